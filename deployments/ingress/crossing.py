"""Inputs as pieces for a network's first block: new inputs, and those that cross into the next network of a chain."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from deployments.ingress.core.inputs import Inputs, PendingInput
from earlyexit.codecs.base import Codec
from earlyexit.codecs.chain import ChainCodec, ChainEncoded, CutRow
from earlyexit.network.boundary import Encoded, WirePiece, entering
from earlyexit.words import num_words
from optimizer.plan import Plan

logger = logging.getLogger(f"ray.serve.{__name__}")


def sample_id_of(ingress: str, pending: PendingInput) -> str:
    """Returns the id by which an input travels: unique in the service, and another one for each attempt."""
    return f"{pending.key}#{ingress}.{pending.serial}.{pending.attempt}"


def serial_and_attempt(sample_id: str) -> tuple[int, int]:
    """Reads an input's serial number and attempt from the id by which it travels."""
    _, serial, attempt = sample_id.rpartition("#")[2].split(".")
    return int(serial), int(attempt)


def departure(ingress: str, inputs: Inputs) -> WirePiece:
    """Returns new inputs as a piece that waits for block 0."""
    return entering([sample_id_of(ingress, each) for each in inputs], [each.encoded for each in inputs])


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """What is known of inputs at a crossing, of which some may lose words."""

    before: int
    """The network that they come from."""
    alpha: float | None
    """None: no input loses words here, but texts that lost some before go on without them."""
    importance: Mapping[str, npt.NDArray[np.floating[Any]]]
    """By sample id, of every token that the network before was given; nothing of inputs that came without."""

    def cut(self, codec: ChainCodec, given: ChainEncoded, sample_id: str, network: int) -> None:
        """Make of an input what the next network is given of it, where that is not the row as it came."""
        if network in given.cut:
            return
        earlier = given.cut.get(self.before)
        row = given.row if earlier is None else earlier.row
        importance_N = self.importance.get(sample_id)
        if self.alpha is not None and importance_N is not None:
            found = codec.pruned_for(network, self.before, row, importance_N, self.alpha)
            # An input that loses nothing is remembered too, with its own row, or it would be examined again.
            given.cut[network] = CutRow(row, found.encoded) if found.row == row else found
        elif earlier is not None and earlier.row is not given.row:
            given.cut[network] = codec.cut_row(network, row)


def cuts_of(going_on: WirePiece | None, plan: Plan) -> Cuts | None:
    """Returns what inputs may lose at a crossing under a plan; None for new inputs, and for a plan of one network.

    An input that left a network before its end, because the plan now skips it, has not met all its attention and loses
    no words.
    """
    if going_on is None or not plan.networks:
        return None
    at_an_end = going_on.next_block in plan.networks
    before = bisect_right(plan.networks, going_on.next_block - 1)
    alpha = plan.prune.get(going_on.next_block - 1) if at_an_end else None
    carried = going_on.tensors if at_an_end and alpha is not None else ()
    if not carried:
        return Cuts(before=before, alpha=None, importance={})
    ends = np.cumsum(going_on.lengths_B)[:-1]
    by_input = np.split(carried[-1].astype(np.float64), ends)
    return Cuts(before=before, alpha=alpha, importance=dict(zip(going_on.sample_ids, by_input, strict=True)))


def is_measured(plan: Plan, network: int) -> bool:
    """Whether inputs that enter a network are to bring what attention their tokens receive in it."""
    return bool(plan.networks) and plan.networks[network] - 1 in plan.prune


TIMES_SLOWER = 10
"""So many times as many rows are asked about before some are encoded on the event loop: there, replies wait meanwhile.
Of texts it is 2,000 characters, a millisecond or two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkEntry:
    """Inputs on their way into a network: new ones, or those that cross."""

    inputs: Inputs
    block: int
    """The first that they wait for."""
    network: int
    going_on: WirePiece | None
    """What the network before let go of; None of new ones."""
    cuts: Cuts | None = None
    """Words that they lose on it."""
    whole: bool = False
    """Whether they go with all words, beside others of the same texts that lost some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnteredPiece:
    """Inputs before a network's first block."""

    piece: WirePiece
    inputs: Inputs
    """In the piece's order."""
    refused: Sequence[tuple[PendingInput, Exception]] = ()
    """Those that the network's codec makes nothing of, though it took them, or did not doubt, when they came."""
    words: int = 0
    """Of the texts that words could be pruned of."""
    pruned_words: int = 0


class CrossingEncoder:
    """Of a chain: every input is encoded once for every network that it gets to."""

    def __init__(self, ingress: str, codec: ChainCodec) -> None:
        self._ingress = ingress
        self._codec = codec

    def is_slow(self, entry: NetworkEntry) -> bool:
        """Whether `prepare` takes milliseconds and leaves the event loop."""
        anew = entry.inputs if entry.cuts is not None and entry.cuts.importance else self._missing(entry)
        rows = [_given(each).row for each in anew]
        return bool(rows) and self._codec.of(entry.network).is_slow(rows * TIMES_SLOWER)

    def prepare(self, entry: NetworkEntry) -> None:
        """Encodes the inputs that were not encoded for the network yet, together, without the words that they lose.

        May be called beside the event loop, and again after. If the codec fails, all of them stay as they are, and
        `enter` finds the input that it fails on. A text whose words cannot be cut goes on whole.
        """
        if entry.cuts is not None:
            self._cut(entry, entry.cuts)
        missing = self._missing(entry)
        if missing:
            with suppress(Exception):
                self._encode(missing, entry.network)

    def enter(self, entry: NetworkEntry, *, measured: bool = False) -> EnteredPiece:
        """Inputs as the piece that waits for a network's first block.

        Every input's `tokens` are those of the network from now on. `measured`: they are to bring what attention their
        tokens receive in it.
        """
        if entry.going_on is None and not entry.whole:  # an attempt begins, with whole texts
            for each in entry.inputs:
                _given(each).cut.clear()
        self.prepare(entry)
        refused = list[tuple[PendingInput, Exception]]()
        entered, encoded = list[PendingInput](), list[Encoded]()
        for each in entry.inputs:
            made = self._made(each, entry)
            if made is None:
                try:
                    [made] = self._encode([each], entry.network)
                except Exception as error:
                    refused.append((each, error))
                    continue
            each.tokens = made.length
            entered.append(each)
            encoded.append(made)
        ids = [sample_id_of(self._ingress, each) for each in entered]
        states_BS = None if entry.going_on is None else _states_of(ids, entry.going_on)
        piece = entering(ids, encoded, block=entry.block, state_BS=states_BS, measured=measured)
        return EnteredPiece(
            piece=piece, inputs=entered, refused=refused, **_words_of(entered, entry.network, entry.cuts)
        )

    def _cut(self, entry: NetworkEntry, cuts: Cuts) -> None:
        for each in entry.inputs:
            try:
                cuts.cut(self._codec, _given(each), sample_id_of(self._ingress, each), entry.network)
            except Exception as error:
                logger.warning("a text of %s keeps its words: %r", each.request_id, error)

    def _made(self, each: PendingInput, entry: NetworkEntry) -> Encoded | None:
        given = _given(each)
        cut = None if entry.whole else given.cut.get(entry.network)
        return given.of(self._codec.alike(entry.network)) if cut is None else cut.encoded

    def _encode(self, inputs: Inputs, network: int) -> list[Encoded]:
        alike, given = self._codec.alike(network), [_given(each) for each in inputs]
        made = self._codec.encoded([each.row for each in given], alike, truncate=True)
        for each, encoded in zip(given, made, strict=True):
            each.others[alike] = encoded
        return made

    def _missing(self, entry: NetworkEntry) -> list[PendingInput]:
        alike = self._codec.alike(entry.network)
        lacking = [each for each in entry.inputs if _given(each).of(alike) is None]
        return [each for each in lacking if entry.whole or entry.network not in _given(each).cut]


def encoder_of(ingress: str, codec: Codec[Any]) -> CrossingEncoder | None:
    """Of a chain; None where there is one network, for which inputs are encoded as they come."""
    return CrossingEncoder(ingress, codec) if isinstance(codec, ChainCodec) else None


def _words_of(inputs: Inputs, network: int, cuts: Cuts | None) -> dict[str, int]:
    """Of inputs whose attention is known: their words at this crossing, and how many of them were pruned."""
    if cuts is None or not cuts.importance:
        return {}
    words = pruned = 0
    for each in inputs:
        given = _given(each)
        earlier, cut = given.cut.get(cuts.before), given.cut.get(network)
        before = num_words(given.row if earlier is None else earlier.row)
        words += before
        pruned += 0 if cut is None else before - num_words(cut.row)
    return {"words": words, "pruned_words": pruned}


def _given(each: PendingInput) -> ChainEncoded:
    return cast("ChainEncoded", each.encoded)


def _states_of(ids: Sequence[str], going_on: WirePiece) -> Any:
    """The exit policy's states of some of a piece's inputs."""
    if going_on.state_BS is None or tuple(ids) == going_on.sample_ids:
        return going_on.state_BS
    row_of = {sample_id: row for row, sample_id in enumerate(going_on.sample_ids)}
    return going_on.state_BS[np.array([row_of[each] for each in ids], dtype=np.int64)]
