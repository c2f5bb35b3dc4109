from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from earlyexit.errors import DataError
from profiles.records import ExitRecords
from profiles.records_table import read_records

HEADER = "Sample_ID,Exit,Confidence,Prediction,Label"
ROWS = ("a,0,0.6,yes,no", "a,2,0.9,no,no", "a,3,,no,no", "b,0,0.7,no,yes", "b,2,0.8,no,yes", "b,3,0.99,no,yes")


def file(folder: Path, *rows: str, header: str = HEADER, name: str = "exits.csv") -> Path:
    path = folder / name
    path.write_text("\n".join((header, *rows)) + "\n", encoding="utf-8")
    return path


def changed(row: int, text: str) -> tuple[str, ...]:
    return (*ROWS[:row], text, *ROWS[row + 1 :])


def test_a_table_of_labels_becomes_records(tmp_path: Path) -> None:
    records = read_records(file(tmp_path, *ROWS))
    assert (records.score, records.num_blocks, records.ramps) == ("confidence", 4, (0, 2))
    assert (records.sample_ids, records.zero_one) == (("a", "b"), True)
    np.testing.assert_array_equal(records.scores_NR, np.array([[0.6, 0.9], [0.7, 0.8]], dtype=np.float32))
    assert records.losses_NR.tolist() == [[1, 0], [0, 0]]
    assert records.true_losses_NE is not None
    assert records.true_losses_NE.tolist() == [[1, 0, 0], [1, 1, 1]]
    assert records.answers().tolist() == [[1, 0, 0], [0, 0, 0]]
    assert records.provenance == {"data": "exits.csv", "label_names": ["no", "yes"]}


def test_the_order_of_rows_other_columns_and_a_byte_order_mark_mean_nothing(tmp_path: Path) -> None:
    rows = [f"{row},more" for row in reversed(ROWS)]
    records = read_records(file(tmp_path, *rows, header="\ufeff" + HEADER + ",Notes"))
    assert records.sample_ids == ("b", "a")
    assert records.losses_NR.tolist() == [[0, 0], [1, 0]]


def test_tokens_are_the_inputs_own(tmp_path: Path) -> None:
    rows = [f"{row},{12 if row[0] == 'a' else 300}" for row in ROWS]
    tokens_N = read_records(file(tmp_path, *rows, header=HEADER + ",Tokens")).tokens_N
    assert tokens_N is not None
    assert tokens_N.tolist() == [12, 300]
    assert read_records(file(tmp_path, *ROWS)).tokens_N is None


@pytest.mark.parametrize("cell", ["0", "-3", "1.5", "many", "", "9999999"])
def test_tokens_that_no_input_has_are_refused_with_their_line(tmp_path: Path, cell: str) -> None:
    rows = [f"{row},{7 if row[0] == 'a' else cell}" for row in ROWS]
    path = file(tmp_path, *rows, header=HEADER + ",tokens")
    with pytest.raises(DataError) as caught:
        read_records(path)
    assert str(caught.value) == f"{path}:5: tokens: a whole number from 1 to 1000000 is needed, not {cell!r}"


def test_whole_numbers_stay_the_labels_that_they_are(tmp_path: Path) -> None:
    header, rows = "sample_id\texit\tentropy\tprediction", ("a\t0\t0.1\t7", "a\t1\t0\t3")
    records = read_records(file(tmp_path, *rows, header=header, name="exits.tsv"))
    assert (records.score, records.true_losses_NE) == ("entropy", None)
    assert records.answers().tolist() == [[7, 3]]


def test_numbers_differ_by_a_scale(tmp_path: Path) -> None:
    rows = ("a,0,0.5,1.5,2", "a,1,0.5,4,2", "a,2,,2,2")
    records = read_records(file(tmp_path, *rows), scale=2.0)
    assert records.losses_NR.tolist() == [[0.25, 1.0]]
    assert records.zero_one is False
    assert records.true_losses_NE is not None
    assert records.true_losses_NE.tolist() == [[0.25, 1.0, 0.0]]


def test_losses_may_be_given_in_the_place_of_answers(tmp_path: Path) -> None:
    header = "sample_id,exit,confidence,loss,true_loss"
    records = read_records(file(tmp_path, "a,0,0.5,0.25,0.5", "a,1,,,0.125", header=header))
    assert records.losses_NR.tolist() == [[0.25]]
    assert (records.zero_one, records.answers_NE) == (False, None)
    assert records.true_losses_NE is not None
    assert records.true_losses_NE.tolist() == [[0.5, 0.125]]


def test_saved_records_are_read_as_well(tmp_path: Path) -> None:
    records = read_records(file(tmp_path, *ROWS))
    records.save(tmp_path / "r.npz")
    assert read_records(tmp_path / "r.npz").losses_NR.tolist() == records.losses_NR.tolist()
    with pytest.raises(DataError, match="holds losses already"):
        read_records(tmp_path / "r.npz", scale=1.0)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        pytest.param("Exit,Confidence,Prediction", r"e\.csv:1: no column sample_id; there are exit, conf", id="input"),
        pytest.param("Sample_ID,Confidence,Prediction", r":1: no column exit;", id="exit"),
        pytest.param("Sample_ID,Exit,Confidence", r":1: no column prediction \(or loss\)", id="answer"),
        pytest.param("Sample_ID,Exit,Share,Loss", r":1: a table does not say above which confidence", id="shares"),
        pytest.param("Sample_ID,Exit,Prediction", r":1: one column of entropy or confidence .* not none", id="score"),
        pytest.param("Sample_ID,Exit,Entropy,Confidence,Loss", r":1: one column of .* not both", id="both scores"),
        pytest.param("Sample_ID,Exit,exit,Confidence,Loss", r":1: two columns exit", id="a column twice"),
        pytest.param("", r":1: no column sample_id; there are none", id="nothing"),
    ],
)
def test_headers_that_do_not_do_are_refused(tmp_path: Path, header: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_records(file(tmp_path, ",".join("1" * (header.count(",") + 1)), header=header, name="e.csv"))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        pytest.param((), r"e\.csv: no rows", id="no rows"),
        pytest.param(("a,0,0.6,yes,no",), "one exit, 0; at least a ramp and the last", id="one exit"),
        pytest.param(changed(1, "a,2,0.9,no"), r":3: 4 cells, the header has 5", id="a cell missing"),
        pytest.param(changed(1, "a,2.0,0.9,no,no"), r":3: exit: the number of the block .* not '2\.0'", id="exit 2.0"),
        pytest.param(changed(1, "a,-1,0.9,no,no"), r":3: exit: .* not '-1'", id="exit -1"),
        pytest.param(changed(1, "a,99999999,0.9,no,no"), r":3: exit: .* not '99999999'", id="exit too large"),
        pytest.param(changed(1, ",2,0.9,no,no"), r":3: sample_id is empty", id="no input"),
        pytest.param(changed(1, "a,2,,no,no"), r":3: confidence: a number from 0 to 1 is needed, not ''", id="empty"),
        pytest.param(changed(1, "a,2,nan,no,no"), r":3: confidence: .* not 'nan'", id="NaN"),
        pytest.param(changed(1, "a,2,1.5,no,no"), r":3: confidence: .* not '1\.5'", id="above 1"),
        pytest.param(changed(1, "a,2,sure,no,no"), r":3: confidence: .* not 'sure'", id="a word"),
        pytest.param(changed(1, "a,2,0.9,,no"), r":3: prediction is empty", id="no answer"),
        pytest.param(
            changed(1, "a,2,0.9,no,yes"), r":3: label: input 'a' has 'yes' here and 'no' on line 2", id="truth"
        ),
        pytest.param(changed(1, "a,0,0.9,no,no"), r":3: input 'a' has exit 0 on line 2 already", id="twice"),
        pytest.param(ROWS[:4] + ROWS[5:], r":5: input 'b' has no exit 2; others have one", id="an exit missing"),
    ],
)
def test_rows_that_break_a_rule_are_refused_with_their_line(
    tmp_path: Path, rows: tuple[str, ...], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read_records(file(tmp_path, *rows, name="e.csv"))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        pytest.param(("a,0,0.5,1.5", "a,1,,0"), r":2: loss: a number from 0 to 1 is needed, not '1\.5'", id="above 1"),
        pytest.param(("a,0,0.5,0", "a,1,,0.5"), r":3: loss: the last exit's is 0", id="of the last exit"),
        pytest.param(("a,0,0.5,", "a,1,,0"), r":2: loss: .* not ''", id="of a ramp, empty"),
    ],
)
def test_losses_that_cannot_be_are_refused(tmp_path: Path, rows: tuple[str, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_records(file(tmp_path, *rows, header="sample_id,exit,confidence,loss"))


@pytest.mark.parametrize(
    ("scale", "message"),
    [(0.0, "positive and finite, not 0.0"), (2.0, r":2: prediction: a finite number is needed, not 'yes'")],
    ids=["no scale", "labels"],
)
def test_numbers_that_are_none_are_refused(tmp_path: Path, scale: float, message: str) -> None:
    rows = ROWS if scale else ("a,0,0.5,1,2", "a,1,0.5,4,2")
    with pytest.raises(DataError, match=message):
        read_records(file(tmp_path, *rows), scale=scale)


def test_a_scale_for_losses_is_refused(tmp_path: Path) -> None:
    path = file(tmp_path, "a,0,0.5,0", "a,1,,0", header="sample_id,exit,confidence,loss")
    with pytest.raises(DataError, match="holds losses already"):
        read_records(path, scale=1.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"\xff\xfe\x00", "not UTF-8", id="not UTF-8"),
        pytest.param(b"", "no column sample_id", id="empty"),
        pytest.param(b"sample_id,exit,loss,entropy\n" + b"x" * 200_000, "field larger than", id="an endless cell"),
    ],
)
def test_files_that_are_no_tables_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "e.csv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_records(tmp_path / "e.csv")


def test_what_is_not_there_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_records(tmp_path / "e.csv")
    with pytest.raises(DataError, match=r"unknown ending '\.txt'; exit records are \.npz, \.csv or \.tsv"):
        read_records(tmp_path / "e.txt")


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
