"""The cheapest plan of a strategy that holds a rate, by the planner's word and then by simulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from experiments.studies.sides import Workload, poisson, serve
from experiments.studies.study import Effort
from optimizer.decision import Planned, Strategy
from optimizer.plan import Stage
from optimizer.planner import solve
from optimizer.problem import MinimizeCost, PlanProblem
from simulator.sustained import SHARE

PRECISION = 0.004
"""Ratio, less 1, of the last two rates that the planner is asked for; one accelerator of 50 is five times that."""
STEP = 1.05
"""Of the first bracket."""
MOST = 4.0
"""Times the rate, or its inverse: what a plan for so much does not hold has none that does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a strategy needs for a rate."""

    proposed: Planned
    """The planner's plan for the rate."""
    proposed_share: float
    """Of inputs that were in time under it."""
    planned: Planned
    """The cheapest that held the rate, of the plans that the planner gives for rates near it."""
    share: float
    asked_per_s: float
    """What the planner was asked for to get it."""

    @property
    def usd_per_hour(self) -> float:
        return self.planned.figures.usd_per_hour

    @property
    def number(self) -> int:
        """Of accelerators."""
        return sum(stage.replicas for stage in self.planned.stages)

    def cells(self) -> tuple[str | float, ...]:
        """What it buys and what the planner proposed, each with USD per hour and the share in time."""
        pairs = ((self.planned, self.share), (self.proposed, self.proposed_share))
        return tuple(
            cell
            for planned, share in pairs
            for cell in (_told(planned.stages), planned.figures.usd_per_hour, f"{share:.1%}")
        )

    def document(self) -> dict[str, Any]:
        """Plain data."""
        return {
            **_bought(self.planned, self.share),
            "asked_per_s": self.asked_per_s,
            "stages": [
                [stage.device, stage.replicas, [[split.first, split.end, split.batch] for split in stage.splits]]
                for stage in self.planned.stages
            ],
            "planner": _bought(self.proposed, self.proposed_share),
        }


def _bought(planned: Planned, share: float) -> dict[str, Any]:
    return {
        "usd_per_hour": planned.figures.usd_per_hour,
        "accelerators": accelerators(planned.stages),
        "in_slo_share": share,
    }


def _told(stages: tuple[Stage, ...]) -> str:
    counts = sorted(accelerators(stages).items(), reverse=True)
    return " + ".join(f"{count} {device}" for device, count in counts)


def accelerators(stages: tuple[Stage, ...]) -> dict[str, int]:
    """Accelerators by type."""
    counts: dict[str, int] = {}
    for stage in stages:
        counts[stage.device] = counts.get(stage.device, 0) + stage.replicas
    return counts


def need(problem: PlanProblem, side: Strategy, inputs: Workload, effort: Effort, *, rate_per_s: float) -> Need | None:
    """Ask the planner for more where its plan does not hold the rate in simulation, and for less where it does.

    The cost model charges a whole batch of 1 for what is left of one, and knows no chance; simulation does neither.
    None where the planner has no plan for the rate, or none that holds it.
    """
    shares: dict[tuple[Stage, ...], float] = {}  # many rates have the same plan

    @cache
    def plan_for(asked_per_s: float) -> Planned | None:
        decision = solve(replace(problem, objective=MinimizeCost(rate_per_s=asked_per_s)), side)
        return decision if isinstance(decision, Planned) else None

    def share(planned: Planned) -> float:
        if planned.stages not in shares:
            outcome = serve(poisson(problem, planned, inputs, rate_per_s, effort))
            shares[planned.stages] = outcome.figures().in_slo_share
        return shares[planned.stages]

    def holds(asked_per_s: float) -> bool:
        planned = plan_for(asked_per_s)
        return planned is not None and share(planned) >= SHARE

    proposed, asked_per_s = plan_for(rate_per_s), least_that_holds(rate_per_s, holds)
    if proposed is None or asked_per_s is None:
        return None
    held = plan_for(asked_per_s)
    assert held is not None, "it was simulated"
    return Need(
        proposed=proposed,
        proposed_share=share(proposed),
        planned=held,
        share=share(held),
        asked_per_s=asked_per_s,
    )


def least_that_holds(rate_per_s: float, holds: Callable[[float], bool]) -> float | None:
    """The least rate to ask a planner for so that its plan holds another; None where nothing up to `MOST` times does.

    `holds`: whether the plan for a rate holds that other one.
    """
    low_per_s, high_per_s = _bracket(rate_per_s, holds)
    if high_per_s is None:
        return None
    while high_per_s / low_per_s > 1 + PRECISION:
        middle_per_s = (low_per_s * high_per_s) ** 0.5
        if holds(middle_per_s):
            high_per_s = middle_per_s
        else:
            low_per_s = middle_per_s
    return high_per_s


def _bracket(rate_per_s: float, holds: Callable[[float], bool]) -> tuple[float, float | None]:
    """A rate that does not do, and one that does."""
    asked_per_s, step = rate_per_s, STEP
    if holds(asked_per_s):
        while asked_per_s > rate_per_s / MOST and holds(asked_per_s / step):
            asked_per_s, step = asked_per_s / step, step**2
        return asked_per_s / step, asked_per_s
    while asked_per_s < rate_per_s * MOST:
        if holds(asked_per_s * step):
            return asked_per_s, asked_per_s * step
        asked_per_s, step = asked_per_s * step, step**2
    return asked_per_s, None
