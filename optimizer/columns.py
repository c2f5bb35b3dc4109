"""Chains worth having: labels on the graph of splits, pruned by prices and by each other.

A chain is a path through `optimizer.moves.Graph`; a label is the beginning of one. Labels that cannot end within
`most_price` are left out, by a backward pass that finds the least price from every node to the end: the completion
bound. There are two ways to look:

- for mixtures, whose rates and replicas the master problem decides later: one label beats another at the same node with
  the same sequence of types when it is no worse in the work of any stage, in latency, or in waits. That holds whatever
  the rest of the plan is, whole replicas included, so all chains that could be part of a best plan are found;
- at a rate, with whole replicas on the devices that there are: one label beats another at the same node when it needs
  no more replicas of any type and takes no longer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optimizer.compiled import compiled, inlined
from optimizer.moves import MoveArrays
from optimizer.step import FloatArray, IntArray, Labels, linked_labels, undominated, with_doubled_capacity

MOST_STAGES = 6
"""Of one chain; where more are allowed, longer ones are not looked for."""
CLOSED = -1
"""The device of a label whose last stage ends at its node."""
# Columns of a label's whole numbers.
DEVICE, TYPES, STAGES, PARENT, MOVE, NEXT = 0, 1, 2, 3, 4, 5
# Columns of its reals: the price of finished stages, the least price of a chain that begins so, seconds, inputs that
# pooled batches wait for, the open stage's work, and inputs that its own batches wait for. Then come works of finished
# stages, by stage or (of whole replicas) by type, and as many waits per replica.
PRICE, TOTAL, LATENCY, FILL, WORK, BATCHES, WORKS = 0, 1, 2, 3, 4, 5, 6
ROUNDING = 1e-12
ALL, SOME, NONE = 0, 1, 2
"""How many labels found room."""


class ChainLimits(NamedTuple):
    """What labels may do."""

    price_C: FloatArray
    """Of a device second per input."""
    price_latency: float
    most_price: float
    limit_s: float
    rate: float
    """Batches wait as at this rate. No chain does more, or with `is_whole`: the rate that a chain must do."""
    is_whole: bool
    """Whether replicas are whole, and at most as many as `count_C`."""
    count_C: FloatArray
    may_split: bool
    may_hop: bool


@inlined
def _least_by(
    moves: MoveArrays, limits: ChainLimits, closed_P: FloatArray, open_PC: FloatArray, move: int
) -> tuple[float, float]:
    """The least price to the end by a move, as the first split of a stage and as a further one."""
    end, device, target = closed_P.size - 1, moves.device_M[move], moves.to_M[move]
    rest = closed_P[end] if target == end else np.inf
    if target != end and limits.may_hop:
        rest = closed_P[target] + limits.price_latency * moves.hop_M[move]
    if target != end and limits.may_split:
        rest = min(rest, open_PC[target, device])
    price = limits.price_C[device] * moves.work_M[move] + rest
    price += limits.price_latency * (moves.seconds_M[move] + moves.cross_M[move])
    wait_s = moves.wait_M[move] / limits.rate
    further_s = wait_s if moves.pooled_M[move] else moves.seconds_M[move]
    return price + limits.price_latency * wait_s, price + limits.price_latency * further_s


@compiled
def least_prices(moves: MoveArrays, limits: ChainLimits) -> tuple[FloatArray, FloatArray]:
    """By node, and by node and device of the open stage: the least price from there to the end."""
    end, num_devices = moves.first_move_P.size - 2, limits.price_C.size
    closed_P, open_PC = np.full(end + 1, np.inf), np.full((end + 1, num_devices), np.inf)
    closed_P[end] = 0.0
    for node in range(end - 1, -1, -1):
        for move in range(moves.first_move_P[node], moves.first_move_P[node + 1]):
            device = moves.device_M[move]
            first, further = _least_by(moves, limits, closed_P, open_PC, move)
            closed_P[node] = min(closed_P[node], first)
            open_PC[node, device] = min(open_PC[node, device], further)
    return closed_P, open_PC


@compiled
def _in_order(
    moves: MoveArrays, limits: ChainLimits, closed_P: FloatArray, open_PC: FloatArray
) -> tuple[IntArray, FloatArray]:
    """The moves of each node, and by how much each raises the least price of a chain at least; the least come first."""
    order_M, dearer_M = np.empty(moves.to_M.size, dtype=np.int64), np.empty(moves.to_M.size)
    for node in range(closed_P.size - 1):
        here = slice(moves.first_move_P[node], moves.first_move_P[node + 1])
        for move in range(here.start, here.stop):
            first, further = _least_by(moves, limits, closed_P, open_PC, move)
            dearer_M[move] = np.inf
            if first < np.inf:
                dearer_M[move] = first - closed_P[node]
            if further < np.inf:
                dearer_M[move] = min(dearer_M[move], further - open_PC[node, moves.device_M[move]])
        order_M[here] = here.start + np.argsort(dearer_M[here])
    return order_M, dearer_M


@compiled
def search(moves: MoveArrays, limits: ChainLimits, most_labels: int, most_alike: int) -> tuple[int, Labels, IntArray]:
    """How many labels found room, the labels, and those at the model's end.

    SOME: of a node's labels that are compared with each other, the cheapest `most_alike` were kept; NONE: there were
    more than `most_labels` in all.
    """
    closed_P, open_PC = least_prices(moves, limits)
    order_M, dearer_M = _in_order(moves, limits, closed_P, open_PC)
    end, slots = moves.first_move_P.size - 2, max(MOST_STAGES, limits.price_C.size)
    labels = Labels(np.zeros((1 << 12, 6), dtype=np.int64), np.zeros((1 << 12, WORKS + 2 * slots)))
    head_P = np.full(end + 1, -1)
    labels.int_LI[0, DEVICE], labels.int_LI[0, PARENT], labels.int_LI[0, NEXT] = CLOSED, -1, -1
    head_P[0] = 0
    count, outcome = 1, ALL
    for node in range(end):
        is_complete, kept_L = _kept(head_P[node], labels, most_alike)
        outcome = outcome if is_complete else SOME
        for label in kept_L:
            most = limits.most_price - labels.float_LF[label, TOTAL]
            for move in order_M[moves.first_move_P[node] : moves.first_move_P[node + 1]]:
                if dearer_M[move] > most:
                    break
                if labels.int_LI[label, DEVICE] not in (CLOSED, moves.device_M[move]):
                    continue
                if count + 2 > labels.int_LI.shape[0]:
                    if count > most_labels:
                        return NONE, labels, np.empty(0, dtype=np.int64)
                    labels = with_doubled_capacity(labels)
                count = _follow(moves, limits, closed_P, open_PC, label, move, head_P, labels, count)
    is_complete, kept_L = _kept(head_P[end], labels, most_alike)
    return outcome if is_complete else SOME, labels, kept_L


@compiled
def _follow(
    moves: MoveArrays, limits: ChainLimits, closed_P: FloatArray, open_PC: FloatArray, label: int, move: int,
    head_P: IntArray, labels: Labels, count: int,
) -> int:  # fmt: skip
    """Write a label for each way to go on after a split; returns how many there are now."""
    int_LI, float_LF = labels
    target, device, end = moves.to_M[move], moves.device_M[move], head_P.size - 1
    is_first = int_LI[label, DEVICE] == CLOSED
    stages = int_LI[label, STAGES] + (1 if is_first else 0)
    if stages > MOST_STAGES:
        return count
    for ends in range(2):
        if not (target == end or limits.may_hop) if ends else (target == end or not limits.may_split):
            continue
        # The label is written at once and given up where it does not last.
        int_LI[count], float_LF[count] = int_LI[label], float_LF[label]
        here_F = float_LF[count]
        int_LI[count, PARENT], int_LI[count, MOVE], int_LI[count, STAGES] = label, move, stages
        int_LI[count, DEVICE] = CLOSED if ends else device
        if is_first and not limits.is_whole:
            int_LI[count, TYPES] = int_LI[label, TYPES] * (limits.price_C.size + 1) + device + 1
        here_F[WORK] += moves.work_M[move]
        here_F[LATENCY] += moves.seconds_M[move] + moves.cross_M[move]
        if not is_first and not moves.pooled_M[move]:
            here_F[BATCHES] += moves.wait_M[move]
        elif limits.is_whole:
            here_F[LATENCY] += moves.wait_M[move] / limits.rate
        else:
            here_F[FILL] += moves.wait_M[move]
        if ends and target != end:
            here_F[WORK] = max(here_F[WORK], moves.hop_work_M[move])
            here_F[LATENCY] += moves.hop_M[move]
        if ends and not _close(limits, here_F, device, stages):
            continue
        seconds = here_F[LATENCY] + here_F[FILL] / limits.rate + _waiting_s(here_F)
        here_F[TOTAL] = here_F[PRICE] + limits.price_C[device] * here_F[WORK] + limits.price_latency * seconds
        here_F[TOTAL] += closed_P[target] if ends else open_PC[target, device]
        if seconds <= limits.limit_s * (1 + 1e-9) and here_F[TOTAL] <= limits.most_price:
            int_LI[count, NEXT], head_P[target] = head_P[target], count
            count += 1
    return count


@compiled
def _close(limits: ChainLimits, here_F: FloatArray, device: int, stages: int) -> bool:
    """End the open stage; False where there are not so many devices."""
    work, slots = here_F[WORK], (here_F.size - WORKS) // 2
    if limits.is_whole:
        work = max(1.0, np.ceil(work * limits.rate * (1 - 1e-9))) / limits.rate
        here_F[WORKS + device] += work
        here_F[LATENCY] += here_F[BATCHES] * work
        if here_F[WORKS + device] * limits.rate > limits.count_C[device] + 0.5:
            return False
    else:
        here_F[WORKS + stages - 1] = work
        here_F[WORKS + slots + stages - 1] = here_F[BATCHES]
    here_F[PRICE] += limits.price_C[device] * work
    here_F[WORK], here_F[BATCHES] = 0.0, 0.0
    return True


@compiled
def _waiting_s(here_F: FloatArray) -> float:
    """The least that splits wait whose batches each replica fills: there are at least rate x work replicas."""
    slots = (here_F.size - WORKS) // 2
    total = here_F[BATCHES] * here_F[WORK]
    for stage in range(slots):
        total += here_F[WORKS + stage] * here_F[WORKS + slots + stage]
    return float(total)


@compiled
def _kept(head: int, labels: Labels, most: int) -> tuple[bool, IntArray]:
    """Whether none was left out, and the labels of a list that none beats.

    Of those with the same types and open device only the `most` cheapest are kept.
    """
    int_LI, float_LF = labels
    found_L = linked_labels(head, int_LI, NEXT)
    # What beats another is no dearer, so it comes first; then a stable sort brings the same types together.
    order_L = found_L[np.argsort(float_LF[:, TOTAL][found_L], kind="mergesort")]
    key_L = int_LI[:, TYPES][order_L] * 64 + int_LI[:, DEVICE][order_L] + 1
    together_L = np.argsort(key_L, kind="mergesort")
    order_L, key_L = order_L[together_L], key_L[together_L]
    return undominated(order_L, key_L, float_LF, LATENCY, float_LF.shape[1], ROUNDING, most)
