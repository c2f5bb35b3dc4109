"""How `offramp doctor` says what it found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from offramp.doctor.finding import Finding

STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def doctor_table(findings: Mapping[str, tuple[Finding, ...]]) -> Table:
    """A line for every finding, with what to do below it."""
    table = Table(box=None, pad_edge=False)
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
