"""Prometheus metrics of the controller; every name starts with `offramp_`."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Mapping
from typing import Any

from ray.serve.metrics import Counter, Gauge

from deployments.metrics import tags


class ControlMetrics:
    """What `describe` says, as figures."""

    def __init__(self) -> None:
        self._epoch = Gauge("offramp_plan_epoch", "The plan in force")
        self._changes = Counter("offramp_plan_changes", "Changes of the plan, by reason", tags("reason"))
        self._replan_s = Gauge("offramp_replan_seconds", "Time of the last planning, by phase", tags("phase"))
        self._predicted = Gauge("offramp_predicted_rate", "Inputs per second that the plan should do")
        self._observed = Gauge("offramp_observed_rate", "Inputs per second that arrive")
        self._goodput = Gauge("offramp_goodput", "Answers per second inside the SLO")
        self._agreement = Gauge("offramp_agreement", "Share of probes answered as by the full model")
        self._pruned_agreement = Gauge(
            "offramp_pruned_agreement", "Share of probes that lost words whose last answer is that to the whole text"
        )
        self._survival = Gauge(
            "offramp_survival", "Share of inputs that no ramp before the block would let out", tags("block", "kind")
        )
        self._threshold = Gauge("offramp_threshold", "Score at which inputs leave, active or not", tags("ramp"))
        self._evidence = Gauge("offramp_alarm_evidence", "Evidence of too much loss; the alarm sounds at 1")
        self._stragglers = Gauge("offramp_stragglers", "Replicas that get no work because they are slow")
        self._accelerators = Gauge("offramp_accelerators", "Accelerators alive", tags("device"))
        self._counted: Tally[str] = Tally()

    def show(self, described: Mapping[str, Any]) -> None:
        """Set every figure that is known."""
        self._epoch.set(described["epoch"])
        self._stragglers.set(len(described["stragglers"]))
        for phase, seconds in described["phases_s"].items():
            self._replan_s.set(seconds, {"phase": phase})
        for device, accelerator in described["accelerators"].items():
            self._accelerators.set(accelerator["alive"], {"device": device})
        observed, forecast = described["observed"], described["forecast"]
        _set(self._predicted, described["predicted"].get("rate_per_s"))
        _set(self._observed, observed["rate_per_s"])
        _set(self._goodput, observed["goodput_per_s"])
        _set(self._agreement, observed["agreement"])
        _set(self._pruned_agreement, observed["pruned_agreement"])
        self._show_survival("observed", observed["survival"])
        for ramp, threshold in described["tuning"]["thresholds"].items():
            self._threshold.set(threshold, {"ramp": ramp})
        _set(self._evidence, described["tuning"]["evidence"])
        self._show_survival("forecast", None if forecast is None else forecast["survival"])
        self._count(Tally(described["plan_changes"]))

    def _show_survival(self, kind: str, survival: list[float] | None) -> None:
        for block, share in enumerate(survival or ()):
            self._survival.set(share, {"block": str(block), "kind": kind})

    def _count(self, changes: Tally[str]) -> None:
        for reason, count in (changes - self._counted).items():
            self._changes.inc(count, {"reason": reason})
        self._counted = changes


def _set(gauge: Gauge, value: float | None) -> None:
    if value is not None:
        gauge.set(value)
