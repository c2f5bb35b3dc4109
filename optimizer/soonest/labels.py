"""Labels of the search: partial plans up to a block, inside an open split of an open stage: kernels.

The replicas of the open stage are not counted yet: its work so far says how many it needs at least, and the waits of its
further splits are kept in inputs, which the replicas multiply in the end.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optimizer.compiled import compiled
from optimizer.soonest.prices import CUT, GO_ON, HOP
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

RUN, ENTRY, RANK, PARENT, HOW, ACTIVE, USED = 0, 1, 2, 3, 4, 5, 6
"""Columns of `whole_LI`: the open split's run and entry; the rank now; the label before, in its own layer; what follows
the block between them, and whether its ramp is active; from there on the replicas of closed stages, per device."""
MEAN, LATENCY, RAMPS, WORK, MEAN_INPUTS, INPUTS, BOUND = 0, 1, 2, 3, 4, 5, 6
"""Columns of `real_LF`: seconds of the mean answer time and of the worst case, without the waits of the open stage's
further splits; seconds of ramps beyond their budget; the open stage's device seconds per input; inputs that it waits
for, by who is unanswered, and all; what no plan that begins so is better than."""
NUM_REALS = 7
# Sums of the same numbers in another order may differ by this; far below what plans are told apart by.
ROUNDING = 1e-13
SLACK = 5e-10
ENDLESS = 1e15


class Labels(NamedTuple):
    """Partial plans (L), all up to the same block."""

    whole_LI: IntArray
    real_LF: FloatArray


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


class Bounds(NamedTuple):
    """What ends a label."""

    latency_s: float
    usd_per_hour: float
    ramps: float
    """Seconds of ramps beyond their budget that rounding may make."""
    value: float
    """Of the best plan so far."""
    seeks_worst: bool


@compiled
def replicas_for(tables: Tables, work_s: float) -> int:
    """The fewest that do the rate."""
    return max(1, int(min(np.ceil(work_s * tables.rate_per_s * (1 - ROUNDING)), ENDLESS)))


@compiled
def extended(
    tables: Tables, rows: Rows, bounds: Bounds, block: int, labels: Labels, first: int, room: Labels
) -> tuple[int, int]:
    """Write what follows a block, for labels from `first` on while there is room; returns how many, and the next."""
    num_devices = tables.count_C.size
    most = 2 * (1 + 2 * tables.device_R.size)
    free_C, count, label = np.empty(num_devices, dtype=np.int64), 0, first
    while label < labels.whole_LI.shape[0] and count + most <= room.whole_LI.shape[0]:
        run, entry, rank = labels.whole_LI[label, RUN], labels.whole_LI[label, ENTRY], labels.whole_LI[label, RANK]
        spent_usd = 0.0
        for device in range(num_devices):
            used = labels.whole_LI[label, USED + device]
            free_C[device] = tables.count_C[device] - used
            spent_usd += used * tables.usd_C[device]
        now = labels.real_LF[label].copy()
        _pass(tables, now, run, entry, rank, block_seconds(tables, block, run, entry, rank), False)
        if may_be_off(tables, block):
            count = _branch(
                tables, rows, bounds, block, labels, label, now, run, entry, rank, False, free_C, spent_usd, room, count
            )
        if may_be_on(tables, block, rank):
            _pass(tables, now, run, entry, rank, ramp_seconds(tables, block, run, entry, rank), True)
            ramp = tables.rank_N[block]
            count = _branch(
                tables, rows, bounds, block, labels, label, now, run, entry, ramp, True, free_C, spent_usd, room, count
            )
        label += 1
    return count, label


@compiled
def _pass(
    tables: Tables, now: FloatArray, run: int, entry: int, rank: int, seconds: float, in_ramp: bool
) -> None:
    now[MEAN] += tables.unanswered_Q[rank] * seconds
    now[LATENCY] += seconds
    if tables.ramp_budget > 0.0:
        now[RAMPS] += seconds if in_ramp else -tables.ramp_budget * seconds
    now[WORK] += tables.enters_E[entry] * seconds / tables.batch_R[run]


@compiled
def _branch(
    tables: Tables, rows: Rows, bounds: Bounds, block: int, labels: Labels, label: int, now: FloatArray, run: int,
    entry: int, rank: int, active: bool, free_C: IntArray, spent_usd: float, room: Labels, count: int,
) -> int:  # fmt: skip
    """All that may follow a block once its ramp is on or off."""
    device, end = tables.device_R[run], block + 1 == tables.rank_N.size
    replicas = replicas_for(tables, now[WORK])
    if replicas > free_C[device] or not _paid(bounds, spent_usd + replicas * tables.usd_C[device]):
        return count
    if end:
        _close(tables, now, replicas, 0.0, 0.0, room.real_LF[count])
        if _ends_well(bounds, room.real_LF[count]):
            _trace(labels, label, 0, 0, 0, GO_ON, active, device, replicas, room.whole_LI[count])
            return count + 1
        return count
    if may_go_on(tables, active):
        room.real_LF[count] = now
        _trace(labels, label, run, entry, rank, GO_ON, active, device, 0, room.whole_LI[count])
        count += _kept(tables, rows, bounds, block + 1, replicas, room, count)
    if tables.may_split:
        count = _start(
            tables, rows, bounds, block, labels, label, now, rank, active, CUT, device, replicas, 0, room, count
        )
    if tables.may_hop:
        hop_s = hop_seconds(tables, block, run, entry, rank)
        replicas = replicas_for(tables, max(now[WORK], tables.enters_E[entry] * hop_s / tables.batch_R[run]))
        if replicas <= free_C[device] and _paid(bounds, spent_usd + replicas * tables.usd_C[device]):
            closed = np.empty(NUM_REALS)
            _close(tables, now, replicas, hop_s, tables.unanswered_Q[rank], closed)
            count = _start(
                tables, rows, bounds, block, labels, label, closed, rank, active, HOP, device, 1, replicas, room, count
            )
    return count


@compiled
def _start(
    tables: Tables, rows: Rows, bounds: Bounds, block: int, labels: Labels, label: int, now: FloatArray, rank: int,
    active: bool, how: int, device: int, replicas: int, taken: int, room: Labels, count: int,
) -> int:  # fmt: skip
    """Every split that may begin after a block, on the same device or, after a hop, on any that is left."""
    entry = entry_of(tables, rank)
    if tables.enters_E[entry] == 0.0:
        return count
    for run in range(tables.device_R.size):
        if how == CUT and tables.device_R[run] != device:
            continue
        room.real_LF[count] = now
        inputs = wait_inputs(tables, run, entry)
        _trace(labels, label, run, entry, rank, how, active, device, taken, room.whole_LI[count])
        if how == CUT:
            room.real_LF[count, MEAN_INPUTS] += tables.unanswered_Q[rank] * inputs / 2
            room.real_LF[count, INPUTS] += inputs
        else:
            on = tables.device_R[run]
            if room.whole_LI[count, USED + on] >= tables.count_C[on]:
                continue
            room.real_LF[count, MEAN] += tables.unanswered_Q[rank] * inputs / 2 / tables.rate_per_s
            room.real_LF[count, LATENCY] += inputs / tables.rate_per_s
        count += _kept(tables, rows, bounds, block + 1, replicas, room, count)
    return count


@compiled
def _close(
    tables: Tables, now: FloatArray, replicas: int, hop_s: float, unanswered: float, closed: FloatArray
) -> None:
    """The open stage ends: its replicas multiply the waits of further splits, and what is left hops."""
    closed[:] = 0.0
    closed[MEAN] = now[MEAN] + replicas * now[MEAN_INPUTS] / tables.rate_per_s + unanswered * hop_s
    closed[LATENCY] = now[LATENCY] + replicas * now[INPUTS] / tables.rate_per_s + hop_s
    closed[RAMPS] = now[RAMPS]


@compiled
def _trace(
    labels: Labels, parent: int, run: int, entry: int, rank: int, how: int, active: bool, device: int, taken: int,
    whole_I: IntArray,
) -> None:  # fmt: skip
    for column in range(USED, whole_I.size):
        whole_I[column] = labels.whole_LI[parent, column]
    whole_I[USED + device] += taken
    whole_I[RUN], whole_I[ENTRY], whole_I[RANK] = run, entry, rank
    whole_I[PARENT], whole_I[HOW], whole_I[ACTIVE] = parent, how, int(active)


@compiled
def _paid(bounds: Bounds, usd: float) -> bool:
    return bool(usd <= bounds.usd_per_hour * (1 + SLACK))


@compiled
def _ends_well(bounds: Bounds, real_F: FloatArray) -> bool:
    """Whether a whole plan keeps its limits and is no worse than the best so far; fills its value."""
    real_F[BOUND] = real_F[LATENCY] if bounds.seeks_worst else real_F[MEAN]
    in_time = real_F[LATENCY] <= bounds.latency_s * (1 + SLACK)
    return bool(in_time and real_F[RAMPS] <= bounds.ramps and real_F[BOUND] <= bounds.value)


@compiled
def _kept(tables: Tables, rows: Rows, bounds: Bounds, block: int, replicas: int, room: Labels, label: int) -> int:
    """1 unless some row of prices rules a label out, of whose open stage `replicas` are needed at least."""
    real_F, whole_I = room.real_LF[label], room.whole_LI[label]
    run, device = whole_I[RUN], tables.device_R[whole_I[RUN]]
    mean_s = real_F[MEAN] + replicas * real_F[MEAN_INPUTS] / tables.rate_per_s
    latency_s = real_F[LATENCY] + replicas * real_F[INPUTS] / tables.rate_per_s
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
        elif over > SLACK * rows.allowed_V[row] + rows.ramps_V[row] * bounds.ramps:
            return 0
    real_F[BOUND] = bound
    return int(bound <= bounds.value)
