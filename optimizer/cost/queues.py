"""Queueing time of inputs that arrive at random, by the heavy-traffic approximation.

The waiting work is a random walk: each input adds x seconds, and m replicas remove m seconds per second. In heavy
traffic, its tail is exponential (Kingman 1962; Köllerström 1974 for m servers). At R inputs per second, a wait exceeds
w with probability a exp(-w/t), where t = R E[x^2] / (2 m (m - R E[x])). The probability that all replicas are busy is
about a = r^(sqrt(2(m+1)) - 1) with r = R E[x] / m (Sakasegawa 1977). In a batch of b inputs that takes T, each input
adds T/b, so larger batches make queues steadier.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Load(NamedTuple):
    """The load of the replicas of a stage, or of their links."""

    rate_per_s: float
    """Arrival rate, R."""
    replicas: int
    work_s: float
    """Mean seconds of work per input, E[x]."""
    square_s2: float
    """Mean square of the seconds per input, E[x^2]."""

    def queue_s(self, late: float) -> tuple[float, float]:
        """Returns the mean wait and the wait that a share `late` exceeds; 0 and infinity if replicas are too few."""
        m, idle = self.replicas, self.replicas - self.rate_per_s * self.work_s
        if idle <= 0:
            return 0.0, math.inf
        tail_s = self.rate_per_s * self.square_s2 / (2 * m * idle)
        busy = (1 - idle / m) ** (math.sqrt(2 * (m + 1)) - 1)
        return busy * tail_s, tail_s * max(0.0, math.log(busy / late)) if busy else 0.0

    def overprovisioning(self, late: float, room_s: float) -> float:
        """Returns the factor on the planned rate with which at most a share `late` waits longer than `room_s`."""
        walk_s = -math.log(late) * self.square_s2 / (2 * self.replicas * room_s)
        return 1 + walk_s / self.work_s if self.work_s else 1.0
