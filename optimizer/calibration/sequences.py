"""Thresholds with a guarantee for sequences: a bound on the mean share of tokens that differ from the full model's.

The path and the test are those for independent inputs, with the bounded loss of each sequence as the loss.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from earlyexit.errors import DataError
from optimizer.calibration.risk import Guarantee
from optimizer.calibration.thresholds import lay_path
from profiles.records import ExitRecords, IntArray
from profiles.scores import FloatArray

LOG_PRICES = np.linspace(-12.0, 0.0, 200)
"""Logarithms of the prices at which thresholds for sequences are tested. At the first one, hardly any token leaves."""


def sequences_of(records: ExitRecords) -> list[IntArray]:
    """Returns the rows of each sequence, in order; raises DataError if they do not lie one after the other."""
    return np.split(np.arange(len(records)), _starts(records)[1:])


def _starts(records: ExitRecords) -> IntArray:
    """Returns the first row of each sequence."""
    assert records.sequences_N is not None, "the records are of sequences"
    starts_S = np.flatnonzero(np.diff(records.sequences_N, prepend=records.sequences_N[0] - 1))
    numbers = records.sequences_N[starts_S]
    if len(set(numbers.tolist())) != len(numbers):
        raise DataError("the tokens of a sequence must lie one after the other")
    return np.asarray(starts_S, dtype=np.int64)


def bounded_losses(records: ExitRecords, thresholds: Mapping[int, float]) -> FloatArray:
    """Returns the bounded loss of each sequence, (S,): the share of tokens from the first different answer on.

    Exit records are of the full model's generations, with all ramps evaluated. If skipped keys and values are computed
    by the full model (fill `compute`), an early-exit generation equals the full one up to the first token that leaves
    at a ramp with another answer. All later tokens may differ, and count as different. So the loss needs no new
    generation per threshold, never falls along the path, and is valid for every subset of the ramps. It is not valid
    for the fill `copy`.
    """
    wrong_N = records.worst_losses_N(thresholds) > 0
    starts_S = _starts(records)
    ends_S = np.append(starts_S[1:], len(records))
    end_N = np.repeat(ends_S, ends_S - starts_S)
    first_S = np.minimum.reduceat(np.where(wrong_N, np.arange(len(records)), end_N), starts_S)
    return np.asarray((ends_S - first_S) / (ends_S - starts_S), dtype=np.float64)


def learn_then_test_sequences(design: ExitRecords, tested: ExitRecords, guarantee: Guarantee) -> dict[int, float]:
    """Returns the last thresholds on the path whose mean bounded loss the test accepts; empty if it accepts none.

    This is CALM's test (Schuster et al. 2022, section 4).
    """
    return lay_path(design).last_passing(
        LOG_PRICES, lambda thresholds: bounded_losses(tested, thresholds), guarantee, zero_one=False
    )
