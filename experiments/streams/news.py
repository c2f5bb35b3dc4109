"""Beginnings of news, which models go on with: AG News, whose parts nobody is given twice."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from experiments.data import require_data

WORDS = 40
"""Of a beginning; shorter texts are left out."""
MEASURED = 400
"""Rows of the test part that servers are measured with."""


def to_measure(path: Path | None = None) -> list[str]:
    """Of the test part, or of another file of rows whose last column is a text."""
    with (path or _tests()).open(encoding="utf-8", newline="") as file:
        return beginnings(row[-1] for row in islice(csv.reader(file), 1, MEASURED))


def to_calibrate() -> list[str]:
    """The rest of the test part."""
    with _tests().open(encoding="utf-8", newline="") as file:
        return beginnings(row[-1] for row in islice(csv.reader(file), MEASURED, None))


def to_learn() -> list[str]:
    """Of the part for learning."""
    with (require_data("ag_news") / "alps_dev.tsv").open(encoding="utf-8", newline="") as file:
        return beginnings(row[0] for row in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def beginnings(texts: Iterable[str]) -> list[str]:
    """Of texts that are long enough."""
    words = (text.split() for text in texts)
    return [" ".join(each[:WORDS]) for each in words if len(each) >= WORDS]


def _tests() -> Path:
    return require_data("ag_news") / "test.csv"
