"""Plans at scale are feasible, not better than the bound, and close to those of the exact planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from earlyexit.errors import PlanError
from optimizer.cost.evaluate import evaluate, violations
from optimizer.problems.problem import Link, MaximizeRate, MinimizeCost, Objective, PlanProblem, Slo, Supply
from optimizer.search.decision import Decision, NoPlan, Planned, Strategy
from optimizer.search.exact import is_too_big
from optimizer.search.kernels import ALL_AT_SCALE
from optimizer.search.planner import solve
from optimizer.search.space import SPACES
from profiles.catalogue import published_profile
from profiles.table import LatencyTable
from tests.optimizer.answers import planned
from tests.optimizer.plain_problem import plain_problem, random_problem

BIG_CLUSTER = {
    "V100": Supply(count=1500, usd_per_hour=2.93),
    "T4": Supply(count=3500, usd_per_hour=0.53),
    "A100": Supply(count=1000, usd_per_hour=3.67),
    "A30": Supply(count=1500, usd_per_hour=1.2),
    "L4": Supply(count=1500, usd_per_hour=0.8),
    "L40S": Supply(count=1000, usd_per_hour=1.86),
}
"""The prices per hour are made up, and close to cloud prices."""
FAST_LINK = Link(bandwidth_bytes_per_s=12.5e9, delay_s=5e-5)
SLOW_LINK = Link(bandwidth_bytes_per_s=1.25e9, delay_s=1e-4)
"""The link of E3. Its hops cost so much that no bound on them is tight."""
LENGTH = 128


def bert_large_problem(
    num_blocks: int, devices: Mapping[str, Supply], link: Link, objective: Objective | None = None
) -> PlanProblem:
    """Returns a problem with the blocks of BERT-large. Three quarters of the inputs leave, most of them early."""
    latency = {}
    for device in devices:
        table = published_profile("bert-large", device).tables[LENGTH]
        latency[device] = LatencyTable(
            batches=table.batches,
            block_s_NB=np.tile(table.block_s_NB[0], (num_blocks, 1)),
            ramp_s_EB=np.tile(table.ramp_s_EB[0], (num_blocks - 1, 1)),
        )
    return plain_problem(
        survival_N=tuple(1 - 0.75 * (block / (num_blocks - 1)) ** 0.6 for block in range(num_blocks)),
        latency=latency,
        devices=devices,
        link=link,
        bytes_per_sample_N=(LENGTH * 1024 * 2.0,) * num_blocks,  # float16
        slo=Slo(latency_s=0.1, slack=0.2),
        objective=objective or MaximizeRate(),
    )


FEW, MANY = 5, 60
"""Numbers of small problems, by default and in `make test-all`."""
# Sums in another order.
AGREE = 1e-6


def cluster_problem(num_blocks: int, counts: dict[str, int], objective: Objective | None = None) -> PlanProblem:
    """Returns a problem with these device counts, at the prices of the big cluster."""
    devices = {name: replace(BIG_CLUSTER[name], count=count) for name, count in counts.items()}
    return bert_large_problem(num_blocks, devices, SLOW_LINK, objective)


@cache
def at_scale(seed: int, strategy: Strategy) -> Decision | None:
    """Returns the decision, or None if the planner reports that it found no plan."""
    try:
        return solve(random_problem(seed), replace(SPACES[strategy], max_labels=0))
    except PlanError:
        return None


def assert_between(problem: PlanProblem, decision: Decision, exact: Decision) -> None:
    """Asserts that the plan is no better than the exact plan, and that the exact plan is no better than the bound."""
    assert isinstance(decision, Planned)
    assert isinstance(exact, Planned)
    assert violations(problem, decision.stages, evaluate(problem, decision.stages)) == []
    assert decision.figures == evaluate(problem, decision.stages)
    if isinstance(problem.objective, MinimizeCost):
        usd = exact.figures.usd_per_hour
        assert decision.bound <= usd * (1 + AGREE)
        assert decision.figures.usd_per_hour >= usd * (1 - AGREE)
    else:
        rate = exact.figures.rate_per_s
        assert decision.figures.rate_per_s <= rate * (1 + AGREE)
        assert decision.bound >= rate * (1 - AGREE)


@pytest.mark.parametrize("seeds", [range(FEW), pytest.param(range(FEW, MANY), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("strategy", [each for each in SPACES if each != "pame"])
def test_bounds_hold_and_plans_keep_their_promises_on_small_problems(strategy: Strategy, seeds: range) -> None:
    planned = 0
    for seed in seeds:
        problem, decision, exact = random_problem(seed), at_scale(seed, strategy), solve(random_problem(seed), strategy)
        if isinstance(decision, NoPlan):
            assert isinstance(exact, NoPlan), f"problem {seed} has a plan"
        elif isinstance(decision, Planned):
            assert_between(problem, decision, exact)
            planned += 1
    assert planned > 0


@pytest.mark.parametrize(
    ("num_blocks", "counts"),
    [
        pytest.param(12, {"V100": 16}, id="16 V100"),
        pytest.param(12, {"V100": 6, "T4": 8, "A30": 15}, id="29 of three types", marks=pytest.mark.slow),
        pytest.param(12, {"V100": 50, "T4": 50}, id="100 of two types"),
    ],
)
def test_the_exact_plan_is_between_the_plan_at_scale_and_its_bound(num_blocks: int, counts: dict[str, int]) -> None:
    problem = cluster_problem(num_blocks, counts)
    decision, exact = planned(problem, ALL_AT_SCALE), solve(problem)
    assert not is_too_big(problem, SPACES["best"])
    assert_between(problem, decision, exact)
    assert decision.gap == pytest.approx(1 - decision.figures.rate_per_s / decision.bound)
    assert decision.gap < 0.1


def test_a_rate_above_the_capacity_is_refused_with_the_highest_possible_rate() -> None:
    fastest = planned(cluster_problem(12, {"V100": 16}), ALL_AT_SCALE)
    problem = cluster_problem(12, {"V100": 16}, MinimizeCost(rate_per_s=2 * fastest.bound))
    decision = solve(problem, ALL_AT_SCALE)
    assert isinstance(decision, NoPlan)
    assert decision.binding == "devices"
    assert decision.highest_rate_per_s == pytest.approx(fastest.figures.rate_per_s)
    assert decision.nearest_slo_s is None
    problem = cluster_problem(12, {"V100": 16}, MinimizeCost(rate_per_s=0.999 * fastest.figures.rate_per_s))
    assert isinstance(solve(problem, ALL_AT_SCALE), Planned), "a plan of all devices"


@pytest.mark.parametrize("num_blocks", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_ten_thousand_devices_are_planned_near_the_bound(num_blocks: int) -> None:
    problem = bert_large_problem(num_blocks, BIG_CLUSTER, FAST_LINK)
    assert is_too_big(problem, SPACES["best"])
    decision = planned(problem)
    assert violations(problem, decision.stages, evaluate(problem, decision.stages)) == []
    assert decision.gap <= 0.01


def test_a_strategy_is_no_worse_than_those_that_it_contains_at_scale() -> None:
    problem = bert_large_problem(16, BIG_CLUSTER, SLOW_LINK)
    strategies: tuple[Strategy, ...] = ("stock", "early-exit", "serial")
    stock, early_exit, serial = (planned(problem, each).figures.rate_per_s for each in strategies)
    assert serial >= max(stock, early_exit)
