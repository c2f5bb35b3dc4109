"""A relaxation of the planning problem that dynamic programming solves block by block: kernels.

Why its value is a bound on all plans:

- A split that is entered at share S(a) with batch b runs a block at the batch b*S(r)/S(a), where r is the last active
  ramp. Its times depend only on (block, device, b, a, r). Plans are therefore *walks* block by block over the states
  (b, a, r) of each device. The work per input W_c (seconds on device c), the work of hops H_c, the latency L, the mean
  answer time and the seconds of ramps are sums over the steps of a walk.
- A plan of rate R needs at least R*W_c and at least R*H_c replicas on device c. The relaxation allows fractional
  replicas, and compares only these sums over all stages on c with the number of devices.
- L contains the seconds of all splits, all hops, and the wait of each stage's first split at a rate that no plan
  exceeds. A later split of a stage with m replicas waits m*b/(R*s) if b > 1. L contains one of two lower bounds of
  this wait: the split's mean seconds T, because R <= m/w for the stage's work w, which contains s*T/b; or b/(R*s),
  because m >= 1. The first bound is tighter for many replicas, and doubles the number of states.
- After a crossing, the ingress fills batches, even inside a stage. The wait is then that of a first split. The hop of
  the crossing costs latency, and it costs work of hops only at the end of a stage.
- Several walks may share the load in any proportion, and a plan is a mixture of a single walk. The optimum over
  mixtures is therefore a bound on all plans. It is a linear program, and for any dual prices the price of the cheapest
  walk bounds it.

The legend is that of `optimizer.search.tables`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from earlyexit.network.boundary import AfterAnswer, Split
from optimizer.plans.plan import Stage
from optimizer.search.compiled import compiled
from optimizer.search.tables import ALL, INSIDE, MEAN, NONE, SPLIT_ENDS, Tables, hop_s, seconds_at
from profiles.scores import FloatArray, IntArray

# What a walk does after a block. If the ramp after the block is active, RAMP is added.
GO_ON, CUT, HOP, RAMP = 0, 1, 2, 3


class Walk(NamedTuple):
    """The sums over one relaxed plan: a column of the linear program."""

    work_C: FloatArray
    """Device seconds per input (W)."""
    hop_work_C: FloatArray
    latency_s: float
    """Latency without the waits for batches that depend on the rate."""
    fill: float
    """Seconds of the waits that depend on the rate, at one input per second."""
    mean_s: float = 0.0
    """Mean answer time without waits."""
    mean_fill: float = 0.0
    ramps_s: float = 0.0
    """Seconds of ramps beyond their budget."""


NO_WALK = Walk(np.zeros(0), np.zeros(0), math.inf, 0.0)
"""The placeholder for a problem without any walk."""


class Prices(NamedTuple):
    """Dual prices of the constraints on walks."""

    work_C: FloatArray
    """Price of a device second per input."""
    hop_C: FloatArray
    latency: float = 0.0
    usd: float = 0.0
    mean: float = 0.0
    """Price of a second of the mean answer time."""
    ramps: float = 0.0
    """Price of a second of ramps beyond their budget."""

    def between(self, other: Prices) -> Prices:
        """Returns the mean of two prices."""
        return Prices._make((one + two) / 2 for one, two in zip(self, other, strict=True))  # type: ignore[operator]  # arrays and numbers


def no_prices(num_devices: int) -> Prices:
    """Returns prices of 0."""
    return Prices(np.zeros(num_devices), np.zeros(num_devices))


class CostToGo(NamedTuple):
    """Tables of the dynamic program: least prices from each state to the end, and the actions. inf: not allowed."""

    inside_NFREQ: FloatArray
    """Inside a split, from before a block. F is 1 if the split's seconds count twice. N may hold only a few blocks."""
    action_NFREQ: npt.NDArray[np.int8]
    """The best action after the block."""
    later_KCQ: FloatArray
    """At a boundary and rank where a later split of a stage on a device begins."""
    later_run_KCQ: IntArray
    first_KQ: FloatArray
    """At a boundary and rank where a new stage begins."""
    first_run_KQ: IntArray


@compiled
def fill_cost_to_go(tables: Tables, prices: Prices, fill_rate: float, costs: CostToGo) -> float:
    """Fills the tables, backwards from the last block; returns the price of the cheapest walk."""
    costs.later_KCQ[:], costs.first_KQ[:] = np.inf, np.inf
    hop_Q, cut_Q = np.empty(tables.after_Q.size), np.zeros(tables.after_Q.size)
    for block in range(tables.rank_N.size - 1, -1, -1):
        top = int(np.searchsorted(tables.after_Q, block, side="right")) - 1
        for run in range(tables.device_R.size):
            _price_inside(tables, prices, block, top, run, costs, hop_Q, cut_Q)
        _price_starts(tables, prices, fill_rate, block, top, costs)
    return float(costs.first_KQ[0, 0])


@compiled
def _price_inside(
    tables: Tables, prices: Prices, block: int, top: int, run: int, costs: CostToGo, hop_Q: FloatArray,
    cut_Q: FloatArray,
) -> None:  # fmt: skip
    """Fills the least prices from before a block to the end, by entry and by rank up to `top`.

    The price of a second is the sum of the prices of latency, of mean answer time (by the share of unanswered inputs),
    and of device work.
    """
    device, ramp, num_kept = tables.device_R[run], tables.rank_N[block], costs.inside_NFREQ.shape[0]
    ends, crosses = block + 1 == tables.rank_N.size, tables.crosses_N[block]
    may_stay = not crosses and tables.rule != SPLIT_ENDS
    may_be_off, may_be_on = ramp == 0 or tables.rule != ALL, ramp > 0 and tables.rule != NONE
    block_s_G, ramp_s_G = tables.block_s_CNG[device, block], tables.ramp_s_CQG[device, ramp]
    later_Q, first_Q = costs.later_KCQ[block + 1, device], costs.first_KQ[block + 1]
    for entry in range(tables.enters_E.size):
        if tables.enters_E[entry] == 0.0 or tables.after_Q[entry] > block:
            continue
        per_input = tables.enters_E[entry] / tables.batch_R[run]
        work_price, hop_price = prices.work_C[device] * per_input, prices.hop_C[device] * per_input
        leaving_Q, weight_Q = tables.leaving_REQ[run, entry], tables.weight_KREQ[MEAN, run, entry]
        cell_Q, part_Q = tables.cell_KREQ[INSIDE, run, entry], tables.part_KREQ[INSIDE, run, entry]
        mean_cell_Q, mean_part_Q = tables.cell_KREQ[MEAN, run, entry], tables.part_KREQ[MEAN, run, entry]
        for rank in range(entry, max(ramp, top) + 1):
            second = prices.latency + prices.mean * tables.unanswered_Q[rank]
            after_s = hop_s(tables.delay_s, tables.bytes_N[block], leaving_Q[rank], tables.bandwidth_C[device])
            hop_Q[rank], cut_Q[rank] = after_s * (second + hop_price), 0.0
            if crosses:
                hop_Q[rank] += second * tables.crossing_s
                cut_Q[rank] = second * (after_s + tables.crossing_s)
        here_FQ = costs.inside_NFREQ[block % num_kept, :, run, entry]
        after_FQ = costs.inside_NFREQ[(block + 1) % num_kept, :, run, entry]
        action_FQ = costs.action_NFREQ[block, :, run, entry]
        for rank in range(entry, top + 1):
            block_s = seconds_at(block_s_G, cell_Q[rank], part_Q[rank])
            ramp_s = seconds_at(ramp_s_G, cell_Q[rank], part_Q[rank]) if may_be_on else 0.0
            weight, mean_cell, mean_part = weight_Q[rank], mean_cell_Q[rank], mean_part_Q[rank]
            mean_block_s = weight * seconds_at(block_s_G, mean_cell, mean_part)
            mean_ramp_s = weight * seconds_at(ramp_s_G, mean_cell, mean_part) if may_be_on else 0.0
            second = prices.latency + prices.mean * tables.unanswered_Q[rank]
            for kind in range(here_FQ.shape[0]):
                mean_second = work_price + (kind * prices.latency if tables.wait_RE[run, 0] > 0.0 else 0.0)
                block_price = block_s * (second - prices.ramps * tables.ramp_budget) + mean_block_s * mean_second
                if ends:
                    here_FQ[kind, rank] = block_price
                    continue
                least, best = np.inf, GO_ON
                if may_be_off:
                    stay = np.inf if crosses else after_FQ[kind, rank]
                    cut, hop = cut_Q[rank] + later_Q[rank], hop_Q[rank] + first_Q[rank]
                    least, best = _cheaper(least, best, 0, stay, cut, hop)
                if may_be_on:
                    ramp_price = ramp_s * (second + prices.ramps) + mean_ramp_s * mean_second
                    stay = ramp_price + after_FQ[kind, ramp] if may_stay else np.inf
                    cut, hop = ramp_price + cut_Q[ramp] + later_Q[ramp], ramp_price + hop_Q[ramp] + first_Q[ramp]
                    least, best = _cheaper(least, best, RAMP, stay, cut, hop)
                here_FQ[kind, rank] = block_price + least
                action_FQ[kind, rank] = best


@compiled
def _cheaper(least: float, best: int, ramp: int, stay: float, cut: float, hop: float) -> tuple[float, int]:
    """Returns the least of four prices, with its action."""
    if stay < least:
        least, best = stay, ramp + GO_ON
    if cut < least:
        least, best = cut, ramp + CUT
    if hop < least:
        least, best = hop, ramp + HOP
    return least, best


@compiled
def _price_starts(tables: Tables, prices: Prices, fill_rate: float, block: int, top: int, costs: CostToGo) -> None:
    """Fills the least prices and best runs of splits that start with a block, as first or later split of a stage."""
    here_FREQ = costs.inside_NFREQ[block % costs.inside_NFREQ.shape[0]]
    counts_twice = here_FREQ.shape[0] == 2 and not (block > 0 and tables.crosses_N[block - 1])
    for rank in range(top + 1):
        entry = min(rank, tables.enters_E.size - 1)
        if tables.enters_E[entry] == 0.0:
            continue
        price_input = (prices.mean * (tables.unanswered_Q[rank] / 2) + prices.latency) / fill_rate
        for run in range(tables.device_R.size):
            device = tables.device_R[run]
            first = here_FREQ[0, run, entry, rank] + price_input * tables.wait_RE[run, entry]
            later = here_FREQ[1, run, entry, rank] if counts_twice else first
            if tables.may_split and later < costs.later_KCQ[block, device, rank]:
                costs.later_KCQ[block, device, rank] = later
                costs.later_run_KCQ[block, device, rank] = run
            if (tables.may_hop or block == 0) and first < costs.first_KQ[block, rank]:
                costs.first_KQ[block, rank] = first
                costs.first_run_KQ[block, rank] = run


@compiled
def trace_walk(tables: Tables, costs: CostToGo) -> tuple[Walk, IntArray]:
    """Returns the cheapest walk, and for each block the run and the action after it. The last action is HOP."""
    num_blocks, num_devices = tables.rank_N.size, tables.count_C.size
    work_C, hop_work_C = np.zeros(num_devices), np.zeros(num_devices)
    way_N2 = np.full((num_blocks, 2), HOP)
    kind, entry, rank, run = 0, 0, 0, costs.first_run_KQ[0, 0]
    latency_s, fill, mean_s, ramps_s = 0.0, tables.wait_RE[run, entry], 0.0, 0.0
    mean_fill = tables.unanswered_Q[0] / 2 * fill
    for block in range(num_blocks):
        device, is_last = tables.device_R[run], block == num_blocks - 1
        per_input = tables.enters_E[entry] / tables.batch_R[run]
        action = HOP if is_last else costs.action_NFREQ[block, kind, run, entry, rank]
        way_N2[block, 0], way_N2[block, 1] = run, action
        block_s_G = tables.block_s_CNG[device, block]
        ramp_s_G = tables.ramp_s_CQG[device, tables.rank_N[block] if action >= RAMP else 0]
        cell_K, part_K = tables.cell_KREQ[:, run, entry, rank], tables.part_KREQ[:, run, entry, rank]
        block_s = seconds_at(block_s_G, cell_K[INSIDE], part_K[INSIDE])
        ramp_s = seconds_at(ramp_s_G, cell_K[INSIDE], part_K[INSIDE])
        busy_s = seconds_at(block_s_G, cell_K[MEAN], part_K[MEAN])
        busy_s += seconds_at(ramp_s_G, cell_K[MEAN], part_K[MEAN])
        busy_s *= tables.weight_KREQ[MEAN, run, entry, rank]
        work_C[device] += per_input * busy_s
        latency_s += block_s + ramp_s + (kind * busy_s if tables.wait_RE[run, 0] > 0.0 else 0.0)
        mean_s += tables.unanswered_Q[rank] * (block_s + ramp_s)
        ramps_s += ramp_s - tables.ramp_budget * block_s
        rank, after_s, crosses = tables.rank_N[block] if action >= RAMP else rank, 0.0, tables.crosses_N[block]
        if action % RAMP == GO_ON or is_last:
            continue
        if action % RAMP == HOP or crosses:
            leaving = tables.leaving_REQ[run, entry, rank]
            after_s = hop_s(tables.delay_s, tables.bytes_N[block], leaving, tables.bandwidth_C[device])
        if action % RAMP == HOP:
            hop_work_C[device] += per_input * after_s
            run = costs.first_run_KQ[block + 1, rank]
        else:
            run = costs.later_run_KCQ[block + 1, device, rank]
        after_s += tables.crossing_s if crosses else 0.0
        latency_s += after_s
        mean_s += tables.unanswered_Q[rank] * after_s
        kind = costs.action_NFREQ.shape[1] - 1 if action % RAMP == CUT and not crosses else 0
        entry = min(rank, tables.enters_E.size - 1)
        if kind == 0:
            fill += tables.wait_RE[run, entry]
            mean_fill += tables.unanswered_Q[rank] / 2 * tables.wait_RE[run, entry]
    return Walk(work_C, hop_work_C, latency_s, fill, mean_s, mean_fill, ramps_s), way_N2


Oracle = Callable[[Prices, float], tuple[float, Walk]]
"""Pricing: maps dual prices, and the rate at which batches fill, to the cheapest walk's price and the walk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkRelaxation:
    """The pricing problem of the relaxation."""

    tables: Tables
    costs: CostToGo
    """The tables of the last call of `cheapest`."""

    @classmethod
    def of(cls, tables: Tables, kinds: int = 2, blocks: int = 2) -> WalkRelaxation:
        """Returns the relaxation with 1 or 2 kinds of splits (F). It keeps prices inside splits for `blocks` blocks.

        With two kinds, the wait of a later split is the split's own time.
        """
        inside, last = (kinds, *tables.leaving_REQ.shape), (len(tables.rank_N) + 1, len(tables.after_Q))
        later = last[0], len(tables.count_C), last[1]
        costs = CostToGo(
            np.full((blocks, *inside), np.inf),
            np.zeros((len(tables.rank_N), *inside), dtype=np.int8),
            np.empty(later),
            np.zeros(later, dtype=np.int64),
            np.empty(last),
            np.zeros(last, dtype=np.int64),
        )
        return cls(tables=tables, costs=costs)

    def cheapest(self, prices: Prices, fill_rate: float) -> tuple[float, Walk]:
        """Returns the price of the cheapest walk, and the walk; infinity if no walk exists."""
        # The rate is converted because numba would compile the kernel once more for an integer.
        least = fill_cost_to_go(self.tables, prices, float(fill_rate), self.costs)
        if math.isinf(least):
            return math.inf, NO_WALK
        return least, trace_walk(self.tables, self.costs)[0]

    def last_stages(self, names: Sequence[str]) -> tuple[Stage, ...]:
        """Returns the chain of the last cheapest walk over these device types, each stage with one replica."""
        return stages_of(self.tables, names, trace_walk(self.tables, self.costs)[1].tolist())


def stages_of(
    tables: Tables, names: Sequence[str], way: Iterable[tuple[int, int]], after_answer: AfterAnswer = "stop"
) -> tuple[Stage, ...]:
    """Returns a chain from the run of each block and the action after it. Each stage has one replica."""
    stages, splits, ramps, first = list[Stage](), list[Split](), list[int](), 0
    for block, (run, action) in enumerate(way):
        ramps += [block] if action >= RAMP else []
        if action % RAMP == GO_ON:
            continue
        batch, end = int(tables.batch_R[run]), block + 1
        splits.append(Split(first=first, end=end, batch=batch, ramps=tuple(ramps), after_answer=after_answer))
        ramps, first = [], end
        if action % RAMP == HOP:
            stages.append(Stage(device=names[tables.device_R[run]], replicas=1, splits=tuple(splits)))
            splits = []
    return tuple(stages)
