"""What the controller does next: pure functions from its state and what it sees to actions.

`QUESTIONS` lists what is asked at one look, in this order; the first answer that moves the plan is the last. `weighed`
compares the best plan that was found with the plan in force. `deployments/controller/act.py` carries the actions out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from deployments.controller.intake import Interval, ran_since, total
from deployments.controller.observe import LEAST_PROBES, Forecast, Look, ObservedStream, Tuning, worth
from deployments.controller.remember import State
from deployments.settings import ControlSettings
from deployments.wire.messages import ReplicaReport
from earlyexit.errors import PlanError
from earlyexit.network.boundary import Split
from optimizer.batch_seconds import split_seconds
from optimizer.decision import Decision, NoPlan, Planned, Strategy, gap_between
from optimizer.evaluate import Evaluation, evaluate, objective_value, predictions, violations
from optimizer.live.changeover import num_started
from optimizer.live.hysteresis import weigh
from optimizer.live.reaction import expected_shares, rate_deviation, survival_deviation
from optimizer.live.stragglers import ReplicaTimes, RestingReplica, Straggler, avoided_replicas, find_stragglers
from optimizer.live.trial import Delivered, FailedPlan, Trial, has_failed, judge
from optimizer.live.tuning.base import NewThresholds
from optimizer.placement import PlacedPlan, divide_replicas
from optimizer.plan import Plan, PolicySpec
from optimizer.problem import MaximizeRate, PlanProblem, Reach, nested_reach
from optimizer.rescore import apply_rescoring, rescore
from profiles.lengths import Lengths

SETTLE_LOOKS = 4
"""A new plan is judged, and a new forecast is called wrong, after so many looks at the earliest."""
REST_PERIODS = 5
"""Periods without work for a straggler; then it is tried again."""
BLAME_PERIODS = 5
"""Periods in which a plan that was rolled back is not taken again, while the problem stays the same."""
START_TRIES = 2
"""Times that a change waits for its replicas; after that, they will not come for this plan."""
TRIES = 10
"""Times that a change may fail for any reason: replicas, ingresses and Serve's controller that die are soon back."""
RECENT_INPUTS = (100, 300, 1000)
"""Answers that are compared with the forecast: few show a jump at once and when it began, many show small changes."""
RATE_LOOKS = 4
"""Looks whose arrivals are compared with the forecast rate."""
REFUSED = frozenset({"overloaded", "admission"})
"""Reasons of drops before an input entered the model."""


# Actions


@dataclass(frozen=True, slots=True, kw_only=True)
class Say:
    """Log an event, and remember it."""

    kind: str
    words: str


@dataclass(frozen=True, slots=True)
class Become:
    """Change fields of the state."""

    changes: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PutInForce:
    """Change over to a plan."""

    placed: PlacedPlan
    reason: str
    words: str
    sized_for_rps: float | None
    """The rate that the plan was made for; None: it gives the highest rate."""
    trial: Trial | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GoBy:
    """Put thresholds in force that the tuner has found."""

    said: NewThresholds
    reason: str


@dataclass(frozen=True, slots=True)
class Suspend:
    """Refuse all inputs."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnDown:
    """Remember a plan that was proposed and is not taken."""

    placed: PlacedPlan
    reason: str
    words: str


@dataclass(frozen=True, slots=True)
class Replan:
    """Forecast, plan, and decide whether the plan that is found is worth the change."""

    reason: str


@dataclass(frozen=True, slots=True)
class Settle:
    """Bring about what the plan in force still lacks."""


Action = Say | Become | PutInForce | GoBy | Suspend | TurnDown | Replan | Settle
Actions = tuple[Action, ...]


# What decisions go by


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What the last planning was based on."""

    forecast: Forecast
    reach: Reach | None
    problem: PlanProblem
    counts: Mapping[str, int]
    """Accelerators that were there."""
    thresholds: Mapping[int, float]
    """Thresholds that the forecast is for."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class View:
    """Everything that decisions go by at one moment. They only read the stream and the tuner."""

    settings: ControlSettings
    now_s: float
    """Wall clock."""
    state: State
    seen: Look
    """The last look."""
    stream: ObservedStream
    tuning: Tuning
    marked: Mapping[str, ReplicaReport] = field(default_factory=dict)
    """The reports of replicas since which they are compared by what they run."""
    ground: Ground | None = None
    """None before the first planning of this process."""
    first_counts: Mapping[str, int] = field(default_factory=dict)
    """Accelerators at the first look."""
    is_restored: bool = False
    """Whether another process made the plan; what it was based on is not remembered."""
    failed: int = 0
    """How often the change under way has failed."""
    late: int = 0
    """Times in a row that its replicas did not start in time."""
    alarm_heard: bool = False
    """Whether an alarm sounded during a change of plan before the last look."""

    @property
    def problem(self) -> PlanProblem:
        """The problem that was planned for last; before that, the settings'."""
        return self.settings.problem if self.ground is None else self.ground.problem

    @property
    def period(self) -> int:
        """Number of the present period, counted from the epoch of the clock."""
        return int(self.now_s // self.settings.period_s)

    @property
    def counts(self) -> dict[str, int]:
        """Accelerators that may be used, per type; those of stragglers count too."""
        devices = self.settings.problem.devices.items()
        return {device: min(supply.count, self.seen.capacity.get(device, 0)) for device, supply in devices}

    @property
    def next_epoch(self) -> int:
        """An epoch above all that any ingress has seen."""
        return max([self.state.placed.epoch, *(report.epoch for report in self.seen.ingresses)]) + 1

    @property
    def hosted(self) -> dict[str, str]:
        """The stage that each replica hosts now, by the replica's id."""
        return {each.replica: each.slot for each in self.seen.replicas if each.slot}

    @property
    def is_changing(self) -> bool:
        """Whether ingresses do not follow the plan in force yet."""
        return self.state.followed != self.state.placed

    def has_room(self, placed: PlacedPlan) -> bool:
        """Whether a plan's accelerators are there."""
        counts = self.counts
        return all(count <= counts.get(device, 0) for device, count in placed.occupied.items())

    @property
    def policy(self) -> PolicySpec:
        """The exit policy of plans to come: the settings', with the thresholds that tuning has found."""
        found, policy = self.state.thresholds, self.settings.policy
        return policy if found is None else replace(policy, thresholds=found)

    def goes_by_ours(self, placed: PlacedPlan) -> bool:
        """Whether a plan goes by the controller's present thresholds; an operator's plan may have its own."""
        policy, ramps = placed.plan.policy, placed.plan.ramps
        if policy is None or policy.name != self.policy.name:
            return policy is None
        return _thresholds_at(policy, ramps) == _thresholds_at(self.policy, ramps)

    def decided(self, plan: Plan) -> Plan:
        """Returns an earlier plan with the present thresholds."""
        foreign = plan.policy is not None and plan.policy.name != self.policy.name
        return plan if foreign or self.state.thresholds is None else replace(plan, policy=self.policy)

    def place(self, plan: Plan, resting: Sequence[RestingReplica] | None = None) -> PlacedPlan:
        """Returns the plan as the next one, on replicas that stay where they are if they can.

        `resting`: the replicas that get no work; None for those that the state has.
        """
        avoided = avoided_replicas(self.state.resting if resting is None else resting)
        return PlacedPlan(plan=replace(plan, epoch=self.next_epoch), avoided=avoided, hosted=self.hosted)

    def completed(self, plan: Plan) -> Plan:
        """Returns a plan with what it does not say: the policy, by which probes are seen, and what it will do."""
        plan, ground = replace(plan, policy=plan.policy or self.policy), self.ground
        if ground is None or plan.predicted:
            return plan
        try:
            figures = evaluate(ground.problem, plan.stages, ground.reach, shares=plan.shares)
            return replace(plan, predicted=predictions(ground.problem, figures))
        except PlanError:  # a batch that was not measured may be tried all the same
            return plan

    def same_rate(self, placed: PlacedPlan, reason: str, words: str) -> PutInForce:
        """Returns the change to a plan for the same rate as the one in force."""
        return PutInForce(placed=placed, reason=reason, words=words, sized_for_rps=self.state.sized_for_rps)


def _thresholds_at(policy: PolicySpec, ramps: Sequence[int]) -> list[float | None]:
    """Returns the thresholds of some ramps; None for a ramp that has none."""
    given = policy.thresholds
    return [given.get(ramp) if isinstance(given, Mapping) else given for ramp in ramps]


# The questions of one look


def thresholds_found(view: View) -> Actions:
    """Has the tuner found other thresholds? They are put in force, and planned for if the plan is no longer the best.

    An alarm ends the trial of a plan, whose promise was for other thresholds. Everything else waits for the end of a
    trial or change. A plan that is held is held to its stages only.
    """
    state, said = view.state, view.tuning.said
    if said is None:
        return _after("alarm", view) if view.alarm_heard and _is_too_careful(view, {}) else ()
    if said.why != "alarm" and (state.trial is not None or view.is_changing):
        return ()
    reason = "alarm" if said.why == "alarm" else "thresholds"
    was_safe = state.thresholds is not None and view.tuning.is_safe(state.thresholds)
    on = {ramp: said.thresholds[ramp] for ramp in state.placed.plan.ramps if ramp in said.thresholds}
    # Inputs may leave, but at no ramp that the plan has on: an exit was moved.
    is_moved = bool(on) and view.tuning.is_safe(on) and not view.tuning.is_safe(said.thresholds)
    replans = was_safe or is_moved or _is_too_careful(view, said.thresholds)
    return GoBy(said=said, reason=reason), *(_after(reason, view) if replans else ())


def _after(reason: str, view: View) -> Actions:
    return () if view.state.hold else (Replan("after an alarm" if reason == "alarm" else "after new thresholds"),)


def _is_too_careful(view: View, thresholds: Mapping[int, float]) -> bool:
    """Whether by these thresholds no input leaves, and more inputs arrive than the plan in force can do."""
    present = {**view.stream.thresholds(view.state), **thresholds}
    recent = total(view.stream.counts(view.state.planned_s)[-RATE_LOOKS:])
    if not view.tuning.is_safe(present) or recent is None or recent.seconds <= 0:
        return False
    reach = view.stream.reach(replace(view.state, thresholds=present), view.now_s)
    does_rps = evaluate(view.problem, view.state.placed.plan.stages, reach).rate_per_s
    return recent.arrived / recent.seconds > does_rps


def accelerators_changed(view: View) -> Actions:
    """Did accelerators come or go? With fewer than the plan needs, another is needed, or nothing can be served."""
    counts, suspended, hold = view.counts, view.state.suspended, view.state.hold
    before = view.first_counts if view.ground is None else view.ground.counts
    as_before = view.ground is not None and counts == before and not _is_period_over(view)
    if suspended is not None and as_before:
        return (Suspend(suspended),)
    less: Actions = ()
    if suspended is not None:
        reason = "recovery"
    elif not view.has_room(view.state.placed):
        reason = "capacity lost"
        less = Become({"hold": False}), *_go_on_with_less(view)
    elif counts != before and not hold:
        reason = "capacity changed"
    else:
        return ()
    return *less, Say(kind="capacity", words=f"{reason}: {dict(before)} before, {counts} now"), Replan(reason)


def _go_on_with_less(view: View) -> Actions:
    """The same splits on the replicas that still run, where every stage has one: nothing has to start or to move.

    Another plan is then weighed against that.
    """
    placed = view.state.placed
    resting = Counter(placed.avoided.values())
    left: dict[str, int] = {}
    for device in {stage.device for stage in placed.plan.stages}:
        left |= divide_replicas(placed.needed(device), view.seen.running.get(device, 0) - resting[device])
    if view.is_changing or min(left.values()) < 1:
        return ()
    plan = placed.plan.with_replicas([min(stage.replicas, left[slot]) for slot, stage in placed.stage_of.items()])
    less = replace(placed, plan=view.completed(replace(plan, epoch=view.next_epoch)), hosted=view.hosted)
    words = "the same splits on what still runs"
    return (view.same_rate(less, "capacity lost", words),) if view.has_room(less) else ()


def change_failed(view: View) -> Actions:
    """Did the change to the plan in force fail again and again? Then the plan that is still followed comes back."""
    state, followed = view.state, view.state.followed
    came = all(view.seen.running.get(device, 0) >= number for device, number in state.placed.occupied.items())
    is_late = view.late >= START_TRIES and not came
    if followed is None or not (is_late or view.failed >= TRIES):
        return ()
    if followed.plan.stages == state.placed.plan.stages:
        return ()
    placed = view.place(view.decided(followed.plan))
    if not view.has_room(placed):
        return ()
    words = f"gives up plan {state.placed.epoch}: the change to it broke off again and again"
    return _blame(view), Say(kind="error", words=words), view.same_rate(placed, "roll back", words)


def _blame(view: View) -> Become:
    """Has the plan in force not be chosen again for a while."""
    stages = tuple(view.state.placed.plan.planned_stages)
    new = FailedPlan(stages=stages, problem=view.problem, until=view.period + BLAME_PERIODS)
    return Become({"blamed": (*(each for each in view.state.blamed if each.stages != stages), new)})


def in_place(_: View) -> Actions:
    """Does the plan in force lack anything? It is brought about, and held in place."""
    return (Settle(),)


def trial_over(view: View) -> Actions:
    """Does a new plan do what it promised? If it does not, the plan before it may come back."""
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
    over = Say(kind="trial", words=judgement.words), Become({"trial": None, "previous": None})
    if not judgement.rolls_back or state.previous is None:
        return over
    placed = view.place(view.decided(state.previous.plan))
    fits = view.has_room(placed)
    back = view.same_rate(placed, "roll back", judgement.words) if fits else Replan("roll back")
    return *over, _blame(view), back


def slow_replicas(view: View) -> Actions:
    """Are replicas slower than their peers? They get no work from now on."""
    state = view.state
    slow = () if state.hold else _stragglers(view)
    if not slow:
        return ()
    until = view.period + REST_PERIODS
    new = [RestingReplica(replica=each.replica, device=each.device, until=until) for each in slow]
    names = {each.replica for each in new}
    resting = (*(rest for rest in state.resting if rest.replica not in names), *new)
    placed = _without(slow, view, resting)
    words = "; ".join(each.words for each in slow)
    return (
        *(Say(kind="straggler", words=each.words) for each in slow),
        Become({"resting": resting}),
        Replan("straggler") if placed is None else view.same_rate(placed, "straggler", words),
    )


def _without(slow: Iterable[Straggler], view: View, resting: Sequence[RestingReplica]) -> PlacedPlan | None:
    """The plan in force with new replicas for slow ones, where accelerators are free, else with fewer replicas.

    None where a stage would have none.
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
    """Is it time to plan again? It is when the period is over, or the stream has changed."""
    state, ground, settings = view.state, view.ground, view.settings
    if state.hold:
        return ()
    if ground is None and view.is_restored:
        return (Replan("restart"),)  # without a forecast no deviation from it could be seen
    if ground is not None and ground.forecast.at_s <= state.changed_s <= view.seen.at_s:
        return _after_change(view, state.changed_s)
    if _is_period_over(view):
        return (Replan("period"),)
    if ground is None or view.seen.at_s < state.planned_s + SETTLE_LOOKS * settings.watch_s:
        return ()
    if left := _forecast_left(view, ground):
        changes = {name: value for each in left if isinstance(each, Become) for name, value in each.changes.items()}
        changed_s = changes.get("changed_s", state.changed_s)
        changed = changed_s >= ground.forecast.at_s  # or only the rate changed
        return *left, *(_after_change(view, changed_s) if changed else (Replan("reaction"),))
    is_learnt = ground.forecast.num_probes < LEAST_PROBES <= _num_probes(view, state.changed_s)
    return (Replan("first probes"),) if is_learnt else ()


def _is_period_over(view: View) -> bool:
    """Periods are the windows of forecasts: it is planned when one is whole, or when the clock was set back."""
    period_s = view.settings.period_s
    return view.seen.at_s // period_s != view.state.planned_s // period_s


def _after_change(view: View, changed_s: float) -> Actions:
    """Without probes since the stream changed, it could only be planned for the survival of the settings."""
    is_late = view.seen.at_s >= changed_s + view.settings.period_s
    return (Replan("reaction"),) if is_late or _num_probes(view, changed_s) >= LEAST_PROBES else ()


def _num_probes(view: View, since_s: float) -> int:
    """Number of probes that what was seen since a time is worth."""
    return worth(view.stream.observed(view.state, since_s, view.seen.at_s))


def _forecast_left(view: View, ground: Ground) -> Actions:
    """Where the stream has left its forecast: what was before is left out from now on."""
    state, settings, plan = view.state, view.settings, view.state.placed.plan
    counted = view.stream.counts(max(state.followed_s, ground.forecast.at_s))
    looks = settings.period_s / settings.watch_s
    exits = None
    if ground.forecast.num_probes:  # without any nothing could be learnt of it
        exits = _survival_left(ground, plan, counted, looks)
    rate = _rate_left(ground.forecast, counted, state.sized_for_rps, looks)
    if exits is None and rate is None:
        return ()
    changes = {"changed_s": exits, "rate_changed_s": rate}
    found = {name: deviation for name, deviation in changes.items() if deviation is not None}
    said = (Say(kind="reaction", words=words) for _, words in found.values())
    return *said, Become({name: since_s for name, (since_s, _) in found.items()})


Deviation = tuple[float, str]
"""Begin of the intervals in which the stream is no longer what was expected, and what they show."""


def _survival_left(ground: Ground, plan: Plan, intervals: Sequence[Interval], looks: float) -> Deviation | None:
    """How the last answers under a plan left the forecast; None where they did not.

    `looks`: number of looks until the next forecast; each has its part of the forecast's chance to err.
    """
    if not plan.ramps:
        return None
    expected = expected_shares(ground.forecast.of(plan.used), plan.ramps, ground.reach)
    expected = replace(expected, coverage=_strict(expected.coverage, looks * len(RECENT_INPUTS)))
    for seen in filter(None, (_last(intervals, answers) for answers in RECENT_INPUTS)):
        # As many leave the service as enter it, whatever they are, unless those inside become more or fewer.
        more_inside = abs(seen.arrived - seen.answered - sum(seen.drops.values()))
        given_up = sum(count for reason, count in seen.drops.items() if reason not in REFUSED)
        found = survival_deviation(expected, seen.exits, unknown=more_inside + given_up)
        if found is not None:
            return seen.since_s, found
    return None


def _rate_left(
    forecast: Forecast, intervals: Sequence[Interval], sized_for_rps: float | None, looks: float
) -> Deviation | None:
    """The same of the rate."""
    seen = total(intervals[-RATE_LOOKS:])
    if seen is None or forecast.rate is None:
        return None
    rate = replace(forecast.rate, coverage=_strict(forecast.rate.coverage, looks))
    found = rate_deviation(rate, seen.arrived, seen.seconds, sized_for_rps=sized_for_rps)
    return None if found is None else (seen.since_s, found)


def _last(intervals: Sequence[Interval], answers: int) -> Interval | None:
    """As many of the last intervals as hold so many answers, as one; None where all intervals hold fewer."""
    for index in range(len(intervals) - 1, -1, -1):
        answers -= sum(intervals[index].exits.values())
        if answers <= 0:
            return total(intervals[index:])
    return None


def _strict(coverage: float, looks: float) -> float:
    return 1 - (1 - coverage) / max(1.0, looks)


def _stragglers(view: View) -> tuple[Straggler, ...]:
    """Replicas slower than their peers, by the problem that the plan in force was weighed on."""
    share_N = nested_reach(view.problem)(view.state.placed.plan.ramps)
    times = [_times(each, view, share_N) for each in view.seen.replicas if each.device in view.problem.latency]
    return find_stragglers(times, view.settings.straggler_ratio, resting=avoided_replicas(view.state.resting))


def _times(report: ReplicaReport, view: View, share_N: Sequence[float]) -> ReplicaTimes:
    """Where inputs have lengths, a batch counts as so many of the profile's inputs as hold its tokens.

    Ramps that the problem does not have take no time: probes run every ramp of the model. A batch is left out if
    another one ran beside it, because it took longer for a reason that is not the replica's.
    """
    problem, expected_s = view.problem, 0.0
    table = problem.latency[report.device]
    length = None if problem.lengths is None else table.length
    runs = [each for each in ran_since(view.marked.get(report.replica), report) if not each.shared]
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
    """Returns what was done over some intervals; None for no intervals."""
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


QUESTIONS: tuple[Callable[[View], Actions], ...] = (
    thresholds_found,
    accelerators_changed,
    change_failed,
    in_place,
    trial_over,
    slow_replicas,
    plan_out_of_date,
)


# Planning


Solve = Callable[[PlanProblem, Strategy], Awaitable[Decision]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The best plan found."""

    problem: PlanProblem
    """The problem that it answers."""
    planned: Planned
    reach: Reach | None
    """Share of inputs that reach each block, by joint exit records; None where there were too few."""

    @property
    def figures(self) -> Evaluation:
        """What the plan will do, by all that was seen."""
        return evaluate(self.problem, self.planned.stages, self.reach)


def questions(
    base: PlanProblem, forecast: Forecast, counts: Mapping[str, int], lengths: Lengths | None
) -> tuple[PlanProblem, ...]:
    """Returns the problem as it is expected to be, on so many accelerators, and problems to try if it has no plan.

    Where the problem names a rate, the upper end of the forecast rate takes its place. No plan for a low rate, at which
    batches would fill too slowly: a plan for the rate that the problem names serves it as well. No plan for a high
    rate: the plan with the highest rate.
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
        # One window cannot say how rates change.
        rates = [upper if np.isfinite(upper) else max(float(forecast.rate.rate_rps_H[0]), named_per_s)]
        rates += [named_per_s] if named_per_s > rates[0] else []
    asked = [problem.with_rate(rate) for rate in rates if rate > 0]
    return (*asked, replace(problem, objective=MaximizeRate()))


async def propose(
    questions: Sequence[PlanProblem],
    solve: Solve,
    strategy: Strategy,
    *,
    blamed: Sequence[FailedPlan],
    reach: Reach | None,
) -> Proposal | NoPlan:
    """Answers the first question that has an answer; where none has, says what the first one lacks.

    The planner does not know blamed plans: its other good plans take their place.
    """
    refusals: list[NoPlan] = []
    for problem in questions:
        found = await solve(problem, strategy)
        if isinstance(found, Planned):
            found = _allowed(problem, found, blamed) or NoPlan(strategy=strategy, binding="devices")
        if isinstance(found, NoPlan):
            refusals.append(found)
            continue
        if reach is not None:
            found = apply_rescoring(problem, found, rescore(problem, found, reach))
        return Proposal(problem=problem, planned=found, reach=reach)
    return refusals[0]


def _allowed(problem: PlanProblem, planned: Planned, blamed: Sequence[FailedPlan]) -> Planned | None:
    """Returns the best plan that is not blamed; None where all are."""
    stages = [
        each for each in dict.fromkeys((planned.stages, *planned.candidates)) if not has_failed(blamed, each, problem)
    ]
    kept = [each for each in stages if each == planned.stages or not violations(problem, each, evaluate(problem, each))]
    if not kept:
        return None
    if kept[0] == planned.stages:
        return replace(planned, candidates=tuple(kept[1:]))
    figures = evaluate(problem, kept[0])
    gap = gap_between(objective_value(problem, figures), planned.bound)
    return replace(planned, stages=kept[0], figures=figures, gap=gap, candidates=tuple(kept[1:]))


# Whether the plan that was found is worth its change


def let_work_again(view: View) -> Become:
    """Ends the rests and blames that are over, and forgets replicas that are gone."""
    reported = {report.replica for report in view.seen.replicas}
    heard_of = {report.device for report in view.seen.replicas}
    is_silent = {device for device, running in view.seen.running.items() if running and device not in heard_of}
    resting = tuple(
        rest
        for rest in view.state.resting
        if rest.until > view.period and (rest.replica in reported or rest.device in is_silent)
    )
    return Become(
        {"resting": resting, "blamed": tuple(blame for blame in view.state.blamed if blame.until > view.period)}
    )


def _without_plan(view: View, none: NoPlan, reason: str) -> tuple[Actions, str]:
    """The plan in force stays, or comes back, if its accelerators are there: late answers are better than none."""
    words = f"no plan meets the problem on {view.counts}: what is missing is {none.binding}"
    placed = view.state.placed
    if not view.has_room(placed):
        return (Suspend(words),), words
    if view.state.suspended is not None:
        back = view.place(placed.plan)
        return (PutInForce(placed=back, reason=reason, words=words, sized_for_rps=None),), words
    return (Say(kind="no plan", words=f"{words}; keeps plan {placed.epoch}"),), words


def weighed(view: View, found: Proposal | NoPlan, reason: str) -> tuple[Actions, str]:
    """Returns the actions for the best plan that was found, and the verdict in words."""
    if isinstance(found, NoPlan):
        return _without_plan(view, found, reason)
    state = view.state
    placed = view.place(_plan_of(view, found))
    settings = view.settings
    verdict = weigh(
        found.problem,
        state.placed.plan.planned_stages if _stands(view) else None,
        found.planned,
        moved=num_started(state.placed, placed),
        start_s=settings.start_s,
        period_s=settings.period_s,
        least_gain=settings.least_gain,
        reach=found.reach,
    )
    if verdict.change:
        change = PutInForce(
            placed=placed,
            reason=reason,
            words=verdict.words,
            sized_for_rps=found.problem.required_per_s,
            trial=_trial(view, found, placed) if _stands(view) else None,
        )
        return (change,), verdict.words
    if avoided_replicas(state.resting) != state.placed.avoided:
        same = view.place(state.placed.plan)
        return (view.same_rate(same, "straggler", "other replicas rest now"),), verdict.words
    if not view.goes_by_ours(state.placed):
        # An operator's thresholds were for the operator's plan only.
        same = view.place(replace(state.placed.plan, policy=view.policy))
        return (view.same_rate(same, reason, "the controller's own thresholds again"),), verdict.words
    keep = Say(kind="keep", words=f"keeps plan {state.placed.epoch} ({reason}): {verdict.words}")
    refused = () if verdict.same else (TurnDown(placed=placed, reason=reason, words=verdict.words),)
    return (keep, *refused), verdict.words


def _stands(view: View) -> bool:
    """Whether inputs are served by the plan in force, and it could go on."""
    return view.state.suspended is None and view.has_room(view.state.placed)


def _plan_of(view: View, found: Proposal) -> Plan:
    """The plan that was found, with the policy even where no ramp is active: probes are seen by it."""
    before = view.state.placed.plan  # the planner chooses nothing of what is taken over from it
    return replace(
        before,
        stages=found.planned.stages,
        shares=found.figures.shares,
        policy=view.policy,
        predicted=predictions(found.problem, found.figures),
    ).with_splits(overlap_below=before.overlap_below)


def _trial(view: View, found: Proposal, placed: PlacedPlan) -> Trial | None:
    """None where the plan before was never followed or measured, or its expected rate is not known."""
    state = view.state
    since_s = max(state.followed_s, view.now_s - view.settings.period_s)
    before = delivered(view.stream.counts(since_s))
    expected_rps = state.placed.plan.predicted.get("rate_per_s")  # in an operator's plan it may be anything
    if not isinstance(expected_rps, int | float) or expected_rps <= 0:
        return None
    if view.is_changing or before is None or before.arrived == 0:
        return None
    return Trial(
        epoch=placed.epoch,
        predicted_rps=found.figures.rate_per_s,
        before=before,
        before_predicted_rps=float(expected_rps),
    )
