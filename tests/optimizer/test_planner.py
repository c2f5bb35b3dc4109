"""The planner is exact: on small random problems no plan of a strategy's space is better than its answer."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest

from optimizer.decision import SLO_RESOLUTION, NoPlan, Planned, Strategy
from optimizer.evaluate import Evaluation, evaluate, violations
from optimizer.exact.intervals import ExactSearch
from optimizer.exact.solve import solve_exactly
from optimizer.moves import build_graph
from optimizer.planner import more_devices, solve
from optimizer.problem import Link, MaximizeRate, MinimizeCost, PlanProblem, Slo, Supply
from optimizer.problem_file import parse_problem
from optimizer.scale.solve import solve_at_scale
from profiles.table import LatencyTable
from tests.optimizer.answers import AGREE, Answers, as_good_as_the_twin, chunks, planned, refused, within
from tests.optimizer.brute_force import Twin
from tests.optimizer.plain_problem import DOCUMENT, plain_problem, random_problem

PROBLEMS = 500
FEW: dict[Strategy, int] = {"best": 60, "stock": 24, "early-exit": 24, "e3": 24, "serial": 24}
"""Problems by default; the rest is for `make test-all`."""

each_chunk = chunks(FEW, PROBLEMS)


@cache
def answers(seed: int, strategy: Strategy) -> Answers:
    return Answers.to(random_problem(seed), strategy)


def sought(problem: PlanProblem, figures: Evaluation) -> float:
    """More is better."""
    return -figures.usd_per_hour if isinstance(problem.objective, MinimizeCost) else figures.rate_per_s


@each_chunk
def test_the_planner_is_as_good_as_its_twin_and_proves_it(strategy: Strategy, seeds: range) -> None:
    as_good_as_the_twin({seed: answers(seed, strategy) for seed in seeds}, strategy, sought)


@chunks({each: FEW[each] for each in FEW if each != "best"}, PROBLEMS)
def test_the_best_plan_is_never_below_a_strategy_of_today(strategy: Strategy, seeds: range) -> None:
    compared = 0
    for seed in seeds:
        best, other = (answers(seed, each).decision for each in ("best", strategy))
        if isinstance(other, Planned):
            assert isinstance(best, Planned), f"problem {seed}: {strategy} has a plan, best has none"
            problem, compared = answers(seed, strategy).problem, compared + 1
            reached, below = sought(problem, best.figures), sought(problem, other.figures)
            assert reached >= below - AGREE * abs(below), f"problem {seed}: best {reached}, {strategy} {below}"
    assert compared


@each_chunk
def test_where_there_is_no_plan_the_nearest_promises_are_told(strategy: Strategy, seeds: range) -> None:
    without = [seed for seed in seeds if isinstance(answers(seed, strategy).decision, NoPlan)]
    assert without
    for seed in without:
        problem, decision = answers(seed, strategy).problem, answers(seed, strategy).decision
        assert isinstance(decision, NoPlan)
        slo_s, rate_per_s = nearest(problem, strategy)
        assert within(decision.highest_rate_per_s, rate_per_s, 0.0), f"problem {seed}: {decision}, twin {rate_per_s}"
        assert within(decision.nearest_slo_s, slo_s, SLO_RESOLUTION), f"problem {seed}: {decision}, twin {slo_s}"


def test_e3_keeps_a_batch_that_a_smaller_one_beats_in_one_split() -> None:
    # Of 10 inputs 9 leave after block 0, which is faster at batch 1 (1000/s) than at 4 (4 / 0.005 = 800/s). But then
    # block 1 does 1 / (0.1 * 0.100) = 100/s, against 4 / (0.1 * 0.010) = 4000/s at batch 4, and E3 has one batch.
    table = LatencyTable(
        batches=(1, 4), block_s_NB=np.array([[0.001, 0.005], [0.100, 0.010]]), ramp_s_EB=np.zeros((1, 2))
    )
    problem = plain_problem(survival_N=(1.0, 0.1), latency={"cpu": table}, devices={"cpu": Supply(count=2)})
    assert planned(problem, "e3").figures.rate_per_s == pytest.approx(4 / 0.005)


def test_a_rate_that_is_too_high_names_the_accelerators_that_are_missing() -> None:
    document = {**DOCUMENT, "objective": {"minimize": "cost", "rate_per_s": 30_000}}
    problem = parse_problem(document).problem
    refused(problem)
    # An input takes 0.001 / 4 + 0.5 * 0.001 / 4 seconds: 8 V100 for block 0 and 4 for block 1, of which 4 are there.
    assert more_devices(problem, "best") == ("V100", 8)
    enough = replace(problem, devices={"V100": replace(problem.devices["V100"], count=12)})
    planned(enough)
    hasty = replace(problem, slo=Slo(latency_s=0.001))
    assert more_devices(hasty, "best") is None  # a block takes longer, on any number of V100


def nearest(problem: PlanProblem, strategy: Strategy) -> tuple[float | None, float | None]:
    """The least SLO latency and, where a rate is asked for, the highest rate that have a plan."""
    least_s = Twin(problem).least_latency_s(strategy)
    slo_s = None if least_s is None else least_s / (1 - problem.slo.slack)
    if isinstance(problem.objective, MaximizeRate):
        return slo_s, None
    # Batches fill faster at a higher rate, so a plan's latency is least at the most it can do.
    fastest = Twin(replace(problem, objective=MaximizeRate())).best(strategy)
    return slo_s, None if fastest is None else fastest.figures.rate_per_s


MOST = 40
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
    search = ExactSearch(graph=build_graph(problem()), may_split=True, may_hop=True, most_labels=MOST)
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
    exact, given_up = (
        planned(asked),
        solve(asked, planners=(partial(solve_exactly, most_labels=MOST), solve_at_scale)),
    )
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
