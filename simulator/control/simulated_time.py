"""asyncio on a simulation's clock: what coroutines wait for happens among the simulation's own events."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Any

from simulator.events import CONTROLS, Events


class SimulatedTime(asyncio.BaseEventLoop):
    """An event loop that never waits: the simulation runs it when something is due, and its time is the simulation's.

    It knows no threads and no sockets, so nothing but sleep and each other may be waited for.
    """

    def __init__(self, events: Events) -> None:
        super().__init__()
        self._events = events
        self._soon: deque[asyncio.Handle] = deque()
        self._has_turn = False

    def time(self) -> float:
        return self._events.time_s

    def call_soon(  # type: ignore[override] # typeshed's is generic in the arguments
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._soon.append(handle)
        self._be_run()
        return handle

    def call_at(  # type: ignore[override] # typeshed's is generic in the arguments
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._events.at(when, CONTROLS, self._due, handle)
        return handle

    def _due(self, handle: asyncio.Handle) -> None:
        self._soon.append(handle)
        self._be_run()

    def _be_run(self) -> None:
        if not self._has_turn:
            self._has_turn = True
            self._events.at(self._events.time_s, CONTROLS, self._run_turn)

    def _run_turn(self, _: None) -> None:
        """Whatever is due, and what follows from it at the same moment."""
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            while self._soon:
                handle = self._soon.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            asyncio._set_running_loop(outer)
            self._has_turn = False
