"""A relaxation of the plans of a graph in which replicas may be fractional, but stages and hops are exact."""

from __future__ import annotations

import math

import numpy as np

from optimizer.compiled import compiled
from optimizer.label_search import CLOSED, Bounds, ChainLimits, completion_bounds, price_after, split_price
from optimizer.moves import Graph, MoveArrays
from optimizer.walks import Oracle, Prices, Walk, no_walk


@compiled
def _cheapest_walk(moves: MoveArrays, limits: ChainLimits, bounds: Bounds) -> Walk:
    """Returns the resource use of the cheapest path. Its devices' work includes hops."""
    work_C, stages_C = np.zeros(limits.price_C.size), np.zeros(limits.price_C.size)
    latency_s, fill, node, device = 0.0, 0.0, 0, CLOSED
    while node < bounds.closed_P.size - 1:
        least, best, best_ends, is_first = np.inf, 0, 0, int(device == CLOSED)
        for move in range(moves.first_move_P[node], moves.first_move_P[node + 1]):
            if not is_first and moves.device_M[move] != device:
                continue
            for ends in range(2):
                price = split_price(moves, limits, move, is_first, ends)
                price += price_after(moves, limits, bounds, move, ends)
                if price < least:
                    least, best, best_ends = price, move, ends
        device, node = moves.device_M[best], moves.to_M[best]
        work, waits_alone = moves.work_M[best], not is_first and not moves.pooled_M[best]
        latency_s += moves.seconds_M[best] * (2 if waits_alone else 1) + moves.cross_M[best]
        fill += 0.0 if waits_alone else moves.wait_M[best]
        stages_C[device] += is_first
        if best_ends:
            latency_s += moves.hop_M[best]
            work = max(work, moves.hop_work_M[best]) if is_first else work
        work_C[device] += work
        device = CLOSED if best_ends else device
    return Walk(work_C, np.zeros(work_C.size), latency_s, fill, stages_C)


def stage_oracle(graph: Graph, *, may_split: bool, may_hop: bool) -> Oracle:
    """Returns a pricing oracle: it finds the cheapest plan of a graph with fractions of replicas, at given prices."""
    nothing_C = np.zeros(len(graph.device_names))

    def cheapest(prices: Prices, fill_rate: float) -> tuple[float, Walk]:
        limits = ChainLimits(
            price_C=prices.work_C + prices.hop_C,
            price_latency=float(prices.latency),
            max_price=math.inf,
            limit_s=math.inf,
            rate=float(fill_rate),
            is_whole=False,
            count_C=nothing_C,
            idle_C=nothing_C,
            usd_C=nothing_C,
            budget=math.inf,
            may_split=may_split,
            may_hop=may_hop,
        )
        bounds = completion_bounds(graph.moves, limits)
        least = float(bounds.closed_P[0])
        if math.isinf(least):
            return math.inf, no_walk(len(nothing_C))
        return least, _cheapest_walk(graph.moves, limits, bounds)

    return cheapest
