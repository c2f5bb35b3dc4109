"""Prices on latency, ramps, devices and money, and what the rest of a plan costs at least by them: kernels.

At given prices a plan's answer time and everything that it uses up are one sum over its steps, whose least is found
backwards, block by block (a Lagrangian relaxation). It is a bound: further splits wait as on one replica, devices are
used in parts, and hops bound no rate.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from optimizer.compiled import compiled
from optimizer.soonest.tables import (
    RunTables,
    after_split_s,
    after_stage_s,
    block_seconds,
    entry_of,
    may_be_off,
    may_be_on,
    may_go_on,
    ramp_seconds,
    wait_inputs,
)
from optimizer.step import FloatArray, IntArray

GO_ON, CUT, HOP = 0, 1, 2
"""What follows a block: the next of the split; another split of the stage; another stage, after a hop."""


class UnitPrices(NamedTuple):
    """What a unit costs, in units of what is sought."""

    mean: float
    """A second of the mean answer time."""
    latency: float
    """A second of the worst case."""
    ramps: float
    """A second that ramps take beyond what their budget gives for the blocks."""
    device_C: FloatArray
    """A replica."""


class Ends(NamedTuple):
    """What it costs at least to the model's end."""

    inside_NREQ: FloatArray
    """From a block, inside a split of a run and an entry, after a rank; what cannot be is infinite."""
    way_NREQ: npt.NDArray[np.int16]
    """What is best there: 1 where the ramp is active, and twice what follows; HOP with the device's number added."""
    start_NCQ: FloatArray
    """From a block on which a split begins, its wait included, by its device."""
    run_NCQ: IntArray
    """The run that is best then."""


@compiled
def empty_ends(tables: RunTables) -> Ends:
    """Room for all states."""
    num_runs, num_entries, num_ranks = tables.cell_REQ.shape
    num_blocks, num_devices = tables.rank_N.size, tables.count_C.size
    return Ends(
        np.full((num_blocks, num_runs, num_entries, num_ranks), np.inf),
        np.zeros((num_blocks, num_runs, num_entries, num_ranks), dtype=np.int16),
        np.full((num_blocks, num_devices, num_ranks), np.inf),
        np.zeros((num_blocks, num_devices, num_ranks), dtype=np.int64),
    )


@compiled
def price_to_end(tables: RunTables, prices: UnitPrices, ends: Ends) -> None:
    """Fill the costs, last block first, of ends that are empty."""
    num_runs, num_entries, num_ranks = tables.cell_REQ.shape
    for block in range(tables.rank_N.size - 1, -1, -1):
        for run in range(num_runs):
            for entry in range(num_entries):
                if tables.enters_E[entry] == 0.0:  # its batch would never be full
                    continue
                for rank in range(entry, num_ranks):
                    if tables.after_Q[rank] <= block:
                        _price_state(tables, prices, ends, block, run, entry, rank)
        _price_starts(tables, prices, ends, block)


@compiled
def _price_starts(tables: RunTables, prices: UnitPrices, ends: Ends, block: int) -> None:
    for rank in range(tables.after_Q.size):
        entry = entry_of(tables, rank)
        if tables.after_Q[rank] > block or tables.enters_E[entry] == 0.0:
            continue
        waiting = (prices.mean * tables.unanswered_Q[rank] / 2 + prices.latency) / tables.rate_per_s
        for run in range(tables.device_R.size):
            device = tables.device_R[run]
            cost = waiting * wait_inputs(tables, run, entry) + ends.inside_NREQ[block, run, entry, rank]
            if cost < ends.start_NCQ[block, device, rank]:
                ends.start_NCQ[block, device, rank] = cost
                ends.run_NCQ[block, device, rank] = run


@compiled
def _price_state(
    tables: RunTables, prices: UnitPrices, ends: Ends, block: int, run: int, entry: int, rank: int
) -> None:
    """The cheapest of all ways on from a block, with the block itself.

    A second of a run costs by the inputs that wait for an answer in it, all its inputs, and the device's part.
    """
    device_s = tables.rate_per_s * tables.enters_E[entry] / tables.batch_R[run]
    second = prices.mean * tables.unanswered_Q[rank] + prices.latency + prices.device_C[tables.device_R[run]] * device_s
    block_s = block_seconds(tables, block, run, entry, rank)
    here = (second - prices.ramps * tables.ramp_budget) * block_s
    for active in range(2):
        now = rank
        if active == 0 and not may_be_off(tables, block):
            continue
        if active == 1:
            if not may_be_on(tables, block, rank):
                continue
            here += (second + prices.ramps) * ramp_seconds(tables, block, run, entry, rank)
            now = tables.rank_N[block]
        after, way = _after(tables, prices, ends, block, run, entry, now, active)
        if here + after < ends.inside_NREQ[block, run, entry, rank]:
            ends.inside_NREQ[block, run, entry, rank] = here + after
            ends.way_NREQ[block, run, entry, rank] = active + 2 * way


@compiled
def _after(
    tables: RunTables, prices: UnitPrices, ends: Ends, block: int, run: int, entry: int, rank: int, active: int
) -> tuple[float, int]:
    """The cheapest way on once a ramp is on or off, and which it is."""
    if block + 1 == tables.rank_N.size:
        return 0.0, GO_ON
    best, way = np.inf, GO_ON
    if may_go_on(tables, block, active):
        best = ends.inside_NREQ[block + 1, run, entry, rank]
    second = prices.mean * tables.unanswered_Q[rank] + prices.latency
    if tables.may_split:
        cost = ends.start_NCQ[block + 1, tables.device_R[run], rank]
        cost += second * after_split_s(tables, block, run, entry, rank)
        if cost < best:
            best, way = cost, CUT
    if tables.may_hop:
        hop = second * after_stage_s(tables, block, run, entry, rank)
        for device in range(tables.count_C.size):
            cost = hop + ends.start_NCQ[block + 1, device, rank]
            if cost < best:
                best, way = cost, HOP + device
    return best, way


@compiled
def cheapest_walk(tables: RunTables, ends: Ends, device: int) -> FloatArray:
    """What the cheapest plan from a device on uses: mean answer time, latency, seconds of ramps, then devices."""
    used = np.zeros(3 + tables.count_C.size)
    block, rank, entry, starts = 0, 0, 0, True
    run = ends.run_NCQ[0, device, 0]
    while block < tables.rank_N.size:
        if starts:
            wait_s = wait_inputs(tables, run, entry) / tables.rate_per_s
            used[0] += tables.unanswered_Q[rank] * wait_s / 2
            used[1] += wait_s
        way = ends.way_NREQ[block, run, entry, rank]
        block_s, ramp_s = block_seconds(tables, block, run, entry, rank), 0.0
        if way % 2 == 1:
            ramp_s = ramp_seconds(tables, block, run, entry, rank)
        used[0] += tables.unanswered_Q[rank] * (block_s + ramp_s)
        used[1] += block_s + ramp_s
        used[2] += ramp_s - tables.ramp_budget * block_s
        work_s = tables.enters_E[entry] * (block_s + ramp_s) / tables.batch_R[run]
        used[3 + tables.device_R[run]] += tables.rate_per_s * work_s
        if way % 2 == 1:
            rank = tables.rank_N[block]
        starts, next_device = way // 2 != GO_ON, tables.device_R[run]
        after_s = after_split_s(tables, block, run, entry, rank)
        if way // 2 >= HOP:
            next_device = way // 2 - HOP
            after_s = after_stage_s(tables, block, run, entry, rank)
        used[0] += tables.unanswered_Q[rank] * after_s
        used[1] += after_s
        block += 1
        if starts:
            run, entry = ends.run_NCQ[block, next_device, rank], entry_of(tables, rank)
    return used
