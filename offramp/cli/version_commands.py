"""The commands around versions of a model: parses, calls, prints. Registered on the app of `offramp.cli.app`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from earlyexit.errors import InputError
from offramp.cli.options import AsJson, above_zero, http_address

ServiceFile = Annotated[Path, typer.Argument(metavar="SERVICE", help="Service file of the version, YAML or JSON.")]
Url = Annotated[str, typer.Option(help="The service at the root.", callback=http_address)]
Version = Annotated[str, typer.Option(help="The version.")]
At = Annotated[str | None, typer.Option(help="Folder where the nodes find model/, exit records and state.")]
Patience = Annotated[float, typer.Option(callback=above_zero, help="How long to wait until it is done.")]
LOCAL = "http://127.0.0.1:8000"

commands = typer.Typer()


@commands.command()
def versions(url: Url = LOCAL, as_json: AsJson = False) -> None:
    """List the models and versions of a cluster, and their states."""
    from offramp.cli.report_versions import index_table
    from offramp.client.client import Client

    with Client(url) as client:
        rows = client.versions()
    if as_json:
        print(json.dumps(rows))
    else:
        _show(index_table(rows))


@commands.command()
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


@commands.command()
def promote(version: Version, url: Url = LOCAL, as_json: AsJson = False) -> None:
    """Let a version answer all requests that name none."""
    from offramp.client.client import Client

    with Client(url) as client:
        seen = client.promote(version)
    _show_sides(seen, as_json=as_json)


@commands.command()
def load(service: ServiceFile, url: Url = LOCAL, at: At = None, timeout_s: Patience = 600.0) -> None:
    """Start a service file's version beside the others, and wait until it is ready."""
    from earlyexit.store import read_card
    from offramp.cli.service_commands import moved
    from offramp.client.client import Client
    from offramp.service.file import read_service

    found = read_service(service)
    model, settings = read_card(Path(found.settings.model)).name, moved(found, at).settings
    with Client(url) as client:
        client.load(model, settings.version, settings=settings.model_dump_json(), timeout_s=timeout_s)
    print(f"version {settings.version} of {model} is ready")


@commands.command()
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
    from offramp.cli.report_versions import side_by_side_table

    if as_json:
        print(json.dumps(seen))
    else:
        _show(side_by_side_table(seen))


def _show(table: Any) -> None:
    from rich.console import Console

    Console().print(table)
