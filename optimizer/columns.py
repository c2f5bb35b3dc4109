"""Column generation: a label-setting search for the chains that can be part of a good plan.

A chain is a path through `optimizer.moves.Graph`, and a label is a prefix of a path. Labels that cannot be completed
within `max_price` are pruned. The completion bound, the least price from a node to the end, comes from a backward pass.
Remaining labels are compared by one of two dominance rules:

- For mixtures, the master problem chooses rates and replicas later. A label dominates another at the same node, with
  the same sequence of device types, if it is no worse in the work of each stage, in latency and in waits. This holds
  for every completion, also with integer replicas. All chains that can be part of an optimal plan are therefore found.
- At a given rate, replicas are integers on the available devices. A label dominates another at the same node if it
  needs no more replicas of any type and has no higher latency.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optimizer.compiled import compiled, inlined
from optimizer.moves import MoveArrays
from optimizer.step import FloatArray, IntArray, Labels, linked_labels, undominated, with_doubled_capacity

MAX_STAGES = 6
"""Stages per chain. The search does not find longer chains."""
CLOSED = -1
"""The device of a label whose last stage ends at its node."""
# Columns of `int_LI`.
DEVICE, TYPES, STAGES, PARENT, MOVE, NEXT = 0, 1, 2, 3, 4, 5
# Columns of `float_LF`: price of the closed stages; lower bound on the price of a completed chain; seconds; inputs for
# which batches at the ingress wait; work of the open stage; inputs for which the open stage's own batches wait. Then
# follow the works of the closed stages, by stage or (with `is_whole`) by device type, and as many waits per replica.
PRICE, TOTAL, LATENCY, FILL, WORK, BATCHES, WORKS = 0, 1, 2, 3, 4, 5, 6
ROUNDING = 1e-12
COMPLETE, TRUNCATED, ABORTED = 0, 1, 2
"""Outcomes of a search: all undominated labels were kept, the cheapest ones of each group, or there were too many."""


class ChainLimits(NamedTuple):
    """Prices and limits of a label search."""

    price_C: FloatArray
    """Price of a device second per input, by device type."""
    price_latency: float
    max_price: float
    limit_s: float
    rate: float
    """An upper bound on the rate of a chain or, with `is_whole`, its required rate. Batches wait as at this rate."""
    is_whole: bool
    """Whether replicas are integers, and limited by `count_C`."""
    count_C: FloatArray
    may_split: bool
    may_hop: bool


@inlined
def _completion_prices(
    moves: MoveArrays, limits: ChainLimits, closed_P: FloatArray, open_PC: FloatArray, move: int
) -> tuple[float, float]:
    """Returns the least price from a move to the end, if it is the first split of a stage and if it is a later one."""
    end, device, target = closed_P.size - 1, moves.device_M[move], moves.to_M[move]
    rest = closed_P[end] if target == end else np.inf
    if target != end and limits.may_hop:
        rest = closed_P[target] + limits.price_latency * moves.hop_M[move]
    if target != end and limits.may_split:
        rest = min(rest, open_PC[target, device])
    price = limits.price_C[device] * moves.work_M[move] + rest
    price += limits.price_latency * (moves.seconds_M[move] + moves.cross_M[move])
    first_wait_s = moves.wait_M[move] / limits.rate
    later_wait_s = first_wait_s if moves.pooled_M[move] else moves.seconds_M[move]
    return price + limits.price_latency * first_wait_s, price + limits.price_latency * later_wait_s


@compiled
def completion_bounds(moves: MoveArrays, limits: ChainLimits) -> tuple[FloatArray, FloatArray]:
    """Returns the least price from each node to the end: after a closed stage, and by device of an open stage."""
    end, num_devices = moves.first_move_P.size - 2, limits.price_C.size
    closed_P, open_PC = np.full(end + 1, np.inf), np.full((end + 1, num_devices), np.inf)
    closed_P[end] = 0.0
    for node in range(end - 1, -1, -1):
        for move in range(moves.first_move_P[node], moves.first_move_P[node + 1]):
            device = moves.device_M[move]
            first, later = _completion_prices(moves, limits, closed_P, open_PC, move)
            closed_P[node] = min(closed_P[node], first)
            open_PC[node, device] = min(open_PC[node, device], later)
    return closed_P, open_PC


@compiled
def _moves_by_reduced_cost(
    moves: MoveArrays, limits: ChainLimits, closed_P: FloatArray, open_PC: FloatArray
) -> tuple[IntArray, FloatArray]:
    """Returns each node's moves by reduced cost, the least amount by which a move raises a bound, and these costs."""
    order_M, reduced_M = np.empty(moves.to_M.size, dtype=np.int64), np.empty(moves.to_M.size)
    for node in range(closed_P.size - 1):
        own = slice(moves.first_move_P[node], moves.first_move_P[node + 1])
        for move in range(own.start, own.stop):
            first, later = _completion_prices(moves, limits, closed_P, open_PC, move)
            reduced_M[move] = np.inf
            if first < np.inf:
                reduced_M[move] = first - closed_P[node]
            if later < np.inf:
                reduced_M[move] = min(reduced_M[move], later - open_PC[node, moves.device_M[move]])
        order_M[own] = own.start + np.argsort(reduced_M[own])
    return order_M, reduced_M


@compiled
def search_labels(
    moves: MoveArrays, limits: ChainLimits, max_labels: int, max_per_group: int
) -> tuple[int, Labels, IntArray]:
    """Returns the outcome, the labels, and the undominated labels at the model's end.

    TRUNCATED means that only the cheapest `max_per_group` labels of a group were kept. A group consists of labels of a
    node that are compared with each other. ABORTED means that there were more than `max_labels` labels in all.
    """
    closed_P, open_PC = completion_bounds(moves, limits)
    order_M, reduced_M = _moves_by_reduced_cost(moves, limits, closed_P, open_PC)
    end, slots = moves.first_move_P.size - 2, max(MAX_STAGES, limits.price_C.size)
    labels = Labels(np.zeros((1 << 12, 6), dtype=np.int64), np.zeros((1 << 12, WORKS + 2 * slots)))
    head_P = np.full(end + 1, -1)
    labels.int_LI[0, DEVICE], labels.int_LI[0, PARENT], labels.int_LI[0, NEXT] = CLOSED, -1, -1
    head_P[0] = 0
    count, outcome = 1, COMPLETE
    for node in range(end):
        is_complete, kept_L = _undominated_at(head_P[node], labels, max_per_group)
        outcome = outcome if is_complete else TRUNCATED
        for label in kept_L:
            slack = limits.max_price - labels.float_LF[label, TOTAL]
            for move in order_M[moves.first_move_P[node] : moves.first_move_P[node + 1]]:
                if reduced_M[move] > slack:
                    break
                if labels.int_LI[label, DEVICE] not in (CLOSED, moves.device_M[move]):
                    continue
                if count + 2 > labels.int_LI.shape[0]:
                    if count > max_labels:
                        return ABORTED, labels, np.empty(0, dtype=np.int64)
                    labels = with_doubled_capacity(labels)
                count = _extend(moves, limits, closed_P, open_PC, label, move, head_P, labels, count)
    is_complete, kept_L = _undominated_at(head_P[end], labels, max_per_group)
    return outcome if is_complete else TRUNCATED, labels, kept_L


@compiled
def _extend(
    moves: MoveArrays, limits: ChainLimits, closed_P: FloatArray, open_PC: FloatArray, label: int, move: int,
    head_P: IntArray, labels: Labels, count: int,
) -> int:  # fmt: skip
    """Extends a label by a move, with the stage left open and with the stage closed; returns the number of labels."""
    int_LI, float_LF = labels
    target, device, end = moves.to_M[move], moves.device_M[move], head_P.size - 1
    is_first = int_LI[label, DEVICE] == CLOSED
    stages = int_LI[label, STAGES] + (1 if is_first else 0)
    if stages > MAX_STAGES:
        return count
    may_end, may_stay_open = target == end or limits.may_hop, target != end and limits.may_split
    for ends in range(2):
        if not (may_end if ends else may_stay_open):
            continue
        # The label is written in place. It is overwritten by the next label if it is pruned.
        int_LI[count], float_LF[count] = int_LI[label], float_LF[label]
        label_F = float_LF[count]
        int_LI[count, PARENT], int_LI[count, MOVE], int_LI[count, STAGES] = label, move, stages
        int_LI[count, DEVICE] = CLOSED if ends else device
        if is_first and not limits.is_whole:
            int_LI[count, TYPES] = int_LI[label, TYPES] * (limits.price_C.size + 1) + device + 1
        label_F[WORK] += moves.work_M[move]
        label_F[LATENCY] += moves.seconds_M[move] + moves.cross_M[move]
        if not is_first and not moves.pooled_M[move]:
            label_F[BATCHES] += moves.wait_M[move]
        elif limits.is_whole:
            label_F[LATENCY] += moves.wait_M[move] / limits.rate
        else:
            label_F[FILL] += moves.wait_M[move]
        if ends and target != end:
            label_F[WORK] = max(label_F[WORK], moves.hop_work_M[move])
            label_F[LATENCY] += moves.hop_M[move]
        if ends and not _close_stage(limits, label_F, device, stages):
            continue
        seconds = label_F[LATENCY] + label_F[FILL] / limits.rate + _waiting_s(label_F)
        label_F[TOTAL] = label_F[PRICE] + limits.price_C[device] * label_F[WORK] + limits.price_latency * seconds
        label_F[TOTAL] += closed_P[target] if ends else open_PC[target, device]
        if seconds <= limits.limit_s * (1 + 1e-9) and label_F[TOTAL] <= limits.max_price:
            int_LI[count, NEXT], head_P[target] = head_P[target], count
            count += 1
    return count


@compiled
def _close_stage(limits: ChainLimits, label_F: FloatArray, device: int, stages: int) -> bool:
    """Closes the open stage of a label; returns False if that takes more devices than available."""
    work, slots = label_F[WORK], (label_F.size - WORKS) // 2
    if limits.is_whole:
        work = max(1.0, np.ceil(work * limits.rate * (1 - 1e-9))) / limits.rate
        label_F[WORKS + device] += work
        label_F[LATENCY] += label_F[BATCHES] * work
        if label_F[WORKS + device] * limits.rate > limits.count_C[device] + 0.5:
            return False
    else:
        label_F[WORKS + stages - 1] = work
        label_F[WORKS + slots + stages - 1] = label_F[BATCHES]
    label_F[PRICE] += limits.price_C[device] * work
    label_F[WORK], label_F[BATCHES] = 0.0, 0.0
    return True


@compiled
def _waiting_s(label_F: FloatArray) -> float:
    """Returns a lower bound on the waits of batches that each replica fills: at least rate x work replicas exist."""
    slots = (label_F.size - WORKS) // 2
    total = label_F[BATCHES] * label_F[WORK]
    for stage in range(slots):
        total += label_F[WORKS + stage] * label_F[WORKS + slots + stage]
    return float(total)


def trace(labels: Labels, label: int) -> list[list[int]]:
    """Returns the moves of the chain that a label at the model's end represents, by stage."""
    stages: list[list[int]] = []
    while labels.int_LI[label, PARENT] >= 0:
        if labels.int_LI[label, DEVICE] == CLOSED:
            stages.insert(0, [])
        stages[0].insert(0, int(labels.int_LI[label, MOVE]))
        label = int(labels.int_LI[label, PARENT])
    return stages


@compiled
def _undominated_at(head: int, labels: Labels, most: int) -> tuple[bool, IntArray]:
    """Returns whether all undominated labels of a list were kept, and those labels.

    At most `most` labels with the same types and open device are kept, the cheapest ones.
    """
    int_LI, float_LF = labels
    listed_L = linked_labels(head, int_LI, NEXT)
    # A label that dominates another is no dearer. Labels are sorted by price, and then stably by group.
    order_L = listed_L[np.argsort(float_LF[:, TOTAL][listed_L], kind="mergesort")]
    group_L = int_LI[:, TYPES][order_L] * 64 + int_LI[:, DEVICE][order_L] + 1
    by_group_L = np.argsort(group_L, kind="mergesort")
    order_L, group_L = order_L[by_group_L], group_L[by_group_L]
    return undominated(order_L, group_L, float_LF, LATENCY, float_LF.shape[1], ROUNDING, most)
