from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from earlyexit.network.checkpoint import random_model
from earlyexit.network.store import save_model
from earlyexit.tasks.label import LabelTask
from experiments.peers.sides import settings
from experiments.peers.turns import check_answers, per_input
from experiments.peers.workloads import Workload
from offramp.demo.plans import Processors
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


def written(path: Path, *answers: tuple[int, str, int]) -> Path:
    rows = [{"input": index, "label": label, "exit": exit_block} for index, label, exit_block in answers]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_an_answer_is_as_recorded_where_label_and_exit_are(workload: Workload, tmp_path: Path) -> None:
    answers = written(tmp_path / "answers.jsonl", (0, "yes", 0), (1, "no", 1), (2, "yes", 0), (3, "yes", 0))
    checked = check_answers(workload, [0, 1, 2, 0], answers)
    assert checked == {"num_inputs": 4, "accuracy": None, "as_recorded": 3 / 4}


def test_accuracy_is_the_share_of_true_labels(workload: Workload, tmp_path: Path) -> None:
    labelled = replace(workload, keys=None, labels=("yes", "yes", "no"))
    answers = written(tmp_path / "answers.jsonl", (0, "yes", 0), (1, "yes", 1))
    assert check_answers(labelled, [0, 2], answers) == {"num_inputs": 2, "accuracy": 1 / 2, "as_recorded": None}


def test_texts_are_written_with_their_keys_and_asked_for_alone_or_together(workload: Workload, tmp_path: Path) -> None:
    lines = workload.write([1, 0], tmp_path / "inputs.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"text": "second", "id": "b"}, {"text": "first", "id": "a"}]
    assert [json.loads(body) for body in workload.bodies([1, 0], 1)] == [{"inputs": "second"}, {"inputs": "first"}]
    assert [json.loads(body) for body in workload.bodies([1, 0], 2)] == [{"inputs": ["second", "first"]}]


def test_the_same_seed_draws_the_same_texts(workload: Workload) -> None:
    drawn = workload.draw(10, seed=3)
    assert drawn == workload.draw(10, seed=3)
    assert len(drawn) == 10
    assert set(drawn) <= {0, 1, 2}


def test_a_sweep_tries_batches_a_wait_one_large_process_and_backends(workload: Workload) -> None:
    tried = settings(workload, "float32", Processors(workers=2, batch_limit=16), slo_s=0.2, batch=16, port=9000)
    shapes = [(each.workers, each.threads, each.batch, each.wait_s, each.kernel) for each in tried]
    assert shapes == [
        (2, 1, 4, 0.0, "packed"),
        (2, 1, 16, 0.0, "packed"),
        (2, 1, 16, 0.005, "packed"),
        (1, 2, 16, 0.0, "packed"),
        (2, 1, 16, 0.0, "onnx"),
    ]
    assert {(each.slo_s, each.port, each.dtype) for each in tried} == {(0.2, 9000, "float32")}


def test_requests_that_fill_a_batch_alone_leave_one_batch_size_to_try(workload: Workload) -> None:
    tried = settings(workload, "bfloat16", Processors(), slo_s=0.2, batch=1, port=9000)
    assert [(each.batch, each.kernel) for each in tried] == [(1, "packed")] * 3


def test_processor_time_is_told_per_input_of_what_was_spent_between() -> None:
    assert per_input({"ingress": 1.0}, {"ingress": 3.0, "stages": 4.0}, 2) == {"ingress": 1.0, "stages": 2.0}
