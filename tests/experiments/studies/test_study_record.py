from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from earlyexit.errors import DataError
from experiments.studies.kit import Box, Boxes, Comparison, Lines, StudyResult
from experiments.studies.record import Done, Failed, Machine, Record, Skipped, perform, read_record, write_record
from tests.experiments.studies.fig99_works import STUDY, run

MACHINE = Machine(
    created_at=datetime(2025, 1, 2, tzinfo=UTC), machine="abacus", python="3.11", versions={"numpy": "2"}, commit="c1"
)
DONE = Record(about=STUDY.about, effort="full", outcome=Done(result=run("full"), took_s=2.5), provenance=MACHINE)
BOX = Box(minimum=1, quartile=2, median=3, third_quartile=4, maximum=5)
LINES = Lines(title="t", x_label="x", y_label="y", x=(1.0, 2.0), series={"e3": (None, 2.0)})
BOXES = Boxes(title="t", x_label="x", y_label="y", labels=("a",), series={"e3": (BOX,)}, limit=9.0)


def with_result(result: StudyResult) -> Record:
    return replace(DONE, outcome=Done(result=result, took_s=1.0))


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(DONE, id="done, with bars"),
        pytest.param(with_result(StudyResult(comparisons=(), pictures=(LINES, BOXES))), id="lines and boxes"),
        pytest.param(replace(DONE, outcome=Skipped(reason="no data")), id="skipped"),
        pytest.param(replace(DONE, outcome=Failed(reason="it broke")), id="failed"),
    ],
)
def test_what_is_written_is_read_again(record: Record, tmp_path: Path) -> None:
    write_record(record, tmp_path / "new" / "fig99_works.json")
    assert read_record(tmp_path / "new" / "fig99_works.json") == replace_figures(record)


def replace_figures(record: Record) -> Record:
    """JSON has lists where Python has tuples; only the free-form figures show it."""
    if not isinstance(record.outcome, Done):
        return record
    figures = json.loads(json.dumps(record.outcome.result.figures))
    return replace(record, outcome=replace(record.outcome, result=replace(record.outcome.result, figures=figures)))


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    figures = {"rate": np.float64(1.5), "count": np.int64(3), "all": np.array([1, 2])}
    write_record(with_result(StudyResult(comparisons=(), figures=figures)), tmp_path / "a.json")
    outcome = read_record(tmp_path / "a.json").outcome
    assert isinstance(outcome, Done)
    assert outcome.result.figures == {"rate": 1.5, "count": 3, "all": [1, 2]}


def test_what_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a result cannot hold set"):
        write_record(with_result(StudyResult(comparisons=(), figures={"a": {1}})), tmp_path / "a.json")
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_schema_is_refused(tmp_path: Path) -> None:
    write_record(DONE, tmp_path / "a.json")
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    (tmp_path / "a.json").write_text(text.replace('"schema_version": 1', '"schema_version": 9'), encoding="utf-8")
    with pytest.raises(DataError, match="no result of this version"):
        read_record(tmp_path / "a.json")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.json: No such file"):
        read_record(tmp_path / "a.json")


def test_a_study_is_timed_by_the_clock_it_is_given() -> None:
    ticks = iter([10.0, 12.5])
    record = perform(STUDY, "full", lambda: next(ticks))
    assert record.outcome == Done(result=run("full"), took_s=2.5)
    assert record.about == STUDY.about


def test_a_study_without_its_data_is_skipped_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFRAMP_DATA", str(tmp_path))
    (tmp_path / "there.csv").touch()
    record = perform(replace(STUDY, needs=("there.csv", "absent.csv")), "full", lambda: 0.0)
    assert record.outcome == Skipped(reason="absent.csv not in OFFRAMP_DATA")


def test_pictures_are_numbered_where_there_are_several() -> None:
    assert list(DONE.pictures) == ["fig99_works.svg"]
    several = with_result(StudyResult(comparisons=(Comparison(name="a", ours=1),), pictures=(LINES, BOXES)))
    assert list(several.pictures) == ["fig99_works-1.svg", "fig99_works-2.svg"]
    assert replace(DONE, outcome=Skipped(reason="no data")).pictures == {}
