"""Least time of every split: numba kernels over plain arrays.

The least time of a split does not depend on the rate, nor on the rest of the plan: only on where it starts and ends,
its device and batch, and the last ramps before and inside it, which fix who enters and who leaves. So the ramps inside
are chosen here once, and the rest of the search never sees them. Where E3's T (figure 6) sums a given profile, this is
a minimum over sets of ramps. Ranks and the shapes of arrays are those of `optimizer.step`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optimizer.compiled import compiled
from optimizer.problem import PlanProblem
from optimizer.step import FloatArray, IntArray, batch_inside, locate, run_s, seconds_at
from profiles.table import LatencyTable

CHOOSE, ALL, NONE, SPLIT_ENDS = 0, 1, 2, 3
"""Ramp rules: any set; every ramp of the model; no ramp; only at the ends of splits (E3 section 5.8.6)."""


class DeviceSeconds(NamedTuple):
    """One device's seconds, over its measured batch sizes."""

    sizes_G: FloatArray
    sums_GK: FloatArray
    """Of all blocks before a boundary."""
    ramp_s_EG: FloatArray


class Ranks(NamedTuple):
    """A problem's ramps, in order; the first rank stands for none."""

    share_Q: FloatArray
    after_Q: IntArray


def seconds_of(table: LatencyTable) -> DeviceSeconds:
    """A latency table as kernels take it."""
    sums_GK = np.zeros((len(table.batches), len(table.block_s_NB) + 1))
    np.cumsum(table.block_s_NB.T, axis=1, out=sums_GK[:, 1:])
    return DeviceSeconds(
        np.array(table.batches, dtype=float), sums_GK, np.array(table.ramp_s_EB, dtype=float, order="C")
    )


def ranks_of(problem: PlanProblem) -> Ranks:
    """Per rank, the share inside the model after it, and the first block after it."""
    shares = [1.0, *(problem.share_after(ramp) for ramp in problem.ramps)]
    return Ranks(np.array(shares), np.array([0, *(ramp + 1 for ramp in problem.ramps)], dtype=np.int64))


@compiled
def _may_follow(rule: int, entry: int, before: int, rank: int) -> bool:
    """Whether `rank` may be the next active ramp after `before` in a split entered at `entry`."""
    if rule == 0:
        return True
    if rule == 1:
        return rank == before + 1
    if rule == 3:
        return before == entry
    return False


@compiled
def _may_end(rule: int, entry: int, last: int, end: int, after_Q: IntArray) -> bool:
    """Whether a split may end at `end` when `last` is the last active ramp."""
    if rule == 1:
        return last + 1 == after_Q.size or after_Q[last + 1] > end
    if rule == 3:
        return last == entry or after_Q[last] == end
    return True


@compiled
def least_times(
    rule: int,
    first: int,
    entry: int,
    batch: float,
    device: DeviceSeconds,
    ranks: Ranks,
    least_EQ: FloatArray,
    before_Q: IntArray,
) -> None:
    """Fill `least_EQ[end, last]` with the seconds of the split first..end-1 entered at rank `entry`; inf: not allowed.

    `before_Q[rank]` becomes the active ramp before `rank` in the best split that holds both.
    """
    sums_GK, share_Q, after_Q = device.sums_GK, ranks.share_Q, ranks.after_Q
    num_ranks = share_Q.size
    num_blocks = sums_GK.shape[1] - 1
    least_EQ[:] = np.inf
    upto_Q = np.full(num_ranks, np.inf)  # seconds until just after each ramp
    cell_Q = np.zeros(num_ranks, dtype=np.int64)
    part_Q = np.zeros(num_ranks)
    upto_Q[entry] = 0.0
    for rank in range(entry, num_ranks):
        if rank != entry and after_Q[rank] <= first:
            continue
        cell_Q[rank], part_Q[rank] = locate(device.sizes_G, batch_inside(share_Q, entry, rank, batch))
    for rank in range(entry + 1, num_ranks):
        end = after_Q[rank]
        if end <= first or rule == 2:
            continue
        for before in range(entry, rank):
            if upto_Q[before] == np.inf or not _may_follow(rule, entry, before, rank):
                continue
            start = max(first, after_Q[before])
            cell, part = cell_Q[before], part_Q[before]
            ramp_s = seconds_at(device.ramp_s_EG[rank - 1], cell, part)
            seconds = upto_Q[before] + run_s(sums_GK, cell, part, start, end) + ramp_s
            if seconds < upto_Q[rank]:
                upto_Q[rank] = seconds
                before_Q[rank] = before
    for last in range(entry, num_ranks):
        if upto_Q[last] == np.inf:
            continue
        start = max(first, after_Q[last])
        for end in range(max(first + 1, after_Q[last]), num_blocks + 1):
            if _may_end(rule, entry, last, end, after_Q):
                least_EQ[end, last] = upto_Q[last] + run_s(sums_GK, cell_Q[last], part_Q[last], start, end)
