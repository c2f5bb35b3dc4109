"""The least times of each split, minimized over its active ramps: numba kernels over plain arrays.

The least times depend neither on the rate nor on the rest of the plan. They depend on the split's boundaries, device
and batch size, and on the last active ramps before and inside it, which determine the inputs that enter and leave. The
ramps inside are therefore chosen once, here, and the rest of the search does not consider them. E3's T (figure 6) sums
a given profile; here it is a minimum over sets of ramps. A set may have the least latency of an input and another one
the least work of the device, so all Pareto-optimal ones (A) are kept. Ranks and array shapes are those of
`optimizer.search.step`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optimizer.generation.steps import step_table
from optimizer.problems.problem import PlanProblem
from optimizer.search.compiled import compiled
from optimizer.search.step import FloatArray, IntArray, batch_inside, locate, run_s, seconds_at

# Relative tolerance of batch sizes, far below the distance between measured sizes.
ROUNDING = 1e-9
MOST_SETS = 64
"""The most sets of ramps that are kept per rank. BERT-large with 24 blocks has up to 50 at small batches, most others
one."""
INSIDE, MEAN = 0, 1
"""The two times of a split (K): that of an input that runs through it, and the mean time of batches."""
CHOOSE, ALL, NONE, SPLIT_ENDS = 0, 1, 2, 3
"""Ramp rules: any set, all ramps, no ramps, or only ramps at the ends of splits (E3 section 5.8.6)."""


class DeviceSeconds(NamedTuple):
    """Latencies of one device, by measured batch size."""

    sizes_G: FloatArray
    sums_GK: FloatArray
    """Prefix sums of block seconds: all blocks before each boundary."""
    ramp_s_EG: FloatArray
    beside_K: FloatArray
    """Prefix sums of the prompts' seconds per generation step; 0 if inputs are not steps."""
    head_s_G: FloatArray
    """Seconds of the vocabulary head after the last block."""
    begin_s: float
    """Additional seconds of a batch that begins after the first block."""
    least_batch: float
    most_batch: float
    """The smallest and the largest batch that a plan may have."""
    unit: float
    """The size of one input (`PlanProblem.tokens_per_input`)."""
    steps: int
    """1 if inputs are generation steps: their latency then is a mean as well."""
    late_head: int
    """1 if the vocabulary head runs once, at the split's end, for all inputs that leave."""


class Ranks(NamedTuple):
    """A problem's ramps in ascending order, after rank 0, which stands for no ramp."""

    share_Q: FloatArray
    after_Q: IntArray
    rows_Q: FloatArray
    """Rows that blocks compute after the ramp, per input of the service: inputs that remain, and tokens whose keys and
    values are filled in (`Generation.tokens_per_step`)."""


def seconds_of(problem: PlanProblem, device: str, batch: int | None) -> DeviceSeconds:
    """Returns the latencies of a device as arrays for kernels. With `batch`, plans have this size alone."""
    table, generation = problem.latency[device], problem.generation
    body, beside_K = table, np.zeros(problem.num_blocks + 1)
    head_s_G, begin_s = np.zeros(len(table.batches)), 0.0
    least_batch, most_batch = (0.0, np.inf) if batch is None else (float(batch), float(batch))
    ramp_s_EB, late_head = table.ramp_s_EB, False
    if generation is not None:
        steps, late_head = step_table(problem, device), generation.late_head
        body, head_s_G, ramp_s_EB = steps.body, steps.head_s_B, steps.ramp_s_EB
        np.cumsum(steps.prompt_s_N / generation.num_steps, out=beside_K[1:])
        begin_s, most_batch = float(generation.regroup_s), min(most_batch, float(generation.batch_limit))
    sums_GK = np.zeros((len(table.batches), len(body.block_s_NB) + 1))
    np.cumsum(body.block_s_NB.T, axis=1, out=sums_GK[:, 1:])
    ramp_s_EG = np.array(ramp_s_EB, dtype=float, order="C")
    sizes_G = np.array(table.batches, dtype=float)
    limits = least_batch, most_batch, float(problem.tokens_per_input)
    flags = int(generation is not None), int(late_head)
    return DeviceSeconds(sizes_G, sums_GK, ramp_s_EG, beside_K, head_s_G, begin_s, *limits, *flags)


def ranks_of(problem: PlanProblem) -> Ranks:
    """Returns the problem's ramps by rank."""
    shares = [1.0, *(problem.survival_N[ramp + 1] for ramp in problem.ramps)]
    rows = shares if problem.generation is None else [problem.generation.tokens_per_step(share) for share in shares]
    after_Q = np.array([0, *(ramp + 1 for ramp in problem.ramps)], dtype=np.int64)
    return Ranks(np.array(shares), after_Q, np.array(rows))


@compiled
def _may_follow(rule: int, entry: int, before: int, rank: int) -> bool:
    """Returns whether `rank` may be the next active ramp after `before` in a split entered at `entry`."""
    return rule == CHOOSE or (rule == ALL and rank == before + 1) or (rule == SPLIT_ENDS and before == entry)


@compiled
def _may_end(rule: int, entry: int, last: int, end: int, after_Q: IntArray) -> bool:
    """Returns whether a split may end at `end` when `last` is the last active ramp."""
    if rule == 1:
        return last + 1 == after_Q.size or after_Q[last + 1] > end
    if rule == 3:
        return last == entry or after_Q[last] == end
    return True


@compiled
def not_empty_probability(unit: float, inside: float, batch: float) -> float:
    """Returns the probability that any input of a batch remains if `inside` remains on average."""
    probability: float = 1.0 - max(0.0, 1.0 - inside / batch) ** (batch / unit)
    return probability


@compiled
def _head_s(device: DeviceSeconds, batch: float, inside: float, is_last: bool) -> float:
    """Returns the expected seconds of the vocabulary head at the end of a split where `inside` inputs remain."""
    rows = inside if is_last else 0.0
    if device.late_head == 1:
        rows = batch if is_last else batch - inside
    if rows <= 0.0:
        return 0.0
    probability = not_empty_probability(device.unit, rows, batch)
    cell, part = locate(device.sizes_G, rows / probability)
    seconds: float = probability * seconds_at(device.head_s_G, cell, part)
    return seconds


class SplitTimes(NamedTuple):
    """The times of the splits that start at one block and rank, by end and last active ramp."""

    times_EQAK: FloatArray
    """Seconds of an input that runs through the split (INSIDE), and the mean seconds of batches (MEAN)."""
    num_EQ: IntArray
    """The number of sets of ramps; 0 if no split is allowed."""
    before_QA2: IntArray
    """The rank before the last one in a set of ramps, and the index of the set up to there."""


@compiled
def empty_split_times(num_blocks: int, num_ranks: int) -> SplitTimes:
    """Allocates the arrays, which `least_times` fills for one start after the other."""
    return SplitTimes(
        np.empty((num_blocks + 1, num_ranks, MOST_SETS, 2)),
        np.zeros((num_blocks + 1, num_ranks), dtype=np.int64),
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
def least_times(
    rule: int, first: int, entry: int, batch: float, device: DeviceSeconds, ranks: Ranks, splits: SplitTimes
) -> None:
    """Fills the times of the splits first..end-1 that are entered at rank `entry`."""
    sums_GK, share_Q, after_Q, rows_Q = device.sums_GK, ranks.share_Q, ranks.after_Q, ranks.rows_Q
    num_ranks, num_blocks = share_Q.size, sums_GK.shape[1] - 1
    splits.num_EQ[:] = 0
    answered = batch / share_Q[entry]
    if answered * rows_Q[entry] > device.sizes_G[-1] * (1 + ROUNDING):
        return
    times_QAK = np.empty((num_ranks, MOST_SETS, 2))  # until just after each ramp
    num_Q = np.zeros(num_ranks, dtype=np.int64)
    weight_QK = np.ones((num_ranks, 2))  # probability that blocks are not skipped
    cell_QK = np.zeros((num_ranks, 2), dtype=np.int64)  # position of the rows that blocks compute
    part_QK = np.zeros((num_ranks, 2))
    own_cell_QK = np.zeros((num_ranks, 2), dtype=np.int64)  # position of the remaining inputs, which ramps compute
    own_part_QK = np.zeros((num_ranks, 2))
    run_K = np.zeros(2)
    times_QAK[entry, 0], num_Q[entry] = 0.0 if first == 0 else device.begin_s, 1
    for rank in range(entry, num_ranks):
        if rank != entry and after_Q[rank] <= first:
            continue
        inside = batch_inside(share_Q, entry, rank, batch)
        for kind in range(2):
            if kind == MEAN or device.steps == 1:
                weight_QK[rank, kind] = not_empty_probability(device.unit, inside, batch)
            weight = weight_QK[rank, kind]
            if weight > 0.0:
                rows = batch * rows_Q[rank] / share_Q[entry]
                own_cell_QK[rank, kind], own_part_QK[rank, kind] = locate(device.sizes_G, inside / weight)
                cell_QK[rank, kind], part_QK[rank, kind] = locate(device.sizes_G, rows / weight)
    for rank in range(entry + 1, num_ranks):
        end = after_Q[rank]
        if end <= first or rule == 2:
            continue
        for before in range(entry, rank):
            if num_Q[before] == 0 or not _may_follow(rule, entry, before, rank):
                continue
            for kind in range(2):
                cell, part = own_cell_QK[before, kind], own_part_QK[before, kind]
                run = seconds_at(device.ramp_s_EG[rank - 1], cell, part)
                cell, part = cell_QK[before, kind], part_QK[before, kind]
                run += run_s(sums_GK, cell, part, max(first, after_Q[before]), end)
                run_K[kind] = weight_QK[before, kind] * run
            for index in range(num_Q[before]):
                times = times_QAK[before, index, INSIDE] + run_K[INSIDE], times_QAK[before, index, MEAN] + run_K[MEAN]
                num_Q[rank] = _add_set(times_QAK[rank], splits.before_QA2[rank], num_Q[rank], times, before, index)
    for last in range(entry, num_ranks):
        for end in range(max(first + 1, after_Q[last]), num_blocks + 1):
            if num_Q[last] == 0 or not _may_end(rule, entry, last, end, after_Q):
                continue
            splits.num_EQ[end, last] = num_Q[last]
            rest_s = _head_s(device, batch, batch_inside(share_Q, entry, last, batch), end == num_blocks)
            rest_s += answered * (device.beside_K[end] - device.beside_K[first])
            for kind in range(2):
                cell, part = cell_QK[last, kind], part_QK[last, kind]
                run = weight_QK[last, kind] * run_s(sums_GK, cell, part, max(first, after_Q[last]), end) + rest_s
                for index in range(num_Q[last]):
                    splits.times_EQAK[end, last, index, kind] = times_QAK[last, index, kind] + run
