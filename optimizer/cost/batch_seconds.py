"""The time of one batch in a split (T in E3), block by block, from a latency table and the survival."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from earlyexit.network.boundary import Split
from profiles.records import IntArray, batch_counts
from profiles.table import FloatArray, LatencyTable


def step_seconds(
    table: LatencyTable, ramps: Sequence[int], split: Split, share_N: Sequence[float], size: float | None = None
) -> list[tuple[float, float]]:
    """Returns, per block, the seconds of the block and of its active ramp for one batch.

    `size` is the number of inputs in the batch; by default the batch is full. `ramps` are all ramps of the model.
    """
    steps = []
    batches = expected_batches(split, share_N, split.batch if size is None else size)
    for block, batch in zip(range(split.first, split.end), batches, strict=True):
        block_s, ramp_s = float(np.interp(batch, table.batches, table.block_s_NB[block])), 0.0
        if block in split.ramps:
            ramp_s = float(np.interp(batch, table.batches, table.ramp_s_EB[ramps.index(block)]))
        steps.append((block_s, ramp_s))
    return steps


def split_seconds(
    table: LatencyTable, ramps: Sequence[int], split: Split, unanswered_N: Sequence[float], size: float | None = None
) -> float:
    """Returns the seconds of one batch in a split (T in E3)."""
    return total_s(step_seconds(table, ramps, split, computed_shares(split, unanswered_N), size))


def total_s(steps: Iterable[tuple[float, ...]]) -> float:
    """Returns the sum of the block and ramp seconds, the first two values of each step."""
    seconds = 0.0
    for block_s, ramp_s, *_ in steps:
        seconds += block_s
        seconds += ramp_s
    return seconds


def computed_shares(split: Split, unanswered_N: Sequence[float]) -> Sequence[float]:
    """Returns the share of inputs that each block computes: all of them if answered inputs stay."""
    return [1.0] * len(unanswered_N) if split.stays else unanswered_N


def expected_batches(split: Split, share_N: Sequence[float], size: float) -> list[float]:
    """Returns the expected batch at each block. A split that no input reaches is counted as full."""
    enters = share_N[split.first]
    return [size * (share_N[block] / enters if enters else 1.0) for block in range(split.first, split.end)]


class StepSeconds(NamedTuple):
    """Time of a batch in one block and, if it is active, in the block's ramp."""

    block_s: float
    ramp_s: float
    unanswered_s: float
    """The sum of both, weighted by the share of all inputs that reach the block without an answer."""


def recorded_steps(table: LatencyTable, ramps: Sequence[int], split: Split, exits_N: IntArray) -> list[StepSeconds]:
    """Returns the mean times of the blocks of a split over batches of the recorded inputs that reach it, in order.

    `exits_N` holds the block after which each input leaves. Answered inputs that stay are computed as well. Returns
    nothing if fewer inputs than a batch reach the split.
    """
    entering_N = exits_N if split.stays else exits_N[exits_N >= split.first]
    if len(entering_N) < split.batch:
        return []
    share, steps = len(entering_N) / len(exits_N), []
    for block in range(split.first, split.end):
        unanswered_K = batch_counts(entering_N >= block, split.batch)
        computed_K = np.full(len(unanswered_K), split.batch) if split.stays else unanswered_K
        block_s_K, ramp_s_K = _seconds(table, table.block_s_NB[block], computed_K), np.zeros(len(unanswered_K))
        if block in split.ramps:
            ramp_s_K = _seconds(table, table.ramp_s_EB[ramps.index(block)], computed_K)
        unanswered_s = share * float((unanswered_K / split.batch * (block_s_K + ramp_s_K)).mean())
        steps.append(StepSeconds(float(block_s_K.mean()), float(ramp_s_K.mean()), unanswered_s))
    return steps


def _seconds(table: LatencyTable, seconds_B: FloatArray, sizes_K: IntArray) -> FloatArray:
    """Returns the seconds of batches of these sizes; 0 for an empty batch."""
    return np.where(sizes_K > 0, np.interp(sizes_K, table.batches, seconds_B), 0.0)
