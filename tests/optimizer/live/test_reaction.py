"""Forecasts held against counts, by hand and by chance."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import numpy as np
import pytest
from numpy.random import default_rng

from optimizer.live.reaction import (
    ExpectedShares,
    RateDeviation,
    expected_shares,
    rate_deviation,
    survival_deviation,
)
from profiles.forecast import Method, RateForecast, SurvivalForecast

METHOD = Method(how="assumed")
FORECAST = SurvivalForecast(
    survival_HK=np.array([[1.0, 0.8, 0.6, 0.4], [1.0, 0.7, 0.5, 0.3]]),
    survival_low_HK=np.array([[1.0, 0.75, 0.5, 0.3], [1.0, 0.6, 0.4, 0.2]]),
    survival_high_HK=np.array([[1.0, 0.85, 0.7, 0.5], [1.0, 0.8, 0.6, 0.4]]),
    go_on_HR=np.ones((2, 3)),
    go_on_low_HR=np.ones((2, 3)),
    go_on_high_HR=np.ones((2, 3)),
    coverage=0.95,
    methods_R=(METHOD, METHOD, METHOD),
)


def one_ramp(share: float = 0.5, low: float = 0.45, high: float = 0.55, coverage: float = 0.95) -> ExpectedShares:
    """Two blocks with a ramp between."""
    return ExpectedShares(ramps=(0,), share_N=(1.0, share), low_N=(1.0, low), high_N=(1.0, high), coverage=coverage)


def left(early: int, late: int) -> dict[int, int]:
    return {0: early, 1: late}


def test_only_active_ramps_let_inputs_out() -> None:
    expected = expected_shares(FORECAST, (1,))
    assert expected.share_N == (1.0, 1.0, 0.6, 0.6)
    assert expected.low_N == (1.0, 1.0, 0.5, 0.5)
    assert expected.high_N == (1.0, 1.0, 0.7, 0.7)


def test_joint_shares_move_the_interval_and_keep_its_width() -> None:
    expected = expected_shares(FORECAST, (1,), reach=lambda active: (1.0, 1.0, 0.95, 0.95))
    assert expected.share_N[2] == 0.95
    assert expected.low_N[2] == pytest.approx(0.85)
    assert expected.high_N[2] == 1.0


def test_the_bounds_of_what_is_seen_are_those_of_wilson() -> None:
    found = survival_deviation(one_ramp(), left(300, 700))
    assert found is not None
    # 1.96 standard deviations at 1000 inputs: (0.3 + 0.0019 -+ 1.96 * sqrt(0.00021 + 0.00000096)) / 1.00384
    assert (found.least_left, found.most_left) == pytest.approx((0.2724, 0.3291), abs=1e-4)
    assert found.beyond == pytest.approx(0.45 - 0.3291, abs=1e-4)
    assert found.words == "30.0% of 1000 inputs left by ramp 0, 45.0% to 55.0% were expected"


@pytest.mark.parametrize(
    ("exits", "why"),
    [
        pytest.param(left(10, 89), "fewer than the least inputs", id="few"),
        pytest.param(left(60, 60), "inside", id="inside"),
        pytest.param(left(46, 74), "38 %, which noise of 120 inputs explains", id="noise"),
        pytest.param({}, "nothing", id="nothing"),
    ],
)
def test_what_chance_explains_is_no_deviation(exits: Mapping[int, int], why: str) -> None:
    assert survival_deviation(one_ramp(), exits) is None, why


def test_what_is_sure_but_small_is_no_deviation() -> None:
    sharp = one_ramp(low=0.499, high=0.501)
    assert survival_deviation(sharp, left(54_000, 46_000)) is None
    found = survival_deviation(sharp, left(54_000, 46_000), least_difference=0.03)
    assert found is not None
    assert found.left == 0.54


def test_the_ramp_that_is_furthest_off_is_named() -> None:
    expected = expected_shares(FORECAST, (0, 1, 2))
    found = survival_deviation(expected, {0: 200, 1: 900, 2: 0, 3: 0})
    assert found is not None
    assert found.ramp == 1  # all have left, 30 % to 50 % were expected; at ramp 2 50 % to 70 %
    assert survival_deviation(expected, {0: 200, 1: 200, 2: 200, 3: 400}) is None


def test_inputs_that_may_have_gone_either_way_widen_what_is_seen() -> None:
    assert survival_deviation(one_ramp(), left(700, 300)) is not None
    assert survival_deviation(one_ramp(), left(700, 300), unknown=400) is None


def test_agreement_is_seldom_called_a_deviation() -> None:
    rng = default_rng(7)
    expected = expected_shares(FORECAST, (0, 1, 2))
    sharp = ExpectedShares(
        ramps=(0, 1, 2), share_N=expected.share_N, low_N=expected.share_N, high_N=expected.share_N, coverage=0.95
    )
    draws = rng.multinomial(300, [0.2, 0.2, 0.2, 0.4], size=1000)
    alarms = sum(
        survival_deviation(sharp, dict(enumerate(draw.tolist())), least_difference=0.0) is not None for draw in draws
    )
    assert 10 <= alarms <= 65  # at most 5 % for three ramps together, and some


RATES = RateForecast(
    rate_rps_H=np.array([100.0]),
    low_rps_H=np.array([70.0]),
    high_rps_H=np.array([150.0]),
    coverage=0.95,
    method=METHOD,
)


def rate(num_arrived: int, *, sized_for_rps: float | None = 150.0, seconds: float = 10.0) -> RateDeviation | None:
    return rate_deviation(RATES, num_arrived, seconds, sized_for_rps=sized_for_rps)


def test_a_rate_beyond_its_interval_and_noise_is_told_in_words() -> None:
    found = rate(2000)
    assert found is not None
    assert found.words == "200 requests/s came for 10 s, 70 to 150 were expected"
    assert rate(400) is not None


@pytest.mark.parametrize("num_arrived", [1000, 1500, 1570, 700, 660])
def test_a_rate_that_the_interval_or_its_noise_explains_is_no_deviation(num_arrived: int) -> None:
    # 1570 in 10 s: 1.96 * sqrt(1570) = 78, so 149.6/s is likely enough; 660: 51 more make 71/s.
    assert rate(num_arrived) is None


def test_a_rate_that_the_plan_was_not_sized_for_is_told() -> None:
    found = rate(1400, sized_for_rps=120.0)
    assert found is not None
    assert found.high_rps == 120.0


def test_a_plan_of_the_highest_rate_does_not_mind_the_demand() -> None:
    assert rate(100_000, sized_for_rps=None) is None


def test_a_difference_below_a_fifth_is_none() -> None:
    sharp = RateForecast(
        rate_rps_H=np.array([100.0]),
        low_rps_H=np.array([99.0]),
        high_rps_H=np.array([101.0]),
        coverage=0.95,
        method=METHOD,
    )
    assert rate_deviation(sharp, 119_000, 1000.0, sized_for_rps=101.0) is None
    assert rate_deviation(sharp, 121_000, 1000.0, sized_for_rps=101.0) is not None


def test_nothing_was_expected_above_an_endless_bound_but_what_the_plan_was_sized_for() -> None:
    unsure = RateForecast(
        rate_rps_H=np.array([10.0]),
        low_rps_H=np.array([0.0]),
        high_rps_H=np.array([inf]),
        coverage=0.95,
        method=METHOD,
    )
    assert rate_deviation(unsure, 500, 10.0, sized_for_rps=100.0) is None
    assert rate_deviation(unsure, 5000, 10.0, sized_for_rps=100.0) is not None
