"""The commands that make a model: parses, calls, prints. Registered on the app of `offramp.cli.app`."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from earlyexit.errors import InputError
from offramp.cli.options import (
    PARTS,
    POOLINGS,
    RAMP_STYLES,
    SCORES,
    AsJson,
    DataFile,
    LabelColumn,
    OptionalDataFile,
    PairColumn,
    Part,
    Seed,
    TextColumn,
    above_zero,
    choice,
    completes,
    integers,
)

if TYPE_CHECKING:
    from earlyexit.dataset import LabelledRows
    from offramp.jobs.calibration import CalibrateJob
    from optimizer.calibration_file import CalibrationCard

HELD_OUT = "held_out"

commands = typer.Typer()


@commands.command()
def train(
    data: DataFile,
    out: Annotated[Path, typer.Option(help="Folder to write the model to.")],
    backbone: Annotated[
        str, typer.Option(help="Checkpoint folder or hub name, 'minilm' (packaged), or your own module:function.")
    ] = "minilm",
    tokenizer: Annotated[
        str | None, typer.Option(help="Checkpoint folder, hub name, minilm or tokenizer.json; default: the backbone's.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Model name in URLs; default: the folder's.")] = None,
    text_column: TextColumn = "text",
    pair_column: PairColumn = None,
    label_column: LabelColumn = "label",
    part: Part = None,
    task: Annotated[str, typer.Option(help="label, regression, or your own module:function.")] = "label",
    codec: Annotated[
        str | None, typer.Option(help="Your own, module:function; default: as the network and the data say.")
    ] = None,
    ramp_style: Annotated[
        str,
        typer.Option(
            help="light (pooling and linear), mlp (one hidden layer of 64) or pooler (DeeBERT's).",
            **completes(RAMP_STYLES),
        ),
    ] = "light",
    pooling: Annotated[
        str,
        typer.Option(help="mean (of tokens, or a map), first (token) or grid (of a map).", **completes(POOLINGS)),
    ] = "mean",
    ramps: Annotated[
        str | None, typer.Option(help="Blocks that get a ramp, like 0,2,4; default: all but the last.")
    ] = None,
    joint: Annotated[bool, typer.Option("--joint", help="Train the whole model, not only its ramps.")] = False,
    imitate: Annotated[
        bool, typer.Option("--imitate", help="Have ramps learn of the full model's outputs, not of the labels.")
    ] = False,
    max_length: Annotated[int | None, typer.Option(min=2, help="Longest input in tokens.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1)] = None,
    learning_rate: Annotated[float | None, typer.Option(callback=above_zero)] = None,
    hold_out: Annotated[
        float | None, typer.Option(help="Share of each label's rows to keep from training: held_out in --out.")
    ] = None,
    seed: Seed = 0,
) -> None:
    """Train a model's ramps (on a frozen backbone, or --joint with it)."""
    from earlyexit.checkpoint import RampOptions
    from earlyexit.dataset import read_labelled
    from offramp.jobs.progress import progress_bars
    from offramp.jobs.train_job import TrainJob
    from offramp.jobs.training import head_in_words, resolve_backbone
    from offramp.jobs.training import train as run_training

    rows = read_labelled(data, text_column=text_column, pair_column=pair_column, label_column=label_column, part=part)
    options = RampOptions(
        style=choice("ramp-style", ramp_style, RAMP_STYLES),
        pooling=choice("pooling", pooling, POOLINGS),
        at=None if ramps is None else integers("ramps", ramps),
    )
    job = TrainJob(
        backbone=resolve_backbone(backbone),
        tokenizer=None if tokenizer is None else resolve_backbone(tokenizer),
        name=name or out.resolve().name,
        codec=codec,
        task=task,
        ramps=options,
        joint=joint,
        imitate=imitate,
        max_length=max_length,
        epochs=epochs,
        learning_rate=learning_rate,
        seed=seed,
        source=str(data),
    )
    if hold_out is not None:
        rows = _hold_out(rows, hold_out, seed, out)
    with progress_bars() as progress:
        model = run_training(job, rows, out, progress=progress)
    labels = "" if task != "label" else f" {model.task.num_outputs} labels,"
    print(f"{len(rows)} rows,{labels} ramps after blocks {list(model.ramp_indices)}: {out}")
    print(f"head of the full model: {head_in_words(model)}")


@commands.command()
def calibrate(
    model: Annotated[Path | None, typer.Argument(help="Model folder, as `offramp train` writes it.")] = None,
    data: OptionalDataFile = None,
    text_column: TextColumn = "text",
    pair_column: PairColumn = None,
    label_column: LabelColumn = "label",
    part: Part = None,
    records: Annotated[
        Path | None,
        typer.Option(help="In the place of a model and data: exit records from elsewhere, .csv, .tsv or .npz."),
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(help="Of records whose answers are numbers: a difference of this much is wholly wrong."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="With --records: folder for calibration.json and exit_records.npz.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="entropy or confidence; default: entropy, or the records'.", **completes(SCORES))
    ] = None,
    budget: Annotated[
        float, typer.Option(min=1e-6, help="Largest mean loss; of labels, the share answered otherwise.")
    ] = 0.01,
    confidence: Annotated[float, typer.Option(help="Probability that the budget is kept.")] = 0.90,
    test: Annotated[Path | None, typer.Option(help="Labelled rows to report on as well.")] = None,
    test_part: Annotated[str | None, typer.Option(help="Which part of the test data.", **completes(PARTS))] = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Find thresholds that agree with the full model often enough, with stated confidence.

    For a model and labelled rows, or for exit records of anything that has exits (docs/records.md).
    """
    from offramp.jobs.calibration import CalibrateJob
    from optimizer.risk import Guarantee

    guarantee = Guarantee(budget=budget, confidence=confidence)
    score = None if policy is None else choice("policy", policy, SCORES)
    if records is not None:
        if model is not None or data is not None or test is not None:
            raise InputError("--records stands for itself: no model, --data or --test goes with it")
        job = CalibrateJob(policy=score, guarantee=guarantee, seed=seed, source=str(records))
        card, report = _calibrate_records(records, scale, out, job)
        return _print_calibration(card, report, as_json=as_json)
    if model is None or data is None:
        raise InputError("calibrate needs a model's folder and --data FILE, or --records FILE")
    if scale is not None or out is not None:
        raise InputError("--scale and --out go with --records; a model's calibration is kept in its folder")
    read = partial(_read_rows, text_column=text_column, pair_column=pair_column, label_column=label_column)
    held_out = None if test is None else _known_rows(model, read(test, part=test_part))
    job = CalibrateJob(policy=score, guarantee=guarantee, seed=seed, source=str(data))
    card, report = _calibrate_model(model, read(data, part=part), held_out, job)
    return _print_calibration(card, report, as_json=as_json)


def _read_rows(path: Path, **options: Any) -> LabelledRows:
    from earlyexit.dataset import read_labelled

    return read_labelled(path, **options)


def _calibrate_model(
    model: Path, rows: LabelledRows, held_out: LabelledRows | None, job: CalibrateJob
) -> tuple[CalibrationCard, dict[str, Any]]:
    from offramp.jobs.calibration import calibrate as run_calibration
    from offramp.jobs.calibration import outcome_figures, record_exits
    from offramp.jobs.progress import progress_bars

    with progress_bars() as progress:
        card, _ = run_calibration(model, rows, job, progress=progress)
        report: dict[str, Any] = {"thresholds": card.thresholds, "tested": card.tested}
        if held_out is not None:
            found = record_exits(
                model, held_out, card.policy, progress=lambda what, done, total: progress(f"test {what}", done, total)
            )
            report["test"] = outcome_figures(found.outcome(card.thresholds))
    return card, report


def _calibrate_records(
    path: Path, scale: float | None, out: Path | None, job: CalibrateJob
) -> tuple[CalibrationCard, dict[str, Any]]:
    from offramp.jobs.calibration import calibrate_records, save_calibration
    from offramp.jobs.training import make_folder
    from profiles.records_table import read_records

    found = read_records(path, scale=scale)
    if job.policy not in (None, found.score):
        raise InputError(f"--policy {job.policy}: {path} holds scores of {found.score}")
    card = calibrate_records(found, job)
    if out is not None:
        make_folder(out)
        save_calibration(card, found, out)
    return card, {"thresholds": card.thresholds, "tested": card.tested}


def _hold_out(rows: LabelledRows, share: float, seed: int, out: Path) -> LabelledRows:
    """The rows to train on; the others are written where calibration and tests find them."""
    from earlyexit.dataset import write_labelled
    from offramp.jobs.training import make_folder

    if not 0 < share < 1:
        raise InputError(f"--hold-out {share:g}; a share between 0 and 1 is needed")
    learned, held = rows.divide(share, seed)
    make_folder(out)
    written = write_labelled(held, out, HELD_OUT)
    print(f"{len(held)} of {len(rows)} rows held out: {written}")
    return learned


def _known_rows(model: Path, rows: LabelledRows) -> LabelledRows:
    """The rows, whose labels the model knows; raises ModelFolderError or DataError before minutes are spent."""
    from earlyexit.store import read_card
    from earlyexit.tasks import find_task

    find_task(read_card(model).task).targets(rows.labels)
    return rows


def _print_calibration(card: CalibrationCard, report: dict[str, Any], *, as_json: bool) -> None:
    from rich.console import Console

    from offramp.cli.report_calibration import calibration_tables, no_threshold_text

    if as_json:
        print(json.dumps(report))
    else:
        Console().print(*calibration_tables(card.policy, report))
    if not card.thresholds:
        print(no_threshold_text(budget=card.budget, confidence=card.confidence), file=sys.stderr)
