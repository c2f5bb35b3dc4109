from __future__ import annotations

import pytest

from experiments.planning.misprediction import ERRORS, by_cost_model, mispredicted, too_few_leave, too_many_leave
from tests.experiments.studies.cases import two_blocks


def test_an_error_moves_the_survival_either_way() -> None:
    # E3 section 5.8.3: of 16 inputs 8 are left; with an error of 50 % the planner expects 12.
    assert 16 * too_few_leave(0.5, 0.5) == 12
    assert 16 * too_many_leave(0.5, 0.5) == 4
    assert too_many_leave(1.0, 0.5) == 1, "before the first ramp there is nothing to mispredict"
    assert (too_few_leave(0.3, 0.0), too_many_leave(0.3, 0.0)) == (0.3, 0.3)


def test_a_true_forecast_loses_nothing_and_a_wrong_one_gains_nothing() -> None:
    few, many = mispredicted("", two_blocks(), "best", ERRORS, by_cost_model(two_blocks()))
    # Best: 2 replicas of block 0 do 4000/s, 1 of block 1 does 2 / 0.5 / 0.001 = 4000/s. Stock: 3 * 2 / 0.002 = 3000/s.
    assert (few.at(0.0), few.stock_per_s) == pytest.approx((4000, 3000))
    assert few.at(0.15) is None
    assert all(rate_per_s <= 4000 * (1 + 1e-9) for each in (few, many) for rate_per_s in each.goodput_per_s)


def test_who_sees_nobody_leave_divides_three_accelerators_wrongly() -> None:
    # In truth the second block has half of the inputs. Who sees all reach it has one split on three, 2 ms for two
    # inputs as stock.
    few, many = mispredicted("", two_blocks(), "e3", (0.0, 0.2, 1.0), by_cost_model(two_blocks()))
    assert [each.direction for each in (few, many)] == ["sees too few leave", "sees too many leave"]
    assert (few.goodput_per_s[0], few.goodput_per_s[2], few.stock_per_s) == pytest.approx((4000, 3000, 3000))
