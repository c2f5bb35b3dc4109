"""Divides a few whole devices among models that share them: the best division, and a proven bound.

The rates of a model's chains add up, and each chain runs on its own devices. So it suffices to know the highest rate of
one chain on each set of devices (A). A set is divided in two repeatedly, chain by chain and model by model. The planner
can compute these rates, but there are many sets. Until a set is planned, its rate is bounded by the prices of a
relaxation and by the sets that contain it. Only sets that the best division by these bounds uses are planned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, product, repeat

import numpy as np

from earlyexit.errors import PlanError
from optimizer.cost.evaluate import TOLERANCE
from optimizer.plans.plan import Stage
from optimizer.problems.fleet import Fleet
from optimizer.problems.problem import MaximizeRate
from optimizer.search.decision import Planned
from optimizer.search.fleet.prices import Division, FleetPrices
from optimizer.search.planner import solve
from optimizer.search.space import Space
from profiles.table import FloatArray

Join = Callable[[FloatArray, FloatArray], FloatArray]


class Sets:
    """All sets of the devices, from none to all, and the divisions of each into two parts."""

    def __init__(self, count_C: FloatArray) -> None:
        self.devices_AC = np.array(list(product(*(range(int(count) + 1) for count in count_C))))
        self.within_AA = np.all(self.devices_AC[:, None] >= self.devices_AC, axis=-1)
        self._whole_P, self._part_P = np.nonzero(self.within_AA)
        self._rest_P = self._whole_P - self._part_P  # a set's index is a number of mixed radix
        self._first_A = np.searchsorted(self._whole_P, np.arange(len(self.devices_AC)))

    def best(self, one_A: FloatArray, other_A: FloatArray, join: Join) -> FloatArray:
        """Returns the best joined value over all divisions, for every set."""
        return np.maximum.reduceat(join(one_A[self._part_P], other_A[self._rest_P]), self._first_A)

    def divided(self, whole: int, one_A: FloatArray, other_A: FloatArray, join: Join) -> tuple[int, int]:
        """Returns the two parts of a set's best division."""
        part_P, rest_P = (each[self._whole_P == whole] for each in (self._part_P, self._rest_P))
        best = np.argmax(join(one_A[part_P], other_A[rest_P]))
        return int(part_P[best]), int(rest_P[best])


class ChainRates:
    """The rates of one chain of a model on each set of devices: upper bounds, and rates of planned sets."""

    def __init__(self, fleet: Fleet, model: int, sets: Sets, high_A: FloatArray) -> None:
        self._fleet, self._model, self._sets = fleet, model, sets
        self.high_A, self.low_A = high_A, np.zeros_like(high_A)
        self.chain_A: list[tuple[Stage, ...]] = [() for _ in high_A]
        self.planned: set[int] = set()

    def plan(self, place: int) -> None:
        """Plans the best chain on a set of devices. If the planner finds none, and none was ruled out, bounds stay."""
        problem = self._fleet.problem_on(self._model, self._sets.devices_AC[place].tolist())
        self.planned.add(place)
        try:
            answer = solve(replace(problem, objective=MaximizeRate(), most_chains=1))
        except PlanError:
            return
        within_A = self._sets.within_AA[place]
        self.high_A[within_A] = np.minimum(self.high_A[within_A], answer.bound if isinstance(answer, Planned) else 0.0)
        if isinstance(answer, Planned):
            for larger in np.flatnonzero(self._sets.within_AA[:, place] & (self.low_A < answer.figures.rate_per_s)):
                self.low_A[larger], self.chain_A[larger] = answer.figures.rate_per_s, answer.stages


def best_division(
    sets: Sets, rates: Sequence[FloatArray], fleet: Fleet, least_usd: float
) -> tuple[float, list[tuple[int, int]]]:
    """Returns the best share, and the model and devices of each chain, for the rates `rates[model]` of one chain.

    If the cost is minimized, returns that of the cheapest set with a share of 1, at least `least_usd`.
    """
    most = fleet.most_chains
    several = [list(accumulate(repeat(own_A, most), lambda rest, own: sets.best(own, rest, np.add))) for own_A in rates]
    own = [each[-1] / rate for each, rate in zip(several, fleet.rate_M, strict=True)]
    shares = list(accumulate(own, lambda rest, own: sets.best(own, rest, np.minimum)))
    chains, left = list[tuple[int, int]](), len(sets.devices_AC) - 1
    value = float(shares[-1][-1])
    if fleet.is_cost:
        usd_A = sets.devices_AC @ fleet.usd_C
        usd_A[(shares[-1] < 1 - TOLERANCE) | (usd_A < least_usd * (1 - TOLERANCE))] = np.inf
        left = int(np.argmin(usd_A))
        value = float(usd_A[left])
    for model in reversed(range(len(own))):
        part = left
        if model > 0:
            part, left = sets.divided(left, own[model], shares[model - 1], np.minimum)
        for fewer_A in reversed(several[model][:-1]):
            one, part = sets.divided(part, rates[model], fewer_A, np.add)
            chains.append((model, one))
        chains.append((model, part))
    return value, [(model, place) for model, place in chains if rates[model][place] > 0]


def divided_by_sets(fleet: Fleet, prices: FleetPrices, space: Space, gap: float) -> Division:
    """Returns the best division that was found, with its bound. Ends when they differ by at most `gap`."""
    sets = Sets(fleet.count_C)
    rates_M = [ChainRates(fleet, model, sets, sets.devices_AC @ rate_C) for model, rate_C in enumerate(prices.rate_MC)]
    while True:
        value, used = best_division(sets, [each.low_A for each in rates_M], fleet, prices.bound)
        bound, needed = best_division(sets, [each.high_A for each in rates_M], fleet, prices.bound)
        unknown = {(model, place) for model, place in needed if place not in rates_M[model].planned}
        if not unknown or max(value, bound) <= min(value, bound) * (1 + gap) or space.is_over():
            break
        for model, place in sorted(unknown):
            rates_M[model].plan(place)
    stages_M = [list[Stage]() for _ in rates_M]
    for model, place in used:
        stages_M[model] += rates_M[model].chain_A[place]
    return Division(bound=bound, stages=tuple(map(tuple, stages_M)))
