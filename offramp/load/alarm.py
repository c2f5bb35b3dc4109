"""Sleeps to well below the millisecond that timers of event loops know.

A load generator that sends up to a millisecond late adds that to every latency, and sends in bursts what should be
Poisson. Linux's timerfd (timerfd_create(2)): the loop sleeps until the kernel's timer makes a file readable.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

Sleep = Callable[[float], Awaitable[object]]

CLOCK_MONOTONIC = 1
NONBLOCK_CLOEXEC = 0o2004000
"""Constants of Linux's time.h and sys/timerfd.h."""


@contextmanager
def exact_sleep() -> Iterator[Sleep]:
    """The most exact sleep, in seconds, that this system has; for one sleeper at a time, in the running loop."""
    if sys.platform != "linux":
        yield asyncio.sleep
        return
    timer = _TimerFile(asyncio.get_running_loop())
    try:
        yield timer.sleep
    finally:
        timer.close()


class _TimerFile:
    """A timer of the kernel."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        libc = ctypes.CDLL(None, use_errno=True)
        self._settime = libc.timerfd_settime
        self._times = (ctypes.c_long * 4)()
        """struct itimerspec: the interval's seconds and nanoseconds, 0 for once, then those of the time."""
        self._file: int = libc.timerfd_create(CLOCK_MONOTONIC, NONBLOCK_CLOEXEC)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._rung: asyncio.Future[None] | None = None
        loop.add_reader(self._file, self._ring)

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        self._times[2], self._times[3] = divmod(int(seconds * 1e9) + 1, 10**9)  # a time of 0 would disarm it
        if self._settime(self._file, 0, self._times, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")
        self._rung = self._loop.create_future()
        await self._rung

    def close(self) -> None:
        self._loop.remove_reader(self._file)
        os.close(self._file)

    def _ring(self) -> None:
        try:
            os.read(self._file, 8)  # else the file stays readable
        except BlockingIOError:  # set anew in the turn in which it rang: it rings again
            return
        if self._rung is not None and not self._rung.done():
            self._rung.set_result(None)
