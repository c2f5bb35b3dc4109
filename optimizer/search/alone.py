"""What one chain does alone: every number of replicas worth having, with its rate, latency and price."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optimizer.search.master import Cluster, Column
from optimizer.step import FloatArray, IntArray

ROUNDING = 1e-12


class Options(NamedTuple):
    """Ways to replicate the stages (S) of a chain within the cluster (K), the highest rate first."""

    rate_K: FloatArray
    latency_s_K: FloatArray
    """Worst case, at that rate."""
    usd_K: FloatArray
    replicas_KS: IntArray


def options_of(column: Column, cluster: Cluster, asked_per_s: float | None, above_per_s: float = 0.0) -> Options:
    """As many replicas as the asked rate needs; or, for each rate above a known one at which a stage is busy, as many.

    More replicas than a rate needs only wait longer for batches of their own, and no rate in between is better.
    """
    work_S = np.array([stage.seconds for stage in column.stages])
    wait_S = np.array([stage.wait for stage in column.stages])
    device_S = np.array([stage.device for stage in column.stages])
    asked_K = None if asked_per_s is None else np.array([asked_per_s])
    rate_K = _busy_rates(work_S, device_S, cluster, above_per_s) if asked_K is None else asked_K
    replicas_KS = np.maximum(np.ceil(rate_K[:, None] * work_S * (1 - ROUNDING)), 1.0)
    used_KC = np.zeros((len(rate_K), len(cluster.count_C)))
    for stage, device in enumerate(device_S):
        used_KC[:, device] += replicas_KS[:, stage]
    usd_K = used_KC @ cluster.usd_C
    fits_K = (used_KC <= cluster.count_C + 0.5).all(axis=1) & (usd_K <= cluster.budget * (1 + 1e-9))
    with np.errstate(divide="ignore", over="ignore"):
        latency_s_K = column.latency_s + (column.fill + replicas_KS @ wait_S) / rate_K
    return Options(rate_K[fits_K], latency_s_K[fits_K], usd_K[fits_K], replicas_KS[fits_K].astype(np.int64))


def _busy_rates(work_S: FloatArray, device_S: IntArray, cluster: Cluster, above_per_s: float) -> FloatArray:
    """The rates at which whole replicas of some stage are fully busy, within what the cluster does, descending."""
    most = np.inf
    for device in set(device_S.tolist()):
        most = min(most, cluster.count_C[device] / work_S[device_S == device].sum())
    usd = float(work_S @ cluster.usd_C[device_S])
    if usd > 0:
        most = min(most, cluster.budget / usd * (1 + 1e-9))
    rates = []
    for work, device in zip(work_S, device_S, strict=True):
        last = int(min(cluster.count_C[device], np.floor(most * work * (1 + 1e-9))))
        first = max(1, int(np.floor(above_per_s * work)))
        rates.append(np.arange(first, last + 1) / work)
    found = np.unique(np.concatenate(rates))[::-1]
    return np.asarray(found[(found <= most * (1 + 1e-9)) & (found >= above_per_s * (1 - 1e-9))])
