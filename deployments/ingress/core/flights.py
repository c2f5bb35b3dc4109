"""Inputs on their way through an ingress, the calls that carry them, and what the core wants done with both."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, compress
from typing import Any, Final, Generic, NamedTuple, TypeVar

from deployments.ingress.core.entries import Watch
from deployments.ingress.core.homes import Home
from deployments.ingress.core.itinerary import Leg
from earlyexit.errors import OfframpError

I = TypeVar("I")  # noqa: E741 # an input, as whoever drives the core knows it
W = TypeVar("W")


WHOLE: Final = -1
"""The attempt by which whole texts travel beside those that lost words: none that an input has by itself."""


class Flight(Generic[I]):
    """One input until it has its outcome; it keeps what its owner gave, so that it can start again."""

    __slots__ = (
        "ahead",
        "ahead_tokens",
        "arrived_s",
        "attempt",
        "cost",
        "deadline_s",
        "holder",
        "home",
        "input",
        "settled",
        "tokens",
    )

    def __init__(
        self, given: I, arrived_s: float, deadline_s: float, ahead: int, tokens: int = 1, ahead_tokens: int = 0
    ) -> None:
        self.input = given
        self.arrived_s = arrived_s
        self.deadline_s = deadline_s
        self.tokens = tokens
        """Its length, for the network that it was last encoded for; 1 where inputs have none."""
        self.cost = tokens
        """What it counts among those without an outcome: its length as it came, whatever other networks make of it."""
        self.ahead = ahead
        """Inputs that had no outcome when it arrived."""
        self.ahead_tokens = ahead_tokens
        """Of these."""
        self.attempt = 0
        self.settled = False
        self.holder: Call[I, Any] | Pause[I] | Due | None = None
        """What has it; None of one that waits to be sent, and of one that is over."""
        self.home: Home | None = None
        """Of its sequence; None of an input that is none's."""

    @property
    def since_s(self) -> float:
        """Since when it waits."""
        return self.arrived_s

    def whole(self) -> Flight[I]:
        """The same as it came, to go beside it when it loses words; nobody waits for an answer to this one."""
        made = Flight(self.input, self.arrived_s, self.deadline_s, 0, self.cost)
        made.attempt, made.settled = WHOLE, True
        return made

    @property
    def is_waiting(self) -> bool:
        """Whether it waits to be sent."""
        return self.holder is None and not self.settled


class Due:
    """What has the steps of sequences that are sent next."""

    __slots__ = ()


DUE = Due()
Tokens = Sequence[int] | None
"""The lengths of a request's inputs, one each; None where inputs have none."""


def flights_of(
    inputs: Sequence[I], tokens: Tokens, arrived_s: float, deadline_s: float, ahead: int, ahead_tokens: int
) -> list[Flight[I]]:
    """A request's inputs."""
    if len(inputs) == 1:  # as most requests have, and a comprehension costs as much as the flight
        return [Flight(inputs[0], arrived_s, deadline_s, ahead, 1 if tokens is None else tokens[0], ahead_tokens)]
    if tokens is None:
        tokens = (1,) * len(inputs)
    before = accumulate(tokens, initial=ahead_tokens)
    return [
        Flight(each, arrived_s, deadline_s, ahead + k, size, so_far)
        for k, (each, size, so_far) in enumerate(zip(inputs, tokens, before, strict=False))
    ]


Flights = Sequence[Flight[I]]
Answers = Sequence[Any]
"""As whoever drives the core knows them, one for each input; or none."""


class Call(Generic[I, W]):
    """Inputs that were sent to a stage together."""

    __slots__ = ("epoch", "flights", "heard", "is_first", "leg", "num_inside", "reserve_s", "started_s", "watch")

    def __init__(
        self,
        leg: Leg[W],
        flights: Sequence[Flight[I]],
        started_s: float,
        epoch: int,
        reserve_s: float,
        watch: Watch | None,
        is_first: bool,
    ) -> None:
        self.leg = leg
        self.flights = flights
        """All that it began with."""
        self.started_s = started_s
        self.epoch = epoch
        """Of the plan by which its inputs were sent to the first stage."""
        self.reserve_s = reserve_s
        """What the stages after this one are expected to take, and what is kept in hand."""
        self.watch = watch
        """What is to be seen of its inputs, which a book of probes has, or had; None for nothing."""
        self.is_first = is_first
        """Whether it brings new inputs, to the first block."""
        self.heard = False
        """Whether an input has left it; early answers alone make no room."""
        self.num_inside = 0
        """Inputs that it has."""

    @property
    def probe(self) -> bool:
        """Whether its inputs are probes, or go beside some."""
        return self.watch in ("probe", "whole")

    def inside(self) -> list[Flight[I]]:
        """Those that have not left it, answered or not."""
        return [flight for flight in self.flights if flight.holder is self]

    def release(self, flights: Sequence[Flight[I]]) -> list[bool]:
        """Let inputs leave this call; whether it had each one, which it has once however often it is named."""
        had = []
        for flight in flights:
            had.append(flight.holder is self)
            if had[-1]:
                flight.holder = None
        return had


def picked(flights: Sequence[Flight[I]], answers: Answers, keep: Sequence[bool]) -> tuple[Flights[I], Answers]:
    """Those to be kept, with their answers, where there are any."""
    if all(keep):
        return flights, answers
    return list(compress(flights, keep)), list(compress(answers, keep))


class Pause(Generic[I]):
    """Inputs of a call that failed, until they wait to be sent again."""

    __slots__ = ("flights", "slot")

    def __init__(self, slot: str, flights: Sequence[Flight[I]]) -> None:
        self.slot = slot
        self.flights = flights
        for flight in flights:
            flight.holder = self

    def unsettled(self) -> list[Flight[I]]:
        """Those that somebody still waits for."""
        return [flight for flight in self.flights if not flight.settled]

    def end(self) -> list[Flight[I]]:
        """Those that begin another attempt."""
        again = self.unsettled()
        for flight in again:
            flight.attempt += 1
            flight.holder = None
        return again


# What the core wants done. Made by the hundred thousand in a simulation, hence tuples.


class SendCall(NamedTuple):
    """Send a call to the stage of its leg."""

    call: Call[Any, Any]
    block: int
    payload: Any
    """What its inputs came with from the stage before, others too where it `enters`; None for new ones."""
    enters: int | None = None
    """The network of the chain for which its inputs are to be encoded, those of `call.flights` alone."""
    rows: tuple[int, ...] | None = None
    """Of the payload, which inputs are the call's; None: all."""


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


Action = SendCall | Answered | Dropped | HungUp | Retried
Actions = list[Action]
