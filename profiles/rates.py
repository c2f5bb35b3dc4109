"""The request rate of the coming windows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from earlyexit.errors import DataError
from profiles.arima import FAILURES, forecast_series

FloatArray = npt.NDArray[np.float64]

WINDOW_S = 120.0
"""Length of a window where none is given: that of E3 (section 3.1)."""
LEAST_WINDOWS = 8
"""Windows with requests that an order can be weighed on."""
MOST_WINDOWS = 300
"""Windows that are looked at: ten hours of two minutes."""
JUMP = 4.0
"""An upward step of so many usual steps is a burst: it comes at once, and momentum would carry it on and on. (Its end
takes several windows, and there momentum helps.) Chosen on four days of the Twitter trace."""
USUAL_STEP = 1.4826
"""Standard deviations in the median size of a normal step, inverted."""
FEW = 20
"""Requests; where no window has more, many may have none, and normal errors of a logarithm make no sense."""
POOLED = 30
"""Windows that are taken together where there are few requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How a figure was forecast."""

    how: str
    """`arima(p,d,q)`, `pooled share`, `pooled rate`, `last value`, `prior` or `assumed`."""
    reason: str = ""
    """Why it was no ARIMA, or what was left out; empty where there is nothing to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateForecast:
    """Requests per second over the coming windows (H): the median, and an interval from normal errors of its log.

    The interval is of the rate that a coming *window* will show, so it is never narrower than the Poisson noise of the
    requests in it.
    """

    rate_rps_H: FloatArray
    low_rps_H: FloatArray
    high_rps_H: FloatArray
    """Infinite where one window with requests cannot say how rates change."""
    coverage: float
    method: Method


def forecast_rate(
    rate_rps_W: FloatArray, horizon: int = 1, coverage: float = 0.8, *, window_s: float = WINDOW_S
) -> RateForecast:
    """The rate over the next `horizon` windows, from past windows of `window_s`, oldest first; missing ones are NaN.

    ARIMA on the logarithm: rates change by factors; never beyond the rates of those windows, as bursts end. Windows
    without a request have no logarithm: they count as missing in the median unless they are the last, and the interval
    goes down to 0 where they are no rarer than what it leaves out below. Raises DataError for negative or infinite
    rates, and where nothing was seen.
    """
    check_request(horizon, coverage)
    if not 0 < window_s < np.inf:
        raise DataError(f"a window lasts more than 0 s, not {window_s}")
    rate_rps_W = np.asarray(rate_rps_W, dtype=np.float64)
    if rate_rps_W.ndim != 1 or np.isnan(rate_rps_W).all():
        raise DataError("a forecast of the rate needs a window that is not missing")
    if (rate_rps_W < 0).any() or np.isinf(rate_rps_W).any():
        raise DataError("rates must be finite and at least 0")
    past = _Past.of(rate_rps_W, window_s)
    if (past.seen_S * window_s <= FEW).all():
        return _pooled_rate(past, horizon, coverage)
    if past.seen_S[-1] == 0:
        return _stopped_rate(past, horizon, coverage)
    return _with_zeros(_from_log(past, horizon, coverage), past)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Past:
    """The windows up to the last one seen, and how many were missed since."""

    rate_rps_W: FloatArray
    hole: int
    window_s: float

    @classmethod
    def of(cls, rate_rps_W: FloatArray, window_s: float) -> _Past:
        end = int(np.flatnonzero(~np.isnan(rate_rps_W))[-1]) + 1
        return cls(
            rate_rps_W=rate_rps_W[max(0, end - MOST_WINDOWS) : end], hole=len(rate_rps_W) - end, window_s=window_s
        )

    @property
    def seen_S(self) -> FloatArray:
        return self.rate_rps_W[~np.isnan(self.rate_rps_W)]

    @property
    def log_W(self) -> FloatArray:
        return np.log(np.where(self.rate_rps_W > 0, self.rate_rps_W, np.nan))

    @property
    def why_no_arima(self) -> str:
        """Empty where there is no reason."""
        seen_S = self.log_W[~np.isnan(self.log_W)]
        if len(seen_S) < LEAST_WINDOWS:
            return f"fewer than {LEAST_WINDOWS} windows with requests"
        if np.ptp(seen_S) == 0:
            return "constant"
        return "the rate jumped in the last window" if _has_jumped(np.diff(seen_S)) else ""


def _has_jumped(steps_S: FloatArray) -> bool:
    return bool(steps_S[-1] > JUMP * USUAL_STEP * float(np.median(np.abs(steps_S))))


def _from_log(past: _Past, horizon: int, coverage: float) -> RateForecast:
    """ARIMA, or a random walk where there is a reason against it."""
    mean_H, variance_H, method = _random_walk(past, horizon)
    if not method.reason:
        mean_H, variance_H, method = _arima(past, horizon)
    poisson_H = np.exp(-mean_H) / past.window_s
    width_H = NormalDist().inv_cdf((1 + coverage) / 2) * np.sqrt(np.maximum(variance_H, poisson_H))
    return RateForecast(
        rate_rps_H=np.exp(mean_H),
        low_rps_H=np.exp(mean_H - width_H),
        high_rps_H=np.exp(mean_H + width_H),
        coverage=coverage,
        method=method,
    )


def _arima(past: _Past, horizon: int) -> tuple[FloatArray, FloatArray, Method]:
    """Mean and variance of the logarithm; after a long hole the last value, at least as unsure as ARIMA is of its."""
    log_W = past.log_W
    last_H, walk_variance_H, method = _random_walk(past, horizon)
    try:
        means, variances, order = forecast_series(log_W, min(past.hole, MOST_WINDOWS) + horizon)
    except FAILURES as error:
        return last_H, walk_variance_H, replace(method, reason=f"no ARIMA could be fitted: {error}")
    if past.hole >= LEAST_WINDOWS:
        reason = f"nothing was seen in the last {LEAST_WINDOWS} windows"
        return last_H, np.maximum(walk_variance_H, variances[-horizon:]), replace(method, reason=reason)
    mean_H = np.clip(means[-horizon:], np.nanmin(log_W), np.nanmax(log_W))
    return mean_H, variances[-horizon:], Method(how=order)


def _random_walk(past: _Past, horizon: int) -> tuple[FloatArray, FloatArray, Method]:
    """Mean and variance of the logarithm as if it walked at random from the last window seen, and why it should."""
    at_S = np.flatnonzero(~np.isnan(past.log_W))
    log_S = past.log_W[at_S]
    ahead_H = past.hole + np.arange(1.0, horizon + 1)
    per_window = (np.diff(log_S) ** 2 / np.diff(at_S)).mean() if len(log_S) > 1 else np.inf
    counted = 2 / (past.seen_S[-1] * past.window_s)  # Poisson noise of the last window and of the coming one
    method = Method(how="last value", reason=past.why_no_arima)
    return np.full(horizon, log_S[-1]), np.maximum(ahead_H * per_window, counted), method


def _stopped_rate(past: _Past, horizon: int, coverage: float) -> RateForecast:
    """No requests, as in the last window, up to what few windows exceed."""
    high = float(np.quantile(past.seen_S, (1 + coverage) / 2, method="higher"))
    return RateForecast(
        rate_rps_H=np.zeros(horizon),
        low_rps_H=np.zeros(horizon),
        high_rps_H=np.full(horizon, high),
        coverage=coverage,
        method=Method(how="last value", reason="the last window had no requests"),
    )


def _pooled_rate(past: _Past, horizon: int, coverage: float) -> RateForecast:
    """All windows taken together: Poisson counts at a rate of Gamma's distribution, from Jeffreys' prior.

    The interval holds that of the counts (negative binomial), the level's own upper bound, and the quantiles of the
    windows, as requests often come in clumps.
    """
    from scipy.stats import gamma, nbinom

    count_S = past.seen_S[-POOLED:] * past.window_s
    low, high = (1 - coverage) / 2, (1 + coverage) / 2
    shape, num = count_S.sum() + 0.5, len(count_S)
    coming = nbinom(shape, num / (num + 1))
    least = min(coming.ppf(low), np.quantile(count_S, low, method="lower"), count_S.mean())
    most = max(coming.ppf(high), gamma.ppf(high, shape) / num, np.quantile(count_S, high, method="higher"))
    return RateForecast(
        rate_rps_H=np.full(horizon, count_S.mean() / past.window_s),
        low_rps_H=np.full(horizon, least / past.window_s),
        high_rps_H=np.full(horizon, most / past.window_s),
        coverage=coverage,
        method=Method(how="pooled rate", reason=f"no window had more than {FEW} requests"),
    )


def _with_zeros(found: RateForecast, past: _Past) -> RateForecast:
    """Down to 0, where windows without requests are no rarer than what the interval leaves out below."""
    if (past.seen_S == 0).mean() < (1 - found.coverage) / 2:
        return found
    return replace(found, low_rps_H=np.zeros_like(found.low_rps_H))


def check_request(horizon: int, coverage: float) -> None:
    """Raises DataError for a horizon or a coverage that cannot be."""
    if horizon < 1:
        raise DataError(f"a forecast is for at least 1 window, not {horizon}")
    if not 0 < coverage < 1:
        raise DataError(f"the coverage of an interval must be between 0 and 1, not {coverage}")
