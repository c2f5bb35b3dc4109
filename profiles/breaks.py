"""Where a series of shares jumped: what was seen before it says nothing about what comes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

FALSE_ALARM = 3e-4
"""Chance that sampling alone makes a window of a steady stream differ as much as a jump must."""
COMPARED = 3
"""Windows before, taken together, that a window is compared with: more would take a slow drift for a jump."""
USUAL = 30
"""Windows that say how much the stream differs anyway."""
LEAST_USUAL = 6
"""Fewer cannot tell a jump from a drift: none is then called a jump."""
FEW_USUAL = 12
"""Of fewer the quantile below is too uncertain: the next later windows fill up."""
RARE = 0.9
"""What one window in ten exceeds stands for how far a drift goes, which has fast spells and slow ones."""
BEYOND = 16.0
"""How many times what a drift adds at that quantile a jump must add. One factor whatever the number of ramps, as a
drift moves all of them. Chosen on random walks, lines and cycles of 60 windows: at 4, up to 39 % hold a false break;
at 16, up to 9 %, and mostly none."""


def last_break(reach_WR: FloatArray, go_on_WR: FloatArray) -> int:
    """The window (W) that the last jump came with; 0 where there was none.

    A window jumped where its shares `go_on / reach`, over all ramps (R), differ from those of the windows before it by
    more than sampling can explain (likelihood ratio of binomials, chi-squared with R degrees of freedom), and by far
    more than other windows differ from those before them: under a drift all do, and none is a jump.
    """
    from scipy.stats import chi2

    num_windows, num_ramps = reach_WR.shape
    if num_ramps == 0:
        return 0
    limit, by_chance = float(chi2.isf(FALSE_ALARM, num_ramps)), float(chi2.ppf(RARE, num_ramps))
    from_before_W = [_from_before(reach_WR, go_on_WR, 0, window) for window in range(1, num_windows)]
    usual: list[float] = []
    start = 0
    for window in range(1, num_windows):
        difference = _from_before(reach_WR, go_on_WR, start, window)
        others = usual[-USUAL:]
        if len(others) < FEW_USUAL:  # and later ones, after those that are compared with this one
            others = others + from_before_W[window + COMPARED : window + COMPARED + FEW_USUAL - len(others)]
        if len(others) >= LEAST_USUAL:
            drift = max(0.0, float(np.quantile(others, RARE)) - by_chance)
            if difference > limit + BEYOND * drift:
                start = window
                continue
        usual.append(difference)
    return start


def _from_before(reach_WR: FloatArray, go_on_WR: FloatArray, start: int, window: int) -> float:
    """How a window differs from those before it, none older than `start`: twice the log likelihood ratio."""
    before = slice(max(start, window - COMPARED), window)
    reach_R, go_on_R = reach_WR[before].sum(0), go_on_WR[before].sum(0)
    apart_R = _log_likelihood(reach_R, go_on_R) + _log_likelihood(reach_WR[window], go_on_WR[window])
    together_R = _log_likelihood(reach_R + reach_WR[window], go_on_R + go_on_WR[window])
    return 2 * float((apart_R - together_R).sum())


def _log_likelihood(reach_R: FloatArray, go_on_R: FloatArray) -> FloatArray:
    """Of binomial counts at their own share; 0 where nobody came or all did the same."""
    from scipy.special import xlogy

    leave_R = reach_R - go_on_R
    return np.asarray(xlogy(go_on_R, go_on_R) + xlogy(leave_R, leave_R) - xlogy(reach_R, reach_R))
