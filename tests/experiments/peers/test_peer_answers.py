from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from earlyexit.checkpoint import random_model
from earlyexit.store import save_model
from earlyexit.tasks.label import LabelTask
from experiments.peers.answers import check_answers
from experiments.peers.workloads import Workload
from optimizer.plan import PolicySpec
from profiles.records import ExitRecords

SIZES = {
    "vocab_size": 10,
    "hidden_size": 8,
    "num_blocks": 2,
    "num_heads": 1,
    "intermediate_size": 8,
    "max_length": 8,
}


@pytest.fixture
def workload(tmp_path: Path) -> Workload:
    """Three texts; the one ramp lets the first out as a `yes`, the others reach the end as `no` and `yes`."""
    save_model(random_model(SIZES, task=LabelTask(("no", "yes"))), tmp_path)
    records = ExitRecords.of_answers(
        np.column_stack([np.array([[1], [1], [1]]), np.array([1, 0, 1])]),
        score="entropy",
        num_blocks=2,
        ramps=(0,),
        sample_ids=("a", "b", "c"),
        scores_NR=np.array([[0.1], [0.6], [0.6]], dtype=np.float32),
    )
    return Workload(
        name="bert-base",
        folder=tmp_path,
        texts=("first", "second", "third"),
        labels=None,
        keys=records.sample_ids,
        policy=PolicySpec(name="recorded", thresholds={0: 0.4}, records="nowhere"),
        records=records,
    )


def written(path: Path, *answers: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    return path


def prediction(label: str, exit_block: int) -> dict[str, Any]:
    return {"label": label, "score": 0.9, "exit": exit_block}


def test_an_answer_is_as_recorded_where_label_and_exit_are(workload: Workload, tmp_path: Path) -> None:
    answers = written(
        tmp_path / "answers.jsonl",
        {"body": 0, "predictions": [prediction("yes", 0), prediction("no", 1)]},
        {"body": 1, "predictions": [prediction("yes", 0), prediction("yes", 0)]},
    )
    checked = check_answers(workload, [(0, 1), (2, 0)], answers)
    assert checked.num_inputs == 4
    assert checked.as_recorded == 3 / 4
    assert checked.accuracy is None


def test_accuracy_is_the_share_of_true_labels_and_needs_no_exits(workload: Workload, tmp_path: Path) -> None:
    labelled = replace(workload, keys=None, labels=("yes", "yes", "no"))
    answers = written(
        tmp_path / "answers.jsonl",
        {"body": 0, "predictions": [{"label": "yes", "score": 0.9}]},
        {"body": 1, "predictions": [{"label": "yes", "score": 0.9}]},
    )
    checked = check_answers(labelled, [(0,), (2,)], answers)
    assert checked.accuracy == 1 / 2
    assert checked.as_recorded is None


def test_a_single_text_is_sent_alone_and_several_as_a_list_with_their_ids(workload: Workload) -> None:
    assert json.loads(workload.body((1,))) == {"inputs": "second", "ids": ["b"]}
    assert json.loads(workload.body((2, 0))) == {"inputs": ["third", "first"], "ids": ["c", "a"]}


def test_the_same_seed_draws_the_same_requests(workload: Workload) -> None:
    drawn = workload.draw(2, num_requests=5, seed=3)
    assert drawn == workload.draw(2, num_requests=5, seed=3)
    assert [len(rows) for rows in drawn] == [2] * 5
    assert {row for rows in drawn for row in rows} <= {0, 1, 2}
