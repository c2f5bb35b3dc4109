"""How an exit's check may be set: thresholds, and the inputs that leave by each (PAME, sections 5.3 and 6.2).

Precision is kept on the recorded inputs that are at hand, and nothing is promised for others; for promises with a
confidence there is `optimizer.thresholds`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from earlyexit.errors import DataError
from profiles.records import ExitOutcome, ExitRecords, RecordedBatches
from profiles.scores import SCORES, BoolArray, FloatArray, Score

TEN_CONFIDENCES = tuple(round(0.50 + 0.05 * step, 2) for step in range(10))
"""The paper names 0.55 and 0.6 (section 7.6) and that there are ten (section 6.1)."""
TEN_SHARES = tuple(round(0.1 * step, 1) for step in range(1, 11))
"""Count thresholds, as shares of the principal values."""
LONG_CONFIDENCES = (*TEN_CONFIDENCES, 0.97, 0.98, 0.99, 0.995, 0.999)
"""The five behind the paper's are for networks that are surer than they should be."""
GRIDS: Mapping[Score, tuple[float, ...]] = {
    "confidence": LONG_CONFIDENCES,
    "share": TEN_SHARES,
    "foreseen": LONG_CONFIDENCES,
    "similar": LONG_CONFIDENCES,
    "entropy": (2.0, 1.5, 1.0, 0.7, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01),
}
"""Thresholds that are tried, from the boldest to the most careful."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Setting:
    """One way to set an exit's check, and what it does to every recorded input (N), inside or not."""

    ramp: int
    leave_N: BoolArray
    losses_N: FloatArray
    """What the exit's own answer costs."""
    threshold: float | None = None
    """In the unit of the score; None where thresholds were set before and are not searched."""
    confidence: float | None = None
    """Of the score `share`: above which a principal value counts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checks:
    """The candidates and how each may be set, on inputs in order of arrival."""

    ramps: tuple[int, ...]
    """The candidates, ascending."""
    end_losses_N: FloatArray
    """What the full model's answer costs: 0 where it is what is held right."""
    settings: Callable[[int], Sequence[Setting]]
    """From a ramp to what is tried there, from the setting by which most leave."""


def given_checks(batches: RecordedBatches) -> Checks:
    """Thresholds that are there already, such as a calibration's, which hold for every subset of the ramps."""

    def settings(ramp: int) -> Sequence[Setting]:
        column = batches.ramps.index(ramp)
        return (Setting(ramp=ramp, leave_N=batches.sure_NR[:, column], losses_N=batches.losses_NR[:, column]),)

    return Checks(ramps=batches.ramps, end_losses_N=np.zeros(len(batches)), settings=settings)


def searched_checks(
    by_confidence: Mapping[float | None, ExitRecords], *, by_truth: bool = False, grid: Sequence[float] | None = None
) -> Checks:
    """A grid of thresholds for each exit, by default that of the score; of `share` one for each recorded confidence.

    `by_confidence`: the same inputs in the same order; under None where the score has no confidence of its own.
    Precision is that of the truth where `by_truth`, else agreement with the full model. Raises DataError.
    """
    if not by_confidence:
        raise DataError("exit checks are searched on exit records: none are given")
    first, *others = by_confidence.values()
    if any((each.ramps, each.sample_ids) != (first.ramps, first.sample_ids) for each in others):
        raise DataError("exit records of several confidences must be of the same ramps and inputs in one order")
    if by_truth and any(each.true_losses_NE is None for each in by_confidence.values()):
        raise DataError("precision by the truth needs records that know it")

    def settings(ramp: int) -> Sequence[Setting]:
        column = first.ramps.index(ramp)
        return [
            Setting(
                ramp=ramp,
                leave_N=records.sure_NR({ramp: threshold})[:, column],
                losses_N=(truth_NE if by_truth and truth_NE is not None else records.losses_NR)[:, column],
                threshold=threshold,
                confidence=confidence,
            )
            for confidence, records in by_confidence.items()
            for truth_NE in (records.true_losses_NE,)
            for threshold in grid or GRIDS[records.score]
        ]

    truth_NE = first.true_losses_NE
    end_losses_N = truth_NE[:, -1] if by_truth and truth_NE is not None else np.zeros(len(first))
    return Checks(ramps=first.ramps, end_losses_N=end_losses_N, settings=settings)


def next_step(score: Score, threshold: float) -> float | None:
    """The boldest of the grid that is more careful; None behind its end."""
    direction = SCORES[score].direction
    return next((value for value in GRIDS[score] if direction * value > direction * threshold), None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Configured:
    """A candidate with its check set, for the inputs that are inside."""

    setting: Setting
    leaving: float
    """r_e: the share of the inputs that reach the exit which leave there."""
    lost_N: FloatArray
    """What the answer of every input costs, with all exits so far and this one the last."""

    @property
    def overall(self) -> float:
        """Q of equation 1 with its update behind further exits: both are the mean precision of all inputs."""
        return 1 - float(self.lost_N.mean())


def configured(
    checks: Checks, ramp: int, inside_N: BoolArray, lost_N: FloatArray, least_precision: float | None
) -> Configured | None:
    """The setting by which most inputs leave while Q is above the least; None where no setting keeps it.

    Section 6.2: maximise r_e subject to Q > eta Q_ori, as if this were the only exit behind those that were found.
    `lost_N` are the costs of all answers without this exit. `least_precision` None: any will do.
    """
    best: Configured | None = None
    for setting in checks.settings(ramp):
        going_N = inside_N & setting.leave_N
        reaching = int(inside_N.sum())
        found = Configured(
            setting=setting,
            leaving=int(going_N.sum()) / reaching if reaching else 0.0,
            lost_N=np.where(going_N, setting.losses_N, lost_N),
        )
        is_precise = least_precision is None or found.overall > least_precision
        if is_precise and (best is None or (found.leaving, found.overall) > (best.leaving, best.overall)):
            best = found
    return best


def normalised(outcome: ExitOutcome) -> float:
    """Accuracy over that of the model without exits (section 7.2); where truth is not known, agreement with it."""
    accuracy, full_accuracy = outcome.accuracy, outcome.full_accuracy
    if accuracy is None or not full_accuracy:
        return outcome.agreement
    return accuracy / full_accuracy
