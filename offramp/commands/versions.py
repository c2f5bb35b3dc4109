"""`offramp versions`, `canary`, `promote`, `load` and `unload`: versions of a model on a running service."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from earlyexit.network.store import read_card
from offramp.client.client import Client
from offramp.commands.options import CanaryJob, LoadJob, PromoteJob, UnloadJob, VersionsJob
from offramp.commands.output import cell, counts_text, make_table, print_result


def versions(job: VersionsJob) -> None:
    """Prints models, versions and their states."""
    with Client(job.url, api_key=job.api_key) as client:
        rows = client.versions()
    fields = ("name", "version", "state", "reason")
    table = make_table("model", *fields[1:], rows=([row[field] for field in fields] for row in rows))
    print_result(rows, lambda: [table], as_json=job.as_json)


def canary(job: CanaryJob) -> None:
    """Starts, ends or reads a canary, and prints it next to the default version."""
    with Client(job.url, api_key=job.api_key) as client:
        if job.end:
            report = client.end_canary()
        elif job.version is None:
            report = client.canary()
        else:
            report = client.set_canary(job.version, share=job.share, compare_share=job.compare)
    print_result(report, lambda: [side_by_side_table(report)], as_json=job.as_json)


def promote(job: PromoteJob) -> None:
    """Makes a version the default, and prints it next to the canary, if any."""
    with Client(job.url, api_key=job.api_key) as client:
        report = client.promote(job.version)
    print_result(report, lambda: [side_by_side_table(report)], as_json=job.as_json)


def load(job: LoadJob) -> None:
    """Starts a version, and waits until it is ready."""
    from offramp.spec.file import read_service  # imports the planner

    service = read_service(job.service)
    model, settings = read_card(Path(service.settings.model)).name, service.moved_to(job.at).settings
    with Client(job.url, api_key=job.api_key) as client:
        client.load(model, settings.version, settings=settings.model_dump_json(), timeout_s=job.timeout_s)
    print(f"version {settings.version} of {model} is ready")


def unload(job: UnloadJob) -> None:
    """Stops a version, and waits until it is gone."""
    with Client(job.url, api_key=job.api_key) as client:
        client.unload(job.model, job.version, timeout_s=job.timeout_s)
    print(f"version {job.version} of {job.model} is gone")


def side_by_side_table(report: Mapping[str, Any]) -> Table:
    """Returns a table with the default version and the canary in two columns."""
    names, canary, compared = list(report["versions"]), report["canary"], report["compared"]
    title = f"{report['model']}: version {report['default']}"
    if canary is not None:
        title += f", and {canary['version']} for {canary['share']:.1%} of the requests"
    agreement = f"they agree on {cell(compared['agreement'], '.2%')} of {compared['inputs']} inputs that both answered"
    caption = None if compared["agreement"] is None else agreement
    rows: dict[str, tuple[str, Callable[[Any], str]]] = {
        "requests": ("requests", str),
        "errors": ("errors", counts_text),
        "p50": ("p50_s", _ms),
        "p99": ("p99_s", _ms),
        "left after block": ("exits", counts_text),
        "agreement with its full model": ("agreement", partial(cell, form=".2%")),
    }
    versions = [report["versions"][name] for name in names]
    cells = ((title, *(text(each[field]) for each in versions)) for title, (field, text) in rows.items())
    return make_table("", *(f"version {name}" for name in names), title=title, caption=caption, rows=cells)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f} ms"
