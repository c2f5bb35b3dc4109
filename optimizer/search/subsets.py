"""Selects the networks of a cascade that a plan uses, by branch and bound over all sets that contain the last network.

Sets are planned in the order of their bounds, and only while a bound is better than the best plan so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from earlyexit.errors import PlanError
from optimizer.cost.evaluate import TOLERANCE, best_value, evaluate, merit, objective_value
from optimizer.problems.networks import Subproblem, Used, network_sets
from optimizer.problems.problem import MaximizeRate, PlanProblem
from optimizer.search.decision import Binding, Decision, NoPlan, Planned, gap_between
from optimizer.search.in_time import excess_s

Incumbent = tuple[Subproblem, Planned]
LEAST_FIRST: tuple[Binding, ...] = ("latency", "ramps", "budget", "devices")
"""Binding constraints, in the order in which they are reported if subproblems differ."""


def best_of_networks(
    problem: PlanProblem, solve: Callable[[PlanProblem], Decision], bound: Callable[[PlanProblem], float | None]
) -> Decision:
    """Returns the best plan over all sets of networks. Among equally good plans, fewer networks are preferred.

    If no set has a plan, the result names the least changes with which any of the sets has one. Raises PlanError if
    no plan is found and `solve` raises it for a set. `bound` returns a bound on the objective of all plans, or None if
    no plan exists.
    """
    parts = [Subproblem(whole=problem, used=used) for used in network_sets(problem)]
    bounds = {part.used: bound(part.problem) for part in parts}
    open_parts = [(part_bound, part) for part in parts if (part_bound := bounds[part.used]) is not None]
    open_parts.sort(key=lambda each: _rank_of_value(problem, *each))
    best: Incumbent | None = None
    solved: list[Incumbent] = []
    infeasible: dict[Used, NoPlan] = {}
    gave_up: PlanError | None = None
    for part_bound, part in open_parts:
        if best is not None and (0.0, *_rank_of_value(problem, part_bound, part)) > _rank(problem, best)[:3]:
            continue
        try:
            decision = solve(part.problem)
        except PlanError as error:  # the search gave up, and the set keeps its bound
            gave_up = gave_up or error
            continue
        if isinstance(decision, NoPlan):
            infeasible[part.used], bounds[part.used] = decision, None
            continue
        bounds[part.used] = decision.bound
        solved.append((part, decision))
        best = min(solved, key=partial(_rank, problem))
    if best is None:
        if gave_up is not None:
            raise gave_up
        decisions = [infeasible.get(part.used) or solve(part.problem) for part in parts]
        return _no_plan([each for each in decisions if isinstance(each, NoPlan)])
    return _in_cascade(problem, best, solved, [each for each in bounds.values() if each is not None])


def _rank(problem: PlanProblem, found: Incumbent) -> tuple[float, ...]:
    """Returns the key by which plans are ranked, best first: their excess, the rank of their value, then `merit`."""
    part, planned = found
    value, merits = objective_value(problem, planned.figures), merit(problem, planned.figures)
    return excess_s(part.problem, planned), *_rank_of_value(problem, value, part), *(-each for each in merits)


def _rank_of_value(problem: PlanProblem, value: float, part: Subproblem) -> tuple[float, int]:
    """Ranks values of the objective, best first. Of values that only rounding separates, fewer networks are better."""
    sign = -1 if isinstance(problem.objective, MaximizeRate) else 1
    return sign * float(f"{value:.9g}"), len(part.used)


def _in_cascade(problem: PlanProblem, best: Incumbent, solved: Sequence[Incumbent], bounds: Sequence[float]) -> Planned:
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


def _no_plan(answers: Sequence[NoPlan]) -> NoPlan:
    """Returns the result for the cascade if no set of networks has a plan: the least changes that help any set."""
    slos = [each.nearest_slo_s for each in answers if each.nearest_slo_s is not None]
    rates = [each.highest_rate_per_s for each in answers if each.highest_rate_per_s is not None]
    nearest = min(answers, key=lambda each: LEAST_FIRST.index(each.binding))
    return replace(nearest, nearest_slo_s=min(slos, default=None), highest_rate_per_s=max(rates, default=None))
