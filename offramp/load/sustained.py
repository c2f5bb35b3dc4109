"""Searches by bisection for the highest Poisson rate that a server sustains. A search is a pure value without I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from earlyexit.errors import InputError

if TYPE_CHECKING:
    from offramp.load.generator import RequestRecord  # needs HTTP libraries

Verdict = Literal["passed", "failed", "client late"]
"""Result of a probe. `client late`: the client could not send at this rate, so the server was not tested."""

Ending = Literal["bracketed", "client late", "highest", "none passed", "most probes"]
"""Why a search ended.

`bracketed`: a slightly higher rate failed. `client late`: the client could not send at a slightly higher rate.
`highest`: the highest allowed rate passed. `none passed`: even the lowest rate failed. `most probes`: the limit of
probes was reached."""


LATE_SHARE = 0.1
"""Lateness of the client, as a share of the SLO, above which its measurements are distorted."""
MAX_LOST_SHARE = 0.01
"""Largest share of refused or failed requests at a sustained rate."""


def percentile(values_N: npt.ArrayLike, percent: float) -> float | None:
    """Returns the percentile of the values that are not NaN; None if there are none."""
    known_N = np.asarray(values_N, dtype=np.float64)
    known_N = known_N[~np.isnan(known_N)]
    return float(np.percentile(known_N, percent)) if len(known_N) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The client's measurements at one rate. Times are 99th percentiles in seconds; None without values."""

    lost_share: float
    """Share of the requests that were refused or failed."""
    p99_s: float | None
    """Latency of the answers, from the scheduled send time."""
    from_sent_p99_s: float | None
    """Latency of the answers, from the actual send time."""
    lateness_p99_s: float | None
    """Delay of the actual send time after the scheduled one, which the server does not cause."""

    @classmethod
    def of(cls, records: Sequence[RequestRecord]) -> ProbeResult:
        """Returns the measurements of these requests."""
        answered = [record for record in records if record.error is None]
        return cls(
            lost_share=1 - len(answered) / len(records) if records else 0.0,
            p99_s=percentile([record.latency_s for record in answered], 99),
            from_sent_p99_s=percentile([record.done_s - record.sent_s for record in answered], 99),
            lateness_p99_s=percentile([record.lateness_s for record in records], 99),
        )

    def verdict(self, slo_s: float) -> Verdict:
        """Returns whether the server sustains the rate with a 99th percentile of latency within `slo_s`.

        Even if the client was late, the probe failed if requests were lost, or took longer than `slo_s` plus lateness.
        """
        if self.lost_share > MAX_LOST_SHARE or self.p99_s is None or self.from_sent_p99_s is None:
            return "failed"
        lateness_s = self.lateness_p99_s or 0.0
        if self.from_sent_p99_s > slo_s + lateness_s:
            return "failed"
        if lateness_s > LATE_SHARE * slo_s:
            return "client late"
        return "passed" if self.p99_s <= slo_s else "failed"


class Probe(NamedTuple):
    """A rate that was tried."""

    rate_per_s: float
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A search for the sustained rate: chooses the next rate from the results of the probes so far.

    From `start_per_s`, the rate rises or falls by the factor `growth`, then by its square and so on, until a rate has
    passed and a higher one has not. Then the search bisects geometrically until the two are within `resolution`. The
    rate that did not pass is probed again, because other work on the machine fails a probe now and then: only two
    failures end the search. If the rate passes, the search continues above it. A probe with a late client is repeated
    once at once. If the client is late again, the rate bounds the search like a failure, with another `ending`.

    Repeating failures but not passes biases the result upwards if chance decides a probe. Probes of at least a thousand
    requests make this unlikely.
    """

    start_per_s: float
    low_per_s: float
    """The search ends if this rate fails."""
    high_per_s: float
    """The highest rate to try."""
    resolution: float = 0.03
    """Relative difference of the final failed and passed rates."""
    most_probes: int = 20
    """Maximum number of probes, repeated ones included."""
    growth: float = 1.6
    """Factor of the first step; near 1 if `start_per_s` is a good estimate."""
    probes: tuple[Probe, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.low_per_s < self.high_per_s < float("inf"):
            raise InputError(f"rates must be above 0, low before high, not {self.low_per_s} and {self.high_per_s}")
        if not (self.resolution > 0 and self.most_probes >= 1):
            raise InputError(f"a resolution above 0 and a probe are needed, not {self.resolution}, {self.most_probes}")
        if self.start_per_s <= 0 or self.growth <= 1:
            raise InputError(f"a search starts above 0 and grows by more than 1, not {self.start_per_s}, {self.growth}")

    def with_probe(self, rate_per_s: float, verdict: Verdict) -> Search:
        """Returns the search with one more probe."""
        return replace(self, probes=(*self.probes, Probe(rate_per_s, verdict)))

    def next_rate(self) -> float | None:
        """Returns the next rate to try; None if the search is over."""
        return None if self.ending is not None else min(max(self._next(), self.low_per_s), self.high_per_s)

    @property
    def best_per_s(self) -> float:
        """The highest rate that passed; 0 if none did."""
        return max((probe.rate_per_s for probe in self.probes if probe.verdict == "passed"), default=0.0)

    @property
    def ending(self) -> Ending | None:
        """Why the search is over; None while it continues."""
        best_per_s, bound_per_s = self.best_per_s, self._bound_per_s
        if best_per_s >= self.high_per_s:
            return "highest"
        if bound_per_s is not None and self._is_confirmed(bound_per_s):
            is_failure = self._count(bound_per_s, "failed") > 0
            if not best_per_s and bound_per_s <= self.low_per_s:
                return "none passed" if is_failure else "client late"
            if best_per_s and self._is_close(best_per_s, bound_per_s):
                return "bracketed" if is_failure else "client late"
        return "most probes" if len(self.probes) >= self.most_probes else None

    def _next(self) -> float:
        best_per_s, bound_per_s = self.best_per_s, self._bound_per_s
        if not self.probes:
            return self.start_per_s
        last = self.probes[-1]
        if last.verdict == "client late" and not self._is_confirmed(last.rate_per_s):
            return last.rate_per_s
        if bound_per_s is None:
            return best_per_s * self._step()
        if not best_per_s:
            return bound_per_s / self._step()
        if not self._is_close(best_per_s, bound_per_s):
            return float((best_per_s * bound_per_s) ** 0.5)
        return bound_per_s

    @property
    def _bound_per_s(self) -> float | None:
        """The lowest rate, above all rates that passed, that did not pass."""
        above = [probe for probe in self.probes if probe.rate_per_s > self.best_per_s]
        return min(
            (probe.rate_per_s for probe in above if probe.verdict == "failed" or self._is_confirmed(probe.rate_per_s)),
            default=None,
        )

    def _step(self) -> float:
        """Returns the factor to the next rate, which is squared with each further rate of the same outcome.

        The first factor is small after a bracket was found, and `growth` before.
        """
        best_per_s = self.best_per_s
        counted = [probe for probe in self.probes if probe.verdict != "client late" or probe.rate_per_s > best_per_s]
        has_passed = counted[-1].verdict == "passed"
        agreeing = list(takewhile(lambda probe: (probe.verdict == "passed") == has_passed, reversed(counted)))
        first = self.growth if len(agreeing) == len(counted) else 1 + self.resolution
        return float(first ** (2 ** (len({probe.rate_per_s for probe in agreeing}) - 1)))

    def _is_close(self, low_per_s: float, high_per_s: float) -> bool:
        return high_per_s / low_per_s <= 1 + self.resolution

    def _is_confirmed(self, rate_per_s: float) -> bool:
        return self._count(rate_per_s, "failed") + self._count(rate_per_s, "client late") > 1

    def _count(self, rate_per_s: float, verdict: Verdict) -> int:
        return sum(probe.rate_per_s == rate_per_s and probe.verdict == verdict for probe in self.probes)
