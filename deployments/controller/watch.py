"""What the tuner says of thresholds, kept until the loop acts on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from deployments.controller.fleet import Fleet
from deployments.controller.history import History
from deployments.controller.intake import IngressIntake, Interval, ReplicaIntake, total
from deployments.controller.knowledge import Knowledge, Outlook
from deployments.settings import ControlSettings
from deployments.wire.messages import IngressReport, ReplicaReport
from earlyexit.clock import Clock
from earlyexit.errors import DataError, OfframpError, PlanError
from earlyexit.network.split import Split
from optimizer.batch_seconds import split_seconds
from optimizer.live.exit_times import ExitTimes
from optimizer.live.reaction import expected_shares, rate_deviation, survival_deviation
from optimizer.live.stragglers import ReplicaTimes, Run, Straggler, find
from optimizer.live.trial import Delivered
from optimizer.live.tuning.base import Question, Tuned, Tuner, TunerState
from optimizer.live.tuning.rows import lets_nobody_leave
from optimizer.live.tuning.tuners import make_tuner
from optimizer.pame.on_batches import Batching
from optimizer.pame.times import seconds_of
from optimizer.placement import PlacedPlan
from optimizer.plan import Plan, Stage
from optimizer.problem import PlanProblem, device_names
from optimizer.reach import Reach, nested_reach
from optimizer.risk import Guarantee
from optimizer.tokens import full_inputs
from profiles.stream import Observations, StreamShape, empty

RECENT_INPUTS = (100, 300, 1000)
"""Answers that are held against the forecast: the least that tell anything, so that a jump shows at once and its begin
is known, and enough for smaller ones."""
RATE_LOOKS = 4
"""Looks whose arrivals are held against the forecast rate."""
REFUSED = frozenset({"overloaded", "admission"})
"""Drops of inputs that never entered the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """The stream is no longer what was expected."""

    since_s: float
    """Begin of the intervals that show it."""
    words: str


def survival_left(
    outlook: Outlook,
    plan: Plan,
    intervals: Sequence[Interval],
    reach: Reach | None,
    *,
    looks: float,
) -> Deviation | None:
    """How the last answers under a plan left the forecast; None where they did not.

    `looks`: how often it is asked until the next forecast; each has its part of the forecast's chance to err.
    """
    if not plan.ramps:
        return None
    expected = expected_shares(outlook.of(plan.used), plan.ramps, reach)
    expected = replace(expected, coverage=_strict(expected.coverage, looks * len(RECENT_INPUTS)))
    for seen in filter(None, (_last(intervals, answers) for answers in RECENT_INPUTS)):
        # As many leave the service as enter it, whatever they are, unless those inside become more or fewer.
        more_inside = abs(seen.arrived - seen.answered - sum(seen.drops.values()))
        given_up = sum(count for reason, count in seen.drops.items() if reason not in REFUSED)
        found = survival_deviation(expected, seen.exits, unknown=more_inside + given_up)
        if found is not None:
            return Deviation(since_s=seen.since_s, words=found.words)
    return None


def rate_left(
    outlook: Outlook, intervals: Sequence[Interval], sized_for_rps: float | None, *, looks: float
) -> Deviation | None:
    """The same of the rate."""
    seen = total(intervals[-RATE_LOOKS:])
    if seen is None or outlook.rate is None:
        return None
    forecast = replace(outlook.rate, coverage=_strict(outlook.rate.coverage, looks))
    found = rate_deviation(forecast, seen.arrived, seen.seconds, sized_for_rps=sized_for_rps)
    return None if found is None else Deviation(since_s=seen.since_s, words=found.words)


def _last(intervals: Sequence[Interval], answers: int) -> Interval | None:
    """As many of the last intervals as hold so many answers, as one; None where all do not."""
    for index in range(len(intervals) - 1, -1, -1):
        answers -= sum(intervals[index].exits.values())
        if answers <= 0:
            return total(intervals[index:])
    return None


def _strict(coverage: float, looks: float) -> float:
    return 1 - (1 - coverage) / max(1.0, looks)


def stragglers(
    problem: PlanProblem,
    plan: Plan,
    reports: Sequence[ReplicaReport],
    intake: ReplicaIntake,
    *,
    ratio: float,
    resting: Iterable[str],
) -> tuple[Straggler, ...]:
    """Replicas slower than their peers; `problem` is the one that the plan in force was weighed on."""
    share_N = nested_reach(problem)(plan.ramps)

    def expected(device: str, split: Split, size: float) -> float:
        return split_seconds(problem.latency[device], problem.ramps, split, share_N, size)

    times = [_times(report, intake, problem) for report in reports if report.device in problem.latency]
    return find(times, expected, ratio, resting=frozenset(resting))


def served(intervals: Sequence[Interval]) -> Delivered | None:
    """What was done over some intervals; None for none."""
    seen = total(intervals)
    if seen is None:
        return None
    return Delivered(
        seconds=seen.seconds,
        arrived=seen.arrived,
        answered=seen.answered,
        in_slo=seen.in_slo,
        dropped=sum(seen.drops.values()),
    )


def used(occupied: Mapping[str, int], devices: Mapping[str, str]) -> dict[str, int]:
    """Accelerators per type that replicas per slot take."""
    taken: dict[str, int] = {}
    for slot, replicas in occupied.items():
        taken[devices[slot]] = taken.get(devices[slot], 0) + replicas
    return taken


def _times(report: ReplicaReport, intake: ReplicaIntake, problem: PlanProblem) -> ReplicaTimes:
    """Where inputs have lengths, a batch counts as so many of the profile's inputs as hold its tokens.

    Ramps that the problem does not have take no time by it: probes run every ramp of the model.
    A batch that another ran beside took longer for it, which is not the replica's fault: it is left out.
    """
    length = None if problem.lengths is None else problem.latency[report.device].length
    runs = tuple(
        Run(
            split=Split(
                first=each.first,
                end=each.end,
                batch=each.size,
                ramps=tuple(ramp for ramp in each.ramps if ramp in problem.ramps),
                after_answer=each.after_answer,
            ),
            size=each.size if length is None else each.tokens / each.batches / length,
            batches=each.batches,
            seconds=each.seconds,
        )
        for each in intake.since_mark(report)
        if not each.shared
    )
    return ReplicaTimes(replica=report.replica, slot=report.slot, device=report.device, runs=runs)


MakeTuner = Callable[[StreamShape], Tuner]
"""Of what all observations share."""


class Tuning:
    """The tuner of one service, made when the first observations tell what they are of."""

    def __init__(self, make: MakeTuner | None, complain: Callable[[str], None], problem: PlanProblem) -> None:
        """`make`: None where thresholds stay as they are. `complain` is told of observations that it cannot use."""
        self._make = make
        self._complain = complain
        self._problem = problem
        self._tuner: Tuner | None = None
        self._shape: StreamShape | None = None
        self._followed: tuple[Mapping[int, float], float] | None = None
        """Thresholds, and since when; None: nothing is served, or by thresholds not known, or somebody else's."""
        self._entry: tuple[str, int] | None = None
        self._batching: Batching | None = None
        """That inputs enter the model in; None before anything is served."""
        self._since_s = 0.0
        """What arrived before was answered by nobody knows what."""
        self.said: Tuned | None = None
        """The last that is still to be put in force."""

    @property
    def is_on(self) -> bool:
        return self._make is not None

    @property
    def alarm(self) -> Tuned | None:
        """What must not wait."""
        return self.said if self.said is not None and self.said.why == "alarm" else None

    @property
    def state(self) -> TunerState | None:
        """None before the first observations."""
        return None if self._tuner is None else self._tuner.state

    def is_safe(self, thresholds: Mapping[int, float]) -> bool:
        """Whether nobody leaves by them; not known before the first observations."""
        return self._shape is not None and lets_nobody_leave(self._shape.score, thresholds)

    def observe(self, parts: Sequence[Observations]) -> None:
        """Have the tuner look; what it says now replaces what nobody has acted on yet."""
        if self._make is None or self._followed is None:
            return
        try:
            seen = Observations.join(parts[0].shape, parts)
            seen = seen.take(seen.times_s_N >= self._since_s)
            if self._tuner is None:
                self._shape, self._tuner = seen.shape, self._make(seen.shape)
                self._tuner.follow(*self._followed)
                if self._batching is not None:
                    self._tuner.serve(self._batching)
            said = self._tuner.observe(seen.take(seen.times_s_N.argsort(kind="stable")))
            if said is not None:
                self.said = said if self.alarm is None or said.why == "alarm" else _as_urgent(self.alarm, said)
        except OfframpError as error:
            self._complain(f"thresholds cannot be tuned by what was seen: {error}")

    def follow(self, thresholds: Mapping[int, float], since_s: float) -> None:
        """These are in force since then, with all ingresses."""
        if self._followed is None:
            self._since_s = since_s
        elif self._followed[0] == thresholds:  # another plan by the same thresholds
            return
        self._followed = thresholds, since_s
        if self._tuner is not None:
            self._tuner.follow(thresholds, since_s)

    def serve(self, first: Stage) -> None:
        """The first stage of the plan that is followed: batches of its first split are what exits shrink."""
        entry = first.device, full_inputs(self._problem.latency[first.device], first.splits[0])
        if entry != self._entry:
            self._entry, self._batching = entry, batching_of(self._problem, *entry)
            if self._tuner is not None:
                self._tuner.serve(self._batching)

    def pause(self) -> None:
        """Look at nothing until told what to follow; what was said before is void by then."""
        self._followed = self.said = None


def _as_urgent(alarm: Tuned, said: Tuned) -> Tuned:
    """What was said after an alarm that nobody has acted on yet."""
    return replace(said, why="alarm", words=f"{alarm.words}; {said.words}")


def tuner_of(settings: ControlSettings, problem: PlanProblem) -> MakeTuner | None:
    """The one that the settings name; None where thresholds stay as they are, or there are no ramps.

    Raises PlanError where there is no budget to keep.
    """
    if settings.tuning == "off" or not problem.ramps:
        return None
    if settings.accuracy_budget is None:
        raise PlanError(
            f"tuning {settings.tuning!r} keeps an accuracy budget, and none is given: accuracy.budget says it"
        )
    guarantee = Guarantee(budget=settings.accuracy_budget, confidence=settings.accuracy_confidence)
    # Of a device that is there: what is measured of others may be of nothing that serves. Savings are told as shares of
    # the model's time, which differ little between devices; its largest batch is what devices run when it matters.
    # Batches are the plan's as soon as there is one: see `Tuning.serve`.
    device = device_names(problem)[0]
    table = problem.latency[device]
    times = ExitTimes.of(table, problem.ramps, table.batches[-1])
    batching = batching_of(problem, device, table.batches[-1])
    name = settings.tuning
    return lambda shape: make_tuner(
        name, Question(score=shape.score, guarantee=guarantee, times=times, batching=batching)
    )


def batching_of(problem: PlanProblem, device: str, size: int) -> Batching:
    """Batches of a split on a device, of whose seconds nothing is known beyond the largest that was measured."""
    table = problem.latency[device]
    return Batching(seconds=seconds_of(table, problem.ramps), size=min(size, table.batches[-1]))


LOOKS = 2
"""A replica that was killed alone is back in seconds; a stage that is empty at so many looks is not waited for."""
BELIEVED_S = 60.0
"""After so long it is tried whether they are there again, if Ray counts them still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Short:
    counted: int
    """By Ray, when it was noticed."""
    missing: int
    until_s: float


class Missing:
    """Watches for stages that lost all their replicas: until then the plan goes on with fewer, and Serve mends it."""

    def __init__(self, devices: Mapping[str, str]) -> None:
        """`devices`: accelerator type by slot."""
        self._devices = devices
        self._ran: set[str] = set()
        self._looks = 0
        self._short: dict[str, _Short] = {}

    def left(
        self, capacity: Mapping[str, int], running: Mapping[str, int], placed: PlacedPlan | None, now_s: float
    ) -> dict[str, int]:
        """The accelerators that can be counted on; `placed` is the plan that is served, None in a change-over."""
        if placed is not None:
            self._look(capacity, running, placed, now_s)
        self._short = {
            device: short
            for device, short in self._short.items()
            if now_s < short.until_s and capacity.get(device, 0) == short.counted
        }
        return {
            device: count - (self._short[device].missing if device in self._short else 0)
            for device, count in capacity.items()
        }

    def _look(self, capacity: Mapping[str, int], running: Mapping[str, int], placed: PlacedPlan, now_s: float) -> None:
        """A slot that never ran anything is only slow to start."""
        self._ran |= {slot for slot, count in running.items() if count}
        is_empty = any(slot in self._ran and not running.get(slot, 0) for slot in placed.slots)
        self._looks = self._looks + 1 if is_empty else 0
        if self._looks < LOOKS:
            return
        self._looks = 0
        here = used(running, self._devices)
        for device, needed in used(placed.occupied, self._devices).items():
            missing = min(needed - here.get(device, 0), capacity.get(device, 0))
            if missing > 0:
                counted = capacity[device]
                self._short[device] = _Short(counted=counted, missing=missing, until_s=now_s + BELIEVED_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look at the service."""

    at_s: float
    ingresses: tuple[IngressReport, ...]
    replicas: tuple[ReplicaReport, ...]
    capacity: Mapping[str, int]
    """Accelerators alive per type."""
    running: Mapping[str, int]
    """Replicas per slot."""


class Watch:
    """Looks, and forgets nothing of what was handed over."""

    def __init__(
        self,
        fleet: Fleet,
        history: History,
        knowledge: Knowledge,
        clock: Clock,
        complain: Callable[[str], None],
        tuning: Tuning,
    ) -> None:
        """`complain` is told of probes that cannot be used."""
        self._fleet = fleet
        self._history = history
        self._knowledge = knowledge
        self._clock = clock
        self._complain = complain
        self._tuning = tuning
        self._ingresses = IngressIntake()
        self.replicas = ReplicaIntake()
        self._mark = True
        self.looked_s = 0.0
        """When ingresses were last asked."""

    def restore(self) -> None:
        """Know again what was remembered."""
        now_s = self._clock.now_s()
        self._history.forget(now_s)
        counts = self._history.counts(since_s=0.0)
        if counts:
            self._knowledge.began_s = counts[0].since_s
        for interval in counts:
            self._knowledge.add_counts(interval)
        try:
            for probes in self._history.probes():
                self._know(probes)
        except DataError as error:
            self._complain(str(error))
        self._knowledge.forget(now_s)

    def mark(self) -> None:
        """Hold replicas against each other from the next look on."""
        self._mark = True

    async def look(self) -> Look:
        """Ask everybody at once."""
        ingresses, replicas, capacity, running = await asyncio.gather(
            self.ingress_reports(), self._fleet.replica_reports(), self._fleet.capacity(), self._fleet.running()
        )
        if self._mark and replicas:
            self.replicas.mark(replicas)
            self._mark = False
        return Look(
            at_s=self._clock.now_s(),
            ingresses=tuple(ingresses),
            replicas=tuple(replicas),
            capacity=capacity,
            running=running,
        )

    async def ingress_reports(self) -> Sequence[IngressReport]:
        """Ask the ingresses; their probes and counts are kept."""
        reports = await self._fleet.ingress_reports()
        now_s = self.looked_s = self._clock.now_s()
        interval = self._ingresses.take(reports, now_s)
        if interval is not None and interval.seconds > 0:
            self._history.add_counts(interval)
            self._knowledge.add_counts(interval)
        seen = [report.probes for report in reports if report.probes is not None and len(report.probes)]
        for part in seen:
            if len(kept := self._know(part)):
                self._history.add_probes(now_s, kept)
        if seen:
            self._tuning.observe(seen)
        self._history.commit()  # probes come once, and whoever waits for the file next must not wait for a change-over
        self._knowledge.forget(now_s)
        return reports

    def _know(self, seen: Observations) -> Observations:
        """What there is to remember of it; nothing of what cannot be used."""
        try:
            return self._knowledge.add_probes(seen)
        except DataError as error:
            self._complain(f"probes cannot be used: {error}")
            return empty(seen.shape)
