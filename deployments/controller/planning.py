"""One planning: what is expected, the best plan for it, whether it is worth the change, and the change."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from deployments.controller.intake import total
from deployments.controller.knowledge import Knowledge, Outlook
from deployments.controller.plan_executor import PlanExecutor, predicted_rps
from deployments.controller.watch import RATE_LOOKS, Look, served
from deployments.settings import ControlSettings
from earlyexit.clock import Clock
from earlyexit.errors import PlanError
from optimizer.decision import Decision, NoPlan, Planned, Strategy, gap_between
from optimizer.evaluate import Evaluation, evaluate, promised, sought, violations
from optimizer.live.blame import Blamed
from optimizer.live.hysteresis import Weighed, weigh
from optimizer.live.slots import num_started, place
from optimizer.live.stragglers import Resting
from optimizer.live.trial import Trial
from optimizer.placement import PlacedPlan
from optimizer.plan import Plan, Stage
from optimizer.problem import PlanProblem
from optimizer.reach import Reach
from optimizer.rescore import joint_reach, rechosen, rescore

Solve = Callable[[PlanProblem, Strategy], Awaitable[Decision]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The best plan found."""

    problem: PlanProblem
    """That it is the answer to."""
    planned: Planned
    reach: Reach | None
    """Of joint exit records; None where there were too few."""

    @property
    def figures(self) -> Evaluation:
        """What it will do, by all that was seen."""
        return evaluate(self.problem, self.planned.stages, self.reach)


async def propose(
    questions: Sequence[PlanProblem],
    solve: Solve,
    strategy: Strategy,
    *,
    slots: Mapping[str, int],
    blamed: Blamed,
    reach: Reach | None,
) -> Proposal | NoPlan:
    """Answer the first question that has an answer; what the first said where none has."""
    refusals: list[NoPlan] = []
    for problem in questions:
        found = await _solved(problem, solve, strategy, slots, blamed)
        if isinstance(found, NoPlan):
            refusals.append(found)
            continue
        if reach is not None:
            found = rechosen(problem, found, rescore(problem, found, reach))
        return Proposal(problem=problem, planned=found, reach=reach)
    return refusals[0]


async def _solved(
    problem: PlanProblem, solve: Solve, strategy: Strategy, slots: Mapping[str, int], blamed: Blamed
) -> Decision:
    """The planner knows nothing of slots and blame: its other good plans are tried, then those of one stage."""
    decision = await solve(problem, strategy)
    if isinstance(decision, NoPlan):
        return decision
    allowed = _allowed(problem, decision, slots, blamed)
    if allowed is not None:
        return allowed
    serial = await solve(problem, "serial")
    if isinstance(serial, NoPlan):
        return serial
    return _allowed(problem, serial, slots, blamed) or NoPlan(strategy=strategy, binding="devices")


def _allowed(problem: PlanProblem, planned: Planned, slots: Mapping[str, int], blamed: Blamed) -> Planned | None:
    stages = [
        each
        for each in dict.fromkeys((planned.stages, *planned.candidates))
        if _fits(each, slots) and not blamed.holds(each, problem)
    ]
    kept = [each for each in stages if each == planned.stages or not violations(problem, each, evaluate(problem, each))]
    if not kept:
        return None
    if kept[0] == planned.stages:
        return replace(planned, candidates=tuple(kept[1:]))
    figures = evaluate(problem, kept[0])
    gap = gap_between(sought(problem, figures), planned.bound)
    return replace(planned, stages=kept[0], figures=figures, gap=gap, candidates=tuple(kept[1:]))


def _fits(stages: Sequence[Stage], slots: Mapping[str, int]) -> bool:
    needed = Counter(stage.device for stage in stages)
    return all(count <= slots.get(device, 0) for device, count in needed.items())


OffLoop = Callable[[Callable[[float], Outlook], float], Awaitable[Outlook]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What the last planning stood on."""

    outlook: Outlook
    reach: Reach | None
    problem: PlanProblem
    counts: Mapping[str, int]
    """Accelerators that were there."""
    thresholds: Mapping[int, float]
    """That the outlook is for."""


class Planning:
    """Plans by what is known, and has the keeper bring about what is worth it."""

    def __init__(
        self,
        settings: ControlSettings,
        knowledge: Knowledge,
        keeper: PlanExecutor,
        clock: Clock,
        solve: Solve,
        off_loop: OffLoop = asyncio.to_thread,
    ) -> None:
        """`solve` and `off_loop` spare the event loop what takes long."""
        self._settings = settings
        self._knowledge = knowledge
        self._keeper = keeper
        self._clock = clock
        self._solve = solve
        self._off_loop = off_loop
        self.ground: Ground | None = None
        """None before the first planning of this process."""
        self.phases_s: dict[str, float] = {}
        """How long each part of the last planning took."""

    async def replan(self, reason: str, seen: Look) -> dict[str, Any]:
        """Plan, and change if it is worth it."""
        with self.timed("forecast"):
            outlook = await self._off_loop(self._knowledge.outlook, seen.at_s)
            reach = self._reach(seen.at_s)
        self._let_work_again(seen)
        counts = self._keeper.counts(seen.capacity)
        with self.timed("solve"):
            found = await self._propose(outlook, reach, counts)
        problem = found.problem if isinstance(found, Proposal) else self._knowledge.questions(outlook, counts)[0]
        self.ground = Ground(
            outlook=outlook, reach=reach, problem=problem, counts=counts, thresholds=self._knowledge.thresholds
        )
        self._keeper.become(planned_s=seen.at_s)
        if isinstance(found, NoPlan):
            return await self._without_plan(found, counts, reason, seen)
        return await self._weigh(found, reason, seen)

    def decide_by(self, thresholds: Mapping[int, float], at_s: float) -> None:
        """Have plans be weighed by other thresholds at once, on what was seen; `keep_up` makes the forecasts anew."""
        self._knowledge.decide_by(thresholds)
        if self.ground is not None:
            self.ground = replace(self.ground, reach=self._reach(at_s))

    async def keep_up(self, seen: Look) -> None:
        """Forecasts of other thresholds than the present ones would call every exit a drift: make them anew."""
        ground = self.ground
        if ground is None or ground.thresholds == self._knowledge.thresholds:
            return
        outlook = await self._off_loop(self._knowledge.outlook, seen.at_s)
        self.ground = replace(
            ground,
            outlook=outlook,
            reach=self._reach(seen.at_s),
            problem=outlook.expected(ground.problem),
            thresholds=self._knowledge.thresholds,
        )

    def is_overrun(self) -> bool:
        """Whether more inputs arrive now than the plan in force does per second by the present thresholds."""
        now_s = self._clock.now_s()
        recent = total(self._knowledge.counts(self._keeper.standing.planned_s)[-RATE_LOOKS:])
        if recent is None or recent.seconds <= 0:
            return False
        does_rps = evaluate(self.problem, self._keeper.placed.plan.stages, self._reach(now_s)).rate_per_s
        return recent.arrived / recent.seconds > does_rps

    async def put_in_force(
        self,
        placed: PlacedPlan,
        reason: str,
        words: str,
        seen: Look,
        *,
        sized_for_rps: float | None = None,
        trial: Trial | None = None,
    ) -> dict[str, Any]:
        """Change over to a plan, whatever was weighed."""
        counted = self._knowledge.counts(self._keeper.standing.followed_s)
        self._keeper.put_in_force(placed, reason, words, counted, sized_for_rps=sized_for_rps, trial=trial)
        with self.timed("apply"):
            await self._keeper.settle(seen)
        return {"epoch": placed.epoch, "changed": True, "reason": reason, "words": words}

    async def go_on_with(self, placed: PlacedPlan, reason: str, words: str, seen: Look) -> dict[str, Any]:
        """Change over to a plan for the same rate as the one in force."""
        sized_for_rps = self._keeper.standing.sized_for_rps
        return await self.put_in_force(placed, reason, words, seen, sized_for_rps=sized_for_rps)

    def place(self, plan: Plan, seen: Look) -> PlacedPlan:
        """The plan as the next one, in the slots that start the fewest replicas."""
        standing = self._keeper.standing
        later = replace(plan, epoch=self._keeper.next_epoch(seen))
        return place(later, self._keeper.slots, standing.placed, standing.resting.avoided)

    def completed(self, plan: Plan) -> Plan:
        """Somebody's plan with what it does not say: the policy, by which probes are seen, and what it will do."""
        plan = replace(plan, policy=plan.policy or self._keeper.policy)
        if self.ground is None or plan.predicted:
            return plan
        problem = self.ground.problem
        try:
            return replace(plan, predicted=promised(problem, evaluate(problem, plan.stages, self.ground.reach)))
        except PlanError:  # a batch that was not measured may be tried all the same
            return plan

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Measure a part of a planning."""
        began_s = self._clock.now_s()
        yield
        self.phases_s[phase] = self._clock.now_s() - began_s

    @property
    def problem(self) -> PlanProblem:
        """What was last planned for; before that, the settings' own."""
        return self._knowledge.problem if self.ground is None else self.ground.problem

    @property
    def thresholds(self) -> Mapping[int, float]:
        """That plans are weighed by."""
        return self._knowledge.thresholds

    @property
    def period(self) -> int:
        """Counts periods since the epoch of the clock."""
        return int(self._clock.now_s() // self._settings.period_s)

    def _reach(self, at_s: float) -> Reach | None:
        """Of recent probes, by the present thresholds; None for too few."""
        records = self._knowledge.records(at_s)
        if records is not None:
            return joint_reach(records, self._knowledge.thresholds)
        if self._knowledge.is_calibrated:
            return None
        stay_N = self._knowledge.expected_survival_N
        return lambda _: stay_N

    def _let_work_again(self, seen: Look) -> None:
        resting = self._keeper.standing.resting.at(self.period)
        reported = {report.replica for report in seen.replicas}
        heard_of = {report.slot for report in seen.replicas}
        silent = {rest.replica for rest in resting.rests if rest.slot not in heard_of and seen.running.get(rest.slot)}
        resting = resting.among(reported | silent)
        self._keeper.become(resting=resting, blamed=self._keeper.standing.blamed.at(self.period))

    async def _propose(self, outlook: Outlook, reach: Reach | None, counts: Mapping[str, int]) -> Proposal | NoPlan:
        """A slow replica is better than none: where stragglers are missed, they work again."""
        resting = self._keeper.standing.resting
        kept = resting.by_device
        found = await self._asked(
            outlook, reach, {device: max(0, count - kept.get(device, 0)) for device, count in counts.items()}
        )
        if isinstance(found, Proposal) or not resting.rests:
            return found
        self._keeper.become(resting=Resting())
        return await self._asked(outlook, reach, counts)

    async def _asked(self, outlook: Outlook, reach: Reach | None, counts: Mapping[str, int]) -> Proposal | NoPlan:
        slots = self._keeper.slots
        questions = self._knowledge.questions(
            outlook, {device: count for device, count in counts.items() if slots.get(device)}
        )
        blamed = self._keeper.standing.blamed
        return await propose(questions, self._solve, self._settings.strategy, slots=slots, blamed=blamed, reach=reach)

    async def _without_plan(self, none: NoPlan, counts: Mapping[str, int], reason: str, seen: Look) -> dict[str, Any]:
        """The plan there is stays, or comes back, if its accelerators are there: late answers are better than none."""
        words = f"no plan meets the problem on {dict(counts)}: what is missing is {none.binding}"
        placed = self._keeper.placed
        if not self._keeper.has_room(placed, counts):
            await self._keeper.suspend(words)
        elif self._keeper.standing.suspended is not None:
            return await self.put_in_force(self.place(placed.plan, seen), reason, words, seen)
        else:
            self._keeper.say("no plan", f"{words}; keeps plan {placed.epoch}")
        return {"epoch": placed.epoch, "changed": False, "reason": reason, "words": words}

    async def _weigh(self, found: Proposal, reason: str, seen: Look) -> dict[str, Any]:
        standing = self._keeper.standing
        placed = self.place(self._plan_of(found), seen)
        verdict = self._verdict(found, placed, seen)
        if verdict.change:
            trial = self._trial(found, placed) if self._stands(seen) else None
            sized_for_rps = found.problem.asked_per_s
            return await self.put_in_force(
                placed, reason, verdict.words, seen, sized_for_rps=sized_for_rps, trial=trial
            )
        if standing.resting.avoided != standing.placed.avoided:
            same = self.place(standing.placed.plan, seen)
            return await self.go_on_with(same, "straggler", "other replicas rest now", seen)
        if not self._keeper.is_tuned:  # somebody's own thresholds were for their own plan only
            same = self.place(replace(standing.placed.plan, policy=self._keeper.policy), seen)
            return await self.go_on_with(same, reason, "the controller's own thresholds again", seen)
        self._keeper.say("keep", f"keeps plan {standing.placed.epoch} ({reason}): {verdict.words}")
        if not verdict.same:
            self._keeper.turned_down(placed, reason, verdict.words)
        return {"epoch": standing.placed.epoch, "changed": False, "reason": reason, "words": verdict.words}

    def _verdict(self, found: Proposal, placed: PlacedPlan, seen: Look) -> Weighed:
        standing = self._keeper.standing
        return weigh(
            found.problem,
            standing.placed.plan.planned_stages if self._stands(seen) else None,
            found.planned,
            moved=num_started(standing.placed, placed),
            start_s=self._settings.start_s,
            period_s=self._settings.period_s,
            least_gain=self._settings.least_gain,
            reach=found.reach,
        )

    def _stands(self, seen: Look) -> bool:
        """Whether the plan in force is served by, and could go on."""
        standing = self._keeper.standing
        return standing.suspended is None and self._keeper.has_room(standing.placed, self._keeper.counts(seen.capacity))

    def _plan_of(self, found: Proposal) -> Plan:
        """With the policy even where no ramp is active: probes are seen by it."""
        before = self._keeper.placed.plan  # the planner chooses nothing of what is taken over from it
        return replace(
            before,
            stages=found.planned.stages,
            shares=found.figures.shares,
            policy=self._keeper.policy,
            predicted=promised(found.problem, found.figures),
        ).with_overlap(before.overlap_below)

    def _trial(self, found: Proposal, placed: PlacedPlan) -> Trial | None:
        """None where the plan before was never followed or measured, or nobody knows what it should have done."""
        standing = self._keeper.standing
        since_s = max(standing.followed_s, self._clock.now_s() - self._settings.period_s)
        before = served(self._knowledge.counts(since_s))
        expected_rps = predicted_rps(standing.placed.plan)
        if standing.followed != standing.placed or before is None or before.arrived == 0 or expected_rps is None:
            return None
        return Trial(
            epoch=placed.epoch,
            predicted_rps=found.figures.rate_per_s,
            before=before,
            before_predicted_rps=expected_rps,
        )
