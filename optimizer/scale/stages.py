"""Plans of a graph with fractions of replicas: an oracle that knows hops and stages as they are: kernels."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from optimizer.compiled import compiled
from optimizer.moves import Graph, MoveArrays
from optimizer.step import FloatArray, IntArray
from optimizer.walks import Oracle, Prices, Walk, no_walk


class Ways(NamedTuple):
    """Least price from a node to the end: between stages, and inside a stage of a device; and the moves it takes."""

    closed_P: FloatArray
    open_PC: FloatArray
    closed_move_P: IntArray
    open_move_PC: IntArray
    closes_P: IntArray
    """Whether the stage ends with that move."""
    open_closes_PC: IntArray


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
                after = moves.hop_M[move] + moves.cross_M[move]
                ending = work + latency * (moves.seconds_M[move] + after) + closed_P[target]
            else:
                hops = 0.0
            going_on = np.inf
            if may_split and target != end:
                going_on = work + latency * (moves.seconds_M[move] + moves.cross_M[move]) + open_PC[target, device]
            first = latency * moves.wait_M[move] / fill_rate
            further = first if moves.pooled_M[move] else latency * moves.seconds_M[move]
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
def _account_of(moves: MoveArrays, ways: Ways, num_devices: int) -> Walk:
    """Of the cheapest way; hops are in its devices' work."""
    needed_C = np.zeros(num_devices)
    latency_s, fill, node, device = 0.0, 0.0, 0, -1
    stages_C = np.zeros(num_devices)
    while node < ways.closed_P.size - 1:
        further = device >= 0
        move = ways.open_move_PC[node, device] if further else ways.closed_move_P[node]
        closes = ways.open_closes_PC[node, device] if further else ways.closes_P[node]
        device = moves.device_M[move]
        needed = moves.work_M[move]
        apart = further and not moves.pooled_M[move]
        latency_s += moves.seconds_M[move] * (2 if apart else 1) + moves.cross_M[move]
        if not apart:
            fill += moves.wait_M[move]
        if not further:
            stages_C[device] += 1.0
        if closes:
            latency_s += moves.hop_M[move]
        if closes and not further:
            needed = max(needed, moves.hop_work_M[move])
        needed_C[device] += needed
        device = -1 if closes else device
        node = moves.to_M[move]
    return Walk(needed_C, np.zeros(num_devices), latency_s, fill, stages_C)


def stages_of(graph: Graph, *, may_split: bool, may_hop: bool) -> Oracle:
    """Plans of a graph with fractions of replicas, as something that prices can be asked of."""
    num_devices = len(graph.device_names)

    def cheapest(prices: Prices, fill_rate: float) -> tuple[float, Walk]:
        price_C = prices.work_C + prices.hop_C
        ways = cheapest_ways(graph.moves, price_C, prices.latency, fill_rate, may_split, may_hop)
        if math.isinf(ways.closed_P[0]):
            return math.inf, no_walk(num_devices)
        return float(ways.closed_P[0]), _account_of(graph.moves, ways, num_devices)

    return cheapest
