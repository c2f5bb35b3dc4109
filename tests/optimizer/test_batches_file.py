from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimizer.problem_file import parse_problem, problem_document
from tests.exit_records import exit_records, share_card
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


def test_an_input_is_one_number_whose_bits_are_the_ramps() -> None:
    assert parse_problem({**THREE, "survival": [1.0, 0.752, 0.499], "batches": BATCHES}).problem.batches is not None
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
    assert "batches" not in problem_document(parse_problem(THREE).problem)


def test_exit_records_bring_their_batches_along_and_their_own_calibration(tmp_path: Path) -> None:
    scores = [[0.1, 0.9], [0.9, 0.1], [0.1, 0.1], [0.9, 0.9]]
    exit_records(scores, score="entropy").save(tmp_path / "records.npz")
    survival = {"records": "records.npz", "thresholds": 0.4}
    problem = parse_problem({**THREE, "survival": survival}, folder=tmp_path).problem
    assert problem.batches is not None
    assert problem.batches.size == 2  # the largest that is measured
    assert problem.batches.remaining((0, 1)).tolist() == [[1, 0], [1, 1]]
    assert problem_document(parse_problem(problem_document(problem)).problem) == problem_document(problem)
    shares = exit_records(np.zeros((2, 2)), score="share", confidences={0: 0.7, 1: 0.7})
    shares.save(tmp_path / "records.npz")
    survival = {"records": "records.npz", "calibration": "calibration.json"}
    (tmp_path / "calibration.json").write_text(share_card(0.7).to_json(), encoding="utf-8")
    assert parse_problem({**THREE, "survival": survival}, folder=tmp_path).problem.survival_N == (1, 1, 1)
