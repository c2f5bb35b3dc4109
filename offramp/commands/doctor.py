"""`offramp doctor`: checks this machine, and prints the findings."""

from __future__ import annotations

import json

import typer
from rich.table import Column
from rich.text import Text

from offramp.commands.options import DoctorJob
from offramp.commands.output import make_table, show
from offramp.doctor.inspection import examine

STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def run(job: DoctorJob) -> None:
    """Prints the findings with advice; the exit status is 1 if a check failed."""
    findings = examine(job.targets, job.port or ())
    if job.as_json:
        print(json.dumps([each._asdict() for each in findings], indent=2))
    else:
        columns = Column("check", no_wrap=True), Column(no_wrap=True), Column("found", overflow="fold")
        table = make_table(*columns, box=None, pad_edge=False)
        for each in findings:
            text = Text(each.found)
            if each.advice is not None:
                text.append(f"\n-> {each.advice}", style="bold")
            table.add_row(each.check, Text(each.verdict, style=STYLES[each.verdict]), text)
        show(table)
    raise typer.Exit(int(any(each.verdict == "failed" for each in findings)))
