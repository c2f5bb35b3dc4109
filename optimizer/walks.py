"""A relaxation of plans that is solved block by block: kernels.

What is relaxed, and why no plan is better than the bound:

- A split entered at share S(a) with batch b runs a block, when r is the last active ramp, at the batch b*S(r)/S(a): its
  seconds depend on (block, device, b, a, r) alone. So plans are walks block by block over states (b, a, r) per device,
  and a walk's work per input W_c (seconds on device c), its hops' work H_c and its latency L are sums over its steps,
  and so are its mean answer time and the seconds of its ramps.
- A plan of rate R has at least R*W_c and at least R*H_c replicas on device c: replicas need not be whole, and of all
  stages on c only the sums of work and of hops are held against the count.
- L counts every split's seconds, every hop, and the wait of a stage's first split at a rate that no plan exceeds. A
  further split of a stage with m replicas waits m*b/(R*s). It counts as one of two things that are no more:
  its own seconds T once more, because R <= m/w for the stage's work w, and w holds s*T/b; or b/(R*s), because m >= 1.
  The first is closer where there are many replicas, and needs every state twice.
- Behind a crossing batches are filled at the ingress, in the middle of a stage as well: its wait is that of a first
  split, and the crossing's hop costs latency, work of hops only where a stage ends.
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
from optimizer.split_times import ALL, NONE, SPLIT_ENDS
from optimizer.step import FloatArray, IntArray, seconds_at
from optimizer.tables import (
    RunTables,
    after_split_s,
    after_stage_s,
    block_seconds,
    crosses_after,
    entry_of,
    hop_seconds,
    ramp_seconds,
    wait_inputs,
)

# What a walk does after a block: with RAMP added, the ramp there is active.
GO_ON, CUT, HOP, RAMP = 0, 1, 2, 3


class Walk(NamedTuple):
    """The account of one relaxed plan."""

    work_C: FloatArray
    """W: device seconds per input."""
    hop_work_C: FloatArray
    latency_s: float
    """Without waits for batches, but for those that count as seconds."""
    fill: float
    """What these waits are at one input per second."""
    stages_C: FloatArray
    mean_s: float = 0.0
    """Of the mean answer time, without waits."""
    mean_fill: float = 0.0
    ramps_s: float = 0.0
    """Beyond their budget."""


def no_walk(num_devices: int) -> Walk:
    """The account of no walk."""
    nothing_C = np.zeros(num_devices)
    return Walk(nothing_C, nothing_C, math.inf, 0.0, nothing_C)


class Prices(NamedTuple):
    """Of what walks use."""

    work_C: FloatArray
    """Of a device second per input."""
    hop_C: FloatArray
    latency: float
    usd: float
    stage_C: FloatArray
    """What is paid for a stage on a device that plans must use."""
    mean: float = 0.0
    """Of a second of the mean answer time."""
    ramps: float = 0.0
    """Of a second that ramps take beyond what their budget gives for the blocks."""

    def between(self, other: Prices) -> Prices:
        """Half way to others, of rates and costs."""
        return Prices(
            (self.work_C + other.work_C) / 2,
            (self.hop_C + other.hop_C) / 2,
            (self.latency + other.latency) / 2,
            (self.usd + other.usd) / 2,
            (self.stage_C + other.stage_C) / 2,
        )


class CostToGo(NamedTuple):
    """Least prices of the costs on, and what they do; filled by the kernel. inf: none is allowed."""

    inside_NFREQ: FloatArray
    """From a block, inside a split (F: 1 where its seconds count twice), after a rank; N may be only the last few."""
    action_NFREQ: npt.NDArray[np.int8]
    """What follows the block there."""
    further_KCQ: FloatArray
    """From a boundary and rank, by a further split of a device's stage."""
    further_run_KCQ: IntArray
    first_KQ: FloatArray
    """By a new stage."""
    first_run_KQ: IntArray


def empty_cost_to_go(tables: RunTables, kinds: int, blocks: int) -> CostToGo:
    """Room for 1 or 2 kinds of splits, and the prices of all blocks, or of as many of the first as are kept."""
    num_blocks, num_devices, num_ranks = len(tables.rank_N), len(tables.count_C), len(tables.after_Q)
    shape = kinds, *tables.cell_REQ.shape
    return CostToGo(
        np.full((blocks, *shape), np.inf),
        np.zeros((num_blocks, *shape), dtype=np.int8),
        np.empty((num_blocks + 1, num_devices, num_ranks)),
        np.zeros((num_blocks + 1, num_devices, num_ranks), dtype=np.int64),
        np.empty((num_blocks + 1, num_ranks)),
        np.zeros((num_blocks + 1, num_ranks), dtype=np.int64),
    )


@compiled
def fill_cost_to_go(tables: RunTables, prices: Prices, fill_rate: float, costs: CostToGo) -> float:
    """Fill the costs, backwards from the last block; returns the price of the cheapest walk."""
    costs.further_KCQ[:], costs.first_KQ[:] = np.inf, np.inf
    hop_Q, cut_Q = np.empty(tables.after_Q.size), np.zeros(tables.after_Q.size)
    for block in range(tables.rank_N.size - 1, -1, -1):
        top = int(np.searchsorted(tables.after_Q, block, side="right")) - 1
        for run in range(tables.device_R.size):
            _price_inside(tables, prices, block, top, run, costs, hop_Q, cut_Q)
        _price_starts(tables, prices, fill_rate, block, top, costs)
    return float(costs.first_KQ[0, 0])


@compiled
def _price_inside(
    tables: RunTables, prices: Prices, block: int, top: int, run: int, costs: CostToGo, hop_Q: FloatArray,
    cut_Q: FloatArray,
) -> None:  # fmt: skip
    """The least prices from before a block to the end, by rank at entry and rank up to `top`.

    A second costs by the inputs that wait for an answer in it, all its inputs, and the device's part.
    """
    device, ramp, num_kept = tables.device_R[run], tables.rank_N[block], costs.inside_NFREQ.shape[0]
    ends, crosses = block + 1 == tables.rank_N.size, crosses_after(tables, block)
    may_stay = not crosses and tables.rule != SPLIT_ENDS
    may_be_off, may_be_on = ramp == 0 or tables.rule != ALL, ramp > 0 and tables.rule != NONE
    block_s_G, ramp_s_G = tables.block_s_CNG[device, block], tables.ramp_s_CQG[device, ramp]
    further_Q, first_Q = costs.further_KCQ[block + 1, device], costs.first_KQ[block + 1]
    for entry in range(tables.enters_E.size):
        if tables.enters_E[entry] == 0.0 or tables.after_Q[entry] > block:
            continue
        per_input = tables.enters_E[entry] / tables.batch_R[run]
        work_price, hop_price = prices.work_C[device] * per_input, prices.hop_C[device] * per_input
        cell_Q, part_Q = tables.cell_REQ[run, entry], tables.part_REQ[run, entry]
        for rank in range(entry, max(ramp, top) + 1):
            second = prices.latency + prices.mean * tables.unanswered_Q[rank]
            after_s = hop_seconds(tables, block, run, entry, rank)
            hop_Q[rank], cut_Q[rank] = after_s * (second + hop_price), 0.0
            if crosses:
                hop_Q[rank] += second * tables.link.crossing_s
                cut_Q[rank] = second * (after_s + tables.link.crossing_s)
        here_FQ = costs.inside_NFREQ[block % num_kept, :, run, entry]
        after_FQ = costs.inside_NFREQ[(block + 1) % num_kept, :, run, entry]
        action_FQ = costs.action_NFREQ[block, :, run, entry]
        for rank in range(entry, top + 1):
            block_s = seconds_at(block_s_G, cell_Q[rank], part_Q[rank])
            ramp_s = seconds_at(ramp_s_G, cell_Q[rank], part_Q[rank]) if may_be_on else 0.0
            same = work_price + prices.mean * tables.unanswered_Q[rank]
            for kind in range(here_FQ.shape[0]):
                second = same + prices.latency * (1 + kind)
                block_price = block_s * (second - prices.ramps * tables.ramp_budget)
                if ends:
                    here_FQ[kind, rank] = block_price
                    continue
                least, best = np.inf, GO_ON
                if may_be_off:
                    stay = np.inf if crosses else after_FQ[kind, rank]
                    cut, hop = cut_Q[rank] + further_Q[rank], hop_Q[rank] + first_Q[rank]
                    least, best = _cheaper(least, best, 0, stay, cut, hop)
                if may_be_on:
                    ramp_price = ramp_s * (second + prices.ramps)
                    stay = ramp_price + after_FQ[kind, ramp] if may_stay else np.inf
                    cut, hop = ramp_price + cut_Q[ramp] + further_Q[ramp], ramp_price + hop_Q[ramp] + first_Q[ramp]
                    least, best = _cheaper(least, best, RAMP, stay, cut, hop)
                here_FQ[kind, rank] = block_price + least
                action_FQ[kind, rank] = best


@compiled
def _cheaper(least: float, best: int, ramp: int, stay: float, cut: float, hop: float) -> tuple[float, int]:
    """The cheapest way so far, and of these three."""
    if stay < least:
        least, best = stay, ramp + GO_ON
    if cut < least:
        least, best = cut, ramp + CUT
    if hop < least:
        least, best = hop, ramp + HOP
    return least, best


@compiled
def _price_starts(tables: RunTables, prices: Prices, fill_rate: float, block: int, top: int, costs: CostToGo) -> None:
    """The least prices of a split that starts with a block, further in its stage or first, with its batch size."""
    here_FREQ = costs.inside_NFREQ[block % costs.inside_NFREQ.shape[0]]
    apart = here_FREQ.shape[0] == 2 and not (block > 0 and crosses_after(tables, block - 1))
    for rank in range(top + 1):
        entry = entry_of(tables, rank)
        if tables.enters_E[entry] == 0.0:
            continue
        price_input = (prices.mean * tables.unanswered_Q[rank] / 2 + prices.latency) / fill_rate
        for run in range(tables.device_R.size):
            device = tables.device_R[run]
            first = here_FREQ[0, run, entry, rank] + price_input * wait_inputs(tables, run, entry)
            further = here_FREQ[1, run, entry, rank] if apart else first
            if tables.may_split and further < costs.further_KCQ[block, device, rank]:
                costs.further_KCQ[block, device, rank] = further
                costs.further_run_KCQ[block, device, rank] = run
            first -= prices.stage_C[device]
            if (tables.may_hop or block == 0) and first < costs.first_KQ[block, rank]:
                costs.first_KQ[block, rank] = first
                costs.first_run_KQ[block, rank] = run


@compiled
def trace_walk(tables: RunTables, costs: CostToGo) -> tuple[Walk, IntArray]:
    """The cheapest walk's account, and per block whether its ramp is active."""
    num_blocks, num_devices = tables.rank_N.size, tables.count_C.size
    work_C, hop_work_C, stages_C = np.zeros(num_devices), np.zeros(num_devices), np.zeros(num_devices)
    on_N = np.zeros(num_blocks, dtype=np.int64)
    kind, entry, rank, run = 0, 0, 0, costs.first_run_KQ[0, 0]
    stages_C[tables.device_R[run]] = 1.0
    latency_s, fill, mean_s, ramps_s = 0.0, wait_inputs(tables, run, entry), 0.0, 0.0
    mean_fill = fill / 2
    for block in range(num_blocks):
        device, per_input = tables.device_R[run], tables.enters_E[entry] / tables.batch_R[run]
        how = 0 if block == num_blocks - 1 else costs.action_NFREQ[block, kind, run, entry, rank]
        block_s, ramp_s = block_seconds(tables, block, run, entry, rank), 0.0
        if how >= RAMP:
            on_N[block], ramp_s = 1, ramp_seconds(tables, block, run, entry, rank)
        work_C[device] += per_input * (block_s + ramp_s)
        latency_s += (block_s + ramp_s) * (1 + kind)
        mean_s += tables.unanswered_Q[rank] * (block_s + ramp_s)
        ramps_s += ramp_s - tables.ramp_budget * block_s
        rank = tables.rank_N[block] if how >= RAMP else rank
        if how % RAMP == GO_ON:
            continue
        if how % RAMP == HOP:
            after_s = after_stage_s(tables, block, run, entry, rank)
            hop_work_C[device] += per_input * hop_seconds(tables, block, run, entry, rank)
            run = costs.first_run_KQ[block + 1, rank]
            stages_C[tables.device_R[run]] += 1.0
        else:
            after_s = after_split_s(tables, block, run, entry, rank)
            run = costs.further_run_KCQ[block + 1, device, rank]
        latency_s += after_s
        mean_s += tables.unanswered_Q[rank] * after_s
        kind = costs.action_NFREQ.shape[1] - 1 if how % RAMP == CUT and not crosses_after(tables, block) else 0
        entry = entry_of(tables, rank)
        if kind == 0:
            fill += wait_inputs(tables, run, entry)
            mean_fill += tables.unanswered_Q[rank] * wait_inputs(tables, run, entry) / 2
    return Walk(work_C, hop_work_C, latency_s, fill, stages_C, mean_s, mean_fill, ramps_s), on_N


Oracle = Callable[[Prices, float], tuple[float, Walk]]
"""From prices, and the rate at which batches fill, to the price of the cheapest walk, and that walk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkRelaxation:
    """The relaxation of the module's head, as something that prices can be asked of."""

    tables: RunTables
    costs: CostToGo
    """Of the last question."""

    @classmethod
    def of(cls, tables: RunTables) -> WalkRelaxation:
        """Further splits wait as long as they take; with room for the prices of two blocks."""
        return cls(tables=tables, costs=empty_cost_to_go(tables, kinds=2, blocks=2))

    def cheapest(self, prices: Prices, fill_rate: float) -> tuple[float, Walk]:
        least = fill_cost_to_go(self.tables, prices, float(fill_rate), self.costs)  # no second version for integers
        if math.isinf(least):
            return math.inf, no_walk(len(self.tables.count_C))
        return least, trace_walk(self.tables, self.costs)[0]

    def last_ramps(self, problem: PlanProblem) -> tuple[int, ...]:
        """The ramps that the last walk activates."""
        on_N = trace_walk(self.tables, self.costs)[1]
        return tuple(ramp for ramp in problem.ramps if on_N[ramp])
