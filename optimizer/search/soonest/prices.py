"""Rows of dual prices, which bound the mean answer time or the worst-case latency of plans, or their use of a limit.

The cutting-plane method (`optimizer.search.relaxation`) finds the first row. Further rows price a single limit each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from optimizer.problems.problem import PlanProblem, device_names
from optimizer.search.relaxation import CuttingPlanes
from optimizer.search.step import FloatArray
from optimizer.search.walks import Prices, RunTables, WalkRelaxation, empty_cost_to_go, no_prices

ITERATIONS = 60
CLOSE = 1e-6
"""Gap at which the cutting-plane method stops."""
MOST_ROW_STATES = 40_000_000
"""Numbers in all rows of prices together. Larger problems have fewer rows."""


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


def planes_of(problem: PlanProblem, tables: RunTables, *, worst_case: bool = False) -> CuttingPlanes:
    """Returns the cutting-plane method for the mean answer time or, without a limit on it, the worst-case latency."""
    goal = no_prices(len(tables.count_C))
    return CuttingPlanes(
        problem=problem,
        names=device_names(problem),
        oracle=_relaxation(tables).cheapest,
        goal=goal._replace(latency=1.0) if worst_case else goal._replace(mean=1.0),
        iterations=ITERATIONS,
        close=CLOSE,
    )


def price_rows(planes: CuttingPlanes, tables: RunTables, best: Prices) -> list[PriceRow]:
    """Returns the row of the best prices, then one row for the latency, the ramps, the budget and each device."""
    problem, none = planes.problem, no_prices(len(tables.count_C))
    alone = [none._replace(work_C=tables.rate_per_s * one_C) for one_C in np.eye(len(tables.count_C))]
    if problem.budget_usd_per_hour is not None:
        alone.insert(0, none._replace(work_C=tables.rate_per_s * tables.usd_C, usd=1.0))
    if problem.ramp_budget is not None:
        alone.insert(0, none._replace(ramps=1.0))
    if planes.goal is not None and not planes.goal.latency:
        alone.insert(0, none._replace(latency=1.0))
    most = MOST_ROW_STATES // (len(tables.rank_N) * tables.cell_REQ.size)
    limits_only = replace(planes, goal=none)
    return [_row(planes, tables, best), *(_row(limits_only, tables, each) for each in alone[: max(0, most - 1)])]


def _row(planes: CuttingPlanes, tables: RunTables, prices: Prices) -> PriceRow:
    walks = _relaxation(tables)
    walks.cheapest(prices, tables.rate_per_s)
    limit = planes.price_of_latency(prices) + planes.price_of_devices(prices, tables.rate_per_s)
    return PriceRow(prices, limit, walks.costs.inside_NFREQ[:, 0])


def _relaxation(tables: RunTables) -> WalkRelaxation:
    return WalkRelaxation(tables=tables, costs=empty_cost_to_go(tables, kinds=1, blocks=len(tables.rank_N)))
