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

from earlyexit.split import Split
from optimizer.evaluate import Evaluation, evaluate, violations
from optimizer.moves import Graph
from optimizer.plan import Stage
from optimizer.problem import Supply
from optimizer.search import Labels, Limits, affordable_moves, best_prices, search
from optimizer.split_times import FloatArray, IntArray

# Rates closer than this are one rate.
RESOLUTION = 1e-10
# Relative widths: of what is prepared at once, and of the intervals in it, which are searched where prices alone do not
# rule them out. The wider, the more labels.
REGION = 0.1
WIDE = 0.01
NARROW = 0.002
FEW_LABELS = 50_000
MANY_LABELS = 5_000
MOST_LABELS = 6_000_000
# Stands for a budget of nothing, because budgets divide.
LEAST_USD = 1e-9
ROUNDS = 12

Chain = tuple[Stage, ...]


class TooManyLabelsError(Exception):
    """The exact search would need more memory than it may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A plan that keeps every promise, and its figures."""

    chain: Chain
    figures: Evaluation


@dataclass(slots=True, kw_only=True)
class ExactSearch:
    """One graph, asked once; remembers prices, because neighbouring intervals have similar ones."""

    graph: Graph
    may_split: bool
    may_hop: bool
    met: list[Found] = field(default_factory=list)
    """Plans met on the way, best last."""
    _share_R: FloatArray | None = None
    _num_labels: int = 0
    """Of the last search."""
    _labels_allowed: int = FEW_LABELS

    def highest_rate(self, *, any_plan: bool = False) -> Found | None:
        """The plan of the highest rate; None where no plan keeps the promises. `any_plan` stops at the first.

        Raises TooManyLabelsError.
        """
        best: Found | None = None
        high, width = self._most_rate(), REGION
        while best is None and not self._too_slow_at(high):
            low = high * (1 - width)
            if self._priced_out(low, high):
                high, width = low, min(2 * width, 0.5)
            else:
                part = replace(self, graph=self._affordable(low, high))
                best = part._highest_rate_between(low, high, any_plan=any_plan)
                high, width = low, REGION
        return best

    def _highest_rate_between(self, low: float, high: float, *, any_plan: bool) -> Found | None:
        best: Found | None = None
        width = WIDE
        while high > low:
            required = max(high * (1 - width), low)
            if self._priced_out(required, high):
                high = required
                continue
            chains = self._chains(required, high)
            if chains is None:
                width = self._after_too_many_labels((high - required) / high)
                continue
            better = self._best_rate(chains, low)
            if better is not None:
                best, low = better, better.figures.rate_per_s * (1 + RESOLUTION)
                width = max(high - low, 0.0) / high / 2
                if any_plan:
                    break
            elif not chains or high - required <= RESOLUTION * high:
                high, width = required, min(2 * width, WIDE)
            else:  # plans, but their batches do not fill as fast as hoped
                width = min(width, (high - required) / high) / 4
        return best and self._cheapest_at(best)

    def least_cost(self, rate_per_s: float) -> Found | None:
        """The cheapest plan of a rate; None where no plan keeps the promises. Raises TooManyLabelsError."""
        most_usd = min(self._budget(), sum(supply.count * supply.usd_per_hour for supply in self._supplies()))
        without, width = self._least_usd(rate_per_s), REGION
        while True:
            budget = max(min(without * (1 + width), most_usd), LEAST_USD)
            if self._priced_out(rate_per_s, rate_per_s, budget):
                width = min(2 * width, 1.0)
            else:
                part = replace(self, graph=self._affordable(rate_per_s, rate_per_s, budget))
                found = part._least_cost_between(rate_per_s, without, budget)
                if found is not None:
                    return found
            if budget >= most_usd:
                return None
            without = budget

    def _least_cost_between(self, rate_per_s: float, without: float, most_usd: float) -> Found | None:
        width = WIDE
        while True:
            budget = max(min(without * (1 + width), most_usd), LEAST_USD)
            hopeless = self._priced_out(rate_per_s, rate_per_s, budget)
            chains = [] if hopeless else self._chains(rate_per_s, rate_per_s, budget)
            if chains is None:
                width = self._after_too_many_labels(width)
                continue
            scored = [each for each in map(self._scored, chains) if each]
            if scored:
                scored.sort(key=lambda each: (-each.figures.usd_per_hour, -each.figures.latency_s))
                self.met.extend(scored)
                return scored[-1]
            if budget >= most_usd:
                return None
            without, width = budget, min(2 * width, WIDE)

    def _after_too_many_labels(self, width: float) -> float:
        """A narrower interval; or, where that is no hope any more, as narrow a one with more memory."""
        if width > NARROW:
            return width / 4
        self._labels_allowed *= 4
        if self._labels_allowed > MOST_LABELS:
            raise TooManyLabelsError
        return width

    def _affordable(self, required: float, filling: float, budget: float | None = None) -> Graph:
        """Only the splits that prices leave in any plan of an interval."""
        limits = self._limits(required, filling, budget)
        return self.graph.only(affordable_moves(self.graph.moves, limits, self._price_rows()))

    def _best_rate(self, chains: list[Chain], above: float) -> Found | None:
        scored = [each for each in map(self._scored, chains) if each and each.figures.rate_per_s > above]
        scored.sort(key=lambda each: each.figures.rate_per_s)
        self.met.extend(scored)
        return scored[-1] if scored else None

    def _cheapest_at(self, best: Found) -> Found:
        """Of the plans with the best rate, the cheapest, where that is soon found."""
        rate, usd = best.figures.rate_per_s, best.figures.usd_per_hour
        chains = self._chains(rate * (1 - RESOLUTION), rate, usd * (1 - RESOLUTION)) if usd else None
        same = [each for each in map(self._scored, chains or []) if each]
        return min([best, *same], key=lambda each: each.figures.usd_per_hour)

    def _scored(self, chain: Chain) -> Found | None:
        figures = evaluate(self.graph.problem, chain)
        return None if violations(self.graph.problem, chain, figures) else Found(chain=chain, figures=figures)

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

    def _chains(self, required: float, filling: float, budget: float | None = None) -> list[Chain] | None:
        """Plans that would do, were their batches filled that fast; None where telling takes too many labels."""
        limits = self._limits(required, filling, budget)
        if self._share_R is None:
            self._share_R = self._even()
        if self._num_labels > MANY_LABELS:  # good prices pay
            _, self._share_R = best_prices(self.graph.moves, limits, self._share_R, 4 * ROUNDS, 0.5)
        done, labels, ended_L = search(
            self.graph.moves, limits, self._price_rows(), self._radix(), self._labels_allowed
        )
        self._num_labels = len(labels.node_L)
        if done:
            self._labels_allowed = max(4 * self._num_labels, FEW_LABELS)
        return [self._chain(labels, int(label)) for label in ended_L] if done else None

    def _chain(self, labels: Labels, label: int) -> Chain:
        """The stages on the way to a label."""
        way: list[int] = []
        while label > 0:
            way.append(label)
            label = int(labels.parent_L[label])
        stages: list[Stage] = []
        splits: list[Split] = []
        used = 0
        for each in reversed(way):
            move = int(labels.move_L[each])
            splits.append(self.graph.split_of(int(labels.node_L[labels.parent_L[each]]), move))
            if labels.device_L[each] < 0:
                device = int(self.graph.moves.device_M[move])
                replicas = (int(labels.used_L[each]) - used) // int(self._radix()[device])
                used = int(labels.used_L[each])
                name = self.graph.device_names[device]
                stages.append(Stage(device=name, replicas=replicas, splits=tuple(splits)))
                splits = []
        return tuple(stages)

    def _limits(self, required: float, filling: float, budget: float | None = None) -> Limits:
        supplies = self._supplies()
        return Limits(
            count_C=np.array([supply.count for supply in supplies], dtype=np.int64),
            usd_C=np.array([supply.usd_per_hour for supply in supplies]),
            budget=float(self._budget() if budget is None else budget),
            latency_s=self.graph.problem.slo.limit_s,
            required_rate=float(required),
            wait_rate=float(filling),
            may_split=self.may_split,
            may_hop=self.may_hop,
        )

    def _least_usd(self, rate_per_s: float) -> float:
        """What the work costs where replicas need not be whole."""
        share_R = np.zeros(len(self.graph.device_names) + 2)
        share_R[-2] = 1.0
        limits = self._limits(rate_per_s, rate_per_s, budget=1.0)
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
