"""Labels of the search: partial plans up to a block, inside an open split of an open stage: kernels.

The replicas of the open stage are not counted yet: its work so far says how many it needs at least, and the waits of
its further splits are kept in inputs, which the replicas multiply in the end.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optimizer.compiled import compiled
from optimizer.step import FloatArray, IntArray, Labels
from optimizer.tables import (
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
from optimizer.walks import CUT, GO_ON, HOP

RUN, ENTRY, RANK, PARENT, HOW, ACTIVE, USED = 0, 1, 2, 3, 4, 5, 6
"""Columns of `int_LI`: the open split's run and entry; the rank now; the label before, in its own layer; what follows
the block between them, and whether its ramp is active; from there on the replicas of closed stages, per device."""
MEAN, LATENCY, RAMPS, WORK, MEAN_INPUTS, INPUTS, BOUND = 0, 1, 2, 3, 4, 5, 6
"""Columns of `float_LF`: seconds of the mean answer time and of the worst case, without the waits of the open stage's
further splits; seconds of ramps beyond their budget; the open stage's device seconds per input; inputs that it waits
for, those without an answer and all; what no plan that begins so is better than."""
NUM_REALS = 7
# Sums of the same numbers in another order may differ by this; far below what plans are told apart by.
ROUNDING = 1e-13
SLACK = 5e-10
ENDLESS = 1e15


class Rows(NamedTuple):
    """Several rows of prices (V), each a proof of its own."""

    mean_V: FloatArray
    latency_V: FloatArray
    ramps_V: FloatArray
    device_VC: FloatArray
    allowed_V: FloatArray
    counts_V: IntArray
    """1 where what is sought is in the row, else 0."""
    inside_VNREQ: FloatArray


class Cutoffs(NamedTuple):
    """What ends a label."""

    latency_s: float
    usd_per_hour: float
    ramps: float
    """Seconds of ramps beyond their budget that rounding may make."""
    value: float
    """Of the best plan so far."""
    seeks_worst: bool


@compiled
def replicas_for(tables: RunTables, work_s: float) -> int:
    """The fewest that do the rate."""
    return max(1, int(min(np.ceil(work_s * tables.rate_per_s * (1 - ROUNDING)), ENDLESS)))


@compiled
def extended(
    tables: RunTables, rows: Rows, cutoffs: Cutoffs, block: int, labels: Labels, first: int, room: Labels
) -> tuple[int, int]:
    """Write what follows a block, for labels from `first` on while there is room; returns how many, and the next."""
    most = 2 * (1 + 2 * tables.device_R.size)
    free_C, count, label = np.empty(tables.count_C.size, dtype=np.int64), 0, first
    now, then = np.empty(NUM_REALS), np.empty(NUM_REALS)
    while label < labels.int_LI.shape[0] and count + most <= room.int_LI.shape[0]:
        run, entry, rank = labels.int_LI[label, RUN], labels.int_LI[label, ENTRY], labels.int_LI[label, RANK]
        spent_usd = 0.0
        for device in range(free_C.size):
            used = labels.int_LI[label, USED + device]
            free_C[device] = tables.count_C[device] - used
            spent_usd += used * tables.usd_C[device]
        now[:] = labels.float_LF[label]
        for active in range(2):
            seconds, ramp = block_seconds(tables, block, run, entry, rank), rank
            if active == 1:
                if not may_be_on(tables, block, rank):
                    continue
                seconds, ramp = ramp_seconds(tables, block, run, entry, rank), tables.rank_N[block]
            _pass(tables, now, run, entry, rank, seconds, active)
            if active == 1 or may_be_off(tables, block):
                count = _branch(
                    tables, rows, cutoffs, block, labels, label, now, then, run, entry, ramp, active, free_C, spent_usd,
                    room, count,
                )  # fmt: skip
        label += 1
    return count, label


@compiled
def _pass(tables: RunTables, now: FloatArray, run: int, entry: int, rank: int, seconds: float, in_ramp: int) -> None:
    now[MEAN] += tables.unanswered_Q[rank] * seconds
    now[LATENCY] += seconds
    if tables.ramp_budget > 0.0:
        now[RAMPS] += in_ramp * seconds - (1 - in_ramp) * tables.ramp_budget * seconds
    now[WORK] += tables.enters_E[entry] * seconds / tables.batch_R[run]


@compiled
def _branch(
    tables: RunTables, rows: Rows, cutoffs: Cutoffs, block: int, labels: Labels, label: int, now: FloatArray,
    then: FloatArray, run: int, entry: int, rank: int, active: int, free_C: IntArray, spent_usd: float,
    room: Labels, count: int,
) -> int:  # fmt: skip
    """All that may follow a block once its ramp is on or off."""
    device, end = tables.device_R[run], block + 1 == tables.rank_N.size
    after_s, last = 0.0, HOP if tables.may_hop or end else CUT
    for how in range(last + 1):
        if (end and how != HOP) or (how == GO_ON and not may_go_on(tables, block, active)) or (
            how == CUT and not tables.may_split
        ):  # fmt: skip
            continue
        work_s = now[WORK]
        if how == HOP and not end:
            hop_s = hop_seconds(tables, block, run, entry, rank)
            after_s = after_stage_s(tables, block, run, entry, rank)
            work_s = max(work_s, tables.enters_E[entry] * hop_s / tables.batch_R[run])
        replicas = replicas_for(tables, work_s)
        usd = spent_usd + replicas * tables.usd_C[device]
        if replicas > free_C[device] or usd > cutoffs.usd_per_hour * (1 + SLACK):
            continue
        then[:] = now
        if how == HOP:
            _close(tables, then, replicas, after_s, tables.unanswered_Q[rank])
        elif how == CUT:
            crossing_s = after_split_s(tables, block, run, entry, rank)
            then[MEAN] += tables.unanswered_Q[rank] * crossing_s
            then[LATENCY] += crossing_s
        count = _write_ways(
            tables, rows, cutoffs, block, labels, label, then, run, entry, rank, active, how, replicas, room, count
        )
    return count


@compiled
def _write_ways(
    tables: RunTables, rows: Rows, cutoffs: Cutoffs, block: int, labels: Labels, label: int, now: FloatArray,
    run: int, entry: int, rank: int, active: int, how: int, replicas: int, room: Labels, count: int,
) -> int:  # fmt: skip
    """One label where the plan ends or the split goes on; else one for every split that may begin."""
    device, end = tables.device_R[run], block + 1 == tables.rank_N.size
    starts = how != GO_ON and not end
    first_run, end_run = (0, tables.device_R.size) if starts else (run, run + 1)
    entered = entry_of(tables, rank) if starts else entry
    if tables.enters_E[entered] == 0.0:
        return count
    for other in range(first_run, end_run):
        on = tables.device_R[other]
        if how == CUT and on != device:
            continue
        real_F, whole_I = room.float_LF[count], room.int_LI[count]
        real_F[:] = now
        whole_I[USED:] = labels.int_LI[label, USED:]
        if how == HOP:
            whole_I[USED + device] += replicas
        whole_I[PARENT], whole_I[HOW], whole_I[ACTIVE] = label, how, active
        whole_I[RUN], whole_I[ENTRY], whole_I[RANK] = (0, 0, 0) if end else (other, entered, rank)
        if end:
            count += _ends_well(cutoffs, real_F)
            continue
        if starts:
            inputs = wait_inputs(tables, other, entered)
            if how == CUT and not crosses_after(tables, block):
                real_F[MEAN_INPUTS] += tables.unanswered_Q[rank] * inputs / 2
                real_F[INPUTS] += inputs
            else:
                real_F[MEAN] += tables.unanswered_Q[rank] * inputs / 2 / tables.rate_per_s
                real_F[LATENCY] += inputs / tables.rate_per_s
        count += _kept(tables, rows, cutoffs, block + 1, 1 if how == HOP else replicas, room, count)
    return count


@compiled
def _close(tables: RunTables, now: FloatArray, replicas: int, hop_s: float, unanswered: float) -> None:
    """The open stage ends: its replicas multiply the waits of further splits, and what is left hops."""
    now[MEAN] += replicas * now[MEAN_INPUTS] / tables.rate_per_s + unanswered * hop_s
    now[LATENCY] += replicas * now[INPUTS] / tables.rate_per_s + hop_s
    now[WORK] = now[MEAN_INPUTS] = now[INPUTS] = 0.0


@compiled
def _ends_well(cutoffs: Cutoffs, real_F: FloatArray) -> int:
    """1 where a whole plan keeps its limits and is no worse than the best so far; fills its value."""
    real_F[BOUND] = real_F[LATENCY] if cutoffs.seeks_worst else real_F[MEAN]
    in_time = real_F[LATENCY] <= cutoffs.latency_s * (1 + SLACK)
    return int(in_time and real_F[RAMPS] <= cutoffs.ramps and real_F[BOUND] <= cutoffs.value)


@compiled
def _kept(tables: RunTables, rows: Rows, cutoffs: Cutoffs, block: int, replicas: int, room: Labels, label: int) -> int:
    """1 unless some row of prices rules a label out, of whose open stage `replicas` are needed at least."""
    real_F, whole_I = room.float_LF[label], room.int_LI[label]
    run, device = whole_I[RUN], tables.device_R[whole_I[RUN]]
    mean_s = real_F[MEAN] + replicas * real_F[MEAN_INPUTS] / tables.rate_per_s
    latency_s = real_F[LATENCY] + replicas * real_F[INPUTS] / tables.rate_per_s
    if whole_I[USED + device] + replicas > tables.count_C[device]:
        return 0
    bound = 0.0
    for row in range(rows.mean_V.size):
        price = rows.mean_V[row] * mean_s + rows.latency_V[row] * latency_s + rows.ramps_V[row] * real_F[RAMPS]
        price += rows.device_VC[row, device] * tables.rate_per_s * real_F[WORK]
        for used in range(tables.count_C.size):
            price += rows.device_VC[row, used] * whole_I[USED + used]
        price += rows.inside_VNREQ[row, block, run, whole_I[ENTRY], whole_I[RANK]]
        over = price - rows.allowed_V[row]
        if rows.counts_V[row]:
            bound = max(bound, over)
        elif over > SLACK * rows.allowed_V[row] + rows.ramps_V[row] * cutoffs.ramps:
            return 0
    real_F[BOUND] = bound
    return int(bound <= cutoffs.value)
