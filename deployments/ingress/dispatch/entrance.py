"""What inputs are, where they enter a network: as they depart from here, and where they cross into the next one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from deployments.ingress.dispatch.cutting import Cuts
from deployments.ingress.dispatch.departure import LiveFlight, sample_id_of
from earlyexit.codecs.base import Codec
from earlyexit.codecs.chain import ChainCodec, ChainEncoded
from earlyexit.signature import Encoded
from earlyexit.wire import WirePiece, entering
from earlyexit.words import num_words

logger = logging.getLogger(f"ray.serve.{__name__}")

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
        """Encode whoever was not encoded for the network, together, without the words that they lose.

        May be called beside the event loop, and again after. Whom the codec fails on, and whoever is among them, stays
        as he is: `enter` finds out who it was. Of whom words cannot be cut, the whole text goes on.
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
