"""Thresholds with a guarantee for sequences: a bound on the mean share of tokens that differ from the full model's.

The method is Learn-then-Test, as in CALM (Schuster et al. 2022, section 4). Design sequences determine a path of
thresholds, which is tested on the other sequences. `optimizer/calibration/thresholds.py` does the same for independent
inputs.

Exit records are of the full model's generations, with all ramps evaluated. If skipped keys and values are computed by
the full model (fill `compute`), an early-exit generation equals the full one up to the first token that leaves at a
ramp with another answer. All later tokens may differ. The *bounded* loss counts them as different: it needs no new
generation per threshold, never falls along the path, and is valid for every subset of the ramps. It is not
valid for the fill `copy`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import numpy as np

from earlyexit.errors import DataError
from optimizer.calibration.risk import Guarantee
from optimizer.calibration.thresholds import lay_path
from profiles.records import ExitRecords, IntArray
from profiles.scores import FloatArray

Thresholds = Mapping[int, float]

STEPS = 200
"""Steps of the path, evenly spaced in the logarithm of the price."""
LEAST_LOG_PRICE = -12.0
"""Start of the path, where hardly any token leaves."""


def sequences_of(records: ExitRecords) -> list[IntArray]:
    """Returns the rows of each sequence, in order; raises DataError if the records are not of sequences."""
    return np.split(np.arange(len(records)), _starts(records)[1:])


def _starts(records: ExitRecords) -> IntArray:
    """Returns the first row of each sequence."""
    if records.sequences_N is None:
        raise DataError("these exit records do not assign tokens to sequences; record generations instead")
    starts_S = np.flatnonzero(np.diff(records.sequences_N, prepend=records.sequences_N[0] - 1))
    numbers = records.sequences_N[starts_S]
    if len(set(numbers.tolist())) != len(numbers):
        raise DataError("the tokens of a sequence must lie one after the other")
    return np.asarray(starts_S, dtype=np.int64)


def of_sequences(records: ExitRecords, chosen: Sequence[int] | IntArray) -> ExitRecords:
    """Returns the records of some sequences, by index."""
    rows = sequences_of(records)
    return records.subset(np.concatenate([rows[k] for k in chosen]))


def bounded_losses(records: ExitRecords, thresholds: Thresholds) -> FloatArray:
    """Returns the bounded loss of each sequence, (S,): the share of tokens from the first different answer on."""
    wrong_N = records.worst_losses_N(thresholds) > 0
    starts_S = _starts(records)
    ends_S = np.append(starts_S[1:], len(records))
    end_N = np.repeat(ends_S, ends_S - starts_S)
    first_S = np.minimum.reduceat(np.where(wrong_N, np.arange(len(records)), end_N), starts_S)
    return np.asarray((ends_S - first_S) / (ends_S - starts_S), dtype=np.float64)


def path_of(design: ExitRecords, steps: int = STEPS) -> list[dict[int, float]]:
    """Returns thresholds from "hardly ever leave" to "always leave", fitted on the tokens of design sequences."""
    path = lay_path(design)
    return [path.thresholds(log_price) for log_price in np.linspace(LEAST_LOG_PRICE, 0.0, steps)]


def learn_then_test_sequences(design: ExitRecords, tested: ExitRecords, guarantee: Guarantee) -> dict[int, float]:
    """Returns the last thresholds on the path whose mean bounded loss the test accepts; empty if it accepts none.

    Raises DataError for too few sequences.
    """
    num_sequences = len(_starts(tested))
    if num_sequences < guarantee.least_inputs:
        raise DataError(
            f"{num_sequences} sequences cannot show a mean loss of {guarantee.budget:.1%} with confidence "
            f"{guarantee.confidence:.0%}; {guarantee.least_inputs} are needed"
        )

    def fails(thresholds: Thresholds) -> bool:
        total = float(bounded_losses(tested, thresholds).sum())
        return not guarantee.holds(total, num_sequences, zero_one=False)

    candidates = path_of(design)
    # Losses never fall along the path, so bisection finds the first failure of the tests in order.
    passed = bisect_left(candidates, True, key=fails)
    return candidates[passed - 1] if passed else {}
