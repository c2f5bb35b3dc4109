from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from profiles.forecast import LEAST_WINDOWS, MOST_WINDOWS, SurvivalForecast, forecast_rate, forecast_survival
from profiles.windows import SurvivalHistory, last_break

FloatArray = npt.NDArray[np.float64]


def history_of(reach_WK: list[list[float]] | FloatArray) -> SurvivalHistory:
    return SurvivalHistory.from_counts(np.array(reach_WK, dtype=float))


def drawn(go_on_WR: FloatArray, num_inputs: int, seed: int) -> SurvivalHistory:
    """Returns windows of inputs that continue at each ramp with the given probabilities."""
    rng = np.random.default_rng(seed)
    reach_WK = np.full((len(go_on_WR), go_on_WR.shape[1] + 1), num_inputs)
    for ramp in range(go_on_WR.shape[1]):
        reach_WK[:, ramp + 1] = rng.binomial(reach_WK[:, ramp], go_on_WR[:, ramp])
    return history_of(reach_WK)


def assert_possible(found: SurvivalForecast) -> None:
    for survival_K in (found.survival_K, found.survival_low_K, found.survival_high_K):
        assert survival_K[0] == 1
        assert (np.diff(survival_K) <= 1e-12).all()
        assert ((survival_K >= 0) & (survival_K <= 1)).all()
    assert (found.survival_low_K <= found.survival_K + 1e-12).all()
    assert (found.survival_K <= found.survival_high_K + 1e-12).all()
    assert (found.go_on_low_R <= found.go_on_R + 1e-12).all()
    assert (found.go_on_R <= found.go_on_high_R + 1e-12).all()


def test_with_few_inputs_the_last_value_the_pooled_share_or_the_prior_is_forecast() -> None:
    found = forecast_survival(history_of([[100, 50, 10]]))
    np.testing.assert_allclose(found.survival_K, [1, 0.5, 0.1])
    assert [(method.how, method.reason) for method in found.methods_R] == [
        ("last value", "only one window was observed")
    ] * 2
    assert_possible(found)
    # After block 0 all continue, after block 1 none does.
    found = forecast_survival(history_of([[200, 200, 0, 0]] * 10))
    assert list(found.next_survival) == [1, 1, 0, 0]
    assert [method.how for method in found.methods_R] == ["pooled share", "pooled share", "assumed"]
    assert found.methods_R[0].reason.startswith("constant")
    assert found.survival_low_K[1] > 0.99
    assert_possible(found)
    nothing = history_of(np.full((3, 3), np.nan))
    found = forecast_survival(nothing, prior=[1, 0.8, 0.4])
    np.testing.assert_allclose(found.survival_K, [1, 0.8, 0.4])
    assert {method.how for method in found.methods_R} == {"prior"}
    partly = forecast_survival(history_of([[100, 0, 0]]), prior=[1, 0.8, 0.4])
    assert [method.how for method in partly.methods_R] == ["last value", "prior"]
    assert partly.go_on_R.tolist() == [0, 0.5]


def test_steady_shares_are_averaged_and_missing_windows_skipped() -> None:
    history = drawn(np.tile([0.7, 0.9, 0.5], (40, 1)), 240, seed=1)
    found = forecast_survival(history)
    truth = np.array([1, 0.7, 0.63, 0.315])
    last_error = np.abs(history.survival_WK[-5:] - truth).mean()
    assert np.abs(found.survival_K - truth).mean() < 0.5 * last_error
    assert all(method.how.startswith("arima(") for method in found.methods_R)
    assert_possible(found)
    reach_WK = drawn(np.tile([0.7, 0.5], (30, 1)), 240, seed=5).survival_WK * 240
    reach_WK[[3, 10, 11, 29]] = np.nan
    found = forecast_survival(history_of(reach_WK))
    np.testing.assert_allclose(found.survival_K, [1, 0.7, 0.35], atol=0.03)
    assert found.methods_R[0].how.startswith("arima(")
    assert_possible(found)


def test_after_a_jump_only_the_new_level_counts() -> None:
    go_on_WR = np.array([[0.9, 0.9]] * 30 + [[0.4, 0.7]] * 4)
    found = forecast_survival(drawn(go_on_WR, 240, seed=3))
    np.testing.assert_allclose(found.go_on_R, [0.4, 0.7], atol=0.05)
    assert "jumped 4 windows ago" in found.methods_R[0].reason
    at_once = forecast_survival(drawn(go_on_WR[:31], 240, seed=3))
    assert at_once.methods_R[0].how == "last value"
    assert "jumped 1 windows ago" in at_once.methods_R[0].reason


@pytest.mark.parametrize(
    ("level", "drift", "num_inputs"),
    [(0.5, 0.1, 400), pytest.param(-1.5, 0.2, 1_000_000, marks=pytest.mark.slow)],
    ids=["noise and drift", "the drift dwarfs the noise"],
)
def test_intervals_have_about_the_promised_coverage(level: float, drift: float, num_inputs: int) -> None:
    rng = np.random.default_rng(8)
    survival, ramps = [], []
    for seed in range(40):
        logits_WR = level + np.cumsum(rng.normal(0, drift, (41, 3)), axis=0)
        go_on_WR = 1 / (1 + np.exp(-logits_WR))
        found = forecast_survival(drawn(go_on_WR[:40], num_inputs, seed))
        truth = np.cumprod(go_on_WR[40])
        survival.append((found.survival_low_K[1:] <= truth) & (truth <= found.survival_high_K[1:]))
        ramps.append((found.go_on_low_R <= go_on_WR[40]) & (go_on_WR[40] <= found.go_on_high_R))
    assert 0.65 < np.mean(survival) < 0.95
    assert 0.65 < np.mean(ramps) < 0.95


def test_few_inputs_do_not_bias_the_share() -> None:
    # 24 inputs of which 0.8 continue: without a correction the logit gives 0.812 on average.
    found = [forecast_survival(drawn(np.full((30, 1), 0.8), 24, seed)) for seed in range(30)]
    assert all(each.methods_R[0].how.startswith("arima(") for each in found)
    assert np.mean([each.survival_K[1] for each in found]) == pytest.approx(0.8, abs=0.008)


def test_the_pooled_share_has_the_interval_of_jeffreys_open_above_where_all_left() -> None:
    # 798 of 800 continue: Beta(798.5, 2.5) has its 10 % and 90 % quantiles here.
    found = forecast_survival(history_of([[200, 200], [200, 199], [200, 199], [200, 200]]))
    assert found.go_on_low_R[0] == pytest.approx(0.99425, abs=1e-4)
    assert found.go_on_high_R[0] == pytest.approx(0.99900, abs=1e-4)
    found = forecast_survival(history_of([[1, 0, 0]]))
    # Beta(0.5, 1.5) stays below 0.6558 in 90 % of cases; little is known of inputs beyond.
    assert found.survival_K.tolist() == [1, 0, 0]
    assert found.survival_low_K.tolist() == [1, 0, 0]
    assert found.survival_high_K[1] == pytest.approx(found.go_on_high_R[0])
    assert found.go_on_high_R[0] == pytest.approx(0.656, abs=0.01)
    assert 0 < found.survival_high_K[2] <= found.survival_high_K[1]


def test_only_the_last_windows_of_a_long_history_count() -> None:
    old, new = np.full((20_000, 1), 0.2), np.full((MOST_WINDOWS, 1), 0.7)
    history = drawn(np.vstack([old, new]), 240, seed=1)
    found = forecast_survival(history)
    assert found.survival_K[1] == pytest.approx(0.7, abs=0.02)
    assert "jumped" not in found.methods_R[0].reason


def test_ramps_that_move_together_widen_the_interval_of_survival() -> None:
    """Four ramps with the same drift have equal errors, so the widths of their logarithms almost add up."""
    walk_W1 = 1.5 + np.cumsum(np.random.default_rng(17).normal(0, 0.1, (60, 1)), axis=0)
    go_on_WR = np.tile(1 / (1 + np.exp(-walk_W1)), (1, 4))
    reach_WK = np.asarray(2000 * np.cumprod(np.hstack([np.ones((60, 1)), go_on_WR]), axis=1), dtype=np.float64)
    found = forecast_survival(history_of(reach_WK))

    def width(low_X: FloatArray, share_X: FloatArray, high_X: FloatArray) -> FloatArray:
        """Returns the width of a share's logarithm, to the first order in its logit."""
        logit_width_X = np.log(high_X / (1 - high_X)) - np.log(low_X / (1 - low_X))
        return np.asarray(logit_width_X * (1 - share_X))

    ramps_R = width(found.go_on_low_R, found.go_on_R, found.go_on_high_R)
    [last] = width(found.survival_low_K[4:], found.survival_K[4:], found.survival_high_K[4:])
    assert 0.7 < last / ramps_R.sum() <= 1  # independent errors would give 1/2


def log_width(rates: object) -> float:
    """Returns the width of the next window's interval, as a factor's logarithm."""
    found = forecast_rate(np.array(rates))
    return float(np.log(found.high_rps / found.low_rps))


@pytest.mark.parametrize(
    ("rates", "expected", "reason"),
    [
        pytest.param([10.0] * 12, 10, "constant", id="constant"),
        pytest.param([10.0, 11, 9], 9, "fewer than 8 windows", id="short"),
        pytest.param([7.0], 7, "fewer than 8 windows", id="one"),
        pytest.param([10.0, 11, 9, 10] * 3 + [0], 0, "no requests", id="stopped"),
        pytest.param([10.0, 11, 9, 10] * 3 + [40], 40, "jumped", id="jump"),
        pytest.param([4.0, 400], 400, "fewer than 8 windows", id="large step"),
        pytest.param([10.0, 11, 9, 10] * 3 + [np.nan] * 9, 10, "nothing was seen", id="long hole"),
    ],
)
def test_rates_without_a_fitting_order_keep_the_last_value(rates: list[float], expected: float, reason: str) -> None:
    found = forecast_rate(np.array(rates))
    assert found.rate_rps == pytest.approx(expected)
    assert found.method.how == "last value"
    assert reason in found.method.reason
    assert found.low_rps - 1e-9 <= found.rate_rps <= found.high_rps + 1e-9
    assert found.high_rps == np.inf if len(rates) == 1 else found.high_rps <= 2 * np.nanmax(rates)


def test_rates_are_smoothed_over_noise_and_holes() -> None:
    rates_W = 100 * np.exp(np.random.default_rng(13).normal(0, 0.1, 60))
    rates_W[[5, 40]] = np.nan
    found = forecast_rate(rates_W)
    assert found.method.how.startswith("arima(")
    assert 93 < found.rate_rps < 107
    assert found.low_rps < 95 < 105 < found.high_rps


@pytest.mark.parametrize("rates", [[50.0, 50], [100.0] * 20], ids=["two", "twenty"])
def test_equal_rates_have_an_interval_of_poisson_noise(rates: list[float]) -> None:
    # Two Poisson counts of 120 s, the last and the coming one: sqrt(2 / count), 1.28 times on both sides.
    assert log_width(rates) == pytest.approx(2 * 1.2816 * np.sqrt(2 / (rates[0] * 120)), rel=1e-3)


def test_windows_without_requests_are_in_the_interval_if_they_are_common_or_the_only_ones() -> None:
    found = forecast_rate(np.array([0.0, 100] * 20))
    assert found.rate_rps == pytest.approx(100)
    assert found.low_rps == 0
    assert found.high_rps > 100
    stopped = forecast_rate(np.array([100.0, 0] * 20))
    assert (stopped.rate_rps, stopped.low_rps, stopped.high_rps) == (0, 0, 100)
    assert forecast_rate(np.array([90.0, 100] * 20 + [0, 95])).low_rps > 0
    found = forecast_rate(np.zeros(12))
    assert (found.rate_rps, found.low_rps, found.method.how) == (0, 0, "pooled rate")
    # Gamma(0.5) stays below 1.353 in 90 % of cases, over 12 windows of 120 s.
    assert found.high_rps == pytest.approx(1.353 / 12 / 120, rel=1e-3)


@pytest.mark.parametrize("mean_count", [0.3, 1, 3, 8, 30])
def test_intervals_cover_few_requests_as_promised(mean_count: float) -> None:
    rng = np.random.default_rng(5)
    inside = []
    for _ in range(60):
        rates_W = rng.poisson(mean_count, 61) / 120
        found = forecast_rate(rates_W[:60])
        inside.append(found.low_rps <= rates_W[60] <= found.high_rps)
    assert np.mean(inside) >= 0.68  # counts are integers: 80 % is a lower bound if there are few


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


def test_the_interval_of_a_random_walk_widens_with_the_root_of_the_distance() -> None:
    # Steps of ln 1.5 up and down; by the last value, the fourth window ahead has twice the width of the first.
    rates = [10.0, 15, 10, 15, 10]
    assert log_width([*rates, np.nan, np.nan, np.nan]) == pytest.approx(2 * log_width(rates))


def test_a_rate_forecast_stays_within_past_rates() -> None:
    rising_W = np.exp(0.3 * np.arange(20))
    found = forecast_rate(np.append(rising_W, [np.nan, np.nan]))
    assert found.method.how.startswith("arima(1,1,")
    assert found.rate_rps <= rising_W[-1] + 1e-9


WINDOWS = np.arange(60)


def breaks(go_on_WR: FloatArray, num_inputs: int, seed: int) -> int:
    """Returns the last break of windows with these numbers of inputs at each ramp."""
    go_on = np.random.default_rng(seed).binomial(num_inputs, go_on_WR).astype(float)
    return last_break(np.full(go_on_WR.shape, float(num_inputs)), go_on)


def line(_: np.random.Generator) -> FloatArray:
    return 0.8 - 0.4 * WINDOWS / 60


def half_cycle(_: np.random.Generator) -> FloatArray:
    return 0.5 + 0.3 * np.sin(np.pi * WINDOWS / 60)


def walk(rng: np.random.Generator) -> FloatArray:
    return np.asarray(1 / (1 + np.exp(-1 - np.cumsum(rng.normal(0, 0.1, 60)))))


def still(_: np.random.Generator) -> FloatArray:
    return np.full(60, 0.6)


@pytest.mark.parametrize("num_inputs", [240, 12_000])
@pytest.mark.parametrize("num_ramps", [1, 3, 11])
@pytest.mark.parametrize("level", [still, line, half_cycle, walk])
def test_drift_is_no_jump(level: Callable[[np.random.Generator], FloatArray], num_ramps: int, num_inputs: int) -> None:
    """All ramps drift together; hardly one of 40 histories may show a jump."""
    found = [
        breaks(np.tile(level(np.random.default_rng(seed))[:, None], (1, num_ramps)), num_inputs, 1000 + seed)
        for seed in range(40)
    ]
    assert np.count_nonzero(found) <= 3


@pytest.mark.parametrize("num_inputs", [240, 12_000])
@pytest.mark.parametrize("before", [3, 15, 30])
def test_a_jump_is_found_wherever_it_is(before: int, num_inputs: int) -> None:
    # At each of three ramps, 0.4 of easy and 0.9 of hard inputs continue; their mix goes from 80:20 to 50:50.
    go_on_W1 = np.repeat([0.5, 0.65], [before, 31 - before])[:, None]
    found = [breaks(np.tile(go_on_W1, (1, 3)), num_inputs, seed) for seed in range(20)]
    assert found.count(before) >= 18


def test_the_last_of_several_jumps_is_found_and_none_in_too_few_windows() -> None:
    go_on_W1 = np.repeat([0.8, 0.5, 0.8], 15)[:, None]
    assert breaks(np.tile(go_on_W1, (1, 3)), 240, seed=2) == 30
    assert breaks(np.repeat([0.8, 0.4], [3, 1])[:, None], 12_000, seed=3) == 0
    assert last_break(np.zeros((3, 0)), np.zeros((3, 0))) == 0


def test_a_window_is_compared_with_several_taken_together() -> None:
    """In one window this change would be lost in the noise: 240 inputs from 0.70 to 0.56, two ramps."""
    go_on_W1 = np.repeat([0.70, 0.56], [30, 1])[:, None]
    found = [breaks(np.tile(go_on_W1, (1, 2)), 240, seed) for seed in range(40)]
    assert found.count(30) >= 28
