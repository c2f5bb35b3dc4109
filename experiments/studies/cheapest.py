"""The cheapest plan of a strategy that holds a rate, by the planner's word and then by simulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from experiments.studies.offered import serve_poisson
from experiments.studies.sides import Workload
from experiments.studies.study import Effort
from optimizer.decision import NoPlan, Planned, Strategy
from optimizer.plan import Stage
from optimizer.planner import solve
from optimizer.problem import MinimizeCost, PlanProblem
from simulator.goodput import SHARE

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
        return sum(accelerators(self.planned.stages).values())

    def document(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "usd_per_hour": self.usd_per_hour,
            "accelerators": accelerators(self.planned.stages),
            "in_slo_share": self.share,
            "asked_per_s": self.asked_per_s,
            "stages": [
                [stage.device, stage.replicas, [[split.first, split.end, split.batch] for split in stage.splits]]
                for stage in self.planned.stages
            ],
            "planner": {
                "usd_per_hour": self.proposed.figures.usd_per_hour,
                "accelerators": accelerators(self.proposed.stages),
                "in_slo_share": self.proposed_share,
            },
        }


def accelerators(stages: tuple[Stage, ...]) -> dict[str, int]:
    """Accelerators by type."""
    counts: dict[str, int] = {}
    for stage in stages:
        counts[stage.device] = counts.get(stage.device, 0) + stage.replicas
    return counts


def need(
    problem: PlanProblem, side: Strategy, inputs: Workload, effort: Effort, *, rate_per_s: float, seed: int
) -> Need | None:
    """Ask the planner for more where its plan does not hold the rate in simulation, and for less where it does.

    The cost model charges a whole batch of 1 for what is left of one, and knows no chance; simulation does neither.
    None where the planner has no plan for the rate, or none that holds it.
    """
    search = Search(
        lambda asked_per_s: _cheapest(problem, side, asked_per_s),
        lambda planned: serve_poisson(problem, planned, inputs, rate_per_s, effort, seed=seed).in_slo_share,
    )
    first = search.plan_for(rate_per_s)
    asked_per_s = search.least_that_holds(rate_per_s)
    if first is None or asked_per_s is None:
        return None
    held = search.plan_for(asked_per_s)
    assert held is not None, "it was simulated"
    return Need(
        proposed=first,
        proposed_share=search.share(first),
        planned=held,
        share=search.share(held),
        asked_per_s=asked_per_s,
    )


def _cheapest(problem: PlanProblem, side: Strategy, rate_per_s: float) -> Planned | None:
    decision = solve(replace(problem, objective=MinimizeCost(rate_per_s=rate_per_s)), side)
    return None if isinstance(decision, NoPlan) else decision


class Search:
    """Which rate to ask a planner for, so that its plan holds another."""

    def __init__(self, plan_at: Callable[[float], Planned | None], share_in_time: Callable[[Planned], float]) -> None:
        self._plan_at = plan_at
        self._share_in_time = share_in_time
        self._plans: dict[float, Planned | None] = {}
        self._shares: dict[tuple[Stage, ...], float] = {}
        """Many rates have the same plan."""

    def plan_for(self, asked_per_s: float) -> Planned | None:
        """The planner's; None where it has none."""
        if asked_per_s not in self._plans:
            self._plans[asked_per_s] = self._plan_at(asked_per_s)
        return self._plans[asked_per_s]

    def share(self, planned: Planned) -> float:
        """Of inputs that are in time under a plan."""
        if planned.stages not in self._shares:
            self._shares[planned.stages] = self._share_in_time(planned)
        return self._shares[planned.stages]

    def least_that_holds(self, rate_per_s: float) -> float | None:
        """The least rate to ask for; None where nothing up to `MOST` times the rate holds it."""
        low_per_s, high_per_s = self._bracket(rate_per_s)
        if high_per_s is None:
            return None
        while high_per_s / low_per_s > 1 + PRECISION:
            middle_per_s = (low_per_s * high_per_s) ** 0.5
            if self._holds(middle_per_s):
                high_per_s = middle_per_s
            else:
                low_per_s = middle_per_s
        return high_per_s

    def _bracket(self, rate_per_s: float) -> tuple[float, float | None]:
        """A rate that does not do, and one that does."""
        asked_per_s, step = rate_per_s, STEP
        if self._holds(asked_per_s):
            while asked_per_s > rate_per_s / MOST and self._holds(asked_per_s / step):
                asked_per_s, step = asked_per_s / step, step**2
            return asked_per_s / step, asked_per_s
        while asked_per_s < rate_per_s * MOST:
            if self._holds(asked_per_s * step):
                return asked_per_s, asked_per_s * step
            asked_per_s, step = asked_per_s * step, step**2
        return asked_per_s, None

    def _holds(self, asked_per_s: float) -> bool:
        planned = self.plan_for(asked_per_s)
        return planned is not None and self.share(planned) >= SHARE
