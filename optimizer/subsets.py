"""Which networks of a chain a plan uses: the best of all sets that end with the last, each planned on its own.

A set is planned only where its bound could be better than the best plan so far, the most promising first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from optimizer.decision import Binding, Decision, NoPlan, Planned, gap_between
from optimizer.evaluate import TOLERANCE, evaluate, merit, objective_value
from optimizer.networks import Subproblem, Used, network_sets
from optimizer.problem import MaximizeRate, PlanProblem

Met = tuple[Subproblem, Planned]
Solve = Callable[[PlanProblem], Decision]
Bound = Callable[[PlanProblem], float | None]
"""What no plan is better than, in the unit of what is sought; None: proven to have none."""
LEAST_FIRST: tuple[Binding, ...] = ("latency", "ramps", "budget", "devices")
"""Of promises that cannot be kept, the one that would be given up first."""


def best_of_networks(problem: PlanProblem, solve: Solve, bound: Bound) -> Decision:
    """The best plan of a chain's, in its numbers; of equal ones that of the fewest networks, then as of any plans.

    Where there is none: what would do for any of the sets. Raises PlanError as the planners do.
    """
    parts = [Subproblem(whole=problem, used=used) for used in network_sets(problem)]
    at_best = {part.used: bound(part.problem) for part in parts}
    hopeful = [(at_most, part) for part in parts if (at_most := at_best[part.used]) is not None]
    is_rate = isinstance(problem.objective, MaximizeRate)
    hopeful.sort(key=lambda each: each[0], reverse=is_rate)  # stable: of equal ones the fewer networks first
    best: Met | None = None
    met: list[Met] = []
    none: dict[Used, NoPlan] = {}
    for at_most, part in hopeful:
        if best is not None and not _may_beat(problem, at_most, part, best):
            continue
        decision = solve(part.problem)
        if isinstance(decision, NoPlan):
            none[part.used], at_best[part.used] = decision, None
            continue
        at_best[part.used] = decision.bound
        met.append((part, decision))
        best = met[-1] if best is None or _beats(problem, met[-1], best) else best
    if best is None:
        asked = [none.get(part.used) or solve(part.problem) for part in parts]
        return _none([each for each in asked if isinstance(each, NoPlan)])
    return _of_chain(problem, best, met, [each for each in at_best.values() if each is not None])


def _may_beat(problem: PlanProblem, at_most: float, part: Subproblem, best: Met) -> bool:
    value = objective_value(problem, best[1].figures)
    if _same(at_most, value):
        return len(part.used) <= len(best[0].used)
    return at_most > value if isinstance(problem.objective, MaximizeRate) else at_most < value


def _beats(problem: PlanProblem, one: Met, other: Met) -> bool:
    """By what is sought, then by the number of networks, then as plans of one network are compared."""
    values = [objective_value(problem, each[1].figures) for each in (one, other)]
    if not _same(*values):
        return values[0] > values[1] if isinstance(problem.objective, MaximizeRate) else values[0] < values[1]
    sizes = [len(each[0].used) for each in (one, other)]
    if sizes[0] != sizes[1]:
        return sizes[0] < sizes[1]
    return merit(problem, one[1].figures) > merit(problem, other[1].figures)


def _same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=TOLERANCE)


def _of_chain(problem: PlanProblem, best: Met, met: Sequence[Met], bounds: Sequence[float]) -> Planned:
    """A set's plan, in the chain's numbers and with the bound of all sets; other sets' plans are candidates."""
    part, planned = best
    value = objective_value(problem, planned.figures)
    bound = max([value, *bounds]) if isinstance(problem.objective, MaximizeRate) else min([value, *bounds])
    bound = planned.bound if _same(bound, planned.bound) else bound
    candidates = [part.in_chain(each) for each in planned.candidates]
    for other, decision in met:
        if other is not part:
            candidates += [other.in_chain(each) for each in (decision.stages, *decision.candidates)]
    stages = part.in_chain(planned.stages)
    return replace(
        planned,
        stages=stages,
        figures=evaluate(problem, stages),
        bound=bound,
        gap=gap_between(value, bound) if bound != planned.bound else planned.gap,
        candidates=tuple(dict.fromkeys(candidates)),
    )


def _none(answers: Sequence[NoPlan]) -> NoPlan:
    """What would do for any of the sets."""
    slos = [each.nearest_slo_s for each in answers if each.nearest_slo_s is not None]
    rates = [each.highest_rate_per_s for each in answers if each.highest_rate_per_s is not None]
    nearest = min(answers, key=lambda each: LEAST_FIRST.index(each.binding))
    return replace(nearest, nearest_slo_s=min(slos, default=None), highest_rate_per_s=max(rates, default=None))
