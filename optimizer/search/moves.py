"""The graph whose paths are plans. Nodes are pairs of block boundary and last active ramp; arcs (*moves*) are splits.

The figures of a move do not depend on the rate, so the graph is built once per problem. A move that is dominated by
another move between the same nodes on the same device is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from earlyexit.errors import PlanError
from earlyexit.network.boundary import Split
from optimizer.plans.plan import Stage
from optimizer.problems.problem import PlanProblem, device_names
from optimizer.search.compiled import compiled
from optimizer.search.space import RampRule
from optimizer.search.split_times import (
    ALL,
    CHOOSE,
    NONE,
    SPLIT_ENDS,
    DeviceSeconds,
    Ranks,
    least_times,
    ranks_of,
    seconds_of,
)
from optimizer.search.step import (
    FloatArray,
    IntArray,
    Labels,
    batch_inside,
    dominates,
    hop_s,
    undominated,
    with_doubled_capacity,
)

FIGURES = 6
"""Number of real-valued columns of a move, which hold seconds or inputs."""
RULES: dict[RampRule, int] = {"choose": CHOOSE, "all": ALL, "none": NONE, "split-ends": SPLIT_ENDS}


class MoveArrays(NamedTuple):
    """The moves (M), by the node that they lead to. A named tuple, because kernels accept it as one argument."""

    first_in_P: IntArray
    """Index of the first move to each node; the last entry is the number of moves."""
    from_M: IntArray
    to_M: IntArray
    device_M: IntArray
    batch_M: IntArray
    rank_M: IntArray
    """Rank of the last active ramp at the split's end. It is stored because all ranks share the model's end node."""
    seconds_M: FloatArray
    """Time of a batch (T)."""
    work_M: FloatArray
    """Device seconds per input of the service, s(i)*T/b."""
    wait_M: FloatArray
    """Inputs for which a batch waits, b/s(i). Divided by the rate, it is in seconds."""
    hop_M: FloatArray
    """Transfer time of a hop after the split (T_x)."""
    hop_work_M: FloatArray
    """Seconds of the link per input, s(i)*T_x/b."""
    cross_M: FloatArray
    """Seconds between a network's end and the next network, hop included (`hop_M` is then 0); 0 elsewhere."""
    pooled_M: IntArray
    """1 if the ingress fills the split's batches even inside a stage, because the split follows a crossing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """All splits of a problem under a ramp rule."""

    problem: PlanProblem
    rule: RampRule
    device_names: tuple[str, ...]
    nodes: Nodes
    moves: MoveArrays
    _splits: dict[tuple[int, ...], Split] = field(default_factory=dict, repr=False, compare=False)
    """Cache of `split_of`, shared with the graphs that hold a subset of these moves."""

    @property
    def num_moves(self) -> int:
        return len(self.moves.to_M)

    def with_batch(self, batch: int | None) -> Graph:
        """Returns the graph with the splits of one batch size; None: all splits."""
        return self if batch is None else self.only(self.moves.batch_M == batch)

    def with_most_blocks(self, most: int | None) -> Graph:
        """Returns the graph with the splits of at most this number of blocks; None: all splits."""
        block_P = self.nodes.block_P
        return self if most is None else self.only(block_P[self.moves.to_M] - block_P[self.moves.from_M] <= most)

    def only(self, kept_M: npt.NDArray[np.bool_]) -> Graph:
        """Returns the graph with a subset of the splits."""
        first_in_P = np.concatenate([[0], np.cumsum(kept_M)])[self.moves.first_in_P]
        return replace(self, moves=MoveArrays(first_in_P, *(values_M[kept_M] for values_M in self.moves[1:])))  # type: ignore[arg-type]  # mixed arrays

    def split_of(self, move: int) -> Split:
        """Returns the split that a move represents, with its best active ramps."""
        problem, moves, node = self.problem, self.moves, self.moves.from_M[move]
        figures = self.nodes.block_P[node], self.nodes.rank_P[node], self.nodes.block_P[moves.to_M[move]]
        key = tuple(map(int, (*figures, moves.rank_M[move], moves.device_M[move], moves.batch_M[move])))
        if key in self._splits:
            return self._splits[key]
        first, entry, end, last, device, batch = key
        ranks, seconds = ranks_of(problem), seconds_of(problem, self.device_names[device])
        least_EQ = np.empty((problem.num_blocks + 1, len(ranks.share_Q)))
        before_Q = np.zeros(len(ranks.share_Q), dtype=np.int64)
        least_times(RULES[self.rule], first, entry, float(batch), seconds, ranks, least_EQ, before_Q)
        ramps: list[int] = []
        while last != entry:
            ramps.append(problem.ramps[last - 1])
            last = int(before_Q[last])
        split = self._splits[key] = Split(first=first, end=end, batch=batch, ramps=tuple(reversed(ramps)))
        return split

    def stages_of(self, path: Iterable[tuple[int, int]]) -> tuple[Stage, ...]:
        """Returns the stages of a path of moves, each with its replicas: 0 unless the move ends a stage."""
        stages: list[Stage] = []
        splits: list[Split] = []
        for move, replicas in path:
            split = self.split_of(move)
            if splits and not splits[-1].ramps and splits[-1].batch == split.batch and not self.problem.networks:
                split = replace(split, first=splits.pop().first)  # no input left since then, so the batch is still full
            splits.append(split)
            if replicas:
                device = self.device_names[int(self.moves.device_M[move])]
                stages.append(Stage(device=device, replicas=replicas, splits=tuple(splits)))
                splits = []
        return tuple(stages)


class Nodes(NamedTuple):
    """Nodes of a graph, in the order of their boundaries. The last node is the model's end."""

    block_P: IntArray
    rank_P: IntArray
    node_KQ: IntArray
    """Node by boundary and rank; -1 if there is none."""


def build_graph(
    problem: PlanProblem,
    rule: RampRule = "choose",
    *,
    every_batch: bool = False,
    nodes: Nodes | None = None,
    most_moves: int = 20_000_000,
) -> Graph:
    """Returns the graph of all splits between all nodes, or between `nodes`; raises PlanError for too many moves.

    `every_batch` keeps dominated batch sizes. They can be optimal if all splits must have the same size.
    """
    nodes = nodes or all_nodes(problem)
    names, ranks, link = device_names(problem), ranks_of(problem), link_arrays(problem)
    parts = [(np.empty((0, 5), dtype=np.int64), np.empty((0, FIGURES)))]
    for device, name in enumerate(names):
        limits = float(problem.slo.limit_s), every_batch, most_moves
        parts.append(_moves_of_device(device, RULES[rule], seconds_of(problem, name), ranks, nodes, link, *limits))
        if len(parts[-1][0]) > most_moves:
            raise PlanError(f"more than {most_moves} splits to choose from")
    int_MI, float_MF = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    # Of equally good labels the first is kept. It has the later ramp, so that inputs leave where it costs nothing.
    order_M = np.lexsort((-np.arange(len(int_MI)), int_MI[:, 0], int_MI[:, 1]))
    # The columns of `_moves_of_device` are in the order of the fields of `MoveArrays`.
    from_M, to_M, *others = (column_M[order_M] for column_M in (*int_MI.T, *float_MF.T))
    first_in_P = np.searchsorted(to_M, np.arange(len(nodes.block_P) + 1))
    pooled_M = np.isin(nodes.block_P[from_M], problem.networks[:-1]).astype(np.int64)
    moves = MoveArrays._make((first_in_P, from_M, to_M, *others, pooled_M))
    return Graph(problem=problem, rule=rule, device_names=names, nodes=nodes, moves=moves)


def all_nodes(problem: PlanProblem) -> Nodes:
    """Returns every pair of boundary and last ramp that inputs reach."""
    return nodes_around(problem, (), len(problem.ramps) + 1)


def end_nodes(problem: PlanProblem) -> Nodes:
    """Returns the model's two ends. The paths between them are plans of a single split."""
    return _nodes(problem, [(0, 0)])


def nodes_around(problem: PlanProblem, ramps: tuple[int, ...], width: int) -> Nodes:
    """Returns, for each boundary, up to `width` ranks around the last ramp before it if `ramps` were active."""
    share_Q, after_Q, _ = ranks_of(problem)
    index = {ramp: rank for rank, ramp in enumerate(problem.ramps, start=1)}
    kept: list[tuple[int, int]] = []
    for block in range(problem.num_blocks):
        last = max((index[ramp] for ramp in ramps if ramp < block), default=0)
        reached = [rank for rank, share in enumerate(share_Q) if after_Q[rank] <= block and share > 0]
        nearest = sorted(reached, key=lambda rank: abs(rank - last))[:width]
        kept += [(block, rank) for rank in sorted(nearest)]
    return _nodes(problem, kept)


def _nodes(problem: PlanProblem, pairs: Sequence[tuple[int, int]]) -> Nodes:
    """Returns the nodes of these pairs of boundary and rank, and the model's end."""
    block_P, rank_P = np.array([*pairs, (problem.num_blocks, 0)], dtype=np.int64).T.copy()
    node_KQ = np.full((problem.num_blocks + 1, len(problem.ramps) + 1), -1, dtype=np.int64)
    node_KQ[block_P, rank_P] = np.arange(len(block_P))
    node_KQ[problem.num_blocks, :] = len(pairs)
    return Nodes(block_P, rank_P, node_KQ)


class LinkArrays(NamedTuple):
    """The link, and the bytes per input that a hop carries after each block."""

    bytes_N: FloatArray
    bandwidth: float
    delay_s: float
    end_N: IntArray
    """End of each block's network, which no split may pass."""
    crossing_s: float


def link_arrays(problem: PlanProblem) -> LinkArrays:
    """Returns the link of a problem whose networks are all used.

    All numbers are converted to float, because numba would otherwise compile kernels once more for integers.
    """
    ends = problem.networks or (problem.num_blocks,)
    end_N = np.array(ends)[np.searchsorted(ends, np.arange(problem.num_blocks), side="right")]
    link = problem.link
    return LinkArrays(
        bytes_N=np.array(problem.bytes_per_sample_N, dtype=float),
        bandwidth=float(link.bandwidth_bytes_per_s),
        delay_s=float(link.delay_s),
        end_N=end_N,
        crossing_s=float(problem.crossing_s),
    )


@compiled
def _moves_of_device(
    device: int, rule: int, seconds: DeviceSeconds, ranks: Ranks, nodes: Nodes, link: LinkArrays, limit_s: float,
    every_batch: bool, most_moves: int,
) -> tuple[IntArray, FloatArray]:  # fmt: skip
    """Returns one device's moves: integers (from, to, device, batch, rank) and the columns of `_write_sizes`."""
    num_blocks, num_ranks, num_sizes = seconds.sums_GK.shape[1] - 1, ranks.share_Q.size, seconds.sizes_G.size
    whole = np.empty((1024, 5), dtype=np.int64)
    real = np.empty((1024, FIGURES))
    count = 0
    least_BEQ = np.empty((num_sizes, num_blocks + 1, num_ranks))
    before_Q = np.zeros(num_ranks, dtype=np.int64)
    figures_B = np.empty((num_sizes, FIGURES))
    kept_B = np.empty(num_sizes, dtype=np.bool_)
    for node in range(nodes.block_P.size - 1):
        first, entry = nodes.block_P[node], nodes.rank_P[node]
        for size in range(num_sizes):
            least_times(rule, first, entry, seconds.sizes_G[size], seconds, ranks, least_BEQ[size], before_Q)
        for end in range(first + 1, link.end_N[first] + 1):
            for rank in range(entry, num_ranks):
                target = nodes.node_KQ[end, rank]
                if target < 0:
                    continue
                _write_sizes(seconds.sizes_G, ranks.share_Q, link, entry, rank, end, least_BEQ, figures_B)
                for size in range(num_sizes):
                    kept_B[size] = figures_B[size, 0] <= limit_s * (1 + 1e-9)
                if not every_batch:
                    _drop_dominated_sizes(figures_B, kept_B)
                for size in range(num_sizes):
                    if not kept_B[size]:
                        continue
                    if count == whole.shape[0]:
                        if count > most_moves:
                            return whole, real
                        whole, real = with_doubled_capacity(Labels(whole, real))
                    whole[count, 0], whole[count, 1], whole[count, 2] = node, target, device
                    whole[count, 3], whole[count, 4] = int(seconds.sizes_G[size]), rank
                    real[count] = figures_B[size]
                    count += 1
    return whole[:count], real[:count]


@compiled
def _write_sizes(
    sizes_G: FloatArray, share_Q: FloatArray, link: LinkArrays, entry: int, rank: int, end: int, least_BEQ: FloatArray,
    figures_B: FloatArray,
) -> None:  # fmt: skip
    """Writes seconds, work, wait, hop, hop work and crossing of one split, by batch size."""
    for size in range(sizes_G.size):
        seconds, per_input, after_s = least_BEQ[size, end, rank], share_Q[entry] / sizes_G[size], 0.0
        if end < link.bytes_N.size:
            leaving = batch_inside(share_Q, entry, rank, sizes_G[size])
            after_s = hop_s(link.delay_s, link.bytes_N[end - 1], leaving, link.bandwidth)
        crosses = end < link.bytes_N.size and end == link.end_N[end - 1]
        figures_B[size, 0] = seconds
        figures_B[size, 1] = per_input * seconds
        figures_B[size, 2] = 1.0 / per_input
        figures_B[size, 3] = 0.0 if crosses else after_s
        figures_B[size, 4] = per_input * after_s
        figures_B[size, 5] = after_s + link.crossing_s if crosses else 0.0


@compiled
def _drop_dominated_sizes(figures_B: FloatArray, kept_B: npt.NDArray[np.bool_]) -> None:
    """Marks the batch sizes that another size dominates."""
    for size in range(kept_B.size):
        for other in range(kept_B.size):
            if other != size and kept_B[size] and kept_B[other] and dominates(figures_B, other, size, 0, FIGURES, 0.0):
                kept_B[size] = False


def near_stages(graph: Graph, stages: tuple[Stage, ...], distance: int) -> Graph:
    """Returns the graph with the splits on a stage's device that start or end near that stage's ends."""
    first_M, end_M = graph.nodes.block_P[graph.moves.from_M], graph.nodes.block_P[graph.moves.to_M]
    kept_M = np.zeros(graph.num_moves, dtype=np.bool_)
    for stage in stages:
        within_M = (first_M >= stage.first - distance) & (end_M <= stage.end + distance)
        near_M = (np.abs(first_M - stage.first) <= distance) | (np.abs(end_M - stage.end) <= distance)
        kept_M |= (graph.moves.device_M == graph.device_names.index(stage.device)) & within_M & near_M
    return graph.only(kept_M)


def single_split_stages(graph: Graph, rate_per_s: float) -> Graph:
    """Returns the graph with the splits that are Pareto-optimal stages, in devices and latency at a rate.

    They are compared with the splits between the same nodes on the same device.
    """
    moves = graph.moves
    cell_M = (moves.from_M * len(graph.nodes.block_P) + moves.to_M) * len(graph.device_names) + moves.device_M
    needed_M = np.maximum(moves.work_M, moves.hop_work_M)
    latency_M = moves.seconds_M + moves.hop_M + moves.wait_M / rate_per_s + moves.cross_M
    order_M, figures_MF = np.lexsort((latency_M, needed_M, cell_M)), np.column_stack([needed_M, latency_M])
    _, optimal = undominated(order_M, cell_M[order_M], figures_MF, 0, 2, 0.0, len(order_M))
    return graph.only(np.isin(np.arange(graph.num_moves), optimal))
