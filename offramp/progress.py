"""Long work shows bars on a terminal, and one line per step where there is none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from earlyexit.train import Progress as Report


@contextmanager
def progress_bars() -> Iterator[Report]:
    """A callback (what, done, total) that draws on stderr."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield report


def _lines() -> Report:
    """A line at every tenth of the way."""
    tenths: dict[str, int] = {}

    def report(what: str, done: int, total: int) -> None:
        tenth = done * 10 // total
        if tenth > tenths.get(what, -1):
            tenths[what] = tenth
            print(f"{what:<10} {done:>8} / {total}", file=sys.stderr, flush=True)  # noqa: T201 - this is the progress line

    return report
