"""The master problem: the rate of each chain, and the integer numbers of replicas of its stages.

A *column* is one chain for one model: the device seconds per input of each stage, and the latency. The master problem
assigns each column a rate and its stages integer numbers of replicas. HiGHS solves it. Its objective is linear in the
rates and replicas. Its constraints are:

- Capacity: rate x work <= replicas, for each stage.
- Supply and budget: the replicas of each accelerator type, and their total cost, are limited.
- Latency: rate x (limit - latency) >= fill + sum of (wait per replica x replicas), or the column is not used.
- Demand: each model is served at its rate, or all models at the same rate relative to their weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from optimizer.search.highs import Solution, minimize
from optimizer.search.step import FloatArray

TOLERANCE = 1e-9
MARGIN = 1e-6
"""Relative margin by which limits are tightened in the program, because HiGHS may violate them by its tolerance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """The work of one stage of a column."""

    device: int
    """Index of the accelerator type."""
    seconds: float
    """Replica seconds per input of the chain."""
    wait: float = 0.0
    """Inputs per replica for which the stage's own batches wait. Divided by the rate, it is in seconds."""
    per_device: int = 1
    """Replicas per device."""
    pool: object = None
    """Stages of the same pool are rounded up to whole devices together. None: each stage is rounded up alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One chain for one model."""

    stages: tuple[StageWork, ...]
    model: int = 0
    latency_s: float = 0.0
    """Worst-case latency, without waits for batches."""
    fill: float = 0.0
    """Inputs for which batches wait at the ingress. Divided by the rate, it is in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The requirements of one model."""

    limit_s: float = math.inf
    """Limit of each chain's worst-case latency."""
    rate_per_s: float | None = None
    """None: the rate is maximized in proportion to `weight`."""
    weight: float = 1.0
    most_chains: int | None = 3
    """Largest number of parallel chains. None: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The available devices, by index of their type (C)."""

    count_C: FloatArray
    usd_C: FloatArray
    budget: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """A solution of the master problem: the rates of the used columns, and the replicas of their stages."""

    rates: Mapping[int, float]
    replicas: Mapping[int, tuple[int, ...]]
    bound: float
    """Bound on the objective of all mixtures of these columns: a rate divided by the weight, or USD per hour."""


@dataclass(slots=True, kw_only=True)
class _Program:
    """Builder of the mixed-integer program: variables, and the rows of the constraint matrix."""

    columns: Sequence[Column]
    demands: Sequence[Demand]
    cluster: Cluster
    unit_Q: FloatArray
    """Units in which rates are expressed, so that all variables have the magnitude of a number of replicas."""
    max_rate_Q: FloatArray
    """Highest rate of each column if it used all devices."""
    cost: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    is_integer: list[bool] = field(default_factory=list)
    terms: list[tuple[int, int, float]] = field(default_factory=list)
    """Row, variable and coefficient of each nonzero of the constraint matrix."""
    limits: list[tuple[float, float]] = field(default_factory=list)
    replicas_Q: list[list[int]] = field(default_factory=list)
    """Per column, the variables of the stages' replicas."""

    def add_variable(self, *, cost: float = 0.0, upper: float = math.inf, is_integer: bool = False) -> int:
        self.cost.append(cost)
        self.upper.append(upper)
        self.is_integer.append(is_integer)
        return len(self.cost) - 1

    def add_row(self, terms: Iterable[tuple[int, float]], lower: float = -math.inf, upper: float = math.inf) -> None:
        self.terms += [(len(self.limits), variable, value) for variable, value in terms if value]
        self.limits.append((lower, upper))

    def build(self) -> None:
        """Adds all variables and rows. The first variables are the columns' rates, so variable q is column q's rate."""
        for max_rate, unit in zip(self.max_rate_Q, self.unit_Q, strict=True):
            self.add_variable(upper=max_rate / unit)
        self._add_devices()
        self._add_uses()
        self._add_demands()

    def _add_devices(self) -> None:
        """Adds the replicas, and the rows of capacity, supply and budget."""
        of_type: dict[int, list[int]] = {}
        pools: dict[tuple[int, object], list[tuple[int, float]]] = {}
        is_cost, usd_C = self.demands[0].rate_per_s is not None, self.cluster.usd_C
        for q, column in enumerate(self.columns):
            variables = []
            for stage in column.stages:
                count = float(self.cluster.count_C[stage.device]) * stage.per_device
                y = self.add_variable(upper=count, is_integer=True)
                work = stage.seconds * self.unit_Q[q] * (1 + MARGIN)
                self.add_row([(q, work), (y, -1.0)], upper=0.0)
                variables.append(y)
                if stage.pool is None and stage.per_device == 1:
                    of_type.setdefault(stage.device, []).append(y)
                else:
                    key = (stage.device, (q, y) if stage.pool is None else stage.pool)
                    pools.setdefault(key, []).append((y, 1 / stage.per_device))
            self.replicas_Q.append(variables)
        for (device, _), members in pools.items():
            devices = self.add_variable(upper=float(self.cluster.count_C[device]), is_integer=True)
            self.add_row([*members, (devices, -1.0)], upper=0.0)
            of_type.setdefault(device, []).append(devices)
        for device, variables in of_type.items():
            self.add_row([(y, 1.0) for y in variables], upper=float(self.cluster.count_C[device]))
            for y in variables:
                self.cost[y] += float(usd_C[device]) if is_cost else 0.0
        if math.isfinite(self.cluster.budget):
            spent = [(y, float(usd_C[device])) for device, variables in of_type.items() for y in variables]
            self.add_row(spent, upper=self.cluster.budget * (1 + TOLERANCE))

    def _add_uses(self) -> None:
        """Adds a binary variable per column that says whether it is used, and the rows of latency and chain count."""
        of_model: dict[int, list[int]] = {}
        for q, column in enumerate(self.columns):
            demand = self.demands[column.model]
            waits = [stage.wait for stage in column.stages]
            fills = (column.fill > 0 or any(waits)) and math.isfinite(demand.limit_s)
            if not fills and demand.most_chains is None:
                continue
            z = self.add_variable(upper=1.0, is_integer=True)
            of_model.setdefault(column.model, []).append(z)
            self.add_row([(q, 1.0), (z, -self.max_rate_Q[q] / self.unit_Q[q])], upper=0.0)
            if fills:
                room_s = (demand.limit_s - column.latency_s) * (1 - MARGIN) * self.unit_Q[q]
                scale = max(column.fill, *waits)
                waiting = [(y, -wait / scale) for y, wait in zip(self.replicas_Q[q], waits, strict=True)]
                self.add_row([(q, room_s / scale), (z, -column.fill / scale), *waiting], lower=0.0)
        for model, uses in of_model.items():
            most = self.demands[model].most_chains
            if most is not None and len(uses) > most:
                self.add_row([(z, 1.0) for z in uses], upper=float(most))

    def _add_demands(self) -> None:
        """Adds the rows of required rates, and maximizes the smallest relative rate of the other models."""
        of_model: dict[int, list[int]] = {}
        for q, column in enumerate(self.columns):
            of_model.setdefault(column.model, []).append(q)
        share: int | None = None
        share_unit = self.share_unit
        for model, demand in enumerate(self.demands):
            columns = of_model.get(model, [])
            if demand.rate_per_s is not None:
                terms = [(q, self.unit_Q[q] / demand.rate_per_s) for q in columns]
                self.add_row(terms, lower=1.0, upper=1.0)  # an equality: a higher rate would fill batches too soon
                continue
            share = self.add_variable(cost=-1.0) if share is None else share
            terms = [(q, self.unit_Q[q] / share_unit / demand.weight) for q in columns]
            self.add_row([*terms, (share, -1.0)], lower=0.0)

    @property
    def share_unit(self) -> float:
        """The unit of the relative rate of models without a required rate."""
        units = zip(self.unit_Q, self.columns, strict=True)
        return float(max(unit / self.demands[column.model].weight for unit, column in units))

    def solve(self, seconds: float) -> Solution | None:
        """Returns the solution of the scaled program, or None if there is none; raises TimeoutError as `minimize`."""
        rows, variables, values = zip(*self.terms, strict=True)
        lower, upper = zip(*self.limits, strict=True)
        return minimize(
            np.array(self.cost),
            (np.array(rows), np.array(variables), np.array(values)),
            np.array(lower),
            np.array(upper),
            most=np.array(self.upper),
            integers=np.flatnonzero(self.is_integer),
            seconds=seconds,
        )


def solve_master(
    columns: Sequence[Column], demands: Sequence[Demand], cluster: Cluster, *, seconds: float = 5.0
) -> Mixture | None:
    """Returns the best mixture that HiGHS finds in `seconds`, or None if there is none.

    The cost is minimized if models require rates. Otherwise, the smallest rate relative to the weights is maximized.
    Raises TimeoutError if HiGHS finds none in time.
    """
    max_rate_Q = np.array([max_rate(column, cluster) for column in columns])
    unit_Q = np.maximum(max_rate_Q, 1e-300)
    for model in {column.model for column in columns}:
        own_Q = np.array([column.model == model for column in columns])
        unit_Q[own_Q] = max_rate_Q[own_Q].max() / max(cluster.count_C.max(), 1.0)
    program = _Program(columns=columns, demands=demands, cluster=cluster, unit_Q=unit_Q, max_rate_Q=max_rate_Q)
    program.build()
    solution = program.solve(seconds)
    if solution is None:
        return None
    values, bound = solution.values, solution.bound
    replicas: dict[int, tuple[int, ...]] = {}
    for q, variables in enumerate(program.replicas_Q):
        counts = tuple(round(values[y]) for y in variables)
        if values[q] * unit_Q[q] > MARGIN * max_rate_Q[q] and all(count > 0 for count in counts):
            replicas[q] = counts
    rates = {q: float(values[q] * unit_Q[q]) for q in replicas}
    is_share = any(demand.rate_per_s is None for demand in demands)
    return Mixture(rates=rates, replicas=replicas, bound=-bound * program.share_unit if is_share else bound)


def max_rate(column: Column, cluster: Cluster) -> float:
    """Returns the rate at which a column alone would use all devices of some type, with fractional replicas."""
    work_C = np.zeros(len(cluster.count_C))
    for stage in column.stages:
        work_C[stage.device] += stage.seconds / stage.per_device
    busy = work_C > 0
    return float((cluster.count_C[busy] / work_C[busy]).min())


def rate_of_replicas(column: Column, replicas: Sequence[int]) -> float:
    """Returns the rate that a column can serve with these replicas."""
    return min(
        count / stage.seconds if stage.seconds else math.inf
        for stage, count in zip(column.stages, replicas, strict=True)
    )
