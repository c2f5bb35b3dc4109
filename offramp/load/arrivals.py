"""When requests arrive, said in one line: `poisson:9000`, `mmpp:1000,peak=5000,calm_s=10,burst_s=1`, `trace:FILE`.

A trace's numbers may be requests per second or the time of each request: `trace:` goes by the content and notes which
reading was taken, `counts:` and `times:` say it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from earlyexit.errors import DataError, InputError
from offramp.load.processes import FloatArray, Gamma, Modulated, Poisson, Process, Uniform
from offramp.load.replay import CountReplay, StampReplay
from offramp.load.traces import GAP_S, CountTrace, Reading, StampTrace, gaps, in_gaps, read_trace

__all__ = ["ALLOWED", "Arrivals", "FloatArray", "parse_arrivals"]

ALLOWED = (
    "poisson:RATE, uniform:RATE, gamma:RATE,cv=CV, mmpp:MEAN,peak=RATE,calm_s=S,burst_s=S, "
    "trace:FILE[,rate=RATE][,from=SECOND][,gaps=cut|keep]; in the place of trace, counts:FILE (requests per second) or "
    "times:FILE[,unit=s|ms] (of each request) say how its numbers are read"
)
LARGEST = 1e12
"""Of any number in a spec: beyond it rates and seconds lose their digits to rounding."""
DATES_S = 1e8
"""Seconds beyond three years are dates since 1970: nobody waits from 0 until they come."""
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
