from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from optimizer.decision import Planned
from optimizer.evaluate import evaluate, violations
from optimizer.exact.intervals import ExactSearch
from optimizer.exact.solve import solve_exactly
from optimizer.moves import build_graph
from optimizer.planner import solve
from optimizer.problem import Link, MaximizeRate, MinimizeCost, PlanProblem, Slo, Supply
from optimizer.scale.solve import solve_at_scale
from profiles.table import LatencyTable
from tests.optimizer.answers import planned, refused
from tests.optimizer.plain_problem import plain_problem

FEW = 40
"""Labels, of the hundreds that the problem below takes."""


def problem() -> PlanProblem:
    """Six blocks on two types of accelerators; a batch of 8 takes twice as long as one of 1."""
    seconds = np.array([[0.001, 0.0012, 0.0015, 0.002]]).repeat(6, axis=0)
    latency = {
        "V100": LatencyTable(batches=(1, 2, 4, 8), block_s_NB=seconds, ramp_s_EB=seconds[:5] / 20),
        "T4": LatencyTable(batches=(1, 2, 4, 8), block_s_NB=seconds * 1.7, ramp_s_EB=seconds[:5] / 12),
    }
    return plain_problem(
        survival_N=(1.0, 0.8, 0.6, 0.5, 0.4, 0.35),
        latency=latency,
        devices={"V100": Supply(count=5, usd_per_hour=3.0), "T4": Supply(count=7, usd_per_hour=1.0)},
        link=Link(bandwidth_bytes_per_s=1.25e9, delay_s=1e-4),
        bytes_per_sample_N=(196608.0,) * 6,
        slo=Slo(latency_s=0.03, slack=0.2),
    )


def test_a_search_with_room_proves_its_plan_and_else_keeps_a_bound() -> None:
    search = ExactSearch(graph=build_graph(problem()), may_split=True, may_hop=True, most_labels=FEW)
    answer = search.highest_rate()
    best = planned(problem())
    assert not answer.proven
    assert answer.bound >= best.figures.rate_per_s
    answer = ExactSearch(graph=build_graph(problem()), may_split=True, may_hop=True).highest_rate()
    assert answer.proven
    assert answer.found is not None
    assert answer.bound == answer.found.figures.rate_per_s


@pytest.mark.parametrize("objective", [MaximizeRate(), MinimizeCost(rate_per_s=4000)], ids=["rate", "cost"])
def test_where_the_exact_search_gives_up_there_is_a_plan_and_a_gap(objective: MaximizeRate | MinimizeCost) -> None:
    asked = replace(problem(), objective=objective)
    exact, given_up = planned(asked), solve(asked, planners=(partial(solve_exactly, most_labels=FEW), solve_at_scale))
    assert isinstance(given_up, Planned)
    assert violations(asked, given_up.stages, evaluate(asked, given_up.stages)) == []
    if isinstance(objective, MinimizeCost):
        assert given_up.bound <= exact.figures.usd_per_hour * (1 + 1e-9)
        assert given_up.figures.usd_per_hour <= given_up.bound * (1 + given_up.gap) * (1 + 1e-9)
    else:
        assert given_up.bound >= exact.figures.rate_per_s * (1 - 1e-9)
        assert given_up.figures.rate_per_s >= given_up.bound * (1 - given_up.gap) * (1 - 1e-9)
    assert 0 <= given_up.gap < 0.5


def test_of_plans_that_cost_the_same_a_quicker_one_is_taken() -> None:
    # 100/s cost one T4 whatever the batch; a plan of full batches would wait 80 ms and more for each.
    asked = replace(problem(), objective=MinimizeCost(rate_per_s=100), slo=Slo(latency_s=10.0))
    decision = planned(asked)
    assert decision.figures.usd_per_hour == 1.0
    assert decision.figures.latency_s < 0.05
    # No input leaves, so no plan does more than stock; plans of several splits would only wait longer.
    asked = replace(problem(), survival_N=(1.0,) * 6, devices={"V100": Supply(count=5, usd_per_hour=3.0)})
    best, stock = planned(asked), planned(asked, "stock")
    assert best.figures.rate_per_s == pytest.approx(stock.figures.rate_per_s)
    assert best.figures.latency_s < 2 * stock.figures.latency_s


def test_a_budget_below_the_cheapest_device_binds_and_latency_where_batches_take_days() -> None:
    decision = refused(replace(problem(), budget_usd_per_hour=0.5))
    assert (decision.binding, decision.nearest_slo_s) == ("budget", None)
    # The first input of a batch of 1 waits 1e5 s for it at 1e-5/s, in a single split; the slack of 20 % adds a quarter.
    decision = refused(replace(problem(), objective=MinimizeCost(rate_per_s=1e-5)))
    assert decision.binding == "latency"
    assert decision.nearest_slo_s == pytest.approx(1e5 / 0.8, rel=1e-3)


def test_blocks_that_take_hardly_any_time_are_not_cut_by_a_slow_link() -> None:
    quick = {
        name: LatencyTable(batches=table.batches, block_s_NB=table.block_s_NB * 1e-6, ramp_s_EB=table.ramp_s_EB * 0)
        for name, table in problem().latency.items()
    }
    link = Link(bandwidth_bytes_per_s=1.0)
    decision = planned(replace(problem(), latency=quick, link=link))
    assert len(decision.stages) == 1, "a hop of 196608 s would bound the rate"
    assert decision.figures.rate_per_s > 1e6
