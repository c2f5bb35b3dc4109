"""Good plans of problems too big to search exactly: a beam search over stages, steered by prices.

At a fixed rate every stage needs so many replicas and no fewer, so a label is a plan's beginning: replicas used per
device, latency so far, and, inside a stage of several splits, its work and batches so far. Its *estimate* is what the
whole plan must cost at the prices: replicas so far, the cheapest way on, and the devices that are left but too few to
run any split further on. Labels whose estimate is above what there is cannot become plans (but for rounding) and are
dropped; of the others each node keeps the best few. So what is found is a plan; what is not found may exist.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from earlyexit.split import Split
from optimizer.compiled import compiled
from optimizer.moves import Graph, MoveArrays
from optimizer.plan import Stage
from optimizer.scale.walks import Oracle, Prices, Walk
from optimizer.split_times import FloatArray, IntArray

SLACK = 1e-9


class Steer(NamedTuple):
    """What the beam is steered by; prices per replica and per second of latency, at one rate."""

    rate_per_s: float
    used_C: FloatArray
    """Price of a replica that is used."""
    idle_C: FloatArray
    """Price of one that is left idle."""
    latency: float
    most: float
    """What a plan may cost."""


class Bounds(NamedTuple):
    """What a plan may use."""

    count_C: FloatArray
    usd_C: FloatArray
    budget: float
    latency_s: float
    may_split: bool
    may_hop: bool


class Ways(NamedTuple):
    """Least price from a node to the end: between stages, and inside a stage of a device; and the moves it takes."""

    closed_P: FloatArray
    open_PC: FloatArray
    closed_move_P: IntArray
    open_move_PC: IntArray
    closes_P: IntArray
    """Whether the stage ends with that move."""
    open_closes_PC: IntArray


class Incoming(NamedTuple):
    """The moves by the node that they lead to."""

    first_P: IntArray
    move_I: IntArray
    from_I: IntArray


@compiled
def cheapest_ways(
    moves: MoveArrays, price_C: FloatArray, latency: float, fill_rate: float, may_split: bool, may_hop: bool
) -> Ways:
    """Backwards over the nodes; prices are per second of work and of latency. Waits of further splits as their T."""
    num_nodes, num_devices = moves.first_move_P.size - 1, price_C.size
    closed_P, open_PC = np.full(num_nodes, np.inf), np.full((num_nodes, num_devices), np.inf)
    closed_move_P, open_move_PC = np.full(num_nodes, -1), np.full((num_nodes, num_devices), -1)
    closes_P, open_closes_PC = np.zeros(num_nodes, np.int64), np.zeros((num_nodes, num_devices), np.int64)
    end = num_nodes - 1
    closed_P[end] = 0.0
    for node in range(end - 1, -1, -1):
        for move in range(moves.first_move_P[node], moves.first_move_P[node + 1]):
            target, device = moves.to_M[move], moves.device_M[move]
            work = price_C[device] * moves.work_M[move]
            ending = np.inf
            if may_hop or target == end:
                hops = max(moves.hop_work_M[move] - moves.work_M[move], 0.0) * price_C[device]
                ending = work + latency * (moves.seconds_M[move] + moves.hop_M[move]) + closed_P[target]
            else:
                hops = 0.0
            going_on = np.inf
            if may_split and target != end:
                going_on = work + latency * moves.seconds_M[move] + open_PC[target, device]
            further = latency * moves.seconds_M[move]
            first = latency * moves.wait_M[move] / fill_rate
            if ending + further < open_PC[node, device]:
                open_PC[node, device], open_move_PC[node, device] = ending + further, move
                open_closes_PC[node, device] = 1
            if going_on + further < open_PC[node, device]:
                open_PC[node, device], open_move_PC[node, device] = going_on + further, move
                open_closes_PC[node, device] = 0
            if ending + hops + first < closed_P[node]:
                closed_P[node], closed_move_P[node], closes_P[node] = ending + hops + first, move, 1
            if going_on + first < closed_P[node]:
                closed_P[node], closed_move_P[node], closes_P[node] = going_on + first, move, 0
    return Ways(closed_P, open_PC, closed_move_P, open_move_PC, closes_P, open_closes_PC)


@compiled
def _account_of(moves: MoveArrays, ways: Ways, num_devices: int) -> tuple[FloatArray, float, float, FloatArray]:
    needed_C = np.zeros(num_devices)
    latency_s, fill, node, device = 0.0, 0.0, 0, -1
    stages_C = np.zeros(num_devices)
    while node < ways.closed_P.size - 1:
        further = device >= 0
        move = ways.open_move_PC[node, device] if further else ways.closed_move_P[node]
        closes = ways.open_closes_PC[node, device] if further else ways.closes_P[node]
        device = moves.device_M[move]
        needed = moves.work_M[move]
        latency_s += moves.seconds_M[move] * (2 if further else 1)
        if not further:
            fill += moves.wait_M[move]
            stages_C[device] += 1.0
        if closes:
            latency_s += moves.hop_M[move]
        if closes and not further:
            needed = max(needed, moves.hop_work_M[move])
        needed_C[device] += needed
        device = -1 if closes else device
        node = moves.to_M[move]
    return needed_C, latency_s, fill, stages_C


def stages_of(graph: Graph, *, may_split: bool, may_hop: bool) -> Oracle:
    """Plans of a graph with fractions of replicas, as something that prices can be asked of."""
    num_devices = len(graph.device_names)

    def cheapest(prices: Prices, fill_rate: float) -> tuple[float, Walk]:
        price_C = prices.work_C + prices.hop_C
        ways = cheapest_ways(graph.moves, price_C, prices.latency, fill_rate, may_split, may_hop)
        if math.isinf(ways.closed_P[0]):
            nothing_C = np.zeros(num_devices)
            return math.inf, Walk(nothing_C, nothing_C, math.inf, 0.0, nothing_C)
        needed_C, latency_s, fill, stages_C = _account_of(graph.moves, ways, num_devices)
        return float(ways.closed_P[0]), Walk(needed_C, np.zeros(num_devices), latency_s, fill, stages_C)

    return cheapest


@compiled
def incoming_moves(moves: MoveArrays) -> Incoming:
    """The same moves by their targets."""
    num_nodes = moves.first_move_P.size - 1
    first_P = np.zeros(num_nodes + 1, dtype=np.int64)
    for move in range(moves.to_M.size):
        first_P[moves.to_M[move] + 1] += 1
    first_P = np.cumsum(first_P)
    place_P = first_P.copy()
    move_I, from_I = np.empty(moves.to_M.size, np.int64), np.empty(moves.to_M.size, np.int64)
    for node in range(num_nodes):
        for move in range(moves.first_move_P[node], moves.first_move_P[node + 1]):
            target = moves.to_M[move]
            move_I[place_P[target]], from_I[place_P[target]] = move, node
            place_P[target] += 1
    return Incoming(first_P, move_I, from_I)


@compiled
def least_devices(moves: MoveArrays, num_devices: int) -> FloatArray:
    """Per node, the fewest device seconds per input that any stage at or after it takes, by device."""
    num_nodes = moves.first_move_P.size - 1
    least_PC = np.full((num_nodes, num_devices), np.inf)
    for node in range(num_nodes - 2, -1, -1):
        least_PC[node] = least_PC[node + 1]
        for move in range(moves.first_move_P[node], moves.first_move_P[node + 1]):
            device = moves.device_M[move]
            needed = max(moves.work_M[move], moves.hop_work_M[move])
            least_PC[node, device] = min(least_PC[node, device], needed)
    return least_PC


class Label(NamedTuple):
    """Plans' beginnings at one kind of node, cheapest first (L): closed between stages, open inside one."""

    used_LC: FloatArray
    latency_L: FloatArray
    """Without the waits of an open stage's further splits."""
    work_L: FloatArray
    batches_L: FloatArray
    estimate_L: FloatArray
    parent_L: IntArray
    """Place in its node; below 0: -1 - place among the open ones."""
    move_L: IntArray
    from_L: IntArray
    device_L: IntArray


@compiled
def _empty(size: int, num_devices: int) -> Label:
    return Label(
        np.empty((size, num_devices)), np.empty(size), np.empty(size), np.empty(size), np.full(size, np.inf),
        np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64),
    )  # fmt: skip


@compiled
def _best(labels: Label, count: int, width: int) -> Label:
    """The cheapest, in order."""
    order_L = np.argsort(labels.estimate_L[:count])[:width]
    return Label(
        labels.used_LC[order_L], labels.latency_L[order_L], labels.work_L[order_L], labels.batches_L[order_L],
        labels.estimate_L[order_L], labels.parent_L[order_L], labels.move_L[order_L], labels.from_L[order_L],
        labels.device_L[order_L],
    )  # fmt: skip


@compiled
def _put_first(labels: Label, best: Label) -> int:
    count = best.latency_L.size
    labels.used_LC[:count], labels.latency_L[:count] = best.used_LC, best.latency_L
    labels.work_L[:count], labels.batches_L[:count] = best.work_L, best.batches_L
    labels.estimate_L[:count], labels.parent_L[:count] = best.estimate_L, best.parent_L
    labels.move_L[:count], labels.from_L[:count] = best.move_L, best.from_L
    labels.device_L[:count] = best.device_L
    return count


@compiled
def beam_search(
    moves: MoveArrays, incoming: Incoming, ways: Ways, least_PC: FloatArray, bounds: Bounds, steer: Steer,
    width: int, open_width: int,
) -> tuple[IntArray, IntArray, IntArray]:  # fmt: skip
    """The cheapest plan that the beam holds at its end: its moves with their nodes and whether they end a stage."""
    num_nodes, num_devices = moves.first_move_P.size - 1, bounds.count_C.size
    end, rate = num_nodes - 1, steer.rate_per_s
    closed, opened = [_empty(0, num_devices)], [_empty(0, num_devices)]
    closed[0] = _empty(1, num_devices)
    closed[0].used_LC[0] = 0.0
    closed[0].latency_L[0], closed[0].estimate_L[0] = 0.0, ways.closed_P[0] - steer.latency * bounds.latency_s
    closed_pool, open_pool = _empty(4 * width, num_devices), _empty(4 * open_width, num_devices)
    for node in range(1, num_nodes):
        num_closed, num_open = 0, 0
        most_closed, most_open = steer.most, steer.most
        for place in range(incoming.first_P[node], incoming.first_P[node + 1]):
            move, start = incoming.move_I[place], incoming.from_I[place]
            device = moves.device_M[move]
            work, seconds = moves.work_M[move], moves.seconds_M[move]
            for inside in range(2):
                source = opened[start] if inside else closed[start]
                way_from = ways.open_PC[start, device] if inside else ways.closed_P[start]
                first_s = 0.0 if inside else moves.wait_M[move] / rate
                least = rate * (steer.used_C[device] * work) + steer.latency * (seconds * (1 + inside) + first_s)
                may_close = bounds.may_hop or node == end
                may_go_on = bounds.may_split and node != end
                way_on = np.inf
                if may_close:
                    way_on = steer.latency * moves.hop_M[move] + ways.closed_P[node]
                if may_go_on:
                    way_on = min(way_on, ways.open_PC[node, device])
                dearer = least + way_on - way_from
                for label in range(source.latency_L.size):
                    if source.estimate_L[label] + dearer > steer.most + SLACK:
                        break
                    if inside and source.device_L[label] != device:
                        continue
                    stage_work, batches = work, 0.0
                    if inside:
                        stage_work += source.work_L[label]
                        batches = source.batches_L[label] + moves.wait_M[move]
                    latency_s = source.latency_L[label] + seconds + first_s
                    for closing in range(2):
                        if not (may_close if closing else may_go_on):
                            continue
                        needed = max(stage_work, moves.hop_work_M[move]) if closing else stage_work
                        replicas = max(np.ceil(rate * needed * (1 - SLACK)), 1.0)
                        if source.used_LC[label, device] + replicas > bounds.count_C[device]:
                            continue
                        total_s = latency_s + replicas * batches / rate
                        if closing:
                            total_s += moves.hop_M[move]
                        if total_s > bounds.latency_s:
                            continue
                        devices = replicas if closing else rate * stage_work
                        estimate, usd = steer.latency * (total_s - bounds.latency_s), 0.0
                        for other in range(num_devices):
                            used = source.used_LC[label, other] + (devices if other == device else 0.0)
                            estimate += steer.used_C[other] * used
                            usd += bounds.usd_C[other] * used
                            left = bounds.count_C[other] - used
                            least_left = np.ceil(rate * least_PC[node, other] * (1 - SLACK))
                            if (closing or other != device) and left < least_left:
                                estimate += steer.idle_C[other] * left
                        if usd > bounds.budget * (1 + SLACK):
                            continue
                        estimate += ways.closed_P[node] if closing else ways.open_PC[node, device]
                        if estimate >= (most_closed if closing else most_open):
                            continue
                        pool = closed_pool if closing else open_pool
                        if closing:
                            slot = num_closed
                            num_closed += 1
                        else:
                            slot = num_open
                            num_open += 1
                        pool.used_LC[slot] = source.used_LC[label]
                        if closing:
                            pool.used_LC[slot, device] += replicas
                        pool.latency_L[slot] = total_s if closing else latency_s
                        pool.work_L[slot], pool.batches_L[slot] = stage_work, batches
                        pool.estimate_L[slot] = estimate
                        pool.parent_L[slot] = -1 - label if inside else label
                        pool.move_L[slot], pool.from_L[slot], pool.device_L[slot] = move, start, device
                        if closing and num_closed == 4 * width:
                            num_closed = _put_first(closed_pool, _best(closed_pool, num_closed, width))
                            most_closed = closed_pool.estimate_L[num_closed - 1]
                        if not closing and num_open == 4 * open_width:
                            num_open = _put_first(open_pool, _best(open_pool, num_open, open_width))
                            most_open = open_pool.estimate_L[num_open - 1]
        closed.append(_best(closed_pool, num_closed, width))
        opened.append(_best(open_pool, num_open, open_width))
    return _way_back(closed, opened, end)


@compiled
def _way_back(closed: list[Label], opened: list[Label], end: int) -> tuple[IntArray, IntArray, IntArray]:
    move_S, from_S = np.empty(end, np.int64), np.empty(end, np.int64)
    closes_S = np.empty(end, np.int64)
    count = 0
    if closed[end].latency_L.size > 0:
        node, place, inside = end, 0, False
        while node > 0:
            labels = opened[node] if inside else closed[node]
            move_S[count], from_S[count] = labels.move_L[place], labels.from_L[place]
            closes_S[count] = 0 if inside else 1
            count += 1
            parent = labels.parent_L[place]
            node = labels.from_L[place]
            inside = parent < 0
            place = -1 - parent if inside else parent
    return move_S[:count][::-1], from_S[:count][::-1], closes_S[:count][::-1]


def stages_at(graph: Graph, way: tuple[IntArray, IntArray, IntArray]) -> list[Stage]:
    """The stages of a way through the graph, with one replica each."""
    stages: list[Stage] = []
    splits: list[Split] = []
    for move, node, closes in zip(*(each.tolist() for each in way), strict=True):
        splits.append(graph.split_of(node, move))
        if closes:
            device = graph.device_names[int(graph.moves.device_M[move])]
            stages.append(Stage(device=device, replicas=1, splits=tuple(splits)))
            splits = []
    return stages
