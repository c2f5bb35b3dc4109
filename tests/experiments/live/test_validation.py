from __future__ import annotations

import math

import numpy as np
import pytest

from earlyexit.network.boundary import Split
from experiments.live.validation import Driven, compare, is_right, possible_answers, simulated_s
from offramp.client.protocol import Prediction
from offramp.load.generator import RequestRecord
from optimizer.plans.plan import Plan, PolicySpec, Stage
from optimizer.problems.problem import Link, PlanProblem, Slo, Supply
from profiles.records import ExitRecords
from profiles.table import LatencyTable
from tests.exit_records import exit_records
from tests.optimizer.plain_problem import plain_problem

DEVICE = "emulated:V100"
EASY, HARD = ["easy"] * 8, ["hard"] * 8
"""An easy input leaves after block 0 if its ramp is active, a hard one at no ramp."""
POLICY = PolicySpec(name="recorded", thresholds={0: 0.4}, records="records.npz")


def two_inputs() -> ExitRecords:
    answers_NE = np.array([[1, 1], [1, 0]])
    return exit_records([[0.1], [0.6]], answers_NE=answers_NE, score="entropy", sample_ids=("easy", "hard"))


def problem(slo_s: float) -> PlanProblem:
    """Returns a problem with two blocks of 1 s at any batch, and a ramp that takes no time."""
    table = LatencyTable(batches=(1, 8), block_s_NB=np.ones((2, 2)), ramp_s_EB=np.zeros((1, 2)))
    return plain_problem(
        survival_N=(1.0, 0.5),
        latency={DEVICE: table},
        devices={DEVICE: Supply(count=2)},
        link=Link(bandwidth_bytes_per_s=1e15, delay_s=0.25),
        slo=Slo(latency_s=slo_s),
    )


def stage(first: int, end: int, *ramps: int) -> Stage:
    return Stage(device=DEVICE, replicas=1, splits=(Split(first=first, end=end, batch=8, ramps=ramps),))


WHOLE = Plan(stages=(stage(0, 2),))
"""The model without exits on one accelerator."""
PIPELINE = Plan(stages=(stage(0, 1, 0), stage(1, 2)), policy=POLICY)
"""A stage per block."""


def driven(sample_ids: list[list[str]], scheduled_s: list[float], took_s: list[float]) -> Driven:
    """Returns a live run in which the whole model answered every request."""
    label_of = {"easy": "positive", "hard": "negative"}
    records = tuple(
        RequestRecord(
            input_indices=tuple(range(8 * k, 8 * k + 8)),
            scheduled_s=at_s,
            sent_s=at_s,
            done_s=at_s + each_s,
            num_attempts=1,
            predictions=tuple(Prediction(label=label_of[key], exit=1, request_id="") for key in keys),
        )
        for k, (keys, at_s, each_s) in enumerate(zip(sample_ids, scheduled_s, took_s, strict=True))
    )
    return Driven(seconds=20.0, keys=tuple(key for each in sample_ids for key in each), records=records, machine=0.3)


def test_a_simulated_request_is_answered_with_its_last_input_or_fails_at_its_deadline() -> None:
    found_s = simulated_s(
        problem(10.0), PIPELINE, two_inputs(), driven([[*EASY[:7], "hard"], EASY], [0.0, 5.0], [2.0, 1.0])
    )
    assert found_s.tolist() == pytest.approx([2.25, 1.0]), "the hard input hops to the second stage"
    found_s = simulated_s(problem(3.0), WHOLE, two_inputs(), driven([HARD, HARD], [0.0, 0.5], [2.0, 3.5]))
    assert found_s[0] == pytest.approx(2.0)
    assert math.isnan(found_s[1]), "it would be answered after 3.5 s"


def test_a_repeated_run_matches_in_ratios_and_in_the_answers_of_any_chain() -> None:
    found = compare(problem(4.0), WHOLE, two_inputs(), driven([HARD, EASY], [12.0, 12.5], [2.0, 3.5]))
    assert found["ratios"] == pytest.approx({"goodput_per_s": 1.0, "p50_s": 1.0, "p99_s": 1.0})
    assert found["wrong"] == 0
    sample_ids, records = [HARD, EASY], driven([HARD, EASY], [0.0, 0.0], [1.0, 1.0]).records
    both = Plan(stages=(stage(0, 2, 0), stage(0, 2)), shares=(0.5, 0.5), policy=POLICY)
    for plan, right in ((PIPELINE, [True, False]), (both, [True, True])):
        answers_of = possible_answers(two_inputs(), plan)
        assert [is_right(*each, answers_of) for each in zip(sample_ids, records, strict=True)] == right
