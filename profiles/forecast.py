"""Forecasts of the coming windows: survival at every block, and the request rate (E3 section 3.1).

E3 forecasts the batch size at every ramp with ARIMA over windows of two minutes. We forecast, on the logit scale, the
share that goes on *among those that reach a ramp*. These forecasts multiply to a survival between 0 and 1 that never
rises, and the sampling noise of one share is independent of the next one's. When a stream becomes harder, all ramps
move together, each hidden in its own noise. So the shares are scaled to equal noise and turned to their principal
directions, which gathers the drift in few series; these are forecast and turned back.

ARIMA is computed by statsmodels: orders weighed by AICc, exact likelihoods, for every window. Shares of a few hundred
inputs carry *sampling noise of known size*, which the state space form holds window by window; only the drift beneath
is estimated. The noise of a rate is unknown, so its size is estimated with the drift. Both walk a grid of parameters
with statsmodels' Kalman filter rather than an optimizer: a likelihood takes 60 microseconds, a fit 5 to 400 ms.
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
"""Autoregressive coefficients of a drift: without memory, up to nearly a straight line."""
DRIFTS = np.geomspace(1e-3, 1e6, 24)
"""Variances of the drift per window, in variances of the sampling noise: those of 100,000 inputs are small."""
BORROWED = 0.5
"""How much the other series' evidence counts for each: alone, one of a few windows would take its noise for drift.
Measured when it was chosen: 0.5 gives 2 % less error than 0."""
RATE_MOMENTA = (0.0, 0.3, 0.5, 0.8, 0.9)
RATE_NOISES = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Variances of a rate's noise, in those of its drift."""
UNNOTICED = 0.02
"""Candidates this much less likely than the best are left out, to save their filters."""
FAILURES = (ValueError, np.linalg.LinAlgError)
"""What statsmodels raises for a series it cannot fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesForecast:
    """Of several series (X) over the coming windows (H)."""

    mean_HX: FloatArray
    variance_HX: FloatArray
    """Of the level itself, without the sampling noise that a window would add."""
    how_X: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A level that moves by a drift per window, the drift keeping `momentum` of itself, seen through noise."""

    momentum: float
    drift: float
    noise: float
    """Variances: of the drift per window, and of the noise; only their ratio is meant where no noise is known."""

    @property
    def order(self) -> tuple[int, int, int]:
        """Of what is seen: a random walk seen through noise is an ARIMA(0,1,1), one with momentum an ARIMA(1,1,2)."""
        if self.drift == 0:
            return 0, 0, 0
        memory = int(self.momentum > 0)
        return memory, 1, 0 if self.noise == 0 else 1 + memory

    @property
    def name(self) -> str:
        return "arima({},{},{})".format(*self.order)


# A drift with momentum m travels 1 / (1 - m) times as far: scaled, so that the grid covers the same ground for each.
_KNOWN_NOISE = (
    _Candidate(momentum=0.0, drift=0.0, noise=1.0),
    *(_Candidate(momentum=m, drift=float(d) * (1 - m), noise=1.0) for m in MOMENTA for d in DRIFTS),
)
_KNOWN_PARAMETERS = tuple(int(each.drift > 0) + int(each.momentum > 0) for each in _KNOWN_NOISE)
_FREE_NOISE = tuple(_Candidate(momentum=m, drift=1.0, noise=n) for m in RATE_MOMENTA for n in RATE_NOISES)
_FREE_PARAMETERS = tuple(1 + int(each.noise > 0) + int(each.momentum > 0) for each in _FREE_NOISE)


def forecast_noisy(series_WX: FloatArray, noise_W: FloatArray, horizon: int) -> SeriesForecast:
    """Forecast several series seen through sampling noise of known variance; missing windows are NaN.

    Each series is a level that stands still, walks at random, or walks with momentum (statsmodels' state space form of
    ARIMA(0,0,0), (0,1,0) and (1,1,0)), plus the noise. Orders and parameters lie on one grid and are averaged by their
    Akaike weights from AICc (Burnham and Anderson 2002, section 4.2): a few windows rarely single one out. When it was
    chosen: 1 % less error than the best of the grid, and 80 % intervals that hold 77 % of the time instead of
    69 %. The order named is that of the single best.
    """
    num_seen = int((~np.isnan(series_WX[:, 0])).sum())
    filters = [_Filters(series_W, noise_W, horizon) for series_W in series_WX.T]
    logs_CX = np.array([[each.log_likelihood(candidate) for each in filters] for candidate in _KNOWN_NOISE])
    penalties_C = np.array([_aicc_penalty(parameters, num_seen - 1) for parameters in _KNOWN_PARAMETERS])
    others_CX = (logs_CX.sum(1, keepdims=True) - logs_CX) / max(len(filters) - 1, 1)
    weights_CX = _akaike_weights(penalties_C[:, None] - 2 * (logs_CX + BORROWED * others_CX))
    averaged = [_averaged(each, _KNOWN_NOISE, own_C) for each, own_C in zip(filters, weights_CX.T, strict=True)]
    return SeriesForecast(
        mean_HX=np.array([mean_H for mean_H, _, _ in averaged]).T,
        variance_HX=np.array([variance_H for _, variance_H, _ in averaged]).T,
        how_X=tuple(how for _, _, how in averaged),
    )


def _akaike_weights(criterion_CX: FloatArray) -> FloatArray:
    """Weights over the candidates; those that would not be noticed are none."""
    weights_CX = np.exp(-0.5 * (criterion_CX - criterion_CX.min(0)))
    weights_CX[weights_CX < UNNOTICED] = 0.0
    return np.asarray(weights_CX / weights_CX.sum(0))


def _averaged(
    filters: _Filters, candidates: Sequence[_Candidate], weights_C: FloatArray
) -> tuple[FloatArray, FloatArray, str]:
    """Mean and variance of the mixture, and the order of its heaviest part."""
    used = [(weight, each) for weight, each in zip(weights_C, candidates, strict=True) if weight > 0]
    weights_U = np.array([weight for weight, _ in used])
    means_UH, variances_UH = np.array([filters.forecast(candidate) for _, candidate in used]).transpose(1, 0, 2)
    mean_H = weights_U @ means_UH
    variance_H = weights_U @ (variances_UH + (means_UH - mean_H) ** 2)
    return mean_H, variance_H, used[int(weights_U.argmax())][1].name


class _Filters:
    """Kalman filters over one series, one per order; coming windows are missing ones at its end."""

    def __init__(self, series_W: FloatArray, noise_W: FloatArray | None, horizon: int) -> None:
        from statsmodels.tsa.statespace.sarimax import SARIMAX

        self._horizon = horizon
        self._scaled = noise_W is None
        """Without known noise the scale of drift and noise is the likeliest one (statsmodels' concentrated scale)."""
        seen = np.concatenate([series_W, np.full(horizon, np.nan)])
        self._models = {
            momentum: SARIMAX(seen, order=(int(momentum), 1, 0), concentrate_scale=self._scaled)
            for momentum in (False, True)
        }
        if noise_W is not None:
            for model in self._models.values():
                model["obs_cov"] = np.concatenate([noise_W, np.zeros(horizon)])[None, None, :]

    def log_likelihood(self, candidate: _Candidate) -> float:
        return float(self._set(candidate).ssm.loglike())

    def forecast(self, candidate: _Candidate) -> tuple[FloatArray, FloatArray]:
        """Mean and variance over the horizon; where the noise is not known, it is part of the variance."""
        found = self._set(candidate).ssm.filter()
        coming = slice(-self._horizon, None)
        return found.forecasts[0, coming], np.maximum(found.forecasts_error_cov[0, 0, coming], 0.0)

    def _set(self, candidate: _Candidate) -> Any:
        model = self._models[candidate.momentum > 0]
        memory = [candidate.momentum] if candidate.momentum > 0 else []
        model.update(np.array(memory if self._scaled else [*memory, candidate.drift]))
        if self._scaled:
            model["obs_cov", 0, 0] = candidate.noise
        return model


def _aicc_penalty(num_parameters: int, num_seen: int) -> float:
    """Twice the number of parameters, corrected for short series (Hurvich and Tsai 1989)."""
    num_seen = max(num_seen, num_parameters + 2)
    return 2 * num_parameters * num_seen / (num_seen - num_parameters - 1)


def forecast_series(series_W: FloatArray, horizon: int) -> tuple[FloatArray, FloatArray, str]:
    """Mean and variance over the horizon, and the order, of one series of unknown noise; missing windows are NaN.

    The ratio of noise to drift lies on the grid as well. No optimizer runs, so none can fail to converge. Averaged as
    `forecast_noisy` does.
    """
    num_seen = int((~np.isnan(series_W)).sum())
    filters = _Filters(series_W, None, horizon)
    logs_C = np.array([filters.log_likelihood(candidate) for candidate in _FREE_NOISE])
    penalties_C = np.array([_aicc_penalty(parameters, num_seen - 1) for parameters in _FREE_PARAMETERS])
    return _averaged(filters, _FREE_NOISE, _akaike_weights((penalties_C - 2 * logs_C)[:, None])[:, 0])


# The request rate of the coming windows.

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
        steps_S = np.diff(seen_S)
        has_jumped = steps_S[-1] > JUMP * USUAL_STEP * float(np.median(np.abs(steps_S)))
        return "the rate jumped in the last window" if has_jumped else ""


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
    method = Method(how="last value", reason="the last window had no requests")
    return _even(0.0, 0.0, high, horizon, coverage, method)


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
    method = Method(how="pooled rate", reason=f"no window had more than {FEW} requests")
    rate_rps, low_rps, high_rps = (count / past.window_s for count in (count_S.mean(), least, most))
    return _even(rate_rps, low_rps, high_rps, horizon, coverage, method)


def _even(
    rate_rps: float, low_rps: float, high_rps: float, horizon: int, coverage: float, method: Method
) -> RateForecast:
    """The same for every coming window."""
    rate_H, low_H, high_H = (np.full(horizon, each) for each in (rate_rps, low_rps, high_rps))
    return RateForecast(rate_rps_H=rate_H, low_rps_H=low_H, high_rps_H=high_H, coverage=coverage, method=method)


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


# Survival in the coming windows.

LEAST_MOVES = 4.0
"""Inputs per window that must be expected to leave at a ramp, and to go on: of fewer the logit is too crooked."""
NEIGHBOUR = 0.7
"""Weight of a window in its neighbour's variance; of the one after that, its square."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalForecast:
    """Over the coming windows (H): survival per block (K), the share that goes on per ramp (R = K - 1), intervals.

    Intervals come from normal errors on the logit scale. That of a ramp's share is exact there. That of survival is an
    approximation: the logarithm of the product of shares is taken as linear in their logits (errors of different
    ramps are correlated, and that is kept), and the result is put on the logit scale of survival.

    Both are intervals of the *level*, the share that endless inputs would show, unless `inputs_to_come` is set: a
    window of so many inputs scatters around its level, and its share lies in the wider interval. Either holds while
    the stream goes on as it did: a jump is in no interval.
    """

    survival_HK: FloatArray
    survival_low_HK: FloatArray
    survival_high_HK: FloatArray
    go_on_HR: FloatArray
    go_on_low_HR: FloatArray
    go_on_high_HR: FloatArray
    coverage: float
    """Chance that one level, or one share of `inputs_to_come` inputs, lies in its interval."""
    inputs_to_come: float | None = None
    """Inputs at block 0 of a coming window whose shares the intervals are for; None: the intervals are of levels."""
    methods_R: tuple[Method, ...]

    @property
    def next_survival(self) -> tuple[float, ...]:
        """Of the next window: what a plan problem takes."""
        return tuple(self.survival_HK[0].tolist())


def forecast_survival(
    history: SurvivalHistory,
    horizon: int = 1,
    prior: Sequence[float] | None = None,
    coverage: float = 0.8,
    *,
    inputs_to_come: float | None = None,
) -> SurvivalForecast:
    """Survival over the next `horizon` windows; of a long history the last `MOST_WINDOWS` count.

    `prior` is a survival per block, say from calibration; it stands in where nothing was seen. With `inputs_to_come`
    the intervals are of what a window of so many inputs will show, without it of the level beneath. Raises DataError
    where nothing was seen and there is no prior.
    """
    check_request(horizon, coverage)
    if inputs_to_come is not None and not 0 < inputs_to_come < np.inf:
        raise DataError(f"the inputs to come must be finite and more than 0, not {inputs_to_come}")
    prior_R = _prior_shares(prior, history.num_blocks)
    if history.missing_W.all() and prior_R is None:
        raise DataError("nothing was seen yet: a forecast needs a window that is not missing, or a prior")
    recent = _since_break(_last_windows(history))
    shares = _pooled_shares(recent, horizon, coverage, prior_R)
    if recent.moving_R.any():
        shares = _with_drift(shares, recent, coverage)
    return _to_survival(shares, coverage, inputs_to_come)


def _last_windows(history: SurvivalHistory) -> SurvivalHistory:
    """The last windows up to the last one seen, and those missing after it: of each at most `MOST_WINDOWS`."""
    seen_S = np.flatnonzero(~history.missing_W)
    end = int(seen_S[-1]) + 1 if len(seen_S) else 0
    kept = slice(max(0, end - MOST_WINDOWS), min(len(history), end + MOST_WINDOWS))
    return SurvivalHistory(
        survival_WK=history.survival_WK[kept], inputs_WK=history.inputs_WK[kept], missing_W=history.missing_W[kept]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recent:
    """What counts: the windows seen since the stream last jumped."""

    reach_WR: FloatArray
    go_on_WR: FloatArray
    missing_W: BoolArray
    note: str

    @property
    def num_seen(self) -> int:
        return int((~self.missing_W).sum())

    @property
    def moving_R(self) -> BoolArray:
        """Ramps that enough inputs leave at, and pass, for a drift to be seen."""
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
        note=f"the stream jumped {len(history) - start} windows ago; what was before is left out" if jump else "",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shares:
    share_HR: FloatArray
    low_HR: FloatArray
    high_HR: FloatArray
    log_covariance_HRR: FloatArray
    """Of the errors of log(share)."""
    methods_R: tuple[Method, ...]


def _pooled_shares(recent: _Recent, horizon: int, coverage: float, prior_R: FloatArray | None) -> _Shares:
    """All windows taken together, as if the stream stood still; intervals are Jeffreys' for a binomial share."""
    from scipy.stats import beta

    reach_R, go_on_R = recent.reach_WR.sum(0), recent.go_on_WR.sum(0)
    stand_in_R = np.ones(len(reach_R)) if prior_R is None else prior_R
    share_R = np.where(reach_R > 0, go_on_R / np.maximum(reach_R, np.finfo(float).tiny), stand_in_R)
    posterior = beta(go_on_R + 0.5, reach_R - go_on_R + 0.5)
    low_R = np.minimum(posterior.ppf((1 - coverage) / 2), share_R)
    high_R = np.maximum(posterior.ppf((1 + coverage) / 2), share_R)
    log_variance_R = posterior.var() / np.maximum(share_R, posterior.mean()) ** 2
    methods = tuple(_pooled_method(recent, ramp, prior_R is not None) for ramp in range(len(reach_R)))
    return _Shares(
        share_HR=np.tile(share_R, (horizon, 1)),
        low_HR=np.tile(low_R, (horizon, 1)),
        high_HR=np.tile(high_R, (horizon, 1)),
        log_covariance_HRR=np.tile(np.diag(log_variance_R), (horizon, 1, 1)),
        methods_R=methods,
    )


def _pooled_method(recent: _Recent, ramp: int, has_prior: bool) -> Method:
    reach = recent.reach_WR[:, ramp].sum()
    leave = reach - recent.go_on_WR[:, ramp].sum()
    if reach <= 0 and has_prior:
        return Method(how="prior", reason="no input was seen at this ramp")
    if reach <= 0:
        return Method(how="assumed", reason="no input was seen at this ramp and there is no prior: all go on")
    if recent.num_seen == 1:
        return Method(how="last value", reason=recent.note or "only one window was seen")
    if leave <= ROUNDING * reach or leave >= reach * (1 - ROUNDING):
        return Method(how="pooled share", reason="constant: all inputs did the same")
    return Method(how="pooled share", reason="too few inputs leave here, or go on, to see a change")


def _with_drift(shares: _Shares, recent: _Recent, coverage: float) -> _Shares:
    """Ramps with enough inputs forecast by ARIMA, the others left as they are."""
    moving_R = recent.moving_R
    horizon = len(shares.share_HR)
    try:
        mean_HM, covariance_HMM, hows = _forecast_logits(recent, horizon)
    except FAILURES as error:
        failed = Method(how="pooled share", reason=f"no ARIMA could be fitted: {error}")
        return replace(shares, methods_R=_replaced(shares.methods_R, moving_R, [failed] * int(moving_R.sum())))
    deviation_HM = np.sqrt(np.diagonal(covariance_HMM, axis1=1, axis2=2))
    width_HM = NormalDist().inv_cdf((1 + coverage) / 2) * deviation_HM
    share_HR, low_HR, high_HR = shares.share_HR.copy(), shares.low_HR.copy(), shares.high_HR.copy()
    share_HR[:, moving_R] = expit(mean_HM)
    low_HR[:, moving_R], high_HR[:, moving_R] = expit(mean_HM - width_HM), expit(mean_HM + width_HM)
    log_covariance_HRR = shares.log_covariance_HRR.copy()
    moving_M = np.flatnonzero(moving_R)
    leave_HM = expit(-mean_HM)  # the slope of log(share) in its logit
    log_covariance_HRR[:, moving_M[:, None], moving_M] = covariance_HMM * leave_HM[:, :, None] * leave_HM[:, None, :]
    methods = [Method(how=how, reason=recent.note) for how in hows]
    return _Shares(
        share_HR=share_HR,
        low_HR=low_HR,
        high_HR=high_HR,
        log_covariance_HRR=log_covariance_HRR,
        methods_R=_replaced(shares.methods_R, moving_R, methods),
    )


def _replaced(methods_R: tuple[Method, ...], moving_R: BoolArray, new_M: list[Method]) -> tuple[Method, ...]:
    coming = iter(new_M)
    return tuple(next(coming) if moving else old for old, moving in zip(methods_R, moving_R, strict=True))


def _forecast_logits(recent: _Recent, horizon: int) -> tuple[FloatArray, FloatArray, list[str]]:
    """Logits of the moving ramps (M): mean (H, M), covariance (H, M, M), and the order that moves each most."""
    moving_R = recent.moving_R
    logit_WM, noise_WM = _noisy_logits(recent.reach_WR[:, moving_R], recent.go_on_WR[:, moving_R])
    seen_W = ~recent.missing_W
    weight_WM = seen_W[:, None] / noise_WM
    centre_M = (logit_WM * weight_WM).sum(0) / weight_WM.sum(0)
    scale_M = np.sqrt(recent.num_seen / weight_WM.sum(0))
    noise_W = np.where(seen_W, (noise_WM / scale_M**2).mean(1), 1.0)
    even_WM = (logit_WM - centre_M) / scale_M
    turn_MM = np.linalg.svd(even_WM[seen_W] / np.sqrt(noise_W[seen_W, None]), full_matrices=True)[2].T
    series_WM = np.where(seen_W[:, None], even_WM @ turn_MM, np.nan)
    found: SeriesForecast = forecast_noisy(series_WM, noise_W, horizon)
    back_MM = scale_M[:, None] * turn_MM
    mean_HM = centre_M + found.mean_HX @ back_MM.T
    covariance_HMM = np.einsum("mx,hx,nx->hmn", back_MM, found.variance_HX, back_MM)
    leading_M = (np.abs(turn_MM) * np.nanstd(series_WM, axis=0)).argmax(1)
    return mean_HM, covariance_HMM, [found.how_X[lead] for lead in leading_M]


def _noisy_logits(reach_WM: FloatArray, go_on_WM: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Logits of the shares, and their sampling variances.

    One more input is counted, at the share of all windows: a window with few inputs then says little, and none says
    nothing. (Haldane's half and half pulls a share near 1 towards 1/2, which adds up over many ramps.) A logit of few
    inputs is further from 0 than that of the share p they come from, to the first order by (p - 1/2) / (n p (1 - p))
    with the input added here; that is taken off. The variance is 1 / (n p (1 - p)). Both take p from the neighbouring
    windows: at a window's own share, windows that err upwards would seem surer than those that err downwards.
    """
    share_M = go_on_WM.sum(0) / reach_WM.sum(0)
    logit_WM = np.log(go_on_WM + share_M) - np.log(reach_WM - go_on_WM + 1 - share_M)
    window = np.arange(len(reach_WM))
    near_WW = NEIGHBOUR ** np.abs(window[:, None] - window)
    local_WM = (near_WW @ go_on_WM + share_M) / (near_WW @ reach_WM + 1)
    spread_WM = local_WM * (1 - local_WM)
    bias_WM = reach_WM / (reach_WM + 1) ** 2 * (local_WM - 0.5) / spread_WM
    return logit_WM - bias_WM, 1 / ((reach_WM + 1) * spread_WM)


def _to_survival(shares: _Shares, coverage: float, inputs_to_come: float | None) -> SurvivalForecast:
    width = NormalDist().inv_cdf((1 + coverage) / 2)
    horizon, num_ramps = shares.share_HR.shape
    first_H1 = np.ones((horizon, 1))
    survival_HK = np.hstack([first_H1, np.cumprod(shares.share_HR, axis=1)])
    up_to_KR = np.tri(num_ramps + 1, num_ramps, -1)
    deviation_HK = np.sqrt(np.einsum("kr,hrs,ks->hk", up_to_KR, shares.log_covariance_HRR, up_to_KR))
    low_HK = _on_logit_scale(survival_HK, -width * deviation_HK)
    high_HK = _on_logit_scale(survival_HK, width * deviation_HK)
    for block in range(1, num_ramps + 1):  # where all leave, as many as may reach the ramp and may yet go on there
        none_H = survival_HK[:, block] == 0
        high_HK[none_H, block] = (high_HK[:, block - 1] * shares.high_HR[:, block - 1])[none_H]
    go_on_low_HR, go_on_high_HR = shares.low_HR, shares.high_HR
    if inputs_to_come is not None:
        num_HR = inputs_to_come * survival_HK[:, :-1]
        go_on_low_HR, go_on_high_HR = _of_inputs(shares.share_HR, go_on_low_HR, go_on_high_HR, num_HR, width)
        low_HK, high_HK = _of_inputs(survival_HK, low_HK, high_HK, np.full_like(survival_HK, inputs_to_come), width)
        low_HK[:, 0] = high_HK[:, 0] = 1.0
    return SurvivalForecast(
        survival_HK=survival_HK,
        survival_low_HK=np.minimum.accumulate(low_HK, axis=1),
        survival_high_HK=np.minimum.accumulate(high_HK, axis=1),
        go_on_HR=shares.share_HR,
        go_on_low_HR=go_on_low_HR,
        go_on_high_HR=go_on_high_HR,
        coverage=coverage,
        inputs_to_come=inputs_to_come,
        methods_R=shares.methods_R,
    )


def _of_inputs(
    share: FloatArray, low: FloatArray, high: FloatArray, num_inputs: FloatArray, width: float
) -> tuple[FloatArray, FloatArray]:
    """From the interval of a level to that of the share that so many inputs show: binomial noise is added.

    Variances add on the logit scale. A share of 0 or 1 has no logit: there the noise is that at the bound of the level.
    """
    num = np.maximum(num_inputs, np.finfo(float).tiny)
    inside = (share > ROUNDING) & (share < 1 - ROUNDING)
    safe = np.where(inside, share, 0.5)
    noise = width**2 / np.maximum(num * safe * (1 - safe), np.finfo(float).tiny)
    bounds = []
    for bound, sign in ((low, -1), (high, 1)):
        bound_inside = np.where(inside & (bound > 0) & (bound < 1), bound, safe)
        step = sign * np.sqrt((logit(bound_inside) - logit(safe)) ** 2 + noise)
        at_edge = np.clip(bound + sign * width * np.sqrt(bound * (1 - bound) / num), 0, 1)
        bounds.append(np.asarray(np.where(inside, expit(logit(safe) + step), at_edge)))
    return bounds[0], bounds[1]


def _on_logit_scale(share: FloatArray, log_step: FloatArray) -> FloatArray:
    """A share after a step of its logarithm, taken as a step of its logit; a share of 1 has none."""
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
