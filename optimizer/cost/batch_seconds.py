"""The time of a batch in a split (T in E3), block by block, from a latency table and the survival.

Inputs leave a batch independently. A batch whose inputs have all left skips the other blocks, so a block's mean time
over all batches is less than its time for the mean batch. The inputs that go on do not benefit: their batch is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from earlyexit.network.boundary import Split
from profiles.records import IntArray, batch_counts
from profiles.table import FloatArray, LatencyTable


class BatchSeconds(NamedTuple):
    """Time of a batch in consecutive blocks and their active ramps."""

    inside_s: float
    """Time of an input that runs through all of them. None of its batch's blocks are skipped."""
    ramp_s: float
    """The part of `inside_s` that active ramps take."""
    mean_s: float
    """Mean time of all batches, of which some skip blocks."""
    unanswered_s: float
    """The sum over blocks, weighted by the share of all inputs that reach a block without an answer."""

    @classmethod
    def total(cls, parts: Iterable[BatchSeconds]) -> BatchSeconds:
        """Returns the sum over at least one part, such as over single blocks."""
        return cls(*map(sum, zip(*parts, strict=True)))


def batch_seconds(
    table: LatencyTable,
    ramps: Sequence[int],
    split: Split,
    unanswered_N: Sequence[float],
    size: float | None = None,
    unit: float = 1.0,
) -> BatchSeconds:
    """Returns the times of the mean batch in a split.

    `size` is the size of a batch at its start; by default it is full. An input counts as `unit`. `ramps` are those of
    the model, active or not. `unanswered_N` is the share of all inputs that reach each block without an answer.
    """
    size, blocks = split.batch if size is None else size, []
    insides = expected_batches(split, computed_shares(split, unanswered_N), size)
    for block, inside in zip(range(split.first, split.end), insides, strict=True):
        block_s_B, ramp_s_B = _measured(table, ramps, split, block)
        block_s, ramp_s = (float(np.interp(inside, table.batches, each)) for each in (block_s_B, ramp_s_B))
        mean_s = mean_seconds(table, block_s_B + ramp_s_B, inside, inside / size, size / unit)
        inside_s = block_s + ramp_s
        blocks.append(BatchSeconds(inside_s, ramp_s, mean_s, unanswered_N[block] * inside_s))
    return BatchSeconds.total(blocks)


def _measured(table: LatencyTable, ramps: Sequence[int], split: Split, block: int) -> tuple[FloatArray, FloatArray]:
    """Returns the seconds of a block and of its ramp by measured batch size; 0 for a ramp that is not active."""
    block_s_B = table.block_s_NB[block]
    return block_s_B, table.ramp_s_EB[ramps.index(block)] if block in split.ramps else np.zeros(len(block_s_B))


def mean_seconds(table: LatencyTable, seconds_B: FloatArray, rows: float, share: float, inputs: float) -> float:
    """Returns the mean seconds of a block over all batches, of which some skip it because their inputs have left.

    A batch starts with `inputs` inputs, of which a `share` reaches the block: with a probability p at least one, and
    then rows / p rows on average, because `rows` is the mean of all batches. Exact if times are linear in the rows.
    """
    probability = 1 - max(0.0, 1 - share) ** inputs
    return probability * float(np.interp(rows / probability, table.batches, seconds_B)) if probability else 0.0


def computed_shares(split: Split, unanswered_N: Sequence[float]) -> Sequence[float]:
    """Returns the share of inputs that each block computes: all of them if answered inputs stay."""
    return [1.0] * len(unanswered_N) if split.stays else unanswered_N


def expected_batches(split: Split, share_N: Sequence[float], size: float) -> list[float]:
    """Returns the expected batch at each block. A split that no input reaches is counted as full."""
    enters = share_N[split.first]
    return [size * (share_N[block] / enters if enters else 1.0) for block in range(split.first, split.end)]


def recorded_seconds(table: LatencyTable, ramps: Sequence[int], split: Split, exits_N: IntArray) -> BatchSeconds | None:
    """Returns the mean times of a split over batches of the recorded inputs that reach it, in order.

    `exits_N` holds the block after which each input leaves. Answered inputs that stay are computed as well. Returns
    None if fewer inputs than a batch reach the split.
    """
    entering_N = exits_N if split.stays else exits_N[exits_N >= split.first]
    if len(entering_N) < split.batch:
        return None
    share, blocks = len(entering_N) / len(exits_N), []
    for block in range(split.first, split.end):
        unanswered_K = batch_counts(entering_N >= block, split.batch)
        computed_K = np.full(len(unanswered_K), split.batch) if split.stays else unanswered_K
        block_s_K, ramp_s_K = (
            np.where(computed_K > 0, np.interp(computed_K, table.batches, seconds_B), 0.0)  # an empty batch is skipped
            for seconds_B in _measured(table, ramps, split, block)
        )
        unanswered_s = share * float((unanswered_K / split.batch * (block_s_K + ramp_s_K)).mean())
        ramp_s = float(ramp_s_K.mean())
        inside_s = float(block_s_K.mean()) + ramp_s
        blocks.append(BatchSeconds(inside_s, ramp_s, inside_s, unanswered_s))
    return BatchSeconds.total(blocks)
