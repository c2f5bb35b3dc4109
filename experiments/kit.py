"""Shared helpers: a table on the terminal, figures in a file, medians with their spread."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, is_dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

WIDE = 200
"""Columns of a line that is not written to a terminal."""


class Spread(NamedTuple):
    """The median and the range of a figure over rounds."""

    median: float
    low: float
    high: float

    def as_text(self, digits: int = 3) -> str:
        """Returns the spread as text, such as "1.02 (0.98 to 1.05)"."""
        return f"{self.median:.{digits}g} ({self.low:.{digits}g} to {self.high:.{digits}g})"


def spread(values: Iterable[float | None]) -> Spread | None:
    """Returns the spread of the values that are not None, or None without any."""
    known = [value for value in values if value is not None]
    return Spread(median(known), min(known), max(known)) if known else None


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints a table with a left-aligned first column and right-aligned figures."""
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, str) else format_figure(cell) for cell in row))
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = WIDE
    console.print(table)


def format_figure(value: object) -> str:
    """Returns a figure with three digits, above a thousand as an integer; "-" for None; other values as text."""
    if value is None:
        return "-"
    if not isinstance(value, int | float | np.number) or isinstance(value, bool):
        return str(value)
    figure = float(value)
    if abs(figure) >= 1000:
        return f"{figure:,.0f}"
    return f"{figure:.0f}" if abs(figure) >= 100 else f"{figure:.3g}"


def write_json(document: object, path: Path) -> Path:
    """Writes figures as JSON atomically; raises TypeError for a value that JSON cannot hold."""
    text = json.dumps(document, default=_plain, allow_nan=False, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".part")
    half.write_text(text + "\n", encoding="utf-8")
    half.replace(path)
    return path


def _plain(value: object) -> object:
    """Converts dataclasses, numpy numbers and arrays, and dates to JSON values."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"figures cannot hold {type(value).__name__}: {value!r}")
