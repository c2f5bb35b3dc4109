"""The Prometheus metrics of one process, for Ray's page and for `GET /metrics`. Every name starts with `offramp_`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ray.serve.metrics import Counter, Gauge

from deployments.ops.prometheus import Sample

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class LazyMetrics:
    """The metrics of one process. Each counter or gauge is created when it is first used."""

    def __init__(self) -> None:
        self.instruments: dict[str, Any] = {}
        """Counters and gauges by name."""
        self._values: defaultdict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
        """The value of each counter and gauge, by name and labels."""

    def add(self, name: str, description: str, amount: float, **labels: str) -> None:
        counter = self.instruments.get(name) or self._create(Counter, name, description, labels)
        if amount > 0:  # Ray's counters refuse zero
            counter.inc(amount, labels)
        self._values[name, tuple(labels.items())] += amount

    def set_total(self, name: str, description: str, total: float, **labels: str) -> None:
        """Adds the difference to the last total to a counter."""
        self.add(name, description, max(0.0, total - self._values[name, tuple(labels.items())]), **labels)

    def set_totals(self, name: str, description: str, totals: Mapping[Any, float], label: str) -> None:
        """Sets the total of each value of a label."""
        for value, total in totals.items():
            self.set_total(name, description, total, **{label: str(value)})

    def set_gauge(self, name: str, description: str, value: float | None, **labels: str) -> None:
        """Sets a gauge; None keeps its last value."""
        gauge = self.instruments.get(name) or self._create(Gauge, name, description, labels)
        if value is not None:
            gauge.set(value, labels)
            self._values[name, tuple(labels.items())] = value

    def set_gauges(self, name: str, description: str, values: Mapping[int, float], label: str) -> None:
        """Sets the gauge of each value of a label, and 0 for those that were set earlier and are missing now."""
        earlier = {int(dict(labels)[label]): 0.0 for each, labels in self._values if each == name}
        for value, number in (earlier | dict(values)).items():
            self.set_gauge(name, description, number, **{label: str(value)})

    def observe(
        self, name: str, description: str, ends: Sequence[float], values: Sequence[float], **labels: str
    ) -> None:
        """Adds values to a histogram: counters of the values up to each of `ends`, of all values, and of their sum.

        Ray's histograms are not used, because Ray's agent handles their values one by one: every ten seconds, this
        would take a core for tens of microseconds per value, and requests would wait.
        """
        sorted_V = np.sort(values)
        for end, number in zip(ends, np.searchsorted(sorted_V, ends, side="right"), strict=True):
            self.add(f"{name}_bucket", description, int(number), **labels, le=f"{end:g}")
        self.add(f"{name}_bucket", description, len(sorted_V), **labels, le="+Inf")
        self.add(f"{name}_count", description, len(sorted_V), **labels)
        self.add(f"{name}_sum", description, float(sorted_V.sum()), **labels)

    def samples(self, **process: str) -> list[Sample]:
        """Returns all values. `process`: labels that identify this process."""
        found = []
        for (name, labels), value in self._values.items():
            instrument = self.instruments[name]
            full_name = f"{name}_total" if isinstance(instrument, Counter) else name
            found.append(Sample(full_name, instrument.info["description"], {**process, **dict(labels)}, value))
        return found

    def _create(self, kind: Any, name: str, description: str, labels: dict[str, str]) -> Any:
        return self.instruments.setdefault(name, kind(name, description, tuple(labels)))
