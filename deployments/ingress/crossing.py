"""What inputs are, where they enter a network: as they depart from here, and where they cross into the next one."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from deployments.ingress.core.inputs import Flight
from earlyexit.codecs.base import Codec
from earlyexit.codecs.chain import ChainCodec, ChainEncoded, CutRow
from earlyexit.errors import OfframpError
from earlyexit.network.wire import Answer, Encoded, WirePiece, entering
from earlyexit.words import num_words
from optimizer.plan import Plan

logger = logging.getLogger(f"ray.serve.{__name__}")

Settle = Callable[["LiveFlight", Answer | OfframpError], None]
"""Told an input's outcome, once, unless it is given up."""


@dataclass(slots=True, kw_only=True, eq=False)
class Query:
    """One input, as its caller gave it; nothing of it changes, but frozen it would take twice as long to make."""

    key: str
    """The caller's id of it, or an empty string."""
    encoded: Encoded
    """Of a chain a `ChainEncoded`, which has its row and all that is made of it for other networks."""
    serial: int
    """Counts the inputs of its ingress."""
    request_id: str
    """The request it came with, for the log."""
    settle: Settle


LiveFlight = Flight[Query]


def sample_id_of(ingress: str, flight: LiveFlight) -> str:
    """What it travels by: unique in the service, where those of different ingresses meet, and per attempt."""
    return f"{flight.input.key}#{ingress}.{flight.input.serial}.{flight.attempt}"


def serial_and_attempt(sample_id: str) -> tuple[int, int]:
    """Of a flight, from the id that it travels by."""
    _, serial, attempt = sample_id.rpartition("#")[2].split(".")
    return int(serial), int(attempt)


def departure(ingress: str, flights: Sequence[LiveFlight]) -> WirePiece:
    """The inputs as a piece that waits for block 0."""
    ids = [sample_id_of(ingress, flight) for flight in flights]
    return entering(ids, [flight.input.encoded for flight in flights])


def settle_all(outcomes: Iterable[tuple[LiveFlight, Answer | OfframpError]]) -> None:
    """Tell every input's owner its outcome, whatever became of telling the one before."""
    for flight, outcome in outcomes:
        try:
            flight.input.settle(flight, outcome)
        except Exception:
            logger.exception("an input of %s has an outcome that its owner cannot take", flight.input.request_id)


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
class Way:
    """Inputs on their way into a network: new ones, or those that cross."""

    flights: Sequence[LiveFlight]
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
class Entering:
    """Inputs before a network's first block."""

    piece: WirePiece
    flights: Sequence[LiveFlight]
    """In the piece's order."""
    refused: Sequence[tuple[LiveFlight, Exception]] = ()
    """Those that the network's codec makes nothing of, though it took them, or did not doubt, when they came."""
    words: int = 0
    """Of the texts that words could be pruned of."""
    pruned_words: int = 0


class ChainEntrance:
    """Of a chain: every input is encoded once for every network that it gets to."""

    def __init__(self, ingress: str, codec: ChainCodec) -> None:
        self._ingress = ingress
        self._codec = codec

    def is_slow(self, way: Way) -> bool:
        """Whether `prepare` takes milliseconds and leaves the event loop."""
        anew = way.flights if way.cuts is not None and way.cuts.importance else self._missing(way)
        rows = [_given(flight).row for flight in anew]
        return bool(rows) and self._codec.of(way.network).is_slow(rows * TIMES_SLOWER)

    def prepare(self, way: Way) -> None:
        """Encodes the inputs that were not encoded for the network yet, together, without the words that they lose.

        May be called beside the event loop, and again after. If the codec fails, all of them stay as they are, and
        `enter` finds the input that it fails on. A text whose words cannot be cut goes on whole.
        """
        if way.cuts is not None:
            self._cut(way, way.cuts)
        missing = self._missing(way)
        if missing:
            with suppress(Exception):
                self._encode(missing, way.network)

    def enter(self, way: Way, *, measured: bool = False) -> Entering:
        """Inputs as the piece that waits for a network's first block.

        Every flight's `tokens` are those of the network from now on. `measured`: they are to bring what attention their
        tokens receive in it.
        """
        if way.going_on is None and not way.whole:  # an attempt begins, with whole texts
            for flight in way.flights:
                _given(flight).cut.clear()
        self.prepare(way)
        refused = list[tuple[LiveFlight, Exception]]()
        entered, encoded = list[LiveFlight](), list[Encoded]()
        for flight in way.flights:
            made = self._made(flight, way)
            if made is None:
                try:
                    [made] = self._encode([flight], way.network)
                except Exception as error:
                    refused.append((flight, error))
                    continue
            flight.tokens = made.length
            entered.append(flight)
            encoded.append(made)
        ids = [sample_id_of(self._ingress, flight) for flight in entered]
        states_BS = None if way.going_on is None else _states_of(ids, way.going_on)
        piece = entering(ids, encoded, block=way.block, state_BS=states_BS, measured=measured)
        return Entering(piece=piece, flights=entered, refused=refused, **_words_of(entered, way.network, way.cuts))

    def _cut(self, way: Way, cuts: Cuts) -> None:
        for flight in way.flights:
            try:
                cuts.cut(self._codec, _given(flight), sample_id_of(self._ingress, flight), way.network)
            except Exception as error:
                logger.warning("a text of %s keeps its words: %r", flight.input.request_id, error)

    def _made(self, flight: LiveFlight, way: Way) -> Encoded | None:
        given = _given(flight)
        cut = None if way.whole else given.cut.get(way.network)
        return given.of(self._codec.alike(way.network)) if cut is None else cut.encoded

    def _encode(self, flights: Sequence[LiveFlight], network: int) -> list[Encoded]:
        alike, given = self._codec.alike(network), [_given(flight) for flight in flights]
        made = self._codec.encoded([each.row for each in given], alike, truncate=True)
        for each, encoded in zip(given, made, strict=True):
            each.others[alike] = encoded
        return made

    def _missing(self, way: Way) -> list[LiveFlight]:
        alike = self._codec.alike(way.network)
        lacking = [flight for flight in way.flights if _given(flight).of(alike) is None]
        return [flight for flight in lacking if way.whole or way.network not in _given(flight).cut]


def entrance_of(ingress: str, codec: Codec[Any]) -> ChainEntrance | None:
    """Of a chain; None where there is one network, for which inputs are encoded as they come."""
    return ChainEntrance(ingress, codec) if isinstance(codec, ChainCodec) else None


def _words_of(flights: Sequence[LiveFlight], network: int, cuts: Cuts | None) -> dict[str, int]:
    """Of inputs whose attention is known: their words at this crossing, and how many of them were pruned."""
    if cuts is None or not cuts.importance:
        return {}
    words = pruned = 0
    for flight in flights:
        given = _given(flight)
        earlier, cut = given.cut.get(cuts.before), given.cut.get(network)
        before = num_words(given.row if earlier is None else earlier.row)
        words += before
        pruned += 0 if cut is None else before - num_words(cut.row)
    return {"words": words, "pruned_words": pruned}


def _given(flight: LiveFlight) -> ChainEncoded:
    return cast("ChainEncoded", flight.input.encoded)


def _states_of(ids: Sequence[str], going_on: WirePiece) -> Any:
    """The exit policy's states of some of a piece's inputs."""
    if going_on.state_BS is None or tuple(ids) == going_on.sample_ids:
        return going_on.state_BS
    row_of = {sample_id: row for row, sample_id in enumerate(going_on.sample_ids)}
    return going_on.state_BS[np.array([row_of[each] for each in ids], dtype=np.int64)]
