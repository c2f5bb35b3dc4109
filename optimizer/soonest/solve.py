"""The plan of a space that answers soonest on average at a rate, proven so or with a gap, or why there is none."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from earlyexit.errors import PlanError
from optimizer.decision import Decision, FeasiblePlan, NoPlan, Planned, why_infeasible, without_budget
from optimizer.evaluate import TOLERANCE
from optimizer.exact.solve import solve_exactly
from optimizer.problem import MaximizeRate, MinimizeLatency, PlanProblem
from optimizer.scale.solve import solve_at_scale
from optimizer.soonest.bound import Allowance, best_row
from optimizer.soonest.search import SAME, WIDTHS, Soonest, SoonestSearch, best_first, num_states
from optimizer.space import Space, parts_of, payable_names
from optimizer.tables import tables_of

# How exactly the highest rate inside a ramp budget is told, and how far below the highest at any it is sought.
RATE_RESOLUTION = 0.01
LEAST_RATE = 1e-3
MOST_STATES = 40_000_000
"""Of a table with a number for every block and state of a split: a third of a gigabyte."""
NARROW = WIDTHS[:2]
"""Of searches that only say why there is no plan: seconds, not minutes."""


def solve_soonest(problem: PlanProblem, space: Space, *, widths: tuple[int, ...] = WIDTHS) -> Decision:
    """A plan of the least mean answer time; of equal ones the cheaper, then the quicker, then one that stops.

    Raises PlanError where none was found and none is ruled out, and for problems that are too large.
    """
    answer = _best_of(problem, space, Allowance.of(problem), widths)
    if not answer.found:
        if math.isfinite(answer.bound):
            raise PlanError(f"no plan was found, though there may be one: none answers before {answer.bound:.6g} s")
        return _why_none(problem, space)
    return answer.found[0].planned(problem, space.strategy, answer.bound, (each.stages for each in answer.found))


def bound_soonest(problem: PlanProblem, space: Space) -> float | None:
    """What no plan of a space answers before; None: proven to have none."""
    limits = Allowance.of(problem)
    least_s = min(
        (best_row(each.tables, limits).least for each in _searches(problem, space, limits, ())), default=math.inf
    )
    return None if math.isinf(least_s) else least_s


def _best_of(problem: PlanProblem, space: Space, limits: Allowance, widths: tuple[int, ...]) -> Soonest:
    """All parts of the space together: what one finds, the next has to match."""
    met: list[FeasiblePlan] = []
    bound = known = math.inf
    for search in _searches(problem, space, limits, widths):
        answer = search.best(known)
        met, bound = [*met, *answer.found], min(bound, answer.bound)
        known = min([known, *(limits.value_of(each) for each in answer.found)])
    found = best_first(met, limits)
    proven = known <= bound * (1 + SAME)
    return Soonest(found=found, bound=limits.value_of(found[0]) if found and proven else bound)


def _any_of(problem: PlanProblem, space: Space, limits: Allowance) -> FeasiblePlan | None:
    """The first plan that is met; None where narrow searches meet none."""
    for search in _searches(problem, space, limits, NARROW):
        found = search.best(any_will_do=True).found
        if found:
            return found[0]
    return None


def _searches(
    problem: PlanProblem, space: Space, limits: Allowance, widths: tuple[int, ...]
) -> Iterator[SoonestSearch]:
    """One per part of the space, those that stop first; or one per batch size where all splits share it."""
    for after_answer in space.after_answer:
        for part in parts_of(problem, space, payable_names(problem)):
            batches = sorted({batch for name in part.devices for batch in problem.latency[name].batches})
            for batch in batches if space.one_batch else [None]:
                tables = tables_of(part, space, after_answer, batch)
                _check_size(num_states(tables))
                yield SoonestSearch(
                    problem=part, tables=tables, after_answer=after_answer, limits=limits, widths=widths
                )


def _check_size(size: int) -> None:
    if size > MOST_STATES:
        raise PlanError(
            f"the least mean answer time is sought among {MOST_STATES:,} states at most (blocks x batch sizes of all "
            f"devices x ramps x ramps), not {size:,}; leave out some ramps or batch sizes"
        )


def _why_none(problem: PlanProblem, space: Space) -> NoPlan:
    """See `why_infeasible`; ramps are given up before money is."""
    return why_infeasible(
        problem,
        space.strategy,
        possible=lambda other: _quickest(other, space),
        nearest_slo_s=lambda found: found.figures.latency_s / (1 - problem.slo.slack),
        highest_rate_per_s=lambda other: _highest_rate_per_s(other, space),
        relaxed=(("ramps", _without_ramp_budget), ("budget", without_budget)),
    )


def _quickest(problem: PlanProblem, space: Space) -> FeasiblePlan | None:
    """The plan of the shortest worst case, at any SLO."""
    limits = replace(Allowance.of(problem), latency_s=math.inf, seeks_worst=True)
    found = _best_of(problem, space, limits, NARROW).found
    return found[0] if found else None


def _without_ramp_budget(problem: PlanProblem) -> PlanProblem:
    assert isinstance(problem.objective, MinimizeLatency)
    return replace(problem, objective=replace(problem.objective, ramp_budget=None))


def _highest_rate_per_s(problem: PlanProblem, space: Space) -> float | None:
    """The highest rate that has a plan; where the ramp budget lowers it, one that has.

    It may be some per cent below the highest: narrow searches miss plans. A plan whose inputs stay
    does the most without ramps, and then as much as if they stopped.
    """
    without = replace(space, ramps="none")
    fastest = _fastest(problem, space if "stop" in space.after_answer else without)
    budget = math.inf if problem.ramp_budget is None else problem.ramp_budget * (1 + TOLERANCE)
    if fastest is None or fastest.figures.ramp_overhead <= budget:
        return None if fastest is None else fastest.figures.rate_per_s
    high = fastest.figures.rate_per_s
    plain = _fastest(problem, without) if space.ramps in ("choose", "split-ends") else None
    low = plain.figures.rate_per_s if plain is not None else None
    if low is None and _any_of(problem.with_rate(high * LEAST_RATE), space, Allowance.of(problem)) is None:
        return None  # not even at leisure do ramps keep their budget
    while low is None or high > low * (1 + RATE_RESOLUTION):
        tried = (low * high) ** 0.5 if low is not None else high / 2
        if _any_of(problem.with_rate(tried), space, Allowance.of(problem)) is not None:
            low = tried
        else:
            high = tried
        if low is None and high < fastest.figures.rate_per_s * LEAST_RATE:
            return None
    return low


def _fastest(problem: PlanProblem, space: Space) -> Planned | None:
    rate = replace(problem, objective=MaximizeRate())
    decision = solve_exactly(rate, space) or solve_at_scale(rate, space)
    return decision if isinstance(decision, Planned) else None
