"""When requests arrive, said in one line: `poisson:9000`, `mmpp:1000,peak=5000,calm_s=10,burst_s=1`, `trace:FILE`.

A trace's numbers may be requests per second or the time of each request: `trace:` goes by the content and notes which
reading was taken, `counts:` and `times:` say it.

Recorded traffic stands in files: how many requests came per second or minute, or when each did. What a
file is follows from its content, and so does gzip:

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from earlyexit.data.images import check_file
from earlyexit.data.text_tables import csv_cells
from earlyexit.errors import DataError, InputError
from offramp.load.processes import (
    LARGEST,
    CountReplay,
    FloatArray,
    Gamma,
    Modulated,
    Poisson,
    Positive,
    Process,
    StampReplay,
    Uniform,
)

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

GAP_S = 60
"""So many seconds in a row without a request, where a hundred are usual, are a gap in the trace."""
GZIP = b"\x1f\x8b"
COLUMNS = "TIMESTAMP (Azure LLM) or minute_1, minute_2, ... (Azure Functions)"
FORMS = f"counts per second, the seconds of requests, one a line, and tables with the columns {COLUMNS}"
Reading = Literal["counts", "times"]
"""Of numbers that could be both: requests per second, or the second of each request."""
ALLOWED = (
    "poisson:RATE, uniform:RATE, gamma:RATE,cv=CV, mmpp:MEAN,peak=RATE,calm_s=S,burst_s=S, "
    "trace:FILE[,rate=RATE][,from=SECOND][,gaps=cut|keep]; in the place of trace, counts:FILE (requests per second) or "
    "times:FILE[,unit=s|ms] (of each request) say how its numbers are read"
)
DATES_S = 1e8
"""Seconds beyond three years are taken as dates since 1970, not as waits from 0."""
UNITS = {"s": 1.0, "ms": 1e-3}
"""Of times, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """A process of arrivals."""

    process: Process
    notes: tuple[str, ...] = ()
    """What was done to a trace that the words for it do not say, a sentence each."""


def parse_arrivals(spec: str) -> Arrivals:
    """Arrivals in words; `ALLOWED` lists the forms, numbers are requests per second and seconds.

    `rate` gives the window drawn of a trace this mean rate: counts are multiplied, so that bursts stay as long; times
    are moved together or apart, so that bursts get shorter or longer. `from` is the second of the file to begin at,
    gaps counted. Runs of at least 60 s without a request in counts per second are cut out, unless `gaps=keep`, and the
    rest is moved together. A trace is read here; raises InputError for wrong words and DataError for a wrong file.
    """
    name, _, rest = spec.strip().partition(":")
    if name not in KINDS:
        raise InputError(f"arrivals {spec!r}: no such process {name!r}; allowed: {ALLOWED}")
    head, *parts = re.split(r",(?=\w+=)", rest)  # a file name may hold commas
    options = {"file" if name in READINGS else "rate": head}
    for part in parts:
        key, _, value = part.partition("=")
        if key in options:
            raise InputError(f"arrivals {spec!r}: {key}= is given twice")
        options[key] = value
    try:
        found = TypeAdapter(KINDS[name]).validate_python(options)
    except ValidationError as error:
        [first, *_] = error.errors()
        key, said = first["loc"][0], first["msg"]
        raise InputError(f"arrivals {spec!r}: {key}: {said[0].lower()}{said[1:]}; allowed: {ALLOWED}") from None
    return _recorded(found, spec, READINGS[name]) if isinstance(found, _Trace) else Arrivals(process=found)


class _Trace(BaseModel):
    """What is asked of a recorded trace."""

    model_config = ConfigDict(extra="forbid")

    file: str = Field(min_length=1)
    rate: Positive | None = None
    start_s: float = Field(default=0.0, alias="from", ge=0, le=LARGEST, allow_inf_nan=False)
    gaps: Literal["cut", "keep"] | None = None
    """None: they are cut out of counts per second."""


class _Times(_Trace):
    unit: Literal["s", "ms"] = "s"


READINGS: Mapping[str, Reading | None] = {"trace": None, "counts": "counts", "times": "times"}
"""How the numbers of a recorded trace are read; None: as the content says."""
KINDS: Mapping[str, type[Any]] = {
    "poisson": Poisson,
    "uniform": Uniform,
    "gamma": Gamma,
    "mmpp": Modulated,
    "trace": _Trace,
    "counts": _Trace,
    "times": _Times,
}
"""By the name of a process, what is drawn or read from a file; the words behind the name are its fields."""


def _recorded(asked: _Trace, spec: str, reading: Reading | None) -> Arrivals:
    """A trace from the second that is asked for on, with notes of how the file was read and what was cut out."""
    trace, start_s, cut = read_trace(Path(asked.file), reading), asked.start_s, tuple[str, ...]()
    has = "single requests" if isinstance(trace, StampReplay) else "seconds" if trace.bin_s == 1 else "minutes"
    if asked.gaps is not None and has != "seconds":
        raise InputError(f"arrivals {spec!r}: gaps= is for counts per second; {asked.file} has {has}")
    if isinstance(trace, StampReplay):
        unit_s = UNITS[asked.unit] if isinstance(asked, _Times) else 1.0
        trace = replace(trace, arrivals_s_N=trace.arrivals_s_N * unit_s)
        first_s, last_s = float(trace.arrivals_s_N[0]), float(trace.arrivals_s_N[-1])
        if "start_s" not in asked.model_fields_set and first_s > DATES_S:
            raise DataError(f"{asked.file}: the first request is at second {first_s:.15g}; say from={first_s:.15g}")
        taken = f"the times of {len(trace.arrivals_s_N):,} requests"
    else:
        last_s = trace.period_s
        taken = f"{len(trace.counts_B):,} counts, requests per {has.removesuffix('s')}"
        if reading is None and has == "seconds":
            taken += " (times: reads them as the time of each request)"
    if start_s > last_s or (start_s == last_s and has != "single requests"):
        raise InputError(f"arrivals {spec!r}: from={start_s:.15g} is beyond the trace's {last_s:g} s")
    if isinstance(trace, CountReplay) and has == "seconds" and asked.gaps != "keep":
        counts_B, start_s, cut = _without_gaps(spec, start_s, trace.counts_B)
        trace = replace(trace, counts_B=counts_B)
    process = replace(trace, start_s=start_s, rate_per_s=asked.rate)
    again = f"the trace is {process.period_s:,.0f} s long; where more is drawn it goes round again"
    return Arrivals(process=process, notes=(f"{asked.file}: read as {taken}", *cut, again))


def _without_gaps(spec: str, start_s: float, per_second_S: FloatArray) -> tuple[FloatArray, float, tuple[str, ...]]:
    """Counts without their gaps, the start in them, and what was cut."""
    found, in_gap_S = gaps(per_second_S), np.zeros(len(per_second_S), dtype=np.bool_)
    if not len(found):
        return per_second_S, start_s, ()
    for begin, end in found:
        in_gap_S[begin:end] = True
    if in_gap_S[int(start_s) :].all():
        raise InputError(f"arrivals {spec!r}: from={start_s:.15g} is in a gap that ends the trace")
    kept_before = int((~in_gap_S[: int(start_s)]).sum())
    moved_s = kept_before + (0.0 if in_gap_S[int(start_s)] else start_s % 1)
    cut = f"{len(found)} gaps of {GAP_S} s or more without a request, {in_gap_S.sum():,} s of {len(in_gap_S):,} in all"
    return per_second_S[~in_gap_S], moved_s, (f"cut out: {cut}",)


def read_trace(path: Path, reading: Reading | None = None) -> CountReplay | StampReplay:
    """Read a file of any of the formats above; raises DataError that names file and line for anything else.

    `reading`: what is asked for, else the content decides; raises DataError too for a table of the other kind.
    """
    lines = _text(path).splitlines()
    header = next((line for line in lines if line.strip()), None)
    if header is None:
        raise DataError(f"{path}: empty; a trace is needed")
    columns = [name.strip(' "') for name in header.split(",")]
    if "TIMESTAMP" in columns:
        trace: CountReplay | StampReplay = _seconds(_stamps(path, lines, columns))
    elif len(columns) > 1:
        trace = _per_minute(path, lines, columns)
    else:
        trace = _numbers(path, lines, reading)
    if reading == "counts" and isinstance(trace, StampReplay):
        raise DataError(f"{path}: seconds of single requests; counts per second or minute are needed")
    if reading == "times" and isinstance(trace, CountReplay):
        raise DataError(f"{path}: counts per minute; the seconds of single requests are needed")
    return trace


def read_counts(path: Path) -> CountReplay:
    """Read a file of counts; raises DataError for one of seconds too."""
    trace = read_trace(path, "counts")
    assert isinstance(trace, CountReplay)
    return trace


def gaps(per_second_S: FloatArray) -> IntArray:
    """First second and end (G, 2) of the runs of at least `GAP_S` zeros: there nothing was recorded."""
    zero_S = np.concatenate([[False], per_second_S == 0, [False]])
    runs_G2 = np.flatnonzero(np.diff(zero_S)).reshape(-1, 2)
    return runs_G2[runs_G2[:, 1] - runs_G2[:, 0] >= GAP_S]


def _text(path: Path) -> str:
    check_file(path)
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if data.startswith(GZIP) else data).decode("utf-8-sig")
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


def _numbers(path: Path, lines: Sequence[str], reading: Reading | None) -> CountReplay | StampReplay:
    """As they are to be read; else counts where a line holds several, or all are whole numbers, and seconds else."""
    rows = [line.split() for line in lines]
    words = [word for row in rows for word in row]
    lines_N = np.repeat(np.arange(1, len(rows) + 1), [len(row) for row in rows])
    values = _Values(path=path, words=words, lines_N=lines_N, values_N=_floats(path, words, lines_N))
    if reading is None:
        alone = len(words) == sum(map(bool, rows))
        reading = "times" if alone and not set().union(*words) <= set("+-0123456789") else "counts"
    if reading == "times":
        return _seconds(values)
    counts_S = values.values_N
    values.refuse(~(np.isfinite(counts_S) & (counts_S == np.floor(counts_S))), "is no whole number of requests")
    values.refuse(counts_S < 0, "is negative; a second has 0 requests or more")
    return _some(path, counts_S, bin_s=1.0)


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


def _seconds(values: _Values) -> StampReplay:
    seconds_N = values.values_N
    values.refuse(~(np.isfinite(seconds_N) & (seconds_N >= 0)), "is no second; finite ones, 0 or above, are allowed")
    values.refuse(np.diff(seconds_N, prepend=0.0) < 0, "is before the line above it; arrivals must ascend")
    if seconds_N[0] == seconds_N[-1]:
        raise DataError(
            f"{values.path}: {len(seconds_N)} requests at one instant have no rate; two instants are needed"
        )
    return StampReplay(arrivals_s_N=seconds_N)


def _some(path: Path, counts_B: FloatArray, *, bin_s: float) -> CountReplay:
    if not counts_B.any():
        raise DataError(f"{path}: no requests: every count is 0")
    return CountReplay(counts_B=counts_B, bin_s=bin_s)


def _per_minute(path: Path, lines: Sequence[str], columns: Sequence[str]) -> CountReplay:
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
