from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from optimizer.decision import NoPlan, Planned, gap_between
from optimizer.evaluate import sought, violations
from optimizer.planner import solve
from optimizer.problem import Link, MaximizeRate, MinimizeCost, PlanProblem, Slo, Supply
from optimizer.search.chains import Searched, searches_of
from optimizer.space import SPACES
from profiles.table import LatencyTable
from tests.optimizer.random_problems import random_problem


def problem() -> PlanProblem:
    """Six blocks on two types of accelerators; a batch of 8 takes twice as long as one of 1."""
    seconds = np.array([[0.001, 0.0012, 0.0015, 0.002]]).repeat(6, axis=0)
    latency = {
        "V100": LatencyTable(batches=(1, 2, 4, 8), block_s_NB=seconds, ramp_s_EB=seconds[:5] / 20),
        "T4": LatencyTable(batches=(1, 2, 4, 8), block_s_NB=seconds * 1.7, ramp_s_EB=seconds[:5] / 12),
    }
    return PlanProblem(
        num_blocks=6,
        ramps=(0, 1, 2, 3, 4),
        survival_N=(1.0, 0.8, 0.6, 0.5, 0.4, 0.35),
        latency=latency,
        devices={"V100": Supply(count=5, usd_per_hour=3.0), "T4": Supply(count=7, usd_per_hour=1.0)},
        link=Link(bandwidth_bytes_per_s=1.25e9, delay_s=1e-4),
        bytes_per_sample_N=(196608.0,) * 6,
        slo=Slo(latency_s=0.03, slack=0.2),
        objective=MaximizeRate(),
    )


def searched(asked: PlanProblem, **effort: object) -> Searched:
    """What one search finds that may do less than it would."""
    [search] = searches_of(asked, SPACES["best"])
    for name, value in effort.items():
        setattr(search, name, value)
    return search.best(0.0 if search.goal == "rate" else math.inf)


EFFORTS = [
    pytest.param({"few_moves": 0}, id="not every chain at once"),
    pytest.param({"few_moves": 0, "widths": (1,)}, id="one label of a kind"),
    pytest.param({"most_splits": 0}, id="few splits"),
    pytest.param({"most_splits": 0, "widths": (1,)}, id="few splits, one label of a kind"),
]


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("objective", [MaximizeRate(), MinimizeCost(rate_per_s=4000)], ids=["rate", "cost"])
def test_with_less_effort_there_is_still_a_plan_and_a_true_bound(
    objective: MaximizeRate | MinimizeCost, effort: dict[str, object]
) -> None:
    asked = replace(problem(), objective=objective)
    best, answer = solve(asked), searched(asked, **effort)
    assert isinstance(best, Planned)
    assert best.gap == 0
    assert answer.found
    assert answer.bound is not None
    found, value = sought(asked, answer.found[0].figures), sought(asked, best.figures)
    assert violations(asked, answer.found[0].chain, answer.found[0].figures) == []
    if isinstance(objective, MinimizeCost):
        assert answer.bound <= value * (1 + 1e-9) <= found * (1 + 2e-9)
    else:
        assert answer.bound >= value * (1 - 1e-9) >= found * (1 - 2e-9)
    assert gap_between(found, answer.bound) < 0.5


@pytest.mark.parametrize("seed", range(0, 60, 2))
def test_bounds_hold_on_small_problems_whatever_the_effort(seed: int) -> None:
    asked = random_problem(seed)
    best = solve(asked)
    value = sought(asked, best.figures) if isinstance(best, Planned) else None
    for effort in ({"few_moves": 0}, {"few_moves": 0, "widths": (1,)}, {"most_splits": 0}):
        if not list(searches_of(asked, SPACES["best"])):
            assert value is None
            continue
        answer = searched(asked, **effort)
        assert value is not None or not answer.found
        if value is None:
            continue
        assert answer.bound is not None, effort
        is_cost = isinstance(asked.objective, MinimizeCost)
        assert answer.bound <= value * (1 + 1e-6) if is_cost else answer.bound >= value * (1 - 1e-6), effort
        for each in answer.found:
            assert violations(asked, each.chain, each.figures) == []


def test_of_plans_that_cost_the_same_a_quicker_one_is_taken() -> None:
    # 100/s cost one T4 whatever the batch; a plan of full batches would wait 80 ms and more for each.
    asked = replace(problem(), objective=MinimizeCost(rate_per_s=100), slo=Slo(latency_s=10.0))
    decision = solve(asked)
    assert isinstance(decision, Planned)
    assert decision.figures.usd_per_hour == 1.0
    assert decision.figures.latency_s < 0.05


def test_a_budget_below_the_cheapest_device_is_what_binds() -> None:
    decision = solve(replace(problem(), budget_usd_per_hour=0.5))
    assert isinstance(decision, NoPlan)
    assert (decision.binding, decision.nearest_slo_s) == ("budget", None)


def test_a_rate_so_low_that_batches_take_days_is_bound_by_latency() -> None:
    # The first input of a batch of 1 waits 1e5 s for it at 1e-5/s, in a single split; the slack of 20 % adds a quarter.
    decision = solve(replace(problem(), objective=MinimizeCost(rate_per_s=1e-5)))
    assert isinstance(decision, NoPlan)
    assert decision.binding == "latency"
    assert decision.nearest_slo_s == pytest.approx(1e5 / 0.8, rel=1e-3)


def test_of_plans_as_fast_and_as_cheap_best_is_not_much_slower_than_stock() -> None:
    # Nobody leaves, so no plan does more than stock; plans of several splits would only wait longer.
    asked = replace(problem(), survival_N=(1.0,) * 6, devices={"V100": Supply(count=5, usd_per_hour=3.0)})
    best, stock = solve(asked), solve(asked, "stock")
    assert isinstance(best, Planned)
    assert isinstance(stock, Planned)
    assert best.figures.rate_per_s == pytest.approx(stock.figures.rate_per_s)
    assert best.figures.latency_s < 2 * stock.figures.latency_s


def test_blocks_that_take_hardly_any_time_are_not_cut_by_a_slow_link() -> None:
    quick = {
        name: LatencyTable(batches=table.batches, block_s_NB=table.block_s_NB * 1e-6, ramp_s_EB=table.ramp_s_EB * 0)
        for name, table in problem().latency.items()
    }
    link = Link(bandwidth_bytes_per_s=1.0)
    decision = solve(replace(problem(), latency=quick, link=link))
    assert isinstance(decision, Planned)
    assert len(decision.stages) == 1, "a hop of 196608 s would bound the rate"
    assert decision.figures.rate_per_s > 1e6
