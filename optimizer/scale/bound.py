"""An upper bound on the rate, or a lower bound on the cost, of every plan of a problem, by Lagrangian duality.

Plans are relaxed to walks (`optimizer.walks`). Kelley's cutting-plane method finds the prices: the cheapest walk at the
current prices joins the mixture, and the dual of the mixture's linear program gives the next prices. Each step is
halved towards the best prices so far.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from optimizer.evaluate import TOLERANCE
from optimizer.problem import PlanProblem
from optimizer.space import Space
from optimizer.step import FloatArray
from optimizer.tables import tables_of
from optimizer.walks import Oracle, Prices, Walk, WalkRelaxation

ITERATIONS = 80
# Relative gap between the linear program and the bound at which the method stops.
CLOSE = 2e-4
# Above any price.
FORBIDDEN = 1e30
# Price of exceeding the latency limit in the linear program, whose other values are about 1: the limit has priority.
BROKEN_LIMIT_PRICE = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class DualBound:
    """A proven bound, and the prices that prove it."""

    value: float
    """No plan has a higher rate, or a lower cost."""
    prices: Prices


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """The solved relaxation of a problem that may have plans."""

    planes: CuttingPlanes
    bound: DualBound
    ramps: tuple[int, ...]
    """The active ramps of the cheapest walk."""


def solve_relaxation(
    problem: PlanProblem,
    space: Space,
    names: tuple[str, ...],
    *,
    batch: int | None = None,
    iterations: int = ITERATIONS,
) -> Relaxation | None:
    """Returns the bound on plans of these accelerator types, or None if it proves that no plan exists.

    With `batch`, all splits have this batch size.
    """
    walks = WalkRelaxation.of(tables_of(problem, space, batch=batch, names=names))
    planes = CuttingPlanes(problem=problem, names=names, oracle=walks.cheapest, iterations=iterations)
    if planes.is_too_slow():
        return None
    rate = problem.required_per_s
    bound = planes.highest_rate(enough=math.inf if rate is None else rate)
    if bound.value <= 0 or (rate is not None and bound.value < rate * (1 - TOLERANCE)):
        return None
    if rate is not None:
        bound = planes.least_cost(rate, bound.prices)
        if bound.value > problem.max_usd_per_hour * (1 + TOLERANCE):
            return None
    walks.cheapest(bound.prices, rate or bound.value)
    return Relaxation(planes=planes, bound=bound, ramps=walks.last_ramps(problem))


@dataclass(slots=True, kw_only=True)
class CuttingPlanes:
    """The restricted master problem: a linear program over mixtures of the walks found so far."""

    problem: PlanProblem
    names: tuple[str, ...]
    oracle: Oracle
    needed: tuple[int, ...] = ()
    """Devices on which every plan of interest has a stage."""
    iterations: int = ITERATIONS
    walks: list[Walk] = field(default_factory=list)

    @property
    def count_C(self) -> FloatArray:
        return np.array([self.problem.devices[name].count for name in self.names], dtype=float)

    @property
    def usd_C(self) -> FloatArray:
        return np.array([self.problem.devices[name].usd_per_hour for name in self.names], dtype=float)

    def is_too_slow(self, fill_rate: float = math.inf) -> bool:
        """Returns whether all plans exceed the latency limit, even if batches fill at this rate."""
        nothing_C = np.zeros(len(self.names))
        least_s = self.oracle(Prices(nothing_C, nothing_C, 1.0, 0.0, nothing_C), fill_rate)[0]
        return least_s > self.problem.slo.limit_s * (1 + TOLERANCE)

    def highest_rate(self, *, enough: float = math.inf) -> DualBound:
        """Returns an upper bound on the rate. Stops early once a mixture of walks reaches `enough`."""
        start_C = 1 / (self.count_C * len(self.names))
        prices = Prices(start_C, np.zeros_like(start_C), 0.0, 0.0, np.zeros_like(start_C))
        bound = self._maximized(prices, math.inf, None, enough)
        if bound.value < enough and math.isfinite(bound.value):  # no plan is faster, so batches fill no faster either
            bound = self._maximized(bound.prices, bound.value * (1 + 1e-9), None, enough)
        return bound

    def least_cost(self, rate_per_s: float, start: Prices) -> DualBound:
        """Returns a lower bound on the cost of a rate that `highest_rate` does not exclude, in USD per hour."""
        return self._maximized(start, rate_per_s, rate_per_s, math.inf)

    def tightened(self, start: DualBound) -> DualBound:
        """Returns an upper bound on the rate, from the prices of another valid bound."""
        return self._maximized(start.prices, start.value * (1 + 1e-9), None, math.inf)

    def needed_for(self, rate_per_s: float, bound: DualBound) -> tuple[int, ...]:
        """Returns the devices without which no plan reaches a rate."""
        needed = []
        for device in range(len(self.names)):
            without_C = bound.prices.work_C.copy()
            without_C[device] = FORBIDDEN
            least, _ = self.oracle(bound.prices._replace(work_C=without_C), bound.value)
            scarcity_C = np.maximum(bound.prices.work_C + bound.prices.hop_C - bound.prices.usd * self.usd_C, 0)
            scale = self._price_of_everything(bound.prices) - float(scarcity_C[device] * self.count_C[device])
            least -= bound.prices.latency * self.problem.slo.limit_s
            if least > 0 and scale < rate_per_s * least * (1 - 1e-6):
                needed.append(device)
        return tuple(needed)

    def _maximized(self, prices: Prices, fill_rate: float, rate_per_s: float | None, enough: float) -> DualBound:
        """Runs the cutting-plane method from the given prices."""
        best_value, best = -math.inf, prices
        for _ in range(self.iterations):
            least, walk = self.oracle(prices, fill_rate)
            value = self._dual_value(prices, least, rate_per_s)
            if value > best_value:
                best_value, best = value, prices
            if math.isinf(least):
                break
            self.walks.append(walk)
            optimum, is_in_time, dual = self._solve_master(fill_rate, rate_per_s)
            if is_in_time and (optimum - best_value <= CLOSE * abs(optimum) or optimum * enough <= 1):
                break
            prices = dual.between(best)
        if rate_per_s is not None:
            return DualBound(value=max(best_value, 0.0), prices=best)
        highest = 1 / best_value if best_value > 0 else math.inf
        return DualBound(value=highest, prices=best)

    def _dual_value(self, prices: Prices, least: float, rate_per_s: float | None) -> float:
        """Returns a lower bound on the service's seconds per input, or on USD per hour, by weak duality."""
        least += float(prices.stage_C.sum()) - prices.latency * self.problem.slo.limit_s
        if rate_per_s is None:
            scale = self._price_of_everything(prices)
            return least / scale if scale > 0 else -math.inf
        scarcity_C = np.maximum(prices.work_C + prices.hop_C - rate_per_s * self.usd_C, 0)
        return least - float(scarcity_C @ self.count_C) / rate_per_s

    def _price_of_everything(self, prices: Prices) -> float:
        """Returns the price of all devices and of the budget together."""
        scarcity_C = np.maximum(prices.work_C + prices.hop_C - prices.usd * self.usd_C, 0)
        budget = self.problem.budget_usd_per_hour
        return float(scarcity_C @ self.count_C) + (0.0 if budget is None else prices.usd * budget)

    def _solve_master(self, fill_rate: float, rate_per_s: float | None) -> tuple[float, bool, Prices]:
        """Returns the value of the best mixture of walks, whether it keeps the latency limit, and its dual prices.

        Columns: seconds per input of the service (unused if the cost is minimized), latency above the limit, share of
        each device, share of the load of each walk. Rows: work, hops and count per device; latency; budget; stages on
        needed devices.
        """
        from scipy.optimize import linprog

        count, num_walks = len(self.names), len(self.walks)
        limit_s, budget = self.problem.slo.limit_s, self.problem.budget_usd_per_hour
        work_CW = np.array([walk.work_C for walk in self.walks]).T / self.count_C[:, None]
        hop_CW = np.array([walk.hop_work_C for walk in self.walks]).T / self.count_C[:, None]
        latency_W = np.array([walk.latency_s + walk.fill / fill_rate for walk in self.walks]) / limit_s
        unit = 1 / rate_per_s if rate_per_s is not None else float(work_CW.max())
        usd_C = self.usd_C * self.count_C
        rows = np.zeros((4 * count + 2, 2 + count + num_walks))
        limits = np.zeros(4 * count + 2)
        devices, shares, loads = np.arange(count), slice(2, 2 + count), slice(2 + count, None)
        rows[:count, loads], rows[devices, 2 + devices] = work_CW / unit, -1.0
        rows[count : 2 * count, loads], rows[count + devices, 2 + devices] = hop_CW / unit, -1.0
        rows[2 * count + devices, 2 + devices] = 1.0
        rows[3 * count, loads], rows[3 * count, 1], limits[3 * count] = latency_W, -1.0, 1.0
        objective = np.zeros(2 + count + num_walks)
        objective[1] = BROKEN_LIMIT_PRICE
        value_unit = unit
        if rate_per_s is None:
            rows[2 * count : 3 * count, 0], objective[0] = -1.0, 1.0
            if budget is not None:
                rows[3 * count + 1, shares], rows[3 * count + 1, 0] = usd_C / max(budget, 1e-9), -1.0
        else:
            limits[2 * count : 3 * count] = 1.0
            value_unit = max(float(usd_C.max()), 1e-9)
            objective[shares] = usd_C / value_unit
            rows[2 * count : 3 * count, 1] = -1.0
        for device in self.needed:
            row = 3 * count + 2 + device
            rows[row, loads] = [-walk.stages_C[device] for walk in self.walks]
            rows[row, 1], limits[row] = -1.0, -1.0
        all_load = np.zeros((1, 2 + count + num_walks))
        all_load[0, loads] = 1.0
        solved = linprog(objective, A_ub=rows, b_ub=limits, A_eq=all_load, b_eq=[1.0], method="highs")
        dual = np.maximum(-solved.ineqlin.marginals, 0.0) * value_unit
        prices = Prices(
            dual[:count] / self.count_C / unit,
            dual[count : 2 * count] / self.count_C / unit,
            float(dual[3 * count]) / limit_s,
            float(dual[3 * count + 1]) / unit / max(budget, 1e-9) if budget else 0.0,
            dual[3 * count + 2 :],
        )
        return float(solved.fun) * value_unit, bool(solved.x[1] <= 1e-9), prices
