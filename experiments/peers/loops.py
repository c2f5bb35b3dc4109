"""When a client sends: at times drawn beforehand, whatever the server does, or whenever an answer has come."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from experiments.peers.alarm import Alarm, new_alarm
from experiments.peers.tally import Ledger
from experiments.peers.wire import Pool

Clock = Callable[[], float]

SWEEPS = 20
"""Looks for timeouts, per timeout: one is noticed at most a twentieth of itself late."""


def poisson_times_s(rate_per_s: float, until_s: float, seed: int) -> list[float]:
    """Send times from 0: of a seed the same arrivals at every rate, only faster or slower, more or fewer."""
    expected = rate_per_s * until_s
    most = int(expected + 10 * expected**0.5 + 10)
    times_s = np.random.default_rng(seed).standard_exponential(most).cumsum() / rate_per_s
    drawn: list[float] = times_s[: np.searchsorted(times_s, until_s)].tolist()
    return drawn


class Loop(ABC):
    """Sends requests through a pool and waits until each has its outcome; `clock` is `time.monotonic`."""

    def __init__(self, *, pool: Pool, ledger: Ledger, clock: Clock, timeout_s: float) -> None:
        self.start_s = 0.0
        """On the clock, once it runs."""
        self._pool = pool
        self._ledger = ledger
        self._clock = clock
        self._timeout_s = timeout_s
        self._done: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Send everything; returns when the last request has its outcome."""
        loop = asyncio.get_running_loop()
        self._done = loop.create_future()
        loop.set_exception_handler(self._failed)
        self._ledger.on_end = self._on_end
        self.start_s = self._clock()
        self._plan_sweep()
        try:
            self._begin()
            await self._done
        finally:
            self._stop()
            self._ledger.on_end = None
            loop.set_exception_handler(None)

    @abstractmethod
    def _begin(self) -> None: ...

    @abstractmethod
    def _on_end(self, request: int) -> None: ...

    @abstractmethod
    def _stop(self) -> None: ...

    def _take(self, due_s: float, now_s: float) -> None:
        self._pool.send(self._ledger.take(due_s, now_s))

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _failed(self, _loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """What a callback raised would be logged only, and a request be missing for ever."""
        error = context.get("exception")
        if self._done is not None and not self._done.done():
            self._done.set_exception(error if isinstance(error, Exception) else RuntimeError(str(context["message"])))

    def _plan_sweep(self) -> None:
        asyncio.get_running_loop().call_later(self._timeout_s / SWEEPS, self._sweep)

    def _sweep(self) -> None:
        if self._done is not None and not self._done.done():
            self._pool.time_out(self._clock() - self._timeout_s)
            self._plan_sweep()


class OpenLoop(Loop):
    """Sends at given times, in ascending order, after its start."""

    def __init__(self, *, times_s: Sequence[float], pool: Pool, ledger: Ledger, clock: Clock, timeout_s: float) -> None:
        super().__init__(pool=pool, ledger=ledger, clock=clock, timeout_s=timeout_s)
        self._times_s = times_s
        self._next = 0
        self._alarm: Alarm | None = None

    def _begin(self) -> None:
        self._alarm = new_alarm(asyncio.get_running_loop(), self._clock, self._wake)
        self._alarm.set(self.start_s + self._times_s[0])

    def _wake(self) -> None:
        """Send everything that is due, and sleep until the next is."""
        assert self._alarm is not None
        times_s, start_s = self._times_s, self.start_s
        while self._next < len(times_s):
            now_s, due_s = self._clock(), start_s + times_s[self._next]
            if due_s > now_s:
                self._alarm.set(due_s)
                return
            self._next += 1
            self._take(due_s, now_s)

    def _on_end(self, request: int) -> None:
        if self._next == len(self._times_s) and not self._ledger.num_open:
            self._finish()

    def _stop(self) -> None:
        if self._alarm is not None:
            self._alarm.close()


class ClosedLoop(Loop):
    """Workers that send back to back until a time; one whose connection fails sends no more."""

    def __init__(
        self, *, workers: int, until_s: float, pool: Pool, ledger: Ledger, clock: Clock, timeout_s: float
    ) -> None:
        super().__init__(pool=pool, ledger=ledger, clock=clock, timeout_s=timeout_s)
        self._workers = workers
        self._until_s = until_s

    def _begin(self) -> None:
        for _ in range(self._workers):
            self._send()

    def _send(self) -> None:
        now_s = self._clock()
        if now_s < self.start_s + self._until_s:
            self._take(now_s, now_s)
        else:
            self._leave()

    def _on_end(self, request: int) -> None:
        if self._ledger.outcomes[request] == "connection":
            self._leave()
        else:
            asyncio.get_running_loop().call_soon(self._send)  # the connection is given back first

    def _leave(self) -> None:
        self._workers -= 1
        if not self._workers:
            self._finish()

    def _stop(self) -> None: ...
