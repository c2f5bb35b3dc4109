"""What recorded batches take with exits, each by how many of its own inputs move on: nothing of it is a mean."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from optimizer.pame.times import ROUNDING, Seconds
from profiles.batches import IntArray, inside_after
from profiles.scores import FloatArray


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
        ramps = sorted(active)
        return batch_times(self.seconds, ramps, inside_after(exits_N, ramps, self.size), self.size)


def batch_times(seconds: Seconds, ramps: Sequence[int], left_KA: IntArray, size: int) -> BatchTimes:
    """Of batches of `size`, of each of which so many are inside after each active ramp (A, ascending)."""
    now_s_K, answered_s = np.zeros(len(left_KA)), 0.0
    inside_K, first = np.full(len(left_KA), size, dtype=np.int64), 0
    columns = [*zip(ramps, left_KA.T, strict=True), (None, np.zeros(len(left_KA), dtype=np.int64))]
    for ramp, left_K in columns:
        stage_s_K = seconds(first, ramp, inside_K.astype(np.float64))
        now_s_K = now_s_K + np.where(inside_K > 0, stage_s_K, 0.0)
        answered_s += float(((inside_K - left_K) * now_s_K).sum())
        inside_K, first = left_K, 0 if ramp is None else ramp + 1
    whole_s = float(seconds(0, None, np.array([float(size)]))[0])
    return BatchTimes(mean_s=answered_s / (size * len(left_KA)), last_s_K=now_s_K, whole_s=whole_s)
