"""Prometheus metrics of a model that has several versions."""

from __future__ import annotations

from deployments.controller.intake import latency_s
from deployments.metrics import Told
from deployments.versions.choice import Tally

QUANTILES = (0.5, 0.99)


class VersionMetrics:
    """Tells Ray about once a second what was counted."""

    def __init__(self) -> None:
        self._shown = Tally()
        self.told = Told()

    def show(self, tally: Tally) -> None:
        """Adds what a tally has counted since the last time; a new tally starts at zero."""
        if tally is not self._shown:
            self._shown = tally
            self.told.totals.clear()
        for outcome, total in (tally.inputs | {"failed": tally.failed}).items():
            self.told.total("offramp_version_compared", "Inputs that two versions answered", total, outcome=outcome)
        asked = "offramp_version_requests", "Requests without a version, by answering version"
        slow = "offramp_version_latency_seconds", "Latency by version, since its figures began"
        for version, each in tally.versions.items():
            for status, count in each.requests.items():
                self.told.total(*asked, count, version=version, status=status)
            for share in QUANTILES:
                self.told.level(*slow, latency_s(each.latencies, share), version=version, quantile=f"{share:g}")
