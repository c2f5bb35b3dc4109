"""The cost model on problems small enough to recompute by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from earlyexit.network.boundary import Split
from optimizer.cost.batch_seconds import batch_seconds
from optimizer.cost.evaluate import Evaluation, Load, evaluate, loads, predictions, queue_s, violations
from optimizer.plans.plan import Stage
from optimizer.problems.problem import Link, MinimizeCost, MinimizeLatency, PlanProblem, Slo, Supply, nested_shares
from profiles.table import LatencyTable
from tests.optimizer.plain_problem import plain_problem

# Three blocks. On the fast device a batch of 4 takes twice as long as one of 2, on the slow one (which only knows 4)
# every batch takes the same. Half of the inputs leave at ramp 0, half of the rest at ramp 1.
FAST = LatencyTable(
    batches=(2, 4),
    block_s_NB=np.array([[0.010, 0.020], [0.030, 0.060], [0.010, 0.030]]),
    ramp_s_EB=np.array([[0.001, 0.003], [0.002, 0.004]]),
)
SLOW = LatencyTable(batches=(4,), block_s_NB=np.array([[0.1], [0.2], [0.3]]), ramp_s_EB=np.array([[0.01], [0.02]]))
PROBLEM = plain_problem(
    survival_N=(1.0, 0.5, 0.25),
    latency={"fast": FAST, "slow": SLOW},
    devices={"fast": Supply(count=4, usd_per_hour=3.0), "slow": Supply(count=2, usd_per_hour=0.5)},
    link=Link(bandwidth_bytes_per_s=1e6, delay_s=0.001),
    bytes_per_sample_N=(1000.0, 2000.0, 0.0),
    slo=Slo(latency_s=1.0, slack=0.2),
)


def split(first: int, end: int, *ramps: int, batch: int = 4) -> Split:
    return Split(first=first, end=end, batch=batch, ramps=ramps)


def stage(*splits: Split, device: str = "fast", replicas: int = 1) -> Stage:
    return Stage(device=device, replicas=replicas, splits=splits)


def at_rate(rate_per_s: float) -> PlanProblem:
    return replace(PROBLEM, objective=MinimizeCost(rate_per_s=rate_per_s))


def test_a_ramp_inside_a_split_shrinks_the_batch_of_the_blocks_after_it() -> None:
    figures = evaluate(PROBLEM, (stage(split(0, 3, 0)),))
    # Blocks 1 and 2 run at 4 * 0.5 = 2 inputs; one batch of 16 skips them, the others have 32 / 15 inputs.
    assert list(figures.splits[0].batch_at_block) == [4, 2, 2]
    assert figures.splits[0].seconds.inside_s == pytest.approx(0.020 + 0.003 + 0.030 + 0.010)
    assert figures.splits[0].seconds.mean_s == pytest.approx(0.020 + 0.003 + 0.030 + 15 / 16 * (0.010 + 0.020 / 15))
    assert figures.splits[0].fill == pytest.approx((4 + 2 + 2) / 3 / 4)


def test_a_batch_of_any_size_shrinks_by_the_survival_expected() -> None:
    for each, size, seconds in (
        (split(0, 2, 0), 4, 0.020 + 0.003 + 0.030),
        (split(0, 2, 0), 3, 0.015 + 0.002 + 7 / 8 * 0.030),  # not full
        (split(1, 3, 1), 4, 0.060 + 0.004 + 15 / 16 * (0.010 + 0.020 / 15)),  # the rest of the model
        (split(0, 1), 1, 0.010),  # below the smallest measured batch
    ):
        assert batch_seconds(FAST, (0, 1), each, (1.0, 0.5, 0.25), size).mean_s == pytest.approx(seconds)


def test_survival_follows_from_the_last_active_ramp_or_from_joint_exit_records() -> None:
    # Survival is nested: the inputs that pass ramp 1 alone pass both.
    assert nested_shares(PROBLEM.survival_N, (1,)) == [1.0, 1.0, 0.25]
    assert nested_shares(PROBLEM.survival_N, (0,)) == [1.0, 0.5, 0.5]
    figures = evaluate(PROBLEM, (stage(split(0, 2, 1), split(2, 3)),))
    assert [each.reached_by for each in figures.splits] == [1.0, 0.25]

    def reach(active: Sequence[int]) -> Sequence[float]:
        assert list(active) == [1]
        return (1.0, 1.0, 0.5)

    figures = evaluate(PROBLEM, (stage(split(0, 2, 1), split(2, 3)),), reach)
    assert [each.reached_by for each in figures.splits] == [1.0, 0.5]
    assert figures.stages[0].work_s == pytest.approx(0.084 / 4 + 0.5 * 0.030 / 4)


def test_a_hop_carries_survivors_and_first_splits_fill_over_all_replicas() -> None:
    figures = evaluate(PROBLEM, (stage(split(0, 1, 0), replicas=2), stage(split(1, 2)), stage(split(2, 3))))
    # 4 * 0.5 survivors of 1000 bytes; then 4 inputs of 2000 bytes, none of which left; nothing leaves the last stage.
    assert [each.hop_s for each in figures.stages] == pytest.approx([0.001 + 0.002, 0.001 + 0.008, 0])
    assert [each.hop_rate_per_s for each in figures.stages] == pytest.approx(
        [2 * 4 / 0.003, 4 / (0.5 * 0.009), math.inf]
    )
    # A quarter of 1 MB/s per device where four share a node's card. The other type's nodes have one device each.
    shared = replace(PROBLEM, devices={**PROBLEM.devices, "fast": Supply(count=2, per_node=4)})
    slow = [stage(split(block, block + 1), device="slow") for block in (1, 2)]
    figures = evaluate(shared, [stage(split(0, 1, 0), replicas=2), *slow])
    assert [each.hop_s for each in figures.stages] == pytest.approx([0.001 + 4 * 0.002, 0.001 + 0.008, 0])
    assert figures.stages[0].hop_rate_per_s == pytest.approx(2 * 4 / 0.009)
    stages = (stage(split(0, 1, 0), split(1, 2, 1, batch=2), replicas=3), stage(split(2, 3), replicas=2))
    waits = [each.wait_s for each in evaluate(at_rate(10), stages).splits]
    # 4 inputs at 10/s; 3 replicas wait for 2 each of the 5/s that go on; 4 of the 2.5/s that reach the next stage.
    assert waits == pytest.approx([4 / 10, 3 * 2 / (10 * 0.5), 4 / (10 * 0.25)])


def test_chains_are_equally_busy_unless_the_batches_of_one_would_fill_too_slowly() -> None:
    chains = stage(split(0, 3)), stage(split(0, 3), device="slow")  # 0.11 s and 0.6 s for 4 inputs
    fast_per_s, slow_per_s = 4 / 0.11, 4 / 0.6
    equal = pytest.approx([fast_per_s / (fast_per_s + slow_per_s), slow_per_s / (fast_per_s + slow_per_s)])
    slo = Slo(latency_s=2.0, slack=0.2)
    # Within 1.6 s, 4 inputs must come in 1.49 s and in 1.0 s. Above these rates, both chains have an equal part left.
    fast_least_per_s, slow_least_per_s = 4 / 1.49, 4 / 1.0
    part = (10 - fast_least_per_s - slow_least_per_s) / (fast_per_s + slow_per_s - fast_least_per_s - slow_least_per_s)
    found = evaluate(replace(at_rate(10), slo=slo), chains)
    assert found.shares[0] * 10 == pytest.approx(fast_least_per_s + part * (fast_per_s - fast_least_per_s))
    assert sum(found.shares) == pytest.approx(1)
    assert found.latency_s < 1.6
    for problem in (replace(PROBLEM, slo=slo), replace(at_rate(35), slo=slo), replace(at_rate(6), slo=slo)):
        assert evaluate(problem, chains).shares == equal  # at 6/s, no shares would do


def test_the_figures_of_parallel_chains_follow_from_their_shares() -> None:
    chains = stage(split(0, 3, 0)), stage(split(0, 3), device="slow")
    found = evaluate(at_rate(10), chains, lambda _: (1.0, 1.0, 1.0), shares=(0.75, 0.25))  # no input leaves early
    assert found.rate_per_s == pytest.approx(4 / 0.6 / 0.25)
    assert found.latency_s == pytest.approx(4 / 2.5 + 0.6)
    assert found.mean_latency_s == pytest.approx(0.75 * (2 / 7.5 + 0.113) + 0.25 * (2 / 2.5 + 0.6))
    assert found.ramp_overhead == pytest.approx(0.75 * 0.003 / 0.110)
    assert (found.usd_per_hour, [each.stage_index for each in found.splits]) == (3.5, [0, 1])


def test_the_batches_of_an_unreached_split_never_fill() -> None:
    problem = replace(PROBLEM, survival_N=(1.0, 0.0, 0.0))
    apart = evaluate(problem, (stage(split(0, 1, 0), split(1, 3)),))
    together = evaluate(problem, (stage(split(0, 3, 0)),))
    assert apart.rate_per_s == pytest.approx(4 / 0.023)
    assert apart.latency_s == math.inf
    # In one split with its ramp, batches skip blocks 1 and 2. An input in them takes the time of the smallest batch.
    assert together.latency_s == pytest.approx(0.023 + (0.023 + 0.030 + 0.010))


def staying(stage: Stage) -> Stage:
    return replace(stage, splits=tuple(replace(split, after_answer="stay") for split in stage.splits))


THREE_SPLITS = (stage(split(0, 1, 0), split(1, 2, 1), replicas=2), stage(split(2, 3), device="slow"))


def test_if_inputs_stay_batches_neither_shrink_nor_wait_longer() -> None:
    figures = evaluate(at_rate(40), [staying(each) for each in THREE_SPLITS])
    assert [each.wait_s for each in figures.splits] == pytest.approx([0.1, 0.2, 0.1])
    assert [each.reached_by for each in figures.splits] == [1.0, 1.0, 1.0]
    assert [each.batch_at_block for each in figures.splits] == [(4.0,), (4.0,), (4.0,)]
    hop_s = 0.001 + 4 * 2000 / 1e6
    assert figures.latency_s == pytest.approx(0.1 + 0.023 + 0.2 + 0.064 + hop_s + 0.1 + 0.3)
    assert figures.mean_latency_s == pytest.approx(
        0.1 / 2 + 0.023 + 0.5 * (0.2 / 2 + 0.064) + 0.25 * (hop_s + 0.1 / 2 + 0.3)
    )
    assert figures.stages[0].work_s == pytest.approx((0.023 + 0.064) / 4)


def test_violations_are_the_constraints_that_a_plan_breaks() -> None:
    problem = replace(PROBLEM, objective=MinimizeLatency(queues=False, rate_per_s=10, ramp_budget=0.02))
    assert broken(problem, stage(split(0, 3))) == []
    assert broken(problem, stage(split(0, 3, 1)))[-1] == "ramps take 4.444% of the blocks' time, and 2.000% are allowed"
    sooner = replace(PROBLEM, objective=MinimizeLatency(queues=False, rate_per_s=10))
    figures = evaluate(sooner, (stage(split(0, 3)),))
    always = {"rate_per_s", "latency_s", "usd_per_hour"}
    assert predictions(PROBLEM, figures).keys() == always
    assert predictions(sooner, figures).keys() == always | {"mean_latency_s", "ramp_overhead"}
    assert broken(PROBLEM, stage(split(0, 3), replicas=4)) == []  # all devices are used
    assert broken(replace(at_rate(30), budget_usd_per_hour=3.0), stage(split(0, 3))) == []
    stages = (stage(split(0, 1), replicas=3), stage(split(1, 2), replicas=1), stage(split(2, 3), replicas=1))
    assert broken(PROBLEM, *stages) == ["it needs 5 fast, and 4 are available"]


def broken(problem: PlanProblem, *stages: Stage) -> list[str]:
    return violations(problem, stages, evaluate(problem, stages))


def test_every_violation_is_reported_with_both_numbers() -> None:
    problem = replace(at_rate(50), budget_usd_per_hour=2.5, slo=Slo(latency_s=0.1, slack=0.2))
    # The lone replica does 4 / 0.110 = 36.3636/s; at 50/s its batch would fill in 0.08 s.
    assert broken(problem, stage(split(0, 3))) == [
        "it costs 3.00 USD/h, and the budget is 2.50",
        "it serves 36.3636/s, and 50/s are required",
        "it takes 190 ms, and 80 ms are allowed",
    ]
    problem = replace(PROBLEM, survival_N=(1.0, 0.0, 0.0))
    assert broken(problem, stage(split(0, 1, 0), split(1, 3))) == ["it takes unlimited time, and 800 ms are allowed"]
    # At 50/s the only replica, which does 36.3636/s, is always busy: its queue grows without end.
    problem = replace(PROBLEM, objective=MinimizeCost(rate_per_s=50, in_time=0.99))
    late = "it takes 190 ms and unlimited time in queues, and 800 ms are allowed"
    assert broken(problem, stage(split(0, 3))) == ["it serves 36.3636/s, and 50/s are required", late]


def test_the_longest_queue_counts_in_full_and_the_others_with_their_means() -> None:
    problem = replace(PROBLEM, objective=MinimizeCost(rate_per_s=30, in_time=0.99))
    stages = (stage(split(0, 1, 0), split(1, 2), replicas=2), stage(split(2, 3)))
    # Seconds of device or link per input. Half of the inputs leave at ramp 0.
    first_s, second_s, hop_s, last_s = 0.023 / 4, 0.060 / 4, 0.009 / 4, 0.030 / 4
    expected = (
        Load(30, 2, first_s + second_s / 2, (first_s**2 + (first_s + second_s) ** 2) / 2, 1.0),
        Load(30, 2, hop_s / 2, hop_s**2 / 2, 0.5),
        Load(30, 1, last_s / 2, last_s**2 / 2, 0.5),
    )
    [found] = loads(problem, stages, evaluate(problem, stages))
    assert [tuple(each) for each in found] == [pytest.approx(tuple(each)) for each in expected]
    (_, tail_s), (link_mean_s, _), (mean_s, _) = (each.queue_s(0.01) for each in expected)
    assert queue_s(problem, stages, evaluate(problem, stages)) == pytest.approx(tail_s + link_mean_s + mean_s)
    # Seven half busy replicas: all are busy with a probability of 0.5^3, since sqrt(2 * 8) - 1 = 3.
    assert Load(50, 7, 0.07, 0.0098, 1.0).queue_s(0.01) == pytest.approx((0.125 * 0.02, 0.02 * math.log(12.5)))
    # One of 4 batches takes 11 ms, because both inputs leave at ramp 0. The others take 51 ms.
    alone = (stage(split(0, 3, 0, batch=2)),)
    [[found_alone]] = loads(problem, alone, evaluate(problem, alone))
    assert found_alone.square_s2 == pytest.approx((0.041 / 2) ** 2 + 0.041 * (0.051 - 0.041) / 2)


def test_rounding_differences_are_no_violations() -> None:
    def figures(off: float) -> Evaluation:
        scored = evaluate(problem, stages)
        return replace(
            scored,
            rate_per_s=50 * (1 - off),
            latency_s=problem.slo.limit_s * (1 + off),
            usd_per_hour=3.0 * (1 + off),
        )

    problem, stages = replace(at_rate(50), budget_usd_per_hour=3.0), (stage(split(0, 3)),)
    assert violations(problem, stages, figures(1e-12)) == []
    assert len(violations(problem, stages, figures(1e-6))) == 3
