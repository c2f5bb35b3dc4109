"""Long work shows bars on a terminal, and one line per step where there is none."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
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

if TYPE_CHECKING:
    from earlyexit.training.ramps import Progress as Report


LIBRARIES = ("offramp", "torch", "transformers", "tokenizers", "numpy", "ray", "onnxruntime")


def provenance(**facts: Any) -> dict[str, Any]:
    """Date, machine, versions and commit, and whatever facts the caller adds (seed, data, options)."""
    return {
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "python": platform.python_version(),
        "versions": {name: found for name in LIBRARIES if (found := installed_version(name))},
        "commit": _commit(),
        **facts,
    }


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def installed_version(package: str) -> str | None:
    """The version of an installed package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The checkout's commit; None for an installed package or where there is no git."""
    here = Path(__file__).resolve().parent.parent
    try:
        done = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


FIRST_LINE = 1000


@contextmanager
def progress_bars() -> Iterator[Report]:
    """A callback (what, done, total) that draws on stderr; of a total of 0, which is unknown, a count and its rate."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    with _bars(BarColumn(), MofNCompleteColumn(), _Rate(), TimeElapsedColumn(), TimeRemainingColumn()) as bars:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total or None)
            bars.update(tasks[what], completed=done)

        yield report


@contextmanager
def progress_share(what: str) -> Iterator[Callable[[float], None]]:
    """A callback (share that is done) that draws on stderr where that is a terminal."""
    columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with _bars(*columns, transient=True, disable=not sys.stderr.isatty()) as bars:
        task = bars.add_task(what, total=1.0)
        yield lambda share: bars.update(task, completed=share)


def _bars(*columns: ProgressColumn, **options: Any) -> Progress:
    """Bars on stderr, each behind its description."""
    return Progress(TextColumn("{task.description}"), *columns, console=Console(stderr=True), **options)


class _Rate(ProgressColumn):
    def render(self, task: Task) -> str:
        """Per second since the beginning."""
        return f"{task.completed / task.elapsed:.1f}/s" if task.elapsed else ""


def _lines() -> Report:
    """A line at every tenth of the way; of an unknown total whenever twice as much is done, a thousand at first."""
    told: dict[str, int] = {}

    def report(what: str, done: int, total: int) -> None:
        level = done * 10 // total if total else (done // FIRST_LINE).bit_length() - 1
        if level > told.get(what, -1):
            told[what] = level
            of_all = f" / {total}" if total else ""
            print(f"{what:<10} {done:>8}{of_all}", file=sys.stderr, flush=True)

    return report
