"""The master problem: how much each chain serves, on how many whole devices.

A *column* is one chain for one model: per stage the device seconds that an input takes there, and the time until an
answer. The master problem gives every column a rate and its stages whole replicas. `scipy.optimize.milp` (HiGHS) solves
it; the objective is linear in rates, replicas, and in whether a column is used:

- a stage's replicas do its work: rate x work <= replicas;
- the replicas on a type, and what all of them cost, stay within what there is;
- a batch must fill in time: rate x (limit - latency) >= fill + sum of (wait per replica x replicas), or the rate is 0;
- every model gets its rate, or as large a share of its weight as the others.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from optimizer.step import FloatArray

TOLERANCE = 1e-9
# Limits that the solver may miss by its own tolerance are this much tighter in the program than in the problem.
TIGHTER = 1e-6
GAP = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """What one stage of a column takes of one accelerator type."""

    device: int
    """Place of the accelerator type."""
    seconds: float
    """Of one replica, per input of the chain."""
    wait: float = 0.0
    """Inputs per replica that batches wait for which each replica fills on its own; over the rate, seconds."""
    per_device: int = 1
    """Replicas that one device holds."""
    pool: object = None
    """Stages of the same pool round up to whole devices together; None: each on its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One chain for one model."""

    stages: tuple[StageWork, ...]
    model: int = 0
    latency_s: float = 0.0
    """Worst case, without waits for batches."""
    fill: float = 0.0
    """Inputs that batches wait for; over the rate, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one model asks for."""

    limit_s: float = math.inf
    """Of a chain's worst-case latency."""
    rate_per_s: float | None = None
    """None: as much as its weight and the other models allow."""
    weight: float = 1.0
    most_chains: int | None = 3
    """None: any number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The devices, by the place of their type (C)."""

    count_C: FloatArray
    usd_C: FloatArray
    budget: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """What the program found: rates per column and replicas per stage, of columns that are used."""

    rates: Mapping[int, float]
    replicas: Mapping[int, tuple[int, ...]]
    bound: float
    """What no mixture of these columns is better than: a rate over weight, or USD per hour."""


@dataclass(slots=True, kw_only=True)
class _Program:
    """The constraint matrix under construction, and where each variable is."""

    columns: Sequence[Column]
    demands: Sequence[Demand]
    cluster: Cluster
    unit_Q: FloatArray
    """Rates are counted in these, so that every variable is about as large as a number of replicas."""
    most_Q: FloatArray
    """Of every column the highest rate that all devices allow."""
    cost: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    terms: list[tuple[int, int, float]] = field(default_factory=list)
    limits: list[tuple[float, float]] = field(default_factory=list)
    replicas_Q: list[list[int]] = field(default_factory=list)
    used_Q: list[int | None] = field(default_factory=list)

    def variable(self, *, cost: float = 0.0, upper: float = math.inf, whole: bool = False) -> int:
        self.cost.append(cost)
        self.upper.append(upper)
        self.whole.append(whole)
        return len(self.cost) - 1

    def limit(self, terms: Iterable[tuple[int, float]], lower: float = -math.inf, upper: float = math.inf) -> None:
        self.terms += [(len(self.limits), place, value) for place, value in terms if value]
        self.limits.append((lower, upper))

    def build(self) -> None:
        """Rates come first, a variable per column; then the rest."""
        for most, unit in zip(self.most_Q, self.unit_Q, strict=True):
            self.variable(upper=most / unit)
        self._add_devices()
        self._add_uses()
        self._add_demands()

    def _add_devices(self) -> None:
        """Replicas that do the work, on devices of which there are enough, within the budget."""
        of_type: dict[int, list[int]] = {}
        pools: dict[tuple[int, object], list[tuple[int, float]]] = {}
        is_cost, usd_C = self.demands[0].rate_per_s is not None, self.cluster.usd_C
        for q, column in enumerate(self.columns):
            places = []
            for stage in column.stages:
                count = float(self.cluster.count_C[stage.device]) * stage.per_device
                y = self.variable(upper=count, whole=True)
                work = stage.seconds * self.unit_Q[q] * (1 + TIGHTER)
                self.limit([(q, work), (y, -1.0)], upper=0.0)
                places.append(y)
                if stage.pool is None and stage.per_device == 1:
                    of_type.setdefault(stage.device, []).append(y)
                else:
                    key = (stage.device, (q, y) if stage.pool is None else stage.pool)
                    pools.setdefault(key, []).append((y, 1 / stage.per_device))
            self.replicas_Q.append(places)
        for (device, _), members in pools.items():
            devices = self.variable(upper=float(self.cluster.count_C[device]), whole=True)
            self.limit([*members, (devices, -1.0)], upper=0.0)
            of_type.setdefault(device, []).append(devices)
        for device, places in of_type.items():
            self.limit([(y, 1.0) for y in places], upper=float(self.cluster.count_C[device]))
            for y in places:
                self.cost[y] += float(usd_C[device]) if is_cost else 0.0
        if math.isfinite(self.cluster.budget):
            spent = [(y, float(usd_C[device])) for device, places in of_type.items() for y in places]
            self.limit(spent, upper=self.cluster.budget * (1 + TOLERANCE))

    def _add_uses(self) -> None:
        """Batches that fill in time, and not more chains than allowed."""
        of_model: dict[int, list[int]] = {}
        for q, column in enumerate(self.columns):
            demand = self.demands[column.model]
            waits = [stage.wait for stage in column.stages]
            fills = (column.fill > 0 or any(waits)) and math.isfinite(demand.limit_s)
            if not fills and demand.most_chains is None:
                self.used_Q.append(None)
                continue
            z = self.variable(upper=1.0, whole=True)
            self.used_Q.append(z)
            of_model.setdefault(column.model, []).append(z)
            self.limit([(q, 1.0), (z, -self.most_Q[q] / self.unit_Q[q])], upper=0.0)
            if fills:
                room_s = (demand.limit_s - column.latency_s) * (1 - TIGHTER) * self.unit_Q[q]
                per = max(column.fill, *waits)
                waiting = [(y, -wait / per) for y, wait in zip(self.replicas_Q[q], waits, strict=True)]
                self.limit([(q, room_s / per), (z, -column.fill / per), *waiting], lower=0.0)
        for model, uses in of_model.items():
            most = self.demands[model].most_chains
            if most is not None and len(uses) > most:
                self.limit([(z, 1.0) for z in uses], upper=float(most))

    def _add_demands(self) -> None:
        """The rates that models ask for, or the smallest share of the others, which is maximised."""
        of_model: dict[int, list[int]] = {}
        for q, column in enumerate(self.columns):
            of_model.setdefault(column.model, []).append(q)
        share: int | None = None
        share_unit = self.share_unit
        for model, demand in enumerate(self.demands):
            rated = of_model.get(model, [])
            if demand.rate_per_s is not None:
                terms = [(q, self.unit_Q[q] / demand.rate_per_s) for q in rated]
                self.limit(terms, lower=1.0, upper=1.0)  # no more arrives, so batches fill no sooner
                continue
            share = self.variable(cost=-1.0) if share is None else share
            self.limit([*((q, self.unit_Q[q] / share_unit / demand.weight) for q in rated), (share, -1.0)], lower=0.0)

    @property
    def share_unit(self) -> float:
        """What the shares of models that ask for no rate are counted in."""
        units = zip(self.unit_Q, self.columns, strict=True)
        return float(max(unit / self.demands[column.model].weight for unit, column in units))

    def solved(self, seconds: float) -> tuple[FloatArray, float] | None:
        """Values of the variables, and the proven bound of the objective as the program counts it."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        rows, places, values = zip(*self.terms, strict=True)
        matrix = coo_array((values, (rows, places)), shape=(len(self.limits), len(self.cost))).tocsr()
        lower, upper = zip(*self.limits, strict=True)
        with without_output():
            answer = milp(
                np.array(self.cost),
                integrality=np.array(self.whole, dtype=int),
                bounds=Bounds(np.zeros(len(self.cost)), np.array(self.upper)),
                constraints=LinearConstraint(matrix, np.array(lower), np.array(upper)),
                options={"time_limit": seconds, "mip_rel_gap": GAP},
            )
        return None if answer.x is None else (answer.x, float(answer.mip_dual_bound))


def solve_master(
    columns: Sequence[Column],
    demands: Sequence[Demand],
    cluster: Cluster,
    *,
    seconds: float = 5.0,
) -> Mixture | None:
    """The best mixture that HiGHS finds in `seconds`; None where it finds none.

    The cost is minimised; where models ask for no rate, the smallest of their rates over weight is maximised.
    """
    most_Q = np.array([most_rate(column, cluster) for column in columns])
    unit_Q = np.maximum(most_Q, 1e-300)
    for model in {column.model for column in columns}:
        own_Q = np.array([column.model == model for column in columns])
        unit_Q[own_Q] = most_Q[own_Q].max() / max(cluster.count_C.max(), 1.0)
    program = _Program(
        columns=columns,
        demands=demands,
        cluster=cluster,
        unit_Q=unit_Q,
        most_Q=most_Q,
    )
    program.build()
    solved = program.solved(seconds)
    if solved is None:
        return None
    values, bound = solved
    replicas = {
        q: tuple(round(values[y]) for y in places)
        for q, places in enumerate(program.replicas_Q)
        if values[q] * unit_Q[q] > TIGHTER * most_Q[q] and all(round(values[y]) > 0 for y in places)
    }
    rates = {q: float(values[q] * unit_Q[q]) for q in replicas}
    is_share = any(demand.rate_per_s is None for demand in demands)
    return Mixture(rates=rates, replicas=replicas, bound=-bound * program.share_unit if is_share else bound)


@contextmanager
def without_output() -> Iterator[None]:
    """HiGHS prints some of its messages whatever its options say, into what may be a command's JSON."""
    flush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    flush(None)
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
        flush(None)
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def most_rate(column: Column, cluster: Cluster) -> float:
    """The rate at which a column alone takes all devices of some type, whole or not."""
    work_C = np.zeros(len(cluster.count_C))
    for stage in column.stages:
        work_C[stage.device] += stage.seconds / stage.per_device
    busy = work_C > 0
    return float((cluster.count_C[busy] / work_C[busy]).min())


def highest_rate(column: Column, replicas: Sequence[int]) -> float:
    """What these replicas do."""
    return min(
        count / stage.seconds if stage.seconds else math.inf
        for stage, count in zip(column.stages, replicas, strict=True)
    )
