"""Selects the confidence above which a principal value counts in the `share` score, among ten candidates per ramp.

PAME (sections 5.3 and 6.2) searches ten confidences together with ten thresholds of the count, for each exit alone.
Here the count is a score, whose threshold is calibrated afterwards. The confidence is a setting of that score. It is
selected on the design part, so that it does not depend on the tested inputs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from profiles.scores import FloatArray

ShareArray = npt.NDArray[np.float32]

LEVELS: ShareArray = np.array([*np.arange(1, 100) / 100, 0.995, 0.999], dtype=np.float32)
"""Recorded confidence levels. They are denser near 1, because fully trained networks are very confident."""
NUM_CONFIDENCES = 10
"""Candidates per ramp, as in PAME."""


def choose_confidences(shares_DRL: ShareArray, losses_DR: FloatArray, budget: float) -> list[int]:
    """Returns, per ramp, the index in `LEVELS` of the confidence whose score lets most inputs leave within the budget.

    `shares_DRL` holds the share of principal values above each level, by design input and ramp.
    """
    return [
        max(candidates(shares_DL), key=lambda level: _worth(shares_DL[:, level], losses_D, budget))
        for shares_DL, losses_D in zip(shares_DRL.transpose(1, 0, 2), losses_DR.T, strict=True)
    ]


def candidates(shares_DL: ShareArray) -> list[int]:
    """Returns the indices of up to ten levels at evenly spaced quantiles of the principal values."""
    quantiles = (np.arange(NUM_CONFIDENCES) + 0.5) / NUM_CONFIDENCES
    above_L = shares_DL.mean(0)
    return sorted({int(np.abs(above_L - quantile).argmin()) for quantile in quantiles})


def _worth(score_D: ShareArray, losses_D: FloatArray, budget: float) -> tuple[int, float]:
    """Returns the number of inputs that can leave within the budget, surest first; then the smallest total loss."""
    order = np.argsort(-score_D, kind="stable")
    ends = np.flatnonzero(np.diff(score_D[order], append=-np.inf))  # inputs with equal scores leave together
    lost = np.cumsum(losses_D[order])[ends]
    within = ends[lost <= budget * len(losses_D)]
    weights = np.diff(ends, prepend=-1)
    return int(within[-1]) + 1 if len(within) else 0, -float(weights @ lost)
