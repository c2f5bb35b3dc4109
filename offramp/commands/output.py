"""Helpers of several commands: tables, messages, output folders, and functions that run in a process of their own."""

from __future__ import annotations

import ctypes
import json
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from earlyexit.errors import InputError, OfframpError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from rich.table import Column, Table

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
    """Prints tables in the width of the terminal."""
    from rich.console import Console

    Console().print(*tables)


def print_result(
    document: Any, make_tables: Callable[[], Iterable[Table]], lines: Iterable[str] = (), *, as_json: bool
) -> None:
    """Prints a result as one line of JSON, or as tables with lines of text below them."""
    if as_json:
        print(json.dumps(document))
        return
    if tables := [*make_tables()]:
        show(*tables)
    for line in lines:
        print(line)


def warn(message: str) -> None:
    """Prints a warning on stderr."""
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


def cell(value: float | None, form: str) -> str:
    """Returns a number in a format such as `.2%`, or `-` for None."""
    return "-" if value is None else format(value, form)


def counts_text(counts: Mapping[str, int], nothing: str = "-") -> str:
    """Returns counts by name as text."""
    return ", ".join(f"{name}: {count}" for name, count in counts.items()) or nothing


def make_folder(out: Path) -> None:
    """Creates a folder and its parents; raises InputError if that fails."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{out} cannot be a model folder: {error.strerror}") from error


def run_in_subprocess(work: Callable[..., Result], *arguments: object) -> Result:
    """Runs a function in a process of its own, so that torch or the planner does not stay in memory afterwards.

    If this process ends, the other one ends too. Raises the OfframpError that the function raises.
    """
    from multiprocessing import get_context

    context = get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sending, work, arguments))
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


def _send(sending: Connection, work: Callable[..., Result], arguments: tuple[object, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # runs the cleanup of the function
    if sys.platform == "linux":  # the kernel sends SIGTERM if the parent process is killed
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        result: Result | None = work(*arguments)
        sending.send((result, None))
    except OfframpError as error:
        sending.send((None, error))
