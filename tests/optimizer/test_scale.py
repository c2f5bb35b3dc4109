"""Plans at scale: never better than the bound, never against a promise, and near the exact planner's."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from earlyexit.errors import PlanError
from optimizer.decision import Decision, NoPlan, Planned, Strategy
from optimizer.evaluate import evaluate, violations
from optimizer.planner import SPACES, solve
from optimizer.problem import Link, MaximizeRate, MinimizeCost, Objective, PlanProblem, Slo, Supply
from optimizer.scale.solve import is_too_big, solve_at_scale
from profiles.catalogue import published_profile
from profiles.table import LatencyTable
from tests.optimizer.random_problems import random_problem

PROBLEMS = 60
# Sums in another order.
AGREE = 1e-6
LENGTH = 128
# Made up: what clouds ask for an hour, roughly.
USD_PER_HOUR = {"V100": 2.93, "T4": 0.53, "A100": 3.67, "A30": 1.2, "L4": 0.8, "L40S": 1.86}
TEN_THOUSAND = {"V100": 1500, "T4": 3500, "A100": 1000, "A30": 1500, "L4": 1500, "L40S": 1000}


def cluster_problem(num_blocks: int, counts: dict[str, int], objective: Objective | None = None) -> PlanProblem:
    """Blocks of BERT-large at published speeds; from 1 to a quarter of the inputs are left, most leave early."""
    latency = {}
    for device in counts:
        table = published_profile("bert-large", device).tables[LENGTH]
        latency[device] = LatencyTable(
            batches=table.batches,
            block_s_NB=np.tile(table.block_s_NB[0], (num_blocks, 1)),
            ramp_s_EB=np.tile(table.ramp_s_EB[0], (num_blocks - 1, 1)),
        )
    return PlanProblem(
        num_blocks=num_blocks,
        ramps=tuple(range(num_blocks - 1)),
        survival_N=tuple(1 - 0.75 * (block / (num_blocks - 1)) ** 0.6 for block in range(num_blocks)),
        latency=latency,
        devices={name: Supply(count=count, usd_per_hour=USD_PER_HOUR[name]) for name, count in counts.items()},
        link=Link(bandwidth_bytes_per_s=1.25e9, delay_s=1e-4),
        bytes_per_sample_N=(LENGTH * 1024 * 2.0,) * num_blocks,
        slo=Slo(latency_s=0.1, slack=0.2),
        objective=objective or MaximizeRate(),
    )


@cache
def at_scale(seed: int, strategy: Strategy) -> Decision | None:
    """None where it says honestly that it found no plan."""
    try:
        return solve_at_scale(random_problem(seed), SPACES[strategy], strategy)
    except PlanError:
        return None


def assert_between(problem: PlanProblem, decision: Decision, exact: Decision) -> None:
    """The plan is no better than the exact one, and that is no better than the bound."""
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


@pytest.mark.parametrize("strategy", SPACES)
def test_bounds_hold_and_plans_keep_their_promises_on_small_problems(strategy: Strategy) -> None:
    planned = 0
    for seed in range(PROBLEMS if strategy == "best" else PROBLEMS // 4):
        problem, decision, exact = random_problem(seed), at_scale(seed, strategy), solve(random_problem(seed), strategy)
        if isinstance(decision, NoPlan):
            assert isinstance(exact, NoPlan), f"problem {seed} has a plan"
        elif isinstance(decision, Planned):
            assert_between(problem, decision, exact)
            planned += 1
    assert planned > 0


@pytest.mark.parametrize(
    ("num_blocks", "counts"),
    [(12, {"V100": 16}), (12, {"V100": 6, "T4": 8, "A30": 15}), (12, {"V100": 50, "T4": 50})],
    ids=["16 V100", "29 of three types", "100 of two types"],
)
def test_the_exact_plan_is_between_the_plan_at_scale_and_its_bound(num_blocks: int, counts: dict[str, int]) -> None:
    problem = cluster_problem(num_blocks, counts)
    decision, exact = solve_at_scale(problem, SPACES["best"], "best"), solve(problem)
    assert not is_too_big(problem, SPACES["best"])
    assert_between(problem, decision, exact)
    assert isinstance(decision, Planned)
    assert decision.gap == pytest.approx(1 - decision.figures.rate_per_s / decision.bound)
    assert decision.gap < 0.1


def test_more_than_all_devices_can_do_is_refused_with_the_rate_that_they_can() -> None:
    fastest = solve_at_scale(cluster_problem(12, {"V100": 16}), SPACES["best"], "best")
    assert isinstance(fastest, Planned)
    problem = cluster_problem(12, {"V100": 16}, MinimizeCost(rate_per_s=2 * fastest.bound))
    decision = solve_at_scale(problem, SPACES["best"], "best")
    assert isinstance(decision, NoPlan)
    assert decision.binding == "devices"
    assert decision.highest_rate_per_s == pytest.approx(fastest.figures.rate_per_s)
    assert decision.nearest_slo_s is None


def test_ten_thousand_devices_are_planned_near_the_bound() -> None:
    link = Link(bandwidth_bytes_per_s=12.5e9, delay_s=5e-5)
    problem = replace(cluster_problem(64, TEN_THOUSAND), link=link)
    assert is_too_big(problem, SPACES["best"])
    decision = solve(problem)
    assert isinstance(decision, Planned)
    assert violations(problem, decision.stages, evaluate(problem, decision.stages)) == []
    assert decision.gap <= 0.01


def test_at_scale_a_strategy_is_no_worse_than_those_that_it_contains() -> None:
    problem = cluster_problem(64, TEN_THOUSAND)
    rates = {}
    strategies: tuple[Strategy, ...] = ("stock", "early-exit", "serial")
    for strategy in strategies:
        decision = solve(problem, strategy)
        assert isinstance(decision, Planned)
        rates[strategy] = decision.figures.rate_per_s
    assert rates["serial"] >= max(rates["stock"], rates["early-exit"])
