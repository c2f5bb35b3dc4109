"""Inputs that enter a network of a cascade: their encoding for this network, and the pruning of their words."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from deployments.ingress.core.calls import SendCall
from deployments.ingress.core.inputs import Inputs, PendingInput, sample_id_of
from earlyexit.codecs.chain import ChainCodec, ChainEncoded, PrunedRow
from earlyexit.network.boundary import Encoded, WirePiece, entry_piece
from earlyexit.words import num_words
from optimizer.plans.plan import Plan

logger = logging.getLogger(f"ray.serve.{__name__}")

THREAD_FACTOR = 10
"""Rows are encoded in a thread if this many times as many rows would be slow at the API. On the event loop, encoding
delays replies, so the bound is stricter than at the API (for texts 2,000 characters, one or two milliseconds)."""


class NetworkEntry:
    """Inputs that enter a network of a cascade: new inputs, or survivors of the previous network.

    Words of survivors may be pruned. Every input is encoded once for each network that it reaches.
    """

    def __init__(self, ingress: str, codec: ChainCodec, send: SendCall, network: int, plan: Plan) -> None:
        """`network`: the network that the inputs of the call enter. `plan`: the current plan."""
        call, survivors = send.call, send.payload
        self.inputs = call.inputs
        """After `enter`, the inputs of the piece, in its order."""
        self.crosses = survivors is not None
        """Whether the inputs come from another network."""
        self.refused: list[tuple[PendingInput, Exception]] = []
        """Inputs that the network's codec cannot encode."""
        self._ingress = ingress
        self._codec = codec
        self._block = send.block
        self._network = network
        self._survivors: WirePiece | None = survivors
        self._alike = codec.alike(network)
        self._is_unpruned = call.watch == "unpruned"
        """Whether the inputs are unpruned copies of probes."""
        self._before = 0 if survivors is None else bisect_right(plan.networks, survivors.next_block - 1)
        """The network that the inputs come from."""
        self._alpha: float | None = None
        """The pruning rate; None: no words are pruned here, but words that were pruned earlier stay pruned."""
        self._importance: Mapping[str, npt.NDArray[np.floating[Any]]] = {}
        """By sample id, the importance of each token in the previous network. Empty if it was not measured."""
        # Pruning needs the attention of the whole network, which inputs lack if the plan now skips their network.
        if survivors is not None and survivors.next_block in plan.networks and survivors.tensors:
            self._alpha = plan.prune.get(survivors.next_block - 1)
        if survivors is not None and self._alpha is not None:
            by_input = np.split(survivors.tensors[-1].astype(np.float64), np.cumsum(survivors.lengths_B)[:-1])
            self._importance = dict(zip(survivors.sample_ids, by_input, strict=True))

    def is_slow(self) -> bool:
        """Whether `prepare` takes milliseconds, so that it must run in a thread."""
        rows = [_encoded(each).row for each in (self.inputs if self._importance else self._missing())]
        return bool(rows) and self._codec.of(self._network).is_slow(rows * THREAD_FACTOR)

    def prepare(self) -> None:
        """Prunes the inputs, and encodes those that have no encoding for the network yet.

        It may run in a thread, and a second call does nothing. If the codec fails, no input is encoded, and `enter`
        finds the input that causes the error. A text that cannot be pruned keeps its words.
        """
        if self.crosses:
            for each in self.inputs:
                try:
                    self._prune(_encoded(each), sample_id_of(self._ingress, each))
                except Exception as error:
                    logger.warning("a text of %s could not be pruned: %r", each.request_id, error)
        if missing := self._missing():
            with suppress(Exception):
                self._encode(missing)

    def enter(self, plan: Plan) -> WirePiece:
        """Returns the inputs as a piece for the network's first block, and sets their `tokens` for the network.

        If the plan prunes words after the network, the network is told to measure the attention that tokens receive.
        """
        if self._survivors is None and not self._is_unpruned:  # every attempt begins without pruned words
            for each in self.inputs:
                _encoded(each).cut.clear()
        self.prepare()
        entered, encodings = list[PendingInput](), list[Encoded]()
        for each in self.inputs:
            encoding = self._encoding(each)
            if encoding is None:
                try:
                    [encoding] = self._encode([each])
                except Exception as error:
                    self.refused.append((each, error))
                    continue
            each.tokens = encoding.length
            entered.append(each)
            encodings.append(encoding)
        self.inputs = entered
        ids = [sample_id_of(self._ingress, each) for each in entered]
        states_BS = None if self._survivors is None else self._survivors.state_BS
        if self._survivors is not None and states_BS is not None and tuple(ids) != self._survivors.sample_ids:
            row_of = {sample_id: row for row, sample_id in enumerate(self._survivors.sample_ids)}
            states_BS = states_BS[np.array([row_of[each] for each in ids], dtype=np.int64)]
        measured = plan.networks[self._network] - 1 in plan.prune
        return entry_piece(ids, encodings, block=self._block, state_BS=states_BS, measured=measured)

    def words(self) -> tuple[int, int]:
        """Returns the words of the inputs whose attention is known, and how many of them were pruned."""
        words = pruned = 0
        for each in self.inputs if self._importance else ():
            chain_encoded = _encoded(each)
            earlier, pruned_row = chain_encoded.cut.get(self._before), chain_encoded.cut.get(self._network)
            before = num_words(chain_encoded.row if earlier is None else earlier.row)
            words += before
            pruned += 0 if pruned_row is None else before - num_words(pruned_row.row)
        return words, pruned

    def _prune(self, chain_encoded: ChainEncoded, sample_id: str) -> None:
        """Sets the pruned row of an input for the network, if it has lost words here or earlier."""
        if self._network in chain_encoded.cut:
            return
        earlier = chain_encoded.cut.get(self._before)
        row = chain_encoded.row if earlier is None else earlier.row
        importance_N = self._importance.get(sample_id)
        if self._alpha is not None and importance_N is not None:
            pruned = self._codec.pruned_for(self._network, self._before, row, importance_N, self._alpha)
            # A row that loses no words is stored too, so that it is not examined again.
            chain_encoded.cut[self._network] = PrunedRow(row, pruned.encoded) if pruned.row == row else pruned
        elif earlier is not None and earlier.row is not chain_encoded.row:
            chain_encoded.cut[self._network] = self._codec.pruned_row(self._network, row)

    def _encoding(self, each: PendingInput) -> Encoded | None:
        """Returns an input's encoding for the network; None if it has none yet."""
        pruned_row = None if self._is_unpruned else _encoded(each).cut.get(self._network)
        return _encoded(each).of(self._alike) if pruned_row is None else pruned_row.encoded

    def _missing(self) -> list[PendingInput]:
        return [each for each in self.inputs if self._encoding(each) is None]

    def _encode(self, inputs: Inputs) -> list[Encoded]:
        chain_encoded = [_encoded(each) for each in inputs]
        encodings = self._codec.encoded([each.row for each in chain_encoded], self._alike, truncate=True)
        for each, encoding in zip(chain_encoded, encodings, strict=True):
            each.others[self._alike] = encoding
        return encodings


def _encoded(each: PendingInput) -> ChainEncoded:
    return cast("ChainEncoded", each.encoded)
