"""A bound on the objective of every plan of a problem, by Lagrangian duality.

Plans are relaxed to walks (`optimizer.search.walks`). Kelley's cutting-plane method finds the prices: the cheapest
walk at the current prices joins the mixture, and the dual of the mixture's linear program gives the next prices. For
rates and costs, each step is halved towards the best prices so far; for times, that would take more steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from optimizer.cost.evaluate import TOLERANCE
from optimizer.problems.problem import PlanProblem, device_names
from optimizer.search.highs import Program
from optimizer.search.master import MAX_USES
from optimizer.search.space import Space, payable_names
from optimizer.search.tables import tables_of
from optimizer.search.walks import Oracle, Prices, Walk, WalkRelaxation, no_prices

ITERATIONS = 80
# Relative gap between the linear program and the bound at which the method stops.
CLOSE = 2e-4
# The same if time is over: the first bounds may be far below those of a few more iterations, which take milliseconds.
CLOSE_ENOUGH = 0.05
# Price of exceeding the limits in the linear program, whose other values are about 1: the limits have priority.
BROKEN_LIMIT_PRICE = 1e3
MINUS_ONE = np.array([-1.0])


@dataclass(frozen=True, slots=True, kw_only=True)
class DualBound:
    """A proven bound, and the prices that prove it."""

    value: float
    """No plan has a higher rate, a lower cost, or a lower answer time."""
    prices: Prices


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """The solved relaxation of a problem that may have plans."""

    problem: PlanProblem
    """The problem with only the accelerator types that the budget can pay."""
    space: Space
    bound: DualBound
    ramps: tuple[int, ...]
    """The active ramps of the cheapest walk."""


def solve_relaxation(problem: PlanProblem, space: Space, iterations: int = ITERATIONS) -> Relaxation | None:
    """Returns the bound on the rate or cost of all plans, or None if it excludes all plans."""
    names = payable_names(problem)
    if not names:
        return None
    problem = problem.on(names)
    walks = WalkRelaxation.of(tables_of(problem, space))
    planes = CuttingPlanes(problem=problem, space=space, oracle=walks.cheapest, iterations=iterations)
    if planes.is_too_slow():
        return None
    rate = problem.required_per_s
    bound = planes.highest_rate(enough=math.inf if rate is None else rate)
    if bound.value <= 0 or (rate is not None and bound.value < rate * (1 - TOLERANCE)):
        return None
    if rate is not None:
        bound = planes.tightened(bound)
        if bound.value > problem.max_usd_per_hour * (1 + TOLERANCE):
            return None
    walks.cheapest(bound.prices, rate or bound.value)
    ramps = tuple(ramp for stage in walks.last_stages(names) for split in stage.splits for ramp in split.ramps)
    return Relaxation(problem=problem, space=space, bound=bound, ramps=ramps)


@dataclass(slots=True, kw_only=True)
class CuttingPlanes:
    """The cutting-plane method for a problem, with the walks that it has found."""

    problem: PlanProblem
    space: Space
    """When its time is over, a bound within CLOSE_ENOUGH of the linear program's value suffices."""
    oracle: Oracle
    goal: Prices | None = None
    """Prices of the mean answer time alone, or of the worst-case latency alone, if one of them is minimized."""
    iterations: int = ITERATIONS
    close: float = CLOSE
    walks: list[Walk] = field(default_factory=list)

    def is_too_slow(self, fill_rate: float = math.inf) -> bool:
        """Returns whether all plans exceed the latency limit, even if batches fill at this rate."""
        prices = no_prices(len(self.problem.count_C))._replace(latency=1.0)
        return self.oracle(prices, fill_rate)[0] > self.problem.slo.limit_s * (1 + TOLERANCE)

    def highest_rate(self, *, enough: float = math.inf, least: float = 0.0) -> DualBound:
        """Returns an upper bound on the rate. Stops if a mixture of walks reaches `enough`, or none reaches `least`."""
        count_C = self.problem.count_C
        prices = no_prices(len(count_C))._replace(work_C=1 / (count_C * len(count_C)))
        bound = self._maximized(prices, math.inf, None, enough, least)
        if least < bound.value < enough and math.isfinite(bound.value):  # no plan is faster, so batches fill no faster
            bound = self._maximized(bound.prices, bound.value * (1 + 1e-9), None, enough, least)
        return bound

    def least_time(self, rate_per_s: float) -> DualBound:
        """Returns a lower bound on the time that is the goal, at a rate, in seconds; infinity if there is no walk."""
        assert self.goal is not None
        return self._maximized(self.goal, rate_per_s, rate_per_s)

    def tightened(self, start: DualBound) -> DualBound:
        """Returns a bound on the objective, a rate or a cost, from the prices of a bound on the rate or on the cost.

        If the cost is minimized, `highest_rate` must not exclude the required rate. A plan uses whole devices, so no
        bound is between two costs of whole devices, unless there are too many of these costs.
        """
        problem, rate_per_s, count_C = self.problem, self.problem.required_per_s, self.problem.count_C
        bound = self._maximized(start.prices, rate_per_s or start.value * (1 + 1e-9), rate_per_s)
        if rate_per_s is None or np.prod(count_C + 1) > MAX_USES:
            return bound
        used_CU = np.indices((count_C + 1).astype(int).tolist())
        usd_U = problem.usd_of(dict(zip(device_names(problem), used_CU, strict=True)))
        is_possible_U = usd_U >= bound.value - TOLERANCE * usd_U.max()
        return replace(bound, value=float(usd_U.min(where=is_possible_U, initial=math.inf)))

    def _maximized(
        self, prices: Prices, fill_rate: float, rate_per_s: float | None, enough: float = math.inf, least: float = 0.0
    ) -> DualBound:
        """Runs the cutting-plane method from the given prices."""
        best_value, best = -math.inf, prices
        for _ in range(self.iterations):
            price, walk = self.oracle(prices, fill_rate)
            value = self._dual_value(prices, price, rate_per_s)
            if value > best_value:
                best_value, best = value, prices
            if math.isinf(price) or (rate_per_s is None and best_value * least >= 1):
                break
            self.walks.append(walk)
            try:
                optimum, keeps_limits, dual = self._solve_program(fill_rate, rate_per_s)
            except TimeoutError:  # the best bound so far is valid even then
                break
            close = max(self.close, CLOSE_ENOUGH) if self.space.is_over() else self.close
            is_close = optimum - best_value <= close * abs(optimum)
            if (is_close and (keeps_limits or self.goal is not None)) or (keeps_limits and optimum * enough <= 1):
                break
            prices = dual.between(best) if self.goal is None else dual
        if rate_per_s is not None:
            return DualBound(value=max(best_value, 0.0), prices=best)
        highest = 1 / best_value if best_value > 0 else math.inf
        return DualBound(value=highest, prices=best)

    def _dual_value(self, prices: Prices, least: float, rate_per_s: float | None) -> float:
        """Returns a lower bound by weak duality: on seconds per input of the service, USD per hour, or the goal."""
        least -= self.price_of_latency(prices)
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
        scarcity_C = np.maximum((prices.work_C + prices.hop_C) / (rate_per_s or 1.0) - usd * self.problem.usd_C, 0)
        return float(scarcity_C @ self.problem.count_C) + prices.usd * (self.problem.budget_usd_per_hour or 0.0)

    def _solve_program(self, fill_rate: float, rate_per_s: float | None) -> tuple[float, bool, Prices]:
        """Returns the value of the best mixture of walks, whether it keeps the limits, and its dual prices.

        The variables are the seconds per input of the service, the excess over the limits, the share of each device,
        and the share of the load of each walk (W). If a rate is required, the seconds are given. All rows are scaled to
        values of about 1. Raises TimeoutError if the numbers are too far apart for the program.
        """
        problem, count_C, budget_usd = self.problem, self.problem.count_C, self.problem.budget_usd_per_hour
        goal, limit_s, each_CC = self.goal or no_prices(len(count_C)), problem.slo.limit_s, np.eye(len(count_C))
        work_WC, hop_WC, latency_W, fill_W, mean_W, mean_fill_W, ramps_W = map(np.array, zip(*self.walks, strict=True))
        latency_W, mean_W = latency_W + fill_W / fill_rate, mean_W + mean_fill_W / fill_rate
        time_W = goal.latency * latency_W + goal.mean * mean_W
        usd_C, is_cost = problem.usd_C * count_C, rate_per_s is not None and self.goal is None
        budget = max(budget_usd or float(usd_C.max()), 1e-9)
        unit = float((work_WC / count_C).max()) if rate_per_s is None else 1 / rate_per_s
        device_s_C, ramps_s, value_unit = count_C * unit, max(float(latency_W[0]), 1e-300), unit
        if rate_per_s is not None:
            value_unit = max(float(usd_C.max()), 1e-9) if is_cost else max(float(time_W[0]), 1e-300)
        program = Program()
        seconds = program.variables(1, cost=float(rate_per_s is None))
        excess = program.variables(1, cost=BROKEN_LIMIT_PRICE)
        device_C = program.variables(len(usd_C), cost=usd_C / value_unit if is_cost else 0.0)
        walk_W = program.variables(len(time_W), cost=time_W / value_unit)
        work_R = program.rows((-each_CC, device_C), ((work_WC / device_s_C).T, walk_W), upper=0.0)
        hop_R = program.rows((-each_CC, device_C), ((hop_WC / device_s_C).T, walk_W), upper=0.0)
        latency_R = program.rows((MINUS_ONE, excess), (latency_W / limit_s, walk_W), upper=1.0)
        most = math.inf if problem.ramp_budget is None else 0.0
        ramps_R = program.rows((MINUS_ONE, excess), (ramps_W / ramps_s, walk_W), upper=most)
        program.rows((np.ones(len(time_W)), walk_W), lower=1.0, upper=1.0)
        available, whole = (seconds, 0.0) if rate_per_s is None else (excess, 1.0)
        program.rows((-np.ones((len(usd_C), 1)), available), (each_CC, device_C), upper=whole)
        most = math.inf if budget_usd is None or is_cost else whole
        money_R = program.rows((MINUS_ONE, available), (usd_C / budget, device_C), upper=most)
        solved = program.minimum()
        assert solved is not None, "any load may exceed the limits"
        dual = np.maximum(-solved.duals, 0.0) * value_unit
        prices = Prices(
            work_C=dual[work_R] / device_s_C,
            hop_C=dual[hop_R] / device_s_C,
            latency=goal.latency + float(dual[latency_R[0]]) / limit_s,
            usd=float(dual[money_R[0]]) / budget / (unit if rate_per_s is None else 1.0),
            mean=goal.mean,
            ramps=float(dual[ramps_R[0]]) / ramps_s,
        )
        return solved.objective * value_unit, bool(solved.values[excess[0]] <= 1e-9), prices
