"""Finds the best plan of a strategy's space for a problem, or the reason why no plan exists."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from earlyexit.clock import MonotonicClock
from earlyexit.errors import PlanError
from optimizer.cost.evaluate import TOLERANCE, evaluate, merit, worst_value
from optimizer.generation.solve import solve_generation
from optimizer.problems.problem import Ingresses, MaximizeRate, MinimizeCost, MinimizeLatency, PlanProblem
from optimizer.problems.tokens import in_tokens, with_budgets
from optimizer.search.beam import bound_at_scale, search_at_scale
from optimizer.search.chains import SOLVED, search_chains
from optimizer.search.decision import (
    SLO_RESOLUTION,
    Decision,
    FeasiblePlan,
    Found,
    NoPlan,
    Planned,
    Strategy,
    gap_between,
    if_feasible,
    joined,
    why_infeasible,
)
from optimizer.search.exact import is_too_big, search_exactly
from optimizer.search.in_time import solve_in_time
from optimizer.search.pame import solve_pame
from optimizer.search.relaxation import solve_relaxation
from optimizer.search.soonest.solve import bound_soonest, solve_soonest
from optimizer.search.space import SPACES, Space, TimeLimit
from optimizer.search.subsets import best_of_networks

Search = Callable[[PlanProblem, Space], Found | None]
"""Searches a space for plans. Returns None for a problem that it is not made for, or if it gave up."""
ONE_CHAIN: tuple[Search, ...] = (search_exactly, search_at_scale)
"""Searches for plans of one chain. They are called one after the other until one proves its result."""
SLO_RESOLUTION_AT_SCALE = 0.05
"""Relative resolution of the nearest SLO if plans are found by `search_at_scale`."""
MAX_MORE = 1 << 14
"""The most additional accelerators that `more_devices` considers."""
PLENTY = 8
"""Multiple of the least number of additional accelerators with which there is a plan if they help at all."""


def solve(
    problem: PlanProblem,
    space: Space | Strategy = "best",
    searches: tuple[Search, ...] = ONE_CHAIN,
    *,
    time_limit_s: float | None = None,
    now_s: Callable[[], float] = MonotonicClock.now_s,
) -> Decision:
    """Returns the best plan of a space, or of a strategy's space, or a proof that no plan exists.

    `searches` are those for plans of one chain. After `time_limit_s` by the clock `now_s`, the result is the best plan
    so far, with its gap. Raises PlanError if the searches neither find a plan nor prove that none exists, and if time
    is over before it is known why none exists.
    """
    space = _space_of(problem, space, time_limit_s, now_s)
    if problem.ingress is not None:
        return _within_ingresses(problem, problem.ingress, space, searches)
    if problem.generation is not None:
        decision = solve_generation(problem, space, _solve_generation_exactly)
    elif problem.networks:
        solve_part = partial(_solve, space=space, searches=searches)
        decision = best_of_networks(problem, solve_part, partial(_bound, space=space))
    else:
        decision = _solve(problem, space, searches)
    if isinstance(decision, NoPlan) and space.is_over():
        raise PlanError(f"no plan meets the problem; which limit prevents it was not found{space.within}")
    return decision


def _within_ingresses(problem: PlanProblem, ingress: Ingresses, space: Space, searches: tuple[Search, ...]) -> Decision:
    """Solves a problem whose ingresses carry a limited rate.

    If the highest rate of the stages is above it, the result is the cheapest plan found for what the ingresses carry,
    whose batches fill at that rate. If they fill too slowly in all plans found for it, a plan of a lower rate is
    returned. Raises PlanError if none is known.
    """
    inner, required_per_s, most_per_s = replace(problem, ingress=None), problem.required_per_s, ingress.most_per_s
    if (required_per_s or 0.0) * (1 - TOLERANCE) > most_per_s:
        return NoPlan(strategy=space.strategy, binding="ingress")
    found = solve(inner, space, searches)
    if isinstance(found, NoPlan):
        is_too_high = (found.highest_rate_per_s or 0.0) > most_per_s
        return replace(found, highest_rate_per_s=None) if is_too_high else found
    if required_per_s is not None:
        return replace(found, figures=evaluate(problem, found.stages, shares=found.figures.shares))
    stages, rate_per_s, note = [found.stages, *found.candidates], found.figures.rate_per_s, found.note
    if rate_per_s > most_per_s * (1 + TOLERANCE):
        note = f"with {ingress.needed(rate_per_s)} ingress replicas, a plan could serve {rate_per_s:.6g}/s"
        with suppress(PlanError):  # if time is over, the plans of higher rates are known, and may serve this one
            cheapest = solve(replace(inner, objective=MinimizeCost(rate_per_s=most_per_s)), space, searches)
            stages += [cheapest.stages, *cheapest.candidates] if isinstance(cheapest, Planned) else []
    plans = [plan for plan in (if_feasible(problem, each) for each in stages) if plan is not None]
    if not plans:
        most = f"{most_per_s:.6g}/s, which the ingresses carry"
        raise PlanError(f"no plan was found{space.within} for at most {most}; there may be one with smaller batches")
    plans.sort(key=lambda plan: merit(problem, plan.figures), reverse=True)
    best = Found(plans=tuple(plans), bound=min(found.bound, most_per_s)).planned(problem, space.strategy)
    return replace(best, note=note)


def _space_of(
    problem: PlanProblem, space: Space | Strategy, time_limit_s: float | None, now_s: Callable[[], float]
) -> Space:
    """Returns the space to search, whose time limit begins now."""
    space = space if isinstance(space, Space) else SPACES[space]
    if "stop" not in space.after_answer and not isinstance(problem.objective, MinimizeLatency):
        space = replace(space, ramps="none")  # if answered inputs stay, ramps improve neither rate nor cost
    if time_limit_s is None:
        return space
    return replace(space, limit=TimeLimit(seconds=time_limit_s, ends_s=now_s() + time_limit_s, now_s=now_s))


def more_devices(problem: PlanProblem, strategy: Strategy, time_limit_s: float | None = None) -> tuple[str, int] | None:
    """Returns an accelerator type and the least number of additional ones that an infeasible problem needs.

    It is the type whose addition is cheapest. The number is a lower bound, by a relaxation that is solved quickly.
    Returns None if no number of one type suffices, or if the objective is not the cost. After `time_limit_s`, a type
    counts as sufficient if the relaxation does not exclude it.
    """
    if not isinstance(problem.objective, MinimizeCost) or problem.generation is not None or problem.networks:
        return None
    problem = replace(problem, objective=replace(problem.objective, in_time=0.0))
    problem = problem if problem.lengths is None else in_tokens(problem)
    space = _space_of(problem, strategy, time_limit_s, MonotonicClock.now_s)

    def with_more(name: str, more: int) -> PlanProblem:
        supply = problem.devices[name]
        return replace(problem, devices={**problem.devices, name: replace(supply, count=supply.count + more)})

    def may_suffice(name: str, more: int) -> bool:
        return _bound(with_more(name, more), space) is not None

    def helps(name: str) -> bool:
        """Whether plenty of a type is enough. In the relaxation, plans may keep the latency limit on average."""
        plenty = with_more(name, PLENTY * needed[name])
        several = _may_have_several_chains(plenty, space)
        found = _several_chains(plenty, space) if several else _one_chain(plenty, space)
        return bool(found.plans) or not found.is_proven(plenty)

    needed: dict[str, int] = {}
    for name in problem.devices:
        least = 1 + bisect_left(range(1, MAX_MORE + 1), True, key=partial(may_suffice, name))
        needed |= {name: least} if least <= MAX_MORE else {}
    prices = {name: more * problem.devices[name].usd_per_hour for name, more in needed.items()}
    cheapest_first = sorted(needed, key=lambda name: (prices[name], needed[name]))
    cheapest = next(filter(helps, cheapest_first), None)
    return None if cheapest is None else (cheapest, needed[cheapest])


def _solve_generation_exactly(problem: PlanProblem, space: Space) -> Decision:
    """Solves a problem of generation steps; raises PlanError if it is too large for the exact planner."""
    found = search_exactly(problem, space)
    if found is None and space.is_over():
        raise PlanError(f"no plan was found{space.within}, and none was ruled out")
    if found is None:
        raise PlanError("generation is planned exactly; this problem has too many devices, ramps or batch sizes for it")
    return _decided(problem, space, found, (search_exactly,))


def _bound(problem: PlanProblem, space: Space) -> float | None:
    """Returns a quickly computed bound on the plans of a space, or None if no plan exists."""
    if problem.lengths is not None:
        bound = _bound(in_tokens(problem), space)
        is_rate = isinstance(problem.objective, MaximizeRate)
        return bound / problem.lengths.mean if bound is not None and is_rate else bound
    if isinstance(problem.objective, MinimizeLatency):
        return bound_soonest(problem, space)
    if not _may_have_several_chains(problem, space):
        return bound_at_scale(problem, space)
    relaxation = solve_relaxation(problem, space)
    return None if relaxation is None else relaxation.bound.value


def _may_have_several_chains(problem: PlanProblem, space: Space) -> bool:
    """Returns whether a plan may have several chains."""
    return min(problem.most_chains, space.most_chains) > 1 and not problem.networks


def _solve(problem: PlanProblem, space: Space, searches: tuple[Search, ...]) -> Decision:
    """Solves a problem whose networks are all used."""
    if problem.in_time:
        return solve_in_time(problem, space, partial(_solve, searches=searches), _bound)
    if problem.lengths is not None:
        return _per_input(problem, _solve(in_tokens(problem), space, searches))
    if space.strategy == "pame":
        return solve_pame(problem, space)
    if isinstance(problem.objective, MinimizeLatency):
        return solve_soonest(problem, space)
    # Found in milliseconds, also if compiling the planner has taken all the time.
    one_split = replace(space, splits_per_stage=False, several_stages=False, limit=None)
    quick = None if space.limit is None else search_exactly(problem, one_split)
    if _may_have_several_chains(problem, space):
        found = _several_chains(problem, space)
        if problem.required_per_s is not None:
            searches = (_several_chains,)  # it explains why there is no plan
    else:
        found = _one_chain(problem, space, searches)
    if quick is not None:
        found = joined(problem, [found, quick], found.bound)
    return _decided(problem, space, found, searches)


def _one_chain(problem: PlanProblem, space: Space, searches: tuple[Search, ...] = ONE_CHAIN) -> Found:
    """Returns the plans of one chain that the searches find, with the tightest of their bounds."""
    founds: list[Found] = []
    for left, search in zip(range(len(searches), 0, -1), searches, strict=True):
        found = search(problem, space.with_share(1 / left))
        founds += [] if found is None else [found]
        if found is not None and found.is_proven(problem):
            break
    return joined(problem, founds, worst_value(problem, (each.bound for each in founds)))


def _several_chains(problem: PlanProblem, space: Space) -> Found:
    """Returns plans of several chains, or better ones of a single chain: the search for several is not exact."""
    found = search_chains(problem, space)
    if found.is_proven(problem) or (found.plans and gap_between(found.value(problem), found.bound) <= SOLVED):
        return found
    if found.plans:
        one = search_exactly(problem, space, incumbent=found.value(problem))
    else:
        one = _one_chain(problem, space)
        if problem.required_per_s is None and not one.plans and one.is_proven(problem):
            return one  # each chain of a plan of the highest rate would be a plan by itself
    return found if one is None else joined(problem, [found, one], found.bound)


def _decided(problem: PlanProblem, space: Space, found: Found, searches: tuple[Search, ...]) -> Decision:
    """Returns the best plan, or why there is none; raises PlanError if neither is known."""
    if found.plans:
        return found.planned(problem, space.strategy)
    if not found.is_proven(problem):
        most = _most_possible(problem, space, found.bound)
        raise PlanError(f"no plan was found{space.within}, though there may be one: {most}")

    def best_plan(other: PlanProblem, among: Sequence[Search]) -> FeasiblePlan | None:
        result = next((each for search in among if (each := search(other, space)) is not None), None)
        return result.plans[0] if result is not None and result.plans else None

    def highest_rate_per_s(other: PlanProblem) -> float | None:
        fastest = best_plan(replace(other, objective=MaximizeRate()), searches)
        return None if fastest is None else fastest.figures.rate_per_s

    exact = partial(search_exactly, any_plan=True)
    quick: dict[Search, Search] = {search_exactly: exact, _several_chains: search_chains}
    any_plan = partial(best_plan, among=[quick.get(each, each) for each in searches])
    return why_infeasible(
        problem,
        space,
        possible=any_plan,
        resolution=SLO_RESOLUTION_AT_SCALE if is_too_big(problem, space) else SLO_RESOLUTION,
        highest_rate_per_s=highest_rate_per_s,
    )


def _most_possible(problem: PlanProblem, space: Space, bound: float) -> str:
    """Returns what is known about plans of which none was found."""
    if problem.required_per_s is None:
        return f"plans do at most {bound:.6g}"
    if _may_have_several_chains(problem, space):
        fastest = search_chains(replace(problem, objective=MaximizeRate()), space)
        if fastest.plans:
            rate_per_s = fastest.plans[0].figures.rate_per_s
            return f"the fastest one found serves {rate_per_s:.6g}/s, and none more than {fastest.bound:.6g}/s"
    return f"plans cost no less than {bound:.6g}"


def _per_input(problem: PlanProblem, decision: Decision) -> Decision:
    """Converts the result of a problem in tokens to inputs of the problem's lengths."""
    assert problem.lengths is not None
    if isinstance(decision, NoPlan):
        rate_per_s = decision.highest_rate_per_s
        return replace(decision, highest_rate_per_s=None if rate_per_s is None else rate_per_s / problem.lengths.mean)
    stages = with_budgets(problem, decision.stages)
    is_rate = isinstance(problem.objective, MaximizeRate)
    return replace(
        decision,
        stages=stages,
        figures=evaluate(problem, stages, shares=decision.figures.shares),
        bound=decision.bound / problem.lengths.mean if is_rate else decision.bound,
        candidates=tuple(with_budgets(problem, each) for each in decision.candidates),
    )
