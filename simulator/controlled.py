"""Simulates a service that the live controller steers."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from deployments.controller.act import ControlLoop
from deployments.controller.remember import History, PlanRow
from deployments.settings import ControlSettings
from deployments.wire.messages import IngressReport
from earlyexit.errors import OfframpError
from optimizer.decision import Decision, Strategy
from optimizer.placement import PlacedPlan
from optimizer.plan import Plan, PolicySpec
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


class Order(NamedTuple):
    """A plan given by an operator, put in force at a time and held."""

    at_s: float
    plan: Plan


class Mix(NamedTuple):
    """The inputs from a time on: rows of the decisions, in turn."""

    at_s: float
    rows_N: IntArray


def rows_in_turn(mixes: Sequence[Mix], arrivals_s: FloatArray, inputs_per_request: int = 1) -> IntArray:
    """Returns the row of every input of requests that arrive then, for a `Scenario` whose inputs change.

    The first mix begins at 0 s.
    """
    begins_s = [mix.at_s for mix in mixes]
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

    @property
    def rows_N(self) -> IntArray:
        """The rows of this load's scenario."""
        return np.concatenate([mix.rows_N for mix in self.mixes])


class ClosedSender:
    """Sends a closed load. The inputs of a mix are numbered by its rows."""

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
        """Send the first inputs."""
        for ingress in self._service.ingresses:
            ingress.settled = self._settled
        self._service.events.at(0.0, ARRIVES, self._send, self._load.in_flight)

    def compact(self, outcome: Outcome) -> Outcome:
        """Returns the outcome of the inputs that were sent, in order."""
        numbers_N = np.frombuffer(self._numbers, dtype=np.int64)
        return replace(
            outcome,
            arrived_s_R=np.frombuffer(self._service.ledger.arrived_s)[numbers_N],
            latency_s_N=outcome.latency_s_N[numbers_N],
            exit_N=outcome.exit_N[numbers_N],
            drop_N=outcome.drop_N[numbers_N],
        )

    def _settled(self, number: int, answered: bool) -> None:
        """Send inputs in place of those that have their outcome; those of one moment are sent together."""
        if not answered:
            self._service.events.at(self._service.events.time_s + self._load.pause_s, ARRIVES, self._send, number)
        else:
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


EVENTS = 100_000
"""The most controller events that are read; more than any simulation has."""
LINGER_S = 1.0
"""After the end of the load, how often to check whether every input has its outcome."""


MakeFleet = Callable[[SimulatedService, Mapping[str, int], Delays], SimulatedFleet]
"""From a service and its accelerators per type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """The controller of a simulated service."""

    problem: PlanProblem
    """The problem that the controller plans for; the true one is the scenario's."""
    settings: Mapping[str, Any]
    """Fields of `ControlSettings`."""
    records: ExitRecords
    """What probes observe; the scenario's decisions must follow from them, row by row."""
    probe_share: float = 0.02
    hold: bool = False
    """Whether the first plan is kept, and only `orders` change it."""
    orders: tuple[Order, ...] = ()
    delays: Delays = field(default_factory=Delays)
    make_fleet: MakeFleet = SimulatedFleet
    plan_s: float = 0.3
    """The seconds of forecasts and solver together; live, 0.26 s and 0.01 s."""
    linger_s: float = 60.0
    """The longest wait for inputs after the load's end."""


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


def simulate_controlled(
    scenario: Scenario, control: Control, *, closed: Closed | None = None, seed: int = 0
) -> Controlled:
    """Serve the scenario's requests, beginning with its plan, while the controller plans anew.

    `closed`: a closed loop's load, in place of arrivals; the scenario then has none, and the load's rows. Ends when
    every input has its outcome, or `linger_s` after the load. Equal arguments give equal results.
    """
    assert len(control.records) == scenario.decisions.num_rows, "records are of the decisions' rows"
    events, history = Events(), History.open(Path(":memory:"), "simulated")
    with closing(SimulatedTime(events)) as time, closing(history):
        return _Run(scenario, control, events, time, history, seed).run(closed)


class _Run:
    """One simulation; puts the parts together."""

    def __init__(
        self, scenario: Scenario, control: Control, events: Events, time: SimulatedTime, history: History, seed: int
    ) -> None:
        self._scenario = scenario
        self._control = control
        self._events = events
        self._time = time
        self._history = history
        self._seed = seed
        placed = PlacedPlan(plan=scenario.plan)
        self._service = SimulatedService(scenario, events, placed, self._probing, self._decide)
        counts = {device: supply.count for device, supply in scenario.problem.devices.items()}
        self._fleet = control.make_fleet(self._service, counts, control.delays)
        settings = {"problem": control.problem, "policy": scenario.plan.policy, "state": ":memory:"}
        self._loop = ControlLoop(
            self._fleet,
            history,
            ControlSettings.model_validate({**settings, **control.settings}),
            first=placed,
            clock=events,
            sleep=asyncio.sleep,
            solve=_solve,
            off_loop=self._off_loop,
        )
        self._tasks: list[asyncio.Task[Any]] = []
        self._ended_s: float | None = None

    def run(self, closed: Closed | None) -> Controlled:
        self._fleet.boot()
        self._tasks = [self._time.create_task(self._loop.run())]
        self._tasks += [self._time.create_task(self._obey(order)) for order in self._control.orders]
        if self._control.hold:  # once the loop has begun: it would take a standing before that up again
            self._time.call_soon(lambda: self._loop.update_state(hold=True))
        sender = None if closed is None else ClosedSender(self._service, closed)
        if sender is not None:
            sender.begin()
        self._events.at(self._scenario.duration_s, CONTROLS, self._end_when_done)
        interrupted = play(self._service).interrupted
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()  # raises what ended it
        outcome = gather(self._service, interrupted=interrupted, ended_s=self._ended_s)
        now_s = self._events.time_s
        return Controlled(
            outcome=outcome if sender is None else sender.compact(outcome),
            plans=tuple(reversed(self._history.plans(EVENTS))),
            said=tuple(reversed(self._history.events(EVENTS))),
            done=tuple(self._fleet.log),
            reports=tuple(ingress.core.report(now_s, now_s) for ingress in self._service.ingresses),
        )

    def _decide(self, policy: PolicySpec | None) -> Decisions:
        """Under other thresholds than the first ones, the records decide which inputs leave where."""
        first, records = self._scenario.plan.policy, self._control.records
        if policy is None or policy.thresholds is None or policy == first:
            return self._scenario.decisions
        given = policy.thresholds
        return recorded(records, dict(given) if isinstance(given, Mapping) else dict.fromkeys(records.ramps, given))

    def _probing(self, index: int) -> Probing:
        control, rng = self._control, random.Random(f"{self._seed} {index}")
        return Probing(control.records, self._scenario.rows_N, control.probe_share, rng)

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


async def _solve(problem: PlanProblem, strategy: Strategy) -> Decision:
    return solve(problem, strategy)
