"""`offramp sites`: lists the points of an ONNX file or a torch module at which ramps can be added."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Column, Table

from earlyexit.errors import GraphError
from earlyexit.foreign import read_foreign
from earlyexit.foreign.dataflow import Dataflow, Site
from earlyexit.foreign.model import ForeignOptions
from offramp.commands.jobs import SitesJob
from offramp.commands.output import cell, make_table, print_result


def run(job: SitesJob) -> None:
    """Prints the sites in the order in which inputs pass them. In JSON, the `tensor` of a set is a list.

    Raises InputError for a file that is not a model, and GraphError for a model without sites.
    """
    model = read_foreign(job.model, ForeignOptions(), open_size=job.open_size)
    if job.outputs:
        model = model.with_outputs(*job.outputs)
    try:
        sites = model.sites(sets=job.sets, measure=job.measure)
    except GraphError as error:
        raise GraphError(f"{error}; with --no-measure, sites are listed without times") from error
    if not sites:
        raise GraphError(f"{job.model} has no site: {_why(model.flow, job)}")
    document = {
        "nodes": len(model.flow.live),
        "sites": [
            {
                "tensor": site.tensors[0] if len(site.tensors) == 1 else list(site.tensors),
                "after": model.flow.maker[site.tensors[0]].name,
                "bytes_per_input": model.flow.bytes_of(site.tensors),
                "seconds_share": None if site.seconds_share is None else round(site.seconds_share, 6),
            }
            for site in sites
        ],
    }
    print_result(document, lambda: [_table(job.model, model.flow, sites)], as_json=job.as_json)


def _why(flow: Dataflow, job: SitesJob) -> str:
    num_working = sum(each.kind == "work" for each in flow.live)
    if num_working < 2:
        return f"{num_working} of its {len(flow.live)} operators compute with the inputs, and a site is between two"
    reason = f"no single tensor between its operators carries all information for {', '.join(flow.outputs)}"
    one_output = ", and --output chooses a single output" if len(flow.outputs) > 1 else ""
    return reason if job.sets else f"{reason}; --sets looks for sets of tensors{one_output}"


def _table(model: str, flow: Dataflow, sites: Sequence[Site]) -> Table:
    """Returns a table with a row per site."""
    title = f"{Path(model).name}: {len(sites)} sites among {len(flow.live)} operators"
    numbers = [Column(name, justify="right") for name in ("#", "time passed", "kB per input")]
    names = [Column(name, overflow="fold") for name in ("tensor", "after")]
    table = make_table(*numbers, *names, title=title)
    for number, site in enumerate(sites):
        num_bytes, maker = flow.bytes_of(site.tensors), flow.maker[site.tensors[0]]
        table.add_row(
            str(number),
            cell(site.seconds_share, ".1%"),
            "-" if num_bytes is None else f"{num_bytes / 1000:.1f}",
            "\n".join(site.tensors),
            f"{maker.op} {maker.name}",
        )
    return table
