"""The life of a plan: the service is looked at, planned for when that is due, and held to its plan.

No Ray here: the service is behind `Fleet`, time is passed in. One thing happens at a time.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from deployments.controller.fleet import Fleet
from deployments.controller.history import History
from deployments.controller.knowledge import LEAST_PROBES, Knowledge, Outlook, worth
from deployments.controller.plan_executor import ChangeOver, PlanExecutor, Sleep, with_epoch
from deployments.controller.planning import Ground, OffLoop, Planning, Solve
from deployments.controller.settings import thresholds_of
from deployments.controller.thresholds import Thresholds
from deployments.controller.watch import (
    Look,
    MakeTuner,
    Missing,
    Tuning,
    Watch,
    rate_left,
    served,
    stragglers,
    survival_left,
    tuner_of,
)
from deployments.settings import ControlSettings
from earlyexit.clock import Clock
from earlyexit.errors import PlanError
from optimizer.live.stragglers import Straggler
from optimizer.live.trial import judge
from optimizer.placement import PlacedPlan
from optimizer.plan import PolicySpec
from optimizer.plan_file import ModelShape, parse_plan
from optimizer.problem import PlanProblem

SETTLE_LOOKS = 4
"""A new plan is not judged, and a new forecast not called wrong, before so many looks."""


class ReplanTriggers:
    """Holds what was planned by against what is seen."""

    def __init__(
        self, settings: ControlSettings, knowledge: Knowledge, keeper: PlanExecutor, planning: Planning
    ) -> None:
        self._settings = settings
        self._knowledge = knowledge
        self._keeper = keeper
        self._planning = planning

    def reason(self, seen: Look) -> str | None:
        """Why it is to be planned now; None: it is not."""
        ground = self._planning.ground
        if ground is None and self._keeper.is_restored:
            return "restart"  # without a forecast nothing could leave it
        if ground is not None and ground.outlook.at_s <= self._knowledge.changed_s <= seen.at_s:
            return self._after_change(seen)
        if self.is_period_over(seen):
            return "period"
        settled_s = self._keeper.standing.planned_s + SETTLE_LOOKS * self._settings.watch_s
        if ground is None or seen.at_s < settled_s:
            return None
        if self._reacts(ground, seen):
            changed = self._knowledge.changed_s >= ground.outlook.at_s  # or only the rate did
            return self._after_change(seen) if changed else "reaction"
        return "first probes" if self._learnt(ground.outlook, seen) else None

    def _after_change(self, seen: Look) -> str | None:
        """Without probes since the stream changed it could only be planned by what was expected before anything."""
        enough = self._num_probes(seen) >= LEAST_PROBES
        return "reaction" if enough or seen.at_s >= self._knowledge.changed_s + self._settings.period_s else None

    def is_period_over(self, seen: Look) -> bool:
        """Periods are the windows of forecasts: it is planned when one is whole, or when the clock was set back."""
        period_s = self._settings.period_s
        return seen.at_s // period_s != self._keeper.standing.planned_s // period_s

    def _reacts(self, ground: Ground, seen: Look) -> bool:
        """Where the stream left its forecast, what was before is left out from now on."""
        standing = self._keeper.standing
        counted = self._knowledge.counts(max(standing.followed_s, ground.outlook.at_s))
        looks, plan = self._settings.period_s / self._settings.watch_s, standing.placed.plan
        exits = None
        if ground.outlook.num_probes:  # without any nothing could be learnt of it
            exits = survival_left(ground.outlook, plan, counted, ground.reach, looks=looks)
        rate = rate_left(ground.outlook, counted, standing.sized_for_rps, looks=looks)
        if exits is None and rate is None:
            return False
        if exits is not None:
            self._keeper.say("reaction", exits.words)
            self._knowledge.changed_s = exits.since_s
        if rate is not None:
            self._keeper.say("reaction", rate.words)
            self._knowledge.rate_changed_s = rate.since_s
        self._keeper.become(changed_s=self._knowledge.changed_s, rate_changed_s=self._knowledge.rate_changed_s)
        return True

    def _learnt(self, outlook: Outlook, seen: Look) -> bool:
        """After a start, or a change of the stream, its first probes are now enough to plan by."""
        if outlook.num_probes >= LEAST_PROBES:
            return False
        return self._num_probes(seen) >= LEAST_PROBES

    def _num_probes(self, seen: Look) -> int:
        """What was seen since the stream changed is worth as many."""
        return worth(self._knowledge.observed(self._knowledge.changed_s, seen.at_s))


logger = logging.getLogger(f"ray.serve.{__name__}")

REST_PERIODS = 5
"""A straggler gets no work for so long; then it is tried again."""
BLAME_PERIODS = 5
"""A plan that was rolled back is not taken again for so long, while the problem stays what it was."""


class ControlLoop:
    """One application's; `run` never ends."""

    def __init__(
        self,
        fleet: Fleet,
        history: History,
        settings: ControlSettings,
        *,
        problem: PlanProblem,
        policy: PolicySpec,
        slots: Mapping[str, int],
        first: PlacedPlan,
        clock: Clock,
        sleep: Sleep,
        solve: Solve,
        off_loop: OffLoop = asyncio.to_thread,
        make_tuner: MakeTuner | None = None,
    ) -> None:
        """`clock` is the wall's: what is remembered outlives the process. `first`: the plan to begin with.

        `make_tuner`: None for the one that the settings name.
        """
        self._settings = settings
        self._history = history
        self._clock = clock
        self._sleep = sleep
        self._lock = asyncio.Lock()
        self.knowledge = Knowledge(
            problem,
            thresholds_of(policy, problem),
            period_s=settings.period_s,
            coverage=settings.coverage,
            since_s=clock.now_s(),
        )
        self.tuning = Tuning(make_tuner or tuner_of(settings, problem), self._complain, problem)
        self.watch = Watch(fleet, history, self.knowledge, clock, self._complain, self.tuning)
        meanwhile = self._meanwhile if self.tuning.is_on else None
        change = ChangeOver(fleet, clock, sleep, self.watch.ingress_reports, settings.starts_at_once, meanwhile)
        self.keeper = PlanExecutor(
            fleet, history, change, clock, settings, problem=problem, policy=policy, slots=slots, first=first
        )
        self.planning = Planning(settings, self.knowledge, self.keeper, clock, solve, off_loop)
        self.thresholds = Thresholds(self.tuning, self.keeper, self.planning, clock)
        self.occasions = ReplanTriggers(settings, self.knowledge, self.keeper, self.planning)
        self._missing = Missing(self.keeper.devices)
        self.seen: Look | None = None
        """The last look; None before the first."""
        self._counts: Mapping[str, int] | None = None
        """Accelerators at the first look."""

    async def run(self) -> None:
        """Look, decide and act, for ever."""
        self.restore()
        while True:
            await self.tick()
            await self._sleep(self._settings.watch_s)

    def restore(self) -> None:
        """Take up where a controller before this one was ended."""
        self.keeper.restore()
        self.knowledge.decide_by(self.keeper.standing.thresholds)
        self.thresholds.tell()
        self.knowledge.changed_s = self.keeper.standing.changed_s
        self.knowledge.rate_changed_s = self.keeper.standing.rate_changed_s
        self.watch.restore()
        self._history.commit()

    async def tick(self) -> None:
        """One look, and what it calls for. What fails now is said, and tried again at the next."""
        async with self._lock:
            try:
                await self._tick()
                self.thresholds.tell()
                self._history.forget(self._clock.now_s())
                self._history.commit()
            except Exception as error:  # a process that dies at this moment must not end planning
                logger.warning("a look failed", exc_info=error)
                self._say_failed(error)

    async def replan(self, reason: str = "asked") -> dict[str, Any]:
        """Plan now, after whatever is under way; ends a hold."""
        async with self._lock:
            self.keeper.become(hold=False)
            seen = await self._look()
            await self.thresholds.sound_alarm(seen)
            verdict = await self.planning.replan(reason, seen)
            self.thresholds.tell()
            self._history.commit()
            return verdict

    async def apply(self, document: Mapping[str, Any], *, hold: bool = False) -> dict[str, Any]:
        """Put somebody's own plan in force; with `hold` nothing else is, until a replan is asked for.

        Raises PlanError for a plan that does not fit the model, the slots or the accelerators.
        """
        problem, networks = self.knowledge.problem, self.keeper.placed.plan.networks
        shape = ModelShape(num_blocks=problem.num_blocks, ramps=problem.ramps, networks=networks)
        plan = self.planning.completed(parse_plan(dict(document), shape))
        async with self._lock:
            seen = await self._look()
            await self.thresholds.sound_alarm(seen)  # else it is forgotten with the controller's own thresholds
            placed = self.planning.place(plan, seen)
            counts = self.keeper.counts(seen.capacity)
            if not self.keeper.has_room(placed, counts):
                raise PlanError(f"the plan needs {dict(placed.occupied)}, there are {counts}")
            self.keeper.become(hold=hold)
            verdict = await self.planning.put_in_force(placed, "asked", "somebody's own plan", seen)
            self.thresholds.tell()
            self._history.commit()
            return verdict

    def _say_failed(self, failure: Exception) -> None:
        """The failure may be the memory's own: a disk that is full must not end the loop."""
        try:
            self.keeper.say("error", f"{type(failure).__name__}: {failure}")
            self._history.forget(self._clock.now_s())
            self._history.commit()
        except sqlite3.Error as error:
            logger.warning("nothing can be remembered", exc_info=error)

    async def _tick(self) -> None:
        seen = await self._look()
        if await self._retuned(seen) or await self._cope(seen) or await self._gave_up(seen):
            return
        await self.keeper.settle(seen)
        if self.keeper.standing.hold or await self._rolled_back(seen) or await self._rested(seen):
            return
        reason = self.occasions.reason(seen)
        if reason is not None:
            await self._replan(reason, seen)

    async def _look(self) -> Look:
        with self.planning.timed("collect"):
            seen = await self.watch.look()
        standing = self.keeper.standing
        served = standing.placed if standing.followed == standing.placed and standing.suspended is None else None
        left = self._missing.left(seen.capacity, seen.running, served, seen.at_s)
        self.seen = replace(seen, capacity=left)
        self.keeper.catch_up(self.seen)
        return self.seen

    async def _replan(self, reason: str, seen: Look) -> None:
        """Replicas are held against each other from here on."""
        await self.planning.replan(reason, seen)
        self.watch.mark()

    async def _retuned(self, seen: Look) -> bool:
        """Whether thresholds became others; where the plan is no longer the one for them, another is looked for."""
        epoch = self.keeper.placed.epoch
        reason = await self.thresholds.follow_tuning(seen)
        if reason is not None and not self.keeper.standing.hold:
            await self._replan(reason, seen)
        await self.planning.keep_up(seen)
        return self.keeper.placed.epoch != epoch

    async def _meanwhile(self) -> None:
        """While replicas are waited for."""
        self.thresholds.tell()
        if self._clock.now_s() >= self.watch.looked_s + self._settings.watch_s:
            await self.watch.ingress_reports()
        if self.seen is not None:
            await self.thresholds.sound_alarm(self.seen)

    def _complain(self, words: str) -> None:
        self.keeper.say("error", words)

    async def _cope(self, seen: Look) -> bool:
        """Accelerators came or went: with fewer than the plan has another is needed, or nothing can be served."""
        counts = self.keeper.counts(seen.capacity)
        ground, suspended = self.planning.ground, self.keeper.standing.suspended
        self._counts = self._counts or counts
        before = self._counts if ground is None else ground.counts
        as_before = ground is not None and counts == before and not self.occasions.is_period_over(seen)
        if suspended is not None and as_before:
            await self.keeper.suspend(suspended)
            return True
        if suspended is not None:
            reason = "recovery"
        elif not self.keeper.has_room(self.keeper.placed, counts):
            reason = "capacity lost"
            self.keeper.become(hold=False)
            await self._go_on_with_less(seen, counts)
        elif counts != before and not self.keeper.standing.hold:
            reason = "capacity changed"
        else:
            return False
        self.keeper.say("capacity", f"{reason}: {dict(before)} before, {counts} now")
        await self._replan(reason, seen)
        return True

    async def _go_on_with_less(self, seen: Look, counts: Mapping[str, int]) -> None:
        """The same splits on what still runs, where every stage does: nothing has to start or to move.

        Another plan is then weighed against that.
        """
        standing = self.keeper.standing
        placed = standing.placed
        resting = Counter(placed.avoided.values())
        left = {slot: seen.running.get(slot, 0) - resting[slot] for slot in placed.slots}
        if standing.followed != placed or min(left.values()) < 1:
            return
        stages = tuple(
            replace(stage, replicas=min(stage.replicas, left[slot])) for slot, stage in placed.stage_of.items()
        )
        plan = replace(placed.plan, stages=stages, predicted={}, epoch=self.keeper.next_epoch(seen))
        less = replace(placed, plan=self.planning.completed(plan))
        if self.keeper.has_room(less, counts):
            await self.planning.go_on_with(less, "capacity lost", "the same splits on what still runs", seen)

    async def _rolled_back(self, seen: Look) -> bool:
        standing = self.keeper.standing
        since = served(self.knowledge.counts(standing.followed_s))
        if standing.trial is None or since is None or standing.followed != standing.placed:
            return False
        judgement = judge(
            standing.trial,
            since,
            margin=self._settings.rollback_margin,
            settle_s=SETTLE_LOOKS * self._settings.watch_s,
            patience_s=self._settings.period_s,
        )
        if judgement.outcome == "wait":
            return False
        self.keeper.say("trial", judgement.words)
        before = standing.previous
        self.keeper.become(trial=None, previous=None)
        if judgement.outcome == "keep" or before is None:
            return False
        self._blame()
        placed = self.planning.place(self.keeper.decided(before.plan), seen)
        if not self.keeper.has_room(placed, self.keeper.counts(seen.capacity)):
            await self._replan("roll back", seen)
        else:
            await self.planning.go_on_with(placed, "roll back", judgement.words, seen)
        return True

    async def _gave_up(self, seen: Look) -> bool:
        """Whether a plan that no change gets to was left for the one that is still followed."""
        standing, before = self.keeper.standing, self.keeper.to_go_back_to(seen)
        if before is None:
            return False
        before = replace(before, plan=self.keeper.decided(before.plan), avoided=standing.resting.avoided)
        placed = with_epoch(before, self.keeper.next_epoch(seen))
        if not self.keeper.has_room(placed, self.keeper.counts(seen.capacity)):
            return False
        self._blame()
        words = f"gives up plan {standing.placed.epoch}: the change to it broke off again and again"
        self.keeper.say("error", words)
        await self.planning.go_on_with(placed, "roll back", words, seen)
        return True

    def _blame(self) -> None:
        """Have the plan in force not be chosen again for a while."""
        standing, planning = self.keeper.standing, self.planning
        stages = standing.placed.plan.planned_stages
        blamed = standing.blamed.add(stages, planning.problem, period=planning.period, periods=BLAME_PERIODS)
        self.keeper.become(blamed=blamed)

    async def _rested(self, seen: Look) -> bool:
        """Whether replicas were found slow, and get no work from now on."""
        standing = self.keeper.standing
        slow = stragglers(
            self.planning.problem,
            standing.placed.plan,
            seen.replicas,
            self.watch.replicas,
            ratio=self._settings.straggler_ratio,
            resting=standing.resting.avoided,
        )
        if not slow:
            return False
        for each in slow:
            self.keeper.say("straggler", each.words)
        self.keeper.become(resting=standing.resting.add(slow, period=self.planning.period, periods=REST_PERIODS))
        placed = self._without(slow, seen)
        if placed is None:
            await self._replan("straggler", seen)
        else:
            await self.planning.go_on_with(placed, "straggler", "; ".join(each.words for each in slow), seen)
        return True

    def _without(self, slow: tuple[Straggler, ...], seen: Look) -> PlacedPlan | None:
        """The plan in force with new replicas for slow ones, where accelerators are free, else with fewer.

        None where a stage would have none.
        """
        standing = self.keeper.standing
        counts = self.keeper.counts(seen.capacity)
        plan = replace(standing.placed.plan, epoch=self.keeper.next_epoch(seen))
        placed = replace(standing.placed, plan=plan, avoided=standing.resting.avoided)
        for each in slow:
            if self.keeper.has_room(placed, counts):
                break
            stage = placed.stage_of.get(each.slot)
            if stage is None or stage.replicas == 1:
                return None
            stages = tuple(replace(one, replicas=one.replicas - (one is stage)) for one in placed.plan.stages)
            placed = replace(placed, plan=self.planning.completed(replace(placed.plan, stages=stages, predicted={})))
        return placed if self.keeper.has_room(placed, counts) else None
