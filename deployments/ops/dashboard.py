"""The state of the live page: rates and percentiles, computed from differences between the counts of all processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from deployments.controller.intake import IngressIntake, latency_s, ran_since
from deployments.settings import ServeSettings
from deployments.wire.messages import IngressReport, Interval, ReplicaReport
from earlyexit.codecs.base import Codec
from earlyexit.engine.engine import TimesRun
from earlyexit.network.boundary import Split
from earlyexit.network.chain import Chain
from earlyexit.network.store import ModelCard
from optimizer.plans.plan import PlacedPlan, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFacts:
    """Facts that stay the same while a service runs."""

    card: ModelCard
    settings: ServeSettings
    image: Mapping[str, Any] | None = None
    """For image models: how images are resized, and the accepted file types; None for other models."""


def image_facts(codec: Codec[Any]) -> Mapping[str, Any] | None:
    """Returns the facts that the page needs to show an image as the model sees it; None for other models."""
    codec = codec.of(0)  # callers send the inputs of a chain's first network
    return {**codec.spec(), "types": codec.content_types} if codec.name == "image" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The service at one moment: the counts of all processes, which only grow, and the controller's last report."""

    at_s: float
    """Seconds since 1970."""
    placed: PlacedPlan
    """The plan that the polling ingress follows."""
    suspended: str | None
    """The reason why no requests are served; None if requests are served."""
    ingresses: Sequence[IngressReport]
    """Empty if the ingresses did not answer. There are no figures then."""
    replicas: Sequence[ReplicaReport]
    """The replicas of the plan's slots."""
    controller: Literal["none", "answers", "silent"]
    """`none`: there is no controller. `silent`: it does not answer, and its last report is shown."""
    described: Mapping[str, Any] | None
    """The document of `GET /plan`; None without a controller, or if it never answered."""
    history: Sequence[Mapping[str, Any]] = ()
    """The rows of `GET /plan/history`."""
    agreement: float | None
    """The agreement of the probes of the polling ingress."""


def within(snapshots: Sequence[Snapshot], seconds: float) -> Sequence[Snapshot]:
    """Returns the snapshots of the last seconds before the newest, in order."""
    return [each for each in snapshots if each.at_s >= snapshots[-1].at_s - seconds]


def under_present_plan(snapshots: Sequence[Snapshot]) -> Sequence[Snapshot]:
    """Returns the snapshots under the plan of the newest one."""
    return [each for each in snapshots if each.placed.epoch == snapshots[-1].placed.epoch]


def between(before: Snapshot, now: Snapshot) -> Interval | None:
    """Returns the counts of all ingresses between two snapshots; None without reports, or if no time passed."""
    if not before.ingresses or now.at_s <= before.at_s:
        return None
    intake = IngressIntake()
    intake.take(before.ingresses, before.at_s)
    return intake.take(now.ingresses, now.at_s)


MOST_REPLICAS = 64
"""Most replicas of a stage that are shown one by one; further ones are only counted."""
Ran = Mapping[str, Sequence[TimesRun]]
"""The batches that each replica ran during the snapshots."""


def plan_state(facts: ServiceFacts, snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    """Returns the newest plan and its figures during the snapshots, which must all be of that plan."""
    now, before = snapshots[-1], {report.replica: report for report in snapshots[0].replicas}
    ran = {report.replica: ran_since(before.get(report.replica), report) for report in now.replicas}
    seconds = now.at_s - snapshots[0].at_s
    return {
        "epoch": now.placed.epoch,
        "policy": None if now.placed.plan.policy is None else now.placed.plan.policy.name,
        "dispatch": now.placed.plan.dispatch,
        "order": now.placed.plan.order.name,
        "after_answer": now.placed.plan.after_answer,
        "overlap_below": now.placed.plan.overlap_below,
        "predicted": dict(now.placed.plan.predicted),
        "stages": [_stage(facts, now, slot, stage, ran, seconds) for slot, stage in now.placed.stage_of.items()],
    }


def blocks_state(plan: Mapping[str, Any], survival: Sequence[float] | None) -> list[dict[str, Any]]:
    """Returns the mean batch size at each block of a plan (`plan_state`), with fusing and without.

    With fusing, it is the mean batch of the split, less the inputs that left at the split's earlier ramps. Without, it
    is b * s(k) / s(0), where b is the mean batch of the first split and s the observed survival (1 if inputs continue
    after their answer).
    """
    if survival is not None and plan["after_answer"] == "stay":
        survival = [1.0] * len(survival)
    splits = [split for stage in plan["stages"] for split in stage["splits"]]
    return [
        {
            "block": block,
            "target": split["batch"],
            "is_first": block == split["first"],
            "fused": _shrunk(split, survival, block),
            "unfused": _shrunk(splits[0], survival, block),
        }
        for split in splits
        for block in range(split["first"], split["end"])
    ]


def _stage(facts: ServiceFacts, now: Snapshot, slot: str, stage: Stage, ran: Ran, seconds: float) -> dict[str, Any]:
    replicas = sorted((each for each in now.replicas if each.slot == slot), key=lambda each: each.replica)
    emulated = facts.settings.emulated.get(stage.device)
    return {
        "slot": slot,
        "device": stage.device,
        "time_scale": None if emulated is None else emulated.time_scale,
        "first": stage.first,
        "end": stage.end,
        "wanted": stage.replicas,
        "running": len(replicas),
        "waiting": sum(report.waiting for report in replicas),
        "splits": [_split(facts, now, slot, split, ran, seconds) for split in stage.splits],
        "replicas": [_replica(now, report, ran, seconds) for report in replicas[:MOST_REPLICAS]],
    }


def _split(facts: ServiceFacts, now: Snapshot, slot: str, split: Split, ran: Ran, seconds: float) -> dict[str, Any]:
    replicas = [report.replica for report in now.replicas if report.slot == slot]
    times = [each for replica in replicas for each in ran[replica] if each.is_of(split)]
    batches = sum(each.batches for each in times)
    size = sum(each.batches * each.size for each in times) / batches if batches else None
    size_tokens = sum(each.tokens for each in times) / batches if batches else None
    return {
        "first": split.first,
        "end": split.end,
        "network": facts.card.chain.name_of(split.first),
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
        "rests": report.replica in now.placed.avoided,
    }


def _shrunk(split: Mapping[str, Any], survival: Sequence[float] | None, block: int) -> float | None:
    """Returns the mean batch of a split, less the inputs that left before a block; None if either is unknown."""
    if split["size"] is None or survival is None or not survival[split["first"]]:
        return None
    size: float = split["size"] * survival[block] / survival[split["first"]]
    return size


SCHEMA = 5
"""The version of the state's format. Pages of another version reload."""
RATES_S = 10.0
"""The window of rates and percentiles, in seconds."""
SHARES_S = 60.0
"""The window of exits, survival and batch sizes, which need more inputs. Older snapshots are dropped."""
SHARES = {"p50_s": 0.5, "p90_s": 0.9, "p99_s": 0.99}
TOTALS = ("arrived", "answered", "in_slo")


def page_state(facts: ServiceFacts, snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    """Returns the page's state as plain data. `snapshots` are in order, at least one."""
    now = snapshots[-1]
    recent = between(within(snapshots, RATES_S)[0], now)
    shares = between(under_present_plan(within(snapshots, SHARES_S))[0], now)
    survival = observed_survival(shares, facts.card.chain.num_blocks)
    plan = plan_state(facts, under_present_plan(within(snapshots, SHARES_S)))
    return {
        "schema": SCHEMA,
        "at_s": now.at_s,
        "service": _service(facts, now),
        "now": _now(now, recent),
        "totals": {name: sum(getattr(each, name) for each in now.ingresses) for name in TOTALS},
        "drops": _drops(now, recent),
        "plan": plan,
        "blocks": blocks_state(plan, survival),
        "exits": _exits(facts, now, shares),
        "early": _early(shares, survival, now),
        "networks": _networks(facts.card.chain, now.placed.plan.used, shares),
        "survival": survival,
        "agreement": now.agreement,
        "described": now.described,
        "history": [
            {**row, "placed": None, "predicted": row["placed"].get("plan", {}).get("predicted", {})}
            for row in now.history
        ],
    }


def observed_survival(seen: Interval | None, num_blocks: int) -> list[float] | None:
    """Returns the share of answers that reached each block, with the active ramps; None without answers."""
    total = 0 if seen is None else sum(seen.exits.values())
    if seen is None or not total:
        return None
    return [sum(count for exit_, count in seen.exits.items() if exit_ >= block) / total for block in range(num_blocks)]


def _service(facts: ServiceFacts, now: Snapshot) -> dict[str, Any]:
    return {
        "model": facts.card.name,
        "num_blocks": facts.card.chain.num_blocks,
        "slo_s": facts.settings.slo_s,
        "generates": facts.card.generates,
        "image": facts.image,
        "ingresses": len(now.ingresses),
        "epoch": now.placed.epoch,
        "suspended": now.suspended,
        "controller": now.controller,
    }


def _now(now: Snapshot, seen: Interval | None) -> dict[str, Any]:
    rates = {"arrived_per_s": "arrived", "answered_per_s": "answered", "goodput_per_s": "in_slo"}
    return {
        "seconds": None if seen is None else seen.seconds,
        **{name: None if seen is None else getattr(seen, count) / seen.seconds for name, count in rates.items()},
        **{name: latency_s({} if seen is None else seen.latencies, share) for name, share in SHARES.items()},
        "unanswered": sum(report.unanswered for report in now.ingresses),
        "waiting": sum(report.waiting for report in now.ingresses),
        "waiting_in_stages": sum(report.waiting for report in now.replicas),
    }


def _drops(now: Snapshot, seen: Interval | None) -> list[dict[str, Any]]:
    """Returns the drops by reason, most frequent first."""
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
    """Returns each exit: active ramps, the end, and inactive ramps at which answers left."""
    exits = {} if seen is None else seen.exits
    total = sum(exits.values())
    ramps, chain = set(now.placed.plan.ramps), facts.card.chain
    last = chain.num_blocks - 1
    return [
        {
            "block": block,
            "kind": "ramp" if block in ramps else "end" if block == last else "inactive ramp",
            "network": chain.name_of(block),
            "answers": exits.get(block, 0),
            "share": exits.get(block, 0) / total if total else None,
        }
        for block in sorted(ramps | set(exits) | {last})
    ]


def _early(seen: Interval | None, survival: list[float] | None, now: Snapshot) -> dict[str, float | None]:
    """Returns the share of early answers, and the mean number of blocks per answer."""
    if seen is None or survival is None:
        return {"share": None, "mean_blocks": None}
    at_end = seen.exits.get(len(survival) - 1, 0) / sum(seen.exits.values())
    run = (sum(survival[split.first : split.end]) for split in now.placed.plan.splits)  # without skipped networks
    return {"share": 1 - at_end, "mean_blocks": sum(run)}


def _networks(chain: Chain, used: Collection[int], seen: Interval | None) -> list[dict[str, Any]]:
    """Returns one row per network of a cascade; no rows for a single network.

    `used`: the positions of the networks that the plan uses. Shares are of the answers under the current plan, and None
    before the first answer.
    """
    seen = seen or Interval(since_s=0.0, at_s=0.0)
    positions = () if chain.is_one else range(len(chain.names))
    return [_network(chain, network, network in used, seen) for network in positions]


def _network(chain: Chain, network: int, is_used: bool, seen: Interval) -> dict[str, Any]:
    first, end = chain.starts[network], chain.bounds[network]
    answers = sum(count for block, count in seen.exits.items() if first <= block < end)
    reached = sum(count for block, count in seen.exits.items() if block >= first)
    total = sum(seen.exits.values())
    crossings, words = seen.crossings.get(first, 0), seen.words.get(first, 0)
    return {
        "name": chain.names[network],
        "first": first,
        "end": end,
        "used": is_used,
        "answers": answers,
        "share": answers / total if total else None,
        "returned": answers / reached if reached and is_used else None,
        "crossings_per_s": crossings / seen.seconds if seen.seconds else None,
        "crossing_s": seen.crossing_s.get(first, 0.0) / crossings if crossings else None,
        "pruned_words": seen.pruned_words.get(first, 0) / words if words else None,
    }
