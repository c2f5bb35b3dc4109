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

from optimizer.problems.problem import PlanProblem
from optimizer.search.compiled import Labels, compiled, dominates, with_doubled_capacity
from optimizer.search.moves import MoveArrays, Path
from optimizer.search.space import Space
from profiles.scores import FloatArray, IntArray

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
    rate: float
    """An upper bound on the rate of a chain or, with `is_whole`, its required rate."""
    may_split: bool
    may_hop: bool
    count_C: FloatArray
    idle_C: FloatArray
    """Price of a replica that is left over because the type's other replicas are in use."""
    usd_C: FloatArray
    limit_s: float
    max_price: float = math.inf
    wait_share: float = 1.0
    """How long batches wait, relative to `rate`. Below 1, the search finds the plans of a relaxed problem."""
    is_whole: bool = False
    """Whether replicas are integers, and limited by `count_C` and `budget`."""
    budget: float = math.inf


def limits_of(
    problem: PlanProblem, space: Space, price_C: FloatArray, price_latency: float, rate: float
) -> ChainLimits:
    """Returns limits that allow the chains of a problem any price, and fractions of replicas."""
    return ChainLimits(
        price_C=price_C,
        price_latency=float(price_latency),
        rate=float(rate),
        may_split=space.splits_per_stage,
        may_hop=space.several_stages,
        count_C=problem.count_C,
        idle_C=np.zeros(len(price_C)),
        usd_C=problem.usd_C,
        limit_s=float(problem.slo.limit_s),
    )


class Bounds(NamedTuple):
    """The least price of each split, and of the way from each node to the end (the completion bounds)."""

    price_MFE: FloatArray
    """By whether the split is the first of its stage (F is 1), and the last (E is 1). Infinity: not allowed."""
    least_PS: FloatArray
    """By the state of a label (S): the device of its open stage, or CLOSED, which is the last index."""
    first_PS: IntArray
    """The first move of the cheapest way, times 2, plus 1 if a stage ends with the move."""


@compiled
def completion_bounds(moves: MoveArrays, limits: ChainLimits, price_C: FloatArray, price_latency: float) -> Bounds:
    """Returns the bounds at these prices of a device second per input and of latency, by a backward pass."""
    # Kernels access local arrays much faster than those of a named tuple.
    from_M, to_M, device_M = moves.from_M, moves.to_M, moves.device_M
    shape = moves.first_in_P.size - 1, price_C.size + 1
    price_MFE = _split_prices(moves, limits, price_C, price_latency)
    least_PS, first_PS = np.full(shape, np.inf), np.zeros(shape, dtype=np.int64)
    least_PS[-1, CLOSED] = 0.0
    for move in range(to_M.size - 1, -1, -1):
        node, device = from_M[move], device_M[move]
        goes_on, ends = least_PS[to_M[move], device], least_PS[to_M[move], CLOSED]
        for is_first, state in enumerate((device, CLOSED)):
            open_price, closed_price = price_MFE[move, is_first, 0] + goes_on, price_MFE[move, is_first, 1] + ends
            price = min(open_price, closed_price)
            if price < least_PS[node, state]:
                least_PS[node, state], first_PS[node, state] = price, 2 * move + int(closed_price < open_price)
    return Bounds(price_MFE, least_PS, first_PS)


@compiled
def _split_prices(moves: MoveArrays, limits: ChainLimits, price_C: FloatArray, price_latency: float) -> FloatArray:
    device_M, to_M, work_M, seconds_M, wait_M = moves.device_M, moves.to_M, moves.work_M, moves.seconds_M, moves.wait_M
    hop_M, hop_work_M, cross_M, pooled_M = moves.hop_M, moves.hop_work_M, moves.cross_M, moves.pooled_M
    end, price_MFE = moves.first_in_P.size - 2, np.full((to_M.size, 2, 2), np.inf)
    for move in range(to_M.size):
        price = price_C[device_M[move]]
        for is_first in range(2):
            # A later split waits for a batch per replica, and the stage has at least as many replicas as it needs.
            wait_s = wait_M[move] * (1 / limits.rate if is_first or pooled_M[move] else work_M[move])
            seconds = seconds_M[move] + cross_M[move] + limits.wait_share * wait_s
            if limits.may_split:
                price_MFE[move, is_first, 0] = price * work_M[move] + price_latency * seconds
            if limits.may_hop or to_M[move] == end:
                work = max(work_M[move], hop_work_M[move]) if is_first else work_M[move]
                price_MFE[move, is_first, 1] = price * work + price_latency * (seconds + hop_M[move])
    return price_MFE


@compiled
def _least_replicas(moves: MoveArrays, limits: ChainLimits) -> FloatArray:
    """Returns, per node and device, the fewest replicas of any stage at or after the node."""
    from_M, device_M, work_M, hop_work_M = moves.from_M, moves.device_M, moves.work_M, moves.hop_work_M
    least_PC = np.full((moves.first_in_P.size - 1, limits.price_C.size), np.inf)
    for move in range(from_M.size):
        node, device = from_M[move], device_M[move]
        least_PC[node, device] = min(least_PC[node, device], max(work_M[move], hop_work_M[move]))
    for node in range(least_PC.shape[0] - 2, -1, -1):
        least_PC[node] = np.minimum(least_PC[node], least_PC[node + 1])
    return np.ceil(limits.rate * least_PC * (1 - TOLERANCE))


@compiled
def _longest_latencies(moves: MoveArrays, limits: ChainLimits, bounds: Bounds) -> FloatArray:
    """Returns an upper bound on the latency from each node to the end, over the chains that are cheap enough."""
    from_M, to_M, device_M, (price_MFE, least_PS, _) = moves.from_M, moves.to_M, moves.device_M, bounds
    path_s_M = moves.seconds_M + moves.hop_M + moves.cross_M
    path_s_M += limits.wait_share * limits.count_C[device_M] * moves.wait_M / limits.rate
    spare, longest_P = limits.max_price - least_PS[0, CLOSED], np.zeros(least_PS.shape[0])
    for move in range(to_M.size - 1, -1, -1):
        node, target, device = from_M[move], to_M[move], device_M[move]
        for is_first, state in enumerate((device, CLOSED)):
            goes_on, ends = price_MFE[move, is_first, 0] + least_PS[target, device], price_MFE[move, is_first, 1]
            if min(goes_on, ends + least_PS[target, CLOSED]) - least_PS[node, state] <= spare:
                longest_P[node] = max(longest_P[node], path_s_M[move] + longest_P[target])
    return longest_P


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
    price_MFE, least_PS, _ = bounds
    least_s_PS = completion_bounds(moves, limits, np.zeros(limits.price_C.size), 1.0).least_PS
    longest_P, least_PC = _longest_latencies(moves, limits, bounds), _least_replicas(moves, limits)
    from_M, device_M, first_in_P, end = moves.from_M, moves.device_M, moves.first_in_P, moves.first_in_P.size - 2
    num_columns = USED + (limits.price_C.size if limits.is_whole else 2 * MAX_STAGES)
    labels = Labels(np.zeros((1 << 12, 5), dtype=np.int64), np.zeros((1 << 12, num_columns)))
    labels.int_LI[0, DEVICE], labels.int_LI[0, PARENT], labels.float_LF[0, TOTAL] = CLOSED, -1, least_PS[0, CLOSED]
    # The first open label of each node, the first closed label, and the label after the last one.
    first_PK = np.zeros((end + 1, 3), dtype=np.int64)
    first_PK[0, 2] = 1
    float_LF = labels.float_LF  # as in `completion_bounds`
    count = made = first_PK[0, 2]  # a literal 1 would have a type of its own, for which kernels are compiled once more
    outcome = COMPLETE
    for node in range(1, end + 1):
        first_PK[node, 0] = count
        for ends in range(2):
            first, cutoff = count, limits.max_price
            most = max_per_group // 2 if is_beam and not ends else max_per_group
            for move in range(first_in_P[node], first_in_P[node + 1]):
                start, device = from_M[move], device_M[move]
                after = CLOSED if ends else device
                for is_first, before in enumerate((device, CLOSED)):
                    low, high = first_PK[start, is_first], first_PK[start, is_first + 1]
                    if low == high or price_MFE[move, is_first, ends] + least_PS[node, after] == np.inf:
                        continue
                    least = price_MFE[move, is_first, ends] + least_PS[node, after] - least_PS[start, before]
                    if float_LF[low, TOTAL] + least > cutoff:
                        continue
                    while count + high - low > len(float_LF):
                        labels = with_doubled_capacity(labels)
                        float_LF = labels.float_LF
                    step = Step(
                        move, is_first, ends, least, least_PS[node, after], least_s_PS[node, after], longest_P[node]
                    )
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


class Step(NamedTuple):
    """One way to extend labels of a node: by a move, with the stage left open or ended."""

    move: int
    is_first: int
    """1 if the move is the first split of its stage, else 0."""
    ends: int
    """1 if the stage ends with the move, else 0."""
    least: float
    """The least amount by which the step raises a label's lower bound."""
    after: float
    """The completion bound after the move."""
    after_s: float
    """The least latency after the move."""
    longest_s: float
    """An upper bound on the latency after the move."""


@compiled
def _extend(
    moves: MoveArrays, limits: ChainLimits, step: Step, least_C: FloatArray, cutoff: float, labels: Labels,
    low: int, high: int, first: int, count: int, capacity: int,
) -> tuple[int, float]:  # fmt: skip
    """Extends labels `low` to `high` - 1 by a step, as far as they can become plans at a price of at most `cutoff`.

    Returns the number of labels and the new `cutoff`. If there are `capacity` labels, a quarter of those from `first`
    on is kept.
    """
    (int_LI, float_LF), (move, is_first, ends, least, after, after_s, longest_s) = labels, step
    device, seconds, inputs = moves.device_M[move], moves.seconds_M[move] + moves.cross_M[move], moves.wait_M[move]
    rate, limit_s, waits_alone = limits.rate, limits.limit_s, not is_first and not moves.pooled_M[move]
    if limits.is_whole and not waits_alone:  # the rate is given, so that the wait is known
        seconds, inputs = seconds + limits.wait_share * inputs / rate, 0.0
    own_batches, own_fill = inputs if waits_alone else 0.0, 0.0 if waits_alone else inputs
    own_work, hop_work = moves.work_M[move], moves.hop_work_M[move] if ends else 0.0
    seconds += moves.hop_M[move] if ends else 0.0
    most_held = limits.wait_share * limits.count_C[device] / rate
    for label in range(low, high):
        if float_LF[label, TOTAL] + least > cutoff:
            break
        if not is_first and int_LI[label, DEVICE] != device:
            continue
        work, batches = max(float_LF[label, WORK] + own_work, hop_work), float_LF[label, BATCHES] + own_batches
        latency_s, fill = float_LF[label, LATENCY] + seconds, float_LF[label, FILL] + own_fill
        replicas, held = 0.0, work
        if limits.is_whole:
            replicas = max(np.ceil(work * rate * (1 - ROUNDING)), 1.0)
            held = replicas / rate
            if float_LF[label, USED + device] + replicas > limits.count_C[device]:
                continue
        total_s = latency_s + limits.wait_share * (fill / rate + float_LF[label, WAITED] + batches * held)
        price = float_LF[label, PRICE] + limits.price_C[device] * (held if ends else work)
        total = price + limits.price_latency * total_s + after
        if total_s + after_s > limit_s * (1 + TOLERANCE) or total > cutoff:
            continue
        if limits.is_whole:
            own = replicas if ends else rate * work
            total += _idle_price(limits, least_C, float_LF, label, device, own, ends)
            if total > cutoff:
                continue
            if latency_s + (held if ends else most_held) * batches + longest_s <= limit_s:
                latency_s, batches = 0.0, 0.0  # its latency no longer matters
        elif int_LI[label, STAGES] + is_first > MAX_STAGES:
            continue
        for column in range(float_LF.shape[1]):
            float_LF[count, column] = float_LF[label, column]
        float_LF[count, TOTAL], float_LF[count, LATENCY], float_LF[count, FILL] = total, latency_s, fill
        float_LF[count, WORK], float_LF[count, BATCHES] = work, batches
        int_LI[count, STAGES], int_LI[count, TYPES] = int_LI[label, STAGES] + is_first, int_LI[label, TYPES]
        if is_first and not limits.is_whole:
            int_LI[count, TYPES] = int_LI[label, TYPES] * (limits.price_C.size + 1) + device + 1
        int_LI[count, PARENT], int_LI[count, MOVE], int_LI[count, DEVICE] = label, move, CLOSED if ends else device
        if ends:
            _close_stage(limits, int_LI, float_LF, count, device, price, held, replicas)
        count += 1
        if count == capacity:
            _, count = _select(labels, first, count, (capacity - first) // 4, capacity > 0)
            cutoff = float_LF[count - 1, TOTAL]
    return count, cutoff


@compiled
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


@compiled
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


@compiled
def undominated(
    order_L: IntArray, group_L: IntArray, figures_LF: FloatArray, first: int, end: int, rounding: float, most: int
) -> tuple[bool, IntArray]:
    """Returns whether all undominated labels were kept, and the labels that no earlier label of their group dominates.

    `order_L` holds labels, that is rows of `figures_LF`, and `group_L` their groups, in the same order. Columns `first`
    to `end` - 1 are compared. At most `most` labels of a group are kept.
    """
    kept_L = np.empty(order_L.size, dtype=np.int64)
    num_kept, first_kept, is_complete = 0, 0, True
    for place in range(order_L.size):
        if place > 0 and group_L[place] != group_L[place - 1]:
            first_kept = num_kept
        is_dominated = False
        for other in range(first_kept, num_kept):
            if dominates(figures_LF, kept_L[other], order_L[place], first, end, rounding):
                is_dominated = True
                break
        if is_dominated:
            continue
        if num_kept - first_kept >= most:
            is_complete = False
            continue
        kept_L[num_kept] = order_L[place]
        num_kept += 1
    return is_complete, kept_L[:num_kept]


def trace(labels: Labels, label: int) -> Path:
    """Returns the path to a label."""
    path: Path = []
    while labels.int_LI[label, PARENT] >= 0:
        path.insert(0, (int(labels.int_LI[label, MOVE]), int(labels.int_LI[label, DEVICE] == CLOSED)))
        label = int(labels.int_LI[label, PARENT])
    return path
