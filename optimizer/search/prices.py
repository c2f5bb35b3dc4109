"""Prices that bound every plan, and the least price of a chain from anywhere in a graph.

Device seconds, hops, latency, money and ramps get prices. At given prices the cheapest chain is found backwards over
the graph (`cheapest_ways`); by weak duality it bounds what any plan does, several chains included. The best prices are
found by cutting planes (Kelley's method): the cheapest chain at the last prices joins a mixture, and the mixture's
linear program gives the next prices, with steps halved towards the best prices so far.

What is relaxed: replicas need not be whole, and chains share the load in any proportion. A further split of a stage
waits for its own batches m*b/(R*s) seconds on m replicas; because R <= m/w, and w contains the split's own s*T/b, that
is at least T, and because m >= 1 it is at least b/(R*s). The larger of the two is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from optimizer.compiled import compiled, inlined
from optimizer.problem import PlanProblem
from optimizer.search.graph import Graph, MoveArrays
from optimizer.step import BoolArray, FloatArray, IntArray

ITERATIONS = 80
CLOSE = 2e-4
# Of the linear program's objective, whose own values are about 1: keeping the limits goes first.
BROKEN_LIMIT_PRICE = 1e3
# Stands for a budget of nothing, because budgets divide.
LEAST_USD = 1e-9
NO_MOVE = -1
# Stands for no limit, in the unit of what is limited.
UNLIMITED = 1e9

Goal = Literal["rate", "cost", "mean", "worst"]
"""What is sought: the highest rate; or, at a rate, the least cost, mean answer time, or worst-case latency."""


class Prices(NamedTuple):
    """Of device seconds per input, of hop seconds, of seconds of latency and of the mean, of ramps, and of dollars."""

    work_C: FloatArray
    hop_C: FloatArray
    latency: float = 0.0
    mean: float = 0.0
    ramps: float = 0.0
    usd: float = 0.0

    @property
    def units(self) -> UnitPrices:
        """As the kernels take them."""
        return UnitPrices(self.work_C + self.hop_C, float(self.latency), float(self.mean), float(self.ramps))

    def between(self, other: Prices) -> Prices:
        """Half way to other prices."""
        return Prices(
            (self.work_C + other.work_C) / 2,
            (self.hop_C + other.hop_C) / 2,
            latency=(self.latency + other.latency) / 2,
            mean=(self.mean + other.mean) / 2,
            ramps=(self.ramps + other.ramps) / 2,
            usd=(self.usd + other.usd) / 2,
        )


class Walk(NamedTuple):
    """The account of one chain whose replicas need not be whole."""

    work_C: FloatArray
    """Device seconds per input."""
    hop_work_C: FloatArray
    latency_s: float
    """Worst case, without waits for batches."""
    fill: float
    """What these waits are at one input per second."""
    mean_s: float = 0.0
    mean_fill: float = 0.0
    """The same of the mean answer time."""
    ramp_s: float = 0.0
    """Seconds of ramps beyond their budget."""


Oracle = Callable[[Prices, float], tuple[float, Walk]]
"""From prices, and the rate at which batches fill, to the price of the cheapest chain, and that chain."""


def nowhere(num_devices: int) -> Walk:
    """The account of no chain."""
    nothing_C = np.zeros(num_devices)
    return Walk(nothing_C, nothing_C, math.inf, 0.0)


class Ways(NamedTuple):
    """Least price from a node (P) to the end, between stages and inside a stage of a device (C); and the way there.

    A way is twice its move, and 1 more where the stage ends with that move.
    """

    closed_P: FloatArray
    open_PC: FloatArray
    closed_way_P: IntArray
    open_way_PC: IntArray


class UnitPrices(NamedTuple):
    """Prices as the kernels take them."""

    price_C: FloatArray
    """Of a device second per input."""
    latency: float
    mean: float
    ramps: float


class Followed(NamedTuple):
    """What may follow a move, and at which price; infinite: it may not."""

    ending: float
    """The stage ends: with the move's own price and the hop."""
    going_on: float
    hops: float
    """What a hop takes beyond the work of a stage of this move alone."""
    first: float
    """The wait of the first split of a stage, and the least of a further one."""
    further: float


@inlined
def _followed(
    moves: MoveArrays, prices: UnitPrices, fill_rate: float, may_split: bool, may_hop: bool, move: int, is_last: bool
) -> Followed:
    device, inside = moves.device_M[move], moves.inside_M[move] == 1
    price = prices.price_C[device] * moves.work_M[move]
    price += prices.latency * (moves.seconds_M[move] + moves.cross_M[move])
    price += prices.mean * moves.mean_M[move] + prices.ramps * moves.ramp_M[move]
    waiting = prices.latency * moves.wait_M[move] + prices.mean * moves.mean_wait_M[move]
    first = waiting / fill_rate
    further = first
    if moves.pooled_M[move] == 0 and moves.wait_M[move] > 0:
        further = waiting * max(1 / fill_rate, moves.seconds_M[move] / moves.wait_M[move])
    going_on = price if not is_last and (inside or may_split) else np.inf
    ending, hops = np.inf, 0.0
    if not inside and (is_last or may_hop):
        ending = price
        if not is_last:
            ending += (prices.latency + prices.mean * moves.leaving_M[move]) * moves.hop_M[move]
            hops = prices.price_C[device] * max(0.0, moves.hop_work_M[move] - moves.work_M[move])
    return Followed(ending, going_on, hops, first, further)


@compiled
def cheapest_ways(moves: MoveArrays, prices: UnitPrices, fill_rate: float, may_split: bool, may_hop: bool) -> Ways:
    """Backwards over the nodes."""
    end, num_devices = moves.first_move_P.size - 2, prices.price_C.size
    closed_P, open_PC = np.full(end + 1, np.inf), np.full((end + 1, num_devices), np.inf)
    closed_way_P, open_way_PC = np.full(end + 1, NO_MOVE), np.full((end + 1, num_devices), NO_MOVE)
    closed_P[end] = 0.0
    for node in range(end - 1, -1, -1):
        for move in range(moves.first_move_P[node], moves.first_move_P[node + 1]):
            device, target = moves.device_M[move], moves.to_M[move]
            after = _followed(moves, prices, fill_rate, may_split, may_hop, move, target == end)
            ending, going_on = after.ending + closed_P[target], after.going_on + open_PC[target, device]
            if ending + after.further < open_PC[node, device]:
                open_PC[node, device], open_way_PC[node, device] = ending + after.further, 2 * move + 1
            if going_on + after.further < open_PC[node, device]:
                open_PC[node, device], open_way_PC[node, device] = going_on + after.further, 2 * move
            if ending + after.hops + after.first < closed_P[node]:
                closed_P[node], closed_way_P[node] = ending + after.hops + after.first, 2 * move + 1
            if going_on + after.first < closed_P[node]:
                closed_P[node], closed_way_P[node] = going_on + after.first, 2 * move
    return Ways(closed_P, open_PC, closed_way_P, open_way_PC)


@compiled
def affordable_moves(
    moves: MoveArrays, prices: UnitPrices, fill_rate: float, may_split: bool, may_hop: bool, most_price: float
) -> BoolArray:
    """Which moves are part of a chain that costs no more than `most_price`."""
    ways = cheapest_ways(moves, prices, fill_rate, may_split, may_hop)
    end, num_devices = moves.first_move_P.size - 2, prices.price_C.size
    closed_P, open_PC = np.full(end + 1, np.inf), np.full((end + 1, num_devices), np.inf)  # from the start
    kept_M = np.zeros(moves.to_M.size, dtype=np.bool_)
    closed_P[0] = 0.0
    for node in range(end):
        for move in range(moves.first_move_P[node], moves.first_move_P[node + 1]):
            device, target = moves.device_M[move], moves.to_M[move]
            after = _followed(moves, prices, fill_rate, may_split, may_hop, move, target == end)
            before = min(closed_P[node] + after.first, open_PC[node, device] + after.further)
            ending, going_on = before + after.ending, before + after.going_on
            closed_P[target] = min(closed_P[target], ending)
            open_PC[target, device] = min(open_PC[target, device], going_on)
            least = min(ending + ways.closed_P[target], going_on + ways.open_PC[target, device])
            kept_M[move] = least <= most_price
    return kept_M


@compiled
def _account_of(moves: MoveArrays, ways: Ways, num_devices: int, fill_rate: float) -> Walk:
    """Of the cheapest chain; its hops are in its devices' work."""
    work_C, node, device = np.zeros(num_devices), 0, -1
    latency_s, fill, mean_s, mean_fill, ramp_s = 0.0, 0.0, 0.0, 0.0, 0.0
    end = ways.closed_P.size - 1
    while node < end:
        is_first = device < 0
        way = ways.closed_way_P[node] if is_first else ways.open_way_PC[node, device]
        move, ends = way // 2, way % 2 == 1
        device = moves.device_M[move]
        work, wait = moves.work_M[move], moves.wait_M[move]
        latency_s += moves.seconds_M[move] + moves.cross_M[move]
        mean_s += moves.mean_M[move]
        ramp_s += moves.ramp_M[move]
        if not is_first and moves.pooled_M[move] == 0 and moves.seconds_M[move] > wait / fill_rate:
            latency_s += moves.seconds_M[move]
            mean_s += moves.mean_wait_M[move] * moves.seconds_M[move] / wait
        else:
            fill += wait
            mean_fill += moves.mean_wait_M[move]
        node = moves.to_M[move]
        if ends and node < end:
            latency_s += moves.hop_M[move]
            mean_s += moves.leaving_M[move] * moves.hop_M[move]
            work = max(work, moves.hop_work_M[move]) if is_first else work
        work_C[device] += work
        device = -1 if ends else device
    return Walk(work_C, np.zeros(num_devices), latency_s, fill, mean_s, mean_fill, ramp_s)


def chains_of_graph(graph: Graph, *, may_split: bool, may_hop: bool) -> Oracle:
    """The chains of a graph, as something that prices can be asked of."""
    num_devices = len(graph.device_names)

    def cheapest(prices: Prices, fill_rate: float) -> tuple[float, Walk]:
        ways = cheapest_ways(graph.moves, prices.units, fill_rate, may_split, may_hop)
        if math.isinf(ways.closed_P[0]):
            return math.inf, nowhere(num_devices)
        return float(ways.closed_P[0]), _account_of(graph.moves, ways, num_devices, fill_rate)

    return cheapest


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    """What prices prove."""

    value: float
    """No plan is better: a rate, USD per hour, or seconds."""
    prices: Prices


@dataclass(slots=True, kw_only=True)
class CuttingPlanes:
    """The linear program over mixtures of chains, in the units of its limits."""

    problem: PlanProblem
    names: tuple[str, ...]
    oracle: Oracle
    goal: Goal
    limit_s: float
    iterations: int = ITERATIONS
    walks: list[Walk] = field(default_factory=list)

    @property
    def count_C(self) -> FloatArray:
        return np.array([self.problem.devices[name].count for name in self.names], dtype=float)

    @property
    def usd_C(self) -> FloatArray:
        return np.array([self.problem.devices[name].usd_per_hour for name in self.names])

    @property
    def budget(self) -> float:
        """USD per hour; infinite where there is none."""
        budget = self.problem.budget_usd_per_hour
        return math.inf if budget is None else budget

    def least_latency_s(self) -> float:
        """Of all chains, with every batch full at once."""
        nothing_C = np.zeros(len(self.names))
        return self.oracle(Prices(nothing_C, nothing_C, latency=1.0), math.inf)[0]

    def highest_rate(self, *, enough: float = math.inf, start: Prices | None = None) -> Bounded:
        """An upper bound on the rate, from some prices on; stops where mixtures do `enough`."""
        assert self.goal == "rate"
        start_C = 1 / (self.count_C * len(self.names))
        bound = self._improved(start or Prices(start_C, np.zeros_like(start_C)), math.inf, enough)
        if bound.value < enough and math.isfinite(bound.value):  # no plan is faster, so no batch fills sooner
            bound = self._improved(bound.prices, bound.value * (1 + 1e-9), enough)
        return bound

    def least(self, rate_per_s: float, start: Prices) -> Bounded:
        """A lower bound on what is sought at a rate."""
        return self._improved(start, rate_per_s, math.inf)

    def _improved(self, prices: Prices, fill_rate: float, enough: float) -> Bounded:
        best_value, best = -math.inf, prices
        for _ in range(self.iterations):
            least, walk = self.oracle(prices, fill_rate)
            value = self._proven(prices, least)
            if value > best_value:
                best_value, best = value, prices
            if math.isinf(least):
                best_value = math.inf
                break
            self.walks.append(walk)
            mixture = self._mixture(fill_rate)
            if mixture is None:
                break
            optimum, is_kept, dual = mixture
            if is_kept and (optimum - best_value <= CLOSE * abs(optimum) or optimum * enough <= 1):
                break
            prices = dual.between(best)
        if self.goal != "rate":
            return Bounded(value=max(best_value, 0.0), prices=best)
        return Bounded(value=1 / best_value if best_value > 0 else math.inf, prices=best)

    def _proven(self, prices: Prices, least: float) -> float:
        """A lower bound by weak duality: on seconds per input of the service, or on what is sought at a rate."""
        if self.goal == "rate":
            scale = self.allowed(prices)
            least -= self._latency_price(prices) * self.limit_s if math.isfinite(self.limit_s) else 0.0
            return least / scale if scale > 0 else -math.inf
        return least - self.allowed(prices)

    def _latency_price(self, prices: Prices) -> float:
        """Of the limit: without what latency counts as the thing that is sought."""
        return prices.latency - (1.0 if self.goal == "worst" else 0.0)

    def allowed(self, prices: Prices) -> float:
        """What all that a plan may use costs, beyond what is sought; for rates, per input and without latency."""
        usd_price, rate = prices.usd + (1.0 if self.goal == "cost" else 0.0), self.problem.asked_per_s
        per_device_C = (prices.work_C + prices.hop_C) / (1.0 if self.goal == "rate" else rate or 1.0)
        scarcity_C = np.maximum(per_device_C - usd_price * self.usd_C, 0)
        money = prices.usd * self.budget if prices.usd else 0.0
        if self.goal == "rate":
            return float(scarcity_C @ self.count_C) + money
        latency_price = self._latency_price(prices)
        return float(scarcity_C @ self.count_C) + money + (latency_price * self.limit_s if latency_price else 0.0)

    def allowed_at(self, prices: Prices, rate_per_s: float) -> float:
        """What a chain may cost that does a rate; of what is sought, the rate."""
        return self.allowed(prices) / rate_per_s + (prices.latency * self.limit_s if prices.latency else 0.0)

    def _mixture(self, fill_rate: float) -> tuple[float, bool, Prices] | None:
        """The best mixture of chains so far: its value, whether it keeps the limits, and its prices.

        None where numbers are too far apart for the solver: any prices bound, so the best so far stand.

        Columns: seconds per input of the service (or nothing), what is above limits, shares of the devices, shares
        of the load. Rows: per device work, hops, count; latency; budget; ramps.
        """
        from scipy.optimize import linprog

        count, num_walks, rate = len(self.names), len(self.walks), self.problem.asked_per_s
        is_rate, limit_s = self.goal == "rate", self.limit_s
        budget = max(self.budget, LEAST_USD)
        work_CW = np.array([walk.work_C for walk in self.walks]).T / self.count_C[:, None]
        hop_CW = np.array([walk.hop_work_C for walk in self.walks]).T / self.count_C[:, None]
        latency_W = np.array([walk.latency_s + walk.fill / fill_rate for walk in self.walks])
        ramp_W = np.array([walk.ramp_s for walk in self.walks])
        unit = float(work_CW.max()) if is_rate else 1 / (rate or 1.0)
        limit_unit = limit_s if math.isfinite(limit_s) else max(float(latency_W.max()), 1e-300)
        ramp_unit = max(float(np.abs(ramp_W).max()), 1e-300)
        usd_C, load, one_C = self.usd_C * self.count_C, slice(2 + count, None), np.arange(count)
        rows, limits = np.zeros((3 * count + 3, 2 + count + num_walks)), np.zeros(3 * count + 3)
        rows[:count, load], rows[one_C, 2 + one_C] = work_CW / unit, -1.0
        rows[count : 2 * count, load], rows[count + one_C, 2 + one_C] = hop_CW / unit, -1.0
        rows[2 * count + one_C, 2 + one_C], rows[2 * count : 3 * count, 0 if is_rate else 1] = 1.0, -1.0
        limits[2 * count : 3 * count] = 0.0 if is_rate else 1.0
        rows[3 * count, load], rows[3 * count, 1] = latency_W / limit_unit, -1.0
        limits[3 * count] = 1.0 if math.isfinite(limit_s) else UNLIMITED
        if math.isfinite(self.budget):
            rows[3 * count + 1, 2 : 2 + count] = usd_C / budget
            rows[3 * count + 1, 0 if is_rate else 1], limits[3 * count + 1] = -1.0, 0.0 if is_rate else 1.0
        rows[3 * count + 2, load], rows[3 * count + 2, 1] = ramp_W / ramp_unit, -1.0
        objective = np.zeros(2 + count + num_walks)
        value_unit = self._objective(objective, unit, fill_rate, latency_W, usd_C)
        objective[1] = BROKEN_LIMIT_PRICE
        all_load = np.zeros((1, 2 + count + num_walks))
        all_load[0, load] = 1.0
        solved = linprog(objective, A_ub=rows, b_ub=limits, A_eq=all_load, b_eq=[1.0], method="highs")
        if solved.x is None:
            return None
        dual = np.maximum(-solved.ineqlin.marginals, 0.0) * value_unit
        prices = Prices(
            dual[:count] / self.count_C / unit,
            dual[count : 2 * count] / self.count_C / unit,
            latency=float(dual[3 * count]) / limit_unit + (1.0 if self.goal == "worst" else 0.0),
            mean=1.0 if self.goal == "mean" else 0.0,
            ramps=float(dual[3 * count + 2]) / ramp_unit,
            usd=float(dual[3 * count + 1]) / (unit if is_rate else 1.0) / budget if math.isfinite(budget) else 0.0,
        )
        return float(solved.fun) * value_unit, bool(solved.x[1] <= 1e-9), prices

    def _objective(
        self, objective: FloatArray, unit: float, fill_rate: float, latency_W: FloatArray, usd_C: FloatArray
    ) -> float:
        """Fill what is minimised; returns the unit of its values."""
        count = len(self.names)
        if self.goal == "rate":
            objective[0] = 1.0
            return unit
        if self.goal == "cost":
            value_unit = max(float(usd_C.max()), 1e-9)
            objective[2 : 2 + count] = usd_C / value_unit
            return value_unit
        mean_W = np.array([walk.mean_s + walk.mean_fill / fill_rate for walk in self.walks])
        value_W = mean_W if self.goal == "mean" else latency_W
        value_unit = max(float(value_W.min()), 1e-300)
        objective[2 + count :] = value_W / value_unit
        return value_unit
