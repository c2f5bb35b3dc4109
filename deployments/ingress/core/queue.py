"""The queue of inputs that wait at an ingress to be sent, and which of them is next. Pure."""

from __future__ import annotations

import math
from bisect import insort_left, insort_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from deployments.ingress.core.routes import StageRoute, least_to_call
from earlyexit.engine.filling import patience
from earlyexit.engine.order import Order, take_from
from earlyexit.network.split import Budget

AHEAD = 4
"""Calls without a part so far that a replica of several splits may have, however small: it chooses between them, which
it cannot where new inputs are kept from it until its batch has run."""
GAP_WEIGHT = 0.05
"""Of the newest gap between inputs: twenty requests tell how long the next lets wait for itself."""
LONGEST_GAP_S = 1.0
"""What a longer one counts as, and what is taken to be one before the first input."""
FRESH_S = 1.0
"""What was heard of a slot longer ago says nothing of how busy it is."""


class BatchingPolicy:
    """Of one ingress: how many must wait, and until when, for a call to be made.

    Where stages fill their batches (`earlyexit.engine.filling`), new inputs wait here for all replicas together, so
    that one call is one batch.
    """

    def __init__(self, first: StageRoute[Any], calls_per_replica: int, unheard: Mapping[str, int]) -> None:
        """`unheard`: calls of new inputs that nothing has come back from, by slot; see `update`."""
        self._calls_per_replica = calls_per_replica
        self._unheard = unheard
        self._busy: dict[str, tuple[float, float]] = {}
        """By slot, how busy it said it was, and when."""
        self.gap_s = LONGEST_GAP_S
        """Recent mean time between inputs; an input that would have left within it is not held for the next."""
        self._came_s = -math.inf
        self.held_until_s = math.inf
        """When the waiting inputs leave, however few they are; infinite when none is held."""
        self.least: float = 1
        """New inputs that must wait for a call to be made."""
        self.least_tokens: float = math.inf
        """Or else so many tokens."""
        self.follow(first)

    def follow(self, first: StageRoute[Any]) -> None:
        """New inputs enter by this leg from now on."""
        self._first = first
        self.held_until_s = math.inf
        self.update()

    def hear(self, slot: str, busy: float, now_s: float) -> None:
        """A replica said what share of its time it was busy, of late."""
        self._busy[slot] = busy, now_s

    def share(self, now_s: float) -> float:
        """Of the time that deadlines leave, what new inputs may wait here; see `patience`."""
        heard = self._busy.get(self._first.slot)
        if heard is None or not self._fills or now_s - heard[1] > FRESH_S:
            return 0.0
        return patience(heard[0])

    def come(self, number: int, now_s: float) -> None:
        """So many inputs arrived together."""
        gap_s = min(LONGEST_GAP_S, now_s - self._came_s) / number
        self.gap_s += GAP_WEIGHT * (gap_s - self.gap_s)
        self._came_s = now_s

    def hold_until(self, until_s: float) -> None:
        """The waiting inputs leave then, or as soon as they are a batch."""
        self.held_until_s = until_s
        self.update()

    def wake(self, now_s: float) -> None:
        """Releases the inputs that were held until now."""
        if self.held_until_s <= now_s:
            self.release()

    def release(self) -> None:
        """Holds no input any more, until the next one comes."""
        if self.held_until_s < math.inf:
            self.held_until_s = math.inf
            self.update()

    @property
    def _fills(self) -> bool:
        return self._first.assignment.dispatch == "filling"

    def update(self) -> None:
        """Take note of how many calls are unheard of now."""
        leg, budget = self._first, self._first.budgets[0]
        unheard, replicas = self._unheard.get(leg.slot, 0), leg.stage.replicas
        several = self._fills and len(leg.stage.splits) > 1
        self.least, self.least_tokens = least_to_call(
            budget,
            unheard=unheard // AHEAD if several else unheard,
            replicas=replicas,
            calls_per_replica=1 if several else self._calls_per_replica,
        )
        if self.held_until_s < math.inf and self.least == 1:
            self.least, self.least_tokens = budget.inputs, math.inf if budget.tokens is None else budget.tokens


MANY_GONE = 64
"""So many in a line are not worth being looked for."""
_deadline_of = attrgetter("deadline_s")
_place_of = attrgetter("deadline_s", "arrived_s")
_tokens_of = attrgetter("tokens")


def length_class(tokens: int) -> int:
    """Inputs whose waits are told together: the power of two that is the longest of them."""
    return 1 << max(0, tokens - 1).bit_length()


class Waiting(Protocol):
    """An input that may wait to be sent."""

    @property
    def arrived_s(self) -> float: ...

    @property
    def since_s(self) -> float:
        """Since when it waits."""
        ...

    @property
    def deadline_s(self) -> float: ...

    @property
    def tokens(self) -> int: ...

    @property
    def settled(self) -> bool: ...


Q = TypeVar("Q", bound=Waiting)


class WaitQueue(Generic[Q]):
    """Inputs that wait to be sent, the earliest deadline first, equal ones in their order of arrival.

    Where all have the same SLO that is first in, first out. Those that are sent again have their old place.
    """

    __slots__ = ("_flights", "length", "tokens")

    def __init__(self) -> None:
        self.length = 0
        self.tokens = 0
        """The sum over all waiting inputs."""
        self._flights: deque[Q] = deque()
        """Those that were settled meanwhile are passed over when their turn comes."""

    def join(self, flights: Sequence[Q]) -> None:
        """A request's inputs, which have one deadline, wait."""
        waiting = self._flights
        if not waiting or not flights or flights[0].deadline_s >= waiting[-1].deadline_s:
            waiting.extend(flights)
        else:
            for flight in flights:
                insort_right(waiting, flight, key=_deadline_of)
        self.length += len(flights)
        self.tokens += sum(map(_tokens_of, flights))

    def rejoin(self, flights: Sequence[Q]) -> None:
        """Wait once more, before those of equal deadlines that arrived at the same time or later."""
        for flight in reversed(flights):
            insort_left(self._flights, flight, key=_place_of)
        self.length += len(flights)
        self.tokens += sum(map(_tokens_of, flights))

    def __iter__(self) -> Iterator[Q]:
        """Yields the waiting inputs, the earliest deadline first."""
        return (flight for flight in self._flights if not flight.settled)

    def oldest_s(self, now_s: float) -> dict[int, float]:
        """Returns the longest wait so far in seconds, by length class."""
        since_s: dict[int, float] = {}
        for flight in self:
            length = length_class(flight.tokens)
            since_s[length] = min(since_s.get(length, now_s), flight.since_s)
        return {length: now_s - first_s for length, first_s in sorted(since_s.items())}

    def leave(self, budget: Budget, order: Order, now_s: float) -> list[Q]:
        """Removes and returns the next inputs, as many as a batch holds: at least one, if any waits."""
        if not self.length:
            return []
        if not order.takes_front(self._flights, now_s):
            leaving = self._chosen(budget, order, now_s)
        else:
            leaving = self._first(budget.inputs) if budget.tokens is None else self._first_within(budget)
        self.length -= len(leaving)
        self.tokens -= sum(map(_tokens_of, leaving))
        return leaving

    def clear(self) -> list[Q]:
        """Removes and returns all waiting inputs."""
        waiting = list(self)
        self.length = self.tokens = 0
        self._flights.clear()
        return waiting

    def forget(self, gone: Sequence[Q]) -> None:
        """Removes inputs that waited here and were settled just now."""
        self.length -= len(gone)
        self.tokens -= sum(map(_tokens_of, gone))
        flights = self._flights
        while flights and flights[0].settled:
            flights.popleft()
        if len(flights) > 2 * self.length + MANY_GONE:
            self._flights = deque(flight for flight in flights if not flight.settled)

    def _first(self, most: int) -> list[Q]:
        flights, number = self._flights, min(most, self.length)
        if self.length == len(flights):  # none of these was settled
            return [flights.popleft()] if number == 1 else [flights.popleft() for _ in range(number)]
        leaving: list[Q] = []
        while len(leaving) < number:
            flight = flights.popleft()
            if not flight.settled:
                leaving.append(flight)
        return leaving

    def _first_within(self, budget: Budget) -> list[Q]:
        flights, number = self._flights, self.length
        leaving: list[Q] = []
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

    def _chosen(self, budget: Budget, order: Order, now_s: float) -> list[Q]:
        waiting = list(self)
        leaving = take_from(waiting, order, budget, now_s)
        self._flights = deque(waiting)
        return leaving
