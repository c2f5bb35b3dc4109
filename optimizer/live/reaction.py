"""Detects that observations have left the forecast, so that the controller must plan again at once.

E3, section 3.1: "it can reactively re-run the optimizer if they differ drastically". A difference counts as drastic if
the forecast's interval and sampling noise do not explain it, and if it is large enough to matter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # avoids the import of scipy
    from profiles.forecast import RateForecast, SurvivalForecast

LEAST_INPUTS = 100
"""With fewer inputs, the standard error of a share may exceed 5 %."""
LEAST_DIFFERENCE = 0.05
"""Least difference of a survival share. It moves a plan's rate by about as much; less is not worth a change."""
LEAST_RATE_DIFFERENCE = 0.2
MOST_REFUSED = 0.02
"""The share of refused inputs above which a smaller difference of the rate matters, too. The plan is then too small."""
COVERAGE = 0.95
"""The share of rates that count as expected before there is a forecast."""


def survival_deviation(
    forecast: SurvivalForecast,
    ramps: Sequence[int],
    exits: Mapping[int, int],
    reached_N: Sequence[float] | None = None,
    *,
    num_probes: float = math.inf,
    unknown: int = 0,
    num_tests: float = 1.0,
) -> str | None:
    """Returns a message on the ramp where exits differ most from the forecast; None if there is no drastic difference.

    `ramps` are the active ramps of the current plan, and `exits` counts its answers by the block after which they left.
    `reached_N` holds the shares of inputs that reach each block, from joint exit records of `num_probes` inputs. With
    them, the next window's interval shifts to those shares, and widens by their sampling noise. `unknown` counts inputs
    that entered the model but did not leave it yet, or were dropped inside. They may have left early or not, so they
    widen the interval. Refused inputs do not count. Inputs are assumed independent. The active ramps and `num_tests`
    tests share the forecast's error probability (Bonferroni).
    """
    num_inputs = sum(exits.values())
    if num_inputs < LEAST_INPUTS or not ramps:
        return None
    width = NormalDist().inv_cdf(1 - (1 - forecast.coverage) / (2 * len(ramps) * num_tests))
    own_width, largest, message = NormalDist().inv_cdf((1 + forecast.coverage) / 2), 0.0, None
    bounds = forecast.survival_K, forecast.survival_low_K, forecast.survival_high_K
    for ramp in sorted(ramps):
        share, share_low, share_high = (float(each_K[ramp + 1]) for each_K in bounds)
        below, above = share - share_low, share_high - share
        if reached_N is not None:
            share = reached_N[ramp + 1]
            below = math.hypot(below, share - wilson_bound(share, num_probes, -own_width))
            above = math.hypot(above, wilson_bound(share, num_probes, own_width) - share)
        low, high = 1 - min(1.0, share + above), 1 - max(0.0, share - below)
        num_left = sum(count for block, count in exits.items() if block <= ramp)
        entered = num_inputs + unknown
        least = wilson_bound(num_left / entered, entered, -width)
        most = wilson_bound((num_left + unknown) / entered, entered, width)
        left, excess = num_left / num_inputs, max(least - high, low - most)
        if excess > largest and abs(left - (1 - share)) >= LEAST_DIFFERENCE:
            largest = excess
            message = f"{left:.1%} of {num_inputs} inputs left by ramp {ramp}, {low:.1%} to {high:.1%} were expected"
    return message


def rate_deviation(
    forecast: RateForecast | None,
    num_arrived: int,
    seconds: float,
    num_refused: int = 0,
    *,
    required_rps: float | None,
    num_tests: float = 1.0,
) -> str | None:
    """Returns a message if the arrivals of the last `seconds` differ drastically from the forecast, else None.

    Arrivals include the refused inputs. `required_rps` is the rate that the last plan must serve. A rate above it and
    the forecast's median is a deviation even within the forecast's interval. It is None if plans maximize the rate, so
    that demand does not change the plan. `num_tests` tests share the forecast's error probability. Before there is a
    forecast, only a rate above the required one is a deviation.
    """
    if required_rps is None or seconds <= 0:
        return None
    median_rps, low_rps, allowed_rps, coverage = required_rps, 0.0, required_rps, COVERAGE
    if forecast is not None:
        median_rps, low_rps, coverage = forecast.rate_rps, forecast.low_rps, forecast.coverage
        allowed_rps = min(forecast.high_rps, max(required_rps, median_rps))
    # Score interval of the mean of a Poisson count.
    width = NormalDist().inv_cdf(1 - (1 - coverage) / (2 * num_tests))
    centre, spread = num_arrived + width**2 / 2, width * math.sqrt(num_arrived + width**2 / 4)
    fewest, most = centre - spread, centre + spread
    rate_rps = num_arrived / seconds
    outside = most / seconds < low_rps or fewest / seconds > allowed_rps
    is_small = abs(rate_rps - median_rps) < LEAST_RATE_DIFFERENCE * median_rps
    if not outside or (is_small and num_refused <= MOST_REFUSED * num_arrived):
        return None
    return f"{rate_rps:.4g} inputs/s arrived for {seconds:.0f} s, {low_rps:.4g} to {allowed_rps:.4g} were expected"


def wilson_bound(share: float, num: float, width: float) -> float:
    """Returns one end of Wilson's score interval, `width` standard deviations from an observed share."""
    squared = width**2 / num
    centre = share + squared / 2
    spread = math.copysign(math.sqrt(squared * (share * (1 - share) + squared / 4)), width)
    return (centre + spread) / (1 + squared)
