"""Lower bounds on the mean answer time, or on the worst-case latency, of every plan: rows of dual prices.

The cutting-plane method (`optimizer.search.relaxation`) finds the best row. Further rows price a single limit each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from optimizer.problems.problem import PlanProblem, device_names
from optimizer.search.relaxation import CuttingPlanes
from optimizer.search.tables import RunTables
from optimizer.search.walks import CostToGo, Prices, WalkRelaxation, empty_cost_to_go, no_prices

ITERATIONS = 60
CLOSE = 1e-6
"""Gap at which the cutting-plane method stops."""


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


def best_price_row(problem: PlanProblem, tables: RunTables, *, worst_case: bool = False) -> PriceRow:
    """Returns the row with the largest bound that is found. The bound is infinite if no plan exists at all.

    With `worst_case`, the worst-case latency is minimized, and it has no limit.
    """
    planes = _planes(problem, tables, worst_case)
    return _price_row(planes, tables, planes.least_time(tables.rate_per_s).prices, has_objective=True)


def price_rows(
    problem: PlanProblem, tables: RunTables, best: PriceRow, most_rows: int, *, worst_case: bool
) -> list[PriceRow]:
    """Returns several rows: the best, then one that prices each limit alone, then one that prices no limit."""
    planes = _planes(problem, tables, worst_case)
    none, goal = no_prices(len(tables.count_C)), planes.goal
    assert goal is not None
    alone = [none._replace(work_C=tables.rate_per_s * one_C) for one_C in np.eye(len(tables.count_C))]
    if problem.budget_usd_per_hour is not None:
        alone.insert(0, none._replace(work_C=tables.rate_per_s * tables.usd_C, usd=1.0))
    if problem.ramp_budget is not None:
        alone.insert(0, none._replace(ramps=1.0))
    if not worst_case:
        alone.insert(0, none._replace(latency=1.0))
    without_goal = replace(planes, goal=none)
    rows = [best, *(_price_row(without_goal, tables, prices, has_objective=False) for prices in alone[: most_rows - 1])]
    return [*rows, _price_row(planes, tables, goal, has_objective=True)][:most_rows]


def _planes(problem: PlanProblem, tables: RunTables, worst_case: bool) -> CuttingPlanes:
    goal = no_prices(len(tables.count_C))
    return CuttingPlanes(
        problem=problem,
        names=device_names(problem),
        oracle=_relaxation(tables).cheapest,
        goal=goal._replace(latency=1.0) if worst_case else goal._replace(mean=1.0),
        iterations=ITERATIONS,
        close=CLOSE,
    )


def _relaxation(tables: RunTables) -> WalkRelaxation:
    return WalkRelaxation(tables=tables, costs=empty_cost_to_go(tables, kinds=1, blocks=len(tables.rank_N)))


def _price_row(planes: CuttingPlanes, tables: RunTables, prices: Prices, *, has_objective: bool) -> PriceRow:
    walks = _relaxation(tables)
    walks.cheapest(prices, tables.rate_per_s)
    limit = planes.price_of_latency(prices) + planes.price_of_devices(prices, tables.rate_per_s)
    return PriceRow(prices=prices, costs=walks.costs, limit=limit, has_objective=has_objective)
