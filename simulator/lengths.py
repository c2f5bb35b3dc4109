"""Lengths of inputs that are made up: tokens drawn from a normal distribution with both ends cut off."""

from __future__ import annotations

import math

import numpy as np

from earlyexit.errors import DataError
from simulator.decisions import IntArray

LEAST_KEPT = 1e-4
"""Of the draws that must lie within the bounds, so that drawing ends."""
AT_ONCE = 4096
"""Draws before bounds are taken for out of reach."""


def truncated_normal(num: int, *, mean: float, variance: float, low: int, high: int, seed: int) -> IntArray:
    """Whole tokens of `num` inputs: a normal distribution, rounded; what is outside low to high is drawn again.

    TCB, section 6.2.1: "3-100 tokens according to a normal distribution". Mean and variance are those of the whole
    distribution: what is cut off moves them, little where the bounds are several deviations away. A variance of 0 gives
    the mean, rounded. Equal seeds give equal lengths. Raises DataError for numbers that no length can have.
    """
    _check(num, mean, variance, low, high)
    rng, deviation = np.random.default_rng(seed), math.sqrt(variance)
    kept, total = np.zeros(0, dtype=np.int64), 0
    while len(kept) < num:
        drawn = np.rint(rng.normal(mean, deviation, max(AT_ONCE, num))).astype(np.int64)
        kept = np.concatenate([kept, drawn[(drawn >= low) & (drawn <= high)]])
        total += len(drawn)
        if len(kept) < LEAST_KEPT * total:
            raise DataError(f"hardly a length about {mean:g} with variance {variance:g} lies within {low} to {high}")
    return kept[:num]


def _check(num: int, mean: float, variance: float, low: int, high: int) -> None:
    if num < 1:
        raise DataError(f"at least one length is needed, not {num}")
    if not math.isfinite(mean):
        raise DataError(f"the mean length must be a finite number, not {mean}")
    if not 0 <= variance < math.inf:
        raise DataError(f"the variance of lengths must be a finite number from 0 on, not {variance}")
    if not 1 <= low <= high:
        raise DataError(f"lengths must lie between 1 and more, not between {low} and {high}")
