"""Searches by bisection for the highest Poisson rate that a server sustains. A search does no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from offramp.load.generator import RequestRecord  # needs HTTP libraries

Verdict = Literal["passed", "failed", "client late"]
"""Result of a probe. `client late`: the client could not send at this rate, so the server was not tested."""

Ending = Literal["bracketed", "client late", "highest", "none passed", "most probes"]
"""Why a search ended.

`bracketed`: a slightly higher rate failed. `client late`: the client could not send at a slightly higher rate.
`highest`: the highest allowed rate passed. `none passed`: the lowest failed. `most probes`: their limit was reached."""

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


@dataclass(slots=True, kw_only=True)
class Search:
    """A search for the sustained rate, which chooses the next rate after each probe.

    From `start_per_s`, the rate rises or falls by the factor `growth`, then by its square and so on, until a rate has
    passed and a higher one has not. Then the search bisects geometrically until the two are within `resolution`. The
    rate that did not pass is probed again, because other work on the machine fails a probe now and then: only two
    failures end the search. If the rate passes, the search continues above it. A probe with a late client is repeated
    once at once. If the client is late again, the rate bounds the search like a failure, with another `ending`.

    Repeating only failures biases the result upwards, but hardly with probes of a thousand requests or more.
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
    probes: list[Probe] = field(default_factory=list)
    best_per_s: float = 0.0
    """The highest rate that passed; 0 if none did."""
    ending: Ending | None = None
    """Why the search is over; None while it continues."""
    _next_per_s: float = 0.0
    _factor: float = 1.0
    """Factor of the next step, while there is no bracket."""
    _last: Probe | None = None
    """The last probe that counted; the first of two probes with a late client does not."""

    def next_rate(self) -> float | None:
        """Returns the next rate to try; None if the search is over."""
        if self.ending is not None:
            return None
        return min(max(self._next_per_s if self.probes else self.start_per_s, self.low_per_s), self.high_per_s)

    def add(self, rate_per_s: float, verdict: Verdict) -> None:
        """Adds the verdict on a rate."""
        self.probes.append(Probe(rate_per_s, verdict))
        misses: dict[float, list[Verdict]] = {}
        for probe in self.probes:
            if probe.verdict == "passed":
                self.best_per_s = max(self.best_per_s, probe.rate_per_s)
            else:
                misses.setdefault(probe.rate_per_s, []).append(probe.verdict)
        if verdict == "client late" and len(misses[rate_per_s]) == 1:
            self._next_per_s = rate_per_s
        else:
            bounds = (rate for rate, each in misses.items() if rate > self.best_per_s and each != ["client late"])
            self._go_on(Probe(rate_per_s, verdict), min(bounds, default=None), misses)
        if self.ending is None and len(self.probes) >= self.most_probes:
            self.ending = "most probes"

    def _go_on(self, probe: Probe, bound_per_s: float | None, misses: Mapping[float, Sequence[Verdict]]) -> None:
        """Chooses the next rate or the ending; `bound_per_s`: the lowest rate that did not pass, above all that did."""
        best_per_s, last = self.best_per_s, self._last
        if last is None or (last.verdict == "passed") != (probe.verdict == "passed"):
            self._factor = self.growth if last is None else 1 + self.resolution
        elif last.rate_per_s != probe.rate_per_s:
            self._factor **= 2
        self._last = probe
        if best_per_s >= self.high_per_s:
            self.ending = "highest"
        elif bound_per_s is None:
            self._next_per_s = best_per_s * self._factor
        elif best_per_s and bound_per_s / best_per_s > 1 + self.resolution:
            self._next_per_s = (best_per_s * bound_per_s) ** 0.5
        elif best_per_s or bound_per_s <= self.low_per_s:
            self._next_per_s = bound_per_s
            if len(misses[bound_per_s]) > 1:
                failed: Ending = "bracketed" if best_per_s else "none passed"
                self.ending = failed if "failed" in misses[bound_per_s] else "client late"
        else:
            self._next_per_s = bound_per_s / self._factor
