"""Where one exit should be, by how many of each batch would move on: how PAME chooses a first exit (6.2 to 6.4).

Online the same is asked of the last inputs (section 7.6): an exit behind which too many inputs move on makes batches
slower than the model without exits, and goes to a later place. Later exits that are there already stay.

Array legend: K batches of n inputs, in order of arrival; B blocks; j inputs that move on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from earlyexit.errors import DataError
from profiles.outcome import ExitOutcome
from profiles.records import ExitRecords
from profiles.scores import FloatArray, Score
from profiles.table import LatencyTable

TAIL = 0.02
"""PAME's tau_l: the share of batches that may be slower than the model without exits (section 7.1)."""
GRIDS: Mapping[Score, tuple[float, ...]] = {
    "confidence": (*(round(0.5 + 0.05 * step, 2) for step in range(10)), 0.97, 0.98, 0.99, 0.995, 0.999),
    "share": tuple(step / 10 for step in range(1, 11)),
    "entropy": (2.0, 1.5, 1.0, 0.7, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01),
}
"""Thresholds that are tried, from the boldest to the most careful. Of confidences the paper tells 0.55 and 0.6, and
that they are ten; the five behind them are for networks that are surer than they should be."""

IntArray = npt.NDArray[np.integer]


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchTimes:
    """Seconds of a batch on one accelerator, by how many of its inputs are still inside at every block."""

    table: LatencyTable
    ramps: tuple[int, ...]
    """Of the model, active or not, as the table's rows have them."""
    batch: int
    """n, the inputs of a batch when it starts."""

    def __post_init__(self) -> None:
        if len(self.ramps) != len(self.table.ramp_s_EB):
            raise DataError(f"the table has times of {len(self.table.ramp_s_EB)} ramps, not of {len(self.ramps)}")
        if not 1 <= self.batch <= self.table.batches[-1]:
            raise DataError(f"a batch of {self.batch} is not measured: the largest is {self.table.batches[-1]}")

    @property
    def stock_s(self) -> float:
        """Of a batch without exits."""
        return float(self._block_s_BJ[:, -1].sum())

    def inference_s_J(self, ramp: int) -> FloatArray:
        """A row of the inference time matrix, t[i, j]: with this exit alone, if j of the batch move on (6.3.1)."""
        moving_on_J = np.arange(self.batch + 1)
        exits_JN = np.where(np.arange(self.batch) < moving_on_J[:, None], self._last, ramp)
        return self.slowest_s_K(exits_JN, [ramp])

    def slowest_s_K(self, exits_KN: IntArray, active: Collection[int]) -> FloatArray:
        """Seconds until the last answer of every batch, its inputs leaving after these blocks."""
        return np.asarray(self._until_s_KB(exits_KN, active)[:, -1])

    def mean_s(self, exits_KN: IntArray, active: Collection[int]) -> float:
        """Mean answer time of all inputs: equation 2, of any exits."""
        return float(np.take_along_axis(self._until_s_KB(exits_KN, active), exits_KN, axis=1).mean())

    def violated(self, exits_KN: IntArray, active: Collection[int]) -> float:
        """Share of the batches that take longer than without exits."""
        return float((self.slowest_s_K(exits_KN, active) > self.stock_s * (1 + 1e-9)).mean())

    def batches(self, exits_N: IntArray) -> IntArray:
        """Inputs in order of arrival cut into whole batches, (K, n)."""
        number = len(exits_N) // self.batch
        return exits_N[: number * self.batch].reshape(number, self.batch).astype(np.int64)

    @property
    def _last(self) -> int:
        return len(self.table.block_s_NB) - 1

    @cached_property
    def _block_s_BJ(self) -> FloatArray:
        return _by_inputs(self.table.blocks_at(np.arange(self.batch + 1.0)))

    @cached_property
    def _ramp_s_EJ(self) -> FloatArray:
        return _by_inputs(self.table.ramps_at(np.arange(self.batch + 1.0)))

    def _until_s_KB(self, exits_KN: IntArray, active: Collection[int]) -> FloatArray:
        """Per batch, the seconds after which what leaves after each block has left."""
        blocks = np.arange(self._last + 1)
        inside_KB = (exits_KN[:, :, None] >= blocks).sum(1)
        taken_s_KB = self._block_s_BJ[blocks, inside_KB]
        for ramp in active:
            taken_s_KB[:, ramp] += self._ramp_s_EJ[self.ramps.index(ramp), inside_KB[:, ramp]]
        return np.cumsum(taken_s_KB, axis=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An exit that could be, and what it would have done."""

    ramp: int
    thresholds: Mapping[int, float]
    """Its own, and those of later exits that stay."""
    violated: float
    """Share of the batches slower than without exits; of several windows, in the worst."""
    precision: float
    """Of the model without exits: 1 where nothing is lost; of several windows, in the worst."""
    mean_s: float
    """Mean answer time."""


def best_place(
    windows: Sequence[ExitRecords],
    times: BatchTimes,
    precision: float,
    ramps: Sequence[int],
    *,
    behind: Mapping[int, float] | None = None,
    tail: float = TAIL,
) -> Place | None:
    """The ramp with the least mean answer time of those whose tail is bearable in all windows; None where none is.

    `behind`: exits that stay where they are behind it, with their thresholds.
    """
    found = (place_at(windows, times, precision, ramp, behind or {}) for ramp in ramps)
    bearable = [place for place in found if place is not None and place.violated <= tail]
    return min(bearable, key=lambda place: (place.mean_s, place.ramp), default=None)


def place_at(
    windows: Sequence[ExitRecords], times: BatchTimes, precision: float, ramp: int, behind: Mapping[int, float]
) -> Place | None:
    """With the boldest threshold that keeps the precision in all windows (6.2); None without one."""
    for threshold in GRIDS[windows[0].score]:
        thresholds = {ramp: threshold, **{later: value for later, value in behind.items() if later > ramp}}
        outcomes = [window.outcome(thresholds) for window in windows]
        worst = min(map(normalised_precision, outcomes))
        if worst >= precision:
            batches = [times.batches(outcome.exits_N) for outcome in outcomes]
            return Place(
                ramp=ramp,
                thresholds=thresholds,
                violated=max(times.violated(exits_KN, thresholds) for exits_KN in batches),
                precision=worst,
                mean_s=times.mean_s(np.concatenate(batches), thresholds),
            )
    return None


def normalised_precision(outcome: ExitOutcome) -> float:
    """Accuracy over that of the model without exits (section 7.2); where truth is not known, agreement with it."""
    accuracy, full_accuracy = outcome.accuracy, outcome.full_accuracy
    if accuracy is None or not full_accuracy:
        return outcome.agreement
    return accuracy / full_accuracy


def next_step(score: Score, threshold: float) -> float | None:
    """The boldest of the grid that is more careful; None behind its end."""
    grid = GRIDS[score]
    careful = [value for value in grid if (value > threshold if grid[0] < grid[-1] else value < threshold)]
    return careful[0] if careful else None


def _by_inputs(seconds_RJ: FloatArray) -> FloatArray:
    """By whole numbers of inputs; without any, none."""
    return np.column_stack([np.zeros(len(seconds_RJ)), seconds_RJ[:, 1:]])
