"""Recorded traffic in files: how many requests came per second or minute, or when each did.

What a file is follows from its content, and so does gzip:

    52 55 48 ...                      whole numbers: requests per second (the Twitter trace of InfAdapter and IPA)
    HashFunction,...,minute_1,...     a function a row, its requests per minute (Azure Functions 2019)
    TIMESTAMP,...                     a request a row (Azure LLM inference 2023, both files)
    0.25                              a request a line: its second

Whole numbers alone are taken for counts, unless the caller says that they are times; numbers one a line, with a point
in one of them (`3.0`), for times, unless the caller says otherwise.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from earlyexit.data.text_tables import csv_cells
from earlyexit.errors import DataError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

GAP_S = 60
"""So many seconds in a row without a request, where a hundred are usual, are a gap in the trace."""
GZIP = b"\x1f\x8b"
COLUMNS = "TIMESTAMP (Azure LLM) or minute_1, minute_2, ... (Azure Functions)"
FORMS = f"counts per second, the seconds of requests, one a line, and tables with the columns {COLUMNS}"
Reading = Literal["counts", "times"]
"""Of numbers that could be both: requests per second, or the second of each request."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CountTrace:
    """Requests per bin of time; finite, none negative, not all 0."""

    counts_B: FloatArray
    bin_s: float

    def __post_init__(self) -> None:
        if not (np.isfinite(self.counts_B).all() and (self.counts_B >= 0).all() and self.counts_B.any()):
            raise DataError("a trace of counts needs finite ones, none negative, not all 0")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StampTrace:
    """The second of every request, from 0, ascending; two are different, else there is no rate."""

    arrivals_s_N: FloatArray

    def __post_init__(self) -> None:
        seconds_N = self.arrivals_s_N
        if not (len(seconds_N) and 0 <= seconds_N[0] < seconds_N[-1] < np.inf and (np.diff(seconds_N) >= 0).all()):
            raise DataError("a trace of seconds needs finite ones from 0 on, ascending, at least two of them different")


def read_trace(path: Path, reading: Reading | None = None) -> CountTrace | StampTrace:
    """Read a file of any of the formats above; raises DataError that names file and line for anything else.

    `reading`: what is asked for, else the content decides; raises DataError too for a table of the other kind.
    """
    trace = _read(path, reading)
    if reading == "counts" and isinstance(trace, StampTrace):
        raise DataError(f"{path}: seconds of single requests; counts per second or minute are needed")
    if reading == "times" and isinstance(trace, CountTrace):
        raise DataError(f"{path}: counts per minute; the seconds of single requests are needed")
    return trace


def _read(path: Path, reading: Reading | None) -> CountTrace | StampTrace:
    lines = _text(path).splitlines()
    header = next((line for line in lines if line.strip()), None)
    if header is None:
        raise DataError(f"{path}: empty; a trace is needed")
    columns = [name.strip(' "') for name in header.split(",")]
    if "TIMESTAMP" in columns:
        return _seconds(_stamps(path, lines, columns))
    if len(columns) > 1:
        return _per_minute(path, lines, columns)
    return _numbers(path, lines, reading)


def read_counts(path: Path) -> CountTrace:
    """Read a file of counts; raises DataError for one of seconds too."""
    trace = read_trace(path, "counts")
    assert isinstance(trace, CountTrace)
    return trace


def gaps(per_second_S: FloatArray) -> IntArray:
    """First second and end (G, 2) of the runs of at least `GAP_S` zeros: there nothing was recorded."""
    zero_S = np.concatenate([[False], per_second_S == 0, [False]])
    runs_G2 = np.flatnonzero(np.diff(zero_S)).reshape(-1, 2)
    return runs_G2[runs_G2[:, 1] - runs_G2[:, 0] >= GAP_S]


def in_gaps(per_second_S: FloatArray) -> BoolArray:
    """Which seconds lie in gaps."""
    found_S = np.zeros(len(per_second_S), dtype=np.bool_)
    for begin, end in gaps(per_second_S):
        found_S[begin:end] = True
    return found_S


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if data.startswith(GZIP) else data).decode("utf-8-sig")
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except IsADirectoryError as error:
        raise DataError(f"{path}: is a folder, not a file") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not UTF-8") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: damaged gzip: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Values:
    """Numbers of a file and where they stand."""

    path: Path
    words: Sequence[str]
    lines_N: IntArray
    values_N: FloatArray

    def refuse(self, bad_N: BoolArray, why: str) -> None:
        """Raises DataError for the first bad one."""
        if bad_N.any():
            raise _error(self.path, self.words, self.lines_N, int(bad_N.argmax()), why)


def _error(path: Path, words: Sequence[str], lines_N: IntArray, index: int, why: str) -> DataError:
    place = "" if len(words) <= lines_N[-1] else f" (value {index + 1} of the file)"  # which of those in its line
    return DataError(f"{path}:{lines_N[index]}: {words[index]!r} {why}{place}")


def _numbers(path: Path, lines: Sequence[str], reading: Reading | None) -> CountTrace | StampTrace:
    """As they are to be read; else counts where a line holds several, or all are whole numbers, and seconds else."""
    rows = [line.split() for line in lines]
    words = [word for row in rows for word in row]
    lines_N = np.repeat(np.arange(1, len(rows) + 1), [len(row) for row in rows])
    values = _Values(path=path, words=words, lines_N=lines_N, values_N=_floats(path, words, lines_N))
    if reading is None:
        alone = len(words) == sum(map(bool, rows))
        reading = "times" if alone and not set().union(*words) <= set("+-0123456789") else "counts"
    return _seconds(values) if reading == "times" else _per_second(values)


def _floats(path: Path, words: Sequence[str], lines_N: IntArray) -> FloatArray:
    try:
        return np.array(words, dtype=np.float64)
    except ValueError:
        index = next(index for index, word in enumerate(words) if not _is_number(word))
        raise _error(path, words, lines_N, index, f"is no number; allowed are {FORMS}") from None


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _per_second(values: _Values) -> CountTrace:
    counts_S = values.values_N
    values.refuse(~(np.isfinite(counts_S) & (counts_S == np.floor(counts_S))), "is no whole number of requests")
    values.refuse(counts_S < 0, "is negative; a second has 0 requests or more")
    return _some(values.path, counts_S, bin_s=1.0)


def _seconds(values: _Values) -> StampTrace:
    seconds_N = values.values_N
    values.refuse(~(np.isfinite(seconds_N) & (seconds_N >= 0)), "is no second; finite ones, 0 or above, are allowed")
    values.refuse(np.diff(seconds_N, prepend=0.0) < 0, "is before the line above it; arrivals must ascend")
    if seconds_N[0] == seconds_N[-1]:
        raise DataError(
            f"{values.path}: {len(seconds_N)} requests at one instant have no rate; two instants are needed"
        )
    return StampTrace(arrivals_s_N=seconds_N)


def _some(path: Path, counts_B: FloatArray, *, bin_s: float) -> CountTrace:
    if not counts_B.any():
        raise DataError(f"{path}: no requests: every count is 0")
    return CountTrace(counts_B=counts_B, bin_s=bin_s)


def _per_minute(path: Path, lines: Sequence[str], columns: Sequence[str]) -> CountTrace:
    """The functions' counts, added."""
    minutes = [index for index, name in enumerate(columns) if re.fullmatch(r"(minute_)?\d+", name)]
    if not minutes or all(name.isdigit() for name in columns):  # a row of numbers names nothing
        raise DataError(f"{path}: columns {', '.join(columns[:5])}; allowed are {FORMS}")
    sums_M = np.zeros(len(minutes))
    for line, row in islice(csv_cells(path, lines), 1, None):
        words, lines_M = [row[index] for index in minutes], np.full(len(minutes), line)
        values = _Values(path=path, words=words, lines_N=lines_M, values_N=_floats(path, words, lines_M))
        values.refuse(~(np.isfinite(values.values_N) & (values.values_N >= 0)), "is no count; 0 or more are allowed")
        sums_M += values.values_N
    return _some(path, sums_M, bin_s=60.0)


def _stamps(path: Path, lines: Sequence[str], columns: Sequence[str]) -> _Values:
    """Seconds since the first request."""
    column = columns.index("TIMESTAMP")
    cells = [(line, row[column].strip()) for line, row in islice(csv_cells(path, lines), 1, None)]
    if not cells:
        raise DataError(f"{path}: no requests below the columns")
    times = [_moment(path, line, word) for line, word in cells]
    return _Values(
        path=path,
        words=[word for _, word in cells],
        lines_N=np.array([line for line, _ in cells]),
        values_N=np.array([(time - times[0]).total_seconds() for time in times]),
    )


def _moment(path: Path, line: int, word: str) -> datetime:
    try:
        moment = datetime.fromisoformat(word)  # to the microsecond
    except ValueError:
        raise DataError(f"{path}:{line}: {word!r} is no time like 2023-11-16 18:17:03.9799600") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
