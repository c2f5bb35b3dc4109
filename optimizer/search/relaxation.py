"""A bound on the objective of every plan of a problem, by Lagrangian duality.

Plans are relaxed to walks (`optimizer.search.walks`). Kelley's cutting-plane method finds the prices: the cheapest
walk at the current prices joins the mixture, and the dual of the mixture's linear program gives the next prices. For
rates and costs, each step is halved towards the best prices so far; for times, that would take more steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from optimizer.cost.evaluate import TOLERANCE
from optimizer.problems.problem import PlanProblem
from optimizer.search.highs import minimize
from optimizer.search.space import Space
from optimizer.search.step import FloatArray
from optimizer.search.tables import tables_of
from optimizer.search.walks import Oracle, Prices, Walk, WalkRelaxation, no_prices

ITERATIONS = 80
# Relative gap between the linear program and the bound at which the method stops.
CLOSE = 2e-4
# Above any price.
FORBIDDEN = 1e30
# Price of exceeding the limits in the linear program, whose other values are about 1: the limits have priority.
BROKEN_LIMIT_PRICE = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class DualBound:
    """A proven bound, and the prices that prove it."""

    value: float
    """No plan has a higher rate, a lower cost, or a lower answer time."""
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
    """Returns the bound on the rate or cost of plans of these accelerator types, or None if it excludes all plans.

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
    """The cutting-plane method for a problem, with the walks that it has found."""

    problem: PlanProblem
    names: tuple[str, ...]
    oracle: Oracle
    needed: tuple[int, ...] = ()
    """Devices on which every plan of interest has a stage."""
    goal: Prices | None = None
    """Prices of the mean answer time alone, or of the worst-case latency alone, if one of them is minimized."""
    iterations: int = ITERATIONS
    close: float = CLOSE
    walks: list[Walk] = field(default_factory=list)

    @property
    def count_C(self) -> FloatArray:
        return np.array([self.problem.devices[name].count for name in self.names], dtype=float)

    @property
    def usd_C(self) -> FloatArray:
        return np.array([self.problem.devices[name].usd_per_hour for name in self.names], dtype=float)

    def is_too_slow(self, fill_rate: float = math.inf) -> bool:
        """Returns whether all plans exceed the latency limit, even if batches fill at this rate."""
        least_s = self.oracle(no_prices(len(self.names))._replace(latency=1.0), fill_rate)[0]
        return least_s > self.problem.slo.limit_s * (1 + TOLERANCE)

    def highest_rate(self, *, enough: float = math.inf) -> DualBound:
        """Returns an upper bound on the rate. Stops early once a mixture of walks reaches `enough`."""
        prices = no_prices(len(self.names))._replace(work_C=1 / (self.count_C * len(self.names)))
        bound = self._maximized(prices, math.inf, None, enough)
        if bound.value < enough and math.isfinite(bound.value):  # no plan is faster, so batches fill no faster either
            bound = self._maximized(bound.prices, bound.value * (1 + 1e-9), None, enough)
        return bound

    def least_cost(self, rate_per_s: float, start: Prices) -> DualBound:
        """Returns a lower bound on the cost of a rate that `highest_rate` does not exclude, in USD per hour."""
        return self._maximized(start, rate_per_s, rate_per_s, math.inf)

    def least_time(self, rate_per_s: float) -> DualBound:
        """Returns a lower bound on the time that is the goal, at a rate, in seconds; infinity if there is no walk."""
        assert self.goal is not None
        return self._maximized(self.goal, rate_per_s, rate_per_s, math.inf)

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
            scale = self.price_of_devices(bound.prices, None) - float(scarcity_C[device] * self.count_C[device])
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
            try:
                optimum, keeps_limits, dual = self._solve_program(fill_rate, rate_per_s)
            except TimeoutError:  # the best bound so far is valid even then
                break
            is_close = optimum - best_value <= self.close * abs(optimum)
            if (is_close and (keeps_limits or self.goal is not None)) or (keeps_limits and optimum * enough <= 1):
                break
            prices = dual.between(best) if self.goal is None else dual
        if rate_per_s is not None:
            return DualBound(value=max(best_value, 0.0), prices=best)
        highest = 1 / best_value if best_value > 0 else math.inf
        return DualBound(value=highest, prices=best)

    def _dual_value(self, prices: Prices, least: float, rate_per_s: float | None) -> float:
        """Returns a lower bound by weak duality: on seconds per input of the service, USD per hour, or the goal."""
        least += float(prices.stage_C.sum()) - self.price_of_latency(prices)
        devices = self.price_of_devices(prices, rate_per_s)
        if rate_per_s is None:
            return least / devices if devices > 0 else -math.inf
        return least - devices

    def price_of_latency(self, prices: Prices) -> float:
        """Returns the price of the latency limit."""
        latency = prices.latency - (0.0 if self.goal is None else self.goal.latency)
        return latency * self.problem.slo.limit_s

    def price_of_devices(self, prices: Prices, rate_per_s: float | None) -> float:
        """Returns the price of all devices and of the budget together."""
        usd = 1.0 if rate_per_s is not None and self.goal is None else prices.usd
        scarcity_C = np.maximum((prices.work_C + prices.hop_C) / (rate_per_s or 1.0) - usd * self.usd_C, 0)
        return float(scarcity_C @ self.count_C) + prices.usd * (self.problem.budget_usd_per_hour or 0.0)

    def _solve_program(self, fill_rate: float, rate_per_s: float | None) -> tuple[float, bool, Prices]:
        """Returns the value of the best mixture of walks, whether it keeps the limits, and its dual prices.

        Columns: seconds per input of the service (unused if a rate is required), excess over the limits, share of each
        device, share of the load of each walk. Rows: see `_uses`; then the count of each device and the budget. Raises
        TimeoutError if the numbers are too far apart for the program.
        """
        count, usd_C = len(self.names), self.usd_C * self.count_C
        latency, ramps, load, money = 3 * count, 3 * count + 1, 3 * count + 2, 4 * count + 3
        devices, walks, whole = slice(2, 2 + count), slice(2 + count, None), slice(load + 1, None)
        budget = max(self.problem.budget_usd_per_hour or 0.0, 1e-9)
        unit = (
            1 / rate_per_s
            if rate_per_s is not None
            else max(float((walk.work_C / self.count_C).max()) for walk in self.walks)
        )
        uses_RW, time_W, units_R = self._uses(fill_rate, unit)
        rows, limits = np.zeros((money + 1, 2 + count + len(self.walks))), np.zeros(money + 1)
        rows[: load + 1, walks] = uses_RW
        rows[:count, devices] = rows[count : 2 * count, devices] = -np.eye(count)
        rows[load + 1 : money, devices], rows[money, devices] = np.eye(count), usd_C / budget
        rows[2 * count : load, 1] = -1.0
        rows[whole, 0 if rate_per_s is None else 1] = -1.0
        limits[2 * count : latency] = [-1.0 if device in self.needed else math.inf for device in range(count)]
        limits[latency] = math.inf if self.goal is not None and self.goal.latency else 1.0
        limits[ramps] = math.inf if self.problem.ramp_budget is None else 0.0
        limits[load], limits[whole] = 1.0, 0.0 if rate_per_s is None else 1.0
        if self.problem.budget_usd_per_hour is None or (rate_per_s is not None and self.goal is None):
            limits[money] = math.inf
        cost, value_unit = np.zeros(rows.shape[1]), unit
        cost[0], cost[1] = float(rate_per_s is None), BROKEN_LIMIT_PRICE
        if self.goal is not None:
            value_unit = max(float(time_W[0]), 1e-300)
            cost[walks] = time_W / value_unit
        elif rate_per_s is not None:
            value_unit = max(float(usd_C.max()), 1e-9)
            cost[devices] = usd_C / value_unit
        lower = np.full(len(rows), -math.inf)
        lower[load] = 1.0
        row_T, column_T = np.nonzero(rows)
        solved = minimize(cost, (row_T, column_T, rows[row_T, column_T]), lower, limits)
        assert solved is not None, "any load may exceed the limits"
        dual = np.maximum(-solved.duals, 0.0) * value_unit
        dual[: load + 1] /= units_R
        goal = no_prices(count) if self.goal is None else self.goal
        prices = Prices(
            work_C=dual[:count],
            hop_C=dual[count : 2 * count],
            latency=goal.latency + float(dual[latency]),
            usd=float(dual[money]) / budget / (unit if rate_per_s is None else 1.0),
            stage_C=dual[2 * count : latency],
            mean=goal.mean,
            ramps=float(dual[ramps]),
        )
        return solved.objective * value_unit, bool(solved.values[1] <= 1e-9), prices

    def _uses(self, fill_rate: float, unit: float) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Returns what each walk uses, by row, the time that is the goal, and the units of the rows.

        Rows: work, hops and stages (negative) per device; latency; ramps; load.
        """
        walks, limit_s = self.walks, self.problem.slo.limit_s
        latency_W = np.array([walk.latency_s + walk.fill / fill_rate for walk in walks])
        works = [np.array([getattr(walk, name) for walk in walks]).T for name in ("work_C", "hop_work_C", "stages_C")]
        ramps_W = np.array([walk.ramps_s for walk in walks])
        units_R = np.concatenate(
            [
                self.count_C * unit,
                self.count_C * unit,
                np.ones(len(self.names)),
                [limit_s, max(latency_W[0], 1e-300), 1.0],
            ]
        )
        uses_RW = np.vstack([works[0], works[1], -works[2], latency_W, ramps_W, np.ones(len(walks))]) / units_R[:, None]
        goal = no_prices(0) if self.goal is None else self.goal
        mean_W = np.array([walk.mean_s + walk.mean_fill / fill_rate for walk in walks])
        return uses_RW, goal.latency * latency_W + goal.mean * mean_W, units_R
