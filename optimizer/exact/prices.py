"""Prices that prove what no plan can do: kernels.

Every device, every dollar and every second of latency gets a price, so normalized that all that a plan may use costs 1.
Where even the cheapest way through the graph costs more, no plan exists: the prices are the proof. This is the
Lagrangian bound of the path problem, whole replicas and hops left out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from optimizer.compiled import compiled
from optimizer.moves import MoveArrays
from optimizer.step import FloatArray, IntArray

# Latencies and costs may exceed their limit by this: evaluate's tolerance.
SLACK = 1e-9
# What a plan may cost: sums of rounded numbers must not rule out a plan that uses exactly everything.
WHOLE = 1 + 10 * SLACK
# Of a row of prices: what is free once may be dear later.
LEAST_SHARE = 1e-6


class Limits(NamedTuple):
    """What a plan may use, and at which rate it is asked."""

    count_C: IntArray
    usd_C: FloatArray
    budget: float
    """USD per hour; inf for none."""
    latency_s: float
    required_rate: float
    """Every stage and hop must do this."""
    wait_rate: float
    """The rate at which batches fill: the required one, or higher for an optimistic answer."""
    may_split: bool
    """Whether a stage may have several splits."""
    may_hop: bool
    """Whether there may be several stages."""


@compiled
def prices_of(limits: Limits, share_R: FloatArray, price_C: FloatArray) -> float:
    """Fill prices per device, from what share of the whole each row is; returns the price of a second.

    A device of which there is none may cost anything.
    """
    price_C[:] = share_R[:-2] / np.maximum(limits.count_C, 1) + share_R[-2] * limits.usd_C / limits.budget
    latency_share: float = share_R[-1]
    return latency_share / limits.latency_s


@compiled
def price_of_move(moves: MoveArrays, limits: Limits, price_C: FloatArray, price_latency: float, move: int) -> float:
    """The least that a split can cost: its share of devices, its time and one wait."""
    devices: float = limits.required_rate * moves.work_M[move]
    latency_s: float = moves.seconds_M[move] + moves.wait_M[move] / limits.wait_rate + moves.cross_M[move]
    price: float = price_C[moves.device_M[move]] * devices + price_latency * latency_s
    return price


@compiled
def price_to_end(
    moves: MoveArrays, limits: Limits, price_C: FloatArray, price_latency: float, least_P: FloatArray, best_P: IntArray
) -> None:
    """Fill `least_P` with the least price from every node to the end, whole replicas and hops left out."""
    end = least_P.size - 1
    least_P[end] = 0.0
    for node in range(end - 1, -1, -1):
        least = np.inf
        for move in range(moves.first_move_P[node], moves.first_move_P[node + 1]):
            price = price_of_move(moves, limits, price_C, price_latency, move) + least_P[moves.to_M[move]]
            if price < least:
                least = price
                best_P[node] = move
        least_P[node] = least


@compiled
def best_prices(
    moves: MoveArrays, limits: Limits, start_R: FloatArray, rounds: int, step: float
) -> tuple[float, FloatArray]:
    """Prices under which the cheapest plan costs most, and what it costs; above 1: there is no plan.

    Rows (R) are the devices, the budget, latency; a row's share of the whole is its price times its limit. Found by
    multiplicative weights: what the cheapest plan uses most becomes dearer.
    """
    num_devices = limits.count_C.size
    num_nodes = moves.first_move_P.size - 1
    least_P = np.empty(num_nodes)
    best_P = np.zeros(num_nodes, dtype=np.int64)
    price_C = np.empty(num_devices)
    used_R = np.empty(num_devices + 2)
    share_R = start_R.copy()
    best_share_R = start_R.copy()
    most = -1.0
    for each in range(rounds):
        price_latency = prices_of(limits, share_R, price_C)
        price_to_end(moves, limits, price_C, price_latency, least_P, best_P)
        if least_P[0] > most:
            most = least_P[0]
            best_share_R[:] = share_R
            if most > 1 + 1e-7:
                break
        used_R[:] = 0.0
        node = 0
        while node < num_nodes - 1 and least_P[0] < np.inf:
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
        dearer_R = np.exp((used_R - highest) / highest * (step / (1.0 + each / 8.0)))
        share_R = np.maximum(share_R * dearer_R, LEAST_SHARE)
        share_R /= share_R.sum()
    return most, best_share_R


@compiled
def affordable_moves(moves: MoveArrays, limits: Limits, share_VR: FloatArray) -> npt.NDArray[np.bool_]:
    """Which moves are on a way from start to end that no row of prices rules out."""
    num_moves, num_nodes, num_devices = moves.to_M.size, moves.first_move_P.size - 1, limits.count_C.size
    kept_M = np.ones(num_moves, dtype=np.bool_)
    price_C = np.empty(num_devices)
    least_P, from_start_P = np.empty(num_nodes), np.empty(num_nodes)
    best_P = np.zeros(num_nodes, dtype=np.int64)
    for row in range(share_VR.shape[0]):
        price_latency = prices_of(limits, share_VR[row], price_C)
        price_to_end(moves, limits, price_C, price_latency, least_P, best_P)
        from_start_P[:] = np.inf
        from_start_P[0] = 0.0
        for node in range(num_nodes):
            for move in range(moves.first_move_P[node], moves.first_move_P[node + 1]):
                target = moves.to_M[move]
                price = price_of_move(moves, limits, price_C, price_latency, move)
                from_start_P[target] = min(from_start_P[target], from_start_P[node] + price)
                if from_start_P[node] + price + least_P[target] > WHOLE:
                    kept_M[move] = False
    return kept_M
