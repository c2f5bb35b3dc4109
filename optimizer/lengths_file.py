"""Lengths of a service's inputs, as problem and service files have them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from earlyexit.data.source_file import Source
from earlyexit.errors import DataError
from optimizer.problem_shape import read_at
from profiles.lengths import Lengths, read_lengths
from profiles.records import ExitRecords

Given = float | list[float] | Mapping[int, float] | str


def lengths_of(given: Given, source: Source, folder: Path, at: tuple[str, ...] = ("lengths",)) -> Lengths:
    """Lengths that a file gives at a place of it; raises at the line of what no input has, as the source does."""
    if isinstance(given, list):
        for position, tokens in enumerate(given):
            with read_at(source, (*at, position), called=at):
                Lengths.of([tokens])
    with read_at(source, at):
        if isinstance(given, str):
            return Lengths.of(tokens_of(folder / given))
        if isinstance(given, list):
            return Lengths.of(given)
        return Lengths.weighted(given) if isinstance(given, Mapping) else Lengths(mean=given)


def lengths_document(lengths: Lengths) -> float | dict[int, float]:
    """Plain data that `lengths_of` reads back."""
    return lengths.mean if lengths.shares is None else dict(lengths.shares)


def tokens_of(path: Path) -> npt.NDArray[np.int64]:
    """Tokens of inputs, in their order, of a file of lengths or of exit records; raises DataError."""
    if path.suffix != ".npz":
        return read_lengths(path)
    tokens_N = ExitRecords.load(path).tokens_N
    if tokens_N is None:
        raise DataError(f"{path}: these exit records do not know how long their inputs are")
    return tokens_N


def stayers_length_N(records: ExitRecords, thresholds: Mapping[int, float]) -> tuple[float, ...] | None:
    """Per block, the mean length of recorded inputs that reach it over that of all; None where it is not known."""
    if records.tokens_N is None:
        return None
    exits_N, mean = records.outcome(thresholds).exits_N, float(records.tokens_N.mean())
    reaching = [records.tokens_N[exits_N >= block] for block in range(records.num_blocks)]
    return tuple(float(each.mean()) / mean if len(each) else 0.0 for each in reaching)
