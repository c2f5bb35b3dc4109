"""The plan of a space that answers soonest on average at a rate, proven so or with a gap, or why there is none."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from earlyexit.errors import PlanError
from optimizer.decision import Binding, Decision, Found, NoPlan, Planned, gap_between
from optimizer.evaluate import TOLERANCE
from optimizer.exact.solve import solve_exactly
from optimizer.problem import ANY_LATENCY_S, MaximizeRate, MinimizeLatency, PlanProblem, device_names
from optimizer.scale.solve import solve_at_scale
from optimizer.soonest.bound import Allowance
from optimizer.soonest.search import WIDTHS, Soonest, SoonestSearch
from optimizer.soonest.tables import MOST_STATES, num_states, tables_of
from optimizer.space import Space, parts_of

# How exactly the highest rate inside a ramp budget is told, and how far below the highest at any it is sought.
RATE_RESOLUTION = 1e-3
LEAST_RATE = 1e-3


def solve_soonest(problem: PlanProblem, space: Space, *, widths: tuple[int, ...] = WIDTHS) -> Decision:
    """A plan of the least mean answer time; it stays only where that is sooner than any plan that stops.

    Raises PlanError where none was found and none is ruled out, and for problems that are too large.
    """
    answer = _best_of(problem, space, Allowance.of(problem), widths)
    if not answer.found:
        if math.isfinite(answer.bound):
            raise PlanError(f"no plan was found, though there may be one: none answers before {answer.bound:.6g} s")
        return _why_none(problem, space, widths)
    best = answer.found[0]
    return Planned(
        strategy=space.strategy,
        stages=best.chain,
        figures=best.figures,
        bound=answer.bound,
        gap=gap_between(best.figures.mean_latency_s, answer.bound),
        candidates=tuple(each.chain for each in answer.found[1:]),
    )


def _best_of(problem: PlanProblem, space: Space, limits: Allowance, widths: tuple[int, ...]) -> Soonest:
    """All parts of the space together: what one finds, the next has to beat."""
    found: tuple[Found, ...] = ()
    bound = known = math.inf
    for search in _searches(problem, space, limits, widths):
        answer = search.best(known)
        found, bound = (*answer.found, *found), min(bound, answer.bound)
        if answer.found:
            known = search.value_of(answer.found[0]) * (1 - TOLERANCE)
    return Soonest(found=found, bound=bound)


def _searches(
    problem: PlanProblem, space: Space, limits: Allowance, widths: tuple[int, ...]
) -> Iterator[SoonestSearch]:
    """One per part of the space, those that stop first; or one per batch size where all splits share it."""
    names = [name for name in device_names(problem) if problem.devices[name].usd_per_hour <= limits.usd_per_hour]
    for after_answer in space.after_answer:
        for part in parts_of(problem, space, names):
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


def _why_none(problem: PlanProblem, space: Space, widths: tuple[int, ...]) -> NoPlan:
    """Which promise cannot be kept: the latency, where there is a plan at any; else what else has to give way."""
    rate_per_s = _highest_rate_per_s(problem, space, widths)
    found = _quickest(problem, space, widths)
    if found is not None:
        slo_s = found.figures.latency_s / (1 - problem.slo.slack)
        return NoPlan(strategy=space.strategy, binding="latency", nearest_slo_s=slo_s, highest_rate_per_s=rate_per_s)
    binding: Binding = "devices"
    if _quickest(replace(problem, budget_usd_per_hour=None), space, widths) is not None:
        binding = "budget"
    elif _quickest(_without_ramp_budget(problem), space, widths) is not None:
        binding = "ramps"
    return NoPlan(strategy=space.strategy, binding=binding, highest_rate_per_s=rate_per_s)


def _quickest(problem: PlanProblem, space: Space, widths: tuple[int, ...]) -> Found | None:
    """The plan of the shortest worst case, at any SLO."""
    patient = replace(problem, slo=replace(problem.slo, latency_s=ANY_LATENCY_S))
    limits = replace(Allowance.of(patient), latency_s=math.inf, seeks_worst=True)
    found = _best_of(patient, space, limits, widths).found
    return found[0] if found else None


def _without_ramp_budget(problem: PlanProblem) -> PlanProblem:
    assert isinstance(problem.objective, MinimizeLatency)
    return replace(problem, objective=replace(problem.objective, ramp_budget=None))


def _highest_rate_per_s(problem: PlanProblem, space: Space, widths: tuple[int, ...]) -> float | None:
    """The highest rate that has a plan; where the ramp budget lowers it, one that has, and few above have.

    A plan whose inputs stay does the most without ramps, and then as much as if they stopped.
    """
    without = replace(space, ramps="none")
    fastest = _fastest(problem, space if "stop" in space.after_answer else without)
    if fastest is None or not _exceeds_ramp_budget(problem, fastest):
        return None if fastest is None else fastest.figures.rate_per_s
    high = fastest.figures.rate_per_s
    plain = _fastest(problem, without) if space.ramps in ("choose", "split-ends") else None
    low = plain.figures.rate_per_s if plain is not None else None
    if low is None and _quickest(problem.with_rate(high * LEAST_RATE), space, widths) is None:
        return None  # not even at leisure do ramps keep their budget
    while low is None or high > low * (1 + RATE_RESOLUTION):
        tried = (low * high) ** 0.5 if low is not None else high / 2
        if _best_of(problem.with_rate(tried), space, Allowance.of(problem), widths).found:
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


def _exceeds_ramp_budget(problem: PlanProblem, planned: Planned) -> bool:
    budget = problem.ramp_budget
    return budget is not None and planned.figures.ramp_overhead > budget * (1 + TOLERANCE)
