"""The plan that answers soonest: labels layer by layer, block by block, the best of each layer kept.

A label is dropped where another at the same place is no worse in everything, or where a row of prices proves that it
leads to no plan, or to none that is better than the best so far. What is left over beyond a layer's width is dropped
too, and remembered by its bound: nothing that was dropped is better than that. So a search with a small width gives a
plan, a wider one then proves it the best, and one that would be too wide ends with a gap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from earlyexit.network.boundary import AfterAnswer, Split
from optimizer.decision import FeasiblePlan, if_feasible
from optimizer.plan import Stage
from optimizer.problem import PlanProblem, device_names
from optimizer.soonest.bound import Allowance, Row, best_row, proofs
from optimizer.soonest.labels import (
    ACTIVE,
    BOUND,
    HOW,
    NUM_REALS,
    PARENT,
    RUN,
    SLACK,
    USED,
    Cutoffs,
    Rows,
    extended,
)
from optimizer.step import IntArray, Labels, undominated
from optimizer.tables import RunTables
from optimizer.walks import CUT, GO_ON

WIDTHS = (500, 5_000, 50_000, 400_000)
"""Labels of a layer, one search after the other, until one drops nothing that could be better."""
ROOM = 200_000
MOST_ROW_STATES = 40_000_000
"""Of all rows of prices together: fewer rows for larger problems."""
SAME = 1e-11
"""Plans that answer this close to each other are told apart by what they cost."""
MOST_FOUND = 8
MOST_TRIED = 200

Chain = tuple[Stage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Soonest:
    """The plans that were found, best first, and what is proven."""

    found: tuple[FeasiblePlan, ...]
    bound: float
    """No plan is better; infinite where there is proven to be none, and none was found."""


@dataclass(slots=True, kw_only=True)
class SoonestSearch:
    """One part of a space, asked for its best plan."""

    problem: PlanProblem
    tables: RunTables
    after_answer: AfterAnswer
    limits: Allowance
    widths: tuple[int, ...] = WIDTHS
    _layers: list[Labels] = field(default_factory=list)

    def best(self, known: float = math.inf, *, any_will_do: bool = False) -> Soonest:
        """The best plan, where it is no worse than a `known` value; or the first that is met."""
        row = best_row(self.tables, self.limits)
        found: tuple[FeasiblePlan, ...] = ()
        least, value = row.least, known
        if not self.limits.seeks_worst:  # no input is answered after the end
            value = min(value, self.limits.latency_s)
        if math.isinf(least) or least > value * (1 + SAME):
            return Soonest(found=(), bound=math.inf)
        most_rows = max(1, MOST_ROW_STATES // num_states(self.tables))
        rows = _stacked(self.tables, proofs(self.tables, self.limits, row, most_rows))
        for width in self.widths:
            dropped = self._search(rows, value, width)
            found = self._found(value) or found
            value = min(value, self.limits.value_of(found[0])) if found else value
            bound = max(least, min(dropped, value))
            if dropped >= value * (1 - SAME):
                return Soonest(found=found, bound=value if found else math.inf)
            if found and any_will_do:
                break
        return Soonest(found=found, bound=bound)

    def _search(self, rows: Rows, value: float, width: int) -> float:
        """Fill the layers; returns the least bound of what was dropped for want of width."""
        cutoffs = Cutoffs(
            float(self.limits.latency_s), float(self.limits.usd_per_hour), _rounding_of_ramps(self.tables),
            value * (1 + SAME), self.limits.seeks_worst,
        )  # fmt: skip
        self._layers, dropped = [_starts(self.tables)], math.inf
        for block in range(self.problem.num_blocks):
            layer = _thinned(_joined(list(_extensions(self.tables, rows, cutoffs, block, self._layers[-1]))))
            beyond = layer.float_LF[width:, BOUND]
            if len(beyond) and block + 1 < self.problem.num_blocks:
                dropped, layer = min(dropped, float(beyond.min())), _some(layer, np.arange(width))
            self._layers.append(layer)
        return dropped

    def _found(self, value: float) -> tuple[FeasiblePlan, ...]:
        """The best plans of the last layer that keep every promise, as evaluated."""
        found: list[FeasiblePlan] = []
        for label in range(min(len(self._layers[-1].int_LI), MOST_TRIED)):
            each = if_feasible(self.problem, self._chain(label))
            if each is not None and self.limits.value_of(each) <= value * (1 + SAME):
                found.append(each)
            if len(found) == MOST_FOUND:
                break
        return best_first(found, self.limits)

    def _chain(self, label: int) -> Chain:
        """The stages of a plan of the last layer."""
        way: list[tuple[IntArray, IntArray]] = []
        for layer in range(len(self._layers) - 1, 0, -1):
            after_I = self._layers[layer].int_LI[label]
            label = int(after_I[PARENT])
            way.append((self._layers[layer - 1].int_LI[label], after_I))
        return tuple(self._stages(list(reversed(way))))

    def _stages(self, way: list[tuple[IntArray, IntArray]]) -> Iterator[Stage]:
        """From the labels before and after every block."""
        names, problem = device_names(self.problem), self.problem
        splits: list[Split] = []
        first, ramps = 0, []
        for block, (before_I, after_I) in enumerate(way):
            device, end = int(self.tables.device_R[before_I[RUN]]), block + 1 == len(way)
            if after_I[ACTIVE]:
                ramps.append(block)
            if after_I[HOW] == GO_ON and not end:
                continue
            batch = int(self.tables.batch_R[before_I[RUN]])
            splits.append(
                Split(first=first, end=block + 1, batch=batch, ramps=tuple(ramps), after_answer=self.after_answer)
            )
            first, ramps = block + 1, []
            if after_I[HOW] != CUT:
                replicas = int(after_I[USED + device] - before_I[USED + device])
                yield Stage(device=names[device], replicas=replicas, splits=tuple(splits))
                splits = []
        assert first == problem.num_blocks


def num_states(tables: RunTables) -> int:
    """Numbers in a table of all states."""
    return len(tables.rank_N) * tables.cell_REQ.size


def best_first(found: Sequence[FeasiblePlan], limits: Allowance) -> tuple[FeasiblePlan, ...]:
    """Of plans that answer as soon, the cheaper comes first, then the shorter worst case, then the one that stops."""
    least = min(map(limits.value_of, found), default=0.0)

    def order(each: FeasiblePlan) -> tuple[float, float, float, bool]:
        value = limits.value_of(each)
        apart = 0.0 if value <= least * (1 + SAME) else value
        # Both modes sum the same seconds in their own order: no difference is made of what rounding leaves.
        return apart, each.figures.usd_per_hour, float(f"{each.figures.latency_s:.10g}"), each.stages[0].splits[0].stays

    return tuple(sorted(found, key=order))


def _starts(tables: RunTables) -> Labels:
    """Every first split."""
    num_runs = len(tables.device_R)
    int_LI = np.zeros((num_runs, USED + len(tables.count_C)), dtype=np.int64)
    int_LI[:, RUN] = np.arange(num_runs)
    wait_s_R = tables.batch_R / tables.rate_per_s
    float_LF = np.zeros((num_runs, NUM_REALS))
    float_LF[:, 0], float_LF[:, 1] = wait_s_R / 2, wait_s_R
    return Labels(int_LI, float_LF)


def _extensions(tables: RunTables, rows: Rows, cutoffs: Cutoffs, block: int, layer: Labels) -> Iterator[Labels]:
    """What follows a block, as much at a time as there is room for."""
    most = max(ROOM, 2 * (1 + 2 * len(tables.device_R)))
    room = Labels(np.empty((most, layer.int_LI.shape[1]), dtype=np.int64), np.empty((most, NUM_REALS)))
    label = 0
    while label < len(layer.int_LI):
        count, label = extended(tables, rows, cutoffs, block, layer, label, room)
        yield _thinned(Labels(room.int_LI[:count].copy(), room.float_LF[:count].copy()))
    yield Labels(room.int_LI[:0], room.float_LF[:0])


def _joined(parts: list[Labels]) -> Labels:
    return Labels(np.concatenate([each.int_LI for each in parts]), np.concatenate([each.float_LF for each in parts]))


def _some(labels: Labels, which_L: IntArray) -> Labels:
    return Labels(labels.int_LI[which_L], labels.float_LF[which_L])


def _thinned(labels: Labels) -> Labels:
    """Those that no other at the same place is as good as in everything, the most promising first."""
    place_LI = np.concatenate([labels.int_LI[:, :PARENT], labels.int_LI[:, USED:]], axis=1)
    hashed_L = place_LI @ _odd_numbers(place_LI.shape[1])  # of equal places equal, of others nearly always not
    order_L = np.lexsort((labels.float_LF[:, BOUND], hashed_L))
    changes_L = (place_LI[order_L[1:]] != place_LI[order_L[:-1]]).any(1)
    _, kept_L = undominated(order_L, np.append(0, changes_L).cumsum(), labels.float_LF, 0, BOUND, 0.0, len(order_L))
    kept_L = kept_L[np.argsort(labels.float_LF[kept_L, BOUND], kind="stable")]
    return _some(labels, kept_L)


def _odd_numbers(count: int) -> IntArray:
    return np.random.default_rng(0).integers(-(2**62), 2**62, count) | 1


def _stacked(tables: RunTables, rows: list[Row]) -> Rows:
    return Rows(
        mean_V=np.array([row.prices.mean for row in rows]),
        latency_V=np.array([row.prices.latency for row in rows]),
        ramps_V=np.array([row.prices.ramps for row in rows]),
        device_VC=np.array([row.prices.work_C / tables.rate_per_s for row in rows]),
        allowed_V=np.array([row.allowed for row in rows]),
        counts_V=np.array([int(row.counts) for row in rows], dtype=np.int64),
        inside_VNREQ=np.array([row.ways.inside_NFREQ[:, 0] for row in rows]),
    )


def _rounding_of_ramps(tables: RunTables) -> float:
    """What a whole plan's ramps may take beyond their budget for all that is known."""
    fastest_N = np.where(tables.block_s_CNG > 0, tables.block_s_CNG, np.inf).min(axis=(0, 2))
    return SLACK * tables.ramp_budget * float(fastest_N.sum())
