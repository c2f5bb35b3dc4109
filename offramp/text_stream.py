"""Texts one after the other from a file or a pipe, of which no more is held than is being asked about."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

from earlyexit.dataset import read_labelled
from earlyexit.errors import DataError

STREAMED = (".csv", ".tsv", ".jsonl", ".txt")
CLINC = ".json"


def stream_texts(path: Path, *, text_column: str = "text", part: str | None = None) -> Iterator[str]:
    """The texts of a file by its ending, in its order; no label is needed.

    Raises DataError at once for a file that cannot be read, and at its line for a row that holds no text.
    """
    if path.suffix not in (*STREAMED, CLINC):
        raise DataError(
            f"{path}: unknown ending {path.suffix!r}; known: {', '.join(STREAMED)}, .json (CLINC150's form)"
        )
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    if path.suffix == CLINC:
        return iter(read_labelled(path, part=part).texts)
    return _opened(path, text_column)


def stream_lines(file: Iterable[str], name: str) -> Iterator[str]:
    """One text a line; lines of white space alone are none. Raises DataError where the bytes are not UTF-8."""
    try:
        yield from (line.rstrip("\r\n") for line in file if line.strip())
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: not UTF-8: {error.reason}") from error


def _opened(path: Path, text_column: str) -> Iterator[str]:
    encoding = "utf-8-sig" if path.suffix in (".csv", ".tsv") else "utf-8"  # spreadsheets write a byte order mark
    with path.open(encoding=encoding, newline="" if path.suffix in (".csv", ".tsv") else None) as file:
        match path.suffix:
            case ".txt":
                yield from stream_lines(file, str(path))
            case ".jsonl":
                yield from _json_lines(file, path, text_column)
            case _:
                yield from _delimited(file, path, text_column)


def _delimited(file: TextIO, path: Path, text_column: str) -> Iterator[str]:
    # GLUE's .tsv files hold bare quotes.
    is_tsv = path.suffix == ".tsv"
    rows = csv.reader(file, delimiter="\t" if is_tsv else ",", quoting=csv.QUOTE_NONE if is_tsv else csv.QUOTE_MINIMAL)
    try:
        columns = next(rows, [])
        if text_column not in columns:
            raise DataError(f"{path}: no column {text_column!r}; there are {', '.join(columns)}")
        place = columns.index(text_column)
        for row in rows:
            if row and len(row) != len(columns):
                raise DataError(f"{path}:{rows.line_num}: the row does not have {len(columns)} columns")
            if row:  # an empty line, as the last one of many files
                yield row[place]
    except csv.Error as error:
        raise DataError(f"{path}:{rows.line_num}: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{rows.line_num + 1}: not UTF-8 in this line or soon after it") from error


def _json_lines(file: TextIO, path: Path, text_column: str) -> Iterator[str]:
    number = 0
    try:
        for number, line in enumerate(file, start=1):
            row = json.loads(line)
            text = row.get(text_column) if isinstance(row, dict) else None
            if not isinstance(text, str):
                raise DataError(f"{path}:{number}: an object with a string {text_column!r} is needed")
            yield text
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{number}: not JSON: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{number + 1}: not UTF-8 in this line or soon after it") from error
