"""Parses arrival processes such as `poisson:9000`, `mmpp:1000,peak=5000,calm_s=10,burst_s=1` and `trace:FILE`.

A trace is a file of recorded traffic: the number of requests per second or minute, or the time of each request. Its
format follows from its content, which may be compressed with gzip:

    52 55 48 ...                      whole numbers: requests per second (the Twitter trace of InfAdapter and IPA)
    HashFunction,...,minute_1,...     one function per row, with its requests per minute (Azure Functions 2019)
    0.25                              one request per line: its time in seconds

With `trace:`, whole numbers are read as counts, and numbers one per line, at least one of them with a decimal point
(`3.0`), as times. A note names the interpretation. `counts:` and `times:` choose it explicitly.

Processes draw the send times of a whole run at once. All but `Uniform` use the same method. They draw points of mean
spacing 1 on an axis of *expected arrivals*, and map these to seconds by the number that is expected until each second.

A replay of recorded traffic starts at a second of the trace, at its own rate or scaled to another one. It starts again
from the beginning if more is drawn than the trace holds. The scaled rate is the mean of the drawn window.
"""

from __future__ import annotations

import gzip
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from earlyexit.data.images import check_file
from earlyexit.data.text_tables import csv_cells
from earlyexit.errors import DataError, InputError, raising
from profiles.scores import BoolArray, FloatArray

MAX_ARRIVALS = 200_000_000
"""Maximum number of arrivals in one draw, which take 1.6 GB, and several times as much while they are drawn."""
LARGEST = 1e12
"""Largest allowed rate or time, beyond which floating-point rounding matters."""
Positive = Annotated[float, Field(gt=0, le=LARGEST, allow_inf_nan=False)]
SPEC_CONFIG = ConfigDict(extra="forbid", populate_by_name=True)
"""Fields have an alias if their option in `offramp.load.arrivals` has another name."""


class Process(Protocol):
    """An arrival process."""

    def draw(self, duration_s: float, rng: np.random.Generator) -> FloatArray:
        """Returns ascending times in [0, duration_s), in seconds. Equal generators give equal arrays.

        A trace that is shorter than the duration repeats. Raises InputError above `MAX_ARRIVALS`, and DataError for a
        window of a trace without arrivals.
        """


@checked(frozen=True, slots=True, kw_only=True, config=SPEC_CONFIG)
class Uniform:
    """Arrivals at equal intervals, the first at second 0."""

    rate_per_s: Annotated[Positive, Field(alias="rate")]

    def draw(self, duration_s: float, rng: np.random.Generator) -> FloatArray:
        check_size(self.rate_per_s * duration_s)
        return before(np.arange(math.ceil(self.rate_per_s * duration_s)) / self.rate_per_s, duration_s)


@checked(frozen=True, slots=True, kw_only=True, config=SPEC_CONFIG)
class Poisson:
    """Independent arrivals, as of many users."""

    rate_per_s: Annotated[Positive, Field(alias="rate")]

    def draw(self, duration_s: float, rng: np.random.Generator) -> FloatArray:
        points_N = unit_points(self.rate_per_s * duration_s, rng.standard_exponential)
        return before(points_N / self.rate_per_s, duration_s)


@checked(frozen=True, slots=True, kw_only=True, config=SPEC_CONFIG)
class Gamma:
    """Independent intervals of a gamma distribution. `cv` 1 is a Poisson process; larger values are burstier.

    The process is stationary: it has started long before second 0, so the expected rate is `rate_per_s` in any window.
    """

    rate_per_s: Annotated[Positive, Field(alias="rate")]
    cv: Annotated[float, Field(ge=0.01, le=100.0, allow_inf_nan=False)]
    """Coefficient of variation of the intervals. Below the range they are equal; above, arrivals of a draw coincide."""

    def draw(self, duration_s: float, rng: np.random.Generator) -> FloatArray:
        shape, until = self.cv**-2, self.rate_per_s * duration_s
        check_size(until)
        # Second 0 lies in an interval with a probability proportional to its length: a gamma variable of shape + 1.
        first = rng.random() * rng.gamma(shape + 1, 1 / shape)
        further_N = unit_points(until - first, lambda num: rng.gamma(shape, 1 / shape, num))
        return before(np.concatenate([[first], first + further_N]) / self.rate_per_s, duration_s)


@checked(frozen=True, slots=True, kw_only=True, config=SPEC_CONFIG)
class Modulated:
    """A Poisson process whose rate switches between two states at exponential times (two-state MMPP).

    The process is stationary, so the expected rate is `mean_per_s` in any window. The rate of a single short window can
    differ a lot. Raises InputError for a peak that would need a negative rate in the calm state.
    """

    mean_per_s: Annotated[Positive, Field(alias="rate")]
    peak_per_s: Annotated[Positive, Field(alias="peak")]
    """Rate in a burst."""
    calm_s: Positive
    """Mean duration of the calm state."""
    burst_s: Positive
    """Mean duration of a burst."""

    def __post_init__(self) -> None:
        highest = self.mean_per_s * (1 + self.calm_s / self.burst_s)
        if not self.mean_per_s < self.peak_per_s <= highest:
            raise InputError(
                f"a peak of {self.peak_per_s:g}/s in bursts of {self.burst_s:g} s after calms of {self.calm_s:g} s; "
                f"for a mean of {self.mean_per_s:g}/s it must be above the mean and at most {highest:g}/s "
                "(calms without arrivals)"
            )

    @property
    def calm_per_s(self) -> float:
        """The rate outside bursts, which follows from the mean and the peak."""
        return max(0.0, self.mean_per_s - (self.peak_per_s - self.mean_per_s) * self.burst_s / self.calm_s)

    def draw(self, duration_s: float, rng: np.random.Generator) -> FloatArray:
        check_size(self.mean_per_s * duration_s)
        ends_s, rates_per_s = self._sojourns(duration_s, rng)
        knots_s = np.concatenate([[0.0], ends_s])
        expected = np.concatenate([[0.0], np.cumsum(rates_per_s * np.diff(knots_s))])
        points_N = unit_points(float(np.interp(duration_s, knots_s, expected)), rng.standard_exponential)
        return within(np.interp(points_N, expected, knots_s), duration_s)

    def _sojourns(self, duration_s: float, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
        """Returns ends and rates of successive states that cover `duration_s`."""
        cycle_s = self.calm_s + self.burst_s
        check_size(2 * duration_s / cycle_s, "changes between calm and burst")
        pair = [(self.burst_s, self.peak_per_s), (self.calm_s, self.calm_per_s)]
        means_s, rates_per_s = zip(*(pair if rng.random() < self.burst_s / cycle_s else pair[::-1]), strict=True)
        lengths: list[FloatArray] = []
        reached_s = 0.0
        while reached_s < duration_s:
            num_cycles = _draw_size((duration_s - reached_s) / cycle_s)
            lengths.append((rng.standard_exponential((num_cycles, 2)) * means_s).ravel())
            reached_s += float(lengths[-1].sum())
        lengths_s = np.concatenate(lengths)
        return np.cumsum(lengths_s), np.tile(rates_per_s, len(lengths_s) // 2)


def unit_points(until: float, spacings: Callable[[int], FloatArray]) -> FloatArray:
    """Returns the cumulative sums below `until` of spacings of mean 1; raises InputError for too many.

    `spacings(n)` draws n spacings.
    """
    check_size(until)
    parts: list[FloatArray] = [np.empty(0)]
    reached = 0.0
    while reached < until:
        part = np.cumsum(spacings(_draw_size(until - reached)))
        part += reached
        reached = float(part[-1])
        parts.append(part)
    return before(parts[1] if len(parts) == 2 else np.concatenate(parts), until)


def _draw_size(expected: float) -> int:
    """Returns how many spacings to draw so that they rarely fall short: four standard deviations more than expected."""
    return math.ceil(expected + 4 * math.sqrt(expected)) + 16


def within(seconds_N: FloatArray, duration_s: float) -> FloatArray:
    """Returns interpolated times, limited to [0, duration_s)."""
    # Rounding can swap neighbours, or put the first below 0, by a unit in the last place.
    return before(np.maximum.accumulate(np.maximum(seconds_N, 0.0)), duration_s)


def before(seconds_N: FloatArray, end_s: float) -> FloatArray:
    """Returns the ascending times that are before `end_s`."""
    return seconds_N[: np.searchsorted(seconds_N, end_s, side="left")]


def check_size(num: float, what: str = "arrivals") -> None:
    """Raises InputError for more than `MAX_ARRIVALS`, before memory or minutes are spent."""
    if not num <= MAX_ARRIVALS:
        raise InputError(
            f"about {num:.3g} {what} in one draw; at most {MAX_ARRIVALS:,} are drawn: lower the rate or the duration"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """A replay of recorded traffic."""

    start_s: float = 0.0
    """Second of the trace at which the draw starts."""
    rate_per_s: float | None = None
    """Mean rate of the drawn window; None: as recorded."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CountReplay(Replay):
    """A Poisson process whose rate in each time bin is the recorded count.

    A bin with a count of 50 gets 50 arrivals on average, not exactly. Scaling multiplies all counts by one factor, so
    bursts keep their proportions and durations. E3 (section 5.7) scales the Twitter trace to a mean of 1000 requests/s
    and does not say how; we assume this method.
    """

    counts_B: FloatArray
    """Requests per time bin: finite, not negative, and not all 0."""
    bin_s: float

    @property
    def period_s(self) -> float:
        """Seconds after which the counts repeat."""
        return len(self.counts_B) * self.bin_s

    def draw(self, duration_s: float, rng: np.random.Generator) -> FloatArray:
        knots_s = np.arange(len(self.counts_B) + 1, dtype=np.float64) * self.bin_s
        expected_K = np.concatenate([[0.0], np.cumsum(self.counts_B)])

        def expected_by(second: float) -> float:
            rounds, rest_s = divmod(second, self.period_s)
            return float(rounds * expected_K[-1] + np.interp(rest_s, knots_s, expected_K))

        begin = expected_by(self.start_s)
        in_window = expected_by(self.start_s + duration_s) - begin
        if in_window <= 0:
            raise _silent(duration_s)
        scale = 1.0 if self.rate_per_s is None else self.rate_per_s * duration_s / in_window
        points_N = begin + unit_points(in_window * scale, rng.standard_exponential) / scale
        rounds_N, rest_N = np.divmod(points_N, expected_K[-1])
        seconds_N = rounds_N * self.period_s + np.interp(rest_N, expected_K, knots_s)
        return within(seconds_N - self.start_s, duration_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StampReplay(Replay):
    """The recorded arrivals, without randomness.

    Scaling compresses or stretches time: exactly `rate * duration` arrivals from `start_s` on are fitted to the
    duration, so bursts become shorter as the rate rises. The trace repeats one mean interval after its last arrival.
    """

    arrivals_s_N: FloatArray
    """The time of each request in seconds: ascending, from 0, and at least two of them different."""

    @property
    def period_s(self) -> float:
        """Seconds after which the arrivals repeat."""
        span_s = float(self.arrivals_s_N[-1] - self.arrivals_s_N[0])
        return span_s * (1 + 1 / (len(self.arrivals_s_N) - 1))

    def draw(self, duration_s: float, rng: np.random.Generator) -> FloatArray:
        in_round, period_s = len(self.arrivals_s_N), self.period_s
        num = duration_s / period_s * in_round if self.rate_per_s is None else self.rate_per_s * duration_s
        check_size(num)
        # Two more rounds than are drawn: the first may be partial, and scaling needs the arrival after the last one.
        first = max(0, math.floor((self.start_s - self.arrivals_s_N[0]) / period_s))
        rounds = np.arange(first, first + math.ceil(num / in_round) + 2)
        seconds_N = (rounds[:, np.newaxis] * period_s + self.arrivals_s_N).ravel() - self.start_s
        seconds_N = seconds_N[np.searchsorted(seconds_N, 0.0) :]
        if self.rate_per_s is not None:
            if seconds_N[0] > period_s:  # the requests would be fitted to the very end of the duration
                raise DataError(f"the trace's first request is at second {self.arrivals_s_N[0]:.15g}; set from= to it")
            last_s = seconds_N[max(1, round(num)) - 1]
            end_s = float(seconds_N[np.searchsorted(seconds_N, last_s, side="right")])  # the next later arrival
            seconds_N = seconds_N[: round(num)] * (duration_s / end_s)
        if not len(drawn_N := within(seconds_N, duration_s)):
            raise _silent(duration_s)
        return drawn_N


def _silent(duration_s: float) -> DataError:
    return DataError(f"the trace has no arrivals in the drawn {duration_s:g} s; draw more, or set another from=")


GZIP = b"\x1f\x8b"
FORMS = (
    "counts per second, times in seconds, one per line, and tables with the columns minute_1, minute_2, ... "
    "(Azure Functions)"
)
Interpretation = Literal["counts", "times"]
"""How numbers are read: as requests per second, or as the time of each request in seconds."""
Cell = tuple[int, str]
"""A text in a file, after the number of its line."""
ALLOWED = (
    "poisson:RATE, uniform:RATE, gamma:RATE,cv=CV, mmpp:MEAN,peak=RATE,calm_s=S,burst_s=S, "
    "trace:FILE[,rate=RATE][,from=SECOND]; instead of trace, counts:FILE reads numbers as requests per second, "
    "times:FILE as the time of each request in seconds"
)


def parse_arrivals(spec: str) -> tuple[Process, tuple[str, ...]]:
    """Returns a process from its text, and notes of how its trace was read; `ALLOWED` lists the forms.

    `rate` scales the drawn window of a trace to this mean rate: counts are multiplied, so bursts keep their duration;
    times are compressed or stretched, so bursts become shorter or longer. `from` is the second of the file at which the
    window starts. Reads the trace file. Raises InputError for an invalid text and DataError for an invalid file.
    """
    name, _, rest = spec.strip().partition(":")
    if name not in KINDS:
        raise InputError(f"arrivals {spec!r}: no such process {name!r}; allowed: {ALLOWED}")
    head, *parts = re.split(r",(?=\w+=)", rest)  # a file name may hold commas
    options = {"file" if name in INTERPRETATIONS else "rate": head}
    for part in parts:
        key, _, value = part.partition("=")
        if key in options:
            raise InputError(f"arrivals {spec!r}: {key}= is given twice")
        options[key] = value
    try:
        parsed = TypeAdapter(KINDS[name]).validate_python(options)
    except ValidationError as error:
        first = error.errors()[0]
        key, message = first["loc"][0], first["msg"]
        raise InputError(f"arrivals {spec!r}: {key}: {message[0].lower()}{message[1:]}; allowed: {ALLOWED}") from None
    return _replay(parsed, spec, INTERPRETATIONS[name]) if isinstance(parsed, _Trace) else (parsed, ())


class _Trace(BaseModel):
    """The options of a trace."""

    model_config = ConfigDict(extra="forbid")

    file: str = Field(min_length=1)
    rate: Positive | None = None
    start_s: float = Field(default=0.0, alias="from", ge=0, le=LARGEST, allow_inf_nan=False)


INTERPRETATIONS: Mapping[str, Interpretation | None] = {"trace": None, "counts": "counts", "times": "times"}
"""How the numbers of a trace are read; None: according to the content."""
KINDS: Mapping[str, type[Any]] = {
    "poisson": Poisson,
    "uniform": Uniform,
    "gamma": Gamma,
    "mmpp": Modulated,
    **dict.fromkeys(INTERPRETATIONS, _Trace),
}
"""The type of each process by its name. Its fields are the options that follow the name."""


def _replay(
    options: _Trace, spec: str, interpretation: Interpretation | None
) -> tuple[CountReplay | StampReplay, tuple[str, ...]]:
    """Reads a trace, and returns its replay with notes of how it was read."""
    trace, start_s = read_trace(Path(options.file), interpretation), options.start_s
    if isinstance(trace, StampReplay):
        last_s, content = float(trace.arrivals_s_N[-1]), f"the times of {len(trace.arrivals_s_N):,} requests"
    else:
        last_s, unit = trace.period_s, "second" if trace.bin_s == 1 else "minute"
        content = f"{len(trace.counts_B):,} counts, requests per {unit}"
        if interpretation is None and unit == "second":
            content += " (times: reads them as the time of each request)"
    if start_s > last_s or (start_s == last_s and isinstance(trace, CountReplay)):
        raise InputError(f"arrivals {spec!r}: from={start_s:.15g} is beyond the trace's {last_s:g} s")
    process = replace(trace, start_s=start_s, rate_per_s=options.rate)
    length = f"the trace is {process.period_s:,.0f} s long, and repeats if more is drawn"
    return process, (f"{options.file}: read as {content}", length)


def _mistakes(values_N: FloatArray, kind: Interpretation | Literal["minutes"]) -> Iterator[tuple[BoolArray, str]]:
    """Yields which numbers of a trace are wrong, and why. `minutes`: they are counts of a minute, which may be sums."""
    is_finite_N = np.isfinite(values_N)
    if kind == "minutes":
        yield ~(is_finite_N & (values_N >= 0)), "is not a count, which is 0 or more"
    elif kind == "counts":
        yield ~(is_finite_N & (values_N == np.floor(values_N))), "is not a whole number of requests"
        yield values_N < 0, "is negative; a second has 0 requests or more"
    else:
        yield ~(is_finite_N & (values_N >= 0)), "is not a time; it must be finite, and 0 or above"
        yield np.diff(values_N, prepend=0.0) < 0, "is before the line above it; arrivals must ascend"


def read_trace(path: Path, interpretation: Interpretation | None = None) -> CountReplay | StampReplay:
    """Reads a trace in any of the formats above; raises DataError with file and line for anything else.

    `interpretation`: None to decide by the content. Raises DataError for a table that contradicts it.
    """
    lines = _text(path).splitlines()
    header = next((line for line in lines if line.strip()), None)
    if header is None:
        raise DataError(f"{path}: empty; a trace is needed")
    columns = [name.strip(' "') for name in header.split(",")]
    if len(columns) > 1:
        if interpretation == "times":
            raise DataError(f"{path}: the file has counts per minute; times of single requests are needed")
        values_N, bin_s, interpretation = _per_minute(path, lines, columns), 60.0, "counts"
    else:
        cells, bin_s = [(line, text) for line, row in enumerate(lines, start=1) for text in row.split()], 1.0
        if interpretation is None:
            one_per_line = len(dict(cells)) == len(cells)
            are_whole = set().union(*(text for _, text in cells)) <= set("+-0123456789")
            interpretation = "times" if one_per_line and not are_whole else "counts"
        values_N = _numbers(path, cells, interpretation)
    if interpretation == "counts":
        if not values_N.any():
            raise DataError(f"{path}: no requests: every count is 0")
        return CountReplay(counts_B=values_N, bin_s=bin_s)
    if values_N[0] == values_N[-1]:
        raise DataError(f"{path}: {len(values_N)} requests at the same time define no rate; two times are needed")
    return StampReplay(arrivals_s_N=values_N)


def _text(path: Path) -> str:
    check_file(path)
    with raising(DataError, f"{path}", OSError):
        data = path.read_bytes()
    try:
        with raising(DataError, f"{path}: damaged gzip", EOFError, zlib.error, gzip.BadGzipFile):
            return (gzip.decompress(data) if data.startswith(GZIP) else data).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not UTF-8") from error


def _numbers(path: Path, cells: Sequence[Cell], kind: Interpretation | Literal["minutes"]) -> FloatArray:
    """Returns the numbers in cells of a file. Raises DataError for the first of each `_mistakes`."""

    def error(index: int, reason: str) -> DataError:
        line, text = cells[index]
        place = ""
        if kind == "minutes":
            place = f" (value {index + 1} of the row's minutes)"
        elif len(cells) > cells[-1][0]:  # several on a line
            place = f" (value {index + 1} of the file)"
        return DataError(f"{path}:{line}: {text!r} {reason}{place}")

    values_N = np.empty(len(cells))
    for index, (_, text) in enumerate(cells):
        try:
            values_N[index] = float(text)
        except ValueError:
            raise error(index, f"is not a number; allowed are {FORMS}") from None
    for wrong_N, reason in _mistakes(values_N, kind):
        if wrong_N.any():
            raise error(int(wrong_N.argmax()), reason)
    return values_N


def _per_minute(path: Path, lines: Sequence[str], columns: Sequence[str]) -> FloatArray:
    """Returns the sums of all functions' counts."""
    minutes = [index for index, name in enumerate(columns) if re.fullmatch(r"(minute_)?\d+", name)]
    if not minutes or all(name.isdigit() for name in columns):  # numbers are no column names
        raise DataError(f"{path}: columns {', '.join(columns[:5])}; allowed are {FORMS}")
    sums_M = np.zeros(len(minutes))
    for line, row in islice(csv_cells(path, lines), 1, None):
        sums_M += _numbers(path, [(line, row[index]) for index in minutes], "minutes")
    return sums_M
