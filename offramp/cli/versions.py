"""Versions of a model: `offramp versions`, `canary`, `promote`, `load` and `unload`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from earlyexit.errors import InputError
from offramp.cli.options import AsJson, http_address, make_table, show
from offramp.cli.service import At, Patience, ServiceFile, moved

if TYPE_CHECKING:
    from rich.table import Table

Url = Annotated[str, typer.Option(help="The service at the root.", callback=http_address)]
Version = Annotated[str, typer.Option(help="The version.")]
LOCAL = "http://127.0.0.1:8000"


def versions(url: Url = LOCAL, as_json: AsJson = False) -> None:
    """List the models and versions of a cluster, and their states."""
    from offramp.client.client import Client

    with Client(url) as client:
        rows = client.versions()
    if as_json:
        print(json.dumps(rows))
    else:
        show(index_table(rows))


def canary(
    url: Url = LOCAL,
    version: Annotated[str | None, typer.Option(help="The version on trial; default: say how it goes.")] = None,
    share: Annotated[float, typer.Option(min=0, max=1, help="Share of the requests that it answers.")] = 0.0,
    compare: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the requests that both versions are asked.")
    ] = 0.0,
    end: Annotated[bool, typer.Option("--end", help="Send all requests to the default version again.")] = False,
    as_json: AsJson = False,
) -> None:
    """Let a version answer a share of the requests, or say how default and canary compare."""
    from offramp.client.client import Client

    if end and version is not None:
        raise InputError("--end ends the canary, --version begins one: give one of them")
    if version is None and (share or compare):
        raise InputError("--share and --compare need --version")
    with Client(url) as client:
        if end:
            seen = client.end_canary()
        elif version is None:
            seen = client.canary()
        else:
            seen = client.set_canary(version, share=share, compare_share=compare)
    _show_sides(seen, as_json=as_json)


def promote(version: Version, url: Url = LOCAL, as_json: AsJson = False) -> None:
    """Let a version answer all requests that name none."""
    from offramp.client.client import Client

    with Client(url) as client:
        seen = client.promote(version)
    _show_sides(seen, as_json=as_json)


def load(service: ServiceFile, url: Url = LOCAL, at: At = None, timeout_s: Patience = 600.0) -> None:
    """Start a service file's version beside the others, and wait until it is ready."""
    from earlyexit.network.store import read_card
    from offramp.client.client import Client
    from offramp.spec.file import read_service

    found = read_service(service)
    model, settings = read_card(Path(found.settings.model)).name, moved(found, at).settings
    with Client(url) as client:
        client.load(model, settings.version, settings=settings.model_dump_json(), timeout_s=timeout_s)
    print(f"version {settings.version} of {model} is ready")


def unload(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    version: Version,
    url: Url = LOCAL,
    timeout_s: Patience = 600.0,
) -> None:
    """End a version that no request is sent to, and wait until it is gone."""
    from offramp.client.client import Client

    with Client(url) as client:
        client.unload(model, version, timeout_s=timeout_s)
    print(f"version {version} of {model} is gone")


def _show_sides(seen: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(seen))
    else:
        show(side_by_side_table(seen))


def index_table(rows: Sequence[Mapping[str, str]]) -> Table:
    """The repository index."""
    fields = ("name", "version", "state", "reason")
    return make_table("model", *fields[1:], rows=([row[field] for field in fields] for row in rows))


def side_by_side_table(seen: Mapping[str, Any]) -> Table:
    """Default and canary in two columns."""
    names = list(seen["versions"])
    canary = seen["canary"]
    title = f"{seen['model']}: version {seen['default']}"
    if canary is not None:
        title += f", and {canary['version']} for {canary['share']:.1%} of the requests"
    table = make_table("", *(f"version {name}" for name in names), title=title, caption=_compared(seen["compared"]))
    sides = [seen["versions"][name] for name in names]
    table.add_row("requests", *(str(side["requests"]) for side in sides))
    table.add_row("errors", *(_counts(side["errors"]) for side in sides))
    table.add_row("p50", *(_ms(side["p50_s"]) for side in sides))
    table.add_row("p99", *(_ms(side["p99_s"]) for side in sides))
    table.add_row("left after block", *(_counts(side["exits"]) for side in sides))
    table.add_row("agreement with its full model", *(_percent(side["agreement"]) for side in sides))
    return table


def _compared(compared: Mapping[str, Any]) -> str | None:
    if compared["agreement"] is None:
        return None
    return f"asked the same {compared['inputs']} inputs, they agree on {compared['agreement']:.2%}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items()) or "-"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f} ms"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.2%}"
