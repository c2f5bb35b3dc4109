from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from optimizer.calibration.thresholds import Guarantee, p_value


@pytest.mark.parametrize(
    ("budget", "confidence", "lost", "num_inputs", "holds"),
    [
        # With a true rate of 1/2: P(none of 3) = 1/8, P(at most 1 of 3) = 4/8, P(at most 1 of 4) = 5/16.
        pytest.param(0.5, 0.875, 0, 3, True, id="none of 3 at 1/8"),
        pytest.param(0.5, 0.5, 1, 3, True, id="1 of 3 at 1/2"),
        pytest.param(0.5, 0.6875, 1, 4, True, id="1 of 4 at 5/16"),
        pytest.param(0.5, 0.7, 1, 4, False, id="1 of 4 at 3/10"),
    ],
)
def test_p_values_are_binomial_tails(budget: float, confidence: float, lost: int, num_inputs: int, holds: bool) -> None:
    assert Guarantee(budget=budget, confidence=confidence).holds(lost, num_inputs) == holds


@pytest.mark.parametrize(
    ("budget", "confidence", "lost", "needed"),
    [
        *((0.5, 0.75, 0, 2), (0.5, 0.9, 0, 4), (0.1, 0.9, 0, 22), (0.01, 0.9, 0, 230), (0.01, 0.95, 0, 299)),
        *((0.01, 0.9, 1, 388), (0.01, 0.9, 2, 531)),
    ],
)
def test_each_additional_loss_needs_more_inputs(budget: float, confidence: float, lost: int, needed: int) -> None:
    guarantee = Guarantee(budget=budget, confidence=confidence)
    assert guarantee.least_inputs == guarantee.inputs_for(0)
    assert guarantee.inputs_for(lost) == needed
    assert guarantee.holds(lost, needed)
    assert not guarantee.holds(lost, needed - 1)


def test_losses_between_0_and_1_are_tested_by_the_smaller_of_two_bounds() -> None:
    # exp(-n h(0, b)) = (1 - b)^n
    assert p_value(0.0, 100, 0.02, zero_one=False) == pytest.approx(0.98**100)
    assert p_value(0.0, 100, 0.02, zero_one=True) == pytest.approx(0.98**100)
    # h(0.05, 0.1) = 0.05 ln 0.5 + 0.95 ln (0.95 / 0.9) = 0.016707
    assert p_value(10.0, 200, 0.1, zero_one=False) == pytest.approx(
        min(np.exp(-200 * 0.016707), np.e * 0.00807), rel=0.01
    )
    # A mean of half the budget, at 1,000 inputs: Bentkus's is the smaller.
    assert p_value(50.0, 1000, 0.1, zero_one=False) == pytest.approx(np.e * binom.cdf(50, 1000, 0.1))
    assert p_value(30.0, 200, 0.1, zero_one=False) == 1.0  # a mean above the budget rejects nothing
    total = float(np.cumsum([7 / 6] * 6)[-1])  # rounds at each step, as sum() did before Python 3.12
    assert total > 7
    assert p_value(total, 1000, 0.02, zero_one=False) == p_value(7.0, 1000, 0.02, zero_one=False)


@given(
    num_inputs=st.integers(1, 2000),
    budget=st.floats(0.001, 0.5),
    first=st.floats(0, 1),
    second=st.floats(0, 1),
    zero_one=st.booleans(),
)
def test_p_values_rise_with_loss(num_inputs: int, budget: float, first: float, second: float, zero_one: bool) -> None:
    low, high = sorted((first * num_inputs, second * num_inputs))
    assert 0 <= p_value(low, num_inputs, budget, zero_one=zero_one) <= 1
    assert (
        p_value(low, num_inputs, budget, zero_one=zero_one)
        <= p_value(high, num_inputs, budget, zero_one=zero_one) + 1e-12
    )


@given(num_inputs=st.integers(1, 400), budget=st.floats(0.01, 0.5), lost=st.integers(0, 400))
def test_for_losses_of_0_and_1_the_bound_is_at_least_the_exact_tail(num_inputs: int, budget: float, lost: int) -> None:
    exact = p_value(min(lost, num_inputs), num_inputs, budget, zero_one=True)
    assert p_value(min(lost, num_inputs), num_inputs, budget, zero_one=False) >= exact - 1e-12


def test_sums_of_losses_are_accepted_up_to_the_first_at_which_the_test_fails() -> None:
    guarantee = Guarantee(budget=0.01, confidence=0.9)
    assert [guarantee.holds(total, 400) for total in (0.0, 1.0, 2.0, 3.0)] == [True, True, False, False]
    assert [guarantee.holds(total, 400, zero_one=False) for total in (0.0, 0.3, 0.9)] == [True, True, False]


@pytest.mark.parametrize("number", [1, 2, 4])
def test_alternative_calibrations_share_the_error_probability(number: int) -> None:
    shared = Guarantee(budget=0.05, confidence=0.9, num_calibrations=number)
    alone = Guarantee(budget=0.05, confidence=1 - 0.1 / number)
    assert shared.error_probability == pytest.approx(0.1 / number)
    assert shared.least_inputs == alone.least_inputs
    assert [shared.inputs_for(lost) for lost in range(4)] == [alone.inputs_for(lost) for lost in range(4)]
