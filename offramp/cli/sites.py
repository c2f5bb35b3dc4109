"""`offramp sites`: where ramps can go in a model that nobody prepared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offramp.cli.options import AsJson
from offramp.cli.printing import make_table, show

if TYPE_CHECKING:
    from rich.table import Table

    from offramp.jobs.sites import SitesFound


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
    from offramp.jobs.sites import SitesJob, sites_document, sites_of

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
