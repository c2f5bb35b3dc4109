"""Enumerates pipelines of PPipe's problems as columns of a master problem, and finds their best mixture.

All pipelines within a model's latency limit are enumerated in arrays, batch by batch, without those that others of the
same types dominate. The master problem then chooses among the best columns at the prices of its relaxation. Unlike the
planner's (`optimizer.search.master`), it serves several models, and replicas share devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np

from optimizer.search.highs import Program, Solution
from profiles.scores import FloatArray, IntArray

MARGIN = 1e-6  # relative tolerance of the integer program
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
    model: int = 0
    whole_devices: bool = False
    """Whether only equal segments (by index) of one model share devices."""


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


class Master:
    """The master problem: the rates of columns (Q) of several models (M), and the replicas of their segments (S)."""

    def __init__(self, columns: Sequence[Pipeline], weight_M: FloatArray, count_C: FloatArray) -> None:
        self.columns, self.weight_M, self.count_C = columns, weight_M, count_C
        self.model_Q = np.array([column.model for column in columns])
        pools: dict[tuple[int, object], int] = {}
        hosts = [(q, each, number, *host) for q, each in enumerate(columns) for number, host in enumerate(each.hosts)]
        pool_of = [(device, (each.model, number) if each.whole_devices else ()) for _, each, number, device, _ in hosts]
        self.pool_S = np.array([pools.setdefault(pool, len(pools)) for pool in pool_of])
        self.column_S, self.shares_S = (np.array([host[at] for host in hosts]) for at in (0, 4))
        self.work_S = np.concatenate([column.work for column in columns])
        self.work_PQ = np.zeros((len(pools), len(columns)))
        np.add.at(self.work_PQ, (self.pool_S, self.column_S), self.work_S / self.shares_S)
        self.of_type_CP = np.array([device for device, _ in pools]) == np.arange(len(count_C))[:, None]
        self.work_CQ = self.of_type_CP @ self.work_PQ
        # Units in which the rate of a column is at most 1, and so is the share.
        self.unit_Q = 1 / (self.work_CQ / np.maximum(count_C, 1)[:, None]).max(axis=0)
        self.unit = max(self.unit_Q[self.model_Q == model].max() / weight for model, weight in enumerate(weight_M))

    def solved(self, seconds: float, *, whole: Literal["", "devices", "replicas"]) -> Solution:
        """Returns the best rates of columns, the devices of pools, the share, and the replicas of segments if whole.

        The duals of the last rows are the prices of the types and of the models.
        """
        program, num_pools = Program(), len(self.work_PQ)
        rate_Q, pool_P = program.variables(len(self.columns)), program.variables(num_pools, is_integer=bool(whole))
        share, used = program.variables(1, cost=-1.0), (-np.eye(num_pools), pool_P)
        if whole == "replicas":
            replicas_S = program.variables(len(self.column_S), is_integer=True)
            work_SQ = (self.column_S[:, None] == np.arange(len(self.columns))) * self.work_S[:, None] * self.unit_Q
            program.rows((work_SQ * (1 + MARGIN), rate_Q), (-np.eye(len(replicas_S)), replicas_S), upper=0.0)
            program.rows(((self.pool_S == np.arange(num_pools)[:, None]) / self.shares_S, replicas_S), used, upper=0.0)
        else:
            program.rows((self.work_PQ * self.unit_Q, rate_Q), used, upper=0.0)
        program.rows((self.of_type_CP.astype(float), pool_P), upper=self.count_C)
        own_MQ = self.model_Q == np.arange(len(self.weight_M))[:, None]
        served_MQ = own_MQ * self.unit_Q / (self.weight_M[:, None] * self.unit)
        program.rows((-served_MQ, rate_Q), (np.ones((len(own_MQ), 1)), share), upper=0.0)
        solution = program.minimum(seconds)
        assert solution is not None, "using no device keeps all limits"
        return solution


def best_mixture(
    columns: Sequence[Pipeline], weight_M: FloatArray, count_C: FloatArray, seconds: float
) -> tuple[float, float, Mapping[int, Sequence[int]]]:
    """Returns the largest share of their weights that all models reach, a bound, and the replicas of each used column.

    The best columns of the relaxation are tried, few of them first, because the solver converges faster with few.
    """
    bound, used_Q, reduced_Q = _relaxed(Master(columns, weight_M, count_C), seconds / 4)
    turns = [_in_turns(columns, reduced_Q, model) for model in range(len(weight_M))]
    best: tuple[float, Mapping[int, Sequence[int]]] = 0.0, {}
    for near in NEAR:
        kept = sorted({*np.flatnonzero(used_Q > CLOSE).tolist(), *(q for own in turns for q in own[:near])})
        with suppress(TimeoutError):
            master = Master([columns[q] for q in kept], weight_M, count_C)
            values = master.solved(seconds / len(NEAR), whole="replicas").values
            count_S = np.rint(values[-len(master.column_S) :]).astype(int)
            counts_Q = [count_S[master.column_S == index].tolist() for index in range(len(kept))]
            replicas = {q: n for q, n, rate in zip(kept, counts_Q, values, strict=False) if rate > MARGIN and all(n)}
            rates_M = np.zeros(len(weight_M))
            for q, counts in replicas.items():
                rates_M[columns[q].model] += (np.array(counts) / columns[q].work).min()
            best = max(best, (float((rates_M / weight_M).min()), replicas), key=lambda each: each[0])
        if best[0] >= bound * (1 - CLOSE):
            break
    return best[0], bound, best[1]


def _relaxed(master: Master, seconds: float) -> tuple[float, FloatArray, FloatArray]:
    """Returns a bound on the share, the columns' rates in some unit, and each column's reduced cost per input.

    Replicas may be fractional. For the bound and the rates, devices that segments share are whole. For the costs they
    may be fractional too.
    """
    found = master.solved(np.inf, whole="")
    bound, price_R = -found.objective, -found.duals[len(master.work_PQ) :]
    type_C, model_M = np.split(price_R, [len(master.count_C)])
    with suppress(TimeoutError):
        found = master.solved(seconds, whole="devices")
        bound = min(bound, -found.bound)
    reduced_Q = type_C @ master.work_CQ - (model_M / (master.weight_M * master.unit))[master.model_Q]
    return float(bound * master.unit), found.values[: len(master.columns)], reduced_Q


def _in_turns(columns: Sequence[Pipeline], reduced_Q: FloatArray, model: int) -> list[int]:
    """Orders a model's columns: the best of each sequence of types, then the second best of each, and so on."""
    num_before: dict[tuple[int, ...], int] = {}
    turns: list[tuple[int, float, int]] = []
    for q in np.argsort(reduced_Q, kind="stable").tolist():
        if columns[q].model == model:
            types = tuple(device for device, _ in columns[q].hosts)
            num_before[types] = num_before.get(types, -1) + 1
            turns.append((num_before[types], float(reduced_Q[q]), q))
    return [q for *_, q in sorted(turns)]
