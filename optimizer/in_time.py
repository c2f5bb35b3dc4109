"""Plans that keep a latency where inputs arrive at random: the searches know of no queues, so they are asked again.

What a search finds may use the whole latency limit, or do just the rate. Where too many inputs would be late then
(`optimizer.evaluate.queue_s`), the same search is asked for a shorter latency, and for so high a rate that the queues
of the plan before would fit into the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from earlyexit.errors import PlanError
from optimizer.decision import Decision, Planned
from optimizer.evaluate import evaluate, loads, milliseconds, queue_s, violations
from optimizer.problem import MinimizeCost, PlanProblem

ROOMS = (0.25, 0.4, 0.1, 0.6)
"""Shares of the latency limit that are kept for queues, one after the other until they fit."""


def solve_in_time(
    problem: PlanProblem, solve: Callable[[PlanProblem], Decision], may_do: Callable[[PlanProblem], bool]
) -> Decision:
    """A plan with room for queues, proven among plans that keep the limits of its note; or the nearest, with a note.

    `may_do` is soon told, of most problems that have no plan.
    """
    assert isinstance(problem.objective, MinimizeCost), "only of these a share in time is said"
    plain = replace(problem, objective=replace(problem.objective, in_time=0.0))
    rate_per_s = required_per_s = problem.objective.rate_per_s
    limit_s, decision = problem.slo.limit_s, solve(plain)
    if not isinstance(decision, Planned) or not violations(problem, decision.stages, decision.figures):
        return decision
    met = [decision]
    for share in ROOMS:
        room_s = max(share * limit_s, limit_s - decision.figures.latency_s)
        needed = [each for of_chain in loads(problem, decision.stages, decision.figures) for each in of_chain]
        rate_per_s = max(rate_per_s, *(required_per_s * each.times(1 - problem.in_time, room_s) for each in needed))
        allowed_s = (1 - share) * limit_s
        slo = replace(problem.slo, slack=1 - allowed_s / problem.slo.latency_s)
        tighter = replace(plain.with_rate(rate_per_s), slo=slo)
        try:
            found = solve(tighter) if may_do(tighter) else None
        except PlanError:  # none was found, and none is ruled out
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
