"""Recorded batches: how many inputs of a batch move on after an exit, as a distribution.

The cost model knows the mean share that moves on. What a batch takes depends on how many of *its* inputs do, and a
promise about slow batches depends on the worst of them. So recorded inputs are kept in their order of arrival, with
which ramps are sure of each and what those answers cost. Cut into batches they hold, for any set of active ramps and
batch by batch, what PAME's batching pattern matrix (section 6.3.2) counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from earlyexit.errors import DataError
from profiles.records import ExitRecords, check_losses
from profiles.scores import BoolArray, FloatArray
from profiles.table import check_ramps

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedBatches:
    """Inputs in order of arrival (N), one column per ramp (R); every `size` of them are a batch (K whole ones)."""

    num_blocks: int
    ramps: tuple[int, ...]
    """Ascending; of all there is a column, whether a plan switches them on or not."""
    sure_NR: BoolArray
    """Which ramps let each input leave."""
    losses_NR: FloatArray
    """What the answers of those ramps cost against the full model's, in [0, 1]; 0 where a ramp is not sure."""
    size: int
    """Inputs of a batch (the paper's n). What is left after the last whole batch is in none."""
    zero_one: bool = True
    """Whether a loss is 0 or 1 by its nature."""

    def __post_init__(self) -> None:
        check_ramps(self.ramps, self.num_blocks)
        shape = (len(self.sure_NR), len(self.ramps))
        if self.sure_NR.shape != shape or self.losses_NR.shape != shape:
            raise DataError(f"recorded batches of {shape[0]} inputs and {shape[1]} ramps need arrays of that shape")
        if not 1 <= self.size <= len(self.sure_NR):
            raise DataError(f"{len(self)} recorded inputs make no batch of {self.size}; allowed are 1 to {len(self)}")
        check_losses(self.losses_NR, zero_one=self.zero_one)
        if self.losses_NR[~self.sure_NR].any():
            raise DataError("recorded batches hold losses of ramps at which no input leaves")

    @classmethod
    def of_records(
        cls, records: ExitRecords, thresholds: Mapping[int, float], size: int, ramps: Sequence[int] | None = None
    ) -> RecordedBatches:
        """With these thresholds, for `ramps`, by default those that have one; arrivals in order where times are known.

        Raises DataError as `ExitRecords.outcome` does, and where the inputs make no batch.
        """
        ramps = tuple(sorted(thresholds)) if ramps is None else tuple(ramps)
        columns = [records.ramps.index(ramp) for ramp in ramps if ramp in records.ramps]
        order_N = np.arange(len(records)) if records.times_s_N is None else records.times_s_N.argsort(kind="stable")
        sure_NR = records.sure_NR(thresholds)[order_N][:, columns]
        return cls(
            num_blocks=records.num_blocks,
            ramps=ramps,
            sure_NR=sure_NR,
            losses_NR=np.where(sure_NR, records.losses_NR[order_N][:, columns], 0.0),
            size=size,
            zero_one=records.zero_one,
        )

    def __len__(self) -> int:
        """Recorded inputs."""
        return len(self.sure_NR)

    def exits_N(self, active: Sequence[int]) -> IntArray:
        """The block that each input leaves after when exactly these ramps are active.

        Raises DataError for ramps that were not recorded.
        """
        columns, ramps = self._columns(active), sorted(active)
        if not ramps:
            return np.full(len(self), self.num_blocks - 1, dtype=np.int64)
        sure_NA = self.sure_NR[:, columns]
        return np.where(sure_NA.any(1), np.array(ramps)[sure_NA.argmax(1)], self.num_blocks - 1).astype(np.int64)

    def remaining(self, active: Sequence[int]) -> IntArray:
        """How many of every batch are inside after each active ramp, those in ascending order, (K, A)."""
        return inside_after(self.exits_N(active), sorted(active), self.size)

    def _columns(self, active: Sequence[int]) -> list[int]:
        unknown = sorted(set(active) - set(self.ramps))
        if unknown:
            raise DataError(f"no recorded batches of ramps {unknown}; recorded are {list(self.ramps)}")
        return [self.ramps.index(ramp) for ramp in sorted(active)]


def batch_counts(some_N: BoolArray, size: int) -> IntArray:
    """How many inputs of every whole batch are among some (K)."""
    num_batches = len(some_N) // size
    return np.asarray(some_N[: num_batches * size].reshape(num_batches, size).sum(1), dtype=np.int64)


def inside_after(exits_N: IntArray, ramps: Sequence[int], size: int) -> IntArray:
    """How many of every whole batch are inside after each ramp (K, A), if inputs leave after these blocks."""
    columns = [batch_counts(exits_N > ramp, size) for ramp in ramps]
    return np.stack(columns, axis=1) if columns else np.zeros((len(exits_N) // size, 0), dtype=np.int64)
