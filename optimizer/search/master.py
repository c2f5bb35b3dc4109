"""The master problem: the rate of each chain, and the integer numbers of replicas of its stages.

A *column* is one chain: the device seconds per input of each stage, and the latency. The master problem assigns each
column a rate and its stages integer numbers of replicas. HiGHS solves it. Its objective is linear in the rates and
replicas. Its constraints are:

- Capacity: rate x work <= replicas, for each stage.
- Supply and budget: the replicas of each accelerator type, and their total cost, are limited.
- Latency: rate x (limit - latency) >= fill + sum of (wait per replica x replicas), or the column is not used.
- Demand: the rates sum to the required rate, or their sum is maximized.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from optimizer.search.highs import Program
from optimizer.search.step import FloatArray, IntArray

TOLERANCE = 1e-9
MARGIN = 1e-6
"""Relative margin by which limits are tightened in the program, because HiGHS may violate them by its tolerance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One chain, whose figures per stage are in the order of its stages."""

    devices: tuple[int, ...]
    """By stage: the index of the accelerator type."""
    seconds: tuple[float, ...]
    """By stage: replica seconds per input of the chain."""
    waits: tuple[float, ...]
    """By stage: inputs per replica for which the stage's own batches wait. Divided by the rate, it is in seconds."""
    latency_s: float
    """Worst-case latency, without waits for batches."""
    fill: float = 0.0
    """Inputs for which batches wait at the ingress. Divided by the rate, it is in seconds."""

    def rate_of(self, replicas: Sequence[int]) -> float:
        """Returns the rate that the column can serve with these replicas."""
        stages = zip(self.seconds, replicas, strict=True)
        return min(count / seconds if seconds else math.inf for seconds, count in stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The requirements of a mixture, and the available devices, by index of their type (C)."""

    count_C: FloatArray
    usd_C: FloatArray
    limit_s: float
    """Limit of each chain's worst-case latency."""
    budget: float = math.inf
    rate_per_s: float | None = None
    """None: the rate is maximized."""
    most_chains: int = 3
    """Largest number of parallel chains."""

    def max_rate(self, column: Column) -> float:
        """Returns the rate at which a column alone would use all devices of some type, with fractional replicas."""
        work_C = np.zeros(len(self.count_C))
        np.add.at(work_C, list(column.devices), column.seconds)
        busy = work_C > 0
        return float((self.count_C[busy] / work_C[busy]).min())


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """A solution of the master problem: the rates of the used columns, and the replicas of their stages."""

    rates: Mapping[int, float]
    replicas: Mapping[int, tuple[int, ...]]
    bound: float
    """Bound on the objective of all mixtures of these columns: a rate, or USD per hour."""


def solve_master(columns: Sequence[Column], demand: Demand, *, seconds: float = 5.0) -> Mixture | None:
    """Returns the best mixture that HiGHS finds in `seconds`, or None if there is none.

    The cost is minimized if a rate is required; otherwise, the rate is maximized. Raises TimeoutError if HiGHS finds
    none in time.
    """
    max_rate_Q, required = np.array([demand.max_rate(column) for column in columns]), demand.rate_per_s
    unit = float(max_rate_Q.max() / max(demand.count_C.max(), 1.0))  # rates then have the magnitude of replicas
    program = Program()
    rate_Q = program.variables(len(columns), most=max_rate_Q / unit)
    replicas_Q = _add_replicas(program, columns, demand, unit)
    _add_uses(program, columns, demand, replicas_Q, max_rate_Q / unit, unit)
    if required is None:
        rate = program.variables(1, cost=-1.0)
        program.rows((np.ones(len(columns)), rate_Q), ([-1.0], rate), lower=0.0)
    else:  # an equality: a higher rate would fill batches too soon
        program.rows((np.full(len(columns), unit / required), rate_Q), lower=1.0, upper=1.0)
    solution = program.minimum(seconds)
    if solution is None:
        return None
    values, replicas = solution.values, {}
    for q, variables in enumerate(replicas_Q):
        counts = tuple(round(values[y]) for y in variables)
        if values[q] * unit > MARGIN * max_rate_Q[q] and all(count > 0 for count in counts):
            replicas[q] = counts
    rates = {q: float(values[q] * unit) for q in replicas}
    return Mixture(rates=rates, replicas=replicas, bound=-solution.bound * unit if required is None else solution.bound)


def _add_replicas(program: Program, columns: Sequence[Column], demand: Demand, unit: float) -> list[IntArray]:
    """Adds variables of replicas, and rows of capacity, supply and budget. Returns the variables of each column."""
    device_S = np.concatenate([column.devices for column in columns])
    seconds_S = np.concatenate([column.seconds for column in columns])
    column_S = np.repeat(np.arange(len(columns)), [len(column.devices) for column in columns])
    usd_S = demand.usd_C[device_S]
    cost_S = usd_S if demand.rate_per_s is not None else np.zeros(len(usd_S))
    replicas_S = program.variables(len(device_S), cost=cost_S, most=demand.count_C[device_S], is_integer=True)
    for q, seconds, y in zip(column_S, seconds_S, replicas_S, strict=True):
        program.rows(([seconds * unit * (1 + MARGIN), -1.0], [q, y]), upper=0.0)
    for device in dict.fromkeys(device_S.tolist()):
        used = replicas_S[device_S == device]
        program.rows((np.ones(len(used)), used), upper=float(demand.count_C[device]))
    if math.isfinite(demand.budget):
        program.rows((usd_S, replicas_S), upper=demand.budget * (1 + TOLERANCE))
    return [replicas_S[column_S == q] for q in range(len(columns))]


def _add_uses(
    program: Program, columns: Sequence[Column], demand: Demand, replicas_Q: Sequence[IntArray], most_Q: FloatArray,
    unit: float,
) -> None:  # fmt: skip
    """Adds variables that say which columns are used, and rows of latency and of the number of chains."""
    use_Q = program.variables(len(columns), most=1.0, is_integer=True)
    for q, column in enumerate(columns):
        program.rows(([1.0, -most_Q[q]], [q, use_Q[q]]), upper=0.0)
        if longest := max(column.fill, *column.waits):
            room_s = (demand.limit_s - column.latency_s) * (1 - MARGIN) * unit
            terms = np.array([room_s, -column.fill, *(-wait for wait in column.waits)])
            program.rows((terms / longest, [q, use_Q[q], *replicas_Q[q]]), lower=0.0)
    if len(columns) > demand.most_chains:
        program.rows((np.ones(len(columns)), use_Q), upper=float(demand.most_chains))
