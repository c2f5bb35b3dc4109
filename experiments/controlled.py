"""Simulates a service with the live controller, and the fleet of accelerators and replicas that it controls."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from deployments.controller.act import ControlLoop
from deployments.controller.observe import ServiceFleet
from deployments.controller.remember import History
from deployments.settings import ControlSettings
from deployments.wire.messages import IngressReport, ReplicaReport, assignments_of
from earlyexit.errors import OfframpError
from optimizer.plans.plan import PlacedPlan, Plan, PolicySpec
from optimizer.plans.plan_file import plan_document
from optimizer.problems.problem import PlanProblem
from optimizer.search.decision import Decision, Strategy
from optimizer.search.planner import solve
from profiles.records import ExitRecords
from simulator.events import CONTROLS, Events, SimulatedTime
from simulator.inputs import Decisions, IntArray, Probing, recorded
from simulator.outcome import Outcome
from simulator.processes import NO_EPOCH, SimulatedReplica
from simulator.scenario import FloatArray, Scenario
from simulator.service import SimulatedService
from simulator.simulate import gather, play


class Order(NamedTuple):
    """A plan that an operator applies at a time, and holds."""

    at_s: float
    plan: Plan


class Mix(NamedTuple):
    """The inputs from a time on: rows of the decisions, which repeat."""

    at_s: float
    rows_N: IntArray


def rows_in_turn(mixes: Sequence[Mix], arrivals_s: FloatArray, inputs_per_request: int = 1) -> IntArray:
    """Returns the row of every input for a `Scenario` whose inputs change. The first mix begins at 0 s."""
    begins_s = [mix.at_s for mix in mixes]
    counts = np.diff(np.append(np.searchsorted(arrivals_s, begins_s), len(arrivals_s))) * inputs_per_request
    return np.concatenate([np.resize(mix.rows_N, count) for mix, count in zip(mixes, counts, strict=True)])


ARRIVES = 4
"""The priority of new inputs, which come after everything else of the same moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """A closed-loop load: a constant number of inputs in flight instead of a rate."""

    in_flight: int
    """The number of inputs in flight."""
    mixes: tuple[Mix, ...]
    """All have the same number of rows."""
    pause_s: float = 0.1
    """The pause after a refused or dropped input. At 0, a service that refuses would be flooded."""

    @property
    def rows_N(self) -> IntArray:
        """The rows of this load's scenario."""
        return np.concatenate([mix.rows_N for mix in self.mixes])


class ClosedSender:
    """Sends a closed-loop load. The inputs of a mix are numbered by its rows."""

    def __init__(self, service: SimulatedService, load: Closed) -> None:
        assert service.scenario.inputs_per_request == 1, "requests of a closed loop have one input"
        self._service = service
        self._load = load
        self._turns = [0] * len(load.mixes)
        self._due = 0
        """Inputs to be sent at this moment."""
        self._numbers = array("q")
        """The numbers sent so far, in order."""

    def begin(self) -> None:
        """Sends the first inputs."""
        for ingress in self._service.ingresses:
            ingress.settled = self._settled
        self._service.events.at(0.0, ARRIVES, self._send, self._load.in_flight)

    def compact(self, outcome: Outcome) -> Outcome:
        """Returns the outcome of the sent inputs, in the order of sending."""
        numbers_N = np.frombuffer(self._numbers, dtype=np.int64)
        return replace(
            outcome,
            arrived_s_R=np.frombuffer(self._service.ledger.arrived_s)[numbers_N],
            latency_s_N=outcome.latency_s_N[numbers_N],
            exit_N=outcome.exit_N[numbers_N],
            drop_N=outcome.drop_N[numbers_N],
        )

    def _settled(self, number: int, answered: bool) -> None:
        """Replaces settled inputs by new ones. Inputs that are sent at the same time are sent together."""
        if not answered:
            self._service.events.at(self._service.events.time_s + self._load.pause_s, ARRIVES, self._send, number)
            return
        if not self._due:
            self._service.events.at(self._service.events.time_s, ARRIVES, self._send_due)
        self._due += number

    def _send_due(self, _: None) -> None:
        number, self._due = self._due, 0
        self._send(number)

    def _send(self, number: int) -> None:
        now_s = self._service.events.time_s
        if now_s >= self._service.scenario.duration_s:
            return
        sent = [self._next_number(now_s) for _ in range(number)]
        ledger, ingresses = self._service.ledger, self._service.ingresses
        for each in sent:
            if each >= len(ledger.latency_s):
                ledger.extend(np.full(len(self._service.scenario.rows_N), np.nan))
            ledger.arrived_s[each] = now_s
        first = len(self._numbers)
        self._numbers.extend(sent)
        for turn, ingress in enumerate(ingresses):
            ingress.arrive_together(sent[(turn - first) % len(ingresses) :: len(ingresses)])

    def _next_number(self, now_s: float) -> int:
        mixes = self._load.mixes
        index = max(index for index, mix in enumerate(mixes) if mix.at_s <= now_s)
        turn, self._turns[index] = self._turns[index], self._turns[index] + 1
        rounds, place = divmod(turn, len(mixes[index].rows_N))
        return (rounds * len(mixes) + index) * len(mixes[index].rows_N) + place


class AcceleratorPool:
    """The accelerators of one type, numbered from 0. The lowest free one is taken first."""

    def __init__(self, count: int) -> None:
        self.holders: list[object] = [None] * count
        """By number, what has the accelerator; None if it is free."""

    def take(self, holder: object) -> bool:
        """Takes the lowest free accelerator; returns False if none is free."""
        return self.hand_over(None, holder)

    def hand_over(self, holder: object, other: object) -> bool:
        """Passes a holder's accelerator to another holder, or frees it (None); returns False if it has none."""
        has_one = holder in self.holders
        if has_one:
            self.holders[self.holders.index(holder)] = other
        return has_one


class SimulatedFleet(ServiceFleet):
    """Starts and stops replicas as Serve does: each type gets its number of replicas as accelerators become free.

    Broadcasts and reports take no time.
    """

    start_s = 10.0
    """The time from a free accelerator to a warm replica."""
    drain_s = 2.0
    """The interval at which Serve checks whether a stopped replica has finished its calls."""

    def __init__(self, service: SimulatedService) -> None:
        self.log: list[tuple[float, str]] = []
        """The actions on the service: time and text."""
        self._service = service
        self._events = service.events
        devices = service.scenario.problem.devices
        self._pools = {device: AcceleratorPool(supply.count) for device, supply in devices.items()}
        self._targets = dict.fromkeys(devices, 0)
        self._starts: dict[str, list[object]] = {device: [] for device in devices}
        """The replicas that were requested but do not run yet."""

    def boot(self) -> None:
        """Starts the replicas of the service's plan, which are ready immediately."""
        self._service.boot()
        for device, replicas in self._service.running.items():
            self._targets[device] = len(replicas)
            for replica in replicas.values():
                has_accelerator = self._pools[device].take(replica)
                assert has_accelerator, f"the plan needs more {device} than there are"

    async def scale(self, device: str, replicas: int) -> None:
        self.say(f"scale {device} to {replicas}")
        self._targets[device] = replicas
        self._reconcile(device)

    async def running(self) -> dict[str, int]:
        return {device: len(replicas) for device, replicas in self._service.running.items()}

    async def prepare(self, placed: PlacedPlan) -> None:
        """Prepares replicas that follow no plan yet. Others have nothing to compile or load in the simulation."""
        self.say(f"prepare {placed.epoch}")
        for assignment in assignments_of(placed).values():
            for replica in self._service.running[assignment.stage.device].values():
                if replica.epoch == NO_EPOCH:
                    replica.prepare([assignment])

    async def follow(self, placed: PlacedPlan) -> None:
        self.say(f"follow {placed.epoch}")
        self._service.follow(placed)

    async def suspend(self, reason: str) -> None:
        self.say("suspend")
        for ingress in self._service.ingresses:
            ingress.suspend(reason)

    async def ingress_reports(self) -> list[IngressReport]:
        now_s = self._events.time_s
        return [ingress.core.report(now_s, now_s) for ingress in self._service.ingresses]

    async def replica_reports(self) -> list[ReplicaReport]:
        return [
            ReplicaReport(
                slot=replica.slot,
                replica=replica.name,
                node="simulated",
                pid=0,
                device=replica.device,
                epoch=replica.epoch,
                waiting=replica.engine.num_waiting,
                times=replica.engine.times.runs(),
            )
            for replicas in self._service.running.values()
            for replica in replicas.values()
        ]

    async def capacity(self) -> dict[str, int]:
        return {device: len(each.holders) for device, each in self._pools.items()}

    def _reconcile(self, device: str) -> None:
        """Starts missing replicas of a type. Of surplus ones, it cancels those not started, then stops the newest."""
        starts, replicas = self._starts[device], list(self._service.running[device].values())
        change = self._targets[device] - len(replicas) - len(starts)
        if change >= 0:
            starts += [object() for _ in range(change)]
        else:
            for replica in replicas[len(replicas) + min(0, change + len(starts)) :]:
                self._service.stop(replica)
                self._call_later(self.drain_s, self._drained, replica)
            for start in starts[change:]:
                starts.remove(start)
                self._pools[device].hand_over(start, None)
        self._place(device)

    def _place(self, device: str) -> None:
        pool = self._pools[device]
        for start in self._starts[device]:
            if start not in pool.holders and pool.take(start):
                self._call_later(self.start_s, self._started, (device, start))

    def _started(self, started: tuple[str, object]) -> None:
        device, start = started
        if start in self._starts[device]:
            self._starts[device].remove(start)
            replica = self._service.start(device)
            self._pools[device].hand_over(start, replica)
            self.say(f"{replica.name} runs")

    def _drained(self, replica: SimulatedReplica) -> None:
        if replica.calls:
            self._call_later(self.drain_s, self._drained, replica)
        elif replica.is_up:
            self.say(f"{replica.name} ends")
            replica.die()
            self._pools[replica.device].hand_over(replica, None)
            self._place(replica.device)

    def _call_later(self, delay_s: float, action: Callable[[Any], None], argument: object) -> None:
        self._events.at(self._events.time_s + delay_s, CONTROLS, action, argument)

    def say(self, words: str) -> None:
        """Appends an entry to the log."""
        self.log.append((self._events.time_s, words))


EVENTS = 100_000
"""The largest number of controller events that are read; more than any simulation has."""
LINGER_S = 1.0
"""The interval of checks after the end of the load whether every input has its outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """The controller of a simulated service."""

    problem: PlanProblem
    """The problem for which the controller plans. It may differ from the scenario's problem, which is the true one."""
    settings: Mapping[str, Any]
    """Fields of `ControlSettings`."""
    records: ExitRecords
    """The observations of probes. The scenario's decisions must follow from them, row by row."""
    probe_share: float = 0.02
    hold: bool = False
    """Whether the first plan is held, so that only `orders` change it."""
    orders: tuple[Order, ...] = ()
    make_fleet: Callable[[SimulatedService], SimulatedFleet] = SimulatedFleet
    plan_s: float = 0.3
    """The seconds of forecasts and solver together."""
    linger_s: float = 60.0
    """The longest wait for inputs after the end of the load."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Controlled:
    """The result of a simulation with a controller."""

    outcome: Outcome
    plans: tuple[Mapping[str, Any], ...]
    """The plans that were in force or proposed, oldest first."""
    said: tuple[Mapping[str, Any], ...]
    """The controller's events, oldest first: `at_s`, `kind` and `words`."""
    done: tuple[tuple[float, str], ...]
    """The log of the fleet: time and text."""
    reports: tuple[IngressReport, ...]
    """The final reports of the ingresses. They contain the probes that were not reported before."""

    def words(self, *kinds: str) -> list[str]:
        """Returns the texts of the controller's events of some kinds."""
        return [str(each["words"]) for each in self.said if each["kind"] in kinds]


def simulate_controlled(
    scenario: Scenario, control: Control, *, closed: Closed | None = None, seed: int = 0
) -> Controlled:
    """Simulates a scenario that starts with its plan, while the controller replans.

    `closed`: a closed-loop load; the scenario then has no arrivals, and has the rows of the load. The simulation ends
    when every input has its outcome, or `linger_s` after the load. Equal arguments give equal results.
    """
    assert len(control.records) == scenario.decisions.num_rows, "records and decisions must have the same rows"
    run = _Run(scenario, control, seed)
    with closing(run.time), closing(run.history):
        return run.play(closed)


class _Run:
    """One simulation with its service, fleet and control loop."""

    def __init__(self, scenario: Scenario, control: Control, seed: int) -> None:
        self._scenario = scenario
        self._control = control
        self._seed = seed
        self._events = Events()
        self.time = SimulatedTime(self._events)
        self.history = History.open(Path(":memory:"), "simulated")
        placed = PlacedPlan(plan=scenario.plan)
        self._service = SimulatedService(scenario, self._events, placed, self._probing, self._decide)
        self._fleet = control.make_fleet(self._service)
        problem = replace(control.problem, probe_share=control.probe_share)
        settings = {"problem": problem, "policy": scenario.plan.policy, "state": ":memory:"}
        self._loop = ControlLoop(
            self._fleet,
            self.history,
            ControlSettings.model_validate({**settings, **control.settings}),
            first=placed,
            clock=self._events,
            sleep=asyncio.sleep,
            solve=_solve,
            off_loop=self._off_loop,
        )
        self._tasks: list[asyncio.Task[Any]] = []
        self._ended_s: float | None = None

    def play(self, closed: Closed | None) -> Controlled:
        self._fleet.boot()
        self._tasks = [self.time.create_task(self._loop.run())]
        self._tasks += [self.time.create_task(self._obey(order)) for order in self._control.orders]
        if self._control.hold:  # after the loop has started, because it restores the stored state
            self.time.call_soon(lambda: self._loop.update_state(hold=True))
        sender = None if closed is None else ClosedSender(self._service, closed)
        if sender is not None:
            sender.begin()
        self._events.at(self._scenario.duration_s, CONTROLS, self._end_when_done)
        interrupted = play(self._service).interrupted
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()  # raises the error of a failed task
        outcome = gather(self._service, interrupted=interrupted, ended_s=self._ended_s)
        now_s = self._events.time_s
        return Controlled(
            outcome=outcome if sender is None else sender.compact(outcome),
            plans=tuple(reversed(self.history.plans(EVENTS))),
            said=tuple(reversed(self.history.events(EVENTS))),
            done=tuple(self._fleet.log),
            reports=tuple(ingress.core.report(now_s, now_s) for ingress in self._service.ingresses),
        )

    def _decide(self, policy: PolicySpec | None) -> Decisions:
        """Returns the exit decisions under a policy: the scenario's or, under new thresholds, those of the records."""
        first, records = self._scenario.plan.policy, self._control.records
        if policy is None or policy.thresholds is None or policy == first:
            return self._scenario.decisions
        own = policy.thresholds
        return recorded(records, dict(own) if isinstance(own, Mapping) else dict.fromkeys(records.ramps, own))

    def _probing(self, index: int) -> Probing:
        control, rng = self._control, random.Random(f"{self._seed} {index}")
        return Probing(control.records, self._scenario.rows_N, control.probe_share, rng)

    async def _off_loop(self, forecast: Any, *arguments: Any) -> Any:
        found = forecast(*arguments)
        await asyncio.sleep(self._control.plan_s)
        return found

    async def _obey(self, order: Order) -> None:
        await asyncio.sleep(order.at_s)
        try:
            await self._loop.apply(plan_document(order.plan), hold=True)
        except OfframpError as refusal:  # live, the caller would get the error
            self._fleet.say(f"an operator's plan was refused: {refusal}")

    def _end_when_done(self, _: None) -> None:
        waiting = any(ingress.core.num_unanswered for ingress in self._service.ingresses)
        if waiting and self._events.time_s < self._scenario.duration_s + self._control.linger_s:
            self._events.at(self._events.time_s + LINGER_S, CONTROLS, self._end_when_done)
            return
        self._ended_s = self._events.time_s
        for task in self._tasks:
            task.cancel()


async def _solve(problem: PlanProblem, strategy: Strategy, _: float) -> Decision:
    return solve(problem, strategy)
