"""What an ingress counts of its inputs; counts only grow, except those of the present plan."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from deployments.reports import BUCKET

PER_BUCKET = 1 / math.log(BUCKET)
SHORTEST_S = 1e-6
"""Below, latencies are one bucket: a clock that stood still has no logarithm."""
MOST_UNCOUNTED = 4096
LONGEST_RETRY_S = 30.0
"""A rate measured under little load says little about a full queue; nobody is sent away for longer."""
LATENCY_ENDS_S = (
    *(0.001, 0.0015, 0.002, 0.003, 0.005, 0.007),
    *(0.01, 0.015, 0.02, 0.03, 0.05, 0.07),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.7),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.0),
    *(10.0, 15.0, 20.0, 30.0, 60.0, math.inf),
)
"""Up to which latencies are told, six per decade."""


def bucket_of(seconds: float) -> int:
    """The latency bucket that a duration falls into."""
    return math.floor(math.log(max(seconds, SHORTEST_S)) * PER_BUCKET)


def latencies_within(latencies: Mapping[int, int], ends_s: Sequence[float]) -> list[int]:
    """Answers by the longest latency that their bucket may hold, at most each of `ends_s`."""
    between = [0] * len(ends_s)
    for bucket, count in latencies.items():
        between[bisect_left(ends_s, BUCKET ** (bucket + 1))] += count
    return list(accumulate(between))


class IngressCounts:
    """Every input that arrived is, later, answered or dropped: once, for one reason."""

    def __init__(self, slo_s: float | None) -> None:
        self._slo_s = math.inf if slo_s is None else slo_s
        self.arrived = 0
        self.answered = 0
        self.exits: Counter[int] = Counter()
        self.drops: Counter[str] = Counter()
        self._in_slo = 0
        self._latencies: Counter[int] = Counter()
        self._uncounted_s = array("d")
        """Latencies that are not in these two yet: counted one by one they cost more than all else of an answer."""

    @property
    def in_slo(self) -> int:
        self._count()
        return self._in_slo

    @property
    def latencies(self) -> Counter[int]:
        """Answers by bucket."""
        self._count()
        return self._latencies

    def totals(self) -> dict[str, Any]:
        """All of them, by the names that an `IngressReport` has for them."""
        plain = {"arrived": self.arrived, "answered": self.answered, "in_slo": self.in_slo}
        return plain | {"exits": dict(self.exits), "drops": dict(self.drops), "latencies": dict(self.latencies)}

    def answer(self, exit_block: int, latencies_s: Sequence[float], *, by_present_plan: bool) -> None:
        """Count answers that were given together."""
        self.answered += len(latencies_s)
        self._uncounted_s.extend(latencies_s)
        if len(self._uncounted_s) > MOST_UNCOUNTED:
            self._count()
        if by_present_plan:
            self.exits[exit_block] += len(latencies_s)

    def begin_plan(self) -> None:
        """Exits are counted anew."""
        self.exits.clear()

    def _count(self) -> None:
        seconds_N = np.array(self._uncounted_s)
        self._uncounted_s = array("d")
        self._in_slo += int((seconds_N <= self._slo_s).sum())
        buckets_N = np.floor(np.log(np.maximum(seconds_N, SHORTEST_S)) * PER_BUCKET).astype(np.int64)
        for bucket, number in zip(*np.unique(buckets_N, return_counts=True), strict=True):
            self._latencies[int(bucket)] += int(number)


@dataclass(slots=True)
class AnswerRate:
    """Answers per second, as a moving average over about ten seconds; tells refused callers when to come back."""

    rate_per_s: float = 0.0
    _since_s: float | None = None
    _count: int = 0

    def begin(self, now_s: float) -> None:
        """Count from now on: until now there was nothing to answer."""
        self._since_s, self._count = now_s, 0

    def record(self, count: int, now_s: float) -> None:
        """Count answers."""
        if self._since_s is None:
            self._since_s = now_s
        self._count += count
        elapsed_s = now_s - self._since_s
        if elapsed_s >= 1.0:
            weight = 1 - math.exp(-elapsed_s / 10)
            self.rate_per_s += (self._count / elapsed_s - self.rate_per_s) * (weight if self.rate_per_s else 1.0)
            self._since_s, self._count = now_s, 0

    def seconds_for(self, count: int) -> float:
        """How long `count` answers take, at least 1 s (HTTP's Retry-After counts whole seconds)."""
        return min(max(1.0, count / self.rate_per_s), LONGEST_RETRY_S) if self.rate_per_s else 1.0
