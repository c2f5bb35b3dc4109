"""The dynamic program over the devices in use, compared with HiGHS on the same master problems."""

from __future__ import annotations

import math

import numpy as np
import pytest

from optimizer.search.by_devices import mixture_by_devices
from optimizer.search.master import Cluster, Column, Demand, Mixture, StageWork, solve_master

LIMIT_S = 0.1


def drawn(seed: int) -> tuple[list[Column], Demand, Cluster]:
    """Returns a random master problem of the highest rate, with waits for batches and, if `seed` is odd, a budget."""
    rng = np.random.default_rng(seed)
    count_C, usd_C = rng.integers(1, 6, 3).astype(float), rng.uniform(0.5, 3, 3)

    def stage(index: int) -> StageWork:
        wait = float(rng.integers(0, 3)) if index else 0.0
        return StageWork(device=int(rng.integers(3)), seconds=float(rng.uniform(0.001, 0.02)), wait=wait)

    def column() -> Column:
        stages = tuple(stage(index) for index in range(rng.integers(1, 4)))
        return Column(stages=stages, latency_s=float(rng.uniform(0.02, 0.09)), fill=float(rng.integers(0, 5)))

    budget = 0.6 * float(usd_C @ count_C) if seed % 2 else math.inf
    cluster = Cluster(count_C=count_C, usd_C=usd_C, budget=budget)
    columns = [column() for _ in range(rng.integers(2, 12))]
    return columns, Demand(limit_s=LIMIT_S, most_chains=int(rng.integers(1, 4))), cluster


def checked_rate(mixture: Mixture, columns: list[Column]) -> float:
    """Returns the rate of a mixture whose replicas suffice, and whose batches fill in time."""
    for q, rate in mixture.rates.items():
        column, replicas = columns[q], mixture.replicas[q]
        assert all(rate * stage.seconds <= n * (1 + 1e-6) for stage, n in zip(column.stages, replicas, strict=True))
        waiting = column.fill + sum(stage.wait * n for stage, n in zip(column.stages, replicas, strict=True))
        assert column.latency_s + waiting / rate <= LIMIT_S * (1 + 1e-6)
    return sum(mixture.rates.values())


def cost_of(mixture: Mixture, columns: list[Column], cluster: Cluster) -> float:
    """Returns the cost of the devices in use, which are available and within the budget."""
    used_C = np.zeros(3)
    for q, replicas in mixture.replicas.items():
        for stage, count in zip(columns[q].stages, replicas, strict=True):
            used_C[stage.device] += count
    assert (used_C <= cluster.count_C).all()
    assert float(used_C @ cluster.usd_C) <= cluster.budget * (1 + 1e-6)
    return float(used_C @ cluster.usd_C)


@pytest.mark.parametrize("seed", range(30))
def test_no_mixture_of_highs_is_better(seed: int) -> None:
    columns, demand, cluster = drawn(seed)
    is_found, fastest = mixture_by_devices(columns, demand, cluster)
    by_highs = solve_master(columns, [demand], cluster)
    assert is_found
    assert by_highs is not None
    if fastest is None:
        assert not by_highs.replicas
        return
    highest = checked_rate(fastest, columns)
    assert cost_of(fastest, columns, cluster) > 0
    assert highest == pytest.approx(fastest.bound) == pytest.approx(checked_rate(by_highs, columns), rel=2e-4)
    for share in (0.31, 0.83, 1.01):
        required = Demand(limit_s=LIMIT_S, rate_per_s=share * highest, most_chains=demand.most_chains)
        is_found, cheapest = mixture_by_devices(columns, required, cluster)
        by_highs = solve_master(columns, [required], cluster)
        if not is_found:
            continue
        assert (cheapest is None) == (by_highs is None)
        assert cheapest is None or share < 1
        if cheapest is not None and by_highs is not None:
            assert checked_rate(cheapest, columns) == pytest.approx(share * highest)
            assert cost_of(cheapest, columns, cluster) == pytest.approx(cheapest.bound)
            assert cheapest.bound == pytest.approx(cost_of(by_highs, columns, cluster), rel=2e-4)


def test_chains_whose_batches_fill_too_slowly_together_are_left_to_highs() -> None:
    """Two small devices are cheaper than a large one, but the rate fills the batches of only one of them."""
    columns = [
        Column(stages=(StageWork(device=0, seconds=0.02),), latency_s=0.05, fill=1.5),
        Column(stages=(StageWork(device=1, seconds=0.02),), latency_s=0.05, fill=1.5),
        Column(stages=(StageWork(device=2, seconds=0.001),), latency_s=0.05, fill=0.5),
    ]
    cluster = Cluster(count_C=np.ones(3), usd_C=np.array([1.0, 1.0, 3.0]))
    demand = Demand(limit_s=LIMIT_S, rate_per_s=55.0)
    assert mixture_by_devices(columns, demand, cluster) == (False, None)
    by_highs = solve_master(columns, [demand], cluster)
    assert by_highs is not None
    assert by_highs.replicas == {2: (1,)}
