"""Exit records and calibrations of a model whose answers are maps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from earlyexit.data.rows import IMAGE, LabelledRows, objects
from earlyexit.errors import DataError, PlanError
from earlyexit.network.store import load_model, read_card, save_model
from earlyexit.policies.base import Opinion
from earlyexit.policies.threshold import SharePolicy
from earlyexit.training.ramps import exit_outputs
from offramp.commands.calibrate import calibrate
from offramp.commands.calibrate_command import calibration_tables, leave_text
from offramp.commands.jobs import CalibrateJob
from offramp.commands.recording import join_records, outputs_of, record_exits, records_from_outputs
from offramp.commands.thresholds import outcome_figures
from offramp.commands.worth import calibration_warnings
from optimizer.calibration_file import CalibrationCard
from profiles.records import ExitRecords
from profiles.scores import SCORES
from tests.earlyexit.codecs.pictures import file_of
from tests.earlyexit.tasks.maps import STREET, encoded_images, images, model_of_maps

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
def data() -> LabelledRows:
    return rows()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_model(model_of_maps(), tmp_path)
    return tmp_path


def outcome_of(card: CalibrationCard, records: ExitRecords) -> Sequence[int]:
    exits: list[int] = records.outcome(card.thresholds).exits_N.tolist()
    return exits


def test_records_are_what_the_policy_decides_by_beside_the_figures_of_the_task(model: Path, data: LabelledRows) -> None:
    card, records = calibrate(model, data, EASY)
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
    right = STREET.targets(data.labels)
    answers = [STREET.answer(outputs[block]).numpy() for block in (0, 1, 2)]
    exits = outcome_of(card, records)
    chosen = np.stack([answers[block][row] for row, block in enumerate(exits)])
    expected = STREET.figures(STREET.tallies(chosen, right).sum(0))
    found = outcome_figures(records.outcome(card.thresholds), STREET)
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    tables = calibration_tables("share", {"thresholds": card.thresholds, "tested": card.tested})
    assert "mean IoU" in list(tables[1].columns[0].cells)
    again = record_exits(model, data, card.policy, confidences=card.confidences)
    np.testing.assert_array_equal(again.scores_NR, records.scores_NR)
    with pytest.raises(PlanError, match="nothing says above which confidence a share counts"):
        record_exits(model, data, "share")


def test_large_outputs_are_never_held_all_at_once(model: Path, data: LabelledRows) -> None:
    parts = list(outputs_of(model, read_card(model), data, "float32", no_progress)[0])
    assert [len(some) for some, _ in parts] == [64, 64, 22]
    whole = exit_outputs(model_of_maps(), encoded_images(NUMBER))
    right = STREET.targets(data.labels)
    joined = join_records(reversed(parts), "confidence", STREET, right)
    alone = records_from_outputs(whole, "confidence", STREET, right)
    assert joined.sample_ids == alone.sample_ids
    np.testing.assert_allclose(joined.scores_NR, alone.scores_NR, rtol=1e-6)
    np.testing.assert_array_equal(joined.losses_NR, alone.losses_NR)


def test_thresholds_that_none_passes_leave_none_and_confidence_may_be_asked(model: Path, data: LabelledRows) -> None:
    card, records = calibrate(model, data, CalibrateJob(budget=0.02, confidence=0.8))
    assert card.thresholds == {}
    assert set(outcome_of(card, records)) == {2}
    [warning] = calibration_warnings(card, {}, load_model(model).info.provenance, None)
    assert warning.startswith("no threshold keeps a budget of 0.02 with confidence 0.8: no input would leave early")
    job = CalibrateJob(budget=EASY.budget, confidence=EASY.confidence, policy="confidence")
    card, _ = calibrate(model, data, job)
    assert (card.policy, card.confidences) == ("confidence", None)
    assert "confidences" not in json.loads((model / "calibration.json").read_text()), "as the files of other tasks"
    with pytest.raises(DataError, match="entropy is of labels, and the model's task is segmentation"):
        calibrate(model, data, CalibrateJob(budget=EASY.budget, confidence=EASY.confidence, policy="entropy"))


def test_a_threshold_that_every_score_passes_is_told_as_always() -> None:
    assert [leave_text("share", at) for at in (-0.01, 0.0, 0.5, SCORES["share"].never, None)] == [
        *("always", "always", "0.5000", "never", "-")
    ]
    assert [leave_text("entropy", at) for at in (np.inf, 0.4, SCORES["entropy"].never)] == ["always", "0.4000", "never"]
