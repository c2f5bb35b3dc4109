"""Inputs on their way through an ingress, the calls that carry them, and what the core wants done with both."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, compress
from typing import Any, Generic, NamedTuple, TypeVar

from deployments.ingress.core.entries import Watch
from deployments.ingress.core.itinerary import Leg
from earlyexit.errors import OfframpError
from earlyexit.split import Budget

I = TypeVar("I")  # noqa: E741 # an input, as whoever drives the core knows it
W = TypeVar("W")


class Flight(Generic[I]):
    """One input until it has its outcome; it keeps what its owner gave, so that it can start again."""

    __slots__ = (
        "ahead",
        "ahead_tokens",
        "arrived_s",
        "attempt",
        "deadline_s",
        "holder",
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
        """Its length, which is what it costs; 1 where inputs have none."""
        self.ahead = ahead
        """Inputs that had no outcome when it arrived."""
        self.ahead_tokens = ahead_tokens
        """Of these."""
        self.attempt = 0
        self.settled = False
        self.holder: Call[I, Any] | Pause[I] | None = None
        """What has it; None of one that waits to be sent, and of one that is over."""

    @property
    def since_s(self) -> float:
        """Since when it waits."""
        return self.arrived_s

    @property
    def is_waiting(self) -> bool:
        """Whether it waits to be sent."""
        return self.holder is None and not self.settled


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
        """Whether its inputs are probes."""
        return self.watch == "probe"

    def inside(self) -> list[Flight[I]]:
        """Those that have not left it, answered or not."""
        return [flight for flight in self.flights if flight.holder is self]


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


def length_class(tokens: int) -> int:
    """Inputs whose waits are told together: the power of two that is the longest of them."""
    return 1 << max(0, tokens - 1).bit_length()


MANY_GONE = 64
"""So many in a line are not worth being looked for."""


class Line(Generic[I]):
    """Inputs that wait to be sent, in the order in which they go."""

    __slots__ = ("_flights", "length", "tokens")

    def __init__(self) -> None:
        self.length = 0
        self.tokens = 0
        """Of all who wait."""
        self._flights: deque[Flight[I]] = deque()
        """Those that were settled meanwhile are passed over when their turn comes."""

    def join(self, flights: Sequence[Flight[I]]) -> None:
        self._flights.extend(flights)
        self.length += len(flights)
        self.tokens += flights[0].tokens if len(flights) == 1 else sum([flight.tokens for flight in flights])

    def return_to_front(self, flights: Sequence[Flight[I]]) -> None:
        """Wait before all others, in this order."""
        self._flights.extendleft(reversed(flights))
        self.length += len(flights)
        self.tokens += sum([flight.tokens for flight in flights])

    def __iter__(self) -> Iterator[Flight[I]]:
        """Those who wait, the next one first."""
        return (flight for flight in self._flights if not flight.settled)

    def oldest_s(self, now_s: float) -> dict[int, float]:
        """How long those who have waited longest have, by length class."""
        since_s: dict[int, float] = {}
        for flight in self:
            length = length_class(flight.tokens)
            since_s[length] = min(since_s.get(length, now_s), flight.since_s)
        return {length: now_s - first_s for length, first_s in sorted(since_s.items())}

    def leave(self, budget: Budget) -> list[Flight[I]]:
        """The next ones, as many as a batch holds: at least one, if anybody waits."""
        leaving = self._first(budget.inputs) if budget.tokens is None else self._first_within(budget)
        self.length -= len(leaving)
        self.tokens -= sum([flight.tokens for flight in leaving])
        return leaving

    def clear(self) -> list[Flight[I]]:
        """Everybody, who waits no more."""
        waiting = list(self)
        self.length = self.tokens = 0
        self._flights.clear()
        return waiting

    def _first(self, most: int) -> list[Flight[I]]:
        flights, number = self._flights, min(most, self.length)
        if self.length == len(flights):  # nobody was settled here
            return [flights.popleft() for _ in range(number)]
        leaving: list[Flight[I]] = []
        while len(leaving) < number:
            flight = flights.popleft()
            if not flight.settled:
                leaving.append(flight)
        return leaving

    def _first_within(self, budget: Budget) -> list[Flight[I]]:
        flights, number = self._flights, self.length
        leaving: list[Flight[I]] = []
        tokens = 0
        while len(leaving) < number:
            flight = flights[0]
            if not flight.settled:
                if not budget.room_for(len(leaving), tokens, flight.tokens):
                    break
                leaving.append(flight)
                tokens += flight.tokens
            flights.popleft()
        return leaving

    def forget(self, gone: Sequence[Flight[I]]) -> None:
        """These, who waited here, were settled just now."""
        self.length -= len(gone)
        self.tokens -= sum([flight.tokens for flight in gone])
        flights = self._flights
        while flights and flights[0].settled:
            flights.popleft()
        if len(flights) > 2 * self.length + MANY_GONE:
            self._flights = deque(flight for flight in flights if not flight.settled)


# What the core wants done. Made by the hundred thousand in a simulation, hence tuples.


class SendCall(NamedTuple):
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


Action = SendCall | Answered | Dropped | HungUp | Retried
Actions = list[Action]
