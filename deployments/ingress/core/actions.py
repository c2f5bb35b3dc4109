"""What an ingress's core wants done. Made by the hundred thousand in a simulation, hence tuples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from deployments.ingress.core.flights import Call, Flight
from earlyexit.errors import OfframpError


class Send(NamedTuple):
    """Send a call to the stage of its leg."""

    call: Call[Any, Any]
    block: int
    payload: Any
    """What its inputs came with from the stage before; None for new ones."""


class Answered(NamedTuple):
    """Tell owners their answers."""

    flights: Sequence[Flight[Any]]
    block: int
    """Which they left after."""
    answers: Sequence[Any]
    """One each, as they came."""
    latencies_s: Sequence[float]


class Dropped(NamedTuple):
    """Inputs get no answer."""

    flights: Sequence[Flight[Any]]
    reason: str
    error: OfframpError | None
    """What to tell their owners; None where they have gone."""


class HungUp(NamedTuple):
    """Stop a call that was given up."""

    call: Call[Any, Any]


class Retried(NamedTuple):
    """Inputs that a slot failed under wait to be sent again."""

    slot: str
    number: int


Action = Send | Answered | Dropped | HungUp | Retried
