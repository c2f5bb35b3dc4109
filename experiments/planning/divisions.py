"""Divides a few whole devices among models that share them: the best division, and a proven bound.

Each model gets the same multiple of its weight, which is maximized. The rates of a model's chains add up, and each
chain runs on its own devices. So it suffices to know the highest rate of one chain on each set of devices (A). A set is
divided in two repeatedly, chain by chain and model by model. The planner can compute these rates, but there are many
sets. Until a set is planned, its rate is bounded by the prices of a relaxation and by the sets that contain it. Only
sets that the best division by these bounds uses are planned.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, product, repeat
from typing import NamedTuple

import numpy as np

from optimizer.cost.evaluate import evaluate, violations
from optimizer.plans.plan import Stage
from optimizer.problems.problem import PlanProblem, Supply, device_names
from optimizer.search.decision import Planned
from optimizer.search.planner import solve
from optimizer.search.relaxation import CuttingPlanes
from optimizer.search.space import SPACES
from optimizer.search.step import FloatArray
from optimizer.search.walks import Prices, Walk, WalkRelaxation, tables_of

Chain = tuple[Stage, ...]
Join = Callable[[FloatArray, FloatArray], FloatArray]


class Fleet(NamedTuple):
    """A plan problem for each model, all with the same devices and for the highest rate."""

    problems: Sequence[PlanProblem]
    weight_M: FloatArray
    """Requests per second of each model at a share of 1."""

    @property
    def names(self) -> tuple[str, ...]:
        """The device types."""
        return device_names(self.problems[0])

    @property
    def count_C(self) -> FloatArray:
        return np.array([float(self.problems[0].devices[name].count) for name in self.names])


def priced(fleet: Fleet) -> tuple[float, FloatArray]:
    """Returns a bound on the share, and for each model an upper bound of the rate per device of each type.

    It relaxes one plan for the inputs of all models, in proportion to their weights, as `optimizer.search.walks`
    relaxes plans of one model. Latencies relative to their limits are averaged over models.
    """
    limit_M, weight_M = np.array([problem.slo.limit_s for problem in fleet.problems]), fleet.weight_M
    walks_M = [WalkRelaxation.of(tables_of(problem, SPACES["best"], names=fleet.names)) for problem in fleet.problems]

    def cheapest_M(prices: Prices) -> tuple[FloatArray, FloatArray, list[Walk]]:
        latency_M: FloatArray = prices.latency * limit_M[0] / (limit_M * weight_M * len(weight_M))
        own_M = [prices._replace(latency=float(latency)) for latency in latency_M]
        found = [walks.cheapest(own, math.inf) for walks, own in zip(walks_M, own_M, strict=True)]
        return np.array([least for least, _ in found]), latency_M * limit_M, [walk for _, walk in found]

    def oracle(prices: Prices, _fill_rate: float) -> tuple[float, Walk]:
        least_M, _, walks = cheapest_M(prices)
        work_C, hop_C = (weight_M @ [walk[at] for walk in walks] for at in (0, 1))
        latency_s = float(limit_M[0] * np.mean([walk.latency_s for walk in walks] / limit_M))
        return float(weight_M @ least_M), Walk(work_C, hop_C, latency_s, 0.0)

    planes = CuttingPlanes(problem=fleet.problems[0], space=SPACES["best"], names=fleet.names, oracle=oracle)
    bounded = planes.highest_rate()
    least_M, waiting_M, _ = cheapest_M(bounded.prices)
    price_C = bounded.prices.work_C + bounded.prices.hop_C
    return bounded.value, price_C / np.maximum(least_M - waiting_M, 1e-300)[:, None]


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

    def __init__(self, problem: PlanProblem, names: Sequence[str], sets: Sets, high_A: FloatArray) -> None:
        self._problem, self._names, self._sets = problem, names, sets
        self.high_A, self.low_A = high_A, np.zeros_like(high_A)
        self.chain_A: list[Chain] = [() for _ in high_A]
        self.planned: set[int] = set()

    def plan(self, place: int) -> None:
        """Plans the best chain on a set of devices."""
        counts = zip(self._names, self._sets.devices_AC[place].tolist(), strict=True)
        devices = {name: Supply(count=count) for name, count in counts if count}
        answer = solve(replace(self._problem, devices=devices))
        self.planned.add(place)
        within_A = self._sets.within_AA[place]
        self.high_A[within_A] = np.minimum(self.high_A[within_A], answer.bound if isinstance(answer, Planned) else 0.0)
        if isinstance(answer, Planned):
            for larger in np.flatnonzero(self._sets.within_AA[:, place] & (self.low_A < answer.figures.rate_per_s)):
                self.low_A[larger], self.chain_A[larger] = answer.figures.rate_per_s, answer.stages


def best_division(
    sets: Sets, rates: Sequence[FloatArray], weight_M: FloatArray, most_chains: int
) -> tuple[float, list[tuple[int, int]]]:
    """Returns the best share, and the model and devices of each chain, for the rates `rates[model]` of one chain."""
    several = [
        list(accumulate(repeat(own_A, most_chains), lambda rest, own: sets.best(own, rest, np.add))) for own_A in rates
    ]
    own = [each[-1] / weight for each, weight in zip(several, weight_M, strict=True)]
    shares = list(accumulate(own, lambda rest, own: sets.best(own, rest, np.minimum)))
    chains, left = list[tuple[int, int]](), len(sets.devices_AC) - 1
    for model in reversed(range(len(own))):
        part = left
        if model > 0:
            part, left = sets.divided(left, own[model], shares[model - 1], np.minimum)
        for fewer_A in reversed(several[model][:-1]):
            one, part = sets.divided(part, rates[model], fewer_A, np.add)
            chains.append((model, one))
        chains.append((model, part))
    return float(shares[-1][-1]), [(model, place) for model, place in chains if rates[model][place] > 0]


def divided(fleet: Fleet, most_chains: int, *, seconds: float, gap: float) -> tuple[float, list[list[Chain]]]:
    """Returns a bound on the share, and the chains of each model in the best division found.

    Ends when they differ by at most `gap`, or after `seconds` of this process.
    """
    until_s, sets, rate_MC = time.process_time() + seconds, Sets(fleet.count_C), priced(fleet)[1]
    rates_M = [
        ChainRates(problem, fleet.names, sets, sets.devices_AC @ rate_C)
        for problem, rate_C in zip(fleet.problems, rate_MC, strict=True)
    ]
    while True:
        low, used = best_division(sets, [each.low_A for each in rates_M], fleet.weight_M, most_chains)
        bound, needed = best_division(sets, [each.high_A for each in rates_M], fleet.weight_M, most_chains)
        unknown = {(model, place) for model, place in needed if place not in rates_M[model].planned}
        if not unknown or bound <= low * (1 + gap) or time.process_time() > until_s:
            break
        for model, place in sorted(unknown):
            rates_M[model].plan(place)
    chains_M: list[list[Chain]] = [[] for _ in rates_M]
    for model, place in used:
        chains_M[model].append(rates_M[model].chain_A[place])
    return bound, chains_M


def share_of(fleet: Fleet, chains_M: Sequence[Sequence[Chain]]) -> float:
    """Returns the share that chains reach by the cost model; raises ValueError if they break a limit."""
    rates_M, left = np.zeros(len(chains_M)), dict(zip(fleet.names, fleet.count_C, strict=True))
    for model, (problem, chains) in enumerate(zip(fleet.problems, chains_M, strict=True)):
        for chain in chains:
            figures = evaluate(problem, chain)
            rates_M[model] += figures.rate_per_s
            if broken := violations(problem, chain, figures):
                raise ValueError(f"model {model}: {broken[0]}")
            for stage in chain:
                left[stage.device] -= stage.replicas
            if min(left.values()) < 0:
                raise ValueError(f"the division uses more accelerators than exist: {left} remain")
    return float((rates_M / fleet.weight_M).min())
