"""Label setting for the least mean answer time: layer by layer, one layer per block, with limited width.

A label is dropped if another label at the same place dominates it, if a row of prices proves that it leads to no plan,
or if its bound shows that it leads to no better plan than the incumbent. Beyond the width of a layer, labels are
dropped as well, and the least of their bounds is kept: no plan that was dropped is better. So a narrow search gives a
plan, a wider one proves that it is the best, and a search that would have to be too wide ends with a gap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from earlyexit.network.boundary import AfterAnswer, Split
from optimizer.plans.plan import Stage
from optimizer.problems.problem import PlanProblem, device_names
from optimizer.search.decision import FeasiblePlan, if_feasible
from optimizer.search.soonest.bound import PriceRow, best_price_row, price_rows
from optimizer.search.soonest.labels import (
    ACTION,
    BOUND,
    IS_ACTIVE,
    LATENCY,
    MEAN,
    NUM_FLOATS,
    PARENT,
    RUN,
    TOLERANCE,
    USED,
    Cutoffs,
    RowArrays,
    extend_labels,
)
from optimizer.search.step import IntArray, Labels, undominated
from optimizer.search.tables import RunTables
from optimizer.search.walks import CUT, GO_ON

WIDTHS = (500, 5_000, 50_000, 400_000)
"""Labels per layer of the successive searches. The next one runs only if the one before dropped better bounds."""
OUTPUT_ROOM = 200_000
"""Labels that are written at once."""
MOST_ROW_STATES = 40_000_000
"""Numbers in all rows of prices together. Larger problems have fewer rows."""
TIE_TOLERANCE = 1e-11
"""Relative difference below which two answer times are a tie. The cheaper plan wins a tie."""
MOST_PLANS = 8
MOST_TRIED = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyResult:
    """The plans that were found, best first, and what is proven about all plans."""

    plans: tuple[FeasiblePlan, ...]
    bound: float
    """No plan is better. Infinite if it is proven that no plan exists."""


@dataclass(slots=True, kw_only=True)
class LatencySearch:
    """A search for the best plan of one part of a space."""

    problem: PlanProblem
    tables: RunTables
    after_answer: AfterAnswer
    worst_case: bool = False
    """Whether the worst-case latency is minimized, without a limit, instead of the mean answer time."""
    widths: tuple[int, ...] = WIDTHS
    _layers: list[Labels] = field(default_factory=list)

    def best(self, incumbent: float = math.inf, *, any_plan: bool = False) -> LatencyResult:
        """Returns the best plans that are no worse than the incumbent's value. `any_plan` stops at the first ones."""
        row = best_price_row(self.problem, self.tables, worst_case=self.worst_case)
        plans: tuple[FeasiblePlan, ...] = ()
        least, value = row.bound, incumbent
        if not self.worst_case:  # the mean answer time is at most the worst case
            value = min(value, self.problem.slo.limit_s)
        if math.isinf(least) or least > value * (1 + TIE_TOLERANCE):
            return LatencyResult(plans=(), bound=math.inf)
        most_rows = max(1, MOST_ROW_STATES // num_states(self.tables))
        all_rows = price_rows(self.problem, self.tables, row, most_rows, worst_case=self.worst_case)
        rows = _row_arrays(self.tables, all_rows)
        for width in self.widths:
            dropped = self._search(rows, value, width)
            plans = self._feasible_plans(value) or plans
            value = min(value, time_of(plans[0], self.worst_case)) if plans else value
            bound = max(least, min(dropped, value))
            if dropped >= value * (1 - TIE_TOLERANCE):
                return LatencyResult(plans=plans, bound=value if plans else math.inf)
            if plans and any_plan:
                break
        return LatencyResult(plans=plans, bound=bound)

    def _search(self, rows: RowArrays, value: float, width: int) -> float:
        """Fills the layers. Returns the least bound of the labels that were dropped because of the width."""
        cutoffs = Cutoffs(
            math.inf if self.worst_case else float(self.problem.slo.limit_s), float(self.problem.max_usd_per_hour),
            _ramp_rounding_s(self.tables), value * (1 + TIE_TOLERANCE), self.worst_case,
        )  # fmt: skip
        self._layers, dropped = [_first_labels(self.tables)], math.inf
        for block in range(self.problem.num_blocks):
            layer = _undominated(_joined(list(_successors(self.tables, rows, cutoffs, block, self._layers[-1]))))
            beyond = layer.float_LF[width:, BOUND]
            if len(beyond) and block + 1 < self.problem.num_blocks:
                dropped, layer = min(dropped, float(beyond.min())), _take(layer, np.arange(width))
            self._layers.append(layer)
        return dropped

    def _feasible_plans(self, value: float) -> tuple[FeasiblePlan, ...]:
        """Returns the best plans of the last layer that keep every promise by `optimizer.cost.evaluate`."""
        plans: list[FeasiblePlan] = []
        for label in range(min(len(self._layers[-1].int_LI), MOST_TRIED)):
            plan = if_feasible(self.problem, self._chain(label))
            if plan is not None and time_of(plan, self.worst_case) <= value * (1 + TIE_TOLERANCE):
                plans.append(plan)
            if len(plans) == MOST_PLANS:
                break
        return ranked(plans, self.worst_case)

    def _chain(self, label: int) -> tuple[Stage, ...]:
        """Returns the stages of a plan of the last layer."""
        path: list[tuple[IntArray, IntArray]] = []
        for layer in range(len(self._layers) - 1, 0, -1):
            after_I = self._layers[layer].int_LI[label]
            label = int(after_I[PARENT])
            path.append((self._layers[layer - 1].int_LI[label], after_I))
        return tuple(self._stages(list(reversed(path))))

    def _stages(self, path: list[tuple[IntArray, IntArray]]) -> Iterator[Stage]:
        """Yields the stages of a path, which holds the labels before and after every block."""
        names, problem = device_names(self.problem), self.problem
        splits: list[Split] = []
        first, ramps = 0, []
        for block, (before_I, after_I) in enumerate(path):
            device, is_end = int(self.tables.device_R[before_I[RUN]]), block + 1 == len(path)
            if after_I[IS_ACTIVE]:
                ramps.append(block)
            if after_I[ACTION] == GO_ON and not is_end:
                continue
            batch = int(self.tables.batch_R[before_I[RUN]])
            splits.append(
                Split(first=first, end=block + 1, batch=batch, ramps=tuple(ramps), after_answer=self.after_answer)
            )
            first, ramps = block + 1, []
            if after_I[ACTION] != CUT:
                replicas = int(after_I[USED + device] - before_I[USED + device])
                yield Stage(device=names[device], replicas=replicas, splits=tuple(splits))
                splits = []
        assert first == problem.num_blocks


def num_states(tables: RunTables) -> int:
    """Returns the size of a table with a number for every block and state of a split."""
    return len(tables.rank_N) * tables.cell_REQ.size


def time_of(plan: FeasiblePlan, worst_case: bool) -> float:
    """Returns the time that is minimized."""
    return plan.figures.latency_s if worst_case else plan.figures.mean_latency_s


def ranked(plans: Sequence[FeasiblePlan], worst_case: bool) -> tuple[FeasiblePlan, ...]:
    """Returns plans, best first. A tie goes to the cheaper, then to the lower worst case, then to inputs that stop."""
    least = min((time_of(plan, worst_case) for plan in plans), default=0.0)

    def order(plan: FeasiblePlan) -> tuple[float, float, float, bool]:
        value = time_of(plan, worst_case)
        excess = 0.0 if value <= least * (1 + TIE_TOLERANCE) else value
        # Plans whose inputs stop, and those whose inputs stay, sum the same seconds in different orders: round.
        worst_s = float(f"{plan.figures.latency_s:.10g}")
        return excess, plan.figures.usd_per_hour, worst_s, plan.stages[0].splits[0].stays

    return tuple(sorted(plans, key=order))


def _first_labels(tables: RunTables) -> Labels:
    """Returns one label for every first split."""
    num_runs = len(tables.device_R)
    int_LI = np.zeros((num_runs, USED + len(tables.count_C)), dtype=np.int64)
    int_LI[:, RUN] = np.arange(num_runs)
    wait_s_R = tables.batch_R / tables.rate_per_s
    float_LF = np.zeros((num_runs, NUM_FLOATS))
    float_LF[:, MEAN], float_LF[:, LATENCY] = wait_s_R / 2, wait_s_R
    return Labels(int_LI, float_LF)


def _successors(tables: RunTables, rows: RowArrays, cutoffs: Cutoffs, block: int, layer: Labels) -> Iterator[Labels]:
    """Yields the labels behind a block, part by part."""
    most = max(OUTPUT_ROOM, 2 * (1 + 2 * len(tables.device_R)))
    output = Labels(np.empty((most, layer.int_LI.shape[1]), dtype=np.int64), np.empty((most, NUM_FLOATS)))
    label = 0
    while label < len(layer.int_LI):
        count, label = extend_labels(tables, rows, cutoffs, block, layer, label, output)
        yield _undominated(Labels(output.int_LI[:count].copy(), output.float_LF[:count].copy()))
    yield Labels(output.int_LI[:0], output.float_LF[:0])


def _joined(parts: list[Labels]) -> Labels:
    return Labels(np.concatenate([part.int_LI for part in parts]), np.concatenate([part.float_LF for part in parts]))


def _take(labels: Labels, which_L: IntArray) -> Labels:
    return Labels(labels.int_LI[which_L], labels.float_LF[which_L])


def _undominated(labels: Labels) -> Labels:
    """Returns the labels that no other label at the same place dominates, the lowest bound first."""
    place_LI = np.concatenate([labels.int_LI[:, :PARENT], labels.int_LI[:, USED:]], axis=1)
    hash_L = place_LI @ _hash_factors(place_LI.shape[1])  # equal places have equal hashes; a collision does no harm
    order_L = np.lexsort((labels.float_LF[:, BOUND], hash_L))
    changes_L = (place_LI[order_L[1:]] != place_LI[order_L[:-1]]).any(1)
    _, kept_L = undominated(order_L, np.append(0, changes_L).cumsum(), labels.float_LF, 0, BOUND, 0.0, len(order_L))
    kept_L = kept_L[np.argsort(labels.float_LF[kept_L, BOUND], kind="stable")]
    return _take(labels, kept_L)


def _hash_factors(count: int) -> IntArray:
    return np.random.default_rng(0).integers(-(2**62), 2**62, count) | 1


def _row_arrays(tables: RunTables, rows: list[PriceRow]) -> RowArrays:
    return RowArrays(
        mean_V=np.array([row.prices.mean for row in rows]),
        latency_V=np.array([row.prices.latency for row in rows]),
        ramps_V=np.array([row.prices.ramps for row in rows]),
        work_VC=np.array([row.prices.work_C / tables.rate_per_s for row in rows]),
        device_VC=np.array([(row.prices.work_C + row.prices.hop_C) / tables.rate_per_s for row in rows]),
        limit_V=np.array([row.limit for row in rows]),
        has_objective_V=np.array([int(row.has_objective) for row in rows], dtype=np.int64),
        bound_VNREQ=np.array([row.costs.inside_NFREQ[:, 0] for row in rows]),
    )


def _ramp_rounding_s(tables: RunTables) -> float:
    """Returns by how many seconds rounding may make a plan's ramps exceed their budget."""
    fastest_N = np.where(tables.block_s_CNG > 0, tables.block_s_CNG, np.inf).min(axis=(0, 2))
    return TOLERANCE * tables.ramp_budget * float(fastest_N.sum())
