"""The least times of each split, minimized over its active ramps: numba kernels over plain arrays.

The least times depend neither on the rate nor on the rest of the plan. They depend on the split's boundaries, device
and batch size, and on the last active ramps before and inside it, which determine the inputs that enter and leave. The
ramps inside are therefore chosen once, here, and the rest of the search does not consider them. E3's T (figure 6) sums
a given profile; here it is a minimum over sets of ramps. A set may have the least latency of an input and another one
the least work of the device, so all Pareto-optimal ones (A) are kept. Ranks and array shapes are those of
`optimizer.search.tables`; E is the end of a split.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optimizer.search.compiled import compiled
from optimizer.search.step import FloatArray, IntArray
from optimizer.search.tables import ALL, CHOOSE, INSIDE, MEAN, NONE, ROUNDING, SPLIT_ENDS, Tables, blocks_s, seconds_at

MOST_SETS = 64
"""The most sets of ramps that are kept per rank. BERT-large with 24 blocks has up to 50 at small batches, most others
one."""


@compiled
def _may_follow(rule: int, entry: int, before: int, rank: int) -> bool:
    """Returns whether `rank` may be the next active ramp after `before` in a split entered at `entry`."""
    return rule == CHOOSE or (rule == ALL and rank == before + 1) or (rule == SPLIT_ENDS and before == entry)


@compiled
def _may_end(rule: int, entry: int, last: int, end: int, after_Q: IntArray) -> bool:
    """Returns whether a split may end at `end` when `last` is the last active ramp."""
    if rule == ALL:
        return last + 1 == after_Q.size or after_Q[last + 1] > end
    if rule == SPLIT_ENDS:
        return last == entry or after_Q[last] == end
    return True


class SplitTimes(NamedTuple):
    """The times of the splits that start at one block and rank, by end and last active ramp."""

    times_EQAK: FloatArray
    """Seconds of an input that runs through the split (INSIDE), and the mean seconds of batches (MEAN)."""
    num_EQ: IntArray
    """The number of sets of ramps; 0 if no split is allowed."""
    before_QA2: IntArray
    """The rank before the last one in a set of ramps, and the index of the set up to there."""


@compiled
def empty_split_times(tables: Tables) -> SplitTimes:
    """Allocates the arrays, which `least_times` fills for one start after the other."""
    num_boundaries, num_ranks = tables.rank_N.size + 1, tables.after_Q.size
    return SplitTimes(
        np.empty((num_boundaries, num_ranks, MOST_SETS, 2)),
        np.zeros((num_boundaries, num_ranks), dtype=np.int64),
        np.zeros((num_ranks, MOST_SETS, 2), dtype=np.int64),
    )


@compiled
def _add_set(
    times_AK: FloatArray, before_A2: IntArray, count: int, times: tuple[float, float], before: int, index: int
) -> int:
    """Adds a set of ramps if no other has both times as short; drops the sets that it beats. Returns their number."""
    inside_s, mean_s, kept = times[INSIDE], times[MEAN], 0
    for other in range(count):
        if times_AK[other, INSIDE] <= inside_s * (1 + ROUNDING) and times_AK[other, MEAN] <= mean_s * (1 + ROUNDING):
            return count
    for other in range(count):
        if times_AK[other, INSIDE] < inside_s or times_AK[other, MEAN] < mean_s:
            times_AK[kept], before_A2[kept] = times_AK[other], before_A2[other]
            kept += 1
    kept = min(kept, MOST_SETS - 1)  # if there are too many, the last one gives way, which differs little
    times_AK[kept, INSIDE], times_AK[kept, MEAN] = inside_s, mean_s
    before_A2[kept, 0], before_A2[kept, 1] = before, index
    return kept + 1


@compiled
def least_times(tables: Tables, run: int, first: int, entry: int, splits: SplitTimes) -> None:
    """Fills the times of the splits first..end-1 of a run that are entered at rank `entry`."""
    splits.num_EQ[:] = 0
    if not tables.fits_RE[run, entry]:
        return
    device, rule, after_Q, num_blocks = tables.device_R[run], tables.rule, tables.after_Q, tables.rank_N.size
    sums_GK, ramp_s_QG, beside_K = tables.sums_CGK[device], tables.ramp_s_CQG[device], tables.beside_CK[device]
    weight_KQ, head_s_KQ = tables.weight_KREQ[:, run, entry], tables.head_s_KREQ[:, run, entry]
    cell_KQ, part_KQ = tables.cell_KREQ[:, run, entry], tables.part_KREQ[:, run, entry]
    rows_cell_KQ, rows_part_KQ = tables.rows_cell_KREQ[:, run, entry], tables.rows_part_KREQ[:, run, entry]
    times_QAK = np.empty((after_Q.size, MOST_SETS, 2))  # until just after each ramp
    num_Q = np.zeros(after_Q.size, dtype=np.int64)
    run_K = np.zeros(2)
    times_QAK[entry, 0], num_Q[entry] = 0.0 if first == 0 else tables.begin_s, 1
    for rank in range(entry + 1, after_Q.size):
        end = after_Q[rank]
        if end <= first or rule == NONE:
            continue
        for before in range(entry, rank):
            if num_Q[before] == 0 or not _may_follow(rule, entry, before, rank):
                continue
            for kind in range(2):
                run_s = seconds_at(ramp_s_QG[rank], cell_KQ[kind, before], part_KQ[kind, before])
                cell, part = rows_cell_KQ[kind, before], rows_part_KQ[kind, before]
                run_s += blocks_s(sums_GK, cell, part, max(first, after_Q[before]), end)
                run_K[kind] = weight_KQ[kind, before] * run_s
            for index in range(num_Q[before]):
                times = times_QAK[before, index, INSIDE] + run_K[INSIDE], times_QAK[before, index, MEAN] + run_K[MEAN]
                num_Q[rank] = _add_set(times_QAK[rank], splits.before_QA2[rank], num_Q[rank], times, before, index)
    answered = tables.batch_R[run] / tables.enters_E[entry]
    for last in range(entry, after_Q.size):
        for end in range(max(first + 1, after_Q[last]), num_blocks + 1):
            if num_Q[last] == 0 or not _may_end(rule, entry, last, end, after_Q):
                continue
            splits.num_EQ[end, last] = num_Q[last]
            rest_s = head_s_KQ[int(end == num_blocks), last] + answered * (beside_K[end] - beside_K[first])
            for kind in range(2):
                cell, part = rows_cell_KQ[kind, last], rows_part_KQ[kind, last]
                own_s = blocks_s(sums_GK, cell, part, max(first, after_Q[last]), end)
                for index in range(num_Q[last]):
                    before_s = times_QAK[last, index, kind]
                    splits.times_EQAK[end, last, index, kind] = before_s + (weight_KQ[kind, last] * own_s + rest_s)
