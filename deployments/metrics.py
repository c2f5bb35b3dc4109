"""What the Prometheus metrics of all parts share. They go through Ray; every name starts with `offramp_`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ray.serve.metrics import Counter, Gauge, Histogram

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Told:
    """Metrics of one part of a service. Each is made when it is first told."""

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}
        self.totals: defaultdict[tuple[str, ...], float] = defaultdict(float)
        """The last total by name and labels; without them, counts begin at zero again."""

    def count(self, name: str, description: str, amount: float, **labels: str) -> None:
        """Adds an amount."""
        counter = self.metrics.get(name) or self._made(Counter, name, description, labels)
        if amount > 0:  # a counter refuses zero
            counter.inc(amount, labels)

    def total(self, name: str, description: str, total: float, **labels: str) -> None:
        """Counts the difference to the last total."""
        key = name, *labels.values()
        self.count(name, description, total - self.totals[key], **labels)
        self.totals[key] = max(total, self.totals[key])

    def level(self, name: str, description: str, value: float | None, **labels: str) -> None:
        """Shows a value; None leaves the one before."""
        gauge = self.metrics.get(name) or self._made(Gauge, name, description, labels)
        if value is not None:
            gauge.set(value, labels)

    def observe(self, name: str, description: str, boundaries: Sequence[float], value: float, **labels: str) -> None:
        """Counts a value in a histogram."""
        histogram = self.metrics.get(name) or self._made(Histogram, name, description, labels, list(boundaries))
        histogram.observe(value, labels)

    def _made(self, kind: Any, name: str, description: str, labels: dict[str, str], *more: Any) -> Any:
        made = self.metrics[name] = kind(name, description, *more, tuple(labels))
        return made
