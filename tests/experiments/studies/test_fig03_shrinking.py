from __future__ import annotations

import numpy as np
import pytest

from experiments.studies.fig03_shrinking import RECORDED, STUDY, compare, mixes, shrinking
from experiments.studies.record import missing_data
from profiles.records import ExitRecords
from profiles.table import LatencyTable

NUM_BLOCKS = 8
# A second for up to two inputs, two for four.
TABLE = LatencyTable(
    batches=(1, 2, 4, 16),
    block_s_NB=np.tile([1.0, 1.0, 2.0, 8.0], (NUM_BLOCKS, 1)),
    ramp_s_EB=np.zeros((NUM_BLOCKS - 1, 4)),
)


def records(num_inputs: int = 8) -> ExitRecords:
    """Input k leaves after block k + 1."""
    scores_NR = np.where(np.arange(NUM_BLOCKS - 1) >= np.arange(num_inputs)[:, None] % NUM_BLOCKS, 0.1, 0.6)
    return ExitRecords.of_answers(
        np.column_stack([np.zeros((num_inputs, NUM_BLOCKS - 1), dtype=np.int64), np.zeros(num_inputs, dtype=np.int64)]),
        score="entropy",
        num_blocks=NUM_BLOCKS,
        ramps=tuple(range(NUM_BLOCKS - 1)),
        sample_ids=tuple(map(str, range(num_inputs))),
        scores_NR=scores_NR.astype(np.float32),
    )


def test_utilisation_is_throughput_over_that_of_a_full_batch() -> None:
    # Of four, two leave after block 4 and one after block 7: per second, then, as many; and at last half as many.
    found = shrinking(np.array([[3, 3, 6, 7]]), TABLE)
    assert found.inside_N == pytest.approx((4, 4, 4, 4, 2, 2, 2, 1))
    assert found.utilisation_N == pytest.approx((1, 1, 1, 1, 1, 1, 1, 0.5))
    assert found.rest == pytest.approx((2 + 1) / (2 + 2)), "of blocks 7 and 8: 3 inputs in 2 s, 2 a second when full"
    assert found.left_share == 0.5


def test_a_batch_that_is_gone_takes_no_time() -> None:
    found = shrinking(np.array([[0, 0, 0, 0], [7, 7, 7, 7]]), TABLE)
    assert found.inside_N == pytest.approx((4, 2, 2, 2, 2, 2, 2, 2))
    assert found.utilisation_N == pytest.approx((1,) * NUM_BLOCKS), "either full or gone"


def test_mixes_have_their_share_of_easy_inputs() -> None:
    found = mixes(records(), np.random.default_rng(0), 4000)
    assert list(found) == ["80:20", "50:50", "20:80", RECORDED]
    easy = {name: float((last_N < NUM_BLOCKS // 2).mean()) for name, last_N in found.items()}
    assert list(easy.values()) == pytest.approx([0.8, 0.5, 0.2, 0.5], abs=0.03)


def test_the_study_compares_mixes_at_two_batch_sizes() -> None:
    result = compare(records(), TABLE, 500)
    assert list(result.figures) == ["8", "16"]
    lost = {each.name: each.ours or 0.0 for each in result.comparisons}
    # Above 2 inputs throughput is 2 per second here, whatever the batch: only what is left of 8 can fall below that.
    assert lost["utilisation lost after ramp 6 (%), 50:50, batch 8"] > 0
    assert lost["inputs that have left by ramp 6 (%), as recorded"] == pytest.approx(75, abs=3)


@pytest.mark.skipif(bool(missing_data(STUDY.needs)), reason="needs the recorded exits of OFFRAMP_DATA")
def test_of_recorded_batches_larger_ones_lose_less() -> None:
    lost = {each.name: each.ours or 0.0 for each in STUDY.run("quick").comparisons}
    of = "utilisation lost after ramp 6 (%), 50:50, batch"
    assert lost[f"{of} 8"] > lost[f"{of} 16"] > 0
