"""What commands print: tables that load their library when they are drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Column, Table


def make_table(*columns: Column | str, narrow: bool = False, **options: Any) -> Table:
    """A table of `rich`; a narrow one has lines below its head only, for many columns in 80 characters."""
    from rich import box
    from rich.table import Table

    if narrow:
        options |= {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0)}
    return Table(*columns, **options)


def show(*tables: Table) -> None:
    """Print them, as wide as the terminal."""
    from rich.console import Console

    Console().print(*tables)


def milliseconds(seconds: float) -> str:
    """With two digits; endless where it is infinite."""
    return "endless" if seconds == float("inf") else f"{seconds * 1e3:.2f}"
