"""Problem files whose survival is that of a model's folder: one problem by each of its calibrations."""

from __future__ import annotations

from pathlib import Path

import pytest

from earlyexit.errors import PlanError
from offramp.commands.plan import NoPlanAnswer, PlanAnswer, answer_document, best_answer, serving_plan
from optimizer.planner import solve
from optimizer.problem_file import read_problem, read_problems
from tests.offramp.service.service_folders import write_beside, write_chain, write_model, write_pruned

PROBLEM = """\
blocks: 5
ramps: [0, 1, 2, 3]
networks: [2, 5]
survival: {folder: cascade}
latency:
  cpu:
    batch: [1, 2]
    block_s: [[0.01, 0.02], [0.01, 0.02], [0.1, 0.2], [0.1, 0.2], [0.1, 0.2]]
    ramp_s: [[0.001, 0.002], [0.002, 0.003], [0.003, 0.004], [0.004, 0.005]]
devices: {cpu: {count: 2}}
link: {bandwidth_bytes_per_s: 1.0e9}
bytes_per_sample: 8
slo: {latency_s: 2.0}
objective: {maximize: rate}
"""


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    small, large = (write_model(tmp_path / name, num_blocks=blocks, name=name) for name, blocks in (("s", 2), ("l", 3)))
    write_beside(write_chain(tmp_path / "cascade", small, large), "", dict.fromkeys(range(4), 0.05))
    path = tmp_path / "problem.yaml"
    path.write_text(PROBLEM, encoding="utf-8")
    return path


def test_each_calibration_leaves_its_own_ramps_and_their_seconds(problem: Path) -> None:
    write_beside(problem.parent / "cascade", "", {0: 0.5, 1: 0.5})
    write_beside(problem.parent / "cascade", "reference", {2: 0.05, 3: 0.5})
    own, reference = read_problems(problem)
    assert own.problem.ramps == (0, 1)
    assert own.problem.survival_N == (1.0, 0.5, 0.25, 0.25, 0.25)
    assert own.problem.latency["cpu"].ramp_s_EB.tolist() == [[0.001, 0.002], [0.002, 0.003]]
    assert reference.problem.ramps == (2, 3)
    assert reference.problem.latency["cpu"].ramp_s_EB.tolist() == [[0.003, 0.004], [0.004, 0.005]]
    assert [each.calibration for each in (own, reference)] == [
        problem.parent / "cascade" / name / "calibration.json" for name in ("", "reference")
    ]


def test_the_plan_that_is_worth_most_says_by_which_calibration_it_is(problem: Path) -> None:
    write_beside(problem.parent / "cascade", "reference", {2: 0.5, 3: 0.5})
    files = read_problems(problem)
    file, found = best_answer(files, "best", solve, compared=())
    assert isinstance(found, PlanAnswer)
    assert file is files[1]
    assert answer_document(found)["calibration"] == str(problem.parent / "cascade" / "reference" / "calibration.json")
    plan = serving_plan(file, found.planned)
    assert plan.policy is not None
    assert plan.ramps == (2,)
    other = best_answer(files[:1], "best", solve, compared=())[1]
    assert isinstance(other, PlanAnswer)
    assert other.planned.figures.rate_per_s < found.planned.figures.rate_per_s


def test_pruned_texts_bring_their_own_records(problem: Path) -> None:
    write_pruned(problem.parent / "cascade", end=1, kept=0.5, measuring=1.5)
    own, pruned = read_problems(problem)
    assert (own.prune, pruned.prune) == ({}, {1: 0.6})
    assert pruned.problem.crossing_tokens == (1.0, 0.5)
    assert pruned.alone is not None


def test_of_equal_plans_the_models_own_calibration_counts(problem: Path) -> None:
    write_beside(problem.parent / "cascade", "reference", {2: 0.05, 3: 0.05})
    files = read_problems(problem)
    assert best_answer(files, "best", solve, compared=())[0] is files[0]


def test_without_a_plan_by_any_of_them_the_first_says_why(problem: Path) -> None:
    problem.write_text(PROBLEM.replace("latency_s: 2.0", "latency_s: 0.001"), encoding="utf-8")
    write_beside(problem.parent / "cascade", "reference", {2: 0.5})
    files = read_problems(problem)
    file, found = best_answer(files, "best", solve, compared=())
    assert file is files[0]
    assert isinstance(found, NoPlanAnswer)


@pytest.mark.parametrize(
    ("survival", "words"),
    [
        ("{folder: cascade, thresholds: 0.5}", "survival: the folder has thresholds; leave one of the two out"),
        ("{thresholds: 0.5}", "survival: neither of records and folder are given; one of them is needed"),
        ("{folder: gone}", "gone/exit_records.npz"),
    ],
)
def test_what_a_folder_cannot_say_is_refused_at_its_line(problem: Path, survival: str, words: str) -> None:
    problem.write_text(PROBLEM.replace("{folder: cascade}", survival), encoding="utf-8")
    with pytest.raises(PlanError) as refused:
        read_problems(problem)
    assert str(refused.value).startswith(f"{problem}:4: ")
    assert words in str(refused.value)


def test_where_one_problem_is_asked_for_several_calibrations_are_refused(problem: Path) -> None:
    assert read_problem(problem).problem.ramps == (0, 1, 2, 3)
    write_beside(problem.parent / "cascade", "reference", {2: 0.5})
    with pytest.raises(PlanError, match=r":4: survival.folder has several calibrations, and one is needed here"):
        read_problem(problem)
