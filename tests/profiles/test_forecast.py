from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from profiles.forecast import (
    MOST_WINDOWS,
    SurvivalForecast,
    _last_windows,
    forecast_survival,
)
from profiles.windows import SurvivalHistory

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


def test_where_little_was_seen_the_last_value_the_pooled_share_or_the_prior_is_forecast() -> None:
    found = forecast_survival(history_of([[100, 50, 10]]), horizon=2)
    np.testing.assert_allclose(found.survival_HK, [[1, 0.5, 0.1], [1, 0.5, 0.1]])
    assert [(method.how, method.reason) for method in found.methods_R] == [
        ("last value", "only one window was seen")
    ] * 2
    assert_possible(found)
    # After block 0 all go on, after block 1 none do.
    found = forecast_survival(history_of([[200, 200, 0, 0]] * 10))
    assert list(found.next_survival) == [1, 1, 0, 0]
    assert [method.how for method in found.methods_R] == ["pooled share", "pooled share", "assumed"]
    assert found.methods_R[0].reason.startswith("constant")
    assert found.survival_low_HK[0, 1] > 0.99
    assert_possible(found)
    nothing = history_of(np.full((3, 3), np.nan))
    found = forecast_survival(nothing, prior=[1, 0.8, 0.4])
    np.testing.assert_allclose(found.survival_HK, [[1, 0.8, 0.4]])
    assert {method.how for method in found.methods_R} == {"prior"}
    partly = forecast_survival(history_of([[100, 0, 0]]), prior=[1, 0.8, 0.4])
    assert [method.how for method in partly.methods_R] == ["last value", "prior"]
    assert partly.go_on_HR.tolist() == [[0, 0.5]]


def test_steady_shares_are_averaged_and_missing_windows_stepped_over() -> None:
    history = drawn(np.tile([0.7, 0.9, 0.5], (40, 1)), 240, seed=1)
    found = forecast_survival(history)
    truth = np.array([1, 0.7, 0.63, 0.315])
    last_error = np.abs(history.survival_WK[-5:] - truth).mean()
    assert np.abs(found.survival_HK[0] - truth).mean() < 0.5 * last_error
    assert all(method.how.startswith("arima(") for method in found.methods_R)
    assert_possible(found)
    reach_WK = drawn(np.tile([0.7, 0.5], (30, 1)), 240, seed=5).survival_WK * 240
    reach_WK[[3, 10, 11, 29]] = np.nan
    found = forecast_survival(history_of(reach_WK))
    np.testing.assert_allclose(found.survival_HK[0], [1, 0.7, 0.35], atol=0.03)
    assert found.methods_R[0].how.startswith("arima(")
    assert_possible(found)


def test_after_a_jump_only_the_new_level_counts() -> None:
    go_on_WR = np.array([[0.9, 0.9]] * 30 + [[0.4, 0.7]] * 4)
    found = forecast_survival(drawn(go_on_WR, 240, seed=3))
    np.testing.assert_allclose(found.go_on_HR[0], [0.4, 0.7], atol=0.05)
    assert "jumped 4 windows ago" in found.methods_R[0].reason
    at_once = forecast_survival(drawn(go_on_WR[:31], 240, seed=3))
    assert at_once.methods_R[0].how == "last value"
    assert "jumped 1 windows ago" in at_once.methods_R[0].reason


def test_further_windows_are_less_sure() -> None:
    rng = np.random.default_rng(6)
    go_on_WR = 1 / (1 + np.exp(-np.cumsum(rng.normal(0, 0.15, (50, 2)), axis=0)))
    found = forecast_survival(drawn(go_on_WR, 2000, seed=6), horizon=5)
    width_HK = found.survival_high_HK - found.survival_low_HK
    assert (width_HK[-1, 1:] > width_HK[0, 1:]).all()
    assert_possible(found)


@pytest.mark.parametrize(
    ("level", "drift", "num_inputs"),
    [(0.5, 0.1, 400), pytest.param(-1.5, 0.2, 1_000_000, marks=pytest.mark.slow)],
    ids=["noise and drift", "the drift dwarfs the noise"],
)
def test_intervals_hold_about_as_often_as_they_promise(level: float, drift: float, num_inputs: int) -> None:
    rng = np.random.default_rng(8)
    survival, ramps = [], []
    for seed in range(40):
        logits_WR = level + np.cumsum(rng.normal(0, drift, (41, 3)), axis=0)
        go_on_WR = 1 / (1 + np.exp(-logits_WR))
        found = forecast_survival(drawn(go_on_WR[:40], num_inputs, seed))
        truth = np.cumprod(go_on_WR[40])
        survival.append((found.survival_low_HK[0, 1:] <= truth) & (truth <= found.survival_high_HK[0, 1:]))
        ramps.append((found.go_on_low_HR[0] <= go_on_WR[40]) & (go_on_WR[40] <= found.go_on_high_HR[0]))
    assert 0.65 < np.mean(survival) < 0.95
    assert 0.65 < np.mean(ramps) < 0.95


def test_few_inputs_do_not_push_the_share_from_the_middle() -> None:
    # 24 inputs of which 0.8 go on: unless it is corrected, the logit puts 0.812 on average.
    found = [forecast_survival(drawn(np.full((30, 1), 0.8), 24, seed)) for seed in range(30)]
    assert all(each.methods_R[0].how.startswith("arima(") for each in found)
    assert np.mean([each.survival_HK[0, 1] for each in found]) == pytest.approx(0.8, abs=0.008)


def test_the_pooled_share_has_the_interval_of_jeffreys_open_above_where_all_left() -> None:
    # 798 of 800 go on: Beta(798.5, 2.5) has its 10 % and 90 % quantiles here.
    found = forecast_survival(history_of([[200, 200], [200, 199], [200, 199], [200, 200]]))
    assert found.go_on_low_HR[0, 0] == pytest.approx(0.99425, abs=1e-4)
    assert found.go_on_high_HR[0, 0] == pytest.approx(0.99900, abs=1e-4)
    found = forecast_survival(history_of([[1, 0, 0]]))
    # Beta(0.5, 1.5) stays below 0.6558 in 90 % of cases; of those that get there, hardly anything is known.
    assert found.survival_HK.tolist() == [[1, 0, 0]]
    assert found.survival_low_HK.tolist() == [[1, 0, 0]]
    assert found.survival_high_HK[0, 1] == pytest.approx(found.go_on_high_HR[0, 0])
    assert found.go_on_high_HR[0, 0] == pytest.approx(0.656, abs=0.01)
    assert 0 < found.survival_high_HK[0, 2] <= found.survival_high_HK[0, 1]


def test_of_a_long_history_the_last_windows_count() -> None:
    old, new = np.full((20_000, 1), 0.2), np.full((MOST_WINDOWS, 1), 0.7)
    history = drawn(np.vstack([old, new]), 240, seed=1)
    kept = _last_windows(history)
    assert kept.survival_WK.shape == (MOST_WINDOWS, 2)
    found = forecast_survival(history)
    assert found.survival_HK[0, 1] == pytest.approx(0.7, abs=0.02)
    assert "jumped" not in found.methods_R[0].reason


def test_a_window_of_few_inputs_scatters_around_its_level() -> None:
    history = drawn(np.tile([0.7, 0.5], (40, 1)), 2000, seed=12)
    level = forecast_survival(history)
    of_50 = forecast_survival(history, inputs_to_come=50)
    of_all = forecast_survival(history, inputs_to_come=1e9)
    assert (level.inputs_to_come, of_50.inputs_to_come) == (None, 50)
    # Binomial noise of 50 inputs at 0.7: sqrt(0.7 * 0.3 / 50) = 0.065, and 1.28 times that on both sides.
    assert of_50.survival_high_HK[0, 1] - of_50.survival_low_HK[0, 1] == pytest.approx(2 * 1.28 * 0.065, rel=0.15)
    np.testing.assert_allclose(of_all.survival_low_HK, level.survival_low_HK, atol=1e-4)
    np.testing.assert_array_equal(of_50.survival_HK, level.survival_HK)
    assert_possible(of_50)
    assert_possible(forecast_survival(history_of([[200, 200, 0, 0]] * 10), inputs_to_come=20))


def test_shares_of_a_coming_window_lie_in_its_interval_as_often_as_promised() -> None:
    rng = np.random.default_rng(14)
    inside = []
    for seed in range(60):
        go_on_WR = 1 / (1 + np.exp(-0.5 - np.cumsum(rng.normal(0, 0.05, (41, 1)), axis=0)))
        history = drawn(go_on_WR, 100, seed)
        past = history_of(100 * history.survival_WK[:40])
        found = forecast_survival(past, inputs_to_come=100)
        inside.append(found.survival_low_HK[0, 1] <= history.survival_WK[40, 1] <= found.survival_high_HK[0, 1])
    assert 0.68 < np.mean(inside) < 0.93


def test_ramps_that_move_together_make_survival_less_sure() -> None:
    """Four ramps with the same drift err alike: the widths of their logarithms add up, almost."""
    walk_W1 = 1.5 + np.cumsum(np.random.default_rng(17).normal(0, 0.1, (60, 1)), axis=0)
    go_on_WR = np.tile(1 / (1 + np.exp(-walk_W1)), (1, 4))
    reach_WK = np.asarray(2000 * np.cumprod(np.hstack([np.ones((60, 1)), go_on_WR]), axis=1), dtype=np.float64)
    found = forecast_survival(history_of(reach_WK))

    def width(low_X: FloatArray, share_X: FloatArray, high_X: FloatArray) -> FloatArray:
        """Of a share's logarithm, to the first order in its logit."""
        logit_width_X = np.log(high_X / (1 - high_X)) - np.log(low_X / (1 - low_X))
        return np.asarray(logit_width_X * (1 - share_X))

    ramps_R = width(found.go_on_low_HR[0], found.go_on_HR[0], found.go_on_high_HR[0])
    [last] = width(found.survival_low_HK[0, 4:], found.survival_HK[0, 4:], found.survival_high_HK[0, 4:])
    assert 0.7 < last / ramps_R.sum() <= 1  # errors that had nothing to do with each other would give 1/2
