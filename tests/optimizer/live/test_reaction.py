"""Deviations from forecasts, on hand-made counts and on random ones."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import inf

import numpy as np
import pytest
from numpy.random import default_rng

from optimizer.live.reaction import rate_deviation, survival_deviation, wilson_bound
from profiles.forecast import Method, RateForecast, SurvivalForecast

METHOD = Method(how="assumed")


def shares(means: list[float], lows: list[float], highs: list[float]) -> SurvivalForecast:
    """A forecast of one window."""
    mean_K, low_K, high_K = (np.array([1.0, *each]) for each in (means, lows, highs))
    go_on_R, methods_R = np.ones(len(means)), (METHOD,) * len(means)
    return SurvivalForecast(
        survival_K=mean_K, survival_low_K=low_K, survival_high_K=high_K, go_on_R=go_on_R,
        go_on_low_R=go_on_R, go_on_high_R=go_on_R, coverage=0.95, methods_R=methods_R,
    )  # fmt: skip


FORECAST = shares([0.8, 0.6, 0.4], [0.75, 0.5, 0.3], [0.85, 0.7, 0.5])


def one_ramp(share: float = 0.5, low: float = 0.45, high: float = 0.55) -> SurvivalForecast:
    """Two blocks with a ramp between."""
    return shares([share], [low], [high])


def left(early: int, late: int) -> dict[int, int]:
    return {0: early, 1: late}


def test_joint_records_shift_the_interval_of_survival() -> None:
    few = {0: 0, 1: 100, 2: 0, 3: 900}
    words = survival_deviation(FORECAST, (1,), few)
    assert words == "10.0% of 1000 inputs left by ramp 1, 30.0% to 50.0% were expected"
    joint = partial(survival_deviation, FORECAST, (1,), reached_N=(1.0, 1.0, 0.95, 0.95))
    assert joint({1: 300, 3: 700}) == "30.0% of 1000 inputs left by ramp 1, 0.0% to 15.0% were expected"
    assert joint(few) is None
    # Wilson's bound of 0.95 at 30 probes is 0.81: 0.05 + sqrt(0.1^2 + 0.14^2).
    assert joint({1: 300, 3: 700}, num_probes=30) == "30.0% of 1000 inputs left by ramp 1, 0.0% to 22.2% were expected"
    assert survival_deviation(FORECAST, (), few) is None


def test_small_differences_of_survival_are_no_deviation() -> None:
    # 1.96 standard deviations at 1000 inputs: (0.3 + 0.0019 -+ 1.96 * sqrt(0.00021 + 0.00000096)) / 1.00384
    assert [wilson_bound(0.3, 1000, width) for width in (-1.96, 1.96)] == pytest.approx([0.2724, 0.3291], abs=1e-4)
    found = survival_deviation(one_ramp(), (0,), left(300, 700))
    assert found == "30.0% of 1000 inputs left by ramp 0, 45.0% to 55.0% were expected"
    assert survival_deviation(one_ramp(low=0.0, high=0.67), (0,), left(300, 700)) is not None
    assert survival_deviation(one_ramp(low=0.0, high=0.672), (0,), left(300, 700)) is None
    sharp = one_ramp(low=0.499, high=0.501)
    assert survival_deviation(sharp, (0,), left(54_000, 46_000)) is None
    found = survival_deviation(sharp, (0,), left(55_100, 44_900))
    assert found == "55.1% of 100000 inputs left by ramp 0, 49.9% to 50.1% were expected"


@pytest.mark.parametrize(
    "exits",
    [left(10, 89), left(60, 60), left(46, 74), {}],
    ids=["fewer than the least inputs", "inside", "38 %, which noise of 120 inputs explains", "nothing"],
)
def test_sampling_noise_is_no_deviation(exits: Mapping[int, int]) -> None:
    assert survival_deviation(one_ramp(), (0,), exits) is None


def test_the_ramp_with_the_largest_deviation_is_named() -> None:
    found = survival_deviation(FORECAST, (0, 1, 2), {0: 200, 1: 900, 2: 0, 3: 0})
    assert found == "100.0% of 1100 inputs left by ramp 1, 30.0% to 50.0% were expected"  # at ramp 2 50 % to 70 %
    assert survival_deviation(FORECAST, (0, 1, 2), {0: 200, 1: 200, 2: 200, 3: 400}) is None
    assert survival_deviation(one_ramp(), (0,), left(700, 300), unknown=400) is None


def test_false_deviations_are_rare() -> None:
    rng = default_rng(7)
    sharp = shares([0.8, 0.6, 0.4], [0.8, 0.6, 0.4], [0.8, 0.6, 0.4])
    draws = rng.multinomial(300, [0.2, 0.2, 0.2, 0.4], size=1000)
    alarms = sum(survival_deviation(sharp, (0, 1, 2), dict(enumerate(draw))) is not None for draw in draws.tolist())
    assert 10 <= alarms <= 65  # at most 5 % for three ramps together, and some


def rates(expected_rps: float, low_rps: float, high_rps: float) -> RateForecast:
    """A forecast of one window."""
    return RateForecast(rate_rps=expected_rps, low_rps=low_rps, high_rps=high_rps, coverage=0.95, method=METHOD)


def rate(num_arrived: int, *, required_rps: float | None = 150.0, seconds: float = 10.0) -> str | None:
    return rate_deviation(rates(100.0, 70.0, 150.0), num_arrived, seconds, required_rps=required_rps)


def test_a_rate_outside_its_interval_or_above_the_plans_is_a_deviation() -> None:
    assert rate(2000) == "200 inputs/s arrived for 10 s, 70 to 150 were expected"
    assert rate(400) is not None
    assert rate(1400, required_rps=120.0) == "140 inputs/s arrived for 10 s, 70 to 120 were expected"
    assert rate(100_000, required_rps=None) is None
    assert rate_deviation(None, 2000, 9.0, required_rps=99.0) == "222.2 inputs/s arrived for 9 s, 0 to 99 were expected"
    assert [rate_deviation(None, arrived, 10.0, required_rps=150.0) for arrived in (0, 1500, 1750)] == [None] * 3
    # 1570 in 10 s: 1.96 * sqrt(1570) = 78, so 149.6/s is likely enough; 660: 51 more make 71/s.
    assert [rate(num_arrived) for num_arrived in (1000, 1500, 1570, 700, 660)] == [None] * 5


def test_a_rate_difference_below_a_fifth_is_no_deviation() -> None:
    sharp = rates(100.0, 99.0, 101.0)
    assert rate_deviation(sharp, 119_000, 1000.0, required_rps=101.0) is None
    assert rate_deviation(sharp, 121_000, 1000.0, required_rps=101.0) is not None
    assert rate_deviation(sharp, 119_000, 1000.0, 2_300, required_rps=101.0) is None
    assert rate_deviation(sharp, 119_000, 1000.0, 2_400, required_rps=101.0) is not None  # more than 2 % are refused
    unsure = rates(10.0, 0.0, inf)
    assert rate_deviation(unsure, 500, 10.0, required_rps=100.0) is None
    assert rate_deviation(unsure, 5000, 10.0, required_rps=100.0) is not None
