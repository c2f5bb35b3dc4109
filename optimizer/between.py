"""What passes between batches: a hop's seconds, a crossing's, and the wait until the next batch is full."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from earlyexit.network.boundary import Split
from optimizer.networks import crossings
from optimizer.plan import Stage
from optimizer.problem import PlanProblem


def hop_s(problem: PlanProblem, split: Split, share_N: Sequence[float]) -> float:
    """E3's T_x, of what is left of a batch."""
    enters = share_N[split.first]
    leaves = split.batch * (share_N[split.end] / enters if enters else 1.0)
    return problem.link.seconds(problem.bytes_per_sample_N[split.end - 1] * leaves)


def crossing_s(problem: PlanProblem, stage: Stage, split: Split, share_N: Sequence[float]) -> float:
    """From a network's end to the next one's batches, without the hop that ends a stage anyway; 0 elsewhere."""
    if split.end not in crossings(problem):
        return 0.0
    return problem.crossing_s + (0.0 if split.end == stage.end else hop_s(problem, split, share_N))


def wait_s(problem: PlanProblem, stage: Stage, index: int, rate_per_s: float, share_N: Sequence[float]) -> float:
    """Until a split's batch is full: at the ingress by all that comes, inside a stage by every replica for itself."""
    split = stage.splits[index]
    filled_apart = 1 if index == 0 or split.first in crossings(problem) else stage.replicas
    return divided(filled_apart * split.batch, rate_per_s * share_N[split.first])


def divided(amount: float, by: float) -> float:
    """A quotient; infinite where nothing divides."""
    return amount / by if by > 0 else np.inf
