from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from profiles.records import ExitRecords
from tests.offramp.cli import runs
from tests.offramp.cli.runs import PLAN, Captured, records, written


def refused(captured: Captured, problem: Path, *options: object, arrivals: str = "uniform:100") -> str:
    return runs.refused(captured, "simulate", problem, "--arrivals", arrivals, *options)


def test_a_printed_plan_that_does_not_fit_the_problem_is_refused(problem: Path, plan: Path, capsys: Captured) -> None:
    answer = {"stages": [{"device": "V100", "splits": [{"first": 0, "end": 3, "batch": 4}]}], "rate_per_s": 1.0}
    written(plan, json.dumps(answer))
    said = refused(capsys, problem, "--plan", plan)
    assert said == f"{plan}:1: the last split ends at block 3, the model has 2 blocks"


def test_shares_of_other_values_than_the_recorded_ones_are_refused(
    problem: Path, plan: Path, tmp_path: Path, capsys: Captured
) -> None:
    path = records(tmp_path / "shares.npz", 0.1)
    replace(ExitRecords.load(path), score="share", confidences={0: 0.5}).save(path)
    written(plan, PLAN.replace("{name: entropy, thresholds: 0.4}", "{name: share, thresholds: 0.4, confidences: 0.9}"))
    said = refused(capsys, problem, "--plan", plan, "--records", path)
    assert said == f"the plan's shares at ramp 0 are of values above 0.9, those of {path} of values above 0.5"


def test_thresholds_that_fall_along_an_answer_want_records_of_that(
    problem: Path, plan: Path, tmp_path: Path, capsys: Captured
) -> None:
    path = records(tmp_path / "tokens.npz", 0.1)
    replace(ExitRecords.load(path), score="foreseen", provenance={"decay": 8.0}).save(path)
    policy = "{name: foreseen, thresholds: 0.4, decay: 4.0}"
    written(plan, PLAN.replace("{name: entropy, thresholds: 0.4}", policy))
    said = refused(capsys, problem, "--plan", plan, "--records", path)
    assert said == f"{path} holds scores of decay 8, not of decay 4"
    written(plan, PLAN.replace("{name: entropy, thresholds: 0.4}", "{name: foreseen, thresholds: 0.4}"))
    assert refused(capsys, problem, "--plan", plan, "--records", path).endswith("decay 8, not of no decay")
