"""Beam search over stages, guided by prices: good plans of problems that are too big for an exact search.

At a fixed rate a stage's number of replicas is determined, so a label describes the beginning of a plan: the replicas
in use per device, the latency so far and, inside a stage of several splits, the stage's work and batches so far. Its
*estimate* is a lower bound on the price of the whole plan. It adds the replicas in use, the completion bound, and the
devices that remain but are too few to run any further split. A label whose estimate is above the price of everything
cannot become a plan and is dropped. Of the others, every node keeps the cheapest ones, up to the beam width. The search
is a heuristic: every plan that it returns is valid, but it may miss plans.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optimizer.compiled import compiled, inlined
from optimizer.exact.prices import TOLERANCE, Limits
from optimizer.moves import MoveArrays
from optimizer.scale.stages import CheapestPaths
from optimizer.step import FloatArray, IntArray


class BeamPrices(NamedTuple):
    """Prices per replica and per second of latency, at one rate. They guide the beam."""

    used_C: FloatArray
    """Price of a replica in use."""
    idle_C: FloatArray
    """Price of an idle replica."""
    latency: float
    most: float
    """Highest price of a plan that keeps its limits."""


class Incoming(NamedTuple):
    """The moves (I), grouped by the node that they lead to."""

    first_P: IntArray
    move_I: IntArray
    from_I: IntArray


def incoming_moves(moves: MoveArrays) -> Incoming:
    """Returns the moves grouped by their target nodes."""
    nodes_P = np.arange(moves.first_move_P.size)
    move_I = np.argsort(moves.to_M, kind="mergesort")
    first_P = np.searchsorted(moves.to_M[move_I], nodes_P)
    return Incoming(first_P, move_I, np.searchsorted(moves.first_move_P, move_I, side="right") - 1)


@compiled
def least_devices(moves: MoveArrays, num_devices: int) -> FloatArray:
    """Returns, per node and device, the fewest device seconds per input of any stage at or after the node."""
    num_nodes = moves.first_move_P.size - 1
    least_PC = np.full((num_nodes, num_devices), np.inf)
    for node in range(num_nodes - 2, -1, -1):
        least_PC[node] = least_PC[node + 1]
        for move in range(moves.first_move_P[node], moves.first_move_P[node + 1]):
            device = moves.device_M[move]
            needed = max(moves.work_M[move], moves.hop_work_M[move])
            least_PC[node, device] = min(least_PC[node, device], needed)
    return least_PC


# Rows of `NodeLabels`, and columns of `CandidatePool`.
LATENCY, WORK, BATCHES, ESTIMATE = 0, 1, 2, 3
PARENT, MOVE, START, DEVICE = 0, 1, 2, 3


class NodeLabels(NamedTuple):
    """The open labels (inside a stage) or the closed ones (between stages) of a node, the cheapest first (L)."""

    used_LC: FloatArray
    float_FL: FloatArray
    """Latency (without the waits of an open stage's further splits), work, batches and estimate."""
    int_IL: IntArray
    """Parent, move, start node and device. A closed parent is given by its index, an open one by -1 - index."""


class CandidatePool(NamedTuple):
    """Candidate labels of a node by kind (K): 0 is open, 1 is closed. It has room for four times the beam width."""

    used_KLC: FloatArray
    float_KLF: FloatArray
    """Latency, work, batches and estimate."""
    int_KLI: IntArray
    """Parent, move, start node and device."""
    width_K: IntArray
    """Beam width: half as many open labels as closed ones."""
    count_K: IntArray
    most_K: FloatArray
    """Candidates whose estimate is at least this are not kept."""


@compiled
def _empty_labels(size: int, num_devices: int) -> NodeLabels:
    return NodeLabels(np.zeros((size, num_devices)), np.zeros((4, size)), np.zeros((4, size), np.int64))


@compiled
def _cheapest(pool: CandidatePool, kind: int) -> IntArray:
    """Returns the cheapest candidates in order, up to the beam width."""
    order_L: IntArray = np.argsort(pool.float_KLF[kind, : pool.count_K[kind], ESTIMATE])[: pool.width_K[kind]]
    return order_L


@compiled
def _selected(pool: CandidatePool, kind: int) -> NodeLabels:
    kept_L = _cheapest(pool, kind)
    float_FL = np.ascontiguousarray(pool.float_KLF[kind][kept_L].T)
    return NodeLabels(pool.used_KLC[kind][kept_L], float_FL, np.ascontiguousarray(pool.int_KLI[kind][kept_L].T))


@compiled
def _shrink(pool: CandidatePool, kind: int) -> None:
    """Keeps only the cheapest candidates of a full pool."""
    kept_L = _cheapest(pool, kind)
    count = kept_L.size
    pool.used_KLC[kind, :count] = pool.used_KLC[kind][kept_L]
    pool.float_KLF[kind, :count] = pool.float_KLF[kind][kept_L]
    pool.int_KLI[kind, :count] = pool.int_KLI[kind][kept_L]
    pool.count_K[kind] = count
    pool.most_K[kind] = pool.float_KLF[kind, count - 1, ESTIMATE]


@compiled
def beam_search(
    moves: MoveArrays, incoming: Incoming, paths: CheapestPaths, least_PC: FloatArray, limits: Limits,
    prices: BeamPrices, width: int,
) -> tuple[IntArray, IntArray, IntArray]:  # fmt: skip
    """Returns the nodes and moves of the cheapest plan found, and whether each move ends a stage; empty without one."""
    num_nodes, num_devices = moves.first_move_P.size - 1, limits.count_C.size
    start = _empty_labels(1, num_devices)
    start.float_FL[ESTIMATE, 0] = paths.closed_P[0] - prices.latency * limits.latency_s
    closed, opened = [start], [_empty_labels(0, num_devices)]
    most = 4 * width
    pool = CandidatePool(
        np.empty((2, most, num_devices)), np.empty((2, most, 4)), np.empty((2, most, 4), np.int64),
        np.array([width // 2, width]), np.zeros(2, np.int64), np.empty(2),
    )  # fmt: skip
    for node in range(1, num_nodes):
        pool.count_K[:], pool.most_K[:] = 0, prices.most
        for position in range(incoming.first_P[node], incoming.first_P[node + 1]):
            move, start_node = incoming.move_I[position], incoming.from_I[position]
            for is_open in range(2):
                source = opened[start_node] if is_open else closed[start_node]
                _extend(moves, paths, least_PC, limits, prices, node, move, start_node, is_open, source, pool)
        closed.append(_selected(pool, 1))
        opened.append(_selected(pool, 0))
    return _backtrack(closed, opened, num_nodes - 1)


@inlined
def _extend(
    moves: MoveArrays, paths: CheapestPaths, least_PC: FloatArray, limits: Limits, prices: BeamPrices, node: int,
    move: int, start: int, is_open: int, source: NodeLabels, pool: CandidatePool,
) -> None:  # fmt: skip
    """Extends the labels of one kind at a node by one move, as far as they can become plans."""
    end, rate, device = moves.first_move_P.size - 2, limits.required_rate, moves.device_M[move]
    work, seconds = moves.work_M[move], moves.seconds_M[move]
    bound_before = paths.open_PC[start, device] if is_open else paths.closed_P[start]
    waits_alone = 1 if is_open and not moves.pooled_M[move] else 0
    first_s, cross_s = 0.0 if waits_alone else moves.wait_M[move] / rate, moves.cross_M[move]
    least = rate * (prices.used_C[device] * work) + prices.latency * (seconds * (1 + waits_alone) + first_s + cross_s)
    may_close = limits.may_hop or node == end
    may_stay_open = limits.may_split and node != end
    bound_after = prices.latency * moves.hop_M[move] + paths.closed_P[node] if may_close else np.inf
    if may_stay_open:
        bound_after = min(bound_after, paths.open_PC[node, device])
    increase = least + bound_after - bound_before
    for label in range(source.float_FL.shape[1]):
        if source.float_FL[ESTIMATE, label] + increase > prices.most + TOLERANCE:
            break
        if is_open and source.int_IL[DEVICE, label] != device:
            continue
        stage_work, batches = work, 0.0
        if is_open:
            stage_work += source.float_FL[WORK, label]
            batches = source.float_FL[BATCHES, label] + (moves.wait_M[move] if waits_alone else 0.0)
        latency_s = source.float_FL[LATENCY, label] + seconds + first_s + cross_s
        for closing in range(2):
            if not (may_close if closing else may_stay_open):
                continue
            needed = max(stage_work, moves.hop_work_M[move]) if closing else stage_work
            replicas = max(np.ceil(rate * needed * (1 - TOLERANCE)), 1.0)
            if source.used_LC[label, device] + replicas > limits.count_C[device]:
                continue
            total_s = latency_s + replicas * batches / rate
            if closing:
                total_s += moves.hop_M[move]
            if total_s > limits.latency_s:
                continue
            estimate, usd = prices.latency * (total_s - limits.latency_s), 0.0
            for other in range(limits.count_C.size):
                used = source.used_LC[label, other]
                if other == device:
                    used += replicas if closing else rate * stage_work
                estimate += prices.used_C[other] * used
                usd += limits.usd_C[other] * used
                left = limits.count_C[other] - used
                least_left = np.ceil(rate * least_PC[node, other] * (1 - TOLERANCE))
                if (closing or other != device) and left < least_left:
                    estimate += prices.idle_C[other] * left
            estimate += paths.closed_P[node] if closing else paths.open_PC[node, device]
            if usd > limits.budget * (1 + TOLERANCE) or estimate >= pool.most_K[closing]:
                continue
            total_s = total_s if closing else latency_s
            _write(pool, closing, source, label, is_open, device, replicas, total_s, stage_work, batches, estimate)
            pool.int_KLI[closing, pool.count_K[closing], MOVE] = move
            pool.int_KLI[closing, pool.count_K[closing], START] = start
            pool.count_K[closing] += 1
            if pool.count_K[closing] == 4 * pool.width_K[closing]:
                _shrink(pool, closing)


@inlined
def _write(
    pool: CandidatePool, kind: int, source: NodeLabels, label: int, is_open: int, device: int, replicas: float,
    latency_s: float, work_s: float, batches: float, estimate: float,
) -> None:  # fmt: skip
    """Writes the extension of a label into the next free slot of its kind."""
    slot = pool.count_K[kind]
    for other in range(source.used_LC.shape[1]):
        pool.used_KLC[kind, slot, other] = source.used_LC[label, other]
    if kind:
        pool.used_KLC[kind, slot, device] += replicas
    float_F, int_I = pool.float_KLF[kind, slot], pool.int_KLI[kind, slot]
    float_F[LATENCY], float_F[WORK], float_F[BATCHES], float_F[ESTIMATE] = latency_s, work_s, batches, estimate
    int_I[PARENT], int_I[DEVICE] = -1 - label if is_open else label, device


@compiled
def _backtrack(closed: list[NodeLabels], opened: list[NodeLabels], end: int) -> tuple[IntArray, IntArray, IntArray]:
    move_S, from_S = np.empty(end, np.int64), np.empty(end, np.int64)
    closes_S = np.empty(end, np.int64)
    count = 0
    if closed[end].float_FL.shape[1] > 0:
        node, position, is_open = end, 0, False
        while node > 0:
            labels = opened[node] if is_open else closed[node]
            move_S[count], from_S[count] = labels.int_IL[MOVE, position], labels.int_IL[START, position]
            closes_S[count] = 0 if is_open else 1
            count += 1
            parent, node = labels.int_IL[PARENT, position], labels.int_IL[START, position]
            is_open = parent < 0
            position = -1 - parent if is_open else parent
    return from_S[:count][::-1], move_S[:count][::-1], closes_S[:count][::-1]
