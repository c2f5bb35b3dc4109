"""Solves for the least mean answer time at a rate: the best plan with proof or a gap, or why there is none."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from earlyexit.errors import PlanError
from optimizer.cost.evaluate import TOLERANCE
from optimizer.problems.problem import MaximizeRate, MinimizeLatency, PlanProblem
from optimizer.search.beam import solve_at_scale
from optimizer.search.decision import Decision, FeasiblePlan, NoPlan, Planned, why_infeasible, without_budget
from optimizer.search.exact import solve_exactly
from optimizer.search.soonest.bound import best_price_row
from optimizer.search.soonest.search import (
    TIE_TOLERANCE,
    WIDTHS,
    LatencyResult,
    LatencySearch,
    num_states,
    ranked,
    time_of,
)
from optimizer.search.space import Space, parts_of, payable_names
from optimizer.search.tables import tables_of

# The highest rate within a ramp budget: its relative resolution, and the least one tried, relative to that without one.
RATE_RESOLUTION = 0.01
LEAST_RATE = 1e-3
MOST_STATES = 40_000_000
"""Size of a table with a number for every block and state of a split: a third of a gigabyte."""
NARROW = WIDTHS[:2]
"""Widths of searches that only explain why there is no plan. They take seconds, not minutes."""


def solve_soonest(problem: PlanProblem, space: Space, *, widths: tuple[int, ...] = WIDTHS) -> Decision:
    """Returns a plan of the least mean answer time, or why there is none; see `ranked` for ties.

    Raises PlanError if no plan was found although one may exist, and for problems that are too large.
    """
    result = _best(problem, space, widths)
    if not result.plans:
        if math.isfinite(result.bound):
            raise PlanError(f"no plan was found, though there may be one: none answers before {result.bound:.6g} s")
        return _why_none(problem, space)
    return result.plans[0].planned(problem, space.strategy, result.bound, (plan.stages for plan in result.plans))


def bound_soonest(problem: PlanProblem, space: Space) -> float | None:
    """Returns a lower bound on the mean answer time of all plans of a space; None if no plan exists."""
    searches = _searches(problem, space, ())
    least_s = min((best_price_row(search.problem, search.tables).bound for search in searches), default=math.inf)
    return None if math.isinf(least_s) else least_s


def _best(problem: PlanProblem, space: Space, widths: tuple[int, ...], *, worst_case: bool = False) -> LatencyResult:
    """Returns the best plans of all parts of a space. A part's best plan is the incumbent of the next part."""
    plans: list[FeasiblePlan] = []
    bound = incumbent = math.inf
    for search in _searches(problem, space, widths, worst_case=worst_case):
        result = search.best(incumbent)
        plans, bound = [*plans, *result.plans], min(bound, result.bound)
        incumbent = min([incumbent, *(time_of(plan, worst_case) for plan in result.plans)])
    best_first = ranked(plans, worst_case)
    if best_first and incumbent <= bound * (1 + TIE_TOLERANCE):
        bound = time_of(best_first[0], worst_case)
    return LatencyResult(plans=best_first, bound=bound)


def _any_plan(problem: PlanProblem, space: Space) -> FeasiblePlan | None:
    """Returns the first plan that narrow searches find; None if they find none."""
    for search in _searches(problem, space, NARROW):
        plans = search.best(any_plan=True).plans
        if plans:
            return plans[0]
    return None


def _searches(
    problem: PlanProblem, space: Space, widths: tuple[int, ...], *, worst_case: bool = False
) -> Iterator[LatencySearch]:
    """Yields one search per mode and part of the space, or one per batch size if all splits must share it."""
    for after_answer in space.after_answer:
        for part in parts_of(problem, space, payable_names(problem)):
            batches = sorted({batch for name in part.devices for batch in problem.latency[name].batches})
            for batch in batches if space.one_batch else [None]:
                tables = tables_of(part, space, after_answer, batch)
                _check_size(num_states(tables))
                yield LatencySearch(
                    problem=part, tables=tables, after_answer=after_answer, worst_case=worst_case, widths=widths
                )


def _check_size(size: int) -> None:
    if size > MOST_STATES:
        raise PlanError(
            f"the least mean answer time is sought among {MOST_STATES:,} states at most (blocks x batch sizes of all "
            f"devices x ramps x ramps), not {size:,}; leave out some ramps or batch sizes"
        )


def _why_none(problem: PlanProblem, space: Space) -> NoPlan:
    """Returns which promise cannot be kept. The ramp budget is dropped before the money budget."""
    return why_infeasible(
        problem,
        space.strategy,
        possible=lambda other: _lowest_latency_plan(other, space),
        nearest_slo_s=lambda plan: plan.figures.latency_s / (1 - problem.slo.slack),
        highest_rate_per_s=lambda other: _highest_rate_per_s(other, space),
        relaxed=(("ramps", _without_ramp_budget), ("budget", without_budget)),
    )


def _lowest_latency_plan(problem: PlanProblem, space: Space) -> FeasiblePlan | None:
    """Returns the plan of the lowest worst-case latency, whatever the SLO."""
    plans = _best(problem, space, NARROW, worst_case=True).plans
    return plans[0] if plans else None


def _without_ramp_budget(problem: PlanProblem) -> PlanProblem:
    assert isinstance(problem.objective, MinimizeLatency)
    return replace(problem, objective=replace(problem.objective, ramp_budget=None))


def _highest_rate_per_s(problem: PlanProblem, space: Space) -> float | None:
    """Returns the highest rate that has a plan; None if there is none. With a ramp budget, finds it by bisection.

    With a ramp budget the result may be a few per cent too low, because narrow searches miss plans. Plans whose inputs
    stay reach their highest rate without ramps, and then as much as if the inputs stopped.
    """
    no_ramps = replace(space, ramps="none")
    fastest = _fastest(problem, space if "stop" in space.after_answer else no_ramps)
    if fastest is None:
        return None
    high = fastest.figures.rate_per_s
    budget = math.inf if problem.ramp_budget is None else problem.ramp_budget * (1 + TOLERANCE)
    if fastest.figures.ramp_overhead <= budget:
        return high
    least = high * LEAST_RATE
    plain = _fastest(problem, no_ramps) if space.ramps in ("choose", "split-ends") else None
    low = plain.figures.rate_per_s if plain is not None else None
    if low is None and _any_plan(problem.with_rate(least), space) is None:
        return None
    while low is None or high > low * (1 + RATE_RESOLUTION):
        middle = (low * high) ** 0.5 if low is not None else high / 2
        if _any_plan(problem.with_rate(middle), space) is not None:
            low = middle
        else:
            high = middle
        if low is None and high < least:
            return None
    return low


def _fastest(problem: PlanProblem, space: Space) -> Planned | None:
    unlimited = replace(problem, objective=MaximizeRate())
    decision = solve_exactly(unlimited, space) or solve_at_scale(unlimited, space)
    return decision if isinstance(decision, Planned) else None
