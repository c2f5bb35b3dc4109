"""Prices on latency, ramps, devices and money, and what the rest of a plan costs at least by them: kernels.

At given prices a plan's answer time and everything that it uses up are one sum over its steps, whose least is found
backwards, block by block (a Lagrangian relaxation). It is a bound: further splits wait as on one replica, devices are
used in parts, and hops bound no rate.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optimizer.compiled import compiled
from optimizer.soonest.tables import (
    Tables,
    block_seconds,
    entry_of,
    hop_seconds,
    may_be_off,
    may_be_on,
    may_go_on,
    ramp_seconds,
    wait_inputs,
)
from optimizer.step import FloatArray, IntArray

GO_ON, CUT, HOP = 0, 1, 2
"""What follows a block: the next of the split; another split of the stage; another stage, after a hop."""


class Prices(NamedTuple):
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
    start_NCQ: FloatArray
    """From a block on which a split begins, its wait included, by its device."""
    run_NCQ: IntArray
    """The run that is best then."""


class WayOn(NamedTuple):
    """What is best after a block."""

    cost: float
    active: bool
    how: int
    device: int


@compiled
def empty_ends(tables: Tables) -> Ends:
    """Room for all states."""
    num_runs, num_entries, num_ranks = tables.cell_REQ.shape
    num_blocks, num_devices = tables.rank_N.size, tables.count_C.size
    return Ends(
        np.full((num_blocks, num_runs, num_entries, num_ranks), np.inf),
        np.full((num_blocks, num_devices, num_ranks), np.inf),
        np.zeros((num_blocks, num_devices, num_ranks), dtype=np.int64),
    )


@compiled
def price_to_end(tables: Tables, prices: Prices, ends: Ends) -> float:
    """Fill the costs, last block first; returns that of a whole plan."""
    num_runs, num_entries, num_ranks = tables.cell_REQ.shape
    for block in range(tables.rank_N.size - 1, -1, -1):
        for run in range(num_runs):
            for entry in range(num_entries):
                if tables.enters_E[entry] == 0.0:  # its batch would never be full
                    continue
                for rank in range(entry, num_ranks):
                    if tables.after_Q[rank] <= block:
                        way = best_way_on(tables, prices, ends, block, run, entry, rank)
                        ends.inside_NREQ[block, run, entry, rank] = way.cost
        _price_starts(tables, prices, ends, block)
    least: float = ends.start_NCQ[0, :, 0].min()
    return least


@compiled
def _price_starts(tables: Tables, prices: Prices, ends: Ends, block: int) -> None:
    ends.start_NCQ[block] = np.inf
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
def second_price(tables: Tables, prices: Prices, run: int, entry: int, rank: int) -> float:
    """Of a second of a run: who waits for an answer in it, who runs at all, and the device's part."""
    device_s = tables.rate_per_s * tables.enters_E[entry] / tables.batch_R[run]
    price: float = (
        prices.mean * tables.unanswered_Q[rank] + prices.latency + prices.device_C[tables.device_R[run]] * device_s
    )
    return price


@compiled
def best_way_on(tables: Tables, prices: Prices, ends: Ends, block: int, run: int, entry: int, rank: int) -> WayOn:
    """The cheapest of all ways on from a block, with the block itself."""
    second = second_price(tables, prices, run, entry, rank)
    block_s = block_seconds(tables, block, run, entry, rank)
    here = (second - prices.ramps * tables.ramp_budget) * block_s
    best = WayOn(np.inf, False, GO_ON, 0)
    if may_be_off(tables, block):
        best = _better_of(best, _after(tables, prices, ends, block, run, entry, rank, here, False))
    if may_be_on(tables, block, rank):
        here += (second + prices.ramps) * ramp_seconds(tables, block, run, entry, rank)
        ramp = tables.rank_N[block]
        best = _better_of(best, _after(tables, prices, ends, block, run, entry, ramp, here, True))
    return best


@compiled
def _better_of(one: WayOn, other: WayOn) -> WayOn:
    return other if other.cost < one.cost else one


@compiled
def _after(
    tables: Tables, prices: Prices, ends: Ends, block: int, run: int, entry: int, rank: int, here: float, active: bool
) -> WayOn:
    """Of the ways on once a ramp is on or off."""
    if block + 1 == tables.rank_N.size:
        return WayOn(here, active, GO_ON, 0)
    best, how, on_device = np.inf, GO_ON, tables.device_R[run]
    if may_go_on(tables, active):
        best = ends.inside_NREQ[block + 1, run, entry, rank]
    if tables.may_split:
        cost = ends.start_NCQ[block + 1, on_device, rank]
        if cost < best:
            best, how = cost, CUT
    if tables.may_hop:
        hop_s = hop_seconds(tables, block, run, entry, rank)
        hop = (prices.mean * tables.unanswered_Q[rank] + prices.latency) * hop_s
        for device in range(tables.count_C.size):
            cost = hop + ends.start_NCQ[block + 1, device, rank]
            if cost < best:
                best, how, on_device = cost, HOP, device
    return WayOn(here + best, active, how, on_device)


@compiled
def cheapest_walk(tables: Tables, prices: Prices, ends: Ends) -> FloatArray:
    """What the cheapest plan at these prices uses: mean answer time, latency, seconds of ramps over, then devices."""
    used = np.zeros(3 + tables.count_C.size)
    rank, entry = 0, 0
    run = ends.run_NCQ[0, ends.start_NCQ[0, :, 0].argmin(), 0]
    _wait(tables, used, run, entry, rank)
    for block in range(tables.rank_N.size):
        way = best_way_on(tables, prices, ends, block, run, entry, rank)
        block_s, ramp_s = block_seconds(tables, block, run, entry, rank), 0.0
        if way.active:
            ramp_s = ramp_seconds(tables, block, run, entry, rank)
        used[0] += tables.unanswered_Q[rank] * (block_s + ramp_s)
        used[1] += block_s + ramp_s
        used[2] += ramp_s - tables.ramp_budget * block_s
        work_s = tables.enters_E[entry] * (block_s + ramp_s) / tables.batch_R[run]
        used[3 + tables.device_R[run]] += tables.rate_per_s * work_s
        rank = tables.rank_N[block] if way.active else rank
        if way.how == HOP:
            hop_s = hop_seconds(tables, block, run, entry, rank)
            used[0] += tables.unanswered_Q[rank] * hop_s
            used[1] += hop_s
        if way.how != GO_ON:
            run, entry = ends.run_NCQ[block + 1, way.device, rank], entry_of(tables, rank)
            _wait(tables, used, run, entry, rank)
    return used


@compiled
def _wait(tables: Tables, used: FloatArray, run: int, entry: int, rank: int) -> None:
    wait_s = wait_inputs(tables, run, entry) / tables.rate_per_s
    used[0] += tables.unanswered_Q[rank] * wait_s / 2
    used[1] += wait_s
