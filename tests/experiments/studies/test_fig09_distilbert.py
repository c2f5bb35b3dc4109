from __future__ import annotations

import numpy as np
import pytest

from experiments.studies.distilbert_exits import ImdbRun
from experiments.studies.distilled import cut, distilled_cluster, half_of, imdb
from experiments.studies.fig09_distilbert import compare, most_exits
from simulator.decisions import STAYS
from tests.experiments.studies.small_cases import four_blocks, four_inputs, inputs_at


def imdb_run(left: int, *, is_plain: bool = True) -> ImdbRun:
    return ImdbRun(
        requests_per_s=30, is_plain=is_plain, num_inputs=100, exits={1: left}, agreement=0.99, saving=left / 200
    )


def test_the_run_is_apparates_own_with_most_exits() -> None:
    runs = [imdb_run(10), imdb_run(20), imdb_run(30, is_plain=False)]
    assert most_exits(runs) is runs[1]


def test_a_cut_model_has_the_first_blocks_and_the_ramps_between_them() -> None:
    found = cut(four_blocks(), 2)
    assert (found.num_blocks, found.ramps) == (2, (0,))
    assert found.latency["V100"].block_s_NB.shape == (2, 2)


def test_the_distilled_model_takes_half_of_berts_time() -> None:
    problem = distilled_cluster()
    assert problem.ramps == (0, 1, 2, 3, 4)
    # TensorRT's 1.23 ms at batch 1, 6.5 times slower, half of it.
    assert float(problem.latency["V100"].block_s_NB[:, 0].sum()) == pytest.approx(1.23e-3 * 6.5 / 2)


def test_imdb_inputs_leave_as_often_as_in_the_run() -> None:
    inputs = imdb(imdb_run(25))
    assert inputs.survival_N == pytest.approx((1, 1, 0.75, 0.75, 0.75, 0.75))


def test_half_a_model_has_every_second_ramp() -> None:
    decisions = half_of(four_inputs(), 0.4)
    assert decisions.ramps == (0,), "ramp 1 of four blocks, which sits after the second, ends the first of two"
    # Ramp 1 lets a and b out.
    np.testing.assert_array_equal(decisions.leaves_N((0,), (0,)), [0, 0, STAYS, STAYS])


def test_the_study_gives_every_side_with_quick_effort() -> None:
    inputs = inputs_at(0.4)
    result = compare(four_blocks(), inputs, inputs, "quick")
    assert all(each.ours is not None for each in result.comparisons)
    ours = {each.name: each.ours for each in result.comparisons}
    # Inputs take 1, 2, 3 and 4 of 4 blocks, and 1 + 0.75 + 0.5 ramps of a tenth.
    assert ours["full batches throughout / stock, batch 8"] == pytest.approx(4 / (2.5 + 0.225))
    assert result.e3.over_stock is not None
    assert result.best.over_stock is not None
    assert result.best.over_stock > 1
