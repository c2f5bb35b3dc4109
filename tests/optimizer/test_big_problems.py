"""Plans of big clusters: never against a promise, and near their bound."""

from __future__ import annotations

from dataclasses import replace

import pytest

from optimizer.decision import NoPlan, Planned, Strategy
from optimizer.evaluate import evaluate, violations
from optimizer.planner import solve
from optimizer.problem import MinimizeCost, Objective, PlanProblem
from tests.optimizer.big_cluster import BIG_CLUSTER, FAST_LINK, SLOW_LINK, bert_large_problem


def cluster_problem(num_blocks: int, counts: dict[str, int], objective: Objective | None = None) -> PlanProblem:
    """So many accelerators of each type, at the prices of the big cluster."""
    devices = {name: replace(BIG_CLUSTER[name], count=count) for name, count in counts.items()}
    return bert_large_problem(num_blocks, devices, SLOW_LINK, objective)


def test_more_than_all_devices_can_do_is_refused_with_the_rate_that_they_can() -> None:
    fastest = solve(cluster_problem(12, {"V100": 16}))
    assert isinstance(fastest, Planned)
    problem = cluster_problem(12, {"V100": 16}, MinimizeCost(rate_per_s=2 * fastest.bound))
    decision = solve(problem)
    assert isinstance(decision, NoPlan)
    assert decision.binding == "devices"
    assert decision.highest_rate_per_s == pytest.approx(fastest.figures.rate_per_s)
    assert decision.nearest_slo_s is None


@pytest.mark.parametrize("num_blocks", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_ten_thousand_devices_are_planned_near_the_bound(num_blocks: int) -> None:
    problem = bert_large_problem(num_blocks, BIG_CLUSTER, FAST_LINK)
    decision = solve(problem)
    assert isinstance(decision, Planned)
    assert violations(problem, decision.stages, evaluate(problem, decision.stages)) == []
    assert decision.gap <= 0.01


def test_at_scale_a_strategy_is_no_worse_than_those_that_it_contains() -> None:
    problem = bert_large_problem(16, BIG_CLUSTER, SLOW_LINK)
    rates = {}
    strategies: tuple[Strategy, ...] = ("stock", "early-exit", "serial")
    for strategy in strategies:
        decision = solve(problem, strategy)
        assert isinstance(decision, Planned)
        rates[strategy] = decision.figures.rate_per_s
    assert rates["serial"] >= max(rates["stock"], rates["early-exit"])
