"""A planning problem as arrays, with which all searches compute, and the seconds of blocks, ramps and hops.

Legend: R *runs*, that is pairs of device and batch size; C devices; E *entries*, the rank at which a split is entered
(a single entry if inputs stay, because every batch is then full); Q ranks: *rank* 0 stands for "no ramp yet", and rank
r + 1 for the problem's r-th ramp; G measured batch sizes; N blocks; K the two times of a split, INSIDE and MEAN, or the
boundaries between blocks in prefix sums.

`optimizer.cost.evaluate` scores the final plans with NumPy's `interp`. It interpolates equally but rounds differently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from earlyexit.network.boundary import AfterAnswer
from optimizer.generation.steps import generation_of, step_table
from optimizer.problems.problem import PlanProblem, device_names
from optimizer.search.compiled import compiled
from optimizer.search.space import RampRule, Space
from profiles.scores import BoolArray, FloatArray, IntArray

INSIDE, MEAN = 0, 1
"""The two times of a split (K): that of an input that runs through it, and the mean time of batches."""
CHOOSE, ALL, NONE, SPLIT_ENDS = 0, 1, 2, 3
"""Ramp rules: any set, all ramps, no ramps, or only ramps at the ends of splits (E3 section 5.8.6)."""
RULES: dict[RampRule, int] = {"choose": CHOOSE, "all": ALL, "none": NONE, "split-ends": SPLIT_ENDS}
ROUNDING = 1e-9
"""Relative tolerance of batch sizes, far below the distance between measured sizes."""


class Tables(NamedTuple):
    """The constant data of a search. A named tuple, because numba kernels accept it as one argument.

    All numbers are converted to float, because numba would otherwise compile kernels once more for integers.
    """

    device_R: IntArray
    batch_R: FloatArray
    block_s_CNG: FloatArray
    sums_CGK: FloatArray
    """Prefix sums of block seconds: all blocks before each boundary."""
    ramp_s_CQG: FloatArray
    """By rank; rank 0 stands for no ramp."""
    cell_KREQ: IntArray
    """Index of the measured size below a batch, by run, entry and current rank: of the mean batch (K is INSIDE), and of
    the batches that do not skip the block (K is MEAN)."""
    part_KREQ: FloatArray
    """Position of the batch in the interval above that size, from 0 to 1."""
    rows_cell_KREQ: IntArray
    """The same for the rows that blocks compute. They differ from the batch only in generation, where tokens that
    skipped the block are filled in (`Generation.tokens_per_step`)."""
    rows_part_KREQ: FloatArray
    weight_KREQ: FloatArray
    """By which the seconds are multiplied. For MEAN, it is the probability that any input of a batch remains: otherwise
    the batch skips the block. For INSIDE it is 1, except in generation, where latencies are means as well."""
    leaving_REQ: FloatArray
    """Inputs of a batch that are still computed, and that a hop carries."""
    enters_E: FloatArray
    """Share of all inputs that is computed at an entry. If inputs stay, there is a single entry."""
    fits_RE: BoolArray
    """Whether the rows of a batch were measured."""
    wait_RE: FloatArray
    """Inputs of the service that arrive until a batch is full. Divided by the rate, it is the wait."""
    unanswered_Q: FloatArray
    """Share of all inputs without an answer. Half of it is the share of a split's wait in the mean answer time."""
    rank_N: IntArray
    """Rank of the ramp after each block; 0 if it has none."""
    after_Q: IntArray
    """The first block after each ramp."""
    beside_CK: FloatArray
    """Prefix sums of the prompts' seconds per generation step; 0 if inputs are not steps."""
    head_s_KREQ: FloatArray
    """Mean seconds of the vocabulary head in a split that ends before the model's end (K is 0) or with it (K is 1)."""
    begin_s: float
    """Additional seconds of a batch that begins after the first block."""
    bytes_N: FloatArray
    """Bytes per input that a hop carries after each block."""
    bandwidth_C: FloatArray
    """Bytes per second of a replica."""
    delay_s: float
    crossing_s: float
    end_N: IntArray
    """End of each block's network, which no split may pass."""
    crosses_N: BoolArray
    """Whether another network begins after a block. Inputs then go through the ingress, which forms batches."""
    rate_per_s: float
    """The required rate; infinite if the rate is maximized."""
    count_C: IntArray
    ramp_budget: float
    """0 if the problem has no ramp budget."""
    rule: int
    may_split: bool
    may_hop: bool


def tables_of(problem: PlanProblem, space: Space, after_answer: AfterAnswer = "stop") -> Tables:
    """Returns the problem as arrays, with the runs of a space."""
    names, num_blocks, ends = device_names(problem), problem.num_blocks, problem.networks
    latency, stops = [problem.latency[name] for name in names], after_answer == "stop"
    most_batch = math.inf if problem.generation is None else problem.generation.batch_limit
    sizes = [[size for size in table.batches if space.batch in (None, size)] for table in latency]
    runs = [(device, size) for device, own in enumerate(sizes) for size in own if size <= most_batch]
    device_R, batch_R = np.array(runs, dtype=np.int64).reshape(-1, 2).T.copy()
    size_R11 = batch_R[:, None, None].astype(float)
    share_N = problem.with_probes(problem.survival_N)
    share_Q = np.array([1.0, *(share_N[ramp + 1] for ramp in problem.ramps)])
    enters_E = share_Q.copy() if stops else np.ones(1)
    inside_EQ = np.ones((len(enters_E), len(share_Q)))
    if stops:  # a split that no input reaches is counted as full
        np.divide(share_Q, share_Q[:, None], out=inside_EQ, where=share_Q[:, None] > 0)
    leaving_REQ, weight_REQ = size_R11 * inside_EQ, _remaining(inside_EQ, size_R11 / problem.tokens_per_input)
    weight_KREQ = np.stack([np.ones_like(weight_REQ), weight_REQ])
    cell_KREQ, part_KREQ = _positions([latency[device].batches for device in device_R], leaving_REQ, weight_KREQ)
    wait_RE = np.full((len(runs), len(enters_E)), math.inf)  # no split begins where no input enters
    waiting_R = np.where(batch_R > problem.tokens_per_input, batch_R, 0.0)  # a batch of one waits for no others
    np.divide(waiting_R[:, None], enters_E, out=wait_RE, where=enters_E > 0)
    rank_N = np.zeros(num_blocks, dtype=np.int64)
    rank_N[list(problem.ramps)] = np.arange(1, len(share_Q))
    tables = Tables(
        device_R=device_R,
        batch_R=batch_R.astype(float),
        **_seconds([table.block_s_NB for table in latency], [table.ramp_s_EB for table in latency]),
        cell_KREQ=cell_KREQ,
        part_KREQ=part_KREQ,
        rows_cell_KREQ=cell_KREQ,
        rows_part_KREQ=part_KREQ,
        weight_KREQ=weight_KREQ,
        leaving_REQ=leaving_REQ,
        enters_E=enters_E,
        fits_RE=np.ones(wait_RE.shape, dtype=np.bool_),
        wait_RE=wait_RE,
        unanswered_Q=share_Q,
        rank_N=rank_N,
        after_Q=np.array([0, *(ramp + 1 for ramp in problem.ramps)], dtype=np.int64),
        beside_CK=np.zeros((len(names), num_blocks + 1)),
        head_s_KREQ=np.zeros(weight_KREQ.shape),
        begin_s=0.0,
        bytes_N=np.array(problem.bytes_per_sample_N, dtype=float),
        bandwidth_C=np.array([problem.bandwidth_of(name) for name in names], dtype=float),
        delay_s=float(problem.link.delay_s),
        crossing_s=float(problem.crossing_s),
        end_N=np.repeat(ends or (num_blocks,), np.diff(ends or (num_blocks,), prepend=0)),
        crosses_N=np.isin(np.arange(1, num_blocks + 1), ends[:-1]),
        rate_per_s=float(problem.required_per_s or math.inf),
        count_C=problem.count_C.astype(np.int64),
        ramp_budget=float(problem.ramp_budget or 0.0),
        rule=RULES[space.ramps],
        may_split=space.splits_per_stage,
        may_hop=space.several_stages,
    )
    return tables if problem.generation is None else _of_steps(problem, names, tables, inside_EQ)


def _remaining(inside: FloatArray, inputs: float | FloatArray) -> FloatArray:
    """Returns the probability that any input of a batch of `inputs` remains if a share `inside` remains on average."""
    return np.asarray(1 - np.maximum(1 - inside, 0.0) ** inputs)


def _positions(
    sizes: Sequence[Sequence[int]], rows_REQ: FloatArray, weight_KREQ: FloatArray
) -> tuple[IntArray, FloatArray]:
    """Returns the positions of batches between the measured sizes of each run: the cell and the part of it.

    There are `rows_REQ` rows on average, and none in batches that skip the block.
    """
    batch_KREQ = np.divide(rows_REQ, weight_KREQ, out=np.zeros_like(weight_KREQ), where=weight_KREQ > 0)
    cell_KREQ, part_KREQ = np.zeros(batch_KREQ.shape, dtype=np.int64), np.zeros(batch_KREQ.shape)
    for run, own in enumerate(sizes):
        sizes_G, batch_KEQ = np.array(own, dtype=float), batch_KREQ[:, run]
        cell_KEQ = np.maximum(np.searchsorted(sizes_G, batch_KEQ, side="right") - 1, 0)
        above_KEQ = np.maximum(batch_KEQ - sizes_G[cell_KEQ], 0.0)
        cell_KREQ[:, run], part_KREQ[:, run] = cell_KEQ, above_KEQ / np.append(np.diff(sizes_G), math.inf)[cell_KEQ]
    return cell_KREQ, part_KREQ


def _of_steps(problem: PlanProblem, names: Sequence[str], tables: Tables, inside_EQ: FloatArray) -> Tables:
    """Returns the tables of a problem whose inputs are generation steps (`optimizer.generation.steps`)."""
    generation, steps = generation_of(problem), [step_table(problem, name) for name in names]
    own = [steps[device] for device in tables.device_R]
    sizes, weight_KREQ = [table.body.batches for table in own], np.stack([tables.weight_KREQ[MEAN]] * 2)
    rows_Q = np.array([generation.tokens_per_step(share) for share in tables.unanswered_Q.tolist()])
    enters_E1 = np.where(tables.enters_E > 0, tables.enters_E, 1.0)[:, None]
    rows_REQ = tables.batch_R[:, None, None] * rows_Q / enters_E1
    cell_KREQ, part_KREQ = _positions(sizes, tables.leaving_REQ, weight_KREQ)
    rows_cell_KREQ, rows_part_KREQ = _positions(sizes, rows_REQ, weight_KREQ)
    most_R1 = np.array([table.body.batches[-1] for table in own], dtype=float)[:, None]
    # A late head runs once, at the split's end, for all inputs that leave.
    late = generation.late_head
    ends_KEQ = np.stack([1 - inside_EQ, np.ones_like(inside_EQ)] if late else [np.zeros_like(inside_EQ), inside_EQ])
    head_s_KREQ = np.zeros(weight_KREQ.shape)
    for run, (table, size) in enumerate(zip(own, tables.batch_R.tolist(), strict=True)):
        weight_KEQ = _remaining(ends_KEQ, size)
        rows_KEQ = np.divide(size * ends_KEQ, weight_KEQ, out=np.zeros_like(ends_KEQ), where=weight_KEQ > 0)
        head_s_KREQ[:, run] = weight_KEQ * np.interp(rows_KEQ, table.body.batches, table.head_s_B)
    prompt_s_CN = np.array([table.prompt_s_N / generation.num_steps for table in steps])
    return tables._replace(
        **_seconds([table.body.block_s_NB for table in steps], [table.ramp_s_EB for table in steps]),
        cell_KREQ=cell_KREQ,
        part_KREQ=part_KREQ,
        rows_cell_KREQ=rows_cell_KREQ,
        rows_part_KREQ=rows_part_KREQ,
        weight_KREQ=weight_KREQ,
        fits_RE=rows_REQ.diagonal(axis1=1, axis2=2) <= most_R1 * (1 + ROUNDING),
        beside_CK=np.pad(np.cumsum(prompt_s_CN, axis=1), ((0, 0), (1, 0))),
        head_s_KREQ=head_s_KREQ,
        begin_s=float(generation.regroup_s),
    )


def _seconds(blocks: Sequence[FloatArray], ramps: Sequence[FloatArray]) -> dict[str, Any]:
    """Returns the fields with the seconds of each device's blocks (NB) and ramps (EB)."""
    block_s_CNG = _padded(blocks)
    # Prefix sums of swapped axes have another memory layout, and numba would compile the kernels once more for it.
    sums_CGK = np.ascontiguousarray(np.pad(np.cumsum(block_s_CNG.swapaxes(1, 2), axis=2), ((0, 0), (0, 0), (1, 0))))
    ramp_s_CQG = _padded([np.pad(ramp_s_EB, ((1, 0), (0, 0))) for ramp_s_EB in ramps])
    return {"block_s_CNG": block_s_CNG, "sums_CGK": sums_CGK, "ramp_s_CQG": ramp_s_CQG}


def _padded(tables: Sequence[FloatArray]) -> FloatArray:
    """Stacks tables with different numbers of batch sizes, padded with zeros, in C order whatever the tables have."""
    most = max(table.shape[1] for table in tables)
    return np.ascontiguousarray(np.stack([np.pad(table, ((0, 0), (0, most - table.shape[1]))) for table in tables]))


@compiled
def seconds_at(seconds_G: FloatArray, cell: int, part: float) -> float:
    """Returns the seconds of one block or ramp at a batch size by linear interpolation; see `Tables.cell_KREQ`."""
    low: float = seconds_G[cell]
    return low + part * (seconds_G[cell + 1] - low) if part > 0.0 else low


@compiled
def blocks_s(sums_GK: FloatArray, cell: int, part: float, first: int, end: int) -> float:
    """Returns the seconds of blocks first..end-1, from prefix sums over the blocks before each boundary (K)."""
    low: float = sums_GK[cell, end] - sums_GK[cell, first]
    if part == 0.0:
        return low
    high: float = sums_GK[cell + 1, end] - sums_GK[cell + 1, first]
    return low + part * (high - low)


@compiled
def hop_s(delay_s: float, num_bytes: float, leaving: float, bandwidth: float) -> float:
    """Returns the transfer time (T_x in E3) of `leaving` inputs of `num_bytes` each."""
    return delay_s + num_bytes * leaving / bandwidth
