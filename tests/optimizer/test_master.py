"""The master problem, compared with a mixed-integer program over all numbers of replicas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from optimizer.search.highs import Program
from optimizer.search.master import Chain, Demand, Mixture, best_mixture, fastest_options

LIMIT_S = 0.1


def drawn(seed: int) -> tuple[list[Chain], Demand]:
    """Returns a random master problem of the highest rate, with waits for batches and, if `seed` is odd, a budget."""
    rng = np.random.default_rng(seed)
    count_C, usd_C = rng.integers(1, 6, 3), rng.uniform(0.5, 3, 3)

    def stage(index: int) -> tuple[float, int, float]:
        wait = float(rng.integers(0, 3)) if index else 0.0
        return wait, int(rng.integers(3)), float(rng.uniform(0.001, 0.02))

    def chain() -> Chain:
        waits, devices, seconds = zip(*(stage(index) for index in range(rng.integers(1, 4))), strict=True)
        latency_s, fill = float(rng.uniform(0.02, 0.09)), float(rng.integers(0, 5))
        return Chain(devices=devices, seconds=seconds, waits=waits, latency_s=latency_s, fill=fill)

    budget = 0.6 * float(usd_C @ count_C) if seed % 2 else math.inf
    chains, most_chains = [chain() for _ in range(rng.integers(2, 12))], int(rng.integers(1, 4))
    return chains, Demand(count_C=count_C, usd_C=usd_C, budget=budget, limit_s=LIMIT_S, most_chains=most_chains)


def best_of_all(chains: Sequence[Chain], demand: Demand) -> float | None:
    """Returns the highest rate, or the least cost at the required rate, over all numbers of replicas. None: no mixture.

    HiGHS selects among all chains with whole replicas that fit the devices, and whose batches fill in time.
    """
    most_rate = math.inf if demand.rate_per_s is None else demand.rate_per_s
    options = []
    for chain in chains:
        for replicas in product(*(range(1, demand.count_C[device] + 1) for device in chain.devices)):
            used_C = np.bincount(chain.devices, weights=replicas, minlength=3)
            rate = min(n / seconds for n, seconds in zip(replicas, chain.seconds, strict=True))
            least = (chain.fill + np.dot(replicas, chain.waits)) / (demand.limit_s - chain.latency_s)
            if (used_C <= demand.count_C).all() and least <= min(rate, most_rate):
                options.append((rate, least, *used_C))
    if not options:
        return None
    rate_O, least_O, *used_CO = np.array(options).T
    usd_O, program = demand.usd_C @ used_CO, Program()
    cost = -rate_O / rate_O.max() if demand.rate_per_s is None else usd_O
    option_O = program.variables(len(options), cost=cost, is_integer=True)
    program.rows((np.eye(len(options)), option_O), upper=1.0)
    program.rows((np.array(used_CO), option_O), upper=demand.count_C.astype(float))
    program.rows((np.ones(len(options)), option_O), upper=float(demand.most_chains))
    program.rows((usd_O, option_O), upper=min(demand.budget, float(demand.usd_C @ demand.count_C)) * (1 + 1e-9))
    if demand.rate_per_s is not None:
        program.rows((rate_O / demand.rate_per_s, option_O), lower=1.0)
        program.rows((least_O / demand.rate_per_s, option_O), upper=1.0)
    solution = program.minimum()
    if solution is None:
        return None
    chosen_O = solution.values > 0.5
    return float((rate_O if demand.rate_per_s is None else usd_O)[chosen_O].sum())


def rates_of(mixture: Mixture) -> tuple[float, float]:
    """Returns the rate from which all batches of a mixture fill in time, and the highest that its replicas serve."""
    least = highest = 0.0
    for chain, replicas in zip(mixture.chains, mixture.replicas, strict=True):
        rate = min(n / each for each, n in zip(chain.seconds, replicas, strict=True))
        waiting = chain.fill + sum(wait * n for wait, n in zip(chain.waits, replicas, strict=True))
        assert chain.latency_s + waiting / rate <= LIMIT_S * (1 + 1e-6)
        least, highest = least + waiting / (LIMIT_S - chain.latency_s), highest + rate
    return least, highest


def cost_of(mixture: Mixture, demand: Demand) -> float:
    """Returns the cost of the devices in use, which are available and within the budget."""
    used_C = np.zeros(3)
    for chain, replicas in zip(mixture.chains, mixture.replicas, strict=True):
        for device, count in zip(chain.devices, replicas, strict=True):
            used_C[device] += count
    assert (used_C <= demand.count_C).all()
    assert float(used_C @ demand.usd_C) <= demand.budget * (1 + 1e-6)
    return float(used_C @ demand.usd_C)


@pytest.mark.parametrize("seed", range(30))
def test_no_other_mixture_is_better(seed: int) -> None:
    chains, demand = drawn(seed)
    fastest, expected = best_mixture(chains, fastest_options(chains, demand), demand), best_of_all(chains, demand)
    if expected is None:
        assert (fastest.chains, fastest.bound) == ((), 0.0)
        return
    highest = rates_of(fastest)[1]
    assert cost_of(fastest, demand) > 0
    assert highest == pytest.approx(fastest.bound) == pytest.approx(expected, rel=2e-4)
    for share in (0.31, 0.83, 1.01):
        required = replace(demand, rate_per_s=share * highest)
        cheapest, expected = (
            best_mixture(chains, fastest_options(chains, required), required),
            best_of_all(chains, required),
        )
        if expected is None or not cheapest.chains:
            assert (expected, cheapest.chains) == (None, ())
            continue
        assert share < 1
        least, most = rates_of(cheapest)
        assert least * (1 - 1e-6) <= share * highest <= most * (1 + 1e-6)
        assert cheapest.bound is not None
        assert cheapest.bound <= cost_of(cheapest, required) * (1 + 1e-9)
        assert cost_of(cheapest, required) == pytest.approx(expected, rel=2e-4)


def test_chains_whose_batches_fill_too_slowly_together_are_no_mixture() -> None:
    """Two small devices are cheaper than a large one, but the rate fills the batches of only one of them."""
    small = {"waits": (0.0,), "latency_s": 0.05, "fill": 1.5, "seconds": (0.02,)}
    large = Chain(devices=(2,), seconds=(0.001,), waits=(0.0,), latency_s=0.05, fill=0.5)
    demand = Demand(
        count_C=np.ones(3, dtype=int), usd_C=np.array([1.0, 1.0, 3.0]), limit_s=LIMIT_S, rate_per_s=55.0, most_chains=3
    )
    chains = [Chain(devices=(0,), **small), Chain(devices=(1,), **small), large]  # type: ignore[arg-type]  # mixed values
    assert best_of_all(chains, demand) == 3.0
    found = best_mixture(chains, fastest_options(chains, demand), demand)
    assert (found.chains, found.replicas, found.bound) == ((large,), ((1,),), 2.0)


def test_many_devices_are_counted_in_units_which_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimizer.search.master.MAX_USES", 30)
    for seed in range(30):
        chains, demand = drawn(seed)
        exact = best_of_all(chains, demand)
        found = best_mixture(chains, fastest_options(chains, demand), demand)
        assert (found.bound is None) == (np.prod(demand.count_C + 1) > 30)
        if found.chains:
            assert exact is not None
            assert cost_of(found, demand) > 0
            assert rates_of(found)[1] <= exact * (1 + 2e-4)
