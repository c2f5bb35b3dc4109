"""A lower bound on the mean answer time of every plan, by Lagrangian duality.

Kelley's cutting-plane method finds the prices: the cheapest walk at the current prices joins a linear program, whose
dual gives the next prices. The unit of the objective is a second of the mean answer time, or of the worst case.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from optimizer.decision import FeasiblePlan
from optimizer.problem import PlanProblem
from optimizer.step import FloatArray
from optimizer.tables import RunTables
from optimizer.walks import CostToGo, Prices, empty_cost_to_go, fill_cost_to_go, trace_walk

ITERATIONS = 60
CLOSE = 1e-6
"""Gap at which the method stops, relative to the bound without limits."""
HIGHEST = 1e4
"""Largest price in the linear program, relative to the bound without limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceLimits:
    """What a plan may use, and what is minimized. A limit is infinite if there is none."""

    latency_s: float
    usd_per_hour: float
    excess_ramp_s: float
    """Seconds of ramps beyond their budget: 0 with a budget, infinite without."""
    minimizes_worst_case: bool = False
    """Whether the worst-case latency is minimized instead of the mean answer time."""

    def value_of(self, plan: FeasiblePlan) -> float:
        """Returns the objective of a plan, in seconds."""
        return plan.figures.latency_s if self.minimizes_worst_case else plan.figures.mean_latency_s

    def row_limits(self, tables: RunTables) -> FloatArray:
        """Returns the limit of each price (J): latency, ramps, money, and the count of every device."""
        return np.array([self.latency_s, self.excess_ramp_s, self.usd_per_hour, *tables.count_C])

    @staticmethod
    def of(problem: PlanProblem) -> ResourceLimits:
        """Returns the limits of a problem."""
        budget = problem.budget_usd_per_hour
        return ResourceLimits(
            latency_s=problem.slo.limit_s,
            usd_per_hour=math.inf if budget is None else budget,
            excess_ramp_s=math.inf if problem.ramp_budget is None else 0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceRow:
    """One row of prices. It bounds every label: by the label's price so far plus the completion bound."""

    prices: Prices
    costs: CostToGo
    limit: float
    """Price of everything that a plan may use."""
    has_objective: bool
    """Whether the price includes the objective. If so, a label's price minus `limit` is a lower bound on the objective
    of its plans. If not, the difference is at most 0 for every plan that keeps its limits."""

    @property
    def bound(self) -> float:
        """The lower bound on the objective of all plans."""
        return float(self.costs.first_KQ[0, 0]) - self.limit


def best_price_row(tables: RunTables, limits: ResourceLimits) -> PriceRow:
    """Returns the row with the largest bound that is found. The bound is infinite if no plan exists at all."""
    limit_J = limits.row_limits(tables)
    row = price_row(tables, limits, np.zeros(len(limit_J)), has_objective=True)
    if math.isinf(row.bound):
        return row
    scale_J = np.where(np.isfinite(limit_J) & (limit_J > 0), limit_J, 1.0)
    scale_J[1] = max(float(tables.block_s_CNG.max(axis=(0, 2)).sum()), 1e-300)
    priced_J = np.isfinite(limit_J)
    unit, best, planes = max(row.bound, 1e-300), row, []
    for _ in range(ITERATIONS):
        walk = trace_walk(tables, row.costs)[0]
        latency_s, devices_C = walk.latency_s + walk.fill / tables.rate_per_s, tables.rate_per_s * walk.work_C
        use_J = np.array([latency_s, walk.ramps_s, float(devices_C @ tables.usd_C), *devices_C])
        excess_J = np.where(priced_J, (use_J - np.where(priced_J, limit_J, 0.0)) / scale_J, 0.0)
        mean_s = walk.mean_s + walk.mean_fill / tables.rate_per_s
        planes.append((latency_s if limits.minimizes_worst_case else mean_s, excess_J))
        solution = _next_prices(planes, unit)
        if solution is None or solution[0] - best.bound <= CLOSE * unit:
            break
        row = price_row(tables, limits, solution[1] / scale_J, has_objective=True)
        best = max(best, row, key=lambda candidate: candidate.bound)
    return best


def price_row(tables: RunTables, limits: ResourceLimits, price_J: FloatArray, *, has_objective: bool) -> PriceRow:
    """Returns the row of the given prices of latency, ramps, money and every device."""
    pairs = zip(price_J, limits.row_limits(tables), strict=True)
    limit = sum(float(price * limit) for price, limit in pairs if price)  # 0 * inf would be NaN
    worst_case = limits.minimizes_worst_case
    nothing_C = np.zeros(len(tables.count_C))
    prices = Prices(
        work_C=tables.rate_per_s * (price_J[3:] + price_J[2] * tables.usd_C),
        hop_C=nothing_C,
        latency=float(price_J[0]) + float(has_objective and worst_case),
        usd=0.0,
        stage_C=nothing_C,
        mean=float(has_objective and not worst_case),
        ramps=float(price_J[1]),
    )
    costs = empty_cost_to_go(tables, kinds=1, blocks=len(tables.rank_N))
    fill_cost_to_go(tables, prices, tables.rate_per_s, costs)
    return PriceRow(prices=prices, costs=costs, limit=limit, has_objective=has_objective)


def price_rows(tables: RunTables, limits: ResourceLimits, best: PriceRow, most_rows: int) -> list[PriceRow]:
    """Returns several rows: the best, then one that prices each limit alone, then one that prices no limit."""
    limit_J = limits.row_limits(tables)
    rows = [best]
    for index, alone_J in enumerate(np.eye(len(limit_J))):
        if np.isfinite(limit_J[index]) and len(rows) < most_rows:
            rows.append(price_row(tables, limits, alone_J, has_objective=False))
    if len(rows) < most_rows:
        rows.append(price_row(tables, limits, np.zeros(len(limit_J)), has_objective=True))
    return rows


def _next_prices(planes: list[tuple[float, FloatArray]], unit: float) -> tuple[float, FloatArray] | None:
    """Returns the largest bound that the cutting planes allow, and its prices.

    Returns None if the linear program fails numerically. The best row so far is a valid bound even then.
    """
    from scipy.optimize import linprog

    value_W = np.array([value for value, _ in planes]) / unit
    excess_WJ = np.array([excess_J for _, excess_J in planes])
    num_prices = excess_WJ.shape[1]
    solved = linprog(
        np.array([-1.0, *np.zeros(num_prices)]),
        A_ub=np.column_stack([np.ones(len(planes)), -excess_WJ]),
        b_ub=value_W,
        bounds=[(None, None), *[(0.0, HIGHEST)] * num_prices],
        method="highs",
    )
    if solved.x is None:
        return None
    return -float(solved.fun) * unit, np.maximum(solved.x[1:], 0.0) * unit
