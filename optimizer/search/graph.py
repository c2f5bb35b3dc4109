"""The graph that chains are paths of.

Between splits, a node is a block boundary with the last active ramp before it. There are two graphs:

- where a rate or a cost is sought, a move is a whole split. Its least time does not depend on the rate, nor on the rest
  of the plan, but only on where it starts and ends, its device and batch, and the last ramps before and inside it. So
  the ramps inside a split are chosen once (`least_times`), where E3's T (figure 6) sums a given profile;
- where early answers are sought, a quick split is not all that counts, so a move is one block, with its ramp on or off,
  and there are nodes inside splits as well (`build_block_graph`).

A move's figures do not depend on the rate, so a graph is built once per problem. Moves that are nowhere better than
another between the same nodes on the same device are left out. Ranks and the shapes of arrays are those of
`optimizer.step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from earlyexit.errors import PlanError
from earlyexit.network.boundary import AfterAnswer, Split
from optimizer.compiled import compiled
from optimizer.generation.steps import ramps_of, step_table
from optimizer.problem import PlanProblem, device_names
from optimizer.space import RampRule
from optimizer.step import FloatArray, IntArray, batch_inside, hop_s, locate, run_s, seconds_at

# Far below the steps between measured batches.
ROUNDING = 1e-9
CHOOSE, ALL, NONE, SPLIT_ENDS = 0, 1, 2, 3
"""Ramp rules: any set; every ramp of the model; no ramp; only at the ends of splits (E3 section 5.8.6)."""


class DeviceSeconds(NamedTuple):
    """One device's seconds, over its measured batch sizes."""

    sizes_G: FloatArray
    sums_GK: FloatArray
    """Of all blocks before a boundary."""
    ramp_s_EG: FloatArray
    beside_K: FloatArray
    """Of prompts, per step, in all blocks before a boundary; none where inputs are no steps."""
    head_s_G: FloatArray
    """Of the vocabulary head, behind the last block."""
    begin_s: float
    """Of a batch that begins behind the first block."""
    most_batch: float
    """The largest that a plan may have."""
    steps: int
    """1 where inputs are steps: what nobody is left for is not run."""
    late_head: int
    """1 where the vocabulary head is asked once, at a split's end, of all who leave."""


class Ranks(NamedTuple):
    """A problem's ramps, in order; the first rank stands for none."""

    share_Q: FloatArray
    after_Q: IntArray
    rows_Q: FloatArray
    """What blocks run after it, of all inputs: who is inside, and tokens that are filled in (`Generation.rows`)."""


def seconds_of(problem: PlanProblem, device: str) -> DeviceSeconds:
    """A device's latency as kernels take it."""
    table, generation = problem.latency[device], problem.generation
    body, beside_K = table, np.zeros(problem.num_blocks + 1)
    head_s_G, begin_s, most_batch = np.zeros(len(table.batches)), 0.0, np.inf
    ramp_s_EB, late_head = table.ramp_s_EB, False
    if generation is not None:
        steps, late_head = step_table(problem, device), generation.late_head
        body, head_s_G, ramp_s_EB = steps.body, steps.head_s_B, ramps_of(table, steps, generation)
        np.cumsum(steps.prompt_s_N / generation.num_steps, out=beside_K[1:])
        begin_s, most_batch = float(generation.regroup_s), float(generation.batch_limit)
    sums_GK = np.zeros((len(table.batches), len(body.block_s_NB) + 1))
    np.cumsum(body.block_s_NB.T, axis=1, out=sums_GK[:, 1:])
    ramp_s_EG = np.array(ramp_s_EB, dtype=float, order="C")
    sizes_G = np.array(table.batches, dtype=float)
    asked = int(generation is not None), int(late_head)
    return DeviceSeconds(sizes_G, sums_GK, ramp_s_EG, beside_K, head_s_G, begin_s, most_batch, *asked)


def ranks_of(problem: PlanProblem) -> Ranks:
    """Per rank, the share inside the model after it, and the first block after it."""
    shares = [1.0, *(problem.share_after(ramp) for ramp in problem.ramps)]
    rows = shares if problem.generation is None else [problem.generation.rows(share) for share in shares]
    after_Q = np.array([0, *(ramp + 1 for ramp in problem.ramps)], dtype=np.int64)
    return Ranks(np.array(shares), after_Q, np.array(rows))


@compiled
def _may_follow(rule: int, entry: int, before: int, rank: int) -> bool:
    """Whether `rank` may be the next active ramp after `before` in a split entered at `entry`."""
    if rule == 0:
        return True
    if rule == 1:
        return rank == before + 1
    if rule == 3:
        return before == entry
    return False


@compiled
def _may_end(rule: int, entry: int, last: int, end: int, after_Q: IntArray) -> bool:
    """Whether a split may end at `end` when `last` is the last active ramp."""
    if rule == 1:
        return last + 1 == after_Q.size or after_Q[last + 1] > end
    if rule == 3:
        return last == entry or after_Q[last] == end
    return True


@compiled
def some_are(steps: int, inside: float, batch: float) -> float:
    """The chance that anybody of a batch of steps is inside, where so many are on average, each by itself; else 1."""
    chance: float = 1.0 - max(0.0, 1.0 - inside / batch) ** batch if steps == 1 else 1.0
    return chance


@compiled
def _head_s(device: DeviceSeconds, batch: float, inside: float, is_last: bool) -> float:
    """Of the vocabulary head, at the end of a split at which so many of a batch are inside."""
    asked = inside if is_last else 0.0
    if device.late_head == 1:
        asked = batch if is_last else batch - inside
    if asked <= 0.0:
        return 0.0
    chance = some_are(device.steps, asked, batch)
    cell, part = locate(device.sizes_G, asked / chance)
    seconds: float = chance * seconds_at(device.head_s_G, cell, part)
    return seconds


@compiled
def least_times(
    rule: int,
    first: int,
    entry: int,
    batch: float,
    device: DeviceSeconds,
    ranks: Ranks,
    least_EQ: FloatArray,
    before_Q: IntArray,
) -> None:
    """Fill `least_EQ[end, last]` with the seconds of the split first..end-1 entered at rank `entry`; inf: not allowed.

    `before_Q[rank]` becomes the active ramp before `rank` in the best split that holds both.
    """
    sums_GK, share_Q, after_Q, rows_Q = device.sums_GK, ranks.share_Q, ranks.after_Q, ranks.rows_Q
    num_ranks = share_Q.size
    num_blocks = sums_GK.shape[1] - 1
    least_EQ[:] = np.inf
    answered = batch / share_Q[entry]
    if batch > device.most_batch or answered * rows_Q[entry] > device.sizes_G[-1] * (1 + ROUNDING):
        return
    upto_Q = np.full(num_ranks, np.inf)  # seconds until just after each ramp
    cell_Q = np.zeros(num_ranks, dtype=np.int64)  # of what blocks run there
    part_Q = np.zeros(num_ranks)
    own_cell_Q = np.zeros(num_ranks, dtype=np.int64)  # of those alone who are inside
    own_part_Q = np.zeros(num_ranks)
    chance_Q = np.ones(num_ranks)  # that somebody is inside
    upto_Q[entry] = 0.0 if first == 0 else device.begin_s
    for rank in range(entry, num_ranks):
        if rank != entry and after_Q[rank] <= first:
            continue
        inside = batch_inside(share_Q, entry, rank, batch)
        chance = some_are(device.steps, inside, batch)
        chance_Q[rank] = chance
        if chance > 0.0:
            own_cell_Q[rank], own_part_Q[rank] = locate(device.sizes_G, inside / chance)
            cell_Q[rank], part_Q[rank] = locate(device.sizes_G, batch * rows_Q[rank] / share_Q[entry] / chance)
    for rank in range(entry + 1, num_ranks):
        end = after_Q[rank]
        if end <= first or rule == 2:
            continue
        for before in range(entry, rank):
            if upto_Q[before] == np.inf or not _may_follow(rule, entry, before, rank):
                continue
            start = max(first, after_Q[before])
            ramp_s = seconds_at(device.ramp_s_EG[rank - 1], own_cell_Q[before], own_part_Q[before])
            blocks_s = run_s(sums_GK, cell_Q[before], part_Q[before], start, end)
            seconds = upto_Q[before] + chance_Q[before] * blocks_s + chance_Q[before] * ramp_s
            if seconds < upto_Q[rank]:
                upto_Q[rank] = seconds
                before_Q[rank] = before
    for last in range(entry, num_ranks):
        if upto_Q[last] == np.inf:
            continue
        start = max(first, after_Q[last])
        for end in range(max(first + 1, after_Q[last]), num_blocks + 1):
            if _may_end(rule, entry, last, end, after_Q):
                seconds = upto_Q[last] + chance_Q[last] * run_s(sums_GK, cell_Q[last], part_Q[last], start, end)
                seconds += _head_s(device, batch, batch_inside(share_Q, entry, last, batch), end == num_blocks)
                least_EQ[end, last] = seconds + answered * (device.beside_K[end] - device.beside_K[first])


FIGURES = 6
"""Of a move that are seconds, or inputs."""
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
    cross_M: FloatArray
    """From a network's end to the next one's batches, the hop included, which `hop_M` then is not; 0 elsewhere."""
    pooled_M: IntArray
    """1 where its batch is filled at the ingress in the middle of a stage as well: behind a crossing."""
    inside_M: IntArray
    """1 where the split goes on behind it: neither the split nor its stage can end there."""
    mean_M: FloatArray
    """Its part of the mean answer time, without waits and hops; like the next three, 0 where whole splits are moves."""
    mean_wait_M: FloatArray
    """Inputs that are waited for, weighted by who has no answer yet; of the wait for a batch, half on average."""
    ramp_M: FloatArray
    """Seconds of ramps, beyond what their budget allows for the seconds of blocks."""
    leaving_M: FloatArray
    """Share of inputs without an answer behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """All splits of a problem under a ramp rule."""

    problem: PlanProblem
    rule: RampRule
    device_names: tuple[str, ...]
    block_P: IntArray
    rank_P: IntArray
    moves: MoveArrays

    by_block: bool = False
    """Whether moves are blocks (`optimizer.search.block_graph`), not splits."""
    after_answer: AfterAnswer = "stop"

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

    def splits_of(self, way: Sequence[int]) -> tuple[Split, ...]:
        """The splits of consecutive moves on one device."""
        if not self.by_block:
            return tuple(self._split_of(move) for move in way)
        splits, steps = [], list[int]()
        for move in way:
            steps.append(move)
            # A split begins with a move that only opens it: the blocks before and behind it are the same.
            if self.moves.inside_M[move] == 0:
                splits.append(self._split_of_blocks(steps))
                steps = []
        return tuple(splits)

    def _node_of(self, move: int) -> int:
        """The node that a move leaves."""
        return int(np.searchsorted(self.moves.first_move_P, move, side="right")) - 1

    def _split_of(self, move: int) -> Split:
        """The split that a move stands for, with its best active ramps."""
        problem, moves, node = self.problem, self.moves, self._node_of(move)
        first, entry = int(self.block_P[node]), int(self.rank_P[node])
        end, last = int(self.block_P[moves.to_M[move]]), int(moves.rank_M[move])
        ranks = ranks_of(problem)
        seconds = seconds_of(problem, self.device_names[moves.device_M[move]])
        least_EQ = np.empty((problem.num_blocks + 1, len(ranks.share_Q)))
        before_Q = np.zeros(len(ranks.share_Q), dtype=np.int64)
        batch = int(moves.batch_M[move])
        least_times(RULES[self.rule], first, entry, float(batch), seconds, ranks, least_EQ, before_Q)
        ramps: list[int] = []
        while last != entry:
            ramps.append(problem.ramps[last - 1])
            last = int(before_Q[last])
        return Split(first=first, end=end, batch=batch, ramps=tuple(reversed(ramps)))

    def _split_of_blocks(self, steps: Sequence[int]) -> Split:
        ranks = [int(self.rank_P[self._node_of(steps[0])]), *(int(self.moves.rank_M[move]) for move in steps)]
        return Split(
            first=int(self.block_P[self._node_of(steps[0])]),
            end=int(self.block_P[self.moves.to_M[steps[-1]]]),
            batch=int(self.moves.batch_M[steps[0]]),
            ramps=tuple(self.problem.ramps[rank - 1] for rank in dict.fromkeys(ranks) if rank > ranks[0]),
            after_answer=self.after_answer,
        )


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
    nodes = nodes or all_nodes(problem)
    names = device_names(problem)
    wire = wire_of(problem)
    parts = [
        _moves_of_device(
            device, RULES[rule], seconds_of(problem, name), ranks_of(problem), nodes, wire,
            float(problem.slo.limit_s), every_batch, most_moves,
        )
        for device, name in enumerate(names)
    ]  # fmt: skip
    if any(len(part[0]) > most_moves for part in parts):
        raise PlanError(f"more than {most_moves} splits to choose from")
    whole_MI = np.concatenate([part[0] for part in parts] or [np.empty((0, 5), dtype=np.int64)])
    whole_MF = np.concatenate([part[1] for part in parts] or [np.empty((0, FIGURES))])
    order_M = np.argsort(whole_MI[:, 0], kind="stable")
    whole_MI, whole_MF = whole_MI[order_M], whole_MF[order_M]
    first_move_P = np.searchsorted(whole_MI[:, 0], np.arange(len(nodes.block_P) + 1))
    to_M, device_M, batch_M, rank_M = (np.ascontiguousarray(whole_MI[:, column]) for column in (1, 2, 3, 4))
    seconds_M, work_M, wait_M, hop_M, hop_work_M, cross_M = (
        np.ascontiguousarray(whole_MF[:, column]) for column in range(FIGURES)
    )
    pooled_M = np.isin(nodes.block_P[whole_MI[:, 0]], problem.networks[:-1]).astype(np.int64)
    nothing_M = np.zeros(len(to_M))
    moves = MoveArrays(
        first_move_P, to_M, device_M, batch_M, seconds_M, work_M, wait_M, hop_M, hop_work_M, rank_M, cross_M, pooled_M,
        np.zeros(len(to_M), dtype=np.int64), nothing_M, nothing_M, nothing_M, nothing_M,
    )  # fmt: skip
    return Graph(
        problem=problem, rule=rule, device_names=names, block_P=nodes.block_P, rank_P=nodes.rank_P, moves=moves
    )


def all_nodes(problem: PlanProblem) -> Nodes:
    """Every pair of boundary and last ramp; those that nothing reaches are no start of a split, so none."""
    share_Q, after_Q, _ = ranks_of(problem)
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


class Wire(NamedTuple):
    """What a hop goes over, and what it carries of one input after every block."""

    bytes_N: FloatArray
    bandwidth: float
    delay_s: float
    end_N: IntArray
    """By block, where its network ends: no split runs further."""
    crossing_s: float


def wire_of(problem: PlanProblem) -> Wire:
    """Of a problem whose networks are all used.

    Here and wherever kernels take a problem's numbers, whole ones become floats: kernels are compiled for either.
    """
    ends = problem.networks or (problem.num_blocks,)
    end_N = np.array(ends)[np.searchsorted(ends, np.arange(problem.num_blocks), side="right")]
    link = problem.link
    return Wire(
        bytes_N=np.array(problem.bytes_per_sample_N, dtype=float),
        bandwidth=float(link.bandwidth_bytes_per_s),
        delay_s=float(link.delay_s),
        end_N=end_N,
        crossing_s=float(problem.crossing_s),
    )


@compiled
def _moves_of_device(
    device: int,
    rule: int,
    seconds: DeviceSeconds,
    ranks: Ranks,
    nodes: Nodes,
    wire: Wire,
    limit_s: float,
    every_batch: bool,
    most_moves: int,
) -> tuple[IntArray, FloatArray]:
    """Columns (from, to, device, batch, rank) and those of `_write_sizes`, of one device's moves."""
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
        for end in range(first + 1, wire.end_N[first] + 1):
            for rank in range(entry, num_ranks):
                target = nodes.node_KQ[end, rank]
                if target < 0:
                    continue
                _write_sizes(seconds.sizes_G, ranks.share_Q, wire, entry, rank, end, least_BEQ, figures_B)
                for size in range(num_sizes):
                    kept_B[size] = figures_B[size, 0] <= limit_s * (1 + 1e-9)
                if not every_batch:
                    _drop_worse(figures_B, kept_B)
                for size in range(num_sizes):
                    if not kept_B[size]:
                        continue
                    if count == whole.shape[0]:
                        if count > most_moves:
                            return whole, real
                        whole, real = _doubled(whole, real)
                    whole[count, 0], whole[count, 1], whole[count, 2] = node, target, device
                    whole[count, 3], whole[count, 4] = int(seconds.sizes_G[size]), rank
                    real[count] = figures_B[size]
                    count += 1
    return whole[:count], real[:count]


@compiled
def _write_sizes(
    sizes_G: FloatArray,
    share_Q: FloatArray,
    wire: Wire,
    entry: int,
    rank: int,
    end: int,
    least_BEQ: FloatArray,
    figures_B: FloatArray,
) -> None:
    """Seconds, work, wait, hop, hop work and crossing of one split, by batch size."""
    for size in range(sizes_G.size):
        seconds, per_input, after_s = least_BEQ[size, end, rank], share_Q[entry] / sizes_G[size], 0.0
        if end < wire.bytes_N.size:
            leaving = batch_inside(share_Q, entry, rank, sizes_G[size])
            after_s = hop_s(wire.delay_s, wire.bytes_N[end - 1], leaving, wire.bandwidth)
        crosses = end < wire.bytes_N.size and end == wire.end_N[end - 1]
        figures_B[size, 0] = seconds
        figures_B[size, 1] = per_input * seconds
        figures_B[size, 2] = 1.0 / per_input
        figures_B[size, 3] = 0.0 if crosses else after_s
        figures_B[size, 4] = per_input * after_s
        figures_B[size, 5] = after_s + wire.crossing_s if crosses else 0.0


@compiled
def _drop_worse(figures_B: FloatArray, kept_B: npt.NDArray[np.bool_]) -> None:
    """Batch sizes that are nowhere better than another one."""
    for size in range(kept_B.size):
        for other in range(kept_B.size):
            if other != size and kept_B[size] and kept_B[other] and _no_worse(figures_B, other, size):
                kept_B[size] = False


@compiled
def _no_worse(figures_B: FloatArray, size: int, than: int) -> bool:
    for column in range(FIGURES):  # noqa: SIM110 - kernels have no generators
        if figures_B[size, column] > figures_B[than, column]:
            return False
    return True


@compiled
def _doubled(whole: IntArray, real: FloatArray) -> tuple[IntArray, FloatArray]:
    rows = whole.shape[0]
    bigger_whole, bigger_real = np.empty((2 * rows, whole.shape[1]), dtype=np.int64), np.empty((2 * rows, FIGURES))
    bigger_whole[:rows] = whole
    bigger_real[:rows] = real
    return bigger_whole, bigger_real


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
