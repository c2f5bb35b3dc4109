"""Good plans of problems too big to search exactly: a beam search over stages, steered by prices.

At a fixed rate every stage needs so many replicas and no fewer, so a label is a plan's beginning: replicas used per
device, latency so far, and, inside a stage of several splits, its work and batches so far. Its *estimate* is what the
whole plan must cost at the prices: replicas so far, the cheapest way on, and the devices that are left but too few to
run any split further on. Labels whose estimate is above what there is cannot become plans (but for rounding) and are
dropped; of the others each node keeps the best few. So what is found is a plan; what is not found may exist.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optimizer.compiled import compiled, inlined
from optimizer.exact.prices import SLACK, Limits
from optimizer.moves import MoveArrays
from optimizer.scale.stages import Ways
from optimizer.step import FloatArray, IntArray


class Steer(NamedTuple):
    """What the beam is steered by: prices per replica and per second of latency, at one rate."""

    used_C: FloatArray
    """Price of a replica that is used."""
    idle_C: FloatArray
    """Price of one that is left idle."""
    latency: float
    most: float
    """What a plan may cost."""


class Incoming(NamedTuple):
    """The moves by the node that they lead to."""

    first_P: IntArray
    move_I: IntArray
    from_I: IntArray


def incoming_moves(moves: MoveArrays) -> Incoming:
    """The same moves by their targets."""
    nodes_P = np.arange(moves.first_move_P.size)
    move_I = np.argsort(moves.to_M, kind="mergesort")
    first_P = np.searchsorted(moves.to_M[move_I], nodes_P)
    return Incoming(first_P, move_I, np.searchsorted(moves.first_move_P, move_I, side="right") - 1)


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


# Columns of a pool's labels.
LATENCY, WORK, BATCHES, ESTIMATE = 0, 1, 2, 3
PARENT, MOVE, START, DEVICE = 0, 1, 2, 3


class Label(NamedTuple):
    """Plans' beginnings at one kind of node, cheapest first (L): closed between stages, open inside one."""

    used_LC: FloatArray
    real_FL: FloatArray
    """Latency without the waits of an open stage's further splits, work, batches and estimate."""
    whole_IL: IntArray
    """The parent's place in its node (below 0: -1 - place among the open ones), move, where it starts, and device."""


class Pool(NamedTuple):
    """What arrives at a node, by kind (K): inside a stage and between stages; four times as much as is kept of it."""

    used_KLC: FloatArray
    real_KLF: FloatArray
    """Latency, work, batches and estimate."""
    whole_KLI: IntArray
    """Parent, move, where it starts, and device."""
    width_K: IntArray
    count_K: IntArray
    most_K: FloatArray
    """Estimates from which on a label would not be kept."""


@compiled
def _empty(size: int, num_devices: int) -> Label:
    return Label(np.zeros((size, num_devices)), np.zeros((4, size)), np.zeros((4, size), np.int64))


@compiled
def _kept(pool: Pool, kind: int) -> IntArray:
    """The cheapest labels, in order."""
    order_L: IntArray = np.argsort(pool.real_KLF[kind, : pool.count_K[kind], ESTIMATE])[: pool.width_K[kind]]
    return order_L


@compiled
def _best(pool: Pool, kind: int) -> Label:
    kept_L = _kept(pool, kind)
    real_FL = np.ascontiguousarray(pool.real_KLF[kind][kept_L].T)
    return Label(pool.used_KLC[kind][kept_L], real_FL, np.ascontiguousarray(pool.whole_KLI[kind][kept_L].T))


@compiled
def _make_room(pool: Pool, kind: int) -> None:
    """Keep only the best labels of a full pool."""
    kept_L = _kept(pool, kind)
    count = kept_L.size
    pool.used_KLC[kind, :count] = pool.used_KLC[kind][kept_L]
    pool.real_KLF[kind, :count] = pool.real_KLF[kind][kept_L]
    pool.whole_KLI[kind, :count] = pool.whole_KLI[kind][kept_L]
    pool.count_K[kind] = count
    pool.most_K[kind] = pool.real_KLF[kind, count - 1, ESTIMATE]


@compiled
def beam_search(
    moves: MoveArrays, incoming: Incoming, ways: Ways, least_PC: FloatArray, limits: Limits, steer: Steer,
    width: int, open_width: int,
) -> tuple[IntArray, IntArray, IntArray]:  # fmt: skip
    """The cheapest plan that the beam holds at its end: its nodes, moves from them, and whether these end a stage."""
    num_nodes, num_devices = moves.first_move_P.size - 1, limits.count_C.size
    start = _empty(1, num_devices)
    start.real_FL[ESTIMATE, 0] = ways.closed_P[0] - steer.latency * limits.latency_s
    closed, opened = [start], [_empty(0, num_devices)]
    most = 4 * max(width, open_width)
    pool = Pool(
        np.empty((2, most, num_devices)), np.empty((2, most, 4)), np.empty((2, most, 4), np.int64),
        np.array([open_width, width]), np.zeros(2, np.int64), np.empty(2),
    )  # fmt: skip
    for node in range(1, num_nodes):
        pool.count_K[:], pool.most_K[:] = 0, steer.most
        for place in range(incoming.first_P[node], incoming.first_P[node + 1]):
            move, start_node = incoming.move_I[place], incoming.from_I[place]
            for inside in range(2):
                source = opened[start_node] if inside else closed[start_node]
                _extend(moves, ways, least_PC, limits, steer, node, move, start_node, inside, source, pool)
        closed.append(_best(pool, 1))
        opened.append(_best(pool, 0))
    return _way_back(closed, opened, num_nodes - 1)


@inlined
def _extend(
    moves: MoveArrays, ways: Ways, least_PC: FloatArray, limits: Limits, steer: Steer, node: int, move: int,
    start: int, inside: int, source: Label, pool: Pool,
) -> None:  # fmt: skip
    """Have the labels of one kind at a node follow one move, as far as they can become plans."""
    end, rate, device = moves.first_move_P.size - 2, limits.required_rate, moves.device_M[move]
    work, seconds = moves.work_M[move], moves.seconds_M[move]
    way_from = ways.open_PC[start, device] if inside else ways.closed_P[start]
    apart = 1 if inside and not moves.pooled_M[move] else 0
    first_s, cross_s = 0.0 if apart else moves.wait_M[move] / rate, moves.cross_M[move]
    least = rate * (steer.used_C[device] * work) + steer.latency * (seconds * (1 + apart) + first_s + cross_s)
    may_close = limits.may_hop or node == end
    may_go_on = limits.may_split and node != end
    way_on = steer.latency * moves.hop_M[move] + ways.closed_P[node] if may_close else np.inf
    if may_go_on:
        way_on = min(way_on, ways.open_PC[node, device])
    dearer = least + way_on - way_from
    for label in range(source.real_FL.shape[1]):
        if source.real_FL[ESTIMATE, label] + dearer > steer.most + SLACK:
            break
        if inside and source.whole_IL[DEVICE, label] != device:
            continue
        stage_work, batches = work, 0.0
        if inside:
            stage_work += source.real_FL[WORK, label]
            batches = source.real_FL[BATCHES, label] + (moves.wait_M[move] if apart else 0.0)
        latency_s = source.real_FL[LATENCY, label] + seconds + first_s + cross_s
        for closing in range(2):
            if not (may_close if closing else may_go_on):
                continue
            needed = max(stage_work, moves.hop_work_M[move]) if closing else stage_work
            replicas = max(np.ceil(rate * needed * (1 - SLACK)), 1.0)
            if source.used_LC[label, device] + replicas > limits.count_C[device]:
                continue
            total_s = latency_s + replicas * batches / rate
            if closing:
                total_s += moves.hop_M[move]
            if total_s > limits.latency_s:
                continue
            estimate, usd = steer.latency * (total_s - limits.latency_s), 0.0
            for other in range(limits.count_C.size):
                used = source.used_LC[label, other]
                if other == device:
                    used += replicas if closing else rate * stage_work
                estimate += steer.used_C[other] * used
                usd += limits.usd_C[other] * used
                left = limits.count_C[other] - used
                least_left = np.ceil(rate * least_PC[node, other] * (1 - SLACK))
                if (closing or other != device) and left < least_left:
                    estimate += steer.idle_C[other] * left
            estimate += ways.closed_P[node] if closing else ways.open_PC[node, device]
            if usd > limits.budget * (1 + SLACK) or estimate >= pool.most_K[closing]:
                continue
            total_s = total_s if closing else latency_s
            _put(pool, closing, source, label, inside, device, replicas, total_s, stage_work, batches, estimate)
            pool.whole_KLI[closing, pool.count_K[closing], MOVE] = move
            pool.whole_KLI[closing, pool.count_K[closing], START] = start
            pool.count_K[closing] += 1
            if pool.count_K[closing] == 4 * pool.width_K[closing]:
                _make_room(pool, closing)


@inlined
def _put(
    pool: Pool, kind: int, source: Label, label: int, inside: int, device: int, replicas: float,
    latency_s: float, work_s: float, batches: float, estimate: float,
) -> None:  # fmt: skip
    """Write a label that follows another into the next free place of its kind."""
    slot = pool.count_K[kind]
    for other in range(source.used_LC.shape[1]):
        pool.used_KLC[kind, slot, other] = source.used_LC[label, other]
    if kind:
        pool.used_KLC[kind, slot, device] += replicas
    real_F, whole_I = pool.real_KLF[kind, slot], pool.whole_KLI[kind, slot]
    real_F[LATENCY], real_F[WORK], real_F[BATCHES], real_F[ESTIMATE] = latency_s, work_s, batches, estimate
    whole_I[PARENT], whole_I[DEVICE] = -1 - label if inside else label, device


@compiled
def _way_back(closed: list[Label], opened: list[Label], end: int) -> tuple[IntArray, IntArray, IntArray]:
    move_S, from_S = np.empty(end, np.int64), np.empty(end, np.int64)
    closes_S = np.empty(end, np.int64)
    count = 0
    if closed[end].real_FL.shape[1] > 0:
        node, place, inside = end, 0, False
        while node > 0:
            labels = opened[node] if inside else closed[node]
            move_S[count], from_S[count] = labels.whole_IL[MOVE, place], labels.whole_IL[START, place]
            closes_S[count] = 0 if inside else 1
            count += 1
            parent, node = labels.whole_IL[PARENT, place], labels.whole_IL[START, place]
            inside = parent < 0
            place = -1 - parent if inside else parent
    return from_S[:count][::-1], move_S[:count][::-1], closes_S[:count][::-1]
