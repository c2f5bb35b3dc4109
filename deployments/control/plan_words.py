"""Plans in one line, and plans beside others of their kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from optimizer.placement import PlacedPlan
from optimizer.plan import Plan


def plan_words(placed: PlacedPlan) -> str:
    """Such as `3 x V100 blocks 0-5 | 1 x P100 blocks 6-11, 812/s in 41 ms predicted`."""
    stages = " | ".join(
        f"{stage.replicas} x {stage.device} blocks {' and '.join(f'{first}-{end - 1}' for first, end in stage.ranges)}"
        for stage in placed.plan.stages
    )
    avoided = f", {len(placed.avoided)} replicas rest" if placed.avoided else ""
    return f"{stages}{_predicted_words(placed.plan.predicted)}{avoided}"


def predicted_rps(plan: Plan) -> float | None:
    """None for a plan that nobody predicted a rate of; what a plan carries is anybody's."""
    rate = plan.predicted.get("rate_per_s")
    return float(rate) if isinstance(rate, int | float) and rate > 0 else None


def with_epoch(placed: PlacedPlan, epoch: int) -> PlacedPlan:
    """The same plan as a later one."""
    return replace(placed, plan=replace(placed.plan, epoch=epoch))


def is_only_decided_otherwise(before: PlacedPlan, after: PlacedPlan) -> bool:
    """Whether two plans differ in what lets inputs leave, and in nothing that replicas would have to change for."""
    if before.plan.policy == after.plan.policy:
        return False
    here, there = ((each.slots, each.avoided, each.plan.stages, each.plan.dispatch) for each in (before, after))
    return here == there


def _predicted_words(figures: Mapping[str, Any]) -> str:
    rate, latency_s = figures.get("rate_per_s"), figures.get("latency_s")
    if not isinstance(rate, int | float) or not isinstance(latency_s, int | float):
        return ""
    return f", {rate:.4g}/s in {latency_s * 1e3:.3g} ms predicted"
