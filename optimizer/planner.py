"""From a plan problem to the best plan of a strategy's space, or why there is none."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from earlyexit.errors import PlanError
from optimizer.chains import solve_chains
from optimizer.decision import Decision, NoPlan, Planned, Strategy, gap_between
from optimizer.evaluate import evaluate, merit, objective_value
from optimizer.exact.solve import one_better, solve_exactly
from optimizer.generation.solve import solve_generation
from optimizer.in_time import solve_in_time
from optimizer.pame.solve import solve_pame
from optimizer.problem import MaximizeRate, MinimizeCost, MinimizeLatency, Objective, PlanProblem
from optimizer.scale.solve import bound_at_scale, solve_at_scale
from optimizer.soonest.solve import bound_soonest, solve_soonest
from optimizer.space import SPACES, Space
from optimizer.subsets import best_of_networks
from optimizer.tokens import in_tokens, with_budgets

Planner = Callable[[PlanProblem, Space], Decision | None]
"""None where it cannot tell."""

PLANNERS: Mapping[type[Objective], tuple[Planner, ...]] = {
    MaximizeRate: (solve_exactly, solve_at_scale),
    MinimizeCost: (solve_exactly, solve_at_scale),
    MinimizeLatency: (solve_soonest,),
}
"""By what is sought. Asked one after the other, until one proves its answer."""
OF_STRATEGIES: Mapping[Strategy, tuple[Planner, ...]] = {"pame": (solve_pame,)}
"""Of strategies that choose by a rule of their own, whatever is sought."""
MOST_DOUBLINGS = 15
"""How often the number of further accelerators is doubled where a problem has no plan."""


def solve(
    problem: PlanProblem, space: Space | Strategy = "best", planners: tuple[Planner, ...] | None = None
) -> Decision:
    """The best plan of a space, or of a strategy's, proven so or with a gap, or what keeps it from having one.

    Raises PlanError where no plan is found and none is ruled out.
    """
    space = space if isinstance(space, Space) else SPACES[space]
    if problem.generation is not None:
        return solve_generation(problem, space, _exactly)
    if problem.networks:
        return best_of_networks(problem, partial(_solve, space=space, planners=planners), partial(_bound, space=space))
    return _solve(problem, space, planners)


def more_devices(problem: PlanProblem, strategy: Strategy) -> tuple[str, int] | None:
    """An accelerator type, and how many more of it a problem without a plan needs at least.

    It is the type that is the cheapest to add to, by a bound that is found quickly: with fewer there is no plan. None
    where no number of one type suffices, or the objective is not the cost.
    """
    if not isinstance(problem.objective, MinimizeCost) or problem.generation is not None or problem.networks:
        return None
    space = SPACES[strategy]

    def may_do(name: str, more: int) -> bool:
        supply = problem.devices[name]
        devices = {**problem.devices, name: replace(supply, count=supply.count + more)}
        return _bound(replace(problem, devices=devices), space) is not None

    needed: dict[str, int] = {}
    for name in problem.devices:
        most = next((1 << power for power in range(MOST_DOUBLINGS) if may_do(name, 1 << power)), None)
        if most is not None:
            fewer = range(most // 2 + 1, most + 1)
            needed[name] = fewer[bisect_left(fewer, True, key=partial(may_do, name))]
    return min(
        needed.items(), key=lambda each: (each[1] * problem.devices[each[0]].usd_per_hour, each[1]), default=None
    )


def _exactly(problem: PlanProblem, space: Space) -> Decision:
    """Of steps; raises PlanError where a problem is too large for that."""
    decision = solve_exactly(problem, _sensible(problem, space))
    if decision is None:
        raise PlanError("generation is planned exactly, and here are too many devices, ramps or batch sizes for that")
    return decision


def _bound(problem: PlanProblem, space: Space) -> float | None:
    """What no plan of a space is better than, soon told; None: there is none."""
    if problem.lengths is not None:
        found = _bound(in_tokens(problem), space)
        is_rate = isinstance(problem.objective, MaximizeRate)
        return found / problem.lengths.mean if found is not None and is_rate else found
    if isinstance(problem.objective, MinimizeLatency):
        return bound_soonest(problem, space)
    return bound_at_scale(problem, _sensible(problem, space))


def _solve(problem: PlanProblem, space: Space, planners: tuple[Planner, ...] | None) -> Decision:
    """Of a problem whose networks are all used."""
    if problem.in_time:
        plain = partial(_solve, space=space, planners=planners)
        return solve_in_time(problem, plain, lambda other: _bound(other, space) is not None)
    if problem.lengths is not None:
        return _of_inputs(problem, _solve(in_tokens(problem), space, planners))
    space = _sensible(problem, space)
    several = min(problem.most_chains, space.most_chains) > 1 and not problem.networks
    if planners is None and several and not isinstance(problem.objective, MinimizeLatency):
        decision = solve_chains(problem, space)
        if decision is not None:
            return _no_worse_than_one(problem, space, decision)
    best: Decision | None = None
    usual = OF_STRATEGIES.get(space.strategy, PLANNERS[type(problem.objective)])
    for planner in usual if planners is None else planners:
        decision = planner(problem, space)
        best = _together(problem, best, decision) if isinstance(best, Planned) else decision
        if isinstance(best, NoPlan) or (best is not None and best.gap == 0):
            break
    assert best is not None, "the last planner always tells"
    return best


def _no_worse_than_one(problem: PlanProblem, space: Space, several: Decision) -> Decision:
    """A plan of several chains, or that of one which is better: the search for several is not exact."""
    if isinstance(several, NoPlan) or several.gap == 0:
        return several
    one = one_better(problem, space, objective_value(problem, several.figures))
    if one is None or merit(problem, one.figures) <= merit(problem, several.figures):
        return several
    return one.planned(problem, space.strategy, several.bound, (several.stages, *several.candidates))


def _of_inputs(problem: PlanProblem, decision: Decision) -> Decision:
    """What was found for tokens, for inputs of the problem's lengths."""
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


def _sensible(problem: PlanProblem, space: Space) -> Space:
    """Where inputs stay, ramps cost time and win neither rate nor money: plans that must stay then have none."""
    if isinstance(problem.objective, MinimizeLatency) or "stop" in space.after_answer:
        return space
    return replace(space, ramps="none")


def _together(problem: PlanProblem, first: Planned, second: Decision | None) -> Planned:
    """The better of two plans, and the tighter of two bounds."""
    assert isinstance(second, Planned), "there is a plan, so none is ruled out"
    better, other = sorted((first, second), key=lambda each: merit(problem, each.figures), reverse=True)
    tighter = min if isinstance(problem.objective, MaximizeRate) else max
    bound = tighter(first.bound, second.bound)
    gap = gap_between(objective_value(problem, better.figures), bound)
    return replace(better, bound=bound, gap=gap, candidates=(*better.candidates, other.stages, *other.candidates))
