from __future__ import annotations

import numpy as np
import pytest

from profiles.forecast import LEAST_WINDOWS, forecast_rate


def log_width(rates: object, horizon: int = 1) -> float:
    """Width of the last window's interval, as a factor's logarithm."""
    found = forecast_rate(np.array(rates), horizon)
    return float(np.log(found.high_rps_H[-1] / found.low_rps_H[-1]))


@pytest.mark.parametrize(
    ("rates", "expected", "reason"),
    [
        pytest.param([10.0] * 12, 10, "constant", id="constant"),
        pytest.param([10.0, 11, 9], 9, "fewer than 8 windows", id="short"),
        pytest.param([7.0], 7, "fewer than 8 windows", id="one"),
        pytest.param([10.0, 11, 9, 10] * 3 + [0], 0, "no requests", id="stopped"),
        pytest.param([10.0, 11, 9, 10] * 3 + [40], 40, "jumped", id="jump"),
        pytest.param([10.0, 11, 9, 10] * 3 + [np.nan] * 9, 10, "nothing was seen", id="long hole"),
    ],
)
def test_rates_that_no_order_fits_stay_as_they_were(rates: list[float], expected: float, reason: str) -> None:
    found = forecast_rate(np.array(rates), horizon=2)
    np.testing.assert_allclose(found.rate_rps_H, [expected, expected])
    assert found.method.how == "last value"
    assert reason in found.method.reason
    assert (found.low_rps_H <= found.rate_rps_H + 1e-9).all()
    assert (found.rate_rps_H <= found.high_rps_H + 1e-9).all()


def test_rates_are_smoothed_over_noise_and_holes() -> None:
    rates_W = 100 * np.exp(np.random.default_rng(13).normal(0, 0.1, 60))
    rates_W[[5, 40]] = np.nan
    found = forecast_rate(rates_W)
    assert found.method.how.startswith("arima(")
    assert 93 < found.rate_rps_H[0] < 107
    assert found.low_rps_H[0] < 95 < 105 < found.high_rps_H[0]


@pytest.mark.parametrize("rates", [[50.0, 50], [100.0] * 20], ids=["two", "twenty"])
def test_equal_rates_still_have_the_noise_of_their_counts(rates: list[float]) -> None:
    # Two Poisson counts of 120 s, the last and the coming one: sqrt(2 / count), 1.28 times on both sides.
    assert log_width(rates) == pytest.approx(2 * 1.2816 * np.sqrt(2 / (rates[0] * 120)), rel=1e-3)


def test_windows_without_requests_are_in_the_interval_where_they_are_common_or_all_there_is() -> None:
    found = forecast_rate(np.array([0.0, 100] * 20))
    assert found.rate_rps_H[0] == pytest.approx(100)
    assert found.low_rps_H[0] == 0
    assert found.high_rps_H[0] > 100
    stopped = forecast_rate(np.array([100.0, 0] * 20))
    assert (stopped.rate_rps_H[0], stopped.low_rps_H[0], stopped.high_rps_H[0]) == (0, 0, 100)
    rare = forecast_rate(np.array([90.0, 100] * 20 + [0, 95]))
    assert rare.low_rps_H[0] > 0
    found = forecast_rate(np.zeros(12))
    assert (found.rate_rps_H[0], found.low_rps_H[0], found.method.how) == (0, 0, "pooled rate")
    # Gamma(0.5) stays below 1.353 in 90 % of cases, over 12 windows of 120 s.
    assert found.high_rps_H[0] == pytest.approx(1.353 / 12 / 120, rel=1e-3)


@pytest.mark.parametrize("mean_count", [0.3, 1, 3, 8, 30])
def test_few_requests_lie_in_the_interval_as_often_as_promised(mean_count: float) -> None:
    rng = np.random.default_rng(5)
    inside = []
    for _ in range(60):
        rates_W = rng.poisson(mean_count, 61) / 120
        found = forecast_rate(rates_W[:60])
        inside.append(found.low_rps_H[0] <= rates_W[60] <= found.high_rps_H[0])
    assert np.mean(inside) >= 0.68  # counts are whole: 80 % is a lower bound where there are few


@pytest.mark.parametrize("drift", ["noise", "rise", "constant"])
def test_the_interval_never_narrows_with_more_missing_windows(drift: str) -> None:
    rng = np.random.default_rng(3)
    past_W = {
        "noise": 100 * np.exp(rng.normal(0, 0.1, 40)),
        "rise": np.exp(np.cumsum(rng.normal(0.05, 0.05, 40))),
        "constant": np.full(40, 10.0),
    }[drift]
    holes = range(LEAST_WINDOWS + 4)
    widths = [log_width(np.concatenate([past_W, np.full(hole, np.nan)])) for hole in holes]
    assert (np.diff(widths) >= -1e-9).all()


def test_a_random_walk_widens_with_the_root_of_the_windows_ahead() -> None:
    # Steps of ln 2 up and down, as a last value: the fourth window ahead is twice as unsure as the first.
    rates = [10.0, 20, 10, 20, 10]
    assert log_width(rates, 4) == pytest.approx(2 * log_width(rates))
    assert log_width([*rates, np.nan, np.nan, np.nan]) == pytest.approx(2 * log_width(rates))


def test_a_forecast_stays_within_the_rates_seen() -> None:
    rising_W = np.exp(0.3 * np.arange(20))
    found = forecast_rate(rising_W, horizon=3)
    assert found.method.how.startswith("arima(1,1,")
    assert (found.rate_rps_H <= rising_W[-1] + 1e-9).all()
