"""Lagrangian bounds that prove that a problem has no plan: kernels.

Every device, every dollar and every second of latency gets a price. Prices are normalized so that everything that a
plan may use costs 1 in total. If even the cheapest path through the graph costs more, no plan exists. This is the
Lagrangian relaxation of the constrained shortest path problem. It ignores that replicas are whole, and it ignores hops.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from optimizer.compiled import compiled
from optimizer.moves import MoveArrays
from optimizer.step import FloatArray, IntArray

# Relative amount by which latencies and costs may exceed their limits, as in `optimizer.evaluate`.
TOLERANCE = 1e-9
# A bound above this proves that no plan exists. The margin keeps rounding from excluding a plan that uses everything.
INFEASIBLE_ABOVE = 1 + 10 * TOLERANCE
# Smallest weight of a resource. A weight of 0 could never grow again.
LEAST_WEIGHT = 1e-6


class Limits(NamedTuple):
    """The resources that a plan may use, and the rates for which it is sought."""

    count_C: IntArray
    usd_C: FloatArray
    budget: float
    """USD per hour; inf without a budget."""
    latency_s: float
    required_rate: float
    """Rate that every stage and hop must reach."""
    wait_rate: float
    """Rate at which batches fill: the required rate, or a higher one, which makes the search a relaxation."""
    may_split: bool
    """Whether a stage may have several splits."""
    may_hop: bool
    """Whether a plan may have several stages."""


@compiled
def weighted_prices(limits: Limits, weight_R: FloatArray, price_C: FloatArray) -> float:
    """Fills the price of each device and returns the price of a second of latency.

    A resource's price is its weight divided by its limit. A type without devices is treated as if it had one.
    """
    price_C[:] = weight_R[:-2] / np.maximum(limits.count_C, 1) + weight_R[-2] * limits.usd_C / limits.budget
    latency_weight: float = weight_R[-1]
    return latency_weight / limits.latency_s


@compiled
def move_price(moves: MoveArrays, limits: Limits, price_C: FloatArray, price_latency: float, move: int) -> float:
    """Returns a lower bound on the price of a split: its share of the devices, its seconds and one wait for a batch."""
    devices: float = limits.required_rate * moves.work_M[move]
    latency_s: float = moves.seconds_M[move] + moves.wait_M[move] / limits.wait_rate + moves.cross_M[move]
    price: float = price_C[moves.device_M[move]] * devices + price_latency * latency_s
    return price


@compiled
def completion_bounds(
    moves: MoveArrays, limits: Limits, price_C: FloatArray, price_latency: float, bound_P: FloatArray, best_P: IntArray
) -> None:
    """Fills `bound_P` with the least price from every node to the end, and `best_P` with the move that attains it."""
    end = bound_P.size - 1
    bound_P[end] = 0.0
    for node in range(end - 1, -1, -1):
        least = np.inf
        for move in range(moves.first_move_P[node], moves.first_move_P[node + 1]):
            price = move_price(moves, limits, price_C, price_latency, move) + bound_P[moves.to_M[move]]
            if price < least:
                least = price
                best_P[node] = move
        bound_P[node] = least


@compiled
def lagrangian_bound(
    moves: MoveArrays, limits: Limits, start_R: FloatArray, rounds: int, step: float
) -> tuple[float, FloatArray]:
    """Returns the largest lower bound on the price of any plan, and its weights. Above 1 there is no plan.

    Rows (R) are the devices, the budget and the latency. A row's weight is its price times its limit. The method of
    multiplicative weights raises the prices of the resources that the cheapest path uses most.
    """
    num_devices = limits.count_C.size
    num_nodes = moves.first_move_P.size - 1
    bound_P = np.empty(num_nodes)
    best_P = np.zeros(num_nodes, dtype=np.int64)
    price_C = np.empty(num_devices)
    used_R = np.empty(num_devices + 2)
    weight_R = start_R.copy()
    best_weight_R = start_R.copy()
    best_bound = -1.0
    for round_index in range(rounds):
        price_latency = weighted_prices(limits, weight_R, price_C)
        completion_bounds(moves, limits, price_C, price_latency, bound_P, best_P)
        if bound_P[0] > best_bound:
            best_bound = bound_P[0]
            best_weight_R[:] = weight_R
            if best_bound > 1 + 1e-7:
                break
        used_R[:] = 0.0
        node = 0
        while node < num_nodes - 1 and bound_P[0] < np.inf:
            move = best_P[node]
            device = moves.device_M[move]
            devices = limits.required_rate * moves.work_M[move]
            used_R[device] += devices / max(limits.count_C[device], 1)
            used_R[num_devices] += devices * limits.usd_C[device] / limits.budget
            used_R[num_devices + 1] += (
                moves.seconds_M[move] + moves.wait_M[move] / limits.wait_rate + moves.cross_M[move]
            ) / limits.latency_s
            node = moves.to_M[move]
        highest = used_R.max()
        if highest <= 0:
            break
        factor_R = np.exp((used_R - highest) / highest * (step / (1.0 + round_index / 8.0)))
        weight_R = np.maximum(weight_R * factor_R, LEAST_WEIGHT)
        weight_R /= weight_R.sum()
    return best_bound, best_weight_R


@compiled
def feasible_moves(moves: MoveArrays, limits: Limits, weight_VR: FloatArray) -> npt.NDArray[np.bool_]:
    """Returns which moves lie on a path from start to end that no row of weights (V) excludes."""
    num_moves, num_nodes, num_devices = moves.to_M.size, moves.first_move_P.size - 1, limits.count_C.size
    kept_M = np.ones(num_moves, dtype=np.bool_)
    price_C = np.empty(num_devices)
    bound_P, from_start_P = np.empty(num_nodes), np.empty(num_nodes)
    best_P = np.zeros(num_nodes, dtype=np.int64)
    for row in range(weight_VR.shape[0]):
        price_latency = weighted_prices(limits, weight_VR[row], price_C)
        completion_bounds(moves, limits, price_C, price_latency, bound_P, best_P)
        from_start_P[:] = np.inf
        from_start_P[0] = 0.0
        for node in range(num_nodes):
            for move in range(moves.first_move_P[node], moves.first_move_P[node + 1]):
                target = moves.to_M[move]
                price = move_price(moves, limits, price_C, price_latency, move)
                from_start_P[target] = min(from_start_P[target], from_start_P[node] + price)
                if from_start_P[node] + price + bound_P[target] > INFEASIBLE_ABOVE:
                    kept_M[move] = False
    return kept_M
