"""Labelled texts from files: CSV, TSV, JSONL, or CLINC150's JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

from earlyexit.errors import DataError

CLINC_LISTS = ("train", "val", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledTexts:
    """Texts and their label names, in file order."""

    texts: tuple[str, ...]
    labels: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def label_names(self) -> tuple[str, ...]:
        """The distinct labels, sorted."""
        return tuple(sorted(set(self.labels)))

    def divide(self, share: float, seed: int) -> tuple[LabelledTexts, LabelledTexts]:
        """All but a share of every label's rows, and that share, drawn at random, both in file order.

        A label keeps at least one row in the first.
        """
        rng, held = Random(seed), set[int]()
        for name in self.label_names:
            rows = [row for row, label in enumerate(self.labels) if label == name]
            held.update(rng.sample(rows, min(round(len(rows) * share), len(rows) - 1)))
        return self._rows(row for row in range(len(self)) if row not in held), self._rows(sorted(held))

    def _rows(self, rows: Iterable[int]) -> LabelledTexts:
        kept = tuple(rows)
        return LabelledTexts(
            texts=tuple(self.texts[row] for row in kept), labels=tuple(self.labels[row] for row in kept)
        )

    def label_indices(self, label_names: tuple[str, ...]) -> list[int]:
        """Every label's place in `label_names`; raises DataError for one that is not there."""
        index = {name: k for k, name in enumerate(label_names)}
        unknown = sorted(set(self.labels) - set(index))
        if unknown:
            raise DataError(f"labels unknown to the model: {', '.join(unknown[:5])} ({len(unknown)} in all)")
        return [index[label] for label in self.labels]


def read_labelled(
    path: Path, *, text_column: str = "text", label_column: str = "label", part: str | None = None
) -> LabelledTexts:
    """Read a file by its ending: .csv, .tsv, .jsonl, or .json in CLINC150's form, of which `part` names a list.

    Raises DataError, naming file, line and what is allowed, for anything that is no labelled text.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        rows = list(_rows(path, text_column, label_column, part))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{_first_bad_line(path)}: not UTF-8") from error
    if not rows:
        raise DataError(f"{path}: no rows")
    for line, text, label in rows:
        if not text.strip():
            raise DataError(f"{path}:{line}: the text is empty")
        if not label.strip():
            raise DataError(f"{path}:{line}: the label is empty")
    return LabelledTexts(texts=tuple(text for _, text, _ in rows), labels=tuple(label for _, _, label in rows))


def read_texts(path: Path) -> tuple[str, ...]:
    """Texts without labels: a .txt file, one text per line; raises DataError for an empty or undecodable one."""
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        texts = tuple(line for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{_first_bad_line(path)}: not UTF-8") from error
    if not texts:
        raise DataError(f"{path}: no texts")
    return texts


def write_labelled(texts: LabelledTexts, path: Path) -> None:
    """As a CSV file that `read_labelled` reads."""
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("text", "label"))
        table.writerows(zip(texts.texts, texts.labels, strict=True))


def _first_bad_line(path: Path) -> int:
    # The error's own position is that within a chunk of the file.
    try:
        path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        return error.object.count(b"\n", 0, error.start) + 1
    return 1


def _rows(path: Path, text_column: str, label_column: str, part: str | None) -> Iterator[tuple[int, str, str]]:
    match path.suffix:
        case ".csv":
            return _delimited(path, text_column, label_column, delimiter=",", quoting=csv.QUOTE_MINIMAL)
        case ".tsv":  # GLUE's files hold bare quotes
            return _delimited(path, text_column, label_column, delimiter="\t", quoting=csv.QUOTE_NONE)
        case ".jsonl":
            return _json_lines(path, text_column, label_column)
        case ".json":
            return _clinc(path, part)
        case suffix:
            raise DataError(f"{path}: unknown ending {suffix!r}; known: .csv, .tsv, .jsonl, .json (CLINC150's form)")


def _delimited(
    path: Path, text_column: str, label_column: str, *, delimiter: str, quoting: Literal[0, 3]
) -> Iterator[tuple[int, str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:  # spreadsheets write a byte order mark
        reader: csv.DictReader[str] = csv.DictReader(file, delimiter=delimiter, quoting=quoting)
        try:
            columns = list(reader.fieldnames or ())
            _check_columns(path, columns, text_column, label_column)
            for row in reader:
                text, label = row[text_column], row[label_column]
                if text is None or label is None or None in row:
                    raise DataError(f"{path}:{reader.line_num}: the row does not have {len(columns)} columns")
                yield reader.line_num, text, label
        except csv.Error as error:
            raise DataError(f"{path}:{reader.reader.line_num}: {error}") from error


def _json_lines(path: Path, text_column: str, label_column: str) -> Iterator[tuple[int, str, str]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            row = _parse(path, number, line.rstrip("\n"))
            if not isinstance(row, dict):
                raise DataError(f"{path}:{number}: a JSON object is needed")
            _check_columns(f"{path}:{number}", list(row), text_column, label_column)
            yield number, _string(path, number, row, text_column), _label(path, number, row, label_column)


def _clinc(path: Path, part: str | None) -> Iterator[tuple[int, str, str]]:
    lists = _parse(path, 1, path.read_text(encoding="utf-8"))
    part = part or "train"
    if not isinstance(lists, dict) or part not in lists:
        known = ", ".join(lists) if isinstance(lists, dict) else ", ".join(CLINC_LISTS)
        raise DataError(f"{path}: no list {part!r}; the file has {known}")
    if not isinstance(lists[part], list):
        raise DataError(f"{path}: {part!r} is not a list of pairs [text, label]")
    for number, row in enumerate(lists[part], start=1):
        if not (isinstance(row, list) and len(row) == 2 and all(isinstance(cell, str) for cell in row)):
            raise DataError(f"{path}: item {number} of {part!r} is not a pair [text, label]")
        yield number, row[0], row[1]


def _parse(path: Path, line: int, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{line + error.lineno - 1}: not JSON: {error.msg}") from error


def _string(path: Path, line: int, row: Mapping[str, Any], column: str) -> str:
    if not isinstance(row[column], str):
        raise DataError(f"{path}:{line}: {column!r} is not a string")
    return str(row[column])


def _label(path: Path, line: int, row: Mapping[str, Any], column: str) -> str:
    if not isinstance(row[column], str | int):
        raise DataError(f"{path}:{line}: {column!r} is neither a string nor a whole number")
    return str(row[column])


def _check_columns(where: Path | str, columns: list[str], text_column: str, label_column: str) -> None:
    for column in (text_column, label_column):
        if column not in columns:
            raise DataError(f"{where}: no column {column!r}; there are {', '.join(columns)}")
