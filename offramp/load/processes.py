"""Processes of arrivals, each of which draws whole arrays of seconds at once.

All but equal gaps are drawn alike: points of mean spacing 1 on the axis of *expected arrivals*, mapped back to seconds
through the expected number of arrivals by then. So an arrival process is its expectation over time.

Recorded traffic goes from a second of the trace on, as it was or scaled to a rate, and round again where more is drawn
than the trace holds. A rate is that of the window that is drawn, not of the whole trace, so the mean rate offered is
the one asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked

from earlyexit.errors import DataError, InputError

FloatArray = npt.NDArray[np.float64]

MOST_ARRIVALS = 200_000_000
"""In one draw: 1.6 GB as an array, several times that while it is drawn."""
LARGEST = 1e12
"""Of any number that is asked for: beyond it rates and seconds lose their digits to rounding."""
Positive = Annotated[float, Field(gt=0, le=LARGEST, allow_inf_nan=False)]
IN_WORDS = ConfigDict(extra="forbid", populate_by_name=True)
"""The aliases of fields are their keys in `offramp.load.arrivals`."""


class Process(Protocol):
    """Arrivals of one kind."""

    def draw(self, duration_s: float, rng: np.random.Generator) -> FloatArray:
        """Seconds in [0, duration_s), ascending; equal generators give equal arrays.

        A trace shorter than the duration goes round again. Raises InputError above `MOST_ARRIVALS`, DataError for a
        part of a trace in which nothing arrives.
        """
        ...


@checked(frozen=True, slots=True, kw_only=True, config=IN_WORDS)
class Uniform:
    """Equal gaps from second 0 on: one metronome, the kindest load of its rate."""

    rate_per_s: Annotated[Positive, Field(alias="rate")]

    def draw(self, duration_s: float, rng: np.random.Generator) -> FloatArray:
        check_size(self.rate_per_s * duration_s)
        return before(self.first(math.ceil(self.rate_per_s * duration_s), rng), duration_s)

    def first(self, num_arrivals: int, rng: np.random.Generator) -> FloatArray:
        """Seconds of the first so many."""
        return np.arange(num_arrivals) / self.rate_per_s


@checked(frozen=True, slots=True, kw_only=True, config=IN_WORDS)
class Poisson:
    """Many independent users, arriving in bursts and lulls."""

    rate_per_s: Annotated[Positive, Field(alias="rate")]

    def draw(self, duration_s: float, rng: np.random.Generator) -> FloatArray:
        points_N = unit_points(self.rate_per_s * duration_s, rng.standard_exponential)
        return before(points_N / self.rate_per_s, duration_s)

    def first(self, num_arrivals: int, rng: np.random.Generator) -> FloatArray:
        """Seconds of the first so many."""
        return np.cumsum(rng.standard_exponential(num_arrivals)) / self.rate_per_s


@checked(frozen=True, slots=True, kw_only=True, config=IN_WORDS)
class Gamma:
    """Independent gaps of a gamma distribution; `cv` 1 is Poisson, above is burstier.

    The process has been running before second 0, which therefore more likely lies in a long gap than in a short one; so
    the expected rate is `rate_per_s` over any window.
    """

    rate_per_s: Annotated[Positive, Field(alias="rate")]
    cv: Annotated[float, Field(ge=0.01, le=100.0, allow_inf_nan=False)]
    """Standard deviation of the gaps over their mean. Below the range gaps are equal; above, all arrivals of a draw
    come at one instant."""

    def draw(self, duration_s: float, rng: np.random.Generator) -> FloatArray:
        shape, until = self.cv**-2, self.rate_per_s * duration_s
        check_size(until)
        # A gap that holds a given instant is drawn by its length, which for gamma means one more in the shape.
        first = rng.random() * rng.gamma(shape + 1, 1 / shape)
        further_N = unit_points(until - first, lambda num: rng.gamma(shape, 1 / shape, num))
        return before(np.concatenate([[first], first + further_N]) / self.rate_per_s, duration_s)


@checked(frozen=True, slots=True, kw_only=True, config=IN_WORDS)
class Modulated:
    """A Poisson process whose rate switches between two states at exponential times (two-state MMPP).

    It starts in the states' long-run shares, so the expected rate is `mean_per_s` over any window; a window of few
    sojourns can be far from it. Raises InputError for a peak that leaves the calm state a rate below zero.
    """

    mean_per_s: Annotated[Positive, Field(alias="rate")]
    peak_per_s: Annotated[Positive, Field(alias="peak")]
    """In a burst."""
    calm_s: Positive
    """Mean length of a calm."""
    burst_s: Positive
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
    """Requests per bin of time; finite, none negative, not all 0."""
    bin_s: float
    start_s: float = 0.0
    """Where in the counts the draw begins."""
    rate_per_s: float | None = None
    """Mean over the drawn window; None: as recorded."""

    def __post_init__(self) -> None:
        if not (np.isfinite(self.counts_B).all() and (self.counts_B >= 0).all() and self.counts_B.any()):
            raise DataError("a trace of counts needs finite ones, none negative, not all 0")

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
    """The second of every request, from 0, ascending; two are different, else there is no rate."""
    start_s: float = 0.0
    """Where in the trace the draw begins."""
    rate_per_s: float | None = None
    """Mean over the drawn window; None: as recorded."""

    def __post_init__(self) -> None:
        seconds_N = self.arrivals_s_N
        if not (len(seconds_N) and 0 <= seconds_N[0] < seconds_N[-1] < np.inf and (np.diff(seconds_N) >= 0).all()):
            raise DataError("a trace of seconds needs finite ones from 0 on, ascending, at least two of them different")

    @property
    def period_s(self) -> float:
        """After so many seconds the arrivals begin again."""
        span_s = float(self.arrivals_s_N[-1] - self.arrivals_s_N[0])
        return span_s * (1 + 1 / (len(self.arrivals_s_N) - 1))

    def draw(self, duration_s: float, rng: np.random.Generator) -> FloatArray:
        """Raises DataError for a window without arrivals, InputError for too many."""
        in_round, period_s = len(self.arrivals_s_N), self.period_s
        num = duration_s / period_s * in_round if self.rate_per_s is None else self.rate_per_s * duration_s
        check_size(num)
        # Two rounds more than are drawn: the first may have begun, and the arrival after the last of all is looked at.
        first = max(0, math.floor((self.start_s - self.arrivals_s_N[0]) / period_s))
        rounds = np.arange(first, first + math.ceil(num / in_round) + 2)
        seconds_N = (rounds[:, np.newaxis] * period_s + self.arrivals_s_N).ravel() - self.start_s
        seconds_N = seconds_N[np.searchsorted(seconds_N, 0.0) :]
        if self.rate_per_s is not None:
            seconds_N = _fitted(seconds_N, round(num), duration_s)
        if not len(drawn_N := within(seconds_N, duration_s)):
            raise _silent(duration_s)
        return drawn_N


def _fitted(seconds_N: FloatArray, num: int, duration_s: float) -> FloatArray:
    """Returns the first so many arrivals, fitted to a duration that ends at the next arrival of another instant."""
    if not num:
        return np.empty(0)
    end_s = float(seconds_N[np.searchsorted(seconds_N, seconds_N[num - 1], side="right")])
    return seconds_N[:num] * (duration_s / end_s)


def _silent(duration_s: float) -> DataError:
    return DataError(f"the trace has no arrivals in the {duration_s:g} s drawn; draw more, or set another from=")
