"""Exact search on the graph of splits for the highest rate or the lowest cost, with proof.

E3's recursion (figure 6) fixes the batch that a rate allows, and it minimizes the longest cycle time. Here batch sizes,
ramps and the splits of a stage are free, and the wait for a batch depends on the rate that the plan will reach. So the
search determines which rates have plans, interval by interval, from the highest rate down. In an interval (x, y] it
relaxes the problem: stages must reach only x, but batches fill as fast as at y. If the relaxed problem has no plan, no
plan has a rate in the interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from optimizer.decision import FeasiblePlan, if_feasible
from optimizer.evaluate import merit
from optimizer.exact.prices import TOLERANCE, Limits, feasible_moves, lagrangian_bound
from optimizer.exact.search import CLOSED, DEVICE, MOVE, PARENT, USED, search
from optimizer.moves import Graph
from optimizer.plan import Stage
from optimizer.problem import Supply
from optimizer.step import FloatArray, IntArray, Labels

# Relative difference below which two rates, or two costs, count as equal.
RESOLUTION = 1e-10
# Labels that the first search of an interval may use.
FEW_LABELS = 20_000
# Above this number of labels, further rounds that improve the prices save more time than they take.
MANY_LABELS = 5_000
MOST_LABELS = 3_000_000
# Rounds that improve the prices of a neighboring interval.
ROUNDS = 12
# Relative width of the interval whose moves are filtered at once, and of the intervals in it that are searched. Wider
# intervals are weaker relaxations and take more labels. Below NARROW, labels are added instead of narrowing further.
REGION = 0.1
WIDE = 0.01
NARROW = 0.002
# Smallest budget, below any price. The prices divide by the budget.
LEAST_USD = 1e-300
# Largest number of costs that are enumerated one by one.
MOST_LEVELS = 1_000_000

Chain = tuple[Stage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best plan that was found, and what is proven about all plans."""

    found: FeasiblePlan | None
    """None if no plan keeps the promises (`proven`), or if none was found."""
    bound: float
    """No plan has a higher rate, or a lower cost."""
    proven: bool
    """Whether no better plan than `found` exists."""
    candidates: tuple[FeasiblePlan, ...] = ()
    """Other good plans, the best first."""


@dataclass(slots=True, kw_only=True)
class ExactSearch:
    """A search for the best plan of one graph. It keeps its price weights: neighboring intervals need similar ones."""

    graph: Graph
    may_split: bool
    may_hop: bool
    most_labels: int = MOST_LABELS
    """The search gives up beyond this number of labels. A label takes 64 bytes."""
    incumbent: float | None = None
    """Rate or cost of a known plan: only better plans are sought. None if no plan is known."""
    plans: list[FeasiblePlan] = field(default_factory=list)
    """All plans that were found on the way, the best last. Searches derived from this one share the list."""
    _weight_R: FloatArray | None = None
    _num_labels: int = 0
    """Labels of the last search."""
    _labels_allowed: int = FEW_LABELS

    def highest_rate(self, *, any_plan: bool = False) -> SearchResult:
        """Returns the plan of the highest rate. With `any_plan`, returns the first plan that is found."""
        high, width, least = self._rate_bound(), REGION, self.incumbent or 0.0
        while high > least * (1 + RESOLUTION) and not self._is_too_slow_at(high):
            low = max(high * (1 - width), least)
            if self._is_infeasible(low, high):
                high, width = low, min(2 * width, 0.5)
                continue
            result = self._filtered(low, high)._highest_rate_between(low, high, any_plan=any_plan)
            if result.found is not None or not result.proven:
                return result
            high, width = low, REGION
        return SearchResult(found=None, bound=least, proven=True)

    def _highest_rate_between(self, low: float, high: float, *, any_plan: bool) -> SearchResult:
        best: FeasiblePlan | None = None
        width = WIDE
        while high > low:
            required = max(high * (1 - width), low)
            if self._is_infeasible(required, high):
                high = required
                continue
            chains = self._relaxed_chains(required, high)
            if chains is None:
                width = self._after_too_many_labels((high - required) / high)
                if self._labels_allowed > self.most_labels:
                    return SearchResult(found=best, bound=high, proven=False)
                continue
            faster = [plan for plan in self._feasible_plans(chains) if plan.figures.rate_per_s > low]
            self.plans.extend(faster)
            if faster:
                best, low = faster[-1], faster[-1].figures.rate_per_s * (1 + RESOLUTION)
                width = max(high - low, 0.0) / high / 2
                if any_plan:
                    return SearchResult(found=best, bound=high, proven=False)
            elif not chains or high - required <= RESOLUTION * high:
                high, width = required, min(2 * width, WIDE)
            else:  # only the relaxation has plans: their batches fill more slowly than assumed
                width = min(width, (high - required) / high) / 4
        if best is None:
            return SearchResult(found=None, bound=low, proven=True)
        best = self._cheapest_with_rate_of(best)
        return SearchResult(found=best, bound=best.figures.rate_per_s, proven=True)

    def least_cost(self, rate_per_s: float) -> SearchResult:
        """Returns the cheapest plan that reaches a rate.

        A quick search for plans with one split per stage gives an upper bound. Below it, only the costs that whole
        devices can have are tried, from the lowest up, because the number of labels grows with the budget.
        """
        quick = replace(self, may_split=False).least_cost(rate_per_s) if self.may_split else None
        above = quick.found if quick else None
        least_usd = self._cost_bound(rate_per_s)
        most_usd = min(self._budget(), sum(supply.count * supply.usd_per_hour for supply in self._supplies()))
        levels = self._cost_levels(least_usd, most_usd)
        for usd in (self.incumbent, above.figures.usd_per_hour if above else None):
            levels = levels if usd is None else levels[levels < usd * (1 - RESOLUTION)]
        width = REGION
        while len(levels):
            budget = _highest_within(levels, width)
            if self._is_infeasible(rate_per_s, rate_per_s, budget):
                width = min(2 * width, 1.0)
            else:
                part = self._filtered(rate_per_s, rate_per_s, budget)
                result = part._least_cost_among(rate_per_s, levels[levels <= budget])
                if result.found is not None or not result.proven:
                    return replace(result, found=result.found or above)
            levels = levels[levels > budget]
        bound = above.figures.usd_per_hour if above else math.inf
        return SearchResult(found=above, bound=bound, proven=True)

    def _least_cost_among(self, rate_per_s: float, levels: FloatArray) -> SearchResult:
        width = WIDE
        while len(levels):
            budget = _highest_within(levels, width)
            is_infeasible = self._is_infeasible(rate_per_s, rate_per_s, budget)
            chains = [] if is_infeasible else self._relaxed_chains(rate_per_s, rate_per_s, budget)
            if chains is None:
                width = self._after_too_many_labels(width)
                if self._labels_allowed > self.most_labels:
                    return SearchResult(found=None, bound=float(levels[0]), proven=False)
                continue
            plans = self._feasible_plans(chains)
            if plans:
                self.plans.extend(plans)
                best = self._with_lower_latency(plans[-1], rate_per_s)
                return SearchResult(found=best, bound=best.figures.usd_per_hour, proven=True)
            levels, width = levels[levels > budget], min(2 * width, WIDE)
        return SearchResult(found=None, bound=math.inf, proven=True)

    def _cost_levels(self, least_usd: float, most_usd: float) -> FloatArray:
        """Returns the costs that whole devices can have, ascending; a geometric grid if there are too many."""
        supplies = self._supplies()
        if math.prod(supply.count + 1 for supply in supplies) > MOST_LEVELS:
            least_usd = max(least_usd, most_usd * 1e-6, LEAST_USD)
            steps = math.ceil(math.log(max(most_usd / least_usd, 1.0)) / math.log1p(NARROW)) + 1
            return np.geomspace(least_usd * (1 + NARROW), max(most_usd, least_usd * (1 + NARROW)), steps)
        usd = np.zeros(1)
        for supply in supplies:
            usd = np.unique(np.add.outer(usd, supply.usd_per_hour * np.arange(supply.count + 1)))
        return np.maximum(usd[(usd >= least_usd * (1 - RESOLUTION)) & (usd <= most_usd * (1 + RESOLUTION))], LEAST_USD)

    def _cheapest_with_rate_of(self, best: FeasiblePlan) -> FeasiblePlan:
        """Returns the cheapest plan with the rate of `best`, if one search finds it, then with a lower latency."""
        rate, usd = best.figures.rate_per_s, best.figures.usd_per_hour
        chains = self._relaxed_chains(rate * (1 - RESOLUTION), rate, usd * (1 - RESOLUTION)) if usd else None
        return self._with_lower_latency(min([best, *self._with_rate(chains, rate)], key=_cost_then_latency), rate)

    def _with_lower_latency(self, best: FeasiblePlan, rate_per_s: float) -> FeasiblePlan:
        """Halves the latency limit as long as a plan of the same rate and cost exists. Returns the last such plan."""
        while True:
            usd, latency_s = best.figures.usd_per_hour, best.figures.latency_s / 2
            chains = self._relaxed_chains(rate_per_s * (1 - RESOLUTION), rate_per_s, usd, latency_s)
            quicker = min(self._with_rate(chains, rate_per_s), key=_cost_then_latency, default=best)
            if quicker.figures.latency_s > latency_s * (1 + TOLERANCE):
                return best
            best = quicker

    def _with_rate(self, chains: list[Chain] | None, rate_per_s: float) -> list[FeasiblePlan]:
        plans = self._feasible_plans(chains or [])
        return [plan for plan in plans if plan.figures.rate_per_s >= rate_per_s * (1 - RESOLUTION)]

    def _feasible_plans(self, chains: list[Chain]) -> list[FeasiblePlan]:
        """Returns the chains that keep every promise, the best last."""
        problem = self.graph.problem
        plans = [plan for plan in (if_feasible(problem, chain) for chain in chains) if plan]
        return sorted(plans, key=lambda plan: merit(problem, plan.figures))

    def _after_too_many_labels(self, width: float) -> float:
        """Returns the width of a narrower interval. If it is narrow already, allows more labels instead."""
        if width > NARROW:
            return width / 4
        self._labels_allowed *= 4
        return width

    def _filtered(self, required: float, filling: float, budget: float | None = None) -> ExactSearch:
        """Returns the same search on the moves that the prices do not exclude from every plan of an interval."""
        limits = self._limits(required, filling, budget)
        return replace(self, graph=self.graph.only(feasible_moves(self.graph.moves, limits, self._weight_rows())))

    def _rate_bound(self) -> float:
        """Returns an upper bound on the rate: all devices work, and waiting takes no time."""
        limits = self._limits(1.0, math.inf)._replace(latency_s=math.inf)
        price, _ = lagrangian_bound(self.graph.moves, limits, self._equal_weights(), 4 * ROUNDS, 1.0)
        return 0.0 if price <= 0 or math.isinf(price) else (1 + RESOLUTION) / price

    def _is_too_slow_at(self, rate_per_s: float) -> bool:
        """Returns whether an idle cluster misses the latency limit if batches fill at this rate, or more slowly."""
        if rate_per_s <= 0:
            return True
        return self._price_by(-1, self._limits(0.0, rate_per_s)) > 1 + 1e-9

    def _is_infeasible(self, required: float, filling: float, budget: float | None = None) -> bool:
        """Returns whether the Lagrangian bound proves that an interval has no plan. Keeps its price weights."""
        limits = self._limits(required, filling, budget)
        if self._weight_R is None:
            price, self._weight_R = lagrangian_bound(self.graph.moves, limits, self._equal_weights(), 2 * ROUNDS, 1.0)
        else:
            price, self._weight_R = lagrangian_bound(self.graph.moves, limits, self._weight_R, ROUNDS, 0.3)
        return bool(price > 1 + 1e-7)

    def _relaxed_chains(
        self, required: float, filling: float, budget: float | None = None, latency_s: float | None = None
    ) -> list[Chain] | None:
        """Returns plans that keep the limits if batches fill that fast. Returns None after too many labels."""
        limits = self._limits(required, filling, budget)
        if latency_s is not None:
            limits = limits._replace(latency_s=latency_s)
        if self._weight_R is None:
            self._weight_R = self._equal_weights()
        if self._num_labels > MANY_LABELS:
            _, self._weight_R = lagrangian_bound(self.graph.moves, limits, self._weight_R, 4 * ROUNDS, 0.5)
        is_complete, self._num_labels, labels, end_L = search(
            self.graph.moves, limits, self._weight_rows(), self._radix(), min(self._labels_allowed, self.most_labels)
        )
        if not is_complete:
            return None
        self._labels_allowed = min(max(4 * self._num_labels, FEW_LABELS), self.most_labels)
        return [self._chain(labels, int(label)) for label in end_L]

    def _chain(self, labels: Labels, label: int) -> Chain:
        """Returns the stages on the path to a label."""
        path: list[int] = []
        while label > 0:
            path.append(label)
            label = int(labels.int_LI[label, PARENT])
        moves, radix_C, steps, node, used = self.graph.moves, self._radix(), [], 0, 0
        for label in reversed(path):
            move, replicas = int(labels.int_LI[label, MOVE]), 0
            if labels.int_LI[label, DEVICE] == CLOSED:
                replicas = (int(labels.int_LI[label, USED]) - used) // int(radix_C[moves.device_M[move]])
                used = int(labels.int_LI[label, USED])
            steps.append((node, move, replicas))
            node = int(moves.to_M[move])
        return self.graph.stages_of(steps)

    def _limits(self, required: float, filling: float, budget: float | None = None) -> Limits:
        supplies = self._supplies()
        budget = self._budget() if budget is None else budget
        return Limits(
            count_C=np.array([_affordable_count(supply, budget) for supply in supplies], dtype=np.int64),
            usd_C=np.array([supply.usd_per_hour for supply in supplies], dtype=float),
            budget=float(budget),
            latency_s=float(self.graph.problem.slo.limit_s),
            required_rate=float(required),
            wait_rate=float(filling),
            may_split=self.may_split,
            may_hop=self.may_hop,
        )

    def _cost_bound(self, rate_per_s: float) -> float:
        """Returns the cost of the work if fractions of replicas could be rented, in USD per hour."""
        return self._price_by(-2, self._limits(rate_per_s, rate_per_s)._replace(budget=1.0))

    def _price_by(self, resource: int, limits: Limits) -> float:
        """Returns the price of the cheapest path if only one resource has a weight."""
        return lagrangian_bound(self.graph.moves, limits, np.eye(len(self.graph.device_names) + 2)[resource], 1, 1.0)[0]

    def _supplies(self) -> list[Supply]:
        return [self.graph.problem.devices[name] for name in self.graph.device_names]

    def _budget(self) -> float:
        budget = self.graph.problem.budget_usd_per_hour
        return math.inf if budget is None else max(budget, LEAST_USD)

    def _equal_weights(self) -> FloatArray:
        num_rows = len(self.graph.device_names) + 2
        return np.full(num_rows, 1 / num_rows)

    def _weight_rows(self) -> FloatArray:
        """Returns the current weights, latency alone, and the current weights with each one raised and lowered."""
        assert self._weight_R is not None
        rows = [self._weight_R, np.eye(len(self._weight_R))[-1]]
        for row in range(len(self._weight_R)):
            for factor in (1.5, 0.67):
                changed_R = self._weight_R.copy()
                changed_R[row] *= factor
                rows.append(changed_R / changed_R.sum())
        return np.array(rows)

    def _radix(self) -> IntArray:
        """Returns the place value of each device in the mixed-radix number of devices in use."""
        counts = [supply.count + 1 for supply in self._supplies()]
        return np.array([math.prod(counts[:device]) for device in range(len(counts))], dtype=np.int64)


def _highest_within(levels: FloatArray, width: float) -> float:
    """Returns the highest of the costs that are at most a relative width above the lowest."""
    return float(levels[levels <= levels[0] * (1 + width)][-1])


def _cost_then_latency(plan: FeasiblePlan) -> tuple[float, float]:
    return plan.figures.usd_per_hour, plan.figures.latency_s


def _affordable_count(supply: Supply, budget: float) -> int:
    """Returns the number of devices of a type that the budget pays for if nothing else is rented."""
    allowed = budget * (1 + TOLERANCE)
    return supply.count if supply.usd_per_hour * supply.count <= allowed else int(allowed / supply.usd_per_hour)
