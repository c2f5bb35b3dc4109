"""Simulates a service that the live controller steers."""

from __future__ import annotations

import asyncio
import math
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from deployments.controller.act import ControlLoop
from deployments.controller.remember import History, PlanRow
from deployments.settings import ControlSettings
from deployments.wire.messages import IngressReport
from earlyexit.errors import DataError, OfframpError, PlanError
from optimizer.decision import Decision, Strategy
from optimizer.placement import PlacedPlan
from optimizer.plan import NO_RAMPS, Plan, PolicySpec
from optimizer.plan_file import plan_document
from optimizer.planner import solve
from optimizer.problem import PlanProblem
from profiles.records import ExitRecords
from simulator.events import CONTROLS, Events
from simulator.fleet import Delays, SimulatedFleet, SimulatedTime
from simulator.inputs import Decisions, IntArray, Probing, recorded
from simulator.outcome import Outcome
from simulator.scenario import FloatArray, Scenario
from simulator.service import SimulatedService
from simulator.simulate import gather, play


@dataclass(frozen=True, slots=True, kw_only=True)
class _At:
    at_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.at_s < math.inf:
            raise DataError(f"at_s must be a finite number of seconds from 0 on, not {self.at_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault(_At):
    """What goes wrong, or right again, at a time: a call of the fleet, such as `fleet.die("split-cpu-0")`."""

    happen: Callable[[SimulatedFleet], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mix(_At):
    """The inputs from a time on: rows of the decisions, in turn."""

    rows_N: IntArray


def rows_in_turn(mixes: Sequence[Mix], arrivals_s: FloatArray, inputs_per_request: int = 1) -> IntArray:
    """Returns the row of every input of requests that arrive then, for a `Scenario` whose inputs change.

    Raises DataError if the first mix begins late.
    """
    begins_s = np.array([mix.at_s for mix in mixes])
    if not len(mixes) or begins_s[0] > 0 or (np.diff(begins_s) <= 0).any():
        raise DataError("mixes begin at 0 s, and one after the other")
    counts = np.diff(np.append(np.searchsorted(arrivals_s, begins_s), len(arrivals_s))) * inputs_per_request
    return np.concatenate([np.resize(mix.rows_N, count) for mix, count in zip(mixes, counts, strict=True)])


ARRIVES = 4
"""Priority of the next input: new inputs come after everything else of the same moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """A closed load: a number of inputs in flight instead of a rate."""

    in_flight: int
    """Inputs."""
    mixes: tuple[Mix, ...]
    """All with the same number of rows."""
    pause_s: float = 0.1
    """Seconds after which an input without an answer is sent again. At 0, a service that refuses would be flooded."""

    def __post_init__(self) -> None:
        if self.in_flight < 1:
            raise DataError(f"at least one input must be in flight, not {self.in_flight}")
        if len({len(mix.rows_N) for mix in self.mixes}) != 1:
            raise DataError("all mixes of a closed loop have as many rows")

    @property
    def rows_N(self) -> IntArray:
        """The rows of this load's scenario."""
        return np.concatenate([mix.rows_N for mix in self.mixes])


class ClosedSender:
    """Sends a closed load. The inputs of a mix are numbered by its rows."""

    def __init__(self, service: SimulatedService, load: Closed) -> None:
        assert service.scenario.inputs_per_request == 1, "requests of a closed loop have one input"
        self._service = service
        self._events = service.events
        self._load = load
        self._turns = [0] * len(load.mixes)
        self._due = 0
        """Inputs to be sent at this moment."""
        self.numbers = array("q")
        """The numbers sent so far, in order."""

    def begin(self) -> None:
        """Send the first inputs."""
        self._events.at(0.0, ARRIVES, self._send, self._load.in_flight)

    def settled(self, number: int, answered: bool) -> None:
        """Send inputs in place of those that have their outcome; those of one moment are sent together."""
        if not answered:
            self._events.at(self._events.time_s + self._load.pause_s, ARRIVES, self._send, number)
        else:
            if not self._due:
                self._events.at(self._events.time_s, ARRIVES, self._send_due)
            self._due += number

    def compact(self, outcome: Outcome) -> Outcome:
        """Returns the outcome of the inputs that were sent, in order."""
        numbers_N = np.frombuffer(self.numbers, dtype=np.int64)
        return replace(
            outcome,
            arrived_s_R=np.frombuffer(self._service.ledger.arrived_s)[numbers_N],
            latency_s_N=outcome.latency_s_N[numbers_N],
            exit_N=outcome.exit_N[numbers_N],
            drop_N=outcome.drop_N[numbers_N],
        )

    def _send_due(self, _: None) -> None:
        number, self._due = self._due, 0
        self._send(number)

    def _send(self, number: int) -> None:
        now_s = self._events.time_s
        if now_s >= self._service.scenario.duration_s:
            return
        sent = [self._next_number(now_s) for _ in range(number)]
        ledger, ingresses = self._service.ledger, self._service.ingresses
        for each in sent:
            if each >= len(ledger.latency_s):
                ledger.extend(np.full(self._service.cycle, np.nan))
            ledger.arrived_s[each] = now_s
        first = len(self.numbers)
        self.numbers.extend(sent)
        for turn, ingress in enumerate(ingresses):
            ingress.arrive_together(sent[(turn - first) % len(ingresses) :: len(ingresses)])

    def _next_number(self, now_s: float) -> int:
        mixes = self._load.mixes
        index = max(index for index, mix in enumerate(mixes) if mix.at_s <= now_s)
        turn, self._turns[index] = self._turns[index], self._turns[index] + 1
        rounds, place = divmod(turn, len(mixes[index].rows_N))
        return rounds * self._service.cycle + index * len(mixes[index].rows_N) + place


EVENTS = 100_000
"""The most controller events that are read; more than any simulation has."""
LINGER_S = 1.0
"""After the end of the load, how often to check whether every input has its outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A plan given by an operator, put in force at a time and held."""

    at_s: float
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """The controller of a simulated service; refuses parts that do not fit together."""

    settings: ControlSettings
    problem: PlanProblem
    """The problem that the controller plans for; the true one is the scenario's."""
    records: ExitRecords
    """What probes observe; the scenario's decisions must follow from them, row by row."""
    probe_share: float = 0.02
    hold: bool = False
    """Whether the first plan is kept, and only `orders` change it."""
    orders: tuple[Order, ...] = ()
    delays: Delays = field(default_factory=Delays)
    plan_s: float = 0.3
    """The seconds of forecasts and solver together; live, 0.26 s and 0.01 s."""
    linger_s: float = 60.0
    """The longest wait for inputs after the load's end."""

    def __post_init__(self) -> None:
        if not 0 <= self.probe_share <= 1:
            raise DataError(f"probe_share must be a share, not {self.probe_share}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Controlled:
    """The result of a controlled simulation."""

    outcome: Outcome
    plans: tuple[PlanRow, ...]
    """The plans that were in force or proposed, oldest first."""
    said: tuple[Mapping[str, Any], ...]
    """The controller's events, oldest first: `at_s`, `kind` and `words`."""
    done: tuple[tuple[float, str], ...]
    """What happened to the fleet, with its second."""
    reports: tuple[IngressReport, ...]
    """All counts of the ingresses; probes are those that were not handed over before."""

    def words(self, *kinds: str) -> list[str]:
        """Returns the words of the controller's events of some kinds."""
        return [str(each["words"]) for each in self.said if each["kind"] in kinds]


def control_settings(problem: PlanProblem, **options: Any) -> ControlSettings:
    """A controller's settings in a simulation; `options` are further ones of `ControlSettings`."""
    return ControlSettings(problem=problem, policy=NO_RAMPS, state=":memory:", **options)


def simulate_controlled(
    scenario: Scenario,
    control: Control,
    *,
    faults: tuple[Fault, ...] = (),
    closed: Closed | None = None,
    seed: int = 0,
) -> Controlled:
    """Serve the scenario's requests, beginning with its plan, while the controller plans anew and things go wrong.

    `closed`: a closed loop's load, in place of arrivals; the scenario then has none, and the load's rows. Ends when
    every input has its outcome, or `linger_s` after the load. Equal arguments give equal results. Raises DataError for
    records of other inputs than the decisions.
    """
    if len(control.records) != scenario.decisions.num_rows:
        raise DataError(f"{len(control.records)} records of {scenario.decisions.num_rows} rows of decisions")
    made = _Run(scenario, control, closed, seed)
    with closing(made.time), closing(made.history):
        return made.run(faults)


class _Run:
    """One simulation; puts the parts together."""

    def __init__(self, scenario: Scenario, control: Control, closed: Closed | None, seed: int) -> None:
        self._scenario = scenario
        self._control = control
        self._events = Events()
        self.time = SimulatedTime(self._events)
        self._placed = PlacedPlan(plan=scenario.plan)
        self._service = SimulatedService(
            scenario, self._events, self._placed, partial(self._probing, seed), self._decide
        )
        self._load = None if closed is None else ClosedSender(self._service, closed)
        if self._load is not None:
            for ingress in self._service.ingresses:
                ingress.settled = self._load.settled
        counts = {device: supply.count for device, supply in scenario.problem.devices.items()}
        self._fleet = SimulatedFleet(self._service, counts, control.delays)
        self.history = History.open(Path(":memory:"), "simulated")
        self._tasks: list[asyncio.Task[Any]] = []
        self._ended_s: float | None = None

    def _decide(self, policy: PolicySpec | None) -> Decisions:
        """Under other thresholds than the first ones, the records decide which inputs leave where."""
        first, records = self._scenario.plan.policy, self._control.records
        if policy is None or policy.thresholds is None or policy == first:
            return self._scenario.decisions
        given = policy.thresholds
        return recorded(records, dict(given) if isinstance(given, Mapping) else dict.fromkeys(records.ramps, given))

    def _probing(self, seed: int, index: int) -> Probing:
        control, rng = self._control, random.Random(f"{seed} {index}")
        return Probing(control.records, self._scenario.rows_N, control.probe_share, rng)

    def run(self, faults: tuple[Fault, ...]) -> Controlled:
        self._fleet.boot()
        for fault in faults:
            self._events.at(fault.at_s, CONTROLS, fault.happen, self._fleet)
        self._loop = self._control_loop()
        self._tasks = [self.time.create_task(self._loop.run())]
        self._tasks += [self.time.create_task(self._obey(order)) for order in self._control.orders]
        if self._control.hold:
            self.time.call_soon(self._hold)  # once the loop has begun: it would take a standing before that up again
        if self._load is not None:
            self._load.begin()
        self._events.at(self._scenario.duration_s, CONTROLS, self._end_when_done)
        interrupted = play(self._service).interrupted
        return self._gather(gather(self._service, interrupted=interrupted, ended_s=self._ended_s))

    def _control_loop(self) -> ControlLoop:
        control = self._control
        policy = self._scenario.plan.policy
        if policy is None:
            raise PlanError("a controller needs the policy of the plan to begin with")
        return ControlLoop(
            self._fleet,
            self.history,
            control.settings.model_copy(update={"problem": control.problem, "policy": policy}),
            first=self._placed,
            clock=self._events,
            sleep=asyncio.sleep,
            solve=_solve,
            off_loop=self._off_loop,
        )

    def _hold(self) -> None:
        self._loop.become(hold=True)

    async def _off_loop(self, forecast: Any, now_s: float) -> Any:
        found = forecast(now_s)
        await asyncio.sleep(self._control.plan_s)
        return found

    async def _obey(self, order: Order) -> None:
        await asyncio.sleep(order.at_s)
        try:
            await self._loop.apply(plan_document(order.plan), hold=True)
        except OfframpError as refusal:  # live, the caller would get the error
            self._fleet.say(f"an order is not carried out: {refusal}")

    def _end_when_done(self, _: None) -> None:
        waiting = any(ingress.core.num_unanswered for ingress in self._service.ingresses)
        if waiting and self._events.time_s < self._scenario.duration_s + self._control.linger_s:
            self._events.at(self._events.time_s + LINGER_S, CONTROLS, self._end_when_done)
            return
        self._ended_s = self._events.time_s
        for task in self._tasks:
            task.cancel()

    def _gather(self, outcome: Outcome) -> Controlled:
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()  # raises what ended it
        plans = tuple(reversed(self.history.plans(EVENTS)))
        said = tuple(reversed(self.history.events(EVENTS)))
        now_s = self._events.time_s
        return Controlled(
            outcome=outcome if self._load is None else self._load.compact(outcome),
            plans=plans,
            said=said,
            done=tuple(self._fleet.log),
            reports=tuple(ingress.core.report(now_s, now_s) for ingress in self._service.ingresses),
        )


async def _solve(problem: PlanProblem, strategy: Strategy) -> Decision:
    return solve(problem, strategy)
