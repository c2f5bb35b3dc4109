"""`offramp doctor`: parses, calls, prints. Registered on the app of `offramp.cli.app`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from offramp.cli.options import AsJson

commands = typer.Typer()


@commands.command()
def doctor(
    targets: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[MODEL_OR_SERVICE]...", help="Model folders and service files to look at as well."),
    ] = None,
    port: Annotated[
        list[int] | None, typer.Option(min=1, max=65535, help="Port wanted, may be repeated; default: 8000.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine: libraries, cores, GPUs, memory, ports, what Ray left. Exit status 1 if something failed.

    Starts nothing, and changes nothing.
    """
    from rich.console import Console

    from offramp.cli.report_doctor import doctor_document, doctor_table
    from offramp.doctor.checks import examine, has_failed
    from offramp.doctor.look import look

    findings = examine(look(targets or (), port or ()))
    if as_json:
        print(json.dumps(doctor_document(findings), indent=2))
    else:
        Console().print(doctor_table(findings))
    raise typer.Exit(1 if has_failed(findings) else 0)
