"""The planner's choice held against what was measured."""

from __future__ import annotations

from argparse import Namespace

import numpy as np
import pytest

from experiments.generation.choice import BATCHES, HALF, SHRINKING, STOCK, by_the_model, chosen_of, problem_of, row
from optimizer.problem import PlanProblem
from profiles.table import LatencyTable


def asked(per_token_s: float, at_once: int) -> PlanProblem:
    """Four blocks of 10 ms and a time per token; half of the tokens leave after the second."""
    block_s = 0.01 + per_token_s * np.tile(np.array(BATCHES, dtype=float), (4, 1))
    steps = LatencyTable(batches=BATCHES, block_s_NB=block_s, ramp_s_EB=np.full((1, len(BATCHES)), 0.001), length=1)
    prompt = LatencyTable(batches=(1,), block_s_NB=np.full((4, 1), 0.01), ramp_s_EB=np.zeros((1, 1)), length=16)
    options = Namespace(ramp=1, share=0.5, prompt=16, tokens=100, fill="compute")
    return problem_of(4, steps, prompt, at_once, options)


def test_a_step_alone_wins_by_an_exit_what_nobody_is_left_for() -> None:
    problem = asked(0.0, 1)
    found = by_the_model(problem, 1)
    assert found[SHRINKING] == pytest.approx((4 + 4 / 99) / (3 + 0.1 + 4 / 99), rel=1e-3)
    assert found[HALF] <= found[SHRINKING]
    assert chosen_of(problem) == SHRINKING


def test_halves_are_not_chosen_where_weights_are_read_twice() -> None:
    problem = asked(0.0, 16)
    assert by_the_model(problem, 16)[HALF] < 0.9
    assert chosen_of(problem) in (STOCK, SHRINKING)


@pytest.mark.parametrize(
    ("chosen", "constant", "right"),
    [(STOCK, 1.2, "yes"), (HALF, 0.9, "NO"), (HALF, 1.09, "yes"), (SHRINKING, 0.7, "yes")],
)
def test_it_is_wrong_to_regroup_where_that_loses(chosen: str, constant: float, right: str) -> None:
    measured = {STOCK: 1.0, SHRINKING: 1.1, "constant": constant, HALF: 0.8}
    planned = {STOCK: 1.0, SHRINKING: 1.0, HALF: 1.0}
    assert row(8, 20.0, measured, planned, chosen)[-1] == right
