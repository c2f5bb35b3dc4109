"""Prints results of commands, checks options that several of them share, and runs functions in other processes."""

from __future__ import annotations

import ctypes
import json
import shlex
import signal
import sys
from collections.abc import Callable, Iterable
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
    """Returns a table of `rich`; a narrow one has only a line below its head, for many columns in 80 characters."""
    from rich import box
    from rich.table import Table

    if narrow:
        options |= {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0)}
    table = Table(*columns, **options)
    for row in rows:
        table.add_row(*row)
    return table


def show(*tables: Table) -> None:
    """Prints tables, as wide as the terminal."""
    from rich.console import Console

    Console().print(*tables)


def print_result(
    document: Any, tables: Callable[[], Iterable[Table]], words: Iterable[str] = (), *, as_json: bool
) -> None:
    """Prints a result as one line of JSON, or as tables, which are built only then, and lines of words below them."""
    if as_json:
        print(json.dumps(document))
    else:
        if found := [*tables()]:  # no plan has none
            show(*found)
        for line in words:
            print(line)


def warn(words: str) -> None:
    """Prints a warning on stderr."""
    print(f"warning: {words}", file=sys.stderr)


def command(*words: object) -> str:
    """Returns a command of ours as a shell takes it: `offramp` and the words, quoted."""
    return shlex.join(["offramp", *map(str, words)])


def percent(share: float) -> str:
    """Returns a share in percent, with four digits."""
    return f"{100 * share:.4g} %"


def milliseconds(seconds: float) -> str:
    """Returns milliseconds with two digits; `endless` for infinity."""
    return "endless" if seconds == float("inf") else f"{seconds * 1e3:.2f}"


def make_folder(out: Path) -> None:
    """Makes a folder and its parents; raises InputError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{out} cannot be a model folder: {error.strerror}") from error


def in_own_process(work: Callable[..., Result], *arguments: object) -> Result:
    """Runs a function in a process that ends with it: torch, a model or the planner would stay in this one's memory.

    That process ends with this one, too. Raises what the function raises, if it is an OfframpError.
    """
    from multiprocessing import get_context

    context = get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sending, work, arguments))
    process.start()
    sending.close()
    try:
        result, error = receiving.recv()
    except EOFError:  # it has printed why
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the other process's
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends what the function has started
    if sys.platform == "linux":  # SIGTERM, too, if the other process is killed
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        result: Result | None = work(*arguments)
        sending.send((result, None))
    except OfframpError as error:
        sending.send((None, error))
