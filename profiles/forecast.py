"""Forecasts of survival at every block, and of the request rate, for the next window (E3 section 3.1).

E3 forecasts the batch size at every ramp with ARIMA over windows of two minutes. This module forecasts, on the logit
scale, the share of inputs that continue *among those that reach a ramp*. The product of these forecasts is a survival
between 0 and 1 that never rises, and the sampling noises of different ramps are independent. If a stream becomes
harder, the shares of all ramps change together, each with its own noise. Therefore, shares are scaled to equal noise
and projected on their principal components, which concentrates the drift in few series. The forecasts of these series
are transformed back.

ARIMA models are averaged with weights by AICc, and statsmodels computes the exact likelihoods. Shares of a few hundred
inputs have *sampling noise of known size*, which the state space form includes for each window, so that only the drift
is estimated. The noise of a rate is unknown and estimated together with the drift. The parameters are on a grid, which
is evaluated with statsmodels' Kalman filter, because an optimizer would take much longer and could fail to converge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np
from scipy.special import expit, logit

from earlyexit.errors import DataError
from profiles.scores import BoolArray, FloatArray
from profiles.windows import ROUNDING, SurvivalHistory, last_break

# ARIMA.

MOMENTA = (0.0, 0.5, 0.8, 0.9, 0.97)
"""Autoregressive coefficients of a drift, from a random walk to almost a straight line."""
DRIFTS = np.geomspace(1e-3, 1e6, 24)
"""Variances of the drift per window, relative to the variance of the sampling noise."""
BORROWED = 0.5
"""Weight of the other series' likelihoods in the choice of a series' model. It prevents that a series of few windows
takes its noise for a drift, and reduces the forecast error by 2 %."""
RATE_MOMENTA = (0.0, 0.3, 0.5, 0.8, 0.9)
RATE_NOISES = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Variances of a rate's noise, relative to the variance of its drift."""
UNNOTICED = 0.02
"""Models with a smaller likelihood relative to the best one are left out, to save time."""
FAILURES = (ValueError, np.linalg.LinAlgError)
"""Exceptions of statsmodels for a series that it cannot fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesForecast:
    """Forecast of several series (X) for the next window."""

    mean_X: FloatArray
    variance_X: FloatArray
    """Variance of the level, without the sampling noise of a window."""
    how_X: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A model: a level that changes by a drift with autoregressive coefficient `momentum`, observed with noise."""

    momentum: float
    drift: float
    """Variance of the drift per window."""
    noise: float
    """Variance of the noise. If the noise is unknown, only the ratio of the two variances matters."""

    @property
    def order(self) -> tuple[int, int, int]:
        """The ARIMA order of the observed series: a random walk with noise is (0,1,1), with momentum (1,1,2)."""
        if self.drift == 0:
            return 0, 0, 0
        memory = int(self.momentum > 0)
        return memory, 1, 0 if self.noise == 0 else 1 + memory

    @property
    def name(self) -> str:
        return "arima({},{},{})".format(*self.order)


# A drift with momentum m moves the level 1 / (1 - m) times as far. The scale makes the grid equivalent for all momenta.
_KNOWN_NOISE = (
    _Candidate(momentum=0.0, drift=0.0, noise=1.0),
    *(_Candidate(momentum=m, drift=float(d) * (1 - m), noise=1.0) for m in MOMENTA for d in DRIFTS),
)
_KNOWN_PARAMETERS = tuple(int(model.drift > 0) + int(model.momentum > 0) for model in _KNOWN_NOISE)
_FREE_NOISE = tuple(_Candidate(momentum=m, drift=1.0, noise=n) for m in RATE_MOMENTA for n in RATE_NOISES)
_FREE_PARAMETERS = tuple(1 + int(model.noise > 0) + int(model.momentum > 0) for model in _FREE_NOISE)


def forecast_noisy(series_WX: FloatArray, noise_W: FloatArray | None) -> SeriesForecast:
    """Returns the forecast of several series with sampling noise of known variance. Missing windows are NaN.

    `noise_W`: None if the noise is unknown. The grid then includes the ratio of noise to drift.

    Each series is a constant level, a random walk, or a random walk with momentum (the state space form of
    ARIMA(0,0,0), (0,1,0) and (1,1,0)), plus noise. The models on the grid are averaged by Akaike weights from AICc
    (Burnham and Anderson 2002, section 4.2), because a few windows rarely identify one model. Averaging has a smaller
    error than the best model, and better intervals. `how_X` is the order of the model with the largest weight.
    """
    models, parameters_C = (_FREE_NOISE, _FREE_PARAMETERS) if noise_W is None else (_KNOWN_NOISE, _KNOWN_PARAMETERS)
    num_seen = int((~np.isnan(series_WX[:, 0])).sum())
    filters = [_Filters(series_W, noise_W) for series_W in series_WX.T]
    logs_CX = np.array([[series.log_likelihood(model) for series in filters] for model in models])
    penalties_C = np.array([_aicc_penalty(parameters, num_seen - 1) for parameters in parameters_C])
    others_CX = (logs_CX.sum(1, keepdims=True) - logs_CX) / max(len(filters) - 1, 1)
    weights_CX = _akaike_weights(penalties_C[:, None] - 2 * (logs_CX + BORROWED * others_CX))
    averaged = [_averaged(series, models, own_C) for series, own_C in zip(filters, weights_CX.T, strict=True)]
    return SeriesForecast(
        mean_X=np.array([mean for mean, _, _ in averaged]),
        variance_X=np.array([variance for _, variance, _ in averaged]),
        how_X=tuple(how for _, _, how in averaged),
    )


def _akaike_weights(criterion_CX: FloatArray) -> FloatArray:
    """Returns the weights of the models, which sum to 1. Weights below UNNOTICED, relative to the best, become 0."""
    weights_CX = np.exp(-0.5 * (criterion_CX - criterion_CX.min(0)))
    weights_CX[weights_CX < UNNOTICED] = 0.0
    return np.asarray(weights_CX / weights_CX.sum(0))


def _averaged(filters: _Filters, candidates: Sequence[_Candidate], weights_C: FloatArray) -> tuple[float, float, str]:
    """Returns mean and variance of the mixture, and the order of the model with the largest weight."""
    used = [(weight, candidate) for weight, candidate in zip(weights_C, candidates, strict=True) if weight > 0]
    weights_U = np.array([weight for weight, _ in used])
    means_U, variances_U = np.array([filters.forecast(candidate) for _, candidate in used]).T
    mean = float(weights_U @ means_U)
    variance = float(weights_U @ (variances_U + (means_U - mean) ** 2))
    return mean, variance, used[int(weights_U.argmax())][1].name


class _Filters:
    """Kalman filters of one series, one with and one without momentum. The next window is appended as missing."""

    def __init__(self, series_W: FloatArray, noise_W: FloatArray | None) -> None:
        from statsmodels.tsa.statespace.sarimax import SARIMAX

        self._scaled = noise_W is None
        """Whether the noise is unknown. Drift and noise then have the scale of the largest likelihood."""
        seen = np.append(series_W, np.nan)
        self._models = {
            momentum: SARIMAX(seen, order=(int(momentum), 1, 0), concentrate_scale=self._scaled)
            for momentum in (False, True)
        }
        if noise_W is not None:
            for model in self._models.values():
                model["obs_cov"] = np.append(noise_W, 0.0)[None, None, :]

    def log_likelihood(self, candidate: _Candidate) -> float:
        return float(self._set(candidate).ssm.loglike())

    def forecast(self, candidate: _Candidate) -> tuple[float, float]:
        """Returns mean and variance of the next window. The variance includes unknown noise."""
        filtered = self._set(candidate).ssm.filter()
        return float(filtered.forecasts[0, -1]), max(float(filtered.forecasts_error_cov[0, 0, -1]), 0.0)

    def _set(self, candidate: _Candidate) -> Any:
        model = self._models[candidate.momentum > 0]
        memory = [candidate.momentum] if candidate.momentum > 0 else []
        model.update(np.array(memory if self._scaled else [*memory, candidate.drift]))
        if self._scaled:
            model["obs_cov", 0, 0] = candidate.noise
        return model


def _aicc_penalty(num_parameters: int, num_seen: int) -> float:
    """Returns twice the number of parameters, corrected for short series (Hurvich and Tsai 1989)."""
    num_seen = max(num_seen, num_parameters + 2)
    return 2 * num_parameters * num_seen / (num_seen - num_parameters - 1)


def forecast_series(series_W: FloatArray) -> tuple[float, float, str]:
    """Returns mean and variance of the next window, and the order, for a series with unknown noise."""
    forecast = forecast_noisy(series_W[:, None], None)
    return float(forecast.mean_X[0]), float(forecast.variance_X[0]), forecast.how_X[0]


# The request rate of the next window.

WINDOW_S = 120.0
"""Default length of a window, that of E3 (section 3.1)."""
LEAST_WINDOWS = 8
"""Minimum number of windows with requests for ARIMA."""
MOST_WINDOWS = 300
"""Maximum number of windows that are used: ten hours of windows of two minutes."""
JUMP = 4.0
"""An upward step of this many usual steps is a burst. A burst does not continue to grow, as momentum would predict.
(Its end takes several windows, which momentum predicts well.) Chosen on four days of the Twitter trace."""
MOST_GROWTH = 2.0
"""Limit of the upper end, relative to the largest past rate. On traces, coverage stays and the pinball loss falls."""
USUAL_STEP = 1.4826
"""Factor from the median absolute step to the standard deviation of a normal distribution."""
FEW = 20
"""If no window has more requests than this, windows are pooled, because many windows may have no request, and errors of
the logarithm are not normal."""
POOLED = 30
"""Maximum number of windows that are pooled if there are few requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """The method of a forecast."""

    how: str
    """`arima(p,d,q)`, `pooled share`, `pooled rate`, `last value`, `prior` or `assumed`."""
    reason: str = ""
    """Why ARIMA was not used, or which data were left out; empty if there is no such reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateForecast:
    """Requests per second in the next window: the median, and an interval from normal errors of its logarithm.

    The interval is for the rate that is observed in a window, so that it includes the Poisson noise of its requests.
    """

    rate_rps: float
    low_rps: float
    high_rps: float
    """Infinite if only one window has requests, because the changes of the rate are then unknown."""
    coverage: float
    method: Method


def forecast_rate(rate_rps_W: FloatArray, coverage: float = 0.8, *, window_s: float = WINDOW_S) -> RateForecast:
    """Returns the rate in the next window, from past windows, oldest first. Missing windows are NaN.

    The forecast is ARIMA on the logarithm, because rates change by factors, and is limited to the range of past rates,
    because bursts end. The upper end is at most `MOST_GROWTH` times the largest past rate. Windows without requests
    have no logarithm. They count as missing, except if the last window has none, and the interval extends to 0 unless
    they are rarer than its lower tail. Raises DataError for negative or infinite rates, and if all windows are missing.
    """
    check_coverage(coverage)
    if not 0 < window_s < np.inf:
        raise DataError(f"window_s must be finite and above 0, not {window_s}")
    rate_rps_W = np.asarray(rate_rps_W, dtype=np.float64)
    if rate_rps_W.ndim != 1 or np.isnan(rate_rps_W).all():
        raise DataError("a forecast of the rate needs at least one window that is not missing")
    if (rate_rps_W < 0).any() or np.isinf(rate_rps_W).any():
        raise DataError("rates must be finite and at least 0")
    past = _Past.of(rate_rps_W, window_s)
    if (past.seen_S * window_s <= FEW).all():
        return _pooled_rate(past, coverage)
    if past.seen_S[-1] == 0:
        return _stopped_rate(past, coverage)
    forecast, has_zeros = _from_log(past, coverage), (past.seen_S == 0).mean() >= (1 - coverage) / 2
    return replace(forecast, low_rps=0.0) if has_zeros else forecast


@dataclass(frozen=True, slots=True, kw_only=True)
class _Past:
    """The windows up to the last one that is not missing, and the number of missing windows after it."""

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
        """Why ARIMA must not be used; empty if it can be used."""
        seen_S = self.log_W[~np.isnan(self.log_W)]
        if len(seen_S) < LEAST_WINDOWS:
            return f"fewer than {LEAST_WINDOWS} windows with requests"
        if np.ptp(seen_S) == 0:
            return "constant"
        steps_S = np.diff(seen_S)
        has_jumped = steps_S[-1] > JUMP * USUAL_STEP * float(np.median(np.abs(steps_S)))
        return "the rate jumped in the last window" if has_jumped else ""


def _from_log(past: _Past, coverage: float) -> RateForecast:
    """Returns the forecast by ARIMA, or by a random walk if there is a reason against ARIMA."""
    mean, variance, method = _random_walk(past)
    if not method.reason:
        mean, variance, method = _arima(past)
    poisson = np.exp(-mean) / past.window_s
    width = NormalDist().inv_cdf((1 + coverage) / 2) * np.sqrt(max(variance, poisson))
    most_rps = MOST_GROWTH * past.seen_S.max() if np.isfinite(variance) else np.inf
    return RateForecast(
        rate_rps=float(np.exp(mean)),
        low_rps=float(np.exp(mean - width)),
        high_rps=float(min(np.exp(mean + width), most_rps)),
        coverage=coverage,
        method=method,
    )


def _arima(past: _Past) -> tuple[float, float, Method]:
    """Returns mean and variance of the logarithm. After many missing windows, the mean is the last value."""
    log_W = past.log_W
    last, walk_variance, method = _random_walk(past)
    try:
        mean, variance, order = forecast_series(np.append(log_W, np.full(min(past.hole, MOST_WINDOWS), np.nan)))
    except FAILURES as error:
        return last, walk_variance, replace(method, reason=f"no ARIMA could be fitted: {error}")
    if past.hole >= LEAST_WINDOWS:
        reason = f"nothing was seen in the last {LEAST_WINDOWS} windows"
        return last, max(walk_variance, variance), replace(method, reason=reason)
    return float(np.clip(mean, np.nanmin(log_W), np.nanmax(log_W))), variance, Method(how=order)


def _random_walk(past: _Past) -> tuple[float, float, Method]:
    """Returns mean and variance of the logarithm for a random walk from the last value, and why ARIMA is not used."""
    window_S = np.flatnonzero(~np.isnan(past.log_W))
    log_S = past.log_W[window_S]
    per_window = float((np.diff(log_S) ** 2 / np.diff(window_S)).mean()) if len(log_S) > 1 else np.inf
    poisson = 2 / float(past.seen_S[-1] * past.window_s)  # the noise of the last window and of the next one
    method = Method(how="last value", reason=past.why_no_arima)
    return float(log_S[-1]), max((past.hole + 1) * per_window, poisson), method


def _stopped_rate(past: _Past, coverage: float) -> RateForecast:
    """Returns a rate of 0, as in the last window, with a quantile of past windows as the upper bound."""
    high = float(np.quantile(past.seen_S, (1 + coverage) / 2, method="higher"))
    method = Method(how="last value", reason="the last window had no requests")
    return RateForecast(rate_rps=0.0, low_rps=0.0, high_rps=high, coverage=coverage, method=method)


def _pooled_rate(past: _Past, coverage: float) -> RateForecast:
    """Returns the mean rate of pooled windows, with Poisson counts and a gamma posterior from Jeffreys' prior.

    It contains the interval of a window's count (negative binomial), the upper bound of the rate, and quantiles of past
    windows, because requests often come in bursts.
    """
    from scipy.stats import gamma, nbinom

    count_S = past.seen_S[-POOLED:] * past.window_s
    low, high = (1 - coverage) / 2, (1 + coverage) / 2
    shape, num = count_S.sum() + 0.5, len(count_S)
    next_count = nbinom(shape, num / (num + 1))
    least = min(next_count.ppf(low), np.quantile(count_S, low, method="lower"), count_S.mean())
    most = max(next_count.ppf(high), gamma.ppf(high, shape) / num, np.quantile(count_S, high, method="higher"))
    method = Method(how="pooled rate", reason=f"no window had more than {FEW} requests")
    rate_rps, low_rps, high_rps = (float(count / past.window_s) for count in (count_S.mean(), least, most))
    return RateForecast(rate_rps=rate_rps, low_rps=low_rps, high_rps=high_rps, coverage=coverage, method=method)


def check_coverage(coverage: float) -> None:
    """Raises DataError for an invalid coverage."""
    if not (coverage > 0 and (1 + coverage) / 2 < 1):  # the quantile of the upper bound
        raise DataError(f"the coverage of an interval must be between 0 and 1, not {coverage}")


# Survival in the next window.

LEAST_MOVES = 4.0
"""Minimum of inputs per window that leave at a ramp, and that continue there. With fewer, errors of the logit are not
normal."""
NEIGHBOUR = 0.7
"""Weight of the adjacent window in a window's variance. The weight decays as a power of the distance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalForecast:
    """Survival per block (K), and the share that continues per ramp (R = K - 1), in the next window.

    Intervals are from normal errors on the logit scale. The interval of survival is an approximation: the logarithm of
    the product of shares is linearised in their logits, with the correlations between ramps, and the result is
    converted to the logit scale of survival.

    Intervals are for the *level*, the share in an infinite number of inputs. They do not include jumps of the stream.
    """

    survival_K: FloatArray
    survival_low_K: FloatArray
    survival_high_K: FloatArray
    go_on_R: FloatArray
    go_on_low_R: FloatArray
    go_on_high_R: FloatArray
    coverage: float
    """Probability that a level is in its interval."""
    methods_R: tuple[Method, ...]

    @property
    def next_survival(self) -> tuple[float, ...]:
        """Survival in the next window, in the form of a problem file."""
        return tuple(self.survival_K.tolist())


def forecast_survival(
    history: SurvivalHistory, prior: Sequence[float] | None = None, coverage: float = 0.8
) -> SurvivalForecast:
    """Returns survival in the next window, from the last `MOST_WINDOWS` of the history.

    `prior`: survival per block, for example from calibration, for ramps without observations. Raises DataError if all
    windows are missing and there is no prior.
    """
    check_coverage(coverage)
    prior_R = _prior_shares(prior, history.num_blocks)
    if history.missing_W.all() and prior_R is None:
        raise DataError("a forecast needs a window that is not missing, or a prior")
    recent = _since_break(_last_windows(history))
    shares = _pooled_shares(recent, coverage, prior_R)
    if recent.moving_R.any():
        shares = _with_drift(shares, recent, coverage)
    return _to_survival(shares, coverage)


def _last_windows(history: SurvivalHistory) -> SurvivalHistory:
    """Returns at most `MOST_WINDOWS` up to the last one that is not missing, and as many missing ones after it."""
    seen_S = np.flatnonzero(~history.missing_W)
    end = int(seen_S[-1]) + 1 if len(seen_S) else 0
    kept = slice(max(0, end - MOST_WINDOWS), min(len(history), end + MOST_WINDOWS))
    arrays = {name: getattr(history, name) for name in ("survival_WK", "inputs_WK", "missing_W", "worth_WR")}
    return SurvivalHistory(**{name: array[kept] for name, array in arrays.items() if array is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recent:
    """The windows since the last jump of the stream."""

    reach_WR: FloatArray
    go_on_WR: FloatArray
    missing_W: BoolArray
    note: str

    @property
    def num_seen(self) -> int:
        return int((~self.missing_W).sum())

    @property
    def moving_R(self) -> BoolArray:
        """Ramps at which enough inputs leave, and enough inputs continue, to estimate a drift."""
        least = LEAST_MOVES * self.num_seen
        leave_R = (self.reach_WR - self.go_on_WR).sum(0)
        return np.asarray((leave_R >= least) & (self.go_on_WR.sum(0) >= least) & (self.num_seen > 1))


def _since_break(history: SurvivalHistory) -> _Recent:
    reach_WR, go_on_WR = history.reach_WR, history.go_on_WR
    seen_W = np.flatnonzero(~history.missing_W)
    jump = last_break(reach_WR[seen_W], go_on_WR[seen_W]) if len(seen_W) else 0
    start = int(seen_W[jump]) if jump else 0
    return _Recent(
        reach_WR=reach_WR[start:],
        go_on_WR=go_on_WR[start:],
        missing_W=history.missing_W[start:],
        note=f"the stream jumped {len(history) - start} windows ago; earlier windows are left out" if jump else "",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shares:
    share_R: FloatArray
    low_R: FloatArray
    high_R: FloatArray
    log_covariance_RR: FloatArray
    """Covariance of the errors of log(share)."""
    methods_R: tuple[Method, ...]


def _pooled_shares(recent: _Recent, coverage: float, prior_R: FloatArray | None) -> _Shares:
    """Returns the shares of pooled windows, for a constant level, with Jeffreys' intervals for a binomial share."""
    from scipy.stats import beta

    reach_R, go_on_R = recent.reach_WR.sum(0), recent.go_on_WR.sum(0)
    default_R = np.ones(len(reach_R)) if prior_R is None else prior_R
    share_R = np.where(reach_R > 0, go_on_R / np.maximum(reach_R, np.finfo(float).tiny), default_R)
    posterior = beta(go_on_R + 0.5, reach_R - go_on_R + 0.5)
    low_R = np.minimum(posterior.ppf((1 - coverage) / 2), share_R)
    high_R = np.maximum(posterior.ppf((1 + coverage) / 2), share_R)
    log_variance_R = posterior.var() / np.maximum(share_R, posterior.mean()) ** 2
    methods = tuple(_pooled_method(recent, ramp, prior_R is not None) for ramp in range(len(reach_R)))
    return _Shares(
        share_R=share_R,
        low_R=low_R,
        high_R=high_R,
        log_covariance_RR=np.diag(log_variance_R),
        methods_R=methods,
    )


def _pooled_method(recent: _Recent, ramp: int, has_prior: bool) -> Method:
    reach = recent.reach_WR[:, ramp].sum()
    leave = reach - recent.go_on_WR[:, ramp].sum()
    if reach <= 0 and has_prior:
        return Method(how="prior", reason="no input was observed at this ramp")
    if reach <= 0:
        return Method(how="assumed", reason="no input was observed at this ramp, and there is no prior: all continue")
    if recent.num_seen == 1:
        return Method(how="last value", reason=recent.note or "only one window was observed")
    if leave <= ROUNDING * reach or leave >= reach * (1 - ROUNDING):
        return Method(how="pooled share", reason="constant: all inputs leave here, or none does")
    return Method(how="pooled share", reason="too few inputs leave or continue here to estimate a change")


def _with_drift(shares: _Shares, recent: _Recent, coverage: float) -> _Shares:
    """Returns the shares, with forecasts by ARIMA for ramps with enough inputs."""
    moving_R = recent.moving_R
    try:
        mean_M, covariance_MM, hows = _forecast_logits(recent)
    except FAILURES as error:
        failed = Method(how="pooled share", reason=f"no ARIMA could be fitted: {error}")
        return replace(shares, methods_R=_replaced(shares.methods_R, moving_R, [failed] * int(moving_R.sum())))
    width_M = NormalDist().inv_cdf((1 + coverage) / 2) * np.sqrt(np.diagonal(covariance_MM))
    share_R, low_R, high_R = shares.share_R.copy(), shares.low_R.copy(), shares.high_R.copy()
    share_R[moving_R] = expit(mean_M)
    low_R[moving_R], high_R[moving_R] = expit(mean_M - width_M), expit(mean_M + width_M)
    log_covariance_RR = shares.log_covariance_RR.copy()
    leave_M = expit(-mean_M)  # the derivative of log(share) with respect to the logit
    log_covariance_RR[np.ix_(moving_R, moving_R)] = covariance_MM * np.outer(leave_M, leave_M)
    methods = [Method(how=how, reason=recent.note) for how in hows]
    return _Shares(
        share_R=share_R,
        low_R=low_R,
        high_R=high_R,
        log_covariance_RR=log_covariance_RR,
        methods_R=_replaced(shares.methods_R, moving_R, methods),
    )


def _replaced(methods_R: tuple[Method, ...], moving_R: BoolArray, new_M: list[Method]) -> tuple[Method, ...]:
    new_methods = iter(new_M)
    return tuple(next(new_methods) if moving else old for old, moving in zip(methods_R, moving_R, strict=True))


def _forecast_logits(recent: _Recent) -> tuple[FloatArray, FloatArray, list[str]]:
    """Returns mean (M) and covariance (M, M) of the moving ramps' (M) logits, and each one's main ARIMA order."""
    moving_R = recent.moving_R
    logit_WM, noise_WM = _noisy_logits(recent.reach_WR[:, moving_R], recent.go_on_WR[:, moving_R])
    seen_W = ~recent.missing_W
    weight_WM = seen_W[:, None] / noise_WM
    centre_M = (logit_WM * weight_WM).sum(0) / weight_WM.sum(0)
    scale_M = np.sqrt(recent.num_seen / weight_WM.sum(0))
    noise_W = np.where(seen_W, (noise_WM / scale_M**2).mean(1), 1.0)
    scaled_WM = (logit_WM - centre_M) / scale_M
    components_MM = np.linalg.svd(scaled_WM[seen_W] / np.sqrt(noise_W[seen_W, None]), full_matrices=True)[2].T
    series_WM = np.where(seen_W[:, None], scaled_WM @ components_MM, np.nan)
    forecast: SeriesForecast = forecast_noisy(series_WM, noise_W)
    back_MM = scale_M[:, None] * components_MM
    mean_M = centre_M + back_MM @ forecast.mean_X
    covariance_MM = (back_MM * forecast.variance_X) @ back_MM.T
    leading_M = (np.abs(components_MM) * np.nanstd(series_WM, axis=0)).argmax(1)
    return mean_M, covariance_MM, [forecast.how_X[component] for component in leading_M]


def _noisy_logits(reach_WM: FloatArray, go_on_WM: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Returns the logits of the shares, and their sampling variances.

    One input with the share of all windows is added to each window, so that windows with few inputs are close to this
    share. (Adding half an input to both outcomes would pull shares near 1 towards 1/2, which accumulates over ramps.)
    The logit of n inputs with share p has a bias of (p - 1/2) / (n p (1 - p)) to first order, which is subtracted. The
    variance is 1 / (n p (1 - p)). In both, p is a local mean over windows. With a window's own share, windows with an
    error upwards would get another weight than those with an error downwards.
    """
    share_M = go_on_WM.sum(0) / reach_WM.sum(0)
    logit_WM = np.log(go_on_WM + share_M) - np.log(reach_WM - go_on_WM + 1 - share_M)
    window = np.arange(len(reach_WM))
    weight_WW = NEIGHBOUR ** np.abs(window[:, None] - window)
    local_WM = (weight_WW @ go_on_WM + share_M) / (weight_WW @ reach_WM + 1)
    spread_WM = local_WM * (1 - local_WM)
    bias_WM = reach_WM / (reach_WM + 1) ** 2 * (local_WM - 0.5) / spread_WM
    return logit_WM - bias_WM, 1 / ((reach_WM + 1) * spread_WM)


def _to_survival(shares: _Shares, coverage: float) -> SurvivalForecast:
    width = NormalDist().inv_cdf((1 + coverage) / 2)
    num_ramps = len(shares.share_R)
    survival_K = np.append(1.0, np.cumprod(shares.share_R))
    up_to_KR = np.tri(num_ramps + 1, num_ramps, -1)
    deviation_K = np.sqrt(np.einsum("kr,rs,ks->k", up_to_KR, shares.log_covariance_RR, up_to_KR))
    low_K = _on_logit_scale(survival_K, -width * deviation_K)
    high_K = _on_logit_scale(survival_K, width * deviation_K)
    for block in range(1, num_ramps + 1):  # a survival of 0 has no logit: its upper bound is the product of bounds
        if survival_K[block] == 0:
            high_K[block] = high_K[block - 1] * shares.high_R[block - 1]
    return SurvivalForecast(
        survival_K=survival_K,
        survival_low_K=np.minimum.accumulate(low_K),
        survival_high_K=np.minimum.accumulate(high_K),
        go_on_R=shares.share_R,
        go_on_low_R=shares.low_R,
        go_on_high_R=shares.high_R,
        coverage=coverage,
        methods_R=shares.methods_R,
    )


def _on_logit_scale(share: FloatArray, log_step: FloatArray) -> FloatArray:
    """Returns a share after a step of its logarithm, which is converted to a step of its logit."""
    leave = 1 - share
    inside = (leave > ROUNDING) & (share > 0)
    step = np.where(inside, log_step / np.maximum(leave, ROUNDING), 0.0)
    return np.asarray(np.where(inside, expit(logit(share) + step), np.minimum(share * np.exp(log_step), 1.0)))


def _prior_shares(prior: Sequence[float] | None, num_blocks: int) -> FloatArray | None:
    if prior is None:
        return None
    survival_K = np.asarray(prior, dtype=np.float64)
    if survival_K.shape != (num_blocks,):
        raise DataError(f"the prior needs {num_blocks} shares, one per block, not {survival_K.size}")
    one = np.ones((1, num_blocks))
    SurvivalHistory(survival_WK=survival_K[None], inputs_WK=one, missing_W=np.zeros(1, dtype=bool))
    before_R = survival_K[:-1]
    return np.divide(survival_K[1:], before_R, out=np.ones_like(before_R), where=before_R > 0)
