"""The brute-force reference enumerates every plan, and scores each as the cost model does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.random import default_rng

from optimizer.cost.evaluate import evaluate
from optimizer.problems.problem import PlanProblem
from optimizer.problems.problem_file import parse_problem
from tests.optimizer.brute_force import BruteForce, layouts, plan_of
from tests.optimizer.plain_problem import DOCUMENT, random_chain, random_latency_problem, random_problem


def problem(num_blocks: int, count: int) -> PlanProblem:
    """Returns a problem with two batch sizes, and a ramp after each block but the last."""
    blocks = {
        "blocks": num_blocks,
        "ramps": list(range(num_blocks - 1)),
        "survival": [1.0, 0.5, 0.4, 0.3][:num_blocks],
        "latency": {"V100": {"batch": [2, 4], "block_s": [[1, 1]] * num_blocks, "ramp_s": [[1, 1]] * (num_blocks - 1)}},
        "devices": {"V100": {"count": count}},
    }
    return parse_problem(DOCUMENT | blocks).problem


def test_the_space_of_four_blocks_is_complete() -> None:
    # c splits: C(3, c-1) cuts and 2**c batches; g stages of them: C(c-1, g-1) groupings; 3 devices: C(3, g) choices of
    # replicas; 3 ramps: 2**3. In all 8 * sum over c of C(3, c-1) * 2**c * C(c+2, 2), by Vandermonde's identity.
    four = problem(4, 3)
    num_plans = sum(scores.rate_per_s_PQ.size for scores in map(BruteForce(four).scores, layouts(four, "best")))
    assert num_plans == 8 * (1 * 2 * 3 + 3 * 4 * 6 + 3 * 8 * 10 + 1 * 16 * 15)


@pytest.mark.parametrize("seeds", [range(15), pytest.param(range(15, 60), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("random", [random_problem, random_latency_problem, random_chain])
def test_brute_force_scores_equal_those_of_the_cost_model(random: Callable[[int], PlanProblem], seeds: range) -> None:
    for seed in seeds:
        problem, rng = random(seed), default_rng(seed)
        twin, spaces = BruteForce(problem), list(layouts(problem, "best"))
        chosen = [spaces[index] for index in rng.permutation(len(spaces))[:30]]
        scored = [(layout, scores) for layout in chosen for scores in [twin.scores(layout)] if len(scores.replicas_QG)]
        assert scored or not spaces, seed
        for layout, scores in scored:
            p, q = rng.integers(len(scores.batch_PS)), rng.integers(len(scores.replicas_QG))
            figures = evaluate(problem, plan_of(layout, scores.batch_PS[p], scores.replicas_QG[q]))
            assert scores.rate_per_s_PQ[p, q] == pytest.approx(figures.rate_per_s, rel=1e-12), seed
            assert scores.latency_s_PQ[p, q] == pytest.approx(figures.latency_s, rel=1e-12), seed
            if np.isfinite(figures.latency_s):  # an unreached split makes a plan infeasible
                assert scores.mean_s_PQ[p, q] == pytest.approx(figures.mean_latency_s, rel=1e-12), seed
            assert scores.overhead_P[p] == pytest.approx(figures.ramp_overhead, rel=1e-12), seed
            assert scores.usd_per_hour_Q[q] == pytest.approx(figures.usd_per_hour, rel=1e-12), seed
