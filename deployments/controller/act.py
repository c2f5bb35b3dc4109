"""The control loop: observes the service, and does what `deployments/controller/decide.py` decides.

One thing is done after the other. Every change of the state is on disk before anything acts on it, so that the next
controller process can continue.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

from pydantic import ValidationError

from deployments.controller import decide
from deployments.controller.decide import NewPlan, Outcome, View, due_requests
from deployments.controller.observe import (
    Forecast,
    MakeTuner,
    MissingAccelerators,
    ObservedStream,
    ServiceFleet,
    Tuning,
    tuner_of,
)
from deployments.controller.remember import History, State, parse_state
from deployments.settings import ControlSettings
from deployments.wire.messages import IngressReport, counts_between, total
from earlyexit.clock import Clock
from earlyexit.errors import DataError, OfframpError, PlanError
from optimizer.live.tuning.base import NewThresholds
from optimizer.plans.plan import PlacedPlan, Plan
from optimizer.plans.plan_file import ModelShape, parse_plan
from optimizer.problems.problem import PlanProblem
from optimizer.search.decision import Decision, Planned, Strategy

START_S = 120.0
"""The time after which replicas that have not loaded their model and warmed up are reported as an error."""
REPEAT_S = 60.0
"""The interval at which a number of replicas is requested again if another number runs. Serve keeps the number and
replaces lost replicas by itself, but a redeployed application starts again with the numbers of its settings."""
DRAIN_S = 60.0
"""The timeout for inputs of the previous plan. Surplus replicas then stop, and no input is lost."""
PAUSE_S = 0.25
"""The interval at which running replicas are counted while a change waits for them."""

logger = logging.getLogger(f"ray.serve.{__name__}")


def describe_plan(placed: PlacedPlan) -> str:
    """Returns a text like `3 x V100 blocks 0-5 | 1 x P100 blocks 6-11, 812/s in 41 ms predicted`."""
    stages = []
    for stage in placed.plan.stages:
        blocks = " and ".join(f"{first}-{end - 1}" for first, end in stage.ranges)
        stages.append(f"{stage.replicas} x {stage.device} blocks {blocks}")
    text = " | ".join(stages)
    rate, latency_s = (placed.plan.predicted.get(name) for name in ("rate_per_s", "latency_s"))
    # The latency is infinite if no input reaches a later split, whose batch never fills.
    if rate is not None and latency_s not in (None, math.inf):
        text += f", {rate:.4g}/s in {latency_s * 1e3:.3g} ms predicted"
    return f"{text}, {len(placed.avoided)} stragglers get no work" if placed.avoided else text


def _only_policies_differ(before: PlacedPlan, after: PlacedPlan) -> bool:
    """Whether only the exit policies of two plans differ, so that replicas need not change."""
    old, new = before.plan, after.plan
    is_same = (before.avoided, old.stages, old.dispatch) == (after.avoided, new.stages, new.dispatch)
    return is_same and old.policy != new.policy


def _dependencies(control: ControlSettings, first: Plan) -> dict[str, Any]:
    """Returns the settings on which a stored state depends, as plain data. Later plans keep fields of the first."""
    problem, names = control.problem, {"policy", "tuning", "accuracy_budget", "accuracy_confidence"}
    return {
        **control.model_dump(mode="json", include=names),
        "blocks": problem.num_blocks,
        "networks": list(problem.networks),
        "ramps": list(problem.ramps),
        "accelerators": sorted(device for device, supply in problem.devices.items() if supply.count),
        "dispatch": first.dispatch,
        "order": asdict(first.order),
    }


class ControlLoop:
    """The controller of one application; `run` never ends."""

    def __init__(
        self,
        fleet: ServiceFleet,
        history: History,
        settings: ControlSettings,
        *,
        first: PlacedPlan,
        clock: Clock,
        sleep: Callable[[float], Awaitable[None]],
        solve: Callable[[PlanProblem, Strategy, float], Awaitable[Decision]],
        off_loop: Callable[..., Awaitable[Forecast]] = asyncio.to_thread,
        make_tuner: MakeTuner | None = None,
    ) -> None:
        """`first`: the first plan. `clock`: a wall clock, because the history outlives the process.

        `solve` and `off_loop` run long work outside the event loop. The third argument of `solve` is its time limit in
        seconds. `off_loop` gets a function and its arguments. `make_tuner`: None for the tuner of the settings.
        """
        self._fleet = fleet
        self._history = history
        self._dependencies = _dependencies(settings, first.plan)
        self._clock = clock
        self._sleep = sleep
        self._solve = solve
        self._off_loop = off_loop
        self._lock = asyncio.Lock()
        now_s = clock.now_s()
        self.settings = settings
        self.stream = ObservedStream(settings, now_s)
        self.tuning = Tuning(make_tuner or tuner_of(settings), settings.problem)
        self._view = View(
            settings=settings,
            stream=self.stream,
            tuning=self.tuning,
            state=State.first(first, self.stream.calibrated, now_s),
            now_s=now_s,
            began_s=now_s,
            observed_s=now_s,
            problem=settings.problem,
        )
        self._reported: dict[str, IngressReport] = {}
        """The last reports of all ingresses by name. Those of the first tick may have counted for hours."""
        self._reported_s = now_s
        self._requested: dict[str, int] = {}
        """The number of replicas that was requested last, by accelerator type."""
        self._requested_s = -math.inf
        self._switched_epoch = 0
        """The epoch of the last plan to which this process changed. New thresholds do not change it."""
        self._missing = MissingAccelerators()
        self._last_failure = ""
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

    async def tick(self) -> None:
        """Observes the service once, and acts. A failure is logged until it repeats, and the next tick tries again."""
        async with self._lock:
            try:
                await self._observe()
                await self._check()
                await self._finish_change()
                self._last_failure = ""
            except Exception as error:  # the death of another process must not end the loop
                self._update_view(failed=self._view.failed + 1)
                if (words := f"{type(error).__name__}: {error}") != self._last_failure:
                    self._log_event("error", words, error)
                self._last_failure = words
            self._history.forget(self._clock.now_s())

    async def apply(self, document: Mapping[str, Any], *, hold: bool = False) -> int:
        """Changes to an operator's plan after the current tick, and returns its epoch.

        `hold`: the controller keeps it until it applies another one, until accelerators of the plan are lost, or until
        the change to it fails. Raises PlanError for a plan that does not fit the model or the accelerators.
        """
        problem, networks = self.settings.problem, self.state.placed.plan.networks
        shape = ModelShape(num_blocks=problem.num_blocks, ramps=problem.ramps, networks=networks)
        plan = self.view.completed(parse_plan(dict(document), shape))
        async with self._lock:
            await self._observe()
            if self.tuning.alarm is not None:  # otherwise it would be dropped with the controller's thresholds
                await self._apply_thresholds(self.tuning.alarm)
            # Rests do not end under a held plan, so it uses stragglers too.
            resting = () if hold else self.state.resting
            placed = replace(self.view, state=replace(self.state, resting=resting)).place(plan)
            if not self.view.has_room(placed):
                raise PlanError(f"the plan needs {dict(placed.occupied)}; available are {self.view.accelerators}")
            new = NewPlan(placed=placed, reason="asked", words="an operator's plan")
            await self._apply_plan(new, hold=hold, resting=resting)
            await self._finish_change()
        return placed.epoch

    def update_state(self, **changes: Any) -> None:
        """Changes fields of the state, on disk first, and tells the tuner."""
        state = replace(self.state, **changes)
        self._history.put(settings=self._dependencies, standing=state.document())
        self._update_view(state=state)
        self._tell_tuner()

    def _tell_tuner(self) -> None:
        """Tells the tuner which thresholds inputs follow."""
        state = self.state
        if self.tuning.pending is not None and self.tuning.pending.thresholds == state.thresholds:
            self.tuning.pending = None  # not before it is stored: the tuner does not repeat an alarm
        is_current = self._view.uses_current_thresholds
        if state.suspended is not None or not is_current(state.placed.plan):
            self.tuning.pause()
        elif state.followed is not None and is_current(state.followed.plan):
            self.tuning.follow(state.thresholds, state.followed_s, state.followed.plan.stages[0])

    def _update_view(self, **changes: Any) -> None:
        """Changes fields of the view."""
        self._view = replace(self._view, **changes)

    # Observing and checking

    async def _check(self) -> None:
        """Runs the checks in their order, until the plan may have changed."""
        await self._reforecast()
        for check in decide.CHECKS:
            outcome = check(self.view)
            if outcome is not None:
                await self._carry_out(outcome)
                if outcome.plan is not None or outcome.replan is not None or self._view.is_changing:
                    break  # stages may have changed, so the other checks wait for the next tick

    async def _finish_change(self) -> None:
        """Observes and checks until all ingresses follow the current plan, or the service is suspended.

        Raises OfframpError if the replicas do not start in time; the change is not undone, and the next tick continues.
        """
        until_s = self._clock.now_s() + START_S
        while self._view.is_changing and self.state.suspended is None:
            if self._clock.now_s() >= until_s:
                raise OfframpError(f"replicas did not start within {START_S:.0f} s: {self._view.missing}")
            await self._sleep(PAUSE_S)
            if 0 <= self._clock.now_s() - self._view.observed_s < self.settings.watch_s:
                self._update_view(running=await self._fleet.running())
            else:  # a tick is over, or the clock was set back
                await self._observe()
            await self._check()

    async def _observe(self) -> None:
        """Collects the reports of all processes in parallel."""
        fleet = self._fleet
        with self._timed("collect"):
            ingresses, replicas, capacity, running = await asyncio.gather(
                self._ingress_reports(), fleet.replica_reports(), fleet.capacity(), fleet.running()
            )
        now_s, state = self._clock.now_s(), self.state
        available = self._missing.available(capacity, running, state, now_s)
        devices = self.settings.problem.devices.items()
        accelerators = {device: min(supply.count, available.get(device, 0)) for device, supply in devices}
        self._update_view(
            observed_s=now_s,
            ingresses=ingresses,
            replicas=replicas,
            accelerators=accelerators,
            running=running,
            baseline=self._view.baseline or {report.replica: report for report in replicas},
            planned_accelerators=self._view.planned_accelerators or accelerators,
        )
        times = "at_s", "followed_s", "changed_s", "rate_changed_s"
        if future := [name for name in times if getattr(state, name) > now_s]:  # the clock was set back
            self.update_state(**dict.fromkeys(future, now_s))
        highest = max((report.epoch for report in ingresses), default=0)
        if highest > state.placed.epoch:
            self._log_event("error", f"an ingress follows plan {highest}, which is unknown")
            plan = replace(state.placed.plan, epoch=highest + 1)
            self.update_state(placed=replace(state.placed, plan=plan), followed=None)

    async def _ingress_reports(self) -> Sequence[IngressReport]:
        """Collects the reports of the ingresses, and stores their probes and counts.

        If an ingress does not report, the others' probes are kept, but it returns no reports and stores no counts. The
        counts of the next reports make up for them.
        """
        answers = await self._fleet.ingress_reports()
        found = [each for each in answers if each is not None]
        reports = found if len(found) == len(answers) else []
        now_s = self._clock.now_s()
        interval = counts_between(self._reported, reports, self._reported_s, now_s)
        if reports:
            self._reported_s = now_s
            self._reported |= {report.name: replace(report, probes=None) for report in reports}
        seen = [report.probes for report in found if report.probes is not None and len(report.probes)]
        try:
            for part in seen:
                if len(kept := self.stream.add_probes(part)):
                    self._history.add_probes(now_s, kept)
            self.tuning.observe(seen)
        except OfframpError as error:
            self._log_event("error", f"the observations cannot be used: {error}")
        self.stream.forget(now_s)
        if interval is not None:
            self.stream.add_interval(interval)
            self._history.add_counts(interval)
        return reports

    async def _reforecast(self) -> None:
        """Updates the forecast if thresholds have changed. Otherwise all new exits would deviate from it."""
        forecast = self._view.forecast
        if forecast is not None and forecast.thresholds != self.state.thresholds:
            forecast = await self._off_loop(self.stream.forecast, self.state, self._view.observed_s)
            self._update_view(forecast=forecast, problem=forecast.expected(self._view.problem))

    # What follows from a check

    async def _carry_out(self, outcome: Outcome) -> None:
        for kind, words in outcome.events:
            self._log_event(kind, words)
        if outcome.plan is not None:
            await self._apply_plan(outcome.plan, **outcome.state)
        elif outcome.state:
            self.update_state(**outcome.state)
        if outcome.thresholds is not None:
            await self._apply_thresholds(outcome.thresholds)
        if outcome.rejected is not None:
            self._remember("proposed", outcome.rejected)
        if outcome.reconciles:
            await self._reconcile()
        if outcome.replan is not None:
            await self._replan(outcome.replan)
            # Replicas are compared by their work from now on.
            self._update_view(baseline={report.replica: report for report in self._view.replicas})

    async def _replan(self, reason: str) -> None:
        """Plans, and changes to the new plan if it is worth it."""
        corrected = replace(self._view.problem, latency=decide.corrected_latency(self._view))
        with self._timed("forecast"):
            forecast = await self._off_loop(self.stream.forecast, self.state, self._view.observed_s)
        # Also if planning fails, so that the next attempt is in the next period, not at the next tick.
        self.update_state(**decide.ended_rests(self.view), planned_s=self._view.observed_s)
        self._update_view(forecast=forecast, planned_accelerators=self._view.accelerators, problem=corrected)
        try:
            with self._timed("solve"):
                problem, found = await self._propose(forecast)
        except PlanError as error:
            await self._carry_out(decide.without_plan(self.view, str(error), reason))
            return
        self._update_view(problem=problem)
        await self._carry_out(decide.evaluate_proposal(self.view, found, reason))

    async def _propose(self, forecast: Forecast) -> tuple[PlanProblem, Decision]:
        """Returns the best plan without the stragglers or, if there is none, the best plan with them.

        All searches together take little more than the time limit, but each has at least a quarter of it.
        """
        limit_s, began_s = self.settings.time_limit_s, self._clock.now_s()

        async def solve(problem: PlanProblem, strategy: Strategy) -> Decision:
            left_s = limit_s - (self._clock.now_s() - began_s)
            return await self._solve(problem, strategy, min(limit_s, max(limit_s / 4, left_s)))

        is_lost = not self._view.has_room(self.state.placed)  # then a plan that was rolled back is better than none
        while True:
            state, view, strategy = self.state, self._view, self.settings.strategy
            counts = view.without_resting(view.accelerators)
            problems = decide.problems_to_solve(self.settings.problem, view.problem, forecast, counts)
            problem, found = await decide.propose(
                problems, solve, strategy, blamed=state.blamed, reach=forecast.reach, start_cost=view.start_cost
            )
            if isinstance(found, Planned) or not (state.resting or (is_lost and state.blamed)):
                return problem, found
            self.update_state(resting=(), blamed={} if is_lost else state.blamed)

    async def _apply_plan(self, new: NewPlan, **changes: Any) -> None:
        """Makes a plan the current one, and changes to it. If that fails, the next tick continues it.

        `changes`: fields of the state that change together with it.
        """
        before, measured = self.state.placed, total(self.stream.intervals(self.state.followed_s))
        if measured is not None and not self._view.is_changing:
            seconds, dropped = measured.seconds, sum(measured.drops.values())
            rates = {"offered_rps": measured.arrived / seconds, "goodput_rps": measured.in_slo / seconds}
            self._history.gained(before.epoch, {"seconds": seconds, **rates, "dropped": dropped})
        plan = {"placed": new.placed, "reason": new.reason, "at_s": self._clock.now_s(), "trial": new.trial}
        self.update_state(**{**changes, **plan, "previous": before, "suspended": None})
        self._remember("in force", new)
        self.changes[new.reason] += 1
        self._update_view(failed=0)
        await self._reconcile()

    # Bringing the service to the state

    async def _reconcile(self) -> None:
        """Does what can be done now for the service to serve under the current plan, or to stay suspended.

        No plan lacks replicas while it is in force: types grow before all ingresses switch to the plan, and shrink once
        no ingress has inputs of the earlier plan.
        """
        state, view, placed = self.state, self._view, self.state.placed
        if state.suspended is not None:
            await self._fleet.suspend(state.suspended)
        elif not view.is_changing:
            # An ingress may have received a suspension from before this plan late.
            if any(report.epoch < placed.epoch or report.suspended for report in view.ingresses):
                await self._fleet.follow(placed)
            await self._request_replicas(may_shrink=self._is_drained())
        elif state.followed is not None and _only_policies_differ(state.followed, placed):
            await self._switch()
        else:
            await self._update_followed()  # again: an ingress may have missed new thresholds
            await self._request_replicas(may_shrink=False)
            if not view.missing:
                await self._fleet.prepare(self.state.placed)
                self._switched_epoch = self.state.placed.epoch
                await self._switch()

    async def _switch(self) -> None:
        """Makes all ingresses follow the current plan."""
        placed = self.state.placed
        await self._fleet.follow(placed)
        self.update_state(followed=placed, followed_s=self._clock.now_s())
        self.phases_s["apply"] = self.state.followed_s - self.state.at_s
        self._update_view(failed=0, ingresses=())  # their reports are from before
        self._log_event("plan", f"plan {placed.epoch} in force ({self.state.reason}): {describe_plan(placed)}")

    async def _request_replicas(self, *, may_shrink: bool) -> None:
        """Requests the replicas of the current plan. `may_shrink`: whether surplus replicas may stop."""
        needed, running, at_once = self.state.placed.occupied, self._view.running, self.settings.starts_at_once
        numbers = due_requests(needed, running, self._requested, at_once=at_once, may_shrink=may_shrink)
        if not 0 <= self._clock.now_s() - self._requested_s < REPEAT_S:
            numbers = {each: num for each, num in self._requested.items() if running.get(each, 0) != num} | numbers
        for device, number in numbers.items():
            await self._fleet.scale(device, number)
            self._requested[device], self._requested_s = number, self._clock.now_s()
            self._update_view(running={**self._view.running, device: min(number, running.get(device, 0))})

    def _is_drained(self) -> bool:
        """Whether no ingress has inputs of earlier plans. An ingress that does not report may still have some."""
        reports = self._view.ingresses
        is_late = self._clock.now_s() >= self.state.followed_s + DRAIN_S
        return is_late or (bool(reports) and all(each.oldest_epoch >= self._switched_epoch for each in reports))

    # New thresholds

    async def _apply_thresholds(self, found: NewThresholds) -> None:
        """Applies new thresholds as a plan with its own epoch and the same stages and replicas, without a trial.

        The thresholds are stored together with that plan.
        """
        words, reason = found.words, "alarm" if found.why == "alarm" else "thresholds"
        self._log_event(reason, words)
        self._update_view(state=replace(self.state, thresholds=dict(found.thresholds)))
        if (forecast := self._view.forecast) is not None:  # for new plans at once; `_check` updates the forecast later
            reach = self.stream.reach(self.state, self._clock.now_s())
            self._update_view(forecast=replace(forecast, reach=reach))
        current, epoch = self.state.placed, self._view.next_epoch
        if not self._view.is_changing:
            new = NewPlan(placed=self._with_thresholds(current, epoch), reason=reason, words=words)
            await self._apply_plan(new)
            return
        placed = self._with_thresholds(current, epoch + 1)  # the plan that is still followed gets the epoch before it
        self.update_state(placed=placed, trial=None, spare_epoch=epoch)
        goes_on = f"continues with other thresholds: {words}"
        self._remember("in force", NewPlan(placed=placed, reason=self.state.reason, words=goes_on))
        self.changes[reason] += 1
        await self._update_followed(reason, words)

    async def _update_followed(self, reason: str = "thresholds", words: str = "new thresholds during a change") -> None:
        """Applies new thresholds to the plan that is still followed during a change, because an alarm must not wait."""
        followed, spare, is_current = self.state.followed, self.state.spare_epoch, self._view.uses_current_thresholds
        if followed is None or is_current(followed.plan) or followed.epoch >= spare:
            return
        followed = self._with_thresholds(followed, spare)
        if is_current(followed.plan):  # an operator's plan may have another policy
            await self._fleet.follow(followed)
            self.update_state(followed=followed, followed_s=self._clock.now_s())
            self._remember("in force", NewPlan(placed=followed, reason=reason, words=words))

    def _with_thresholds(self, placed: PlacedPlan, epoch: int) -> PlacedPlan:
        return replace(placed, plan=replace(self._view.with_current_thresholds(placed.plan), epoch=epoch))

    # Events and history

    def _log_event(self, kind: str, words: str, error: Exception | None = None) -> None:
        """Logs an event, with the traceback of an error, and stores it in the history."""
        log = logger.warning if kind in {"error", "suspended"} else logger.info
        log("%s: %s", kind, words, exc_info=error, extra={"kind": kind, "epoch": self.state.placed.epoch})
        self._history.add_event(self._clock.now_s(), kind, words)

    def _remember(self, outcome: str, new: NewPlan) -> None:
        self._history.add_plan(self._clock.now_s(), new.placed, outcome, new.reason, new.words)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Measures the seconds of a phase of planning."""
        began_s = self._clock.now_s()
        yield
        self.phases_s[phase] = self._clock.now_s() - began_s

    # Restoring the state of an earlier process

    def restore(self) -> None:
        """Restores the state of an earlier controller process, unless the settings on which it depends have changed."""
        state = self._stored_state()
        if state is None:
            self._remember("in force", NewPlan(placed=self.state.placed, reason="start", words="the first plan"))
        else:
            self._update_view(state=state)
            self._log_event("restart", f"takes up plan {state.placed.epoch} again: {describe_plan(state.placed)}")
        self._requested = {} if self._view.is_changing else dict(self.state.placed.occupied)
        try:
            self.update_state()
        except sqlite3.Error as error:  # the disk may be full; the next change of the state stores it
            logger.warning("the controller's state cannot be stored yet: %s", error)
            self._tell_tuner()
        self._restore_stream()

    def _stored_state(self) -> State | None:
        """Returns the stored state; None if there is none or, with an event, if it does not fit the application."""
        try:
            document, before = self._history.get("standing"), self._history.get("settings") or {}
            changed = [name for name, value in self._dependencies.items() if before.get(name) != value]
            if document is not None and changed:
                raise OfframpError(f"settings have changed: {', '.join(changed)}")
            return None if document is None else parse_state(document)
        except (OfframpError, ValueError) as error:  # ValueError: it is no JSON
            self._log_event("error", f"the last plan cannot be restored: {error}")
            return None

    def _restore_stream(self) -> None:
        """Restores the stored counts and probes."""
        now_s = self._clock.now_s()
        self._history.forget(now_s)
        try:
            if counts := self._history.counts():
                self.stream.began_s = counts[0].since_s
            for interval in counts:
                self.stream.add_interval(interval)
            for probes in self._history.probes():
                with suppress(DataError):  # another model had them
                    self.stream.add_probes(probes)
        except (DataError, ValidationError) as error:
            self._log_event("error", f"stored observations cannot be read: {error}")
        self.stream.forget(now_s)
