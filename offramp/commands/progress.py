"""Progress of long work (bars on a terminal, lines elsewhere), and facts about this machine for provenance."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from offramp import installed_version

if TYPE_CHECKING:
    from earlyexit.training.ramps import Progress as Report


LIBRARIES = ("offramp", "torch", "transformers", "tokenizers", "numpy", "ray", "onnxruntime")


def provenance(**facts: Any) -> dict[str, Any]:
    """Returns date, machine, library versions and commit, with the facts that the caller adds (seed, data, options)."""
    return {
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "python": platform.python_version(),
        "versions": {name: number for name in LIBRARIES if (number := installed_version(name))},
        "commit": _commit(),
        **facts,
    }


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _commit() -> str | None:
    """Returns the commit of the checkout; None for an installed package, or without git."""
    here = Path(__file__).resolve().parent.parent
    try:
        done = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


FIRST_LINE = 1000
"""Count at which work of unknown length prints its first line of progress."""


@contextmanager
def progress_bars() -> Iterator[Report]:
    """Yields a callback (step, done, total) that shows progress on stderr. A total of 0 means that it is unknown."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    with _bars(BarColumn(), MofNCompleteColumn(), _Rate(), TimeElapsedColumn(), TimeRemainingColumn()) as bars:
        tasks: dict[str, TaskID] = {}

        def report(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bars.add_task(step, total=total or None)
            bars.update(tasks[step], completed=done)

        yield report


@contextmanager
def progress_share(step: str) -> Iterator[Callable[[float], None]]:
    """Yields a callback that takes the share done so far. The bar is drawn only if stderr is a terminal."""
    columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with _bars(*columns, transient=True, disable=not sys.stderr.isatty()) as bars:
        task = bars.add_task(step, total=1.0)
        yield lambda share: bars.update(task, completed=share)


def _bars(*columns: ProgressColumn, **options: Any) -> Progress:
    """Returns progress bars on stderr, each with its description."""
    return Progress(TextColumn("{task.description}"), *columns, console=Console(stderr=True), **options)


class _Rate(ProgressColumn):
    def render(self, task: Task) -> str:
        """Returns the mean rate per second since the start."""
        return f"{task.completed / task.elapsed:.1f}/s" if task.elapsed else ""


def _lines() -> Report:
    """Returns a callback that prints a line for each tenth of the total, or each time that the count has doubled."""
    printed: dict[str, int] = {}

    def report(step: str, done: int, total: int) -> None:
        level = done * 10 // total if total else (done // FIRST_LINE).bit_length() - 1
        if level > printed.get(step, -1):
            printed[step] = level
            of_total = f" / {total}" if total else ""
            print(f"{step:<10} {done:>8}{of_total}", file=sys.stderr, flush=True)

    return report
