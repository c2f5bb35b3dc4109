"""What the Prometheus metrics of all parts share. They go through Ray; every name starts with `offramp_`."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from ray.serve.metrics import Counter, Histogram

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Totals:
    """Counters that are given their totals."""

    def __init__(self) -> None:
        self._told: defaultdict[tuple[Counter, tuple[str, ...]], float] = defaultdict(float)

    def grow(self, counter: Counter, total: float, **labels: str) -> None:
        """Counts the difference to the last total."""
        key = counter, tuple(labels.values())
        if total > self._told[key]:  # a counter refuses zero
            counter.inc(total - self._told[key], labels)
            self._told[key] = total


def le(end_s: float) -> str:
    """Returns the label of a bucket by its upper end."""
    return "+Inf" if math.isinf(end_s) else f"{end_s:g}"


def histogram(name: str, description: str, boundaries: tuple[float, ...], *names: str) -> Histogram:
    """A histogram with the given tags."""
    return Histogram(name, description, list(boundaries), tags(*names))


def tags(*names: str) -> Any:
    """Tag names in the form that Ray's metrics take."""
    return names  # ray's annotation allows one name only, its code any number
