"""Settings of an exit's check: thresholds, and the inputs that leave at each (PAME, sections 5.3 and 6.2).

Precision is kept on the recorded inputs only. `optimizer.thresholds` makes promises for new inputs, with a confidence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from earlyexit.errors import DataError
from profiles.records import ExitOutcome, ExitRecords, RecordedBatches
from profiles.scores import SCORES, BoolArray, FloatArray, Score

TEN_CONFIDENCES = tuple(round(0.50 + 0.05 * step, 2) for step in range(10))
"""The paper has ten of them (section 6.1), among them 0.55 and 0.6 (section 7.6)."""
TEN_SHARES = tuple(round(0.1 * step, 1) for step in range(1, 11))
"""Count thresholds, as shares of the principal values."""
LONG_CONFIDENCES = (*TEN_CONFIDENCES, 0.97, 0.98, 0.99, 0.995, 0.999)
"""The five values beyond the paper's are for overconfident networks."""
GRIDS: Mapping[Score, tuple[float, ...]] = {
    "confidence": LONG_CONFIDENCES,
    "share": TEN_SHARES,
    "foreseen": LONG_CONFIDENCES,
    "similar": LONG_CONFIDENCES,
    "entropy": (2.0, 1.5, 1.0, 0.7, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01),
}
"""Thresholds to try for each score, from the one at which most inputs leave to the strictest."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckSetting:
    """One setting of an exit's check, and its effect on every recorded input (N), including those that left earlier."""

    ramp: int
    leave_N: BoolArray
    losses_N: FloatArray
    """Losses of the exit's own answers."""
    threshold: float | None = None
    """In the unit of the score. None if thresholds are fixed in advance."""
    confidence: float | None = None
    """For the score `share`: a principal value counts above this confidence."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checks:
    """The candidate exits and their settings, on recorded inputs in order of arrival."""

    ramps: tuple[int, ...]
    """The candidates, ascending."""
    end_losses_N: FloatArray
    """Losses of the full model's answers: 0 if they are the reference."""
    settings: Callable[[int], Sequence[CheckSetting]]
    """Maps a ramp to its settings, from the one at which most inputs leave."""


def fixed_checks(batches: RecordedBatches) -> Checks:
    """Returns checks with fixed thresholds, such as a calibration's, which hold for every subset of the ramps."""

    def settings(ramp: int) -> Sequence[CheckSetting]:
        column = batches.ramps.index(ramp)
        return (CheckSetting(ramp=ramp, leave_N=batches.sure_NR[:, column], losses_N=batches.losses_NR[:, column]),)

    return Checks(ramps=batches.ramps, end_losses_N=np.zeros(len(batches)), settings=settings)


def grid_checks(
    by_confidence: Mapping[float | None, ExitRecords], *, by_truth: bool = False, grid: Sequence[float] | None = None
) -> Checks:
    """Returns checks with a grid of thresholds for each exit, and for `share` one grid for each recorded confidence.

    The records of all confidences hold the same inputs in the same order. The key is None unless the score is `share`.
    The default grid is that of the score. Losses are against the truth with `by_truth`, otherwise against the full
    model. Raises DataError.
    """
    if not by_confidence:
        raise DataError("the search for exit checks needs exit records; there are none")
    first, *others = by_confidence.values()
    if any((each.ramps, each.sample_ids) != (first.ramps, first.sample_ids) for each in others):
        raise DataError("exit records of several confidences must have the same ramps and inputs, in the same order")
    if by_truth and any(each.true_losses_NE is None for each in by_confidence.values()):
        raise DataError("precision against the truth needs exit records with true losses")

    def losses_NR(records: ExitRecords) -> FloatArray:
        true_losses_NE = records.true_losses_NE if by_truth else None
        return records.losses_NR if true_losses_NE is None else true_losses_NE

    def settings(ramp: int) -> Sequence[CheckSetting]:
        column = first.ramps.index(ramp)
        return [
            CheckSetting(
                ramp=ramp,
                leave_N=records.sure_NR({ramp: threshold})[:, column],
                losses_N=losses_NR(records)[:, column],
                threshold=threshold,
                confidence=confidence,
            )
            for confidence, records in by_confidence.items()
            for threshold in grid or GRIDS[records.score]
        ]

    end_losses_N = losses_NR(first)[:, -1] if by_truth else np.zeros(len(first))
    return Checks(ramps=first.ramps, end_losses_N=end_losses_N, settings=settings)


def next_threshold(score: Score, threshold: float) -> float | None:
    """Returns the next stricter threshold of the score's grid; None if there is none."""
    direction = SCORES[score].direction
    return next((value for value in GRIDS[score] if direction * value > direction * threshold), None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConfiguredExit:
    """A candidate exit with the setting of its check, for the inputs that reach it."""

    setting: CheckSetting
    leaving: float
    """r_e: share of the inputs that reach the exit and leave there."""
    lost_N: FloatArray
    """Loss of every input's answer, with the exits found so far and this one."""

    @property
    def overall(self) -> float:
        """The mean precision of all inputs: Q of equation 1, and its update for further exits."""
        return 1 - float(self.lost_N.mean())


def configure_exit(
    checks: Checks, ramp: int, inside_N: BoolArray, lost_N: FloatArray, least_precision: float | None
) -> ConfiguredExit | None:
    """Returns the setting at which most inputs leave while Q stays above `least_precision`; None if there is none.

    Section 6.2: maximize r_e subject to Q > eta Q_ori, as if this were the last exit. `lost_N` are the losses of all
    answers without this exit. With `least_precision` None, every setting is accepted.
    """
    best: ConfiguredExit | None = None
    for setting in checks.settings(ramp):
        leaves_N = inside_N & setting.leave_N
        num_inside = int(inside_N.sum())
        candidate = ConfiguredExit(
            setting=setting,
            leaving=int(leaves_N.sum()) / num_inside if num_inside else 0.0,
            lost_N=np.where(leaves_N, setting.losses_N, lost_N),
        )
        is_precise = least_precision is None or candidate.overall > least_precision
        if is_precise and (best is None or (candidate.leaving, candidate.overall) > (best.leaving, best.overall)):
            best = candidate
    return best


def relative_precision(outcome: ExitOutcome) -> float:
    """Returns the accuracy relative to the full model's (section 7.2), or the agreement if the truth is not known."""
    accuracy, full_accuracy = outcome.accuracy, outcome.full_accuracy
    if accuracy is None or not full_accuracy:
        return outcome.agreement
    return accuracy / full_accuracy
