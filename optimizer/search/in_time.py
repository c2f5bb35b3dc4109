"""Plans that keep the latency limit under random arrivals, by repeated searches with tighter limits.

The searches do not model queues: a plan may use the whole latency limit, or serve exactly the required rate. If too
many inputs would be late (`optimizer.cost.evaluate.queue_s`), the search is repeated with a shorter latency limit, and
with a rate so high that the previous plan's queues would fit into the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain

from earlyexit.errors import PlanError
from optimizer.cost.evaluate import evaluate, loads, milliseconds, queue_s, violations
from optimizer.problems.problem import MinimizeCost, PlanProblem
from optimizer.search.decision import Decision, Planned

QUEUE_SHARES = (0.25, 0.4, 0.1, 0.6)
"""Shares of the latency limit that are reserved for queues, tried in this order until the queues fit."""


def solve_in_time(
    problem: PlanProblem, solve: Callable[[PlanProblem], Decision], may_do: Callable[[PlanProblem], bool]
) -> Decision:
    """Returns a plan with room for queues, or else the plan that comes closest to the limit.

    The plan's note names the tighter limits among which its gap is proven, or says that the limit is not kept. `may_do`
    is a quick test that rules out most problems without a plan.
    """
    assert isinstance(problem.objective, MinimizeCost), "in_time belongs to this objective alone"
    plain = replace(problem, objective=replace(problem.objective, in_time=0.0))
    rate_per_s = required_per_s = problem.objective.rate_per_s
    limit_s, decision = problem.slo.limit_s, solve(plain)
    if not isinstance(decision, Planned) or not violations(problem, decision.stages, decision.figures):
        return decision
    met = [decision]
    for share in QUEUE_SHARES:
        room_s = max(share * limit_s, limit_s - decision.figures.latency_s)
        for load in chain.from_iterable(loads(problem, decision.stages, decision.figures)):
            rate_per_s = max(rate_per_s, required_per_s * load.overprovisioning(1 - problem.in_time, room_s))
        allowed_s = (1 - share) * limit_s
        slo = replace(problem.slo, slack=1 - allowed_s / problem.slo.latency_s)
        tighter = replace(plain.with_rate(rate_per_s), slo=slo)
        try:
            found = solve(tighter) if may_do(tighter) else None
        except PlanError:  # the search neither found a plan nor proved that none exists
            continue
        if isinstance(found, Planned):
            figures = evaluate(problem, found.stages, shares=found.figures.shares)
            note = f"room for queues: planned and proven for {rate_per_s:.6g}/s within {milliseconds(allowed_s)}"
            others = [each for each in found.candidates if not violations(problem, each, evaluate(problem, each))]
            decision = replace(found, figures=figures, note=note, candidates=tuple(others))
            if not violations(problem, found.stages, figures):
                return decision
            met.append(decision)
    nearest = min(met, key=lambda each: each.figures.latency_s + queue_s(problem, each.stages, each.figures))
    return replace(nearest, note=f"less than {problem.in_time:.4g} of inputs that arrive at random may be in time")
