from __future__ import annotations

import numpy as np
import pytest

from experiments.studies.e3_case import even_exits, exits_at_once, like_e3, ramp_share, with_ramps_of
from experiments.studies.savings import savings
from experiments.studies.sides import equal_cluster
from tests.experiments.studies.small_cases import four_blocks


def test_as_many_inputs_leave_after_every_block() -> None:
    assert even_exits(four_blocks()).survival_N == pytest.approx((1, 0.75, 0.5, 0.25))


def test_half_of_the_inputs_leave_at_once_in_the_middle() -> None:
    assert exits_at_once(four_blocks()).survival_N == pytest.approx((1, 1, 0.5, 0.5))


def test_made_up_inputs_are_the_same_for_the_same_seed() -> None:
    one, other = (even_exits(four_blocks(), seed=3) for _ in range(2))
    np.testing.assert_array_equal(one.rows_N, other.rows_N)


def test_a_ramp_takes_its_share_of_the_block_before_it() -> None:
    table = with_ramps_of(four_blocks(), 0.5).latency["V100"]
    np.testing.assert_allclose(table.ramp_s_EB, [[0.005, 0.020]] * 3)
    np.testing.assert_allclose(table.block_s_NB, four_blocks().latency["V100"].block_s_NB)


def test_the_share_of_a_ramp_follows_from_what_leaving_ramps_out_gains() -> None:
    # 4 blocks and 3 ramps of x, or 4 blocks and 1 ramp of x: (4 + 3 x) / (4 + x) = 1.2 for x = 4 / 9.
    share = ramp_share(four_blocks(), gain=1.2, num_splits=2)
    assert share == pytest.approx(4 / 9)
    assert (4 + 3 * share) / (4 + share) == pytest.approx(1.2)


def test_a_batch_of_eight_takes_as_long_as_one_input_where_eight_do_not_fill_an_accelerator() -> None:
    problem = like_e3(four_blocks())
    table = problem.latency["V100"]
    np.testing.assert_allclose(table.block_s_NB, 0.040)
    np.testing.assert_allclose(table.ramp_s_EB, 0.040 * ramp_share(problem))


def test_even_exits_save_what_e3_says_its_exits_save_at_batch_one() -> None:
    problem = equal_cluster()
    saved = savings(even_exits(problem).survival_N, problem.latency["V100"], problem.ramps)
    assert saved.latency == pytest.approx(0.427, abs=0.01), "E3, figure 2"
