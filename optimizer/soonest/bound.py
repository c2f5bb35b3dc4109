"""The best prices: the greatest proof that plans of a space answer no sooner.

Found by cutting planes (Kelley's method): the cheapest walk at the last prices joins a linear program, whose dual gives
the next ones. The unit of what is sought is a second: of the mean answer time, or of the worst case.
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
HIGHEST = 1e4
"""No price is sought above so many times what is sought costs without any limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What a plan may use up; infinite where there is no limit."""

    latency_s: float
    usd_per_hour: float
    ramps: float
    """0: seconds of ramps stay inside their budget; infinite: there is none."""
    seeks_worst: bool = False
    """Whether the worst case is sought in the place of the mean answer time."""

    def value_of(self, found: FeasiblePlan) -> float:
        """What is sought, of a plan."""
        return found.figures.latency_s if self.seeks_worst else found.figures.mean_latency_s

    @staticmethod
    def of(problem: PlanProblem) -> Allowance:
        """Those of a problem."""
        budget = problem.budget_usd_per_hour
        return Allowance(
            latency_s=problem.slo.limit_s,
            usd_per_hour=math.inf if budget is None else budget,
            ramps=math.inf if problem.ramp_budget is None else 0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of prices, and what it proves of every partial plan: its price so far, and that of the rest."""

    prices: Prices
    ways: CostToGo
    allowed: float
    """The price of all that a plan may use up."""
    counts: bool
    """Whether what is sought is in it: then its sums less `allowed` are a bound; else they are at most 0 for a plan."""

    @property
    def least(self) -> float:
        """What it proves of all plans."""
        return float(self.ways.first_KQ[0, 0]) - self.allowed


def best_row(tables: RunTables, limits: Allowance) -> Row:
    """The row of the greatest bound; an infinite one where no plan runs at all."""
    num_devices = len(tables.count_C)
    limit_J = np.array([limits.latency_s, limits.ramps, limits.usd_per_hour, *tables.count_C])
    row = row_of(tables, limits, np.zeros(3 + num_devices), counts=True)
    if math.isinf(row.least):
        return row
    scale_J = np.where(np.isfinite(limit_J) & (limit_J > 0), limit_J, 1.0)
    scale_J[1] = max(float(tables.block_s_CNG.max(axis=(0, 2)).sum()), 1e-300)
    priced_J = np.isfinite(limit_J)
    unit, best, planes = max(row.least, 1e-300), row, []
    for _ in range(ITERATIONS):
        walk = trace_walk(tables, row.ways)[0]
        latency_s, devices_C = walk.latency_s + walk.fill / tables.rate_per_s, tables.rate_per_s * walk.work_C
        use_J = np.array([latency_s, walk.ramps_s, float(devices_C @ tables.usd_C), *devices_C])
        over_J = np.where(priced_J, (use_J - np.where(priced_J, limit_J, 0.0)) / scale_J, 0.0)
        mean_s = walk.mean_s + walk.mean_fill / tables.rate_per_s
        planes.append((latency_s if limits.seeks_worst else mean_s, over_J))
        found = _next_prices(planes, unit)
        if found is None or found[0] - best.least <= CLOSE * unit:
            break
        price_J = found[1]
        row = row_of(tables, limits, price_J / scale_J, counts=True)
        best = max(best, row, key=lambda each: each.least)
    return best


def row_of(tables: RunTables, limits: Allowance, price_J: FloatArray, *, counts: bool) -> Row:
    """The row of some prices: of latency, ramps, money, and every device."""
    finite_J = np.array([limits.latency_s, limits.ramps, limits.usd_per_hour, *tables.count_C])
    allowed = sum(float(price * limit) for price, limit in zip(price_J, finite_J, strict=True) if price)
    worst = limits.seeks_worst
    nothing_C = np.zeros(len(tables.count_C))
    prices = Prices(
        work_C=tables.rate_per_s * (price_J[3:] + price_J[2] * tables.usd_C),
        hop_C=nothing_C,
        latency=float(price_J[0]) + float(counts and worst),
        usd=0.0,
        stage_C=nothing_C,
        mean=float(counts and not worst),
        ramps=float(price_J[1]),
    )
    ways = empty_cost_to_go(tables, kinds=1, blocks=len(tables.rank_N))
    fill_cost_to_go(tables, prices, tables.rate_per_s, ways)
    return Row(prices=prices, ways=ways, allowed=allowed, counts=counts)


def proofs(tables: RunTables, limits: Allowance, best: Row, most_rows: int) -> list[Row]:
    """Several rows: the best, then one for each limit alone, which no plan may exceed, and one without any limit."""
    num_prices = 3 + len(tables.count_C)
    limit_J = np.array([limits.latency_s, limits.ramps, limits.usd_per_hour, *tables.count_C])
    rows = [best]
    for price in range(num_prices):
        if np.isfinite(limit_J[price]) and len(rows) < most_rows:
            rows.append(row_of(tables, limits, np.eye(num_prices)[price], counts=False))
    if len(rows) < most_rows:
        rows.append(row_of(tables, limits, np.zeros(num_prices), counts=True))
    return rows


def _next_prices(planes: list[tuple[float, FloatArray]], unit: float) -> tuple[float, FloatArray] | None:
    """The greatest bound that the walks met so far allow, and its prices; None where numbers are too far apart.

    Every row is a proof, so without them the best one so far stands.
    """
    from scipy.optimize import linprog

    value_W = np.array([value for value, _ in planes]) / unit
    over_WJ = np.array([over_J for _, over_J in planes])
    num_prices = over_WJ.shape[1]
    solved = linprog(
        np.array([-1.0, *np.zeros(num_prices)]),
        A_ub=np.column_stack([np.ones(len(planes)), -over_WJ]),
        b_ub=value_W,
        bounds=[(None, None), *[(0.0, HIGHEST)] * num_prices],
        method="highs",
    )
    if solved.x is None:
        return None
    return -float(solved.fun) * unit, np.maximum(solved.x[1:], 0.0) * unit
