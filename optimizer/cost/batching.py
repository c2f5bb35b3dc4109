"""Times of the exits of one batch on one accelerator, whose answered inputs stay (Apparate) or leave (PAME).

Waits are left out: they are equal for all exits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from profiles.records import ExitOutcome, IntArray, batch_counts
from profiles.scores import FloatArray
from profiles.table import LatencyTable

ROUNDING = 1e-9
"""Relative difference below which two times are equal. Sums over stages and over the model round differently."""
SLOWER = 0.02
"""Largest share of batches that may be slower than without exits (tau_l in PAME)."""


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
    def slower(self) -> float:
        """The share of batches whose last answer comes later than without exits."""
        return float((self.last_s_K > self.whole_s * (1 + ROUNDING)).mean())


@dataclass(frozen=True, kw_only=True, eq=False)
class Batching:
    """Batches of one size on one accelerator."""

    table: LatencyTable
    """Ramps are profiled with their check. Their seconds include the regrouping behind an exit."""
    ramps: tuple[int, ...]
    """The ramps of the table's rows, in order: all ramps of the model, active or not."""
    size: int
    """n: the inputs of a batch when it starts."""
    first: int = 0
    """The block at which a batch starts. Behind an exit, `size` is the paper's n_l."""

    @cached_property
    def block_s_N(self) -> FloatArray:
        """Seconds of each block for a whole batch: with `ramp_s` the "one-time profile" of Apparate, section 3.3."""
        return self.table.blocks_at(np.array(self.size, dtype=np.float64))

    @cached_property
    def ramp_s(self) -> Mapping[int, float]:
        """Seconds of each ramp for a whole batch."""
        return dict(zip(self.ramps, self.table.ramps_at(np.array(self.size, dtype=np.float64)).tolist(), strict=True))

    @cached_property
    def whole_s(self) -> float:
        """Seconds of a whole batch to the model's end without ramps: t_0^n of PAME for batches from block 0 on."""
        return float(self.block_s_N[self.first :].sum())

    def released_s_N(self, active: Collection[int]) -> FloatArray:
        """Returns, per block, the seconds until an answer given after it is released, if answered inputs stay."""
        ramp_s_N = [self.ramp_s[block] if block in active else 0.0 for block in range(len(self.block_s_N))]
        return np.cumsum(self.block_s_N + ramp_s_N)

    def saved(self, outcome: ExitOutcome, active: Collection[int]) -> float:
        """Returns by which share of `whole_s` answers come earlier if inputs stay, on average; below 0 if later."""
        return 1 - float(self.released_s_N(active)[outcome.exits_N].mean()) / self.whole_s

    def seconds(self, first: int, exit_: int | None, sizes_X: FloatArray) -> FloatArray:
        """Returns the seconds (X) of a stage from block `first` to an exit's ramp; None: to the model's end.

        They are linear between measured sizes, as in the cost model.
        """
        end = len(self.table.block_s_NB) if exit_ is None else exit_ + 1
        blocks_X = self.table.blocks_at(sizes_X)[first:end].sum(0)
        return np.asarray(
            blocks_X if exit_ is None else blocks_X + self.table.ramps_at(sizes_X)[self.ramps.index(exit_)]
        )

    def exit_seconds_J(self, exit_: int) -> FloatArray:
        """Returns the seconds of a whole batch to an exit and then of 0 to `size` inputs to the model's end (J).

        This is row i of PAME's inference time matrix t[i, j] (section 6.3.1), with an interval v of 1 input.
        """
        after_J = np.zeros(self.size + 1)
        after_J[1:] = self.seconds(exit_ + 1, None, np.arange(1.0, self.size + 1))  # no inputs take no time
        return np.asarray(self.seconds(self.first, exit_, np.array([float(self.size)]))[0] + after_J)

    def times(self, exits_N: IntArray, active: Collection[int]) -> BatchTimes:
        """Returns the times of recorded inputs in order of arrival, given the block after which each leaves.

        Every batch is timed by how many of its own inputs move on, not by a mean.
        """
        zeros_K = np.zeros(len(exits_N) // self.size, dtype=np.int64)
        elapsed_s_K, total_s, inside_K, first = zeros_K.astype(np.float64), 0.0, zeros_K + self.size, 0
        for ramp in (*sorted(active), None):
            remaining_K = zeros_K if ramp is None else batch_counts(exits_N > ramp, self.size)
            stage_s_K = self.seconds(first, ramp, inside_K.astype(np.float64))
            elapsed_s_K = elapsed_s_K + np.where(inside_K > 0, stage_s_K, 0.0)
            total_s += float(((inside_K - remaining_K) * elapsed_s_K).sum())
            inside_K, first = remaining_K, 0 if ramp is None else ramp + 1
        return BatchTimes(mean_s=total_s / (self.size * len(zeros_K)), last_s_K=elapsed_s_K, whole_s=self.whole_s)
