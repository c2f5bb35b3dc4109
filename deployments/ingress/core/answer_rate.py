"""How many answers a second an ingress gives."""

from __future__ import annotations

import math
from dataclasses import dataclass

LONGEST_RETRY_S = 30.0
"""A rate measured under little load says little about a full queue; nobody is sent away for longer."""


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
