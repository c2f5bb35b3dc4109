"""A label search for chains: the paths through `optimizer.search.moves.Graph` that can be part of a good plan.

A label is a prefix of a path: *closed* between two stages, *open* inside one. A lower bound on the price of the
chains that complete a label adds the completion bound, the least price from the label's node to the end. Labels above
`max_price` are dropped. The other labels of a node are kept by one of three rules:

- For mixtures, the master problem chooses rates and replicas later. A label dominates another at the same node, with
  the same sequence of device types, if it is no worse in the work of each stage, in latency and in waits. This holds
  for every completion, also with integer replicas. All chains that can be part of an optimal plan are therefore found.
- At a given rate, replicas are integers on the available devices. A label dominates another at the same node if it
  needs no more replicas of any type and has no higher latency.
- A beam search keeps the cheapest labels without comparing them. It finds good plans of problems that are too big for
  an exact search. Every plan that it returns is valid, but it may miss plans.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from optimizer.search.compiled import compiled, inlined
from optimizer.search.moves import MoveArrays
from optimizer.search.space import Space
from optimizer.search.step import FloatArray, IntArray, Labels, undominated, with_doubled_capacity

MAX_STAGES = 6
"""Stages per chain of a mixture. The search does not find longer chains."""
CLOSED = -1
"""The device of a closed label."""
# Columns of `int_LI`.
DEVICE, TYPES, STAGES, PARENT, MOVE = 0, 1, 2, 3, 4
# Columns of `float_LF`: price of the closed stages; lower bound on the price of a completed chain; seconds in which the
# batches of closed stages wait for each other; other seconds; inputs for which batches at the ingress wait; work of the
# open stage; inputs for which the open stage's own batches wait. Then follow the replicas in use by device type (with
# `is_whole`), or the works of the closed stages and as many waits per replica.
PRICE, TOTAL, WAITED, LATENCY, FILL, WORK, BATCHES, USED = 0, 1, 2, 3, 4, 5, 6, 7
ROUNDING = 1e-12
TOLERANCE = 1e-9
UNLIMITED = 1 << 62
"""A number of labels that no search reaches."""
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
    """An upper bound on the rate of a chain or, with `is_whole`, its required rate."""
    wait_share: float
    """How long batches wait, relative to `rate`. Below 1, the search finds the plans of a relaxed problem."""
    is_whole: bool
    """Whether replicas are integers, and limited by `count_C` and `budget`."""
    count_C: FloatArray
    idle_C: FloatArray
    """Price of a replica that is left over because the type's other replicas are in use."""
    usd_C: FloatArray
    budget: float
    may_split: bool
    may_hop: bool
    other_price_VC: FloatArray = np.zeros((0, 0))
    """Other prices (V) by which labels are pruned, with `is_whole`. Each row is a valid bound, as `price_C` is."""
    other_latency_V: FloatArray = np.zeros(0)
    other_max_V: FloatArray = np.zeros(0)


def limits_of_prices(price_C: FloatArray, price_latency: float, rate: float, space: Space) -> ChainLimits:
    """Returns limits that allow the chains of a space any price, any latency, and fractions of replicas."""
    nothing_C = np.zeros(len(price_C))
    return ChainLimits(
        price_C=price_C,
        price_latency=float(price_latency),
        max_price=math.inf,
        limit_s=math.inf,
        rate=float(rate),
        wait_share=1.0,
        is_whole=False,
        count_C=nothing_C,
        idle_C=nothing_C,
        usd_C=nothing_C,
        budget=math.inf,
        may_split=space.splits_per_stage,
        may_hop=space.several_stages,
    )


class Bounds(NamedTuple):
    """The least price of each split, and of the way from each node to the end (the completion bounds)."""

    price_MFE: FloatArray
    """By whether the split is the first of its stage (F is 1), and the last (E is 1). Infinity: not allowed."""
    closed_P: FloatArray
    open_PC: FloatArray
    """By device of the open stage."""


@compiled
def completion_bounds(moves: MoveArrays, limits: ChainLimits, price_C: FloatArray, price_latency: float) -> Bounds:
    """Returns the bounds at these prices of a device second per input and of latency, by a backward pass."""
    # Kernels access local arrays much faster than those of a named tuple.
    first_move_P, to_M, device_M, end = moves.first_move_P, moves.to_M, moves.device_M, moves.first_move_P.size - 2
    price_MFE = _split_prices(moves, limits, price_C, price_latency)
    closed_P, open_PC = np.full(end + 1, np.inf), np.full((end + 1, price_C.size), np.inf)
    closed_P[end] = 0.0
    for node in range(end - 1, -1, -1):
        for move in range(first_move_P[node], first_move_P[node + 1]):
            device, target = device_M[move], to_M[move]
            goes_on, ends = open_PC[target, device], closed_P[target]
            first = min(price_MFE[move, 1, 0] + goes_on, price_MFE[move, 1, 1] + ends)
            later = min(price_MFE[move, 0, 0] + goes_on, price_MFE[move, 0, 1] + ends)
            closed_P[node], open_PC[node, device] = min(closed_P[node], first), min(open_PC[node, device], later)
    return Bounds(price_MFE, closed_P, open_PC)


@compiled
def _split_prices(moves: MoveArrays, limits: ChainLimits, price_C: FloatArray, price_latency: float) -> FloatArray:
    device_M, to_M, work_M, seconds_M, wait_M = moves.device_M, moves.to_M, moves.work_M, moves.seconds_M, moves.wait_M
    hop_M, hop_work_M, cross_M, pooled_M = moves.hop_M, moves.hop_work_M, moves.cross_M, moves.pooled_M
    end, price_MFE = moves.first_move_P.size - 2, np.full((to_M.size, 2, 2), np.inf)
    for move in range(to_M.size):
        price = price_C[device_M[move]]
        for is_first in range(2):
            # A later split waits for a batch per replica, and the stage has at least as many replicas as it needs.
            wait_s = wait_M[move] / limits.rate if is_first or pooled_M[move] else seconds_M[move]
            seconds = seconds_M[move] + cross_M[move] + limits.wait_share * wait_s
            if limits.may_split:
                price_MFE[move, is_first, 0] = price * work_M[move] + price_latency * seconds
            if limits.may_hop or to_M[move] == end:
                work = max(work_M[move], hop_work_M[move]) if is_first else work_M[move]
                price_MFE[move, is_first, 1] = price * work + price_latency * (seconds + hop_M[move])
    return price_MFE


class Incoming(NamedTuple):
    """The moves (I), grouped by the node that they lead to."""

    first_P: IntArray
    move_I: IntArray
    from_I: IntArray


@compiled
def _incoming_moves(moves: MoveArrays) -> Incoming:
    first_P = np.zeros(moves.first_move_P.size, dtype=np.int64)
    for target in moves.to_M:
        first_P[target + 1] += 1
    first_P = np.cumsum(first_P)
    next_P, incoming = first_P.copy(), Incoming(first_P, np.empty_like(moves.to_M), np.empty_like(moves.to_M))
    for node in range(moves.first_move_P.size - 1):
        # Of equally good labels the first is kept. It has the later ramp, so that inputs leave where it costs nothing.
        for move in range(moves.first_move_P[node + 1] - 1, moves.first_move_P[node] - 1, -1):
            place = next_P[moves.to_M[move]]
            next_P[moves.to_M[move]] += 1
            incoming.move_I[place], incoming.from_I[place] = move, node
    return incoming


@compiled
def _least_replicas(moves: MoveArrays, limits: ChainLimits) -> FloatArray:
    """Returns, per node and device, the fewest replicas of any stage at or after the node."""
    least_PC = np.full((moves.first_move_P.size - 1, limits.price_C.size), np.inf)
    for node in range(moves.first_move_P.size - 3, -1, -1):
        least_PC[node] = least_PC[node + 1]
        for move in range(moves.first_move_P[node], moves.first_move_P[node + 1]):
            device, work = moves.device_M[move], max(moves.work_M[move], moves.hop_work_M[move])
            least_PC[node, device] = min(least_PC[node, device], work)
    return np.ceil(limits.rate * least_PC * (1 - TOLERANCE))


@compiled
def _longest_latencies(moves: MoveArrays, limits: ChainLimits, bounds: Bounds) -> FloatArray:
    """Returns an upper bound on the latency from each node to the end, over the chains that are cheap enough."""
    first_move_P, to_M, device_M, wait_M = moves.first_move_P, moves.to_M, moves.device_M, moves.wait_M
    seconds_M, hop_M, cross_M, (price_MFE, closed_P, open_PC) = moves.seconds_M, moves.hop_M, moves.cross_M, bounds
    spare, longest_P = limits.max_price - closed_P[0], np.zeros(closed_P.size)
    for node in range(closed_P.size - 2, -1, -1):
        for move in range(first_move_P[node], first_move_P[node + 1]):
            device, target = device_M[move], to_M[move]
            goes_on, ends = open_PC[target, device], closed_P[target]
            first = min(price_MFE[move, 1, 0] + goes_on, price_MFE[move, 1, 1] + ends) - closed_P[node]
            later = min(price_MFE[move, 0, 0] + goes_on, price_MFE[move, 0, 1] + ends) - open_PC[node, device]
            if min(first, later) <= spare:
                wait_s = limits.wait_share * limits.count_C[device] * wait_M[move] / limits.rate
                path_s = seconds_M[move] + hop_M[move] + cross_M[move] + wait_s + longest_P[target]
                longest_P[node] = max(longest_P[node], path_s)
    return longest_P


@compiled
def _other_bounds(moves: MoveArrays, limits: ChainLimits) -> tuple[FloatArray, FloatArray]:
    """Returns the completion bounds at the other prices, of closed and of open labels."""
    num_nodes, num_devices, num_rows = moves.first_move_P.size - 1, limits.count_C.size, limits.other_max_V.size
    closed_PV, open_PCV = np.empty((num_nodes, num_rows)), np.empty((num_nodes, num_devices, num_rows))
    for row in range(num_rows):
        bounds = completion_bounds(moves, limits, limits.other_price_VC[row], limits.other_latency_V[row])
        closed_PV[:, row], open_PCV[:, :, row] = bounds.closed_P, bounds.open_PC
    return closed_PV, open_PCV


class Step(NamedTuple):
    """One way to extend labels of a node: by a move, with the stage left open or ended."""

    move: int
    is_first: int
    """1 if the move is the first split of its stage, else 0."""
    ends: int
    """1 if the stage ends with the move, else 0."""
    after: float
    """The completion bound after the move."""
    after_s: float
    """The least latency after the move."""
    longest_s: float
    """An upper bound on the latency after the move."""
    other_after_V: FloatArray
    """The completion bounds after the move at the other prices."""
    least: float
    """The least amount by which the step raises a label's lower bound."""


@compiled
def search_labels(
    moves: MoveArrays, limits: ChainLimits, max_labels: int, max_per_group: int, is_beam: bool
) -> tuple[int, Labels, IntArray]:
    """Returns the outcome, the labels, and the labels at the model's end, the cheapest first.

    TRUNCATED means that only the cheapest `max_per_group` labels of a group were kept. A group consists of labels of a
    node that are compared with each other. In a beam search, the closed labels of a node are a group, and of its open
    labels half as many are kept. ABORTED means that there were more than `max_labels` labels in all.
    """
    bounds = completion_bounds(moves, limits, limits.price_C, limits.price_latency)
    price_MFE, closed_P, open_PC = bounds
    longest_P = _longest_latencies(moves, limits, bounds)
    other_closed_PV, other_open_PCV = _other_bounds(moves, limits)
    _, closed_s_P, open_s_PC = completion_bounds(moves, limits, np.zeros(limits.price_C.size), 1.0)
    least_PC = _least_replicas(moves, limits)
    (first_in_P, move_I, from_I), device_M, end = _incoming_moves(moves), moves.device_M, moves.first_move_P.size - 2
    num_columns = USED + (limits.price_C.size if limits.is_whole else 2 * MAX_STAGES)
    labels = Labels(np.zeros((1 << 12, 5), dtype=np.int64), np.zeros((1 << 12, num_columns)))
    labels.int_LI[0, DEVICE], labels.int_LI[0, PARENT], labels.float_LF[0, TOTAL] = CLOSED, -1, closed_P[0]
    # The first open label of each node, the first closed label, and the label after the last one.
    first_PK = np.zeros((end + 1, 3), dtype=np.int64)
    first_PK[0, 2] = 1
    count = made = first_PK[0, 2]  # a literal 1 would have a type of its own, for which kernels are compiled once more
    outcome = COMPLETE
    for node in range(1, end + 1):
        first_PK[node, 0] = count
        for ends in range(2):
            first, cutoff = count, limits.max_price
            most = max_per_group // 2 if is_beam and not ends else max_per_group
            for position in range(first_in_P[node], first_in_P[node + 1]):
                move, start = move_I[position], from_I[position]
                if first_PK[start, 0] == first_PK[start, 2]:
                    continue  # no label reached this node
                after = closed_P[node] if ends else open_PC[node, device_M[move]]
                after_s = closed_s_P[node] if ends else open_s_PC[node, device_M[move]]
                for is_first in range(2):
                    low, high = first_PK[start, is_first], first_PK[start, is_first + 1]
                    if low == high or after == np.inf:
                        continue
                    before = closed_P[start] if is_first else open_PC[start, device_M[move]]
                    least = price_MFE[move, is_first, ends] + after - before
                    if labels.float_LF[low, TOTAL] + least > cutoff:
                        continue
                    while count + high - low > labels.int_LI.shape[0]:
                        labels = with_doubled_capacity(labels)
                    other_after_V = other_closed_PV[node] if ends else other_open_PCV[node, device_M[move]]
                    step = Step(move, is_first, ends, after, after_s, longest_P[node], other_after_V, least)
                    capacity = first + 4 * most if is_beam else -1
                    count, cutoff = _extend(
                        moves, limits, step, least_PC[node], cutoff, labels, low, high, first, count, capacity
                    )
                if made + count - first > max_labels:
                    return ABORTED, Labels(labels.int_LI[:count], labels.float_LF[:count]), np.arange(0)
            made += count - first
            is_complete, count = _select(labels, first, count, most, is_beam)
            outcome = outcome if is_complete else TRUNCATED
            first_PK[node, ends + 1] = count
    return outcome, Labels(labels.int_LI[:count], labels.float_LF[:count]), np.arange(first_PK[end, 1], count)


@compiled
def _extend(
    moves: MoveArrays, limits: ChainLimits, step: Step, least_C: FloatArray, cutoff: float, labels: Labels,
    low: int, high: int, first: int, count: int, capacity: int,
) -> tuple[int, float]:  # fmt: skip
    """Extends labels `low` to `high` - 1 by a step, as far as they can become plans at a price of at most `cutoff`.

    Returns the number of labels and the new `cutoff`. If there are `capacity` labels, a quarter of those from `first`
    on is kept.
    """
    int_LI, float_LF = labels
    move, ends, rate, limit_s = step.move, step.ends, limits.rate, limits.limit_s * (1 + TOLERANCE) - step.after_s
    device, seconds, inputs = moves.device_M[move], moves.seconds_M[move] + moves.cross_M[move], moves.wait_M[move]
    waits_alone = not step.is_first and not moves.pooled_M[move]
    if limits.is_whole and not waits_alone:  # the rate is given, so that the wait is known
        seconds, inputs = seconds + limits.wait_share * inputs / rate, 0.0
    own_batches, own_fill = inputs if waits_alone else 0.0, 0.0 if waits_alone else inputs
    own_work, hop_work = moves.work_M[move], moves.hop_work_M[move] if ends else 0.0
    seconds += moves.hop_M[move] if ends else 0.0
    most_held = limits.wait_share * limits.count_C[device] / rate
    for label in range(low, high):
        if float_LF[label, TOTAL] + step.least > cutoff:
            break
        if not step.is_first and int_LI[label, DEVICE] != device:
            continue
        work, batches = max(float_LF[label, WORK] + own_work, hop_work), float_LF[label, BATCHES] + own_batches
        latency_s, fill = float_LF[label, LATENCY] + seconds, float_LF[label, FILL] + own_fill
        replicas, held = 0.0, work
        if limits.is_whole:
            replicas = max(np.ceil(work * rate * (1 - ROUNDING)), 1.0)
            held = replicas / rate
            if float_LF[label, USED + device] + replicas > limits.count_C[device]:
                continue
        wait_s = fill / rate + float_LF[label, WAITED] + batches * held
        total_s = latency_s + limits.wait_share * wait_s
        price = float_LF[label, PRICE] + limits.price_C[device] * (held if ends else work)
        total = price + limits.price_latency * total_s + step.after
        if total_s > limit_s or total > cutoff:
            continue
        if limits.is_whole:
            own = replicas if ends else rate * work
            total += _idle_price(limits, least_C, float_LF, label, device, own, ends)
            if total > cutoff or not _may_complete(limits, step, float_LF, label, device, own, total_s):
                continue
            if latency_s + (ends * held + (1 - ends) * most_held) * batches + step.longest_s <= limits.limit_s:
                latency_s, batches = 0.0, 0.0  # its latency no longer matters
        elif int_LI[label, STAGES] + step.is_first > MAX_STAGES:
            continue
        _write_integers(limits, step, device, int_LI, label, count)
        for column in range(float_LF.shape[1]):
            float_LF[count, column] = float_LF[label, column]
        float_LF[count, TOTAL], float_LF[count, LATENCY], float_LF[count, FILL] = total, latency_s, fill
        float_LF[count, WORK], float_LF[count, BATCHES] = work, batches
        if ends:
            _close_stage(limits, int_LI, float_LF, count, device, price, held, replicas)
        count += 1
        if count == capacity:
            _, count = _select(labels, first, count, (capacity - first) // 4, capacity > 0)
            cutoff = float_LF[count - 1, TOTAL]
    return count, cutoff


@inlined
def _idle_price(
    limits: ChainLimits, least_C: FloatArray, float_LF: FloatArray, label: int, device: int, own: float, ends: int
) -> float:
    """Returns the price of the replicas that are too few for any further stage; infinity above the budget.

    `own` is the number of replicas of the last stage, or a lower bound on it if the stage goes on.
    """
    price, usd = 0.0, 0.0
    for other in range(limits.count_C.size):
        used = float_LF[label, USED + other] + (own if other == device else 0.0)
        usd += limits.usd_C[other] * used
        left = limits.count_C[other] - used
        if (ends or other != device) and left < least_C[other]:
            price += limits.idle_C[other] * left
    return price if usd <= limits.budget * (1 + TOLERANCE) else np.inf


@inlined
def _may_complete(
    limits: ChainLimits, step: Step, float_LF: FloatArray, label: int, device: int, own: float, total_s: float
) -> bool:
    """Returns False if the other prices prove that a label with `own` more replicas leads to no plan."""
    for row in range(limits.other_max_V.size):
        price = step.other_after_V[row] + limits.other_latency_V[row] * total_s
        price += limits.other_price_VC[row, device] * own / limits.rate
        for other in range(limits.count_C.size):
            price += limits.other_price_VC[row, other] * float_LF[label, USED + other] / limits.rate
        if price > limits.other_max_V[row]:
            return False
    return True


@inlined
def _write_integers(limits: ChainLimits, step: Step, device: int, int_LI: IntArray, parent: int, label: int) -> None:
    int_LI[label, DEVICE] = CLOSED if step.ends else device
    int_LI[label, TYPES] = int_LI[parent, TYPES]
    if step.is_first and not limits.is_whole:
        int_LI[label, TYPES] = int_LI[parent, TYPES] * (limits.price_C.size + 1) + device + 1
    int_LI[label, STAGES] = int_LI[parent, STAGES] + step.is_first
    int_LI[label, PARENT], int_LI[label, MOVE] = parent, step.move


@inlined
def _close_stage(
    limits: ChainLimits, int_LI: IntArray, float_LF: FloatArray, label: int, device: int, price: float, held: float,
    replicas: float,
) -> None:  # fmt: skip
    """Closes a label's stage, which holds `held` device seconds per input."""
    stage, batches = int_LI[label, STAGES] - 1, float_LF[label, BATCHES]
    if limits.is_whole:
        float_LF[label, USED + device] += replicas
        float_LF[label, LATENCY] += limits.wait_share * batches * held
    else:
        float_LF[label, USED + stage], float_LF[label, USED + MAX_STAGES + stage] = held, batches
        float_LF[label, WAITED] += batches * held
    float_LF[label, PRICE], float_LF[label, WORK], float_LF[label, BATCHES] = price, 0.0, 0.0


@compiled
def _select(labels: Labels, first: int, count: int, most: int, is_beam: bool) -> tuple[bool, int]:
    """Keeps the undominated labels from `first` on or, in a beam search, the cheapest ones, in the order of prices.

    Returns whether all undominated labels were kept, and the number of labels.
    """
    int_LI, float_LF = labels
    # A label that dominates another is no dearer. Labels are sorted by price, and then stably by group.
    is_complete = count - first <= most
    if is_beam:
        kept_L = first + np.argsort(float_LF[first:count, TOTAL].copy(), kind="mergesort")[:most]
    else:
        kept_L = first + np.argsort(float_LF[first:count, TOTAL].copy(), kind="mergesort")
        group_L = int_LI[:, TYPES][kept_L] * 64 + int_LI[:, DEVICE][kept_L] + 1
        by_group_L = np.argsort(group_L, kind="mergesort")
        is_complete, kept_L = undominated(
            kept_L[by_group_L], group_L[by_group_L], float_LF, LATENCY, float_LF.shape[1], ROUNDING, most
        )
        kept_L = kept_L[np.argsort(float_LF[:, TOTAL][kept_L], kind="mergesort")]
    end = first + kept_L.size
    int_LI[first:end], float_LF[first:end] = int_LI[kept_L], float_LF[kept_L]
    return is_complete, end


def trace(moves: MoveArrays, labels: Labels, label: int) -> list[tuple[int, int, int]]:
    """Returns node, move and whether it ends a stage, for each split of the chain that a label represents."""
    path: list[tuple[int, int]] = []
    while labels.int_LI[label, PARENT] >= 0:
        path.insert(0, (int(labels.int_LI[label, MOVE]), int(labels.int_LI[label, DEVICE] == CLOSED)))
        label = int(labels.int_LI[label, PARENT])
    node_S = [0, *(int(moves.to_M[move]) for move, _ in path)]
    return [(node, move, ends) for node, (move, ends) in zip(node_S, path, strict=False)]
