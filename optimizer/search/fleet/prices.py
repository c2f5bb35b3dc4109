"""Divisions of a cluster among models, and the relaxation that prices its accelerators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from optimizer.cost.evaluate import TOLERANCE, evaluate, violations
from optimizer.plans.plan import Stage, replicas_of
from optimizer.problems.fleet import Fleet
from optimizer.search.relaxation import CuttingPlanes
from optimizer.search.space import SPACES
from optimizer.search.tables import tables_of
from optimizer.search.walks import Prices, Walk, WalkRelaxation
from profiles.table import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """A plan for each model, on its part of the accelerators."""

    bound: float
    """No division has a higher share, or a lower cost."""
    stages: tuple[tuple[Stage, ...], ...]
    """The stages of each model's plan. Without any, the model is not served."""

    def merit(self, fleet: Fleet) -> float:
        """Returns the least share of all models by the cost model, or minus the USD per hour; the best is the highest.

        If a plan breaks a limit, the share is 0, and the cost is infinite.
        """
        shares, none = list[float](), -math.inf if fleet.is_cost else 0.0
        for problem, stages, rate_per_s in zip(fleet.problems, self.stages, fleet.rate_M, strict=True):
            figures = evaluate(problem, stages) if stages else None
            if figures is None or violations(problem, stages, figures):
                return none
            shares.append(figures.rate_per_s / rate_per_s)
        used = replicas_of(stage for stages in self.stages for stage in stages)
        if any(used[name] > supply.count for name, supply in problem.devices.items()):
            return none
        return -problem.usd_of(used) if fleet.is_cost else min(shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPrices:
    """The solved relaxation of a fleet."""

    bound: float
    """No division has a higher share, or a lower cost."""
    price_C: FloatArray
    """Price of a device second."""
    rate_MC: FloatArray
    """Upper bounds of a model's requests per second on each accelerator of a type."""
    walks_M: Sequence[WalkRelaxation]


def priced(fleet: Fleet) -> FleetPrices:
    """Returns a bound on the share or the cost, with the prices that prove it.

    It relaxes one plan for the inputs of all models, in proportion to their rates, as `optimizer.search.walks` relaxes
    plans of one model. Latencies relative to their limits are averaged over models.
    """
    problems, rate_M = fleet.problems, fleet.rate_M
    limit_M = np.array([problem.slo.limit_s for problem in problems])
    walks_M = [WalkRelaxation.of(tables_of(problem, SPACES["best"])) for problem in problems]

    def cheapest_M(prices: Prices) -> tuple[FloatArray, FloatArray, list[Walk]]:
        latency_M: FloatArray = prices.latency * limit_M[0] / (limit_M * rate_M * len(rate_M))
        own_M = [prices._replace(latency=float(latency)) for latency in latency_M]
        found = [walks.cheapest(own, math.inf) for walks, own in zip(walks_M, own_M, strict=True)]
        return np.array([least for least, _ in found]), latency_M * limit_M, [walk for _, walk in found]

    def oracle(prices: Prices, _fill_rate: float) -> tuple[float, Walk]:
        least_M, _, walks = cheapest_M(prices)
        work_C, hop_C = (rate_M @ [walk[at] for walk in walks] for at in (0, 1))
        latency_s = float(limit_M[0] * np.mean([walk.latency_s for walk in walks] / limit_M))
        return float(rate_M @ least_M), Walk(work_C, hop_C, latency_s, 0.0)

    unit = problems[0].with_rate(1.0)  # the inputs of all models at a share of 1 are the input of one problem
    planes = CuttingPlanes(problem=unit, space=SPACES["best"], oracle=oracle)
    bounded = planes.highest_rate()
    least_M, waiting_M, _ = cheapest_M(bounded.prices)
    price_C = bounded.prices.work_C + bounded.prices.hop_C
    rate_MC = price_C / np.maximum(least_M - waiting_M, 1e-100)[:, None]
    if fleet.is_cost:
        bounded = planes.tightened(bounded) if bounded.value >= 1 - TOLERANCE else replace(bounded, value=math.inf)
        price_C = np.maximum(bounded.prices.work_C + bounded.prices.hop_C, fleet.usd_C)
    return FleetPrices(bound=bounded.value, price_C=price_C, rate_MC=rate_MC, walks_M=walks_M)
