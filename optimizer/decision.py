"""What a planner answers: a plan with its proof, or why there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from optimizer.evaluate import Evaluation, evaluate, objective_value, violations
from optimizer.plan import Stage
from optimizer.problem import ANY_LATENCY_S, MinimizeLatency, PlanProblem

Strategy = Literal["best", "stock", "early-exit", "e3", "serial", "apparate", "pame"]
STRATEGIES: tuple[Strategy, ...] = ("best", "stock", "early-exit", "e3", "serial")
"""`best` searches the whole space of plans; the others are parts of it that people deploy today, or E3's."""


def strategies_for(problem: PlanProblem) -> tuple[Strategy, ...]:
    """What a problem's plans are compared with: Apparate's as well, where early answers are what is sought.

    And PAME's, where the distribution of batches is known besides.
    """
    if not isinstance(problem.objective, MinimizeLatency):
        return STRATEGIES
    return (*STRATEGIES, "apparate") if problem.batches is None else (*STRATEGIES, "apparate", "pame")


Binding = Literal["devices", "budget", "latency", "ramps", "ttft", "sequences", "memory"]
"""The last three of generation: its first tokens, sequences at a time, and memory of keys and values."""
Possible = TypeVar("Possible")
SLO_RESOLUTION = 1e-3
"""How exactly the nearest SLO is told where plans are found quickly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeasiblePlan:
    """A plan that keeps every promise, and its figures."""

    stages: tuple[Stage, ...]
    """Stages of all chains, one chain after the other."""
    figures: Evaluation

    def planned(
        self, problem: PlanProblem, strategy: Strategy, bound: float, others: Iterable[tuple[Stage, ...]] = ()
    ) -> Planned:
        """The plan as the best of a strategy's space, of which no plan is better than `bound`."""
        return Planned(
            strategy=strategy,
            stages=self.stages,
            figures=self.figures,
            bound=bound,
            gap=gap_between(objective_value(problem, self.figures), bound),
            candidates=tuple(dict.fromkeys(each for each in others if each != self.stages)),
        )


def if_feasible(problem: PlanProblem, stages: tuple[Stage, ...], shares: Sequence[float] = ()) -> FeasiblePlan | None:
    """The plan with its figures, if it keeps every promise; `shares` as `evaluate` takes them."""
    figures = evaluate(problem, stages, shares=shares)
    return None if violations(problem, stages, figures) else FeasiblePlan(stages=stages, figures=figures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The best plan of a strategy's space."""

    strategy: Strategy
    stages: tuple[Stage, ...]
    """Of all chains, one chain after the other."""
    figures: Evaluation
    bound: float
    """No plan of the space is better than this: a rate per second, USD per hour, or seconds."""
    gap: float
    """How far the plan may be from the best, as a share of the bound; 0 where it is proven best."""
    candidates: tuple[tuple[Stage, ...], ...] = ()
    """Other good plans, best first: what joint exit records may prefer."""
    note: str = ""
    """What else is to say of it in a line, such as why it has no exit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPlan:
    """No plan of the strategy's space meets the problem."""

    strategy: Strategy
    binding: Binding
    """Which promise cannot be kept; the figures below say what would do, the others unchanged."""
    nearest_slo_s: float | None = None
    """The least SLO latency that has a plan; None where none has."""
    highest_rate_per_s: float | None = None
    """The highest rate that has a plan; None where none has or the rate is what is sought."""
    more: tuple[str, int] | None = None
    """An accelerator type, and how many more of it are needed at least (`optimizer.planner.more_devices`)."""


Decision = Planned | NoPlan


def gap_between(value: float, bound: float) -> float:
    """How far a plan is from a bound, as a share of it."""
    return abs(value - bound) / bound if bound else float(value > 0)


Relaxed = tuple[Binding, Callable[[PlanProblem], PlanProblem]]
"""A promise, and the same problem without it."""


def without_budget(problem: PlanProblem) -> PlanProblem:
    """Money is no object."""
    return replace(problem, budget_usd_per_hour=None)


def why_infeasible(
    problem: PlanProblem,
    strategy: Strategy,
    *,
    possible: Callable[[PlanProblem], Possible | None],
    nearest_slo_s: Callable[[Possible], float | None],
    highest_rate_per_s: Callable[[PlanProblem], float | None],
    relaxed: Sequence[Relaxed] = (("budget", without_budget),),
) -> NoPlan:
    """Which promise cannot be kept: the latency, where there is a plan at any; else the last that has to be `relaxed`.

    They are relaxed one after the other, and stay so. `possible` tells of a problem whether it has plans, None for
    none, and `nearest_slo_s` goes on from what it said. Where a rate is asked for, `highest_rate_per_s` is the highest
    that has a plan.
    """
    rate_per_s = None if problem.required_per_s is None else highest_rate_per_s(problem)
    easier = replace(problem, slo=replace(problem.slo, latency_s=ANY_LATENCY_S))
    plan = possible(easier)
    if plan is not None:
        slo_s = nearest_slo_s(plan)
        return NoPlan(strategy=strategy, binding="latency", nearest_slo_s=slo_s, highest_rate_per_s=rate_per_s)
    for binding, relax in relaxed:
        easier = relax(easier)
        if possible(easier) is not None:
            return NoPlan(strategy=strategy, binding=binding, highest_rate_per_s=rate_per_s)
    return NoPlan(strategy=strategy, binding="devices", highest_rate_per_s=rate_per_s)


def nearest_slo_s(
    problem: PlanProblem,
    patient: FeasiblePlan,
    any_plan: Callable[[PlanProblem], FeasiblePlan | None],
    resolution: float = SLO_RESOLUTION,
) -> float:
    """The least SLO latency for which a plan is found, `resolution` above it at most; `patient` is a plan at any."""

    def needed_s(latency_s: float, found: FeasiblePlan) -> float:
        return min(latency_s, found.figures.latency_s / (1 - problem.slo.slack))

    below, above = problem.slo.latency_s, needed_s(ANY_LATENCY_S, patient)
    while above > below * (1 + resolution):
        middle = (below * above) ** 0.5
        found = any_plan(replace(problem, slo=replace(problem.slo, latency_s=middle)))
        below, above = (middle, above) if found is None else (below, needed_s(middle, found))
    return above


def rate_of(found: FeasiblePlan | None) -> float | None:
    """The most that a plan does, if there is one."""
    return None if found is None else found.figures.rate_per_s
