"""Labels of the search: beginnings of plans up to a block, inside an open split of an open stage: kernels.

The replicas of the open stage are not counted yet. Its work so far gives a lower bound on them. The waits of its
further splits are kept as inputs, and they are multiplied by the replicas when the stage closes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optimizer.search.compiled import compiled
from optimizer.search.step import FloatArray, IntArray, Labels
from optimizer.search.tables import (
    RunTables,
    after_split_s,
    after_stage_s,
    block_seconds,
    crosses_after,
    entry_of,
    hop_seconds,
    may_be_off,
    may_be_on,
    may_go_on,
    ramp_seconds,
    wait_inputs,
)
from optimizer.search.walks import CUT, GO_ON, HOP

RUN, ENTRY, RANK, PARENT, ACTION, IS_ACTIVE, USED = 0, 1, 2, 3, 4, 5, 6
"""Columns of `int_LI`: run and entry of the open split; current rank; parent label in the layer before; what follows
the parent's block (GO_ON, CUT or HOP); whether its ramp is active; from USED on, the closed stages' replicas."""
MEAN, LATENCY, RAMPS, WORK, MEAN_INPUTS, INPUTS, BOUND = 0, 1, 2, 3, 4, 5, 6
"""Columns of `float_LF`: seconds of the mean answer time; seconds of the worst case (both without the waits of the open
stage's further splits); seconds of ramps beyond their budget; device seconds per input of the open stage; inputs that
each of its replicas waits for, weighted by the share without an answer; the same unweighted; bound on the objective."""
NUM_FLOATS = 7
# Relative difference that the order of a sum may cause. It is far below the differences between plans.
ROUNDING = 1e-13
TOLERANCE = 5e-10
# More replicas than any cluster has, but still exact as an integer.
MOST_REPLICAS = 1e15


class RowArrays(NamedTuple):
    """Several rows of prices (V). Each row alone is a valid bound."""

    mean_V: FloatArray
    latency_V: FloatArray
    ramps_V: FloatArray
    work_VC: FloatArray
    """Price of a device that computes."""
    device_VC: FloatArray
    """Price of a device, whose replicas compute and send."""
    limit_V: FloatArray
    """Price of everything that a plan may use."""
    has_objective_V: IntArray
    """1 if the row's price includes the objective, else 0."""
    bound_VNREQ: FloatArray
    """Completion bound: the least price from a block to the end."""


class Cutoffs(NamedTuple):
    """Values beyond which a label is dropped."""

    latency_s: float
    usd_per_hour: float
    ramps: float
    """Seconds of ramps beyond their budget that rounding may cause."""
    value: float
    """Objective of the incumbent."""
    minimizes_worst_case: bool


@compiled
def least_replicas(tables: RunTables, work_s: float) -> int:
    """Returns the smallest number of replicas that reaches the rate."""
    return max(1, int(min(np.ceil(work_s * tables.rate_per_s * (1 - ROUNDING)), MOST_REPLICAS)))


@compiled
def extend_labels(
    tables: RunTables, rows: RowArrays, cutoffs: Cutoffs, block: int, labels: Labels, first: int, output: Labels
) -> tuple[int, int]:
    """Extends labels from `first` on until `output` is full. Returns the number of successors and the next label."""
    most = 2 * (1 + 2 * tables.device_R.size)
    free_C, count, label = np.empty(tables.count_C.size, dtype=np.int64), 0, first
    sums_F, next_F = np.empty(NUM_FLOATS), np.empty(NUM_FLOATS)
    while label < labels.int_LI.shape[0] and count + most <= output.int_LI.shape[0]:
        run, entry, rank = labels.int_LI[label, RUN], labels.int_LI[label, ENTRY], labels.int_LI[label, RANK]
        spent_usd = 0.0
        for device in range(free_C.size):
            used = labels.int_LI[label, USED + device]
            free_C[device] = tables.count_C[device] - used
            spent_usd += used * tables.usd_C[device]
        sums_F[:] = labels.float_LF[label]
        for is_active in range(2):
            seconds, rank_after = block_seconds(tables, block, run, entry, rank), rank
            if is_active == 1:  # adds the ramp to the sums, which hold the block already
                if not may_be_on(tables, block, rank):
                    continue
                seconds, rank_after = ramp_seconds(tables, block, run, entry, rank), tables.rank_N[block]
            _add(tables, sums_F, run, entry, rank, seconds, is_active)
            if is_active == 1 or may_be_off(tables, block):
                count = _write_successors(
                    tables, rows, cutoffs, block, labels, label, sums_F, next_F, run, entry, rank_after, is_active,
                    free_C, spent_usd, output, count,
                )  # fmt: skip
        label += 1
    return count, label


@compiled
def _add(tables: RunTables, sums_F: FloatArray, run: int, entry: int, rank: int, seconds: float, ramp: int) -> None:
    sums_F[MEAN] += tables.unanswered_Q[rank] * seconds
    sums_F[LATENCY] += seconds
    if tables.ramp_budget > 0.0:
        sums_F[RAMPS] += ramp * seconds - (1 - ramp) * tables.ramp_budget * seconds
    sums_F[WORK] += tables.enters_E[entry] * seconds / tables.batch_R[run]


@compiled
def _write_successors(
    tables: RunTables, rows: RowArrays, cutoffs: Cutoffs, block: int, labels: Labels, label: int, sums_F: FloatArray,
    next_F: FloatArray, run: int, entry: int, rank: int, is_active: int, free_C: IntArray, spent_usd: float,
    output: Labels, count: int,
) -> int:  # fmt: skip
    """Writes all successors of a label for one state of the block's ramp, and returns their number."""
    device, is_end = tables.device_R[run], block + 1 == tables.rank_N.size
    after_s, last = 0.0, HOP if tables.may_hop or is_end else CUT
    for action in range(last + 1):
        if is_end and action != HOP:
            continue
        if (action == GO_ON and not may_go_on(tables, block, is_active)) or (action == CUT and not tables.may_split):
            continue
        work_s = sums_F[WORK]
        if action == HOP and not is_end:
            hop_s = hop_seconds(tables, block, run, entry, rank)
            after_s = after_stage_s(tables, block, run, entry, rank)
            work_s = max(work_s, tables.enters_E[entry] * hop_s / tables.batch_R[run])
        replicas = least_replicas(tables, work_s)
        usd = spent_usd + replicas * tables.usd_C[device]
        if replicas > free_C[device] or usd > cutoffs.usd_per_hour * (1 + TOLERANCE):
            continue
        next_F[:] = sums_F
        if action == HOP:
            _close_stage(tables, next_F, replicas, after_s, tables.unanswered_Q[rank])
        elif action == CUT:
            crossing_s = after_split_s(tables, block, run, entry, rank)
            next_F[MEAN] += tables.unanswered_Q[rank] * crossing_s
            next_F[LATENCY] += crossing_s
        count = _write_labels(
            tables, rows, cutoffs, block, labels, label, next_F, run, entry, rank, is_active, action, replicas, output,
            count,
        )  # fmt: skip
    return count


@compiled
def _write_labels(
    tables: RunTables, rows: RowArrays, cutoffs: Cutoffs, block: int, labels: Labels, label: int, sums_F: FloatArray,
    run: int, entry: int, rank: int, is_active: int, action: int, replicas: int, output: Labels, count: int,
) -> int:  # fmt: skip
    """Writes one label for every split that may begin, or a single one if the plan ends or its split goes on."""
    device, is_end = tables.device_R[run], block + 1 == tables.rank_N.size
    begins_split = action != GO_ON and not is_end
    first_run, end_run = (0, tables.device_R.size) if begins_split else (run, run + 1)
    next_entry = entry_of(tables, rank) if begins_split else entry
    if tables.enters_E[next_entry] == 0.0:
        return count
    for next_run in range(first_run, end_run):
        if action == CUT and tables.device_R[next_run] != device:
            continue
        float_F, int_I = output.float_LF[count], output.int_LI[count]
        float_F[:] = sums_F
        int_I[USED:] = labels.int_LI[label, USED:]
        if action == HOP:
            int_I[USED + device] += replicas
        int_I[PARENT], int_I[ACTION], int_I[IS_ACTIVE] = label, action, is_active
        int_I[RUN], int_I[ENTRY], int_I[RANK] = (0, 0, 0) if is_end else (next_run, next_entry, rank)
        if is_end:
            count += _is_feasible(cutoffs, float_F)
            continue
        if begins_split:
            inputs = wait_inputs(tables, next_run, next_entry)
            if action == CUT and not crosses_after(tables, block):
                float_F[MEAN_INPUTS] += tables.unanswered_Q[rank] * inputs / 2
                float_F[INPUTS] += inputs
            else:
                float_F[MEAN] += tables.unanswered_Q[rank] * inputs / 2 / tables.rate_per_s
                float_F[LATENCY] += inputs / tables.rate_per_s
        count += _can_complete(tables, rows, cutoffs, block + 1, 1 if action == HOP else replicas, output, count)
    return count


@compiled
def _close_stage(tables: RunTables, sums_F: FloatArray, replicas: int, hop_s: float, unanswered: float) -> None:
    """Adds the waits of the open stage's further splits, now that its replicas are known, and the hop behind it."""
    sums_F[MEAN] += replicas * sums_F[MEAN_INPUTS] / tables.rate_per_s + unanswered * hop_s
    sums_F[LATENCY] += replicas * sums_F[INPUTS] / tables.rate_per_s + hop_s
    sums_F[WORK] = sums_F[MEAN_INPUTS] = sums_F[INPUTS] = 0.0


@compiled
def _is_feasible(cutoffs: Cutoffs, float_F: FloatArray) -> int:
    """Fills the value of a complete plan. Returns 1 if it keeps its limits and is no worse than the incumbent."""
    float_F[BOUND] = float_F[LATENCY] if cutoffs.minimizes_worst_case else float_F[MEAN]
    is_in_time = float_F[LATENCY] <= cutoffs.latency_s * (1 + TOLERANCE)
    return int(is_in_time and float_F[RAMPS] <= cutoffs.ramps and float_F[BOUND] <= cutoffs.value)


@compiled
def _can_complete(
    tables: RunTables, rows: RowArrays, cutoffs: Cutoffs, block: int, replicas: int, output: Labels, label: int
) -> int:
    """Fills the bound of a label whose open stage needs `replicas` at least. Returns 0 if the bound excludes it."""
    float_F, int_I = output.float_LF[label], output.int_LI[label]
    run, device = int_I[RUN], tables.device_R[int_I[RUN]]
    mean_s = float_F[MEAN] + replicas * float_F[MEAN_INPUTS] / tables.rate_per_s
    latency_s = float_F[LATENCY] + replicas * float_F[INPUTS] / tables.rate_per_s
    if int_I[USED + device] + replicas > tables.count_C[device]:
        return 0
    bound = 0.0
    for row in range(rows.mean_V.size):
        price = rows.mean_V[row] * mean_s + rows.latency_V[row] * latency_s + rows.ramps_V[row] * float_F[RAMPS]
        price += rows.work_VC[row, device] * tables.rate_per_s * float_F[WORK]
        for used in range(tables.count_C.size):
            price += rows.device_VC[row, used] * int_I[USED + used]
        price += rows.bound_VNREQ[row, block, run, int_I[ENTRY], int_I[RANK]]
        excess = price - rows.limit_V[row]
        if rows.has_objective_V[row]:
            bound = max(bound, excess)
        elif excess > TOLERANCE * rows.limit_V[row] + rows.ramps_V[row] * cutoffs.ramps:
            return 0
    float_F[BOUND] = bound
    return int(bound <= cutoffs.value)
