"""A caller's input, and inputs as the piece that waits for block 0."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from deployments.ingress.core.flights import Flight
from earlyexit.errors import OfframpError
from earlyexit.signature import Encoded
from earlyexit.wire import Answer, WirePiece, entering

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
