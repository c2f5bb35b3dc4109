"""What happens when: events ordered by (time, priority, serial), so that equal seeds give equal runs, byte for byte."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from typing import Any, Final

ENDS: Final = 0
"""Priority of work that ends: what is free at a moment is free for what arrives at it."""
COMES: Final = 1
"""Of what arrives over a link."""
CONTROLS: Final = 2
"""Of what a controller does; it sees everything that has happened by then. New requests come after all of these."""

Action = Callable[[Any], None]


class Events:
    """The clock of a simulation, and everything that will happen. It stands still between events."""

    __slots__ = ("_heap", "_serial", "time_s")

    def __init__(self) -> None:
        self.time_s = 0.0
        self._heap: list[tuple[float, int, int, Action, Any]] = []
        self._serial = 0

    def now_s(self) -> float:
        """Seconds since the start (`earlyexit.clock.Clock`)."""
        return self.time_s

    @property
    def next_s(self) -> float:
        """When the next event is; infinite where there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def at(self, time_s: float, priority: int, action: Action, argument: Any = None) -> None:
        """Have `action(argument)` happen then, which must not be in the past."""
        self._serial += 1
        heapq.heappush(self._heap, (time_s, priority, self._serial, action, argument))

    def run_until(self, time_s: float) -> None:
        """Everything up to a moment, that included; then it is that moment."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= time_s:
            self.time_s, _, _, action, argument = pop(heap)
            action(argument)
        self.time_s = time_s

    def run_out(self) -> None:
        """Everything that is left, until nothing is."""
        heap, pop = self._heap, heapq.heappop
        while heap:
            self.time_s, _, _, action, argument = pop(heap)
            action(argument)

    def run_arrivals(self, arrivals_s: Iterable[float], arrive: Callable[[int], None], first: int = 0) -> None:
        """Have things arrive at these ascending seconds, numbered from `first`, after all else of the same moment."""
        heap, pop = self._heap, heapq.heappop
        for number, at_s in enumerate(arrivals_s, first):
            while heap and heap[0][0] <= at_s:
                self.time_s, _, _, action, argument = pop(heap)
                action(argument)
            self.time_s = at_s
            arrive(number)
