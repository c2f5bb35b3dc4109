"""Least time of every split: numba kernels over plain arrays.

The least time of a split does not depend on the rate, nor on the rest of the plan: only on where it starts and ends,
its device and batch, and the last ramps before and inside it, which fix who enters and who leaves. So the ramps inside
are chosen here once, and the rest of the search never sees them. Where E3's T (figure 6) sums a given profile, this is
a minimum over sets of ramps.

Legend: *rank* 0 stands for "no ramp yet", rank r + 1 for the problem's r-th ramp. `share_Q` holds, per rank, the share
of inputs inside the model after it; `after_Q` the first block after it. A ramp rule says which ramps a plan may use.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from optimizer.compiled import compiled

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

CHOOSE, ALL, NONE, SPLIT_ENDS = 0, 1, 2, 3
"""Ramp rules: any set; every ramp of the model; no ramp; only at the ends of splits (E3 section 5.8.6)."""


@compiled
def _run_s(sums_GK: FloatArray, cell: int, part: float, first: int, end: int) -> float:
    """Seconds of blocks first..end-1 at one batch, given as a cell of measured batches and the part of the way."""
    low: float = sums_GK[cell, end] - sums_GK[cell, first]
    if part == 0.0:
        return low
    high: float = sums_GK[cell + 1, end] - sums_GK[cell + 1, first]
    return low + part * (high - low)


@compiled
def locate(batches_G: FloatArray, batch: float) -> tuple[int, float]:
    """The measured sizes around a batch: linear between them, constant below the smallest."""
    if batch <= batches_G[0]:
        return 0, 0.0
    cell = 0
    while cell + 2 < batches_G.size and batches_G[cell + 1] <= batch:
        cell += 1
    if cell + 1 >= batches_G.size:
        return cell, 0.0
    part = (batch - batches_G[cell]) / (batches_G[cell + 1] - batches_G[cell])
    if part >= 1.0:
        return cell + 1, 0.0
    return cell, part


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
    batches_G: FloatArray,
    sums_GK: FloatArray,
    ramp_s_EG: FloatArray,
    share_Q: FloatArray,
    after_Q: IntArray,
    least_EQ: FloatArray,
    before_Q: IntArray,
) -> None:
    """Fill `least_EQ[end, last]` with the seconds of the split first..end-1 entered at rank `entry`; inf: not allowed.

    `before_Q[rank]` becomes the active ramp before `rank` in the best split that holds both.
    """
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
        cell_Q[rank], part_Q[rank] = locate(batches_G, batch * share_Q[rank] / share_Q[entry])
    for rank in range(entry + 1, num_ranks):
        end = after_Q[rank]
        if end <= first or rule == 2:
            continue
        for before in range(entry, rank):
            if upto_Q[before] == np.inf or not _may_follow(rule, entry, before, rank):
                continue
            start = max(first, after_Q[before])
            cell, part = cell_Q[before], part_Q[before]
            ramp_s = ramp_s_EG[rank - 1, cell]
            if part > 0.0:
                ramp_s += part * (ramp_s_EG[rank - 1, cell + 1] - ramp_s)
            seconds = upto_Q[before] + _run_s(sums_GK, cell, part, start, end) + ramp_s
            if seconds < upto_Q[rank]:
                upto_Q[rank] = seconds
                before_Q[rank] = before
    for last in range(entry, num_ranks):
        if upto_Q[last] == np.inf:
            continue
        start = max(first, after_Q[last])
        for end in range(max(first + 1, after_Q[last]), num_blocks + 1):
            if _may_end(rule, entry, last, end, after_Q):
                least_EQ[end, last] = upto_Q[last] + _run_s(sums_GK, cell_Q[last], part_Q[last], start, end)
