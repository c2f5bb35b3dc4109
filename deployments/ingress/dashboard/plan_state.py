"""The plan as the page draws it: stages, splits with the batches that really ran, and replicas. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deployments.control.intake import ReplicaIntake
from deployments.ingress.dashboard.snapshot import ServiceFacts, Snapshot
from deployments.reports import ReplicaReport
from earlyexit.counts import TimesRun
from earlyexit.split import Split
from optimizer.plan import Stage

MOST_REPLICAS = 64
"""Of a stage that are drawn; more are counted."""
Ran = Mapping[str, Sequence[TimesRun]]
"""By replica, what it ran while it was looked at."""


def plan_state(facts: ServiceFacts, snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    """The newest plan, with what it did over `snapshots`, which are all of that plan."""
    now, ran = snapshots[-1], ran_over(snapshots)
    seconds = now.at_s - snapshots[0].at_s
    described = now.described if now.described and now.described.get("epoch") == now.placed.epoch else {}
    predicted = now.placed.plan.predicted
    return {
        "epoch": now.placed.epoch,
        "reason": described.get("reason"),
        "since_s": described.get("in_force_since_s"),
        "policy": None if now.placed.plan.policy is None else now.placed.plan.policy.name,
        "dispatch": now.placed.plan.dispatch,
        "order": now.placed.plan.order.name,
        "after_answer": now.placed.plan.after_answer,
        "overlap_below": now.placed.plan.overlap_below,
        "tuning": _tuning(now.described or {}),
        "predicted": {name: predicted.get(name) for name in ("rate_per_s", "latency_s", "usd_per_hour")},
        "stages": [_stage(facts, now, slot, stage, ran, seconds) for slot, stage in now.placed.stage_of.items()],
    }


def _tuning(described: Mapping[str, Any]) -> dict[str, Any] | None:
    """Whether nobody leaves, and how often it came to that; None where thresholds stay as they are."""
    tuning = described.get("tuning") or {"how": "off"}
    return None if tuning["how"] == "off" else {name: tuning[name] for name in ("how", "safe", "alarms")}


def blocks_state(snapshots: Sequence[Snapshot], survival: Sequence[float] | None) -> list[dict[str, Any]]:
    """Per block the batch with fusing, and what the first batch would have shrunk to without.

    With: what a split's batches really held at its first block, less what left at its own ramps before the block.
    Without: b * s(k) / s(0), b the first split's batches and s the observed survival; 1 where answered inputs stay.
    """
    if survival is not None and snapshots[-1].placed.plan.after_answer == "stay":
        survival = [1.0] * len(survival)
    now, ran = snapshots[-1], ran_over(snapshots)
    splits = [(slot, split) for slot, stage in now.placed.stage_of.items() for split in stage.splits]
    sizes = {split.first: _size(_times(now, slot, split, ran)) for slot, split in splits}
    return [
        {
            "block": block,
            "target": split.batch,
            "is_first": block == split.first,
            "fused": _shrunk(sizes[split.first], survival, split.first, block),
            "unfused": _shrunk(sizes[splits[0][1].first], survival, splits[0][1].first, block),
        }
        for _, split in splits
        for block in range(split.first, split.end)
    ]


def ran_over(snapshots: Sequence[Snapshot]) -> Ran:
    """What every replica of the newest snapshot ran since the oldest; one that started meanwhile began at zero."""
    intake = ReplicaIntake()
    intake.mark(snapshots[0].replicas)
    return {report.replica: intake.since_mark(report) for report in snapshots[-1].replicas}


def _stage(facts: ServiceFacts, now: Snapshot, slot: str, stage: Stage, ran: Ran, seconds: float) -> dict[str, Any]:
    replicas = sorted((each for each in now.replicas if each.slot == slot), key=lambda each: each.replica)
    return {
        "slot": slot,
        "device": stage.device,
        "time_scale": facts.emulated.get(stage.device),
        "first": stage.first,
        "end": stage.end,
        "wanted": stage.replicas,
        "running": len(replicas),
        "waiting": sum(report.waiting for report in replicas),
        "splits": [_split(facts, now, slot, split, ran, seconds) for split in stage.splits],
        "replicas": [_replica(now, report, ran, seconds) for report in replicas[:MOST_REPLICAS]],
    }


def _split(facts: ServiceFacts, now: Snapshot, slot: str, split: Split, ran: Ran, seconds: float) -> dict[str, Any]:
    times = _times(now, slot, split, ran)
    size, batches = _size(times), sum(each.batches for each in times)
    size_tokens = sum(each.tokens for each in times) / batches if batches else None
    return {
        "first": split.first,
        "end": split.end,
        "network": facts.chain.name_of(split.first),
        "batch": split.batch,
        "tokens": split.tokens,
        "ramps": list(split.ramps),
        "size": size,
        "size_tokens": size_tokens,
        "fill": None if size is None else size / split.batch,
        "token_fill": None if size_tokens is None or split.tokens is None else size_tokens / split.tokens,
        "batches_per_s": batches / seconds if seconds else None,
    }


def _replica(now: Snapshot, report: ReplicaReport, ran: Ran, seconds: float) -> dict[str, Any]:
    busy_s = sum(each.seconds for each in ran.get(report.replica, ()))
    return {
        "name": report.replica,
        "node": report.node,
        "pid": report.pid,
        "epoch": report.epoch,
        "waiting": report.waiting,
        "busy": min(1.0, busy_s / seconds) if seconds else None,
        "rests": report.replica in now.placed.avoided_ids,
    }


def _times(now: Snapshot, slot: str, split: Split, ran: Ran) -> list[TimesRun]:
    """Of one split, on all replicas of its slot."""
    return [each for report in now.replicas if report.slot == slot for each in ran[report.replica] if each.is_of(split)]


def _size(times: Sequence[TimesRun]) -> float | None:
    """Mean inputs per batch; None where none ran."""
    batches = sum(each.batches for each in times)
    return sum(each.batches * each.size for each in times) / batches if batches else None


def _shrunk(size: float | None, survival: Sequence[float] | None, first: int, block: int) -> float | None:
    if size is None or survival is None or not survival[first]:
        return None
    return size * survival[block] / survival[first]
