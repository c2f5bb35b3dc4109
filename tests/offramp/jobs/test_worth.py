"""Models and exits that are of little use, and what the commands say of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from earlyexit.data.rows import read_labelled
from earlyexit.network.model import EarlyExitModel
from earlyexit.tasks.base import Task
from earlyexit.tasks.label import LabelTask
from earlyexit.tasks.pose import PoseTask
from earlyexit.tasks.regression import RegressionTask
from offramp.commands.calibrate import calibrate
from offramp.commands.calibrate_command import calibration_tables
from offramp.commands.inject import inject
from offramp.commands.jobs import CalibrateJob
from offramp.commands.worth import (
    calibration_warnings,
    constant_accuracy,
    warnings_of,
    warnings_on,
    work_share,
)
from optimizer.calibration_file import CalibrationCard
from profiles.table import FloatArray
from tests.offramp.cli.runs import Captured, cells, run
from tests.offramp.jobs.test_injecting import job_of, rows_of

FROZEN, JOINT, INJECTED = {"joint": False}, {"joint": True}, {"cuts": [["a"]]}


@pytest.fixture
def dull(tmp_path: Path) -> Path:
    """Rows whose texts say nothing of their labels, two thirds of which are `x`."""
    path = tmp_path / "dull.csv"
    path.write_text("text,label\n" + "pay my bill,x\npay my bill,y\npay my bill,x\n" * 60, encoding="utf-8")
    return path


@pytest.mark.parametrize("options", [(), ("--hold-out", 0.5)], ids=["on the rows", "on the rows held out"])
def test_a_frozen_model_no_better_than_one_label_for_all_is_named_with_what_to_do(
    checkpoint: Path, dull: Path, tmp_path: Path, capsys: Captured, options: tuple[object, ...]
) -> None:
    arguments = ("train", "--data", dull, "--backbone", checkpoint, "--out", tmp_path / "m", "--epochs", 3)
    assert run(*arguments, *options) == 0
    [warning] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert warning == (
        "warning: the full model answers 66.7% of the rows right, and the same answer to all of them is right for "
        "66.7%: train the backbone with its ramps (train --joint)"
    )
    assert run("calibrate", tmp_path / "m", "--data", dull, "--budget", 0.1, "--json") == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    [said] = report["warnings"]
    assert f"warning: {said}" in captured.err.splitlines()
    assert said.endswith("train the backbone with its ramps (train --joint)")
    assert report["tested"]["constant_accuracy"] == report["tested"]["full_accuracy"] < 0.7


def test_what_exits_save_and_a_dull_answer_does_is_in_the_calibration(model: Path, data: Path) -> None:
    card, _ = calibrate(model, read_labelled(data), CalibrateJob(budget=0.5, confidence=0.9))
    assert card.tested["work_share"] == pytest.approx(card.tested["mean_blocks"] / 3)
    assert card.tested["constant_accuracy"] == 0.5
    better = card.model_copy(update={"tested": card.tested | {"full_accuracy": 0.9}})
    assert calibration_warnings(better, {}, FROZEN, None) == []
    survival, costs = (1.0, 1.0, 0.5, 0.25), (1.0, 1.0, 4.0, 4.0)
    assert work_share(survival, None) == pytest.approx(2.75 / 4)
    assert work_share(survival, costs) == pytest.approx(5 / 10)
    assert work_share(survival, costs, first=2) == pytest.approx(5 / 8), "a chain beside its last model"
    assert work_share(survival, costs, first=2, entry=2) == pytest.approx(3 / 8), "that model alone"


def test_an_injected_model_of_which_little_can_be_saved_is_named(tmp_path: Path) -> None:
    def late_ramps(model: EarlyExitModel, _: Path) -> tuple[FloatArray, FloatArray]:
        """The time is spent before the first ramp: less than 3 % of it comes after."""
        return np.array([0.97, *[0.03 / (model.num_blocks - 1)] * (model.num_blocks - 1)]), np.zeros(
            len(model.ramp_indices)
        )

    [warning] = inject(job_of(), rows_of(), tmp_path, times=late_ramps).warnings
    assert warning.startswith("exits save ")
    assert warning.endswith("% of the model's work: serve it without exits (offramp serve FOLDER --plan stock)")


@pytest.mark.parametrize(
    ("task", "truth", "accuracy"),
    [
        (LabelTask(("a", "b")), [0, 1, 1], 2 / 3),
        (RegressionTask(scale=10.0), [0.0, 1.0, 5.0], 1 - (0.1 + 0.4) / 3),
        (PoseTask(("knee",), image_side=64, heatmap_side=16, tolerance=1.0, mirror_pairs=()), [0], None),
    ],
    ids=["the most frequent label", "the median", "no one answer"],
)
def test_the_best_constant_answer(task: Task, truth: list[float], accuracy: float | None) -> None:
    assert constant_accuracy(task, np.array(truth)) == (None if accuracy is None else pytest.approx(accuracy))


@pytest.mark.parametrize(
    ("worth", "model", "words"),
    [
        ((0.667, 0.684, 0.5), FROZEN, ["train the backbone with its ramps (train --joint)"]),
        ((0.667, 0.684, 0.5), JOINT, ["more rows, more epochs or another backbone may help"]),
        ((0.667, 0.684, 0.5), INJECTED, ["check the order of --labels, and --mean, --std and --bgr"]),
        ((0.9, 0.6, 0.03), FROZEN, ["train its backbone too (train --joint), or serve it without exits"]),
        ((0.9, 0.6, 0.03), INJECTED, ["3.0% of the model's work: serve it without exits"]),
        ((0.9, 0.6, -0.01), None, ["exits save 0.0% of the model's work: do not use exits"]),
        ((0.9, 0.6, 0.06), FROZEN, []),
        ((None, None, None), FROZEN, []),
    ],
)
def test_what_to_do_fits_the_model(worth: tuple[Any, Any, Any], model: dict[str, Any] | None, words: list[str]) -> None:
    accuracy, constant, saved = worth
    said = warnings_of(accuracy, constant, saved, model)
    assert len(said) == len(words)
    assert all(part in each for part, each in zip(words, said, strict=True))


def card_of_chain(work: float, blocks: float, ramp: int = 3) -> CalibrationCard:
    tested = {"work_share": work, "mean_blocks": blocks, "num_blocks": 9, "full_accuracy": 0.9, "worst_agreement": 1.0}
    return CalibrationCard(
        policy="entropy", thresholds={ramp: 0.1}, budget=0.01, confidence=0.9, tested=tested, provenance={}
    )


def test_a_cascade_of_more_work_than_its_reference_and_a_diverged_training_are_named() -> None:
    chain, alone = card_of_chain(0.9, 5.78), card_of_chain(0.69, 4.11)
    [warning] = calibration_warnings(chain, {"reference": alone}, {}, "mpnet")
    assert warning == (
        "the chain takes 90% of the work of mpnet, after 5.78 blocks; mpnet alone takes 69%, after 4.11 blocks: leave "
        "the chain alone and serve mpnet"
    )
    assert calibration_warnings(card_of_chain(0.5, 5.78), {"reference": alone}, {}, "mpnet") == []
    assert "mpnet alone takes 100%: leave" in calibration_warnings(card_of_chain(1.2, 8.0), {}, {}, "mpnet")[0]
    for num_rows, words in ((3, ["diverged; train again with a lower --learning-rate"]), (0, [])):
        outputs = {block: torch.full((num_rows, 2), float("nan")) for block in range(2)}
        truth_N = np.zeros(num_rows, dtype=np.int64)
        said = warnings_on(outputs, LabelTask(("a", "b")), truth_N, {}, block_costs=None)
        assert [part in each for part, each in zip(words, said, strict=True)] == [True] * len(words)


def test_ramps_of_the_calibrations_beside_are_numbers_of_blocks(capsys: Captured) -> None:
    from offramp.commands.output import show

    tested: dict[str, Any] = card_of_chain(0.7, 4.1).tested | {"num_blocks": 6}
    report = {"thresholds": {3: 0.1}, "tested": tested}
    own = report | {"tested": tested | {"inputs": 1, "agreement": 1, "accuracy": 1, "survival": []}}
    show(*calibration_tables("entropy", own | {"beside": {"reference": report}}))
    said = cells(capsys.readouterr().out)
    assert "reference 3 4.10 of 6 1.0000" in said
    assert any("ramps after blocks" in line for line in said)
