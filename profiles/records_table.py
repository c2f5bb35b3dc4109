"""Exit records from tables with one row per input and exit, in the form of docs/models.md#exit-records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from earlyexit.data.images import check_file
from earlyexit.data.text_tables import csv_cells, open_csv
from earlyexit.errors import DataError
from earlyexit.tasks.label import label_loss
from earlyexit.tasks.regression import RegressionTask
from profiles.lengths import MOST_TOKENS
from profiles.records import ExitRecords, Loss, ValueArray
from profiles.scores import SCORES, FloatArray, Score

INPUT, EXIT = "sample_id", "exit"
ANSWER, TRUTH = "prediction", "label"
TOKENS = "tokens"
LOSS, TRUE_LOSS = "loss", "true_loss"
SURE: tuple[Score, ...] = ("entropy", "confidence")
"""Columns of scores. The score `share` is not supported, because a table has no column for ramps' confidences."""
DELIMITERS = {".csv": ",", ".tsv": "\t"}
MOST_EXITS = 10_000
"""Upper bound of a block's number, to bound memory if the number is wrong."""


def read_records(path: Path, *, scale: float | None = None) -> ExitRecords:
    """Returns the exit records in a file: .npz of `ExitRecords.save`, or a table in .csv or .tsv.

    `scale`: for tables whose answers are numbers, the smallest difference whose loss is 1; None if answers are labels.
    Raises DataError with file, line and what is allowed.
    """
    if path.suffix.lower() in DELIMITERS:
        return _of_table(path, scale)
    if path.suffix.lower() != ".npz":
        raise DataError(f"{path}: unknown suffix {path.suffix!r}; exit records are .npz, .csv or .tsv")
    if scale is not None:
        raise DataError(f"{path}: has losses already; a scale is for the numbers in a .csv or .tsv file")
    return ExitRecords.load(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    line: int
    sample_id: str
    exit: int
    cells: Mapping[str, str]
    """The cells of the row by column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grid:
    """The rows of a table by input (N) and exit (E), the last exit last."""

    path: Path
    sample_ids: tuple[str, ...]
    exits: tuple[int, ...]
    rows_NE: Sequence[Sequence[_Row]]

    def texts(self, column: str) -> list[list[str]]:
        return [[row.cells[column] for row in rows] for rows in self.rows_NE]

    def numbers(self, column: str, low: float, high: float, *, may_end_empty: bool) -> FloatArray:
        """Returns the numbers of a column, (N, E). With `may_end_empty`, cells of the last exit may be empty: NaN."""
        return np.array(
            [[self._number(row, column, low, high, may_end_empty) for row in rows] for rows in self.rows_NE]
        )

    def _number(self, row: _Row, column: str, low: float, high: float, may_end_empty: bool) -> float:
        cell = row.cells[column]
        if not cell and may_end_empty and row.exit == self.exits[-1]:
            return np.nan
        try:
            value = float(cell)
        except ValueError:
            value = np.nan
        if not (low <= value <= high and np.isfinite(value)):
            allowed = f"a number from {low:g} to {high:g}" if np.isfinite(high) else "a finite number"
            raise DataError(f"{self.path}:{row.line}: {column}: {allowed} is needed, not {cell!r}")
        return value

    def of_inputs(self, column: str) -> list[str]:
        """Returns the values, (N,), of a column that must be equal in all rows of an input."""
        for rows in self.rows_NE:
            for row in rows:
                if row.cells[column] != rows[0].cells[column]:
                    raise DataError(
                        f"{self.path}:{row.line}: {column}: input {row.sample_id!r} has {row.cells[column]!r} here "
                        f"and {rows[0].cells[column]!r} on line {rows[0].line}"
                    )
        return [rows[0].cells[column] for rows in self.rows_NE]


def _of_table(path: Path, scale: float | None) -> ExitRecords:
    columns, rows = _read(path)
    score = _score_of(path, columns)
    grid = _grid(path, rows)
    scores_NE = grid.numbers(score, 0.0, SCORES[score].highest, may_end_empty=True)
    shared: dict[str, Any] = {
        "score": score,
        "num_blocks": grid.exits[-1] + 1,
        "ramps": grid.exits[:-1],
        "sample_ids": grid.sample_ids,
        "scores_NR": scores_NE[:, :-1].astype(np.float32),
        "tokens_N": _tokens(grid) if TOKENS in columns else None,
    }
    if ANSWER not in columns:
        return _of_losses(grid, columns, shared, scale)
    answers_NE, truth_N, facts = (_labels if scale is None else _numbers)(grid, TRUTH in columns)
    return ExitRecords.of_answers(
        answers_NE,
        truth_N=truth_N,
        loss=label_loss if scale is None else _difference(scale),
        zero_one=scale is None,
        provenance={"data": path.name, **facts},
        **shared,
    )


def _read(path: Path) -> tuple[set[str], list[_Row]]:
    check_file(path)
    with open_csv(path) as file:
        lines = csv_cells(path, file, delimiter=DELIMITERS[path.suffix.lower()])
        _, names = next(lines, (1, []))
        header = [name.strip().lower() for name in names]
        _check_header(path, header)
        rows = [_row(path, line, dict(zip(header, map(str.strip, cells), strict=True))) for line, cells in lines]
    if not rows:
        raise DataError(f"{path}: no rows")
    return set(header), rows


def _check_header(path: Path, header: Sequence[str]) -> None:
    missing = [name for name in (INPUT, EXIT) if name not in header]
    if not {ANSWER, LOSS} & set(header):
        missing.append(f"{ANSWER} (or {LOSS})")
    if missing:
        raise DataError(f"{path}:1: no column {missing[0]}; there are {', '.join(header) or 'none'}")
    if repeated := [name for name in header if header.count(name) > 1]:
        raise DataError(f"{path}:1: more than one column has the name {repeated[0]!r}")


def _score_of(path: Path, columns: set[str]) -> Score:
    found = [score for score in SURE if score in columns]
    if not found and "share" in columns:
        raise DataError(f"{path}:1: the score share needs confidences, which only .npz files can have")
    if len(found) != 1:
        actual = "both" if found else "none"
        raise DataError(f"{path}:1: one column of scores is needed, {' or '.join(SURE)}, not {actual}")
    return found[0]


def _row(path: Path, line: int, cells: Mapping[str, str]) -> _Row:
    block = cells[EXIT]
    if not (block.isascii() and block.isdigit() and len(block) < 20 and int(block) < MOST_EXITS):
        raise DataError(f"{path}:{line}: exit: the number of the block before the exit is needed, not {block!r}")
    if not cells[INPUT]:
        raise DataError(f"{path}:{line}: {INPUT} is empty")
    return _Row(line=line, sample_id=cells[INPUT], exit=int(block), cells=cells)


def _grid(path: Path, rows: Sequence[_Row]) -> _Grid:
    """Returns the rows by input and exit; raises DataError unless each input has each exit once."""
    exits = tuple(sorted({row.exit for row in rows}))
    if len(exits) < 2:
        raise DataError(f"{path}: the only exit is {exits[0]}; a ramp and the full model's exit are needed at least")
    by_sample: dict[str, dict[int, _Row]] = {}
    for row in rows:
        by_exit = by_sample.setdefault(row.sample_id, {})
        if row.exit in by_exit:
            first = by_exit[row.exit].line
            raise DataError(f"{path}:{row.line}: input {row.sample_id!r} has exit {row.exit} on line {first} already")
        by_exit[row.exit] = row
    for sample_id, by_exit in by_sample.items():
        if missing := [block for block in exits if block not in by_exit]:
            line = next(iter(by_exit.values())).line
            raise DataError(f"{path}:{line}: input {sample_id!r} has no exit {missing[0]}, which other inputs have")
    return _Grid(
        path=path,
        sample_ids=tuple(by_sample),
        exits=exits,
        rows_NE=[[by_exit[block] for block in exits] for by_exit in by_sample.values()],
    )


def _tokens(grid: _Grid) -> npt.NDArray[np.int64]:
    tokens = grid.of_inputs(TOKENS)
    for rows, cell in zip(grid.rows_NE, tokens, strict=True):
        if not (cell.isascii() and cell.isdigit() and len(cell) < 20 and 1 <= int(cell) <= MOST_TOKENS):
            raise DataError(
                f"{grid.path}:{rows[0].line}: {TOKENS}: a whole number from 1 to {MOST_TOKENS} is needed, not {cell!r}"
            )
    return np.array(tokens, dtype=np.int64)


def _labels(grid: _Grid, truth: bool) -> tuple[ValueArray, ValueArray | None, dict[str, Any]]:
    """Returns labels as indices. Whole numbers are kept; other names, also 01, are numbered in alphabetical order."""
    answers, truths = grid.texts(ANSWER), grid.of_inputs(TRUTH) if truth else []
    for rows in grid.rows_NE:
        for row in rows:
            if empty := [column for column in (ANSWER, TRUTH) if row.cells.get(column) == ""]:
                raise DataError(f"{grid.path}:{row.line}: {empty[0]} is empty")
    names = sorted({text for texts in answers for text in texts} | set(truths))
    if all(name.isascii() and name.isdigit() and len(name) < 10 and name == str(int(name)) for name in names):
        index, facts = {name: int(name) for name in names}, {}
    else:
        index, facts = {name: k for k, name in enumerate(names)}, {"label_names": names}
    answers_NE = np.array([[index[text] for text in texts] for texts in answers], dtype=np.int64)
    truth_N = np.array([index[text] for text in truths], dtype=np.int64) if truth else None
    if truth_N is not None and not np.isin(truth_N, answers_NE).any():  # such as 3.0 and 3, or names and numbers
        differ = f"such as {truths[0]!r} and {answers[0][-1]!r}; both need the same form"
        raise DataError(f"{grid.path}: no {TRUTH} occurs as a {ANSWER}, {differ}")
    return answers_NE, truth_N, facts


def _numbers(grid: _Grid, truth: bool) -> tuple[ValueArray, ValueArray | None, dict[str, Any]]:
    answers_NE = grid.numbers(ANSWER, -np.inf, np.inf, may_end_empty=False)
    if not truth:
        return answers_NE, None, {}
    grid.of_inputs(TRUTH)
    return answers_NE, grid.numbers(TRUTH, -np.inf, np.inf, may_end_empty=False)[:, 0], {}


def _difference(scale: float) -> Loss:
    try:
        return RegressionTask(scale).loss
    except ValueError as error:
        raise DataError(f"the scale must be positive and finite, not {scale}") from error


def _of_losses(grid: _Grid, columns: set[str], shared: Mapping[str, Any], scale: float | None) -> ExitRecords:
    if scale is not None:
        raise DataError(f"{grid.path}: has losses already; a scale is for a column {ANSWER}")
    losses_NE = grid.numbers(LOSS, 0.0, 1.0, may_end_empty=True)
    for rows, last in zip(grid.rows_NE, losses_NE[:, -1], strict=True):
        if last > 0:
            raise DataError(f"{grid.path}:{rows[-1].line}: {LOSS}: the last exit's must be 0, as it is the reference")
    truth: npt.NDArray[np.float64] | None = None
    if TRUE_LOSS in columns:
        truth = grid.numbers(TRUE_LOSS, 0.0, 1.0, may_end_empty=False)
    return ExitRecords(
        losses_NR=losses_NE[:, :-1],
        zero_one=False,
        true_losses_NE=truth,
        provenance={"data": grid.path.name},
        **shared,
    )
