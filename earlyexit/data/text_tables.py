"""Reading of tables with line numbers: texts or pairs of texts from CSV, TSV, JSONL and CLINC150's JSON; any CSV."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TextIO

from earlyexit.data.images import check_file
from earlyexit.data.source_file import mapping_of
from earlyexit.errors import DataError

Row = tuple[int, tuple[str, ...], str]
"""Line number, texts, label."""
TABLES = (".csv", ".tsv", ".jsonl")
csv.field_size_limit(10_000_000)  # by default 131,072 characters; a quote that is never closed makes longer cells


def read_table(path: Path, text_columns: Sequence[str], label_column: str | None, part: str | None) -> list[Row]:
    """Returns the rows of `stream_rows`; raises DataError if there are none, and for empty texts and labels."""
    rows = list(stream_rows(path, text_columns, label_column, part))
    if not rows:
        raise DataError(f"{path}: no rows")
    for line, texts, label in rows:
        for name, text in zip(text_columns, texts, strict=True):
            cut = re.search("[\ud800-\udfff]", text)  # half a character, such as of an emoji that was cut in JSON
            if cut or not text.strip():
                fault = "holds half a character" if cut else "is empty"
                raise DataError(f"{path}:{line}: the {'text' if len(texts) == 1 else name} {fault}")
        if label_column is not None and not label.strip():
            raise DataError(f"{path}:{line}: the label is empty")
    return rows


def stream_rows(
    path: Path, text_columns: Sequence[str], label_column: str | None = None, part: str | None = None
) -> Iterator[Row]:
    """Yields the rows of a file in its order. The suffix determines the format. `part`: a list in CLINC150's form.

    Without a `label_column`, labels are empty, except for CLINC150's form. A .txt file has no labels, and its lines
    that are not blank are the texts. Raises DataError with file and line.
    """
    check_file(path)
    known, suffix = TABLES if label_column is not None else (*TABLES, ".txt"), path.suffix.lower()
    if suffix not in (*known, ".json"):
        raise DataError(f"{path}: unknown suffix {path.suffix!r}; known: {', '.join(known)}, .json (CLINC150's form)")
    if suffix in TABLES:
        return stream_table(path, text_columns, label_column)
    if len(text_columns) > 1:
        raise DataError(f"{path}: rows of {' and '.join(text_columns)} must be .csv, .tsv or .jsonl")
    return _clinc(path, part) if suffix == ".json" else stream_lines(path)


def has_column(path: Path, name: str) -> bool:
    """Returns whether the first row of a table has a column with a name."""
    return path.suffix.lower() in TABLES and path.is_file() and name in next(_rows(path, ()), (0, {}))[1]


def stream_lines(path: Path) -> Iterator[Row]:
    """Yields the lines of a text file that are not blank as rows of one text. Raises DataError."""
    check_file(path)
    with _utf8(path), path.open(encoding="utf-8-sig") as file:
        yield from ((number, (line.rstrip("\n"),), "") for number, line in enumerate(file, 1) if line.strip())


def stream_table(path: Path, text_columns: Sequence[str], label_column: str | None = None) -> Iterator[Row]:
    """Yields the rows of a CSV, TSV or JSONL file. Without a `label_column`, labels are empty.

    Raises DataError with the line for a row without one of the columns, or with a value of another type.
    """
    options = dict(zip(text_columns, ("--text-column", "--pair-column"), strict=False))
    if label_column is not None:
        options[label_column] = "--label-column"
    for line, row in _rows(path, options):
        for name in text_columns:
            if not isinstance(row[name], str):
                raise DataError(f"{path}:{line}: {name!r} is not a string")
        label = "" if label_column is None or row[label_column] is None else row[label_column]
        if not isinstance(label, str | int | float):
            raise DataError(f"{path}:{line}: {label_column!r} is neither a string nor a number")
        yield line, tuple(row[name] for name in text_columns), label if isinstance(label, str) else json.dumps(label)


def _rows(path: Path, columns: Collection[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    suffix = path.suffix.lower()
    return _json_rows(path, columns) if suffix == ".jsonl" else csv_rows(path, columns, tabs=suffix == ".tsv")


@contextmanager
def _utf8(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        # The position in the error is relative to a chunk of the file, so the line is searched in the whole file.
        text = path.read_bytes().decode("utf-8", errors="surrogateescape")
        line = 1 + re.split("[\udc80-\udcff]", text, maxsplit=1)[0].count("\n")
        raise DataError(f"{path}:{line}: not UTF-8; save the file as UTF-8") from error


@contextmanager
def open_csv(path: Path) -> Iterator[TextIO]:
    """Opens a table for reading. Raises DataError with the line for text that is not UTF-8."""
    with _utf8(path), path.open(encoding="utf-8-sig", newline="") as file:  # spreadsheets write a byte order mark
        yield file


def csv_rows(
    path: Path, columns: Collection[str], *, tabs: bool = False, strict: bool = False
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields line number and cells of each row of a CSV file, or of a TSV file without quoting if `tabs`.

    `strict` refuses a file without rows, and quotes that are not closed or are in the middle of a cell. Raises
    DataError with the line if a column is missing or repeated, if a row has more or fewer cells than the header, and
    for text that is not UTF-8.
    """
    check_file(path)
    quoting: Literal[0, 3] = csv.QUOTE_NONE if tabs else csv.QUOTE_MINIMAL  # GLUE's files have unpaired quotes
    with open_csv(path) as file:
        rows = csv_cells(path, file, delimiter="\t" if tabs else ",", quoting=quoting, strict=strict)
        _, header = next(rows, (1, []))
        _check_columns(path, header, columns)
        if repeated := [name for name in columns if header.count(name) > 1]:
            raise DataError(f"{path}:1: more than one column has the name {repeated[0]!r}")
        line = 0
        for line, cells in rows:
            yield line, dict(zip(header, cells, strict=True))
        if strict and not line:
            raise DataError(f"{path}: no rows")


def csv_cells(
    path: Path,
    lines: Iterable[str],
    *,
    delimiter: str = ",",
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL,
    strict: bool = False,
) -> Iterator[tuple[int, list[str]]]:
    """Yields line number and cells of the rows of a table, the header first. Empty rows are skipped.

    `path`: for messages. Raises DataError with the line for a row that has more or fewer cells than the header.
    """
    reader, num_columns = csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=strict), 0
    try:
        for cells in filter(None, reader):
            num_columns = num_columns or len(cells)
            if len(cells) != num_columns:
                raise DataError(f"{path}:{reader.line_num}: the row does not have {num_columns} columns")
            yield reader.line_num, cells
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: {error}") from error


def _json_rows(path: Path, columns: Collection[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields line number and values of each row. Rows that lack a column of the first row have None there."""
    of_first: dict[str, None] = {}
    with _utf8(path), path.open(encoding="utf-8-sig") as file:
        for number, line in ((number, line) for number, line in enumerate(file, start=1) if line.strip()):
            row = _parse(path, number, line.rstrip("\n"))
            if not isinstance(row, dict):
                raise DataError(f"{path}:{number}: a JSON object is needed")
            of_first = of_first or dict.fromkeys(row)
            row = of_first | row
            _check_columns(f"{path}:{number}", list(row), columns)
            yield number, row


def _clinc(path: Path, part: str | None) -> Iterator[Row]:
    with _utf8(path):
        lists = _parse(path, 1, path.read_text(encoding="utf-8-sig"))
    part, lists = part or "train", lists if isinstance(lists, dict) else {}
    if not isinstance(lists.get(part), list):
        there = ", ".join(lists) or "none; objects must be in a .jsonl file, one per line"
        raise DataError(f"{path}: no list {part!r} of pairs [text, label]; there are {there}")
    for number, row in enumerate(lists[part], start=1):
        if not (isinstance(row, list) and len(row) == 2 and all(isinstance(cell, str) for cell in row)):
            raise DataError(f"{path}: item {number} of {part!r} is not a pair [text, label]")
        yield number, (row[0],), row[1]


def _parse(path: Path, line: int, text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=mapping_of)
    except (ValueError, RecursionError) as error:  # also an integer of too many digits, and deep nesting
        reason, row = re.split(r": line |; use sys\.", str(error))[0], line + getattr(error, "lineno", 1) - 1
        raise DataError(f"{path}:{row}: not JSON: {reason}") from error


def _check_columns(where: Path | str, header: Sequence[str], columns: Collection[str]) -> None:
    """Raises DataError for a missing column. `columns` may be a mapping to the options that name them."""
    for column in columns:
        if column not in header:
            there = ", ".join(header) or "none: it is empty"
            hint = f"; {columns[column]} names another" if isinstance(columns, Mapping) and header else ""
            hint = "; commas must separate the columns" if len(header) == 1 and ";" in there else hint
            raise DataError(f"{where}: no column {column!r}; there are {there}{hint}")
