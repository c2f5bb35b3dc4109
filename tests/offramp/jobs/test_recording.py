"""Exit records and calibrations of a model whose answers are maps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from earlyexit.data.rows import IMAGE, LabelledRows, objects, read_labelled
from earlyexit.errors import DataError, PlanError
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.store import load_model, read_card, save_model
from earlyexit.policies.base import Opinion
from earlyexit.policies.threshold import SharePolicy
from earlyexit.tasks.base import Task
from earlyexit.tasks.label import LabelTask
from earlyexit.tasks.pose import PoseTask
from earlyexit.tasks.regression import RegressionTask
from earlyexit.training.ramps import exit_outputs
from offramp.commands.calibrate import calibrate
from offramp.commands.calibrate_command import calibration_tables, leave_text
from offramp.commands.inject import inject
from offramp.commands.jobs import CalibrateJob
from offramp.commands.recording import join_records, outputs_of, record_exits, records_from_outputs
from offramp.commands.thresholds import outcome_figures
from offramp.commands.worth import calibration_warnings, constant_accuracy, warnings_of, warnings_on, work_share
from optimizer.calibration_file import CalibrationCard
from profiles.records import ExitRecords
from profiles.scores import SCORES
from profiles.table import FloatArray
from tests.earlyexit.codecs.pictures import file_of
from tests.earlyexit.tasks.maps import STREET, encoded_images, images, model_of_maps
from tests.offramp.cli.runs import Captured, cells, run
from tests.offramp.jobs.test_injecting import job_of, rows_of

NUMBER = 150
EASY = CalibrateJob(budget=0.25, confidence=0.8)


def no_progress(what: str, done: int, total: int) -> None:
    """Shows nothing."""


def rows(count: int = NUMBER, seed: int = 0) -> LabelledRows:
    """Noise, labelled with what the full model says of it but for a column of pixels."""
    outputs = exit_outputs(model_of_maps(), encoded_images(count, seed))
    right = STREET.answer(outputs[2]).numpy()
    right[:, :, 0] = 0
    files = [file_of(image) for image in images(count, seed)]
    masks: Any = tuple(file_of(mask) for mask in right)
    return LabelledRows(columns={IMAGE: objects(files)}, labels=masks)


@pytest.fixture(scope="module")
def seen() -> LabelledRows:
    return rows()


@pytest.fixture
def mapper(tmp_path: Path) -> Path:
    save_model(model_of_maps(), tmp_path)
    return tmp_path


def outcome_of(card: CalibrationCard, records: ExitRecords) -> Sequence[int]:
    exits: list[int] = records.outcome(card.thresholds).exits_N.tolist()
    return exits


def test_records_are_what_the_policy_decides_by_beside_the_figures_of_the_task(
    mapper: Path, seen: LabelledRows
) -> None:
    card, records = calibrate(mapper, seen, EASY)
    assert (card.policy, records.score, records.answers_NE) == ("share", "share", None)
    assert card.confidences is not None
    assert records.confidences == card.confidences
    assert set(card.thresholds) == set(card.confidences) == {0, 1}
    policy = SharePolicy(card.thresholds, card.confidences)
    outputs = exit_outputs(model_of_maps(), encoded_images(NUMBER))
    full = STREET.answer(outputs[2]).numpy()
    for column, ramp in enumerate(records.ramps):
        opinion = Opinion(STREET, outputs[ramp])
        assert records.scores_NR[:, column].tolist() == policy.score(ramp, opinion).tolist()
        np.testing.assert_allclose(records.losses_NR[:, column], STREET.loss(opinion.value_B.numpy(), full))
    assert {0, 1} & set(outcome_of(card, records)), "some leave early"
    assert card.tested["agreement"] >= 0.75
    figures = outcome_figures(records.outcome({}), STREET)
    assert figures["pixel_accuracy"] == figures["full_pixel_accuracy"]
    assert figures["mean_iou"] == figures["full_mean_iou"]
    right = STREET.targets(seen.labels)
    answers = [STREET.answer(outputs[block]).numpy() for block in (0, 1, 2)]
    exits = outcome_of(card, records)
    chosen = np.stack([answers[block][row] for row, block in enumerate(exits)])
    expected = STREET.figures(STREET.tallies(chosen, right).sum(0))
    found = outcome_figures(records.outcome(card.thresholds), STREET)
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    tables = calibration_tables("share", {"thresholds": card.thresholds, "tested": card.tested})
    assert "mean IoU" in list(tables[1].columns[0].cells)
    again = record_exits(mapper, seen, card.policy, confidences=card.confidences)
    np.testing.assert_array_equal(again.scores_NR, records.scores_NR)
    with pytest.raises(PlanError, match="nothing says above which confidence a share counts"):
        record_exits(mapper, seen, "share")


def test_large_outputs_are_never_held_all_at_once(mapper: Path, seen: LabelledRows) -> None:
    parts = list(outputs_of(mapper, read_card(mapper), seen, "float32", no_progress)[0])
    assert [len(some) for some, _ in parts] == [64, 64, 22]
    whole = exit_outputs(model_of_maps(), encoded_images(NUMBER))
    right = STREET.targets(seen.labels)
    joined = join_records(reversed(parts), "confidence", STREET, right)
    alone = records_from_outputs(whole, "confidence", STREET, right)
    assert joined.sample_ids == alone.sample_ids
    np.testing.assert_allclose(joined.scores_NR, alone.scores_NR, rtol=1e-6)
    np.testing.assert_array_equal(joined.losses_NR, alone.losses_NR)


def test_thresholds_that_none_passes_leave_none_and_confidence_may_be_asked(mapper: Path, seen: LabelledRows) -> None:
    card, records = calibrate(mapper, seen, CalibrateJob(budget=0.02, confidence=0.8))
    assert card.thresholds == {}
    assert set(outcome_of(card, records)) == {2}
    [warning] = calibration_warnings(card, {}, load_model(mapper).info.provenance, None)
    assert warning.startswith("no threshold keeps a budget of 0.02 with confidence 0.8: no input would leave early")
    job = CalibrateJob(budget=EASY.budget, confidence=EASY.confidence, policy="confidence")
    card, _ = calibrate(mapper, seen, job)
    assert (card.policy, card.confidences) == ("confidence", None)
    assert "confidences" not in json.loads((mapper / "calibration.json").read_text()), "as the files of other tasks"
    with pytest.raises(DataError, match="entropy is of labels, and the model's task is segmentation"):
        calibrate(mapper, seen, CalibrateJob(budget=EASY.budget, confidence=EASY.confidence, policy="entropy"))


def test_a_threshold_that_every_score_passes_is_told_as_always() -> None:
    assert [leave_text("share", at) for at in (-0.01, 0.0, 0.5, SCORES["share"].never, None)] == [
        *("always", "always", "0.5000", "never", "-")
    ]
    assert [leave_text("entropy", at) for at in (np.inf, 0.4, SCORES["entropy"].never)] == ["always", "0.4000", "never"]


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
