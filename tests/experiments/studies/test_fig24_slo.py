from __future__ import annotations

from dataclasses import replace

import numpy as np

from experiments.studies.fig24_slo import cases, compare, under_slo
from optimizer.decision import Decision, Planned
from optimizer.problem import PlanProblem, Slo
from profiles.table import LatencyTable
from tests.experiments.studies.small_cases import four_blocks, inputs_at


def with_a_batch_of_24() -> PlanProblem:
    """It has hardly more throughput than one of 8 and takes 236 ms instead of 80 ms."""
    block_s_B = np.array([0.005, 0.020, 0.059])
    table = LatencyTable(
        batches=(1, 8, 24), block_s_NB=np.tile(block_s_B, (4, 1)), ramp_s_EB=np.tile(block_s_B / 10, (3, 1))
    )
    problem = four_blocks()
    return replace(problem, latency={"V100": table}, slo=Slo(latency_s=problem.slo.latency_s, slack=0.0))


def test_a_contender_takes_the_batch_limit_that_serves_it_best() -> None:
    found = under_slo(with_a_batch_of_24(), inputs_at(0.4), 0.375, ("stock",))
    tuned, planned = found.tuned["stock"], found.planned["stock"]
    assert [largest_batch(each.decision) for each in (tuned, planned)] == [8, 24]
    assert tuned.rate_per_s is not None
    assert planned.rate_per_s is not None
    assert tuned.rate_per_s > planned.rate_per_s, "who waits for 24 inputs has no time left to queue"


def largest_batch(decision: Decision) -> int:
    assert isinstance(decision, Planned)
    return max(split.batch for stage in decision.stages for split in stage.splits)


def test_a_strict_slo_leaves_less_goodput_than_a_loose_one() -> None:
    result = compare(four_blocks(), inputs_at(0.4), (0.4, 2.0), {}, "quick")
    for name in ("stock", "early-exit", "e3"):
        strict, loose = result.figures["tuned"]["400 ms"][name], result.figures["tuned"]["2000 ms"][name]
        assert strict["goodput_per_s"] <= loose["goodput_per_s"], name
    ours = {each.name: each.ours for each in result.comparisons}
    assert ours["e3 / early-exit, largest"] == result.e3.over_early_exit
    assert ours["e3 / early-exit, SLO 400 ms"] is not None


def test_a_slo_that_no_plan_keeps_is_a_gap() -> None:
    result = compare(four_blocks(), inputs_at(0.4), (0.01,), {}, "quick")
    assert result.e3.over_early_exit is None
    assert result.figures["tuned"]["10 ms"]["stock"] is None


def test_e3s_circumstances_are_one_case() -> None:
    ((problem, inputs),) = cases(four_blocks()).values()
    assert inputs.survival_N[2] == 0.5
    assert problem.latency["V100"].block_s_NB[0, 0] == 0.040
