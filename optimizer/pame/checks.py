"""How an exit's check may be set: thresholds, and the inputs that leave by each (PAME, sections 5.3 and 6.2).

Precision is kept on the recorded inputs that are at hand, and nothing is promised for others; for promises with a
confidence there is `optimizer.thresholds`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

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


class Checks(Protocol):
    """The candidates and how each may be set, on inputs in order of arrival."""

    @property
    def ramps(self) -> tuple[int, ...]:
        """The candidates, ascending."""
        ...

    @property
    def end_losses_N(self) -> FloatArray:
        """What the full model's answer costs: 0 where it is what is held right."""
        ...

    def settings(self, ramp: int) -> Sequence[Setting]:
        """What is tried at a ramp."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GivenChecks:
    """Thresholds that are there already, such as a calibration's, which hold for every subset of the ramps."""

    batches: RecordedBatches

    @property
    def ramps(self) -> tuple[int, ...]:
        return self.batches.ramps

    @property
    def end_losses_N(self) -> FloatArray:
        return np.zeros(len(self.batches))

    def settings(self, ramp: int) -> Sequence[Setting]:
        column = self.batches.ramps.index(ramp)
        leave_N, losses_N = self.batches.sure_NR[:, column], self.batches.losses_NR[:, column]
        return (Setting(ramp=ramp, leave_N=leave_N, losses_N=losses_N),)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchedChecks:
    """A grid of thresholds for each exit; of the score `share` one for each of the confidences that were recorded.

    Precision is that of the truth where `by_truth`, else agreement with the full model.
    """

    by_confidence: Mapping[float | None, ExitRecords]
    """The same inputs in the same order; under None where the score has no confidence of its own."""
    by_truth: bool = False
    grid: tuple[float, ...] | None = None
    """Thresholds in the unit of the score; None: those above."""

    def __post_init__(self) -> None:
        if not self.by_confidence:
            raise DataError("exit checks are searched on exit records: none are given")
        first, *others = self.by_confidence.values()
        if any((each.ramps, each.sample_ids) != (first.ramps, first.sample_ids) for each in others):
            raise DataError("exit records of several confidences must be of the same ramps and inputs in one order")
        if self.by_truth and any(each.true_losses_NE is None for each in self.by_confidence.values()):
            raise DataError("precision by the truth needs records that know it")

    @classmethod
    def of(cls, records: ExitRecords, *, by_truth: bool = False, grid: Sequence[float] | None = None) -> SearchedChecks:
        """Of records whose score has no confidence of its own."""
        return cls(by_confidence={None: records}, by_truth=by_truth, grid=None if grid is None else tuple(grid))

    @property
    def ramps(self) -> tuple[int, ...]:
        return self._any.ramps

    @property
    def end_losses_N(self) -> FloatArray:
        truth_NE = self._any.true_losses_NE
        return truth_NE[:, -1] if self.by_truth and truth_NE is not None else np.zeros(len(self._any))

    def settings(self, ramp: int) -> Sequence[Setting]:
        """Every threshold of the grid, from the one by which most leave."""
        return [
            self._setting(records, ramp, threshold, confidence)
            for confidence, records in self.by_confidence.items()
            for threshold in self.grid or GRIDS[records.score]
        ]

    @property
    def _any(self) -> ExitRecords:
        return next(iter(self.by_confidence.values()))

    def _setting(self, records: ExitRecords, ramp: int, threshold: float, confidence: float | None) -> Setting:
        column = records.ramps.index(ramp)
        truth_NE = records.true_losses_NE
        return Setting(
            ramp=ramp,
            leave_N=records.sure_NR({ramp: threshold})[:, column],
            losses_N=truth_NE[:, column] if self.by_truth and truth_NE is not None else records.losses_NR[:, column],
            threshold=threshold,
            confidence=confidence,
        )


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
