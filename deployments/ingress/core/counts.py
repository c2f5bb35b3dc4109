"""What an ingress counts of its inputs; counts only grow, except those of the present plan."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate

from deployments.reports import BUCKET

PER_BUCKET = 1 / math.log(BUCKET)
SHORTEST_S = 1e-6
"""Below, latencies are one bucket: a clock that stood still has no logarithm."""


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
        self.in_slo = 0
        self.exits: Counter[int] = Counter()
        self.drops: Counter[str] = Counter()
        self.latencies: Counter[int] = Counter()

    def answer(self, exit_block: int, latency_s: float, *, by_present_plan: bool) -> None:
        """Count an answer that was given."""
        self.answered += 1
        self.in_slo += latency_s <= self._slo_s
        self.latencies[bucket_of(latency_s)] += 1
        if by_present_plan:
            self.exits[exit_block] += 1

    def begin_plan(self) -> None:
        """Exits are counted anew."""
        self.exits.clear()
