"""Label setting for the least mean answer time: layer by layer, one layer per block, with limited width.

A label is the beginning of a plan up to a block, inside an open split of an open stage. Every label passes the next
block, with or without its ramp, and then goes on, begins another split of its stage, or begins another stage. The
replicas of the open stage are not counted yet. Its work so far gives a lower bound on them. The waits of its further
splits are kept as inputs, and they are multiplied by the replicas when the stage closes.

A label is dropped if another label at the same place dominates it, or if a row of prices shows that it leads to no plan
or to no better one than the incumbent. The cutting-plane method (`optimizer.search.relaxation`) finds the prices of the
first row. Beyond the width of a layer, labels are dropped as well, and the least of their bounds is kept: no plan that
was dropped is better. So a narrow search gives a plan, a wider one proves that it is the best, and a search that would
have to be too wide ends with a gap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from earlyexit.network.boundary import AfterAnswer
from optimizer.cost.evaluate import objective_value
from optimizer.plans.plan import Stage, with_replicas
from optimizer.problems.problem import PlanProblem, device_names
from optimizer.search.decision import FeasiblePlan, Found, if_feasible
from optimizer.search.label_search import undominated
from optimizer.search.relaxation import CuttingPlanes
from optimizer.search.space import SPACES, Space
from optimizer.search.tables import ALL, NONE, SPLIT_ENDS, Tables
from optimizer.search.walks import CUT, GO_ON, HOP, RAMP, Prices, WalkRelaxation, no_prices, stages_of
from profiles.scores import BoolArray, FloatArray, IntArray

ITERATIONS = 60
CLOSE = 1e-6
"""Gap at which the cutting-plane method stops."""
MOST_ROW_STATES = 40_000_000
"""Numbers in all rows of prices together. Larger problems have fewer rows."""
WIDTHS = (500, 5_000, 50_000, 400_000)
"""Labels per layer of the successive searches. The next one runs only if the one before dropped better bounds."""
TOGETHER = 20_000
"""Labels that are extended at once, which limits the memory."""
TIE_TOLERANCE = 1e-11
"""Relative difference below which two answer times are a tie. The cheaper plan wins a tie."""
MOST_PLANS = 8
MOST_TRIED = 200
# Relative difference that the order of a sum may cause. It is far below the differences between plans.
ROUNDING = 1e-13
TOLERANCE = 5e-10

MEAN, LATENCY, RAMPS, WORK, MEAN_INPUTS, INPUTS, NUM_SUMS = range(7)
"""Columns of `Layer.sums_LF`: seconds of the mean answer time; seconds of the worst case (both without the waits of
the open stage's further splits); seconds of ramps beyond their budget; device seconds per input of the open stage;
inputs that each of its replicas waits for, weighted by the share without an answer; the same unweighted."""


class PriceRow(NamedTuple):
    """One row of prices. The *excess* of a beginning of plans is its price and that of its completion, minus `limit`.

    The first row's excess is a lower bound on the objective of these plans. In other rows, the excess is at most 0 for
    every plan that keeps its limits.
    """

    prices: Prices
    limit: float
    """Price of everything that a plan may use."""
    to_end_NREQ: FloatArray
    """The least price from before a block to the end."""


def planes_of(problem: PlanProblem, tables: Tables, space: Space = SPACES["best"]) -> CuttingPlanes:
    """Returns the cutting-plane method for the time that is minimized, in the space's time."""
    mean, worst = problem.time_weights
    return CuttingPlanes(
        problem=problem,
        space=space,
        oracle=WalkRelaxation.of(tables, kinds=1, blocks=len(tables.rank_N)).cheapest,
        goal=no_prices(len(tables.count_C))._replace(mean=mean, latency=worst),
        iterations=ITERATIONS,
        close=CLOSE,
    )


def price_rows(planes: CuttingPlanes, tables: Tables, best: Prices) -> list[PriceRow]:
    """Returns the row of the best prices, then rows that price a single limit: latency, ramps, budget, each device."""
    problem, none = planes.problem, no_prices(len(tables.count_C))
    alone = [none._replace(work_C=tables.rate_per_s * one_C) for one_C in np.eye(len(tables.count_C))]
    if problem.budget_usd_per_hour is not None:
        alone.insert(0, none._replace(work_C=tables.rate_per_s * problem.usd_C, usd=1.0))
    if problem.ramp_budget is not None:
        alone.insert(0, none._replace(ramps=1.0))
    alone.insert(0, none._replace(latency=1.0))
    rows: list[PriceRow] = []
    for prices in [best, *alone][: max(1, MOST_ROW_STATES // (len(tables.rank_N) * tables.leaving_REQ.size))]:
        walks = WalkRelaxation.of(tables, kinds=1, blocks=len(tables.rank_N))
        walks.cheapest(prices, tables.rate_per_s)
        own = replace(planes, goal=none if rows else planes.goal)
        limit = own.price_of_latency(prices) + own.price_of_devices(prices, tables.rate_per_s)
        rows.append(PriceRow(prices, limit, walks.costs.inside_NFREQ[:, 0]))
    return rows


class Layer(NamedTuple):
    """The labels before a block (L)."""

    run_L: IntArray
    """Run, entry and current rank of the open split; see `Tables`. With `used_LC`, they are the label's place."""
    entry_L: IntArray
    rank_L: IntArray
    used_LC: IntArray
    """Replicas of closed stages."""
    sums_LF: FloatArray
    bound_L: FloatArray
    """Lower bound on the objective of the label's plans."""
    parent_L: IntArray
    """The label in the layer before."""
    action_L: IntArray
    """What follows the parent's block: GO_ON, CUT or HOP, plus RAMP if the ramp behind it is active."""

    def take(self, rows_S: IntArray | BoolArray | slice) -> Layer:
        """Returns some of the labels: a copy, except for a slice."""
        return Layer._make(each[rows_S] for each in self)

    @staticmethod
    def joined(parts: Sequence[Layer]) -> Layer:
        """Returns the labels of all parts."""
        return Layer._make(map(np.concatenate, zip(*parts, strict=True)))


@dataclass(slots=True, kw_only=True)
class LatencySearch:
    """A search for the best plan of one part of a space."""

    problem: PlanProblem
    space: Space
    tables: Tables
    after_answer: AfterAnswer
    widths: tuple[int, ...] = WIDTHS
    _rows: list[PriceRow] = field(init=False)
    _most: float = field(init=False)
    """The largest value of a plan of interest: that of the incumbent."""
    _layers: list[Layer] = field(init=False)

    def best(self, incumbent: float = math.inf, *, any_plan: bool = False) -> Found:
        """Returns the best plans that are no worse than the incumbent's value. `any_plan` stops at the first ones."""
        planes = planes_of(self.problem, self.tables, self.space)
        least, most_s = planes.least_time(self.tables.rate_per_s), self.problem.slo.limit_s
        most_s *= sum(self.problem.time_weights)  # the mean answer time is at most the worst case
        value, dropped = min(incumbent, most_s), 0.0
        plans: tuple[FeasiblePlan, ...] = ()
        if math.isinf(least.value) or least.value > value * (1 + TIE_TOLERANCE):
            return Found(plans=plans, bound=math.inf)
        if not self.space.is_over():
            self._rows = price_rows(planes, self.tables, least.prices)
        for width in self.widths:
            self._most = value * (1 + TIE_TOLERANCE)
            if (least_dropped := self._search(width)) is None:
                break
            dropped = least_dropped
            plans = self._feasible_plans() or plans
            value = min([value, *(objective_value(self.problem, plan.figures) for plan in plans[:1])])
            if dropped >= value * (1 - TIE_TOLERANCE):
                return Found(plans=plans, bound=value if plans else math.inf)
            if plans and any_plan:
                break
        return Found(plans=plans, bound=max(least.value, min(dropped, value)))

    def _search(self, width: int) -> float | None:
        """Fills the layers. Returns the least bound of labels that the width dropped, or None if time is over first."""
        self._layers, dropped = [_first_layer(self.tables)], math.inf
        for block in range(self.problem.num_blocks):
            if self.space.is_over():
                return None
            layer = self._next_layer(block)
            if len(layer.run_L) > width and block + 1 < self.problem.num_blocks:
                dropped, layer = min(dropped, float(layer.bound_L[width])), layer.take(np.arange(width))
            self._layers.append(layer)
        return dropped

    def _next_layer(self, block: int) -> Layer:
        """Returns the undominated labels behind a block, the lowest bound first."""
        layer = self._layers[-1]._replace(parent_L=np.arange(len(self._layers[-1].run_L)))
        parts = [layer.take(slice(0))]
        for first in range(0, len(layer.run_L), TOGETHER):
            some = layer.take(slice(first, first + TOGETHER))
            parts.append(_undominated(Layer.joined([parts[0], *self._behind(block, some)])))
        return _undominated(Layer.joined(parts)) if len(parts) != 2 else parts[1]

    def _behind(self, block: int, labels: Layer) -> Iterator[Layer]:
        """Yields what follows a block, without and with its ramp."""
        tables, rank = self.tables, int(self.tables.rank_N[block])
        crosses, is_end = bool(tables.crosses_N[block]), block + 1 == self.problem.num_blocks
        for ramp in dict.fromkeys((0, rank)):
            if (ramp != rank and tables.rule == ALL) or (ramp and tables.rule == NONE):
                continue
            passed = self._passed(block, labels, ramp)
            if is_end:
                yield self._complete(passed)
                continue
            if not crosses and not (ramp and tables.rule == SPLIT_ENDS):
                yield self._after(block, passed, GO_ON)
            if tables.may_split:
                yield self._after(block, passed, CUT)
            if tables.may_hop:
                yield self._after(block, passed, HOP)

    def _passed(self, block: int, labels: Layer, ramp: int) -> Layer:
        """Returns the labels with the seconds of a block and of the ramp behind it; rank 0: no active ramp."""
        tables = self.tables
        # An optional ramp at which no input leaves stays off.
        is_useful_L = tables.unanswered_Q[ramp] < tables.unanswered_Q[labels.rank_L]
        labels = labels.take(is_useful_L | (ramp == 0 or tables.rule == ALL))
        self._add(labels, tables.block_s_CNG[:, block], -tables.ramp_budget)
        if ramp:
            self._add(labels, tables.ramp_s_CQG[:, ramp], float(tables.ramp_budget > 0))
            labels.rank_L[:] = ramp
        labels.action_L[:] = RAMP if ramp else 0
        return labels

    def _add(self, labels: Layer, seconds_CG: FloatArray, beyond: float) -> None:
        """Adds the seconds of a block or ramp; `beyond` is the share that counts as beyond the ramps' budget."""
        tables, state = self.tables, (labels.run_L, labels.entry_L, labels.rank_L)
        device_L = tables.device_R[labels.run_L]
        cell_KL, part_KL = tables.cell_KREQ[:, *state], tables.part_KREQ[:, *state]
        low_KL = seconds_CG[device_L, cell_KL]
        high_KL = seconds_CG[device_L, np.minimum(cell_KL + 1, seconds_CG.shape[1] - 1)]
        seconds_L, mean_s_L = tables.weight_KREQ[:, *state] * (low_KL + part_KL * (high_KL - low_KL))
        labels.sums_LF[:, MEAN] += tables.unanswered_Q[labels.rank_L] * seconds_L
        labels.sums_LF[:, LATENCY] += seconds_L
        labels.sums_LF[:, RAMPS] += beyond * seconds_L
        labels.sums_LF[:, WORK] += self._per_input(labels, mean_s_L)

    def _per_input(self, labels: Layer, seconds_L: FloatArray) -> FloatArray:
        """Returns the seconds of a batch per input of the service."""
        return np.asarray(self.tables.enters_E[labels.entry_L] * seconds_L / self.tables.batch_R[labels.run_L])

    def _after(self, block: int, labels: Layer, action: int) -> Layer:
        """Returns the promising labels before the next block, after GO_ON, CUT or HOP."""
        tables, crosses, work_L = self.tables, bool(self.tables.crosses_N[block]), labels.sums_LF[:, WORK]
        after_s_L = np.zeros(len(work_L))
        if action == HOP or crosses:
            leaving_L = tables.leaving_REQ[labels.run_L, labels.entry_L, labels.rank_L]
            bandwidth_L = tables.bandwidth_C[tables.device_R[labels.run_L]]
            after_s_L = tables.delay_s + tables.bytes_N[block] * leaving_L / bandwidth_L
        if action == HOP:  # replicas send while they compute
            work_L = np.maximum(work_L, self._per_input(labels, after_s_L))
        fits_L, replicas_L = self._replicas(labels, work_L)
        labels, replicas_L = labels.take(fits_L), replicas_L[fits_L]
        labels.action_L[:] += action
        if action == GO_ON:
            return self._promising(block + 1, labels, replicas_L)
        after_s_L = after_s_L[fits_L] + (tables.crossing_s if crosses else 0.0)
        if action == HOP:
            self._close(labels, replicas_L)
        labels.sums_LF[:, MEAN] += tables.unanswered_Q[labels.rank_L] * after_s_L
        labels.sums_LF[:, LATENCY] += after_s_L
        return self._begun(block, labels, replicas_L, action)

    def _replicas(self, labels: Layer, work_L: FloatArray) -> tuple[BoolArray, IntArray]:
        """Returns whether the open stage fits the devices and the budget, and the least replicas that it needs."""
        tables, device_L = self.tables, self.tables.device_R[labels.run_L]
        needed_L = np.maximum(np.ceil(work_L * tables.rate_per_s * (1 - ROUNDING)), 1)
        used_LC = labels.used_LC + needed_L[:, None] * np.eye(len(tables.count_C))[device_L]
        usd_L = self.problem.usd_of(dict(zip(device_names(self.problem), used_LC.T, strict=True)))
        fits_L = (used_LC <= tables.count_C).all(axis=1) & (usd_L <= self.problem.max_usd_per_hour * (1 + TOLERANCE))
        return fits_L, np.where(fits_L, needed_L, 0).astype(np.int64)

    def _close(self, labels: Layer, replicas_L: IntArray) -> None:
        """Closes the open stages. The waits of their further splits follow from their replicas."""
        sums_LF = labels.sums_LF
        sums_LF[:, :2] += replicas_L[:, None] * sums_LF[:, MEAN_INPUTS:] / self.tables.rate_per_s
        sums_LF[:, WORK:] = 0.0
        labels.used_LC[np.arange(len(replicas_L)), self.tables.device_R[labels.run_L]] += replicas_L

    def _begun(self, block: int, labels: Layer, replicas_L: IntArray, action: int) -> Layer:
        """Returns one label for every split that may begin behind a block."""
        tables = self.tables
        entry_L = np.minimum(labels.rank_L, len(tables.enters_E) - 1)
        if action == CUT:
            may_begin_LR = tables.device_R[labels.run_L, None] == tables.device_R
        else:
            may_begin_LR, replicas_L = (labels.used_LC < tables.count_C)[:, tables.device_R], np.ones_like(replicas_L)
        label_S, run_S = np.nonzero(may_begin_LR & (tables.enters_E[entry_L] > 0)[:, None])
        labels = labels.take(label_S)._replace(run_L=run_S, entry_L=entry_L[label_S])
        inputs_S = tables.wait_RE[run_S, labels.entry_L]
        waits_S2 = np.stack([tables.unanswered_Q[labels.rank_L] / 2 * inputs_S, inputs_S], axis=1)
        if action == CUT and not tables.crosses_N[block]:  # each replica fills a batch of its own
            labels.sums_LF[:, MEAN_INPUTS:] += waits_S2
        else:
            labels.sums_LF[:, :2] += waits_S2 / tables.rate_per_s
        return self._promising(block + 1, labels, replicas_L[label_S])

    def _promising(self, block: int, labels: Layer, replicas_L: IntArray) -> Layer:
        """Returns the labels that may lead to a better plan, if their stages need `replicas_L` at least."""
        sums_LF, rate_per_s, device_L = labels.sums_LF, self.tables.rate_per_s, self.tables.device_R[labels.run_L]
        times_L2 = sums_LF[:, :2] + replicas_L[:, None] * sums_LF[:, MEAN_INPUTS:] / rate_per_s
        is_promising_L = np.ones(len(device_L), dtype=bool)
        for row, (prices, limit, to_end_NREQ) in enumerate(self._rows):
            price_L = times_L2 @ np.array([prices.mean, prices.latency]) + prices.ramps * sums_LF[:, RAMPS]
            price_L += prices.work_C[device_L] * sums_LF[:, WORK]
            price_L += labels.used_LC @ ((prices.work_C + prices.hop_C) / rate_per_s)
            price_L += to_end_NREQ[block, labels.run_L, labels.entry_L, labels.rank_L]
            if row == 0:
                labels.bound_L[:] = np.maximum(price_L - limit, 0.0)
                is_promising_L &= labels.bound_L <= self._most
            else:
                is_promising_L &= price_L - limit <= TOLERANCE * limit + prices.ramps * self._ramp_rounding_s(labels)
        return labels.take(is_promising_L)

    def _complete(self, labels: Layer) -> Layer:
        """Returns the plans that keep their limits and are no worse than the incumbent, after the last block."""
        fits_L, replicas_L = self._replicas(labels, labels.sums_LF[:, WORK])
        labels = labels.take(fits_L)
        self._close(labels, replicas_L[fits_L])
        for each_L in (labels.run_L, labels.entry_L, labels.rank_L):
            each_L[:] = 0
        labels.action_L[:] += HOP
        labels.bound_L[:] = labels.sums_LF[:, :2] @ np.array(self.problem.time_weights)
        keeps_L = labels.sums_LF[:, LATENCY] <= self.problem.slo.limit_s * (1 + TOLERANCE)
        keeps_L &= labels.sums_LF[:, RAMPS] <= self._ramp_rounding_s(labels)
        return labels.take(keeps_L & (labels.bound_L <= self._most))

    def _ramp_rounding_s(self, labels: Layer) -> FloatArray:
        """Returns by how many seconds rounding may make ramps exceed their budget."""
        return TOLERANCE * self.tables.ramp_budget * labels.sums_LF[:, LATENCY]

    def _feasible_plans(self) -> tuple[FeasiblePlan, ...]:
        """Returns the best plans of the last layer that keep every promise by `optimizer.cost.evaluate`."""
        plans: list[FeasiblePlan] = []
        for label in range(min(len(self._layers[-1].run_L), MOST_TRIED)):
            plan = if_feasible(self.problem, self._chain(label))
            if plan is not None and objective_value(self.problem, plan.figures) <= self._most:
                plans.append(plan)
            if len(plans) == MOST_PLANS:
                break
        return ranked(self.problem, plans)

    def _chain(self, label: int) -> tuple[Stage, ...]:
        """Returns the stages of a plan of the last layer."""
        way, counts = list[tuple[int, int]](), list[int]()
        for layer, behind in reversed(list(pairwise(self._layers))):
            before = behind.parent_L[label]
            way.append((layer.run_L[before], behind.action_L[label]))
            counts.append(int((behind.used_LC[label] - layer.used_LC[before]).sum()))
            label = before
        stages = stages_of(self.tables, device_names(self.problem), reversed(way), self.after_answer)
        return with_replicas(stages, [count for count in reversed(counts) if count])


def ranked(problem: PlanProblem, plans: Sequence[FeasiblePlan]) -> tuple[FeasiblePlan, ...]:
    """Returns plans, best first. A tie goes to the cheaper, then to the lower worst case, then to inputs that stop."""
    least = min((objective_value(problem, plan.figures) for plan in plans), default=0.0)

    def order(plan: FeasiblePlan) -> tuple[float, float, float, bool]:
        value = max(objective_value(problem, plan.figures), least * (1 + TIE_TOLERANCE))
        # Plans whose inputs stop, and those whose inputs stay, sum the same seconds in different orders: round.
        worst_s = float(f"{plan.figures.latency_s:.10g}")
        return value, plan.figures.usd_per_hour, worst_s, plan.stages[0].splits[0].stays

    return tuple(sorted(plans, key=order))


def _first_layer(tables: Tables) -> Layer:
    """Returns one label for every first split."""
    wait_s_R = tables.wait_RE[:, 0] / tables.rate_per_s
    sums_RF = np.zeros((len(wait_s_R), NUM_SUMS))
    sums_RF[:, MEAN], sums_RF[:, LATENCY] = tables.unanswered_Q[0] / 2 * wait_s_R, wait_s_R
    none_R, used_RC = np.zeros_like(tables.device_R), np.zeros((len(wait_s_R), len(tables.count_C)), dtype=np.int64)
    return Layer(np.arange(len(wait_s_R)), none_R, none_R, used_RC, sums_RF, 0.0 * wait_s_R, none_R, none_R)


def _undominated(labels: Layer) -> Layer:
    """Returns the labels that no other label at the same place dominates, the lowest bound first."""
    place_LI = np.column_stack([labels.run_L, labels.entry_L, labels.rank_L, labels.used_LC])
    # Equal places have equal hashes; a collision does no harm.
    hash_L = place_LI @ (np.random.default_rng(0).integers(-(2**62), 2**62, place_LI.shape[1]) | 1)
    order_L = np.lexsort((labels.parent_L, labels.bound_L, hash_L))
    group_L = np.append(0, (place_LI[order_L[1:]] != place_LI[order_L[:-1]]).any(1).cumsum())
    _, kept_L = undominated(order_L, group_L, labels.sums_LF, 0, NUM_SUMS, 0.0, len(order_L))
    return labels.take(kept_L[np.argsort(labels.bound_L[kept_L], kind="stable")])
