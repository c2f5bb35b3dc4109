"""Measures what blocks, ramps and splits cost, on the live device."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from experiments.gpu.choice import Costs
from experiments.gpu.side import Side
from experiments.gpu.workbench import Workbench, early_exit, no_collections, serial_every_ramp, stock

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


def measure_costs(bench: Workbench, sizes: Sequence[int], seconds: float) -> Costs:
    """By batch size, from three plans under which nobody leaves, so that all their batches are full.

    With R ramps, N blocks and t a batch's seconds: a ramp is (all ramps on - stock) / R, a split is (a cut after every
    ramp - all ramps on) / R, a block is (stock - one split) / N. What selecting survivors costs is in none of them.
    """
    rows = [_costs_of(bench, size, seconds) for size in sizes]
    block_s, ramp_s, split_s = zip(*rows, strict=True)
    return Costs(batches=tuple(sizes), block_s=block_s, ramp_s=ramp_s, split_s=split_s)


def _costs_of(bench: Workbench, batch: int, seconds: float) -> tuple[float, float, float]:
    blocks, ramps = bench.size.num_blocks, bench.exits.ramps
    plans = (stock(blocks, batch), early_exit(blocks, ramps, batch), serial_every_ramp(blocks, ramps, batch))
    bench.prepare(plans)
    sides = [bench.side(plan, leaving=False) for plan in plans]
    numbers = [num_inputs(bench, side, batch, seconds) for side in sides]
    rounds = [
        [batch * saturated_s(bench, side, number) / number for side, number in zip(sides, numbers, strict=True)]
        for _ in range(ROUNDS)
    ]
    stock_s, ramps_s, cut_s = (median(column) for column in zip(*rounds, strict=True))
    split_s = max((cut_s - ramps_s) / len(ramps), 0.0)
    return max((stock_s - split_s) / blocks, 0.0), max((ramps_s - stock_s) / len(ramps), 0.0), split_s


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
