"""`offramp calibrate`: thresholds of a model, or of exit records from elsewhere."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from earlyexit.errors import InputError
from offramp.cli.calibration_tables import calibration_tables, no_threshold_text
from offramp.cli.options import (
    DTYPES,
    METRICS,
    PARTS,
    SCORES,
    AsJson,
    Classes,
    Dtype,
    Joints,
    LabelColumn,
    OptionalDataFile,
    PairColumn,
    Part,
    Seed,
    TextColumn,
    choice,
    completes,
    integers,
    show,
)

if TYPE_CHECKING:
    from earlyexit.data.rows import LabelledRows
    from offramp.commands.calibrate import CalibrateJob
    from optimizer.calibration_file import CalibrationCard


Policy = Annotated[
    str | None,
    typer.Option(
        help="entropy, confidence, share, foreseen or similar; default: what fits the task, or the records'.",
        **completes(SCORES),
    ),
]
MetricName = Annotated[
    str,
    typer.Option(
        help="What is promised: agreement with the full model, or harm: to be wrong where that is right.",
        **completes(METRICS),
    ),
]
Budget = Annotated[
    float, typer.Option(min=1e-6, help="Largest mean loss; of labels, the share answered otherwise, or harmed.")
]
Ramps = Annotated[
    str | None,
    typer.Option(
        help="Ramps that get thresholds, 0,3,5 for instance, `ends`: of a chain's networks, or `all`. Default: all; of "
        "a chain the ends and what few are worth it, and few of the last network's besides, for plans to choose from. "
        "What is promised is promised of every subset of these."
    ),
]
Latency = Annotated[
    Path | None,
    typer.Option(
        help="Latency profile of the model: leaving is then priced by the seconds it saves. Default: by blocks, "
        "of a chain by their parameters."
    ),
]
RecordsFile = Annotated[
    Path | None, typer.Option(help="In the place of a model and data: exit records from elsewhere, .csv, .tsv or .npz.")
]
RecordsOut = Annotated[
    Path | None, typer.Option(help="With --records: folder for calibration.json and exit_records.npz.")
]
EnsembleFlag = Annotated[
    bool, typer.Option("--ensemble", help="Of a chain: mix what its networks say, where that pays (docs/models.md).")
]
Prune = Annotated[
    float | None,
    typer.Option(
        help="Of a chain: share of the words that is pruned where inputs go on to the next model, such as 0.14; "
        "calibrated besides, in the folder `pruned`. Not with --ensemble."
    ),
]
Answers = Annotated[
    int | None,
    typer.Option(
        min=1, help="Of decoders: most tokens of an answer; default: as its ramps learned of. Rows are prompts."
    ),
]
Decay = Annotated[
    float | None, typer.Option(help="Of decoders: what thresholds have on top at first falls to 1/e in so many tokens.")
]
Scale = Annotated[
    float | None,
    typer.Option(help="Of records whose answers are numbers: a difference of this much is wholly wrong."),
]


def calibrate(
    model: Annotated[Path | None, typer.Argument(help="Model folder, as `offramp train` writes it.")] = None,
    data: OptionalDataFile = None,
    text_column: TextColumn = "text",
    pair_column: PairColumn = None,
    label_column: LabelColumn = "label",
    part: Part = None,
    joints: Joints = None,
    classes: Classes = None,
    records: RecordsFile = None,
    scale: Scale = None,
    out: RecordsOut = None,
    policy: Policy = None,
    metric: MetricName = "agreement",
    budget: Budget = 0.01,
    confidence: Annotated[float, typer.Option(help="Probability that the budget is kept.")] = 0.90,
    ramps: Ramps = None,
    latency: Latency = None,
    ensemble: EnsembleFlag = False,
    prune: Prune = None,
    answers: Answers = None,
    decay: Decay = None,
    test: Annotated[Path | None, typer.Option(help="Labelled rows to report on as well.")] = None,
    test_part: Annotated[str | None, typer.Option(help="Which part of the test data.", **completes(PARTS))] = None,
    dtype: Dtype = "float32",
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Find thresholds that agree with the full model often enough, with stated confidence.

    For a model and labelled rows, or for exit records of anything that has exits (docs/models.md#exit-records).
    """
    from offramp.commands.calibrate import CalibrateJob
    from optimizer.risk import Guarantee

    job = CalibrateJob(
        policy=choice("policy", policy, SCORES),
        guarantee=Guarantee(budget=budget, confidence=confidence),
        metric=choice("metric", metric, METRICS),
        ramps=_ramps(ramps),
        latency=latency,
        ensemble=ensemble,
        prune=prune,
        answers=answers,
        decay=decay,
        dtype=choice("dtype", dtype, DTYPES),
        seed=seed,
        source=str(data if records is None else records),
    )
    if records is not None:
        _check_alone(model, data, test)
        return _print_calibration(*_calibrate_records(records, scale, out, job), as_json=as_json)
    if model is None or data is None:
        raise InputError("calibrate needs a model's folder and --data FILE, or --records FILE")
    if scale is not None or out is not None:
        raise InputError("--scale and --out go with --records; a model's calibration is kept in its folder")
    labels = _label_column(model, label_column)
    read = partial(_read_rows, (text_column, pair_column, labels), joints=joints, classes=classes)
    held_out = None if test is None else _known_rows(model, read(test, part=test_part))
    return _print_calibration(*_calibrate_model(model, read(data, part=part), held_out, job), as_json=as_json)


def _check_alone(*others: Path | None) -> None:
    if any(other is not None for other in others):
        raise InputError("--records stands for itself: no model, --data or --test goes with it")


def _ramps(text: str | None) -> tuple[int, ...] | Literal["all", "ends"] | None:
    match text:
        case None | "all" | "ends":
            return text
        case _:
            return integers("ramps", text)


def _label_column(model: Path, asked: str) -> str | None:
    """None where the model's answers are tokens: rows are then prompts."""
    from earlyexit.network.store import read_card
    from earlyexit.tasks.token import TokenTask

    return None if read_card(model).task["name"] == TokenTask.name else asked


def _read_rows(columns: tuple[str, str | None, str | None], path: Path, **options: Any) -> LabelledRows:
    from earlyexit.data.rows import read_labelled

    text, pair, label = columns
    return read_labelled(path, text_column=text, pair_column=pair, label_column=label, **options)


def _calibrate_model(
    model: Path, rows: LabelledRows, held_out: LabelledRows | None, job: CalibrateJob
) -> tuple[CalibrationCard, dict[str, Any]]:
    from earlyexit.network.store import read_card
    from earlyexit.tasks import find_task
    from offramp.commands.calibrate import calibrate as run_calibration
    from offramp.commands.calibrate import outcome_figures
    from offramp.commands.progress import progress_bars
    from offramp.commands.recording import record_exits
    from optimizer.calibration_file import CALIBRATION_FILE, beside_of, read_calibration_file

    with progress_bars() as progress:
        card, _ = run_calibration(model, rows, job, progress=progress)
        report = _report(card)
        beside = {each.name: _report(read_calibration_file(each / CALIBRATION_FILE)) for each in beside_of(model)}
        if beside:
            report["beside"] = beside
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
    return card, report


def _report(card: CalibrationCard) -> dict[str, Any]:
    confidences = {} if card.confidences is None else {"confidences": card.confidences}
    return {"thresholds": card.thresholds, **confidences, "tested": card.tested}


def _calibrate_records(
    path: Path, scale: float | None, out: Path | None, job: CalibrateJob
) -> tuple[CalibrationCard, dict[str, Any]]:
    from offramp.commands.calibrate import calibrate_records, save_calibration
    from offramp.commands.train import make_folder
    from profiles.records_table import read_records

    if job.ensemble:
        raise InputError("--ensemble needs what every network says, which exit records do not hold: give the chain")
    found = read_records(path, scale=scale)
    if job.policy not in (None, found.score):
        raise InputError(f"--policy {job.policy}: {path} holds scores of {found.score}")
    card = calibrate_records(found, job)
    if out is not None:
        make_folder(out)
        save_calibration(card, found, out)
    return card, _report(card)


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


def _print_calibration(card: CalibrationCard, report: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report))
    else:
        show(*calibration_tables(card.policy, report))
    if not card.thresholds:
        print(no_threshold_text(budget=card.budget, confidence=card.confidence), file=sys.stderr)
