"""From snapshots to what the page shows: rates and percentiles are differences of counts. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from deployments.controller.intake import Interval, ReplicaIntake, latency_s, network_figures
from deployments.ops.dashboard.snapshot import ServiceFacts, Snapshot, between, under_present_plan, within
from deployments.wire.messages import ReplicaReport
from earlyexit.engine.times import TimesRun
from earlyexit.network.split import Split
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
    """Whether no input leaves by the thresholds, and the number of alarms; None where thresholds do not change."""
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


SCHEMA = 4
"""Of the state; a page that was loaded from another version is told to load anew."""
RATES_S = 10.0
"""Rates and percentiles are those of so many seconds."""
SHARES_S = 60.0
"""Exits, survival and batch sizes those of so many, since they need more inputs; the longest that is remembered."""
SHARES = {"p50_s": 0.5, "p90_s": 0.9, "p99_s": 0.99}


def page_state(facts: ServiceFacts, snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    """Everything that the page draws, as plain data; `snapshots` in order, at least one."""
    now = snapshots[-1]
    recent = between(within(snapshots, RATES_S)[0], now)
    shares = between(under_present_plan(within(snapshots, SHARES_S))[0], now)
    survival = observed_survival(shares, facts.chain.num_blocks)
    return {
        "schema": SCHEMA,
        "at_s": now.at_s,
        "service": _service(facts, now),
        "now": _now(now, recent),
        "totals": _totals(now),
        "drops": _drops(now, recent),
        "plan": plan_state(facts, under_present_plan(within(snapshots, SHARES_S))),
        "blocks": blocks_state(under_present_plan(within(snapshots, SHARES_S)), survival),
        "exits": _exits(facts, now, shares),
        "early": _early(shares, survival, now),
        "networks": network_figures(facts.chain, now.placed.plan.used, shares),
        "survival": _survival(now, survival),
        "agreement": _agreement(now),
        "changes": changes_state(now.history, now.described),
    }


def observed_survival(seen: Interval | None, num_blocks: int) -> list[float] | None:
    """Per block, the share of answers that went into it, by the ramps that are active; None without answers."""
    if seen is None or not (total := sum(seen.exits.values())):
        return None
    return [sum(count for exit_, count in seen.exits.items() if exit_ >= block) / total for block in range(num_blocks)]


def _service(facts: ServiceFacts, now: Snapshot) -> dict[str, Any]:
    return {
        "model": facts.model,
        "num_blocks": facts.chain.num_blocks,
        "slo_s": facts.slo_s,
        "generates": facts.generates,
        "image": facts.image,
        "ingresses": len(now.ingresses),
        "epoch": now.placed.epoch,
        "suspended": now.suspended,
        "controller": now.controller,
    }


def _now(now: Snapshot, seen: Interval | None) -> dict[str, Any]:
    latencies = {} if seen is None else seen.latencies
    return {
        "seconds": None if seen is None else seen.seconds,
        "arrived_per_s": None if seen is None else seen.arrived / seen.seconds,
        "answered_per_s": None if seen is None else seen.answered / seen.seconds,
        "goodput_per_s": None if seen is None else seen.in_slo / seen.seconds,
        **{name: latency_s(latencies, share) for name, share in SHARES.items()},
        "unanswered": sum(report.unanswered for report in now.ingresses),
        "waiting": sum(report.waiting for report in now.ingresses),
        "waiting_in_stages": sum(report.waiting for report in now.replicas),
    }


def _totals(now: Snapshot) -> dict[str, int]:
    return {name: sum(getattr(report, name) for report in now.ingresses) for name in ("arrived", "answered", "in_slo")}


def _drops(now: Snapshot, seen: Interval | None) -> list[dict[str, Any]]:
    """By reason, most frequent first."""
    totals: Counter[str] = Counter()
    for report in now.ingresses:
        totals.update(report.drops)
    recent = {} if seen is None else seen.drops
    seconds = 1.0 if seen is None else seen.seconds
    return [
        {"reason": reason, "total": total, "per_s": recent.get(reason, 0) / seconds}
        for reason, total in sorted(totals.items(), key=lambda item: (-item[1], item[0]))
    ]


def _exits(facts: ServiceFacts, now: Snapshot, seen: Interval | None) -> list[dict[str, Any]]:
    """Every place where inputs may leave: active ramps and the end, and what else answers left after."""
    exits = {} if seen is None else seen.exits
    total = sum(exits.values())
    ramps = set(now.placed.plan.ramps)
    return [
        {
            "block": block,
            "kind": "ramp" if block in ramps else "end" if block == facts.chain.num_blocks - 1 else "inactive ramp",
            "network": facts.chain.name_of(block),
            "answers": exits.get(block, 0),
            "share": exits.get(block, 0) / total if total else None,
        }
        for block in sorted(ramps | set(exits) | {facts.chain.num_blocks - 1})
    ]


def _early(seen: Interval | None, survival: list[float] | None, now: Snapshot) -> dict[str, float | None]:
    """The share of answers that were given before the end, and the blocks that an answer takes, on average."""
    if seen is None or survival is None:
        return {"share": None, "mean_blocks": None}
    at_end = seen.exits.get(len(survival) - 1, 0) / sum(seen.exits.values())
    run = (sum(survival[split.first : split.end]) for split in now.placed.plan.splits)  # not what a plan leaves out
    return {"share": 1 - at_end, "mean_blocks": sum(run)}


def _survival(now: Snapshot, answers: list[float] | None) -> dict[str, Any]:
    """What was forecast and what probes saw is of all ramps, whether active or not; answers know the active ones."""
    described = now.described or {}
    forecast = described.get("forecast") or {}
    observed = described.get("observed") or {}
    return {
        "forecast": forecast.get("survival"),
        "low": forecast.get("survival_low"),
        "high": forecast.get("survival_high"),
        "how": forecast.get("how"),
        "probes": observed.get("survival"),
        "answers": answers,
    }


def _agreement(now: Snapshot) -> dict[str, Any]:
    observed = (now.described or {}).get("observed")
    if observed is None:
        return {"value": now.agreement, "budget": None, "within": None, "inputs_seen": None, "pruned": None}
    return {
        "value": observed["agreement"],
        "budget": observed["accuracy_budget"],
        "within": observed["within_budget"],
        "inputs_seen": observed["inputs_seen"],
        "pruned": observed["pruned_agreement"],
    }


IN_FORCE = "in force"


def changes_state(history: Sequence[Mapping[str, Any]], described: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Newest first, as the history is; the plan in force has no figures of its own yet, so those observed are its."""
    return [_change(row, described) for row in history]


def _change(row: Mapping[str, Any], described: Mapping[str, Any] | None) -> dict[str, Any]:
    """What it was expected to gain is in the verdict's words: plans before were predicted for another survival."""
    predicted = row["placed"].get("plan", {}).get("predicted") or {}
    is_present = row["outcome"] == IN_FORCE and described is not None and described.get("epoch") == row["epoch"]
    gained = _so_far(described) if is_present and row["gained"] is None else _measured(row["gained"])
    return {
        "epoch": row["epoch"],
        "at_s": row["at_s"],
        "outcome": row["outcome"],
        "is_present": is_present,
        "reason": row["reason"],
        "words": row["words"],
        "expected_per_s": predicted.get("rate_per_s"),
        "expected_latency_s": predicted.get("latency_s"),
        **gained,
    }


def _measured(gained: Mapping[str, Any] | None) -> dict[str, Any]:
    measured = gained or {}
    return {
        "goodput_per_s": measured.get("goodput_rps"),
        "offered_per_s": measured.get("offered_rps"),
        "dropped": measured.get("dropped"),
        "seconds": measured.get("seconds"),
    }


def _so_far(described: Mapping[str, Any] | None) -> dict[str, Any]:
    observed = (described or {}).get("observed") or {}
    return {
        "goodput_per_s": observed.get("goodput_per_s"),
        "offered_per_s": observed.get("rate_per_s"),
        "dropped": sum((observed.get("drops") or {}).values()),
        "seconds": observed.get("seconds"),
    }
