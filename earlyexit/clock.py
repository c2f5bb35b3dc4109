"""Clocks. Code takes its clock as an argument, so that the service, the simulator and the tests share that code."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of seconds that never goes back."""

    def now_s(self) -> float:
        """Seconds since an arbitrary start."""


class MonotonicClock:
    """The machine's monotonic clock."""

    now_s = staticmethod(time.monotonic)


class WallClock:
    """Seconds since 1970, for records that outlive the process. If the clock is adjusted, one window is wrong."""

    now_s = staticmethod(time.time)
