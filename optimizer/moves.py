"""The graph that plans are paths of: nodes are (block boundary, last active ramp), moves are splits.

A move's figures do not depend on the rate, so the graph is built once per problem. Moves that are nowhere better than
another between the same nodes on the same device are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from earlyexit.errors import PlanError
from earlyexit.split import Split
from optimizer.compiled import compiled
from optimizer.problem import PlanProblem
from optimizer.split_times import ALL, CHOOSE, NONE, SPLIT_ENDS, FloatArray, IntArray, least_times

RampRule = Literal["choose", "all", "none", "split-ends"]
RULES: dict[RampRule, int] = {"choose": CHOOSE, "all": ALL, "none": NONE, "split-ends": SPLIT_ENDS}


class MoveArrays(NamedTuple):
    """One entry per move (M), ordered by the node it leaves; a tuple, because kernels take it whole."""

    first_move_P: IntArray
    """Per node (and one past the last), its first move."""
    to_M: IntArray
    device_M: IntArray
    batch_M: IntArray
    seconds_M: FloatArray
    """T."""
    work_M: FloatArray
    """Device seconds per input of the service, s(i)*T/b."""
    wait_M: FloatArray
    """b/s(i), in inputs: divided by the rate, the seconds until the batch is full."""
    hop_M: FloatArray
    """T_x of a hop after it."""
    hop_work_M: FloatArray
    """s(i)*T_x/b: the link's seconds per input."""
    rank_M: IntArray
    """Last active ramp at its end, as a rank: at the model's end one node stands for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """All splits of a problem under a ramp rule."""

    problem: PlanProblem
    rule: RampRule
    device_names: tuple[str, ...]
    block_P: IntArray
    rank_P: IntArray
    moves: MoveArrays

    @property
    def num_moves(self) -> int:
        return len(self.moves.to_M)

    def with_batch(self, batch: int) -> Graph:
        """Only the splits of one batch size."""
        return self.only(self.moves.batch_M == batch)

    def only(self, kept_M: npt.NDArray[np.bool_]) -> Graph:
        """Some of the splits."""
        first_move_P = np.concatenate([[0], np.cumsum(kept_M)])[self.moves.first_move_P]
        return replace(self, moves=MoveArrays(first_move_P, *(values_M[kept_M] for values_M in self.moves[1:])))  # type: ignore[arg-type]  # mixed arrays

    def split_of(self, node: int, move: int) -> Split:
        """The split that a move from `node` stands for, with its best active ramps."""
        problem, moves = self.problem, self.moves
        first, entry = int(self.block_P[node]), int(self.rank_P[node])
        end, last = int(self.block_P[moves.to_M[move]]), int(moves.rank_M[move])
        share_Q, after_Q = ranks_of(problem)
        table = problem.latency[self.device_names[moves.device_M[move]]]
        least_EQ = np.empty((problem.num_blocks + 1, len(share_Q)))
        before_Q = np.zeros(len(share_Q), dtype=np.int64)
        batch = int(moves.batch_M[move])
        sizes_G, sums_GK, ramp_s_EG = _table_arrays(table.batches, table.block_s_NB, table.ramp_s_EB)
        least_times(
            RULES[self.rule], first, entry, float(batch), sizes_G, sums_GK, ramp_s_EG, share_Q, after_Q,
            least_EQ, before_Q,
        )  # fmt: skip
        ramps: list[int] = []
        while last != entry:
            ramps.append(problem.ramps[last - 1])
            last = int(before_Q[last])
        return Split(first=first, end=end, batch=batch, ramps=tuple(reversed(ramps)))


class Nodes(NamedTuple):
    """Starts of splits, in the order of their boundaries; the last is the model's end."""

    block_P: IntArray
    rank_P: IntArray
    node_KQ: IntArray
    """By boundary and rank; -1: none."""


def build_graph(
    problem: PlanProblem,
    rule: RampRule = "choose",
    *,
    every_batch: bool = False,
    nodes: Nodes | None = None,
    most_moves: int = 20_000_000,
) -> Graph:
    """Every split between all nodes, or the given ones; raises PlanError for more than `most_moves`.

    `every_batch` keeps batch sizes that another is better than: where all splits must share one, it may still be it.
    """
    share_Q, after_Q = ranks_of(problem)
    block_P, rank_P, node_KQ = nodes or all_nodes(problem)
    names = device_names(problem)
    parts = []
    for device, name in enumerate(names):
        table = problem.latency[name]
        sizes_G, sums_GK, ramp_s_EG = _table_arrays(table.batches, table.block_s_NB, table.ramp_s_EB)
        parts.append(
            _moves_of_device(
                device, RULES[rule], sizes_G, sums_GK, ramp_s_EG, share_Q, after_Q, block_P, rank_P, node_KQ,
                np.array(problem.bytes_per_sample_N), problem.link.bandwidth_bytes_per_s, problem.link.delay_s,
                problem.slo.limit_s, every_batch, most_moves,
            )
        )  # fmt: skip
    if any(len(part[0]) > most_moves for part in parts):
        raise PlanError(f"more than {most_moves} splits to choose from")
    whole_MI = np.concatenate([part[0] for part in parts] or [np.empty((0, 5), dtype=np.int64)])
    whole_MF = np.concatenate([part[1] for part in parts] or [np.empty((0, 5))])
    order_M = np.argsort(whole_MI[:, 0], kind="stable")
    whole_MI, whole_MF = whole_MI[order_M], whole_MF[order_M]
    first_move_P = np.searchsorted(whole_MI[:, 0], np.arange(len(block_P) + 1))
    to_M, device_M, batch_M, rank_M = (np.ascontiguousarray(whole_MI[:, column]) for column in (1, 2, 3, 4))
    seconds_M, work_M, wait_M, hop_M, hop_work_M = (np.ascontiguousarray(whole_MF[:, column]) for column in range(5))
    moves = MoveArrays(first_move_P, to_M, device_M, batch_M, seconds_M, work_M, wait_M, hop_M, hop_work_M, rank_M)
    return Graph(problem=problem, rule=rule, device_names=names, block_P=block_P, rank_P=rank_P, moves=moves)


def device_names(problem: PlanProblem) -> tuple[str, ...]:
    """The devices that there are, in the order of all arrays."""
    return tuple(name for name, supply in sorted(problem.devices.items()) if supply.count > 0)


def ranks_of(problem: PlanProblem) -> tuple[FloatArray, IntArray]:
    """Per rank, the share inside the model after it, and the first block after it."""
    shares = [1.0, *(problem.share_after(ramp) for ramp in problem.ramps)]
    return np.array(shares), np.array([0, *(ramp + 1 for ramp in problem.ramps)], dtype=np.int64)


def _table_arrays(
    batches: tuple[int, ...], block_s_NB: FloatArray, ramp_s_EB: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    sums_GK = np.zeros((len(batches), len(block_s_NB) + 1))
    np.cumsum(block_s_NB.T, axis=1, out=sums_GK[:, 1:])
    return np.array(batches, dtype=float), sums_GK, np.ascontiguousarray(ramp_s_EB, dtype=float)


def all_nodes(problem: PlanProblem) -> Nodes:
    """Every pair of boundary and last ramp; those that nothing reaches are no start of a split, so none."""
    share_Q, after_Q = ranks_of(problem)
    nodes = [
        (block, rank)
        for block in range(problem.num_blocks)
        for rank in range(len(share_Q))
        if after_Q[rank] <= block and share_Q[rank] > 0 and (rank == 0 or block > 0)
    ]
    node_KQ = np.full((problem.num_blocks + 1, len(share_Q)), -1, dtype=np.int64)
    for node, (block, rank) in enumerate(nodes):
        node_KQ[block, rank] = node
    node_KQ[problem.num_blocks, :] = len(nodes)
    nodes.append((problem.num_blocks, 0))
    blocks, ranks = zip(*nodes, strict=True)
    return Nodes(np.array(blocks, dtype=np.int64), np.array(ranks, dtype=np.int64), node_KQ)


def ends_of(problem: PlanProblem) -> Nodes:
    """Only the model's two ends: between them, plans of a single split."""
    node_KQ = np.full((problem.num_blocks + 1, len(problem.ramps) + 1), -1, dtype=np.int64)
    node_KQ[0, 0], node_KQ[problem.num_blocks, :] = 0, 1
    return Nodes(np.array([0, problem.num_blocks]), np.zeros(2, dtype=np.int64), node_KQ)


@compiled
def _moves_of_device(
    device: int,
    rule: int,
    sizes_G: FloatArray,
    sums_GK: FloatArray,
    ramp_s_EG: FloatArray,
    share_Q: FloatArray,
    after_Q: IntArray,
    block_P: IntArray,
    rank_P: IntArray,
    node_KQ: IntArray,
    bytes_N: FloatArray,
    bandwidth: float,
    delay_s: float,
    limit_s: float,
    every_batch: bool,
    most_moves: int,
) -> tuple[IntArray, FloatArray]:
    """Columns (from, to, device, batch, rank) and (seconds, work, wait, hop, hop work) of one device's moves."""
    num_blocks, num_ranks, num_sizes = sums_GK.shape[1] - 1, share_Q.size, sizes_G.size
    num_nodes = block_P.size
    whole = np.empty((1024, 5), dtype=np.int64)
    real = np.empty((1024, 5))
    count = 0
    least_BEQ = np.empty((num_sizes, num_blocks + 1, num_ranks))
    before_Q = np.zeros(num_ranks, dtype=np.int64)
    figures_B = np.empty((num_sizes, 5))
    kept_B = np.empty(num_sizes, dtype=np.bool_)
    for node in range(num_nodes - 1):
        first, entry = block_P[node], rank_P[node]
        for size in range(num_sizes):
            least_times(
                rule, first, entry, sizes_G[size], sizes_G, sums_GK, ramp_s_EG, share_Q, after_Q,
                least_BEQ[size], before_Q,
            )  # fmt: skip
        for end in range(first + 1, num_blocks + 1):
            for rank in range(entry, num_ranks):
                target = node_KQ[end, rank]
                if target < 0:
                    continue
                for size in range(num_sizes):
                    seconds = least_BEQ[size, end, rank]
                    leaving = sizes_G[size] * share_Q[rank] / share_Q[entry]
                    hop_s = delay_s + bytes_N[end - 1] * leaving / bandwidth if end < num_blocks else 0.0
                    _write_figures(figures_B[size], seconds, share_Q[entry] / sizes_G[size], hop_s)
                    kept_B[size] = seconds <= limit_s * (1 + 1e-9)
                if not every_batch:
                    _drop_worse(figures_B, kept_B)
                for size in range(num_sizes):
                    if not kept_B[size]:
                        continue
                    if count == whole.shape[0]:
                        if count > most_moves:
                            return whole, real
                        whole, real = _doubled(whole, real)
                    whole[count, 0] = node
                    whole[count, 1] = target
                    whole[count, 2] = device
                    whole[count, 3] = int(sizes_G[size])
                    whole[count, 4] = rank
                    for column in range(5):
                        real[count, column] = figures_B[size, column]
                    count += 1
    return whole[:count], real[:count]


@compiled
def _write_figures(figures_F: FloatArray, seconds: float, per_input: float, hop_s: float) -> None:
    """Seconds, work, wait, hop and hop work of one split; `per_input` is s(i)/b."""
    figures_F[0] = seconds
    figures_F[1] = per_input * seconds
    figures_F[2] = 1.0 / per_input
    figures_F[3] = hop_s
    figures_F[4] = per_input * hop_s


@compiled
def _drop_worse(figures_B: FloatArray, kept_B: npt.NDArray[np.bool_]) -> None:
    """Batch sizes that are nowhere better than another one."""
    for size in range(kept_B.size):
        for other in range(kept_B.size):
            if other != size and kept_B[size] and kept_B[other] and _no_worse(figures_B, other, size):
                kept_B[size] = False


@compiled
def _no_worse(figures_B: FloatArray, size: int, than: int) -> bool:
    for column in range(5):  # noqa: SIM110 - kernels have no generators
        if figures_B[size, column] > figures_B[than, column]:
            return False
    return True


@compiled
def _doubled(whole: IntArray, real: FloatArray) -> tuple[IntArray, FloatArray]:
    rows, columns = whole.shape
    bigger_whole, bigger_real = np.empty((2 * rows, columns), dtype=np.int64), np.empty((2 * rows, columns))
    for row in range(rows):
        for column in range(columns):
            bigger_whole[row, column] = whole[row, column]
            bigger_real[row, column] = real[row, column]
    return bigger_whole, bigger_real
