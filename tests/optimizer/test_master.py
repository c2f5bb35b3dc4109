"""The master problem, compared with a mixed-integer program over all numbers of replicas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from optimizer.problems.problem import MinimizeCost, PlanProblem, Slo, Supply
from optimizer.search.highs import Program
from optimizer.search.master import CandidateChain, Mixture, best_mixtures
from profiles.scores import FloatArray, IntArray
from profiles.table import LatencyTable
from tests.optimizer.plain_problem import plain_problem

LIMIT_S = 0.1
TABLE = LatencyTable(batches=(1,), block_s_NB=np.full((1, 1), 0.001), ramp_s_EB=np.zeros((0, 1)))


def on_devices(counts: Sequence[int], prices: Sequence[float], **fields: Any) -> PlanProblem:
    """Returns the problem of the highest rate on these accelerators. The model does not matter here."""
    pairs = zip("ABC", counts, prices, strict=True)
    supplies = {name: Supply(count=count, usd_per_hour=usd) for name, count, usd in pairs}
    slo = Slo(latency_s=LIMIT_S, slack=0.0)
    tables = dict.fromkeys(supplies, TABLE)
    return plain_problem(survival_N=(1.0,), latency=tables, devices=supplies, slo=slo, **fields)


def drawn(seed: int) -> tuple[list[CandidateChain], PlanProblem]:
    """Returns chains with waits for batches, and a problem of the highest rate, with a budget if `seed` is odd."""
    rng = np.random.default_rng(seed)
    count_C, usd_C = rng.integers(1, 6, 3), rng.uniform(0.5, 3, 3)

    def stage(index: int) -> tuple[float, int, float]:
        wait = float(rng.integers(0, 3)) if index else 0.0
        return wait, int(rng.integers(3)), float(rng.uniform(0.001, 0.02))

    def chain() -> CandidateChain:
        waits, devices, seconds = zip(*(stage(index) for index in range(rng.integers(1, 4))), strict=True)
        latency_s, fill = float(rng.uniform(0.02, 0.09)), float(rng.integers(0, 5))
        return CandidateChain(devices=devices, seconds=seconds, waits=waits, latency_s=latency_s, fill=fill)

    budget = 0.6 * float(usd_C @ count_C) if seed % 2 else None
    chains, most_chains = [chain() for _ in range(rng.integers(2, 12))], int(rng.integers(1, 4))
    return chains, on_devices(count_C.tolist(), usd_C.tolist(), budget_usd_per_hour=budget, most_chains=most_chains)


def supplied(problem: PlanProblem) -> tuple[IntArray, FloatArray]:
    """Returns the number and the price of each accelerator type."""
    supplies = problem.devices.values()
    return np.array([each.count for each in supplies]), np.array([each.usd_per_hour for each in supplies])


def best_of_all(chains: Sequence[CandidateChain], problem: PlanProblem) -> float | None:
    """Returns the highest rate, or the least cost at the required rate, over all numbers of replicas. None: no mixture.

    HiGHS selects among all chains with whole replicas that fit the devices, and whose batches fill in time.
    """
    (count_C, usd_C), required, options = supplied(problem), problem.required_per_s, []
    for chain in chains:
        for replicas in product(*(range(1, count_C[device] + 1) for device in chain.devices)):
            used_C = np.bincount(chain.devices, weights=replicas, minlength=3)
            rate = min(n / seconds for n, seconds in zip(replicas, chain.seconds, strict=True))
            least = (chain.fill + np.dot(replicas, chain.waits)) / (LIMIT_S - chain.latency_s)
            if (used_C <= count_C).all() and least <= min(rate, required or math.inf):
                options.append((rate, least, *used_C))
    if not options:
        return None
    rate_O, least_O, *used_CO = np.array(options).T
    usd_O, program = usd_C @ used_CO, Program()
    cost = -rate_O / rate_O.max() if required is None else usd_O
    option_O = program.variables(len(options), cost=cost, is_integer=True)
    program.rows((np.eye(len(options)), option_O), upper=1.0)
    program.rows((np.array(used_CO), option_O), upper=count_C.astype(float))
    program.rows((np.ones(len(options)), option_O), upper=float(problem.most_chains))
    program.rows((usd_O, option_O), upper=problem.max_usd_per_hour * (1 + 1e-9))
    if required is not None:
        program.rows((rate_O / required, option_O), lower=1.0)
        program.rows((least_O / required, option_O), upper=1.0)
    solution = program.minimum()
    if solution is None:
        return None
    chosen_O = solution.values > 0.5
    return float((rate_O if required is None else usd_O)[chosen_O].sum())


def rates_of(mixture: Mixture) -> tuple[float, float]:
    """Returns the rate from which all batches of a mixture fill in time, and the highest that its replicas serve."""
    least = highest = 0.0
    for chain, replicas in mixture.chains:
        rate = min(n / each for each, n in zip(chain.seconds, replicas, strict=True))
        waiting = chain.fill + sum(wait * n for wait, n in zip(chain.waits, replicas, strict=True))
        assert chain.latency_s + waiting / rate <= LIMIT_S * (1 + 1e-6)
        least, highest = least + waiting / (LIMIT_S - chain.latency_s), highest + rate
    return least, highest


def cost_of(mixture: Mixture, problem: PlanProblem) -> float:
    """Returns the cost of the devices in use, which are available and within the budget."""
    used_C, (count_C, usd_C) = np.zeros(3), supplied(problem)
    for chain, replicas in mixture.chains:
        for device, count in zip(chain.devices, replicas, strict=True):
            used_C[device] += count
    assert (used_C <= count_C).all()
    assert float(used_C @ usd_C) <= problem.max_usd_per_hour * (1 + 1e-6)
    return float(used_C @ usd_C)


@pytest.mark.parametrize("seed", range(30))
def test_no_other_mixture_is_better(seed: int) -> None:
    chains, problem = drawn(seed)
    fastest, expected = best_mixtures(chains, problem)[-1], best_of_all(chains, problem)
    if expected is None:
        assert (fastest.chains, fastest.bound) == ((), 0.0)
        return
    _, highest = rates_of(fastest)
    assert cost_of(fastest, problem) > 0
    assert highest == pytest.approx(fastest.bound) == pytest.approx(expected, rel=2e-4)
    for share in (0.31, 0.83, 1.01):
        asked = replace(problem, objective=MinimizeCost(rate_per_s=share * highest))
        cheapest = best_mixtures(chains, asked)[-1]
        expected = best_of_all(chains, asked)
        if expected is None or not cheapest.chains:
            assert (expected, cheapest.chains) == (None, ())
            continue
        assert share < 1
        least, most = rates_of(cheapest)
        assert least * (1 - 1e-6) <= share * highest <= most * (1 + 1e-6)
        assert cheapest.bound is not None
        assert cheapest.bound <= cost_of(cheapest, asked) * (1 + 1e-9)
        assert cost_of(cheapest, asked) == pytest.approx(expected, rel=2e-4)


def test_chains_whose_batches_fill_too_slowly_together_are_no_mixture() -> None:
    """Two small devices are cheaper than a large one, but the rate fills the batches of only one of them."""
    small = {"waits": (0.0,), "latency_s": 0.05, "fill": 1.5, "seconds": (0.02,)}
    large = CandidateChain(devices=(2,), seconds=(0.001,), waits=(0.0,), latency_s=0.05, fill=0.5)
    problem = on_devices((1, 1, 1), (1.0, 1.0, 3.0), objective=MinimizeCost(rate_per_s=55.0), most_chains=3)
    chains = [CandidateChain(devices=(0,), **small), CandidateChain(devices=(1,), **small), large]  # type: ignore[arg-type]  # mixed values
    assert best_of_all(chains, problem) == 3.0
    assert best_mixtures(chains, problem)[-1] == Mixture(chains=((large, (1,)),), bound=2.0)
