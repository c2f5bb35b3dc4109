"""Helpers of several commands: tables, messages, progress, provenance, and functions in a process of their own."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from earlyexit.errors import InputError, OfframpError, raising
from offramp import installed_version

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from rich.progress import TaskID
    from rich.table import Column, Table

    from earlyexit.training.ramps import Progress as Report


LIBRARIES = ("offramp", "torch", "transformers", "tokenizers", "numpy", "ray", "onnxruntime")


def provenance(**facts: Any) -> dict[str, Any]:
    """Returns date, machine, library versions and commit, with the facts that the caller adds (seed, data, options).

    The commit is the checkout's; None for an installed package, or without git.
    """
    here = str(Path(__file__).resolve().parent.parent)
    return {
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "python": platform.python_version(),
        "versions": {name: number for name in LIBRARIES if (number := installed_version(name))},
        "commit": output_of("git", "-C", here, "rev-parse", "HEAD", limit_s=5.0).strip() or None,
        **facts,
    }


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def output_of(*arguments: str, limit_s: float, **variables: str) -> str:
    """Returns the output of a command; "" if it is missing, fails or takes too long. `variables`: its environment's."""
    try:
        done = subprocess.run(
            arguments, capture_output=True, text=True, timeout=limit_s, check=True, env=os.environ | variables
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


FIRST_LINE = 1000
"""Count at which work of unknown length prints its first line of progress."""


@contextmanager
def progress_bars(*, transient: bool = False) -> Iterator[Report]:
    """Yields a callback (step, done, total) that shows progress on stderr. A total of 0 means that it is unknown.

    If stderr is not a terminal, lines are printed instead of bars. If `transient`, bars disappear, and no lines appear.
    """
    if not sys.stderr.isatty():
        printed: dict[str, int] = {}

        def print_line(step: str, done: int, total: int) -> None:
            level = done * 10 // total if total else (done // FIRST_LINE).bit_length() - 1
            if level > printed.get(step, -1):  # a tenth of the total, or the count has doubled
                printed[step] = level
                of_total = f" / {total}" if total else ""
                print(f"{step:<10} {done:>8}{of_total}", file=sys.stderr, flush=True)

        yield (lambda *_: None) if transient else print_line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    counts = ("{task.description}", BarColumn(), MofNCompleteColumn(), "{task.fields[rate]}")
    columns = (*counts, TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=transient) as bars:
        tasks: dict[str, TaskID] = {}

        def report(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bars.add_task(step, total=total or None, rate="")
            elapsed_s = bars.tasks[tasks[step]].elapsed
            bars.update(tasks[step], completed=done, rate=f"{done / elapsed_s:.1f}/s" if elapsed_s else "")

        yield report


Result = TypeVar("Result")
PR_SET_PDEATHSIG = 1  # option of prctl(2)


def make_table(
    *columns: Column | str, rows: Iterable[Iterable[str]] = (), narrow: bool = False, **options: Any
) -> Table:
    """Returns a table of `rich`. With `narrow`, it has no borders, so that many columns fit into 80 characters."""
    from rich import box
    from rich.table import Table

    if narrow:
        options |= {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0)}
    table = Table(*columns, **options)
    for row in rows:
        table.add_row(*row)
    return table


def show(*tables: Table) -> None:
    """Prints tables in the width of the terminal, but at least 80 characters wide, so that no cell is cut off."""
    from rich.console import Console

    Console(width=max(Console().width, 80), markup=False, emoji=False).print(*tables)


def print_result(
    document: Any, make_tables: Callable[[], Iterable[Table]] = tuple, lines: Iterable[str] = (), *, as_json: bool
) -> None:
    """Prints a result as one line of JSON, or as tables with lines of text below them."""
    if as_json:
        print(json.dumps(document))
        return
    if tables := [*make_tables()]:
        show(*tables)
    for line in lines:
        print(line)


def warn(*messages: str) -> None:
    """Prints warnings on stderr."""
    for message in messages:
        print(f"warning: {message}", file=sys.stderr)


def command(*arguments: object) -> str:
    """Returns an `offramp` command with these arguments, quoted for a shell."""
    return shlex.join(["offramp", *map(str, arguments)])


def percent(share: float) -> str:
    """Returns a share in percent, with four significant digits."""
    return f"{100 * share:.4g} %"


def milliseconds(seconds: float) -> str:
    """Returns milliseconds with two decimals; `endless` for infinity."""
    return "endless" if seconds == float("inf") else f"{seconds * 1e3:.2f}"


def rate_text(per_s: float) -> str:
    """Returns a rate with at least three digits; `inf` for infinity."""
    return f"{per_s:.3g}" if per_s < 1 else f"{per_s:.1f}" if per_s < 1000 else f"{per_s:.0f}"


def milliseconds_text(seconds: float | None) -> str:
    """Returns the result of `milliseconds` with the unit, or `-` for None."""
    return "-" if seconds is None else f"{milliseconds(seconds)} ms"


def cell(value: float | None, form: str) -> str:
    """Returns a number in a format such as `.2%`, or `-` for None."""
    return "-" if value is None else format(value, form)


def counts_text(counts: Mapping[str, int], nothing: str = "-") -> str:
    """Returns counts by name as text."""
    return ", ".join(f"{name}: {count}" for name, count in counts.items()) or nothing


@contextmanager
def new_folder(out: Path) -> Iterator[None]:
    """Creates a folder, and after an error removes it and its parents if new and empty; raises InputError."""
    with raising(InputError, f"{out} cannot be created as a folder", OSError):
        missing = [each for each in (out, *out.parents) if not each.exists()]
        out.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # it has files
            for each in missing:
                each.rmdir()
        raise


def run_in_subprocess(work: Callable[..., Result], *arguments: object) -> Result:
    """Runs a function in a process of its own, so that torch or the planner does not stay in memory afterwards.

    If this process ends, the other one ends too. Raises the OfframpError that the function raises.
    """
    from multiprocessing import get_context

    context = get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(os.getpid(), sending, work, arguments))
    process.start()
    sending.close()
    try:
        result, error = receiving.recv()
    except EOFError:  # the process has printed the reason
        process.join()
        raise OfframpError(f"a process of this command ended with status {process.exitcode}") from None
    except KeyboardInterrupt:
        process.terminate()
        raise
    finally:
        process.join()
    if error is not None:
        raise error
    return cast(Result, result)


def _send(parent: int, sending: Connection, work: Callable[..., Result], arguments: tuple[object, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # runs the cleanup of the function
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # if the parent process is killed
    if os.getppid() != parent:  # it ended while this process started
        sys.exit(1)
    try:
        sending.send((work(*arguments), None))
    except OfframpError as error:
        sending.send((None, error))
