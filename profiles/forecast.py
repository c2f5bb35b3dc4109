"""What the coming windows will look like: survival at every block, and the request rate (E3 section 3.1).

E3 forecasts the batch size at every ramp with ARIMA over windows of two minutes. We forecast, on the logit scale, the
share that goes on *among those that reach a ramp*: its forecasts multiply to a survival that never rises and stays
between 0 and 1, and the sampling noise of one ramp's share is independent of the next one's. Where a stream becomes
harder all ramps move together, each hidden in its own noise; so the shares are first scaled to equal noise and turned
to their principal directions, which leaves the noise as it is and gathers the drift in few series. Those are forecast
(`profiles/arima.py`) and turned back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
from scipy.special import expit, logit

from earlyexit.errors import DataError
from profiles.arima import FAILURES, SeriesForecast, forecast_noisy
from profiles.rates import Method, RateForecast, check_request, forecast_rate
from profiles.windows import ROUNDING, SurvivalHistory, last_break

__all__ = ["Method", "RateForecast", "SurvivalForecast", "SurvivalHistory", "forecast_rate", "forecast_survival"]

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

LEAST_MOVES = 4.0
"""Inputs per window that must be expected to leave at a ramp, and to go on: of fewer the logit is too crooked."""
NEIGHBOUR = 0.7
"""Weight of a window in its neighbour's variance; of the one after that, its square."""
MOST_WINDOWS = 300
"""Windows that are looked at: ten hours of two minutes. Older ones say nothing about the next."""


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
    return np.asarray(np.where(before_R > 0, survival_K[1:] / np.where(before_R > 0, before_R, 1.0), 1.0))
