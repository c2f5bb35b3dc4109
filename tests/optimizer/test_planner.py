"""The planner is exact: on small random problems no plan of a strategy's space is better than its answer."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from optimizer.decision import SLO_RESOLUTION, NoPlan, Planned, Strategy
from optimizer.evaluate import Evaluation
from optimizer.planner import more_devices
from optimizer.problem import MaximizeRate, MinimizeCost, PlanProblem, Slo, Supply
from optimizer.problem_file import parse_problem
from profiles.table import LatencyTable
from tests.optimizer.answers import AGREE, Answers, as_good_as_the_twin, chunks, planned, refused, within
from tests.optimizer.brute_force import Twin
from tests.optimizer.plain_problem import plain_problem
from tests.optimizer.random_problems import random_problem
from tests.optimizer.two_blocks import DOCUMENT

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
