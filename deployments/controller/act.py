"""The control loop: observes the service, and performs the actions that `deployments/controller/decide.py` decides.

Actions run one after the other. Every change of the state is on disk before anything acts on it, so that the next
controller process can continue.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

from deployments.controller import decide
from deployments.controller.decide import ApplyPlan, PlanningBasis, Replan, Solve, View
from deployments.controller.intake import IngressIntake
from deployments.controller.observe import (
    Fleet,
    Forecast,
    MakeTuner,
    MissingAccelerators,
    ObservedStream,
    Tuning,
    tuner_of,
)
from deployments.controller.remember import History, State, parse_state
from deployments.settings import ControlSettings
from deployments.wire.messages import IngressReport
from earlyexit.clock import Clock
from earlyexit.errors import DataError, OfframpError, PlanError
from optimizer.live.changeover import Await, ChangeStep, Drain, Prepare, Scale, Switch, steps
from optimizer.live.tuning.base import NewThresholds
from optimizer.plans.plan import PlacedPlan
from optimizer.plans.plan_file import ModelShape, parse_plan
from optimizer.problems.problem import PlanProblem
from optimizer.search.decision import Decision, Planned
from profiles.stream import Observations, empty

START_S = 120.0
"""The timeout for a replica to load its model and warm up."""
DRAIN_S = 60.0
"""The timeout for inputs of the previous plan. The change then continues, and no input is lost."""
LOOK_S = 0.25
"""The polling interval while replicas start or inputs drain."""

logger = logging.getLogger(f"ray.serve.{__name__}")


def _missing(replicas: Mapping[str, int], running: Mapping[str, int]) -> str:
    """Describes the replicas that do not run yet; empty if all run."""
    return ", ".join(
        f"{device} runs {running.get(device, 0)} of {count}"
        for device, count in replicas.items()
        if running.get(device, 0) < count
    )


def describe_plan(placed: PlacedPlan) -> str:
    """Returns a text like `3 x V100 blocks 0-5 | 1 x P100 blocks 6-11, 812/s in 41 ms predicted`."""
    stages = " | ".join(
        f"{stage.replicas} x {stage.device} blocks {' and '.join(f'{first}-{end - 1}' for first, end in stage.ranges)}"
        for stage in placed.plan.stages
    )
    avoided = f", {len(placed.avoided)} replicas rest" if placed.avoided else ""
    rate, latency_s = (placed.plan.predicted.get(name) for name in ("rate_per_s", "latency_s"))
    if rate is None or latency_s in (None, float("inf")):  # infinite: no input reaches a later split, which never fills
        return f"{stages}{avoided}"
    return f"{stages}, {rate:.4g}/s in {latency_s * 1e3:.3g} ms predicted{avoided}"


def _dependencies(control: ControlSettings) -> dict[str, Any]:
    """Returns the settings on which a stored state depends, as plain data."""
    problem, names = control.problem, {"policy", "tuning", "accuracy_budget", "accuracy_confidence"}
    return {
        **control.model_dump(mode="json", include=names),
        "blocks": problem.num_blocks,
        "networks": list(problem.networks),
        "ramps": list(problem.ramps),
        "accelerators": sorted(device for device, supply in problem.devices.items() if supply.count),
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
        sleep: Callable[[float], Awaitable[None]],
        solve: Solve,
        off_loop: Callable[[Callable[[float], Forecast], float], Awaitable[Forecast]] = asyncio.to_thread,
        make_tuner: MakeTuner | None = None,
    ) -> None:
        """`first`: the first plan. `clock`: a wall clock, because the history outlives the process.

        `solve` and `off_loop` run long work outside the event loop. `make_tuner`: None for the tuner of the settings.
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
            looked_s=now_s,
            stream=self.stream,
            tuning=self.tuning,
        )
        self._ingresses = IngressIntake()
        self._collected_s = 0.0
        """When the reports of ingresses were last collected."""
        self._targets: dict[str, int] = {}
        """The number of replicas that this process has requested, by accelerator type."""
        self._missing = MissingAccelerators()
        self.changes: Counter[str] = Counter()
        """Changes of the plan by this process, by reason."""
        self.phases_s: dict[str, float] = {}
        """The seconds of each phase of the last planning."""

    @property
    def view(self) -> View:
        """The view for decisions at this moment."""
        return replace(self._view, now_s=self._clock.now_s())

    @property
    def state(self) -> State:
        return self._view.state

    async def run(self) -> None:
        """Restores the state, then ticks regularly. It never returns."""
        self.restore()
        while True:
            await self.tick()
            await self._sleep(self.settings.watch_s)

    def restore(self) -> None:
        """Restores the state of an earlier controller process, unless the settings on which it depends have changed."""
        document, settings = self._history.get("standing"), _dependencies(self.settings)
        state = None if document is None else self._parsed(document, settings)
        if state is None:
            self._remember(self.state.placed, "in force", "start", "the plan to begin with")
        else:
            self._update_view(state=state, is_restored=True)
            self._log_event("restart", f"takes up plan {state.placed.epoch} again: {describe_plan(state.placed)}")
        self._history.put("settings", settings)
        self.update_state()
        self._update_tuner()
        self._restore_stream()
        self._history.commit()

    async def tick(self) -> None:
        """Observes the service once, and acts. A failure is logged, and the next tick tries again."""
        async with self._lock:
            try:
                await self._tick()
                self._update_tuner()
                self._history.forget(self._clock.now_s())
                self._history.commit()
            except Exception as error:  # the death of another process must not end the loop
                logger.warning("a tick of the control loop failed", exc_info=error)
                self._log_failure(error)

    async def replan(self, reason: str = "asked") -> dict[str, Any]:
        """Plans now, after the current tick, and ends a hold. Returns the verdict."""
        async with self._operation():
            self.update_state(hold=False)
            return await self._replan(reason)

    async def apply(self, document: Mapping[str, Any], *, hold: bool = False) -> dict[str, Any]:
        """Applies an operator's plan. `hold`: keep it until a replan is requested.

        Raises PlanError for a plan that does not fit the model or the accelerators.
        """
        problem, networks = self.settings.problem, self.state.placed.plan.networks
        shape = ModelShape(num_blocks=problem.num_blocks, ramps=problem.ramps, networks=networks)
        plan = self.view.completed(parse_plan(dict(document), shape))
        async with self._operation():
            placed = self.view.place(plan)
            if not self.view.has_room(placed):
                raise PlanError(f"the plan needs {dict(placed.occupied)}; available are {self.view.counts}")
            self.update_state(hold=hold)
            words = "an operator's plan"
            await self._perform(ApplyPlan(placed=placed, reason="asked", words=words, sized_for_rps=None))
            return {"epoch": placed.epoch, "changed": True, "reason": "asked", "words": words}

    @asynccontextmanager
    async def _operation(self) -> AsyncIterator[None]:
        """Surrounds a change that an operator requests. Observes the service first, so that it is the newest view."""
        async with self._lock:
            await self._look()
            await self._handle_alarm()  # otherwise it would be dropped together with the controller's thresholds
            yield
            self._update_tuner()
            self._history.commit()

    def update_state(self, **changes: Any) -> None:
        """Changes fields of the state, also on disk."""
        self._update_view(state=replace(self.state, **changes))
        self._history.put("standing", self.state.document())
        self._history.commit()

    def _update_view(self, **changes: Any) -> None:
        """Changes fields of the view."""
        self._view = replace(self._view, **changes)

    # One tick

    async def _tick(self) -> None:
        await self._look()
        self._update_tuner()
        await self._reforecast()
        for question in decide.CHECKS:
            actions = question(self.view)
            self._update_view(had_alarm=False)  # the first check has handled it
            await self._perform_all(actions)
            if any(isinstance(each, ApplyPlan | NewThresholds | decide.Suspend | Replan) for each in actions):
                break  # the plan may have changed, so the other checks wait for the next tick
        await self._reforecast()

    async def _look(self) -> None:
        """Collects the reports of all processes in parallel."""
        fleet = self._fleet
        with self._timed("collect"):
            ingresses, replicas, capacity, running = await asyncio.gather(
                self._ingress_reports(), fleet.replica_reports(), fleet.capacity(), fleet.running()
            )
        now_s = self._clock.now_s()
        in_force = self.state.placed if self.state.followed == self.state.placed else None
        served = None if self.state.suspended is not None else in_force
        left = self._missing.left(capacity, running, served, now_s)
        self._update_view(looked_s=now_s, ingresses=ingresses, replicas=replicas, capacity=left, running=running)
        baseline = self._view.baseline or {report.replica: report for report in replicas}
        self._update_view(baseline=baseline, first_counts=self._view.first_counts or self._view.counts)
        highest = max((report.epoch for report in ingresses), default=0)
        if highest > self.state.placed.epoch:
            self._log_event("error", f"an ingress follows plan {highest}, which is unknown")
            placed = self.state.placed
            self.update_state(placed=replace(placed, plan=replace(placed.plan, epoch=highest + 1)), followed=None)

    async def _ingress_reports(self) -> Sequence[IngressReport]:
        """Collects the reports of the ingresses, and stores their probes and counts."""
        reports = await self._fleet.ingress_reports()
        now_s = self._collected_s = self._clock.now_s()
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
                self._log_event("error", f"the observations cannot be used to tune thresholds: {error}")
        self._history.commit()  # ingresses report probes only once
        self.stream.forget(now_s)
        return reports

    def _kept(self, seen: Observations) -> Observations:
        """Adds observations to the stream; returns those that it keeps."""
        try:
            return self.stream.add_probes(seen)
        except DataError as error:
            self._log_event("error", f"probes cannot be used: {error}")
            return empty(seen.shape)

    async def _reforecast(self) -> None:
        """Updates the forecasts if thresholds have changed. Otherwise all new exits would deviate from the forecast."""
        basis, thresholds = self._view.basis, self.stream.thresholds(self.state)
        if basis is None or basis.forecast.thresholds == thresholds:
            return
        forecast = await self._forecast()
        self._update_view(basis=replace(basis, forecast=forecast, problem=forecast.expected(basis.problem)))

    async def _forecast(self) -> Forecast:
        state = self.state
        return await self._off_loop(lambda now_s: self.stream.forecast(state, now_s), self._view.looked_s)

    async def _handle_alarm(self) -> None:
        """Applies the thresholds of an alarm during a change of plan. The change then continues."""
        if self.tuning.alarm is None:
            return
        try:
            self._update_tuner()
            for action in decide.thresholds_found(self.view):
                if isinstance(action, NewThresholds):  # a replan waits until the change is finished
                    await self._perform(action)
        finally:
            self._update_view(had_alarm=True)

    def _update_tuner(self) -> None:
        """Passes the current thresholds to the tuner once all ingresses follow them."""
        state = self.state
        if state.suspended is not None or not self.view.uses_current_thresholds(state.placed):
            self.tuning.pause()
        elif state.followed is not None and self.view.uses_current_thresholds(state.followed):
            self.tuning.follow(self.stream.thresholds(state), state.followed_s)
            self.tuning.serve(state.followed.plan.stages[0])

    # Actions

    async def _perform_all(self, actions: decide.Actions) -> None:
        for action in actions:
            await self._perform(action)

    async def _perform(self, action: decide.Action) -> None:
        match action:
            case decide.LogEvent(kind=kind, words=words):
                self._log_event(kind, words)
            case decide.UpdateState(changes):
                self.update_state(**changes)
            case ApplyPlan():
                await self._apply_plan(action)
            case NewThresholds():
                await self._apply_thresholds(action)
            case decide.FinishChange():
                await self._finish_change()
            case decide.Suspend(reason):
                if self.state.suspended != reason:
                    self._log_event("suspended", reason)
                    self.update_state(suspended=reason, trial=None, previous=None, followed=None)
                await self._fleet.suspend(reason)
            case decide.RecordRejected(placed=placed, reason=reason, words=words):
                self._remember(placed, "proposed", reason, words)
            case Replan(reason):
                await self._replan(reason)
                self._update_view(baseline={})  # replicas are compared by their work from now on

    async def _replan(self, reason: str) -> dict[str, Any]:
        """Plans, and changes to the new plan if it is worth it; returns the verdict."""
        with self._timed("forecast"):
            forecast = await self._forecast()
        await self._perform(decide.end_rests(self.view))
        counts = self.view.counts
        with self._timed("solve"):
            problem, found = await self._propose(forecast)
        self._update_view(basis=PlanningBasis(forecast=forecast, problem=problem, counts=counts))
        self.update_state(planned_s=self._view.looked_s)
        actions, words = decide.evaluate_proposal(self.view, found, reason)
        await self._perform_all(actions)
        for each in actions:
            if isinstance(each, ApplyPlan):
                return {"epoch": each.placed.epoch, "changed": True, "reason": each.reason, "words": each.words}
        return {"epoch": self.state.placed.epoch, "changed": False, "reason": reason, "words": words}

    async def _propose(self, forecast: Forecast) -> tuple[PlanProblem, Decision]:
        """Returns the best plan without the stragglers or, if there is none, the best plan with them."""
        strategy, blamed = self.settings.strategy, self.state.blamed
        while True:
            resting = Counter(rest.device for rest in self.state.resting)
            counts = {device: max(0, count - resting[device]) for device, count in self.view.counts.items()}
            lengths = self.stream.lengths(self.state, forecast.at_s)
            problems = decide.problems_to_solve(self.settings.problem, forecast, counts, lengths)
            reach = forecast.reach
            problem, found = await decide.propose(problems, self._solve, strategy, blamed=blamed, reach=reach)
            if isinstance(found, Planned) or not resting:
                return problem, found
            self.update_state(resting=())

    async def _apply_plan(self, action: ApplyPlan) -> None:
        """Makes a plan the current one, and changes to it. If the change fails, the next tick continues it."""
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
        self._update_view(failed=0, late=0)
        self.changes[action.reason] += 1
        self.update_state(
            placed=action.placed,
            reason=action.reason,
            at_s=self._clock.now_s(),
            sized_for_rps=action.sized_for_rps,
            trial=action.trial,
            previous=None if action.trial is None else before,
            suspended=None,
        )
        with self._timed("apply"):
            await self._finish_change()

    async def _finish_change(self) -> None:
        """Continues the change to the current plan, or repairs deviations from it."""
        placed, followed, running = self.state.placed, self.state.followed, self._view.running
        if followed == placed:
            # An ingress may have received a suspension from before this plan late.
            if any(report.epoch < placed.epoch or report.suspended for report in self._view.ingresses):
                await self._fleet.follow(placed)
            for device, replicas in running.items():  # redeploying the application resets the replica counts
                if replicas != placed.occupied.get(device, 0):
                    await self._scale(device, placed.occupied.get(device, 0))
            return
        coming = {device: max(count, self._targets.get(device, 0)) for device, count in running.items()}
        before, after = (
            None if each is None else (each.avoided, each.plan.stages, each.plan.dispatch)
            for each in (followed, placed)
        )
        if followed is not None and before == after and followed.plan.policy != placed.plan.policy:
            todo: tuple[ChangeStep, ...] = (Switch(),)
        else:
            todo = steps(followed, placed, self.view.counts, running, coming)
            is_current = self.view.uses_current_thresholds
            if followed is not None and not is_current(followed) and is_current(placed):
                updated = self._with_current_thresholds(followed, 0)
                if is_current(updated):  # an ingress did not receive them, and an alarm must not wait
                    await self._update_thresholds(self.state.reason, "thresholds that an ingress did not receive")
        await self._carry_out(todo)
        placed = self.state.placed  # new thresholds may have replaced it
        self._log_event("plan", f"plan {placed.epoch} in force ({self.state.reason}): {describe_plan(placed)}")

    async def _carry_out(self, steps: Sequence[ChangeStep]) -> None:
        """Carries out the steps of a change. Thresholds may change in the meantime.

        Raises OfframpError if replicas do not start in time or accelerators are lost, and the errors of the fleet. The
        steps so far are not undone; the next tick computes the remaining ones.
        """
        self._update_view(failed=self._view.failed + 1)
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
                    self._update_view(late=0)
                    self.update_state(followed=self.state.placed, followed_s=self._clock.now_s())
                case Drain():
                    await self._drain()
        self._update_view(failed=0)

    async def _scale(self, device: str, replicas: int) -> None:
        await self._fleet.scale(device, replicas)
        self._targets[device] = replicas

    async def _start_some(self, device: str, replicas: int) -> None:
        """Starts new replicas in groups, because starting takes processor time from replicas that serve."""
        at_once = self.settings.starts_at_once
        if at_once is not None:
            running = (await self._fleet.running()).get(device, 0)
            for count in range(running + at_once, replicas, at_once):
                await self._await({device: count})

    async def _await(self, replicas: Mapping[str, int]) -> None:
        for device, count in replicas.items():  # an earlier failed change may have requested fewer
            if self._targets.get(device, 0) < count:
                await self._scale(device, count)
        room = sum((await self._fleet.capacity()).values())
        until_s = self._clock.now_s() + START_S
        while missing := _missing(replicas, await self._fleet.running()):
            if self._clock.now_s() >= until_s:
                self._update_view(late=self._view.late + 1)
                raise OfframpError(f"replicas did not start within {START_S:.0f} s: {missing}")
            if sum((await self._fleet.capacity()).values()) < room:
                raise OfframpError(f"accelerators were lost while replicas were starting: {missing}")
            await self._wait()

    async def _drain(self) -> None:
        """Waits for the inputs of earlier plans. An ingress that does not report may still have some."""
        epoch = self.state.placed.epoch  # new thresholds may raise it in the meantime
        until_s = self._clock.now_s() + DRAIN_S
        while self._clock.now_s() < until_s:
            reports = await self._ingress_reports()
            if reports and all(report.oldest_epoch >= epoch for report in reports):
                return
            await self._wait()

    async def _wait(self) -> None:
        """Waits during a change, and handles alarms of the tuner meanwhile."""
        if self.tuning.is_on:
            self._update_tuner()
            if self._clock.now_s() >= self._collected_s + self.settings.watch_s:
                await self._ingress_reports()
            await self._handle_alarm()
        await self._sleep(LOOK_S)

    async def _apply_thresholds(self, said: NewThresholds) -> None:
        """Applies new thresholds as a plan with its own epoch and the same stages and replicas, without a trial.

        The thresholds are stored together with that plan.
        """
        thresholds, words, reason = said.thresholds, said.words, "alarm" if said.why == "alarm" else "thresholds"
        self.tuning.said = None
        missing = sorted(set(self.stream.thresholds(self.state)) - set(thresholds))
        if missing:
            raise PlanError(f"{words}: no threshold for ramps {missing}")
        self._log_event(reason, words)
        self._update_view(state=replace(self.state, thresholds=dict(thresholds)))
        if (basis := self._view.basis) is not None:  # needed for new plans at once; `_tick` updates the forecast later
            reach = self.stream.reach(self.state, self._clock.now_s())
            self._update_view(basis=replace(basis, forecast=replace(basis.forecast, reach=reach)))
        if self.view.is_changing:
            self.changes[reason] += 1
            await self._update_thresholds(reason, words)
        else:
            placed = self._with_current_thresholds(self.state.placed, self.view.next_epoch)
            await self._perform(self.view.same_rate(placed, reason, words))
        self._update_tuner()

    def _with_current_thresholds(self, placed: PlacedPlan, epoch: int) -> PlacedPlan:
        plan = replace(self.view.with_current_thresholds(placed.plan), epoch=epoch)
        if plan.policy != placed.plan.policy:
            plan = self.view.completed(replace(plan, predicted={}))
        return replace(placed, plan=plan)

    async def _update_thresholds(self, reason: str, words: str) -> None:
        """Applies the current thresholds during a change, to the new plan and to the followed plan if it is known."""
        epoch, followed = self.view.next_epoch, self.state.followed
        placed = self._with_current_thresholds(self.state.placed, epoch + 1)
        self._remember(placed, "in force", self.state.reason, f"goes on by other thresholds: {words}")
        self.update_state(placed=placed, trial=None, previous=None)  # first, so that no ingress follows a later epoch
        if followed is not None:
            followed = self._with_current_thresholds(followed, epoch)
            self._remember(followed, "in force", reason, words)
            await self._fleet.follow(followed)
            self.update_state(followed=followed, followed_s=self._clock.now_s())

    # Events and history

    def _log_event(self, kind: str, words: str) -> None:
        """Logs an event, and stores it in the history."""
        log = logger.warning if kind in {"error", "suspended"} else logger.info
        log("%s: %s", kind, words, extra={"kind": kind, "epoch": self.state.placed.epoch})
        self._history.add_event(self._clock.now_s(), kind, words)

    def _log_failure(self, failure: Exception) -> None:
        """Logs a failure. The history itself may be the cause (a full disk), so its errors are only logged."""
        try:
            self._log_event("error", f"{type(failure).__name__}: {failure}")
            self._history.forget(self._clock.now_s())
            self._history.commit()
        except sqlite3.Error as error:
            logger.warning("the history cannot be written", exc_info=error)

    def _remember(self, placed: PlacedPlan, outcome: str, reason: str, words: str) -> None:
        self._history.add_plan(self._clock.now_s(), placed, outcome, reason, words)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Measures the seconds of a phase of planning."""
        began_s = self._clock.now_s()
        yield
        self.phases_s[phase] = self._clock.now_s() - began_s

    # Restoring the state of an earlier process

    def _restore_stream(self) -> None:
        """Restores the stored counts and probes."""
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
            self._log_event("error", str(error))
        self.stream.forget(now_s)

    def _parsed(self, document: Mapping[str, Any], settings: Mapping[str, Any]) -> State | None:
        """Returns the stored state. If it does not fit the application, logs the reason and returns None."""
        before = self._history.get("settings") or {}
        changed = [name for name, value in settings.items() if before.get(name) != value]
        try:
            if changed:
                raise OfframpError(f"settings have changed: {', '.join(changed)}")
            return parse_state(document)
        except OfframpError as error:
            self._log_event("error", f"the last plan cannot be restored: {error}")
            return None
