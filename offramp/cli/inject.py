"""`offramp inject`: ramps for an ONNX file or a torch module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offramp.cli.fields import takes_fields
from offramp.cli.options import AsJson, make_table, show, warn

if TYPE_CHECKING:
    from rich.table import Table

    from earlyexit.data.rows import LabelledRows
    from offramp.commands.inject import Injected
    from offramp.commands.jobs import InjectJob, InjectOptions, SitesJob
    from offramp.commands.sites import SitesFound


@takes_fields("offramp.commands.jobs:SitesJob")
def sites(job: SitesJob, as_json: AsJson = False) -> None:
    """List the places of a model where one tensor carries everything, so that it can be cut and left."""
    from offramp.commands.sites import sites_document, sites_of

    found = sites_of(job)
    if as_json:
        print(json.dumps(sites_document(found)))
        return
    show(sites_table(job.model, found))


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


KNOWN_MEANS = ((0.485, 0.456, 0.406), (0.4815, 0.4578, 0.4082))
"""Means of red, green, blue in ImageNet (torchvision) and in CLIP's training data (openai/CLIP, clip.py)."""


@takes_fields("offramp.commands.jobs:InjectOptions")
def inject(
    job: InjectOptions,
    labels: Annotated[
        Path | None, typer.Option(help="Names of the model's answers in its order, a line each; default: the data's.")
    ] = None,
) -> None:
    """Add ramps to an ONNX file or a torch module: cut the model into blocks, and train the ramps with it frozen."""
    from earlyexit.data.text_tables import read_texts
    from offramp.commands.inject import inject as run_injection
    from offramp.commands.progress import progress_bars

    warn_of_reversed_means(job)
    if labels is not None:
        job = job.model_copy(update={"labels": read_texts(labels)})
    rows = read_rows(job)
    with progress_bars() as progress:
        done = run_injection(job, rows, job.out, progress=progress, say=print)
    _tell(done, job.out)


def read_rows(job: InjectOptions) -> LabelledRows:
    """Returns rows, with labels where there are any: they name the model's answers even where ramps learn others."""
    from earlyexit.data.rows import has_labels

    without = job.label_column is None and has_labels(job.data, part=job.part)
    return job.read(job.data, label_column="label" if without else job.label_column)


def _tell(done: Injected, out: Path) -> None:
    source = "the model's own answers" if done.model.info.provenance["imitate"] else "labels"
    print(f"{done.rows} rows, ramps after blocks {list(done.model.ramp_indices)} trained from {source}: {out}")
    if done.right is not None:
        print(f"the model answers {done.right:.1%} of the rows as they are labelled")
    for each in done.warnings:
        warn(each)
    kept = "FILE" if done.held_out is None else done.held_out
    print(f"next: offramp calibrate {out} --data {kept}, then offramp serve {out}")


def warn_of_reversed_means(job: InjectJob) -> None:
    """Print a warning where the means of the channels are well known, in the reverse order."""
    if job.mean is None:
        return
    in_bgr = job.mean if job.bgr else job.mean[::-1]
    if any(all(abs(a - b) < 1e-3 for a, b in zip(in_bgr, known, strict=True)) for known in KNOWN_MEANS):
        order = "with --bgr the order is blue,green,red" if job.bgr else "without --bgr the order is red,green,blue"
        given = ",".join(map(str, job.mean))
        warn(f"--mean {given}: these are well-known means, but reversed; {order}")
