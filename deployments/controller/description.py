"""The controller described as plain data: the plan, what was expected, and what is seen."""

from __future__ import annotations

from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

from deployments.controller.act import ControlLoop
from deployments.controller.decide import View
from deployments.controller.observe import Forecast
from deployments.controller.remember import History
from deployments.settings import ServeSettings
from deployments.wire.messages import latency_s, total
from optimizer.live.stragglers import avoided_replicas
from optimizer.plans.plan_file import placed_document

LAST_EVENTS = 20


def describe(loop: ControlLoop, history: History, settings: ServeSettings) -> dict[str, Any]:
    """Returns what `GET /plan` shows as plain data."""
    view = loop.view
    state, now_s, forecast = view.state, view.now_s, view.forecast
    period_s, bytes_N = view.settings.period_s, view.settings.problem.bytes_per_sample_N
    plan = state.placed.plan
    bytes_per_hop = [bytes_N[stage.end - 1] for chain in plan.chains for stage in chain.stages[:-1]]
    return {
        "epoch": state.placed.epoch,
        **placed_document(state.placed),
        "reason": state.reason,
        "in_force_since_s": state.at_s,
        "followed_epoch": None if state.followed is None else state.followed.epoch,
        "suspended": state.suspended,
        "hold": state.hold,
        "next_replan_s": max(0.0, (now_s // period_s + 1) * period_s - now_s),
        # By the last planning, which may have kept an earlier plan.
        "predicted": dict(view.completed(replace(plan, predicted={})).predicted or plan.predicted),
        "forecast": None if forecast is None else _forecast(forecast),
        "observed": _observed(view),
        "hops": {"dtype": settings.hop_dtype, "bytes_per_input": bytes_per_hop},
        "accelerators": _accelerators(view, settings),
        "stragglers": dict(avoided_replicas(state.resting)),
        "phases_s": dict(loop.phases_s),
        "plan_changes": dict(loop.changes),
        "tuning": _tuning(view, loop.changes["alarm"]),
        "events": history.events(LAST_EVENTS),
    }


def _forecast(forecast: Forecast) -> dict[str, Any]:
    survival, rate = forecast.survival, forecast.rate
    return {
        "at_s": forecast.at_s,
        "how": forecast.how,
        "probes": forecast.num_probes,
        "coverage": survival.coverage,
        "survival": survival.survival_K.tolist(),
        "survival_low": survival.survival_low_K.tolist(),
        "survival_high": survival.survival_high_K.tolist(),
        "rate": rate
        and {
            "rate_per_s": rate.rate_rps,
            "low_per_s": rate.low_rps,
            "high_per_s": rate.high_rps if rate.high_rps < float("inf") else None,  # JSON has no infinity
            "how": rate.method.how,
        },
    }


def _tuning(view: View, num_alarms: int) -> dict[str, Any]:
    """Describes the thresholds of all ramps, and the evidence for an alarm."""
    thresholds, state = view.state.thresholds, view.tuning.state
    return {
        "how": view.settings.tuning,
        "thresholds": {str(ramp): threshold for ramp, threshold in thresholds.items()},
        "safe": view.tuning.is_safe(thresholds),
        "alarms": num_alarms,
        **({"evidence": None, "watched": 0, "rows": 0, "next_test": None} if state is None else asdict(state)),
    }


def _observed(view: View) -> dict[str, Any]:
    """Describes the measurements of the last period, or since the ingresses follow the plan if that is shorter."""
    state, now_s, budget = view.state, view.now_s, view.settings.accuracy_budget
    since_s = max(state.followed_s, now_s - view.settings.period_s)
    seen = total(view.stream.intervals(since_s))
    full = view.stream.observed(state, since_s, now_s)
    window = view.stream.window(since_s, now_s)
    agreement = _agreement(view, since_s)
    return {
        "seconds": 0.0 if seen is None else seen.seconds,
        "rate_per_s": None if seen is None else seen.arrived / seen.seconds,
        "goodput_per_s": None if seen is None else seen.in_slo / seen.seconds,
        "p50_s": None if seen is None else latency_s(seen.latencies, 0.5),
        "p99_s": None if seen is None else latency_s(seen.latencies, 0.99),
        "exits": {} if seen is None else {str(block): count for block, count in sorted(seen.exits.items())},
        "drops": {} if seen is None else dict(seen.drops),
        "inputs_seen": 0 if full is None else full.num_inputs,
        "survival": None if full is None or full.survival is None else [share.value for share in full.survival],
        "agreement": agreement,
        "pruned_agreement": None if window is None else window.observations.pruned_agreement,
        "accuracy_budget": budget,
        "within_budget": None if agreement is None or budget is None else agreement >= 1 - budget,
    }


def _agreement(view: View, since_s: float) -> float | None:
    """Returns the mean agreement of all chains, each of which has its own active ramps; None if one is not known."""
    plan = view.state.placed.plan
    seen = [view.stream.observed(view.state, since_s, view.now_s, chain.ramps) for chain in plan.chains]
    known = [each.agreement.value for each in seen if each is not None and each.agreement is not None]
    return fmean(known, plan.shares) if len(known) == len(seen) else None


def _accelerators(view: View, settings: ServeSettings) -> dict[str, Any]:
    """Describes the accelerators by type. `time_scale`: real seconds per second of an emulated accelerator.

    `latency_ratio`: seconds of all blocks, as plans expect them, divided by those of the profile.
    """
    described: dict[str, Any] = {}
    for device, count in view.accelerators.items():
        emulated = settings.emulated.get(device)
        own = {} if emulated is None else emulated.model_dump(include={"time_scale", "decisions"})
        profile_s, planned_s = (each.latency[device].block_s_NB.sum() for each in (view.settings.problem, view.problem))
        described[device] = {"alive": count, "used": view.running.get(device, 0), "emulated": emulated is not None}
        described[device] |= {"latency_ratio": float(planned_s / profile_s), **own}
    return described
