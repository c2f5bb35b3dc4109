"""Events ordered by (time, priority, serial number), so that equal seeds give equal runs, byte for byte."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import Context
from heapq import heappop, heappush
from typing import Any, Final

ENDS: Final = 0
"""The priority of batches that end. They come first, so that a freed device can serve inputs of the same moment."""
COMES: Final = 1
"""The priority of arrivals over a link."""
WAKES: Final = 2
"""The priority of an ingress's timers. They come later, so that an answer at its deadline is in time."""
CONTROLS: Final = 3
"""The priority of the controller, which sees everything of the moment except new requests. Those come last."""

Action = Callable[[Any], bool | None]
"""The function of an event. It returns False if nothing happened."""
Event = tuple[float, int, int, Action, Any]


class Events:
    """The clock of a simulation and its future events. The clock stands still between events."""

    __slots__ = ("_heap", "_serial", "time_s")

    def __init__(self) -> None:
        self.time_s = 0.0
        self._serial = 0
        self._heap: list[Event] = []

    def now_s(self) -> float:
        """Seconds since the start (`earlyexit.clock.Clock`)."""
        return self.time_s

    @property
    def next_s(self) -> float:
        """The time of the next event; infinite if there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def at(self, time_s: float, priority: int, action: Action, argument: Any = None) -> None:
        """Schedules `action(argument)` for a time that is not in the past."""
        self._serial += 1
        heappush(self._heap, (time_s, priority, self._serial, action, argument))

    def run_out(self) -> None:
        """Runs all events. The clock then shows the time of the last one that did anything."""
        heap, pop = self._heap, heappop
        while heap:
            before_s = self.time_s
            self.time_s, _, _, action, argument = pop(heap)
            if action(argument) is False:
                self.time_s = before_s

    def run_arrivals(self, arrivals_s: Iterable[float], arrive: Callable[[int], None], first: int = 0) -> None:
        """Calls `arrive` at ascending times, with numbers from `first` on, after the other events of each moment."""
        heap, pop = self._heap, heappop
        for number, at_s in enumerate(arrivals_s, first):
            while heap and heap[0][0] <= at_s:
                self.time_s, _, _, action, argument = pop(heap)
                action(argument)
            self.time_s = at_s
            arrive(number)


class SimulatedTime(asyncio.BaseEventLoop):
    """An event loop on virtual time. The simulation runs it when something is due, so it never waits.

    It has no threads and no sockets, so coroutines may only wait for `asyncio.sleep` and for each other.
    """

    def __init__(self, events: Events) -> None:
        super().__init__()
        self._events = events
        self._soon: deque[asyncio.Handle] = deque()
        """What is due, including the callback that runs now."""

    def time(self) -> float:
        return self._events.time_s

    def call_soon(  # type: ignore[override] # typeshed's is generic in the arguments
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._due(handle)
        return handle

    def call_at(  # type: ignore[override] # typeshed's is generic in the arguments
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._events.at(when, CONTROLS, self._due, handle)
        return handle

    def _due(self, handle: asyncio.Handle) -> None:
        self._soon.append(handle)
        if len(self._soon) == 1:
            self._events.at(self._events.time_s, CONTROLS, self._run_turn)

    def _run_turn(self, _: None) -> None:
        """Runs everything that is due, including callbacks that are added meanwhile."""
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            while self._soon:
                if not self._soon[0].cancelled():
                    self._soon[0]._run()
                self._soon.popleft()
        finally:
            asyncio._set_running_loop(outer)
