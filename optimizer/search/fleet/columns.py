"""Divides many devices among models by column generation: each model's chains are columns (Q) of a master problem.

The master problem divides the devices among chains with fractional replicas, and its duals price the devices. At these
prices, the cheapest walk of each model (`optimizer.search.walks`) is a further chain. Integer programs then choose a
few chains of each model with whole replicas:

- With many replicas per stage, chains serve any rates, and half a device per stage is left for rounding.
- With few, each chain is an *exact* column: it has whole replicas, and a rate that uses them well. The chains that the
  planner's search finds are added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from optimizer.cost.evaluate import evaluate, worst_value
from optimizer.plans.plan import Stage, with_replicas
from optimizer.problems.fleet import Fleet
from optimizer.problems.problem import MaximizeRate, PlanProblem, device_names
from optimizer.search.chains import find_chains
from optimizer.search.fleet.prices import Division, FleetPrices
from optimizer.search.highs import Program
from optimizer.search.master import CandidateChain, options_of, replicas_at
from optimizer.search.relaxation import BROKEN_LIMIT_PRICE
from optimizer.search.space import Space
from optimizer.search.walks import Prices, WalkRelaxation
from profiles.table import FloatArray

ROUNDS, GAIN = 8, 1e-4
"""Most times that the master problem is solved and priced, and the least relative gain for which it is again."""
STEPS, CLOSE = 12, 1.02
"""Steps of the search for the least price of latency at which a chain meets its SLO, and the factor where it ends."""
NEAR = 15
"""Chains of a model among which the integer program chooses, beside those that the master problem uses."""
ROUNDED = 0.5
"""Part of a device by which the replicas of a stage are rounded up on average."""
EXCLUDED = 1e6
"""Price of devices on which no chain is sought, relative to the others."""
SEARCHED = 200
"""Chains of a model from the planner's search."""
PARTS, PER_PART = 12, 15
"""Parts of a model's rate, and its exact columns in each part."""
MAX_SEARCHED = 2000
"""Accelerators with which the planner's search is worth its time. With more, rounding costs little."""
UNUSED = 1e-6
"""Largest relative rate of a chain that counts as unused: the solver has a tolerance."""
PROGRAM_S = 3.0
"""Time limit of the integer program."""


class Column(NamedTuple):
    """A chain of a model."""

    model: int
    chain: CandidateChain
    least_per_s: float
    """The rate from which its batches fill in time; infinity if it is too slow at any rate."""
    most_per_s: float = math.inf
    """The highest rate."""
    replicas: tuple[int, ...] = ()
    """The replicas of its stages if it serves exactly the rate `most_per_s`. Empty: as many as its rate needs."""

    @classmethod
    def of(cls, model: int, problem: PlanProblem, chain: CandidateChain) -> Column:
        """Returns a chain's column. Its stages are assumed to have about as many replicas as they need."""
        held_s = sum(inputs * seconds for inputs, seconds in zip(chain.waits, chain.seconds, strict=True))
        room_s = problem.slo.limit_s - chain.latency_s - held_s
        return cls(model, chain, (chain.fill + ROUNDED * sum(chain.waits)) / room_s if room_s > 0 else math.inf)


def chain_of(problem: PlanProblem, stages: tuple[Stage, ...]) -> CandidateChain:
    """Returns a chain of stages with one replica each."""
    figures, seen = evaluate(problem, stages), set[int]()
    fill, waits = 0.0, [0.0] * len(stages)
    for split in figures.splits:
        inputs = split.wait_s * figures.served_per_s
        if split.stage_index in seen:
            waits[split.stage_index] += inputs
        else:  # the ingress fills the batches of a stage's first split
            fill += inputs
        seen.add(split.stage_index)
    return CandidateChain(
        stages=stages,
        devices=tuple(device_names(problem).index(stage.device) for stage in stages),
        seconds=tuple(1 / min(each.rate_per_s, each.hop_rate_per_s) for each in figures.stages),
        waits=tuple(waits),
        latency_s=figures.latency_s - sum(split.wait_s for split in figures.splits),
        fill=fill,
    )


class Master:
    """The master problem of a fleet. Rates are relative to a chain's highest or, for the cost, to its model's rate."""

    def __init__(self, fleet: Fleet, columns: Sequence[Column]) -> None:
        self.fleet, self.columns = fleet, columns
        self.rounding_CQ, self.work_CQ = np.zeros((2, len(fleet.names), len(columns)))
        for q, column in enumerate(columns):
            np.add.at(self.work_CQ[:, q], list(column.chain.devices), column.chain.seconds)
            pairs = zip(column.replicas, column.chain.seconds, strict=False)
            rounding = [number - column.most_per_s * seconds for number, seconds in pairs] or ROUNDED
            np.add.at(self.rounding_CQ[:, q], list(column.chain.devices), rounding)
        self.own_MQ = np.arange(len(fleet.rate_M))[:, None] == np.array([column.model for column in columns])
        alone_Q = 1 / (self.work_CQ / fleet.count_C[:, None]).max(axis=0)
        most_Q = np.array([column.most_per_s for column in columns])
        self.unit_Q = np.minimum(most_Q, fleet.rate_M @ self.own_MQ if fleet.is_cost else alone_Q)

    def solved(self, *, is_whole: bool = False) -> tuple[FloatArray, FloatArray, float]:
        """Returns the rates of the chains in the best division, the prices of the devices, and the objective.

        With `is_whole`, each model uses at most `most_chains` chains, their batches fill in time, and devices are left
        for rounding. There are no prices then. Raises TimeoutError if no division was found in time.

        The objective is minimized: minus the share, or the cost. What the share then lacks to 1 has a high price.
        """
        usd_C, sign, price = self.fleet.usd_C, 1.0, -1.0
        if self.fleet.is_cost:
            sign, price = -1.0, BROKEN_LIMIT_PRICE * max(float(usd_C @ self.fleet.count_C), 1.0)
        served_MQ = self.own_MQ * self.unit_Q / self.fleet.rate_M[:, None]
        unit, each_QQ, program = served_MQ.max(), np.eye(len(self.columns)), Program()
        rate_Q = program.variables(len(self.columns), cost=usd_C @ self.work_CQ * self.unit_Q)
        share = program.variables(1, cost=price)
        program.rows((-served_MQ / unit, rate_Q), (np.full((len(served_MQ), 1), sign), share), upper=min(sign, 0.0))
        used = [(self.work_CQ * self.unit_Q, rate_Q)]
        if is_whole:
            used_Q = program.variables(len(self.columns), cost=usd_C @ self.rounding_CQ, is_integer=True)
            least_Q = np.array([column.least_per_s for column in self.columns]) / self.unit_Q
            program.rows((each_QQ, used_Q), upper=1.0)
            program.rows((self.own_MQ.astype(float), used_Q), upper=float(self.fleet.most_chains))
            program.rows((each_QQ, rate_Q), (-each_QQ, used_Q), upper=0.0)
            program.rows((np.diag(least_Q), used_Q), (-each_QQ, rate_Q), upper=0.0)
            used.append((self.rounding_CQ, used_Q))
        count_C = program.rows(*used, upper=self.fleet.count_C)
        solution = program.minimum(PROGRAM_S)
        assert solution is not None, "using no device keeps all limits"
        price_C = np.maximum(-solution.duals[count_C], 0.0) if len(solution.duals) else np.zeros(len(count_C))
        relative_Q = solution.values[: len(self.columns)]
        rate_Q = np.where(relative_Q > UNUSED, relative_Q, 0.0) * self.unit_Q
        return rate_Q, usd_C + price_C, solution.objective * unit

    def near(self, rate_Q: FloatArray, price_C: FloatArray) -> Master:
        """Returns the master problem of the chains in use, and of the cheapest chains of each model."""
        price_Q = price_C @ self.work_CQ
        kept = set(np.flatnonzero(rate_Q > 0).tolist())
        for own_Q in self.own_MQ:
            kept.update(np.argsort(np.where(own_Q, price_Q, np.inf))[: min(NEAR, own_Q.sum())].tolist())
        return Master(self.fleet, [self.columns[q] for q in sorted(kept)])


@dataclass(slots=True, kw_only=True)
class ColumnGeneration:
    """The columns of a fleet that pricing has found."""

    fleet: Fleet
    prices: FleetPrices
    space: Space
    bounds: list[tuple[float, FloatArray]] = field(default_factory=list)
    """Bounds on the share or the cost, each with the prices of a device second that prove it."""
    _columns: dict[tuple[int, tuple[Stage, ...]], Column] = field(default_factory=dict)

    def master(self) -> tuple[Master, FloatArray, FloatArray, float] | None:
        """Returns the master problem with its solution, or None if a model has no chain that meets its SLO."""
        prices = [self.prices.price_C]
        # Chains of one device type leave less to round.
        prices += [np.where(each_C, 1.0, EXCLUDED) for each_C in np.eye(len(self.fleet.names), dtype=bool)]
        least = math.inf
        for _ in range(ROUNDS):
            for price_C in prices:
                self._price(price_C)
            columns = [each for each in self._columns.values() if math.isfinite(each.least_per_s)]
            if len({each.model for each in columns}) < len(self.fleet.problems):
                return None
            master = Master(self.fleet, columns)
            rate_Q, price_C, objective = master.solved()
            if objective >= least - GAIN * abs(objective) or self.space.is_over():
                break
            least, prices = objective, [price_C]
        return master, rate_Q, price_C, objective

    def _price(self, price_C: FloatArray) -> None:
        """Adds chains of each model at these prices of a device second.

        The cheapest chain that meets the SLO is approached by the price of latency, which is doubled or bisected. With
        each price of latency, the cheapest walk proves a least price of an input. What all devices cost at these prices
        then bounds the share. What all inputs cost, less what the prices add to the devices' own, bounds the cost.
        """
        rate_M, least_M = self.fleet.rate_M, np.zeros(len(self.fleet.problems))
        for model, (walks, problem) in enumerate(zip(self.prices.walks_M, self.fleet.problems, strict=True)):
            low, high, latency = 0.0, math.inf, 0.0
            for _ in range(STEPS):
                least, _ = walks.cheapest(Prices(price_C, np.zeros(len(price_C)), latency), math.inf)
                least_M[model] = max(least_M[model], least - latency * problem.slo.limit_s)
                if self._add(model, problem, walks):
                    high = latency
                else:
                    low = latency
                if high <= low * CLOSE:
                    break
                if high < math.inf:
                    latency = math.sqrt(low * high) if low else high / 4
                else:
                    latency = 2 * low or least / problem.slo.limit_s
        needed = float(rate_M @ least_M)  # the price of all inputs at a share of 1
        added = float(np.maximum(price_C - self.fleet.usd_C, 0.0) @ self.fleet.count_C)
        self.bounds.append((needed - added if self.fleet.is_cost else added / max(needed, 1e-300), price_C))

    def _add(self, model: int, problem: PlanProblem, walks: WalkRelaxation) -> bool:
        """Adds the chain of the last walk; returns whether it can meet the SLO."""
        stages = walks.last_stages(self.fleet.names)
        if (model, stages) not in self._columns:
            self._columns[model, stages] = Column.of(model, problem, chain_of(problem, stages))
        return math.isfinite(self._columns[model, stages].least_per_s)


def divided_by_columns(fleet: Fleet, prices: FleetPrices, space: Space) -> Division:
    """Returns the best division that was found, with the bound of the relaxation."""
    generation = ColumnGeneration(fleet=fleet, prices=prices, space=space)
    solved = generation.master()
    bound, proving_C = (max if fleet.is_cost else min)(generation.bounds, key=lambda each: each[0])
    bound = worst_value(fleet.problems[0], [prices.bound, bound])
    divisions = [Division(bound=bound, stages=tuple(() for _ in fleet.problems))]
    if solved is not None:
        master, rate_Q, price_C, objective = solved
        divisions.append(replace(divisions[0], stages=_rounded(master.near(rate_Q, price_C))))
        if fleet.count_C.sum() <= MAX_SEARCHED and not space.is_over():
            chains_M = with_searched_chains(master, space)
            most_share = 1.0 if fleet.is_cost else -objective
            if columns := exact_columns(fleet, chains_M, proving_C, most_share):
                divisions.append(replace(divisions[0], stages=_rounded(Master(fleet, columns))))
    return max(divisions, key=lambda each: each.merit(fleet))


def with_searched_chains(master: Master, space: Space) -> list[list[CandidateChain]]:
    """Returns the chains of each model, and those that the planner would mix if it had the cluster for itself."""
    chains_M: list[list[CandidateChain]] = [[] for _ in master.fleet.problems]
    for column in master.columns:
        chains_M[column.model].append(column.chain)
    for chains, problem in zip(chains_M, master.fleet.problems, strict=True):
        if not space.is_over():
            alone = replace(problem, most_chains=master.fleet.most_chains, objective=MaximizeRate())
            chains += find_chains(alone, space, SEARCHED)
    return chains_M


def exact_columns(
    fleet: Fleet, chains_M: Sequence[Sequence[CandidateChain]], price_C: FloatArray, most_share: float
) -> list[Column]:
    """Returns chains with whole replicas: for each part of a model's rate, those of the least price per input.

    Only the cheapest is returned of those that use the same devices. `most_share`: no division has a higher one.
    """
    columns = list[Column]()
    for model, (chains, problem) in enumerate(zip(chains_M, fleet.problems, strict=True)):
        cheapest = dict[tuple[float, ...], tuple[float, Column]]()
        most_per_s = most_share * float(fleet.rate_M[model])
        for chain in chains:
            rate_R, _, use_RC = options_of(chain, problem)
            rate_R = np.minimum(rate_R, most_per_s)
            price_R, part_R = use_RC @ price_C / rate_R, np.ceil(rate_R / most_per_s * PARTS)
            for part in np.unique(part_R).tolist():
                best = int(np.argmin(np.where(part_R == part, price_R, np.inf)))
                key, price, rate = (part, *use_RC[best].tolist()), float(price_R[best]), float(rate_R[best])
                if key not in cheapest or price < cheapest[key][0]:
                    replicas = tuple(replicas_at(rate_R[best], chain).astype(int).tolist())
                    cheapest[key] = price, Column(model, chain, rate, rate, replicas)
        for part in range(1, PARTS + 1):
            options = [option for (own, *_), option in cheapest.items() if own == part]
            columns += [column for _, column in sorted(options, key=lambda each: each[0])[:PER_PART]]
    return columns


def _rounded(master: Master) -> tuple[tuple[Stage, ...], ...]:
    """Returns each model's stages with whole replicas. If none were found in time, a model has no stages.

    The rates of columns that are not exact are multiplied as far as the devices can serve them.
    """
    stages = [list[Stage]() for _ in master.fleet.problems]
    rate_Q = np.zeros(0)
    with suppress(TimeoutError):
        rate_Q, *_ = master.solved(is_whole=True)
    used = [(column, rate) for column, rate in zip(master.columns, rate_Q.tolist(), strict=False) if rate > 0]

    def replicas(factor: float) -> list[Sequence[int]]:
        return [
            column.replicas or [max(1, math.ceil(factor * rate * each)) for each in column.chain.seconds]
            for column, rate in used
        ]

    low, high = (1.0, 1.0) if master.fleet.is_cost else (0.0, 2.0)
    while high - low > GAIN:
        used_C, middle = np.zeros(len(master.fleet.names)), (low + high) / 2
        for (column, _), counts in zip(used, replicas(middle), strict=True):
            np.add.at(used_C, list(column.chain.devices), counts)
        low, high = (middle, high) if (used_C <= master.fleet.count_C).all() else (low, middle)
    for (column, _), counts in zip(used, replicas(low), strict=True):
        stages[column.model] += with_replicas(column.chain.stages, counts)
    return tuple(map(tuple, stages))
