"""How many replicas the stages of a plan need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from optimizer.evaluate import evaluate
from optimizer.plan import Stage
from optimizer.problem import PlanProblem


def _needed(problem: PlanProblem, stages: Sequence[Stage]) -> list[float]:
    """Replicas per input a second, by stage."""
    figures = evaluate(problem, stages)
    return [
        stage.replicas / min(each.rate_per_s, each.hop_rate_per_s)
        for stage, each in zip(stages, figures.stages, strict=True)
    ]


def at_rate(problem: PlanProblem, stages: Sequence[Stage], rate_per_s: float) -> tuple[Stage, ...]:
    """The same stages with as many replicas as a rate needs, by work and by hops."""
    return tuple(
        replace(stage, replicas=max(1, math.ceil(rate_per_s * needed * (1 - 1e-9))))
        for stage, needed in zip(stages, _needed(problem, stages), strict=True)
    )


def fastest(problem: PlanProblem, chain: Sequence[Stage], rate_per_s: float) -> tuple[Stage, ...]:
    """The same stages at the highest rate that the devices and the budget allow."""
    low, high = rate_per_s, 2 * rate_per_s
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _fits(problem, at_rate(problem, chain, middle)) else (low, middle)
    return at_rate(problem, chain, low)


def _fits(problem: PlanProblem, chain: Sequence[Stage]) -> bool:
    usd = sum(stage.replicas * problem.devices[stage.device].usd_per_hour for stage in chain)
    if problem.budget_usd_per_hour is not None and usd > problem.budget_usd_per_hour:
        return False
    return all(
        sum(stage.replicas for stage in chain if stage.device == name) <= supply.count
        for name, supply in problem.devices.items()
    )
