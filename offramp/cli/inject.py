"""`offramp inject`: ramps for an ONNX file or a torch module."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from earlyexit.errors import InputError
from offramp.cli.options import (
    POOLINGS,
    RAMP_STYLES,
    AsJson,
    PairColumn,
    Part,
    Seed,
    TextColumn,
    above_zero,
    choice,
    integers,
    make_table,
    show,
)
from offramp.cli.train import Codec, HoldOut, PoolingOption, Ramps, RampStyle

if TYPE_CHECKING:
    from rich.table import Table

    from earlyexit.data.rows import LabelledRows
    from offramp.commands.inject import Injected
    from offramp.commands.inject_job import InjectJob
    from offramp.commands.sites import SitesFound


def sites(
    model: Annotated[
        str,
        typer.Argument(help="A file .onnx, or module:function that returns a torch module and example inputs."),
    ],
    sets: Annotated[
        bool, typer.Option("--sets", help="Where no tensor carries everything for long: sets of two or three that do.")
    ] = False,
    measure: Annotated[
        bool,
        typer.Option("--measure/--no-measure", help="Run the model, on one thread of this CPU, for shares of time."),
    ] = True,
    output: Annotated[
        list[str] | None, typer.Option(help="Of several outputs, one that counts; may be given again; default: all.")
    ] = None,
    open_size: Annotated[
        int, typer.Option(min=1, help="Axes that an ONNX file leaves open have this size: tokens, pixels of a side.")
    ] = 128,
    as_json: AsJson = False,
) -> None:
    """List the places of a model where one tensor carries everything, so that it can be cut and left."""
    from offramp.commands.sites import SitesJob, sites_document, sites_of

    job = SitesJob(model=model, sets=sets, measure=measure, outputs=tuple(output or ()), open_size=open_size)
    found = sites_of(job)
    if as_json:
        print(json.dumps(sites_document(found)))
        return
    show(sites_table(model, found))


def sites_table(model: str, found: SitesFound) -> Table:
    """One row per site, in the order in which inputs pass them."""
    from rich.table import Column

    title = f"{Path(model).name}: {len(found.sites)} sites among {len(found.flow.live)} operators"
    numbers = [Column(name, justify="right") for name in ("#", "time passed", "kB per input")]
    names = [Column(name, overflow="fold") for name in ("tensor", "after")]
    table = make_table(*numbers, *names, title=title)
    for number, site in enumerate(found.sites):
        table.add_row(
            str(number),
            "-" if site.seconds_share is None else f"{site.seconds_share:.1%}",
            "-" if site.bytes_per_input is None else f"{site.bytes_per_input / 1000:.1f}",
            "\n".join(site.tensors),
            f"{found.flow.maker[site.tensors[0]].op} {site.after}",
        )
    return table


Model = Annotated[str, typer.Argument(help="ONNX file, or module:function that gives a torch module and examples.")]
FromAnswers = Annotated[
    bool, typer.Option("--from-answers", help="Train from the model's own answers; labels only name them.")
]
Rows = Annotated[
    Path,
    typer.Option(
        help="Rows, labelled or not: .csv, .tsv, .jsonl, .json (CLINC150), .txt, .npz, images in a folder or .zip."
    ),
]
Labelled = Annotated[
    str | None,
    typer.Option("--label-column", help="Column with the label; default: label, where there is one; else no labels."),
]
Labels = Annotated[
    Path | None, typer.Option(help="Names of the model's answers in its order, a line each; default: the data's.")
]
Sets = Annotated[bool, typer.Option("--sets", help="Cut too where two or three tensors carry everything together.")]
Tokenizer = Annotated[str | None, typer.Option(help="Of texts: checkpoint folder, hub name, minilm or tokenizer.json.")]


MEAN_HELP = (
    "Mean of the ONNX file's pixels, from 0 to 1, in the order in which the file takes the channels: red,green,blue, "
    "or with --bgr blue,green,red; like .485,.456,.406."
)
KNOWN_MEANS = ((0.485, 0.456, 0.406), (0.4815, 0.4578, 0.4082))
"""Means of red, green, blue in ImageNet (torchvision) and in CLIP's training data (openai/CLIP, clip.py)."""


def inject(
    model: Model,
    data: Rows,
    out: Annotated[Path, typer.Option(help="Folder to write the model to.")],
    name: Annotated[str | None, typer.Option(help="Model name in URLs; default: the folder's.")] = None,
    text_column: TextColumn = "text",
    pair_column: PairColumn = None,
    label_column: Labelled = None,
    part: Part = None,
    from_answers: FromAnswers = False,
    labels: Labels = None,
    codec: Codec = None,
    tokenizer: Tokenizer = None,
    max_length: Annotated[int | None, typer.Option(min=2, help="Longest input in tokens.")] = None,
    image_size: Annotated[str | None, typer.Option(help="HEIGHTxWIDTH, where an ONNX file leaves it open.")] = None,
    mean: Annotated[str | None, typer.Option(help=MEAN_HELP)] = None,
    std: Annotated[str | None, typer.Option(help="Standard deviation of the pixels, in the same order.")] = None,
    bgr: Annotated[bool, typer.Option("--bgr", help="The ONNX file takes blue, green, red.")] = False,
    output: Annotated[str | None, typer.Option(help="Of several outputs, the one that is the answer.")] = None,
    blocks: Annotated[int | None, typer.Option(help="Default: one more than there are sites, up to 12.")] = None,
    sets: Sets = False,
    ramp_style: RampStyle = "light",
    pooling: PoolingOption = "mean",
    ramps: Ramps = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the rows.")] = None,
    learning_rate: Annotated[float | None, typer.Option(callback=above_zero)] = None,
    hold_out: HoldOut = None,
    seed: Seed = 0,
) -> None:
    """Add ramps to an ONNX file or a torch module: cut the model into blocks, and train the ramps with it frozen."""
    from earlyexit.network.checkpoint import RampOptions
    from offramp.commands.inject_job import InjectJob
    from offramp.commands.train import resolve_backbone

    job = InjectJob(
        backbone=model,
        name=name or out.resolve().name,
        codec=codec,
        tokenizer=None if tokenizer is None else resolve_backbone(tokenizer),
        max_length=max_length,
        image_size=None if image_size is None else _size(image_size),
        pixels=_pixels(mean, std, bgr=bgr),
        labels=None if labels is None else _lines(labels),
        output=output,
        blocks=blocks,
        sets=sets,
        ramps=RampOptions(
            style=choice("ramp-style", ramp_style, RAMP_STYLES),
            pooling=choice("pooling", pooling, POOLINGS),
            at=None if ramps is None else integers("ramps", ramps),
        ),
        from_answers=from_answers,
        hold_out=hold_out,
        epochs=epochs,
        learning_rate=learning_rate,
        seed=seed,
        source=str(data),
    )
    _run(job, _rows(data, text_column, pair_column, label_column, part), out)


def _run(job: InjectJob, rows: LabelledRows, out: Path) -> None:
    from offramp.commands.inject import inject as run_injection
    from offramp.commands.progress import progress_bars

    with progress_bars() as progress:
        done = run_injection(job, rows, out, progress=progress, say=print)
    _tell(done, out)


def _rows(
    data: Path, text_column: str, pair_column: str | None, label_column: str | None, part: str | None
) -> LabelledRows:
    """With labels where there are any: they name the model's answers even where ramps do not learn from them."""
    from earlyexit.data.rows import has_labels, read_labelled

    if label_column is None and has_labels(data, part=part):
        label_column = "label"
    return read_labelled(data, text_column=text_column, pair_column=pair_column, label_column=label_column, part=part)


def _tell(done: Injected, out: Path) -> None:
    source = "the model's own answers" if done.model.info.provenance["imitate"] else "labels"
    print(f"{done.rows} rows, ramps after blocks {list(done.model.ramp_indices)} trained from {source}: {out}")
    if done.right is not None:
        print(f"the model answers {done.right:.1%} of the rows as they are labelled")
    kept = "FILE" if done.held_out is None else done.held_out
    print(f"next: offramp calibrate {out} --data {kept}, then offramp serve {out}")


def _size(text: str) -> tuple[int, int]:
    height, _, width = text.partition("x")
    if not (height.isdigit() and width.isdigit() and int(height) and int(width)):
        raise InputError(f"--image-size {text!r}; HEIGHTxWIDTH in pixels is needed, like 224x224")
    return int(height), int(width)


def _pixels(mean: str | None, std: str | None, *, bgr: bool) -> dict[str, object]:
    given = {name: _channels(name, text) for name, text in (("mean", mean), ("std", std)) if text is not None}
    in_rgb = given.get("mean", ())[:: -1 if bgr else 1]
    if any(
        all(abs(a - b) < 1e-3 for a, b in zip(in_rgb[::-1], known, strict=False)) for known in KNOWN_MEANS if in_rgb
    ):
        order = "with --bgr the order is blue,green,red" if bgr else "without --bgr the order is red,green,blue"
        print(f"--mean {mean}: these are well-known means, but reversed; {order}", file=sys.stderr)
    return {**given, **({"order": "BGR"} if bgr else {})}


def _channels(name: str, text: str) -> tuple[float, ...]:
    try:
        values = tuple(map(float, text.split(",")))
    except ValueError:
        values = ()
    if len(values) != 3 or (name == "std" and min(values) <= 0):
        raise InputError(f"--{name} {text!r}; three numbers are needed, one for each channel, by commas")
    if not all(0 <= value <= 1 for value in values):
        raise InputError(f"--{name} {text!r}; pixels count from 0 to 1 here: divide numbers that are out of 255 by 255")
    return values


def _lines(path: Path) -> tuple[str, ...]:
    from earlyexit.data.text_tables import read_texts

    return read_texts(path)
