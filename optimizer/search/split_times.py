"""The least time of each split, minimized over its active ramps: numba kernels over plain arrays.

The least time depends neither on the rate nor on the rest of the plan. It depends on the split's boundaries, device and
batch size, and on the last active ramps before and inside it, which determine the inputs that enter and leave. The
ramps inside are therefore chosen once, here, and the rest of the search does not consider them. E3's T (figure 6) sums
a given profile; here it is a minimum over sets of ramps. Ranks and array shapes are those of `optimizer.search.step`.
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
    most_batch: float
    """The largest batch that a plan may have."""
    steps: int
    """1 if inputs are generation steps: a block is then skipped if no input of the batch reaches it."""
    late_head: int
    """1 if the vocabulary head runs once, at the split's end, for all inputs that leave."""


class Ranks(NamedTuple):
    """A problem's ramps in ascending order, after rank 0, which stands for no ramp."""

    share_Q: FloatArray
    after_Q: IntArray
    rows_Q: FloatArray
    """Rows that blocks compute after the ramp, per input of the service: inputs that remain, and tokens whose keys and
    values are filled in (`Generation.tokens_per_step`)."""


def seconds_of(problem: PlanProblem, device: str) -> DeviceSeconds:
    """Returns the latencies of a device as arrays for kernels."""
    table, generation = problem.latency[device], problem.generation
    body, beside_K = table, np.zeros(problem.num_blocks + 1)
    head_s_G, begin_s, most_batch = np.zeros(len(table.batches)), 0.0, np.inf
    ramp_s_EB, late_head = table.ramp_s_EB, False
    if generation is not None:
        steps, late_head = step_table(problem, device), generation.late_head
        body, head_s_G, ramp_s_EB = steps.body, steps.head_s_B, steps.ramp_s_EB
        np.cumsum(steps.prompt_s_N / generation.num_steps, out=beside_K[1:])
        begin_s, most_batch = float(generation.regroup_s), float(generation.batch_limit)
    sums_GK = np.zeros((len(table.batches), len(body.block_s_NB) + 1))
    np.cumsum(body.block_s_NB.T, axis=1, out=sums_GK[:, 1:])
    ramp_s_EG = np.array(ramp_s_EB, dtype=float, order="C")
    sizes_G = np.array(table.batches, dtype=float)
    flags = int(generation is not None), int(late_head)
    return DeviceSeconds(sizes_G, sums_GK, ramp_s_EG, beside_K, head_s_G, begin_s, most_batch, *flags)


def ranks_of(problem: PlanProblem) -> Ranks:
    """Returns the problem's ramps by rank."""
    shares = [1.0, *(problem.share_after(ramp) for ramp in problem.ramps)]
    rows = shares if problem.generation is None else [problem.generation.tokens_per_step(share) for share in shares]
    after_Q = np.array([0, *(ramp + 1 for ramp in problem.ramps)], dtype=np.int64)
    return Ranks(np.array(shares), after_Q, np.array(rows))


@compiled
def _may_follow(rule: int, entry: int, before: int, rank: int) -> bool:
    """Returns whether `rank` may be the next active ramp after `before` in a split entered at `entry`."""
    if rule == 0:
        return True
    if rule == 1:
        return rank == before + 1
    if rule == 3:
        return before == entry
    return False


@compiled
def _may_end(rule: int, entry: int, last: int, end: int, after_Q: IntArray) -> bool:
    """Returns whether a split may end at `end` when `last` is the last active ramp."""
    if rule == 1:
        return last + 1 == after_Q.size or after_Q[last + 1] > end
    if rule == 3:
        return last == entry or after_Q[last] == end
    return True


@compiled
def not_empty_probability(steps: int, inside: float, batch: float) -> float:
    """Returns the probability that any step remains if `inside` remain on average; 1 if inputs are not steps."""
    probability: float = 1.0 - max(0.0, 1.0 - inside / batch) ** batch if steps == 1 else 1.0
    return probability


@compiled
def _head_s(device: DeviceSeconds, batch: float, inside: float, is_last: bool) -> float:
    """Returns the expected seconds of the vocabulary head at the end of a split where `inside` inputs remain."""
    rows = inside if is_last else 0.0
    if device.late_head == 1:
        rows = batch if is_last else batch - inside
    if rows <= 0.0:
        return 0.0
    probability = not_empty_probability(device.steps, rows, batch)
    cell, part = locate(device.sizes_G, rows / probability)
    seconds: float = probability * seconds_at(device.head_s_G, cell, part)
    return seconds


@compiled
def least_times(
    rule: int, first: int, entry: int, batch: float, device: DeviceSeconds, ranks: Ranks, least_EQ: FloatArray,
    before_Q: IntArray,
) -> None:  # fmt: skip
    """Fills `least_EQ[end, last]` with the seconds of the split first..end-1 entered at rank `entry`; inf: not allowed.

    `before_Q[rank]` becomes the predecessor of the active ramp `rank` in the best split.
    """
    sums_GK, share_Q, after_Q, rows_Q = device.sums_GK, ranks.share_Q, ranks.after_Q, ranks.rows_Q
    num_ranks = share_Q.size
    num_blocks = sums_GK.shape[1] - 1
    least_EQ[:] = np.inf
    answered = batch / share_Q[entry]
    if batch > device.most_batch or answered * rows_Q[entry] > device.sizes_G[-1] * (1 + ROUNDING):
        return
    upto_Q = np.full(num_ranks, np.inf)  # seconds until just after each ramp
    cell_Q = np.zeros(num_ranks, dtype=np.int64)  # position of the rows that blocks compute
    part_Q = np.zeros(num_ranks)
    own_cell_Q = np.zeros(num_ranks, dtype=np.int64)  # position of the remaining inputs alone, which ramps compute
    own_part_Q = np.zeros(num_ranks)
    occupied_Q = np.ones(num_ranks)  # probability that any input remains
    upto_Q[entry] = 0.0 if first == 0 else device.begin_s
    for rank in range(entry, num_ranks):
        if rank != entry and after_Q[rank] <= first:
            continue
        inside = batch_inside(share_Q, entry, rank, batch)
        probability = not_empty_probability(device.steps, inside, batch)
        occupied_Q[rank] = probability
        if probability > 0.0:
            own_cell_Q[rank], own_part_Q[rank] = locate(device.sizes_G, inside / probability)
            cell_Q[rank], part_Q[rank] = locate(device.sizes_G, batch * rows_Q[rank] / share_Q[entry] / probability)
    for rank in range(entry + 1, num_ranks):
        end = after_Q[rank]
        if end <= first or rule == 2:
            continue
        for before in range(entry, rank):
            if upto_Q[before] == np.inf or not _may_follow(rule, entry, before, rank):
                continue
            start = max(first, after_Q[before])
            ramp_s = seconds_at(device.ramp_s_EG[rank - 1], own_cell_Q[before], own_part_Q[before])
            blocks_s = run_s(sums_GK, cell_Q[before], part_Q[before], start, end)
            seconds = upto_Q[before] + occupied_Q[before] * blocks_s + occupied_Q[before] * ramp_s
            if seconds < upto_Q[rank]:
                upto_Q[rank] = seconds
                before_Q[rank] = before
    for last in range(entry, num_ranks):
        if upto_Q[last] == np.inf:
            continue
        start = max(first, after_Q[last])
        for end in range(max(first + 1, after_Q[last]), num_blocks + 1):
            if _may_end(rule, entry, last, end, after_Q):
                seconds = upto_Q[last] + occupied_Q[last] * run_s(sums_GK, cell_Q[last], part_Q[last], start, end)
                seconds += _head_s(device, batch, batch_inside(share_Q, entry, last, batch), end == num_blocks)
                least_EQ[end, last] = seconds + answered * (device.beside_K[end] - device.beside_K[first])
