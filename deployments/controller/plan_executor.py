"""The plan in force: brought about, kept in place, and remembered, so that a controller that starts anew goes on."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

from deployments.controller.fleet import Fleet
from deployments.controller.history import (
    History,
    PlanRow,
    Standing,
    StandingChanges,
    parse_standing,
    standing_document,
)
from deployments.controller.intake import Interval
from deployments.controller.settings import thresholds_at, thresholds_of, tuned_by
from deployments.controller.watch import Look, served, used
from deployments.settings import ControlSettings
from deployments.slots import slot_devices
from deployments.wire.messages import Assignment, IngressReport
from earlyexit.clock import Clock
from earlyexit.errors import OfframpError
from optimizer.live.changeover import Await, ChangeStep, Drain, Prepare, Scale, Switch, steps
from optimizer.live.trial import Trial
from optimizer.placement import PlacedPlan, placed_document
from optimizer.plan import Plan, PolicySpec
from optimizer.plan_file import policy_document
from optimizer.problem import PlanProblem


def plan_words(placed: PlacedPlan) -> str:
    """Such as `3 x V100 blocks 0-5 | 1 x P100 blocks 6-11, 812/s in 41 ms predicted`."""
    stages = " | ".join(
        f"{stage.replicas} x {stage.device} blocks {' and '.join(f'{first}-{end - 1}' for first, end in stage.ranges)}"
        for stage in placed.plan.stages
    )
    avoided = f", {len(placed.avoided)} replicas rest" if placed.avoided else ""
    return f"{stages}{_predicted_words(placed.plan.predicted)}{avoided}"


def predicted_rps(plan: Plan) -> float | None:
    """None for a plan that nobody predicted a rate of; what a plan carries is anybody's."""
    rate = plan.predicted.get("rate_per_s")
    return float(rate) if isinstance(rate, int | float) and rate > 0 else None


def with_epoch(placed: PlacedPlan, epoch: int) -> PlacedPlan:
    """The same plan as a later one."""
    return replace(placed, plan=replace(placed.plan, epoch=epoch))


def is_only_decided_otherwise(before: PlacedPlan, after: PlacedPlan) -> bool:
    """Whether two plans differ in what lets inputs leave, and in nothing that replicas would have to change for."""
    if before.plan.policy == after.plan.policy:
        return False
    here, there = ((each.slots, each.avoided, each.plan.stages, each.plan.dispatch) for each in (before, after))
    return here == there


def _predicted_words(figures: Mapping[str, Any]) -> str:
    rate, latency_s = figures.get("rate_per_s"), figures.get("latency_s")
    if not isinstance(rate, int | float) or not isinstance(latency_s, int | float):
        return ""
    return f", {rate:.4g}/s in {latency_s * 1e3:.3g} ms predicted"


START_S = 120.0
"""For a replica to load its model and warm up; after that, something else is wrong."""
DRAIN_S = 60.0
"""For the inputs of the plan before: no piece is lost if they take longer, so the change goes on."""
LOOK_S = 0.25

Sleep = Callable[[float], Awaitable[None]]
Reports = Callable[[], Awaitable[Sequence[IngressReport]]]
Meanwhile = Callable[[], Awaitable[None]]


class ChangeOver:
    """What leads a fleet from plan to plan."""

    def __init__(
        self,
        fleet: Fleet,
        clock: Clock,
        sleep: Sleep,
        reports: Reports,
        starts_at_once: int | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> None:
        """`reports` asks the ingresses, and keeps the probes that they hand over; None starts all replicas at once.

        `meanwhile`: what must not wait until a change is through, asked at every look.
        """
        self._fleet = fleet
        self._clock = clock
        self._sleep = sleep
        self._reports = reports
        self._starts_at_once = starts_at_once
        self._meanwhile = meanwhile
        self.told: dict[str, int] = {}
        """Replicas that slots were asked for, by this process."""
        self.late = 0
        """Times in a row that replicas did not start in time."""

    async def carry_out(
        self, steps: Sequence[ChangeStep], after: Callable[[], PlacedPlan], switched: Callable[[], None]
    ) -> None:
        """Take the steps, and say when the ingresses follow.

        `after`: the plan that they lead to, asked when it is needed, for its thresholds may become others on the way.
        Raises OfframpError where replicas do not come in time, or their accelerators are gone; and whatever the fleet
        raises. Steps taken then stay taken: what is still missing can be worked out anew.
        """
        for step in steps:
            match step:
                case Scale(slot=slot, replicas=replicas):
                    await self._start_some(slot, replicas)
                    await self._scale(slot, replicas)
                case Await(replicas=replicas):
                    await self._await(replicas)
                case Prepare():
                    await self._fleet.prepare(after())
                case Switch():
                    await self._fleet.follow(after())
                    self.late = 0
                    switched()
                case Drain():
                    await self._drain(after().epoch)

    async def keep_in_place(self, placed: PlacedPlan, running: Mapping[str, int]) -> None:
        """Have every slot told again that does not run what it should, without waiting.

        A replica that died comes back by itself; a deployed configuration that was applied again does not.
        """
        for slot, replicas in running.items():
            needed = placed.occupied.get(slot, 0)
            if replicas != needed:
                await self._scale(slot, needed)

    def coming(self, running: Mapping[str, int]) -> dict[str, int]:
        """Replicas that run, or were asked for and may be starting."""
        return {slot: max(count, self.told.get(slot, 0)) for slot, count in running.items()}

    async def _scale(self, slot: str, replicas: int) -> None:
        await self._fleet.scale(slot, replicas)
        self.told[slot] = replicas

    async def _start_some(self, slot: str, replicas: int) -> None:
        """Of many new replicas so many after so many: one that starts takes a core, maybe one that others serve on."""
        if self._starts_at_once is not None:
            running = (await self._fleet.running()).get(slot, 0)
            for count in range(running + self._starts_at_once, replicas, self._starts_at_once):
                await self._await({slot: count})

    async def _await(self, replicas: Mapping[str, int]) -> None:
        for slot, count in replicas.items():  # a change that broke off may have told them otherwise
            if self.told.get(slot, 0) < count:
                await self._scale(slot, count)
        room = sum((await self._fleet.capacity()).values())
        until_s = self._clock.now_s() + START_S
        while missing := _missing(replicas, await self._fleet.running()):
            if self._clock.now_s() >= until_s:
                self.late += 1
                raise OfframpError(f"replicas did not start within {START_S:.0f} s: {missing}")
            if sum((await self._fleet.capacity()).values()) < room:
                raise OfframpError(f"accelerators were lost while replicas were to start: {missing}")
            await self._wait()

    async def _drain(self, epoch: int) -> None:
        """An ingress that does not report may still have inputs under way."""
        until_s = self._clock.now_s() + DRAIN_S
        while self._clock.now_s() < until_s:
            reports = await self._reports()
            if reports and all(report.oldest_epoch >= epoch for report in reports):
                return
            await self._wait()

    async def _wait(self) -> None:
        if self._meanwhile is not None:
            await self._meanwhile()
        await self._sleep(LOOK_S)


def _missing(replicas: Mapping[str, int], running: Mapping[str, int]) -> str:
    """Empty where nothing is."""
    return ", ".join(
        f"{slot} runs {running.get(slot, 0)} of {count}"
        for slot, count in replicas.items()
        if running.get(slot, 0) < count
    )


logger = logging.getLogger(f"ray.serve.{__name__}")

START_TRIES = 2
"""Times that a change waits for its replicas; after that, they will not come for this plan."""
TRIES = 10
"""Times that a change may break off for any reason: replicas, ingresses and Ray's dashboard that die are soon back."""


class PlanExecutor:
    """Holds where the controller stands; every change of it is on disk before anything acts on it."""

    def __init__(
        self,
        fleet: Fleet,
        history: History,
        change: ChangeOver,
        clock: Clock,
        settings: ControlSettings,
        *,
        problem: PlanProblem,
        policy: PolicySpec,
        slots: Mapping[str, int],
        first: PlacedPlan,
    ) -> None:
        now_s = clock.now_s()
        self._fleet = fleet
        self._history = history
        self._change = change
        self._clock = clock
        self._problem = problem
        self._policy = policy
        self._tuned_by = tuned_by(settings)
        self.slots = slots
        self.devices = slot_devices(dict(slots))
        """Accelerator type by slot."""
        self.standing = Standing(
            placed=first,
            reason="start",
            at_s=now_s,
            followed=first,
            followed_s=now_s,
            planned_s=now_s,
            changed_s=now_s,
            rate_changed_s=now_s,
        )
        self._broke_off = 0
        """Times that the change under way did."""
        self.is_restored = False
        """Whether another process made the plan: what it stood on is not remembered."""
        self.changes: Counter[str] = Counter()
        """Changes of the plan by this process, by reason."""

    @property
    def placed(self) -> PlacedPlan:
        return self.standing.placed

    @property
    def policy(self) -> PolicySpec:
        """The exit policy of plans to come: the settings', with the thresholds that tuning has found since."""
        thresholds = self.standing.thresholds
        return self._policy if thresholds is None else replace(self._policy, thresholds=thresholds)

    @property
    def is_tuned(self) -> bool:
        """Whether the plan in force goes by the controller's thresholds; somebody's own plan may have its own."""
        return self.goes_by_ours(self.placed.plan)

    def goes_by_ours(self, plan: Plan) -> bool:
        """Whether a plan goes by the controller's thresholds of now."""
        if plan.policy is None or plan.policy.name != self._policy.name:
            return plan.policy is None
        return thresholds_at(plan.policy, plan.ramps) == thresholds_at(self.policy, plan.ramps)

    def decided(self, plan: Plan) -> Plan:
        """A plan of before, by the thresholds of now."""
        foreign = plan.policy is not None and plan.policy.name != self._policy.name
        return plan if foreign or self.standing.thresholds is None else replace(plan, policy=self.policy)

    def decide_by(self, thresholds: Mapping[int, float]) -> None:
        """Go by these thresholds; it is remembered with the plan that does, never without."""
        self.standing = replace(self.standing, thresholds=dict(thresholds))

    def restore(self) -> None:
        """Take up what was remembered, unless the application has become another since."""
        document = self._history.get("standing")
        standing = None if document is None else self._parsed(document)
        if standing is None:
            self._remember(self.placed, "in force", "start", "the plan to begin with")
        else:
            self.standing = standing
            self.is_restored = True
            self.say("restart", f"takes up plan {standing.placed.epoch} again: {plan_words(standing.placed)}")
            self._check_thresholds()
        self._history.put("policy", _policy_document(self._policy))
        self._history.put("tuned by", self._tuned_by)
        self.become()

    def become(self, **changes: Unpack[StandingChanges]) -> None:
        """Stand otherwise, from now on and after a restart."""
        self.standing = replace(self.standing, **changes)
        self._history.put("standing", standing_document(self.standing))
        self._history.commit()

    def say(self, kind: str, words: str) -> None:
        """Log what happened, and remember it."""
        log = logger.warning if kind in {"error", "suspended"} else logger.info
        log("%s: %s", kind, words, extra={"kind": kind, "epoch": self.placed.epoch})
        self._history.add_event(self._clock.now_s(), kind, words)

    def counts(self, capacity: Mapping[str, int]) -> dict[str, int]:
        """Accelerators that may be used, those of stragglers too."""
        devices = self._problem.devices.items()
        return {device: min(supply.count, capacity.get(device, 0)) for device, supply in devices}

    def has_room(self, placed: PlacedPlan, counts: Mapping[str, int]) -> bool:
        """Whether a plan's accelerators are there."""
        return all(count <= counts.get(device, 0) for device, count in used(placed.occupied, self.devices).items())

    def to_go_back_to(self, seen: Look) -> PlacedPlan | None:
        """The plan that is still followed, where none gets to the one in force; None: no reason, or nothing there."""
        followed = self.standing.followed
        came = all(seen.running.get(slot, 0) >= replicas for slot, replicas in self.placed.occupied.items())
        late = self._change.late >= START_TRIES and not came
        if followed is None or not (late or self._broke_off >= TRIES):
            return None
        return None if followed.plan.stages == self.placed.plan.stages else followed

    def next_epoch(self, seen: Look) -> int:
        """Above all that anybody has seen."""
        return max([self.placed.epoch, *(report.epoch for report in seen.ingresses)]) + 1

    def put_in_force(
        self,
        placed: PlacedPlan,
        reason: str,
        words: str,
        counted: list[Interval],
        *,
        sized_for_rps: float | None,
        trial: Trial | None = None,
    ) -> None:
        """Have a plan be followed from the next `settle` on; `counted` is what happened under the one before."""
        before = self.placed
        measured = served(counted)
        if measured is not None and self.standing.followed == before:
            self._history.gained(
                before.epoch,
                {
                    "seconds": measured.seconds,
                    "offered_rps": measured.offered_rps,
                    "goodput_rps": measured.goodput_rps,
                    "dropped": measured.dropped,
                },
            )
        self._remember(placed, "in force", reason, words)
        self._change.late = self._broke_off = 0
        self.changes[reason] += 1
        self.become(
            placed=placed,
            reason=reason,
            at_s=self._clock.now_s(),
            sized_for_rps=sized_for_rps,
            trial=trial,
            previous=None if trial is None else before,
            suspended=None,
        )

    def assignment_of(self, slot: str) -> Assignment | None:
        """What a replica that starts in a slot shall do; None where no plan has a stage there."""
        for placed in (self.standing.followed, self.standing.placed):
            if placed is not None and slot in placed.stage_of:
                return Assignment.of(placed.plan, placed.stage_of[slot])
        return None

    def turned_down(self, placed: PlacedPlan, reason: str, words: str) -> None:
        """Remember a plan that was proposed and not taken."""
        self._remember(placed, "proposed", reason, words)

    def catch_up(self, seen: Look) -> None:
        """Where ingresses follow a later plan than is remembered, the plan in force becomes a later one still."""
        highest = max((report.epoch for report in seen.ingresses), default=0)
        if highest > self.placed.epoch:
            self.say("error", f"an ingress follows plan {highest}, which is not remembered")
            self.become(placed=with_epoch(self.placed, highest + 1), followed=None)

    async def settle(self, seen: Look) -> None:
        """Bring about whatever the plan in force still lacks; whoever was interrupted here goes on here."""
        placed, followed = self.placed, self.standing.followed
        if followed == placed:
            # A word of suspension that came late, from before this plan, would else hold for ever.
            if any(report.epoch < placed.epoch or report.suspended for report in seen.ingresses):
                await self._fleet.follow(placed)
            await self._change.keep_in_place(placed, seen.running)
            return
        if followed is not None and is_only_decided_otherwise(followed, placed):
            await self._fleet.decide(placed)
            self._switched()
            self._say_in_force()
            return
        if followed is not None and self.is_tuned:
            await self._catch_up_with_thresholds(followed, seen)
        coming = self._change.coming(seen.running)
        todo = steps(followed, self.placed, self.counts(seen.capacity), seen.running, coming)
        self._broke_off += 1
        await self._change.carry_out(todo, lambda: self.placed, self._switched)
        self._broke_off = 0
        self._say_in_force()

    async def _catch_up_with_thresholds(self, followed: PlacedPlan, seen: Look) -> None:
        """Others came during this change, and not everybody was told: an alarm must not wait for its end."""
        plan = self.decided(followed.plan)
        if self.goes_by_ours(followed.plan) or not self.goes_by_ours(plan):
            return
        epoch = self.next_epoch(seen)
        before = replace(followed, plan=replace(plan, predicted={}, epoch=epoch))
        words = "thresholds that not everybody was told of"
        await self._decide_meanwhile(before, with_epoch(self.placed, epoch + 1), self.standing.reason, words)

    async def decide_meanwhile(self, followed: PlacedPlan | None, placed: PlacedPlan, reason: str, words: str) -> None:
        """While a change is under way: have the plan that is followed be one of other thresholds, and the next too.

        None: no plan is known to be followed.
        """
        self.changes[reason] += 1
        await self._decide_meanwhile(followed, placed, reason, words)

    async def _decide_meanwhile(self, followed: PlacedPlan | None, placed: PlacedPlan, reason: str, words: str) -> None:
        self._remember(placed, "in force", self.standing.reason, f"goes on by other thresholds: {words}")
        self.become(placed=placed, trial=None, previous=None)  # the later epoch first: ingresses must not be ahead
        if followed is not None:
            self._remember(followed, "in force", reason, words)
            await self._fleet.decide(followed)
            self.become(followed=followed, followed_s=self._clock.now_s())

    async def suspend(self, reason: str) -> None:
        """Have everything refused until a plan is put in force."""
        if self.standing.suspended != reason:
            self.say("suspended", reason)
            self.become(suspended=reason, trial=None, previous=None, followed=None)
        await self._fleet.suspend(reason)

    def _say_in_force(self) -> None:
        self.say("plan", f"plan {self.placed.epoch} in force ({self.standing.reason}): {plan_words(self.placed)}")

    def _switched(self) -> None:
        self.become(followed=self.placed, followed_s=self._clock.now_s())

    def _remember(self, placed: PlacedPlan, outcome: str, reason: str, words: str) -> None:
        row = PlanRow(
            epoch=placed.epoch,
            at_s=self._clock.now_s(),
            outcome=outcome,
            reason=reason,
            words=words,
            placed=placed_document(placed),
        )
        self._history.add_plan(row)

    def _parsed(self, document: Mapping[str, Any]) -> Standing | None:
        """What was remembered; None, and a word of why, where it is of another application than this."""
        try:
            standing = parse_standing(document)
            self._check_fits(standing.placed)
        except (OfframpError, KeyError, TypeError) as error:
            self.say("error", f"the plan that was in force cannot be taken up again: {error}")
            return None
        return standing

    def _check_thresholds(self) -> None:
        """Where what was found is for other settings or ramps than there are now, go back to the settings' own."""
        found, was_tuned = self.standing.thresholds, self.is_tuned
        if found is None:
            return
        before = self._history.get("tuned by") or self._tuned_by
        others = [
            f"{name} {before.get(name)} then, {now} now"
            for name, now in self._tuned_by.items()
            if before.get(name) != now
        ]
        if set(found) != set(self._problem.ramps):
            others.append(f"for ramps {sorted(found)} then, {list(self._problem.ramps)} now")
        if not others:
            return
        self.say("thresholds", f"back to the settings'; what tuning found is void: {'; '.join(others)}")
        self.decide_by(thresholds_of(self._policy, self._problem))
        if was_tuned:
            placed = self.placed
            plan = replace(placed.plan, policy=self.policy, predicted={}, epoch=placed.epoch + 1)
            self._remember(replace(placed, plan=plan), "in force", self.standing.reason, "by the settings' thresholds")
            self.become(placed=replace(placed, plan=plan), trial=None, previous=None)

    def _check_fits(self, placed: PlacedPlan) -> None:
        policy = self._history.get("policy")
        if policy is not None and _given(policy) != _policy_document(self._policy):
            raise OfframpError("the exit policy is another now")
        ramps = sorted(set(placed.plan.ramps) - set(self._problem.ramps))
        if ramps:
            raise OfframpError(f"there are no ramps {ramps} any more")
        unknown = sorted(set(placed.occupied) - set(self.devices))
        if unknown:
            raise OfframpError(f"there are no slots {unknown} any more")
        if placed.plan.num_blocks != self._problem.num_blocks:
            raise OfframpError(f"it is of {placed.plan.num_blocks} blocks, not {self._problem.num_blocks}")
        if placed.plan.networks != self._problem.networks:
            ours, its = list(self._problem.networks), list(placed.plan.networks)
            raise OfframpError(f"its networks end at {its}, not at {ours}")


def _policy_document(policy: PolicySpec) -> dict[str, Any]:
    """As JSON gives it back, whose keys are all strings."""
    document: dict[str, Any] = json.loads(json.dumps(policy_document(policy)))
    return document


def _given(document: Mapping[str, Any]) -> dict[str, Any]:
    """Without the fields that its policy does not take, which histories used to hold as null."""
    return {name: value for name, value in document.items() if value is not None}
