"""Label-setting search for plans of at least a given rate, on the graph of splits: kernels.

At a required rate every stage needs a certain number of replicas, and further replicas only add latency. So the problem
is a constrained shortest path over (boundary, last active ramp, devices in use), with latency as the length. A label is
dropped if another label at the same node dominates it, or if a completion bound proves that it cannot reach the end of
the model within the limits (`optimizer.exact.prices`).

A *closed* label is between two stages. It holds the devices in use and the latency so far. An *open* label is inside a
stage whose replicas are not counted yet. It holds the stage's work so far, and the latency without the waits of its
further splits. These waits are kept as inputs, and they are multiplied by the replicas when the stage closes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optimizer.compiled import compiled
from optimizer.exact.prices import INFEASIBLE_ABOVE, TOLERANCE, Limits, completion_bounds, move_price, weighted_prices
from optimizer.moves import MoveArrays
from optimizer.step import FloatArray, IntArray, Labels, linked_labels, undominated, with_doubled_capacity

DEVICE, USED, PARENT, MOVE, NEXT = 0, 1, 2, 3, 4
"""Columns of `int_LI`: device of the open stage, or CLOSED; devices of closed stages, in mixed radix; parent label;
the move from the parent; next label of the same node."""
LATENCY, WORK, BATCHES = 0, 1, 2
"""Columns of `float_LF`: seconds; device seconds per input; inputs that each replica of the open stage waits for."""
CLOSED, NO_LABEL = -1, -1
# Relative difference that the order of a sum may cause. It is far below the resolution of rates.
ROUNDING = 1e-13
# More replicas than any cluster has, but still exact as an integer.
MOST_REPLICAS = 1e15


class PriceRows(NamedTuple):
    """Several rows of prices (V). Each row alone is a valid bound."""

    price_VC: FloatArray
    """Price of one device."""
    price_latency_V: FloatArray
    """Price of one second of latency."""
    bound_VP: FloatArray
    """Completion bound: the least price from a node to the end."""


class MoveOrder(NamedTuple):
    """The moves that the first row of prices does not exclude, sorted by their completion bound."""

    to_end_M: FloatArray
    """Least price of a path to the end that starts with the move."""
    order_M: IntArray
    """Moves by cell, the cheapest first. A cell is a pair of node and device."""
    first_of_cell: IntArray
    """Position in `order_M` of each cell's first move."""
    longest_P: FloatArray
    """Upper bound on the latency from a node to the end, in seconds."""


@compiled
def search(
    moves: MoveArrays, limits: Limits, weight_VR: FloatArray, radix_C: IntArray, most_labels: int
) -> tuple[bool, int, Labels, IntArray]:
    """Returns whether the search is complete, the number of labels, the labels, and those at the model's end.

    `weight_VR` are the rows of price weights to prune by. `radix_C` is each device's place value in column USED.
    """
    num_nodes = moves.first_move_P.size - 1
    prices = _price_rows(moves, limits, weight_VR)
    order = _ordered_moves(moves, limits, prices)
    labels = Labels(np.empty((1 << 12, 5), dtype=np.int64), np.empty((1 << 12, 3)))
    head_P = np.full(num_nodes, NO_LABEL)
    _write_label(labels, head_P, 0, 0, CLOSED, 0, NO_LABEL, NO_LABEL, 0.0, 0.0, 0.0)
    count = 1
    free_C = np.empty(limits.count_C.size, dtype=np.int64)
    spent_V = np.empty(weight_VR.shape[0])
    for node in range(num_nodes - 1):
        for label in _undominated_labels(head_P[node], labels, radix_C, limits, order.longest_P[node]):
            usd = _free_devices(labels.int_LI[label, USED], radix_C, limits, free_C)
            _price_used_devices(prices, limits, free_C, spent_V)
            count, labels = _extend(
                moves, limits, prices, order, node, label, usd, free_C, spent_V, radix_C, head_P, labels, count
            )
            if count > most_labels:
                return False, count, labels, np.empty(0, dtype=np.int64)
    return True, count, labels, _undominated_labels(head_P[num_nodes - 1], labels, radix_C, limits, np.inf)


@compiled
def _extend(
    moves: MoveArrays, limits: Limits, prices: PriceRows, order: MoveOrder, node: int, label: int, usd: float,
    free_C: IntArray, spent_V: FloatArray, radix_C: IntArray, head_P: IntArray, labels: Labels, count: int,
) -> tuple[int, Labels]:  # fmt: skip
    """Extends a label by every move that may lead to a plan. Returns the number of labels and their storage."""
    last = moves.first_move_P.size - 2
    open_device, used = labels.int_LI[label, DEVICE], labels.int_LI[label, USED]
    latency_s, work_s = labels.float_LF[label, LATENCY], labels.float_LF[label, WORK]
    for device in range(free_C.size):
        if open_device not in (CLOSED, device):
            continue
        spent = spent_V[0] + prices.price_latency_V[0] * latency_s
        spent += prices.price_VC[0, device] * limits.required_rate * work_s
        cell = node * free_C.size + device
        for position in range(order.first_of_cell[cell], order.first_of_cell[cell + 1]):
            move = order.order_M[position]
            if spent + order.to_end_M[move] > INFEASIBLE_ABOVE:
                break  # the moves after it are no cheaper
            target, stage_s = moves.to_M[move], work_s + moves.work_M[move]
            passed_s, batches = latency_s + moves.seconds_M[move] + moves.cross_M[move], labels.float_LF[label, BATCHES]
            if open_device == CLOSED or moves.pooled_M[move]:
                passed_s += moves.wait_M[move] / limits.wait_rate
            else:
                batches += moves.wait_M[move]
            while count + 2 > labels.int_LI.shape[0]:
                labels = with_doubled_capacity(labels)
            if target != last and limits.may_split:
                replicas = _least_replicas(stage_s, limits)
                total_s = passed_s + replicas * batches / limits.wait_rate
                devices = limits.required_rate * stage_s
                if _fits(limits, free_C, usd, device, replicas, total_s) and _can_complete(
                    prices, spent_V, device, devices, total_s, target
                ):
                    _write_label(labels, head_P, count, target, device, used, label, move, passed_s, stage_s, batches)
                    count += 1
            if target == last or limits.may_hop:
                replicas = _least_replicas(max(stage_s, moves.hop_work_M[move]), limits)
                total_s = passed_s + replicas * batches / limits.wait_rate + moves.hop_M[move]
                if _fits(limits, free_C, usd, device, replicas, total_s) and _can_complete(
                    prices, spent_V, device, float(replicas), total_s, target
                ):
                    now_used = used + replicas * radix_C[device]
                    _write_label(labels, head_P, count, target, CLOSED, now_used, label, move, total_s, 0.0, 0.0)
                    count += 1
    return count, labels


@compiled
def _least_replicas(work_s: float, limits: Limits) -> int:
    """Returns the smallest number of replicas that reaches the required rate."""
    return max(1, int(min(np.ceil(work_s * limits.required_rate * (1 - ROUNDING)), MOST_REPLICAS)))


@compiled
def _fits(limits: Limits, free_C: IntArray, usd: float, device: int, replicas: int, latency_s: float) -> bool:
    """Returns whether the free devices, the budget and the latency limit suffice."""
    return bool(
        replicas <= free_C[device]
        and latency_s <= limits.latency_s * (1 + TOLERANCE)
        and usd + replicas * limits.usd_C[device] <= limits.budget * (1 + TOLERANCE)
    )


@compiled
def _can_complete(
    prices: PriceRows, spent_V: FloatArray, device: int, devices: float, latency_s: float, target: int
) -> bool:
    """Returns False if a row of prices proves that no extension to the end stays within the limits."""
    for row in range(spent_V.size):
        spent = spent_V[row] + prices.price_VC[row, device] * devices + prices.price_latency_V[row] * latency_s
        if spent + prices.bound_VP[row, target] > INFEASIBLE_ABOVE:
            return False
    return True


@compiled
def _price_used_devices(prices: PriceRows, limits: Limits, free_C: IntArray, spent_V: FloatArray) -> None:
    """Fills `spent_V` with the price of the devices that are in use, per row."""
    for row in range(spent_V.size):
        spent_V[row] = 0.0
        for device in range(free_C.size):
            spent_V[row] += prices.price_VC[row, device] * (limits.count_C[device] - free_C[device])


@compiled
def _price_rows(moves: MoveArrays, limits: Limits, weight_VR: FloatArray) -> PriceRows:
    num_devices, num_nodes, num_rows = limits.count_C.size, moves.first_move_P.size - 1, weight_VR.shape[0]
    prices = PriceRows(np.empty((num_rows, num_devices)), np.empty(num_rows), np.empty((num_rows, num_nodes)))
    best_P = np.zeros(num_nodes, dtype=np.int64)
    for row in range(num_rows):
        price_latency = weighted_prices(limits, weight_VR[row], prices.price_VC[row])
        prices.price_latency_V[row] = price_latency
        completion_bounds(moves, limits, prices.price_VC[row], price_latency, prices.bound_VP[row], best_P)
    return prices


@compiled
def _ordered_moves(moves: MoveArrays, limits: Limits, prices: PriceRows) -> MoveOrder:
    num_moves, num_nodes, num_devices = moves.to_M.size, moves.first_move_P.size - 1, limits.count_C.size
    to_end_M = np.empty(num_moves)
    kept_M, cell_M = np.empty(num_moves, dtype=np.int64), np.empty(num_moves, dtype=np.int64)
    num_kept = 0
    from_start_P = np.full(num_nodes, np.inf)
    from_start_P[0] = 0.0
    for node in range(num_nodes):
        for move in range(moves.first_move_P[node], moves.first_move_P[node + 1]):
            target = moves.to_M[move]
            price = move_price(moves, limits, prices.price_VC[0], prices.price_latency_V[0], move)
            from_start_P[target] = min(from_start_P[target], from_start_P[node] + price)
            to_end_M[move] = price + prices.bound_VP[0, target]
            cell_M[move] = node * num_devices + moves.device_M[move]
            if from_start_P[node] + to_end_M[move] <= INFEASIBLE_ABOVE:
                kept_M[num_kept] = move
                num_kept += 1
    kept_M = kept_M[:num_kept]
    order_M = kept_M[_lexsorted(cell_M[kept_M], to_end_M[kept_M], to_end_M[kept_M])]
    first_of_cell = np.searchsorted(cell_M[order_M], np.arange(num_nodes * num_devices + 1))
    longest_P = _longest_latencies(moves, limits, order_M, first_of_cell)
    return MoveOrder(to_end_M, order_M, first_of_cell, longest_P)


@compiled
def _longest_latencies(moves: MoveArrays, limits: Limits, order_M: IntArray, first_of_cell: IntArray) -> FloatArray:
    num_nodes, num_devices = moves.first_move_P.size - 1, limits.count_C.size
    longest_P = np.zeros(num_nodes)
    for node in range(num_nodes - 2, -1, -1):
        for position in range(first_of_cell[node * num_devices], first_of_cell[(node + 1) * num_devices]):
            move = order_M[position]
            wait_s = limits.count_C[moves.device_M[move]] * moves.wait_M[move] / limits.wait_rate
            path_s = moves.seconds_M[move] + wait_s + moves.hop_M[move] + moves.cross_M[move]
            path_s += longest_P[moves.to_M[move]]
            longest_P[node] = max(longest_P[node], path_s)
    return longest_P


@compiled
def _write_label(
    labels: Labels, head_P: IntArray, label: int, node: int, device: int, used: int, parent: int, move: int,
    latency_s: float, work_s: float, batches: float,
) -> None:  # fmt: skip
    """Writes one label and puts it at the head of its node's list."""
    int_I, float_F = labels.int_LI[label], labels.float_LF[label]
    int_I[DEVICE], int_I[USED], int_I[PARENT], int_I[MOVE] = device, used, parent, move
    float_F[LATENCY], float_F[WORK], float_F[BATCHES] = latency_s, work_s, batches
    int_I[NEXT], head_P[node] = head_P[node], label


@compiled
def _free_devices(used: int, radix_C: IntArray, limits: Limits, free_C: IntArray) -> float:
    """Fills `free_C` with the free devices of each type and returns the cost of the used ones, in USD per hour."""
    usd = 0.0
    for device in range(radix_C.size - 1, -1, -1):
        num_used = used // radix_C[device]
        used -= num_used * radix_C[device]
        free_C[device] = limits.count_C[device] - num_used
        usd += num_used * limits.usd_C[device]
    return usd


@compiled
def _undominated_labels(head: int, labels: Labels, radix_C: IntArray, limits: Limits, longest_s: float) -> IntArray:
    """Returns the labels of a node that no other label with the same devices dominates.

    A label that uses fewer devices could dominate more labels, but comparing all pairs costs more than it saves. If
    even the longest path to the end stays within the limit, latency no longer matters, and it counts as 0.
    """
    found_L = linked_labels(head, labels.int_LI, NEXT)
    group_L = np.empty(found_L.size, dtype=np.int64)
    figures_LF = np.empty((found_L.size, 3))
    most_replicas = limits.count_C.max()
    for position, label in enumerate(found_L):
        group_L[position] = labels.int_LI[label, USED] * (radix_C.size + 1) + labels.int_LI[label, DEVICE] + 1
        latency_s, batches = labels.float_LF[label, LATENCY], labels.float_LF[label, BATCHES]
        worst_s = latency_s + most_replicas * batches / limits.wait_rate + longest_s
        matters = 1.0 if worst_s > limits.latency_s else 0.0
        figures_LF[position, LATENCY] = matters * latency_s
        figures_LF[position, WORK] = labels.float_LF[label, WORK]
        figures_LF[position, BATCHES] = matters * batches
    # Labels of a group share the devices in use and the open device. Only earlier labels can dominate a label.
    order_L = _lexsorted(group_L, figures_LF[:, LATENCY], figures_LF[:, WORK])
    _, kept_L = undominated(order_L, group_L[order_L], figures_LF, LATENCY, BATCHES + 1, 0.0, order_L.size)
    best_L: IntArray = found_L[kept_L]
    return best_L


@compiled
def _lexsorted(group_I: IntArray, first_I: FloatArray, second_I: FloatArray) -> IntArray:
    """Returns the positions sorted by group, then by the first key, then by the second."""
    order_I = np.argsort(second_I, kind="mergesort")
    order_I = order_I[np.argsort(first_I[order_I], kind="mergesort")]
    return order_I[np.argsort(group_I[order_I], kind="mergesort")]
