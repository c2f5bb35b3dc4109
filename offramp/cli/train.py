"""`offramp train`: a model with ramps, from a checkpoint and labelled rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from earlyexit.errors import InputError
from offramp.cli.fields import takes_fields
from offramp.cli.options import AsJson, warn

if TYPE_CHECKING:
    from earlyexit.data.rows import LabelledRows
    from earlyexit.network.model import EarlyExitModel
    from offramp.commands.jobs import TrainOptions


def chain(
    models: Annotated[
        list[Path], typer.Argument(help="Folders of calibrated models, the smallest first; the last is the reference.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write the chain to; it names the models' folders.")],
    name: Annotated[str | None, typer.Option(help="Model name in URLs; default: the last model's.")] = None,
    as_json: AsJson = False,
) -> None:
    """Put small models before a large one: inputs that a model is not sure of go on to the next."""
    from offramp.commands.chain import chain_models

    card = chain_models(models, out, name=name)
    found = card.chain
    if as_json:
        networks = [
            {"name": each, "first": first, "end": end}
            for each, first, end in zip(found.names, found.starts, found.bounds, strict=True)
        ]
        print(json.dumps({"name": card.name, "networks": networks, "ramps": list(card.ramps)}))
        return
    for place, each in enumerate(found.names):
        role = "the reference" if place == len(found.names) - 1 else f"its end is ramp {found.ends[place]}"
        print(f"{each}: blocks {found.starts[place]} to {found.ends[place]}, {role}")
    print(f"chain: {out}; next: offramp calibrate {out} --data VALIDATION_FILE")


@takes_fields("offramp.commands.jobs:TrainOptions")
def train(job: TrainOptions) -> None:
    """Train a model's ramps (on a frozen backbone, or --joint with it)."""
    from offramp.commands import train as training
    from offramp.commands.jobs import TOKEN
    from offramp.commands.progress import progress_bars

    rows = job.read(job.data, label_column=None if job.task == TOKEN else job.label_column)
    held = None
    if job.hold_out is not None:
        rows, held = _held_out(rows, job.hold_out, job)
    with progress_bars() as progress:
        model = training.train(job, rows, job.out, held_out=held, progress=progress, warn=warn)
    _print_trained(model, len(rows), job.out)


def _print_trained(model: EarlyExitModel, num_rows: int, out: Path) -> None:
    from offramp.commands.train import head_in_words

    labels = f" {model.task.num_outputs} labels," if model.task.name == "label" else ""
    print(f"{num_rows} rows,{labels} ramps after blocks {list(model.ramp_indices)}: {out}")
    if model.task.name != "token":
        print(f"head of the full model: {head_in_words(model)}")


def _held_out(rows: LabelledRows, share: float, job: TrainOptions) -> tuple[LabelledRows, LabelledRows]:
    """Returns the rows to train on and the others, and writes those where calibration and tests find them."""
    from earlyexit.data.rows import write_labelled
    from offramp.commands.train import HELD_OUT, make_folder

    if rows.part_names:
        raise InputError("--hold-out writes rows and their labels; of images with joints or maps --part names a part")
    learned, held = rows.divide(share, job.seed)
    make_folder(job.out)
    written = write_labelled(held, job.out, HELD_OUT)
    print(f"{len(held)} of {len(rows)} rows held out: {written}")
    return learned, held
