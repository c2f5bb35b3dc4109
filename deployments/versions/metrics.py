"""Prometheus metrics of a model that has several versions."""

from __future__ import annotations

from ray.serve.metrics import Counter, Gauge

from deployments.controller.intake import latency_s
from deployments.metrics import Totals, tags
from deployments.versions.choice import Tally

QUANTILES = (0.5, 0.99)


class VersionMetrics:
    """Tells Ray about once a second what was counted."""

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
        self._totals = Totals()

    def show(self, tally: Tally) -> None:
        """Adds what a tally has counted since the last time; a new tally starts at zero."""
        if tally is not self._shown:
            self._shown, self._totals = tally, Totals()
        for outcome, total in (tally.inputs | {"failed": tally.failed}).items():
            self._totals.grow(self._compared, total, outcome=outcome)
        for version, each in tally.versions.items():
            for status, count in each.requests.items():
                self._totals.grow(self._requests, count, version=version, status=status)
            for quantile in QUANTILES:
                seconds = latency_s(each.latencies, quantile)
                if seconds is not None:
                    self._latency_s.set(seconds, {"version": version, "quantile": f"{quantile:g}"})
