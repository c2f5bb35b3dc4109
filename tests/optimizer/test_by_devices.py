"""The dynamic program over the devices in use, compared with HiGHS on the same master problems."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from optimizer.search.by_devices import mixture_by_devices
from optimizer.search.master import Column, Demand, Mixture, solve_master

LIMIT_S = 0.1


def drawn(seed: int) -> tuple[list[Column], Demand]:
    """Returns a random master problem of the highest rate, with waits for batches and, if `seed` is odd, a budget."""
    rng = np.random.default_rng(seed)
    count_C, usd_C = rng.integers(1, 6, 3).astype(float), rng.uniform(0.5, 3, 3)

    def stage(index: int) -> tuple[float, int, float]:
        wait = float(rng.integers(0, 3)) if index else 0.0
        return wait, int(rng.integers(3)), float(rng.uniform(0.001, 0.02))

    def column() -> Column:
        waits, devices, seconds = zip(*(stage(index) for index in range(rng.integers(1, 4))), strict=True)
        latency_s, fill = float(rng.uniform(0.02, 0.09)), float(rng.integers(0, 5))
        return Column(devices=devices, seconds=seconds, waits=waits, latency_s=latency_s, fill=fill)

    budget = 0.6 * float(usd_C @ count_C) if seed % 2 else math.inf
    columns, most_chains = [column() for _ in range(rng.integers(2, 12))], int(rng.integers(1, 4))
    return columns, Demand(count_C=count_C, usd_C=usd_C, budget=budget, limit_s=LIMIT_S, most_chains=most_chains)


def checked_rate(mixture: Mixture, columns: list[Column]) -> float:
    """Returns the rate of a mixture whose replicas suffice, and whose batches fill in time."""
    for q, rate in mixture.rates.items():
        column, replicas = columns[q], mixture.replicas[q]
        assert all(rate * each <= n * (1 + 1e-6) for each, n in zip(column.seconds, replicas, strict=True))
        waiting = column.fill + sum(wait * n for wait, n in zip(column.waits, replicas, strict=True))
        assert column.latency_s + waiting / rate <= LIMIT_S * (1 + 1e-6)
    return sum(mixture.rates.values())


def cost_of(mixture: Mixture, columns: list[Column], demand: Demand) -> float:
    """Returns the cost of the devices in use, which are available and within the budget."""
    used_C = np.zeros(3)
    for q, replicas in mixture.replicas.items():
        for device, count in zip(columns[q].devices, replicas, strict=True):
            used_C[device] += count
    assert (used_C <= demand.count_C).all()
    assert float(used_C @ demand.usd_C) <= demand.budget * (1 + 1e-6)
    return float(used_C @ demand.usd_C)


@pytest.mark.parametrize("seed", range(30))
def test_no_mixture_of_highs_is_better(seed: int) -> None:
    columns, demand = drawn(seed)
    is_found, fastest = mixture_by_devices(columns, demand)
    by_highs = solve_master(columns, demand)
    assert is_found
    assert by_highs is not None
    if fastest is None:
        assert not by_highs.replicas
        return
    highest = checked_rate(fastest, columns)
    assert cost_of(fastest, columns, demand) > 0
    assert highest == pytest.approx(fastest.bound) == pytest.approx(checked_rate(by_highs, columns), rel=2e-4)
    for share in (0.31, 0.83, 1.01):
        required = replace(demand, rate_per_s=share * highest)
        is_found, cheapest = mixture_by_devices(columns, required)
        by_highs = solve_master(columns, required)
        if not is_found:
            continue
        assert (cheapest is None) == (by_highs is None)
        assert cheapest is None or share < 1
        if cheapest is not None and by_highs is not None:
            assert checked_rate(cheapest, columns) == pytest.approx(share * highest)
            assert cost_of(cheapest, columns, demand) == pytest.approx(cheapest.bound)
            assert cheapest.bound == pytest.approx(cost_of(by_highs, columns, demand), rel=2e-4)


def test_chains_whose_batches_fill_too_slowly_together_are_left_to_highs() -> None:
    """Two small devices are cheaper than a large one, but the rate fills the batches of only one of them."""
    columns = [
        Column(devices=(0,), seconds=(0.02,), waits=(0.0,), latency_s=0.05, fill=1.5),
        Column(devices=(1,), seconds=(0.02,), waits=(0.0,), latency_s=0.05, fill=1.5),
        Column(devices=(2,), seconds=(0.001,), waits=(0.0,), latency_s=0.05, fill=0.5),
    ]
    demand = Demand(count_C=np.ones(3), usd_C=np.array([1.0, 1.0, 3.0]), limit_s=LIMIT_S, rate_per_s=55.0)
    assert mixture_by_devices(columns, demand) == (False, None)
    by_highs = solve_master(columns, demand)
    assert by_highs is not None
    assert by_highs.replicas == {2: (1,)}
