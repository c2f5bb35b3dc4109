from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from earlyexit.data.rows import write_labelled
from offramp.commands import inject as injecting
from offramp.commands.inject import read_rows, warn_of_reversed_means
from offramp.commands.jobs import InjectJob, InjectOptions
from tests.data import BERT12_SST2, data_folder
from tests.offramp.cli.runs import PROBLEM, Captured, played, refused, run, written
from tests.offramp.jobs.test_injecting import quick_ramps, rows_of

HEADER = "sample_id,exit,confidence,prediction,label"
PROMISE = ("--budget", 0.1)


def table(path: Path, num_inputs: int = 200, *, ramp_is_right: bool = False) -> Path:
    """Two blocks; the ramp's confidence rises from input to input, and below 0.5 every fourth answer differs.

    Right is what the last exit says, or what the ramp says.
    """
    rows = [HEADER]
    for k in range(num_inputs):
        early = "no" if k < num_inputs / 2 and k % 4 == 0 else "yes"
        right = early if ramp_is_right else "yes"
        rows += [f"s{k},0,{k / num_inputs},{early},{right}", f"s{k},1,,yes,{right}"]
    return written(path, "\n".join(rows) + "\n")


@pytest.fixture
def exits(tmp_path: Path) -> Path:
    return table(tmp_path / "exits.csv")


def calibrated(captured: Captured, exits: Path, *options: object) -> Any:
    assert run("calibrate", "--records", exits, *PROMISE, *options, "--json") == 0
    found = captured.readouterr()
    report = json.loads(found.out)
    assert found.err == "".join(f"warning: {each}\n" for each in report["warnings"])
    return report


def test_exit_records_of_a_table_get_thresholds_with_a_guarantee(exits: Path, capsys: Captured) -> None:
    report = calibrated(capsys, exits)
    assert 0 < report["thresholds"]["0"] < 0.5
    tested = report["tested"]
    assert (tested["inputs"], tested["num_blocks"]) == (150, 2)  # a quarter of 200 lays the path
    assert 0.9 <= tested["worst_agreement"] <= tested["agreement"] < 1
    assert tested["full_accuracy"] == 1.0


def test_without_json_a_table_is_printed_with_a_dash_for_unknown_accuracy(tmp_path: Path, capsys: Captured) -> None:
    text = table(tmp_path / "exits.csv").read_text(encoding="utf-8").replace(",yes\n", "\n").replace(",label", "")
    assert run("calibrate", "--records", written(tmp_path / "no_truth.csv", text), *PROMISE) == 0
    lines = {
        line.split("│")[1].strip(): line.split("│")[2].strip()
        for line in capsys.readouterr().out.splitlines()
        if line.count("│") == 3
    }
    assert lines["accuracy"] == "-"
    assert float(lines["with the worst of all subsets of ramps"]) >= 0.9


def test_plan_and_simulate_accept_the_written_calibration(exits: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "calibrated"
    threshold = calibrated(capsys, exits, "--out", out)["thresholds"]["0"]
    survival = "{folder: calibrated}"
    problem = written(tmp_path / "problem.yaml", PROBLEM.replace("[1.0, 0.5]", survival))
    assert run("plan", problem, "--json") == 0
    assert json.loads(capsys.readouterr().out)["rate_per_s"] > 2000  # of a plan without exits
    by_plan = played(capsys, problem)
    given = ("--records", exits, "--thresholds", out / "calibration.json")
    by_file = played(capsys, written(tmp_path / "other.yaml", PROBLEM), *given)
    for found in (by_plan, by_file):
        assert f"confidence of at least {threshold:g}" in found["inputs"]["policy"]
        assert set(found["simulated"]["exits"]) == {"0", "1"}


def test_numbers_need_a_scale(tmp_path: Path, capsys: Captured) -> None:
    rng = np.random.default_rng(1)
    rows = [HEADER.removesuffix(",label")]
    for k, off in enumerate(rng.random(300)):  # how far off the ramp is, and it knows
        rows += [f"s{k},0,{1 - off:.4f},{k + off:.4f}", f"s{k},1,,{k}"]
    path = written(tmp_path / "numbers.csv", "\n".join(rows) + "\n")
    tested = calibrated(capsys, path, "--scale", 2)["tested"]
    assert 0.9 <= tested["worst_agreement"] < 1
    assert tested["exits"]["0"] > 50
    as_labels = calibrated(capsys, path)["tested"]  # none of which agrees: only what the budget allows leaves
    assert as_labels["agreement"] == pytest.approx(as_labels["mean_blocks"] - 1)


def test_harm_costs_less_than_agreement_where_the_last_exit_errs(tmp_path: Path, capsys: Captured) -> None:
    exits = table(tmp_path / "exits.csv", ramp_is_right=True)
    agreeing = calibrated(capsys, exits)
    harmless = calibrated(capsys, exits, "--metric", "harm", "--out", tmp_path / "out")
    tested = harmless["tested"]
    assert (tested["harm"], tested["worst_harm"]) == (0, 0)  # the ramp is right throughout
    assert tested["exits"] == {"0": 150}
    assert (tested["agreement"], tested["accuracy"]) == (tested["full_accuracy"], 1.0)
    assert agreeing["tested"]["mean_blocks"] > 1
    assert "harm" not in agreeing["tested"]
    kept = json.loads((tmp_path / "out/calibration.json").read_text(encoding="utf-8"))
    assert (kept["metric"], kept["budget"]) == ("harm", 0.1)
    assert run("calibrate", "--records", exits, *PROMISE, "--metric", "harm") == 0
    assert "wrong where the full model is right" in capsys.readouterr().out


def test_bert_on_sst2_as_others_recorded_it_is_calibrated_as_it_is(capsys: Captured) -> None:
    folder = data_folder()
    if folder is None or not (folder / BERT12_SST2).is_file():
        pytest.skip(f"{BERT12_SST2} is not in OFFRAMP_DATA")
    report = calibrated(capsys, folder / BERT12_SST2, "--budget", 0.02)
    assert report["tested"]["inputs"] == 654  # of 872
    assert report["tested"]["worst_agreement"] >= 0.98
    assert report["tested"]["mean_blocks"] < 8  # of 12


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
    assert ("these are well-known means in reverse order" in capsys.readouterr().err) == warned


def test_answers_without_names_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(injecting, "inject", partial(injecting.inject, times=quick_ramps))
    rows = write_labelled(rows_of(labels=("cat",)), tmp_path, "rows")
    assert run("inject", TORCH, "--data", rows, "--from-answers", "--epochs", 1, "--out", tmp_path / "m") == 0
    assert "warning: answers are called 0 to 2: name them with --labels FILE" in capsys.readouterr().err


@pytest.mark.parametrize(("head", "labels"), [("text,label", ("x", "y")), ("text,answer", ("", ""))])
def test_without_a_named_label_column_labels_are_optional(tmp_path: Path, head: str, labels: tuple[str, ...]) -> None:
    path = written(tmp_path / "d.csv", f"{head}\na,x\nb,y\n")
    job = InjectOptions.model_validate({"backbone": TORCH, "data": path, "out": tmp_path / "out"})
    assert read_rows(job).labels == labels


@pytest.mark.parametrize("name", ["a/b", "../up", "..", ".hidden"])
def test_names_of_answers_that_are_no_folders_are_refused_where_images_are_kept(
    data: Path, tmp_path: Path, capsys: Captured, name: str
) -> None:
    names = written(tmp_path / "names.txt", f"{name}\na\nb\n")
    options = ["--data", str(data), "--out", str(tmp_path / "out"), "--labels", str(names), "--hold-out", "0.5"]
    assert f"the label {name!r} cannot be the name of a folder" in refused(capsys, "inject", TORCH, *options)
