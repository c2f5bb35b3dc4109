"""`offramp calibrate`: finds thresholds for a model or for exit records, and prints their expected effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from earlyexit.codecs import find_codec
from earlyexit.data.rows import has_labels
from earlyexit.errors import InputError
from earlyexit.network.store import CARD_FILE, read_card
from earlyexit.tasks import find_task
from offramp.commands.folders import CONFIG, keeps_answers, save_calibration
from offramp.commands.jobs import CalibrateOptions
from offramp.commands.output import cell, command, make_table, print_result, progress_bars, warn
from offramp.commands.thresholds import calibrate_records, calibration_warnings, outcome_figures
from optimizer.calibration.calibration_file import CALIBRATION_FILE, CalibrationCard, beside_of, read_calibration_file
from profiles.records_table import read_records
from profiles.scores import SCORES, Score


def run(job: CalibrateOptions) -> None:
    """Calibrates, and prints thresholds, their expected effect, and warnings."""
    job = job.model_copy(update={"source": str(job.records or job.data)})
    if job.records is None:
        card, report = _calibrate_model(job)
    else:
        records = read_records(job.records, scale=job.scale)
        if job.policy not in (None, records.score):
            raise InputError(f"--policy {job.policy}: {job.records} holds scores of {records.score}")
        card = calibrate_records(records, job)
        if job.out is not None:
            save_calibration(card, records, job.out)
        report = _report(card) | {"warnings": calibration_warnings(card, {}, None, None)}
    folder = job.model or job.out
    lines = [f"calibration: {folder / CALIBRATION_FILE}"] if folder else []
    print_result(report, lambda: calibration_tables(card.policy, report), lines, as_json=job.as_json)
    warn(*report["warnings"])


def _calibrate_model(job: CalibrateOptions) -> tuple[CalibrationCard, dict[str, Any]]:
    """Calibrates a model. The rows of decoders are prompts; models that keep their answers need no labels either."""
    from offramp.commands.calibrate import calibrate, record_exits  # imports torch, which records do not need

    model, data = job.model, job.data
    assert model is not None, "checked by the job"
    assert data is not None, "checked by the job"
    if (model / CONFIG).is_file() and not (model / CARD_FILE).is_file():
        ramp = command("ramp", model, "--data", data)
        raise InputError(
            f"{model} is a checkpoint of transformers, not a model folder; to add calibrated exits: {ramp}"
        )
    model_card = read_card(model)
    task, facts = find_task(model_card.task), model_card.provenance
    labels_optional = keeps_answers(facts) and "label_column" not in job.model_fields_set
    without_labels = labels_optional and not has_labels(data, label_column=job.label_column, part=job.part)
    rows, held_out = job.read(data, **({"label_column": None} if model_card.generates or without_labels else {})), None
    if job.test is not None:
        if model_card.generates:
            raise InputError("--test is not for decoders, whose thresholds are tested with a part of the prompts")
        held_out = job.read(job.test, part=job.test_part)
        held_out.targets(task, find_codec(model_card.codec, model))  # refuses labels that the model does not know
    with progress_bars() as progress:
        calibrate(model, rows, job, progress=progress)
        card = read_calibration_file(model / CALIBRATION_FILE)  # the folder's own, also where words are pruned
        report = _report(card)
        beside = {each.name: read_calibration_file(each / CALIBRATION_FILE) for each in beside_of(model)}
        if beside:
            report["beside"] = {name: _report(each) for name, each in beside.items()}
        if held_out is not None:
            tested = record_exits(
                model, held_out, card, job.dtype, lambda what, done, total: progress(f"test {what}", done, total)
            )
            report["test"] = outcome_figures(tested.outcome(card.thresholds), task, card.metric)
    reference = None if model_card.chain.is_one else model_card.chain.names[-1]
    report["warnings"] = calibration_warnings(card, beside, facts, reference)
    learned = {read_card(each).provenance.get("data") for each in model_card.network_folders(model)}
    if job.part is None and str(data) in learned:
        report["warnings"] += [f"ramps were trained on {data}, so they may break the budget: calibrate with other rows"]
    return card, report


def _report(card: CalibrationCard) -> dict[str, Any]:
    confidences = {} if card.confidences is None else {"confidences": card.confidences}
    return {"thresholds": card.thresholds, **confidences, "tested": card.tested}


def calibration_tables(policy: Score, report: dict[str, Any]) -> list[Table]:
    """Returns tables of thresholds and survival by block, of figures, and of alternative calibrations."""
    alternatives = [_alternatives_table(report["beside"])] if "beside" in report else []
    return [_blocks_table(policy, report), _figures_table(report), *alternatives]


def _alternatives_table(reports: Mapping[str, dict[str, Any]]) -> Table:
    """Returns a table of the calibrations that plans may choose instead."""
    table = make_table("in the folder", "ramps after blocks", "mean blocks", "worst of all subsets", title="Besides")
    for name, report in reports.items():
        tested, ramps = report["tested"], ", ".join(map(str, report["thresholds"])) or "-"
        worst = tested.get("worst_agreement", tested.get("worst_harm"))
        table.add_row(name, ramps, _figure(tested, "mean_blocks"), f"{worst:.4f}")
    return table


def _blocks_table(policy: Score, report: dict[str, Any]) -> Table:
    thresholds, confidences = report["thresholds"], report.get("confidences")
    above = [] if confidences is None else ["of values above"]
    table = make_table("block", f"leave at {policy}", *above, "survival", title="By block")
    for block, share in enumerate(report["tested"]["survival"]):
        counted = [] if confidences is None else [cell(confidences.get(block), ".4f")]
        table.add_row(str(block), leave_text(policy, thresholds.get(block)), *counted, f"{share:.3f}")
    return table


def leave_text(policy: Score, threshold: float | None) -> str:
    """Returns a ramp's threshold as text, or `never` or `always` if no score or every score passes it."""
    if threshold is None:
        return "-"
    rule = SCORES[policy]
    if threshold == rule.never:
        return "never"
    if threshold <= 0 if rule.larger_is_surer else threshold >= rule.score_at(float("-inf")):
        return "always"
    is_near_1 = rule.larger_is_surer and 0.9999 < threshold < 1
    return f"1 - {1 - threshold:.2g}" if is_near_1 else f"{threshold:#.4g}"


FIGURES = {
    "inputs": "inputs",
    "sequences": "sequences",
    "sequence_loss": "mean share of their tokens that may differ",
    "same_sequences": "sequences that are the full model's",
    "agreement": "agreement with the full model",
    "harm": "wrong where the full model is right",
    "worst_harm": "that with the worst of all subsets of ramps",
    "worst_agreement": "with the worst of all subsets of ramps",
    "accuracy": "accuracy",
    "full_accuracy": "accuracy of the full model",
    "mean_blocks": "mean blocks",
    "pck": "PCK",
    "full_pck": "PCK of the full model",
    "pixel_accuracy": "pixel accuracy",
    "full_pixel_accuracy": "pixel accuracy of the full model",
    "mean_iou": "mean IoU",
    "full_mean_iou": "mean IoU of the full model",
}
"""Figures of a report with their titles, in the order of the table."""


def _figures_table(report: dict[str, Any]) -> Table:
    titles = {"tested": "calibration"} | ({"test": "test"} if "test" in report else {})
    names = (name for name in FIGURES if name in report["tested"])
    rows = ((FIGURES[name], *(_figure(report[column], name) for column in titles)) for name in names)
    return make_table("", *titles.values(), title="Expected", rows=rows)


def _figure(figures: dict[str, Any], field: str) -> str:
    value = figures.get(field)
    if field == "mean_blocks":
        return f"{value:.2f} of {figures['num_blocks']}"
    return str(value) if isinstance(value, int) else cell(value, ".4f")
