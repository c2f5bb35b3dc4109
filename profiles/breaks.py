"""Where a series of shares jumped: what was seen before it says nothing about what comes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

FALSE_ALARM = 1e-3
"""Chance that a window of a steady stream is taken for a jump."""
COMPARED = 3
"""Windows before, taken together, that a window is compared with: more would take a slow drift for a jump."""
USUAL = 30
"""Windows that say how much neighbours usually differ."""


def last_break(reach_WR: FloatArray, go_on_WR: FloatArray) -> int:
    """The window (W) that the last jump came with; 0 where there was none.

    A window jumped where its shares `go_on / reach`, over all ramps (R), differ from those of the windows before it by
    more than sampling can explain (likelihood ratio of binomials, chi-squared with R degrees of freedom), and by far
    more than neighbours lately did: under a steady drift all neighbours differ, and none is a jump.
    """
    from scipy.stats import chi2

    num_windows, num_ramps = reach_WR.shape
    if num_ramps == 0:
        return 0
    limit, typical = float(chi2.isf(FALSE_ALARM, num_ramps)), float(chi2.median(num_ramps))
    steps_W = _difference(reach_WR[:-1], go_on_WR[:-1], reach_WR[1:], go_on_WR[1:])
    start = 0
    for window in range(1, num_windows):
        before = slice(max(start, window - COMPARED), window)
        difference = _difference(reach_WR[before].sum(0), go_on_WR[before].sum(0), reach_WR[window], go_on_WR[window])
        usual = max(1.0, float(np.median(steps_W[max(0, window - USUAL) : window])) / typical)
        if float(difference) > limit * usual:
            start = window
    return start


def _difference(reach_XR: FloatArray, go_on_XR: FloatArray, reach_YR: FloatArray, go_on_YR: FloatArray) -> FloatArray:
    """Twice the log likelihood ratio of two sets of shares against one, summed over ramps."""
    apart = _log_likelihood(reach_XR, go_on_XR) + _log_likelihood(reach_YR, go_on_YR)
    together = _log_likelihood(reach_XR + reach_YR, go_on_XR + go_on_YR)
    return np.asarray(2 * (apart - together).sum(-1))


def _log_likelihood(reach_XR: FloatArray, go_on_XR: FloatArray) -> FloatArray:
    """Of binomial counts at their own share; 0 where nobody came or all did the same."""
    from scipy.special import xlogy

    leave_XR = reach_XR - go_on_XR
    return np.asarray(xlogy(go_on_XR, go_on_XR) + xlogy(leave_XR, leave_XR) - xlogy(reach_XR, reach_XR))
