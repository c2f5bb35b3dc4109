"""A problem as arrays, as the walks of `optimizer.scale.walks` read it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optimizer.compiled import compiled
from optimizer.moves import Wire, wire_of
from optimizer.problem import PlanProblem
from optimizer.split_times import ranks_of
from optimizer.step import FloatArray, IntArray, batch_inside, hop_s, locate


class Tables(NamedTuple):
    """A problem as arrays: devices C, batch sizes G, blocks N, ramps E, ranks Q (0: no ramp yet)."""

    sizes_CG: FloatArray
    num_sizes_C: IntArray
    block_s_CNG: FloatArray
    ramp_s_CEG: FloatArray
    share_Q: FloatArray
    after_Q: IntArray
    cell_CGQQ: IntArray
    """Where in the measured sizes a batch is that entered at one rank and has passed another."""
    part_CGQQ: FloatArray
    wire: Wire


def tables_of(problem: PlanProblem, names: tuple[str, ...], batch: int | None) -> Tables:
    """The named devices' figures; with `batch`, splits of that size only."""
    share_Q, after_Q, _ = ranks_of(problem)
    latency = [problem.latency[name] for name in names]
    num_sizes = max(len(table.batches) for table in latency)
    shape = len(names), problem.num_blocks, num_sizes
    sizes_CG, num_sizes_C = np.zeros((len(names), num_sizes)), np.array([len(table.batches) for table in latency])
    block_s_CNG, ramp_s_CEG = np.zeros(shape), np.zeros((len(names), max(1, len(problem.ramps)), num_sizes))
    for device, table in enumerate(latency):
        count = len(table.batches)
        sizes_CG[device, :count] = table.batches
        block_s_CNG[device, :, :count] = table.block_s_NB
        ramp_s_CEG[device, : len(problem.ramps), :count] = table.ramp_s_EB
    cell_CGQQ, part_CGQQ = _located(sizes_CG, num_sizes_C, share_Q)
    return Tables(
        sizes_CG if batch is None else np.where(sizes_CG == batch, sizes_CG, 0.0),
        num_sizes_C, block_s_CNG, ramp_s_CEG, share_Q, after_Q, cell_CGQQ, part_CGQQ,
        wire_of(problem),
    )  # fmt: skip


@compiled
def _located(sizes_CG: FloatArray, num_sizes_C: IntArray, share_Q: FloatArray) -> tuple[IntArray, FloatArray]:
    num_ranks = share_Q.size
    cell_CGQQ = np.zeros((*sizes_CG.shape, num_ranks, num_ranks), dtype=np.int64)
    part_CGQQ = np.zeros((*sizes_CG.shape, num_ranks, num_ranks))
    for device in range(sizes_CG.shape[0]):
        sizes_G = sizes_CG[device, : num_sizes_C[device]]
        for size in range(sizes_G.size):
            for entry in range(num_ranks):
                if share_Q[entry] <= 0:
                    continue
                for rank in range(entry, num_ranks):
                    cell, part = locate(sizes_G, batch_inside(share_Q, entry, rank, sizes_G[size]))
                    cell_CGQQ[device, size, entry, rank] = cell
                    part_CGQQ[device, size, entry, rank] = part
    return cell_CGQQ, part_CGQQ


@compiled
def hop_seconds(tables: Tables, block: int, device: int, size: int, entry: int, rank: int) -> float:
    """T_x after a block, of a split's batch that has passed a rank."""
    leaving = batch_inside(tables.share_Q, entry, rank, tables.sizes_CG[device, size])
    return hop_s(tables.wire.delay_s, tables.wire.bytes_N[block], leaving, tables.wire.bandwidth)


@compiled
def crosses_after(tables: Tables, block: int) -> bool:
    """Whether another network begins behind a block."""
    return bool(tables.wire.end_N[block] == block + 1 and block + 1 < tables.wire.bytes_N.size)
