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
from optimizer.search.space import RampRule, Space
from optimizer.search.split_times import (
    ALL,
    CHOOSE,
    INSIDE,
    MEAN,
    MOST_SETS,
    NONE,
    SPLIT_ENDS,
    DeviceSeconds,
    Ranks,
    empty_split_times,
    least_times,
    ranks_of,
    seconds_of,
)
from optimizer.search.step import FloatArray, IntArray, Labels, batch_inside, dominates, hop_s, with_doubled_capacity

FIGURES = 6
"""Number of real-valued columns of a move, which hold seconds or inputs."""
MOST_MOVES = 20_000_000
"""Moves of a device: for more, the memory does not suffice."""
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
    set_M: IntArray
    """Which of the sets of ramps up to there is active (`SplitTimes`)."""
    seconds_M: FloatArray
    """Time of an input that runs through the split."""
    work_M: FloatArray
    """Device seconds per input of the service, s(i)*T/b, where T is the mean time of a batch."""
    wait_M: FloatArray
    """Inputs for which a batch waits: b/s(i), or 0 for a batch of one. Divided by the rate, it is in seconds."""
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
    seconds: tuple[DeviceSeconds, ...]
    """Latencies of the devices, in the same order."""
    nodes: Nodes
    moves: MoveArrays
    _splits: dict[tuple[int, ...], Split] = field(default_factory=dict, repr=False, compare=False)
    """Cache of `split_of`, shared with the graphs that hold a subset of these moves."""

    @property
    def num_moves(self) -> int:
        return len(self.moves.to_M)

    def only(self, kept_M: npt.NDArray[np.bool_]) -> Graph:
        """Returns the graph with a subset of the splits."""
        first_in_P = np.concatenate([[0], np.cumsum(kept_M)])[self.moves.first_in_P]
        return replace(self, moves=MoveArrays(first_in_P, *(values_M[kept_M] for values_M in self.moves[1:])))  # type: ignore[arg-type]  # mixed arrays

    def split_of(self, move: int) -> Split:
        """Returns the split that a move represents, with its best active ramps."""
        problem, moves, node = self.problem, self.moves, self.moves.from_M[move]
        figures = self.nodes.block_P[node], self.nodes.rank_P[node], self.nodes.block_P[moves.to_M[move]]
        own = moves.rank_M[move], moves.set_M[move], moves.device_M[move], moves.batch_M[move]
        key = tuple(map(int, (*figures, *own)))
        if key in self._splits:
            return self._splits[key]
        first, entry, end, last, index, device, batch = key
        ranks = ranks_of(problem)
        splits = empty_split_times(problem.num_blocks, len(ranks.share_Q))
        least_times(RULES[self.rule], first, entry, float(batch), self.seconds[device], ranks, splits)
        ramps: list[int] = []
        while last != entry:
            ramps.append(problem.ramps[last - 1])
            last, index = map(int, splits.before_QA2[last, index])
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


def build_graph(problem: PlanProblem, space: Space, *, nodes: Nodes | None = None) -> Graph:
    """Returns the graph of a space's splits between all nodes, or between `nodes`; raises PlanError for too many."""
    if nodes is None:  # plans of one split need its two ends alone
        is_one = not space.splits_per_stage and not space.several_stages
        nodes = _nodes(problem, [(0, 0)]) if is_one else nodes_around(problem, (), len(problem.ramps) + 1)
    names, ranks = device_names(problem), ranks_of(problem)
    link, seconds = link_arrays(problem, names), tuple(seconds_of(problem, name, space.batch) for name in names)
    parts = [(np.empty((0, 6), dtype=np.int64), np.empty((0, FIGURES)))]
    for device, own in enumerate(seconds):
        limits = float(problem.slo.limit_s), space.most_blocks or problem.num_blocks
        parts.append(_moves_of_device(device, RULES[space.ramps], own, ranks, nodes, link, *limits))
        if len(parts[-1][0]) > MOST_MOVES:
            raise PlanError(f"more than {MOST_MOVES} splits to choose from")
    int_MI, float_MF = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    # Of equally good labels the first is kept. It has the later ramp, so that inputs leave where it costs nothing.
    order_M = np.lexsort((-np.arange(len(int_MI)), int_MI[:, 0], int_MI[:, 1]))
    # The columns of `_moves_of_device` are in the order of the fields of `MoveArrays`.
    from_M, to_M, *others = (column_M[order_M] for column_M in (*int_MI.T, *float_MF.T))
    first_in_P = np.searchsorted(to_M, np.arange(len(nodes.block_P) + 1))
    pooled_M = np.isin(nodes.block_P[from_M], problem.networks[:-1]).astype(np.int64)
    moves = MoveArrays._make((first_in_P, from_M, to_M, *others, pooled_M))
    return Graph(problem=problem, rule=space.ramps, device_names=names, seconds=seconds, nodes=nodes, moves=moves)


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
    bandwidth_C: FloatArray
    """Bytes per second of a replica, by device type."""
    delay_s: float
    end_N: IntArray
    """End of each block's network, which no split may pass."""
    crossing_s: float


def link_arrays(problem: PlanProblem, names: Sequence[str]) -> LinkArrays:
    """Returns the link of a problem whose networks are all used, for the named devices.

    All numbers are converted to float, because numba would otherwise compile kernels once more for integers.
    """
    ends = problem.networks or (problem.num_blocks,)
    end_N = np.array(ends)[np.searchsorted(ends, np.arange(problem.num_blocks), side="right")]
    return LinkArrays(
        bytes_N=np.array(problem.bytes_per_sample_N, dtype=float),
        bandwidth_C=np.array([problem.bandwidth_of(name) for name in names], dtype=float),
        delay_s=float(problem.link.delay_s),
        end_N=end_N,
        crossing_s=float(problem.crossing_s),
    )


@compiled
def _moves_of_device(
    device: int, rule: int, seconds: DeviceSeconds, ranks: Ranks, nodes: Nodes, link: LinkArrays, limit_s: float,
    most_blocks: int,
) -> tuple[IntArray, FloatArray]:  # fmt: skip
    """Returns one device's moves: integers (from, to, device, batch, rank, set) and the columns of `_write_sizes`."""
    num_blocks, num_ranks, num_sizes = seconds.sums_GK.shape[1] - 1, ranks.share_Q.size, seconds.sizes_G.size
    whole = np.empty((1024, 6), dtype=np.int64)
    real = np.empty((1024, FIGURES))
    count = 0
    least_size = np.searchsorted(seconds.sizes_G, seconds.least_batch)
    end_size = np.searchsorted(seconds.sizes_G, seconds.most_batch, side="right")
    splits_B = [empty_split_times(num_blocks, num_ranks) for _ in range(num_sizes)]
    figures_X = np.empty((num_sizes * MOST_SETS, FIGURES))
    which_X2 = np.empty((num_sizes * MOST_SETS, 2), dtype=np.int64)  # size and set of ramps
    for node in range(nodes.block_P.size - 1):
        first, entry = nodes.block_P[node], nodes.rank_P[node]
        for size in range(least_size, end_size):
            least_times(rule, first, entry, seconds.sizes_G[size], seconds, ranks, splits_B[size])
        for end in range(first + 1, min(link.end_N[first], first + most_blocks) + 1):
            for rank in range(entry, num_ranks):
                target = nodes.node_KQ[end, rank]
                if target < 0:
                    continue
                num_rows = 0
                for size in range(least_size, end_size):
                    batch, splits = seconds.sizes_G[size], splits_B[size]
                    for index in range(splits.num_EQ[end, rank]):
                        times_K = splits.times_EQAK[end, rank, index]
                        if times_K[INSIDE] <= limit_s * (1 + 1e-9):
                            which_X2[num_rows, 0], which_X2[num_rows, 1] = size, index
                            figures_F = figures_X[num_rows]
                            _write_figures(
                                device, batch, seconds.unit, ranks.share_Q, link, entry, rank, end, times_K, figures_F
                            )
                            num_rows += 1
                for row in range(num_rows):
                    size, index = which_X2[row]
                    if _is_dominated(figures_X[:num_rows], row):
                        continue
                    if count == whole.shape[0]:
                        if count > MOST_MOVES:
                            return whole, real
                        whole, real = with_doubled_capacity(Labels(whole, real))
                    whole[count, 0], whole[count, 1], whole[count, 2] = node, target, device
                    whole[count, 3], whole[count, 4], whole[count, 5] = int(seconds.sizes_G[size]), rank, index
                    real[count] = figures_X[row]
                    count += 1
    return whole[:count], real[:count]


@compiled
def _write_figures(
    device: int, batch: float, unit: float, share_Q: FloatArray, link: LinkArrays, entry: int, rank: int, end: int,
    times_K: FloatArray, figures_F: FloatArray,
) -> None:  # fmt: skip
    """Writes seconds, work, wait, hop, hop work and crossing of one split."""
    per_input, after_s = share_Q[entry] / batch, 0.0
    if end < link.bytes_N.size:
        leaving = batch_inside(share_Q, entry, rank, batch)
        after_s = hop_s(link.delay_s, link.bytes_N[end - 1], leaving, link.bandwidth_C[device])
    crosses = end < link.bytes_N.size and end == link.end_N[end - 1]
    figures_F[0] = times_K[INSIDE]
    figures_F[1] = per_input * times_K[MEAN]
    figures_F[2] = 1.0 / per_input if batch > unit else 0.0
    figures_F[3] = 0.0 if crosses else after_s
    figures_F[4] = per_input * after_s
    figures_F[5] = after_s + link.crossing_s if crosses else 0.0


@compiled
def _is_dominated(figures_X: FloatArray, row: int) -> bool:
    """Returns whether another split is as good. The last of equal ones is kept."""
    for other in range(len(figures_X)):
        is_better = other != row and dominates(figures_X, other, row, 0, FIGURES, 0.0)
        if is_better and (other > row or not dominates(figures_X, row, other, 0, FIGURES, 0.0)):
            return True
    return False


def near_stages(graph: Graph, stages: tuple[Stage, ...], distance: int) -> Graph:
    """Returns the graph with the splits on a stage's device that start or end near that stage's ends."""
    first_M, end_M = graph.nodes.block_P[graph.moves.from_M], graph.nodes.block_P[graph.moves.to_M]
    kept_M = np.zeros(graph.num_moves, dtype=np.bool_)
    for stage in stages:
        within_M = (first_M >= stage.first - distance) & (end_M <= stage.end + distance)
        near_M = (np.abs(first_M - stage.first) <= distance) | (np.abs(end_M - stage.end) <= distance)
        kept_M |= (graph.moves.device_M == graph.device_names.index(stage.device)) & within_M & near_M
    return graph.only(kept_M)
