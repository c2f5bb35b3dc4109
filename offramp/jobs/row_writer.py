"""Rows of predictions as JSON lines or CSV, one by one as they come."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TextIO

from earlyexit.errors import InputError
from offramp.jobs.bulk import Row

Format = Literal["jsonl", "csv"]
ERROR = "error"


def format_of(out: Path | None, asked: Format | None) -> Format:
    """What `--format` says, else what the file's ending says; raises InputError where the two disagree."""
    named: Format | None = "csv" if out is not None and out.suffix == ".csv" else None
    if out is not None and out.suffix == ".jsonl":
        named = "jsonl"
    if named is not None and asked is not None and named != asked:
        raise InputError(f"--format {asked}: the ending of --out {out} says {named}")
    return named or asked or "jsonl"


@contextmanager
def row_writer(out: Path | None, form: Format, columns: Sequence[str]) -> Iterator[Callable[[Row], None]]:
    """A function that writes a row to a file, or to stdout; `columns` are those of CSV, but for the error."""
    if out is None:
        yield _writer(sys.stdout, form, columns)
        sys.stdout.flush()
        return
    with out.open("w", encoding="utf-8", newline="") as file:
        yield _writer(file, form, columns)


def _writer(file: TextIO, form: Format, columns: Sequence[str]) -> Callable[[Row], None]:
    if form == "jsonl":
        return lambda row: print(json.dumps(row.to_json(), ensure_ascii=False), file=file)
    table = csv.DictWriter(file, (*columns, ERROR), lineterminator="\n")
    table.writeheader()
    return lambda row: table.writerow(row.to_json())
