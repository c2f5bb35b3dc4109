"""Is there a plan of at least this rate? Labels on the graph of splits, pruned by prices: kernels.

For a required rate every stage needs so many replicas and no fewer, and more than needed only cost latency. What is
left is a shortest path over (boundary, last active ramp, devices used) with latency as its length. Labels are dropped
when another at the same node is no worse in everything, or when a row of prices shows that they cannot reach the
model's end (`optimizer.exact.prices`).

A *closed* label stands between two stages: devices used, latency so far. An *open* label is inside a stage, whose
replicas are not counted yet: its work so far, its latency without the waits of further splits, and those waits'
batches, which the replicas multiply later.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optimizer.compiled import compiled
from optimizer.exact.prices import SLACK, WHOLE, Limits, price_of_move, price_to_end, prices_of
from optimizer.moves import MoveArrays
from optimizer.step import FloatArray, IntArray, Labels, linked_labels, undominated, with_doubled_capacity

DEVICE, USED, PARENT, MOVE, NEXT = 0, 1, 2, 3, 4
"""Columns of `int_LI`: device of the open stage, or CLOSED; devices of closed stages, in mixed radix; the label and
the move that led here; the next label of the same node."""
LATENCY, WORK, BATCHES = 0, 1, 2
"""Columns of `float_LF`: seconds; device seconds per input; inputs that each replica of the open stage waits for."""
CLOSED, NO_LABEL = -1, -1
# Sums of the same numbers in another order may differ by this; far below the resolution of rates.
ROUNDING = 1e-13
# More replicas than there are, and still an integer.
ENDLESS = 1e15


class PriceRows(NamedTuple):
    """Several rows of prices (V), each a proof of its own."""

    price_VC: FloatArray
    """Of one device."""
    price_latency_V: FloatArray
    """Of one second."""
    least_VP: FloatArray
    """From every node to the end."""


class Route(NamedTuple):
    """The moves that the first row of prices leaves, cheapest to the end first, per node and device."""

    to_end_M: FloatArray
    order_M: IntArray
    first_of_cell: IntArray
    """Position in `order_M`; a cell is a node and a device."""
    longest_P: FloatArray
    """Per node, more latency than any way on can take."""


@compiled
def search(
    moves: MoveArrays, limits: Limits, share_VR: FloatArray, radix_C: IntArray, most_labels: int
) -> tuple[bool, int, Labels, IntArray]:
    """Whether it came to an end, how many labels it took, the labels, and those at the model's end.

    `share_VR` are the rows of prices to prune by, `radix_C` the weight of each device in used devices.
    """
    num_nodes = moves.first_move_P.size - 1
    prices = _priced(moves, limits, share_VR)
    route = _cheapest_first(moves, limits, prices)
    labels = Labels(np.empty((1 << 12, 5), dtype=np.int64), np.empty((1 << 12, 3)))
    head_P = np.full(num_nodes, NO_LABEL)
    _write_label(labels, head_P, 0, 0, CLOSED, 0, NO_LABEL, NO_LABEL, 0.0, 0.0, 0.0)
    count = 1
    free_C = np.empty(limits.count_C.size, dtype=np.int64)
    spent_V = np.empty(share_VR.shape[0])
    for node in range(num_nodes - 1):
        for label in _best_labels(head_P[node], labels, radix_C, limits, route.longest_P[node]):
            usd = _free_devices(labels.int_LI[label, USED], radix_C, limits, free_C)
            _spend(prices, limits, free_C, spent_V)
            count, labels = _follow(
                moves, limits, prices, route, node, label, usd, free_C, spent_V, radix_C, head_P, labels, count
            )
            if count > most_labels:
                return False, count, labels, np.empty(0, dtype=np.int64)
    return True, count, labels, _best_labels(head_P[num_nodes - 1], labels, radix_C, limits, np.inf)


@compiled
def _follow(
    moves: MoveArrays, limits: Limits, prices: PriceRows, route: Route, node: int, label: int, usd: float,
    free_C: IntArray, spent_V: FloatArray, radix_C: IntArray, head_P: IntArray, labels: Labels, count: int,
) -> tuple[int, Labels]:  # fmt: skip
    """Write a label for every way on from one; returns how many there are now, and their room."""
    last = moves.first_move_P.size - 2
    open_device, used = labels.int_LI[label, DEVICE], labels.int_LI[label, USED]
    latency_s, work_s = labels.float_LF[label, LATENCY], labels.float_LF[label, WORK]
    for device in range(free_C.size):
        if open_device not in (CLOSED, device):
            continue
        spent = spent_V[0] + prices.price_latency_V[0] * latency_s
        spent += prices.price_VC[0, device] * limits.required_rate * work_s
        cell = node * free_C.size + device
        for position in range(route.first_of_cell[cell], route.first_of_cell[cell + 1]):
            move = route.order_M[position]
            if spent + route.to_end_M[move] > WHOLE:
                break
            target, stage_s = moves.to_M[move], work_s + moves.work_M[move]
            passed_s, batches = latency_s + moves.seconds_M[move] + moves.cross_M[move], labels.float_LF[label, BATCHES]
            if open_device == CLOSED or moves.pooled_M[move]:
                passed_s += moves.wait_M[move] / limits.wait_rate
            else:
                batches += moves.wait_M[move]
            while count + 2 > labels.int_LI.shape[0]:
                labels = with_doubled_capacity(labels)
            if target != last and limits.may_split:
                replicas = _replicas(stage_s, limits)
                total_s = passed_s + replicas * batches / limits.wait_rate
                devices = limits.required_rate * stage_s
                if _fits(limits, free_C, usd, device, replicas, total_s) and _affordable(
                    prices, spent_V, device, devices, total_s, target
                ):
                    _write_label(labels, head_P, count, target, device, used, label, move, passed_s, stage_s, batches)
                    count += 1
            if target == last or limits.may_hop:
                replicas = _replicas(max(stage_s, moves.hop_work_M[move]), limits)
                total_s = passed_s + replicas * batches / limits.wait_rate + moves.hop_M[move]
                if _fits(limits, free_C, usd, device, replicas, total_s) and _affordable(
                    prices, spent_V, device, float(replicas), total_s, target
                ):
                    taken = used + replicas * radix_C[device]
                    _write_label(labels, head_P, count, target, CLOSED, taken, label, move, total_s, 0.0, 0.0)
                    count += 1
    return count, labels


@compiled
def _replicas(work_s: float, limits: Limits) -> int:
    """The fewest that do the required rate."""
    return max(1, int(min(np.ceil(work_s * limits.required_rate * (1 - ROUNDING)), ENDLESS)))


@compiled
def _fits(limits: Limits, free_C: IntArray, usd: float, device: int, replicas: int, latency_s: float) -> bool:
    """Whether devices, budget and latency suffice."""
    return bool(
        replicas <= free_C[device]
        and latency_s <= limits.latency_s * (1 + SLACK)
        and usd + replicas * limits.usd_C[device] <= limits.budget * (1 + SLACK)
    )


@compiled
def _affordable(
    prices: PriceRows, spent_V: FloatArray, device: int, devices: float, latency_s: float, target: int
) -> bool:
    """Whether no row of prices rules out every way on."""
    for row in range(spent_V.size):
        here = spent_V[row] + prices.price_VC[row, device] * devices + prices.price_latency_V[row] * latency_s
        if here + prices.least_VP[row, target] > WHOLE:
            return False
    return True


@compiled
def _spend(prices: PriceRows, limits: Limits, free_C: IntArray, spent_V: FloatArray) -> None:
    """Fill the price, per row, of the devices that are used."""
    for row in range(spent_V.size):
        spent_V[row] = 0.0
        for device in range(free_C.size):
            spent_V[row] += prices.price_VC[row, device] * (limits.count_C[device] - free_C[device])


@compiled
def _priced(moves: MoveArrays, limits: Limits, share_VR: FloatArray) -> PriceRows:
    num_devices, num_nodes, num_rows = limits.count_C.size, moves.first_move_P.size - 1, share_VR.shape[0]
    prices = PriceRows(np.empty((num_rows, num_devices)), np.empty(num_rows), np.empty((num_rows, num_nodes)))
    best_P = np.zeros(num_nodes, dtype=np.int64)
    for row in range(num_rows):
        price_latency = prices_of(limits, share_VR[row], prices.price_VC[row])
        prices.price_latency_V[row] = price_latency
        price_to_end(moves, limits, prices.price_VC[row], price_latency, prices.least_VP[row], best_P)
    return prices


@compiled
def _cheapest_first(moves: MoveArrays, limits: Limits, prices: PriceRows) -> Route:
    num_moves, num_nodes, num_devices = moves.to_M.size, moves.first_move_P.size - 1, limits.count_C.size
    to_end_M = np.empty(num_moves)
    kept_M, cell_M = np.empty(num_moves, dtype=np.int64), np.empty(num_moves, dtype=np.int64)
    num_kept = 0
    from_start_P = np.full(num_nodes, np.inf)
    from_start_P[0] = 0.0
    for node in range(num_nodes):
        for move in range(moves.first_move_P[node], moves.first_move_P[node + 1]):
            target = moves.to_M[move]
            price = price_of_move(moves, limits, prices.price_VC[0], prices.price_latency_V[0], move)
            from_start_P[target] = min(from_start_P[target], from_start_P[node] + price)
            to_end_M[move] = price + prices.least_VP[0, target]
            cell_M[move] = node * num_devices + moves.device_M[move]
            if from_start_P[node] + to_end_M[move] <= WHOLE:
                kept_M[num_kept] = move
                num_kept += 1
    kept_M = kept_M[:num_kept]
    order_M = kept_M[_ordered(cell_M[kept_M], to_end_M[kept_M], to_end_M[kept_M])]
    first_of_cell = np.searchsorted(cell_M[order_M], np.arange(num_nodes * num_devices + 1))
    longest_P = _longest_way(moves, limits, order_M, first_of_cell)
    return Route(to_end_M, order_M, first_of_cell, longest_P)


@compiled
def _longest_way(moves: MoveArrays, limits: Limits, order_M: IntArray, first_of_cell: IntArray) -> FloatArray:
    num_nodes, num_devices = moves.first_move_P.size - 1, limits.count_C.size
    longest_P = np.zeros(num_nodes)
    for node in range(num_nodes - 2, -1, -1):
        for position in range(first_of_cell[node * num_devices], first_of_cell[(node + 1) * num_devices]):
            move = order_M[position]
            wait_s = limits.count_C[moves.device_M[move]] * moves.wait_M[move] / limits.wait_rate
            way_s = moves.seconds_M[move] + wait_s + moves.hop_M[move] + moves.cross_M[move]
            way_s += longest_P[moves.to_M[move]]
            longest_P[node] = max(longest_P[node], way_s)
    return longest_P


@compiled
def _write_label(
    labels: Labels, head_P: IntArray, label: int, node: int, device: int, used: int, parent: int, move: int,
    latency_s: float, work_s: float, batches: float,
) -> None:  # fmt: skip
    """Fill one label, and put it before the others of its node."""
    whole_I, real_F = labels.int_LI[label], labels.float_LF[label]
    whole_I[DEVICE], whole_I[USED], whole_I[PARENT], whole_I[MOVE] = device, used, parent, move
    real_F[LATENCY], real_F[WORK], real_F[BATCHES] = latency_s, work_s, batches
    whole_I[NEXT], head_P[node] = head_P[node], label


@compiled
def _free_devices(used: int, radix_C: IntArray, limits: Limits, free_C: IntArray) -> float:
    """Fill the devices left of each type; returns what the used ones cost."""
    usd = 0.0
    for device in range(radix_C.size - 1, -1, -1):
        taken = used // radix_C[device]
        used -= taken * radix_C[device]
        free_C[device] = limits.count_C[device] - taken
        usd += taken * limits.usd_C[device]
    return usd


@compiled
def _best_labels(head: int, labels: Labels, radix_C: IntArray, limits: Limits, longest_s: float) -> IntArray:
    """The labels of one node that no other with the same devices is as good as in everything.

    One that used fewer devices could beat more, but comparing all pairs was measured to cost more than it saves.
    Where even the longest way on stays inside the limit, a label's latency no longer matters: it counts as 0.
    """
    found_L = linked_labels(head, labels.int_LI, NEXT)
    group_L = np.empty(found_L.size, dtype=np.int64)
    figures_LF = np.empty((found_L.size, 3))  # as far as they matter
    most_replicas = limits.count_C.max()
    for position, label in enumerate(found_L):
        group_L[position] = labels.int_LI[label, USED] * (radix_C.size + 1) + labels.int_LI[label, DEVICE] + 1
        latency_s, batches = labels.float_LF[label, LATENCY], labels.float_LF[label, BATCHES]
        worst_s = latency_s + most_replicas * batches / limits.wait_rate + longest_s
        matters = 1.0 if worst_s > limits.latency_s else 0.0
        figures_LF[position, LATENCY] = matters * latency_s
        figures_LF[position, WORK] = labels.float_LF[label, WORK]
        figures_LF[position, BATCHES] = matters * batches
    # A label can be beaten by earlier ones only. Groups share the devices used and the open device.
    order_L = _ordered(group_L, figures_LF[:, LATENCY], figures_LF[:, WORK])
    _, kept_L = undominated(order_L, group_L[order_L], figures_LF, LATENCY, BATCHES + 1, 0.0, order_L.size)
    best_L: IntArray = found_L[kept_L]
    return best_L


@compiled
def _ordered(group_I: IntArray, first_I: FloatArray, second_I: FloatArray) -> IntArray:
    """Places by group, then by the first key, then by the second."""
    order_I = np.argsort(second_I, kind="mergesort")
    order_I = order_I[np.argsort(first_I[order_I], kind="mergesort")]
    return order_I[np.argsort(group_I[order_I], kind="mergesort")]
