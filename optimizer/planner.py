"""From a plan problem to the best plan of a strategy's space, or why there is none."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from optimizer.decision import Decision, NoPlan, Strategy
from optimizer.evaluate import evaluate
from optimizer.generation.solve import solve_generation
from optimizer.pame.solve import solve_pame
from optimizer.problem import MaximizeRate, MinimizeLatency, PlanProblem
from optimizer.search.chains import bound_of, solve_chains
from optimizer.space import SPACES, Space
from optimizer.subsets import best_of_networks
from optimizer.tokens import in_tokens, with_budgets


def solve(problem: PlanProblem, space: Space | Strategy = "best") -> Decision:
    """The best plan of a space, or of a strategy's, proven so or with a gap, or what keeps it from having one.

    Raises PlanError where no plan is found and none is ruled out.
    """
    space = space if isinstance(space, Space) else SPACES[space]
    if problem.generation is not None:
        return solve_generation(problem, space, lambda steps, part: solve_chains(steps, _sensible(steps, part)))
    if problem.networks:
        return best_of_networks(problem, partial(_solve, space=space), partial(_bound, space=space))
    return _solve(problem, space)


def _bound(problem: PlanProblem, space: Space) -> float | None:
    """What no plan of a space is better than, soon told; None: there is none."""
    return bound_of(problem, _sensible(problem, space))


def _solve(problem: PlanProblem, space: Space) -> Decision:
    """Of a problem whose networks are all used."""
    if problem.lengths is not None:
        return _of_inputs(problem, _solve(in_tokens(problem), space))
    if space.strategy == "pame":
        return solve_pame(problem, space)
    return solve_chains(problem, _sensible(problem, space))


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
