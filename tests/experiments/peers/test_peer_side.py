from __future__ import annotations

from pathlib import Path

import numpy as np

from experiments.peers.compare import per_input
from experiments.peers.limit import enough
from experiments.peers.plans import Machine
from experiments.peers.sides import settings
from experiments.peers.workloads import Workload
from optimizer.plan import PolicySpec
from profiles.records import ExitRecords


def workload() -> Workload:
    records = ExitRecords.of_answers(
        np.column_stack([np.zeros((1, 1), dtype=np.int64), np.zeros(1, dtype=np.int64)]),
        score="entropy",
        num_blocks=2,
        ramps=(0,),
        sample_ids=("a",),
        scores_NR=np.zeros((1, 1), dtype=np.float32),
    )
    return Workload(
        name="clinc150",
        folder=Path("model"),
        texts=("a",),
        labels=None,
        keys=None,
        policy=PolicySpec(thresholds={0: 0.4}),
        records=records,
    )


def test_a_sweep_tries_batches_a_wait_one_large_process_and_the_padded_modules() -> None:
    tried = settings(workload(), "float32", Machine(workers=2, batch_limit=16), slo_s=0.2, batch=16, port=9000)
    shapes = [(each.workers, each.threads, each.batch, each.wait_s, each.kernel) for each in tried]
    assert shapes == [
        (2, 1, 4, 0.0, "packed"),
        (2, 1, 16, 0.0, "packed"),
        (2, 1, 16, 0.005, "packed"),
        (1, 2, 16, 0.0, "packed"),
        (2, 1, 16, 0.0, "transformers"),
    ]
    assert {(each.slo_s, each.port, each.dtype) for each in tried} == {(0.2, 9000, "float32")}


def test_requests_that_fill_a_batch_alone_leave_one_batch_size_to_try() -> None:
    tried = settings(workload(), "float32", Machine(), slo_s=0.2, batch=1, port=9000)
    assert [each.batch for each in tried] == [1, 1, 1, 1]


def test_processor_time_is_told_per_input_of_what_was_spent_between() -> None:
    assert per_input({"ingress": 1.0}, {"ingress": 3.0, "stages": 4.0}, 2) == {"ingress": 1.0, "stages": 2.0}


def test_a_limit_begins_with_a_few_inputs_then_runs_what_the_time_left_is_enough_for() -> None:
    assert enough(0, 0.0, 8.0, 4500) == 256
    assert enough(256, 2.0, 8.0, 4500) == 768, "128 a second for the 6 seconds left"
    assert enough(256, 2.0, 8.0, 500) == 500, "no more than there are"
    assert enough(1024, 7.9, 8.0, 4500) == 64, "a few at least"
