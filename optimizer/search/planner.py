"""Finds the best plan of a strategy's space for a problem, or the reason why no plan exists.

A problem whose ingresses carry a limited rate, with several networks, with room for queues or with lengths is solved
as simpler problems. Plain problems are left, which are given to the searches.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain

from earlyexit.clock import MonotonicClock
from earlyexit.errors import PlanError
from optimizer.cost.evaluate import (
    TOLERANCE,
    best_value,
    evaluate,
    loads,
    merit,
    milliseconds,
    objective_value,
    queue_s,
    violations,
    worst_value,
)
from optimizer.generation.solve import solve_generation
from optimizer.problems.networks import Subproblem, Used, network_sets
from optimizer.problems.problem import (
    ANY_LATENCY_S,
    Ingresses,
    MaximizeRate,
    MinimizeCost,
    MinimizeLatency,
    PlanProblem,
)
from optimizer.problems.tokens import in_tokens, with_budgets
from optimizer.search.beam import bound_at_scale, search_at_scale
from optimizer.search.chains import SOLVED, search_chains
from optimizer.search.decision import (
    SLO_RESOLUTION,
    Binding,
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
from optimizer.search.exact import is_too_big, one_split, search_exactly
from optimizer.search.pame import solve_pame
from optimizer.search.relaxation import solve_relaxation
from optimizer.search.soonest.solve import bound_soonest, solve_soonest
from optimizer.search.space import SPACES, Space, TimeLimit

SLO_RESOLUTION_AT_SCALE = 0.05
"""Relative resolution of the nearest SLO if plans are found by `search_at_scale`."""
MAX_MORE = 1 << 14
"""The most additional accelerators that `more_devices` considers."""
PLENTY = 8
"""Multiple of the least number of additional accelerators with which there is a plan if they help at all."""
LEAST_FIRST: tuple[Binding, ...] = ("latency", "ramps", "budget", "devices")
"""Binding constraints, in the order in which they are reported if sets of networks differ."""
WORTH = 0.01
"""The least share by which further replicas must shorten the mean answer time."""
QUEUE_SHARES = (0.25, 0.4, 0.1, 0.6)
"""Shares that are reserved for queues: of the latency limit, in this order until they fit, or of the replicas' time."""
LARGE_STEP = 50
"""Part of a stage's replicas by which they are changed at once, so that few steps suffice for thousands of them."""
Solved = tuple[Subproblem, Planned]
"""A set of networks with its best plan."""


def solve(
    problem: PlanProblem,
    space: Space | Strategy = "best",
    *,
    time_limit_s: float | None = None,
    now_s: Callable[[], float] = MonotonicClock.now_s,
) -> Decision:
    """Returns the best plan of a space, or of a strategy's space, or a proof that no plan exists.

    After `time_limit_s` by the clock `now_s`, the result is the best plan so far, with its gap. Raises PlanError if the
    searches neither find a plan nor prove that none exists, and if time is over before it is known why none exists.
    """
    space = _space_of(problem, space, time_limit_s, now_s)
    if problem.ingress is not None:
        return _within_ingresses(problem, problem.ingress, space)
    if problem.generation is not None:
        decision = solve_generation(problem, space, _solve_generation_exactly)
    elif problem.networks:
        decision = _best_of_networks(problem, space)
    else:
        decision = _solve(problem, space)
    if isinstance(decision, NoPlan) and space.is_over():
        raise PlanError(f"no plan meets the problem; which limit prevents it was not found{space.within}")
    return decision


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


def _within_ingresses(problem: PlanProblem, ingress: Ingresses, space: Space) -> Decision:
    """Solves a problem whose ingresses carry a limited rate.

    If the highest rate of the stages is above it, the result is the cheapest plan found for what the ingresses carry,
    whose batches fill at that rate. If they fill too slowly in all plans found for it, a plan of a lower rate is
    returned. Raises PlanError if none is known.
    """
    inner, required_per_s, most_per_s = replace(problem, ingress=None), problem.required_per_s, ingress.most_per_s
    if (required_per_s or 0.0) * (1 - TOLERANCE) > most_per_s:
        return NoPlan(strategy=space.strategy, binding="ingress")
    found = solve(inner, space)
    if isinstance(found, NoPlan):
        is_too_high = (found.highest_rate_per_s or 0.0) > most_per_s
        return replace(found, highest_rate_per_s=None) if is_too_high else found
    if required_per_s is not None:
        return replace(found, figures=evaluate(problem, found.stages, shares=found.figures.shares))
    stages, rate_per_s, note = [found.stages, *found.candidates], found.figures.rate_per_s, found.note
    if rate_per_s > most_per_s * (1 + TOLERANCE):
        note = f"with {ingress.needed(rate_per_s)} ingress replicas, a plan could serve {rate_per_s:.6g}/s"
        with suppress(PlanError):  # if time is over, the plans of higher rates are known, and may serve this one
            cheapest = solve(replace(inner, objective=MinimizeCost(rate_per_s=most_per_s)), space)
            stages += [cheapest.stages, *cheapest.candidates] if isinstance(cheapest, Planned) else []
    plans = [plan for plan in (if_feasible(problem, each) for each in stages) if plan is not None]
    if not plans:
        most = f"{most_per_s:.6g}/s, which the ingresses carry"
        raise PlanError(f"no plan was found{space.within} for at most {most}; there may be one with smaller batches")
    plans.sort(key=lambda plan: merit(problem, plan.figures), reverse=True)
    best = Found(plans=tuple(plans), bound=min(found.bound, most_per_s)).planned(problem, space.strategy)
    return replace(best, note=note)


def _solve_generation_exactly(problem: PlanProblem, space: Space) -> Decision:
    """Solves a problem of generation steps; raises PlanError if it is too large for the exact planner."""
    found = search_exactly(problem, space)
    if found is None and space.is_over():
        raise PlanError(f"no plan was found{space.within}, and none was ruled out")
    if found is None:
        raise PlanError("generation is planned exactly; this problem has too many devices, ramps or batch sizes for it")
    return _decided(problem, space, found)


def _best_of_networks(problem: PlanProblem, space: Space) -> Decision:
    """Returns the best plan over all sets of a cascade's networks. Of equally good plans, fewer networks are preferred.

    The sets contain the last network. By branch and bound, they are planned in the order of their bounds, and only
    while a bound is better than the best plan so far. If no set has a plan, the result names the least changes with
    which any of the sets has one. Raises PlanError if no plan is found and the search gave up for a set.
    """
    parts = [Subproblem(whole=problem, used=used) for used in network_sets(problem)]
    bounds = {part.used: _bound(part.problem, space) for part in parts}
    open_parts = [(part_bound, part) for part in parts if (part_bound := bounds[part.used]) is not None]
    open_parts.sort(key=lambda each: _rank_of_value(problem, *each))
    best: Solved | None = None
    solved: list[Solved] = []
    infeasible: dict[Used, NoPlan] = {}
    gave_up: PlanError | None = None
    for part_bound, part in open_parts:
        if best is not None and (0.0, *_rank_of_value(problem, part_bound, part)) > _rank_in_cascade(problem, best)[:3]:
            continue
        try:
            decision = _solve(part.problem, space)
        except PlanError as error:  # the search gave up, and the set keeps its bound
            gave_up = gave_up or error
            continue
        if isinstance(decision, NoPlan):
            infeasible[part.used], bounds[part.used] = decision, None
            continue
        bounds[part.used] = decision.bound
        solved.append((part, decision))
        best = min(solved, key=partial(_rank_in_cascade, problem))
    if best is None:
        if gave_up is not None:
            raise gave_up
        decisions = [infeasible.get(part.used) or _solve(part.problem, space) for part in parts]
        return _least_changes([each for each in decisions if isinstance(each, NoPlan)])
    return _in_cascade(problem, best, solved, [each for each in bounds.values() if each is not None])


def _rank_in_cascade(problem: PlanProblem, found: Solved) -> tuple[float, ...]:
    """Returns the key by which plans are ranked, best first: their excess, the rank of their value, then `merit`."""
    part, planned = found
    value, merits = objective_value(problem, planned.figures), merit(problem, planned.figures)
    return excess_s(part.problem, planned), *_rank_of_value(problem, value, part), *(-each for each in merits)


def _rank_of_value(problem: PlanProblem, value: float, part: Subproblem) -> tuple[float, int]:
    """Ranks values of the objective, best first. Of values that only rounding separates, fewer networks are better."""
    sign = -1 if isinstance(problem.objective, MaximizeRate) else 1
    return sign * float(f"{value:.9g}"), len(part.used)


def _in_cascade(problem: PlanProblem, best: Solved, solved: Sequence[Solved], bounds: Sequence[float]) -> Planned:
    """Converts the best plan to the cascade's numbers, with the bound of all sets and all other plans as candidates."""
    part, planned = best
    value = objective_value(problem, planned.figures)
    bound = best_value(problem, [value, *bounds])
    if math.isclose(bound, planned.bound, rel_tol=TOLERANCE):
        bound = planned.bound
    candidates = [part.in_cascade(each) for each in planned.candidates]
    for other, decision in solved:
        if other is not part:
            candidates += [other.in_cascade(each) for each in (decision.stages, *decision.candidates)]
    stages = part.in_cascade(planned.stages)
    return replace(
        planned,
        stages=stages,
        figures=evaluate(problem, stages),
        bound=bound,
        gap=gap_between(value, bound) if bound != planned.bound else planned.gap,
        candidates=tuple(dict.fromkeys(candidates)),
    )


def _least_changes(answers: Sequence[NoPlan]) -> NoPlan:
    """Returns the result for the cascade if no set of networks has a plan: the least changes that help any set."""
    slos = [each.nearest_slo_s for each in answers if each.nearest_slo_s is not None]
    rates = [each.highest_rate_per_s for each in answers if each.highest_rate_per_s is not None]
    nearest = min(answers, key=lambda each: LEAST_FIRST.index(each.binding))
    return replace(nearest, nearest_slo_s=min(slos, default=None), highest_rate_per_s=max(rates, default=None))


def _solve_with_queues(problem: PlanProblem, space: Space) -> Decision:
    """Returns the best plan found with its queues: the cheapest or earliest, or else the closest one to the limit.

    The searches do not model queues: a plan may use the whole latency limit, or serve exactly the required rate. If too
    many inputs would be late (`queue_s`), the search is repeated with a shorter latency limit, and with a rate so high
    that the previous plan's queues would fit into the difference. Strategies that the space contains are searched
    likewise: of equally cheap plans, they may find one with more room. Then replicas are added to each plan until its
    queues fit, and those that it can spare are removed. The earliest answers are sought with several higher rates, and
    more replicas. No plan is better than the best one without queues, so the gap is the distance to its bound.

    The plan's note names the tighter limits for which it was planned, or says that the limit is not kept.
    """
    first, *others = _plans_with_room(problem, space)
    if not isinstance(first, Planned) or (problem.in_time and not excess_s(problem, first)):
        return first
    for each in space.contained():
        with suppress(PlanError):  # the search neither found a plan nor proved that none exists
            others += _plans_with_room(problem, each) if _bound(problem, each) is not None else []
    plans = [_with_fitting_replicas(problem, each) for each in (first, *others) if isinstance(each, Planned)]
    best = min(plans, key=partial(_rank_with_queues, problem))
    late = f"less than {problem.in_time:.4g} of inputs that arrive at random may be in time"
    note = late if excess_s(problem, best) else best.note
    gap = gap_between(objective_value(problem, best.figures), first.bound)
    return replace(best, strategy=first.strategy, bound=first.bound, gap=gap, note=note)


def excess_s(problem: PlanProblem, planned: Planned) -> float:
    """Returns by how much a plan exceeds the SLO with its queues; 0 if it keeps the SLO."""
    needed_s = planned.figures.latency_s + queue_s(problem, planned.stages, planned.figures)
    limit_s = problem.slo.limit_s
    return needed_s - limit_s if needed_s > limit_s * (1 + TOLERANCE) else 0.0


def _rank_with_queues(problem: PlanProblem, planned: Planned) -> tuple[float, float]:
    """Returns the key by which plans are ranked, the best first."""
    return excess_s(problem, planned), objective_value(problem, planned.figures)


def _with_fitting_replicas(problem: PlanProblem, planned: Planned) -> Planned:
    """Returns the plan after adding or removing replicas of one stage at a time, as long as this improves its rank."""
    patient = replace(problem, slo=replace(problem.slo, latency_s=ANY_LATENCY_S))
    planned = replace(planned, figures=evaluate(problem, planned.stages, shares=planned.figures.shares))
    note = planned.note or "room for queues: more replicas than the rate needs"
    while True:
        plans = [planned]
        for index, stage in enumerate(planned.stages):
            for step in sorted({-1, 1, -stage.replicas // LARGE_STEP, stage.replicas // LARGE_STEP}):
                changed = replace(stage, replicas=max(1, stage.replicas + step))
                stages = (*planned.stages[:index], changed, *planned.stages[index + 1 :])
                figures = evaluate(problem, stages)
                if not violations(patient, stages, figures):
                    plans.append(replace(planned, stages=stages, figures=figures, note=note))
        best = min(plans, key=partial(_rank_with_queues, problem))
        excess, value = _rank_with_queues(problem, planned)
        if _rank_with_queues(problem, best) >= (excess, value if problem.in_time else value * (1 - WORTH)):
            return planned
        planned = best


def _plans_with_room(problem: PlanProblem, space: Space) -> Iterator[Decision]:
    """Yields the result of a search without queues, and then plans for tighter limits until all inputs are in time."""
    plain, limit_s = problem.without_queues(), problem.slo.limit_s
    rate_per_s = required_per_s = problem.required_per_s or 0.0
    best = _solve(plain, space)
    yield best
    for share in QUEUE_SHARES:
        if not isinstance(best, Planned) or (problem.in_time and not excess_s(problem, best)) or space.is_over():
            return
        if problem.in_time:
            room_s, allowed_s = max(share * limit_s, limit_s - best.figures.latency_s), (1 - share) * limit_s
            for load in chain.from_iterable(loads(problem, best.stages, best.figures)):
                rate_per_s = max(rate_per_s, required_per_s * load.overprovisioning(1 - problem.in_time, room_s))
        else:
            rate_per_s, allowed_s = required_per_s / (1 - share), limit_s
        slo = replace(problem.slo, slack=1 - allowed_s / problem.slo.latency_s)
        tighter = replace(plain.with_rate(rate_per_s), slo=slo)
        try:
            found = None if _bound(tighter, space) is None else _solve(tighter, space)
        except PlanError:  # as above
            continue
        if isinstance(found, Planned):
            figures = evaluate(problem, found.stages, shares=found.figures.shares)
            note = f"room for queues: planned for {rate_per_s:.6g}/s within {milliseconds(allowed_s)}"
            candidates = [each for each in found.candidates if not violations(problem, each, evaluate(problem, each))]
            best = replace(found, figures=figures, note=note, candidates=tuple(candidates))
            yield best


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


def _solve(problem: PlanProblem, space: Space) -> Decision:
    """Solves a problem whose networks are all used."""
    counts_queues = problem.in_time or (isinstance(problem.objective, MinimizeLatency) and problem.objective.queues)
    if counts_queues and space.strategy != "pame":
        return _solve_with_queues(problem, space)
    if problem.lengths is not None:
        return _per_input(problem, _solve(in_tokens(problem), space))
    if space.strategy == "pame":
        return solve_pame(problem, space)
    if isinstance(problem.objective, MinimizeLatency):
        return solve_soonest(problem, space)
    # Found in milliseconds, also if compiling the planner has taken all the time.
    quick = None if space.limit is None else search_exactly(problem, replace(one_split(space), limit=None))
    several = _may_have_several_chains(problem, space)
    found = _several_chains(problem, space) if several else _one_chain(problem, space)
    if quick is not None:
        found = joined(problem, [found, quick], found.bound)
    return _decided(problem, space, found)


def _one_chain(problem: PlanProblem, space: Space) -> Found:
    """Returns the plans of one chain that are found exactly and, without a proof, at scale; with the tighter bound."""
    exact = search_exactly(problem, space.with_share(1 / 2))
    if exact is not None and exact.is_proven(problem):
        return exact
    founds = [*([] if exact is None else [exact]), search_at_scale(problem, space)]
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


def _decided(problem: PlanProblem, space: Space, found: Found) -> Decision:
    """Returns the best plan, or why there is none; raises PlanError if neither is known."""
    if found.plans:
        return found.planned(problem, space.strategy)
    if not found.is_proven(problem):
        most = _most_possible(problem, space, found.bound)
        raise PlanError(f"no plan was found{space.within}, though there may be one: {most}")
    # For the highest rate, each chain of a plan would be a plan by itself.
    needs_several = _may_have_several_chains(problem, space) and problem.required_per_s is not None

    def best_plan(other: PlanProblem, *, any_plan: bool = False) -> FeasiblePlan | None:
        if needs_several:
            result: Found | None = search_chains(other, space) if any_plan else _several_chains(other, space)
        else:
            result = search_exactly(other, space, any_plan=any_plan)
            if result is None and problem.generation is None:
                result = search_at_scale(other, space)
        return result.plans[0] if result is not None and result.plans else None

    def highest_rate_per_s(other: PlanProblem) -> float | None:
        fastest = best_plan(replace(other, objective=MaximizeRate()))
        return None if fastest is None else fastest.figures.rate_per_s

    return why_infeasible(
        problem,
        space,
        possible=partial(best_plan, any_plan=True),
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


def _may_have_several_chains(problem: PlanProblem, space: Space) -> bool:
    """Returns whether a plan may have several chains."""
    return min(problem.most_chains, space.most_chains) > 1 and not problem.networks and problem.generation is None


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


def more_devices(problem: PlanProblem, strategy: Strategy, time_limit_s: float | None = None) -> tuple[str, int] | None:
    """Returns an accelerator type and the least number of additional ones that an infeasible problem needs.

    It is the type whose addition is cheapest. The number is a lower bound, by a relaxation that is solved quickly.
    Returns None if no number of one type suffices, or if the objective is not the cost. After `time_limit_s`, a type
    counts as sufficient if the relaxation does not exclude it.
    """
    if not isinstance(problem.objective, MinimizeCost) or problem.generation is not None or problem.networks:
        return None
    problem = problem.without_queues()
    problem = problem if problem.lengths is None else in_tokens(problem)
    space = _space_of(problem, strategy, time_limit_s, MonotonicClock.now_s)

    def with_more(name: str, more: int) -> PlanProblem:
        return problem.with_counts({name: problem.devices[name].count + more})

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
    cheapest_first = sorted(needed, key=lambda name: (problem.usd_of({name: needed[name]}), needed[name]))
    cheapest = next(filter(helps, cheapest_first), None)
    return None if cheapest is None else (cheapest, needed[cheapest])
