"""Times of batches that shrink at exits: PAME's inference time matrix (section 6.3.1), and recorded batches.

Every recorded batch is timed by how many of its own inputs move on, not by a mean.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from profiles.records import IntArray, batch_counts
from profiles.scores import FloatArray
from profiles.table import LatencyTable

Seconds = Callable[[int, int | None, FloatArray], FloatArray]
"""Maps a stage's first block, the exit that ends it (None: the model's end) and batch sizes (X) to seconds (X).
They include the exit's head, its check, and the copy of the inputs that move on."""
ROUNDING = 1e-9
"""Relative difference below which two times are equal. Sums over stages and over the model round differently."""


def seconds_of(table: LatencyTable, ramps: Sequence[int]) -> Seconds:
    """Returns the seconds of stages by a latency table, whose rows belong to `ramps`, in order.

    They are linear between measured sizes, as in the cost model. Ramps are profiled with their check, and their seconds
    include the regrouping that follows an exit (`profiles/measure.py`).
    """
    row_of = {ramp: row for row, ramp in enumerate(ramps)}

    def seconds(first: int, exit_: int | None, sizes_X: FloatArray) -> FloatArray:
        end = len(table.block_s_NB) if exit_ is None else exit_ + 1
        blocks_X = table.blocks_at(sizes_X)[first:end].sum(0)
        return np.asarray(blocks_X if exit_ is None else blocks_X + table.ramps_at(sizes_X)[row_of[exit_]])

    return seconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimeMatrix:
    """Times by candidate exit (E) and by the number of inputs that move on (J), from 0 to the batch.

    The paper's interval v between these numbers is 1.
    """

    first: int
    """First block of the first of the two stages."""
    exits: tuple[int, ...]
    """The candidates, each given by the block before it."""
    batch: int
    """Inputs of the first stage: the paper's n or, behind an exit, n_l."""
    seconds_EJ: FloatArray
    """t[i, j]: seconds of the whole batch to exit i and then of j inputs to the end."""
    whole_s: float
    """Seconds of the whole batch to the end without an exit, t_0^n in the first step. They must not be exceeded."""

    @property
    def allowed_E(self) -> list[int]:
        """Per candidate, the largest number of inputs that may move on within `whole_s`; -1 if even 0 is too slow."""
        fits_EJ = self.seconds_EJ <= self.whole_s * (1 + ROUNDING)
        return [int(np.logical_and.accumulate(fits_J).sum()) - 1 for fits_J in fits_EJ]


def time_matrix(seconds: Seconds, first: int, exits: Sequence[int], batch: int) -> TimeMatrix:
    """Returns the matrix for a batch that begins at block `first`, and for candidates behind that block."""
    size_1 = np.array([float(batch)])
    sizes_J = np.arange(batch + 1, dtype=np.float64)
    rows = [_row(seconds, first, exit_, size_1, sizes_J) for exit_ in exits]
    return TimeMatrix(
        first=first,
        exits=tuple(exits),
        batch=batch,
        seconds_EJ=np.array(rows).reshape(len(rows), len(sizes_J)),
        whole_s=float(seconds(first, None, size_1)[0]),
    )


def _row(seconds: Seconds, first: int, exit_: int, size_1: FloatArray, sizes_J: FloatArray) -> FloatArray:
    after_J = np.zeros(len(sizes_J))
    if len(sizes_J) > 1:  # without inputs, the rest takes no time
        after_J[1:] = seconds(exit_ + 1, None, sizes_J[1:])
    return np.asarray(seconds(first, exit_, size_1)[0] + after_J)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchTimes:
    """Times of batches that run through a model with exits one after another, without queues."""

    mean_s: float
    """Mean time of all inputs from the start of their batch to their answer."""
    last_s_K: FloatArray
    """Time of each batch until its last answer."""
    whole_s: float
    """Time of a batch without exits."""

    @property
    def tail_s(self) -> float:
        """The mean time of a batch's last answer: the paper's average tail latency (figure 9)."""
        return float(self.last_s_K.mean())

    @property
    def slower(self) -> float:
        """The share of batches whose last answer comes later than without exits."""
        return float((self.last_s_K > self.whole_s * (1 + ROUNDING)).mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """Batches of one size on one accelerator."""

    seconds: Seconds
    size: int
    """n: the inputs of a batch when it starts."""

    def times(self, exits_N: IntArray, active: Collection[int]) -> BatchTimes:
        """Returns the times of recorded inputs in order of arrival, given the block after which each leaves."""
        zeros_K = np.zeros(len(exits_N) // self.size, dtype=np.int64)
        elapsed_s_K, total_s, inside_K, first = zeros_K.astype(np.float64), 0.0, zeros_K + self.size, 0
        for ramp in (*sorted(active), None):
            remaining_K = zeros_K if ramp is None else batch_counts(exits_N > ramp, self.size)
            stage_s_K = self.seconds(first, ramp, inside_K.astype(np.float64))
            elapsed_s_K = elapsed_s_K + np.where(inside_K > 0, stage_s_K, 0.0)
            total_s += float(((inside_K - remaining_K) * elapsed_s_K).sum())
            inside_K, first = remaining_K, 0 if ramp is None else ramp + 1
        whole_s = float(self.seconds(0, None, np.array([float(self.size)]))[0])
        return BatchTimes(mean_s=total_s / (self.size * len(zeros_K)), last_s_K=elapsed_s_K, whole_s=whole_s)
