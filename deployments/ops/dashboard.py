"""The state of the live page: rates and percentiles, computed from differences between the counts of all processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from deployments.settings import ServeSettings
from deployments.wire.messages import IngressReport, Interval, ReplicaReport, counts_between, latency_s, ran_since
from earlyexit.codecs.base import Codec
from earlyexit.engine.engine import TimesRun
from earlyexit.network.boundary import Split
from earlyexit.network.chain import ModelChain
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
    """Returns the last seconds' snapshots in order, without those from before the clock was set back."""
    return [each for each in snapshots if 0 <= snapshots[-1].at_s - each.at_s <= seconds]


def _between(before: Snapshot, now: Snapshot) -> Interval:
    """Returns the counts of all ingresses between two snapshots; none in 0 s without reports, or if no time passed."""
    earlier = {report.name: report for report in before.ingresses}
    seen = counts_between(earlier, now.ingresses, before.at_s, now.at_s)
    return seen or Interval(since_s=now.at_s, at_s=now.at_s)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


MOST_REPLICAS = 64
"""Most replicas of a stage that are shown one by one; further ones are only counted."""
Ran = Mapping[str, Sequence[TimesRun]]
"""The batches that each replica ran during the snapshots."""


def plan_state(facts: ServiceFacts, snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    """Returns the newest plan and its figures during the snapshots, which must all be of that plan."""
    now, reports = snapshots[-1], [report for each in reversed(snapshots) for report in each.replicas]
    before = {report.replica: report for report in reports}  # the earliest, as a replica may not always answer
    ran = {report.replica: ran_since(before.get(report.replica), report) for report in now.replicas}
    placed, seconds = now.placed, now.at_s - snapshots[0].at_s
    chain_of_stage = [number for number, chain in enumerate(placed.plan.chains) for _ in chain.stages]
    return {
        "epoch": placed.epoch,
        "policy": None if placed.plan.policy is None else placed.plan.policy.name,
        "dispatch": placed.plan.dispatch,
        "order": placed.plan.order.name,
        "after_answer": placed.plan.after_answer,
        "predicted": dict(placed.plan.predicted),
        "chains": _chains(snapshots),
        "stages": [
            {"chain": chain, **_stage(facts, now, slot, stage, ran, seconds)}
            for chain, (slot, stage) in zip(chain_of_stage, placed.stage_of.items(), strict=True)
        ],
    }


def _chains(snapshots: Sequence[Snapshot]) -> list[dict[str, Any]]:
    """Returns each chain's planned share, its share of the inputs that ended during the snapshots, and its load."""
    now, plan = snapshots[-1], snapshots[-1].placed.plan
    seen = _between(snapshots[0], now).assigned
    following = [each.chains for each in now.ingresses if each.epoch == plan.epoch and each.chains]
    return [
        {
            "planned": planned,
            "share": _ratio(seen.get(chain, 0), sum(seen.values())),
            **{name: sum(getattr(each[chain], name) for each in following) for name in ("unanswered", "cost", "limit")},
        }
        for chain, planned in enumerate(plan.shares)
    ]


def blocks_state(plan: Mapping[str, Any], survival: Sequence[float] | None) -> list[dict[str, Any]]:
    """Returns the mean batch size at each block of a plan (`plan_state`), with fusing and without.

    With fusing, it is the mean batch of the split, less the inputs that left at the split's earlier ramps. Without, it
    is b * s(k) / s(0), where b is the mean batch of the chain's first split and s the observed survival (1 if inputs
    continue after their answer). All chains have the same survival here, because it is not observed for each chain.
    """
    if survival is not None and plan["after_answer"] == "stay":
        survival = [1.0] * len(survival)
    splits = [(stage["chain"], split) for stage in plan["stages"] for split in stage["splits"]]
    first_of = dict(reversed(splits))
    return [
        {
            "chain": chain,
            "block": block,
            "target": split["batch"],
            "is_first": block == split["first"],
            "fused": _shrunk(split, survival, block),
            "unfused": _shrunk(first_of[chain], survival, block),
        }
        for chain, split in splits
        for block in range(split["first"], split["end"])
    ]


def _shrunk(split: Mapping[str, Any], survival: Sequence[float] | None, block: int) -> float | None:
    """Returns the mean batch of a split, less the inputs that left before a block; None if either is unknown."""
    if split["size"] is None or survival is None:
        return None
    return _ratio(split["size"] * survival[block], survival[split["first"]])


def _stage(facts: ServiceFacts, now: Snapshot, slot: str, stage: Stage, ran: Ran, seconds: float) -> dict[str, Any]:
    replicas = sorted((each for each in now.replicas if each.slot == slot), key=lambda each: each.replica)
    times = [each for report in replicas for each in ran[report.replica]]
    emulated = facts.settings.emulated.get(stage.device)
    return {
        "device": stage.device,
        "time_scale": None if emulated is None else emulated.time_scale,
        "first": stage.first,
        "end": stage.end,
        "wanted": stage.replicas,
        "running": len(replicas),
        "waiting": sum(report.waiting for report in replicas),
        "splits": [
            _split(split, facts.card.chain.name_of(split.first), [each for each in times if each.is_of(split)], seconds)
            for split in stage.splits
        ],
        "replicas": [
            {
                "name": report.replica,
                "node": report.node,
                "pid": report.pid,
                "epoch": report.epoch,
                "waiting": report.waiting,
                "busy": min(1.0, sum(each.seconds for each in ran[report.replica]) / seconds) if seconds else None,
                "rests": report.replica in now.placed.avoided,
            }
            for report in replicas[:MOST_REPLICAS]
        ],
    }


def _split(split: Split, network: str, times: Sequence[TimesRun], seconds: float) -> dict[str, Any]:
    batches = sum(each.batches for each in times)
    size = _ratio(sum(each.batches * each.size for each in times), batches)
    size_tokens = _ratio(sum(each.tokens for each in times), batches)
    return {
        "first": split.first,
        "end": split.end,
        "network": network,
        "batch": split.batch,
        "tokens": split.tokens,
        "ramps": list(split.ramps),
        "size": size,
        "size_tokens": size_tokens,
        "fill": None if size is None else size / split.batch,
        "token_fill": None if size_tokens is None or split.tokens is None else size_tokens / split.tokens,
        "batches_per_s": _ratio(batches, seconds),
    }


SCHEMA = 6
"""The version of the state's format. Pages of another version reload."""
RATES_S = 10.0
"""The window of rates and percentiles, in seconds."""
SHARES_S = 60.0
"""The window of exits, survival and batch sizes, which need more inputs. Older snapshots are dropped."""
SHARES = {"p50_s": 0.5, "p90_s": 0.9, "p99_s": 0.99}
RATES = {"arrived_per_s": "arrived", "answered_per_s": "answered", "goodput_per_s": "in_slo"}


def page_state(facts: ServiceFacts, snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    """Returns the page's state as plain data. `snapshots` are in order, at least one."""
    now, chain = snapshots[-1], facts.card.chain
    recent = _between(within(snapshots, RATES_S)[0], now)
    of_plan = [each for each in within(snapshots, SHARES_S) if each.placed.epoch == now.placed.epoch]
    seen, used = _between(of_plan[0], now), now.placed.plan.used
    plan, answers = plan_state(facts, of_plan), sum(seen.exits.values())
    survival = [_reached(seen, block) / answers for block in range(chain.num_blocks)] if answers else None
    early: dict[str, float | None] = {"share": None, "mean_blocks": None}
    if survival is not None:  # blocks of skipped networks do not count
        chains = zip(now.placed.plan.shares, now.placed.plan.chains, strict=True)
        run = (share * sum(survival[each.first : each.end]) for share, own in chains for each in own.splits)
        early = {"share": 1 - seen.exits.get(chain.num_blocks - 1, 0) / answers, "mean_blocks": sum(run)}
    networks = () if chain.is_one else range(len(chain.names))
    return {
        "schema": SCHEMA,
        "at_s": now.at_s,
        "service": {
            "model": facts.card.name,
            "num_blocks": chain.num_blocks,
            "slo_s": facts.settings.slo_s,
            "generates": facts.card.generates,
            "image": facts.image,
            "ingresses": len(now.ingresses),
            "epoch": now.placed.epoch,
            "suspended": now.suspended,
            "controller": now.controller,
        },
        "now": {
            "seconds": recent.seconds or None,
            **{name: _ratio(getattr(recent, count), recent.seconds) for name, count in RATES.items()},
            **{name: latency_s(recent.latencies, share) for name, share in SHARES.items()},
            "unanswered": sum(report.unanswered for report in now.ingresses),
            "waiting": sum(report.waiting for report in now.ingresses),
            "waiting_in_stages": sum(report.waiting for report in now.replicas),
        },
        "totals": {name: sum(getattr(each, name) for each in now.ingresses) for name in RATES.values()},
        "drops": _drops(now, recent),
        "plan": plan,
        "blocks": blocks_state(plan, survival),
        "exits": _exits(chain, now.placed.plan.ramps, seen),
        "early": early,
        "networks": [_network(chain, network, network in used, seen) for network in networks],
        "survival": survival,
        "agreement": now.agreement,
        "described": now.described,
        "history": [
            {**row, "placed": None, "predicted": row["placed"].get("plan", {}).get("predicted", {})}
            for row in now.history
        ],
    }


def _reached(seen: Interval, block: int) -> int:
    """Returns the number of answers that reached a block, with the active ramps."""
    return sum(count for exit_, count in seen.exits.items() if exit_ >= block)


def _drops(now: Snapshot, recent: Interval) -> list[dict[str, Any]]:
    """Returns the drops by reason, most frequent first."""
    totals = sum((Counter(report.drops) for report in now.ingresses), Counter[str]())
    return [
        {"reason": reason, "total": total, "per_s": recent.drops.get(reason, 0) / (recent.seconds or 1.0)}
        for reason, total in sorted(totals.items(), key=lambda item: (-item[1], item[0]))
    ]


def _exits(chain: ModelChain, ramps: Collection[int], seen: Interval) -> list[dict[str, Any]]:
    """Returns each exit: active ramps, the end, and inactive ramps at which answers left."""
    total, last = sum(seen.exits.values()), chain.num_blocks - 1
    return [
        {
            "block": block,
            "kind": "ramp" if block in ramps else "end" if block == last else "inactive ramp",
            "network": chain.name_of(block),
            "answers": seen.exits.get(block, 0),
            "share": _ratio(seen.exits.get(block, 0), total),
        }
        for block in sorted({*ramps, *seen.exits, last})
    ]


def _network(chain: ModelChain, network: int, is_used: bool, seen: Interval) -> dict[str, Any]:
    """Returns the figures of a network of a cascade. Shares are of the answers under the current plan."""
    first, end = chain.starts[network], chain.bounds[network]
    reached, crossings = _reached(seen, first), seen.crossings.get(first, 0)
    answers = reached - _reached(seen, end)
    return {
        "name": chain.names[network],
        "first": first,
        "end": end,
        "used": is_used,
        "answers": answers,
        "share": _ratio(answers, sum(seen.exits.values())),
        "returned": _ratio(answers, reached) if is_used else None,
        "crossings_per_s": _ratio(crossings, seen.seconds),
        "crossing_s": _ratio(seen.crossing_s.get(first, 0.0), crossings),
        "pruned_words": _ratio(seen.pruned_words.get(first, 0), seen.words.get(first, 0)),
    }
