"""What one batch of a split takes, by a latency table and the shares of inputs that stay: E3's T, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from earlyexit.network.boundary import Split
from profiles.table import LatencyTable


def step_seconds(
    table: LatencyTable, ramps: Sequence[int], split: Split, share_N: Sequence[float], size: float | None = None
) -> list[tuple[float, float]]:
    """What one batch of `size` inputs, by default a full one, takes in every block, and in its ramp where it is active.

    `ramps` are all of the model.
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
    """E3's T of a split."""
    return total_s(step_seconds(table, ramps, split, computed_shares(split, unanswered_N), size))


def total_s(steps: Iterable[tuple[float, ...]]) -> float:
    """E3's T: the sum of the seconds of blocks and ramps, which each step begins with."""
    seconds = 0.0
    for block_s, ramp_s, *_ in steps:
        seconds += block_s
        seconds += ramp_s
    return seconds


def computed_shares(split: Split, unanswered_N: Sequence[float]) -> Sequence[float]:
    """Per block, the share of inputs that runs it: all where they stay."""
    return [1.0] * len(unanswered_N) if split.stays else unanswered_N


def expected_batches(split: Split, share_N: Sequence[float], size: float) -> list[float]:
    """Expected batch at each block; a split that nothing reaches is counted as full."""
    enters = share_N[split.first]
    return [size * (share_N[block] / enters if enters else 1.0) for block in range(split.first, split.end)]
