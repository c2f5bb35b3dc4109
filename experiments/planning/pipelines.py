"""Enumerates pipelines of PPipe's problems as columns of the master problem, and finds their best mixture.

All pipelines within a model's latency limit are enumerated in arrays, batch by batch, without those that others of the
same types dominate. The master problem then chooses among the best columns at the prices of its relaxation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from optimizer.search.highs import Program, Solution
from optimizer.search.master import Cluster, Column, Demand, StageWork, rate_of_replicas, solve_master
from optimizer.search.step import FloatArray, IntArray

NEAR = (10, 40)
"""Numbers of columns per model among which whole replicas are chosen, tried one after the other."""
CLOSE = 1e-4
"""Relative tolerance of shares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The costs of each run of blocks by host (H), batch (B), and its first and last boundary (K)."""

    hosts: Sequence[tuple[int, int]]
    """For each host, the index of the accelerator type, and the number of replicas that share one device."""
    seconds_HBKK: FloatArray
    """Seconds from a batch's start until the next segment may start; infinite for a batch that the host lacks."""
    work_HBKK: FloatArray
    """Seconds of one replica per input of the model."""
    limit_B: FloatArray
    """Largest sum of the seconds of all segments of a pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Index of the batch size, the boundaries of segments including both ends, and each segment's host and work."""

    batch: int
    bounds: Sequence[int]
    hosts: Sequence[tuple[int, int]]
    work: Sequence[float]

    def column(self, model: int, *, whole_devices: bool) -> Column:
        """Returns the column; with `whole_devices`, only equal segments (by index) of one model share devices."""
        stages = (
            StageWork(device=device, seconds=seconds, per_device=shares, pool=(model, number) if whole_devices else ())
            for number, ((device, shares), seconds) in enumerate(zip(self.hosts, self.work, strict=True))
        )
        return Column(stages=tuple(stages), model=model)


def best_pipelines(segments: Segments, count: int) -> Iterator[Pipeline]:
    """Returns the non-dominated pipelines of `count` segments that keep the limit."""
    num_blocks = segments.seconds_HBKK.shape[-1] - 1
    if count > num_blocks:
        return
    bounds_XP = np.array([(0, *cuts, num_blocks) for cuts in combinations(range(1, num_blocks), count - 1)], dtype=int)
    total = np.zeros((1,) * (count + 2))  # axes: batch, bounds, and the host of each segment
    for number in range(count):
        own_HBX = segments.seconds_HBKK[:, :, bounds_XP[:, number], bounds_XP[:, number + 1]]
        others = [2 + other for other in range(count) if other != number]
        total = total + np.expand_dims(own_HBX.transpose(1, 2, 0), others)
    limit = segments.limit_B.reshape(-1, *(1,) * (count + 1))
    batch_Q, cut_Q, *host_PQ = np.nonzero(total <= limit)
    host_QP, bounds_QP = np.stack(host_PQ, axis=1), bounds_XP[cut_Q]
    work_QP = segments.work_HBKK[host_QP, batch_Q[:, None], bounds_QP[:, :-1], bounds_QP[:, 1:]]
    device_H, shares_H = np.array(segments.hosts).T
    for types in np.unique(device_H[host_QP], axis=0):
        alike_Q = np.flatnonzero((device_H[host_QP] == types).all(axis=1))
        shares_QP = shares_H[host_QP[alike_Q]]
        for q in alike_Q[_irreplaceable(work_QP[alike_Q] / shares_QP, shares_QP)]:
            hosts = [segments.hosts[host] for host in host_QP[q]]
            yield Pipeline(batch=int(batch_Q[q]), bounds=bounds_QP[q].tolist(), hosts=hosts, work=work_QP[q].tolist())


def _irreplaceable(work_QP: FloatArray, shares_QP: IntArray) -> IntArray:
    """Returns the non-dominated rows: no other row has less work and shares that divide theirs in each column."""
    left_Q = np.lexsort((-shares_QP.sum(axis=1), work_QP.sum(axis=1)))
    kept: list[int] = []
    while len(left_Q):
        best, left_Q = left_Q[0], left_Q[1:]
        kept.append(int(best))
        is_less_QP = work_QP[left_Q] < work_QP[best]
        left_Q = left_Q[(is_less_QP | (shares_QP[best] % shares_QP[left_Q] > 0)).any(axis=1)]
    return np.array(kept, dtype=np.int64)


def best_mixture(
    columns: Sequence[Column], demands: Sequence[Demand], cluster: Cluster, seconds: float
) -> tuple[float, float, Mapping[int, Sequence[int]]]:
    """Returns the largest share of their weights that all models reach, a bound, and the replicas of each used column.

    The best columns of the relaxation are tried, few of them first, because the solver converges faster with few.
    """
    bound, used_Q, reduced_Q = _relaxed(columns, demands, cluster, seconds / 4)
    turns = [_in_turns(columns, reduced_Q, model) for model in range(len(demands))]
    best: tuple[float, Mapping[int, Sequence[int]]] = 0.0, {}
    for near in NEAR:
        kept = sorted({*np.flatnonzero(used_Q > CLOSE).tolist(), *(q for own in turns for q in own[:near])})
        with suppress(TimeoutError):
            mixture = solve_master([columns[q] for q in kept], demands, cluster, seconds=seconds / len(NEAR))
            replicas = {} if mixture is None else {kept[q]: counts for q, counts in mixture.replicas.items()}
            best = max(best, (_share_of(columns, demands, replicas), replicas), key=lambda each: each[0])
        if best[0] >= bound * (1 - CLOSE):
            break
    return best[0], bound, best[1]


def _share_of(columns: Sequence[Column], demands: Sequence[Demand], replicas: Mapping[int, Sequence[int]]) -> float:
    rates_M = np.zeros(len(demands))
    for q, counts in replicas.items():
        rates_M[columns[q].model] += rate_of_replicas(columns[q], counts)
    return float((rates_M / [demand.weight for demand in demands]).min())


def _relaxed(
    columns: Sequence[Column], demands: Sequence[Demand], cluster: Cluster, seconds: float
) -> tuple[float, FloatArray, FloatArray]:
    """Returns a bound on the share, the columns' rates in some unit, and each column's reduced cost per input.

    Replicas may be fractional. For the bound and the rates, devices that stages share are whole. For the costs they may
    be fractional too.
    """
    weight_M, model_Q = np.array([each.weight for each in demands]), np.array([column.model for column in columns])
    pools: dict[tuple[int, object], int] = {}
    stages = [(q, stage) for q, column in enumerate(columns) for stage in column.stages]
    pool_S = np.array([pools.setdefault((stage.device, stage.pool), len(pools)) for _, stage in stages])
    column_S = np.array([q for q, _ in stages])
    device_P, work_PQ = np.array([device for device, _ in pools]), np.zeros((len(pools), len(columns)))
    np.add.at(work_PQ, (pool_S, column_S), [each.seconds / each.per_device for _, each in stages])
    of_type_CP = (device_P == np.arange(len(cluster.count_C))[:, None]).astype(float)
    work_CQ = of_type_CP @ work_PQ
    # Units in which the rate of a column is at most 1, and so is the share.
    unit_Q = 1 / (work_CQ / np.maximum(cluster.count_C, 1)[:, None]).max(axis=0)
    unit = max(unit_Q[model_Q == model].max() / weight for model, weight in enumerate(weight_M))
    served_MQ = (model_Q == np.arange(len(demands))[:, None]) * unit_Q / (weight_M[:, None] * unit)

    def solved(seconds: float, *, is_integer: bool) -> tuple[Solution, IntArray, IntArray] | None:
        """Returns the solution, and the rows of the types and of the models."""
        program = Program()
        rate_Q, pool_P = program.variables(len(columns)), program.variables(len(pools), is_integer=is_integer)
        share = program.variables(1, cost=-1.0)
        program.rows((work_PQ * unit_Q, rate_Q), (-np.eye(len(pools)), pool_P), upper=0.0)
        type_R = program.rows((of_type_CP, pool_P), upper=cluster.count_C)
        model_R = program.rows((-served_MQ, rate_Q), (np.ones((len(demands), 1)), share), upper=0.0)
        solution = program.minimum(seconds)
        return None if solution is None else (solution, type_R, model_R)

    relaxed = solved(np.inf, is_integer=False)
    assert relaxed is not None, "using no device keeps all limits"
    found, type_R, model_R = relaxed
    bound, price_R = -found.objective, -found.duals
    with suppress(TimeoutError):
        whole = solved(seconds, is_integer=True)
        if whole is not None:
            bound, found = min(bound, -whole[0].bound), whole[0]
    reduced_Q = price_R[type_R] @ work_CQ - (price_R[model_R] / (weight_M * unit))[model_Q]
    return float(bound * unit), found.values[: len(columns)], reduced_Q


def _in_turns(columns: Sequence[Column], reduced_Q: FloatArray, model: int) -> list[int]:
    """Orders a model's columns: the best of each sequence of types, then the second best of each, and so on."""
    num_before: dict[tuple[int, ...], int] = {}
    turns: list[tuple[int, float, int]] = []
    for q in np.argsort(reduced_Q, kind="stable").tolist():
        if columns[q].model == model:
            types = tuple(stage.device for stage in columns[q].stages)
            num_before[types] = num_before.get(types, -1) + 1
            turns.append((num_before[types], float(reduced_Q[q]), q))
    return [q for *_, q in sorted(turns)]
