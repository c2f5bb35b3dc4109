"""A relaxation of plans that is solved block by block: kernels.

What is relaxed, and why no plan is better than the bound:

- A split entered at share S(a) with batch b runs a block, when r is the last active ramp, at the batch b*S(r)/S(a): its
  seconds depend on (block, device, b, a, r) alone. So plans are walks block by block over states (b, a, r) per device,
  and a walk's work per input W_c (seconds on device c), its hops' work H_c and its latency L are sums over its steps.
- A plan of rate R has at least R*W_c and at least R*H_c replicas on device c: replicas need not be whole, and of all
  stages on c only the sums of work and of hops are held against the count.
- L counts every split's seconds, every hop, and the wait of a stage's first split at a rate that no plan exceeds. A
  further split of a stage with m replicas waits m*b/(R*s); since R <= m/w for the stage's work w, and w holds the
  split's own s*T/b, it waits at least T: it is counted twice, and the rest of its wait left out.
- Several walks may share the load in any proportion. With one walk this is a plan's own account, so the optimum over
  mixtures is at least as good as any plan; it is a linear program, and any prices bound it: by the cheapest walk.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from optimizer.compiled import compiled
from optimizer.problem import PlanProblem
from optimizer.split_times import FloatArray, IntArray, locate

# What a walk does after a block: with RAMP added, the ramp there is active.
GO_ON, CUT, HOP, RAMP = 0, 1, 2, 3


class Walk(NamedTuple):
    """The account of one relaxed plan."""

    work_C: FloatArray
    """W: device seconds per input."""
    hop_work_C: FloatArray
    latency_s: float
    """Without first splits' waits."""
    fill: float
    """What these waits are at one input per second."""
    stages_C: FloatArray


class Prices(NamedTuple):
    """Of device seconds, hops, latency and dollars; and what is paid for a stage on a device that plans must use."""

    work_C: FloatArray
    hop_C: FloatArray
    latency: float
    usd: float
    stage_C: FloatArray

    def between(self, other: Prices) -> Prices:
        return Prices(
            (self.work_C + other.work_C) / 2,
            (self.hop_C + other.hop_C) / 2,
            (self.latency + other.latency) / 2,
            (self.usd + other.usd) / 2,
            (self.stage_C + other.stage_C) / 2,
        )


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
    bytes_N: FloatArray
    bandwidth: float
    delay_s: float


class Choices(NamedTuple):
    """What the cheapest walk does, filled by the kernel."""

    after_block: npt.NDArray[np.int8]
    """By (block, whether a further split, device, size, rank at entry, rank)."""
    further_size_KQC: IntArray
    first_size_KQ: IntArray
    first_device_KQ: IntArray


def tables_of(problem: PlanProblem, names: tuple[str, ...], batch: int | None) -> Tables:
    """The named devices' figures; with `batch`, splits of that size only."""
    share_Q = np.array([1.0, *(problem.share_after(ramp) for ramp in problem.ramps)])
    after_Q = np.array([0, *(ramp + 1 for ramp in problem.ramps)], dtype=np.int64)
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
        np.array(problem.bytes_per_sample_N), problem.link.bandwidth_bytes_per_s, problem.link.delay_s,
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
                    batch = sizes_G[size] * share_Q[rank] / share_Q[entry]
                    cell, part = locate(sizes_G, batch)
                    cell_CGQQ[device, size, entry, rank] = cell
                    part_CGQQ[device, size, entry, rank] = part
    return cell_CGQQ, part_CGQQ


@compiled
def _between(seconds_G: FloatArray, cell: int, part: float) -> float:
    low: float = seconds_G[cell]
    return low + part * (seconds_G[cell + 1] - low) if part > 0.0 else low


@compiled
def cheapest_walk(
    rule: int, may_split: bool, may_hop: bool, tables: Tables,
    price_C: FloatArray, price_hop_C: FloatArray, price_latency: float, paid_C: FloatArray, fill_rate: float,
    choices: Choices,
) -> float:  # fmt: skip
    """The price of the cheapest walk, backwards from the last block; inf: none is allowed."""
    num_devices, num_blocks, num_sizes = tables.block_s_CNG.shape
    num_ranks = tables.share_Q.size
    shape = (2, num_devices, num_sizes, num_ranks, num_ranks)
    here, after = np.full(shape, np.inf), np.full(shape, np.inf)
    further_KQC = np.full((num_blocks + 1, num_ranks, num_devices), np.inf)
    first_KQ = np.full((num_blocks + 1, num_ranks), np.inf)
    ways = np.empty(2 * RAMP)
    for block in range(num_blocks - 1, -1, -1):
        ramp, top = -1, 0
        for rank in range(1, num_ranks):
            if tables.after_Q[rank] == block + 1:
                ramp = rank
            if tables.after_Q[rank] <= block:
                top = rank
        for device in range(num_devices):
            for size in range(tables.num_sizes_C[device]):
                batch = tables.sizes_CG[device, size]
                if batch <= 0:
                    continue
                for entry in range(top + 1):
                    if tables.share_Q[entry] <= 0:
                        continue
                    per_input = tables.share_Q[entry] / batch
                    for rank in range(entry, top + 1):
                        cell = tables.cell_CGQQ[device, size, entry, rank]
                        part = tables.part_CGQQ[device, size, entry, rank]
                        block_s = _between(tables.block_s_CNG[device, block], cell, part)
                        ramp_s = _between(tables.ramp_s_CEG[device, ramp - 1], cell, part) if ramp >= 0 else 0.0
                        for further in range(2):
                            price = price_C[device] * per_input + price_latency * (1 + further)
                            if block == num_blocks - 1:
                                here[further, device, size, entry, rank] = block_s * price
                                continue
                            ways[:] = np.inf
                            for on in range(2):
                                if (on == 1 and (ramp < 0 or rule == 2)) or (on == 0 and ramp >= 0 and rule == 1):
                                    continue
                                passed = ramp if on else rank
                                spent = ramp_s * price if on else 0.0
                                if not (on and rule == 3):
                                    ways[RAMP * on] = spent + after[further, device, size, entry, passed]
                                if tables.share_Q[passed] <= 0:
                                    continue
                                if may_split:
                                    ways[RAMP * on + CUT] = spent + further_KQC[block + 1, passed, device]
                                if may_hop:
                                    leaving = batch * tables.share_Q[passed] / tables.share_Q[entry]
                                    hop_s = tables.delay_s + tables.bytes_N[block] * leaving / tables.bandwidth
                                    hop = hop_s * (price_latency + price_hop_C[device] * per_input)
                                    ways[RAMP * on + HOP] = spent + hop + first_KQ[block + 1, passed]
                            best = 0
                            for way in range(1, 2 * RAMP):
                                if ways[way] < ways[best]:
                                    best = way
                            here[further, device, size, entry, rank] = ways[best] + block_s * price
                            choices.after_block[block, further, device, size, entry, rank] = best
        for rank in range(top + 1):
            if tables.share_Q[rank] <= 0:
                continue
            for device in range(num_devices):
                for size in range(tables.num_sizes_C[device]):
                    batch = tables.sizes_CG[device, size]
                    if batch <= 0:
                        continue
                    further_price = here[1, device, size, rank, rank]
                    if further_price < further_KQC[block, rank, device]:
                        further_KQC[block, rank, device] = further_price
                        choices.further_size_KQC[block, rank, device] = size
                    wait_s = batch / (fill_rate * tables.share_Q[rank])
                    first_price = here[0, device, size, rank, rank] + price_latency * wait_s - paid_C[device]
                    if first_price < first_KQ[block, rank]:
                        first_KQ[block, rank] = first_price
                        choices.first_size_KQ[block, rank] = size
                        choices.first_device_KQ[block, rank] = device
        here, after = after, here
    return float(first_KQ[0, 0])


@compiled
def account_of(tables: Tables, choices: Choices) -> tuple[FloatArray, FloatArray, float, float, FloatArray, IntArray]:
    """The walk's work and hop work per device, latency without fills, fills at rate 1, stages, and ramps on."""
    num_devices, num_blocks = tables.block_s_CNG.shape[:2]
    work_C, hop_work_C = np.zeros(num_devices), np.zeros(num_devices)
    further, entry, rank = 0, 0, 0
    device, size = choices.first_device_KQ[0, 0], choices.first_size_KQ[0, 0]
    latency_s, fill = 0.0, tables.sizes_CG[device, size]
    stages_C = np.zeros(num_devices)
    stages_C[device] = 1.0
    on_N = np.zeros(num_blocks, dtype=np.int64)
    for block in range(num_blocks):
        batch = tables.sizes_CG[device, size]
        per_input = tables.share_Q[entry] / batch
        cell, part = tables.cell_CGQQ[device, size, entry, rank], tables.part_CGQQ[device, size, entry, rank]
        seconds = _between(tables.block_s_CNG[device, block], cell, part)
        way = 0 if block == num_blocks - 1 else choices.after_block[block, further, device, size, entry, rank]
        if way >= RAMP:
            on_N[block] = 1
            while tables.after_Q[rank] != block + 1:
                rank += 1
            seconds += _between(tables.ramp_s_CEG[device, rank - 1], cell, part)
        work_C[device] += per_input * seconds
        latency_s += seconds * (1 + further)
        if way % RAMP == CUT:
            further, entry, size = 1, rank, choices.further_size_KQC[block + 1, rank, device]
        elif way % RAMP == HOP:
            leaving = batch * tables.share_Q[rank] / tables.share_Q[entry]
            hop_s = tables.delay_s + tables.bytes_N[block] * leaving / tables.bandwidth
            hop_work_C[device] += per_input * hop_s
            device, size = choices.first_device_KQ[block + 1, rank], choices.first_size_KQ[block + 1, rank]
            latency_s += hop_s
            fill += tables.sizes_CG[device, size] / tables.share_Q[rank]
            further, entry = 0, rank
            stages_C[device] += 1.0
    return work_C, hop_work_C, latency_s, fill, stages_C, on_N


Oracle = Callable[[Prices, float], tuple[float, Walk]]
"""From prices, and the rate at which batches fill, to the price of the cheapest walk, and that walk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Walks:
    """The relaxation of the module's head, as something that prices can be asked of."""

    tables: Tables
    rule: int
    may_split: bool
    may_hop: bool
    choices: Choices
    """Of the last question."""

    def cheapest(self, prices: Prices, fill_rate: float) -> tuple[float, Walk]:
        least = cheapest_walk(
            self.rule, self.may_split, self.may_hop, self.tables, prices.work_C, prices.hop_C, prices.latency,
            prices.stage_C, fill_rate, self.choices,
        )  # fmt: skip
        if math.isinf(least):
            nothing_C = np.zeros(len(self.tables.num_sizes_C))
            return math.inf, Walk(nothing_C, nothing_C, math.inf, 0.0, nothing_C)
        return least, Walk(*account_of(self.tables, self.choices)[:5])


def walks_of(tables: Tables, rule: int, *, may_split: bool, may_hop: bool) -> Walks:
    """With room for its choices."""
    num_devices, num_blocks, num_sizes = tables.block_s_CNG.shape
    num_ranks = len(tables.share_Q)
    choices = Choices(
        np.zeros((num_blocks, 2, num_devices, num_sizes, num_ranks, num_ranks), dtype=np.int8),
        np.zeros((num_blocks + 1, num_ranks, num_devices), dtype=np.int64),
        np.zeros((num_blocks + 1, num_ranks), dtype=np.int64),
        np.zeros((num_blocks + 1, num_ranks), dtype=np.int64),
    )
    return Walks(tables=tables, rule=rule, may_split=may_split, may_hop=may_hop, choices=choices)


def ramps_of(problem: PlanProblem, walks: Walks) -> tuple[int, ...]:
    """The ramps that the last walk activates."""
    on_N = account_of(walks.tables, walks.choices)[5]
    return tuple(ramp for ramp in problem.ramps if on_N[ramp])
