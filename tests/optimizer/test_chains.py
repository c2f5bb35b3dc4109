"""Plans of chains of networks, beside every plan there is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from earlyexit.network.boundary import Split
from optimizer.decision import NoPlan, Planned, Strategy
from optimizer.evaluate import evaluate, sought, violations
from optimizer.networks import Part
from optimizer.plan import Stage
from optimizer.planner import solve
from optimizer.problem import Link, PlanProblem, Slo, Supply
from optimizer.tokens import with_budgets
from profiles.lengths import Lengths
from profiles.table import LatencyTable
from tests.optimizer.answers import planned
from tests.optimizer.brute_force import Twin
from tests.optimizer.plain_problem import plain_problem
from tests.optimizer.random_chains import random_chain


def some(few: int, many: int) -> pytest.MarkDecorator:
    """The first seeds, and for `make test-all` all."""
    rest = pytest.param(range(few, many), id="many", marks=pytest.mark.slow)
    return pytest.mark.parametrize("seeds", [pytest.param(range(few), id="few"), rest])


@some(15, 500)
@pytest.mark.parametrize("strategy", ["best", "serial", "e3", "stock"])
def test_the_best_plan_of_a_chain_is_the_twins(seeds: range, strategy: Strategy) -> None:
    for seed in seeds:
        problem = random_chain(seed)
        known, found = Twin(problem).best(strategy), solve(problem, strategy)
        assert isinstance(found, NoPlan) == (known is None), seed
        if known is None:
            continue
        assert isinstance(found, Planned)
        value = sought(problem, found.figures)
        assert value == pytest.approx(sought(problem, known.figures), rel=1e-9), seed
        assert found.gap == 0, seed
        assert violations(problem, found.stages, evaluate(problem, found.stages)) == [], seed


def two_networks(**changes: object) -> PlanProblem:
    """A block of 4 ms before one of 20 ms, batches of 4, half of the inputs leave between; a hop takes 1 ms."""
    facts = {
        "survival_N": (1.0, 0.5),
        "latency": {"cpu": LatencyTable.of_rows((4,), [[0.004], [0.020]], [[0.0]])},
        "devices": {"cpu": Supply(count=2, usd_per_hour=3.0)},
        "link": Link(bandwidth_bytes_per_s=1e9, delay_s=0.001),
        "slo": Slo(latency_s=1.0, slack=0.0),
        "networks": (1, 2),
        "crossing_s": 0.002,
    }
    return plain_problem(**facts | changes)


SMALL, LARGE = Split(first=0, end=1, batch=4, ramps=(0,)), Split(first=1, end=2, batch=4)


def test_recorded_survival_of_a_set_of_networks_is_taken_where_it_is_known() -> None:
    problem = two_networks(
        num_blocks=3,
        ramps=(0, 1),
        survival_N=(1.0, 0.5, 0.4),
        networks=(1, 2, 3),
        bytes_per_sample_N=(0.0,) * 3,
        latency={"cpu": LatencyTable(batches=(4,), block_s_NB=np.ones((3, 1)), ramp_s_EB=np.zeros((2, 1)))},
        survival_of={(1, 2): (1.0, 1.0, 0.7)},
    )
    assert Part(whole=problem, used=(1, 2)).problem.survival_N == (1.0, 0.7)
    assert Part(whole=problem, used=(0, 2)).problem.survival_N == (1.0, 0.5)
    assert Part(whole=problem, used=(0, 1, 2)).problem.survival_N == (1.0, 0.5, 0.4)
    assert Part(whole=problem, used=(2,)).problem.networks == ()


def test_of_equal_plans_the_one_of_fewer_networks_is_taken() -> None:
    # Half of the work is saved by the small network, which takes as much: 10 + 0.5 * 20 ms.
    table = LatencyTable(batches=(4,), block_s_NB=np.array([[0.010], [0.020]]), ramp_s_EB=np.array([[0.0]]))
    found = planned(two_networks(latency={"cpu": table}))
    assert [split.first for stage in found.stages for split in stage.splits] == [1]


def test_with_lengths_a_networks_budget_counts_its_own_tokens() -> None:
    table = LatencyTable(
        batches=(2, 4),
        block_s_NB=np.array([[0.002, 0.004], [0.010, 0.020]]),
        ramp_s_EB=np.array([[0.0, 0.0]]),
        length=10,
    )
    problem = two_networks(
        latency={"cpu": table}, lengths=Lengths.of([10]), network_tokens=(1.0, 1.0), crossing_tokens=(1.0, 0.5)
    )
    small, large = replace(SMALL, tokens=40), replace(LARGE, tokens=20)
    behind = evaluate(problem, [Stage(device="cpu", replicas=2, splits=(small, large))])
    # 4 inputs, with half of the words left: a batch takes what 2 whole ones take.
    assert [split.seconds for split in behind.splits] == pytest.approx([0.004, 0.010])
    assert behind.rate_per_s == pytest.approx(2 * 4 / (0.004 + 0.5 * 0.010))
    alone = evaluate(problem, [Stage(device="cpu", replicas=2, splits=(replace(LARGE, tokens=40),))])
    assert alone.rate_per_s == pytest.approx(2 * 4 / 0.020)
    in_tokens = [Stage(device="cpu", replicas=2, splits=(forty(SMALL), forty(LARGE)))]
    [planned] = with_budgets(Part(whole=problem, used=(0, 1)).problem, in_tokens)
    assert [split.tokens for split in planned.splits] == [40, 20]


def forty(split: Split) -> Split:
    """As a plan in tokens has it."""
    return replace(split, batch=40)
