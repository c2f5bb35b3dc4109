"""Whether what is seen has left the forecast, so that the plan must be made anew at once.

E3 section 3.1: "it can reactively re-run the optimizer if they differ drastically". Drastically is, here, both: beyond
what the forecast's interval and the noise of the inputs seen explain, and by enough to matter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

from earlyexit.errors import PlanError
from optimizer.problem import Reach, nested_shares

if TYPE_CHECKING:  # forecasts are read here, not made: no scipy
    from profiles.forecast import RateForecast, SurvivalForecast

LEAST_INPUTS = 100
"""Of fewer, no share is known to a tenth."""
LEAST_DIFFERENCE = 0.05
"""Of a share that goes on; a smaller one moves a plan's rate by about as much, which is hardly worth a change."""
LEAST_RATE_DIFFERENCE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedShares:
    """Under one plan: the share of inputs expected to reach each block, with its interval."""

    ramps: tuple[int, ...]
    """The active ones."""
    share_N: tuple[float, ...]
    low_N: tuple[float, ...]
    high_N: tuple[float, ...]
    coverage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalDeviation:
    """The active ramp where inputs leave most differently from the forecast."""

    ramp: int
    left: float
    """Share of the answers that left at or before the ramp."""
    least_left: float
    """The least share of all inputs, endless ones, that explains it; the most below."""
    most_left: float
    expected: float
    low: float
    """The least share that the forecast holds likely; the largest below."""
    high: float
    num_inputs: int

    @property
    def beyond(self) -> float:
        """How far what is seen and what is expected are apart at the least; below 0 where they overlap."""
        return max(self.least_left - self.high, self.low - self.most_left)

    @property
    def words(self) -> str:
        return (
            f"{self.left:.1%} of {self.num_inputs} inputs left by ramp {self.ramp}, "
            f"{self.low:.1%} to {self.high:.1%} were expected"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RateDeviation:
    """A request rate that the forecast does not hold likely."""

    rate_rps: float
    expected_rps: float
    low_rps: float
    high_rps: float
    seconds: float

    @property
    def words(self) -> str:
        return (
            f"{self.rate_rps:.4g} requests/s came for {self.seconds:.0f} s, "
            f"{self.low_rps:.4g} to {self.high_rps:.4g} were expected"
        )


def expected_shares(forecast: SurvivalForecast, ramps: Sequence[int], reach: Reach | None = None) -> ExpectedShares:
    """Returns the next window's forecast as a plan with these active ramps shows it, nested as the planner sees it.

    With `reach`, say of joint exit records, the interval keeps its width and moves to its shares. Raises PlanError for
    a ramp that the forecast has no block after.
    """
    num_blocks = forecast.survival_HK.shape[1]
    outside = [ramp for ramp in ramps if not 0 <= ramp < num_blocks - 1]
    if outside:
        raise PlanError(f"ramps {outside} are not after blocks 0 to {num_blocks - 2}")
    nested_N, low_N, high_N = (
        nested_shares(each_HK[0].tolist(), ramps)
        for each_HK in (forecast.survival_HK, forecast.survival_low_HK, forecast.survival_high_HK)
    )
    share_N = nested_N if reach is None else list(reach(ramps))
    moved_N = [share - nested for share, nested in zip(share_N, nested_N, strict=True)]
    return ExpectedShares(
        ramps=tuple(sorted(ramps)),
        share_N=tuple(share_N),
        low_N=tuple(max(0.0, low + moved) for low, moved in zip(low_N, moved_N, strict=True)),
        high_N=tuple(min(1.0, high + moved) for high, moved in zip(high_N, moved_N, strict=True)),
        coverage=forecast.coverage,
    )


def survival_deviation(
    expected: ExpectedShares,
    exits: Mapping[int, int],
    *,
    unknown: int = 0,
    least_difference: float = LEAST_DIFFERENCE,
) -> SurvivalDeviation | None:
    """Returns None where the answers agree with what was expected, are too few, or differ by too little to matter.

    `exits` counts answers by the block they left after, since the plan is followed; `unknown` are inputs that entered
    the model and were not seen to leave it: under way, or dropped inside. They may have gone, or go, either way, so
    they widen what is seen. Refused inputs are neither. Inputs are taken as drawn apart; each of the R active ramps is
    judged at the R-th part of the forecast's chance to err.
    """
    num_inputs = sum(exits.values())
    if num_inputs < LEAST_INPUTS or not expected.ramps:
        return None
    width = NormalDist().inv_cdf(1 - (1 - expected.coverage) / (2 * len(expected.ramps)))
    found = [_left_by(ramp, expected, exits, unknown, width) for ramp in expected.ramps]
    outside = [each for each in found if each.beyond > 0 and abs(each.left - each.expected) >= least_difference]
    return max(outside, key=lambda each: each.beyond, default=None)


def rate_deviation(
    forecast: RateForecast,
    num_arrived: int,
    seconds: float,
    *,
    sized_for_rps: float | None,
) -> RateDeviation | None:
    """Returns None where the arrivals of the last `seconds`, refused ones too, agree with the forecast or are few.

    `sized_for_rps` is the rate that the plan was made for: more than that is told even where the forecast's interval
    reaches further. None: the plan gives the highest rate there is, so no other demand would change it.
    """
    if sized_for_rps is None or seconds <= 0:
        return None
    median_rps, low_rps, high_rps = (
        float(each_H[0]) for each_H in (forecast.rate_rps_H, forecast.low_rps_H, forecast.high_rps_H)
    )
    allowed_rps = min(high_rps, max(sized_for_rps, median_rps))
    # The score interval of a Poisson count's mean.
    width = NormalDist().inv_cdf((1 + forecast.coverage) / 2)
    centre, spread = num_arrived + width**2 / 2, width * math.sqrt(num_arrived + width**2 / 4)
    fewest, most = centre - spread, centre + spread
    rate_rps = num_arrived / seconds
    outside = most / seconds < low_rps or fewest / seconds > allowed_rps
    if not outside or abs(rate_rps - median_rps) < LEAST_RATE_DIFFERENCE * median_rps:
        return None
    return RateDeviation(
        rate_rps=rate_rps, expected_rps=median_rps, low_rps=low_rps, high_rps=allowed_rps, seconds=seconds
    )


def _left_by(
    ramp: int, expected: ExpectedShares, exits: Mapping[int, int], unknown: int, width: float
) -> SurvivalDeviation:
    num_inputs = sum(exits.values())
    left = sum(count for block, count in exits.items() if block <= ramp)
    entered = num_inputs + unknown
    return SurvivalDeviation(
        ramp=ramp,
        left=left / num_inputs,
        least_left=_wilson_bound(left / entered, entered, -width),
        most_left=_wilson_bound((left + unknown) / entered, entered, width),
        expected=1 - expected.share_N[ramp + 1],
        low=1 - expected.high_N[ramp + 1],
        high=1 - expected.low_N[ramp + 1],
        num_inputs=num_inputs,
    )


def _wilson_bound(share: float, num: int, width: float) -> float:
    """One end of Wilson's score interval: the share whose noise, `width` standard deviations, explains the one seen."""
    squared = width**2 / num
    centre = share + squared / 2
    spread = math.copysign(math.sqrt(squared * (share * (1 - share) + squared / 4)), width)
    return (centre + spread) / (1 + squared)
