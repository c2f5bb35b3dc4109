"""What the Prometheus metrics of all parts share. They go through Ray; every name starts with `offramp_`."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from ray.serve.metrics import Counter, Gauge, Histogram

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Told:
    """Metrics of one part of a service, which are told totals and levels. Each is made when it is first told."""

    def __init__(self) -> None:
        self.counters: dict[str, Counter] = {}
        self.gauges: dict[str, Gauge] = {}
        self.totals: defaultdict[tuple[str, ...], float] = defaultdict(float)
        """The last total by name and labels; without them, counts begin at zero again."""

    def total(self, name: str, description: str, total: float, **labels: str) -> None:
        """Counts the difference to the last total."""
        if name not in self.counters:
            self.counters[name] = Counter(name, description, tags(*labels))
        key = name, *labels.values()
        if total > self.totals[key]:  # a counter refuses zero
            self.counters[name].inc(total - self.totals[key], labels)
            self.totals[key] = total

    def level(self, name: str, description: str, value: float | None, **labels: str) -> None:
        """Shows a value; None leaves the one before."""
        if name not in self.gauges:
            self.gauges[name] = Gauge(name, description, tags(*labels))
        if value is not None:
            self.gauges[name].set(value, labels)


def histogram(name: str, description: str, boundaries: tuple[float, ...], *names: str) -> Histogram:
    """A histogram with the given tags."""
    return Histogram(name, description, list(boundaries), tags(*names))


def tags(*names: str) -> Any:
    """Tag names in the form that Ray's metrics take."""
    return names  # ray's annotation allows one name only, its code any number
