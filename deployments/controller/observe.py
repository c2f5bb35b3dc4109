"""The controller's observations: the stream of the last two hours, forecasts from it, and missing accelerators.

This module does not use Ray: the service is behind `ServiceFleet`, and time is passed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from cluster.inventory import accelerators_on_node
from deployments.controller.remember import KEEP_S, State
from deployments.controller.settings import thresholds_of
from deployments.settings import ControlSettings
from deployments.wire.messages import IngressReport, Interval, ReplicaReport, total
from earlyexit.errors import DataError, PlanError
from optimizer.calibration.thresholds import Guarantee
from optimizer.cost.batching import Batching
from optimizer.cost.rescore import joint_reach
from optimizer.live.tuning import TUNERS
from optimizer.live.tuning.base import NewThresholds, Tuner, TunerSettings, TunerState, no_input_leaves
from optimizer.plans.plan import PlacedPlan, Stage
from optimizer.problems.networks import Used, network_sets, ramps_of, survival_with
from optimizer.problems.problem import PlanProblem, Reach, device_names
from optimizer.problems.tokens import most_tokens
from profiles.lengths import Lengths
from profiles.records import ExitRecords
from profiles.scores import FloatArray
from profiles.stream import ExitStream, Observations, StreamShape
from profiles.windows import SurvivalHistory, Window, WindowEstimate, survival_history, windows

if TYPE_CHECKING:
    from profiles.forecast import RateForecast, SurvivalForecast


class ServiceFleet(Protocol):
    """The ingresses and replicas of a service. Any method may fail when a process dies; the control loop retries."""

    async def scale(self, device: str, replicas: int) -> None:
        """Sets the number of replicas of an accelerator type; returns before they run."""

    async def running(self) -> dict[str, int]:
        """Returns the number of replicas that accept calls, by accelerator type."""

    async def prepare(self, placed: PlacedPlan) -> None:
        """Prepares all replicas of the plan's accelerator types, and waits for them."""

    async def follow(self, placed: PlacedPlan) -> None:
        """Makes all ingresses follow the plan, and waits for them. They assign the stages to replicas."""

    async def suspend(self, reason: str) -> None:
        """Makes all ingresses refuse inputs, with the reason, until they follow a plan again."""

    async def ingress_reports(self) -> Sequence[IngressReport | None]:
        """Returns one report per ingress, None for one that does not answer. Each probe is reported once."""

    async def replica_reports(self) -> list[ReplicaReport]:
        """Returns one report per replica."""

    async def capacity(self) -> dict[str, int]:
        """Returns the number of accelerators that are alive, in use or not, by type."""


def room(resources: Mapping[str, float], device: str) -> int:
    """Returns the number of replicas of a type that an empty node with these resources holds. `cuda` is any GPU."""
    return int(resources.get("GPU", 0)) if device == "cuda" else accelerators_on_node(resources).get(device, 0)


# The stream, and forecasts of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """One forecast of survival, rate and lengths."""

    at_s: float
    """When it was made."""
    thresholds: Mapping[int, float]
    """The thresholds of all ramps for which it was made."""
    survival: SurvivalForecast
    """The expected survival. With few probes, it is a mean with the prior, and its intervals contain both."""
    num_probes: int
    """The effective number of probes; see `effective_probes`."""
    how: str
    """The method, for the user."""
    survival_of: Mapping[Used, SurvivalForecast]
    """For a cascade, forecasts for plans that skip networks, by exactly the networks that they use."""
    reach: Reach | None
    """The share of inputs that reach each block according to recent probes; None with too few probes."""
    rate: RateForecast | None
    """The expected rate; None before the first input was counted."""
    lengths: Lengths | None
    """The expected lengths; None if inputs have none."""

    def expected(self, problem: PlanProblem) -> PlanProblem:
        """Returns the problem with the expected survival and lengths."""
        survival_of = {used: forecast.next_survival for used, forecast in self.survival_of.items()} or None
        return replace(problem, survival_N=self.survival.next_survival, survival_of=survival_of, lengths=self.lengths)


LEAST_PROBES = 30
"""The number of probes (`effective_probes`) from which on plans are scored by them. With fewer, the earlier survival
keeps part of its weight. From 30 probes, a share of 1/2 has a standard deviation of 0.09."""
RECENT_WINDOWS = 2
"""The number of recent windows whose probes score plans. Older ones may differ from the current stream."""
LEAST_MEASURED = 300
"""The number of answers from which on the mean length of inputs is measured (standard error about 6 %)."""
LEAST_COVERED = 0.5
"""The share of a window that must have been counted for its rate to be known."""


class ObservedStream:
    """Probes and counts of the last two hours. Forecasts ignore everything before the last change of the stream.

    Methods that depend on thresholds, or on the time of the last change, take the controller's `State`.
    """

    def __init__(self, settings: ControlSettings, since_s: float) -> None:
        """`since_s`: when the recording began."""
        self.problem = settings.problem
        self.calibrated = thresholds_of(settings.policy, settings.problem)
        """The thresholds of the problem's survival."""
        self._all_stay_N = (1.0,) * settings.problem.num_blocks
        self._period_s, self._coverage = settings.period_s, settings.coverage
        self._longest_s = max(settings.period_s, 2 * settings.time_limit_s)
        """The longest interval of counts. Nothing is collected during a search for a plan."""
        self.began_s = since_s
        self._stream: ExitStream | None = None
        self._intervals: list[Interval] = []

    def add_probes(self, seen: Observations) -> Observations:
        """Adds probes and inputs that stayed; returns those that it keeps, which the history must store too.

        Probes of another shape, such as scores of another policy, start a new stream. Raises DataError for probes of
        another model or of other ramps.
        """
        if self._stream is None or self._stream.shape != seen.shape:
            problem, shape = self.problem, seen.shape
            if shape.num_blocks != problem.num_blocks or not set(problem.ramps) <= set(shape.ramps):
                raise DataError(
                    f"probes have {shape.num_blocks} blocks and ramps {list(shape.ramps)}; "
                    f"the problem has {problem.num_blocks} blocks and ramps {list(problem.ramps)}"
                )
            # The first window is kept although it is incomplete.
            since_s, keep_s = self.began_s // self._period_s * self._period_s, max(KEEP_S, self._period_s)
            self._stream = ExitStream(seen.shape, since_s=since_s, period_s=self._period_s, keep_s=keep_s)
        return self._stream.take_in(seen.take(seen.probe_N | seen.stayed_N))

    def add_interval(self, interval: Interval) -> None:
        """Adds new counts. If the clock was set forward, it drops all counts: the rate would seem to have fallen."""
        if interval.seconds > self._longest_s:
            self._intervals.clear()
        else:
            self._intervals.append(interval)

    def forget(self, now_s: float) -> None:
        """Drops probes and counts that are too old, or from after the present time, because the clock was set back."""
        self._intervals = [each for each in self._intervals if now_s - KEEP_S < each.at_s <= now_s]
        self.began_s = min(self.began_s, now_s)
        if self._stream is not None:
            self._stream.forget(now_s)
            if not self._stream.whole_windows(now_s + self._period_s):  # it has forgotten the present window
                self._stream = None

    def intervals(self, since_s: float) -> list[Interval]:
        """Returns the counts of the intervals that began at a time or after it."""
        return [each for each in self._intervals if each.since_s >= since_s]

    def window(self, since_s: float, now_s: float) -> Window | None:
        """Returns the probes that arrived in a time span; None before the first probe, and for an empty span."""
        if self._stream is None or now_s <= since_s:
            return None
        kept = self._stream.whole_windows(now_s + self._period_s)
        first = max(int(since_s // self._period_s), kept.start if kept else 0)
        joined = self._stream.pooled(range(first, int(now_s // self._period_s) + 1))
        inside_N = (joined.times_s_N >= since_s) & (joined.times_s_N < now_s)
        return Window(start_s=since_s, observations=joined.take(inside_N))

    def observed(
        self, state: State, since_s: float, now_s: float, ramps: Sequence[int] | None = None
    ) -> WindowEstimate | None:
        """Returns the estimate for a time span if these ramps (None: all) are active; None if there is no window.

        The present thresholds apply to past windows, too.
        """
        window = self.window(since_s, now_s)
        if window is None:
            return None
        thresholds = state.thresholds
        return window.estimate({ramp: thresholds[ramp] for ramp in (self.problem.ramps if ramps is None else ramps)})

    def records(self, state: State, now_s: float) -> ExitRecords | None:
        """Returns recent probes since the stream changed, for scoring plans; None for fewer than `LEAST_PROBES`."""
        for since_s in (max(state.changed_s, now_s - RECENT_WINDOWS * self._period_s), state.changed_s):
            window = self.window(since_s, now_s)
            if window is not None and window.num_probes >= LEAST_PROBES:
                return window.records()
        return None

    def reach(self, state: State, now_s: float) -> Reach | None:
        """Returns the share of inputs that reach each block according to recent probes; None with too few probes.

        With too few probes for tuned thresholds, all inputs are assumed to stay.
        """
        records = self.records(state, now_s)
        if records is not None:
            return joint_reach(records, state.thresholds)
        return None if self._is_calibrated(state) else lambda _: self._all_stay_N

    def forecast(self, state: State, now_s: float) -> Forecast:
        """Returns the forecasts for the next window. Fitting takes up to a second, so call it in a thread."""
        thresholds, problem, calibrated = state.thresholds, self.problem, self._is_calibrated(state)
        prior_N = tuple(problem.survival_N) if calibrated else self._all_stay_N
        survival, num_probes, how = self._survival(now_s, state.changed_s, thresholds, prior_N)
        others: dict[Used, SurvivalForecast] = {}
        for used in network_sets(problem)[:-1]:  # the last set has all networks
            theirs = {ramp: thresholds[ramp] for ramp in ramps_of(problem, used)}
            if theirs:  # network sets without ramps need no forecast
                prior_N = survival_with(problem, used) if calibrated else self._all_stay_N
                others[used], _, _ = self._survival(now_s, state.changed_s, theirs, prior_N)
        return Forecast(
            at_s=now_s,
            thresholds=thresholds,
            survival=survival,
            num_probes=num_probes,
            how=how,
            survival_of=others,
            reach=self.reach(state, now_s),
            rate=self._rate(state.rate_changed_s, now_s),
            lengths=self._lengths(state, now_s),
        )

    def _is_calibrated(self, state: State) -> bool:
        """Whether the problem's survival is for the current thresholds. For others, all inputs are expected to stay."""
        return state.thresholds == self.calibrated

    def _survival(
        self, now_s: float, changed_s: float, thresholds: Mapping[int, float], prior_N: tuple[float, ...]
    ) -> tuple[SurvivalForecast, int, str]:
        """Forecasts from whole windows, or else from one window with all inputs since the stream changed.

        With few inputs in that window, the prior has weight. Also returns the effective probes and the method.
        """
        from profiles.forecast import forecast_survival

        forecast_of = partial(forecast_survival, prior=prior_N, coverage=self._coverage)
        whole = [] if self._stream is None else windows(self._stream, now_s)
        estimates = [each.estimate(thresholds) for each in whole if each.start_s >= changed_s]
        num_probes = sum(map(effective_probes, estimates))
        if num_probes >= LEAST_PROBES:
            return forecast_of(survival_history(estimates)), num_probes, f"{len(estimates)} windows"
        window = self.window(changed_s, now_s)
        estimate = None if window is None else window.estimate(thresholds)
        num_probes = effective_probes(estimate)
        if estimate is None or estimate.survival is None:
            return forecast_of(SurvivalHistory.from_counts(np.full((1, len(prior_N)), np.nan))), 0, "expected"
        seen, how = forecast_of(survival_history([estimate])), f"worth {num_probes} probes"
        if num_probes >= LEAST_PROBES:
            return seen, num_probes, how
        weight, prior = num_probes / LEAST_PROBES, np.array(prior_N)
        mixed = replace(  # without changing the observed shares per ramp
            seen,
            survival_K=weight * seen.survival_K + (1 - weight) * prior,
            survival_low_K=np.minimum(seen.survival_low_K, prior),
            survival_high_K=np.maximum(seen.survival_high_K, prior),
        )
        return mixed, num_probes, f"{how}, and what was expected"

    def _rate(self, changed_s: float, now_s: float) -> RateForecast | None:
        from profiles.forecast import forecast_rate

        rate_rps_W, window_s = window_rates(self._intervals, changed_s, now_s, self._period_s), self._period_s
        recent = total(self.intervals(changed_s))
        if not np.isfinite(rate_rps_W).any():
            if recent is None or recent.seconds <= 0:
                return None
            rate_rps_W, window_s = np.array([recent.arrived / recent.seconds]), recent.seconds
        return forecast_rate(rate_rps_W, coverage=self._coverage, window_s=window_s)

    def _lengths(self, state: State, now_s: float) -> Lengths | None:
        """Returns the problem's lengths of inputs, scaled to the mean of recent answers; None without lengths.

        If long inputs are refused or late more often than short ones, the mean is too low.
        """
        known = self.problem.lengths
        recent = total(self.intervals(max(state.changed_s, now_s - RECENT_WINDOWS * self._period_s)))
        if known is None or recent is None or recent.answered < LEAST_MEASURED:
            return known
        most = min(most_tokens(self.problem.latency[device]) for device in self.problem.devices)
        return known.stretched(recent.answered_tokens / recent.answered, most=most)


def effective_probes(estimate: WindowEstimate | None) -> int:
    """Returns the number of probes with which the least-known share of the survival would be equally well known.

    It is at most a little above the number of probes if ramps were inactive, because inputs that stayed do not show
    inactive ramps. Returns 0 if nothing is known.
    """
    if estimate is None or estimate.survival is None:
        return 0
    return round(min(share.effective_inputs for share in estimate.survival))


def window_rates(counts: Sequence[Interval], since_s: float, now_s: float, period_s: float) -> FloatArray:
    """Returns the arrivals per second of every complete window since a time, oldest first.

    An interval that spans two windows is divided by time. A window of which less than half was counted is NaN.
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


# The tuner


MakeTuner = Callable[[StreamShape], Tuner]
"""Makes a tuner for streams of a shape."""


class Tuning:
    """The tuner of one service. It is created with the first observations, whose shape it needs."""

    def __init__(self, make: MakeTuner | None, problem: PlanProblem) -> None:
        """`make`: creates the tuner; None: thresholds are not tuned."""
        self._make = make
        self._problem = problem
        self._tuner: Tuner | None = None
        self._followed: tuple[Mapping[int, float], float] | None = None
        """The current thresholds and since when they apply; None if inputs are refused or the plan has others."""
        self._entry: tuple[str, int] | None = None
        """The accelerator type and the batch size of the first split; None before the first plan."""
        self._since_s = 0.0
        """Inputs that arrived earlier were answered under an unknown plan."""
        self.pending: NewThresholds | None = None
        """The tuner's last result, until it is applied."""

    @property
    def alarm(self) -> NewThresholds | None:
        """The tuner's last result if it is an alarm, which must be applied immediately."""
        return self.pending if self.pending is not None and self.pending.why == "alarm" else None

    @property
    def state(self) -> TunerState | None:
        """The state of the tuner; None before the first observations."""
        return None if self._tuner is None else self._tuner.state

    def is_safe(self, thresholds: Mapping[int, float]) -> bool:
        """Whether no input leaves under these thresholds; False before the first observations."""
        return self._tuner is not None and no_input_leaves(self._tuner.settings.score, thresholds)

    def observe(self, parts: Sequence[Observations]) -> None:
        """Passes observations to the tuner. A new result replaces one that is not applied yet.

        Raises OfframpError for observations that the tuner cannot use, and for a result without all thresholds.
        """
        if self._make is None or self._followed is None or not parts:
            return
        seen = Observations.join(parts[0].shape, parts)
        seen = seen.take(seen.times_s_N >= self._since_s)
        if self._tuner is None:
            self._tuner = self._make(seen.shape)
            self._tuner.follow(*self._followed)
            self._set_batching()
        found = self._tuner.observe(seen.take(seen.times_s_N.argsort(kind="stable")))
        if found is None:
            return
        if missing := sorted(set(self._followed[0]) - set(found.thresholds)):
            raise PlanError(f"{found.words}: no threshold for ramps {missing}")
        if self.alarm is not None and found.why != "alarm":  # the new result inherits the pending alarm's urgency
            found = replace(found, why="alarm", words=f"{self.alarm.words}; {found.words}")
        self.pending = found

    def follow(self, thresholds: Mapping[int, float], since_s: float, first: Stage) -> None:
        """Sets the thresholds and the first stage that all ingresses follow, and since when.

        Exits shrink the batches of the first split.
        """
        split, length = first.splits[0], self._problem.latency[first.device].length or 1
        entry = first.device, split.batch if split.tokens is None else max(1, split.tokens // length)
        if entry != self._entry:
            self._entry = entry
            self._set_batching()
        if self._followed is None:
            self._since_s = since_s
        elif self._followed[0] == thresholds:  # another plan with the same thresholds
            return
        self._followed = thresholds, since_s
        if self._tuner is not None:
            self._tuner.follow(thresholds, since_s)

    def _set_batching(self) -> None:
        if self._tuner is not None and self._entry is not None:
            self._tuner.set_batching(batching_of(self._problem, *self._entry))

    def pause(self) -> None:
        """Ignores observations until the next `follow`, and drops a result that is not applied yet."""
        self._followed = self.pending = None


def tuner_of(settings: ControlSettings) -> MakeTuner | None:
    """Returns the tuner of the settings; None if tuning is off or there are no ramps."""
    problem = settings.problem
    if settings.tuning == "off" or not problem.ramps:
        return None
    assert settings.accuracy_budget is not None, "`check_tuning` refuses settings without a budget"
    guarantee = Guarantee(budget=settings.accuracy_budget, confidence=settings.accuracy_confidence)
    # Savings are shares of the model's time, which differ little between devices, so any device will do. Under load,
    # batches are large. `Tuning.follow` replaces this batch size by the plan's.
    device = device_names(problem)[0]
    batching = batching_of(problem, device, problem.latency[device].batches[-1])
    name = settings.tuning
    return lambda shape: TUNERS[name](TunerSettings(score=shape.score, guarantee=guarantee, batching=batching))


def batching_of(problem: PlanProblem, device: str, size: int) -> Batching:
    """Returns a device's batches of a size, at most the largest size that was measured."""
    table = problem.latency[device]
    return Batching(table=table, ramps=problem.ramps, size=min(size, table.batches[-1]))


# Missing accelerators


EMPTY_S, BELIEVED_S = 30.0, 60.0
"""Accelerators count as missing once a stage that ran is seen without a replica for `EMPTY_S`. After `BELIEVED_S` they
are tried again, if Ray still counts them. Serve replaces a replica in about 20 s."""
LONGEST_START_S, UNSTARTED_S = 240.0, 1800.0
"""The same two times for replicas that do not start for a change of plan. Those of the first plan have half an hour."""


class MissingAccelerators:
    """Detects accelerators that Ray counts although they are lost, or although no replica starts on them.

    As long as every stage has a replica, the plan continues with fewer replicas, and Serve replaces the lost ones.
    """

    def __init__(self) -> None:
        self._ran = Counter[str]()
        """The most replicas that each type has run at once."""
        self._lacking_s = np.inf
        """Since when a type seems to lack replicas: one per stage or, during a change, all that the new plan needs."""
        self._missing: dict[str, tuple[int, int, int, float]] = {}
        """By type with missing accelerators: replicas that ran, replicas that the plan needed, accelerators that Ray
        counted, and until when this entry is valid."""

    def available(
        self, capacity: Mapping[str, int], running: Mapping[str, int], state: State, now_s: float
    ) -> dict[str, int]:
        """Returns the available accelerators by type."""
        self._ran |= Counter(running)
        placed, changes = state.placed, state.followed != state.placed
        wanted = placed.occupied if changes else Counter(stage.device for stage in placed.plan.stages)
        lacking = [device for device, number in wanted.items() if running.get(device, 0) < number]
        self._lacking_s = min(self._lacking_s, now_s) if state.suspended is None and lacking else np.inf
        longest_s, believed_s = UNSTARTED_S, UNSTARTED_S  # if the replicas of the first plan have never started
        if changes:
            longest_s = LONGEST_START_S
        elif any(wanted[device] <= self._ran[device] for device in lacking):
            longest_s, believed_s = EMPTY_S, BELIEVED_S
        if now_s >= max(self._lacking_s, state.at_s) + longest_s:
            self._lacking_s = now_s
            self._missing |= {
                device: (running.get(device, 0), needed, capacity.get(device, 0), now_s + believed_s)
                for device, needed in placed.occupied.items()
            }
        self._missing = {
            device: (ran, needed, counted, until_s)
            for device, (ran, needed, counted, until_s) in self._missing.items()
            if now_s < until_s and capacity.get(device, 0) == counted and running.get(device, 0) < needed
        }
        # Serve starts replicas on all accelerators on which they start, so that the others are missing.
        most = {device: max(ran, running.get(device, 0)) for device, (ran, _, _, _) in self._missing.items()}
        return {device: min(count, most.get(device, count)) for device, count in capacity.items()}
