from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from earlyexit.network.boundary import AfterAnswer, Split
from offramp.commands.plan import answer, answer_document
from optimizer.cost.evaluate import evaluate
from optimizer.cost.rescore import by_networks, joint_reach, rescore
from optimizer.plans.plan import Stage
from optimizer.problems.problem import MinimizeCost, PlanProblem, Slo
from optimizer.problems.problem_file import ProblemFile, parse_problem
from optimizer.search.decision import Planned
from optimizer.search.planner import solve
from tests.exit_records import exit_records
from tests.optimizer.answers import plan_json
from tests.optimizer.plain_problem import DOCUMENT

HALF_LEAVE_TOGETHER = [1, 1, 1, 1, 0, 0, 0, 0]
HALF_LEAVE_EVENLY = [1, 0, 1, 0, 1, 0, 1, 0]
STEPS = {
    "V100": {"batch": [1, 2, 3, 4], "block_s": [[0.004] * 4, [0.001, 0.001, 0.004, 0.004]], "ramp_s": [[0.001] * 4]}
}
"""Block 1 takes equally long for 3 and for 4 inputs."""


def problem(sure: list[int], **changed: Any) -> PlanProblem:
    objective = {"minimize": "latency", "rate_per_s": 100, "queues": False}
    batches = {"size": 4, "losses": [[0 if leaves else None] for leaves in sure]}
    return parse_problem({**DOCUMENT, "latency": STEPS, "objective": objective, "batches": batches, **changed}).problem


def one_split(after_answer: AfterAnswer = "stop", batch: int = 4) -> tuple[Stage, ...]:
    split = Split(first=0, end=2, batch=batch, ramps=(0,), after_answer=after_answer)
    return (Stage(device="V100", replicas=2, splits=(split,)),)


def test_recorded_batches_that_shrink_equally_take_the_mean_batchs_time() -> None:
    asked = problem(HALF_LEAVE_EVENLY)
    on_records, by_mean = evaluate(asked, one_split(), asked.batches), evaluate(asked, one_split())
    assert on_records.mean_latency_s == pytest.approx(by_mean.mean_latency_s)
    assert on_records.rate_per_s == pytest.approx(2 * 4 / (0.005 + 0.001))
    # By chance, one batch of 16 skips block 1, and the others have 32 / 15 inputs in it.
    assert by_mean.rate_per_s == pytest.approx(2 * 4 / (0.005 + 15 / 16 * (0.001 + 0.003 * 2 / 15)))
    asked = problem([1, 1, 1, 1, 1, 1, 0, 0], survival=[1.0, 0.25])
    splits = (Split(first=0, end=1, batch=4, ramps=(0,)), Split(first=1, end=2, batch=4))
    found = evaluate(asked, (Stage(device="V100", replicas=1, splits=splits),), asked.batches)
    assert found.splits[1].seconds.mean_s == pytest.approx(0.004)


def test_probes_count_as_inputs_that_run_all_blocks() -> None:
    half = parse_problem({**DOCUMENT, "survival": [1.0, 0.5], "probe_share": 0.1}).problem
    more = parse_problem({**DOCUMENT, "survival": [1.0, 0.55]}).problem
    assert evaluate(half, one_split(), lambda _: (1.0, 0.5)) == evaluate(more, one_split())
    assert isinstance(solve(half), Planned)
    assert solve(half) == solve(more)


def test_the_same_mean_of_other_batches_takes_longer() -> None:
    asked = problem(HALF_LEAVE_TOGETHER)
    found = evaluate(asked, one_split(), asked.batches)
    # One batch leaves whole after 5 ms; the other takes 4 ms more for all of its inputs, not 1 ms for half of them.
    assert found.splits[0].seconds.mean_s == pytest.approx(0.005 + 0.004 / 2)
    assert found.mean_latency_s == pytest.approx(4 / 100 / 2 + 0.005 + 0.004 / 2)
    assert evaluate(asked, one_split()).mean_latency_s == pytest.approx(4 / 100 / 2 + 0.005 + 0.001 / 2)
    splits = (Split(first=0, end=1, batch=2, ramps=(0,)), Split(first=1, end=2, batch=4))
    found = evaluate(asked, (Stage(device="V100", replicas=1, splits=splits),), asked.batches)
    assert [each.seconds.mean_s for each in found.splits] == pytest.approx([0.005, 0.004])
    assert found.splits[1].reached_by == 0.5
    found = evaluate(asked, one_split("stay"), asked.batches)
    assert found.splits[0].seconds.mean_s == pytest.approx(0.009)
    assert found.mean_latency_s == pytest.approx(4 / 100 / 2 + 0.005 + 0.004 / 2)


def test_the_best_plan_is_selected_by_recorded_batches_if_the_answer_time_is_minimized() -> None:
    """On the mean batch, shrinking batches of four are best at this rate; some recorded batches hardly shrink."""
    asked = problem(HALF_LEAVE_TOGETHER, devices={"V100": {"count": 1}})
    asked = asked.with_rate(480.0)
    found = answer(ProblemFile(problem=asked), "best")
    assert found.rescoring is not None
    kept = [each.joint.mean_latency_s for each in found.rescoring.candidates if not each.broken]
    assert answer_document(found)["joint"]["mean_latency_s"] == pytest.approx(min(kept))
    assert plan_json(ProblemFile(problem=replace(asked, batches=None)))["joint"] is None


RECORDS = exit_records(
    [[0.1, 0.9], [0.1, 0.9], [0.9, 0.1], [0.9, 0.9]], answers_NE=np.zeros((4, 3), dtype=np.int64), score="entropy"
)
"""Two inputs may leave at ramp 0 but not at ramp 1, one at ramp 1 only, one never."""
THRESHOLDS = {0: 0.4, 1: 0.4}
LATENCY = {"V100": {"batch": [1, 2, 4], "block_s": [[0.001] * 3] * 3, "ramp_s": [[0.0] * 3] * 2}}
THREE_BLOCKS = {"blocks": 3, "ramps": [0, 1], "survival": [1.0, 0.5, 0.25], "latency": LATENCY}
PROBLEM = parse_problem(
    {**DOCUMENT, **THREE_BLOCKS, "bytes_per_sample": 0, "slo": {"latency_s": 1, "slack": 0}}
).problem
LATE = (
    Stage(
        device="V100", replicas=4, splits=(Split(first=0, end=2, batch=4, ramps=(1,)), Split(first=2, end=3, batch=4))
    ),
)
"""Only ramp 1 is active: a quarter continues with nested survival, three quarters according to the records."""
EARLY = (
    Stage(
        device="V100", replicas=4, splits=(Split(first=0, end=1, batch=4, ramps=(0,)), Split(first=1, end=3, batch=4))
    ),
)
"""Only ramp 0 is active: half continue, with nested survival and according to the records."""
REACH = joint_reach(RECORDS, THRESHOLDS)


def planned(problem: PlanProblem = PROBLEM, *candidates: tuple[Stage, ...]) -> Planned:
    figures = evaluate(problem, LATE)
    return Planned(
        strategy="best", stages=LATE, figures=figures, bound=figures.rate_per_s, gap=0.0, candidates=candidates
    )


def test_joint_survival_counts_inputs_that_would_leave_at_an_inactive_ramp() -> None:
    assert tuple(REACH((0, 1))) == (1.0, 0.5, 0.25)
    assert tuple(REACH((1,))) == (1.0, 1.0, 0.75)  # nested survival is 0.25
    assert tuple(REACH(())) == (1.0, 1.0, 1.0)
    problem = replace(PROBLEM, networks=(1, 3))
    reach = by_networks(problem, REACH, lambda active: (1.0, 1.0, 0.1))
    assert list(reach((0, 1))) == [1.0, 0.5, 0.25]
    assert list(reach((1,))) == [1.0, 1.0, 0.1]


def test_the_candidate_with_the_best_joint_figures_is_chosen() -> None:
    [only] = rescore(PROBLEM, planned(), REACH).candidates
    assert only.joint.rate_per_s == pytest.approx(4 * 4 / (0.002 + 0.75 * 0.001))
    assert only.broken == ()
    rescoring = rescore(PROBLEM, planned(PROBLEM, EARLY), REACH)
    nested = [evaluate(PROBLEM, each.stages).rate_per_s for each in rescoring.candidates]
    assert nested == pytest.approx([16 / 0.00225, 16 / 0.002])  # 0.001 + 0.5 * 0.002
    assert rescoring.chosen is rescoring.candidates[1]
    chosen = rescore(PROBLEM, replace(planned(PROBLEM, EARLY), bound=10_000.0), REACH).planned
    assert chosen.stages == EARLY
    assert chosen.figures.rate_per_s == pytest.approx(8000)
    assert chosen.gap == pytest.approx(0.2)


def test_the_shares_of_chains_are_those_of_the_joint_figures() -> None:
    stages = replace(LATE[0], replicas=2), replace(EARLY[0], replicas=2)  # 8 inputs in 2.75 ms and in 2 ms
    rescoring = rescore(PROBLEM, replace(planned(), stages=stages, figures=evaluate(PROBLEM, stages)), REACH)
    assert rescoring.planned.figures.shares == pytest.approx((2 / 4.75, 2.75 / 4.75))
    assert rescoring.candidates[0].joint.shares == rescoring.planned.figures.shares


def test_the_planners_choice_is_kept_unless_a_cheaper_plan_serves_the_rate() -> None:
    own = replace(planned(PROBLEM, LATE), gap=0.01)  # it is its own candidate, too
    rescoring = rescore(PROBLEM, own, REACH)
    assert rescoring.candidates == (rescoring.chosen,)
    assert rescoring.planned is own
    slo_s = evaluate(PROBLEM, LATE, REACH).latency_s
    tight = replace(PROBLEM, slo=Slo(latency_s=slo_s * 0.999, slack=0.0))
    rescoring = rescore(tight, planned(tight), REACH)
    assert rescoring.chosen is None
    assert rescoring.candidates[0].broken[0].startswith("it takes ")
    assert rescoring.planned == planned(tight)
    cheapest = replace(PROBLEM, objective=MinimizeCost(rate_per_s=3800))
    two = (replace(EARLY[0], replicas=2),)  # 2 * 4 / 0.002 = 4000/s with both
    one = (replace(EARLY[0], replicas=1),)
    rescoring = rescore(cheapest, planned(cheapest, two, one), REACH)
    assert rescoring.chosen is rescoring.candidates[1]
    assert rescoring.candidates[2].broken[0] == "it serves 2000/s, and 3800/s are required"
