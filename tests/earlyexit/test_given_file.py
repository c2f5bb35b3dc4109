from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from earlyexit.data.dense_rows import read_classes
from earlyexit.data.images import check_file
from earlyexit.data.rows import read_arrays
from earlyexit.data.text_tables import read_table, read_texts
from earlyexit.errors import DataError, InputError, PlanError
from profiles.latency import LatencyProfile
from profiles.records_table import read_records


def test_what_is_not_there_is_told_from_a_folder_and_from_what_cannot_be_looked_at(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check_file(tmp_path / "file")
    wrong = (
        (tmp_path / "gone", ": no such file; it is made elsewhere"),
        (tmp_path, ": is a folder, not a file"),
        (tmp_path / ("p" * 300), ": cannot be read: File name too long"),
    )
    for path, said in wrong:
        with pytest.raises(PlanError) as caught:
            check_file(path, PlanError, hint="; it is made elsewhere")
        assert str(caught.value) == f"{path}{said}"


@pytest.mark.parametrize(
    "read",
    [
        read_arrays,
        read_texts,
        lambda path: read_table(path, ("text",), "label", None),
        read_classes,
        LatencyProfile.load,
    ],
    ids=["arrays", "texts", "table", "classes", "profile"],
)
def test_a_folder_is_never_called_no_such_file(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    with pytest.raises(InputError, match="is a folder, not a file"):
        read(tmp_path)


def test_nor_is_one_that_is_named_like_exit_records(tmp_path: Path) -> None:
    folder = tmp_path / "records.csv"
    folder.mkdir()
    with pytest.raises(DataError, match="is a folder, not a file"):
        read_records(folder)


def test_a_latency_profile_that_is_missing_says_what_measures_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    with pytest.raises(DataError) as caught:
        LatencyProfile.load(path)
    assert str(caught.value) == f"{path}: no such file; `offramp profile MODEL --out {path}` measures one"
