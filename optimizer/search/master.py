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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from optimizer.search.highs import Program
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


def solve_master(
    columns: Sequence[Column], demands: Sequence[Demand], cluster: Cluster, *, seconds: float = 5.0
) -> Mixture | None:
    """Returns the best mixture that HiGHS finds in `seconds`, or None if there is none.

    The cost is minimized if models require rates. Otherwise, the smallest rate relative to the weights is maximized.
    Raises TimeoutError if HiGHS finds none in time.
    """
    model_Q = np.array([column.model for column in columns])
    max_rate_Q = np.array([max_rate(column, cluster) for column in columns])
    # Rates have such units that all variables have the magnitude of a number of replicas.
    unit_Q = np.array([max_rate_Q[model_Q == model].max() for model in model_Q]) / max(cluster.count_C.max(), 1.0)
    program = Program()
    rate_Q = program.variables(len(columns), most=max_rate_Q / unit_Q)
    replicas_Q = _add_replicas(program, columns, unit_Q, cluster, is_cost=demands[0].rate_per_s is not None)
    _add_uses(program, columns, demands, replicas_Q, max_rate_Q, unit_Q)
    share_unit = max(unit / demands[model].weight for unit, model in zip(unit_Q, model_Q, strict=True))
    is_share = any(demand.rate_per_s is None for demand in demands)
    share = program.variables(int(is_share), cost=-1.0)
    for model, demand in enumerate(demands):
        own_Q = rate_Q[model_Q == model]
        if demand.rate_per_s is not None:  # an equality: a higher rate would fill batches too soon
            program.rows((unit_Q[own_Q] / demand.rate_per_s, own_Q), lower=1.0, upper=1.0)
        else:
            program.rows((unit_Q[own_Q] / share_unit / demand.weight, own_Q), ([-1.0], share), lower=0.0)
    solution = program.minimum(seconds)
    if solution is None:
        return None
    values, replicas = solution.values, {}
    for q, variables in enumerate(replicas_Q):
        counts = tuple(round(values[y]) for y in variables)
        if values[q] * unit_Q[q] > MARGIN * max_rate_Q[q] and all(count > 0 for count in counts):
            replicas[q] = counts
    rates = {q: float(values[q] * unit_Q[q]) for q in replicas}
    bound = -solution.bound * float(share_unit) if is_share else solution.bound
    return Mixture(rates=rates, replicas=replicas, bound=bound)


def _add_replicas(
    program: Program, columns: Sequence[Column], unit_Q: FloatArray, cluster: Cluster, *, is_cost: bool
) -> list[list[int]]:
    """Adds variables of replicas, and rows of capacity, supply and budget. Returns the variables of each column."""
    replicas_Q: list[list[int]] = [[] for _ in columns]
    of_type: dict[int, list[int]] = {}
    pools: dict[tuple[int, object], list[tuple[int, float]]] = {}
    usd_C = cluster.usd_C if is_cost else np.zeros_like(cluster.usd_C)
    for q, stage in ((q, stage) for q, column in enumerate(columns) for stage in column.stages):
        is_alone, count = stage.pool is None and stage.per_device == 1, float(cluster.count_C[stage.device])
        cost = float(usd_C[stage.device]) if is_alone else 0.0
        [y] = program.variables(1, cost=cost, most=count * stage.per_device, is_integer=True).tolist()
        program.rows(([stage.seconds * unit_Q[q] * (1 + MARGIN), -1.0], [q, y]), upper=0.0)
        replicas_Q[q].append(y)
        if is_alone:
            of_type.setdefault(stage.device, []).append(y)
        else:
            pool = (stage.device, (q, y) if stage.pool is None else stage.pool)
            pools.setdefault(pool, []).append((y, 1 / stage.per_device))
    for (device, _), members in pools.items():
        count = float(cluster.count_C[device])
        [devices] = program.variables(1, cost=float(usd_C[device]), most=count, is_integer=True).tolist()
        variables, shares = zip(*members, strict=True)
        program.rows(([*shares, -1.0], [*variables, devices]), upper=0.0)
        of_type.setdefault(device, []).append(devices)
    for device, used in of_type.items():
        program.rows((np.ones(len(used)), used), upper=float(cluster.count_C[device]))
    if math.isfinite(cluster.budget):
        spent = [(np.full(len(used), cluster.usd_C[device]), used) for device, used in of_type.items()]
        program.rows(*spent, upper=cluster.budget * (1 + TOLERANCE))
    return replicas_Q


def _add_uses(
    program: Program,
    columns: Sequence[Column],
    demands: Sequence[Demand],
    replicas_Q: Sequence[Sequence[int]],
    max_rate_Q: FloatArray,
    unit_Q: FloatArray,
) -> None:
    """Adds variables that say which columns are used, and rows of latency and of the number of chains."""
    of_model: dict[int, list[int]] = {}
    for q, column in enumerate(columns):
        demand, waits = demands[column.model], [stage.wait for stage in column.stages]
        fills = (column.fill > 0 or any(waits)) and math.isfinite(demand.limit_s)
        if not fills and demand.most_chains is None:
            continue
        [z] = program.variables(1, most=1.0, is_integer=True).tolist()
        of_model.setdefault(column.model, []).append(z)
        program.rows(([1.0, -max_rate_Q[q] / unit_Q[q]], [q, z]), upper=0.0)
        if fills:
            room_s = (demand.limit_s - column.latency_s) * (1 - MARGIN) * unit_Q[q]
            terms = np.array([room_s, -column.fill, *(-wait for wait in waits)])
            program.rows((terms / max(column.fill, *waits), [q, z, *replicas_Q[q]]), lower=0.0)
    for model, uses in of_model.items():
        most = demands[model].most_chains
        if most is not None and len(uses) > most:
            program.rows((np.ones(len(uses)), uses), upper=float(most))


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
