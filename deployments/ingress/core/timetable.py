"""What an ingress has to do when."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any, Generic, TypeVar

from deployments.ingress.core.flights import Flight, I, Pause

T = TypeVar("T")
FEW = 64


class Timetable(Generic[T]):
    """Things by the second at which they are due.

    Nearly all come in the order in which they are due, and are over long before: so they stand in a line, which is
    cheaper than a heap, and from time to time those at its front that are over leave it. The others are in a heap.
    """

    __slots__ = ("_is_over", "_line", "_many", "_serial", "_unordered")

    def __init__(self, is_over: Callable[[T], bool]) -> None:
        self._is_over = is_over
        self._line: deque[tuple[float, T]] = deque()
        self._unordered: list[tuple[float, int, T]] = []
        self._serial = 0
        self._many = FEW
        """Things in the line that are worth a look whether they are over."""

    def add(self, at_s: float, thing: T) -> None:
        """It is due then, a finite time."""
        line = self._line
        if line and line[-1][0] > at_s:
            self._serial += 1
            heappush(self._unordered, (at_s, self._serial, thing))
            return
        line.append((at_s, thing))
        if len(line) > self._many:
            self._drain()
            self._many = 2 * len(line) + FEW

    def next_s(self) -> float:
        """When something is due that is not over; infinite where nothing is."""
        line, unordered = self._line, self._unordered
        self._drain()
        while unordered and self._is_over(unordered[0][2]):
            heappop(unordered)
        return min(line[0][0] if line else math.inf, unordered[0][0] if unordered else math.inf)

    def pop(self, now_s: float) -> list[T]:
        """Everything that is due by now and not over, in its order."""
        due: list[T] = []
        while self.next_s() <= now_s:
            line, unordered = self._line, self._unordered
            if not unordered or (line and line[0][0] <= unordered[0][0]):
                due.append(line.popleft()[1])
            else:
                due.append(heappop(unordered)[2])
        return due

    def _drain(self) -> None:
        line = self._line
        while line and self._is_over(line[0][1]):
            line.popleft()


class Agenda(Generic[I]):
    """What an ingress has to do later, if nothing comes before it."""

    __slots__ = ("deadlines", "hanging", "pauses")

    def __init__(self) -> None:
        self.deadlines: Timetable[Sequence[Flight[I]]] = Timetable(_are_over)
        """Requests."""
        self.hanging: Timetable[Flight[I]] = Timetable(lambda flight: flight.holder is None)
        """Inputs past their deadline that a call has still."""
        self.pauses: Timetable[Pause[I]] = Timetable(lambda pause: not pause.unsettled())

    def next_s(self) -> float:
        """When the first of it is due; infinite where there is nothing."""
        return min(self.deadlines.next_s(), self.hanging.next_s(), self.pauses.next_s())


def _are_over(flights: Sequence[Flight[Any]]) -> bool:
    for flight in flights:  # noqa: SIM110 - `all` of a generator takes five times as long, for every request
        if not flight.settled or flight.holder is not None:
            return False
    return True
