from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from earlyexit.codecs import find_codec
from earlyexit.data.rows import LabelledRows, read_labelled
from earlyexit.errors import DataError
from earlyexit.network.store import load_model
from earlyexit.training.ramps import exit_outputs
from offramp.commands.calibrate import calibrate
from offramp.commands.calibrated import read_calibration
from offramp.commands.jobs import CalibrateJob
from offramp.commands.recording import record_exits
from offramp.commands.thresholds import Recorded, parts_of
from profiles.records import ExitRecords
from tests.exit_records import exit_records

EASY = CalibrateJob(budget=0.5, confidence=0.9)


@pytest.mark.parametrize(
    ("job", "least"),
    [
        (CalibrateJob(), 306),  # 76 lay the path, 230 test it
        (EASY, 5),  # 1 lays the path, 4 test it
        (EASY.model_copy(update={"design_share": 0.5}), 8),  # half of 7 rounds to 4 and leaves 3 for the test
        (CalibrateJob(budget=0.9, confidence=0.1), 3),  # 1 tests it, and the path needs one as well
    ],
)
def test_the_fewest_rows_leave_enough_to_test(job: CalibrateJob, least: int) -> None:
    assert job.least_rows == least


def test_too_few_rows_are_refused_before_the_model_is_read(tmp_path: Path) -> None:
    few = LabelledRows.of_texts(texts=("a",) * 305, labels=("x",) * 305)
    with pytest.raises(DataError) as refused:
        calibrate(tmp_path / "no model", few, CalibrateJob(source="d.csv"))
    assert str(refused.value) == (
        "d.csv: 305 rows; at least 306 are needed to promise agreement of 0.99 with confidence 0.9: "
        "25% of the rows lay the path of thresholds, 230 rows test it; give more rows, or --budget 0.02: 152 rows are "
        "needed for 98 % at 90 %"
    )


def test_a_calibration_reports_its_progress_and_is_read_back(model: Path, data: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    card, records = calibrate(model, read_labelled(data), EASY, progress=lambda *step: seen.append(step))
    assert seen[-1] == ("records", 40, 40)
    assert records.tokens_N is not None
    assert len(records.tokens_N) == len(records)
    assert read_calibration(model).thresholds == card.thresholds


def test_outputs_that_are_known_already_give_what_running_the_model_gives(model: Path, data: Path) -> None:
    rows, job = read_labelled(data), EASY
    loaded = load_model(model)
    outputs = exit_outputs(loaded, rows.encode(find_codec(loaded.info.codec, model)))
    given, _ = calibrate(model, rows, job, outputs=[(range(len(rows)), outputs)])
    ran, _ = calibrate(model, rows, job)
    assert given.thresholds == ran.thresholds
    assert given.tested == ran.tested


def test_thresholds_can_be_found_in_bfloat16_and_weights_stay_as_they_were(model: Path, data: Path) -> None:
    before = load_model(model).state_dict()
    rows = read_labelled(data)
    job = EASY.model_copy(update={"dtype": "bfloat16"})
    card, records = calibrate(model, rows, job)
    after = load_model(model).state_dict()
    assert card.provenance["dtype"] == "bfloat16"
    assert all(after[name].equal(before[name]) for name in before if name != "temperatures_E")
    again = record_exits(model, rows, card.policy, dtype="bfloat16")
    whole = record_exits(model, rows, card.policy)
    np.testing.assert_allclose(again.scores_NR, records.scores_NR, atol=1e-2)
    assert not np.array_equal(again.scores_NR, whole.scores_NR)


def recorded_exits(*agrees: bool, num_blocks: int = 4) -> ExitRecords:
    """A hundred inputs of which every ramp is equally sure; ramp k gives the full model's answer or another."""
    answers_NE = np.array([[0 if each else 1 for each in agrees] + [0]] * 100, dtype=np.int64)
    scores_NR = np.full((100, len(agrees)), 0.1)
    return exit_records(scores_NR, answers_NE=answers_NE, score="entropy", num_blocks=num_blocks)


def recorded(*views: ExitRecords) -> Recorded:
    return Recorded(job=EASY, views=views, parts=parts_of(views[0], EASY), facts={})


def test_a_view_promises_what_others_hold_and_no_ramp_before_the_entry() -> None:
    right, wrong = recorded_exits(True), recorded_exits(False)
    assert set(recorded(right).card().thresholds) == {0}
    assert recorded(right, wrong).card().thresholds == {}
    rows = recorded(recorded_exits(True, False, True))
    assert rows.few(()) == recorded(rows.views[0], recorded_exits(False, True, True)).few(()) == (0,), (
        "by the first view"
    )
    assert rows.few((), first=2) == (2,)
