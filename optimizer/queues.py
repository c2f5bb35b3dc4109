"""How long inputs that arrive at random queue for busy replicas.

Work that waits is a random walk: every input brings x seconds, and m replicas take m seconds per second away. If they
are nearly always busy its tail falls exponentially (heavy traffic; Kingman 1962, with m servers Köllerström 1974): a
wait is longer than w with probability a exp(-w/t), where t = R E[x^2] / (2 m (m - R E[x])) at R inputs per second. All
replicas are busy with a probability of about a = r^(sqrt(2(m+1)) - 1), r = R E[x] / m (Sakasegawa 1977). Of a batch of
b that takes T every input brings T/b, so that larger batches make steadier queues.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Load(NamedTuple):
    """What comes to some replicas, or to their links."""

    rate_per_s: float
    """Inputs of the service, R."""
    replicas: int
    work_s: float
    """Mean seconds per input, E[x]."""
    square_s2: float
    """Mean of their square, E[x^2]."""

    def queue_s(self, late: float) -> tuple[float, float]:
        """The mean wait, and the wait that a share `late` exceeds; 0 and infinite where the replicas are too few."""
        m, idle = self.replicas, self.replicas - self.rate_per_s * self.work_s
        if idle <= 0:
            return 0.0, math.inf
        tail_s = self.rate_per_s * self.square_s2 / (2 * m * idle)
        busy = (1 - idle / m) ** (math.sqrt(2 * (m + 1)) - 1)
        return busy * tail_s, tail_s * max(0.0, math.log(busy / late)) if busy else 0.0

    def times(self, late: float, room_s: float) -> float:
        """For how many times the rate there must be replicas, so that a share `late` at most waits longer than that."""
        walk_s = -math.log(late) * self.square_s2 / (2 * self.replicas * room_s)
        return 1 + walk_s / self.work_s if self.work_s else 1.0
