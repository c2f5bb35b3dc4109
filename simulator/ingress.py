"""An ingress: the live core, driven by events in place of connections and timers."""

from __future__ import annotations

import math
import random
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from deployments.ingress.core.attempts import HANG_S
from deployments.ingress.core.ingress_core import IngressCore
from deployments.ingress.core.inputs import Action, Answered, Call, Dropped, HungUp, Rules, SendCall
from earlyexit.engine.queue import Member
from earlyexit.errors import DeadlineError, OfframpError
from optimizer.placement import PlacedPlan
from simulator.events import COMES, WAKES, Events
from simulator.inputs import NetworkTokens, Probing, recorded_loss
from simulator.outcome import REASONS, Ledger
from simulator.replica import Input, SimulatedReplica, Slot, Trip
from simulator.scenario import Scenario

WAITS_S = 30.0
"""For a replica, where there is no SLO: `ServeSettings.default_timeout_s`."""
TOO_LATE: Final = DeadlineError("the deadline could no longer be met, so the input was not run")

Settled = Callable[[int, bool], None]
"""Is told how many inputs have their outcome, and whether that is an answer."""


def ignore_settled(number: int, answered: bool) -> None:
    """Does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Where an ingress stands."""

    index: int
    """Among the service's ingresses."""
    scenario: Scenario
    events: Events
    ledger: Ledger
    placed: PlacedPlan
    """What it follows at first."""
    slots: Mapping[str, Slot]
    probing: Probing | None = None
    """None without probes."""


class SimulatedIngress:
    """One of several."""

    def __init__(self, around: Surroundings) -> None:
        scenario, probing = around.scenario, around.probing
        self.index = around.index
        self.settled: Settled = ignore_settled
        rng = random.Random() if probing is None else probing.rng
        self.core: IngressCore[int, Slot] = IngressCore(
            f"ingress#{self.index}", around.placed, around.slots, _rules(scenario, probing), rng, make_call=Trip
        )
        self._probing = probing
        self._slots = around.slots
        self._ledger = around.ledger
        self._events = around.events
        self._slo_s = scenario.slo_s
        tokens_C = tokens_in_turn(scenario)
        self._tokens = None if tokens_C is None else NetworkTokens(scenario.problem, tokens_C)
        self._per_request = scenario.inputs_per_request
        self._entry_s, self._answer_s = scenario.entry_s, scenario.answer_s
        self._crossing_s = scenario.problem.crossing_s
        self._has_networks = len(scenario.problem.networks) > 1
        self._admits = scenario.admission and not math.isinf(scenario.slo_s)
        self._todo: deque[Action] = deque()
        self._is_busy = False
        self._wakes_s = math.inf

    def arrive(self, first: int) -> None:
        """A request, whose inputs are numbered from `first` on."""
        core, now_s = self.core, self._events.time_s
        numbers, deadline_s = range(first, first + self._per_request), now_s + self._slo_s
        try:
            if self._admits:
                core.check(self._per_request, deadline_s, now_s)
            tokens = None if self._tokens is None else self._tokens_of(numbers, self._tokens)
            core.submit(numbers, tokens=tokens, arrived_s=now_s, deadline_s=deadline_s, now_s=now_s)
        except OfframpError as refusal:
            self._drop(numbers, refusal.kind)
            return
        if core.is_due or core.wake_s < self._wakes_s:
            self._do(())

    def arrive_together(self, firsts: Iterable[int]) -> None:
        """Requests of one moment, which leave together, as live ones of the same turn of an event loop do."""
        self._is_busy = True
        for first in firsts:
            self.arrive(first)
        self._is_busy = False
        self._do(())

    def follow(self, placed: PlacedPlan) -> None:
        """Go by this plan from now on."""
        self.core.follow(placed)
        self._do(())

    def suspend(self, reason: str) -> None:
        """There is no plan: what waits, and what arrives until the next one, is refused."""
        self._do(self.core.suspend(reason, self._events.time_s))

    def answer(self, trip: Trip, members: Sequence[Input], block: int) -> None:
        if self._answer_s:
            for member in members:
                member.origin = None
            self._events.at(self._events.time_s + self._answer_s, COMES, self._take_answers, (trip, members, block))
        else:
            self._take_answers((trip, members, block))

    def answer_early(self, trip: Trip, members: Sequence[Input], block: int) -> None:
        if self._answer_s:
            self._events.at(self._events.time_s + self._answer_s, COMES, self._take_early, (members, block))
        else:
            self._take_early((members, block))

    def lose(self, trip: Trip, members: Sequence[Input]) -> None:
        flights = [member.payload for member in members]
        self._part_of(trip, self.core.lose(trip, flights, TOO_LATE, self._events.time_s))

    def go_on(self, trip: Trip, members: Sequence[Input], block: int) -> None:
        flights = [member.payload for member in members]
        self._hear(trip)
        self._part_of(trip, self.core.go_on(trip, flights, block, members, self._events.time_s))

    def restart(self, trip: Trip) -> None:
        """Its replica is dead, or there is none for it: what has not left it starts again."""
        self._do(self.core.fail(trip, trip.left(), self._events.time_s))

    def go(self, trip: Trip, block: int, delay_s: float) -> bool:
        """Have a call take its way; False where its slot has no replica."""
        trip.weight, batch = trip.leg.weigh(block, trip.flights)
        replica = trip.leg.transport.choose(self.index, trip.weight, batch)
        if replica is None:
            return False
        self._set_off(trip, replica, block, delay_s)
        return True

    def _set_off(self, trip: Trip, replica: SimulatedReplica, block: int, delay_s: float) -> None:
        trip.replica = replica
        replica.trips.add(trip)
        if delay_s:
            self._events.at(self._events.time_s + delay_s, COMES, _arrives, (trip, block))
        else:
            replica.submit(trip, block)

    def _tokens_of(self, numbers: Sequence[int], tokens: NetworkTokens) -> list[int]:
        network = self.core.itinerary.chains[0].network
        return [tokens.of(number, network) for number in numbers]

    def _do(self, actions: Iterable[Action]) -> None:
        """Carry actions out, and whatever they lead to at once; a nested call leaves its actions to the outer one."""
        todo, core = self._todo, self.core
        if self._is_busy:
            todo.extend(actions)
            return
        self._is_busy = True
        for action in actions:
            self._carry_out(action)
        while todo or core.is_due:
            if todo:
                self._carry_out(todo.popleft())
            else:
                todo.extend(core.pump(self._events.time_s))
        self._is_busy = False
        if core.wake_s < self._wakes_s:
            self._wakes_s = core.wake_s
            self._events.at(max(core.wake_s, self._events.time_s), WAKES, self._wake, core.wake_s)

    def _carry_out(self, action: Action) -> None:
        if type(action) is Answered:
            self._answered(action)
        elif type(action) is SendCall:
            self._send(action)
        elif type(action) is Dropped:
            self._drop([flight.input for flight in action.flights], action.reason)
        elif type(action) is HungUp:
            self._hang_up(action.call)

    def _answered(self, answered: Answered) -> None:
        flights, block, _, took_s = answered
        latencies_s, exits = self._ledger.latency_s, self._ledger.exit
        for flight, seconds in zip(flights, took_s, strict=True):
            number = flight.input
            latencies_s[number] = seconds
            exits[number] = block
        self.settled(len(flights), True)

    def _drop(self, numbers: Sequence[int], reason: str) -> None:
        drop, code = self._ledger.drop, REASONS[reason]
        for number in numbers:
            drop[number] = code
        self.settled(len(numbers), False)

    def _send(self, send: SendCall) -> None:
        trip, block, members, network, rows = send
        assert isinstance(trip, Trip)
        enters = members is None
        if rows is not None:
            members = [members[row] for row in rows]
        crosses = network is not None and members is not None
        if network is not None and self._tokens is not None and self._has_networks:
            self._tokens.enter(trip.flights, network, crossed=crosses)
        if members is None:
            members = self._members(trip)
        elif crosses:
            members = self._crossing(trip, block, members)
        trip.begin(self, members)
        delay_s = self._entry_s if enters else self._crossing_s if crosses else 0.0
        if not self.go(trip, block, delay_s):
            trip.leg.transport.pending.append((trip, block, delay_s))
            if math.isinf(self._slo_s):
                self._events.at(self._events.time_s + WAITS_S + HANG_S, COMES, self._wait_no_more, trip)

    def _members(self, trip: Trip) -> Sequence[Input]:
        """Of a call that enters."""
        probe = trip.probe
        return [
            Member(sample_id="", payload=flight, tokens=flight.tokens, deadline_s=flight.deadline_s, probe=probe)
            for flight in trip.flights
        ]

    def _crossing(self, trip: Trip, block: int, members: Sequence[Input]) -> list[Input]:
        """An input whose request was given up does not cross."""
        entering = [member for member in members if member.payload.holder is trip]
        for member in entering:
            member.tokens = member.payload.tokens
        self.core.counts.cross(block, [self._crossing_s] * len(entering))
        return entering

    def _take_answers(self, answers: tuple[Trip, Sequence[Input], int]) -> None:
        trip, members, block = answers
        flights = [member.payload for member in members]
        self._hear(trip)
        if trip.watch is not None and self._probing is not None:
            ramps = self._probing.shape.ramps if trip.probe else flights[0].chain.present.route.ramps
            self.core.see(trip, self._probing.seen(flights, ramps))
        self._part_of(trip, self.core.answer(trip, flights, block, self._events.time_s))

    def _take_early(self, answers: tuple[Sequence[Input], int]) -> None:
        """Answers to inputs that stayed, and may have another call by now."""
        members, block = answers
        flights = [member.payload for member in members]
        for call in {flight.holder: None for flight in flights}:
            if isinstance(call, Call):
                self._do(self.core.answer_early(call, flights, block, self._events.time_s))

    def _hear(self, trip: Trip) -> None:
        if trip.replica is not None:
            self.core.hear(trip, trip.replica.busy, self._events.time_s)

    def _part_of(self, trip: Trip, actions: Iterable[Action]) -> None:
        """A part of a call's reply came back."""
        if not trip.num_inside:
            self._end(trip)
        self._do(actions)

    def _end(self, trip: Trip) -> None:
        if trip.replica is not None and trip in trip.replica.trips:
            trip.replica.trips.remove(trip)
            trip.leg.transport.done(self.index, trip.replica, trip.weight)
        trip.members = ()  # members refer to it too, and cycles are not collected here

    def _wake(self, wake_s: float) -> bool:
        """Whether there was anything to do."""
        if wake_s != self._wakes_s:
            return False
        self._wakes_s = math.inf
        actions = self.core.wake(self._events.time_s)
        self._do(actions)
        return bool(actions)

    def _hang_up(self, call: Call[int, Slot]) -> None:
        slot = call.leg.transport
        slot.withdraw(call)
        for trip in slot.trips():
            if trip is call and trip.replica is not None:
                trip.replica.forget(trip)
                self._end(trip)

    def _wait_no_more(self, trip: Trip) -> None:
        if trip.replica is None:
            trip.leg.transport.withdraw(trip)
            self.restart(trip)


def tokens_in_turn(scenario: Scenario) -> array[int] | None:
    """Tokens of inputs in the order in which they come; shorter than the inputs, it goes round."""
    if scenario.lengths_R is None:
        return None
    return array("i", scenario.lengths_R[scenario.rows_N].astype(np.int32).tobytes())


def _rules(scenario: Scenario, probing: Probing | None) -> Rules:
    has_slo = not math.isinf(scenario.slo_s)
    return Rules(
        max_queued=math.inf if scenario.max_queued is None else scenario.max_queued,
        calls_per_replica=scenario.calls_per_replica,
        max_attempts=scenario.max_attempts,
        slo_s=scenario.slo_s if has_slo else None,
        slack=scenario.problem.slo.slack,
        num_ingresses=scenario.num_ingresses,
        admits=scenario.admission,
        shape=None if probing is None else probing.shape,
        loss=recorded_loss,
        probe_share=0.0 if probing is None else probing.share,
    )


def _arrives(arriving: tuple[Trip, int]) -> None:
    trip, block = arriving
    assert trip.replica is not None
    trip.replica.submit(trip, block)
