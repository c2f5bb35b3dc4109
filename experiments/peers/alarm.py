"""Wakes an event loop at a time, to well below the millisecond that uvloop's timers know.

A client that sends up to a millisecond late adds that to every latency, and sends in bursts what should be Poisson.
Linux's timerfd (timerfd_create(2)): the loop sleeps until the kernel's timer makes a file readable, and nothing spins.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import Callable
from typing import Protocol

CLOCK_MONOTONIC = 1
NONBLOCK_CLOEXEC = 0o2004000
ABSOLUTE = 1
"""Constants of Linux's time.h and sys/timerfd.h."""


class Alarm(Protocol):
    """Calls back once per `set`, never before its time."""

    def set(self, at_s: float) -> None:
        """Ring at a time of `time.monotonic`; one already set is forgotten."""

    def close(self) -> None:
        """Never ring again."""


def new_alarm(loop: asyncio.AbstractEventLoop, clock: Callable[[], float], ring: Callable[[], object]) -> Alarm:
    """The most exact one that this system has."""
    return TimerFile(loop, ring) if sys.platform == "linux" else LoopTimer(loop, clock, ring)


class LoopTimer:
    """By the loop's own timers: some 0.5 ms late with uvloop, at times 2 ms."""

    SHORTEST_S = 0.001
    """uvloop rounds to milliseconds, and what becomes 0 it calls back at once, again and again."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float], ring: Callable[[], object]) -> None:
        self._loop = loop
        self._clock = clock
        self._ring = ring
        self._at_s = 0.0
        self._handle: asyncio.TimerHandle | None = None

    def set(self, at_s: float) -> None:
        self.close()
        self._at_s = at_s
        self._handle = self._loop.call_later(max(self.SHORTEST_S, at_s - self._clock()), self._rung)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _rung(self) -> None:
        if self._clock() < self._at_s:
            self.set(self._at_s)
        else:
            self._ring()


class TimerFile:
    """By a timer of the kernel."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], object]) -> None:
        self._loop = loop
        self._ring = ring
        libc = ctypes.CDLL(None, use_errno=True)
        self._settime = libc.timerfd_settime
        self._times = (ctypes.c_long * 4)()
        """struct itimerspec: the interval's seconds and nanoseconds, 0 for once, then those of the time."""
        self._file: int = libc.timerfd_create(CLOCK_MONOTONIC, NONBLOCK_CLOEXEC)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        loop.add_reader(self._file, self._rung)

    def set(self, at_s: float) -> None:
        seconds = int(at_s)
        self._times[2], self._times[3] = seconds, int((at_s - seconds) * 1e9) + 1  # a time of 0 would disarm it
        if self._settime(self._file, ABSOLUTE, self._times, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        self._loop.remove_reader(self._file)
        os.close(self._file)

    def _rung(self) -> None:
        os.read(self._file, 8)  # else the file stays readable
        self._ring()
