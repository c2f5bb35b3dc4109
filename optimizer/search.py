"""Is there a plan of at least this rate? Labels on the graph of splits, pruned by prices: numba kernels.

For a required rate R every stage needs so many replicas and no fewer, and more than needed only cost latency. What is
left is a shortest path over (boundary, last active ramp, devices used) with latency as its length. A *closed* label
stands between two stages: devices used, latency so far. An *open* label is inside a stage, whose replicas are not
counted yet: its work so far (w), its latency without the waits of further splits, and those waits' batches (B), which
the replicas multiply later.

Labels are dropped when another at the same node is no worse in everything, or when prices show that they cannot reach
the model's end: with a price per device and per second of latency, so normalized that all there is costs 1, a label's
price so far plus the least price of any way on is above 1. Each row of prices is such a proof of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from optimizer.compiled import compiled
from optimizer.moves import MoveArrays
from optimizer.ordering import ordered
from optimizer.split_times import FloatArray, IntArray

# Latencies and costs may exceed their limit by this: evaluate's tolerance.
SLACK = 1e-9
# Sums of the same numbers in another order may differ by this; far below the resolution of rates.
ROUNDING = 1e-13
# Comparing all pairs of more labels would cost more than it saves; right answers do not need it.
MOST_COMPARED = 4000
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


class Labels(NamedTuple):
    """All labels of one search, in the order they were made."""

    device_L: IntArray
    """Device of the open stage; -1: closed."""
    used_L: IntArray
    """Devices of closed stages, in mixed radix."""
    latency_L: FloatArray
    work_L: FloatArray
    batches_L: FloatArray
    """B: of the open stage's further splits, in inputs."""
    parent_L: IntArray
    move_L: IntArray
    """The move that led here; several labels may share it."""
    node_L: IntArray


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
            price = (
                price_C[moves.device_M[move]] * limits.required_rate * moves.work_M[move]
                + price_latency * (moves.seconds_M[move] + moves.wait_M[move] / limits.wait_rate)
                + least_P[moves.to_M[move]]
            )
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
        price_latency = _prices(limits, share_R, price_C)
        price_to_end(moves, limits, price_C, price_latency, least_P, best_P)
        if least_P[0] > most:
            most = least_P[0]
            for row in range(num_devices + 2):
                best_share_R[row] = share_R[row]
            if most > 1 + 1e-7:
                break
        for row in range(num_devices + 2):
            used_R[row] = 0.0
        node = 0
        while node < num_nodes - 1 and least_P[0] < np.inf:
            move = best_P[node]
            device = moves.device_M[move]
            devices = limits.required_rate * moves.work_M[move]
            used_R[device] += devices / limits.count_C[device]
            used_R[num_devices] += devices * limits.usd_C[device] / limits.budget
            used_R[num_devices + 1] += (
                moves.seconds_M[move] + moves.wait_M[move] / limits.wait_rate
            ) / limits.latency_s
            node = moves.to_M[move]
        highest = 0.0
        for row in range(num_devices + 2):
            highest = max(highest, used_R[row])
        if highest <= 0:
            break
        total = 0.0
        for row in range(num_devices + 2):
            dearer = np.exp((used_R[row] - highest) / highest * (step / (1.0 + each / 8.0)))
            share_R[row] = max(share_R[row] * dearer, LEAST_SHARE)
            total += share_R[row]
        for row in range(num_devices + 2):
            share_R[row] /= total
    return most, best_share_R


@compiled
def _prices(limits: Limits, share_R: FloatArray, price_C: FloatArray) -> float:
    """Fill prices per device, from what share of the whole each row is; returns the price of a second."""
    num_devices = limits.count_C.size
    for device in range(num_devices):
        price_C[device] = (
            share_R[device] / limits.count_C[device] + share_R[num_devices] * limits.usd_C[device] / limits.budget
        )
    latency_share: float = share_R[num_devices + 1]
    return latency_share / limits.latency_s


@compiled
def _replicas(work: float, hop_work: float, rate: float) -> int:
    return max(1, int(np.ceil(max(work, hop_work) * rate * (1 - ROUNDING))))


@compiled
def search(
    moves: MoveArrays, limits: Limits, share_VR: FloatArray, radix_C: IntArray, most_labels: int
) -> tuple[bool, Labels, IntArray]:
    """Labels that reached the end, none of them better than another in devices and latency; False: gave up.

    `share_VR` are the rows of prices to prune by, `radix_C` the weight of each device in `used_L`.
    """
    num_devices, num_nodes, num_prices = limits.count_C.size, moves.first_move_P.size - 1, share_VR.shape[0]
    price_VC = np.empty((num_prices, num_devices))
    price_latency_V = np.empty(num_prices)
    least_VP = np.empty((num_prices, num_nodes))
    best_P = np.zeros(num_nodes, dtype=np.int64)
    for row in range(num_prices):
        price_latency_V[row] = _prices(limits, share_VR[row], price_VC[row])
        price_to_end(moves, limits, price_VC[row], price_latency_V[row], least_VP[row], best_P)
    to_end_M, order_M, first_of_cell = _cheapest_first(moves, limits, price_VC[0], price_latency_V[0], least_VP[0])
    longest_P = _longest_way(moves, limits, order_M, first_of_cell)

    size = 1 << 12
    device_L, used_L = np.empty(size, np.int64), np.empty(size, np.int64)
    latency_L, work_L, batches_L = np.empty(size), np.empty(size), np.empty(size)
    parent_L, move_L, node_L = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64)
    next_L = np.empty(size, np.int64)
    head_P = np.full(num_nodes, -1)
    device_L[0], used_L[0], latency_L[0], work_L[0], batches_L[0] = -1, 0, 0.0, 0.0, 0.0
    parent_L[0], move_L[0], node_L[0], next_L[0], head_P[0] = -1, -1, 0, -1, 0
    count = 1
    free_C = np.empty(num_devices, dtype=np.int64)
    spent_V = np.empty(num_prices)
    ended_L = np.empty(0, dtype=np.int64)

    for node in range(num_nodes):
        chosen_L = _best_labels(
            head_P[node], next_L, device_L, used_L, latency_L, work_L, batches_L, radix_C, limits, longest_P[node]
        )
        if node == num_nodes - 1:
            ended_L = chosen_L
            break
        for label in chosen_L:
            usd = _free(used_L[label], radix_C, limits, free_C)
            for row in range(num_prices):
                spent_V[row] = 0.0
                for device in range(num_devices):
                    spent_V[row] += price_VC[row, device] * (limits.count_C[device] - free_C[device])
            open_device = device_L[label]
            for device in range(num_devices):
                if open_device >= 0 and device != open_device:
                    continue
                spent = spent_V[0] + price_latency_V[0] * latency_L[label]
                if open_device >= 0:
                    spent += price_VC[0, device] * limits.required_rate * work_L[label]
                cell = node * num_devices + device
                for position in range(first_of_cell[cell], first_of_cell[cell + 1]):
                    move = order_M[position]
                    if spent + to_end_M[move] > 1 + 10 * SLACK:
                        break
                    work = moves.work_M[move]
                    latency = latency_L[label] + moves.seconds_M[move]
                    batches = 0.0
                    if open_device >= 0:
                        work += work_L[label]
                        batches = batches_L[label] + moves.wait_M[move]
                    else:
                        latency += moves.wait_M[move] / limits.wait_rate
                    target = moves.to_M[move]
                    least = _replicas(work, 0.0, limits.required_rate)
                    if least > free_C[device]:
                        continue
                    for closing in range(2):
                        if closing:
                            if not (limits.may_hop or target == num_nodes - 1):
                                continue
                            replicas = _replicas(work, moves.hop_work_M[move], limits.required_rate)
                            devices = float(replicas)
                            total = latency + replicas * batches / limits.wait_rate + moves.hop_M[move]
                        else:
                            if target == num_nodes - 1 or not limits.may_split:
                                continue
                            replicas = least
                            devices = limits.required_rate * work
                            total = latency + replicas * batches / limits.wait_rate
                        if replicas > free_C[device] or total > limits.latency_s * (1 + SLACK):
                            continue
                        if usd + replicas * limits.usd_C[device] > limits.budget * (1 + SLACK):
                            continue
                        hopeless = False
                        for row in range(num_prices):
                            price = (
                                spent_V[row]
                                + price_VC[row, device] * devices
                                + price_latency_V[row] * total
                                + least_VP[row, target]
                            )
                            if price > 1 + 10 * SLACK:
                                hopeless = True
                                break
                        if hopeless:
                            continue
                        if count == size:
                            size *= 2
                            device_L, used_L = _grown(device_L, size), _grown(used_L, size)
                            latency_L, work_L = _grown(latency_L, size), _grown(work_L, size)
                            batches_L, parent_L = _grown(batches_L, size), _grown(parent_L, size)
                            move_L, node_L, next_L = _grown(move_L, size), _grown(node_L, size), _grown(next_L, size)
                        if closing:
                            device_L[count] = -1
                            used_L[count] = used_L[label] + replicas * radix_C[device]
                            latency_L[count] = total
                            work_L[count] = 0.0
                            batches_L[count] = 0.0
                        else:
                            device_L[count] = device
                            used_L[count] = used_L[label]
                            latency_L[count] = latency
                            work_L[count] = work
                            batches_L[count] = batches
                        parent_L[count] = label
                        move_L[count] = move
                        node_L[count] = target
                        next_L[count] = head_P[target]
                        head_P[target] = count
                        count += 1
            if count > most_labels:
                labels = Labels(device_L, used_L, latency_L, work_L, batches_L, parent_L, move_L, node_L)
                return False, labels, ended_L
    labels = Labels(
        device_L[:count], used_L[:count], latency_L[:count], work_L[:count], batches_L[:count],
        parent_L[:count], move_L[:count], node_L[:count],
    )  # fmt: skip
    return True, labels, ended_L


@compiled
def _cheapest_first(
    moves: MoveArrays, limits: Limits, price_C: FloatArray, price_latency: float, least_P: FloatArray
) -> tuple[FloatArray, IntArray, IntArray]:
    """Per move its least price to the end; per (node, device) the moves in that order that a plan can afford."""
    num_moves, num_nodes, num_devices = moves.to_M.size, moves.first_move_P.size - 1, limits.count_C.size
    to_end_M = np.empty(num_moves)
    kept_M = np.empty(num_moves, dtype=np.int64)
    cell_M = np.empty(num_moves, dtype=np.int64)
    num_kept = 0
    from_start_P = np.full(num_nodes, np.inf)
    from_start_P[0] = 0.0
    for node in range(num_nodes):
        for move in range(moves.first_move_P[node], moves.first_move_P[node + 1]):
            target = moves.to_M[move]
            price = price_C[moves.device_M[move]] * limits.required_rate * moves.work_M[move] + price_latency * (
                moves.seconds_M[move] + moves.wait_M[move] / limits.wait_rate
            )
            from_start_P[target] = min(from_start_P[target], from_start_P[node] + price)
            to_end_M[move] = price + least_P[target]
            cell_M[move] = node * num_devices + moves.device_M[move]
            if from_start_P[node] + to_end_M[move] <= 1 + 10 * SLACK:
                kept_M[num_kept] = move
                num_kept += 1
    order_M = ordered(kept_M[:num_kept], cell_M, to_end_M, to_end_M)
    first_of_cell = np.zeros(num_nodes * num_devices + 1, dtype=np.int64)
    for position in range(num_kept):
        first_of_cell[cell_M[order_M[position]] + 1] += 1
    for cell in range(num_nodes * num_devices):
        first_of_cell[cell + 1] += first_of_cell[cell]
    return to_end_M, order_M, first_of_cell


@compiled
def affordable_moves(moves: MoveArrays, limits: Limits, share_VR: FloatArray) -> npt.NDArray[np.bool_]:
    """Which moves are on a way from start to end that no row of prices rules out."""
    num_moves, num_nodes, num_devices = moves.to_M.size, moves.first_move_P.size - 1, limits.count_C.size
    kept_M = np.ones(num_moves, dtype=np.bool_)
    price_C = np.empty(num_devices)
    least_P, from_start_P = np.empty(num_nodes), np.empty(num_nodes)
    best_P = np.zeros(num_nodes, dtype=np.int64)
    for row in range(share_VR.shape[0]):
        price_latency = _prices(limits, share_VR[row], price_C)
        price_to_end(moves, limits, price_C, price_latency, least_P, best_P)
        for node in range(num_nodes):
            from_start_P[node] = np.inf if node else 0.0
        for node in range(num_nodes):
            for move in range(moves.first_move_P[node], moves.first_move_P[node + 1]):
                target = moves.to_M[move]
                price = price_C[moves.device_M[move]] * limits.required_rate * moves.work_M[move] + price_latency * (
                    moves.seconds_M[move] + moves.wait_M[move] / limits.wait_rate
                )
                from_start_P[target] = min(from_start_P[target], from_start_P[node] + price)
                if from_start_P[node] + price + least_P[target] > 1 + 10 * SLACK:
                    kept_M[move] = False
    return kept_M


@compiled
def _longest_way(moves: MoveArrays, limits: Limits, order_M: IntArray, first_of_cell: IntArray) -> FloatArray:
    """Per node, more latency than any way on can take."""
    num_nodes, num_devices = moves.first_move_P.size - 1, limits.count_C.size
    longest_P = np.zeros(num_nodes)
    for node in range(num_nodes - 2, -1, -1):
        for device in range(num_devices):
            cell = node * num_devices + device
            for position in range(first_of_cell[cell], first_of_cell[cell + 1]):
                move = order_M[position]
                wait_s = limits.count_C[device] * moves.wait_M[move] / limits.wait_rate
                way = moves.seconds_M[move] + wait_s + moves.hop_M[move] + longest_P[moves.to_M[move]]
                longest_P[node] = max(longest_P[node], way)
    return longest_P


@compiled
def _grown(values: np.ndarray, size: int) -> np.ndarray:
    bigger = np.empty(size, values.dtype)
    bigger[: values.size] = values
    return bigger


@compiled
def _free(used: int, radix_C: IntArray, limits: Limits, free_C: IntArray) -> float:
    """Fill the devices left of each type; returns what the used ones cost."""
    usd = 0.0
    for device in range(radix_C.size - 1, -1, -1):
        taken = used // radix_C[device]
        used -= taken * radix_C[device]
        free_C[device] = limits.count_C[device] - taken
        usd += taken * limits.usd_C[device]
    return usd


@compiled
def _best_labels(
    head: int,
    next_L: IntArray,
    device_L: IntArray,
    used_L: IntArray,
    latency_L: FloatArray,
    work_L: FloatArray,
    batches_L: FloatArray,
    radix_C: IntArray,
    limits: Limits,
    longest: float,
) -> IntArray:
    """The labels of one node that no other is as good as in everything.

    Where even the longest way on stays inside the limit, a label's latency no longer matters: it counts as 0.
    """
    count = 0
    label = head
    while label >= 0:
        count += 1
        label = next_L[label]
    found_L = np.empty(count, dtype=np.int64)
    group_L = np.empty(count, dtype=np.int64)
    figures_L = np.empty((count, 3))  # latency, work, batches: as far as they matter
    label, position = head, 0
    most_replicas = limits.count_C.max()
    while label >= 0:
        found_L[position] = label
        group_L[position] = used_L[label] * (radix_C.size + 1) + device_L[label] + 1
        worst = latency_L[label] + most_replicas * batches_L[label] / limits.wait_rate + longest
        matters = 1.0 if worst > limits.latency_s else 0.0
        figures_L[position, 0] = matters * latency_L[label]
        figures_L[position, 1] = work_L[label]
        figures_L[position, 2] = matters * batches_L[label]
        position += 1
        label = next_L[label]
    # A label can be beaten by earlier ones only. Groups share the devices used and the open device.
    order_L = ordered(np.arange(count), group_L, figures_L[:, 0], figures_L[:, 1])
    kept_L = np.empty(count, dtype=np.int64)
    num_kept = 0
    first_kept = 0
    for place in range(count):
        position = order_L[place]
        if place == 0 or group_L[position] != group_L[order_L[place - 1]]:
            first_kept = num_kept
        beaten = False
        for other in range(first_kept, num_kept):
            rival = kept_L[other]
            if figures_L[rival, 1] <= figures_L[position, 1] and figures_L[rival, 2] <= figures_L[position, 2]:
                beaten = True
                break
        if not beaten:
            kept_L[num_kept] = position
            num_kept += 1
    return _fewest_devices(kept_L[:num_kept], found_L, figures_L, device_L, used_L, radix_C, limits)


@compiled
def _fewest_devices(
    kept_L: IntArray,
    found_L: IntArray,
    figures_L: FloatArray,
    device_L: IntArray,
    used_L: IntArray,
    radix_C: IntArray,
    limits: Limits,
) -> IntArray:
    """The labels at the kept positions, without those that another beats with no more devices of any type."""
    count, num_devices = kept_L.size, radix_C.size
    chosen_L = np.empty(count, dtype=np.int64)
    free_LC = np.empty((count, num_devices), dtype=np.int64)
    for place in range(count):
        chosen_L[place] = found_L[kept_L[place]]
        _free(used_L[chosen_L[place]], radix_C, limits, free_LC[place])
    if count > MOST_COMPARED:
        return chosen_L
    num_chosen = 0
    for place in range(count):
        position, label = kept_L[place], found_L[kept_L[place]]
        beaten = False
        for other in range(count):
            rival = kept_L[other]
            if (
                figures_L[rival, 0] > figures_L[position, 0]
                or figures_L[rival, 1] > figures_L[position, 1]
                or figures_L[rival, 2] > figures_L[position, 2]
                or device_L[found_L[rival]] != device_L[label]
                or used_L[found_L[rival]] == used_L[label]
            ):
                continue
            beaten = True
            for device in range(num_devices):
                if free_LC[other, device] < free_LC[place, device]:
                    beaten = False
                    break
            if beaten:
                break
        if not beaten:
            chosen_L[num_chosen] = label
            num_chosen += 1
    return chosen_L[:num_chosen]
