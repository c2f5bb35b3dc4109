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
) -> str | None:
    """Returns how the answers differ from what was expected, at the ramp where they differ most.

    Returns None where they agree, are too few, or differ by too little to matter.

    `exits` counts answers by the block they left after, since the plan is followed; `unknown` are inputs that entered
    the model and were not seen to leave it: under way, or dropped inside. They may have gone, or go, either way, so
    they widen what is seen. Refused inputs are neither. Inputs are taken as drawn apart; each of the R active ramps is
    judged at the R-th part of the forecast's chance to err.
    """
    num_inputs = sum(exits.values())
    if num_inputs < LEAST_INPUTS or not expected.ramps:
        return None
    width = NormalDist().inv_cdf(1 - (1 - expected.coverage) / (2 * len(expected.ramps)))
    furthest, words = 0.0, None
    for ramp in expected.ramps:
        num_left = sum(count for block, count in exits.items() if block <= ramp)
        least, most = left_bounds(num_left, num_inputs, unknown, width)
        low, high = 1 - expected.high_N[ramp + 1], 1 - expected.low_N[ramp + 1]
        left, beyond = num_left / num_inputs, max(least - high, low - most)
        if beyond > furthest and abs(left - (1 - expected.share_N[ramp + 1])) >= least_difference:
            furthest = beyond
            words = f"{left:.1%} of {num_inputs} inputs left by ramp {ramp}, {low:.1%} to {high:.1%} were expected"
    return words


def left_bounds(num_left: int, num_inputs: int, unknown: int, width: float) -> tuple[float, float]:
    """Returns the least and the largest share of all inputs, endless ones, whose noise explains what left.

    `unknown` inputs may have left or not. `width`: standard deviations of noise.
    """
    entered = num_inputs + unknown
    least = _wilson_bound(num_left / entered, entered, -width)
    return least, _wilson_bound((num_left + unknown) / entered, entered, width)


def rate_deviation(
    forecast: RateForecast,
    num_arrived: int,
    seconds: float,
    *,
    sized_for_rps: float | None,
) -> str | None:
    """Returns how the arrivals of the last `seconds`, refused ones too, differ from the forecast.

    Returns None where they agree with it, or are few.

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
    return f"{rate_rps:.4g} requests/s came for {seconds:.0f} s, {low_rps:.4g} to {allowed_rps:.4g} were expected"


def _wilson_bound(share: float, num: int, width: float) -> float:
    """One end of Wilson's score interval: the share whose noise, `width` standard deviations, explains the one seen."""
    squared = width**2 / num
    centre = share + squared / 2
    spread = math.copysign(math.sqrt(squared * (share * (1 - share) + squared / 4)), width)
    return (centre + spread) / (1 + squared)
