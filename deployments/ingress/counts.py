"""What an ingress counts of its inputs; counts only grow, except those of the present plan."""

from __future__ import annotations

import math
from collections import Counter

from deployments.reports import BUCKET

PER_BUCKET = 1 / math.log(BUCKET)
SHORTEST_S = 1e-6
"""Below, latencies are one bucket: a clock that stood still has no logarithm."""


def bucket_of(seconds: float) -> int:
    """The latency bucket that a duration falls into."""
    return math.floor(math.log(max(seconds, SHORTEST_S)) * PER_BUCKET)


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
