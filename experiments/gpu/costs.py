"""Measures what blocks and ramps cost on the live device, and how long a run should be."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np

from experiments.gpu.plans import early_exit, stock
from experiments.gpu.side import Side
from experiments.gpu.workbench import Workbench, no_collections
from profiles.table import LatencyTable

ROUNDS = 3
FIRST_BATCHES = 8
"""Run to warm up, and to see how many inputs make a run as long as it should be."""
MOST_INPUTS = 100_000
"""Of one run: their tokens, and their objects, are all made before it."""


def measured_sizes(batches: Sequence[int]) -> tuple[int, ...]:
    """The batch limits, and every power of two below the largest: batches shrink through those."""
    largest = max(batches)
    powers = [1 << k for k in range(largest.bit_length()) if 1 << k <= largest]
    return tuple(sorted({*powers, *batches}))


def measure_costs(bench: Workbench, sizes: Sequence[int], seconds: float) -> LatencyTable:
    """By batch size, from two plans under which nobody leaves, so that all their batches are full.

    With R ramps, N blocks and t a batch's seconds: a block is stock / N, a ramp (all ramps on - stock) / R; embedding
    and head are spread over the blocks. What selecting survivors costs, or one more split, is in neither.
    """
    block_s, ramp_s = zip(*(_costs_of(bench, size, seconds) for size in sizes), strict=True)
    blocks, ramps = bench.size.num_blocks, len(bench.exits.ramps)
    return LatencyTable(
        batches=tuple(sizes), block_s_NB=np.tile(block_s, (blocks, 1)), ramp_s_EB=np.tile(ramp_s, (ramps, 1))
    )


def _costs_of(bench: Workbench, batch: int, seconds: float) -> tuple[float, float]:
    blocks, ramps = bench.size.num_blocks, bench.exits.ramps
    plans = (stock(blocks, batch), early_exit(blocks, ramps, batch))
    bench.prepare(plans)
    sides = [bench.side(plan, leaving=False) for plan in plans]
    numbers = [num_inputs(bench, side, batch, seconds) for side in sides]
    rounds = [
        [batch * saturated_s(bench, side, number) / number for side, number in zip(sides, numbers, strict=True)]
        for _ in range(ROUNDS)
    ]
    stock_s, ramps_s = (median(column) for column in zip(*rounds, strict=True))
    return stock_s / blocks, max((ramps_s - stock_s) / len(ramps), 0.0)


def num_inputs(bench: Workbench, side: Side, batch: int, seconds: float) -> int:
    """Full batches that take about these seconds; the side is warm afterwards."""
    first = FIRST_BATCHES * batch
    saturated_s(bench, side, first)
    rate_per_s = first / saturated_s(bench, side, first)
    wanted = min(int(rate_per_s * seconds), MOST_INPUTS)
    return max(wanted // batch, FIRST_BATCHES) * batch


def saturated_s(bench: Workbench, side: Side, number: int) -> float:
    """Seconds from queueing that many inputs to the last answer."""
    members = bench.members(number)
    with no_collections():
        return side.saturate(members)
