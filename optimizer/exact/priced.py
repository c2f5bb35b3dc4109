"""A graph, and the prices that prove what no plan on it can do; and the plans that are left, by labels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from earlyexit.network.boundary import Split
from optimizer.exact.labels import DEVICE, MOVE, PARENT, USED, Labels
from optimizer.exact.prices import SLACK, Limits, affordable_moves, best_prices
from optimizer.exact.search import search
from optimizer.moves import Graph
from optimizer.plan import Stage
from optimizer.problem import Supply
from optimizer.step import FloatArray, IntArray

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

Chain = tuple[Stage, ...]


@dataclass(slots=True, kw_only=True)
class PricedGraph:
    """One graph, asked about rates and budgets; remembers prices, because neighbouring intervals have similar ones."""

    graph: Graph
    may_split: bool
    may_hop: bool
    most_labels: int = MOST_LABELS
    """Beyond these it gives up; each takes 64 bytes."""
    _share_R: FloatArray | None = None
    _num_labels: int = 0
    """Of the last search."""
    _labels_allowed: int = FEW_LABELS

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
            label = int(labels.whole_LI[label, PARENT])
        stages: list[Stage] = []
        splits: list[Split] = []
        node, used = 0, 0
        for each in reversed(way):
            move = int(labels.whole_LI[each, MOVE])
            splits.append(self.graph.split_of(node, move))
            node = int(self.graph.moves.to_M[move])
            if labels.whole_LI[each, DEVICE] < 0:
                device = int(self.graph.moves.device_M[move])
                replicas = (int(labels.whole_LI[each, USED]) - used) // int(self._radix()[device])
                used = int(labels.whole_LI[each, USED])
                name = self.graph.device_names[device]
                stages.append(Stage(device=name, replicas=replicas, splits=tuple(splits)))
                splits = []
        return tuple(stages)

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


def _affordable_count(supply: Supply, budget: float) -> int:
    """Devices of a type that the budget pays when nothing else is bought."""
    allowed = budget * (1 + SLACK)
    return supply.count if supply.usd_per_hour * supply.count <= allowed else int(allowed / supply.usd_per_hour)
