from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from profiles.records import ExitRecords
from profiles.records_table import read_records

HEADER = "Sample_ID,Exit,Confidence,Prediction,Label"
ROWS = ("a,0,0.6,yes,no", "a,2,0.9,no,no", "a,3,,no,no", "b,0,0.7,no,yes", "b,2,0.8,no,yes", "b,3,0.99,no,yes")


def file(folder: Path, *rows: str, header: str = HEADER, name: str = "exits.csv") -> Path:
    path = folder / name
    path.write_text("\n".join((header, *rows)) + "\n", encoding="utf-8")
    return path


def test_a_table_of_labels_becomes_records_whatever_its_order_and_other_columns(tmp_path: Path) -> None:
    records = read_records(file(tmp_path, *ROWS))
    assert (records.score, records.num_blocks, records.ramps) == ("confidence", 4, (0, 2))
    assert (records.sample_ids, records.zero_one) == (("a", "b"), True)
    np.testing.assert_array_equal(records.scores_NR, np.array([[0.6, 0.9], [0.7, 0.8]], dtype=np.float32))
    assert records.losses_NR.tolist() == [[1, 0], [0, 0]]
    assert records.true_losses_NE is not None
    assert records.true_losses_NE.tolist() == [[1, 0, 0], [1, 1, 1]]
    assert records.answers().tolist() == [[1, 0, 0], [0, 0, 0]]
    assert records.provenance == {"data": "exits.csv", "label_names": ["no", "yes"]}
    rows = [f"{row},more" for row in reversed(ROWS)]
    records = read_records(file(tmp_path, *rows, header="\ufeff" + HEADER + ",Notes"))
    assert records.sample_ids == ("b", "a")
    assert records.losses_NR.tolist() == [[0, 0], [1, 0]]
    rows = [f"{row},{12 if row[0] == 'a' else 300}" for row in ROWS]
    tokens_N = read_records(file(tmp_path, *rows, header=HEADER + ",Tokens")).tokens_N
    assert tokens_N is not None
    assert tokens_N.tolist() == [12, 300]
    assert records.tokens_N is None


def test_whole_numbers_stay_the_labels_that_they_are(tmp_path: Path) -> None:
    header, rows = "sample_id\texit\tentropy\tprediction", ("a\t0\t0.1\t7", "a\t1\t0\t3")
    records = read_records(file(tmp_path, *rows, header=header, name="exits.tsv"))
    assert (records.score, records.true_losses_NE) == ("entropy", None)
    assert records.answers().tolist() == [[7, 3]]


def test_numbers_differ_by_a_scale_and_losses_may_be_given_in_the_place_of_answers(tmp_path: Path) -> None:
    rows = ("a,0,0.5,1.5,2", "a,1,0.5,4,2", "a,2,,2,2")
    records = read_records(file(tmp_path, *rows), scale=2.0)
    assert records.losses_NR.tolist() == [[0.25, 1.0]]
    assert records.zero_one is False
    assert records.true_losses_NE is not None
    assert records.true_losses_NE.tolist() == [[0.25, 1.0, 0.0]]
    header = "sample_id,exit,confidence,loss,true_loss"
    records = read_records(file(tmp_path, "a,0,0.5,0.25,0.5", "a,1,,,0.125", header=header))
    assert records.losses_NR.tolist() == [[0.25]]
    assert (records.zero_one, records.answers_NE) == (False, None)
    assert records.true_losses_NE is not None
    assert records.true_losses_NE.tolist() == [[0.5, 0.125]]


def test_arrays_that_numpy_alone_wrote_are_records(tmp_path: Path) -> None:
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
