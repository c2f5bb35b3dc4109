"""The planner's result: a plan with its optimality gap, or the reason why no plan exists."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from optimizer import Strategy as Strategy
from optimizer.cost.evaluate import TOLERANCE, Evaluation, best_value, evaluate, merit, objective_value, violations
from optimizer.plans.plan import Stage, with_replicas
from optimizer.problems.problem import ANY_LATENCY_S, MinimizeLatency, PlanProblem
from optimizer.search.space import Space

STRATEGIES: tuple[Strategy, ...] = ("best", "stock", "early-exit", "e3", "serial")
"""`best` searches the whole space of plans. The others are restricted to common deployments, or to the plans of E3."""


def strategies_for(problem: PlanProblem) -> tuple[Strategy, ...]:
    """Returns the strategies that are compared for a problem.

    They include Apparate if the mean answer time is minimized, and PAME if recorded batches are known as well.
    """
    if not isinstance(problem.objective, MinimizeLatency):
        return STRATEGIES
    return (*STRATEGIES, "apparate") if problem.batches is None else (*STRATEGIES, "apparate", "pame")


Binding = Literal["ingress", "devices", "budget", "latency", "ramps", "ttft", "sequences", "memory"]
"""The last three exist for generation only: time to first token, concurrent sequences, and KV cache memory."""
SLO_RESOLUTION = 1e-3
"""Relative resolution of the nearest SLO if plans are found quickly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeasiblePlan:
    """A plan that satisfies every constraint of its problem, and its figures."""

    stages: tuple[Stage, ...]
    """The stages of all chains, one chain after the other."""
    figures: Evaluation


def if_feasible(problem: PlanProblem, stages: tuple[Stage, ...]) -> FeasiblePlan | None:
    """Returns the plan with its figures, or None if it violates a constraint."""
    figures = evaluate(problem, stages)
    return None if violations(problem, stages, figures) else FeasiblePlan(stages=stages, figures=figures)


def plan_at_rate(problem: PlanProblem, stages: Sequence[Stage], rate_per_s: float) -> FeasiblePlan | None:
    """Returns the feasible plan with the replicas that a rate needs, or None."""
    pairs = zip(stages, evaluate(problem, stages).stages, strict=True)
    alone = [min(figures.rate_per_s, figures.hop_rate_per_s) / stage.replicas for stage, figures in pairs]
    counts = [max(1, math.ceil(rate_per_s / each * (1 - TOLERANCE))) for each in alone]
    return if_feasible(problem, with_replicas(stages, counts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The plans that a search found in a space, and the bound that it proved for all plans of the space."""

    plans: tuple[FeasiblePlan, ...]
    """The best first."""
    bound: float
    """No plan has a better objective. If this is `best_value` of no values, no plan exists."""

    def value(self, problem: PlanProblem) -> float:
        """Returns the objective of the best plan; without plans, a value that is worse than that of any plan."""
        return best_value(problem, (objective_value(problem, plan.figures) for plan in self.plans[:1]))

    def is_proven(self, problem: PlanProblem) -> bool:
        """Returns whether the best plan is proven optimal or, without plans, that no plan exists."""
        return self.bound == self.value(problem)

    def planned(self, problem: PlanProblem, strategy: Strategy) -> Planned:
        """Returns the first plan as the result of a strategy, with the other plans as candidates."""
        best, *others = dict.fromkeys(plan.stages for plan in self.plans)
        return Planned(
            strategy=strategy,
            stages=best,
            figures=self.plans[0].figures,
            bound=self.bound,
            gap=gap_between(objective_value(problem, self.plans[0].figures), self.bound),
            candidates=tuple(others),
        )


def joined(problem: PlanProblem, founds: Sequence[Found], bound: float) -> Found:
    """Returns what several searches found together. `bound` is a bound on all plans of their spaces."""
    with_plans = [each for each in founds if each.plans]
    with_plans.sort(key=lambda each: merit(problem, each.plans[0].figures), reverse=True)
    plans = tuple(plan for each in with_plans for plan in each.plans)
    return Found(plans=plans, bound=best_value(problem, [bound, *(each.value(problem) for each in founds)]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned(FeasiblePlan):
    """The best plan that was found in a strategy's space."""

    strategy: Strategy
    bound: float
    """Bound on the objective of all plans of the space: a rate per second, USD per hour, or seconds."""
    gap: float
    """Relative distance between the plan's objective and the bound; 0 if the plan is proven optimal."""
    candidates: tuple[tuple[Stage, ...], ...] = ()
    """Other good plans, best first. Joint exit records may prefer one of them."""
    note: str = ""
    """A remark of one line about the plan, such as why it has no exit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPlan:
    """Proof that no plan of a strategy's space satisfies the problem."""

    strategy: Strategy
    binding: Binding
    """The constraint that cannot be satisfied. Each figure below relaxes a single limit and keeps the others."""
    nearest_slo_s: float | None = None
    """The least SLO latency that has a plan; None if no SLO has one."""
    highest_rate_per_s: float | None = None
    """The highest rate that has a plan. None if no rate has one, if the rate is maximized, or if the ingresses bind."""
    more: tuple[str, int] | None = None
    """An accelerator type, and the least number of further ones that is needed
    (`optimizer.search.planner.more_devices`)."""


Decision = Planned | NoPlan


def gap_between(value: float, bound: float) -> float:
    """Returns the relative distance between an objective value and a bound."""
    return abs(value - bound) / bound if bound else float(value > 0)


def why_infeasible(
    problem: PlanProblem,
    space: Space,
    *,
    possible: Callable[[PlanProblem], FeasiblePlan | None],
    resolution: float,
    highest_rate_per_s: Callable[[PlanProblem], float | None],
) -> NoPlan:
    """Returns which constraint keeps an infeasible problem from having a plan.

    It is the latency if a plan exists at some latency. The least such SLO is sought by bisection, up to a relative
    `resolution`. Otherwise the budgets are removed one after the other until a plan exists, and the last one binds.
    `possible` returns None if a problem has no plan; if it returns the quickest plan, any `resolution` is exact.
    `highest_rate_per_s` is called if the problem requires a rate. The result is invalid if time is over by then.
    """
    rate_per_s = None if problem.required_per_s is None else highest_rate_per_s(problem)
    no_plan = NoPlan(strategy=space.strategy, binding="devices", highest_rate_per_s=rate_per_s)
    easier = replace(problem, slo=replace(problem.slo, latency_s=ANY_LATENCY_S))
    patient = possible(easier)
    if patient is not None:
        slack, below_s = problem.slo.slack, problem.slo.latency_s
        slo_s = patient.figures.latency_s / (1 - slack)
        while slo_s > below_s * (1 + resolution) and not space.is_over():
            middle_s = (below_s * slo_s) ** 0.5
            found = possible(replace(problem, slo=replace(problem.slo, latency_s=middle_s)))
            if found is None:
                below_s = middle_s
            else:
                slo_s = found.figures.latency_s / (1 - slack)
        return replace(no_plan, binding="latency", nearest_slo_s=slo_s)
    for binding, relaxed in _without_budgets(easier):
        if possible(relaxed) is not None:
            return replace(no_plan, binding=binding)
    return no_plan


def _without_budgets(problem: PlanProblem) -> Iterator[tuple[Binding, PlanProblem]]:
    """Yields the problem without its ramp budget, if it has one, and then without a limit on the cost too."""
    if isinstance(problem.objective, MinimizeLatency) and problem.ramp_budget is not None:
        problem = replace(problem, objective=replace(problem.objective, ramp_budget=None))
        yield "ramps", problem
    yield "budget", replace(problem, budget_usd_per_hour=None)
