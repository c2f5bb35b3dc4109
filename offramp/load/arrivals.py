"""When requests arrive, said in one line: `poisson:9000`, `mmpp:1000,peak=5000,calm_s=10,burst_s=1`, `trace:FILE`.

A trace's numbers may be requests per second or the time of each request: `trace:` goes by the content and notes which
reading was taken, `counts:` and `times:` say it.

Random processes of arrivals: each draws whole arrays of seconds at once.

All but equal gaps are drawn alike: points of mean spacing 1 on the axis of *expected arrivals*, mapped back to seconds
through the expected number of arrivals by then. So an arrival process is its expectation over time.

Recorded traffic as arrival processes: from a second of the trace on, as it was or scaled to a rate.

Both go round again where more is drawn than the trace holds. A rate is that of the window that is drawn, not of the
whole trace, so the mean rate offered is the one asked for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from earlyexit.errors import DataError, InputError
from offramp.load.traces import GAP_S, CountTrace, Reading, StampTrace, gaps, in_gaps, read_trace

FloatArray = npt.NDArray[np.float64]

MOST_ARRIVALS = 200_000_000
"""In one draw: 1.6 GB as an array, several times that while it is drawn."""


class Process(Protocol):
    """Arrivals of one kind."""

    def draw(self, duration_s: float, rng: np.random.Generator) -> FloatArray:
        """Seconds in [0, duration_s), ascending; raises InputError above `MOST_ARRIVALS`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    """Equal gaps from second 0 on: one metronome, the kindest load of its rate."""

    rate_per_s: float

    def draw(self, duration_s: float, rng: np.random.Generator) -> FloatArray:
        check_size(self.rate_per_s * duration_s)
        return before(self.first(math.ceil(self.rate_per_s * duration_s), rng), duration_s)

    def first(self, num_arrivals: int, rng: np.random.Generator) -> FloatArray:
        """Seconds of the first so many."""
        return np.arange(num_arrivals) / self.rate_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Poisson:
    """Many independent users, arriving in bursts and lulls."""

    rate_per_s: float

    def draw(self, duration_s: float, rng: np.random.Generator) -> FloatArray:
        points_N = unit_points(self.rate_per_s * duration_s, rng.standard_exponential)
        return before(points_N / self.rate_per_s, duration_s)

    def first(self, num_arrivals: int, rng: np.random.Generator) -> FloatArray:
        """Seconds of the first so many."""
        return np.cumsum(rng.standard_exponential(num_arrivals)) / self.rate_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Gamma:
    """Independent gaps of a gamma distribution; `cv` 1 is Poisson, above is burstier.

    The process has been running before second 0, which therefore more likely lies in a long gap than in a short one; so
    the expected rate is `rate_per_s` over any window.
    """

    rate_per_s: float
    cv: float
    """Standard deviation of the gaps over their mean."""

    def draw(self, duration_s: float, rng: np.random.Generator) -> FloatArray:
        shape, until = self.cv**-2, self.rate_per_s * duration_s
        check_size(until)
        # A gap that holds a given instant is drawn by its length, which for gamma means one more in the shape.
        first = rng.random() * rng.gamma(shape + 1, 1 / shape)
        further_N = unit_points(until - first, lambda num: rng.gamma(shape, 1 / shape, num))
        return before(np.concatenate([[first], first + further_N]) / self.rate_per_s, duration_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Modulated:
    """A Poisson process whose rate switches between two states at exponential times (two-state MMPP).

    It starts in the states' long-run shares, so the expected rate is `mean_per_s` over any window; a window of few
    sojourns can be far from it. Raises InputError for a peak that leaves the calm state a rate below zero.
    """

    mean_per_s: float
    peak_per_s: float
    """In a burst."""
    calm_s: float
    """Mean length of a calm."""
    burst_s: float
    """Mean length of a burst."""

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
        """The rate outside bursts, which makes the mean come out."""
        return max(0.0, self.mean_per_s - (self.peak_per_s - self.mean_per_s) * self.burst_s / self.calm_s)

    def draw(self, duration_s: float, rng: np.random.Generator) -> FloatArray:
        check_size(self.mean_per_s * duration_s)
        ends_s, rates_per_s = self._sojourns(duration_s, rng)
        knots_s = np.concatenate([[0.0], ends_s])
        expected = np.concatenate([[0.0], np.cumsum(rates_per_s * np.diff(knots_s))])
        points_N = unit_points(float(np.interp(duration_s, knots_s, expected)), rng.standard_exponential)
        return within(np.interp(points_N, expected, knots_s), duration_s)

    def _sojourns(self, duration_s: float, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
        """Ends and rates of sojourns that cover `duration_s`."""
        cycle_s = self.calm_s + self.burst_s
        check_size(2 * duration_s / cycle_s, "changes between calm and burst")
        pair = [(self.burst_s, self.peak_per_s), (self.calm_s, self.calm_per_s)]
        means_s, rates_per_s = zip(*(pair if rng.random() < self.burst_s / cycle_s else pair[::-1]), strict=True)
        lengths: list[FloatArray] = []
        reached_s = 0.0
        while reached_s < duration_s:
            num_cycles = _enough((duration_s - reached_s) / cycle_s)
            lengths.append((rng.standard_exponential((num_cycles, 2)) * means_s).ravel())
            reached_s += float(lengths[-1].sum())
        lengths_s = np.concatenate(lengths)
        return np.cumsum(lengths_s), np.tile(rates_per_s, len(lengths_s) // 2)


def unit_points(until: float, spacings: Callable[[int], FloatArray]) -> FloatArray:
    """Sums of spacings of mean 1 that stay below `until`; `spacings` draws so many. Raises InputError for too many."""
    check_size(until)
    parts: list[FloatArray] = [np.empty(0)]
    reached = 0.0
    while reached < until:
        part = np.cumsum(spacings(_enough(until - reached)))
        part += reached
        reached = float(part[-1])
        parts.append(part)
    return before(parts[1] if len(parts) == 2 else np.concatenate(parts), until)


def _enough(expected: float) -> int:
    """A number to draw at once that rarely falls short of `expected`, by four standard deviations of a count."""
    return math.ceil(expected + 4 * math.sqrt(expected)) + 16


def within(seconds_N: FloatArray, duration_s: float) -> FloatArray:
    """Interpolated seconds, cut to [0, duration_s)."""
    # Rounding at a knot may put neighbours in the wrong order, or the first below 0, by a unit in the last place.
    return before(np.maximum.accumulate(np.maximum(seconds_N, 0.0)), duration_s)


def before(seconds_N: FloatArray, end_s: float) -> FloatArray:
    """Those of ascending seconds that are before `end_s`."""
    return seconds_N[: np.searchsorted(seconds_N, end_s, side="left")]


def check_size(num: float, what: str = "arrivals") -> None:
    """Raises InputError for more than `MOST_ARRIVALS`, before memory or minutes are spent."""
    if not num <= MOST_ARRIVALS:
        raise InputError(
            f"about {num:.3g} {what} in one draw; at most {MOST_ARRIVALS:,} are drawn: lower the rate or the duration"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CountReplay:
    """Counts per bin as the expectations of a Poisson process, constant within each bin.

    Scaling multiplies every count by one number, fractions allowed, so bursts and lulls keep their proportions and
    their lengths. E3 (section 5.7) scales the Twitter trace to a mean of 1000 requests/s and does not say how; this is
    our reading. Unscaled counts are expectations too: a second of 50 gets 50 arrivals on average, not exactly.
    """

    counts_B: FloatArray
    bin_s: float
    start_s: float = 0.0
    """Where in the counts the draw begins."""
    rate_per_s: float | None = None
    """Mean over the drawn window; None: as recorded."""

    @property
    def period_s(self) -> float:
        """After so many seconds the counts begin again."""
        return len(self.counts_B) * self.bin_s

    def draw(self, duration_s: float, rng: np.random.Generator) -> FloatArray:
        """Raises DataError for a window without arrivals, InputError for too many."""
        expected_K = np.concatenate([[0.0], np.cumsum(self.counts_B)])
        begin = self._expected_by(self.start_s, expected_K)
        in_window = self._expected_by(self.start_s + duration_s, expected_K) - begin
        if in_window <= 0:
            raise _silent(duration_s)
        scale = 1.0 if self.rate_per_s is None else self.rate_per_s * duration_s / in_window
        points_N = begin + unit_points(in_window * scale, rng.standard_exponential) / scale
        rounds_N, rest_N = np.divmod(points_N, expected_K[-1])
        seconds_N = rounds_N * self.period_s + np.interp(rest_N, expected_K, self._knots_s())
        return within(seconds_N - self.start_s, duration_s)

    def _expected_by(self, second: float, expected_K: FloatArray) -> float:
        rounds, rest_s = divmod(second, self.period_s)
        return float(rounds * expected_K[-1] + np.interp(rest_s, self._knots_s(), expected_K))

    def _knots_s(self) -> FloatArray:
        return np.arange(len(self.counts_B) + 1, dtype=np.float64) * self.bin_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StampReplay:
    """The recorded arrivals themselves; nothing is random.

    Scaling compresses or stretches time: of the arrivals from `start_s` on, the next `rate * duration` are fitted to
    the duration, so bursts get shorter as the rate rises, and exactly so many are drawn. The trace begins again one
    mean gap after its last arrival.
    """

    arrivals_s_N: FloatArray
    """Ascending, not all equal."""
    start_s: float = 0.0
    """Where in the trace the draw begins."""
    rate_per_s: float | None = None
    """Mean over the drawn window; None: as recorded."""

    @property
    def period_s(self) -> float:
        """After so many seconds the arrivals begin again."""
        span_s = float(self.arrivals_s_N[-1] - self.arrivals_s_N[0])
        return span_s * (1 + 1 / (len(self.arrivals_s_N) - 1))

    def draw(self, duration_s: float, rng: np.random.Generator) -> FloatArray:
        """Raises DataError for a window without arrivals, InputError for too many."""
        drawn_N = (
            self._as_recorded(duration_s) if self.rate_per_s is None else self._fitted(self.rate_per_s, duration_s)
        )
        if not len(drawn_N):
            raise _silent(duration_s)
        return drawn_N

    def _as_recorded(self, duration_s: float) -> FloatArray:
        check_size(duration_s / self.period_s * len(self.arrivals_s_N))
        indices_N = np.arange(self._num_before(self.start_s), self._num_before(self.start_s + duration_s))
        return within(self._from_start_s(indices_N), duration_s)

    def _fitted(self, rate_per_s: float, duration_s: float) -> FloatArray:
        check_size(rate_per_s * duration_s)
        first, num_arrivals = self._num_before(self.start_s), round(rate_per_s * duration_s)
        if not num_arrivals:
            return np.empty(0)
        following = self._first_after(first + num_arrivals - 1)
        seconds_N = self._from_start_s(np.append(np.arange(first, first + num_arrivals), following))
        return within(seconds_N[:-1] * (duration_s / seconds_N[-1]), duration_s)

    def _first_after(self, index: int) -> int:
        """The next arrival that is not at the very instant of this one: there the window of a fit ends."""
        in_round = index % len(self.arrivals_s_N)
        later = np.searchsorted(self.arrivals_s_N, self.arrivals_s_N[in_round], side="right")
        return index - in_round + int(later)

    def _num_before(self, second: float) -> int:
        """Of the arrivals of all rounds, those before a second of the trace."""
        rounds, rest_s = divmod(second - self.arrivals_s_N[0], self.period_s)
        if rounds < 0:
            return 0
        in_round = np.searchsorted(self.arrivals_s_N - self.arrivals_s_N[0], rest_s, side="left")
        return int(rounds) * len(self.arrivals_s_N) + int(in_round)

    def _from_start_s(self, indices_N: npt.NDArray[np.int64]) -> FloatArray:
        rounds_N, rest_N = np.divmod(indices_N, len(self.arrivals_s_N))
        return rounds_N * self.period_s + self.arrivals_s_N[rest_N] - self.start_s


def _silent(duration_s: float) -> DataError:
    return DataError(f"the trace has no arrivals in the {duration_s:g} s drawn; draw more, or set another from=")


__all__ = ["ALLOWED", "Arrivals", "FloatArray", "parse_arrivals"]

ALLOWED = (
    "poisson:RATE, uniform:RATE, gamma:RATE,cv=CV, mmpp:MEAN,peak=RATE,calm_s=S,burst_s=S, "
    "trace:FILE[,rate=RATE][,from=SECOND][,gaps=cut|keep]; in the place of trace, counts:FILE (requests per second) or "
    "times:FILE[,unit=s|ms] (of each request) say how its numbers are read"
)
LARGEST = 1e12
"""Of any number in a spec: beyond it rates and seconds lose their digits to rounding."""
DATES_S = 1e8
"""Seconds beyond three years are taken as dates since 1970, not as waits from 0."""
UNITS = {"s": 1.0, "ms": 1e-3}
"""Of times, in seconds."""
CV_RANGE = (0.01, 100.0)
"""Below, gaps are equal; above, all arrivals of a draw come at one instant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """A process of arrivals, and the words that ask for it."""

    words: str
    process: Process
    notes: tuple[str, ...] = ()
    """What was done to a trace that the words do not say, a sentence each."""

    def draw(self, duration_s: float, rng: np.random.Generator) -> FloatArray:
        """Seconds of all arrivals in [0, duration_s), ascending; equal generators give equal arrays.

        Raises InputError for a duration that is not finite and above 0 and for more than 200 million arrivals,
        DataError for a part of a trace in which nothing arrives. A trace shorter than the duration goes round again.
        """
        if not 0 < duration_s < math.inf:
            raise InputError(f"a duration of {duration_s} s; a finite one above 0 is needed")
        return self.process.draw(duration_s, rng)


def parse_arrivals(spec: str) -> Arrivals:
    """Arrivals in words; `ALLOWED` lists the forms, numbers are requests per second and seconds.

    `rate` gives the window drawn of a trace this mean rate: counts are multiplied, so that bursts stay as long; times
    are moved together or apart, so that bursts get shorter or longer. `from` is the second of the file to begin at,
    gaps counted. Runs of at least 60 s without a request in counts per second are cut out, unless `gaps=keep`, and the
    rest is moved together. A trace is read here; raises InputError for wrong words and DataError for a wrong file.
    """
    name, _, rest = spec.strip().partition(":")
    if name not in _KINDS:
        raise InputError(f"arrivals {spec!r}: no such process {name!r}; allowed: {ALLOWED}")
    head, options = _options(spec, rest)
    build, keys = _KINDS[name]
    unknown = sorted(set(options) - set(keys))
    if unknown:
        raise InputError(f"arrivals {spec!r}: no such key {unknown[0]!r}; allowed: {ALLOWED}")
    process, notes = build(_Words(spec=spec, head=head, options=options))
    return Arrivals(words=spec.strip(), process=process, notes=notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """The parts of a spec behind its name."""

    spec: str
    head: str
    options: Mapping[str, str]

    @property
    def rate_per_s(self) -> float:
        return self._above_zero("its rate", self.head)

    def needed(self, key: str) -> float:
        if key not in self.options:
            raise InputError(f"arrivals {self.spec!r}: {key}= is missing; allowed: {ALLOWED}")
        return self._above_zero(key, self.options[key])

    def rate_option(self) -> float | None:
        return self.needed("rate") if "rate" in self.options else None

    def start_s(self) -> float:
        text = self.options.get("from", "0")
        second = _number(text)
        if second is None or not 0 <= second <= LARGEST:
            raise InputError(f"arrivals {self.spec!r}: from={text!r}; a second of the trace, 0 or above, is needed")
        return second

    def cuts_gaps(self) -> bool:
        text = self.options.get("gaps", "cut")
        if text not in ("cut", "keep"):
            raise InputError(f"arrivals {self.spec!r}: gaps={text!r}; allowed: cut, keep")
        return text == "cut"

    def _above_zero(self, what: str, text: str) -> float:
        value = _number(text)
        if value is None or not 0 < value <= LARGEST:
            raise InputError(
                f"arrivals {self.spec!r}: {what} is {text!r}; a number above 0 and at most {LARGEST:g} is needed; "
                f"allowed: {ALLOWED}"
            )
        return value


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _options(spec: str, rest: str) -> tuple[str, dict[str, str]]:
    """What is before the first `,key=`, and the keys; a file name may hold commas."""
    head, *parts = re.split(r",(?=\w+=)", rest)
    options: dict[str, str] = {}
    for part in parts:
        key, _, value = part.partition("=")
        if key in options:
            raise InputError(f"arrivals {spec!r}: {key}= is given twice")
        options[key] = value
    return head, options


_Built = tuple[Process, tuple[str, ...]]


def _poisson(words: _Words) -> _Built:
    return Poisson(rate_per_s=words.rate_per_s), ()


def _uniform(words: _Words) -> _Built:
    return Uniform(rate_per_s=words.rate_per_s), ()


def _gamma(words: _Words) -> _Built:
    cv = words.needed("cv")
    if not CV_RANGE[0] <= cv <= CV_RANGE[1]:
        raise InputError(f"arrivals {words.spec!r}: cv={cv:g}; allowed: {CV_RANGE[0]:g} to {CV_RANGE[1]:g}")
    return Gamma(rate_per_s=words.rate_per_s, cv=cv), ()


def _mmpp(words: _Words) -> _Built:
    process = Modulated(
        mean_per_s=words.rate_per_s,
        peak_per_s=words.needed("peak"),
        calm_s=words.needed("calm_s"),
        burst_s=words.needed("burst_s"),
    )
    return process, ()


def _trace(words: _Words) -> _Built:
    return _read(words, None)


def _read(words: _Words, reading: Reading | None) -> _Built:
    """With a note of how the file was read."""
    if not words.head:
        raise InputError(f"arrivals {words.spec!r}: the file is missing; allowed: {ALLOWED}")
    trace = read_trace(Path(words.head), reading)
    if isinstance(trace, StampTrace):
        process, notes = _stamps(words, trace)
        taken = f"the times of {len(trace.arrivals_s_N):,} requests"
    else:
        process, notes = _counts(words, trace)
        taken = f"{len(trace.counts_B):,} counts, requests per {'second' if trace.bin_s == 1 else 'minute'}"
        if reading is None and trace.bin_s == 1:
            taken += " (times: reads them as the time of each request)"
    return process, (f"{words.head}: read as {taken}", *notes)


def _counted(words: _Words) -> _Built:
    return _read(words, "counts")


def _timed(words: _Words) -> _Built:
    unit = words.options.get("unit", "s")
    if unit not in UNITS:
        raise InputError(f"arrivals {words.spec!r}: unit={unit!r}; allowed: {', '.join(UNITS)}")
    return _read(words, "times")


def _stamps(words: _Words, trace: StampTrace) -> _Built:
    if "gaps" in words.options:
        raise InputError(f"arrivals {words.spec!r}: gaps= is for counts per second; {words.head} has single requests")
    arrivals_s_N = trace.arrivals_s_N * UNITS[words.options.get("unit", "s")]
    first_s, last_s = float(arrivals_s_N[0]), float(arrivals_s_N[-1])
    if "from" not in words.options and first_s > DATES_S:
        raise DataError(f"{words.head}: the first request is at second {first_s:.15g}; say from={first_s:.15g}")
    if words.start_s() > last_s:
        raise _beyond(words, last_s)
    replay = StampReplay(arrivals_s_N=arrivals_s_N, start_s=words.start_s(), rate_per_s=words.rate_option())
    return replay, (_round_again(replay.period_s),)


def _counts(words: _Words, trace: CountTrace) -> _Built:
    if "gaps" in words.options and trace.bin_s != 1:
        raise InputError(f"arrivals {words.spec!r}: gaps= is for counts per second; {words.head} has minutes")
    seconds, start_s = len(trace.counts_B) * trace.bin_s, words.start_s()
    if start_s >= seconds:
        raise _beyond(words, seconds)
    counts_B, notes = trace.counts_B, tuple[str, ...]()
    if trace.bin_s == 1 and words.cuts_gaps():
        counts_B, start_s, notes = _without_gaps(words, counts_B)
    replay = CountReplay(counts_B=counts_B, bin_s=trace.bin_s, start_s=start_s, rate_per_s=words.rate_option())
    return replay, (*notes, _round_again(replay.period_s))


def _without_gaps(words: _Words, per_second_S: FloatArray) -> tuple[FloatArray, float, tuple[str, ...]]:
    """Counts without their gaps, the start in them, and what was cut."""
    num_gaps, in_gap_S, start_s = len(gaps(per_second_S)), in_gaps(per_second_S), words.start_s()
    if not num_gaps:
        return per_second_S, start_s, ()
    if in_gap_S[int(start_s) :].all():
        raise InputError(f"arrivals {words.spec!r}: from={words.options['from']} is in a gap that ends the trace")
    kept_before = int((~in_gap_S[: int(start_s)]).sum())
    moved_s = kept_before + (0.0 if in_gap_S[int(start_s)] else start_s % 1)
    cut = f"{num_gaps} gaps of {GAP_S} s or more without a request, {in_gap_S.sum():,} s of {len(in_gap_S):,} in all"
    return per_second_S[~in_gap_S], moved_s, (f"cut out: {cut}",)


def _beyond(words: _Words, seconds: float) -> InputError:
    return InputError(f"arrivals {words.spec!r}: from={words.options['from']} is beyond the trace's {seconds:g} s")


def _round_again(period_s: float) -> str:
    return f"the trace is {period_s:,.0f} s long; where more is drawn it goes round again"


_KINDS: Mapping[str, tuple[Callable[[_Words], _Built], tuple[str, ...]]] = {
    "poisson": (_poisson, ()),
    "uniform": (_uniform, ()),
    "gamma": (_gamma, ("cv",)),
    "mmpp": (_mmpp, ("peak", "calm_s", "burst_s")),
    "trace": (_trace, ("rate", "from", "gaps")),
    "counts": (_counted, ("rate", "from", "gaps")),
    "times": (_timed, ("rate", "from", "unit")),
}
