"""The line of inputs that wait at an ingress to be sent, and who of them goes next. Pure."""

from __future__ import annotations

from bisect import insort_left, insort_right
from collections import deque
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Generic

from deployments.ingress.core.flights import Flight, I
from earlyexit.order import Order, take_from
from earlyexit.split import Budget

MANY_GONE = 64
"""So many in a line are not worth being looked for."""
_deadline_of = attrgetter("deadline_s")
_place_of = attrgetter("deadline_s", "arrived_s")
_tokens_of = attrgetter("tokens")


def length_class(tokens: int) -> int:
    """Inputs whose waits are told together: the power of two that is the longest of them."""
    return 1 << max(0, tokens - 1).bit_length()


class Line(Generic[I]):
    """Inputs that wait to be sent, the earliest deadline first, equal ones in their order of arrival.

    Where all have the same SLO that is first in, first out. Those that are sent again have their old place.
    """

    __slots__ = ("_flights", "length", "tokens")

    def __init__(self) -> None:
        self.length = 0
        self.tokens = 0
        """Of all who wait."""
        self._flights: deque[Flight[I]] = deque()
        """Those that were settled meanwhile are passed over when their turn comes."""

    def join(self, flights: Sequence[Flight[I]]) -> None:
        """A request's inputs, which have one deadline, wait."""
        waiting = self._flights
        if not waiting or not flights or flights[0].deadline_s >= waiting[-1].deadline_s:
            waiting.extend(flights)
        else:
            for flight in flights:
                insort_right(waiting, flight, key=_deadline_of)
        self.length += len(flights)
        self.tokens += sum(map(_tokens_of, flights))

    def rejoin(self, flights: Sequence[Flight[I]]) -> None:
        """Wait once more, before those of equal deadlines that arrived at the same time or later."""
        for flight in reversed(flights):
            insort_left(self._flights, flight, key=_place_of)
        self.length += len(flights)
        self.tokens += sum(map(_tokens_of, flights))

    def __iter__(self) -> Iterator[Flight[I]]:
        """Those who wait, the earliest deadline first."""
        return (flight for flight in self._flights if not flight.settled)

    def oldest_s(self, now_s: float) -> dict[int, float]:
        """How long those who have waited longest have, by length class."""
        since_s: dict[int, float] = {}
        for flight in self:
            length = length_class(flight.tokens)
            since_s[length] = min(since_s.get(length, now_s), flight.since_s)
        return {length: now_s - first_s for length, first_s in sorted(since_s.items())}

    def leave(self, budget: Budget, order: Order, now_s: float) -> list[Flight[I]]:
        """The next ones, as many as a batch holds: at least one, if anybody waits."""
        if not self.length:
            return []
        if not order.takes_front(self._flights, now_s):
            leaving = self._chosen(budget, order, now_s)
        else:
            leaving = self._first(budget.inputs) if budget.tokens is None else self._first_within(budget)
        self.length -= len(leaving)
        self.tokens -= sum(map(_tokens_of, leaving))
        return leaving

    def clear(self) -> list[Flight[I]]:
        """Everybody, who waits no more."""
        waiting = list(self)
        self.length = self.tokens = 0
        self._flights.clear()
        return waiting

    def forget(self, gone: Sequence[Flight[I]]) -> None:
        """These, who waited here, were settled just now."""
        self.length -= len(gone)
        self.tokens -= sum(map(_tokens_of, gone))
        flights = self._flights
        while flights and flights[0].settled:
            flights.popleft()
        if len(flights) > 2 * self.length + MANY_GONE:
            self._flights = deque(flight for flight in flights if not flight.settled)

    def _first(self, most: int) -> list[Flight[I]]:
        flights, number = self._flights, min(most, self.length)
        if self.length == len(flights):  # nobody was settled here
            return [flights.popleft()] if number == 1 else [flights.popleft() for _ in range(number)]
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

    def _chosen(self, budget: Budget, order: Order, now_s: float) -> list[Flight[I]]:
        waiting = list(self)
        leaving = take_from(waiting, order, budget, now_s)
        self._flights = deque(waiting)
        return leaving
