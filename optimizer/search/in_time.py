"""Plans that keep the latency limit under random arrivals, by repeated searches with tighter limits.

The searches do not model queues: a plan may use the whole latency limit, or serve exactly the required rate. If too
many inputs would be late (`optimizer.cost.evaluate.queue_s`), the search is repeated with a shorter latency limit, and
with a rate so high that the previous plan's queues would fit into the difference. Strategies that the space contains
are searched likewise: of equally cheap plans, they may find one with more room. Then replicas are added to each plan
until its queues fit, and those that it can spare are removed. No plan is cheaper than the best one without queues, so
the gap is the distance to that plan's bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain

from earlyexit.errors import PlanError
from optimizer.cost.evaluate import TOLERANCE, evaluate, loads, milliseconds, queue_s, violations
from optimizer.problems.problem import ANY_LATENCY_S, MinimizeCost, PlanProblem
from optimizer.search.decision import Decision, Planned, gap_between
from optimizer.search.space import Space

QUEUE_SHARES = (0.25, 0.4, 0.1, 0.6)
"""Shares of the latency limit that are reserved for queues, tried in this order until the queues fit."""
LARGE_STEP = 50
"""Part of a stage's replicas by which they are changed at once, so that few steps suffice for thousands of them."""
Solve = Callable[[PlanProblem, Space], Decision]
Bound = Callable[[PlanProblem, Space], float | None]
"""A quick bound. It is None for most problems without a plan."""


def solve_in_time(problem: PlanProblem, space: Space, solve: Solve, bound: Bound) -> Decision:
    """Returns the cheapest plan found with room for queues, or else the plan that comes closest to the limit.

    The plan's note names the tighter limits for which it was planned, or says that the limit is not kept.
    """
    first, *others = _plans(problem, space, solve, bound)
    if not isinstance(first, Planned) or not excess_s(problem, first):
        return first
    for each in space.contained():
        with suppress(PlanError):  # the search neither found a plan nor proved that none exists
            others += _plans(problem, each, solve, bound) if bound(problem, each) is not None else []
    plans = [_with_fitting_replicas(problem, each) for each in (first, *others) if isinstance(each, Planned)]
    best = min(plans, key=partial(_rank, problem))
    late = f"less than {problem.in_time:.4g} of inputs that arrive at random may be in time"
    note = late if excess_s(problem, best) else best.note
    gap = gap_between(best.figures.usd_per_hour, first.bound)
    return replace(best, strategy=first.strategy, bound=first.bound, gap=gap, note=note)


def excess_s(problem: PlanProblem, planned: Planned) -> float:
    """Returns by how much a plan exceeds the SLO with its queues; 0 if it keeps the SLO."""
    needed_s = planned.figures.latency_s + queue_s(problem, planned.stages, planned.figures)
    limit_s = problem.slo.limit_s
    return needed_s - limit_s if needed_s > limit_s * (1 + TOLERANCE) else 0.0


def _rank(problem: PlanProblem, planned: Planned) -> tuple[float, float]:
    """Returns the key by which plans are ranked, the best first."""
    return excess_s(problem, planned), planned.figures.usd_per_hour


def _with_fitting_replicas(problem: PlanProblem, planned: Planned) -> Planned:
    """Returns the plan after adding or removing replicas of one stage at a time, as long as this improves its rank."""
    patient = replace(problem, slo=replace(problem.slo, latency_s=ANY_LATENCY_S))
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
        best = min(plans, key=partial(_rank, problem))
        if best is planned:
            return planned
        planned = best


def _plans(problem: PlanProblem, space: Space, solve: Solve, bound: Bound) -> Iterator[Decision]:
    """Yields the result without queues, and then plans for tighter limits until one has room for its queues."""
    assert isinstance(problem.objective, MinimizeCost), "in_time belongs to this objective alone"
    plain = replace(problem, objective=replace(problem.objective, in_time=0.0))
    rate_per_s = required_per_s = problem.objective.rate_per_s
    limit_s, best = problem.slo.limit_s, solve(plain, space)
    yield best
    for share in QUEUE_SHARES:
        if not isinstance(best, Planned) or not excess_s(problem, best) or space.is_over():
            return
        room_s = max(share * limit_s, limit_s - best.figures.latency_s)
        for load in chain.from_iterable(loads(problem, best.stages, best.figures)):
            rate_per_s = max(rate_per_s, required_per_s * load.overprovisioning(1 - problem.in_time, room_s))
        allowed_s = (1 - share) * limit_s
        slo = replace(problem.slo, slack=1 - allowed_s / problem.slo.latency_s)
        tighter = replace(plain.with_rate(rate_per_s), slo=slo)
        try:
            found = None if bound(tighter, space) is None else solve(tighter, space)
        except PlanError:  # as above
            continue
        if isinstance(found, Planned):
            figures = evaluate(problem, found.stages, shares=found.figures.shares)
            note = f"room for queues: planned for {rate_per_s:.6g}/s within {milliseconds(allowed_s)}"
            candidates = [each for each in found.candidates if not violations(problem, each, evaluate(problem, each))]
            best = replace(found, figures=figures, note=note, candidates=tuple(candidates))
            yield best
