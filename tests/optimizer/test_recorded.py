from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from earlyexit.network.boundary import AfterAnswer, Split
from offramp.commands.plan import PlanAnswer, answer, answer_document
from optimizer.evaluate import evaluate
from optimizer.plan import Stage
from optimizer.planner import solve
from optimizer.problem import PlanProblem
from optimizer.problem_file import ProblemFile, parse_problem
from optimizer.recorded import evaluate_on
from tests.optimizer.answers import told
from tests.optimizer.two_blocks import DOCUMENT

HALF_LEAVE_TOGETHER = [1, 1, 1, 1, 0, 0, 0, 0]
HALF_LEAVE_EVENLY = [1, 0, 1, 0, 1, 0, 1, 0]
STEPS = {
    "V100": {"batch": [1, 2, 3, 4], "block_s": [[0.004] * 4, [0.001, 0.001, 0.004, 0.004]], "ramp_s": [[0.001] * 4]}
}
"""Block 1 takes as long for 3 inputs as for 4."""


def problem(sure: list[int], **changed: Any) -> PlanProblem:
    document = {**DOCUMENT, "latency": STEPS, "objective": {"minimize": "latency", "rate_per_s": 100}, **changed}
    batches = {"size": 4, "sure": sure, "lost": [0] * len(sure)}
    return parse_problem({**document, "batches": batches}).problem


def one_split(after_answer: AfterAnswer = "stop", batch: int = 4) -> tuple[Stage, ...]:
    split = Split(first=0, end=2, batch=batch, ramps=(0,), after_answer=after_answer)
    return (Stage(device="V100", replicas=2, splits=(split,)),)


def test_batches_that_shrink_alike_or_that_too_few_come_to_take_what_the_mean_takes() -> None:
    asked = problem(HALF_LEAVE_EVENLY)
    on_records, by_mean = evaluate_on(asked, one_split(), _batches(asked)), evaluate(asked, one_split())
    assert on_records.mean_latency_s == pytest.approx(by_mean.mean_latency_s)
    assert on_records.rate_per_s == pytest.approx(by_mean.rate_per_s)
    asked = problem([1, 1, 1, 1, 1, 1, 0, 0], survival=[1.0, 0.25])
    splits = (Split(first=0, end=1, batch=4, ramps=(0,)), Split(first=1, end=2, batch=4))
    found = evaluate_on(asked, (Stage(device="V100", replicas=1, splits=splits),), _batches(asked))
    assert found.splits[1].seconds == pytest.approx(0.004)


def test_the_same_mean_of_other_batches_takes_longer() -> None:
    asked = problem(HALF_LEAVE_TOGETHER)
    found = evaluate_on(asked, one_split(), _batches(asked))
    # One batch leaves whole after 5 ms; the other takes 4 ms more for all of its inputs, not 1 ms for half of them.
    assert found.splits[0].seconds == pytest.approx(0.005 + 0.004 / 2)
    assert found.mean_latency_s == pytest.approx(4 / 100 / 2 + 0.005 + 0.004 / 2)
    assert evaluate(asked, one_split()).mean_latency_s == pytest.approx(4 / 100 / 2 + 0.005 + 0.001 / 2)
    splits = (Split(first=0, end=1, batch=2, ramps=(0,)), Split(first=1, end=2, batch=4))
    found = evaluate_on(asked, (Stage(device="V100", replicas=1, splits=splits),), _batches(asked))
    assert [each.seconds for each in found.splits] == pytest.approx([0.005, 0.004])
    assert found.splits[1].reached_by == 0.5
    found = evaluate_on(asked, one_split("stay"), _batches(asked))
    assert found.splits[0].seconds == pytest.approx(0.009)
    assert found.mean_latency_s == pytest.approx(4 / 100 / 2 + 0.005 + 0.004 / 2)


def test_best_is_chosen_by_recorded_batches_where_early_answers_are_sought() -> None:
    """By the mean, batches of four that shrink are best at this rate; by the records, some of them hardly do."""
    asked = problem(HALF_LEAVE_TOGETHER, devices={"V100": {"count": 1}})
    asked = asked.with_rate(480.0)
    found = answer(ProblemFile(problem=asked), "best", solve)
    assert isinstance(found, PlanAnswer)
    assert found.rescoring is not None
    kept = [each.joint.mean_latency_s for each in found.rescoring.candidates if not each.broken]
    assert answer_document(found)["joint"]["mean_latency_s"] == pytest.approx(min(kept))
    assert told(ProblemFile(problem=replace(asked, batches=None)))["joint"] is None


def _batches(asked: PlanProblem) -> Any:
    assert asked.batches is not None
    return asked.batches
