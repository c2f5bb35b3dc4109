"""The request rate of the coming windows."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from earlyexit.errors import DataError
from profiles.arima import FAILURES, forecast_series

FloatArray = npt.NDArray[np.float64]

LEAST_WINDOWS = 8
"""Windows with requests that an order can be weighed on."""
JUMP = 4.0
"""An upward step of so many usual steps is a burst: it comes at once, and momentum would carry it on and on. (Its end
takes several windows, and there momentum helps.) Chosen on four days of the Twitter trace."""
USUAL_STEP = 1.4826
"""Standard deviations in the median size of a normal step, inverted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How a figure was forecast."""

    how: str
    """`arima(p,d,q)`, `pooled share`, `last value`, `prior` or `assumed`."""
    reason: str = ""
    """Why it was no ARIMA, or what was left out; empty where there is nothing to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateForecast:
    """Requests per second over the coming windows (H): the median, and an interval from normal errors of its log."""

    rate_rps_H: FloatArray
    low_rps_H: FloatArray
    high_rps_H: FloatArray
    """Infinite where one window, or none with requests, cannot say how rates change."""
    coverage: float
    method: Method


def forecast_rate(rate_rps_W: FloatArray, horizon: int = 1, coverage: float = 0.8) -> RateForecast:
    """The rate over the next `horizon` windows, from past windows, oldest first; missing windows are NaN.

    ARIMA on the logarithm: rates change by factors; never beyond the rates of those windows, as bursts end. Windows
    without a request have no logarithm, and count as missing unless they are the last. Raises DataError for negative
    or infinite rates, and where nothing was seen.
    """
    check_request(horizon, coverage)
    rate_rps_W = np.asarray(rate_rps_W, dtype=np.float64)
    seen_S = rate_rps_W[~np.isnan(rate_rps_W)]
    if rate_rps_W.ndim != 1 or not len(seen_S):
        raise DataError("a forecast of the rate needs a window that is not missing")
    if (seen_S < 0).any() or np.isinf(seen_S).any():
        raise DataError("rates must be finite and at least 0")
    log_W = np.log(np.where(rate_rps_W > 0, rate_rps_W, np.nan))
    why_not = _why_no_arima(rate_rps_W, log_W)
    if why_not:
        return _last_rate(seen_S, log_W, horizon, coverage, why_not)
    try:
        mean_H, variance_H, how = forecast_series(log_W, horizon)
    except FAILURES as error:
        return _last_rate(seen_S, log_W, horizon, coverage, f"no ARIMA could be fitted: {error}")
    seen_mean_H = np.clip(mean_H, np.nanmin(log_W), np.nanmax(log_W))
    return _from_log(seen_mean_H, np.sqrt(variance_H), coverage, Method(how=how))


def _why_no_arima(rate_rps_W: FloatArray, log_W: FloatArray) -> str:
    """Empty where there is no reason."""
    seen_S = log_W[~np.isnan(log_W)]
    last = rate_rps_W[~np.isnan(rate_rps_W)][-1]
    if last == 0:
        return "the last window had no requests"
    if len(seen_S) < LEAST_WINDOWS:
        return f"fewer than {LEAST_WINDOWS} windows with requests"
    if np.ptp(seen_S) == 0:
        return "constant"
    if np.isnan(log_W[-LEAST_WINDOWS:]).all():
        return f"nothing was seen in the last {LEAST_WINDOWS} windows"
    return "the rate jumped in the last window" if _has_jumped(np.diff(seen_S)) else ""


def _has_jumped(steps_S: FloatArray) -> bool:
    return bool(steps_S[-1] > JUMP * USUAL_STEP * float(np.median(np.abs(steps_S))))


def _last_rate(seen_S: FloatArray, log_W: FloatArray, horizon: int, coverage: float, reason: str) -> RateForecast:
    """The last rate seen, as a random walk would have it."""
    method = Method(how="last value", reason=reason)
    steps = np.diff(log_W[~np.isnan(log_W)])
    ahead_H = np.arange(1, horizon + 1)
    if seen_S[-1] == 0 or not len(steps):
        same_H = np.full(horizon, seen_S[-1])
        high_H = np.full(horizon, 0.0 if not seen_S.any() else np.inf)
        return RateForecast(
            rate_rps_H=same_H, low_rps_H=np.zeros(horizon), high_rps_H=high_H, coverage=coverage, method=method
        )
    deviation_H = np.sqrt(ahead_H * (steps**2).mean())
    return _from_log(np.full(horizon, np.log(seen_S[-1])), deviation_H, coverage, method)


def _from_log(mean_H: FloatArray, deviation_H: FloatArray, coverage: float, method: Method) -> RateForecast:
    width_H = NormalDist().inv_cdf((1 + coverage) / 2) * deviation_H
    return RateForecast(
        rate_rps_H=np.exp(mean_H),
        low_rps_H=np.exp(mean_H - width_H),
        high_rps_H=np.exp(mean_H + width_H),
        coverage=coverage,
        method=method,
    )


def check_request(horizon: int, coverage: float) -> None:
    """Raises DataError for a horizon or a coverage that cannot be."""
    if horizon < 1:
        raise DataError(f"a forecast is for at least 1 window, not {horizon}")
    if not 0 < coverage < 1:
        raise DataError(f"the coverage of an interval must be between 0 and 1, not {coverage}")
