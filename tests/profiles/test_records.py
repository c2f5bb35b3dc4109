from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from earlyexit.errors import DataError
from profiles.records import ExitRecords, IntArray, RecordedBatches, batch_counts
from profiles.records_table import read_records
from profiles.scores import Score
from tests.exit_records import exit_records
from tests.profiles import windows_of

RECORDS = replace(windows_of.RECORDS, provenance={"model": "m", "seed": 3})


def broken(whole: bytes, seed: int) -> bytes:
    """Returns the bytes truncated, or with some bytes changed anywhere or only in the second half."""
    rng = np.random.default_rng(seed)
    changed = bytearray(whole)
    if seed % 3 == 0:
        return whole[: rng.integers(len(whole))]
    start = 0 if seed % 3 == 1 else len(whole) // 2
    for place in rng.integers(start, len(whole), rng.integers(1, 20)):
        changed[place] = rng.integers(256)
    return bytes(changed)


def test_an_input_leaves_at_the_first_ramp_that_is_sure() -> None:
    outcome = RECORDS.outcome({1: 0.75, 3: 0.8})
    # a and c leave after block 1, b after block 3, d after the last.
    assert outcome.exits_N.tolist() == [1, 3, 1, 5]
    np.testing.assert_array_equal(outcome.answers_N, [0, 1, 0, 2])
    assert outcome.losses_N.tolist() == [0, 0, 1, 0]  # c: 0, but the full model answers 2
    assert outcome.exit_counts == {1: 2, 3: 1, 5: 1}
    assert outcome.mean_blocks == (2 + 4 + 2 + 6) / 4
    assert outcome.survival == (1.0, 1.0, 0.5, 0.5, 0.25, 0.25)
    assert (outcome.losses_N.sum(), outcome.agreement) == (1, 0.75)
    assert (outcome.accuracy, outcome.full_accuracy) == (0.75, 0.5)
    # Of 100 tokens 60 and 40 reach blocks 2 and 4.
    assert outcome.survival_by(np.array([10, 20, 30, 40])) == (1.0, 1.0, 0.6, 0.6, 0.4, 0.4)


@pytest.mark.parametrize(
    ("thresholds", "exits"),
    [
        pytest.param({}, [5, 5, 5, 5], id="no ramp is active"),
        pytest.param({3: 0.6}, [3, 3, 3, 5], id="only the second"),
        pytest.param({1: 0.9}, [1, 5, 5, 5], id="exactly met"),
        pytest.param({1: 0.0, 3: 0.0}, [1, 1, 1, 1], id="all leave"),
    ],
)
def test_only_the_named_ramps_are_active(thresholds: dict[int, float], exits: list[int]) -> None:
    assert RECORDS.outcome(thresholds).exits_N.tolist() == exits


def test_small_entropies_are_sure_ones() -> None:
    records = replace(RECORDS, score="entropy")
    assert records.outcome({1: 0.5, 3: 0.6}).exits_N.tolist() == [5, 1, 3, 1]
    assert records.outcome({}).survival == (1.0,) * 6


@pytest.mark.parametrize(("score", "endless"), [("confidence", np.inf), ("entropy", -np.inf)])
def test_inputs_with_infinite_scores_do_not_leave_at_inactive_ramps(score: Score, endless: float) -> None:
    records = replace(RECORDS, score=score, scores_NR=np.full((4, 2), endless, dtype=np.float32))
    assert records.outcome({}).exits_N.tolist() == [5, 5, 5, 5]
    assert records.outcome({3: 1e300}).exits_N.tolist() == [3, 3, 3, 3], "beyond the range of float32"


def test_a_subset_has_the_same_rows_in_all_arrays() -> None:
    part = RECORDS.subset(np.array([3, 1]))
    assert part.sample_ids == ("d", "b")
    assert part.answers().tolist() == [[1, 1, 2], [0, 1, 1]]
    assert part.losses_NR.tolist() == [[1, 1], [1, 0]]
    np.testing.assert_array_equal(part.true_losses_NE, [[0, 0, 1], [1, 0, 0]])
    assert part.outcome({3: 0.8}).exits_N.tolist() == [5, 3]


def assert_equal(found: ExitRecords, expected: ExitRecords) -> None:
    assert (found.score, found.num_blocks, found.ramps) == (expected.score, expected.num_blocks, expected.ramps)
    assert found.sample_ids == expected.sample_ids
    assert found.provenance == expected.provenance
    assert found.zero_one == expected.zero_one
    for name in ("scores_NR", "losses_NR", "answers_NE", "true_losses_NE", "times_s_N"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("name", ["r.npz", "records"], ids=["with its ending", "without"])
def test_saved_records_are_loaded_equal(tmp_path: Path, name: str) -> None:
    RECORDS.save(tmp_path / name)
    assert_equal(ExitRecords.load(tmp_path / name), RECORDS)


MAPS_NE = np.array([[[[0, 0], [0, 0]], [[0, 1], [0, 0]], [[1, 1], [0, 0]]]])


def wrong_pixels(early: np.ndarray[Any, Any], full: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.asarray((early != full).mean((1, 2)))


def test_answers_of_any_shape_become_losses_in_between(tmp_path: Path) -> None:
    # One input of 2 x 2 pixels: the ramps differ from the full model in two and in one of them.
    facts: dict[str, Any] = {"truth_N": MAPS_NE[:, 1], "loss": wrong_pixels, "zero_one": False}
    records = exit_records([[0.3, 0.6]], answers_NE=MAPS_NE, num_blocks=6, ramps=(1, 3), **facts)
    assert records.losses_NR.tolist() == [[0.5, 0.25]]
    outcome = records.outcome({1: 0.3, 3: 0.6})
    assert (outcome.agreement, outcome.accuracy, outcome.full_accuracy) == (0.5, 0.75, 0.75)
    np.testing.assert_array_equal(outcome.answers_N, MAPS_NE[:, 0])
    records.save(tmp_path / "r.npz")
    assert_equal(ExitRecords.load(tmp_path / "r.npz"), replace(records, provenance={}))


def test_a_broken_file_is_refused_or_still_holds_records(tmp_path: Path) -> None:
    path = tmp_path / "r.npz"
    replace(RECORDS, times_s_N=np.arange(4.0)).save(path)
    whole = path.read_bytes()
    for seed in range(60):
        path.write_bytes(broken(whole, seed))
        with suppress(DataError):
            assert len(ExitRecords.load(path)) == 4, seed


OF_INPUTS: dict[str, Any] = {
    "times_s_N": np.array([5.0, 6.0, 7.5, 9.0]),
    "tokens_N": np.array([10, 20, 30, 40]),
    "sequences_N": np.array([0, 0, 1, 1]),
    "tallies_NE": np.arange(24).reshape(4, 3, 2),
    "end_losses_N": np.array([0.0, 1.0, 1.0, 0.0]),
    "end_true_losses_N": np.array([1.0, 0.0, 1.0, 0.0]),
}


@pytest.mark.parametrize("name", OF_INPUTS)
def test_data_of_inputs_is_kept_in_subsets_and_files(tmp_path: Path, name: str) -> None:
    replace(RECORDS, **{name: OF_INPUTS[name]}).subset(np.array([3, 1])).save(tmp_path / "r.npz")
    loaded = ExitRecords.load(tmp_path / "r.npz")
    assert loaded.sample_ids == ("d", "b")
    np.testing.assert_array_equal(getattr(loaded, name), OF_INPUTS[name][[3, 1]])


# Losses at the end, harm, and records of fewer ramps.

# Two ramps. The full model answers 0, 1, 2, 2; right answers are 0, 1, 0, 1.
EARLY_WRONG = ExitRecords.of_answers(
    np.array([[0, 1, 0], [0, 1, 1], [0, 2, 2], [1, 0, 2]]),
    **{name: getattr(RECORDS, name) for name in ("score", "num_blocks", "ramps", "sample_ids", "scores_NR")},
    truth_N=np.array([0, 1, 0, 1]),
)
WITH_END = replace(EARLY_WRONG, end_losses_N=np.array([0.0, 1.0, 1.0, 0.0]))


def test_harm_counts_losses_where_the_full_model_is_right() -> None:
    harmed = EARLY_WRONG.of_harm()
    # The full model is right only about a and b, so only their early answers can do harm.
    assert harmed.losses_NR.tolist() == [[0, 1], [1, 0], [0, 0], [0, 0]]
    assert EARLY_WRONG.losses_NR.tolist() == [[0, 1], [1, 0], [1, 0], [1, 1]]
    assert (harmed.losses_NR <= EARLY_WRONG.losses_NR).all()
    assert harmed.worst_losses_N({1: 0.0, 3: 0.0}).tolist() == [1, 1, 0, 0]
    truth_NE = np.array([[0.5, 0.2, 0.3], [0.1, 0.4, 0.4]])
    records = replace(EARLY_WRONG.subset(np.array([0, 1])), zero_one=False, true_losses_NE=truth_NE)
    assert records.of_harm().losses_NR == pytest.approx(np.array([[0.2, 0.0], [0.0, 0.0]]))
    harmed = WITH_END.of_harm()
    np.testing.assert_array_equal(harmed.end_losses_N, [0, 1, 0, 0])


def test_an_input_that_reaches_the_end_has_its_loss_also_in_the_worst_subset() -> None:
    assert WITH_END.outcome({1: 0.75}).losses_N.tolist() == [0, 1, 1, 0]  # a and c leave; b has the end's loss
    assert EARLY_WRONG.outcome({1: 0.75}).losses_N.tolist() == [0, 0, 1, 0]
    thresholds = {1: 0.6, 3: 0.6}
    each = [
        WITH_END.outcome({ramp: thresholds[ramp] for ramp in subset}).losses_N
        for subset in chain.from_iterable(combinations((1, 3), size) for size in range(3))
    ]
    assert WITH_END.worst_losses_N(thresholds).tolist() == np.max(each, axis=0).tolist() == [1, 1, 1, 0]


def test_records_of_some_ramps_are_those_of_a_model_without_the_others() -> None:
    shares = replace(
        EARLY_WRONG, score="share", confidences={1: 0.5, 3: 0.6}, tallies_NE=np.arange(24).reshape(4, 3, 2)
    )
    left = shares.of_ramps({3})
    assert (left.ramps, left.confidences, left.num_blocks) == ((3,), {3: 0.6}, 6)
    assert left.scores_NR.tolist() == shares.scores_NR[:, [1]].tolist()
    assert left.answers().tolist() == shares.answers()[:, [1, 2]].tolist()
    assert left.tallies_NE is not None
    assert left.tallies_NE[0].tolist() == [[2, 3], [4, 5]]
    for thresholds in ({}, {3: 0.7}):
        assert left.outcome(thresholds).exits_N.tolist() == shares.outcome(thresholds).exits_N.tolist()
        assert left.outcome(thresholds).accuracy == shares.outcome(thresholds).accuracy
    assert shares.of_ramps(()).outcome({}).mean_blocks == 6


HEADER = "Sample_ID,Exit,Confidence,Prediction,Label"
ROWS = ("a,0,0.6,yes,no", "a,2,0.9,no,no", "a,3,,no,no", "b,0,0.7,no,yes", "b,2,0.8,no,yes", "b,3,0.99,no,yes")


def file(folder: Path, *rows: str, header: str = HEADER, name: str = "exits.csv") -> Path:
    path = folder / name
    path.write_text("\n".join((header, *rows)) + "\n", encoding="utf-8")
    return path


def test_tables_of_labels_become_records_in_any_order_of_rows(tmp_path: Path) -> None:
    records = read_records(file(tmp_path, *ROWS))
    assert (records.score, records.num_blocks, records.ramps) == ("confidence", 4, (0, 2))
    assert (records.sample_ids, records.zero_one) == (("a", "b"), True)
    np.testing.assert_array_equal(records.scores_NR, np.array([[0.6, 0.9], [0.7, 0.8]], dtype=np.float32))
    assert records.losses_NR.tolist() == [[1, 0], [0, 0]]
    np.testing.assert_array_equal(records.true_losses_NE, [[1, 0, 0], [1, 1, 1]])
    assert records.answers().tolist() == [[1, 0, 0], [0, 0, 0]]
    assert records.provenance == {"data": "exits.csv", "label_names": ["no", "yes"]}
    rows = [f"{row},more" for row in reversed(ROWS)]
    records = read_records(file(tmp_path, *rows, header="\ufeff" + HEADER + ",Notes"))
    assert records.sample_ids == ("b", "a")
    assert records.losses_NR.tolist() == [[0, 0], [1, 0]]
    rows = [f"{row},{12 if row[0] == 'a' else 300}" for row in ROWS]
    with pytest.raises(DataError, match="exit: the number of the block"):
        read_records(file(tmp_path, f"a,{'1' * 5000},0.3,3,3"))  # Python converts no more than 4,300 digits
    tokens_N = read_records(file(tmp_path, *rows, header=HEADER + ",Tokens")).tokens_N
    np.testing.assert_array_equal(tokens_N, [12, 300])
    assert records.tokens_N is None


def test_whole_numbers_stay_the_labels_that_they_are(tmp_path: Path) -> None:
    header, rows = "sample_id\texit\tentropy\tprediction", ("a\t0\t0.1\t7", "a\t1\t0\t3")
    records = read_records(file(tmp_path, *rows, header=header, name="exits.tsv"))
    assert (records.score, records.true_losses_NE) == ("entropy", None)
    assert records.answers().tolist() == [[7, 3]]
    rows = ("a\t0\t0.1\t01", "a\t1\t0\t1")  # other labels
    assert read_records(file(tmp_path, *rows, header=header, name="exits.tsv")).losses_NR.tolist() == [[1]]


def test_losses_of_numbers_use_a_scale_and_may_replace_answers(tmp_path: Path) -> None:
    rows = ("a,0,0.5,1.5,2", "a,1,0.5,4,2", "a,2,,2,2")
    records = read_records(file(tmp_path, *rows), scale=2.0)
    assert records.losses_NR.tolist() == [[0.25, 1.0]]
    assert records.zero_one is False
    np.testing.assert_array_equal(records.true_losses_NE, [[0.25, 1.0, 0.0]])
    header = "sample_id,exit,confidence,loss,true_loss"
    records = read_records(file(tmp_path, "a,0,0.5,0.25,0.5", "a,1,,,0.125", header=header))
    assert records.losses_NR.tolist() == [[0.25]]
    assert (records.zero_one, records.answers_NE) == (False, None)
    np.testing.assert_array_equal(records.true_losses_NE, [[0.5, 0.125]])


def test_arrays_written_by_numpy_are_records(tmp_path: Path) -> None:
    facts = {"score": "confidence", "zero_one": True, "num_blocks": 3, "ramps": [0, 1], "provenance": {}}
    header = json.dumps({"schema_version": 2, **facts})
    arrays: dict[str, Any] = {
        "sample_ids": np.array(["a"]),
        "scores": np.array([[0.5, 0.9]]),
        "losses": np.array([[1.0, 0.0]]),
    }
    np.savez(tmp_path / "exits.npz", header=np.array(header), **arrays)
    records = read_records(tmp_path / "exits.npz")
    assert isinstance(records, ExitRecords)
    assert records.outcome({1: 0.9}).exits_N.tolist() == [1]
    assert records.scores_NR.dtype == np.float32


SURE = [[1, 1], [0, 1], [0, 0], [1, 0], [0, 1], [0, 0], [1, 1]]
"""Seven inputs, two ramps; the fourth leaves only at the earlier ramp."""


def batches(size: int = 3, sure: list[list[int]] = SURE) -> RecordedBatches:
    sure_NR = np.array(sure, dtype=bool)
    losses_NR = np.zeros(sure_NR.shape)
    losses_NR[1, 1] = losses_NR[3, 0] = 1.0
    return RecordedBatches(num_blocks=4, ramps=(0, 2), sure_NR=sure_NR, losses_NR=losses_NR, size=size)


def remaining(batches: RecordedBatches, active: tuple[int, ...]) -> IntArray:
    """Returns the number of inputs of every batch that remain after each active ramp, (K, A)."""
    exits_N = batches.exits_N(active)
    return np.stack([batch_counts(exits_N > ramp, batches.size) for ramp in active], axis=1)


def test_records_become_batches_in_order() -> None:
    both = remaining(batches(), (0, 2)).tolist()
    assert both == [[2, 1], [2, 1]]  # the seventh input is in no whole batch
    as_kept = RecordedBatches.of_records(records(), {0: 0.5, 1: 0.5}, 1, (0, 1))
    assert remaining(as_kept, (0, 1)).tolist() == [[0, 0], [1, 0], [1, 1]]
    assert as_kept.losses_NR.tolist() == [[1, 0], [0, 1], [0, 0]]  # a ramp that is not sure has no loss
    backwards = RecordedBatches.of_records(records([3.0, 2.0, 1.0]), {0: 0.5, 1: 0.5}, 1, (0, 1))
    assert remaining(backwards, (0,)).tolist() == [[1], [1], [0]]
    one = RecordedBatches.of_records(records(), {0: 0.5, 1: 0.5}, 3, (1,))
    assert (one.ramps, remaining(one, (1,)).tolist()) == ((1,), [[1]])
    thresholds = {0: 0.5, 1: 0.5}
    of = RecordedBatches.of_records(records(), thresholds, 3, (0, 1))
    for active in ((), (0,), (1,), (0, 1)):
        outcome = records().outcome({ramp: thresholds[ramp] for ramp in active})
        assert of.exits_N(active).tolist() == outcome.exits_N.tolist()


def records(times: list[float] | None = None) -> ExitRecords:
    times_s_N = None if times is None else np.array(times)
    return exit_records([[0.9, 0.9], [0.1, 0.9], [0.1, 0.2]], [[1, 0], [1, 1], [1, 0]], times_s_N=times_s_N)
