"""The metrics of a stage's replica; apart from the ingress's, because they know the engine."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from deployments.metrics import SECONDS, histogram
from earlyexit.device import Answered, GoesOn, Release
from earlyexit.engine import Batch

SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class StageMetrics:
    """What a stage's replica counts, by slot and device: the stage that a slot hosts changes.

    Ray is told once a second, by the event loop: to tell it of every input cost the device's thread 6 % of its time.
    """

    def __init__(self, slot: str, device: str) -> None:
        self._where = {"slot": slot, "device": device}
        names = tuple(self._where)
        self._queue_s = histogram("offramp_queue_seconds", "Time an input waited in a stage", SECONDS, *names)
        self._compute_s = histogram("offramp_compute_seconds", "Time an input ran in a stage", SECONDS, *names)
        self._fill = histogram(
            "offramp_batch_fill", "Share of the target batch that was filled", SHARES, *names, "split"
        )
        self._spent_s: deque[tuple[float, float]] = deque()
        """Waiting and running, per input."""
        self._fills: deque[tuple[int, float]] = deque()
        """By split."""

    def record(self, releases: list[Release[Any]]) -> None:
        """Count what a device released."""
        for release in releases:
            match release:
                case Answered(stays=False):
                    self._spent_s.append((release.member.queue_s, release.member.compute_s))
                case GoesOn():
                    self._spent_s.extend((member.queue_s, member.compute_s) for member in release.members)
                case _:  # the ingress counts what got no answer: it knows whether another attempt follows
                    pass

    def batch_finished(self, batch: Batch[Any]) -> None:
        """Count a batch's fill; probes do not wait to fill one."""
        if not batch.probe:
            self._fills.append((batch.split.first, len(batch.members) / batch.split.batch))

    async def keep_telling(self) -> None:
        """Tell Ray once a second, for ever."""
        while True:
            await asyncio.sleep(1.0)
            self.tell()

    def tell(self) -> None:
        """Tell Ray what was counted since the last time."""
        while self._spent_s:
            queue_s, compute_s = self._spent_s.popleft()
            self._queue_s.observe(queue_s, self._where)
            self._compute_s.observe(compute_s, self._where)
        while self._fills:
            split, share = self._fills.popleft()
            self._fill.observe(share, {**self._where, "split": str(split)})
