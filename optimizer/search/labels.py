"""Labels: the beginnings of chains on a graph of splits, pruned by prices and by each other.

A label that cannot end within what a row of prices allows is dropped; what is left of a chain costs at least the least
price from its node to the end (`optimizer.search.prices`). There are two ways to search:

- for mixtures, whose rates and replicas the master problem decides later: one label beats another at the same node with
  the same sequence of types when it is no worse in the work of any stage, in latency, and in waits. That holds whatever
  the rest of the plan is, whole replicas included, so the search finds every chain that a best plan can contain;
- at a rate, with whole replicas: one label beats another at the same node when it needs no more replicas of any type,
  and is no worse in anything else.

Of labels at the same node with the same types only the cheapest few may be kept. The search then returns the least
price of those it dropped: no chain that was missed is cheaper than that.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optimizer.compiled import compiled, inlined
from optimizer.search.graph import MoveArrays
from optimizer.search.prices import UnitPrices, cheapest_ways
from optimizer.step import FloatArray, IntArray

MOST_STAGES = 6
"""Longer chains are not searched, even where the problem allows them."""
CLOSED = -1
"""The device of a label whose last stage ends at its node."""
# Columns of a label's whole numbers.
DEVICE, TYPES, STAGES, PARENT, MOVE, NEXT = 0, 1, 2, 3, 4, 5
# Columns of its reals, which are compared from LATENCY on: the price of finished stages; the least price of a chain
# that begins so; seconds that finished stages wait at least for batches of their own; worst-case seconds; inputs that
# pooled batches wait for; the open stage's work; inputs that its own batches wait for; seconds of the mean answer time;
# inputs of its own batches in it; seconds of ramps beyond their budget. Then come the works of finished stages and
# their waits per replica, or (of whole replicas) the replicas of each type.
PRICE, TOTAL, WAITED, LATENCY, FILL, WORK, BATCHES, MEAN, MEAN_BATCHES, RAMPS, WORKS = range(11)
ROUNDING = 1e-12


class Rows(NamedTuple):
    """Several rows of prices (V), each a proof of its own. Chains are compared by the first."""

    price_VC: FloatArray
    """Of a device second per input."""
    latency_V: FloatArray
    mean_V: FloatArray
    ramps_V: FloatArray
    most_V: FloatArray
    """What a chain may cost. Where replicas are not whole, only the first row may price devices."""


class ChainLimits(NamedTuple):
    """What labels may do."""

    limit_s: float
    most_ramps: float
    """Seconds of ramps beyond their budget that rounding may make; infinite without a budget."""
    rate: float
    """Every stage must do this rate; counts only for whole replicas."""
    fill_rate: float
    """Batches fill as at this rate, which no chain exceeds."""
    is_whole: bool
    """Whether replicas are whole, and at most as many as `count_C`."""
    count_C: FloatArray
    usd_C: FloatArray
    budget: float
    may_split: bool
    may_hop: bool


class ChainLabels(NamedTuple):
    """All labels so far."""

    whole_LI: IntArray
    real_LF: FloatArray


class _ToEnd(NamedTuple):
    """The least price of each row to the end, between stages and inside one."""

    closed_VP: FloatArray
    open_VPC: FloatArray


@compiled
def search(
    moves: MoveArrays, limits: ChainLimits, rows: Rows, most_labels: int, most_alike: int
) -> tuple[float, int, ChainLabels, IntArray]:
    """Returns the least price of dropped labels (inf: none), the number of labels, all of them, and the ended ones.

    Of a node's labels that are compared with each other, the cheapest `most_alike` are kept; one of each, once there
    are `most_labels` in all.
    """
    to_end = _priced(moves, limits, rows)
    end, slots = moves.first_move_P.size - 2, max(MOST_STAGES, limits.count_C.size)
    labels = ChainLabels(np.zeros((1 << 12, 6), dtype=np.int64), np.zeros((1 << 12, WORKS + 2 * slots)))
    head_P, now_F = np.full(end + 1, -1), np.zeros(WORKS)
    labels.whole_LI[0, DEVICE], labels.whole_LI[0, PARENT], labels.whole_LI[0, NEXT] = CLOSED, -1, -1
    head_P[0] = 0
    count, dropped = 1, np.inf
    for node in range(end):
        if head_P[node] < 0:
            continue
        missed, kept_L = undominated(head_P[node], labels, most_alike if count < most_labels else 1)
        dropped = min(dropped, missed)
        for label in kept_L:
            for move in range(moves.first_move_P[node], moves.first_move_P[node + 1]):
                if labels.whole_LI[label, DEVICE] not in (CLOSED, moves.device_M[move]):
                    continue
                if count + 2 > labels.whole_LI.shape[0]:
                    labels = _with_more_room(labels)
                count = _follow(moves, limits, rows, to_end, label, move, now_F, head_P, labels, count)
    missed, kept_L = undominated(head_P[end], labels, labels.whole_LI.shape[0])
    return dropped, count, labels, kept_L


@compiled
def _priced(moves: MoveArrays, limits: ChainLimits, rows: Rows) -> _ToEnd:
    num_rows, num_devices = rows.price_VC.shape
    num_nodes = moves.first_move_P.size - 1
    to_end = _ToEnd(np.empty((num_rows, num_nodes)), np.empty((num_rows, num_nodes, num_devices)))
    for row in range(num_rows):
        prices = UnitPrices(rows.price_VC[row], rows.latency_V[row], rows.mean_V[row], rows.ramps_V[row])
        ways = cheapest_ways(moves, prices, limits.fill_rate, limits.may_split, limits.may_hop)
        to_end.closed_VP[row] = ways.closed_P
        to_end.open_VPC[row] = ways.open_PC
    return to_end


@compiled
def _follow(
    moves: MoveArrays, limits: ChainLimits, rows: Rows, to_end: _ToEnd, label: int, move: int, now_F: FloatArray,
    head_P: IntArray, labels: ChainLabels, count: int,
) -> int:  # fmt: skip
    """Write a label for each way to go on after a move; returns how many labels there are now."""
    whole_LI = labels.whole_LI
    target, end, is_first = moves.to_M[move], head_P.size - 1, whole_LI[label, DEVICE] == CLOSED
    stages = whole_LI[label, STAGES] + (1 if is_first else 0)
    if stages > MOST_STAGES:
        return count
    _pass(moves, limits, labels.real_LF[label], is_first, move, now_F)
    if target == end and now_F[RAMPS] > limits.most_ramps:
        return count
    inside = moves.inside_M[move] == 1
    for ends in range(2):
        if ends:
            if inside or not (target == end or limits.may_hop):
                continue
        elif target == end or not (inside or limits.may_split):
            continue
        if not _settle(moves, limits, rows, to_end, label, move, now_F, ends == 1, stages, labels, count):
            continue
        here_I = whole_LI[count]
        here_I[:] = whole_LI[label]
        here_I[PARENT], here_I[MOVE], here_I[STAGES] = label, move, stages
        here_I[DEVICE] = CLOSED if ends else moves.device_M[move]
        if is_first and not limits.is_whole:
            here_I[TYPES] = here_I[TYPES] * (limits.count_C.size + 1) + moves.device_M[move] + 1
        here_I[NEXT], head_P[target] = head_P[target], count
        count += 1
    return count


@inlined
def _pass(
    moves: MoveArrays, limits: ChainLimits, from_F: FloatArray, is_first: bool, move: int, now_F: FloatArray
) -> None:
    """Fill what a label has come to behind a move, its stage not yet ended."""
    for column in range(WORKS):
        now_F[column] = from_F[column]
    now_F[WORK] += moves.work_M[move]
    now_F[LATENCY] += moves.seconds_M[move] + moves.cross_M[move]
    now_F[MEAN] += moves.mean_M[move]
    now_F[RAMPS] += moves.ramp_M[move]
    if not is_first and moves.pooled_M[move] == 0:
        now_F[BATCHES] += moves.wait_M[move]
        now_F[MEAN_BATCHES] += moves.mean_wait_M[move]
    elif limits.is_whole:
        now_F[LATENCY] += moves.wait_M[move] / limits.fill_rate
        now_F[MEAN] += moves.mean_wait_M[move] / limits.fill_rate
    else:
        now_F[FILL] += moves.wait_M[move]


@inlined
def _settle(
    moves: MoveArrays, limits: ChainLimits, rows: Rows, to_end: _ToEnd, label: int, move: int, now_F: FloatArray,
    ends: bool, stages: int, labels: ChainLabels, count: int,
) -> bool:  # fmt: skip
    """Write the figures of the next label, its stage ended or open; False where it cannot lead to a chain."""
    from_F, device, target = labels.real_LF[label], moves.device_M[move], moves.to_M[move]
    work, latency_s, mean_s = now_F[WORK], now_F[LATENCY], now_F[MEAN]
    if ends and target < moves.first_move_P.size - 2:
        work = max(work, moves.hop_work_M[move])
        latency_s += moves.hop_M[move]
        mean_s += moves.leaving_M[move] * moves.hop_M[move]
    # Device seconds per input that count for prices; seconds that the open stage's own batches are waited for.
    taken, replicas, apart_s, mean_apart_s = work, 0.0, now_F[BATCHES] * work, 0.0
    if limits.is_whole:
        replicas = max(1.0, np.ceil(work * limits.rate * (1 - ROUNDING)))
        if not _fits(limits, from_F, device, replicas):
            return False
        taken = replicas / limits.rate if ends else work
        apart_s = now_F[BATCHES] * replicas / limits.fill_rate
        mean_apart_s = now_F[MEAN_BATCHES] * replicas / limits.fill_rate
    seconds = latency_s + now_F[FILL] / limits.fill_rate + now_F[WAITED] + apart_s
    price, first = now_F[PRICE] + rows.price_VC[0, device] * taken, 0.0
    for row in range(rows.most_V.size):
        total = rows.latency_V[row] * seconds + rows.mean_V[row] * (mean_s + mean_apart_s)
        total += rows.ramps_V[row] * now_F[RAMPS]
        total += to_end.closed_VP[row, target] if ends else to_end.open_VPC[row, target, device]
        if row == 0:
            first = total = total + price
        elif limits.is_whole:
            total += rows.price_VC[row, device] * taken
            for other in range(limits.count_C.size):
                total += rows.price_VC[row, other] * from_F[WORKS + other] / limits.rate
        if total > rows.most_V[row]:
            return False
    here_F = labels.real_LF[count]
    here_F[:WORKS] = now_F
    here_F[WORKS:] = from_F[WORKS:]
    here_F[TOTAL] = first
    if not ends:
        return True
    here_F[PRICE], here_F[LATENCY], here_F[MEAN] = price, latency_s, mean_s
    here_F[WORK], here_F[BATCHES], here_F[MEAN_BATCHES] = 0.0, 0.0, 0.0
    if limits.is_whole:
        here_F[LATENCY] += apart_s
        here_F[MEAN] += mean_apart_s
        here_F[WORKS + device] += replicas
    else:
        here_F[WAITED] += apart_s
        here_F[WORKS + stages - 1] = work
        here_F[WORKS + (here_F.size - WORKS) // 2 + stages - 1] = now_F[BATCHES]
    return True


@compiled
def _fits(limits: ChainLimits, from_F: FloatArray, device: int, replicas: float) -> bool:
    """Whether there are so many more replicas of a type, and money for them."""
    if from_F[WORKS + device] + replicas > limits.count_C[device] + 0.5:
        return False
    usd = replicas * limits.usd_C[device]
    for other in range(limits.count_C.size):
        usd += from_F[WORKS + other] * limits.usd_C[other]
    return bool(usd <= limits.budget * (1 + 1e-9))


@compiled
def _beats(labels: ChainLabels, one: int, other: int) -> bool:
    """Whether a label is no worse than another in anything; equal ones beat each other."""
    real_LF = labels.real_LF
    for column in range(LATENCY, real_LF.shape[1]):
        if real_LF[one, column] > real_LF[other, column] * (1 + ROUNDING) + (ROUNDING if column == RAMPS else 0.0):
            return False
    return True


@compiled
def undominated(head: int, labels: ChainLabels, most: int) -> tuple[float, IntArray]:
    """The least price of labels that were left out for want of room, and the labels of a list that none beats.

    Of those with the same types and open device only the `most` cheapest are kept.
    """
    whole_LI, real_LF = labels
    count, label = 0, head
    while label != -1:
        count += 1
        label = whole_LI[label, NEXT]
    found_L, key_L, price_L = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64), np.empty(count)
    label = head
    for place in range(count):
        found_L[place], key_L[place] = label, whole_LI[label, TYPES] * 64 + whole_LI[label, DEVICE] + 1
        price_L[place] = real_LF[label, TOTAL]
        label = whole_LI[label, NEXT]
    # What beats another is no dearer, so it comes first; then a stable sort brings the same types together.
    order_L = np.argsort(price_L, kind="mergesort")
    order_L = order_L[np.argsort(key_L[order_L], kind="mergesort")]
    kept_L = np.empty(count, dtype=np.int64)
    kept, group, dropped = 0, 0, np.inf
    for place in range(count):
        here = order_L[place]
        if place and key_L[here] != key_L[order_L[place - 1]]:
            group = kept
        is_beaten = False
        for other in range(group, kept):
            if _beats(labels, kept_L[other], found_L[here]):
                is_beaten = True
                break
        if is_beaten:
            continue
        if kept - group >= most:
            dropped = min(dropped, price_L[here])
            continue
        kept_L[kept] = found_L[here]
        kept += 1
    return dropped, kept_L[:kept]


@compiled
def _with_more_room(labels: ChainLabels) -> ChainLabels:
    rows = labels.whole_LI.shape[0]
    whole_LI, real_LF = np.zeros((2 * rows, 6), dtype=np.int64), np.zeros((2 * rows, labels.real_LF.shape[1]))
    whole_LI[:rows], real_LF[:rows] = labels.whole_LI, labels.real_LF
    return ChainLabels(whole_LI, real_LF)
