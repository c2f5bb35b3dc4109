"""A relaxation of the plans of a graph in which replicas may be fractional, but stages and hops are exact: kernels."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from optimizer.compiled import compiled
from optimizer.moves import Graph, MoveArrays
from optimizer.step import FloatArray, IntArray
from optimizer.walks import Oracle, Prices, Walk, no_walk


class CheapestPaths(NamedTuple):
    """Least prices from a node to the end, and their first moves, between stages (closed) and inside one (open)."""

    closed_P: FloatArray
    open_PC: FloatArray
    closed_move_P: IntArray
    open_move_PC: IntArray
    closes_P: IntArray
    """Whether the stage ends with the closed move; below, with the open move."""
    open_closes_PC: IntArray


@compiled
def cheapest_paths(
    moves: MoveArrays, price_C: FloatArray, latency: float, fill_rate: float, may_split: bool, may_hop: bool
) -> CheapestPaths:
    """Solves for shortest paths backward, at prices per second. A further split's wait counts as its own seconds."""
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
            closing = np.inf
            if may_hop or target == end:
                hops = max(moves.hop_work_M[move] - moves.work_M[move], 0.0) * price_C[device]
                after = moves.hop_M[move] + moves.cross_M[move]
                closing = work + latency * (moves.seconds_M[move] + after) + closed_P[target]
            else:
                hops = 0.0
            going_on = np.inf
            if may_split and target != end:
                going_on = work + latency * (moves.seconds_M[move] + moves.cross_M[move]) + open_PC[target, device]
            first_wait = latency * moves.wait_M[move] / fill_rate
            further_wait = first_wait if moves.pooled_M[move] else latency * moves.seconds_M[move]
            if closing + further_wait < open_PC[node, device]:
                open_PC[node, device], open_move_PC[node, device] = closing + further_wait, move
                open_closes_PC[node, device] = 1
            if going_on + further_wait < open_PC[node, device]:
                open_PC[node, device], open_move_PC[node, device] = going_on + further_wait, move
                open_closes_PC[node, device] = 0
            if closing + hops + first_wait < closed_P[node]:
                closed_P[node], closed_move_P[node], closes_P[node] = closing + hops + first_wait, move, 1
            if going_on + first_wait < closed_P[node]:
                closed_P[node], closed_move_P[node], closes_P[node] = going_on + first_wait, move, 0
    return CheapestPaths(closed_P, open_PC, closed_move_P, open_move_PC, closes_P, open_closes_PC)


@compiled
def _cheapest_walk(moves: MoveArrays, paths: CheapestPaths, num_devices: int) -> Walk:
    """Returns the resource use of the cheapest path. Its devices' work includes hops."""
    work_C = np.zeros(num_devices)
    latency_s, fill, node, device = 0.0, 0.0, 0, -1
    stages_C = np.zeros(num_devices)
    while node < paths.closed_P.size - 1:
        is_open = device >= 0
        move = paths.open_move_PC[node, device] if is_open else paths.closed_move_P[node]
        closes = paths.open_closes_PC[node, device] if is_open else paths.closes_P[node]
        device = moves.device_M[move]
        work = moves.work_M[move]
        waits_alone = is_open and not moves.pooled_M[move]
        latency_s += moves.seconds_M[move] * (2 if waits_alone else 1) + moves.cross_M[move]
        if not waits_alone:
            fill += moves.wait_M[move]
        if not is_open:
            stages_C[device] += 1.0
        if closes:
            latency_s += moves.hop_M[move]
        if closes and not is_open:
            work = max(work, moves.hop_work_M[move])
        work_C[device] += work
        device = -1 if closes else device
        node = moves.to_M[move]
    return Walk(work_C, np.zeros(num_devices), latency_s, fill, stages_C)


def stage_oracle(graph: Graph, *, may_split: bool, may_hop: bool) -> Oracle:
    """Returns a pricing oracle: it finds the cheapest plan of a graph with fractions of replicas, at given prices."""
    num_devices = len(graph.device_names)

    def cheapest(prices: Prices, fill_rate: float) -> tuple[float, Walk]:
        price_C = prices.work_C + prices.hop_C
        paths = cheapest_paths(graph.moves, price_C, prices.latency, fill_rate, may_split, may_hop)
        if math.isinf(paths.closed_P[0]):
            return math.inf, no_walk(num_devices)
        return float(paths.closed_P[0]), _cheapest_walk(graph.moves, paths, num_devices)

    return cheapest
