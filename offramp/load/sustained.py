"""The highest Poisson rate that a server sustains, found by bisection. Pure: several searches can take turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal, NamedTuple

from earlyexit.errors import InputError
from offramp.load.report import LATE_SHARE, RequestRecord, percentile

Verdict = Literal["passed", "failed", "client late"]
"""`client late` says nothing about the server: the client did not send at the rate that it was told to."""

Ending = Literal["bracketed", "client late", "highest", "none passed", "most probes"]
"""Why a search is over.

A rate that failed meets the result from above; or one at which the client was late, or the highest that may be asked,
and the server may do more; or nothing passed; or it took too many probes."""


MOST_LOST_SHARE = 0.01
"""Of the requests of a rate that is sustained, the share that may be refused or fail, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a rate gave, by the client."""

    lost_share: float
    """Of the requests, those that were refused or failed."""
    p99_s: float | None
    """Of the answers, from when a request was due; None without an answer."""
    from_sent_p99_s: float | None
    """The same from when the client took the request up."""
    lateness_p99_s: float | None
    """How long after it was due the client took a request up: its own fault, never the server's."""

    @classmethod
    def of(cls, records: Sequence[RequestRecord]) -> Measured:
        """Of these requests."""
        answered = [record for record in records if record.error is None]
        return cls(
            lost_share=1 - len(answered) / len(records) if records else 0.0,
            p99_s=percentile([record.latency_s for record in answered], 99),
            from_sent_p99_s=percentile([record.done_s - record.sent_s for record in answered], 99),
            lateness_p99_s=percentile([record.lateness_s for record in records], 99),
        )

    def verdict(self, slo_s: float) -> Verdict:
        """Whether the server sustains the rate with the 99th percentile of its latency within `slo_s`.

        A late client is no excuse for a server that lost requests, or took too long by more than that lateness.
        """
        if self.lost_share > MOST_LOST_SHARE or self.p99_s is None or self.from_sent_p99_s is None:
            return "failed"
        lateness_s = self.lateness_p99_s or 0.0
        if self.from_sent_p99_s > slo_s + lateness_s:
            return "failed"
        if lateness_s > LATE_SHARE * slo_s:
            return "client late"
        return "passed" if self.p99_s <= slo_s else "failed"


class Tried(NamedTuple):
    """One rate of a search."""

    rate_per_s: float
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Which rate to try next, by what the rates before it gave.

    From `start_per_s` it goes up, or down, by `growth`, then its square and so on, until one rate has passed and a
    higher one has not; then it tries their geometric mean until they are `resolution` apart. The rate that did not pass
    is then tried again: only what failed twice counts as the end, for a machine that others use fails a probe now and
    then. If it passes this time, the search goes on above it. A probe with a late client is repeated once at once; late
    again, it ends the search from above like a failure, but the ending tells.

    Where chance decides a probe, asking failures again but not passes errs upwards, for every server alike: let a probe
    count a thousand requests or more.
    """

    start_per_s: float
    low_per_s: float
    """A rate that fails here sustains nothing worth telling."""
    high_per_s: float
    """No higher rate is tried."""
    resolution: float = 0.03
    """Ratio, less 1, of the rate that failed to the one that passed, at the end."""
    most_probes: int = 20
    """Includes confirmations."""
    growth: float = 1.6
    """Of the first step; near 1 where `start_per_s` is well known."""
    probes: tuple[Tried, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.low_per_s < self.high_per_s < float("inf"):
            raise InputError(f"rates must be above 0, low before high, not {self.low_per_s} and {self.high_per_s}")
        if not (self.resolution > 0 and self.most_probes >= 1):
            raise InputError(f"a resolution above 0 and a probe are needed, not {self.resolution}, {self.most_probes}")
        if self.start_per_s <= 0 or self.growth <= 1:
            raise InputError(f"a search starts above 0 and grows by more than 1, not {self.start_per_s}, {self.growth}")

    def learn(self, rate_per_s: float, verdict: Verdict) -> Search:
        """The search with one more probe."""
        return replace(self, probes=(*self.probes, Tried(rate_per_s, verdict)))

    def next_rate(self) -> float | None:
        """The rate to try next; None where the search is over."""
        return None if self.ending is not None else min(max(self._next(), self.low_per_s), self.high_per_s)

    @property
    def best_per_s(self) -> float:
        """The highest rate that passed; 0 where none did."""
        return max((probe.rate_per_s for probe in self.probes if probe.verdict == "passed"), default=0.0)

    @property
    def ending(self) -> Ending | None:
        """Why the search is over; None while it goes on."""
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
        """The lowest rate, above all that passed, that did not."""
        above = [probe for probe in self.probes if probe.rate_per_s > self.best_per_s]
        return min(
            (probe.rate_per_s for probe in above if probe.verdict == "failed" or self._is_confirmed(probe.rate_per_s)),
            default=None,
        )

    def _step(self) -> float:
        """Squared with every rate that agrees with the last; small at first where there was a bracket already."""
        best_per_s = self.best_per_s
        told = [probe for probe in self.probes if probe.verdict != "client late" or probe.rate_per_s > best_per_s]
        has_passed = told[-1].verdict == "passed"
        agreeing = list(takewhile(lambda probe: (probe.verdict == "passed") == has_passed, reversed(told)))
        first = self.growth if len(agreeing) == len(told) else 1 + self.resolution
        return float(first ** (2 ** (len({probe.rate_per_s for probe in agreeing}) - 1)))

    def _is_close(self, low_per_s: float, high_per_s: float) -> bool:
        return high_per_s / low_per_s <= 1 + self.resolution

    def _is_confirmed(self, rate_per_s: float) -> bool:
        return self._count(rate_per_s, "failed") + self._count(rate_per_s, "client late") > 1

    def _count(self, rate_per_s: float, verdict: Verdict) -> int:
        return sum(probe.rate_per_s == rate_per_s and probe.verdict == verdict for probe in self.probes)
