from __future__ import annotations

import numpy as np
import pytest

from profiles.forecast import forecast_noisy, forecast_series


def test_known_noise_is_distinguished_from_drift() -> None:
    rng = np.random.default_rng(10)
    steady_W = rng.normal(0, 1, 60)
    walk_W = np.cumsum(rng.normal(0, 3, 60)) + rng.normal(0, 1, 60)
    steady = forecast_noisy(steady_W[:, None], np.ones(60))
    walk = forecast_noisy(walk_W[:, None], np.ones(60))
    assert steady.how_X == ("arima(0,0,0)",)
    assert walk.how_X == ("arima(0,1,1)",)
    assert abs(steady.mean_X[0]) < 0.4
    assert abs(walk.mean_X[0] - walk_W[-1]) < 2
    assert steady.variance_X[0] < 0.5 < walk.variance_X[0]


def test_a_series_with_momentum_is_extrapolated() -> None:
    rng = np.random.default_rng(11)
    rising_W = 0.1 * np.arange(60) + rng.normal(0, 0.01, 60)
    mean, variance, how = forecast_series(np.append(rising_W, np.nan))
    assert mean == pytest.approx(6.1, abs=0.1)
    assert variance > 0
    assert how.startswith("arima(1,1,")


def test_a_drift_far_above_the_noise_has_a_wide_interval() -> None:
    # Steps of 300 standard deviations of the noise: a variance of 90,000 per window.
    walk_W = np.cumsum(np.random.default_rng(12).normal(0, 300, 100))
    found = forecast_noisy(walk_W[:, None], np.ones(100))
    assert found.variance_X[0] == pytest.approx(90_000, rel=0.5)


def test_a_few_windows_are_not_taken_for_a_drift_with_momentum() -> None:
    """AICc: four windows of pure noise must not justify two parameters."""
    noise = np.random.default_rng(13).normal(0, 1, (40, 4))
    found = [forecast_noisy(series_W[:, None], np.ones(4)).how_X[0] for series_W in noise]
    assert found.count("arima(0,0,0)") >= 38


def test_evidence_is_pooled_over_series() -> None:
    rng = np.random.default_rng(14)
    still_W = rng.normal(0, 1, 30)
    walks_WX = np.cumsum(rng.normal(0, 3, (30, 3)), axis=0)
    alone = forecast_noisy(still_W[:, None], np.ones(30))
    among = forecast_noisy(np.hstack([still_W[:, None], walks_WX]), np.ones(30))
    assert among.variance_X[0] > 1.5 * alone.variance_X[0]
