"""Exact search on a graph of splits: the highest rate, or the least cost, with proof.

E3's recursion (figure 6) fixes the batch that a rate allows and minimizes the longest cycle time. Here batches, ramps
and several splits per stage are free, and waiting for a batch depends on the rate that the plan will reach, so a rate
is sought for which a plan exists: from above, interval by interval. In an interval (x, y] stages must do x while
batches fill as fast as at y; where not even that has a plan, no plan has a rate in the interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from optimizer.decision import FeasiblePlan, if_feasible
from optimizer.evaluate import merit
from optimizer.exact.prices import SLACK, Limits, affordable_moves, best_prices
from optimizer.exact.search import DEVICE, MOVE, PARENT, USED, search
from optimizer.moves import Graph
from optimizer.plan import Stage
from optimizer.problem import Supply
from optimizer.step import FloatArray, IntArray, Labels

# Rates closer than this are one rate.
RESOLUTION = 1e-10
NARROW = 0.002
"""Relative width of an interval that is not made narrower for want of labels."""
FEW_LABELS = 20_000
MANY_LABELS = 5_000
MOST_LABELS = 3_000_000
# Stands for a budget of nothing, because budgets divide: below any price.
LEAST_USD = 1e-300
ROUNDS = 12
# Relative widths: of what is prepared at once, and of the intervals in it, which are searched where prices alone do not
# rule them out. The wider, the more labels.
REGION = 0.1
WIDE = 0.01
# Costs that are told apart.
MOST_LEVELS = 1_000_000

Chain = tuple[Stage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """The best plan that was found, and what is proven."""

    found: FeasiblePlan | None
    """None where no plan keeps the promises; or where none was found and nothing is proven."""
    bound: float
    """No plan has a higher rate, or costs less."""
    proven: bool
    """Whether nothing better exists than what was found."""


@dataclass(slots=True, kw_only=True)
class ExactSearch:
    """One graph, asked once for its best plan; remembers prices, because neighbouring intervals have similar ones."""

    graph: Graph
    may_split: bool
    may_hop: bool
    most_labels: int = MOST_LABELS
    """Beyond these it gives up; each takes 64 bytes."""
    known: float | None = None
    """A rate or a cost: only better plans are sought. None: the best plan is."""
    met: list[FeasiblePlan] = field(default_factory=list)
    """Plans met on the way, best last."""
    _share_R: FloatArray | None = None
    _num_labels: int = 0
    """Of the last search."""
    _labels_allowed: int = FEW_LABELS

    def highest_rate(self, *, any_plan: bool = False) -> Searched:
        """The plan of the highest rate; `any_plan` stops at the first."""
        high, width, known = self._most_rate(), REGION, self.known or 0.0
        while high > known * (1 + RESOLUTION) and not self._too_slow_at(high):
            low = max(high * (1 - width), known)
            if self._priced_out(low, high):
                high, width = low, min(2 * width, 0.5)
                continue
            part = replace(self, graph=self._affordable(low, high))
            answer = part._highest_rate_between(low, high, any_plan=any_plan)
            if answer.found is not None or not answer.proven:
                return answer
            high, width = low, REGION
        return Searched(found=None, bound=known, proven=True)

    def _highest_rate_between(self, low: float, high: float, *, any_plan: bool) -> Searched:
        best: FeasiblePlan | None = None
        width = WIDE
        while high > low:
            required = max(high * (1 - width), low)
            if self._priced_out(required, high):
                high = required
                continue
            chains = self._chains(required, high)
            if chains is None:
                width = self._after_too_many_labels((high - required) / high)
                if self._labels_allowed > self.most_labels:
                    return Searched(found=best, bound=high, proven=False)
                continue
            faster = [each for each in self._kept(chains) if each.figures.rate_per_s > low]
            self.met.extend(faster)
            if faster:
                best, low = faster[-1], faster[-1].figures.rate_per_s * (1 + RESOLUTION)
                width = max(high - low, 0.0) / high / 2
                if any_plan:
                    return Searched(found=best, bound=high, proven=False)
            elif not chains or high - required <= RESOLUTION * high:
                high, width = required, min(2 * width, WIDE)
            else:  # plans, but their batches do not fill as fast as hoped
                width = min(width, (high - required) / high) / 4
        if best is None:
            return Searched(found=None, bound=low, proven=True)
        best = self._cheapest_at(best)
        return Searched(found=best, bound=best.figures.rate_per_s, proven=True)

    def least_cost(self, rate_per_s: float) -> Searched:
        """The cheapest plan of a rate.

        Plans with one split per stage are soon searched. What is left is to ask for a plan below their cost: at costs
        that whole devices can have, and from the bottom, because labels grow with what may be spent.
        """
        quick = replace(self, may_split=False).least_cost(rate_per_s) if self.may_split else None
        above = quick.found if quick else None
        least_usd = self._least_usd(rate_per_s)
        most_usd = min(self._budget(), sum(supply.count * supply.usd_per_hour for supply in self._supplies()))
        levels = self._attainable_usd(least_usd, most_usd)
        levels = levels if self.known is None else levels[levels < self.known * (1 - RESOLUTION)]
        levels = levels[levels < above.figures.usd_per_hour * (1 - RESOLUTION)] if above else levels
        width = REGION
        while len(levels):
            budget = _spent_at_once(levels, width)
            if self._priced_out(rate_per_s, rate_per_s, budget):
                width = min(2 * width, 1.0)
            else:
                part = replace(self, graph=self._affordable(rate_per_s, rate_per_s, budget))
                answer = part._least_cost_among(rate_per_s, levels[levels <= budget])
                if answer.found is not None or not answer.proven:
                    return replace(answer, found=answer.found or above)
            levels = levels[levels > budget]
        bound = above.figures.usd_per_hour if above else math.inf
        return Searched(found=above, bound=bound, proven=True)

    def _least_cost_among(self, rate_per_s: float, levels: FloatArray) -> Searched:
        width = WIDE
        while len(levels):
            budget = _spent_at_once(levels, width)
            hopeless = self._priced_out(rate_per_s, rate_per_s, budget)
            chains = [] if hopeless else self._chains(rate_per_s, rate_per_s, budget)
            if chains is None:
                width = self._after_too_many_labels(width)
                if self._labels_allowed > self.most_labels:
                    return Searched(found=None, bound=float(levels[0]), proven=False)
                continue
            found = self._kept(chains)
            if found:
                self.met.extend(found)
                best = self._quicker(found[-1], rate_per_s)
                return Searched(found=best, bound=best.figures.usd_per_hour, proven=True)
            levels, width = levels[levels > budget], min(2 * width, WIDE)
        return Searched(found=None, bound=math.inf, proven=True)

    def _attainable_usd(self, least_usd: float, most_usd: float) -> FloatArray:
        """What whole devices can cost, ascending; or evenly close values where there are too many."""
        supplies = self._supplies()
        if math.prod(supply.count + 1 for supply in supplies) > MOST_LEVELS:
            least_usd = max(least_usd, most_usd * 1e-6, LEAST_USD)
            steps = math.ceil(math.log(max(most_usd / least_usd, 1.0)) / math.log1p(NARROW)) + 1
            return np.geomspace(least_usd * (1 + NARROW), max(most_usd, least_usd * (1 + NARROW)), steps)
        usd = np.zeros(1)
        for supply in supplies:
            usd = np.unique(np.add.outer(usd, supply.usd_per_hour * np.arange(supply.count + 1)))
        return np.maximum(usd[(usd >= least_usd * (1 - RESOLUTION)) & (usd <= most_usd * (1 + RESOLUTION))], LEAST_USD)

    def _cheapest_at(self, best: FeasiblePlan) -> FeasiblePlan:
        """Of the plans with the best rate, the cheapest, where that is soon found; of these a quick one."""
        rate, usd = best.figures.rate_per_s, best.figures.usd_per_hour
        chains = self._chains(rate * (1 - RESOLUTION), rate, usd * (1 - RESOLUTION)) if usd else None
        return self._quicker(min([best, *self._as_fast(chains, rate)], key=_cost_then_latency), rate)

    def _quicker(self, best: FeasiblePlan, rate_per_s: float) -> FeasiblePlan:
        """A plan as fast and as cheap, in half of the latency, and again: many plans differ in nothing else."""
        while True:
            usd, latency_s = best.figures.usd_per_hour, best.figures.latency_s / 2
            chains = self._chains(rate_per_s * (1 - RESOLUTION), rate_per_s, usd, latency_s)
            quicker = min(self._as_fast(chains, rate_per_s), key=_cost_then_latency, default=best)
            if quicker.figures.latency_s > latency_s * (1 + SLACK):
                return best
            best = quicker

    def _as_fast(self, chains: list[Chain] | None, rate_per_s: float) -> list[FeasiblePlan]:
        return [each for each in self._kept(chains or []) if each.figures.rate_per_s >= rate_per_s * (1 - RESOLUTION)]

    def _kept(self, chains: list[Chain]) -> list[FeasiblePlan]:
        """Those that keep every promise, best last."""
        problem = self.graph.problem
        found = [each for each in (if_feasible(problem, chain) for chain in chains) if each]
        return sorted(found, key=lambda each: merit(problem, each.figures))

    def _after_too_many_labels(self, width: float) -> float:
        """A narrower interval; or, where that is no hope any more, as narrow a one with more memory."""
        if width > NARROW:
            return width / 4
        self._labels_allowed *= 4
        return width

    def _affordable(self, required: float, filling: float, budget: float | None = None) -> Graph:
        """Only the splits that prices leave in any plan of an interval."""
        limits = self._limits(required, filling, budget)
        return self.graph.only(affordable_moves(self.graph.moves, limits, self._price_rows()))

    def _most_rate(self) -> float:
        """What all devices do when waiting costs nothing."""
        limits = self._limits(1.0, math.inf)._replace(latency_s=math.inf)
        price, _ = best_prices(self.graph.moves, limits, self._even(), 4 * ROUNDS, 1.0)
        return 0.0 if price <= 0 or math.isinf(price) else (1 + RESOLUTION) / price

    def _too_slow_at(self, rate_per_s: float) -> bool:
        """Whether even an empty cluster is too slow when batches fill at this rate, or slower."""
        if rate_per_s <= 0:
            return True
        share_R = np.zeros(len(self.graph.device_names) + 2)
        share_R[-1] = 1.0
        price, _ = best_prices(self.graph.moves, self._limits(0.0, rate_per_s), share_R, 1, 1.0)
        return bool(price > 1 + 1e-9)

    def _priced_out(self, required: float, filling: float, budget: float | None = None) -> bool:
        limits = self._limits(required, filling, budget)
        if self._share_R is None:
            price, self._share_R = best_prices(self.graph.moves, limits, self._even(), 2 * ROUNDS, 1.0)
        else:
            price, self._share_R = best_prices(self.graph.moves, limits, self._share_R, ROUNDS, 0.3)
        return bool(price > 1 + 1e-7)

    def _chains(
        self, required: float, filling: float, budget: float | None = None, latency_s: float | None = None
    ) -> list[Chain] | None:
        """Plans that would do, were their batches filled that fast; None where telling takes too many labels."""
        limits = self._limits(required, filling, budget)
        if latency_s is not None:
            limits = limits._replace(latency_s=latency_s)
        if self._share_R is None:
            self._share_R = self._even()
        if self._num_labels > MANY_LABELS:  # good prices pay
            _, self._share_R = best_prices(self.graph.moves, limits, self._share_R, 4 * ROUNDS, 0.5)
        done, self._num_labels, labels, ended_L = search(
            self.graph.moves, limits, self._price_rows(), self._radix(), min(self._labels_allowed, self.most_labels)
        )
        if done:
            self._labels_allowed = min(max(4 * self._num_labels, FEW_LABELS), self.most_labels)
        return [self._chain(labels, int(label)) for label in ended_L] if done else None

    def _chain(self, labels: Labels, label: int) -> Chain:
        """The stages on the way to a label."""
        way: list[int] = []
        while label > 0:
            way.append(label)
            label = int(labels.int_LI[label, PARENT])
        moves, radix_C, steps, node, used = self.graph.moves, self._radix(), [], 0, 0
        for each in reversed(way):
            move, replicas = int(labels.int_LI[each, MOVE]), 0
            if labels.int_LI[each, DEVICE] < 0:
                replicas = (int(labels.int_LI[each, USED]) - used) // int(radix_C[moves.device_M[move]])
                used = int(labels.int_LI[each, USED])
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

    def _least_usd(self, rate_per_s: float) -> float:
        """What the work costs where replicas need not be whole."""
        share_R = np.zeros(len(self.graph.device_names) + 2)
        share_R[-2] = 1.0
        limits = self._limits(rate_per_s, rate_per_s)._replace(budget=1.0)
        return best_prices(self.graph.moves, limits, share_R, 1, 1.0)[0]

    def _supplies(self) -> list[Supply]:
        return [self.graph.problem.devices[name] for name in self.graph.device_names]

    def _budget(self) -> float:
        budget = self.graph.problem.budget_usd_per_hour
        return math.inf if budget is None else max(budget, LEAST_USD)

    def _even(self) -> FloatArray:
        num_rows = len(self.graph.device_names) + 2
        return np.full(num_rows, 1 / num_rows)

    def _price_rows(self) -> FloatArray:
        """Prices of the last `_priced_out`, and latency alone."""
        assert self._share_R is not None
        latency_R = np.zeros_like(self._share_R)
        latency_R[-1] = 1.0
        rows = [self._share_R, latency_R]
        for row in range(len(self._share_R)):
            for factor in (1.5, 0.67):
                changed_R = self._share_R.copy()
                changed_R[row] *= factor
                rows.append(changed_R / changed_R.sum())
        return np.array(rows)

    def _radix(self) -> IntArray:
        counts = [supply.count + 1 for supply in self._supplies()]
        return np.array([math.prod(counts[:device]) for device in range(len(counts))], dtype=np.int64)


def _spent_at_once(levels: FloatArray, width: float) -> float:
    """The highest of the costs that a relative width above the lowest reaches."""
    return float(levels[levels <= levels[0] * (1 + width)][-1])


def _cost_then_latency(found: FeasiblePlan) -> tuple[float, float]:
    return found.figures.usd_per_hour, found.figures.latency_s


def _affordable_count(supply: Supply, budget: float) -> int:
    """Devices of a type that the budget pays when nothing else is bought."""
    allowed = budget * (1 + SLACK)
    return supply.count if supply.usd_per_hour * supply.count <= allowed else int(allowed / supply.usd_per_hour)
