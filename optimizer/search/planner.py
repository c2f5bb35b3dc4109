"""Finds the best plan of a strategy's space for a problem, or the reason why no plan exists."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from earlyexit.errors import PlanError
from optimizer.cost.evaluate import evaluate, merit, objective_value
from optimizer.generation.solve import solve_generation
from optimizer.problems.problem import MaximizeRate, MinimizeCost, MinimizeLatency, Objective, PlanProblem
from optimizer.problems.tokens import in_tokens, with_budgets
from optimizer.search.beam import bound_at_scale, solve_at_scale
from optimizer.search.chains import solve_chains
from optimizer.search.decision import Decision, NoPlan, Planned, Strategy, gap_between
from optimizer.search.exact import better_plan, solve_exactly
from optimizer.search.in_time import solve_in_time
from optimizer.search.pame import solve_pame
from optimizer.search.relaxation import solve_relaxation
from optimizer.search.soonest.solve import bound_soonest, solve_soonest
from optimizer.search.space import SPACES, Space, payable_names
from optimizer.search.subsets import best_of_networks

Planner = Callable[[PlanProblem, Space], Decision | None]
"""Returns None if it neither found a plan nor proved that no plan exists."""

PLANNERS: Mapping[type[Objective], tuple[Planner, ...]] = {
    MaximizeRate: (solve_exactly, solve_at_scale),
    MinimizeCost: (solve_exactly, solve_at_scale),
    MinimizeLatency: (solve_soonest,),
}
"""Planners by objective. They are called one after the other until one proves its result."""
STRATEGY_PLANNERS: Mapping[Strategy, tuple[Planner, ...]] = {"pame": (solve_pame,)}
"""Planners of strategies that have a rule of their own, for any objective."""
MAX_DOUBLINGS = 15
"""How often `more_devices` doubles the number of additional accelerators."""


def solve(
    problem: PlanProblem, space: Space | Strategy = "best", planners: tuple[Planner, ...] | None = None
) -> Decision:
    """Returns the best plan of a space, or of a strategy's space, or a proof that no plan exists.

    Raises PlanError if the search neither finds a plan nor proves that none exists.
    """
    space = space if isinstance(space, Space) else SPACES[space]
    if problem.generation is not None:
        return solve_generation(problem, space, _solve_generation_exactly)
    if problem.networks:
        return best_of_networks(problem, partial(_solve, space=space, planners=planners), partial(_bound, space=space))
    return _solve(problem, space, planners)


def more_devices(problem: PlanProblem, strategy: Strategy) -> tuple[str, int] | None:
    """Returns an accelerator type and the least number of additional ones that an infeasible problem needs.

    It is the type whose addition is cheapest. The number is a lower bound, by a relaxation that is solved quickly.
    Returns None if no number of one type suffices, or if the objective is not the cost.
    """
    if not isinstance(problem.objective, MinimizeCost) or problem.generation is not None or problem.networks:
        return None
    space = SPACES[strategy]

    def may_suffice(name: str, more: int) -> bool:
        supply = problem.devices[name]
        devices = {**problem.devices, name: replace(supply, count=supply.count + more)}
        return _bound(replace(problem, devices=devices), space) is not None

    needed: dict[str, int] = {}
    for name in problem.devices:
        enough = next((1 << power for power in range(MAX_DOUBLINGS) if may_suffice(name, 1 << power)), None)
        if enough is not None:
            counts = range(enough // 2 + 1, enough + 1)
            needed[name] = counts[bisect_left(counts, True, key=partial(may_suffice, name))]
    prices = {name: more * problem.devices[name].usd_per_hour for name, more in needed.items()}
    cheapest = min(needed, key=lambda name: (prices[name], needed[name]), default=None)
    return None if cheapest is None else (cheapest, needed[cheapest])


def _solve_generation_exactly(problem: PlanProblem, space: Space) -> Decision:
    """Solves a problem of generation steps; raises PlanError if it is too large for the exact planner."""
    decision = solve_exactly(problem, _without_useless_ramps(problem, space))
    if decision is None:
        raise PlanError("generation is planned exactly; this problem has too many devices, ramps or batch sizes for it")
    return decision


def _bound(problem: PlanProblem, space: Space) -> float | None:
    """Returns a quickly computed bound on the plans of a space, or None if no plan exists."""
    if problem.lengths is not None:
        bound = _bound(in_tokens(problem), space)
        is_rate = isinstance(problem.objective, MaximizeRate)
        return bound / problem.lengths.mean if bound is not None and is_rate else bound
    if isinstance(problem.objective, MinimizeLatency):
        return bound_soonest(problem, space)
    return bound_at_scale(problem, _without_useless_ramps(problem, space))


def _solve(problem: PlanProblem, space: Space, planners: tuple[Planner, ...] | None) -> Decision:
    """Solves a problem whose networks are all used."""
    if problem.in_time:
        plain = partial(_solve, space=space, planners=planners)
        return solve_in_time(problem, plain, lambda other: _bound(other, space) is not None)
    if problem.lengths is not None:
        return _per_input(problem, _solve(in_tokens(problem), space, planners))
    space = _without_useless_ramps(problem, space)
    several = min(problem.most_chains, space.most_chains) > 1 and not problem.networks
    if planners is None and several and not isinstance(problem.objective, MinimizeLatency):
        decision = solve_chains(problem, space)
        return _among_several(problem, space) if decision is None else _no_worse_than_one(problem, space, decision)
    best: Decision | None = None
    if planners is None:
        planners = STRATEGY_PLANNERS.get(space.strategy, PLANNERS[type(problem.objective)])
    for planner in planners:
        decision = planner(problem, space)
        best = _better_of(problem, best, decision) if isinstance(best, Planned) else decision
        if isinstance(best, NoPlan) or (best is not None and best.gap == 0):
            break
    assert best is not None, "the last planner always decides"
    return best


def _no_worse_than_one(problem: PlanProblem, space: Space, several: Decision) -> Decision:
    """Returns the plan of several chains, or a better one of a single chain: the search for several is not exact."""
    if isinstance(several, NoPlan) or several.gap == 0:
        return several
    one = better_plan(problem, space, objective_value(problem, several.figures))
    if one is None or merit(problem, one.figures) <= merit(problem, several.figures):
        return several
    return one.planned(problem, space.strategy, several.bound, (several.stages, *several.candidates))


def _among_several(problem: PlanProblem, space: Space) -> Decision:
    """Returns a plan of one chain with the bound on plans of several chains, of which none was found.

    Raises PlanError if there is none of one chain for the required rate either.
    """
    if isinstance(problem.objective, MaximizeRate):
        # If there is no plan of one chain, there is none of several, because each of them would be one.
        one = _solve(problem, replace(space, most_chains=1), None)
    else:
        one = _at_required_rate(problem, space)
    if isinstance(one, NoPlan):
        return one
    relaxation = solve_relaxation(problem, space, payable_names(problem))
    assert relaxation is not None, "there is a plan"
    bound = relaxation.bound.value
    return replace(one, bound=bound, gap=gap_between(objective_value(problem, one.figures), bound))


def _at_required_rate(problem: PlanProblem, space: Space) -> Decision:
    """Returns a plan of one chain. If there is none, raises PlanError with the highest rate of plans of several."""
    try:
        return solve_at_scale(problem, space)
    except PlanError as error:
        fastest = solve_chains(replace(problem, objective=MaximizeRate()), space)
        if not isinstance(fastest, Planned):
            raise
        rates = f"serves {fastest.figures.rate_per_s:.6g}/s, and none more than {fastest.bound:.6g}/s"
        raise PlanError(f"no plan was found, though there may be one: the fastest one found {rates}") from error


def _per_input(problem: PlanProblem, decision: Decision) -> Decision:
    """Converts the result of a problem in tokens to inputs of the problem's lengths."""
    lengths = problem.lengths
    assert lengths is not None
    if isinstance(decision, NoPlan):
        rate_per_s = decision.highest_rate_per_s
        return replace(decision, highest_rate_per_s=None if rate_per_s is None else rate_per_s / lengths.mean)
    stages = with_budgets(problem, decision.stages)
    is_rate = isinstance(problem.objective, MaximizeRate)
    return replace(
        decision,
        stages=stages,
        figures=evaluate(problem, stages),
        bound=decision.bound / lengths.mean if is_rate else decision.bound,
        candidates=tuple(with_budgets(problem, each) for each in decision.candidates),
    )


def _without_useless_ramps(problem: PlanProblem, space: Space) -> Space:
    """Returns the space without ramps if answered inputs must stay: ramps then improve neither rate nor cost."""
    if isinstance(problem.objective, MinimizeLatency) or "stop" in space.after_answer:
        return space
    return replace(space, ramps="none")


def _better_of(problem: PlanProblem, first: Planned, second: Decision | None) -> Planned:
    """Returns the better of two plans with the tighter of their bounds."""
    assert isinstance(second, Planned), "no planner may rule out a problem that has a plan"
    better, other = sorted((first, second), key=lambda each: merit(problem, each.figures), reverse=True)
    tighter = min if isinstance(problem.objective, MaximizeRate) else max
    bound = tighter(first.bound, second.bound)
    gap = gap_between(objective_value(problem, better.figures), bound)
    return replace(better, bound=bound, gap=gap, candidates=(*better.candidates, other.stages, *other.candidates))
