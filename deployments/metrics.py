"""Prometheus metrics, through Ray's own exporter; every name starts with `offramp_`."""

from __future__ import annotations

from collections import Counter as Tally
from typing import Any

from ray.serve.metrics import Counter, Histogram

from earlyexit.device import Answered, GoesOn, Release
from earlyexit.engine import Batch
from earlyexit.piece import Piece

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class StageMetrics:
    """What a stage's replica counts."""

    def __init__(self, stage_index: int) -> None:
        self._stage = {"stage": str(stage_index)}
        self._queue_s = _histogram("offramp_queue_seconds", "Time an input waited in a stage", SECONDS, "stage")
        self._compute_s = _histogram("offramp_compute_seconds", "Time an input ran in a stage", SECONDS, "stage")
        self._fill = _histogram("offramp_batch_fill", "Share of the target batch that was filled", SHARES, "split")
        self._drops = Counter("offramp_drops", "Inputs that got no answer, by reason", _tags("stage", "reason"))

    def record(self, releases: list[Release]) -> None:
        """Count what a device released."""
        for release in releases:
            match release:
                case Answered():
                    self._observe(release.member.queue_s, release.member.compute_s)
                case GoesOn():
                    for member in release.members:
                        self._observe(member.queue_s, member.compute_s)
                case _:
                    self._drops.inc(1, {**self._stage, "reason": release.error.kind})

    def batch_started(self, batch: Batch[Piece]) -> None:
        """Count a batch's fill."""
        self._fill.observe(len(batch.members) / batch.split.batch, {"split": str(batch.split.first)})

    def _observe(self, queue_s: float, compute_s: float) -> None:
        self._queue_s.observe(queue_s, self._stage)
        self._compute_s.observe(compute_s, self._stage)


class IngressMetrics:
    """What an ingress counts."""

    def __init__(self) -> None:
        self._requests = Counter("offramp_requests", "HTTP requests, by route and status", _tags("route", "status"))
        self._answers = Counter("offramp_answers", "Answers, by the block they left after", _tags("exit"))
        self._hop_s = _histogram("offramp_hop_seconds", "Time a call spent outside its stage", SECONDS, "stage")
        self._retries = Counter("offramp_retries", "Inputs sent again because a replica failed", _tags("stage"))

    def request(self, route: str, status: int) -> None:
        """Count a finished HTTP request."""
        self._requests.inc(1, {"route": route, "status": str(status)})

    def answers(self, exits: list[int]) -> None:
        """Count answers by exit."""
        for block, count in Tally(exits).items():
            self._answers.inc(count, {"exit": str(block)})

    def hop(self, stage_index: int, seconds: float) -> None:
        """Record the way to a stage and back."""
        self._hop_s.observe(seconds, {"stage": str(stage_index)})

    def retried(self, stage_index: int, num_inputs: int) -> None:
        """Count inputs sent again."""
        self._retries.inc(num_inputs, {"stage": str(stage_index)})


def _histogram(name: str, description: str, boundaries: tuple[float, ...], tag: str) -> Histogram:
    return Histogram(name, description, list(boundaries), _tags(tag))


def _tags(*names: str) -> Any:
    return names  # ray's annotation allows one name only, its code any number
