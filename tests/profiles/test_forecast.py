from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from earlyexit.errors import DataError
from profiles.arima import forecast_noisy, forecast_series
from profiles.breaks import last_break
from profiles.forecast import SurvivalForecast, SurvivalHistory, forecast_rate, forecast_survival

FloatArray = npt.NDArray[np.float64]


def history_of(reach_WK: list[list[float]] | FloatArray) -> SurvivalHistory:
    return SurvivalHistory.from_counts(np.array(reach_WK, dtype=float))


def drawn(go_on_WR: FloatArray, num_inputs: int, seed: int) -> SurvivalHistory:
    """Windows of so many inputs, each going on at each ramp with the given chance."""
    rng = np.random.default_rng(seed)
    reach_WK = np.full((len(go_on_WR), go_on_WR.shape[1] + 1), num_inputs)
    for ramp in range(go_on_WR.shape[1]):
        reach_WK[:, ramp + 1] = rng.binomial(reach_WK[:, ramp], go_on_WR[:, ramp])
    return history_of(reach_WK)


def assert_possible(found: SurvivalForecast) -> None:
    for survival_HK in (found.survival_HK, found.survival_low_HK, found.survival_high_HK):
        assert (survival_HK[:, 0] == 1).all()
        assert (np.diff(survival_HK, axis=1) <= 1e-12).all()
        assert ((survival_HK >= 0) & (survival_HK <= 1)).all()
    assert (found.survival_low_HK <= found.survival_HK + 1e-12).all()
    assert (found.survival_HK <= found.survival_high_HK + 1e-12).all()
    assert (found.go_on_low_HR <= found.go_on_HR + 1e-12).all()
    assert (found.go_on_HR <= found.go_on_high_HR + 1e-12).all()


def test_a_history_of_counts_has_shares_and_the_inputs_behind_them() -> None:
    history = history_of([[100, 50, 10], [0, 0, 0], [200, 150, 150]])
    assert history.missing_W.tolist() == [False, True, False]
    assert history.survival_WK[[0, 2]].tolist() == [[1, 0.5, 0.1], [1, 0.75, 0.75]]
    assert history.reach_WR.tolist() == [[100, 50], [0, 0], [200, 150]]
    np.testing.assert_allclose(history.go_on_WR, [[50, 10], [0, 0], [150, 150]])


ONE = {"survival_WK": np.array([[1, 0.5]]), "inputs_WK": np.ones((1, 2)), "missing_W": np.zeros(1, dtype=bool)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"survival_WK": np.array([[0.9, 0.5]])}, "must be 1 at the first block", id="not 1 at first"),
        pytest.param({"survival_WK": np.array([[1, -0.5]])}, "at least 0", id="negative"),
        pytest.param({"survival_WK": np.array([[1, np.nan]])}, "must be numbers", id="NaN"),
        pytest.param({"inputs_WK": np.array([[5, np.inf]])}, "must be numbers", id="endless"),
        pytest.param({"inputs_WK": -np.ones((1, 2))}, "fewer than no inputs", id="negative inputs"),
        pytest.param({"inputs_WK": np.ones((1, 3))}, "as many windows and blocks", id="shapes"),
        pytest.param({"survival_WK": np.array([1, 0.5])}, "a row per window", id="one row"),
    ],
)
def test_histories_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        SurvivalHistory(**(ONE | changes))


@pytest.mark.parametrize(
    ("reach", "message"),
    [
        pytest.param([[100, 50, 60]], "survival rises", id="rising"),
        pytest.param([[100, -1, -1]], "fewer than no inputs", id="negative"),
        pytest.param([[100, np.nan, 3]], "must be numbers", id="half missing"),
        pytest.param([100, 50], "a row per window", id="one row"),
    ],
)
def test_counts_that_cannot_be_are_refused(reach: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        history_of(reach)


def test_one_window_is_forecast_to_stay() -> None:
    found = forecast_survival(history_of([[100, 50, 10]]), horizon=2)
    np.testing.assert_allclose(found.survival_HK, [[1, 0.5, 0.1], [1, 0.5, 0.1]])
    assert [(method.how, method.reason) for method in found.methods_R] == [
        ("last value", "only one window was seen")
    ] * 2
    assert_possible(found)


def test_shares_that_never_vary_are_forecast_exactly() -> None:
    # After block 0 all go on, after block 1 none do.
    found = forecast_survival(history_of([[200, 200, 0, 0]] * 10))
    assert list(found.next_survival) == [1, 1, 0, 0]
    assert [method.how for method in found.methods_R] == ["pooled share", "pooled share", "assumed"]
    assert found.methods_R[0].reason.startswith("constant")
    assert found.survival_low_HK[0, 1] > 0.99
    assert_possible(found)


def test_a_ramp_where_hardly_anybody_leaves_takes_all_windows_together() -> None:
    found = forecast_survival(history_of([[200, 200], [200, 199], [200, 199], [200, 200]]))
    assert list(found.next_survival) == [1, 798 / 800]
    assert "too few" in found.methods_R[0].reason


def test_the_prior_stands_in_where_nothing_was_seen() -> None:
    nothing = history_of(np.full((3, 3), np.nan))
    found = forecast_survival(nothing, prior=[1, 0.8, 0.4])
    np.testing.assert_allclose(found.survival_HK, [[1, 0.8, 0.4]])
    assert {method.how for method in found.methods_R} == {"prior"}
    partly = forecast_survival(history_of([[100, 0, 0]]), prior=[1, 0.8, 0.4])
    assert [method.how for method in partly.methods_R] == ["last value", "prior"]
    assert partly.go_on_HR.tolist() == [[0, 0.5]]
    with pytest.raises(DataError, match="nothing was seen yet"):
        forecast_survival(nothing)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param({"horizon": 0}, "at least 1 window", id="horizon"),
        pytest.param({"coverage": 1.0}, "between 0 and 1", id="coverage"),
        pytest.param({"prior": [1, 0.5]}, "needs 3 shares", id="prior too short"),
        pytest.param({"prior": [1, 0.5, 0.6]}, "survival rises", id="prior rises"),
    ],
)
def test_requests_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        forecast_survival(history_of([[100, 50, 10]]), **settings)


def test_steady_shares_are_averaged_rather_than_repeated() -> None:
    history = drawn(np.tile([0.7, 0.9, 0.5], (40, 1)), 240, seed=1)
    found = forecast_survival(history)
    truth = np.array([1, 0.7, 0.63, 0.315])
    last_error = np.abs(history.survival_WK[-5:] - truth).mean()
    assert np.abs(found.survival_HK[0] - truth).mean() < 0.5 * last_error
    assert all(method.how.startswith("arima(") for method in found.methods_R)
    assert_possible(found)


def test_a_steady_trend_is_followed() -> None:
    go_on_WR = np.stack([np.linspace(0.9, 0.5, 41), np.linspace(0.95, 0.6, 41)], axis=1)
    history = drawn(go_on_WR[:40], 3000, seed=2)
    found = forecast_survival(history)
    truth = np.cumprod(go_on_WR[40])
    assert np.abs(found.survival_HK[0, 1:] - truth).mean() < np.abs(history.survival_WK[-1, 1:] - truth).mean()
    assert_possible(found)


def test_after_a_jump_only_the_new_level_counts() -> None:
    go_on_WR = np.array([[0.9, 0.9]] * 30 + [[0.4, 0.7]] * 4)
    found = forecast_survival(drawn(go_on_WR, 240, seed=3))
    np.testing.assert_allclose(found.go_on_HR[0], [0.4, 0.7], atol=0.05)
    assert "jumped 4 windows ago" in found.methods_R[0].reason
    at_once = forecast_survival(drawn(go_on_WR[:31], 240, seed=3))
    assert at_once.methods_R[0].how == "last value"
    assert "jumped 1 windows ago" in at_once.methods_R[0].reason


def test_a_slow_drift_is_no_jump() -> None:
    go_on_W1 = np.linspace(0.8, 0.4, 60)[:, None]
    history = drawn(go_on_W1, 240, seed=4)
    assert last_break(history.reach_WR, history.go_on_WR) == 0
    jumped = drawn(np.array([[0.8]] * 10 + [[0.4]] * 10), 240, seed=4)
    assert last_break(jumped.reach_WR, jumped.go_on_WR) == 10
    assert last_break(np.zeros((3, 0)), np.zeros((3, 0))) == 0


def test_missing_windows_are_stepped_over() -> None:
    reach_WK = drawn(np.tile([0.7, 0.5], (30, 1)), 240, seed=5).survival_WK * 240
    reach_WK[[3, 10, 11, 29]] = np.nan
    found = forecast_survival(history_of(reach_WK))
    np.testing.assert_allclose(found.survival_HK[0], [1, 0.7, 0.35], atol=0.03)
    assert found.methods_R[0].how.startswith("arima(")
    assert_possible(found)


def test_further_windows_are_less_sure() -> None:
    rng = np.random.default_rng(6)
    go_on_WR = 1 / (1 + np.exp(-np.cumsum(rng.normal(0, 0.15, (50, 2)), axis=0)))
    found = forecast_survival(drawn(go_on_WR, 2000, seed=6), horizon=5)
    width_HK = found.survival_high_HK - found.survival_low_HK
    assert (width_HK[-1, 1:] > width_HK[0, 1:]).all()
    assert_possible(found)


def test_intervals_hold_about_as_often_as_they_promise() -> None:
    rng = np.random.default_rng(8)
    inside = []
    for seed in range(40):
        logits_WR = 0.5 + np.cumsum(rng.normal(0, 0.1, (41, 3)), axis=0)
        go_on_WR = 1 / (1 + np.exp(-logits_WR))
        found = forecast_survival(drawn(go_on_WR[:40], 400, seed))
        truth = np.cumprod(go_on_WR[40])
        inside.append((found.survival_low_HK[0, 1:] <= truth) & (truth <= found.survival_high_HK[0, 1:]))
    assert 0.65 < np.mean(inside) < 0.92


def test_24_ramps_of_60_windows_are_forecast_in_two_seconds() -> None:
    history = drawn(np.tile(np.linspace(0.8, 0.99, 24), (60, 1)), 2000, seed=9)
    forecast_survival(history)  # imports statsmodels
    began_s = time.perf_counter()
    forecast_survival(history)
    assert time.perf_counter() - began_s < 2


def test_known_noise_is_told_from_drift() -> None:
    rng = np.random.default_rng(10)
    steady_W = rng.normal(0, 1, 60)
    walk_W = np.cumsum(rng.normal(0, 3, 60)) + rng.normal(0, 1, 60)
    steady = forecast_noisy(steady_W[:, None], np.ones(60), 1)
    walk = forecast_noisy(walk_W[:, None], np.ones(60), 1)
    assert steady.how_X == ("arima(0,0,0)",)
    assert walk.how_X == ("arima(0,1,1)",)
    assert abs(steady.mean_HX[0, 0]) < 0.4
    assert abs(walk.mean_HX[0, 0] - walk_W[-1]) < 2
    assert steady.variance_HX[0, 0] < 0.5 < walk.variance_HX[0, 0]


def test_a_series_with_momentum_is_carried_on() -> None:
    rng = np.random.default_rng(11)
    rising_W = 0.1 * np.arange(60) + rng.normal(0, 0.01, 60)
    mean_H, variance_H, how = forecast_series(rising_W, 2)
    np.testing.assert_allclose(mean_H, [6.0, 6.1], atol=0.1)
    assert (variance_H > 0).all()
    assert how.startswith("arima(1,1,")


@pytest.mark.parametrize(
    ("rates", "expected", "reason"),
    [
        pytest.param([10.0] * 12, 10, "constant", id="constant"),
        pytest.param([0.0] * 12, 0, "no requests", id="all zero"),
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


@pytest.mark.parametrize("rates", [[-1.0, 2], [np.inf, 2], [np.nan, np.nan], []], ids=str)
def test_rates_that_cannot_be_are_refused(rates: list[float]) -> None:
    with pytest.raises(DataError):
        forecast_rate(np.array(rates))
