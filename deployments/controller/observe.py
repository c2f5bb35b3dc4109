"""What the controller sees: the service at one look, its stream over the last two hours, and forecasts from that.

No Ray here: the service is behind `Fleet`, time is passed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from cluster.inventory import accelerators_on_node
from deployments.controller.intake import Interval, total
from deployments.controller.remember import KEEP_S, State
from deployments.controller.settings import thresholds_of
from deployments.settings import ControlSettings
from deployments.wire.messages import IngressReport, ReplicaReport
from earlyexit.errors import DataError, PlanError
from optimizer.live.exit_times import ExitTimes
from optimizer.live.tuning.base import NewThresholds, Tuner, TunerSettings, TunerState, no_input_leaves
from optimizer.live.tuning.tuners import make_tuner
from optimizer.networks import Used, network_sets, ramps_of, survival_with
from optimizer.pame.batches import Batching, seconds_of
from optimizer.placement import PlacedPlan
from optimizer.plan import Stage
from optimizer.problem import PlanProblem, Reach, device_names
from optimizer.rescore import joint_reach
from optimizer.risk import Guarantee
from optimizer.tokens import full_inputs, most_tokens
from profiles.lengths import Lengths
from profiles.records import ExitRecords
from profiles.stream import ExitStream, Observations, StreamShape
from profiles.windows import Window, WindowEstimate, survival_history, windows

if TYPE_CHECKING:
    from profiles.forecast import RateForecast, SurvivalForecast


class Fleet(Protocol):
    """The ingresses and replicas of a service. Every method may fail while a process dies; the loop tries again."""

    async def scale(self, device: str, replicas: int) -> None:
        """Has an accelerator type run so many replicas; returns before they run."""

    async def running(self) -> dict[str, int]:
        """Returns the number of replicas that take calls, per accelerator type."""

    async def prepare(self, placed: PlacedPlan) -> None:
        """Has all replicas of the plan's accelerator types make ready, and waits for it."""

    async def follow(self, placed: PlacedPlan) -> None:
        """Has all ingresses follow the plan, and waits for it; they tell the replicas."""

    async def suspend(self, reason: str) -> None:
        """Has all ingresses refuse inputs, with the reason, until they follow a plan again."""

    async def ingress_reports(self) -> list[IngressReport]:
        """Returns one report per ingress; it hands its probes over once."""

    async def replica_reports(self) -> list[ReplicaReport]:
        """Returns one report per replica."""

    async def capacity(self) -> dict[str, int]:
        """Returns the number of accelerators that are alive, in use or not, per type."""


def room(resources: Mapping[str, float], device: str) -> int:
    """Returns the number of replicas of an accelerator type that an empty node could hold; `cuda` takes any GPU."""
    return int(resources.get("GPU", 0)) if device == "cuda" else accelerators_on_node(resources).get(device, 0)


# The stream, and forecasts of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """One forecast of survival and rate."""

    at_s: float
    """When it was made."""
    survival: SurvivalForecast
    """The shares that an endless number of inputs would show. After few probes its middle leans to the shares that
    were expected before the first probe, and its intervals hold both."""
    num_probes: int
    """The number of probes that would say as much; see `worth`."""
    how: str
    rate: RateForecast | None = None
    """None where no input was counted yet."""
    survival_of: Mapping[Used, SurvivalForecast] = field(default_factory=dict)
    """For a cascade, forecasts for plans that leave networks out, by the networks that they use."""

    def of(self, used: Used) -> SurvivalForecast:
        """Returns the survival forecast for plans that use exactly these networks."""
        return self.survival_of.get(used, self.survival)

    def expected(self, problem: PlanProblem) -> PlanProblem:
        """Returns the problem with the survival that is expected."""
        of_others = {used: forecast.next_survival for used, forecast in self.survival_of.items()}
        return replace(problem, survival_N=self.survival.next_survival, survival_of=of_others or None)


Prior = tuple[float, ...]

LEAST_PROBES = 30
"""Probes, or what is worth as many (`worth`), by which plans are scored. With fewer, the survival that was expected
before keeps part of its weight: a share of 1/2 is known from 30 probes to 0.09 (one standard deviation), about as well
as from a calibration on another stream."""
RECENT_WINDOWS = 2
"""Windows whose probes score plans: more would mix in what the stream no longer is."""
LEAST_MEASURED = 300
"""Answers from which lengths of inputs are taken: their mean is then known to 6 % (one standard deviation), if lengths
spread as far as their mean."""
LEAST_COVERED = 0.5
"""Share of a window that must have been counted for its rate to be known."""


class ObservedStream:
    """Probes and counts of the last two hours. Forecasts leave out what lies before a change of the stream.

    What depends on thresholds, or on when the stream changed, takes the controller's `State`.
    """

    def __init__(self, settings: ControlSettings, since_s: float) -> None:
        """`since_s`: when the recording began."""
        self.problem = settings.problem
        self._calibrated = thresholds_of(settings.policy, settings.problem)
        """The thresholds for which the problem says the survival."""
        self._period_s, self._coverage = settings.period_s, settings.coverage
        self.began_s = since_s
        self._stream: ExitStream | None = None
        self._counts: list[Interval] = []

    def add_probes(self, seen: Observations) -> Observations:
        """Takes probes, and inputs that stayed; returns those that it keeps, which the memory must hold too.

        Raises DataError for probes of another model, and of ramps other than before.
        """
        if self._stream is None:
            asked, shape = self.problem, seen.shape
            if shape.num_blocks != asked.num_blocks or not set(asked.ramps) <= set(shape.ramps):
                raise DataError(
                    f"probes are of {shape.num_blocks} blocks and ramps {list(shape.ramps)}; "
                    f"the problem has {asked.num_blocks} blocks and ramps {list(asked.ramps)}"
                )
            # From the border before the begin: the window that it falls into is not whole, but not lost either.
            border_s = self.began_s // self._period_s * self._period_s
            self._stream = ExitStream(
                seen.shape, since_s=border_s, period_s=self._period_s, keep_s=max(KEEP_S, self._period_s)
            )
        return self._stream.take_in(seen.take(seen.probe_N | seen.stayed_N))

    def add_counts(self, interval: Interval) -> None:
        """Takes new counts."""
        self._counts.append(interval)

    def forget(self, now_s: float) -> None:
        """Drops what is too old to matter."""
        self._counts = [each for each in self._counts if each.at_s > now_s - KEEP_S]
        if self._stream is not None:
            self._stream.forget(now_s)

    def counts(self, since_s: float) -> list[Interval]:
        """Returns the intervals that began at a time or after it."""
        return [each for each in self._counts if each.since_s >= since_s]

    def thresholds(self, state: State) -> Mapping[int, float]:
        """Returns the thresholds of all ramps of the problem; estimates of past windows are made by these too."""
        given = self._calibrated if state.thresholds is None else state.thresholds
        return {ramp: given[ramp] for ramp in self.problem.ramps}

    def window(self, since_s: float, now_s: float) -> Window | None:
        """Returns the probes that arrived in between; None before the first recording, and for no time."""
        if self._stream is None or now_s <= since_s:
            return None
        kept = self._stream.whole_windows(now_s + self._period_s)
        first = max(int(since_s // self._period_s), kept.start if kept else 0)
        joined = self._stream.pooled(range(first, int(now_s // self._period_s) + 1))
        mine_N = (joined.times_s_N >= since_s) & (joined.times_s_N < now_s)
        return Window(start_s=since_s, period_s=now_s - since_s, observations=joined.take(mine_N))

    def observed(
        self, state: State, since_s: float, now_s: float, ramps: Sequence[int] | None = None
    ) -> WindowEstimate | None:
        """Returns what the inputs seen in between say of the given active ramps, or of all ramps; None as `window`."""
        window = self.window(since_s, now_s)
        if window is None:
            return None
        thresholds = self.thresholds(state)
        return window.estimate({ramp: thresholds[ramp] for ramp in (self.problem.ramps if ramps is None else ramps)})

    def records(self, state: State, now_s: float) -> ExitRecords | None:
        """Returns recent probes of the present stream that score plans; None for fewer than `LEAST_PROBES`."""
        for since_s in (max(state.changed_s, now_s - RECENT_WINDOWS * self._period_s), state.changed_s):
            window = self.window(since_s, now_s)
            if window is not None and window.num_probes >= LEAST_PROBES:
                return window.records()
        return None

    def reach(self, state: State, now_s: float) -> Reach | None:
        """Returns the share of inputs that reach each block by recent probes; None for too few probes."""
        records = self.records(state, now_s)
        if records is not None:
            return joint_reach(records, self.thresholds(state))
        if self._is_calibrated(state):
            return None
        stay_N = self._prior_N(state)
        return lambda _: stay_N

    def forecast(self, state: State, now_s: float) -> Forecast:
        """Returns forecasts of the coming window: for a cascade one per set of networks with ramps.

        Fitting takes up to a second, so call it off the event loop.
        """
        thresholds = self.thresholds(state)
        whole = self._survival(now_s, state.changed_s, thresholds, self._prior_N(state))
        others, every = {}, tuple(range(len(self.problem.networks)))
        for used in network_sets(self.problem) if every else ():
            theirs = {ramp: thresholds[ramp] for ramp in ramps_of(self.problem, used)}
            if used == every or not theirs:  # sets without ramps need no forecast
                continue
            stay_N = (1.0,) * self.problem.num_blocks
            prior_N = survival_with(self.problem, used) if self._is_calibrated(state) else stay_N
            others[used] = self._survival(now_s, state.changed_s, theirs, prior_N).survival
        return replace(whole, rate=self._rate(state.rate_changed_s, now_s), survival_of=others)

    def lengths(self, state: State, now_s: float) -> Lengths | None:
        """Returns the problem's lengths of inputs, stretched to the mean of recent answers.

        None where the problem has no lengths. Long inputs that are refused or late more often than short ones count
        too little.
        """
        known = self.problem.lengths
        if known is None:
            return None
        recent = total(self.counts(max(state.changed_s, now_s - RECENT_WINDOWS * self._period_s)))
        if recent is None or recent.answered < LEAST_MEASURED:
            return known
        most = min(most_tokens(self.problem.latency[device]) for device in self.problem.devices)
        return known.stretched(recent.answered_tokens / recent.answered, most=most)

    def _is_calibrated(self, state: State) -> bool:
        """Whether the thresholds are those of the settings, for which the problem says the survival."""
        return self.thresholds(state) == self._calibrated

    def _prior_N(self, state: State) -> Prior:
        """The survival expected before the first probe; by other thresholds than calibrated, that all inputs stay."""
        return tuple(self.problem.survival_N) if self._is_calibrated(state) else (1.0,) * self.problem.num_blocks

    def _survival(self, now_s: float, changed_s: float, thresholds: Mapping[int, float], prior_N: Prior) -> Forecast:
        from profiles.forecast import forecast_survival

        whole = [] if self._stream is None else windows(self._stream, now_s)
        estimates = [each.estimate(thresholds) for each in whole if each.start_s >= changed_s]
        num_probes = sum(map(worth, estimates))
        if num_probes < LEAST_PROBES:
            return self._pooled_survival(now_s, changed_s, thresholds, prior_N)
        return Forecast(
            at_s=now_s,
            survival=forecast_survival(survival_history(estimates), prior=prior_N, coverage=self._coverage),
            num_probes=num_probes,
            how=f"{len(estimates)} windows",
        )

    def _pooled_survival(
        self, now_s: float, changed_s: float, thresholds: Mapping[int, float], prior_N: Prior
    ) -> Forecast:
        """Takes all inputs since the stream changed as one window; with few of them the prior keeps its weight."""
        from profiles.forecast import forecast_survival
        from profiles.windows import SurvivalHistory

        window = self.window(changed_s, now_s)
        estimate = None if window is None else window.estimate(thresholds)
        num_probes = worth(estimate)
        if estimate is None or estimate.survival is None:
            none = SurvivalHistory.from_counts(np.full((1, len(prior_N)), np.nan))
            expected = forecast_survival(none, prior=prior_N, coverage=self._coverage)
            return Forecast(at_s=now_s, survival=expected, num_probes=0, how="expected")
        seen = forecast_survival(survival_history([estimate]), prior=prior_N, coverage=self._coverage)
        if num_probes >= LEAST_PROBES:
            return Forecast(at_s=now_s, survival=seen, num_probes=num_probes, how=f"worth {num_probes} probes")
        weight, prior = num_probes / LEAST_PROBES, np.array(prior_N)
        leaning = replace(  # the shares per ramp stay those seen
            seen,
            survival_HK=weight * seen.survival_HK + (1 - weight) * prior,
            survival_low_HK=np.minimum(seen.survival_low_HK, prior),
            survival_high_HK=np.maximum(seen.survival_high_HK, prior),
        )
        how = f"worth {num_probes} probes, and what was expected"
        return Forecast(at_s=now_s, survival=leaning, num_probes=num_probes, how=how)

    def _rate(self, changed_s: float, now_s: float) -> RateForecast | None:
        from profiles.forecast import forecast_rate

        rate_W = window_rates(self._counts, changed_s, now_s, self._period_s)
        if np.isfinite(rate_W).any():
            return forecast_rate(rate_W, coverage=self._coverage, window_s=self._period_s)
        recent = total(self.counts(changed_s))
        if recent is None or recent.seconds <= 0:
            return None
        rate_rps = np.array([recent.arrived / recent.seconds])
        return forecast_rate(rate_rps, coverage=self._coverage, window_s=recent.seconds)


def worth(estimate: WindowEstimate | None) -> int:
    """Returns the number of probes that would say as much of the share that is known least; 0 where none is known.

    Inputs that stayed say nothing of ramps that were off: with three probes, any number of them is worth little more.
    """
    if estimate is None or estimate.survival is None:
        return 0
    return round(min(share.effective_inputs for share in estimate.survival))


def window_rates(counts: Sequence[Interval], since_s: float, now_s: float, period_s: float) -> npt.NDArray[np.float64]:
    """Returns arrivals per second in every whole window since a time, oldest first; NaN where under half was counted.

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


# The tuner


MakeTuner = Callable[[StreamShape], Tuner]
"""Makes a tuner for streams of a shape."""


class Tuning:
    """The tuner of one service, made when the first observations tell their shape."""

    def __init__(self, make: MakeTuner | None, problem: PlanProblem) -> None:
        """`make`: None where thresholds stay as they are."""
        self._make = make
        self._problem = problem
        self._tuner: Tuner | None = None
        self._shape: StreamShape | None = None
        self._followed: tuple[Mapping[int, float], float] | None = None
        """The thresholds in force, and since when; None: inputs are refused, or the plan has thresholds of its own."""
        self._entry: tuple[str, int] | None = None
        self._batching: Batching | None = None
        """The batches in which inputs enter the model; None before any plan is served."""
        self._since_s = 0.0
        """Inputs that arrived earlier were answered under an unknown plan."""
        self.said: NewThresholds | None = None
        """The last thresholds that are still to be put in force."""

    @property
    def is_on(self) -> bool:
        return self._make is not None

    @property
    def alarm(self) -> NewThresholds | None:
        """What was said last, if it must not wait."""
        return self.said if self.said is not None and self.said.why == "alarm" else None

    @property
    def state(self) -> TunerState | None:
        """None before the first observations."""
        return None if self._tuner is None else self._tuner.state

    def is_safe(self, thresholds: Mapping[int, float]) -> bool:
        """Whether no input leaves by them; False before the first observations."""
        return self._shape is not None and no_input_leaves(self._shape.score, thresholds)

    def observe(self, parts: Sequence[Observations]) -> None:
        """Shows the tuner new observations; what it says replaces what is still to be put in force.

        Raises OfframpError for observations that it cannot use.
        """
        if self._make is None or self._followed is None:
            return
        seen = Observations.join(parts[0].shape, parts)
        seen = seen.take(seen.times_s_N >= self._since_s)
        if self._tuner is None:
            self._shape, self._tuner = seen.shape, self._make(seen.shape)
            self._tuner.follow(*self._followed)
            if self._batching is not None:
                self._tuner.set_batching(self._batching)
        said = self._tuner.observe(seen.take(seen.times_s_N.argsort(kind="stable")))
        if said is not None:
            if self.alarm is not None and said.why != "alarm":  # it is as urgent as the alarm before it
                said = replace(said, why="alarm", words=f"{self.alarm.words}; {said.words}")
            self.said = said

    def follow(self, thresholds: Mapping[int, float], since_s: float) -> None:
        """All ingresses go by these thresholds since then."""
        if self._followed is None:
            self._since_s = since_s
        elif self._followed[0] == thresholds:  # another plan by the same thresholds
            return
        self._followed = thresholds, since_s
        if self._tuner is not None:
            self._tuner.follow(thresholds, since_s)

    def serve(self, first: Stage) -> None:
        """Takes the first stage of the plan that is followed: exits shrink the batches of its first split."""
        entry = first.device, full_inputs(self._problem.latency[first.device], first.splits[0])
        if entry != self._entry:
            self._entry, self._batching = entry, batching_of(self._problem, *entry)
            if self._tuner is not None:
                self._tuner.set_batching(self._batching)

    def pause(self) -> None:
        """Observes nothing until it is told what to follow; what was said before is void by then."""
        self._followed = self.said = None


def tuner_of(settings: ControlSettings, problem: PlanProblem) -> MakeTuner | None:
    """Returns the tuner that the settings name; None where thresholds stay as they are, or there are no ramps.

    Raises PlanError where there is no budget to keep.
    """
    if settings.tuning == "off" or not problem.ramps:
        return None
    if settings.accuracy_budget is None:
        raise PlanError(
            f"tuning {settings.tuning!r} keeps an accuracy budget, and none is given: accuracy.budget says it"
        )
    guarantee = Guarantee(budget=settings.accuracy_budget, confidence=settings.accuracy_confidence)
    # Savings are told as shares of the model's time, which differ little between devices, so any device that is there
    # will do. Its largest batch is what devices run under load; `Tuning.serve` replaces it by the plan's.
    device = device_names(problem)[0]
    table = problem.latency[device]
    times = ExitTimes.of(table, problem.ramps, table.batches[-1])
    batching = batching_of(problem, device, table.batches[-1])
    name = settings.tuning
    return lambda shape: make_tuner(
        name, TunerSettings(score=shape.score, guarantee=guarantee, times=times, batching=batching)
    )


def batching_of(problem: PlanProblem, device: str, size: int) -> Batching:
    """Returns a device's batches of a size, at most the largest size that was measured."""
    table = problem.latency[device]
    return Batching(seconds=seconds_of(table, problem.ramps), size=min(size, table.batches[-1]))


# The service at one look


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The service at one look."""

    at_s: float
    ingresses: Sequence[IngressReport]
    replicas: Sequence[ReplicaReport]
    capacity: Mapping[str, int]
    """Accelerators that can be counted on, per type."""
    running: Mapping[str, int]
    """Replicas that take calls, per accelerator type."""


EMPTY_S = 30.0
"""A stage that stays empty for so long is given up. Serve has a replica that died alone back in about 20 s."""
BELIEVED_S = 60.0
"""Accelerators count as missing for so long; then they are tried again, if Ray still counts them."""


class MissingAccelerators:
    """Accelerators that Ray still counts although a type has fewer replicas left than stages.

    While every stage has a replica the plan goes on with fewer, and Serve replaces the lost ones.
    """

    def __init__(self) -> None:
        self._ran: dict[str, int] = {}
        """The most replicas that each type has run at once."""
        self._empty_s: float | None = None
        """Since when a type has had fewer replicas than stages."""
        self._missing: dict[str, tuple[int, int, int, float]] = {}
        """By type: accelerators that are missing, that ran, that Ray counted, and until when this is believed."""

    def left(
        self, capacity: Mapping[str, int], running: Mapping[str, int], placed: PlacedPlan | None, now_s: float
    ) -> dict[str, int]:
        """Returns the accelerators that can be counted on; `placed`: the plan in force, None while it changes."""
        if placed is None:
            self._empty_s = None
        else:
            self._look(capacity, running, placed, now_s)
        self._missing = {
            device: (missing, needed, counted, until_s)
            for device, (missing, needed, counted, until_s) in self._missing.items()
            if now_s < until_s and capacity.get(device, 0) == counted and running.get(device, 0) < needed
        }
        return {device: count - self._missing.get(device, (0,))[0] for device, count in capacity.items()}

    def _look(self, capacity: Mapping[str, int], running: Mapping[str, int], placed: PlacedPlan, now_s: float) -> None:
        """A type that never ran as many replicas as stages is only slow to start."""
        self._ran |= {device: max(count, self._ran.get(device, 0)) for device, count in running.items()}
        stages = Counter(stage.device for stage in placed.plan.stages)
        is_empty = any(running.get(device, 0) < least <= self._ran.get(device, 0) for device, least in stages.items())
        if not is_empty:
            self._empty_s = None
            return
        if self._empty_s is None:
            self._empty_s = now_s
        if now_s < self._empty_s + EMPTY_S:
            return
        self._empty_s = None
        for device, needed in placed.occupied.items():
            missing = min(needed - running.get(device, 0), capacity.get(device, 0))
            if missing > 0:
                self._missing[device] = missing, needed, capacity[device], now_s + BELIEVED_S
