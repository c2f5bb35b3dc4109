"""Time is passed in: the live system, the simulator and the tests run the same code on different clocks."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of seconds that never goes back."""

    def now_s(self) -> float:
        """Seconds since an arbitrary start."""
        ...


class MonotonicClock:
    """The machine's own clock."""

    def now_s(self) -> float:
        return time.monotonic()


class WallClock:
    """Seconds since 1970: what is remembered outlives the process. An adjusted clock makes one window wrong."""

    def now_s(self) -> float:
        return time.time()
