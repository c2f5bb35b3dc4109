"""The controller's decisions: pure functions from a frozen view of the service to actions.

`CHECKS` lists the checks of one tick in their order. The tick ends after the first check that changes the plan.
`evaluate_proposal` compares the best found plan with the current plan. `deployments/controller/act.py` acts on them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from deployments.controller.intake import ran_since
from deployments.controller.observe import (
    LEAST_PROBES,
    Forecast,
    ObservedStream,
    Tuning,
    effective_probes,
)
from deployments.controller.remember import State
from deployments.settings import ControlSettings
from deployments.wire.messages import IngressReport, Interval, ReplicaReport, total
from earlyexit.errors import PlanError
from earlyexit.network.boundary import Split
from optimizer.cost.batch_seconds import split_seconds
from optimizer.cost.evaluate import Evaluation, evaluate, objective_value, predictions, violations
from optimizer.cost.rescore import apply_rescoring, rescore
from optimizer.live.changeover import Delivered, Trial, judge, num_started
from optimizer.live.hysteresis import weigh
from optimizer.live.reaction import expected_shares, rate_deviation, survival_deviation
from optimizer.live.stragglers import ReplicaTimes, RestingReplica, avoided_replicas, find_stragglers
from optimizer.live.tuning.base import NewThresholds
from optimizer.plans.plan import PlacedPlan, Plan, PolicySpec, Stage, divide_replicas
from optimizer.problems.problem import MaximizeRate, PlanProblem, Reach, nested_reach
from optimizer.search.decision import Decision, NoPlan, Planned, Strategy, gap_between
from profiles.lengths import Lengths

SETTLE_LOOKS = 4
"""The number of ticks before a new plan may be judged, and before a new forecast may be found wrong."""
REST_PERIODS = 5
"""The number of periods without work for a straggler, before it is tried again."""
BLAME_PERIODS = 5
"""The number of periods in which a plan that was rolled back is not chosen again."""
START_TRIES = 2
"""The number of timeouts while a change waits for its replicas, after which the change is given up."""
TRIES = 10
"""The number of failures of any kind after which a change is given up. Dead processes usually restart sooner."""
RECENT_INPUTS = (100, 300, 1000)
"""Numbers of recent answers that are compared with the forecast. Few show a jump quickly; many show small changes."""
RATE_LOOKS = 4
"""The number of recent ticks whose arrivals are compared with the forecast rate."""
REFUSED = frozenset({"overloaded", "admission"})
"""Drop reasons of inputs that never entered the model."""


# Actions


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEvent:
    """Log an event and store it in the history."""

    kind: str
    words: str


@dataclass(frozen=True, slots=True)
class UpdateState:
    """Change fields of the state."""

    changes: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyPlan:
    """Change over to a plan."""

    placed: PlacedPlan
    reason: str
    words: str
    sized_for_rps: float | None
    """The rate for which the plan was made; None: it maximizes the rate."""
    trial: Trial | None = None


@dataclass(frozen=True, slots=True)
class Suspend:
    """Refuse all inputs."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRejected:
    """Store a plan that was proposed and rejected in the history."""

    placed: PlacedPlan
    reason: str
    words: str


@dataclass(frozen=True, slots=True)
class Replan:
    """Forecast, plan, and change to the new plan if it is worth it."""

    reason: str


@dataclass(frozen=True, slots=True)
class FinishChange:
    """Continue or repair the change to the current plan."""


Action = LogEvent | UpdateState | ApplyPlan | NewThresholds | Suspend | RecordRejected | Replan | FinishChange
"""What the control loop does next. It applies new thresholds as the tuner has found them."""
Actions = tuple[Action, ...]


# The view on which decisions are based


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningBasis:
    """The inputs of the last planning."""

    forecast: Forecast
    problem: PlanProblem
    counts: Mapping[str, int]
    """The available accelerators by type."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class View:
    """Everything that decisions depend on at one moment. They read the stream and the tuner but do not change them."""

    settings: ControlSettings
    now_s: float
    """Wall clock."""
    state: State
    looked_s: float
    """When the next four fields were collected."""
    ingresses: Sequence[IngressReport] = ()
    replicas: Sequence[ReplicaReport] = ()
    capacity: Mapping[str, int] = field(default_factory=dict)
    """The available accelerators by type."""
    running: Mapping[str, int] = field(default_factory=dict)
    """Replicas that accept calls, by accelerator type."""
    stream: ObservedStream
    tuning: Tuning
    baseline: Mapping[str, ReplicaReport] = field(default_factory=dict)
    """Earlier reports by replica. The work since then is compared to find stragglers."""
    basis: PlanningBasis | None = None
    """None before the first planning of this process."""
    first_counts: Mapping[str, int] = field(default_factory=dict)
    """The accelerators at the first tick, by type."""
    is_restored: bool = False
    """Whether an earlier process made the plan, so that its basis is unknown."""
    failed: int = 0
    """How often the current change has failed."""
    late: int = 0
    """How often in a row the replicas of the current change did not start in time."""
    had_alarm: bool = False
    """Whether an alarm of the tuner was handled during a change of plan since the last tick."""

    @property
    def problem(self) -> PlanProblem:
        """The problem of the last planning; before the first, that of the settings."""
        return self.settings.problem if self.basis is None else self.basis.problem

    @property
    def period(self) -> int:
        """The number of the current period since the epoch of the clock."""
        return int(self.now_s // self.settings.period_s)

    @property
    def counts(self) -> dict[str, int]:
        """The usable accelerators by type, including those of stragglers."""
        devices = self.settings.problem.devices.items()
        return {device: min(supply.count, self.capacity.get(device, 0)) for device, supply in devices}

    @property
    def next_epoch(self) -> int:
        """An epoch that is higher than any that an ingress has seen."""
        return max([self.state.placed.epoch, *(report.epoch for report in self.ingresses)]) + 1

    @property
    def hosted(self) -> dict[str, str]:
        """The slot of the stage that each replica hosts, by replica."""
        return {each.replica: each.slot for each in self.replicas if each.slot}

    @property
    def is_changing(self) -> bool:
        """Whether the ingresses do not follow the current plan yet."""
        return self.state.followed != self.state.placed

    def has_room(self, placed: PlacedPlan) -> bool:
        """Whether the accelerators of a plan are available."""
        counts = self.counts
        return all(count <= counts.get(device, 0) for device, count in placed.occupied.items())

    @property
    def policy(self) -> PolicySpec:
        """The exit policy of new plans: the policy of the settings, with the tuned thresholds if there are any."""
        tuned, policy = self.state.thresholds, self.settings.policy
        return policy if tuned is None else replace(policy, thresholds=tuned)

    def uses_current_thresholds(self, placed: PlacedPlan) -> bool:
        """Whether a plan uses the controller's current thresholds. An operator's plan may have others."""
        policy, ramps = placed.plan.policy, placed.plan.ramps
        if policy is None or policy.name != self.policy.name:
            return policy is None
        return _thresholds_at(policy, ramps) == _thresholds_at(self.policy, ramps)

    def with_current_thresholds(self, plan: Plan) -> Plan:
        """Returns an earlier plan with the current thresholds."""
        foreign = plan.policy is not None and plan.policy.name != self.policy.name
        return plan if foreign or self.state.thresholds is None else replace(plan, policy=self.policy)

    def place(self, plan: Plan, resting: Sequence[RestingReplica] | None = None) -> PlacedPlan:
        """Returns the plan as the next epoch. Replicas keep their stages if possible.

        `resting`: the replicas that get no work; None: those of the state.
        """
        avoided = avoided_replicas(self.state.resting if resting is None else resting)
        return PlacedPlan(plan=replace(plan, epoch=self.next_epoch), avoided=avoided, hosted=self.hosted)

    def completed(self, plan: Plan) -> Plan:
        """Returns a plan with its missing policy, which probes need, and with its missing predictions."""
        plan, basis = replace(plan, policy=plan.policy or self.policy), self.basis
        if basis is None or plan.predicted:
            return plan
        try:
            figures = evaluate(basis.problem, plan.stages, basis.forecast.reach, shares=plan.shares)
            return replace(plan, predicted=predictions(basis.problem, figures))
        except PlanError:  # a plan with batch sizes that were not measured is allowed, without predictions
            return plan

    def same_rate(self, placed: PlacedPlan, reason: str, words: str) -> ApplyPlan:
        """Returns the change to a plan that is made for the same rate as the current one."""
        return ApplyPlan(placed=placed, reason=reason, words=words, sized_for_rps=self.state.sized_for_rps)


def _thresholds_at(policy: PolicySpec, ramps: Sequence[int]) -> list[float | None]:
    """Returns the thresholds of some ramps; None for a ramp without one."""
    thresholds = policy.thresholds
    return [thresholds.get(ramp) if isinstance(thresholds, Mapping) else thresholds for ramp in ramps]


# The checks of one tick


def thresholds_found(view: View) -> Actions:
    """Checks whether the tuner has found new thresholds: applies them, and replans if the plan may not be the best.

    An alarm ends the trial of a plan, because its prediction was for other thresholds. Other thresholds wait for the
    end of a trial or change. Thresholds also change while a plan is held.
    """
    state, said = view.state, view.tuning.said
    if said is None:
        return _after("alarm", view) if view.had_alarm and _is_too_careful(view, {}) else ()
    if said.why != "alarm" and (state.trial is not None or view.is_changing):
        return ()
    was_safe = state.thresholds is not None and view.tuning.is_safe(state.thresholds)
    on = {ramp: said.thresholds[ramp] for ramp in state.placed.plan.ramps if ramp in said.thresholds}
    # Inputs may leave at some ramp, but at none that is active in the plan: an exit was moved.
    is_moved = bool(on) and view.tuning.is_safe(on) and not view.tuning.is_safe(said.thresholds)
    replans = was_safe or is_moved or _is_too_careful(view, said.thresholds)
    return said, *(_after(said.why, view) if replans else ())


def _after(reason: str, view: View) -> Actions:
    return () if view.state.hold else (Replan("after an alarm" if reason == "alarm" else "after new thresholds"),)


def _is_too_careful(view: View, thresholds: Mapping[int, float]) -> bool:
    """Whether no input leaves under these thresholds although more inputs arrive than the plan can then serve."""
    merged = {**view.stream.thresholds(view.state), **thresholds}
    recent = total(view.stream.counts(view.state.planned_s)[-RATE_LOOKS:])
    if not view.tuning.is_safe(merged) or recent is None or recent.seconds <= 0:
        return False
    reach = view.stream.reach(replace(view.state, thresholds=merged), view.now_s)
    capacity_rps = evaluate(view.problem, view.state.placed.plan.stages, reach).rate_per_s
    return recent.arrived / recent.seconds > capacity_rps


def accelerators_changed(view: View) -> Actions:
    """Checks whether accelerators were added or lost. Without enough for the plan, a smaller plan is needed."""
    counts, suspended, hold = view.counts, view.state.suspended, view.state.hold
    before = view.first_counts if view.basis is None else view.basis.counts
    is_unchanged = view.basis is not None and counts == before and not _is_period_over(view)
    if suspended is not None and is_unchanged:
        return (Suspend(suspended),)
    first_actions: Actions = ()
    if suspended is not None:
        reason = "recovery"
    elif not view.has_room(view.state.placed):
        reason = "capacity lost"
        first_actions = UpdateState({"hold": False}), *_shrink_plan(view)
    elif counts != before and not hold:
        reason = "capacity changed"
    else:
        return ()
    event = LogEvent(kind="capacity", words=f"{reason}: {dict(before)} before, {counts} now")
    return *first_actions, event, Replan(reason)


def _shrink_plan(view: View) -> Actions:
    """Returns the change to the same splits on the replicas that still run, if every stage has one.

    Nothing has to start or move for it. The replan then compares other plans with it.
    """
    placed = view.state.placed
    resting = Counter(placed.avoided.values())
    left: dict[str, int] = {}
    for device in {stage.device for stage in placed.plan.stages}:
        left |= divide_replicas(placed.needed(device), view.running.get(device, 0) - resting[device])
    if view.is_changing or min(left.values()) < 1:
        return ()
    plan = placed.plan.with_replicas([min(stage.replicas, left[slot]) for slot, stage in placed.stage_of.items()])
    less = replace(placed, plan=view.completed(replace(plan, epoch=view.next_epoch)), hosted=view.hosted)
    words = "the same splits on what still runs"
    return (view.same_rate(less, "capacity lost", words),) if view.has_room(less) else ()


def change_failed(view: View) -> Actions:
    """Checks whether the change to the current plan failed too often: returns to the plan that is still followed."""
    state, followed = view.state, view.state.followed
    all_run = all(view.running.get(device, 0) >= number for device, number in state.placed.occupied.items())
    is_late = view.late >= START_TRIES and not all_run
    if followed is None or not (is_late or view.failed >= TRIES):
        return ()
    if followed.plan.stages == state.placed.plan.stages:
        return ()
    placed = view.place(view.with_current_thresholds(followed.plan))
    if not view.has_room(placed):
        return ()
    words = f"gives up plan {state.placed.epoch}: the change to it failed repeatedly"
    return _blame(view), LogEvent(kind="error", words=words), view.same_rate(placed, "roll back", words)


def _blame(view: View) -> UpdateState:
    """Returns the action that bars the current plan for a while."""
    stages = view.state.placed.plan.planned_stages
    return UpdateState({"blamed": {**view.state.blamed, stages: view.period + BLAME_PERIODS}})


def change_unfinished(_: View) -> Actions:
    """Continues an unfinished change, and repairs deviations from the current plan."""
    return (FinishChange(),)


def trial_over(view: View) -> Actions:
    """Checks whether a new plan performs as predicted. If not, the previous plan may be restored."""
    state, settings = view.state, view.settings
    since = delivered(view.stream.counts(state.followed_s))
    if state.hold or state.trial is None or since is None or view.is_changing:
        return ()
    judgement = judge(
        state.trial,
        since,
        margin=settings.rollback_margin,
        settle_s=SETTLE_LOOKS * settings.watch_s,
        patience_s=settings.period_s,
    )
    if judgement is None:
        return ()
    over = LogEvent(kind="trial", words=judgement.words), UpdateState({"trial": None, "previous": None})
    if not judgement.rolls_back or state.previous is None:
        return over
    placed = view.place(view.with_current_thresholds(state.previous.plan))
    fits = view.has_room(placed)
    back = view.same_rate(placed, "roll back", judgement.words) if fits else Replan("roll back")
    return *over, _blame(view), back


def slow_replicas(view: View) -> Actions:
    """Checks whether replicas are slower than their peers. Such stragglers get no work for a while."""
    state = view.state
    slow = {} if state.hold else _stragglers(view)
    if not slow:
        return ()
    until = view.period + REST_PERIODS
    new = [RestingReplica(replica=each.replica, device=each.device, until=until) for each in slow]
    names = {each.replica for each in new}
    resting = (*(rest for rest in state.resting if rest.replica not in names), *new)
    placed = _without(slow, view, resting)
    words = "; ".join(slow.values())
    return (
        *(LogEvent(kind="straggler", words=each) for each in slow.values()),
        UpdateState({"resting": resting}),
        Replan("straggler") if placed is None else view.same_rate(placed, "straggler", words),
    )


def _without(slow: Iterable[ReplicaTimes], view: View, resting: Sequence[RestingReplica]) -> PlacedPlan | None:
    """Returns the current plan with replacements for slow replicas, or without them if no accelerators are free.

    Returns None if a stage would have no replica.
    """
    placed = view.place(view.state.placed.plan, resting)
    for each in slow:
        if view.has_room(placed):
            break
        stage = placed.stage_of.get(each.slot)
        if stage is None or stage.replicas == 1:
            return None
        plan = placed.plan.with_replicas([one.replicas - (one is stage) for one in placed.plan.stages])
        placed = replace(placed, plan=view.completed(plan))
    return placed if view.has_room(placed) else None


def plan_out_of_date(view: View) -> Actions:
    """Checks whether the period is over or the stream has changed, so that a new plan is needed."""
    state, basis, settings = view.state, view.basis, view.settings
    if state.hold:
        return ()
    if basis is None and view.is_restored:
        return (Replan("restart"),)  # deviations can only be detected with a forecast
    if basis is not None and basis.forecast.at_s <= state.changed_s <= view.looked_s:
        return _after_change(view, state.changed_s)
    if _is_period_over(view):
        return (Replan("period"),)
    if basis is None or view.looked_s < state.planned_s + SETTLE_LOOKS * settings.watch_s:
        return ()
    deviations = _deviations(view, basis)
    if deviations:
        events = [LogEvent(kind="reaction", words=words) for _, words in deviations.values()]
        update = UpdateState({name: since_s for name, (since_s, _) in deviations.items()})
        changed_s = update.changes.get("changed_s", state.changed_s)
        only_rate_changed = changed_s < basis.forecast.at_s
        replan = (Replan("reaction"),) if only_rate_changed else _after_change(view, changed_s)
        return *events, update, *replan
    has_first_probes = basis.forecast.num_probes < LEAST_PROBES <= _num_probes(view, state.changed_s)
    return (Replan("first probes"),) if has_first_probes else ()


def _is_period_over(view: View) -> bool:
    """Whether the window of the last forecast is over. This is also true if the clock was set back."""
    period_s = view.settings.period_s
    return view.looked_s // period_s != view.state.planned_s // period_s


def _after_change(view: View, changed_s: float) -> Actions:
    """Replans once there are enough probes since the stream changed, or one period after the change."""
    is_late = view.looked_s >= changed_s + view.settings.period_s
    return (Replan("reaction"),) if is_late or _num_probes(view, changed_s) >= LEAST_PROBES else ()


def _num_probes(view: View, since_s: float) -> int:
    """Number of probes that what was seen since a time is worth."""
    return effective_probes(view.stream.observed(view.state, since_s, view.looked_s))


Deviation = tuple[float, str]
"""The start of the intervals that deviate from the forecast, and a description."""


def _deviations(view: View, basis: PlanningBasis) -> dict[str, Deviation]:
    """Returns the deviations of the stream from the forecast, by the field of the state that records their start."""
    state, settings, plan = view.state, view.settings, view.state.placed.plan
    intervals = view.stream.counts(max(state.followed_s, basis.forecast.at_s))
    ticks = settings.period_s / settings.watch_s
    found = {
        "changed_s": _survival_deviation(basis, plan, intervals, ticks),
        "rate_changed_s": _rate_deviation(basis.forecast, intervals, state.sized_for_rps, ticks),
    }
    return {name: deviation for name, deviation in found.items() if deviation is not None}


def _survival_deviation(
    basis: PlanningBasis, plan: Plan, intervals: Sequence[Interval], ticks: float
) -> Deviation | None:
    """Returns the deviation of the exits of recent answers from the forecast; None if there is none.

    `ticks`: the number of ticks per forecast, which share the probability of a false alarm.
    """
    if not plan.ramps or not basis.forecast.num_probes:  # a forecast without probes cannot be judged
        return None
    expected = expected_shares(basis.forecast.of(plan.used), plan.ramps, basis.forecast.reach)
    expected = replace(expected, coverage=_shared_coverage(expected.coverage, ticks * len(RECENT_INPUTS)))
    for recent in filter(None, (_last(intervals, answers) for answers in RECENT_INPUTS)):
        # The exits of inputs that are still in the service, or were dropped, are unknown.
        num_pending = abs(recent.arrived - recent.answered - sum(recent.drops.values()))
        num_dropped = sum(count for reason, count in recent.drops.items() if reason not in REFUSED)
        words = survival_deviation(expected, recent.exits, unknown=num_pending + num_dropped)
        if words is not None:
            return recent.since_s, words
    return None


def _rate_deviation(
    forecast: Forecast, intervals: Sequence[Interval], sized_for_rps: float | None, ticks: float
) -> Deviation | None:
    """Returns the deviation of the recent arrival rate from the forecast; None if there is none."""
    recent = total(intervals[-RATE_LOOKS:])
    if recent is None or forecast.rate is None:
        return None
    rate = replace(forecast.rate, coverage=_shared_coverage(forecast.rate.coverage, ticks))
    words = rate_deviation(rate, recent.arrived, recent.seconds, sized_for_rps=sized_for_rps)
    return None if words is None else (recent.since_s, words)


def _last(intervals: Sequence[Interval], answers: int) -> Interval | None:
    """Returns the last intervals with at least this many answers as one interval; None if there are fewer answers."""
    for index in range(len(intervals) - 1, -1, -1):
        answers -= sum(intervals[index].exits.values())
        if answers <= 0:
            return total(intervals[index:])
    return None


def _shared_coverage(coverage: float, num_tests: float) -> float:
    """Returns the coverage of each of several tests that together have this coverage (Bonferroni)."""
    return 1 - (1 - coverage) / max(1.0, num_tests)


def _stragglers(view: View) -> dict[ReplicaTimes, str]:
    """Returns the replicas that are slower than their peers, each with the reason."""
    share_N = nested_reach(view.problem)(view.state.placed.plan.ramps)
    times = [_times(each, view, share_N) for each in view.replicas if each.device in view.problem.latency]
    return find_stragglers(times, view.settings.straggler_ratio, resting=avoided_replicas(view.state.resting))


def _times(report: ReplicaReport, view: View, share_N: Sequence[float]) -> ReplicaTimes:
    """Returns the measured times of a replica since the baseline, and the times that the profile predicts.

    If inputs have lengths, a batch counts as the number of inputs of the profile's length with equally many tokens.
    Ramps that the problem does not have are ignored. So are batches that shared the device with another batch, because
    their longer times are not the replica's fault.
    """
    problem, expected_s = view.problem, 0.0
    table = problem.latency[report.device]
    length = None if problem.lengths is None else table.length
    runs = [each for each in ran_since(view.baseline.get(report.replica), report) if not each.shared]
    for each in runs:
        split = Split(
            first=each.first,
            end=each.end,
            batch=each.size,
            ramps=tuple(ramp for ramp in each.ramps if ramp in problem.ramps),
            after_answer=each.after_answer,
        )
        size = each.size if length is None else each.tokens / each.batches / length
        expected_s += each.batches * split_seconds(table, problem.ramps, split, share_N, size)
    return ReplicaTimes(
        replica=report.replica,
        slot=report.slot,
        device=report.device,
        batches=sum(each.batches for each in runs),
        seconds=sum(each.seconds for each in runs),
        expected_s=expected_s,
    )


def delivered(intervals: Sequence[Interval]) -> Delivered | None:
    """Returns the sum of some intervals as a trial's measurement; None without intervals."""
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


CHECKS: tuple[Callable[[View], Actions], ...] = (
    thresholds_found,
    accelerators_changed,
    change_failed,
    change_unfinished,
    trial_over,
    slow_replicas,
    plan_out_of_date,
)


# Planning


Solve = Callable[[PlanProblem, Strategy], Awaitable[Decision]]


def problems_to_solve(
    base: PlanProblem, forecast: Forecast, counts: Mapping[str, int], lengths: Lengths | None
) -> tuple[PlanProblem, ...]:
    """Returns the expected problem on the available accelerators, followed by problems to try if it has no plan.

    A required rate is replaced by the upper end of the forecast rate. At a low rate there may be no plan, because
    batches fill too slowly; then a plan for the original rate is sufficient. If there is no plan for a high rate, the
    plan with the highest rate is used.
    """
    devices = {
        device: replace(supply, count=min(supply.count, counts.get(device, 0)))
        for device, supply in base.devices.items()
    }
    problem = replace(forecast.expected(base), devices=devices, lengths=lengths)
    named_per_s = problem.required_per_s
    if named_per_s is None:
        return (problem,)
    rates = [named_per_s]
    if forecast.rate is not None:
        upper = float(forecast.rate.high_rps_H[0])
        # The upper end is infinite after a single window.
        rates = [upper if np.isfinite(upper) else max(float(forecast.rate.rate_rps_H[0]), named_per_s)]
        rates += [named_per_s] if named_per_s > rates[0] else []
    asked = [problem.with_rate(rate) for rate in rates if rate > 0]
    return (*asked, replace(problem, objective=MaximizeRate()))


async def propose(
    questions: Sequence[PlanProblem],
    solve: Solve,
    strategy: Strategy,
    *,
    blamed: Collection[tuple[Stage, ...]],
    reach: Reach | None,
) -> tuple[PlanProblem, Decision]:
    """Returns the first problem that has a plan, and its best plan; otherwise the first one, and why it has none.

    Blamed plans are replaced by the planner's other candidates. Raises PlanError if the search neither found a plan
    for any problem nor proved that none exists.
    """
    refusals: list[tuple[PlanProblem, NoPlan]] = []
    for problem in questions:
        try:
            found = await solve(problem, strategy)
        except PlanError:
            if problem is questions[-1] and not refusals:
                raise
            continue
        if isinstance(found, Planned):
            found = _allowed(problem, found, blamed) or NoPlan(strategy=strategy, binding="devices")
        if isinstance(found, NoPlan):
            refusals.append((problem, found))
            continue
        if reach is not None:
            found = apply_rescoring(problem, found, rescore(problem, found, reach))
        return problem, found
    return refusals[0]


def _allowed(problem: PlanProblem, planned: Planned, blamed: Collection[tuple[Stage, ...]]) -> Planned | None:
    """Returns the best plan that is not blamed; None if all are."""
    stages = [each for each in dict.fromkeys((planned.stages, *planned.candidates)) if each not in blamed]
    kept = [each for each in stages if each == planned.stages or not violations(problem, each, evaluate(problem, each))]
    if not kept:
        return None
    if kept[0] == planned.stages:
        return replace(planned, candidates=tuple(kept[1:]))
    figures = evaluate(problem, kept[0])
    gap = gap_between(objective_value(problem, figures), planned.bound)
    return replace(planned, stages=kept[0], figures=figures, gap=gap, candidates=tuple(kept[1:]))


# Whether a found plan is worth the change


def end_rests(view: View) -> UpdateState:
    """Ends expired rests and blames, and the rests of replicas that no longer exist."""
    reported = {report.replica for report in view.replicas}
    reporting_types = {report.device for report in view.replicas}
    # If no replica of a type reports, its replicas may still exist.
    silent_types = {device for device, running in view.running.items() if running} - reporting_types
    resting = tuple(
        rest
        for rest in view.state.resting
        if rest.until > view.period and (rest.replica in reported or rest.device in silent_types)
    )
    blamed = {stages: until for stages, until in view.state.blamed.items() if until > view.period}
    return UpdateState({"resting": resting, "blamed": blamed})


def _without_plan(view: View, none: NoPlan, reason: str) -> tuple[Actions, str]:
    """Keeps or restores the current plan if its accelerators exist, because late answers are better than none."""
    words = f"no plan meets the problem on {view.counts}: what is missing is {none.binding}"
    placed = view.state.placed
    if not view.has_room(placed):
        return (Suspend(words),), words
    if view.state.suspended is not None:
        back = view.place(placed.plan)
        return (ApplyPlan(placed=back, reason=reason, words=words, sized_for_rps=None),), words
    return (LogEvent(kind="no plan", words=f"{words}; keeps plan {placed.epoch}"),), words


def evaluate_proposal(view: View, found: Decision, reason: str) -> tuple[Actions, str]:
    """Returns the actions for the best plan that was found for the view's basis, and the verdict as text."""
    if isinstance(found, NoPlan):
        return _without_plan(view, found, reason)
    state, settings, problem = view.state, view.settings, view.problem
    reach = None if view.basis is None else view.basis.forecast.reach
    figures = evaluate(problem, found.stages, reach)
    placed = view.place(_plan_of(view, found, figures))
    verdict = weigh(
        problem,
        state.placed.plan.planned_stages if _stands(view) else None,
        found,
        moved=num_started(state.placed, placed),
        start_s=settings.start_s,
        period_s=settings.period_s,
        least_gain=settings.least_gain,
        reach=reach,
    )
    if verdict.change:
        change = ApplyPlan(
            placed=placed,
            reason=reason,
            words=verdict.words,
            sized_for_rps=problem.required_per_s,
            trial=_trial(view, figures, placed) if _stands(view) else None,
        )
        return (change,), verdict.words
    if avoided_replicas(state.resting) != state.placed.avoided:
        same = view.place(state.placed.plan)
        return (view.same_rate(same, "straggler", "other replicas rest now"),), verdict.words
    if not view.uses_current_thresholds(state.placed):
        # The thresholds of an operator's plan end with that plan.
        same = view.place(replace(state.placed.plan, policy=view.policy))
        return (view.same_rate(same, reason, "the controller's own thresholds again"),), verdict.words
    keep = LogEvent(kind="keep", words=f"keeps plan {state.placed.epoch} ({reason}): {verdict.words}")
    refused = () if verdict.same else (RecordRejected(placed=placed, reason=reason, words=verdict.words),)
    return (keep, *refused), verdict.words


def _stands(view: View) -> bool:
    """Whether the current plan serves inputs and its accelerators are available."""
    return view.state.suspended is None and view.has_room(view.state.placed)


def _plan_of(view: View, found: Planned, figures: Evaluation) -> Plan:
    """Returns the found plan with the policy, which probes need even if no ramp is active."""
    before = view.state.placed.plan  # keeps the fields that the planner does not choose
    return replace(
        before,
        stages=found.stages,
        shares=figures.shares,
        policy=view.policy,
        predicted=predictions(view.problem, figures),
    ).with_splits(overlap_below=before.overlap_below)


def _trial(view: View, figures: Evaluation, placed: PlacedPlan) -> Trial | None:
    """Returns the trial of a new plan; None if the current plan was not measured or has no predicted rate."""
    state = view.state
    since_s = max(state.followed_s, view.now_s - view.settings.period_s)
    before = delivered(view.stream.counts(since_s))
    expected_rps = state.placed.plan.predicted.get("rate_per_s")  # any value in an operator's plan
    if not isinstance(expected_rps, int | float) or expected_rps <= 0:
        return None
    if view.is_changing or before is None or before.arrived == 0:
        return None
    return Trial(
        epoch=placed.epoch,
        predicted_rps=figures.rate_per_s,
        before=before,
        before_predicted_rps=float(expected_rps),
    )
