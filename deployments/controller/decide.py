"""The controller's decisions: pure functions from a frozen view of the service to what the control loop does next.

`CHECKS` lists the checks of one tick in their order. The tick ends after the first check that changes the plan.
`evaluate_proposal` compares the best found plan with the current plan. `deployments/controller/act.py` acts on them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from deployments.controller.observe import LEAST_PROBES, Forecast, ObservedStream, Tuning, effective_probes
from deployments.controller.remember import State
from deployments.settings import ControlSettings
from deployments.wire.messages import IngressReport, Interval, ReplicaReport, ran_since, total
from earlyexit.errors import PlanError
from earlyexit.network.boundary import Split
from optimizer.cost.batch_seconds import batch_seconds
from optimizer.cost.evaluate import Evaluation, evaluate, predictions
from optimizer.cost.rescore import rescore
from optimizer.live.plan_changes import StartCost, Trial, best_after_starts, judge, kept_share, weigh
from optimizer.live.reaction import rate_deviation, survival_deviation
from optimizer.live.stragglers import LEAST_BATCHES, ReplicaTimes, RestingReplica, avoided_replicas, find_stragglers
from optimizer.live.tuning.base import NewThresholds
from optimizer.plans.plan import PlacedPlan, Plan, PolicySpec, Stage, divide_replicas
from optimizer.problems.networks import pruned_table
from optimizer.problems.problem import LEAST_BLOCK_S, MOST_BLOCK_S, MaximizeRate, PlanProblem, Reach, nested_shares
from optimizer.search.decision import Decision, Found, NoPlan, Planned, Strategy, if_feasible
from profiles.scores import FloatArray
from profiles.table import LatencyTable

if TYPE_CHECKING:
    from profiles.forecast import RateForecast, SurvivalForecast

SETTLE_TICKS = 4
"""The number of ticks before a new plan may be judged, and before a new forecast of exits may be found wrong."""
REST_PERIODS = 5
"""The number of periods before a straggler gets work, or a plan that was rolled back is chosen, again."""
TRIES = 10
"""The number of failures of any kind after which a change is given up. Dead processes usually restart sooner."""
RECENT_INPUTS = (100, 300, 1000)
"""Numbers of recent answers that are compared with the forecast. Few show a jump quickly; many show small changes."""
RATE_TICKS = 4
"""The number of recent ticks whose arrivals are compared with the forecast rate."""
LEAST_TIMED = 300
"""The number of batches that correct a latency. If their times vary by 30 %, their mean varies by 1.7 %."""
REFUSED = frozenset({"overloaded", "admission"})
"""Drop reasons of inputs that never entered the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPlan:
    """A plan that the controller or an operator proposes."""

    placed: PlacedPlan
    reason: str
    """Why it was made, such as `period`."""
    words: str
    """The verdict on it."""
    trial: Trial | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the control loop does after a check, in the order of the fields."""

    events: tuple[tuple[str, str], ...] = ()
    """Events to log, each with its kind and text."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """The changed fields of the state. If there is a plan, they are stored together with it."""
    plan: NewPlan | None = None
    """The plan to change over to."""
    thresholds: NewThresholds | None = None
    """Thresholds to apply, as the tuner has found them."""
    rejected: NewPlan | None = None
    """A plan that is only stored in the history."""
    reconciles: bool = False
    """Whether the service is brought to the state: a change is continued, or deviations are repaired."""
    replan: str | None = None
    """Why the controller plans, and changes to the new plan if it is worth it; None: it does not plan."""


# The view on which decisions are based


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class View:
    """Everything that decisions depend on at one moment. They read the stream and the tuner but do not change them."""

    settings: ControlSettings
    stream: ObservedStream
    tuning: Tuning
    state: State
    now_s: float
    """Wall clock."""
    began_s: float
    """When this process began."""
    observed_s: float
    """When the next four fields were collected."""
    ingresses: Sequence[IngressReport] = ()
    replicas: Sequence[ReplicaReport] = ()
    accelerators: Mapping[str, int] = field(default_factory=dict)
    """The usable accelerators by type, including those of stragglers."""
    running: Mapping[str, int] = field(default_factory=dict)
    """Replicas that accept calls, by accelerator type."""
    baseline: Mapping[str, ReplicaReport] = field(default_factory=dict)
    """Earlier reports by replica. The work since then is compared to find stragglers."""
    forecast: Forecast | None = None
    """The forecast of the last planning; None before the first planning of this process."""
    problem: PlanProblem
    """The problem of the last planning; before the first, that of the settings."""
    planned_accelerators: Mapping[str, int] = field(default_factory=dict)
    """The usable accelerators by type at the last planning; before the first, at the first tick."""
    failed: int = 0
    """How often a tick has failed since the last change of plan began or ended."""

    @property
    def period(self) -> int:
        """The number of the current period since the epoch of the clock."""
        return int(self.now_s // self.settings.period_s)

    @property
    def is_period_over(self) -> bool:
        """Whether the window of the last forecast is over. This is also true if the clock was set back."""
        return self.observed_s // self.settings.period_s != self.state.planned_s // self.settings.period_s

    @property
    def next_epoch(self) -> int:
        """An epoch that is higher than any that an ingress has seen."""
        return max([self.state.placed.epoch, *(report.epoch for report in self.ingresses)]) + 1

    @property
    def is_changing(self) -> bool:
        """Whether the ingresses do not follow the current plan yet."""
        return self.state.followed != self.state.placed

    @property
    def missing(self) -> str:
        """Describes the replicas that a change to the current plan still needs; empty if all run.

        While no plan is followed, one replica per stage of a chain is enough: late answers are better than none.
        """
        needed: Mapping[str, int] = self.state.placed.occupied
        if self.state.followed is None:
            runnable = self.state.placed.runnable(self.running)
            needed = {} if runnable else Counter(stage.device for stage in self.state.placed.plan.stages)
        counts = ((device, self.running.get(device, 0), num) for device, num in needed.items())
        return ", ".join(f"{device} runs {running} of {num}" for device, running, num in counts if running < num)

    @property
    def policy(self) -> PolicySpec:
        """The exit policy of new plans: the policy of the settings, with the current thresholds."""
        return replace(self.settings.policy, thresholds=self.state.thresholds)

    @property
    def start_cost(self) -> StartCost:
        """The cost of replicas that a new plan needs beyond those of the current plan that do not rest."""
        running = self.without_resting(self.state.placed.occupied)
        return StartCost(running=running, start_s=self.settings.start_s, period_s=self.settings.period_s)

    def without_resting(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Returns the counts of replicas or accelerators by type, less the stragglers that rest."""
        resting = Counter(rest.device for rest in self.state.resting)
        return {device: max(0, count - resting[device]) for device, count in counts.items()}

    def has_room(self, placed: PlacedPlan) -> bool:
        """Whether the accelerators of a plan are available."""
        return all(count <= self.accelerators.get(device, 0) for device, count in placed.occupied.items())

    def uses_current_thresholds(self, plan: Plan) -> bool:
        """Whether a plan uses the controller's current thresholds. An operator's plan may have others."""
        policy, ramps = plan.policy, plan.ramps
        if policy is None or policy.name != self.policy.name:
            return policy is None
        return _thresholds_at(policy, ramps) == _thresholds_at(self.policy, ramps)

    def with_current_thresholds(self, plan: Plan) -> Plan:
        """Returns an earlier plan with the current thresholds, and with predictions for them."""
        foreign = plan.policy is not None and plan.policy.name != self.policy.name
        if foreign or plan.policy == self.policy:
            return plan
        return self.completed(replace(plan, policy=self.policy, predicted={}))

    def completed(self, plan: Plan) -> Plan:
        """Returns a plan with its missing policy, which probes need, and with its missing predictions."""
        plan, forecast = replace(plan, policy=plan.policy or self.policy), self.forecast
        if forecast is None or plan.predicted:
            return plan
        try:
            figures = evaluate(self.problem, plan.stages, forecast.reach, shares=plan.shares)
            return replace(plan, predicted=predictions(self.problem, figures))
        except PlanError:  # a plan with batch sizes that were not measured is allowed, without predictions
            return plan

    def place(self, plan: Plan) -> PlacedPlan:
        """Returns the plan as the next epoch. Replicas keep their stages if possible."""
        avoided = avoided_replicas(self.state.resting)
        hosted = {each.replica: each.slot for each in self.replicas if each.slot}
        return PlacedPlan(plan=replace(plan, epoch=self.next_epoch), avoided=avoided, hosted=hosted)


def _thresholds_at(policy: PolicySpec, ramps: Sequence[int]) -> list[float | None]:
    """Returns the thresholds of some ramps; None for a ramp without one."""
    thresholds = policy.thresholds
    return [thresholds.get(ramp) if isinstance(thresholds, Mapping) else thresholds for ramp in ramps]


# Replicas of a change. A replica can host any stage of its accelerator type, so a change only needs enough replicas of
# each type. Types that need more grow before the switch, and types that need fewer shrink after the earlier plan has
# drained, so that neither plan lacks replicas while it is in force.


def due_requests(
    needed: Mapping[str, int],
    running: Mapping[str, int],
    requested: Mapping[str, int],
    *,
    at_once: int | None = None,
    may_shrink: bool,
) -> dict[str, int]:
    """Returns the numbers of replicas to request now, by accelerator type, so that a plan gets those that it needs.

    `requested`: the numbers that were requested last; a type without an entry is requested in any case. `at_once`: how
    many replicas of a type may start together, because they take processor time from replicas that serve; None: all. It
    lowers no requested number, because starting replicas would stop. `may_shrink`: whether surplus replicas may stop.
    """
    numbers = {}
    for device in sorted({*needed, *running}):
        now, wanted, last = running.get(device, 0), needed.get(device, 0), requested.get(device)
        number = min(wanted, max(last or 0, now + (at_once or wanted)))
        # A type that the plan does not use may still start replicas, which an earlier change has requested.
        if (now or wanted or last) and (may_shrink or now <= wanted > 0) and number != last:
            numbers[device] = number
    return numbers


# The checks of one tick


def thresholds_found(view: View) -> Outcome | None:
    """Checks whether the tuner has found new thresholds: applies them, and replans if the plan may not be the best.

    An alarm ends the trial of a plan, because its prediction was for other thresholds. Other thresholds wait for the
    end of a trial or change. Thresholds also change while a plan is held.
    """
    state, found, tuning = view.state, view.tuning.pending, view.tuning
    if found is None or (found.why != "alarm" and (state.trial is not None or view.is_changing)):
        return None
    active = {ramp: found.thresholds[ramp] for ramp in state.placed.plan.ramps if ramp in found.thresholds}
    # Inputs may leave at some ramp, but at none that is active in the plan: an exit was moved.
    is_moved = bool(active) and tuning.is_safe(active) and not tuning.is_safe(found.thresholds)
    if state.hold or not (tuning.is_safe(state.thresholds) or is_moved or _is_too_careful(view, found.thresholds)):
        return Outcome(thresholds=found)
    return Outcome(thresholds=found, replan="after an alarm" if found.why == "alarm" else "after new thresholds")


def _is_too_careful(view: View, thresholds: Mapping[int, float]) -> bool:
    """Whether no input leaves under these thresholds although more inputs arrive than the plan can then serve."""
    plan = view.state.placed.plan
    recent = total(view.stream.intervals(view.state.planned_s)[-RATE_TICKS:])
    if not view.tuning.is_safe(thresholds) or recent is None:
        return False
    reach = view.stream.reach(replace(view.state, thresholds=thresholds), view.now_s)
    try:
        capacity_rps = evaluate(view.problem, plan.stages, reach, shares=plan.shares).rate_per_s
    except PlanError:  # a plan with batch sizes that were not measured is allowed
        return False
    return recent.arrived / recent.seconds > capacity_rps


def accelerators_changed(view: View) -> Outcome | None:
    """Checks whether accelerators were added or lost. Without enough for the plan, a smaller plan is needed."""
    now, before, state = view.accelerators, view.planned_accelerators, view.state
    if state.suspended is not None:
        if view.forecast is not None and now == before and not view.is_period_over:
            return None
        reason = "recovery"
    elif not view.has_room(state.placed):
        reason = "capacity lost"
    elif now != before and not state.hold:
        reason = "capacity changed"
    else:
        return None
    event = "capacity", f"{reason}: {dict(before)} before, {now} now"
    if reason != "capacity lost":
        return Outcome(events=(event,), replan=reason)
    less = _shrunk(view, reason, "the same splits on what still runs")
    return Outcome(events=(event,), state={"hold": False}, plan=less, replan=reason)


def _shrunk(view: View, reason: str, words: str) -> NewPlan | None:
    """Returns the followed chains on the replicas that still run and do not rest; None if no chain has all its stages.

    Stragglers do not end a chain. No replica has to start for it. The replan then compares other plans with it.
    """
    # A straggler that was lost with its accelerator rests no more.
    view = replace(view, state=replace(view.state, **ended_rests(view)))
    followed = view.state.followed or view.state.placed
    placed, left = view.place(view.with_current_thresholds(followed.plan)), dict[str, int]()
    running = view.without_resting(view.running)
    runnable = placed.runnable(running)
    for device, number in running.items():
        needed = {slot: replicas for slot, replicas in placed.needed(device).items() if slot in runnable}
        left |= divide_replicas(needed, number)
    fewer = [min(stage.replicas, left.get(slot, 0)) for slot, stage in placed.stage_of.items()]
    plan = None if reason == "straggler" and min(fewer) < 1 else placed.plan.with_replicas(fewer)
    if plan is None:
        return None
    placed = replace(placed, plan=view.completed(plan))
    return NewPlan(placed=placed, reason=reason, words=words) if view.has_room(placed) else None


def change_failed(view: View) -> Outcome | None:
    """Checks whether the change to the current plan failed too often: returns to the plan that is still followed.

    Without such a plan, or without its accelerators, the controller plans anew.
    """
    state, placed, followed = view.state, view.state.placed, view.state.followed
    is_same = followed is not None and followed.plan.stages == placed.plan.stages
    if is_same or view.failed < TRIES:
        return None
    words = f"gives up plan {placed.epoch}: the change to it failed repeatedly"
    back = _roll_back(view, followed, words)
    if back.plan is None and placed.plan.planned_stages in state.blamed:  # there was no other plan
        return None
    return replace(back, events=(("error", words),), state={**back.state, "hold": False})


def _roll_back(view: View, earlier: PlacedPlan | None, words: str) -> Outcome:
    """Bars the current plan for a while, and returns to an earlier plan or, without its accelerators, replans."""
    placed = None if earlier is None else view.place(view.with_current_thresholds(earlier.plan))
    blamed = {**view.state.blamed, view.state.placed.plan.planned_stages: view.period + REST_PERIODS}
    if placed is None or not view.has_room(placed):
        return Outcome(state={"blamed": blamed}, replan="roll back")
    return Outcome(state={"blamed": blamed}, plan=NewPlan(placed=placed, reason="roll back", words=words))


def change_unfinished(_: View) -> Outcome:
    """Continues an unfinished change, and repairs deviations from the current plan."""
    return Outcome(reconciles=True)


def trial_over(view: View) -> Outcome | None:
    """Checks whether a new plan performs as predicted. If not, the previous plan may be restored."""
    state, settings = view.state, view.settings
    intervals = view.stream.intervals(state.followed_s)
    if state.hold or state.trial is None or view.is_changing or (since := total(intervals)) is None:
        return None
    judgement = judge(
        state.trial,
        since,
        margin=settings.rollback_margin,
        settle_s=SETTLE_TICKS * settings.watch_s,
        patience_s=settings.period_s,
    )
    if judgement is None:
        return None
    over = Outcome(events=(("trial", judgement.words),), state={"trial": None})
    if not judgement.change or state.previous is None:
        return over
    back = _roll_back(view, state.previous, judgement.words)
    return replace(back, events=over.events, state={**over.state, **back.state})


def slow_replicas(view: View) -> Outcome | None:
    """Checks whether replicas are slower than their peers. Such stragglers get no work for a while.

    At first the other replicas run the same splits. The new plan may then use free accelerators.
    """
    times = []
    for each, ran_R6 in _times(view, view.baseline):
        own = dict(zip(("batches", "seconds", "expected_s", "variance_s2"), ran_R6[:, 2:].sum(axis=0), strict=True))
        times.append(ReplicaTimes(replica=each.replica, slot=each.slot, device=each.device, **own))
    slow = find_stragglers(times, view.settings.straggler_ratio, resting=avoided_replicas(view.state.resting))
    if view.state.hold or not slow:
        return None
    until, names = view.period + REST_PERIODS, {each.replica for each in slow}
    new = [RestingReplica(replica=each.replica, device=each.device, until=until) for each in slow]
    resting = (*(rest for rest in view.state.resting if rest.replica not in names), *new)
    rested = replace(view, state=replace(view.state, resting=resting))
    return Outcome(
        events=tuple(("straggler", words) for words in slow.values()),
        state={"resting": resting},
        plan=_shrunk(rested, "straggler", "; ".join(slow.values())),
        replan="straggler",
    )


def plan_out_of_date(view: View) -> Outcome | None:
    """Checks whether the period is over or the stream has changed, so that a new plan is needed."""
    state, forecast = view.state, view.forecast
    if state.hold:
        return None
    if forecast is None and state.planned_s < view.began_s:  # the forecast was lost with an earlier process
        return Outcome(replan="restart")
    awaits_probes = forecast is not None and forecast.at_s <= state.changed_s <= view.observed_s
    if awaits_probes and _is_change_observed(view, state.changed_s):
        return Outcome(replan="reaction")
    if view.is_period_over and not awaits_probes:
        return Outcome(replan="period")
    is_settled = view.observed_s >= state.planned_s + SETTLE_TICKS * view.settings.watch_s
    deviations = _deviations(view, forecast, is_settled)
    if awaits_probes:  # but a change of the rate needs no probes
        deviations.pop("changed_s", None)
    if deviations:
        changes = {name: since_s for name, (since_s, _) in deviations.items()}
        events = tuple(("reaction", words) for _, words in deviations.values())
        may_replan = "rate_changed_s" in changes or _is_change_observed(view, changes["changed_s"])
        return Outcome(events=events, state=changes, replan="reaction" if may_replan else None)
    if forecast is None or not is_settled:
        return None
    has_first_probes = forecast.num_probes < LEAST_PROBES <= _num_probes(view, state.changed_s)
    return Outcome(replan="first probes") if has_first_probes else None


def _is_change_observed(view: View, changed_s: float) -> bool:
    """Whether there are enough probes since the stream changed, or the change was a period ago."""
    return view.observed_s >= changed_s + view.settings.period_s or _num_probes(view, changed_s) >= LEAST_PROBES


def _num_probes(view: View, since_s: float) -> int:
    """Returns the number of probes that the observations since a time are worth."""
    return effective_probes(view.stream.observed(view.state, since_s, view.observed_s))


def _deviations(view: View, forecast: Forecast | None, is_settled: bool) -> dict[str, tuple[float, str]]:
    """Returns the deviations of the stream from the forecast, by the field of the state that records their start.

    A deviation is the start of the intervals that deviate, and a description.
    """
    ticks = max(1.0, view.settings.period_s / view.settings.watch_s)  # they share the probability of a false alarm
    found = {"rate_changed_s": _rate_deviation(view, None if forecast is None else forecast.rate, 2 * ticks)}
    if forecast is not None and is_settled:
        # Inputs that were sent before the switch may be answered during the tick after it.
        intervals = view.stream.intervals(max(view.state.followed_s + view.settings.watch_s, forecast.at_s))
        found["changed_s"] = _survival_deviation(view, forecast, intervals, ticks * len(RECENT_INPUTS))
    return {name: each for name, each in found.items() if each is not None}


def _rate_deviation(view: View, rate: RateForecast | None, num_tests: float) -> tuple[float, str] | None:
    """Returns the deviation of recent arrivals from the forecast rate; None if there is none.

    After a jump, the last intervals that each exceed the forecast show the new rate, because earlier ones are partly
    from before the jump. A single interval may be a short burst, so the next one decides. Slower changes show in all
    recent intervals together.
    """
    intervals = view.stream.intervals(view.state.planned_s)[-RATE_TICKS:]
    required_rps = view.problem.required_per_s

    def deviation(part: Sequence[Interval]) -> tuple[float, str] | None:
        recent = total(part)
        if recent is None:
            return None
        refused = sum(count for reason, count in recent.drops.items() if reason in REFUSED)
        counts = recent.arrived, recent.seconds, refused
        words = rate_deviation(rate, *counts, required_rps=required_rps, num_tests=num_tests)
        return None if words is None else (recent.since_s, words)

    usual_rps = required_rps or 0.0 if rate is None else rate.rate_rps
    jumped = [*takewhile(lambda one: one.arrived > usual_rps * one.seconds and deviation([one]), reversed(intervals))]
    if not jumped and len(intervals) == RATE_TICKS:
        return deviation(intervals)
    return deviation(jumped) if len(jumped) > 1 else None


def _survival_deviation(
    view: View, forecast: Forecast, intervals: Sequence[Interval], num_tests: float
) -> tuple[float, str] | None:
    """Returns the deviation of the exits of recent answers from the forecast; None if there is none."""
    if not forecast.num_probes:  # a forecast without probes cannot be judged
        return None
    plan, records = view.state.placed.plan, view.stream.records(view.state, forecast.at_s)
    num_probes = np.inf if records is None else len(records)
    for recent in filter(None, (_last(intervals, answers) for answers in RECENT_INPUTS)):
        # The exits of inputs that are still in the service, or were dropped, are unknown.
        unknown = abs(recent.arrived - recent.answered - sum(recent.drops.values()))
        unknown += sum(count for reason, count in recent.drops.items() if reason not in REFUSED)
        expected, reached_N = _expected_exits(plan, forecast, recent)
        words = survival_deviation(
            expected, plan.ramps, recent.exits, reached_N, unknown=unknown, num_tests=num_tests, num_probes=num_probes
        )
        if words is not None:
            return recent.since_s, words
    return None


def _expected_exits(plan: Plan, forecast: Forecast, recent: Interval) -> tuple[SurvivalForecast, list[float] | None]:
    """Returns the forecast survival, and the share of inputs that reach each block according to recent probes.

    They are means over all chains, each of which has its own active ramps.
    """
    chains = [(chain.ramps, forecast.survival_of.get(chain.used, forecast.survival)) for chain in plan.chains]
    # The planned shares count as one input: they matter only if none has ended.
    weights = np.array([share + recent.assigned.get(number, 0) for number, share in enumerate(plan.shares)])
    weights /= weights.sum()
    mixed: dict[str, Any] = {
        name: weights @ [nested_shares(getattr(survival, name), ramps) for ramps, survival in chains]
        for name in ("survival_K", "survival_low_K", "survival_high_K")
    }
    reach = forecast.reach
    reached_N = None if reach is None else (weights @ [reach(ramps) for ramps, _ in chains]).tolist()
    return replace(chains[0][1], **mixed), reached_N


def _last(intervals: Sequence[Interval], answers: int) -> Interval | None:
    """Returns the last intervals with at least this many answers as one interval; None if there are fewer answers."""
    for index in range(len(intervals) - 1, -1, -1):
        answers -= sum(intervals[index].exits.values())
        if answers <= 0:
            return total(intervals[index:])
    return None


def _times(view: View, since: Mapping[str, ReplicaReport]) -> Iterator[tuple[ReplicaReport, FloatArray]]:
    """Yields for each replica its batches since an earlier report, as an array with a row per split and batch size.

    The columns are: first block, end, batches, measured seconds, and the seconds that the profile predicts, with their
    variance at most. As many inputs reach each block as since the last planning or, with several chains, as were
    expected then. If inputs have lengths, a batch counts as the number of inputs of the profile's length with equally
    many tokens. Ramps that the problem does not have are ignored. So are batches that shared the device with another
    batch, because their longer times are not the replica's fault.
    """
    problem, placed, seen = view.settings.problem, view.state.placed, total(view.stream.intervals(view.state.planned_s))
    chains = placed.plan.chains
    chain_of = dict(zip(placed.stage_of, (chain for chain in chains for _ in chain.stages), strict=True))
    for report in view.replicas:
        plan, table = chain_of.get(report.slot, chains[0]), problem.latency[report.device]
        share_N = nested_shares(view.problem.survival_N, plan.ramps)
        if seen is not None and seen.exits and len(chains) == 1:  # exits are not counted by chain
            left_N = np.cumsum([seen.exits.get(block, 0) for block in range(problem.num_blocks)])
            share_N = [1.0, *(1 - left_N[:-1] / left_N[-1]).tolist()]
        length = None if problem.lengths is None else table.length
        if length is None:  # otherwise tokens are counted after pruning
            table = pruned_table(problem, table, plan.used)
        rows = []
        for each in ran_since(since.get(report.replica), report):
            ramps = tuple(ramp for ramp in each.ramps if ramp in problem.ramps)
            size = each.size if length is None else each.tokens / each.batches / length
            split = Split(first=each.first, end=each.end, batch=each.size, ramps=ramps, after_answer=each.after_answer)
            one = batch_seconds(table, problem.ramps, split, share_N, size)
            expected_s, skipped_s = each.batches * one.mean_s, max(0.0, one.inside_s - one.mean_s)
            if not each.shared:
                rows.append((each.first, each.end, each.batches, each.seconds, expected_s, expected_s * skipped_s))
        yield report, np.array(rows).reshape(-1, 6)


CHECKS: tuple[Callable[[View], Outcome | None], ...] = (
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


def corrected_latency(view: View) -> dict[str, LatencyTable]:
    """Returns the latency of the settings, corrected by the batches since the last planning.

    Seconds of a block are multiplied by measured over predicted seconds of the batches that ran it, or of all batches
    on its accelerator type if fewer than `LEAST_TIMED` ran it. If fewer ran on the type, it keeps its last correction.
    Stragglers, and replicas with few batches, do not count. Nor do sequences, whose times depend on the context.
    """
    problem, avoided, latency = view.settings.problem, avoided_replicas(view.state.resting), dict(view.problem.latency)
    since = {} if view.forecast is None else view.baseline  # a new process counts all batches of the replicas
    times = [] if problem.generation is not None else [*_times(view, since)]
    for device, table in problem.latency.items():
        of_type = [ran_R6[:, :5] for each, ran_R6 in times if each.device == device and each.replica not in avoided]
        ran_R5 = np.concatenate([np.empty((0, 5)), *(each for each in of_type if each[:, 2].sum() >= LEAST_BATCHES)])
        sums_3 = ran_R5[:, 2:].sum(axis=0)
        if sums_3[0] < LEAST_TIMED:
            continue
        block_N1 = np.arange(problem.num_blocks)[:, None]
        sums_N3 = ((ran_R5[:, 0] <= block_N1) & (block_N1 < ran_R5[:, 1])) @ ran_R5[:, 2:]
        _, seconds_N, expected_N = np.where(sums_N3[:, :1] < LEAST_TIMED, sums_3, sums_N3).T
        ratio_N1 = (seconds_N / expected_N)[:, None]
        block_s_NB = np.clip(table.block_s_NB * ratio_N1, LEAST_BLOCK_S, MOST_BLOCK_S)
        ramp_s_EB = table.ramp_s_EB * ratio_N1[list(problem.ramps)]
        latency[device] = replace(table, block_s_NB=block_s_NB, ramp_s_EB=ramp_s_EB)
    return latency


def problems_to_solve(
    base: PlanProblem, last: PlanProblem, forecast: Forecast, counts: Mapping[str, int]
) -> tuple[PlanProblem, ...]:
    """Returns the expected problem on the available accelerators, followed by problems to try if it has no plan.

    `base` is the problem of the settings, and `last` that of the last planning, with the present latency. A required
    rate is replaced by the upper end of the forecast rate. After a single window, which has no upper end, plans serve
    at least the original rate, or that of the last planning if it was lower. At a low rate there may be no plan,
    because batches fill too slowly; then a plan for the original rate is sufficient. If there is no plan for a high
    rate, the plan with the highest rate is used.
    """
    problem = _within(forecast.expected(replace(base, latency=last.latency)), counts)
    named_per_s = problem.required_per_s
    if named_per_s is None:
        return (problem,)
    rates = [named_per_s]
    if forecast.rate is not None:
        expected_per_s = forecast.rate.high_rps
        if not np.isfinite(expected_per_s):  # after a single window
            expected_per_s = max(forecast.rate.rate_rps, min(named_per_s, last.required_per_s or np.inf))
        rates = [expected_per_s, named_per_s] if named_per_s > expected_per_s else [expected_per_s]
    return (*(problem.with_rate(rate) for rate in rates if rate > 0), replace(problem, objective=MaximizeRate()))


def _within(problem: PlanProblem, counts: Mapping[str, int]) -> PlanProblem:
    """Returns the problem on at most these numbers of accelerators."""
    most = {device: min(supply.count, counts.get(device, 0)) for device, supply in problem.devices.items()}
    return problem.with_counts(most)


async def propose(
    problems: Sequence[PlanProblem],
    solve: Solve,
    strategy: Strategy,
    *,
    blamed: Collection[tuple[Stage, ...]],
    reach: Reach | None,
    start_cost: StartCost,
) -> tuple[PlanProblem, Decision]:
    """Returns the first problem that has a plan, and its best plan; otherwise the first one, and why it has none.

    If the best plan starts replicas, the best plan that starts none is among its candidates. Blamed plans are replaced
    by the planner's other candidates. Raises PlanError if the search found no plan, nor a proof that there is none.
    """
    refused: tuple[PlanProblem, Decision] | None = None
    for problem in problems:
        try:
            found = await solve(problem, strategy)
        except PlanError:
            if problem is problems[-1] and refused is None:
                raise
            continue
        if isinstance(found, Planned):
            if start_cost.num_started(found.stages):
                others = await _plans_for(_within(problem, start_cost.running), solve, strategy)
                found = replace(found, candidates=(*found.candidates, *others))
            found = _allowed(problem, found, blamed) or NoPlan(strategy=strategy, binding="devices")
        if isinstance(found, Planned):
            return problem, found if reach is None else rescore(problem, found, reach).planned
        refused = refused or (problem, found)
    assert refused is not None, "the search raises for the last problem if it decided none"
    return refused


async def _plans_for(problem: PlanProblem, solve: Solve, strategy: Strategy) -> tuple[tuple[Stage, ...], ...]:
    """Returns the plans that the planner finds; none if there are none, or if the search gives up."""
    with suppress(PlanError):
        found = await solve(problem, strategy)
        return (found.stages, *found.candidates) if isinstance(found, Planned) else ()
    return ()


def _allowed(problem: PlanProblem, planned: Planned, blamed: Collection[tuple[Stage, ...]]) -> Planned | None:
    """Returns the best plan that is not blamed, with the other feasible plans as candidates; None if all are blamed."""
    if not blamed:
        return planned
    plans = [each for each in dict.fromkeys((planned.stages, *planned.candidates)) if each not in blamed]
    feasible = tuple(found for each in plans if (found := if_feasible(problem, each)) is not None)
    return Found(plans=feasible, bound=planned.bound).planned(problem, planned.strategy) if feasible else None


# Whether a found plan is worth the change


def ended_rests(view: View) -> dict[str, Any]:
    """Returns the fields of the state without expired rests and blames, and without rests of lost replicas."""
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
    return {"resting": resting, "blamed": blamed}


def evaluate_proposal(view: View, found: Decision, reason: str) -> Outcome:
    """Returns what follows from the best plan that was found for the view's forecast."""
    if isinstance(found, NoPlan):
        words = f"no plan meets the problem on {view.accelerators}: the binding limit is {found.binding}"
        return without_plan(view, words, reason)
    state, problem, start_cost, least_gain = view.state, view.problem, view.start_cost, view.settings.least_gain
    reach = None if view.forecast is None else view.forecast.reach
    stages, compared = best_after_starts(problem, found, start_cost, reach)
    figures = evaluate(problem, stages, reach)
    placed = view.place(_plan_of(view, stages, figures))
    current: tuple[Stage, ...] | None = state.placed.plan.planned_stages
    if state.suspended is not None or current in state.blamed or not view.has_room(state.placed):
        current = None  # it does not serve, or was given up
    shares, rate = state.placed.plan.shares, None if view.forecast is None else view.forecast.rate
    if rate and rate.rate_rps > 0 and rate.high_rps < np.inf:
        # New plans are for the upper end of the forecast, which fluctuates. The plan in force must serve the forecast.
        problem = problem.with_rate(rate.rate_rps)
    verdict = weigh(problem, current, stages, start_cost=start_cost, least_gain=least_gain, reach=reach, shares=shares)
    new = NewPlan(placed=placed, reason=reason, words=verdict.words + compared)
    if verdict.change:
        return Outcome(plan=replace(new, trial=None if current is None else _trial(view, figures, placed)))
    if avoided_replicas(state.resting) != state.placed.avoided:
        same = view.place(state.placed.plan)
        return Outcome(plan=NewPlan(placed=same, reason="straggler", words="other stragglers get no work now"))
    if not view.uses_current_thresholds(state.placed.plan):
        # The thresholds of an operator's plan end with that plan.
        same = view.place(replace(state.placed.plan, policy=view.policy))
        return Outcome(plan=NewPlan(placed=same, reason=reason, words="the controller's own thresholds again"))
    keep = "keep", f"keeps plan {state.placed.epoch} ({reason}): {new.words}"
    return Outcome(events=(keep,), rejected=None if current == stages else new)


def without_plan(view: View, words: str, reason: str) -> Outcome:
    """Keeps or restores a plan whose accelerators exist, because late answers are better than none."""
    state = view.state
    placed = next((each for each in (state.placed, state.followed) if each is not None and view.has_room(each)), None)
    if placed is None:
        changes = {"suspended": words, "trial": None, "followed": None}
        events = () if state.suspended == words else (("suspended", words),)
        return Outcome(events=events, state=changes, reconciles=True)
    if state.suspended is not None or placed != state.placed:
        return Outcome(plan=NewPlan(placed=view.place(placed.plan), reason=reason, words=words))
    return Outcome(events=(("no plan", f"{words}; keeps plan {placed.epoch}"),))


def _plan_of(view: View, stages: tuple[Stage, ...], figures: Evaluation) -> Plan:
    """Returns the plan of these stages with the policy, which probes need even if no ramp is active."""
    before = view.state.placed.plan  # keeps the fields that the planner does not choose
    return replace(
        before,
        stages=stages,
        shares=figures.shares,
        policy=view.policy,
        predicted=predictions(view.problem, figures),
    ).with_splits(overlap_below=before.overlap_below)


def _trial(view: View, figures: Evaluation, placed: PlacedPlan) -> Trial | None:
    """Returns the trial of a new plan; None if the current plan was not measured or has no predicted rate."""
    state = view.state
    before = total(view.stream.intervals(max(state.followed_s, view.now_s - view.settings.period_s)))
    expected_rps = state.placed.plan.predicted.get("rate_per_s")
    if not expected_rps or view.is_changing or before is None or before.arrived == 0:
        return None
    return Trial(
        epoch=placed.epoch,
        predicted_rps=figures.rate_per_s,
        before_kept=kept_share(before, float(expected_rps)),
        before_predicted_rps=float(expected_rps),
    )
