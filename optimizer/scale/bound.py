"""A bound on every plan: the best prices of the walks that plans are.

Prices are found by cutting planes: the cheapest walk at the last prices joins the mixture, whose linear program gives
the next prices (Kelley's method, steps halved towards the best prices so far).
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
CLOSE = 2e-4
# Above any price.
FORBIDDEN = 1e30
# Of the linear program's objective, whose own values are about 1: keeping the latency limit goes first.
BROKEN_LIMIT_PRICE = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    """What prices prove."""

    value: float
    """No plan has a higher rate, or costs less."""
    prices: Prices


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """What the relaxation proves of the plans of a problem that may have some."""

    planes: CuttingPlanes
    bound: Bounded
    ramps: tuple[int, ...]
    """The ramps that the best walk activates."""


def relaxed(
    problem: PlanProblem,
    space: Space,
    names: tuple[str, ...],
    *,
    batch: int | None = None,
    iterations: int = ITERATIONS,
) -> Relaxation | None:
    """The bound on the rate or the cost of plans on these accelerator types; None: proven to have no plan.

    `batch`: the only batch size; None: any.
    """
    walks = WalkRelaxation.of(tables_of(problem, space, batch=batch, names=names))
    planes = CuttingPlanes(problem=problem, names=names, oracle=walks.cheapest, iterations=iterations)
    if planes.least_latency_s() > problem.slo.limit_s * (1 + TOLERANCE):
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
    """The linear program over mixtures of walks, in the units of its limits."""

    problem: PlanProblem
    names: tuple[str, ...]
    oracle: Oracle
    needed: tuple[int, ...] = ()
    """Devices that the plans of interest have a stage on."""
    iterations: int = ITERATIONS
    walks: list[Walk] = field(default_factory=list)

    @property
    def count_C(self) -> FloatArray:
        return np.array([self.problem.devices[name].count for name in self.names], dtype=float)

    @property
    def usd_C(self) -> FloatArray:
        return np.array([self.problem.devices[name].usd_per_hour for name in self.names], dtype=float)

    def least_latency_s(self) -> float:
        """Of all plans, batches full at once."""
        nothing_C = np.zeros(len(self.names))
        return self.oracle(Prices(nothing_C, nothing_C, 1.0, 0.0, nothing_C), math.inf)[0]

    def highest_rate(self, *, enough: float = math.inf) -> Bounded:
        """An upper bound on the rate; stops where mixtures do `enough`."""
        start_C = 1 / (self.count_C * len(self.names))
        prices = Prices(start_C, np.zeros_like(start_C), 0.0, 0.0, np.zeros_like(start_C))
        bound = self._improved(prices, math.inf, None, enough)
        if bound.value < enough and math.isfinite(bound.value):  # no plan is faster, so nor do batches fill
            bound = self._improved(bound.prices, bound.value * (1 + 1e-9), None, enough)
        return bound

    def least_cost(self, rate_per_s: float, start: Prices) -> Bounded:
        """A lower bound on the cost of a rate that `highest_rate` does not rule out."""
        return self._improved(start, rate_per_s, rate_per_s, math.inf)

    def tightened(self, start: Bounded) -> Bounded:
        """An upper bound on the rate, from the prices of another one that holds too."""
        return self._improved(start.prices, start.value * (1 + 1e-9), None, math.inf)

    def needed_for(self, rate_per_s: float, bound: Bounded) -> tuple[int, ...]:
        """Devices without which no plan has this rate."""
        needed = []
        for device in range(len(self.names)):
            without_C = bound.prices.work_C.copy()
            without_C[device] = FORBIDDEN
            least, _ = self.oracle(bound.prices._replace(work_C=without_C), bound.value)
            scarcity_C = np.maximum(bound.prices.work_C + bound.prices.hop_C - bound.prices.usd * self.usd_C, 0)
            scale = self.scale_of(bound.prices) - float(scarcity_C[device] * self.count_C[device])
            least -= bound.prices.latency * self.problem.slo.limit_s
            if least > 0 and scale < rate_per_s * least * (1 - 1e-6):
                needed.append(device)
        return tuple(needed)

    def _improved(self, prices: Prices, fill_rate: float, rate_per_s: float | None, enough: float) -> Bounded:
        best_value, best = -math.inf, prices
        for _ in range(self.iterations):
            least, walk = self.oracle(prices, fill_rate)
            value = self._proven(prices, least, rate_per_s)
            if value > best_value:
                best_value, best = value, prices
            if math.isinf(least):
                break
            self.walks.append(walk)
            optimum, kept, dual = self._mixture(fill_rate, rate_per_s, best_value)
            if kept and (optimum - best_value <= CLOSE * abs(optimum) or optimum * enough <= 1):
                break
            prices = dual.between(best)
        if rate_per_s is not None:
            return Bounded(value=max(best_value, 0.0), prices=best)
        highest = 1 / best_value if best_value > 0 else math.inf
        return Bounded(value=highest, prices=best)

    def _proven(self, prices: Prices, least: float, rate_per_s: float | None) -> float:
        """A lower bound on seconds per input of the service, or on USD per hour, by weak duality."""
        least += float(prices.stage_C.sum()) - prices.latency * self.problem.slo.limit_s
        if rate_per_s is None:
            scale = self.scale_of(prices)
            return least / scale if scale > 0 else -math.inf
        scarcity_C = np.maximum(prices.work_C + prices.hop_C - rate_per_s * self.usd_C, 0)
        return least - float(scarcity_C @ self.count_C) / rate_per_s

    def scale_of(self, prices: Prices) -> float:
        """What all there is costs."""
        scarcity_C = np.maximum(prices.work_C + prices.hop_C - prices.usd * self.usd_C, 0)
        budget = self.problem.budget_usd_per_hour
        return float(scarcity_C @ self.count_C) + (0.0 if budget is None else prices.usd * budget)

    def _mixture(self, fill_rate: float, rate_per_s: float | None, about: float) -> tuple[float, bool, Prices]:
        """The best mixture of walks so far: its value, whether it keeps the latency limit, and its prices.

        Columns: seconds per input of the service (or nothing), latency above the limit, shares of the devices, shares
        of the load. Rows: per device work, hops, count; latency; budget.
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
        one_C, share = np.arange(count), slice(2, 2 + count)
        rows[:count, 2 + count :], rows[one_C, 2 + one_C] = work_CW / unit, -1.0
        rows[count : 2 * count, 2 + count :], rows[count + one_C, 2 + one_C] = hop_CW / unit, -1.0
        rows[2 * count + one_C, 2 + one_C] = 1.0
        rows[3 * count, 2 + count :], rows[3 * count, 1], limits[3 * count] = latency_W, -1.0, 1.0
        objective = np.zeros(2 + count + num_walks)
        objective[1] = BROKEN_LIMIT_PRICE
        value_unit = unit
        if rate_per_s is None:
            rows[2 * count : 3 * count, 0], objective[0] = -1.0, 1.0
            if budget is not None:
                rows[3 * count + 1, share], rows[3 * count + 1, 0] = usd_C / max(budget, 1e-9), -1.0
        else:
            limits[2 * count : 3 * count] = 1.0
            value_unit = max(float(usd_C.max()), 1e-9)
            objective[share] = usd_C / value_unit
            rows[2 * count : 3 * count, 1] = -1.0
        for device in self.needed:
            row = 3 * count + 2 + device
            rows[row, 2 + count :], rows[row, 1], limits[row] = (
                [-walk.stages_C[device] for walk in self.walks],
                -1.0,
                -1.0,
            )
        all_load = np.zeros((1, 2 + count + num_walks))
        all_load[0, 2 + count :] = 1.0
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
