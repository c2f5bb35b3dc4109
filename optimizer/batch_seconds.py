"""The time of one batch in a split (T in E3), block by block, from a latency table and the survival."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from earlyexit.network.boundary import Split
from profiles.table import LatencyTable


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
