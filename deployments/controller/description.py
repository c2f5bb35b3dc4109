"""What the controller says of itself, as plain data: the plan, what was expected, and what is seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deployments.controller.history import History
from deployments.controller.intake import latency_s, network_figures, total
from deployments.controller.knowledge import Outlook
from deployments.controller.loop import ControlLoop
from deployments.controller.watch import used
from deployments.settings import ServeSettings
from deployments.wire.messages import ReplicaReport
from earlyexit.network.chain import Chain
from optimizer.placement import placed_document
from optimizer.plan import Plan

LAST_EVENTS = 20


def describe(
    loop: ControlLoop, history: History, settings: ServeSettings, now_s: float, chain: Chain
) -> dict[str, Any]:
    """Everything that somebody who watches the service may ask; `chain`: of the model that it serves."""
    assert settings.control is not None
    standing = loop.keeper.standing
    ground = loop.planning.ground
    period_s = settings.control.period_s
    return {
        "epoch": standing.placed.epoch,
        **placed_document(standing.placed),
        "reason": standing.reason,
        "in_force_since_s": standing.at_s,
        "followed_epoch": None if standing.followed is None else standing.followed.epoch,
        "suspended": standing.suspended,
        "hold": standing.hold,
        "next_replan_s": max(0.0, (now_s // period_s + 1) * period_s - now_s),
        "predicted": dict(standing.placed.plan.predicted),
        "forecast": None if ground is None else _forecast(ground.outlook),
        "observed": _observed(loop, settings, now_s, chain),
        "hops": _hops(standing.placed.plan, settings),
        "fill": [] if loop.seen is None else _fill(loop, loop.seen.replicas),
        "accelerators": {} if loop.seen is None else _accelerators(loop, settings),
        "stragglers": dict(standing.resting.avoided),
        "phases_s": dict(loop.planning.phases_s),
        "plan_changes": dict(loop.keeper.changes),
        "tuning": _tuning(loop, settings),
        "events": history.events(LAST_EVENTS),
    }


def _hops(plan: Plan, settings: ServeSettings) -> dict[str, Any]:
    """In what hidden states travel, and how many bytes an input has after each stage but the last, as was planned."""
    assert settings.control is not None
    bytes_N = settings.control.problem.bytes_per_sample_N
    after = [stage.splits[-1].end - 1 for stage in plan.stages[:-1]]
    return {"dtype": settings.hop_dtype, "bytes_per_input": [bytes_N[block] for block in after]}


def _forecast(outlook: Outlook) -> dict[str, Any]:
    survival = outlook.survival
    return {
        "at_s": outlook.at_s,
        "how": outlook.how,
        "probes": outlook.num_probes,
        "coverage": survival.coverage,
        "survival": survival.survival_HK[0].tolist(),
        "survival_low": survival.survival_low_HK[0].tolist(),
        "survival_high": survival.survival_high_HK[0].tolist(),
        "rate": None
        if outlook.rate is None
        else {
            "rate_per_s": float(outlook.rate.rate_rps_H[0]),
            "low_per_s": float(outlook.rate.low_rps_H[0]),
            "high_per_s": _finite(float(outlook.rate.high_rps_H[0])),
            "how": outlook.rate.method.how,
        },
    }


def _tuning(loop: ControlLoop, settings: ServeSettings) -> dict[str, Any]:
    """By which thresholds inputs leave, all ramps', and how far the alarm is from sounding."""
    assert settings.control is not None
    thresholds, state = loop.knowledge.thresholds, loop.tuning.state
    return {
        "how": settings.control.tuning,
        "thresholds": {str(ramp): threshold for ramp, threshold in thresholds.items()},
        "safe": loop.tuning.is_safe(thresholds),
        "alarms": loop.keeper.changes["alarm"],
        "evidence": None if state is None else state.evidence / state.limit,
        "watched": 0 if state is None else state.watched,
        "next_test": None if state is None else state.next_test,
        "rows": 0 if state is None else state.rows,
    }


def _observed(loop: ControlLoop, settings: ServeSettings, now_s: float, chain: Chain) -> dict[str, Any]:
    """Over the last period, or since the plan is followed if that is shorter."""
    assert settings.control is not None
    standing = loop.keeper.standing
    since_s = max(standing.followed_s, now_s - settings.control.period_s)
    seen = total(loop.knowledge.counts(since_s))
    active = loop.knowledge.observed(since_s, now_s, standing.placed.plan.ramps)
    full = loop.knowledge.observed(since_s, now_s)
    window = loop.knowledge.window(since_s, now_s)
    agreement = None if active is None or active.agreement is None else active.agreement.value
    return {
        "seconds": 0.0 if seen is None else seen.seconds,
        "rate_per_s": None if seen is None else seen.arrived / seen.seconds,
        "goodput_per_s": None if seen is None else seen.in_slo / seen.seconds,
        "p50_s": None if seen is None else latency_s(seen.latencies, 0.5),
        "p99_s": None if seen is None else latency_s(seen.latencies, 0.99),
        "exits": {} if seen is None else {str(block): count for block, count in sorted(seen.exits.items())},
        "drops": {} if seen is None else dict(seen.drops),
        "networks": network_figures(chain, standing.placed.plan.used, seen),
        "inputs_seen": 0 if full is None else full.num_inputs,
        "survival": None if full is None or full.survival is None else [share.value for share in full.survival],
        "agreement": agreement,
        "pruned_agreement": None if window is None else window.observations.pruned_agreement,
        "accuracy_budget": settings.control.accuracy_budget,
        "within_budget": _within(agreement, settings.control.accuracy_budget),
    }


def _within(agreement: float | None, budget: float | None) -> bool | None:
    return None if agreement is None or budget is None else agreement >= 1 - budget


def _fill(loop: ControlLoop, replicas: Sequence[ReplicaReport]) -> list[dict[str, Any]]:
    """Per split of the plan, inputs per batch over its batch size, tokens over its budget, since the last planning."""
    rows = []
    for slot, stage in loop.keeper.placed.stage_of.items():
        times = [each for report in replicas if report.slot == slot for each in loop.watch.replicas.since_mark(report)]
        for split in stage.splits:
            mine = [each for each in times if (each.first, each.end) == (split.first, split.end)]
            batches = sum(each.batches for each in mine)
            inputs, tokens = sum(each.batches * each.size for each in mine), sum(each.tokens for each in mine)
            rows.append(
                {
                    "slot": slot,
                    "first": split.first,
                    "end": split.end,
                    "batch": split.batch,
                    "batches": batches,
                    "fill": inputs / batches / split.batch if batches else None,
                    "tokens": split.tokens,
                    "token_fill": tokens / batches / split.tokens if batches and split.tokens else None,
                }
            )
    return rows


def _accelerators(loop: ControlLoop, settings: ServeSettings) -> dict[str, Any]:
    """Emulated ones say so, and how many of our seconds one of theirs takes."""
    assert loop.seen is not None
    taken = used(loop.seen.running, loop.keeper.devices)
    return {
        device: {"alive": count, "used": taken.get(device, 0), **_emulated(settings, device)}
        for device, count in loop.seen.capacity.items()
    }


def _emulated(settings: ServeSettings, device: str) -> Mapping[str, Any]:
    emulated = settings.emulated.get(device)
    if emulated is None:
        return {"emulated": False}
    return {"emulated": True, "time_scale": emulated.time_scale, "decisions": emulated.decisions}


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if value < float("inf") else None
