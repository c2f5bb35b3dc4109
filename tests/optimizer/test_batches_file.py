from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from earlyexit.errors import DataError, PlanError
from optimizer.calibration_file import CalibrationCard
from optimizer.problem_file import parse_problem, problem_document, read_problem
from profiles.records import ExitRecords
from tests.optimizer.two_blocks import DOCUMENT

LATENCY = {"V100": {"batch": [1, 2], "block_s": [[0.001] * 2] * 3, "ramp_s": [[0.0] * 2] * 2}}
THREE: dict[str, Any] = {**DOCUMENT, "blocks": 3, "ramps": [0, 1], "survival": [1.0, 0.5, 0.25], "latency": LATENCY}
"""Three blocks, two ramps."""


@pytest.mark.parametrize(
    "batches",
    [
        {"size": 2, "sure": [3, 0, 2], "lost": [1, 0, 2]},
        {"size": 3, "sure": [3, 0, 2], "losses": [[0.5, 0.0], [], [1.0]]},
    ],
    ids=["lost or not", "losses"],
)
def test_what_is_written_is_read_back(batches: dict[str, Any]) -> None:
    survival = [1, 2 / 3, 1 / 3]
    document = problem_document(parse_problem({**THREE, "survival": survival, "batches": batches}).problem)
    assert document["batches"] == batches
    assert problem_document(parse_problem(document).problem) == document


BATCHES = {"size": 2, "sure": [3, 0, 2, 0], "lost": [0] * 4}
"""One of four leaves after block 0, another after block 1."""


@pytest.mark.parametrize(
    ("survival", "told"),
    [
        ([1.0, 0.2, 0.2], "batches: 0.75 of their inputs reach block 1; survival says 0.2"),
        ([1.0, 0.75, 0.6], "batches: 0.5 of their inputs reach block 2; survival says 0.6"),
    ],
)
def test_batches_that_survival_contradicts_are_refused(survival: list[float], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        parse_problem({**THREE, "survival": survival, "batches": BATCHES})


def test_survival_may_be_rounded() -> None:
    assert parse_problem({**THREE, "survival": [1.0, 0.752, 0.499], "batches": BATCHES}).problem.batches is not None


def test_an_input_is_one_number_whose_bits_are_the_ramps() -> None:
    batches = parse_problem(
        {
            **THREE,
            "survival": [1, 0.75, 0.25],
            "batches": {"size": 2, "sure": [3, 0, 2, 2], "lost": [1, 0, 2, 0]},
        }
    ).problem.batches
    assert batches is not None
    assert batches.remaining((0, 1)).tolist() == [[1, 1], [2, 0]]
    assert batches.losses_NR.tolist() == [[1, 0], [0, 0], [0, 1], [0, 0]]


def test_a_problem_without_batches_is_written_without_a_word_of_them() -> None:
    assert "batches" not in problem_document(parse_problem(THREE).problem)


def test_exit_records_bring_their_batches_along(tmp_path: Path) -> None:
    ExitRecords(
        score="entropy",
        num_blocks=3,
        ramps=(0, 1),
        sample_ids=("a", "b", "c", "d"),
        scores_NR=np.array([[0.1, 0.9], [0.9, 0.1], [0.1, 0.1], [0.9, 0.9]], dtype=np.float32),
        losses_NR=np.zeros((4, 2)),
    ).save(tmp_path / "records.npz")
    survival = {"records": "records.npz", "thresholds": 0.4}
    problem = parse_problem({**THREE, "survival": survival}, folder=tmp_path).problem
    with pytest.raises(PlanError, match="batches are those of survival's exit records; leave one of the two out"):
        parse_problem({**THREE, "survival": survival, "batches": BATCHES}, folder=tmp_path)
    assert problem.batches is not None
    assert problem.batches.size == 2  # the largest that is measured
    assert problem.batches.remaining((0, 1)).tolist() == [[1, 0], [1, 1]]
    assert problem_document(parse_problem(problem_document(problem)).problem) == problem_document(problem)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ({"size": 2, "sure": [4, 0], "lost": [0, 0]}, "batches.sure.0 is 4; with 2 ramps at most 3"),
        ({"size": 2, "sure": [1, 0], "lost": [2, 0]}, "recorded batches hold losses of ramps at which no input leaves"),
        ({"size": 2, "sure": [1, 0], "lost": [0]}, "batches: 1 inputs have losses, 2 are recorded"),
        ({"size": 2, "sure": [1, 0]}, "batches: neither of lost and losses are given; one of them is needed"),
        ({"size": 1, "sure": [1], "losses": [[0.1, 0.2]]}, "batches: input 0 has 2 losses; 1 ramps let it leave"),
        ({"size": 1, "sure": [1], "losses": [[1.5]]}, "batches: losses must be numbers from 0 to 1"),
        ({"size": 3, "sure": [1, 0], "lost": [0, 0]}, "2 recorded inputs make no batch of 3; allowed are 1 to 2"),
        ({"size": 1, "sure": [1], "lost": [0], "seen": 3}, "batches.seen: unknown field"),
    ],
)
def test_batches_that_do_not_fit_are_refused_at_their_line(
    batches: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "problem.yaml"
    before = yaml.safe_dump(THREE, sort_keys=False)
    path.write_text(before + yaml.safe_dump({"batches": batches}, default_flow_style=None, width=500), encoding="utf-8")
    with pytest.raises(PlanError) as caught:
        read_problem(path)
    assert message in str(caught.value)
    line = int(str(caught.value).removeprefix(f"{path}:").split(":")[0])
    assert line > before.count("\n")


def test_a_calibration_goes_with_records_of_its_own_confidences(tmp_path: Path) -> None:
    ExitRecords(
        score="share",
        num_blocks=3,
        ramps=(0, 1),
        sample_ids=("a", "b"),
        scores_NR=np.zeros((2, 2), dtype=np.float32),
        losses_NR=np.zeros((2, 2)),
        confidences={0: 0.7, 1: 0.7},
    ).save(tmp_path / "records.npz")
    survival = {"records": "records.npz", "calibration": "calibration.json"}
    for confidence in (0.7, 0.95):
        card = CalibrationCard(
            policy="share",
            thresholds={0: 0.5, 1: 0.5},
            confidences={0: 0.7, 1: confidence},
            budget=0.05,
            confidence=0.9,
            tested={},
            provenance={},
        )
        (tmp_path / "calibration.json").write_text(card.to_json(), encoding="utf-8")
        if confidence == 0.7:
            assert parse_problem({**THREE, "survival": survival}, folder=tmp_path).problem.survival_N == (1, 1, 1)
            continue
        with pytest.raises(PlanError, match=r"is of confidence 0\.95 at ramp 1, the records are of 0\.7; take the"):
            parse_problem({**THREE, "survival": survival}, folder=tmp_path)


def test_records_of_other_confidences_are_not_joined() -> None:
    parts = [
        ExitRecords(
            score="share",
            num_blocks=3,
            ramps=(0,),
            sample_ids=("a",),
            scores_NR=np.zeros((1, 1), dtype=np.float32),
            losses_NR=np.zeros((1, 1)),
            confidences={0: confidence},
        )
        for confidence in (0.7, 0.95)
    ]
    with pytest.raises(DataError, match=r"exit records of confidences \{0: 0\.7\} and \{0: 0\.95\} do not go together"):
        ExitRecords.join(parts)
