"""The metrics of a stage's replica; apart from the ingress's, because they know the engine."""

from __future__ import annotations

from typing import Any

from deployments.metrics import SECONDS, histogram
from earlyexit.device import Answered, GoesOn, Release
from earlyexit.engine import Batch

SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class StageMetrics:
    """What a stage's replica counts, by slot and device: the stage that a slot hosts changes."""

    def __init__(self, slot: str, device: str) -> None:
        self._where = {"slot": slot, "device": device}
        names = tuple(self._where)
        self._queue_s = histogram("offramp_queue_seconds", "Time an input waited in a stage", SECONDS, *names)
        self._compute_s = histogram("offramp_compute_seconds", "Time an input ran in a stage", SECONDS, *names)
        self._fill = histogram(
            "offramp_batch_fill", "Share of the target batch that was filled", SHARES, *names, "split"
        )

    def record(self, releases: list[Release[Any]]) -> None:
        """Count what a device released."""
        for release in releases:
            match release:
                case Answered(stays=False):
                    self._observe(release.member.queue_s, release.member.compute_s)
                case GoesOn():
                    for member in release.members:
                        self._observe(member.queue_s, member.compute_s)
                case _:  # the ingress counts what got no answer: it knows whether another attempt follows
                    pass

    def batch_finished(self, batch: Batch[Any]) -> None:
        """Count a batch's fill; probes do not wait to fill one."""
        if not batch.probe:
            share = len(batch.members) / batch.split.batch
            self._fill.observe(share, {**self._where, "split": str(batch.split.first)})

    def _observe(self, queue_s: float, compute_s: float) -> None:
        self._queue_s.observe(queue_s, self._where)
        self._compute_s.observe(compute_s, self._where)
