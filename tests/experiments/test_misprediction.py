from __future__ import annotations

import numpy as np
import pytest

from experiments.misprediction import ERRORS, mispredicted, too_few_leave, too_many_leave
from optimizer.problem import Link, MaximizeRate, PlanProblem, Slo, Supply
from profiles.table import LatencyTable


def test_with_half_of_the_error_half_of_those_who_leave_are_not_seen() -> None:
    # E3 section 5.8.3: of 16 inputs 8 are left; with an error of 50 % the planner expects 12.
    assert 16 * too_few_leave(0.5, 0.5) == 12


def test_an_error_the_other_way_sees_half_of_the_survivors() -> None:
    assert 16 * too_many_leave(0.5, 0.5) == 4
    assert too_many_leave(1.0, 0.5) == 1, "before the first ramp there is nothing to mispredict"


@pytest.mark.parametrize("predict", [too_few_leave, too_many_leave])
def test_without_an_error_the_truth_is_predicted(predict: object) -> None:
    assert callable(predict)
    assert predict(0.3, 0.0) == 0.3


def problem() -> PlanProblem:
    """Two blocks, half of the inputs leave after the first; a batch of 2 takes as long as one of 1."""
    return PlanProblem(
        num_blocks=2,
        ramps=(0,),
        survival_N=(1.0, 0.5),
        latency={"V100": LatencyTable(batches=(1, 2), block_s_NB=np.full((2, 2), 0.001), ramp_s_EB=np.zeros((1, 2)))},
        devices={"V100": Supply(count=3)},
        link=Link(bandwidth_bytes_per_s=1e9),
        bytes_per_sample_N=(0.0, 0.0),
        slo=Slo(latency_s=0.1, slack=0.2),
        objective=MaximizeRate(),
    )


def test_a_true_forecast_loses_nothing_and_a_wrong_one_gains_nothing() -> None:
    outcomes = mispredicted(problem(), "best", 2)
    assert len(outcomes) == 2 * len(ERRORS)
    assert [each.share_of_best for each in outcomes if each.error == 0] == [1.0, 1.0]
    assert all(each.share_of_best <= 1 + 1e-9 for each in outcomes)
    assert all(each.keeps_slo for each in outcomes)


def test_goodput_is_told_relative_to_stock_too() -> None:
    # Best: 2 replicas of block 0 do 4000/s, 1 of block 1 does 2 / 0.5 / 0.001 = 4000/s. Stock: 3 * 2 / 0.002 = 3000/s.
    first = mispredicted(problem(), "best", 2)[0]
    assert first.rate_per_s == pytest.approx(4000)
    assert first.times_stock == pytest.approx(4 / 3)
