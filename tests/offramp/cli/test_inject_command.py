"""`offramp inject`, from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from earlyexit.data.rows import write_labelled
from offramp.commands.inject import read_rows, warn_of_reversed_means
from offramp.commands.jobs import InjectJob, InjectOptions
from tests.offramp.cli.runs import Captured, refused
from tests.offramp.jobs.test_injecting import rows_of

TORCH = "tests.earlyexit.foreign.modules:pictures"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labelled(rows_of(labels=("a", "b", "c")), tmp_path_factory.mktemp("rows"), "rows")


@pytest.mark.parametrize(
    ("mean", "bgr", "warned"),
    [
        (".485,.456,.406", False, False),
        (".485,.456,.406", True, True),
        (".406,.456,.485", True, False),
        (".408,.458,.481", False, True),
        (".5,.5,.5", True, False),
    ],
)
def test_known_means_in_the_reverse_order_are_warned_of(capsys: Captured, mean: str, bgr: bool, warned: bool) -> None:
    numbers = tuple(map(float, mean.split(",")))
    job = InjectJob.model_validate({"backbone": TORCH, "name": "m", "mean": mean, "bgr": bgr})
    assert job.pixels == {"mean": numbers} | ({"order": "BGR"} if bgr else {})
    warn_of_reversed_means(job)
    assert ("these are well-known means, but reversed" in capsys.readouterr().err) == warned


@pytest.mark.parametrize(("head", "labels"), [("text,label", ("x", "y")), ("text,answer", ("", ""))])
def test_without_a_named_label_column_labels_are_optional(tmp_path: Path, head: str, labels: tuple[str, ...]) -> None:
    path = tmp_path / "d.csv"
    path.write_text(f"{head}\na,x\nb,y\n")
    job = InjectOptions.model_validate({"backbone": TORCH, "data": path, "out": tmp_path / "out"})
    assert read_rows(job).labels == labels


@pytest.mark.parametrize("name", ["a/b", "../up", "..", ".hidden"])
def test_names_of_answers_that_are_no_folders_are_refused_where_images_are_kept(
    data: Path, tmp_path: Path, capsys: Captured, name: str
) -> None:
    names = tmp_path / "names.txt"
    names.write_text(f"{name}\na\nb\n")
    options = ["--data", str(data), "--out", str(tmp_path / "out"), "--labels", str(names), "--hold-out", "0.5"]
    assert f"the label {name!r} cannot be the name of a folder" in refused(capsys, "inject", TORCH, *options)
