from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from numpy.random import default_rng

from earlyexit.network.boundary import Split
from optimizer.decision import STRATEGIES, Strategy
from optimizer.evaluate import evaluate, violations
from optimizer.plan import Stage
from optimizer.problem import Link, MaximizeRate, MinimizeCost, PlanProblem, Slo, Supply, nested_reach
from profiles.table import LatencyTable
from tests.optimizer.brute_force import Twin, reached_by
from tests.optimizer.layouts import Layout, layouts, plan_of
from tests.optimizer.random_problems import random_problem

SPLIT_AFTER_THE_RAMP = (Split(first=0, end=1, batch=4, ramps=(0,)), Split(first=1, end=2, batch=4))

TINY = [seed for seed in range(500, 700) if random_problem(seed).num_blocks <= 2]


def two_blocks(*, count: int, slo_s: float) -> PlanProblem:
    """10 ms a block and 2 ms the ramp whatever the batch, which is 4; half of the inputs leave; hops are free."""
    return PlanProblem(
        num_blocks=2,
        ramps=(0,),
        survival_N=(1.0, 0.5),
        latency={
            "cpu": LatencyTable(batches=(4,), block_s_NB=np.array([[0.010], [0.010]]), ramp_s_EB=np.array([[0.002]]))
        },
        devices={"cpu": Supply(count=count, usd_per_hour=3.0)},
        link=Link(bandwidth_bytes_per_s=1e9),
        bytes_per_sample_N=(0.0, 0.0),
        slo=Slo(latency_s=slo_s, slack=0.0),
        objective=MaximizeRate(),
    )


def four_blocks() -> PlanProblem:
    """Three devices, two batch sizes."""
    return replace(
        two_blocks(count=3, slo_s=1.0),
        num_blocks=4,
        ramps=(0, 1, 2),
        survival_N=(1.0, 0.5, 0.4, 0.3),
        bytes_per_sample_N=(0.0,) * 4,
        latency={"cpu": LatencyTable(batches=(2, 4), block_s_NB=np.ones((4, 2)), ramp_s_EB=np.ones((3, 2)))},
    )


def plans(problem: PlanProblem, strategy: Strategy) -> list[tuple[Stage, ...]]:
    twin = Twin(problem)
    return [
        plan_of(layout, batch_S, replicas_G)
        for layout in layouts(problem, strategy)
        for scores in [twin.scores(layout)]
        for batch_S in scores.batch_PS
        for replicas_G in scores.replicas_QG
    ]


@pytest.mark.parametrize(
    ("strategy", "rate_per_s"),
    [
        pytest.param("stock", 4 / 0.020, id="stock"),
        pytest.param("early-exit", 4 / 0.022, id="a smaller batch is no faster here"),
        pytest.param("serial", 4 / (0.012 + 0.5 * 0.010), id="every second batch goes on"),
        pytest.param("best", 4 / (0.012 + 0.5 * 0.010), id="best"),
    ],
)
def test_the_twin_finds_the_highest_rate_of_one_device(strategy: Strategy, rate_per_s: float) -> None:
    found = Twin(two_blocks(count=1, slo_s=0.100)).best(strategy)
    assert found is not None
    assert found.figures.rate_per_s == pytest.approx(rate_per_s, rel=1e-12)


def test_the_twin_keeps_the_slo() -> None:
    # Survivors wait for a full batch: 4 / 235.3 + 0.012 + 4 / (235.3 * 0.5) + 0.010 = 0.073 s, against
    # 4 / 200 + 0.020 = 0.040 s without exits.
    cut, whole = (Twin(two_blocks(count=1, slo_s=slo_s)).best("best") for slo_s in (0.074, 0.072))
    assert cut is not None
    assert whole is not None
    assert cut.stages == (Stage(device="cpu", replicas=1, splits=SPLIT_AFTER_THE_RAMP),)
    assert whole.figures.rate_per_s == pytest.approx(4 / 0.020)
    assert Twin(two_blocks(count=1, slo_s=0.039)).best("best") is None
    assert Twin(two_blocks(count=1, slo_s=0.039)).least_latency_s("best") == pytest.approx(0.040)


def test_with_one_split_per_stage_the_slowest_stage_decides() -> None:
    # Of 2 devices E3 makes two whole replicas: 2 * 4 / 0.022 = 363.6/s against 4 / 0.012 = 333.3/s cut after the ramp.
    # Of 3, it cuts: two devices for the first stage, 2 * 4 / 0.012 = 666.7/s, one for the second, 4 / 0.005 = 800/s.
    two, three = (Twin(two_blocks(count=count, slo_s=0.100)).best("e3") for count in (2, 3))
    assert two is not None
    assert three is not None
    assert two.figures.rate_per_s == pytest.approx(2 * 4 / 0.022)
    assert three.figures.rate_per_s == pytest.approx(2 * 4 / 0.012)
    assert [stage.replicas for stage in three.stages] == [2, 1]


@pytest.mark.parametrize(
    ("rate_per_s", "usd_per_hour"),
    [
        pytest.param(190.0, 3.0, id="one device without exits"),
        pytest.param(230.0, 3.0, id="one device cut after the ramp"),
        pytest.param(240.0, 6.0, id="two devices"),
        pytest.param(480.0, None, id="too much for two devices"),
    ],
)
def test_the_twin_finds_the_least_cost_of_a_rate(rate_per_s: float, usd_per_hour: float | None) -> None:
    problem = replace(two_blocks(count=2, slo_s=0.100), objective=MinimizeCost(rate_per_s=rate_per_s))
    found = Twin(problem).best("best")
    assert (None if found is None else found.figures.usd_per_hour) == usd_per_hour


@pytest.mark.parametrize(
    ("strategy", "num_plans"),
    [
        # With 2 devices of one type, a stage has 1 or 2 replicas and two stages have 1 each.
        pytest.param("best", (2 * 2 + 4 * 2 + 4 * 1) * 2, id="best: 2 or 4 choices of batches, the ramp on or off"),
        pytest.param("stock", 2 * 2, id="stock: batch and replicas"),
        pytest.param("early-exit", 2 * 2, id="early-exit: batch and replicas"),
        pytest.param("e3", 2 * 2 + 2, id="e3: one stage, or two of the same batch"),
        pytest.param("serial", (2 * 2 + 4 * 2) * 2, id="serial: one stage of one or two splits"),
    ],
)
def test_every_plan_of_a_strategy_is_scored_once(strategy: Strategy, num_plans: int) -> None:
    table = LatencyTable(batches=(2, 4), block_s_NB=np.ones((2, 2)), ramp_s_EB=np.ones((1, 2)))
    found = plans(replace(two_blocks(count=2, slo_s=1.0), latency={"cpu": table}), strategy)
    assert len(found) == len(set(found)) == num_plans


def test_the_space_of_four_blocks_is_whole() -> None:
    # c splits: C(3, c-1) cuts and 2**c batches; g stages of them: C(c-1, g-1) groupings; 3 devices: C(3, g) choices of
    # replicas; 3 ramps: 2**3. In all 8 * sum over c of C(3, c-1) * 2**c * C(c+2, 2), by Vandermonde's identity.
    problem = four_blocks()
    num_plans = sum(scores.rate_per_s_PQ.size for scores in map(Twin(problem).scores, layouts(problem, "best")))
    assert num_plans == 8 * (1 * 2 * 3 + 3 * 4 * 6 + 3 * 8 * 10 + 1 * 16 * 15)


def some(problems: list[int], few: int) -> pytest.MarkDecorator:
    """The first problems, and for `make test-all` the others."""
    rest = pytest.param(problems[few:], id="many", marks=pytest.mark.slow)
    return pytest.mark.parametrize("seeds", [pytest.param(problems[:few], id="few"), rest])


@some(list(range(60)), 15)
def test_the_twin_scores_as_the_cost_model_does(seeds: list[int]) -> None:
    for seed in seeds:
        problem, rng = random_problem(seed), default_rng(seed)
        twin, spaces = Twin(problem), list(layouts(problem, "best"))
        chosen = [spaces[index] for index in rng.permutation(len(spaces))[:30]]
        scored = [(layout, scores) for layout in chosen for scores in [twin.scores(layout)] if len(scores.replicas_QG)]
        assert scored or not spaces, seed
        for layout, scores in scored:
            p, q = rng.integers(len(scores.batch_PS)), rng.integers(len(scores.replicas_QG))
            figures = evaluate(problem, plan_of(layout, scores.batch_PS[p], scores.replicas_QG[q]))
            assert scores.rate_per_s_PQ[p, q] == pytest.approx(figures.rate_per_s, rel=1e-12), seed
            assert scores.latency_s_PQ[p, q] == pytest.approx(figures.latency_s, rel=1e-12), seed
            assert scores.usd_per_hour_Q[q] == pytest.approx(figures.usd_per_hour, rel=1e-12), seed


@some(TINY, 20)
def test_the_twin_agrees_with_scoring_plan_by_plan(seeds: list[int]) -> None:
    for seed, strategy in product(seeds, STRATEGIES):
        problem = random_problem(seed)
        scored = [(stages, evaluate(problem, stages)) for stages in plans(problem, strategy)]
        kept = [figures for stages, figures in scored if not violations(problem, stages, figures)]
        found = Twin(problem).best(strategy)
        assert (found is None) == (not kept), seed
        if found is not None and isinstance(problem.objective, MinimizeCost):
            assert found.figures.usd_per_hour == min(figures.usd_per_hour for figures in kept), seed
        elif found is not None:
            best = max(figures.rate_per_s for figures in kept)
            assert found.figures.rate_per_s == pytest.approx(best, rel=1e-12), seed


def test_survival_counts_from_the_last_active_ramp() -> None:
    problem = four_blocks()
    for active in ((), (0,), (1,), (0, 2), (0, 1, 2)):
        assert reached_by(problem, active)[:4] == list(nested_reach(problem)(active))
    assert reached_by(problem, (1,)) == [1.0, 1.0, 0.4, 0.4, 0.4]


def test_a_layout_knows_the_device_of_every_split() -> None:
    layout = Layout(stages=(((0,), (1, 2)), ((3,),)), devices=("V100", "T4"), ramps=(), constant_batch=False)
    assert layout.splits == (((0,), "V100"), ((1, 2), "V100"), ((3,), "T4"))
