"""What batches take that leave exits smaller: PAME's inference time matrix (section 6.3.1), and recorded batches.

Each recorded batch is timed by how many of its own inputs move on: nothing of it is a mean.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from profiles.records import IntArray, batch_counts
from profiles.scores import FloatArray
from profiles.table import LatencyTable

Seconds = Callable[[int, int | None, FloatArray], FloatArray]
"""From the first block of a stage, the exit that ends it (None: the model's end) and batch sizes in inputs (X) to its
seconds (X). An exit's head, check and the copy of the inputs that move on are in them."""
ROUNDING = 1e-9
"""Times that agree to this are equal: sums over stages and over the whole model round otherwise."""


def seconds_of(table: LatencyTable, ramps: Sequence[int]) -> Seconds:
    """A latency table as the search takes it; `ramps` are its rows, in order.

    Linear between measured sizes, as the cost model is. A profile's ramps were timed with their check; what follows
    an exit as a stage of its own is in its price (`profiles/measure.py`).
    """
    place = {ramp: row for row, ramp in enumerate(ramps)}

    def seconds(first: int, exit_: int | None, sizes_X: FloatArray) -> FloatArray:
        end = len(table.block_s_NB) if exit_ is None else exit_ + 1
        blocks_X = table.blocks_at(sizes_X)[first:end].sum(0)
        return np.asarray(blocks_X if exit_ is None else blocks_X + table.ramps_at(sizes_X)[place[exit_]])

    return seconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimeMatrix:
    """One row per candidate (E), one column per number of inputs that move on (J): from 0 to the batch.

    The paper's interval v, by which numbers are told apart, is 1.
    """

    first: int
    """Block that the first of the two stages begins with."""
    exits: tuple[int, ...]
    """The candidates: the block after which each sits."""
    batch: int
    """Inputs of the first stage: the paper's n, or n_l behind an exit."""
    seconds_EJ: FloatArray
    """t[i, j]: the whole batch to exit i, then j inputs from there to the end."""
    whole_s: float
    """The whole batch to the end without an exit: the time that must not be exceeded, t_0^n in the first step."""

    @property
    def allowed_E(self) -> list[int]:
        """Per candidate the most inputs that may move on: up to there no time is above `whole_s`; -1: not even none."""
        fits_EJ = self.seconds_EJ <= self.whole_s * (1 + ROUNDING)
        return [int(np.logical_and.accumulate(fits_J).sum()) - 1 for fits_J in fits_EJ]


def time_matrix(seconds: Seconds, first: int, exits: Sequence[int], batch: int) -> TimeMatrix:
    """The matrix of the stages that begin with `first` at a batch of `batch`, for candidates behind that block."""
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
    rest_J = np.zeros(len(sizes_J))
    if len(sizes_J) > 1:  # where no input moves on, no time is taken
        rest_J[1:] = seconds(exit_ + 1, None, sizes_J[1:])
    return np.asarray(seconds(first, exit_, size_1)[0] + rest_J)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchTimes:
    """One batch after another through a model with exits, nothing waiting."""

    mean_s: float
    """Of all inputs, from the start of their batch to their answer."""
    last_s_K: FloatArray
    """Per batch, until its last answer."""
    whole_s: float
    """A batch without exits: until all answers."""

    @property
    def tail_s(self) -> float:
        """Mean over batches of the last answer's time: the paper's average tail latency (figure 9)."""
        return float(self.last_s_K.mean())

    @property
    def slower(self) -> float:
        """Share of the batches whose last answer comes later than without exits."""
        return float((self.last_s_K > self.whole_s * (1 + ROUNDING)).mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """Batches of one size on one accelerator."""

    seconds: Seconds
    size: int
    """n, the inputs of a batch when it starts."""

    def times(self, exits_N: IntArray, active: Collection[int]) -> BatchTimes:
        """Of inputs in order of arrival, at least a batch, that leave after these blocks."""
        none_K = np.zeros(len(exits_N) // self.size, dtype=np.int64)
        now_s_K, answered_s, inside_K, first = none_K.astype(np.float64), 0.0, none_K + self.size, 0
        for ramp in (*sorted(active), None):
            left_K = none_K if ramp is None else batch_counts(exits_N > ramp, self.size)
            stage_s_K = self.seconds(first, ramp, inside_K.astype(np.float64))
            now_s_K = now_s_K + np.where(inside_K > 0, stage_s_K, 0.0)
            answered_s += float(((inside_K - left_K) * now_s_K).sum())
            inside_K, first = left_K, 0 if ramp is None else ramp + 1
        whole_s = float(self.seconds(0, None, np.array([float(self.size)]))[0])
        return BatchTimes(mean_s=answered_s / (self.size * len(none_K)), last_s_K=now_s_K, whole_s=whole_s)
