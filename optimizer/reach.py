"""The share of inputs that reaches each block, by the ramps that are active."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from optimizer.problem import PlanProblem

Reach = Callable[[Sequence[int]], Sequence[float]]
"""From the active ramps to the share of inputs that reach every block (N)."""


def nested_reach(problem: PlanProblem) -> Reach:
    """The planner's view of survival: an input that passes the last active ramp would pass all earlier ones."""

    def reach(active: Sequence[int]) -> Sequence[float]:
        return nested_shares(problem.survival_N, active)

    return reach


def nested_shares(survival_N: Sequence[float], active: Sequence[int]) -> list[float]:
    """Per block, the share of inputs that reaches it with these ramps active, by a nested survival."""
    shares, share = [], 1.0
    for block in range(len(survival_N)):
        shares.append(share)
        share = survival_N[block + 1] if block in active else share
    return shares
