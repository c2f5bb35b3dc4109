"""Events ordered by (time, priority, serial number), so that equal seeds give equal runs, byte for byte."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import Any, Final

ENDS: Final = 0
"""The priority of work that ends: what it frees is free for inputs that arrive at the same moment."""
COMES: Final = 1
"""The priority of what arrives over a link."""
WAKES: Final = 2
"""The priority of an ingress's timers: an answer that comes at its deadline comes in time."""
CONTROLS: Final = 3
"""The priority of the controller, which sees all that has happened by then. New requests come after all of these."""

FEW, MANY = 16, 256
"""Events of a page: fewer are not worth turning it, and a heap of more is slow."""

Action = Callable[[Any], bool | None]
"""Returns False if nothing happened."""
Event = tuple[float, int, int, Action, Any]


class Events:
    """The clock of a simulation and its future events. The clock stands still between events.

    A calendar (Brown, CACM 31(10), 1988): time is cut into pages; the events of the present page are a heap, those of
    a later one lie there unsorted until it is turned to. One heap of all that ten thousand replicas will do fits no
    processor's cache, and was a quarter of the time of such a simulation.
    """

    __slots__ = ("_later", "_mean", "_now", "_page", "_pages", "_pages_per_s", "_serial", "time_s")

    def __init__(self) -> None:
        self.time_s = 0.0
        self._serial = 0
        self._now: list[Event] = []
        """The events of the present page, as a heap."""
        self._page = 0
        self._later: dict[int, list[Event]] = {}
        """The events of later pages, by page."""
        self._pages: list[int] = []
        """The later pages that have events, as a heap."""
        self._pages_per_s = 1024.0
        """Only ever doubled and halved: what is on a page is then on its halves, or the pages' whole, without error."""
        self._mean = float(FEW)
        """Recent mean of the events on a page when it was turned to."""

    def now_s(self) -> float:
        """Seconds since the start (`earlyexit.clock.Clock`)."""
        return self.time_s

    @property
    def next_s(self) -> float:
        """When the next event is; infinite if there is none."""
        return self._now[0][0] if self._now or self._turn() else math.inf

    def at(self, time_s: float, priority: int, action: Action, argument: Any = None) -> None:
        """Schedule `action(argument)` for a time that is not in the past."""
        self._serial += 1
        event = time_s, priority, self._serial, action, argument
        page = int(time_s * self._pages_per_s)
        if page <= self._page:
            heappush(self._now, event)
            return
        events = self._later.get(page)
        if events is None:
            self._later[page] = [event]
            heappush(self._pages, page)
        else:
            events.append(event)

    def run_until(self, time_s: float) -> None:
        """Run all events up to and including a moment, and set the clock to it."""
        now, pop = self._now, heappop
        while (now or self._turn()) and now[0][0] <= time_s:
            self.time_s, _, _, action, argument = pop(now)
            action(argument)
        self.time_s = time_s

    def run_out(self) -> None:
        """Run all events until none is left; the clock then shows the last one that did anything."""
        now, pop = self._now, heappop
        while now or self._turn():
            before_s = self.time_s
            self.time_s, _, _, action, argument = pop(now)
            if action(argument) is False:
                self.time_s = before_s

    def run_arrivals(self, arrivals_s: Iterable[float], arrive: Callable[[int], None], first: int = 0) -> None:
        """Call `arrive` at these ascending seconds, numbered from `first`, after the other events of each moment."""
        now, pop = self._now, heappop
        for number, at_s in enumerate(arrivals_s, first):
            while (now or self._turn()) and now[0][0] <= at_s:
                self.time_s, _, _, action, argument = pop(now)
                action(argument)
            self.time_s = at_s
            arrive(number)

    def _turn(self) -> bool:
        """Go to the next page that has events, the present one being empty; False where there is none."""
        if not self._pages:
            return False
        self._page = heappop(self._pages)
        self._now += self._later.pop(self._page)
        self._mean += (len(self._now) - self._mean) / 8
        if self._mean > MANY:
            self._cut(2.0)
        elif self._mean < FEW and len(self._pages) > FEW:
            self._cut(0.5)
        self._now.sort()
        return True

    def _cut(self, times: float) -> None:
        """Make pages so many times as many; the present one then ends when it did, or later."""
        self._pages_per_s *= times
        self._mean /= times
        self._page = int((self._page + 1) * times) - 1 if times > 1 else int(self._page * times)
        events = [event for page in self._later.values() for event in page]
        self._later = {}
        for event in events:
            page = int(event[0] * self._pages_per_s)
            if page <= self._page:
                self._now.append(event)
            else:
                self._later.setdefault(page, []).append(event)
        self._pages = sorted(self._later)
