"""`offramp calibrate`: thresholds of a model, or of exit records from elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from earlyexit.errors import InputError
from offramp.cli.calibration_tables import calibration_tables
from offramp.cli.fields import takes_fields
from offramp.cli.options import AsJson, show, warn

if TYPE_CHECKING:
    from earlyexit.data.rows import LabelledRows
    from offramp.commands.jobs import CalibrateOptions
    from optimizer.calibration_file import CalibrationCard


@takes_fields("offramp.commands.jobs:CalibrateOptions")
def calibrate(job: CalibrateOptions, as_json: AsJson = False) -> None:
    """Find thresholds that agree with the full model often enough, with stated confidence.

    For a model and labelled rows, or for exit records of anything that has exits (docs/models.md#exit-records).
    """
    if job.records is not None:
        card, report = _calibrate_records(job.records, job)
    else:
        assert job.model is not None, "the job checks it"
        assert job.data is not None, "the job checks it"
        card, report = _calibrate_model(job.model, job.data, job)
    if as_json:
        print(json.dumps(report))
    else:
        show(*calibration_tables(card.policy, report))
    for each in report["warnings"]:
        warn(each)


def _calibrate_model(model: Path, data: Path, job: CalibrateOptions) -> tuple[CalibrationCard, dict[str, Any]]:
    """Rows of a model whose answers are tokens are prompts, without labels."""
    from earlyexit.network.store import read_card
    from earlyexit.tasks import find_task
    from earlyexit.tasks.token import TokenTask
    from offramp.commands.calibrate import calibrate as run_calibration
    from offramp.commands.calibrate import outcome_figures
    from offramp.commands.progress import progress_bars
    from offramp.commands.recording import record_exits
    from offramp.commands.worth import calibration_warnings
    from optimizer.calibration_file import CALIBRATION_FILE, beside_of, read_calibration_file

    labels = {"label_column": None} if read_card(model).task["name"] == TokenTask.name else {}
    rows, held_out = job.read(data, **labels), None
    if job.test is not None:
        held_out = _known_rows(model, job.read(job.test, part=job.test_part, **labels))
    with progress_bars() as progress:
        card, _ = run_calibration(model, rows, job, progress=progress)
        report = _report(card)
        beside = {each.name: read_calibration_file(each / CALIBRATION_FILE) for each in beside_of(model)}
        if beside:
            report["beside"] = {name: _report(each) for name, each in beside.items()}
        if held_out is not None:
            found = record_exits(
                model,
                held_out,
                card.policy,
                confidences=card.confidences,
                weights=card.weights,
                dtype=job.dtype,
                progress=lambda what, done, total: progress(f"test {what}", done, total),
            )
            task = find_task(read_card(model).task)
            report["test"] = outcome_figures(found.outcome(card.thresholds), task, card.metric)
    info = read_card(model)
    reference = None if info.chain.is_one else info.chain.names[-1]
    report["warnings"] = calibration_warnings(card, beside, info.provenance, reference)
    return card, report


def _report(card: CalibrationCard) -> dict[str, Any]:
    confidences = {} if card.confidences is None else {"confidences": card.confidences}
    return {"thresholds": card.thresholds, **confidences, "tested": card.tested}


def _calibrate_records(path: Path, job: CalibrateOptions) -> tuple[CalibrationCard, dict[str, Any]]:
    from offramp.commands.calibrate import calibrate_records, save_calibration
    from offramp.commands.train import make_folder
    from offramp.commands.worth import calibration_warnings
    from profiles.records_table import read_records

    found = read_records(path, scale=job.scale)
    if job.policy not in (None, found.score):
        raise InputError(f"--policy {job.policy}: {path} holds scores of {found.score}")
    card = calibrate_records(found, job)
    if job.out is not None:
        make_folder(job.out)
        save_calibration(card, found, job.out)
    return card, _report(card) | {"warnings": calibration_warnings(card, {}, None, None)}


def _known_rows(model: Path, rows: LabelledRows) -> LabelledRows:
    """The rows, whose labels the model knows; raises ModelFolderError or DataError before minutes are spent."""
    from earlyexit.codecs import find_codec
    from earlyexit.network.store import read_card
    from earlyexit.tasks import find_task
    from earlyexit.tasks.token import TokenTask

    card = read_card(model)
    if card.task["name"] == TokenTask.name:
        raise InputError("--test is of rows with labels; of a decoder part of the prompts tests the thresholds already")
    rows.targets(find_task(card.task), find_codec(card.codec, model))
    return rows
