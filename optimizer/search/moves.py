"""The graph whose paths are plans. Nodes are pairs of block boundary and last active ramp; arcs (*moves*) are splits.

The figures of a move do not depend on the rate, so the graph is built once per problem. A move that is dominated by
another move between the same nodes on the same device is left out.

The least times of a split depend neither on the rate nor on the rest of the plan. They depend on the split's
boundaries, device and batch size, and on the last active ramps before and inside it, which determine the inputs that
enter and leave. The ramps inside are therefore chosen once, here, and the rest of the search does not consider them.
E3's T (figure 6) sums a given profile; here it is a minimum over sets of ramps. A set may have the least latency of an
input and another one the least work of the device, so all Pareto-optimal ones (A) are kept. Ranks and array shapes are
those of `optimizer.search.tables`; in times of splits, E is the end of a split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from earlyexit.errors import PlanError
from earlyexit.network.boundary import Split
from optimizer.plans.plan import Stage
from optimizer.problems.problem import PlanProblem, device_names
from optimizer.search.compiled import Labels, compiled, dominates, with_doubled_capacity
from optimizer.search.space import Space
from optimizer.search.tables import (
    ALL,
    CHOOSE,
    INSIDE,
    MEAN,
    NONE,
    ROUNDING,
    SPLIT_ENDS,
    Tables,
    blocks_s,
    hop_s,
    seconds_at,
    tables_of,
)
from profiles.scores import FloatArray, IntArray

FIGURES = 6
"""Number of real-valued columns of a move, which hold seconds or inputs."""
MOST_MOVES = 20_000_000
"""Moves of a graph: for more, the memory does not suffice."""
MOST_SETS = 64
"""The most sets of ramps that are kept per rank. BERT-large with 24 blocks has up to 50 at small batches, most others
one."""


class MoveArrays(NamedTuple):
    """The moves (M), by the node that they lead to. A named tuple, because kernels accept it as one argument."""

    first_in_P: IntArray
    """Index of the first move to each node; the last entry is the number of moves."""
    from_M: IntArray
    to_M: IntArray
    device_M: IntArray
    run_M: IntArray
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


Path = list[tuple[int, int]]
"""Moves, each with 1 if it ends a stage, else 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """All splits of a problem under a ramp rule."""

    problem: PlanProblem
    device_names: tuple[str, ...]
    tables: Tables
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
        tables, moves, nodes, node = self.tables, self.moves, self.nodes, self.moves.from_M[move]
        own = nodes.rank_P[node], nodes.block_P[moves.to_M[move]], moves.rank_M[move], moves.set_M[move]
        key = tuple(map(int, (moves.run_M[move], nodes.block_P[node], *own)))
        if key in self._splits:
            return self._splits[key]
        run, first, entry, end, last, index = key
        splits, ramps = empty_split_times(tables), list[int]()
        least_times(tables, run, first, entry, splits)
        while last != entry:
            ramps.insert(0, self.problem.ramps[last - 1])
            last, index = map(int, splits.before_QA2[last, index])
        split = self._splits[key] = Split(first=first, end=end, batch=int(tables.batch_R[run]), ramps=tuple(ramps))
        return split

    def stages_of(self, path: Path) -> tuple[Stage, ...]:
        """Returns the stages of a path, with one replica each."""
        stages: list[Stage] = []
        splits: list[Split] = []
        for move, ends in path:
            split = self.split_of(move)
            if splits and not splits[-1].ramps and splits[-1].batch == split.batch and not self.problem.networks:
                split = replace(split, first=splits.pop().first)  # no input left since then, so the batch is still full
            splits.append(split)
            if ends:
                device = self.device_names[int(self.moves.device_M[move])]
                stages.append(Stage(device=device, replicas=1, splits=tuple(splits)))
                splits = []
        return tuple(stages)


class Nodes(NamedTuple):
    """Nodes of a graph, in the order of their boundaries. The last node is the model's end."""

    block_P: IntArray
    rank_P: IntArray
    node_KQ: IntArray
    """Node by boundary and rank; -1 if there is none."""


def build_graph(problem: PlanProblem, space: Space, *, around: tuple[int, ...] = (), width: int | None = None) -> Graph:
    """Returns the graph of a space's splits; raises PlanError for too many.

    With `width`, splits begin only at this many ranks per boundary, near the last ramp of `around`.
    """
    tables = tables_of(problem, space)
    nodes = _nodes_of(tables, [tables.rank_N[ramp] for ramp in around], width or len(tables.after_Q))
    most_blocks = space.most_blocks or problem.num_blocks
    int_MI, float_MF = _all_moves(tables, nodes, float(problem.slo.limit_s), most_blocks)
    if len(int_MI) > MOST_MOVES:
        raise PlanError(f"more than {MOST_MOVES} splits to choose from")
    # Of equally good labels the first is kept. It has the later ramp, so that inputs leave where it costs nothing.
    order_M = np.lexsort((-np.arange(len(int_MI)), int_MI[:, 0], int_MI[:, 1]))
    # The columns of `_all_moves` are in the order of the fields of `MoveArrays`.
    from_M, to_M, *others = (column_M[order_M] for column_M in (*int_MI.T, *float_MF.T))
    first_in_P = np.searchsorted(to_M, np.arange(len(nodes.block_P) + 1))
    pooled_M = np.isin(nodes.block_P[from_M], problem.networks[:-1]).astype(np.int64)
    moves = MoveArrays._make((first_in_P, from_M, to_M, *others, pooled_M))
    return Graph(problem=problem, device_names=device_names(problem), tables=tables, nodes=nodes, moves=moves)


def _nodes_of(tables: Tables, around: Sequence[int], width: int) -> Nodes:
    """Returns, for each boundary, up to `width` ranks around the last one of `around`, and the model's end."""
    num_blocks, pairs = len(tables.rank_N), list[tuple[int, int]]()
    for block in range(num_blocks):
        reached = np.flatnonzero((tables.after_Q <= block) & (tables.unanswered_Q > 0))
        last = max((rank for rank in around if tables.after_Q[rank] <= block), default=0)
        nearest = sorted(reached.tolist(), key=lambda rank: abs(rank - last))[:width]
        pairs += [(block, rank) for rank in sorted(nearest)]
        if not tables.may_split and not tables.may_hop:
            break  # plans of one split need its two ends alone
    block_P, rank_P = np.array([*pairs, (num_blocks, 0)], dtype=np.int64).T.copy()
    node_KQ = np.full((num_blocks + 1, len(tables.after_Q)), -1, dtype=np.int64)
    node_KQ[block_P, rank_P] = np.arange(len(block_P))
    node_KQ[num_blocks, :] = len(pairs)
    return Nodes(block_P, rank_P, node_KQ)


@compiled
def _all_moves(tables: Tables, nodes: Nodes, limit_s: float, most_blocks: int) -> tuple[IntArray, FloatArray]:
    """Returns the moves: integers (from, to, device, run, rank, set), and the columns of `_write_rows`."""
    whole = np.empty((1024, 6), dtype=np.int64)
    real = np.empty((1024, FIGURES))
    count = 0
    for device in range(tables.count_C.size):
        own_R = np.flatnonzero(tables.device_R == device)
        splits_R = [empty_split_times(tables) for _ in own_R]
        figures_X = np.empty((own_R.size * MOST_SETS, FIGURES))
        which_X2 = np.empty((own_R.size * MOST_SETS, 2), dtype=np.int64)  # run and set of ramps
        for node in range(nodes.block_P.size - 1):
            first, entry = nodes.block_P[node], nodes.rank_P[node]
            for own in range(own_R.size):
                least_times(tables, own_R[own], first, entry, splits_R[own])
            for further, rank in np.ndindex(min(tables.end_N[first] - first, most_blocks), tables.after_Q.size):
                end = first + 1 + further
                if rank < entry or nodes.node_KQ[end, rank] < 0:
                    continue
                num_rows = _write_rows(tables, own_R, entry, rank, end, limit_s, splits_R, which_X2, figures_X)
                while count + num_rows > len(whole):
                    whole, real = with_doubled_capacity(Labels(whole, real))
                for row in range(num_rows):
                    if not _is_dominated(figures_X[:num_rows], row):
                        whole[count, 0], whole[count, 1], whole[count, 2] = node, nodes.node_KQ[end, rank], device
                        whole[count, 3], whole[count, 4], whole[count, 5] = which_X2[row, 0], rank, which_X2[row, 1]
                        real[count] = figures_X[row]
                        count += 1
                if count > MOST_MOVES:
                    return whole, real
    return whole[:count].copy(), real[:count].copy()  # frees the spare capacity before the moves are sorted


@compiled
def _write_rows(
    tables: Tables, own_R: IntArray, entry: int, rank: int, end: int, limit_s: float, splits_R: list[SplitTimes],
    which_X2: IntArray, figures_X: FloatArray,
) -> int:  # fmt: skip
    """Writes run, set of ramps, and figures in the order of `MoveArrays` for the splits of some runs with these ends.

    Returns the number of splits, without those that exceed the latency limit.
    """
    num_rows = 0
    for own in range(own_R.size):
        run, splits = own_R[own], splits_R[own]
        per_input, after_s = tables.enters_E[entry] / tables.batch_R[run], 0.0
        if end < tables.rank_N.size:
            bandwidth, leaving = tables.bandwidth_C[tables.device_R[run]], tables.leaving_REQ[run, entry, rank]
            after_s = hop_s(tables.delay_s, tables.bytes_N[end - 1], leaving, bandwidth)
        for index in range(splits.num_EQ[end, rank]):
            times_K = splits.times_EQAK[end, rank, index]
            if times_K[INSIDE] <= limit_s * (1 + ROUNDING):
                which_X2[num_rows, 0], which_X2[num_rows, 1] = run, index
                figures_X[num_rows, 0], figures_X[num_rows, 1] = times_K[INSIDE], per_input * times_K[MEAN]
                figures_X[num_rows, 2] = tables.wait_RE[run, entry]
                figures_X[num_rows, 3] = 0.0 if tables.crosses_N[end - 1] else after_s
                figures_X[num_rows, 4] = per_input * after_s
                figures_X[num_rows, 5] = after_s + tables.crossing_s if tables.crosses_N[end - 1] else 0.0
                num_rows += 1
    return num_rows


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


@compiled
def _may_follow(rule: int, entry: int, before: int, rank: int) -> bool:
    """Returns whether `rank` may be the next active ramp after `before` in a split entered at `entry`."""
    return rule == CHOOSE or (rule == ALL and rank == before + 1) or (rule == SPLIT_ENDS and before == entry)


@compiled
def _may_end(rule: int, entry: int, last: int, end: int, after_Q: IntArray) -> bool:
    """Returns whether a split may end at `end` when `last` is the last active ramp."""
    if rule == ALL:
        return last + 1 == after_Q.size or after_Q[last + 1] > end
    if rule == SPLIT_ENDS:
        return last == entry or after_Q[last] == end
    return True


class SplitTimes(NamedTuple):
    """The times of the splits that start at one block and rank, by end and last active ramp."""

    times_EQAK: FloatArray
    """Seconds of an input that runs through the split (INSIDE), and the mean seconds of batches (MEAN)."""
    num_EQ: IntArray
    """The number of sets of ramps; 0 if no split is allowed."""
    before_QA2: IntArray
    """The rank before the last one in a set of ramps, and the index of the set up to there."""


@compiled
def empty_split_times(tables: Tables) -> SplitTimes:
    """Allocates the arrays, which `least_times` fills for one start after the other."""
    num_boundaries, num_ranks = tables.rank_N.size + 1, tables.after_Q.size
    return SplitTimes(
        np.empty((num_boundaries, num_ranks, MOST_SETS, 2)),
        np.zeros((num_boundaries, num_ranks), dtype=np.int64),
        np.zeros((num_ranks, MOST_SETS, 2), dtype=np.int64),
    )


@compiled
def _add_set(
    times_AK: FloatArray, before_A2: IntArray, count: int, times: tuple[float, float], before: int, index: int
) -> int:
    """Adds a set of ramps if no other has both times as short; drops the sets that it beats. Returns their number."""
    inside_s, mean_s, kept = times[INSIDE], times[MEAN], 0
    for other in range(count):
        if times_AK[other, INSIDE] <= inside_s * (1 + ROUNDING) and times_AK[other, MEAN] <= mean_s * (1 + ROUNDING):
            return count
    for other in range(count):
        if times_AK[other, INSIDE] < inside_s or times_AK[other, MEAN] < mean_s:
            times_AK[kept], before_A2[kept] = times_AK[other], before_A2[other]
            kept += 1
    kept = min(kept, MOST_SETS - 1)  # if there are too many, the last one gives way, which differs little
    times_AK[kept, INSIDE], times_AK[kept, MEAN] = inside_s, mean_s
    before_A2[kept, 0], before_A2[kept, 1] = before, index
    return kept + 1


@compiled
def least_times(tables: Tables, run: int, first: int, entry: int, splits: SplitTimes) -> None:
    """Fills the times of the splits first..end-1 of a run that are entered at rank `entry`."""
    splits.num_EQ[:] = 0
    if not tables.fits_RE[run, entry]:
        return
    device, rule, after_Q, num_blocks = tables.device_R[run], tables.rule, tables.after_Q, tables.rank_N.size
    sums_GK, ramp_s_QG, beside_K = tables.sums_CGK[device], tables.ramp_s_CQG[device], tables.beside_CK[device]
    weight_KQ, head_s_KQ = tables.weight_KREQ[:, run, entry], tables.head_s_KREQ[:, run, entry]
    cell_KQ, part_KQ = tables.cell_KREQ[:, run, entry], tables.part_KREQ[:, run, entry]
    rows_cell_KQ, rows_part_KQ = tables.rows_cell_KREQ[:, run, entry], tables.rows_part_KREQ[:, run, entry]
    times_QAK = np.empty((after_Q.size, MOST_SETS, 2))  # until just after each ramp
    num_Q = np.zeros(after_Q.size, dtype=np.int64)
    run_K = np.zeros(2)
    times_QAK[entry, 0], num_Q[entry] = 0.0 if first == 0 else tables.begin_s, 1
    for rank in range(entry + 1, after_Q.size):
        end = after_Q[rank]
        if end <= first or rule == NONE:
            continue
        for before in range(entry, rank):
            if num_Q[before] == 0 or not _may_follow(rule, entry, before, rank):
                continue
            for kind in range(2):
                run_s = seconds_at(ramp_s_QG[rank], cell_KQ[kind, before], part_KQ[kind, before])
                cell, part = rows_cell_KQ[kind, before], rows_part_KQ[kind, before]
                run_s += blocks_s(sums_GK, cell, part, max(first, after_Q[before]), end)
                run_K[kind] = weight_KQ[kind, before] * run_s
            for index in range(num_Q[before]):
                times = times_QAK[before, index, INSIDE] + run_K[INSIDE], times_QAK[before, index, MEAN] + run_K[MEAN]
                num_Q[rank] = _add_set(times_QAK[rank], splits.before_QA2[rank], num_Q[rank], times, before, index)
    answered = tables.batch_R[run] / tables.enters_E[entry]
    for last in range(entry, after_Q.size):
        for end in range(max(first + 1, after_Q[last]), num_blocks + 1):
            if num_Q[last] == 0 or not _may_end(rule, entry, last, end, after_Q):
                continue
            splits.num_EQ[end, last] = num_Q[last]
            rest_s = head_s_KQ[int(end == num_blocks), last] + answered * (beside_K[end] - beside_K[first])
            for kind in range(2):
                cell, part = rows_cell_KQ[kind, last], rows_part_KQ[kind, last]
                own_s = blocks_s(sums_GK, cell, part, max(first, after_Q[last]), end)
                for index in range(num_Q[last]):
                    before_s = times_QAK[last, index, kind]
                    splits.times_EQAK[end, last, index, kind] = before_s + (weight_KQ[kind, last] * own_s + rest_s)
