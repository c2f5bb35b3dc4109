"""Solves for the least mean answer time at a rate: the best plan with proof or a gap, or why there is none."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from earlyexit.errors import PlanError
from optimizer.cost.evaluate import TOLERANCE, objective_value
from optimizer.problems.problem import MaximizeRate, MinimizeWorstCase, PlanProblem
from optimizer.search.beam import search_at_scale
from optimizer.search.decision import Decision, FeasiblePlan, Found, NoPlan, why_infeasible
from optimizer.search.exact import search_exactly
from optimizer.search.soonest.search import TIE_TOLERANCE, WIDTHS, LatencySearch, planes_of, ranked
from optimizer.search.space import Space, parts_of
from optimizer.search.tables import tables_of

# The highest rate within a ramp budget: its relative resolution, and how often the one without it is halved at most.
RATE_RESOLUTION = 0.01
MOST_HALVES = 20
MOST_STATES = 40_000_000
"""Size of a table with a number for every block and state of a split: a third of a gigabyte."""
NARROW = WIDTHS[:2]
"""Widths of searches that only explain why there is no plan. They take seconds, not minutes."""


def solve_soonest(problem: PlanProblem, space: Space) -> Decision:
    """Returns a plan of the least mean answer time, or why there is none; see `ranked` for ties.

    Raises PlanError if no plan was found although one may exist, and for problems that are too large.
    """
    result = search_soonest(problem, space)
    if not result.plans:
        if math.isfinite(result.bound):
            most = f"none answers before {result.bound:.6g} s"
            raise PlanError(f"no plan was found{space.within}, though there may be one: {most}")
        return _why_none(problem, space)
    return result.planned(problem, space.strategy)


def bound_soonest(problem: PlanProblem, space: Space) -> float | None:
    """Returns a lower bound on the mean answer time of all plans of a space; None if no plan exists."""
    rate_per_s, searches = problem.required_per_s or math.inf, _searches(problem, space, ())
    bounds = [planes_of(each.problem, each.tables, space).least_time(rate_per_s).value for each in searches]
    return min((bound for bound in bounds if math.isfinite(bound)), default=None)


def search_soonest(
    problem: PlanProblem, space: Space, widths: tuple[int, ...] = WIDTHS, *, any_plan: bool = False
) -> Found:
    """Returns the best plans of all parts of a space, or with `any_plan` the first plans.

    A part's best plan is the incumbent of the next part.
    """
    plans: list[FeasiblePlan] = []
    bound = incumbent = math.inf
    for search in _searches(problem, space, widths):
        result = search.best(incumbent, any_plan=any_plan)
        plans, bound = [*plans, *result.plans], min(bound, result.bound)
        incumbent = min([incumbent, *(objective_value(problem, plan.figures) for plan in result.plans)])
        if plans and any_plan:
            break
    best_first = ranked(problem, plans)
    if best_first and incumbent <= bound * (1 + TIE_TOLERANCE):
        bound = objective_value(problem, best_first[0].figures)
    return Found(plans=best_first, bound=bound)


def _searches(problem: PlanProblem, space: Space, widths: tuple[int, ...]) -> Iterator[LatencySearch]:
    """Yields one search per mode and part of the space."""
    for after_answer in space.after_answer:
        for part, own in parts_of(problem, space):
            tables = tables_of(part, own, after_answer)
            num_states = len(tables.rank_N) * tables.leaving_REQ.size
            if num_states > MOST_STATES:
                raise PlanError(
                    f"the least mean answer time is sought among {MOST_STATES:,} states at most (blocks x batch "
                    f"sizes of all devices x ramps x ramps), not {num_states:,}; leave out some ramps or "
                    "batch sizes"
                )
            yield LatencySearch(problem=part, space=own, tables=tables, after_answer=after_answer, widths=widths)


def _why_none(problem: PlanProblem, space: Space) -> NoPlan:
    """Returns which promise cannot be kept."""

    def quickest(other: PlanProblem) -> FeasiblePlan | None:
        objective = MinimizeWorstCase(
            rate_per_s=other.required_per_s or 0.0, ramp_budget=other.ramp_budget, queues=False
        )
        plans = search_soonest(replace(other, objective=objective), space, NARROW).plans
        return plans[0] if plans else None

    return why_infeasible(
        problem,
        space,
        possible=quickest,
        resolution=math.inf,  # the plan is the quickest
        highest_rate_per_s=lambda other: _highest_rate_per_s(other, space),
    )


def _highest_rate_per_s(problem: PlanProblem, space: Space) -> float | None:
    """Returns the highest rate that has a plan; None if there is none. With a ramp budget, finds it by bisection.

    With a ramp budget the result may be a few per cent too low, because narrow searches miss plans. Plans whose inputs
    stay reach their highest rate without ramps, and then as much as if the inputs stopped.
    """

    def has_plan(rate_per_s: float) -> bool:
        return bool(search_soonest(problem.with_rate(rate_per_s), space, NARROW, any_plan=True).plans)

    no_ramps = replace(space, ramps="none")
    fastest = _fastest(problem, space if "stop" in space.after_answer else no_ramps)
    if fastest is None:
        return None
    high = fastest.figures.rate_per_s
    budget = math.inf if problem.ramp_budget is None else problem.ramp_budget * (1 + TOLERANCE)
    if fastest.figures.ramp_overhead <= budget:
        return high
    plain = _fastest(problem, no_ramps) if space.ramps in ("choose", "split-ends") else None
    halves = (high / 2**power for power in range(1, MOST_HALVES))
    low = next(filter(has_plan, halves), None) if plain is None else plain.figures.rate_per_s
    while low is not None and high > low * (1 + RATE_RESOLUTION) and not space.is_over():
        middle = (low * high) ** 0.5
        low, high = (middle, high) if has_plan(middle) else (low, middle)
    return low


def _fastest(problem: PlanProblem, space: Space) -> FeasiblePlan | None:
    unlimited = replace(problem, objective=MaximizeRate())
    found = search_exactly(unlimited, space) or search_at_scale(unlimited, space)
    return found.plans[0] if found.plans else None
