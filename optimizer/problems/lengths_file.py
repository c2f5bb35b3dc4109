"""Lengths of inputs in problem files and service files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from earlyexit.data.source_file import Source
from earlyexit.errors import DataError
from optimizer.problems.problem_shape import read_at
from profiles.lengths import Lengths, read_lengths
from profiles.records import ExitRecords

LengthsValue = float | list[float] | Mapping[int, float] | str


def lengths_of(value: LengthsValue, source: Source, folder: Path, at: tuple[str, ...] = ("lengths",)) -> Lengths:
    """Returns the lengths of a value in a file; raises the source's error at the line of an invalid length."""
    if isinstance(value, list):
        for position, tokens in enumerate(value):
            with read_at(source, (*at, position), called=at):
                Lengths.of([tokens])
    with read_at(source, at):
        if isinstance(value, str):
            return Lengths.of(tokens_of(folder / value))
        if isinstance(value, list):
            return Lengths.of(value)
        return Lengths.weighted(value) if isinstance(value, Mapping) else Lengths(mean=value)


def lengths_document(lengths: Lengths) -> float | dict[int, float]:
    """Returns plain data that `lengths_of` reads."""
    return lengths.mean if lengths.shares is None else dict(lengths.shares)


def tokens_of(path: Path) -> npt.NDArray[np.int64]:
    """Returns the tokens of each input from a file of lengths or of exit records; raises DataError."""
    if path.suffix != ".npz":
        return read_lengths(path)
    tokens_N = ExitRecords.load(path).tokens_N
    if tokens_N is None:
        raise DataError(f"{path}: these exit records do not hold the lengths of their inputs")
    return tokens_N


def stayers_length_N(records: ExitRecords, thresholds: Mapping[int, float]) -> tuple[float, ...] | None:
    """Returns the mean length of recorded inputs that reach each block, relative to all; None if it is not recorded."""
    if records.tokens_N is None:
        return None
    exits_N, mean = records.outcome(thresholds).exits_N, float(records.tokens_N.mean())
    reaching = [records.tokens_N[exits_N >= block] for block in range(records.num_blocks)]
    return tuple(float(each.mean()) / mean if len(each) else 0.0 for each in reaching)
