"""A problem as arrays, for kernels that traverse plans block by block.

Legend: R *runs*, that is pairs of device and batch size; C devices; E *entries*, the rank at which a split is entered
(a single entry if inputs stay, because every batch is then full); Q ranks, as in `optimizer.search.step`; G measured
sizes; N blocks; K boundaries between blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from earlyexit.network.boundary import AfterAnswer
from optimizer.problems.problem import PlanProblem, device_names
from optimizer.search.compiled import compiled
from optimizer.search.moves import RULES, LinkArrays, link_arrays
from optimizer.search.space import Space
from optimizer.search.split_times import ranks_of
from optimizer.search.step import FloatArray, IntArray, hop_s, seconds_at


class RunTables(NamedTuple):
    """The constant data of a search. A named tuple, because numba kernels accept it as one argument."""

    device_R: IntArray
    batch_R: FloatArray
    block_s_CNG: FloatArray
    ramp_s_CQG: FloatArray
    """By rank; rank 0 stands for no ramp."""
    cell_REQ: IntArray
    """Position of a batch between measured sizes (`step.locate`), by run, entry and current rank."""
    part_REQ: FloatArray
    inside_EQ: FloatArray
    """Share of a split's batch that is still computed, by entry and current rank."""
    enters_E: FloatArray
    """Share of all inputs that is computed at an entry."""
    unanswered_Q: FloatArray
    mean_wait_Q: FloatArray
    """Part of a split's wait that the mean answer time contains, by the rank at the split."""
    rank_N: IntArray
    """Rank of the ramp after each block; 0 if it has none."""
    after_Q: IntArray
    link: LinkArrays
    rate_per_s: float
    """The required rate; infinite if the rate is maximized."""
    count_C: IntArray
    usd_C: FloatArray
    ramp_budget: float
    """0 if the problem has no ramp budget."""
    rule: int
    stops: bool
    may_split: bool
    may_hop: bool


def tables_of(
    problem: PlanProblem,
    space: Space,
    after_answer: AfterAnswer = "stop",
    batch: int | None = None,
    names: Sequence[str] | None = None,
) -> RunTables:
    """Returns the problem as arrays, for all devices or the named ones. `batch` keeps only runs of that size."""
    names, ranks = device_names(problem) if names is None else names, ranks_of(problem)
    latency = [problem.latency[name] for name in names]
    runs = [(device, size) for device, table in enumerate(latency) for size in table.batches if batch in (None, size)]
    stops, share_Q = after_answer == "stop", ranks.share_Q
    inside_EQ = np.ones((len(share_Q) if stops else 1, len(share_Q)))
    if stops:  # a split that no input reaches is counted as full
        np.divide(share_Q, share_Q[:, None], out=inside_EQ, where=share_Q[:, None] > 0)
    cell_REQ = np.zeros((len(runs), *inside_EQ.shape), dtype=np.int64)
    part_REQ = np.zeros(cell_REQ.shape)
    for run, (device, size) in enumerate(runs):
        sizes_G, batch_EQ = np.array(latency[device].batches, dtype=float), size * inside_EQ
        cell_REQ[run] = np.maximum(np.searchsorted(sizes_G, batch_EQ, side="right") - 1, 0)
        above_EQ = np.maximum(batch_EQ - sizes_G[cell_REQ[run]], 0.0)
        part_REQ[run] = above_EQ / np.append(np.diff(sizes_G), math.inf)[cell_REQ[run]]
    rank_N = np.zeros(problem.num_blocks, dtype=np.int64)
    rank_N[list(problem.ramps)] = np.arange(1, len(share_Q))
    return RunTables(
        device_R=np.array([device for device, _ in runs], dtype=np.int64),
        batch_R=np.array([size for _, size in runs], dtype=float),
        block_s_CNG=_padded([table.block_s_NB for table in latency]),
        ramp_s_CQG=_padded([np.pad(table.ramp_s_EB, ((1, 0), (0, 0))) for table in latency]),
        cell_REQ=cell_REQ,
        part_REQ=part_REQ,
        inside_EQ=inside_EQ,
        enters_E=share_Q.copy() if stops else np.ones(1),
        unanswered_Q=share_Q,
        mean_wait_Q=share_Q / 2,  # as in the cost model
        rank_N=rank_N,
        after_Q=ranks.after_Q,
        link=link_arrays(problem),
        rate_per_s=float(problem.required_per_s or math.inf),
        count_C=np.array([problem.devices[name].count for name in names], dtype=np.int64),
        usd_C=np.array([problem.devices[name].usd_per_hour for name in names], dtype=float),
        ramp_budget=float(problem.ramp_budget or 0.0),
        rule=RULES[space.ramps],
        stops=stops,
        may_split=space.splits_per_stage,
        may_hop=space.several_stages,
    )


def _padded(tables: list[npt.NDArray[np.float64]]) -> FloatArray:
    """Stacks tables with different numbers of batch sizes, padded with zeros."""
    padded = np.zeros((len(tables), len(tables[0]), max(table.shape[1] for table in tables)))
    for device, table in enumerate(tables):
        padded[device, :, : table.shape[1]] = table
    return padded


@compiled
def block_seconds(tables: RunTables, block: int, run: int, entry: int, rank: int) -> float:
    """Returns the seconds of one batch in one block."""
    device, cell = tables.device_R[run], tables.cell_REQ[run, entry, rank]
    seconds: float = seconds_at(tables.block_s_CNG[device, block], cell, tables.part_REQ[run, entry, rank])
    return seconds


@compiled
def ramp_seconds(tables: RunTables, block: int, run: int, entry: int, rank: int) -> float:
    """Returns the seconds of one batch in the ramp after a block."""
    device, cell = tables.device_R[run], tables.cell_REQ[run, entry, rank]
    ramp_s_G = tables.ramp_s_CQG[device, tables.rank_N[block]]
    seconds: float = seconds_at(ramp_s_G, cell, tables.part_REQ[run, entry, rank])
    return seconds


@compiled
def wait_inputs(tables: RunTables, run: int, entry: int) -> float:
    """Returns how many inputs of the service arrive until a batch is full. Divided by the rate, it is the wait."""
    inputs: float = tables.batch_R[run] / tables.enters_E[entry]
    return inputs


@compiled
def hop_seconds(tables: RunTables, block: int, run: int, entry: int, rank: int) -> float:
    """Returns the transfer time (T_x in E3) of the inputs of a batch that remain after a block."""
    leaving = tables.batch_R[run] * tables.inside_EQ[entry, rank]
    seconds: float = hop_s(tables.link.delay_s, tables.link.bytes_N[block], leaving, tables.link.bandwidth)
    return seconds


@compiled
def crosses_after(tables: RunTables, block: int) -> bool:
    """Returns whether another network begins after a block. Inputs then go through the ingress, which forms batches."""
    return bool(tables.link.end_N[block] == block + 1 and block + 1 < tables.rank_N.size)


@compiled
def after_stage_s(tables: RunTables, block: int, run: int, entry: int, rank: int) -> float:
    """Returns the seconds between a stage's last block and the next stage."""
    seconds: float = hop_seconds(tables, block, run, entry, rank)
    return seconds + tables.link.crossing_s if crosses_after(tables, block) else seconds


@compiled
def after_split_s(tables: RunTables, block: int, run: int, entry: int, rank: int) -> float:
    """Returns the seconds between a split's last block and the next split of the same stage."""
    return after_stage_s(tables, block, run, entry, rank) if crosses_after(tables, block) else 0.0


@compiled
def entry_of(tables: RunTables, rank: int) -> int:
    """Returns the entry of a split that begins at a rank."""
    return rank if tables.stops else 0
