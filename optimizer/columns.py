"""Chains worth having: labels on the graph of splits, pruned by prices and by each other.

A chain is a path through `optimizer.moves.Graph`. A label is the beginning of one: its node, the types of its stages in
order, the work of each, and what it has of latency. One label beats another at the same node with the same types when
it is no worse in anything; that holds whatever the rest of the plan is, whole replicas included. Labels that cannot end
within `most_price` at the dual prices of the master problem are left out, by a backward pass that finds the least price
from every node to the end: the completion bound. With `most_price` infinite, every chain that could be part of a best
plan is found.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optimizer.compiled import compiled
from optimizer.moves import MoveArrays
from optimizer.step import FloatArray, IntArray

MOST_STAGES = 6
"""Of one chain; where more are allowed, longer ones are not looked for."""
# Columns of a label's whole numbers: the node comes first by its list.
CLOSED = -1
DEVICE, TYPES, STAGES, PARENT, MOVE, NEXT = 0, 1, 2, 3, 4, 5
# Columns of its reals; then MOST_STAGES works of finished stages, and as many waits per replica.
PRICE, LATENCY, FILL, WORK, BATCHES = 0, 1, 2, 3, 4
REALS = 5 + 2 * MOST_STAGES
ROUNDING = 1e-12


class Reach(NamedTuple):
    """What labels may do."""

    price_C: FloatArray
    """Of a device second per input."""
    price_latency: float
    most_price: float
    limit_s: float
    most_rate: float
    """No chain does more, so batches wait at least as long."""
    may_split: bool
    may_hop: bool


class Labels(NamedTuple):
    """All labels so far."""

    whole_LI: IntArray
    real_LF: FloatArray


@compiled
def least_prices(moves: MoveArrays, reach: Reach, num_devices: int) -> tuple[FloatArray, FloatArray]:
    """By node, and by node and device of the open stage: the least price from there to the end."""
    end = moves.first_move_P.size - 2
    closed_P, open_PC = np.full(end + 1, np.inf), np.full((end + 1, num_devices), np.inf)
    closed_P[end] = 0.0
    for node in range(end - 1, -1, -1):
        for move in range(moves.first_move_P[node], moves.first_move_P[node + 1]):
            device, target = moves.device_M[move], moves.to_M[move]
            rest = closed_P[end] if target == end else np.inf
            if target != end and reach.may_hop:
                rest = closed_P[target] + reach.price_latency * moves.hop_M[move]
            if target != end and reach.may_split:
                rest = min(rest, open_PC[target, device])
            price = price_of(moves, reach, move) + rest
            wait_s = moves.wait_M[move] / reach.most_rate
            closed_P[node] = min(closed_P[node], price + reach.price_latency * wait_s)
            further_s = wait_s if moves.pooled_M[move] else moves.seconds_M[move]
            open_PC[node, device] = min(open_PC[node, device], price + reach.price_latency * further_s)
    return closed_P, open_PC


@compiled
def price_of(moves: MoveArrays, reach: Reach, move: int) -> float:
    """Of a split alone, without waits and hops."""
    price: float = reach.price_C[moves.device_M[move]] * moves.work_M[move]
    return price + reach.price_latency * (moves.seconds_M[move] + moves.cross_M[move])


@compiled
def search(moves: MoveArrays, reach: Reach, most_labels: int) -> tuple[bool, Labels, IntArray]:
    """Whether all labels found room, the labels, and those at the model's end."""
    num_devices = reach.price_C.size
    closed_P, open_PC = least_prices(moves, reach, num_devices)
    end = moves.first_move_P.size - 2
    labels = Labels(np.zeros((1 << 12, 6), dtype=np.int64), np.zeros((1 << 12, REALS)))
    head_P = np.full(end + 1, -1)
    labels.whole_LI[0, DEVICE], labels.whole_LI[0, PARENT], labels.whole_LI[0, NEXT] = CLOSED, -1, -1
    head_P[0] = 0
    count = 1
    for node in range(end):
        for label in undominated(head_P[node], labels):
            for move in range(moves.first_move_P[node], moves.first_move_P[node + 1]):
                if labels.whole_LI[label, DEVICE] not in (CLOSED, moves.device_M[move]):
                    continue
                if count + 2 > labels.whole_LI.shape[0]:
                    if count > most_labels:
                        return False, labels, np.empty(0, dtype=np.int64)
                    labels = _with_more_room(labels)
                count = _follow(moves, reach, closed_P, open_PC, label, move, head_P, labels, count)
    return True, labels, undominated(head_P[end], labels)


@compiled
def _follow(
    moves: MoveArrays, reach: Reach, closed_P: FloatArray, open_PC: FloatArray, label: int, move: int,
    head_P: IntArray, labels: Labels, count: int,
) -> int:  # fmt: skip
    """Write a label for each way to go on after a split; returns how many there are now."""
    whole_LI, real_LF = labels
    target, device, end = moves.to_M[move], moves.device_M[move], head_P.size - 1
    is_first = whole_LI[label, DEVICE] == CLOSED
    stages = whole_LI[label, STAGES] + (1 if is_first else 0)
    if stages > MOST_STAGES:
        return count
    types = whole_LI[label, TYPES]
    if is_first:
        types = types * (reach.price_C.size + 1) + device + 1
    work = real_LF[label, WORK] + moves.work_M[move]
    latency_s = real_LF[label, LATENCY] + moves.seconds_M[move] + moves.cross_M[move]
    fill, batches = real_LF[label, FILL], real_LF[label, BATCHES]
    if is_first or moves.pooled_M[move]:
        fill += moves.wait_M[move]
    else:
        batches += moves.wait_M[move]
    if target != end and reach.may_split:
        if _lasts(reach, real_LF, label, stages, work, batches, latency_s, fill):
            price = _priced(reach, real_LF, label, stages, device, work, batches, latency_s, fill)
            if price + open_PC[target, device] <= reach.most_price:
                finished = real_LF[label, PRICE]
                _write(labels, count, label, move, device, types, stages, finished, latency_s, fill, work, batches)
                whole_LI[count, NEXT], head_P[target] = head_P[target], count
                count += 1
    if target == end or reach.may_hop:
        if target != end:
            work = max(work, moves.hop_work_M[move])
            latency_s += moves.hop_M[move]
        if _lasts(reach, real_LF, label, stages, work, batches, latency_s, fill):
            price = _priced(reach, real_LF, label, stages, device, work, batches, latency_s, fill)
            if price + closed_P[target] <= reach.most_price:
                finished = real_LF[label, PRICE] + reach.price_C[device] * work
                _write(labels, count, label, move, CLOSED, types, stages, finished, latency_s, fill, 0.0, 0.0)
                real_LF[count, 5 + stages - 1] = work
                real_LF[count, 5 + MOST_STAGES + stages - 1] = batches
                whole_LI[count, NEXT], head_P[target] = head_P[target], count
                count += 1
    return count


@compiled
def _waiting_s(real_LF: FloatArray, label: int, stages: int, work: float, batches: float) -> float:
    """The least that splits wait whose batches each replica fills: there are at least rate x work replicas.

    The label's stages before the last one are finished; `work` and `batches` are of the last one.
    """
    total = batches * work
    for stage in range(stages - 1):
        total += real_LF[label, 5 + stage] * real_LF[label, 5 + MOST_STAGES + stage]
    return total


@compiled
def _lasts(
    reach: Reach, real_LF: FloatArray, label: int, stages: int, work: float, batches: float, latency_s: float,
    fill: float,
) -> bool:  # fmt: skip
    """Whether the latency can be kept."""
    least_s = latency_s + fill / reach.most_rate + _waiting_s(real_LF, label, stages, work, batches)
    return bool(least_s <= reach.limit_s * (1 + 1e-9))


@compiled
def _priced(
    reach: Reach, real_LF: FloatArray, label: int, stages: int, device: int, work: float, batches: float,
    latency_s: float, fill: float,
) -> float:  # fmt: skip
    """The price of a label that goes on from another: its finished stages' work is in that one's price already."""
    devices = reach.price_C[device] * work
    finished: float = real_LF[label, PRICE]
    waits_s = fill / reach.most_rate + _waiting_s(real_LF, label, stages, work, batches)
    return finished + devices + reach.price_latency * (latency_s + waits_s)


@compiled
def _write(
    labels: Labels, count: int, label: int, move: int, device: int, types: int, stages: int, price: float,
    latency_s: float, fill: float, work: float, batches: float,
) -> None:  # fmt: skip
    """Fill a label; PRICE is of the work of finished stages alone."""
    whole_LI, real_LF = labels
    real_LF[count] = real_LF[label]
    whole_LI[count, DEVICE], whole_LI[count, TYPES], whole_LI[count, STAGES] = device, types, stages
    whole_LI[count, PARENT], whole_LI[count, MOVE] = label, move
    real_LF[count, LATENCY], real_LF[count, FILL] = latency_s, fill
    real_LF[count, WORK], real_LF[count, BATCHES] = work, batches
    real_LF[count, PRICE] = price


@compiled
def _beats(labels: Labels, one: int, other: int) -> bool:
    """Whether a label is no worse than another in anything; equal ones beat each other."""
    whole_LI, real_LF = labels
    for column in range(LATENCY, REALS):  # noqa: SIM110 - kernels have no generators
        if real_LF[one, column] > real_LF[other, column] * (1 + ROUNDING):
            return False
    return True


@compiled
def undominated(head: int, labels: Labels) -> IntArray:
    """The labels of a list that none beats, those of the same types and open device beside each other."""
    whole_LI, real_LF = labels
    count, label = 0, head
    while label != -1:
        count += 1
        label = whole_LI[label, NEXT]
    found_L, key_L, sum_L = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64), np.empty(count)
    label = head
    for place in range(count):
        found_L[place], key_L[place] = label, whole_LI[label, TYPES] * 64 + whole_LI[label, DEVICE] + 1
        sum_L[place] = real_LF[label, LATENCY:REALS].sum()
        label = whole_LI[label, NEXT]
    # What beats another has the smaller sum, so it comes first; then a stable sort brings the same types together.
    order_L = np.argsort(sum_L, kind="mergesort")
    order_L = order_L[np.argsort(key_L[order_L], kind="mergesort")]
    kept_L = np.empty(count, dtype=np.int64)
    kept, group = 0, 0
    for place in range(count):
        here = order_L[place]
        if place and key_L[here] != key_L[order_L[place - 1]]:
            group = kept
        is_beaten = False
        for other in range(group, kept):
            if _beats(labels, kept_L[other], found_L[here]):
                is_beaten = True
                break
        if not is_beaten:
            kept_L[kept] = found_L[here]
            kept += 1
    return kept_L[:kept]


@compiled
def _with_more_room(labels: Labels) -> Labels:
    rows = labels.whole_LI.shape[0]
    whole_LI, real_LF = np.zeros((2 * rows, 6), dtype=np.int64), np.zeros((2 * rows, REALS))
    whole_LI[:rows], real_LF[:rows] = labels.whole_LI, labels.real_LF
    return Labels(whole_LI, real_LF)
