"""Plans of several chains, beside every multiset of the chains that there are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations_with_replacement, product
from pathlib import Path

import numpy as np
import pytest

from optimizer.chains import SOLVED
from optimizer.decision import Planned
from optimizer.evaluate import sought, violations
from optimizer.plan import chains_of
from optimizer.planner import solve
from optimizer.problem import Link, MaximizeRate, MinimizeCost, PlanProblem, Slo, Supply
from optimizer.problem_file import read_problem
from profiles.table import LatencyTable
from tests.optimizer.answers import planned
from tests.optimizer.brute_force import Twin
from tests.optimizer.layouts import layouts
from tests.optimizer.plain_problem import plain_problem
from tests.optimizer.random_problems import random_problem

SMALL = [seed for seed in range(500) if random_problem(seed).num_blocks <= 4]
Devices = tuple[int, ...]
"""Replicas by accelerator type."""
Rates = tuple[float, float]
"""The least rate at which a chain's batches fill in time, and the most that it does."""


def chains(problem: PlanProblem) -> dict[Devices, list[Rates]]:
    """Every chain of the space `best`, by what it uses; without those that another one is better than."""
    at_one, at_half = (Twin(replace(problem, objective=MinimizeCost(rate_per_s=rate))) for rate in (1.0, 0.5))
    limit_s = problem.slo.limit_s * (1 + 1e-9)
    found: dict[Devices, set[Rates]] = defaultdict(set)
    for layout in layouts(problem, "best"):
        one, half = at_one.scores(layout), at_half.scores(layout)
        with np.errstate(divide="ignore", invalid="ignore"):  # where no input arrives, no batch fills
            filled_PQ = half.latency_s_PQ - one.latency_s_PQ
            room_PQ = limit_s - (one.latency_s_PQ - filled_PQ)
            least_PQ = np.where(room_PQ > 0, filled_PQ / room_PQ, np.inf)
        for q, replicas_G in enumerate(one.replicas_QG):
            used = tuple(
                sum(int(count) for count, device in zip(replicas_G, layout.devices, strict=True) if device == name)
                for name in problem.devices
            )
            rates = zip(least_PQ[:, q].tolist(), one.rate_per_s_PQ[:, q].tolist(), strict=True)
            found[used] |= {(least, most) for least, most in rates if least <= most * (1 + 1e-9)}
    return {used: list(_worth_having(rates)) for used, rates in found.items() if rates}


def _worth_having(rates: set[Rates]) -> Iterator[Rates]:
    most_so_far = -1.0
    for least, most in sorted(rates, key=lambda each: (each[0], -each[1])):
        if most > most_so_far:
            most_so_far = most
            yield least, most


def best_of_all(problem: PlanProblem, most_chains: int) -> float | None:
    """The highest rate or the least cost of any multiset of chains; None where none keeps the promises."""
    by_devices = chains(problem)
    counts = [supply.count for supply in problem.devices.values()]
    prices = [supply.usd_per_hour for supply in problem.devices.values()]
    budget = np.inf if problem.budget_usd_per_hour is None else problem.budget_usd_per_hour * (1 + 1e-9)
    values = []
    for num_chains in range(1, most_chains + 1):
        for several in combinations_with_replacement(by_devices, num_chains):
            used = [sum(each) for each in zip(*several, strict=True)]
            usd = sum(price * count for price, count in zip(prices, used, strict=True))
            if usd > budget or any(taken > there for taken, there in zip(used, counts, strict=True)):
                continue
            if problem.asked_per_s is None:
                values.append(sum(max(most for _, most in by_devices[devices]) for devices in several))
            elif any(_serves(rates, problem.asked_per_s) for rates in product(*(by_devices[each] for each in several))):
                values.append(usd)
    return (max if problem.asked_per_s is None else min)(values) if values else None


def _serves(rates: tuple[Rates, ...], asked_per_s: float) -> bool:
    least, most = (sum(each) for each in zip(*rates, strict=True))
    return bool(least <= asked_per_s * (1 + 1e-9) and most >= asked_per_s * (1 - 1e-9))


@pytest.mark.parametrize("seed", SMALL[::10])
def test_no_multiset_of_chains_is_better_than_the_plan_or_its_gap_says_by_how_much(seed: int) -> None:
    problem = replace(random_problem(seed), most_chains=3)
    expected, found = best_of_all(problem, 3), solve(problem, "best")
    if expected is None:
        assert not isinstance(found, Planned)
        return
    assert isinstance(found, Planned)
    assert violations(problem, found.stages, found.figures) == []
    assert len(chains_of(found.stages, problem.num_blocks)) == len(found.figures.shares) <= 3
    value, allowed = sought(problem, found.figures), max(found.gap, SOLVED)
    if isinstance(problem.objective, MaximizeRate):
        assert expected * (1 - allowed) <= value <= expected * (1 + 1e-6)
        assert found.bound >= expected * (1 - SOLVED)
    else:
        assert expected * (1 - 1e-6) <= value
        assert value * (1 - allowed) <= expected * (1 + SOLVED) + 1e-9
        assert found.bound <= expected * (1 + SOLVED)


def table(batches: tuple[int, ...], block_ms: list[list[float]], ramp_ms: list[list[float]]) -> LatencyTable:
    return LatencyTable(batches=batches, block_s_NB=np.array(block_ms) / 1e3, ramp_s_EB=np.array(ramp_ms) / 1e3)


def test_a_chain_on_two_types_may_be_slower_than_the_types_alone_if_it_leaves_devices_to_another_chain() -> None:
    """Blocks 0 and 1 are slow on V100. All T4 run them for one V100, and the other V100 are a chain of their own."""
    v100 = [[38.9], [10.9], [1.5], [1.5], [10.7], [5.9], [5.5], [4.5], [3.1]]
    t4 = [[5.1, 14.4], [8.2, 21.8], [11.4, 16.9], [8.9, 12.4], [12.9, 26.4], [5.8, 10.4], [11.8, 17.3], [10.4, 22.9]]
    problem = plain_problem(
        ramps=(1, 2, 3, 6, 7),
        survival_N=(1.0, 1.0, 0.0519, 0.0245, 0.0226, 0.0226, 0.0226, 0.0019, 0.0006),
        latency={
            "V100": table((4,), v100, [[4.9], [1.9], [0.9], [3.2], [0.4]]),
            "T4": table(
                (2, 8), [*t4, [11.1, 22.9]], [[0.35, 0.68], [0.35, 0.81], [0.36, 0.63], [0.66, 1.19], [0.34, 0.35]]
            ),
        },
        devices={"V100": Supply(count=4, usd_per_hour=0.6), "T4": Supply(count=7, usd_per_hour=1.6)},
        link=Link(bandwidth_bytes_per_s=1e6, delay_s=0.0),
        bytes_per_sample_N=(7e4, 2.6e4, 3.1e4, 4.1e4, 2.1e4, 8e4, 8.7e4, 5e4, 8.2e4),
        slo=Slo(latency_s=1.28, slack=0.2),
        most_chains=2,
    )
    found = planned(problem)
    assert len(found.figures.shares) == 2
    assert found.gap < 0.1


def test_plans_of_several_chains_are_no_worse_than_the_best_of_one() -> None:
    problem = read_problem(Path("examples/problems/bert_large_hetero.yaml")).problem
    one, several = planned(replace(problem, most_chains=1)), planned(replace(problem, most_chains=3))
    assert several.figures.rate_per_s >= one.figures.rate_per_s * (1 - 1e-9)
    assert several.figures.rate_per_s <= several.bound
