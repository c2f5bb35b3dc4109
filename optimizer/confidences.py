"""Above which confidence an exit's principal values count: ten values per ramp, looked at on the design part.

PAME (sections 5.3 and 6.2) searches ten values of this confidence with ten of the count that must exceed it, each exit
as if it were the only one. Here the count is a score like others, whose threshold is tested afterwards; the confidence
is a setting of that score, and may be any that never saw the inputs of the test.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from profiles.scores import FloatArray

ShareArray = npt.NDArray[np.float32]

LEVELS: ShareArray = np.array([*np.arange(1, 100) / 100, 0.995, 0.999], dtype=np.float32)
"""Confidences that are counted for; networks that are trained to the end are sure to the third digit."""
NUM_CONFIDENCES = 10
"""Of a ramp, as PAME has it."""


def choose_confidences(shares_DRL: ShareArray, losses_DR: FloatArray, budget: float) -> list[int]:
    """Per ramp, the position in `LEVELS` of the confidence whose shares order inputs best.

    `shares_DRL`: of each design input the share of a ramp's principal values above each level.
    """
    return [
        max(candidates(shares_DL), key=lambda level: _worth(shares_DL[:, level], losses_D, budget))
        for shares_DL, losses_D in zip(shares_DRL.transpose(1, 0, 2), losses_DR.T, strict=True)
    ]


def candidates(shares_DL: ShareArray) -> list[int]:
    """Ten levels, fewer where some are one, with as many principal values between each two."""
    wanted = (np.arange(NUM_CONFIDENCES) + 0.5) / NUM_CONFIDENCES
    above_L = shares_DL.mean(0)
    return sorted({int(np.abs(above_L - share).argmin()) for share in wanted})


def _worth(score_D: ShareArray, losses_D: FloatArray, budget: float) -> tuple[int, float]:
    """How many inputs can leave within the budget, the surest first; of equals, how little they lose all along."""
    order = np.argsort(-score_D, kind="stable")
    ends = np.flatnonzero(np.diff(score_D[order], append=-np.inf))  # inputs with equal scores leave together
    lost = np.cumsum(losses_D[order])[ends]
    within = ends[lost <= budget * len(losses_D)]
    weights = np.diff(ends, prepend=-1)
    return int(within[-1]) + 1 if len(within) else 0, -float(weights @ lost)
