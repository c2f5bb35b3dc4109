"""Recorded traffic as arrival processes: from a second of the trace on, as it was or scaled to a rate.

Both go round again where more is drawn than the trace holds. A rate is that of the window that is drawn, not of the
whole trace, so the mean rate offered is the one asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from earlyexit.errors import DataError
from offramp.load.processes import FloatArray, check_size, unit_points, within


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
