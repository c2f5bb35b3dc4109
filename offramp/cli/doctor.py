"""`offramp doctor`, and how it says what it found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offramp.cli.options import AsJson, make_table, show

if TYPE_CHECKING:
    from rich.table import Table

    from offramp.doctor.checks import Finding

STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}


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
    from offramp.doctor.checks import examine, has_failed
    from offramp.doctor.look import look

    findings = examine(look(targets or (), port or ()))
    if as_json:
        print(json.dumps(doctor_document(findings), indent=2))
    else:
        show(doctor_table(findings))
    raise typer.Exit(1 if has_failed(findings) else 0)


def doctor_table(findings: Mapping[str, tuple[Finding, ...]]) -> Table:
    """A line for every finding, with what to do below it."""
    from rich.text import Text

    table = make_table(box=None, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found", overflow="fold")
    for name, group in findings.items():
        for each in group:
            words = Text(each.found)
            if each.advice is not None:
                words.append(f"\n-> {each.advice}", style="bold")
            table.add_row(name, Text(each.verdict, style=STYLES[each.verdict]), words)
    return table


def doctor_document(findings: Mapping[str, tuple[Finding, ...]]) -> list[dict[str, Any]]:
    """The same as JSON."""
    return [
        {"check": name, "verdict": each.verdict, "found": each.found, "advice": each.advice}
        for name, group in findings.items()
        for each in group
    ]
