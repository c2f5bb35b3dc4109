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
from optimizer.scale.tables import Tables, crosses_after, hop_seconds
from optimizer.split_times import ALL, NONE, SPLIT_ENDS
from optimizer.step import FloatArray, IntArray, seconds_at

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


def nowhere(num_devices: int) -> Walk:
    """The account of no walk."""
    nothing_C = np.zeros(num_devices)
    return Walk(nothing_C, nothing_C, math.inf, 0.0, nothing_C)


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


class Choices(NamedTuple):
    """What the cheapest walk does, filled by the kernel."""

    after_block: npt.NDArray[np.int8]
    """By (block, whether a further split, device, size, rank at entry, rank)."""
    further_size_KQC: IntArray
    first_size_KQ: IntArray
    first_device_KQ: IntArray


class Allowed(NamedTuple):
    """What walks may do: a ramp rule, splits within a stage, hops between stages."""

    rule: int
    may_split: bool
    may_hop: bool


class Room(NamedTuple):
    """Least prices of the ways on; inf: none is allowed."""

    further_KQC: FloatArray
    """From a boundary and rank, by a further split of a device's stage."""
    first_KQ: FloatArray
    """By a new stage."""
    hop_Q: FloatArray
    """Of the hop there, by last ramp, for the split at hand."""
    cut_Q: FloatArray
    """Of going on to a further split there: nothing, unless it is of the next network."""


@compiled
def cheapest_walk(allowed: Allowed, tables: Tables, prices: Prices, fill_rate: float, choices: Choices) -> float:
    """The price of the cheapest walk, backwards from the last block; inf: none is allowed."""
    num_devices, num_blocks, num_sizes = tables.block_s_CNG.shape
    num_ranks = tables.share_Q.size
    shape = (2, num_devices, num_sizes, num_ranks, num_ranks)
    here, after = np.full(shape, np.inf), np.full(shape, np.inf)
    room = Room(
        np.full((num_blocks + 1, num_ranks, num_devices), np.inf),
        np.full((num_blocks + 1, num_ranks), np.inf),
        np.full(num_ranks, np.inf),
        np.zeros(num_ranks),
    )
    for block in range(num_blocks - 1, -1, -1):
        ramp, top = 0, 0
        for rank in range(1, num_ranks):
            if tables.after_Q[rank] == block + 1:
                ramp = rank
            if tables.after_Q[rank] <= block:
                top = rank
        for device in range(num_devices):
            for size in range(tables.num_sizes_C[device]):
                if tables.sizes_CG[device, size] > 0:
                    _fill_inside(allowed, tables, prices, block, ramp, top, device, size, here, after, room, choices)
        _fill_starts(allowed, tables, prices, fill_rate, block, top, here, room, choices)
        here, after = after, here
    return float(room.first_KQ[0, 0])


@compiled
def _fill_inside(
    allowed: Allowed, tables: Tables, prices: Prices, block: int, ramp: int, top: int, device: int, size: int,
    here: FloatArray, after: FloatArray, room: Room, choices: Choices,
) -> None:  # fmt: skip
    """The least prices from before a block to the end, by rank at entry and last rank; `ramp` 0: there is none."""
    ends = block == tables.wire.bytes_N.size - 1
    crosses = not ends and crosses_after(tables, block)
    block_s_G, ramp_s_G = tables.block_s_CNG[device, block], tables.ramp_s_CEG[device, max(ramp, 1) - 1]
    further_QC, first_Q = room.further_KQC[block + 1], room.first_KQ[block + 1]
    for entry in range(top + 1):
        if tables.share_Q[entry] <= 0:
            continue
        per_input = tables.share_Q[entry] / tables.sizes_CG[device, size]
        cell_Q, part_Q = tables.cell_CGQQ[device, size, entry], tables.part_CGQQ[device, size, entry]
        price_hop = prices.latency + prices.hop_C[device] * per_input
        for rank in range(entry, max(ramp, top) + 1):
            after_s = hop_seconds(tables, block, device, size, entry, rank)
            room.hop_Q[rank], room.cut_Q[rank] = after_s * price_hop, 0.0
            if crosses:
                room.hop_Q[rank] += prices.latency * tables.wire.crossing_s
                room.cut_Q[rank] = prices.latency * (after_s + tables.wire.crossing_s)
        for further in range(2):
            price = prices.work_C[device] * per_input + prices.latency * (1 + further)
            here_Q, after_Q = here[further, device, size, entry], after[further, device, size, entry]
            choice_Q = choices.after_block[block, further, device, size, entry]
            for rank in range(entry, top + 1):
                block_price = seconds_at(block_s_G, cell_Q[rank], part_Q[rank]) * price
                if ends:
                    here_Q[rank] = block_price
                    continue
                least, best = np.inf, GO_ON
                if ramp == 0 or allowed.rule != ALL:
                    hop = room.hop_Q[rank] + first_Q[rank]
                    stay = np.inf if crosses else after_Q[rank]
                    least, best = _cheaper(least, best, 0, stay, room.cut_Q[rank] + further_QC[rank, device], hop)
                if ramp > 0 and allowed.rule != NONE:
                    spent = seconds_at(ramp_s_G, cell_Q[rank], part_Q[rank]) * price
                    stay = np.inf if crosses or allowed.rule == SPLIT_ENDS else spent + after_Q[ramp]
                    cut = spent + room.cut_Q[ramp] + further_QC[ramp, device]
                    hop = spent + room.hop_Q[ramp] + first_Q[ramp]
                    least, best = _cheaper(least, best, RAMP, stay, cut, hop)
                here_Q[rank] = least + block_price
                choice_Q[rank] = best


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
def _fill_starts(
    allowed: Allowed, tables: Tables, prices: Prices, fill_rate: float, block: int, top: int,
    here: FloatArray, room: Room, choices: Choices,
) -> None:  # fmt: skip
    """The least prices of a split that starts with a block, further in its stage or first, with its batch size."""
    crossed = block > 0 and crosses_after(tables, block - 1)
    for rank in range(top + 1):
        if tables.share_Q[rank] <= 0:
            continue
        for device in range(tables.num_sizes_C.size):
            for size in range(tables.num_sizes_C[device]):
                batch = tables.sizes_CG[device, size]
                if batch <= 0:
                    continue
                wait_s = batch / (fill_rate * tables.share_Q[rank])
                further_price = here[1, device, size, rank, rank]
                if crossed:
                    further_price = here[0, device, size, rank, rank] + prices.latency * wait_s
                if allowed.may_split and further_price < room.further_KQC[block, rank, device]:
                    room.further_KQC[block, rank, device] = further_price
                    choices.further_size_KQC[block, rank, device] = size
                first_price = here[0, device, size, rank, rank] + prices.latency * wait_s - prices.stage_C[device]
                if (allowed.may_hop or block == 0) and first_price < room.first_KQ[block, rank]:
                    room.first_KQ[block, rank] = first_price
                    choices.first_size_KQ[block, rank] = size
                    choices.first_device_KQ[block, rank] = device


@compiled
def account_of(tables: Tables, choices: Choices) -> tuple[Walk, IntArray]:
    """The cheapest walk's account, and per block whether its ramp is active."""
    num_devices, num_blocks = tables.block_s_CNG.shape[:2]
    work_C, hop_work_C = np.zeros(num_devices), np.zeros(num_devices)
    further, entry, rank = 0, 0, 0
    device, size = choices.first_device_KQ[0, 0], choices.first_size_KQ[0, 0]
    latency_s, fill = 0.0, tables.sizes_CG[device, size]
    stages_C = np.zeros(num_devices)
    stages_C[device] = 1.0
    on_N = np.zeros(num_blocks, dtype=np.int64)
    for block in range(num_blocks):
        per_input = tables.share_Q[entry] / tables.sizes_CG[device, size]
        cell, part = tables.cell_CGQQ[device, size, entry, rank], tables.part_CGQQ[device, size, entry, rank]
        seconds = seconds_at(tables.block_s_CNG[device, block], cell, part)
        way = 0 if block == num_blocks - 1 else choices.after_block[block, further, device, size, entry, rank]
        if way >= RAMP:
            on_N[block] = 1
            while tables.after_Q[rank] != block + 1:
                rank += 1
            seconds += seconds_at(tables.ramp_s_CEG[device, rank - 1], cell, part)
        work_C[device] += per_input * seconds
        latency_s += seconds * (1 + further)
        crosses = crosses_after(tables, block)
        if crosses:
            latency_s += tables.wire.crossing_s
        if way % RAMP == CUT:
            if crosses:
                latency_s += hop_seconds(tables, block, device, size, entry, rank)
            further, entry, size = int(not crosses), rank, choices.further_size_KQC[block + 1, rank, device]
            fill += tables.sizes_CG[device, size] / tables.share_Q[rank] if crosses else 0.0
        elif way % RAMP == HOP:
            after_s = hop_seconds(tables, block, device, size, entry, rank)
            hop_work_C[device] += per_input * after_s
            device, size = choices.first_device_KQ[block + 1, rank], choices.first_size_KQ[block + 1, rank]
            latency_s += after_s
            fill += tables.sizes_CG[device, size] / tables.share_Q[rank]
            further, entry = 0, rank
            stages_C[device] += 1.0
    return Walk(work_C, hop_work_C, latency_s, fill, stages_C), on_N


Oracle = Callable[[Prices, float], tuple[float, Walk]]
"""From prices, and the rate at which batches fill, to the price of the cheapest walk, and that walk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Walks:
    """The relaxation of the module's head, as something that prices can be asked of."""

    tables: Tables
    allowed: Allowed
    choices: Choices
    """Of the last question."""

    @classmethod
    def of(cls, tables: Tables, allowed: Allowed) -> Walks:
        """With room for its choices."""
        num_devices, num_blocks, num_sizes = tables.block_s_CNG.shape
        num_ranks = len(tables.share_Q)
        choices = Choices(
            np.zeros((num_blocks, 2, num_devices, num_sizes, num_ranks, num_ranks), dtype=np.int8),
            np.zeros((num_blocks + 1, num_ranks, num_devices), dtype=np.int64),
            np.zeros((num_blocks + 1, num_ranks), dtype=np.int64),
            np.zeros((num_blocks + 1, num_ranks), dtype=np.int64),
        )
        return cls(tables=tables, allowed=allowed, choices=choices)

    def cheapest(self, prices: Prices, fill_rate: float) -> tuple[float, Walk]:
        least = cheapest_walk(self.allowed, self.tables, prices, fill_rate, self.choices)
        if math.isinf(least):
            return math.inf, nowhere(len(self.tables.num_sizes_C))
        return least, account_of(self.tables, self.choices)[0]

    def last_ramps(self, problem: PlanProblem) -> tuple[int, ...]:
        """The ramps that the last walk activates."""
        on_N = account_of(self.tables, self.choices)[1]
        return tuple(ramp for ramp in problem.ramps if on_N[ramp])
