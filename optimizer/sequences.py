"""Thresholds with a guarantee for sequences: of a sequence's tokens at most so large a share differs, on average.

Learn-then-Test, as CALM does it (Schuster et al. 2022, section 4), over a path of thresholds that design sequences lay,
on the other sequences' bounded losses against the full model's own generations. `optimizer/thresholds.py` does the same
for inputs that do not hang together.

Exit records are of the full model's generations, with every ramp looking. With keys and values filled in as the full
model's (`compute`), an early generation is the full one up to the first token that a ramp lets out with another answer.
Of what comes after it no more is said than that it may differ, so *bounded* losses need no generation per threshold,
never fall along the path, and hold for every subset of the ramps. Losses of generations that were really run, as with
`copy` there must be, are given from outside.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from earlyexit.errors import DataError
from optimizer.risk import Guarantee
from optimizer.thresholds import lay_path
from profiles.records import ExitRecords, IntArray
from profiles.scores import FloatArray

Thresholds = Mapping[int, float]

STEPS = 200
"""Of the path, evenly in the logarithm of its price."""
LEAST_LOG_PRICE = -12.0
"""Where a saved block is worth so little that hardly a token leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceCalibration:
    """Thresholds, and the mean loss of the sequences that they were tested on."""

    thresholds: dict[int, float]
    """None where nothing could be promised."""
    mean_loss: float
    num_sequences: int


def sequences_of(records: ExitRecords) -> list[IntArray]:
    """Rows of every sequence, in their order; raises DataError for records that are of none."""
    return np.split(np.arange(len(records)), _starts(records)[1:])


def _starts(records: ExitRecords) -> IntArray:
    """The first row of every sequence."""
    if records.sequences_N is None:
        raise DataError("these exit records do not say which sequence a token is of: record generations")
    starts_S = np.flatnonzero(np.diff(records.sequences_N, prepend=records.sequences_N[0] - 1))
    numbers = records.sequences_N[starts_S]
    if len(set(numbers.tolist())) != len(numbers):
        raise DataError("the tokens of a sequence must lie one after the other")
    return np.asarray(starts_S, dtype=np.int64)


def of_sequences(records: ExitRecords, chosen: Sequence[int] | IntArray) -> ExitRecords:
    """The records of some sequences, by their places."""
    rows = sequences_of(records)
    return records.subset(np.concatenate([rows[k] for k in chosen]))


def bounded_losses(records: ExitRecords, thresholds: Thresholds) -> FloatArray:
    """Of every sequence the share of its tokens from the first that any sure ramp would answer otherwise, (S,)."""
    wrong_N = records.worst_losses_N(thresholds) > 0
    starts_S = _starts(records)
    ends_S = np.append(starts_S[1:], len(records))
    end_N = np.repeat(ends_S, ends_S - starts_S)
    first_S = np.minimum.reduceat(np.where(wrong_N, np.arange(len(records)), end_N), starts_S)
    return np.asarray((ends_S - first_S) / (ends_S - starts_S), dtype=np.float64)


def path_of(design: ExitRecords, steps: int = STEPS) -> list[dict[int, float]]:
    """Thresholds from hardly ever to always, as the design sequences' tokens suggest."""
    path = lay_path(design)
    return [path.thresholds(log_price) for log_price in np.linspace(LEAST_LOG_PRICE, 0.0, steps)]


def tried_in_order(
    candidates: Sequence[dict[int, float]],
    losses_of: Callable[[Thresholds], FloatArray],
    guarantee: Guarantee,
    num_sequences: int,
) -> SequenceCalibration:
    """The last of candidates, the most careful first, before the first whose losses the test does not accept.

    `losses_of` gives a loss in [0, 1] for every tested sequence. Fixed-sequence testing: no candidate may have been
    chosen by these sequences. Raises DataError for too few of them.
    """
    if num_sequences < guarantee.least_inputs:
        raise DataError(
            f"{num_sequences} sequences cannot show a mean loss of {guarantee.budget:.1%} with confidence "
            f"{guarantee.confidence:.0%}; {guarantee.least_inputs} are needed"
        )
    found = SequenceCalibration(thresholds={}, mean_loss=0.0, num_sequences=num_sequences)
    for thresholds in candidates:
        losses_S = losses_of(thresholds)
        if not guarantee.holds(float(losses_S.sum()), len(losses_S), zero_one=False):
            return found
        found = SequenceCalibration(
            thresholds=dict(thresholds), mean_loss=float(losses_S.mean()), num_sequences=len(losses_S)
        )
    return found


def learn_then_test_sequences(design: ExitRecords, tested: ExitRecords, guarantee: Guarantee) -> SequenceCalibration:
    """The boldest thresholds on the path whose bounded losses the test accepts; raises as `tried_in_order`."""
    candidates, num_sequences, losses_of = path_of(design), len(_starts(tested)), partial(bounded_losses, tested)

    def fails(place: int) -> bool:
        total = float(losses_of(candidates[place]).sum())
        return not guarantee.holds(total, num_sequences, zero_one=False)

    # Losses never fall along the path, so what is tried in order fails from one place on.
    passed = bisect_left(range(len(candidates)), True, key=fails)
    return tried_in_order(candidates[max(passed - 1, 0) : passed], losses_of, guarantee, num_sequences)
