"""What the controller knows of its stream: from observations to forecasts, and from these to plan problems."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from deployments.controller.intake import Interval, total
from earlyexit.errors import DataError
from optimizer.networks import Used, choices, ramps_of, survival_with
from optimizer.problem import MaximizeRate, PlanProblem
from optimizer.tokens import most_tokens
from profiles.lengths import Lengths
from profiles.records import ExitRecords
from profiles.stream import Observations, SampledStream, StreamShape
from profiles.windows import Window, WindowEstimate, survival_history, windows

if TYPE_CHECKING:
    from profiles.forecast import RateForecast, SurvivalForecast


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """One forecast of survival, rate and lengths."""

    at_s: float
    """When this was said."""
    survival: SurvivalForecast
    """Of the level beneath: what endless inputs would show. Where only few probes were seen its middle leans to what
    was expected before anything was, and its intervals hold both."""
    num_probes: int
    """What is behind it is worth as many; see `worth`."""
    how: str
    rate: RateForecast | None = None
    """None where nothing was counted yet."""
    survival_of: Mapping[Used, SurvivalForecast] = field(default_factory=dict)
    """Of a chain, by the networks that are used, where some are left out: with the ramps of these alone."""

    def of(self, used: Used) -> SurvivalForecast:
        """Under plans that use these networks."""
        return self.survival_of.get(used, self.survival)

    def expected(self, problem: PlanProblem) -> PlanProblem:
        """The problem with the survival that is expected."""
        of_others = {used: forecast.next_survival for used, forecast in self.survival_of.items()}
        return replace(problem, survival_N=self.survival.next_survival, survival_of=of_others or None)


def fewer_networks(problem: PlanProblem) -> Iterable[Used]:
    """The sets of networks that leave some out and still have ramps: of the others nobody needs to be told anything."""
    every = tuple(range(len(problem.networks)))
    return [used for used in choices(problem) if used != every and ramps_of(problem, used)] if every else []


Prior = tuple[float, ...]

KEEP_S = 7200.0
"""What is remembered: at most; sixty windows of two minutes show any drift that a forecast can use."""
LEAST_PROBES = 30
"""By which plans are scored, or what is worth as many (`worth`). Below, what was expected before anything was seen
keeps part of its weight: of 30 probes a share of 1/2 is known to 0.09 (one standard deviation), about as well as a
calibration of another stream tells it."""
RECENT_WINDOWS = 2
"""Whose probes plans are scored on again: more would mix in what the stream no longer is."""
LEAST_MEASURED = 300
"""Answers by which lengths of inputs are known better than from before: their mean, of lengths that spread as far as
their mean, to 6 % (one standard deviation)."""
LEAST_COVERED = 0.5
"""Share of a window that must have been counted for its rate to be known."""


class Knowledge:
    """Probes and counts of the last two hours; what lies before a change of the stream is left out of forecasts."""

    def __init__(
        self,
        problem: PlanProblem,
        thresholds: Mapping[int, float],
        *,
        period_s: float,
        coverage: float,
        since_s: float,
    ) -> None:
        """`since_s`: when the recording began; see `ExitStream`."""
        self.problem = problem
        self._calibrated = {ramp: thresholds[ramp] for ramp in problem.ramps}
        self.thresholds: Mapping[int, float] = self._calibrated
        """Of all ramps of the problem, as they are now: estimates of past windows are made by these too."""
        self.period_s = period_s
        self.coverage = coverage
        self.began_s = since_s
        self.changed_s = since_s
        """When the stream last became another, as far as its exits go."""
        self.rate_changed_s = since_s
        self._stream: SampledStream | None = None
        self._counts: list[Interval] = []

    def add_probes(self, seen: Observations) -> Observations:
        """Take probes, and inputs that stayed; gives what is kept of them, which is all that there is to remember.

        Raises DataError for those of another model, and of ramps other than before.
        """
        if self._stream is None:
            self._check_shape(seen.shape)
            # From the border before the begin: the window that it falls into is not whole, but not lost either.
            border_s = self.began_s // self.period_s * self.period_s
            self._stream = SampledStream(
                seen.shape, since_s=border_s, period_s=self.period_s, keep_s=max(KEEP_S, self.period_s)
            )
        return self._stream.take_in(seen.take(seen.probe_N | seen.stayed_N))

    def add_counts(self, interval: Interval) -> None:
        """Take new counts."""
        self._counts.append(interval)

    def forget(self, now_s: float) -> None:
        """Drop what is too old to matter."""
        self._counts = [each for each in self._counts if each.at_s > now_s - KEEP_S]
        if self._stream is not None:
            self._stream.forget(now_s)

    def decide_by(self, thresholds: Mapping[int, float] | None) -> None:
        """Ask by these thresholds from now on; None: by those that were there at first."""
        given = self._calibrated if thresholds is None else thresholds
        self.thresholds = {ramp: given[ramp] for ramp in self.problem.ramps}

    @property
    def expected_survival_N(self) -> tuple[float, ...]:
        """What is expected of inputs before anything was seen: of thresholds that nobody calibrated, that all stay."""
        return tuple(self.problem.survival_N) if self.is_calibrated else (1.0,) * self.problem.num_blocks

    @property
    def is_calibrated(self) -> bool:
        """Whether the thresholds are those that were there at first, of which it is known what to expect."""
        return self.thresholds == self._calibrated

    def counts(self, since_s: float) -> list[Interval]:
        """Those that began at a time or after it."""
        return [each for each in self._counts if each.since_s >= since_s]

    def window(self, since_s: float, now_s: float) -> Window | None:
        """The probes that arrived in between; None where nothing was ever recorded, or no time has passed."""
        if self._stream is None or now_s <= since_s:
            return None
        kept = self._stream.whole_windows(now_s + self.period_s)
        first = max(int(since_s // self.period_s), kept.start if kept else 0)
        joined = self._stream.pooled(range(first, int(now_s // self.period_s) + 1))
        mine_N = (joined.times_s_N >= since_s) & (joined.times_s_N < now_s)
        return Window(start_s=since_s, period_s=now_s - since_s, observations=joined.take(mine_N))

    def observed(self, since_s: float, now_s: float, ramps: Sequence[int] | None = None) -> WindowEstimate | None:
        """What the inputs seen in between say of the given active ramps, or of all; None as of `window`."""
        window = self.window(since_s, now_s)
        if window is None:
            return None
        return window.estimate(
            {ramp: self.thresholds[ramp] for ramp in (self.problem.ramps if ramps is None else ramps)}
        )

    def records(self, now_s: float) -> ExitRecords | None:
        """Recent probes to score plans on, of the stream as it is now; None for fewer than `LEAST_PROBES`."""
        for since_s in (max(self.changed_s, now_s - RECENT_WINDOWS * self.period_s), self.changed_s):
            window = self.window(since_s, now_s)
            if window is not None and window.num_probes >= LEAST_PROBES:
                return window.records()
        return None

    def outlook(self, now_s: float) -> Outlook:
        """Forecasts of the coming window. Takes up to a second of fitting, so call it off the event loop.

        Of a chain as many as there are sets of networks with ramps.
        """
        whole = self._survival_outlook(now_s, self.thresholds, self.expected_survival_N)
        others = {used: self._outlook_of(used, now_s).survival for used in fewer_networks(self.problem)}
        return replace(whole, rate=self._rate(now_s), survival_of=others)

    def _outlook_of(self, used: Used, now_s: float) -> Outlook:
        """Under plans that leave the other networks out."""
        thresholds = {ramp: self.thresholds[ramp] for ramp in ramps_of(self.problem, used)}
        stay_N = (1.0,) * self.problem.num_blocks
        return self._survival_outlook(
            now_s, thresholds, survival_with(self.problem, used) if self.is_calibrated else stay_N
        )

    def questions(self, outlook: Outlook, counts: Mapping[str, int]) -> tuple[PlanProblem, ...]:
        """The problem as it is expected to be, on so many accelerators; further ones to ask where it has no plan.

        Where a rate is asked for, it is the upper end of its forecast. No plan at a low rate (its batches would fill
        too slowly): a plan for the rate that the problem names serves it as well. No plan at a high rate: the most
        that can be done is done.
        """
        devices = {
            device: replace(supply, count=min(supply.count, counts.get(device, 0)))
            for device, supply in self.problem.devices.items()
        }
        problem = replace(outlook.expected(self.problem), devices=devices, lengths=self.lengths(outlook.at_s))
        named_per_s = problem.asked_per_s
        if named_per_s is None:
            return (problem,)
        rates = [named_per_s]
        if outlook.rate is not None:
            upper = float(outlook.rate.high_rps_H[0])
            # One window cannot say how rates change.
            rates = [upper if np.isfinite(upper) else max(float(outlook.rate.rate_rps_H[0]), named_per_s)]
            rates += [named_per_s] if named_per_s > rates[0] else []
        asked = [problem.with_rate(rate) for rate in rates if rate > 0]
        return (*asked, replace(problem, objective=MaximizeRate()))

    def lengths(self, now_s: float) -> Lengths | None:
        """Of the stream's inputs: those of the problem, stretched to the mean of what was answered lately.

        None where the problem has none: then nothing counts tokens. Long inputs that are refused or late more often
        than short ones count too little.
        """
        known = self.problem.lengths
        if known is None:
            return None
        recent = total(self.counts(max(self.changed_s, now_s - RECENT_WINDOWS * self.period_s)))
        if recent is None or recent.answered < LEAST_MEASURED:
            return known
        most = min(most_tokens(self.problem.latency[device]) for device in self.problem.devices)
        return known.stretched(recent.answered_tokens / recent.answered, most=most)

    def _check_shape(self, shape: StreamShape) -> None:
        missing = sorted(set(self.problem.ramps) - set(shape.ramps))
        if shape.num_blocks != self.problem.num_blocks or missing:
            raise DataError(
                f"probes are of {shape.num_blocks} blocks and ramps {list(shape.ramps)}; "
                f"the problem has {self.problem.num_blocks} blocks and ramps {list(self.problem.ramps)}"
            )

    def _survival_outlook(self, now_s: float, thresholds: Mapping[int, float], prior_N: Prior) -> Outlook:
        from profiles.forecast import forecast_survival

        whole = [] if self._stream is None else windows(self._stream, now_s)
        estimates = [each.estimate(thresholds) for each in whole if each.start_s >= self.changed_s]
        num_probes = sum(map(worth, estimates))
        if num_probes < LEAST_PROBES:
            return self._pooled_outlook(now_s, thresholds, prior_N)
        return Outlook(
            at_s=now_s,
            survival=forecast_survival(survival_history(estimates), prior=prior_N, coverage=self.coverage),
            num_probes=num_probes,
            how=f"{len(estimates)} windows",
        )

    def _pooled_outlook(self, now_s: float, thresholds: Mapping[int, float], prior_N: Prior) -> Outlook:
        """All that was seen since the stream changed as one window; of little, the prior keeps part of the weight."""
        from profiles.forecast import forecast_survival
        from profiles.windows import SurvivalHistory

        estimate = self.observed(self.changed_s, now_s, tuple(thresholds))
        num_probes = worth(estimate)
        if estimate is None or estimate.survival is None:
            none = SurvivalHistory.from_counts(np.full((1, len(prior_N)), np.nan))
            expected = forecast_survival(none, prior=prior_N, coverage=self.coverage)
            return Outlook(at_s=now_s, survival=expected, num_probes=0, how="expected")
        seen = forecast_survival(survival_history([estimate]), prior=prior_N, coverage=self.coverage)
        if num_probes >= LEAST_PROBES:
            return Outlook(at_s=now_s, survival=seen, num_probes=num_probes, how=f"worth {num_probes} probes")
        leaning = _leaning(seen, np.array(prior_N), num_probes / LEAST_PROBES)
        how = f"worth {num_probes} probes, and what was expected"
        return Outlook(at_s=now_s, survival=leaning, num_probes=num_probes, how=how)

    def _rate(self, now_s: float) -> RateForecast | None:
        from profiles.forecast import forecast_rate

        rate_W = window_rates(self._counts, self.rate_changed_s, now_s, self.period_s)
        if np.isfinite(rate_W).any():
            return forecast_rate(rate_W, coverage=self.coverage, window_s=self.period_s)
        recent = total(self.counts(self.rate_changed_s))
        if recent is None or recent.seconds <= 0:
            return None
        rate_rps = np.array([recent.arrived / recent.seconds])
        return forecast_rate(rate_rps, coverage=self.coverage, window_s=recent.seconds)


def worth(estimate: WindowEstimate | None) -> int:
    """Probes that would say as much of where inputs leave, where least is known of it; 0 where nothing is said.

    Inputs that stayed tell nothing of ramps that were off: with three probes, any number of them is worth little more.
    """
    if estimate is None or estimate.survival is None:
        return 0
    return round(min(share.effective_inputs for share in estimate.survival))


def window_rates(counts: Sequence[Interval], since_s: float, now_s: float, period_s: float) -> npt.NDArray[np.float64]:
    """Arrivals per second in every whole window since a time, oldest first; NaN where less than half was counted.

    An interval over the border of two windows is shared out by time.
    """
    first, end = int(np.ceil(since_s / period_s)), int(now_s // period_s)
    arrived_W, seconds_W = np.zeros(max(0, end - first)), np.zeros(max(0, end - first))
    for each in counts:
        for index in range(max(first, int(each.since_s // period_s)), min(end, int(each.at_s // period_s) + 1)):
            inside_s = min(each.at_s, (index + 1) * period_s) - max(each.since_s, index * period_s)
            if inside_s > 0:
                arrived_W[index - first] += each.arrived * inside_s / each.seconds
                seconds_W[index - first] += inside_s
    known_W = seconds_W >= LEAST_COVERED * period_s
    return np.where(known_W, arrived_W / np.where(known_W, seconds_W, 1.0), np.nan)


def _leaning(seen: SurvivalForecast, prior_N: npt.NDArray[np.float64], weight: float) -> SurvivalForecast:
    """What was seen with so much weight; the shares per ramp stay those seen."""
    return replace(
        seen,
        survival_HK=weight * seen.survival_HK + (1 - weight) * prior_N,
        survival_low_HK=np.minimum(seen.survival_low_HK, prior_N),
        survival_high_HK=np.maximum(seen.survival_high_HK, prior_N),
    )
