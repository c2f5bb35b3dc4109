"""How an exit's check may be set: the thresholds that are tried, and whom each lets leave (PAME, sections 5.3, 6.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from optimizer.pame.precision import Precision, overall
from profiles.batches import RecordedBatches
from profiles.scores import BoolArray, FloatArray


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
class Configured:
    """A candidate with its check set, for the inputs that are inside."""

    setting: Setting
    precision: Precision
    overall: float
    """Q of all exits, this one the last."""


def configured(
    checks: Checks, ramp: int, inside_N: BoolArray, before: Sequence[Precision], least_precision: float | None
) -> Configured | None:
    """The setting by which most leave while the precision of all is above the least; None where no setting keeps it.

    Section 6.2: maximise r_e subject to Q > eta Q_ori, as if this were the only exit behind those that were found.
    `least_precision` None: any will do.
    """
    best: Configured | None = None
    for setting in checks.settings(ramp):
        precision = Precision.measured(inside_N, setting.leave_N, setting.losses_N, checks.end_losses_N)
        found = Configured(setting=setting, precision=precision, overall=overall([*before, precision]))
        is_precise = least_precision is None or found.overall > least_precision
        if is_precise and (best is None or _order(found) > _order(best)):
            best = found
    return best


def _order(found: Configured) -> tuple[float, float]:
    """Of settings by which as many leave, the more precise."""
    return found.precision.leaving, found.overall
