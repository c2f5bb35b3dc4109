"""Mixes of easy and hard inputs, and what a planner that knew them would do (E3 section 5.4)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from earlyexit.errors import DataError
from profiles.records import ExitRecords, IntArray

EASY_SHARES = (0.8, 0.5, 0.2)
"""E3's 80:20, 50:50 and 20:80, in its order."""
MANY = 8000
"""Inputs by which a mix is known: its survival is then known to half a percent."""


def easy_and_hard(records: ExitRecords, thresholds: Mapping[int, float]) -> tuple[IntArray, IntArray]:
    """Rows of easy inputs, which leave in the first half of the model, and of the rest (E3 does not say its rule).

    Raises DataError where one of the kinds is missing.
    """
    easy_N = records.outcome(thresholds).exits_N < records.num_blocks // 2
    easy, hard = np.flatnonzero(easy_N), np.flatnonzero(~easy_N)
    if not len(easy) or not len(hard):
        raise DataError(f"no mixes of {len(easy)} easy and {len(hard)} hard inputs")
    return easy, hard


def mixed_rows(
    records: ExitRecords,
    thresholds: Mapping[int, float],
    easy_share: float,
    rng: np.random.Generator,
    *,
    num_inputs: int = MANY,
) -> IntArray:
    """Rows drawn with replacement: each is easy with probability `easy_share`, independently of those before it."""
    easy, hard = easy_and_hard(records, thresholds)
    is_easy_N = rng.random(num_inputs) < easy_share
    return np.where(is_easy_N, rng.choice(easy, num_inputs), rng.choice(hard, num_inputs))


def mixed_records(records: ExitRecords, thresholds: Mapping[int, float], easy_share: float) -> ExitRecords:
    """Records in which the mix has its exact shares: what a forecast that is never wrong would know."""
    easy, hard = easy_and_hard(records, thresholds)
    num_easy = round(MANY * easy_share)
    return records.subset(np.concatenate([np.resize(easy, num_easy), np.resize(hard, MANY - num_easy)]))
