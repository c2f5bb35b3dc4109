"""The control loop: looks at the service, and carries out what `deployments/controller/decide.py` decides.

One thing happens at a time. Every change of the state is on disk before anything acts on it, so that a controller that
takes over goes on where the one before it ended.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from deployments.controller import decide
from deployments.controller.decide import Ground, Proposal, PutInForce, Replan, Solve, View
from deployments.controller.intake import IngressIntake
from deployments.controller.observe import (
    Fleet,
    Forecast,
    Look,
    MakeTuner,
    MissingAccelerators,
    ObservedStream,
    Tuning,
    tuner_of,
)
from deployments.controller.remember import History, PlanRow, State, parse_state
from deployments.controller.settings import thresholds_of
from deployments.settings import ControlSettings
from deployments.wire.messages import IngressReport
from earlyexit.clock import Clock
from earlyexit.errors import DataError, OfframpError, PlanError
from optimizer.decision import NoPlan
from optimizer.live.changeover import Await, ChangeStep, Drain, Prepare, Scale, Switch, steps
from optimizer.placement import PlacedPlan, placed_document
from optimizer.plan_file import ModelShape, parse_plan, parse_policy, policy_document
from optimizer.problem import PlanProblem, Reach
from profiles.stream import Observations, empty

START_S = 120.0
"""For a replica to load its model and warm up; after that, something else is wrong."""
DRAIN_S = 60.0
"""For the inputs of the plan before. No piece is lost if they take longer, so the change goes on."""
LOOK_S = 0.25
"""Time between two looks at replicas that start, or inputs that drain."""

Sleep = Callable[[float], Awaitable[None]]
OffLoop = Callable[[Callable[[float], Forecast], float], Awaitable[Forecast]]

logger = logging.getLogger(f"ray.serve.{__name__}")


def _missing(replicas: Mapping[str, int], running: Mapping[str, int]) -> str:
    """Empty where nothing is missing."""
    return ", ".join(
        f"{device} runs {running.get(device, 0)} of {count}"
        for device, count in replicas.items()
        if running.get(device, 0) < count
    )


def plan_words(placed: PlacedPlan) -> str:
    """Returns words like `3 x V100 blocks 0-5 | 1 x P100 blocks 6-11, 812/s in 41 ms predicted`."""
    stages = " | ".join(
        f"{stage.replicas} x {stage.device} blocks {' and '.join(f'{first}-{end - 1}' for first, end in stage.ranges)}"
        for stage in placed.plan.stages
    )
    avoided = f", {len(placed.avoided)} replicas rest" if placed.avoided else ""
    rate, latency_s = (placed.plan.predicted.get(name) for name in ("rate_per_s", "latency_s"))
    if not isinstance(rate, int | float) or not isinstance(latency_s, int | float):
        return f"{stages}{avoided}"
    return f"{stages}, {rate:.4g}/s in {latency_s * 1e3:.3g} ms predicted{avoided}"


def _tuned_by(control: ControlSettings) -> dict[str, str | float | None]:
    """Returns the settings that thresholds which tuning finds depend on."""
    return {
        "tuning": control.tuning,
        "budget": control.accuracy_budget,
        "confidence": control.accuracy_confidence,
    }


class ControlLoop:
    """The controller of one application; `run` never ends."""

    def __init__(
        self,
        fleet: Fleet,
        history: History,
        settings: ControlSettings,
        *,
        first: PlacedPlan,
        clock: Clock,
        sleep: Sleep,
        solve: Solve,
        off_loop: OffLoop = asyncio.to_thread,
        make_tuner: MakeTuner | None = None,
    ) -> None:
        """`first`: the plan to begin with. `clock`: the wall's, because what is remembered outlives the process.

        `solve` and `off_loop` keep long work off the event loop. `make_tuner`: None for the tuner of the settings.
        """
        self._fleet = fleet
        self._history = history
        self._clock = clock
        self._sleep = sleep
        self._solve = solve
        self._off_loop = off_loop
        self._lock = asyncio.Lock()
        now_s = clock.now_s()
        self.settings = settings
        self.stream = ObservedStream(settings, now_s)
        self.tuning = Tuning(make_tuner or tuner_of(settings, settings.problem), settings.problem)
        self._view = View(
            settings=settings,
            now_s=now_s,
            state=State.first(first, now_s),
            seen=Look(at_s=now_s, ingresses=(), replicas=(), capacity={}, running={}),
            stream=self.stream,
            tuning=self.tuning,
        )
        self._ingresses = IngressIntake()
        self._asked_s = 0.0
        """When ingresses were last asked."""
        self._told: dict[str, int] = {}
        """Replicas that this process has asked accelerator types for."""
        self._missing = MissingAccelerators()
        self._is_mark_due = True
        """Whether the next look that sees replicas begins to compare them anew."""
        self._is_alarm_new = False
        """Whether an alarm has sounded since the last look, during a change."""
        self.changes: Counter[str] = Counter()
        """Changes of the plan by this process, by reason."""
        self.phases_s: dict[str, float] = {}
        """How long each part of the last planning took."""

    @property
    def view(self) -> View:
        """What decisions go by at this moment."""
        return replace(self._view, now_s=self._clock.now_s())

    @property
    def state(self) -> State:
        return self._view.state

    async def run(self) -> None:
        """Looks, decides and acts, for ever."""
        self.restore()
        while True:
            await self.tick()
            await self._sleep(self.settings.watch_s)

    def restore(self) -> None:
        """Takes up the state of a controller before this one, unless the application has changed since."""
        document = self._history.get("standing")
        state = None if document is None else self._parsed(document)
        if state is None:
            self._remember(self.state.placed, "in force", "start", "the plan to begin with")
        else:
            self._note(state=state, is_restored=True)
            self._say("restart", f"takes up plan {state.placed.epoch} again: {plan_words(state.placed)}")
            self._check_thresholds()
        self._history.put("policy", policy_document(self.settings.policy))
        self._history.put("tuned by", _tuned_by(self.settings))
        self.become()
        self._tell_tuner()
        self._restore_stream()
        self._history.commit()

    async def tick(self) -> None:
        """One look, and what it calls for. A failure is logged, and the next look tries again."""
        async with self._lock:
            try:
                await self._tick()
                self._tell_tuner()
                self._history.forget(self._clock.now_s())
                self._history.commit()
            except Exception as error:  # a process that dies at this moment must not end planning
                logger.warning("a look failed", exc_info=error)
                self._say_failed(error)

    async def replan(self, reason: str = "asked") -> dict[str, Any]:
        """Plans now, after whatever is under way; ends a hold."""
        async with self._lock:
            self.become(hold=False)
            await self._look()
            await self._sound_alarm()
            verdict = await self._replan(reason)
            self._tell_tuner()
            self._history.commit()
            return verdict

    async def apply(self, document: Mapping[str, Any], *, hold: bool = False) -> dict[str, Any]:
        """Puts an operator's plan in force; with `hold` it stays in force until a replan is asked for.

        Raises PlanError for a plan that does not fit the model or the accelerators.
        """
        problem, networks = self.settings.problem, self.state.placed.plan.networks
        shape = ModelShape(num_blocks=problem.num_blocks, ramps=problem.ramps, networks=networks)
        plan = self.view.completed(parse_plan(dict(document), shape))
        async with self._lock:
            await self._look()
            await self._sound_alarm()  # else it is forgotten with the controller's own thresholds
            placed = self.view.place(plan)
            if not self.view.has_room(placed):
                raise PlanError(f"the plan needs {dict(placed.occupied)}, there are {self.view.counts}")
            self.become(hold=hold)
            words = "an operator's plan"
            await self._do(PutInForce(placed=placed, reason="asked", words=words, sized_for_rps=None))
            self._tell_tuner()
            self._history.commit()
            return {"epoch": placed.epoch, "changed": True, "reason": "asked", "words": words}

    def become(self, **changes: Any) -> None:
        """Changes fields of the state, from now on and after a restart."""
        self._note(state=replace(self.state, **changes))
        self._history.put("standing", self.state.document())
        self._history.commit()

    def _note(self, **changes: Any) -> None:
        """Changes what decisions go by from now on."""
        self._view = replace(self._view, **changes)

    # One look

    async def _tick(self) -> None:
        await self._look()
        self._tell_tuner()
        self._note(alarm_heard=self._is_alarm_new)
        self._is_alarm_new = False
        await self._reforecast()
        for question in decide.QUESTIONS:
            actions = question(self.view)
            await self._do_all(actions)
            if any(isinstance(each, PutInForce | decide.GoBy | decide.Suspend | Replan) for each in actions):
                break  # another plan may be in force, so further questions wait for the next look
        await self._reforecast()

    async def _look(self) -> None:
        """Asks all processes at once."""
        fleet = self._fleet
        with self._timed("collect"):
            ingresses, replicas, capacity, running = await asyncio.gather(
                self._ingress_reports(), fleet.replica_reports(), fleet.capacity(), fleet.running()
            )
        now_s = self._clock.now_s()
        in_force = self.state.placed if self.state.followed == self.state.placed else None
        served = None if self.state.suspended is not None else in_force
        left = self._missing.left(capacity, running, served, now_s)
        seen = Look(at_s=now_s, ingresses=ingresses, replicas=replicas, capacity=left, running=running)
        self._note(seen=seen)
        if self._is_mark_due and seen.replicas:
            self._is_mark_due = False
            self._note(marked={report.replica: report for report in seen.replicas})
        self._note(first_counts=self._view.first_counts or self._view.counts)
        highest = max((report.epoch for report in seen.ingresses), default=0)
        if highest > self.state.placed.epoch:
            self._say("error", f"an ingress follows plan {highest}, which is not remembered")
            placed = self.state.placed
            self.become(placed=replace(placed, plan=replace(placed.plan, epoch=highest + 1)), followed=None)

    async def _ingress_reports(self) -> Sequence[IngressReport]:
        """Asks the ingresses, and keeps their probes and counts."""
        reports = await self._fleet.ingress_reports()
        now_s = self._asked_s = self._clock.now_s()
        interval = self._ingresses.take(reports, now_s)
        if interval is not None and interval.seconds > 0:
            self._history.add_counts(interval)
            self.stream.add_counts(interval)
        seen = [report.probes for report in reports if report.probes is not None and len(report.probes)]
        for part in seen:
            if len(kept := self._kept(part)):
                self._history.add_probes(now_s, kept)
        if seen:
            try:
                self.tuning.observe(seen)
            except OfframpError as error:
                self._say("error", f"thresholds cannot be tuned by what was seen: {error}")
        self._history.commit()  # probes come once, and a controller that takes over must not wait for a change-over
        self.stream.forget(now_s)
        return reports

    def _kept(self, seen: Observations) -> Observations:
        """Returns the observations that the stream keeps; none of those that cannot be used."""
        try:
            return self.stream.add_probes(seen)
        except DataError as error:
            self._say("error", f"probes cannot be used: {error}")
            return empty(seen.shape)

    async def _reforecast(self) -> None:
        """Makes the forecasts anew if thresholds have changed since; by the old ones every exit is a deviation."""
        ground, thresholds = self._view.ground, self.stream.thresholds(self.state)
        if ground is None or ground.thresholds == thresholds:
            return
        forecast = await self._forecast()
        reach, problem = self._reach(self._view.seen.at_s), forecast.expected(ground.problem)
        self._note(ground=replace(ground, forecast=forecast, reach=reach, problem=problem, thresholds=thresholds))

    async def _forecast(self) -> Forecast:
        state = self.state
        return await self._off_loop(lambda now_s: self.stream.forecast(state, now_s), self._view.seen.at_s)

    def _reach(self, now_s: float) -> Reach | None:
        return self.stream.reach(self.state, now_s)

    async def _sound_alarm(self) -> None:
        """Puts the thresholds of an alarm in force while a plan is changed; the change then goes on."""
        if self.tuning.alarm is None:
            return
        try:
            self._tell_tuner()
            for action in decide.thresholds_found(self.view):
                if isinstance(action, decide.GoBy):  # what follows from it is asked once the change is through
                    await self._do(action)
        finally:
            self._is_alarm_new = True

    def _tell_tuner(self) -> None:
        """Tells the tuner by which thresholds inputs are answered, once all ingresses follow them."""
        state = self.state
        if state.suspended is not None or not self.view.goes_by_ours(state.placed):
            self.tuning.pause()
        elif state.followed is not None and self.view.goes_by_ours(state.followed):
            self.tuning.follow(self.stream.thresholds(state), state.followed_s)
            self.tuning.serve(state.followed.plan.stages[0])

    # Actions

    async def _do_all(self, actions: decide.Actions) -> None:
        for action in actions:
            await self._do(action)

    async def _do(self, action: decide.Action) -> None:
        match action:
            case decide.Say(kind=kind, words=words):
                self._say(kind, words)
            case decide.Become(changes):
                self.become(**changes)
            case PutInForce():
                await self._put_in_force(action)
            case decide.GoBy(said=said, reason=reason):
                await self._go_by(said.thresholds, said.words, reason)
            case decide.Settle():
                await self._settle()
            case decide.Suspend(reason):
                if self.state.suspended != reason:
                    self._say("suspended", reason)
                    self.become(suspended=reason, trial=None, previous=None, followed=None)
                await self._fleet.suspend(reason)
            case decide.TurnDown(placed=placed, reason=reason, words=words):
                self._remember(placed, "proposed", reason, words)
            case Replan(reason):
                await self._replan(reason)
                self._is_mark_due = True  # replicas are compared by what they run from here on

    async def _replan(self, reason: str) -> dict[str, Any]:
        """Plans, and changes over if it is worth it; returns the verdict."""
        with self._timed("forecast"):
            forecast = await self._forecast()
            reach = self._reach(self._view.seen.at_s)
        await self._do(decide.let_work_again(self.view))
        counts = self.view.counts
        with self._timed("solve"):
            found = await self._propose(forecast, reach)
        asked = found.problem if isinstance(found, Proposal) else self._questions(forecast, counts)[0]
        thresholds = self.stream.thresholds(self.state)
        ground = Ground(forecast=forecast, reach=reach, problem=asked, counts=counts, thresholds=thresholds)
        self._note(ground=ground)
        self.become(planned_s=self._view.seen.at_s)
        actions, words = decide.weighed(self.view, found, reason)
        await self._do_all(actions)
        for each in actions:
            if isinstance(each, PutInForce):
                return {"epoch": each.placed.epoch, "changed": True, "reason": each.reason, "words": each.words}
        return {"epoch": self.state.placed.epoch, "changed": False, "reason": reason, "words": words}

    async def _propose(self, forecast: Forecast, reach: Reach | None) -> Proposal | NoPlan:
        """A slow replica is better than none: where no plan is found without stragglers, they work again."""
        strategy, blamed = self.settings.strategy, self.state.blamed
        while True:
            resting = Counter(rest.device for rest in self.state.resting)
            counts = {device: max(0, count - resting[device]) for device, count in self.view.counts.items()}
            asked = self._questions(forecast, counts)
            found = await decide.propose(asked, self._solve, strategy, blamed=blamed, reach=reach)
            if isinstance(found, Proposal) or not resting:
                return found
            self.become(resting=())

    def _questions(self, forecast: Forecast, counts: Mapping[str, int]) -> tuple[PlanProblem, ...]:
        lengths = self.stream.lengths(self.state, forecast.at_s)
        return decide.questions(self.settings.problem, forecast, counts, lengths)

    async def _put_in_force(self, action: PutInForce) -> None:
        """Has a plan be followed, now or, where that fails, from the next look on."""
        before = self.state.placed
        measured = decide.delivered(self.stream.counts(self.state.followed_s))
        if measured is not None and self.state.followed == before:
            gained = {
                "seconds": measured.seconds,
                "offered_rps": measured.offered_rps,
                "goodput_rps": measured.goodput_rps,
                "dropped": measured.dropped,
            }
            self._history.gained(before.epoch, gained)
        self._remember(action.placed, "in force", action.reason, action.words)
        self._note(failed=0, late=0)
        self.changes[action.reason] += 1
        self.become(
            placed=action.placed,
            reason=action.reason,
            at_s=self._clock.now_s(),
            sized_for_rps=action.sized_for_rps,
            trial=action.trial,
            previous=None if action.trial is None else before,
            suspended=None,
        )
        with self._timed("apply"):
            await self._settle()

    async def _settle(self) -> None:
        """Brings about what the plan in force still lacks; a change that was interrupted goes on here."""
        placed, followed, seen = self.state.placed, self.state.followed, self._view.seen
        if followed == placed:
            # A suspension that arrived late, from before this plan, would else hold for ever.
            if any(report.epoch < placed.epoch or report.suspended for report in seen.ingresses):
                await self._fleet.follow(placed)
            for device, replicas in seen.running.items():  # a configuration that was applied again resets them
                if replicas != placed.occupied.get(device, 0):
                    await self._scale(device, placed.occupied.get(device, 0))
            return
        coming = {device: max(count, self._told.get(device, 0)) for device, count in seen.running.items()}
        before, after = (
            None if each is None else (each.avoided, each.plan.stages, each.plan.dispatch)
            for each in (followed, placed)
        )
        if followed is not None and before == after and followed.plan.policy != placed.plan.policy:
            todo: tuple[ChangeStep, ...] = (Switch(),)
        else:
            todo = steps(followed, placed, self.view.counts, seen.running, coming)
            # Thresholds may have changed during this change, and some ingress was not told: an alarm must not wait.
            ours = self.view.goes_by_ours
            if followed is not None and not ours(followed) and ours(self._decided(followed, 0)) and ours(placed):
                await self._decide_meanwhile(self.state.reason, "thresholds that some ingress was not told of")
        await self._carry_out(todo)
        placed = self.state.placed  # thresholds may have made it a later one
        self._say("plan", f"plan {placed.epoch} in force ({self.state.reason}): {plan_words(placed)}")

    async def _carry_out(self, steps: Sequence[ChangeStep]) -> None:
        """Takes the steps to the plan in force, whose thresholds may change on the way.

        Raises OfframpError where replicas do not come in time, or their accelerators are gone; and whatever the fleet
        raises. Steps taken then stay taken: what is still missing is worked out anew at the next look.
        """
        self._note(failed=self._view.failed + 1)
        for step in steps:
            match step:
                case Scale(device=device, replicas=replicas):
                    await self._start_some(device, replicas)
                    await self._scale(device, replicas)
                case Await(replicas=awaited):
                    await self._await(awaited)
                case Prepare():
                    await self._fleet.prepare(self.state.placed)
                case Switch():
                    await self._fleet.follow(self.state.placed)
                    self._note(late=0)
                    self.become(followed=self.state.placed, followed_s=self._clock.now_s())
                case Drain():
                    await self._drain()
        self._note(failed=0)

    async def _scale(self, device: str, replicas: int) -> None:
        await self._fleet.scale(device, replicas)
        self._told[device] = replicas

    async def _start_some(self, device: str, replicas: int) -> None:
        """Starts new replicas in groups: one that starts takes a core, maybe one that others serve on."""
        at_once = self.settings.starts_at_once
        if at_once is not None:
            running = (await self._fleet.running()).get(device, 0)
            for count in range(running + at_once, replicas, at_once):
                await self._await({device: count})

    async def _await(self, replicas: Mapping[str, int]) -> None:
        for device, count in replicas.items():  # a change that failed may have told them otherwise
            if self._told.get(device, 0) < count:
                await self._scale(device, count)
        room = sum((await self._fleet.capacity()).values())
        until_s = self._clock.now_s() + START_S
        while missing := _missing(replicas, await self._fleet.running()):
            if self._clock.now_s() >= until_s:
                self._note(late=self._view.late + 1)
                raise OfframpError(f"replicas did not start within {START_S:.0f} s: {missing}")
            if sum((await self._fleet.capacity()).values()) < room:
                raise OfframpError(f"accelerators were lost while replicas were to start: {missing}")
            await self._wait()

    async def _drain(self) -> None:
        """Waits for inputs of earlier plans. An ingress that does not report may still have some."""
        epoch = self.state.placed.epoch  # thresholds may make it a later one meanwhile
        until_s = self._clock.now_s() + DRAIN_S
        while self._clock.now_s() < until_s:
            reports = await self._ingress_reports()
            if reports and all(report.oldest_epoch >= epoch for report in reports):
                return
            await self._wait()

    async def _wait(self) -> None:
        """Waits during a change; what the tuner says must not wait until the change is through."""
        if self.tuning.is_on:
            self._tell_tuner()
            if self._clock.now_s() >= self._asked_s + self.settings.watch_s:
                await self._ingress_reports()
            await self._sound_alarm()
        await self._sleep(LOOK_S)

    async def _go_by(self, thresholds: Mapping[int, float], words: str, reason: str) -> None:
        """Goes by other thresholds, in an epoch of their own.

        Stages and replicas stay, so nothing is started, tried or waited for. The thresholds are remembered with
        the plan that goes by them, never without.
        """
        self.tuning.said = None
        missing = sorted(set(self.stream.thresholds(self.state)) - set(thresholds))
        if missing:
            raise PlanError(f"{words}: no threshold for ramps {missing}")
        self._say(reason, words)
        self._decide_by(thresholds)
        if self.view.is_changing:
            self.changes[reason] += 1
            await self._decide_meanwhile(reason, words)
        else:
            again = self._decided(self.state.placed, self.view.next_epoch)
            await self._do(self.view.same_rate(again, reason, words))
        self._tell_tuner()

    def _decide_by(self, thresholds: Mapping[int, float]) -> None:
        self._note(state=replace(self.state, thresholds=dict(thresholds)))
        if (ground := self._view.ground) is not None:  # plans are weighed by them at once; `_tick` forecasts anew
            self._note(ground=replace(ground, reach=self._reach(self._clock.now_s())))

    def _decided(self, placed: PlacedPlan, epoch: int) -> PlacedPlan:
        plan = replace(self.view.decided(placed.plan), epoch=epoch)
        if plan.policy != placed.plan.policy:
            plan = self.view.completed(replace(plan, predicted={}))
        return replace(placed, plan=plan)

    async def _decide_meanwhile(self, reason: str, words: str) -> None:
        """While a change is under way: the next plan and the followed one, if one is known, get the thresholds."""
        epoch, followed = self.view.next_epoch, self.state.followed
        placed = self._decided(self.state.placed, epoch + 1)
        self._remember(placed, "in force", self.state.reason, f"goes on by other thresholds: {words}")
        self.become(placed=placed, trial=None, previous=None)  # the later epoch first: ingresses must not be ahead
        if followed is not None:
            followed = self._decided(followed, epoch)
            self._remember(followed, "in force", reason, words)
            await self._fleet.follow(followed)
            self.become(followed=followed, followed_s=self._clock.now_s())

    # What is said and remembered

    def _say(self, kind: str, words: str) -> None:
        """Logs an event, and remembers it."""
        log = logger.warning if kind in {"error", "suspended"} else logger.info
        log("%s: %s", kind, words, extra={"kind": kind, "epoch": self.state.placed.epoch})
        self._history.add_event(self._clock.now_s(), kind, words)

    def _say_failed(self, failure: Exception) -> None:
        """The failure may be the memory's own: a disk that is full must not end the loop."""
        try:
            self._say("error", f"{type(failure).__name__}: {failure}")
            self._history.forget(self._clock.now_s())
            self._history.commit()
        except sqlite3.Error as error:
            logger.warning("nothing can be remembered", exc_info=error)

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

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Measures a part of a planning."""
        began_s = self._clock.now_s()
        yield
        self.phases_s[phase] = self._clock.now_s() - began_s

    # What another controller remembered

    def _restore_stream(self) -> None:
        """Takes up the counts and probes that were remembered."""
        now_s = self._clock.now_s()
        self._history.forget(now_s)
        counts = self._history.counts()
        if counts:
            self.stream.began_s = counts[0].since_s
        for interval in counts:
            self.stream.add_counts(interval)
        try:
            for probes in self._history.probes():
                self._kept(probes)
        except DataError as error:
            self._say("error", str(error))
        self.stream.forget(now_s)

    def _parsed(self, document: Mapping[str, Any]) -> State | None:
        """Returns the remembered state; None, with an event that says why, where it is of another application."""
        try:
            state = parse_state(document)
            self._check_fits(state.placed)
        except OfframpError as error:
            self._say("error", f"the plan that was in force cannot be taken up again: {error}")
            return None
        return state

    def _check_fits(self, placed: PlacedPlan) -> None:
        """Raises OfframpError for a plan of other settings."""
        policy, problem = self._history.get("policy"), self.settings.problem
        if policy is not None and parse_policy(policy) != self.settings.policy:
            raise OfframpError("the exit policy is another now")
        ramps = sorted(set(placed.plan.ramps) - set(problem.ramps))
        if ramps:
            raise OfframpError(f"there are no ramps {ramps} any more")
        there = {device for device, supply in problem.devices.items() if supply.count}
        unknown = sorted(set(placed.occupied) - there)
        if unknown:
            raise OfframpError(f"there are no accelerators {unknown} any more")
        if placed.plan.num_blocks != problem.num_blocks:
            raise OfframpError(f"it is of {placed.plan.num_blocks} blocks, not {problem.num_blocks}")
        if placed.plan.networks != problem.networks:
            ours, its = list(problem.networks), list(placed.plan.networks)
            raise OfframpError(f"its networks end at {its}, not at {ours}")

    def _check_thresholds(self) -> None:
        """Goes back to the thresholds of the settings where those found are for other settings or ramps."""
        found, settings = self.state.thresholds, self.settings
        if found is None:
            return
        now = _tuned_by(settings)
        before = self._history.get("tuned by") or now
        others = [
            f"{name} {before.get(name)} then, {value} now" for name, value in now.items() if before.get(name) != value
        ]
        if set(found) != set(settings.problem.ramps):
            others.append(f"for ramps {sorted(found)} then, {list(settings.problem.ramps)} now")
        if not others:
            return
        self._say("thresholds", f"back to the settings'; what tuning found is void: {'; '.join(others)}")
        was_tuned = self.view.goes_by_ours(self.state.placed)
        self._decide_by(thresholds_of(settings.policy, settings.problem))
        if was_tuned:
            placed = self.state.placed
            plan = replace(placed.plan, policy=self.view.policy, predicted={}, epoch=placed.epoch + 1)
            self._remember(replace(placed, plan=plan), "in force", self.state.reason, "by the settings' thresholds")
            self.become(placed=replace(placed, plan=plan), trial=None, previous=None)
