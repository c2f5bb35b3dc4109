"""The graph whose moves are single blocks: for plans that answer early, where each ramp of a split is a choice.

A split is opened at a boundary by a move that takes no time: then a batch size on a device is chosen, and its batch is
waited for. Each block is a move from there, with its ramp on or off, to the inside of the same split, or to the
boundary where it ends. Inside a split a node is (block, run, rank at entry, rank now); a *run* is a batch size on a
device. Inputs that stay after their answer keep every batch full, so that one rank at entry stands for all.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from earlyexit.errors import PlanError
from earlyexit.network.boundary import AfterAnswer
from optimizer.compiled import compiled
from optimizer.problem import PlanProblem, device_names
from optimizer.search.graph import ALL, NONE, RULES, SPLIT_ENDS, Graph, MoveArrays, Wire, ranks_of, wire_of
from optimizer.space import Space
from optimizer.step import FloatArray, IntArray, hop_s, locate, seconds_at

MOST_STATES = 40_000_000
"""Nodes of a graph, before those that nothing reaches are left out."""
# Columns of whole numbers per move: where it leads, device, batch, rank at its end, whether a batch is filled at the
# ingress, whether the split goes on.
TO, DEVICE, BATCH, RANK, POOLED, INSIDE = range(6)
# Columns of seconds and inputs per move, in the order of MoveArrays.
SECONDS, WORK, WAIT, HOP, HOP_WORK, CROSS, MEAN, MEAN_WAIT, RAMP, LEAVING = range(10)


class BlockTables(NamedTuple):
    """A problem as the kernels read it: runs R, devices C, measured sizes G, ranks Q."""

    device_R: IntArray
    batch_R: FloatArray
    sizes_CG: FloatArray
    num_sizes_C: IntArray
    block_s_CGN: FloatArray
    ramp_s_CGE: FloatArray
    share_Q: FloatArray
    after_Q: IntArray
    rank_N: IntArray
    """Of the ramp after each block; 0: there is none."""
    wire: Wire
    ramp_budget: float
    """0 without a budget: then seconds of ramps are not counted."""
    rule: int
    stops: bool
    ends_early: bool
    """Whether a split may end before the model does."""


def build_block_graph(problem: PlanProblem, space: Space, after_answer: AfterAnswer) -> Graph:
    """Every block of every split; raises PlanError for a model that is too large."""
    tables = _tables_of(problem, space, after_answer)
    num_runs, num_ranks = len(tables.batch_R), len(tables.share_Q)
    num_states = problem.num_blocks * num_runs * num_ranks * (num_ranks if tables.stops else 1)
    if num_states > MOST_STATES:
        raise PlanError(
            f"the least mean answer time is sought among {MOST_STATES:,} states at most (blocks x batch sizes of all "
            f"devices x ramps x ramps), not {num_states:,}; leave out some ramps or batch sizes"
        )
    nodes = _numbered(tables)
    whole, real = np.empty((0, 6), dtype=np.int64), np.empty((0, 10))
    count = _write_moves(tables, nodes, whole, real, np.zeros(len(nodes.block_P) + 1, dtype=np.int64))
    whole, real = np.empty((count, 6), dtype=np.int64), np.empty((count, 10))
    first_move_P = np.zeros(len(nodes.block_P) + 1, dtype=np.int64)
    _write_moves(tables, nodes, whole, real, first_move_P)
    moves = _moves_of(first_move_P, whole, real)
    return Graph(
        problem=problem, rule=space.ramps, device_names=device_names(problem), block_P=nodes.block_P,
        rank_P=nodes.rank_P, moves=moves, by_block=True, after_answer=after_answer,
    )  # fmt: skip


def _moves_of(first_move_P: IntArray, whole: IntArray, real: FloatArray) -> MoveArrays:
    whole, real = np.ascontiguousarray(whole.T), np.ascontiguousarray(real.T)
    return MoveArrays(
        first_move_P=first_move_P,
        to_M=whole[TO],
        device_M=whole[DEVICE],
        batch_M=whole[BATCH],
        seconds_M=real[SECONDS],
        work_M=real[WORK],
        wait_M=real[WAIT],
        hop_M=real[HOP],
        hop_work_M=real[HOP_WORK],
        rank_M=whole[RANK],
        cross_M=real[CROSS],
        pooled_M=whole[POOLED],
        inside_M=whole[INSIDE],
        mean_M=real[MEAN],
        mean_wait_M=real[MEAN_WAIT],
        ramp_M=real[RAMP],
        leaving_M=real[LEAVING],
    )


def _tables_of(problem: PlanProblem, space: Space, after_answer: AfterAnswer) -> BlockTables:
    names, ranks, budget = device_names(problem), ranks_of(problem), problem.ramp_budget
    latency = [problem.latency[name] for name in names]
    runs = [(device, size) for device, table in enumerate(latency) for size in table.batches]
    most = max(len(table.batches) for table in latency)
    sizes_CG, block_s_CGN = np.zeros((len(names), most)), np.zeros((len(names), most, problem.num_blocks))
    ramp_s_CGE = np.zeros((len(names), most, max(1, len(problem.ramps))))
    for device, table in enumerate(latency):
        count = len(table.batches)
        sizes_CG[device, :count], block_s_CGN[device, :count] = table.batches, table.block_s_NB.T
        ramp_s_CGE[device, :count, : len(problem.ramps)] = table.ramp_s_EB.T
    rank_N = np.zeros(problem.num_blocks, dtype=np.int64)
    rank_N[list(problem.ramps)] = np.arange(1, len(ranks.share_Q))
    return BlockTables(
        device_R=np.array([device for device, _ in runs], dtype=np.int64),
        batch_R=np.array([size for _, size in runs], dtype=float),
        sizes_CG=sizes_CG,
        num_sizes_C=np.array([len(table.batches) for table in latency]),
        block_s_CGN=block_s_CGN,
        ramp_s_CGE=ramp_s_CGE,
        share_Q=ranks.share_Q,
        after_Q=ranks.after_Q,
        rank_N=rank_N,
        wire=wire_of(problem),
        ramp_budget=0.0 if budget is None else float(budget),
        rule=RULES[space.ramps],
        stops=after_answer == "stop",
        ends_early=space.splits_per_stage or space.several_stages,
    )


class BlockNodes(NamedTuple):
    """Boundaries and the insides of splits, in the order of their blocks; -1 where there is no node."""

    block_P: IntArray
    rank_P: IntArray
    boundary_KQ: IntArray
    inside_NREQ: IntArray


@compiled
def _numbered(tables: BlockTables) -> BlockNodes:
    num_blocks, num_runs, num_ranks = tables.rank_N.size, tables.batch_R.size, tables.share_Q.size
    num_entries = num_ranks if tables.stops else 1
    boundary_KQ = np.full((num_blocks + 1, num_ranks), -1)
    inside_NREQ = np.full((num_blocks, num_runs, num_entries, num_ranks), -1)
    most = boundary_KQ.size + inside_NREQ.size
    block_P, rank_P, count = np.zeros(most, dtype=np.int64), np.zeros(most, dtype=np.int64), 0
    for block in range(num_blocks):
        for rank in range(num_ranks):
            is_reached = tables.share_Q[rank] > 0 or not tables.stops  # else its batch would never be full
            is_start = rank == 0 if block == 0 else tables.ends_early and tables.after_Q[rank] <= block
            if is_start and is_reached:
                boundary_KQ[block, rank] = count
                block_P[count], rank_P[count] = block, rank
                count += 1
        for run in range(num_runs):
            for entry in range(num_entries):
                if tables.stops and tables.share_Q[entry] == 0.0:
                    continue
                for rank in range(entry, num_ranks):
                    if tables.after_Q[rank] <= block:
                        inside_NREQ[block, run, entry, rank] = count
                        block_P[count], rank_P[count] = block, rank
                        count += 1
    boundary_KQ[num_blocks, :] = count
    block_P[count] = num_blocks
    return BlockNodes(block_P[: count + 1], rank_P[: count + 1], boundary_KQ, inside_NREQ)


@compiled
def _write_moves(
    tables: BlockTables, nodes: BlockNodes, whole: IntArray, real: FloatArray, first_move_P: IntArray
) -> int:
    """Write all moves where there is room for them; returns how many there are."""
    num_blocks, num_runs, num_entries, num_ranks = nodes.inside_NREQ.shape
    count = 0
    for block in range(num_blocks):
        for rank in range(num_ranks):
            node = nodes.boundary_KQ[block, rank]
            if node >= 0:
                first_move_P[node] = count
                for run in range(num_runs):
                    count = _open(tables, nodes, block, rank, run, whole, real, count)
        for run in range(num_runs):
            for entry in range(num_entries):
                for rank in range(num_ranks):
                    node = nodes.inside_NREQ[block, run, entry, rank]
                    if node >= 0:
                        first_move_P[node] = count
                        for active in range(2):
                            count = _run(tables, nodes, block, run, entry, rank, active, whole, real, count)
    first_move_P[-2], first_move_P[-1] = count, count
    return count


@compiled
def _open(
    tables: BlockTables,
    nodes: BlockNodes,
    block: int,
    rank: int,
    run: int,
    whole: IntArray,
    real: FloatArray,
    count: int,
) -> int:
    """The move that begins a split."""
    entry = rank if tables.stops else 0
    target = nodes.inside_NREQ[block, run, entry, rank]
    if target < 0:
        return count
    if count < whole.shape[0]:
        wait = tables.batch_R[run] / (tables.share_Q[rank] if tables.stops else 1.0)
        real[count] = 0.0
        real[count, WAIT], real[count, MEAN_WAIT] = wait, tables.share_Q[rank] * wait / 2
        real[count, LEAVING] = tables.share_Q[rank]
        whole[count, TO], whole[count, DEVICE], whole[count, BATCH] = target, tables.device_R[run], tables.batch_R[run]
        whole[count, RANK], whole[count, INSIDE] = rank, 1
        whole[count, POOLED] = 1 if block > 0 and tables.wire.end_N[block - 1] == block else 0
    return count + 1


@compiled
def _run(
    tables: BlockTables, nodes: BlockNodes, block: int, run: int, entry: int, rank: int, active: int,
    whole: IntArray, real: FloatArray, count: int,
) -> int:  # fmt: skip
    """The moves through a block with its ramp on or off: the split goes on, or ends."""
    ramp, end = tables.rank_N[block], block + 1 == tables.rank_N.size
    now = ramp if active else rank
    if active:
        if (
            ramp == 0 or tables.rule == NONE or (tables.rule != ALL and tables.share_Q[ramp] >= tables.share_Q[rank])
        ):  # a ramp at which no input leaves stays off where there is a choice
            return count
    elif ramp > 0 and tables.rule == ALL:
        return count
    crosses = not end and tables.wire.end_N[block] == block + 1
    for ends in range(2):
        if ends:
            if not (end or tables.ends_early):
                continue
            target = nodes.boundary_KQ[block + 1, now]
        else:
            if end or crosses or (active and tables.rule == SPLIT_ENDS):
                continue
            target = nodes.inside_NREQ[block + 1, run, entry, now]
        if target < 0:
            continue
        if count < whole.shape[0]:
            _fill(tables, block, run, entry, rank, now, active, ends == 1 and not end, crosses, real[count])
            whole[count, TO], whole[count, DEVICE] = target, tables.device_R[run]
            whole[count, BATCH], whole[count, RANK] = tables.batch_R[run], now
            whole[count, INSIDE], whole[count, POOLED] = 1 - ends, 1
        count += 1
    return count


@compiled
def _fill(
    tables: BlockTables, block: int, run: int, entry: int, rank: int, now: int, active: int, hops: bool, crosses: bool,
    real_F: FloatArray,
) -> None:  # fmt: skip
    """What a batch takes in a block and its ramp, and from there to the next split's batches."""
    device, batch, enters = tables.device_R[run], tables.batch_R[run], tables.share_Q[entry] if tables.stops else 1.0
    inside = tables.share_Q[rank] / enters if tables.stops else 1.0
    cell, part = locate(tables.sizes_CG[device, : tables.num_sizes_C[device]], batch * inside)
    block_s, ramp_s = seconds_at(tables.block_s_CGN[device, :, block], cell, part), 0.0
    if active:
        ramp_s = seconds_at(tables.ramp_s_CGE[device, :, now - 1], cell, part)
    real_F[:] = 0.0
    real_F[SECONDS], real_F[WORK] = block_s + ramp_s, enters * (block_s + ramp_s) / batch
    real_F[MEAN], real_F[LEAVING] = tables.share_Q[rank] * (block_s + ramp_s), tables.share_Q[now]
    if tables.ramp_budget > 0.0:
        real_F[RAMP] = ramp_s - tables.ramp_budget * block_s
    if not hops:
        return
    leaving = batch * (tables.share_Q[now] / enters if tables.stops else 1.0)
    after_s = hop_s(tables.wire.delay_s, tables.wire.bytes_N[block], leaving, tables.wire.bandwidth)
    real_F[HOP_WORK] = enters * after_s / batch
    if crosses:
        real_F[CROSS] = after_s + tables.wire.crossing_s
        real_F[MEAN] += tables.share_Q[now] * real_F[CROSS]
    else:
        real_F[HOP] = after_s
