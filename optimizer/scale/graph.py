"""The graph that a big problem's plans are sought in: splits between the last ramps of a good walk."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from optimizer.compiled import compiled
from optimizer.moves import Graph, Nodes, all_nodes
from optimizer.plan import Stage
from optimizer.problem import PlanProblem
from optimizer.step import FloatArray, IntArray


def nodes_around(problem: PlanProblem, ramps: tuple[int, ...], width: int) -> Nodes:
    """Per boundary, as last ramp the one that `ramps` being active would make it, and up to `width` in all near it."""
    block_P, rank_P, node_KQ = all_nodes(problem)
    index = {ramp: rank for rank, ramp in enumerate(problem.ramps, start=1)}
    kept = []
    for block in range(problem.num_blocks):
        last = max((index[ramp] for ramp in ramps if ramp < block), default=0)
        here_P = np.flatnonzero((block_P == block) & (np.arange(len(block_P)) < len(block_P) - 1))
        nearest_P = here_P[np.argsort(np.abs(rank_P[here_P] - last), kind="stable")[:width]]
        kept += sorted(nearest_P.tolist())
    kept.append(len(block_P) - 1)
    chosen_P = np.array(kept)
    node_KQ = np.full_like(node_KQ, -1)
    node_KQ[block_P[chosen_P], rank_P[chosen_P]] = np.arange(len(chosen_P))
    node_KQ[problem.num_blocks, :] = len(chosen_P) - 1
    return Nodes(block_P[chosen_P], rank_P[chosen_P], node_KQ)


def window_of(graph: Graph, stages: tuple[Stage, ...], distance: int) -> Graph:
    """Only splits that start or end near where a stage of these does, on its device."""
    from_M = np.repeat(np.arange(len(graph.block_P)), np.diff(graph.moves.first_move_P))
    first_M, end_M = graph.block_P[from_M], graph.block_P[graph.moves.to_M]
    kept_M = np.zeros(graph.num_moves, dtype=np.bool_)
    for stage in stages:
        within_M = (first_M >= stage.first - distance) & (end_M <= stage.end + distance)
        near_M = (np.abs(first_M - stage.first) <= distance) | (np.abs(end_M - stage.end) <= distance)
        kept_M |= (graph.moves.device_M == graph.device_names.index(stage.device)) & within_M & near_M
    return graph.only(kept_M)


def whole_stages(graph: Graph, rate_per_s: float) -> Graph:
    """Only splits that are the best stages of their own: none between the same nodes on the same device needs less."""
    moves = graph.moves
    from_M = np.repeat(np.arange(len(graph.block_P)), np.diff(moves.first_move_P))
    cell_M = (from_M * len(graph.block_P) + moves.to_M) * len(graph.device_names) + moves.device_M
    needed_M = np.maximum(moves.work_M, moves.hop_work_M)
    latency_M = moves.seconds_M + moves.hop_M + moves.wait_M / rate_per_s + moves.cross_M
    order_M = np.lexsort((latency_M, needed_M, cell_M))
    return graph.only(_quickest_so_far(order_M, cell_M, latency_M))


@compiled
def _quickest_so_far(order_M: IntArray, cell_M: IntArray, latency_M: FloatArray) -> npt.NDArray[np.bool_]:
    kept_M = np.zeros(order_M.size, dtype=np.bool_)
    cell, least = -1, np.inf
    for move in order_M:
        if cell_M[move] != cell:
            cell, least = cell_M[move], np.inf
        if latency_M[move] < least:
            least = latency_M[move]
            kept_M[move] = True
    return kept_M
