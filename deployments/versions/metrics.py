"""Prometheus metrics by version, where a model has more than one."""

from __future__ import annotations

from ray.serve.metrics import Counter, Gauge

from deployments.metrics import tags
from deployments.versions.choice import Counts, Tally, counts, growth, quantile_s

QUANTILES = (0.5, 0.99)


class VersionMetrics:
    """Shown about once a second: what has grown since."""

    def __init__(self) -> None:
        self._requests = Counter(
            "offramp_version_requests", "Requests without a version, by answering version", tags("version", "status")
        )
        self._compared = Counter("offramp_version_compared", "Inputs that two versions answered", tags("outcome"))
        self._latency_s = Gauge(
            "offramp_version_latency_seconds",
            "Latency by version, since its figures began",
            tags("version", "quantile"),
        )
        self._shown = Tally()
        self._before: Counts = {}

    def show(self, tally: Tally) -> None:
        """Tell Ray what a tally holds; another tally than before begins at nothing."""
        if tally is not self._shown:
            self._shown, self._before = tally, {}
        now = counts(tally)
        for (version, status), grown in growth(self._before, now).items():
            if version:
                self._requests.inc(grown, {"version": version, "status": status})
            else:
                self._compared.inc(grown, {"outcome": status})
        self._before = now
        for version, each in tally.versions.items():
            for quantile in QUANTILES:
                latency_s = quantile_s(each.latencies, quantile)
                if latency_s is not None:
                    self._latency_s.set(latency_s, {"version": version, "quantile": f"{quantile:g}"})
