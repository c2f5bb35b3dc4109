"""An ingress: the live core and its driver, with events in place of connections and timers."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from deployments.ingress.core.calls import Action, Answered, Call, Dropped, HungUp, SendCall, weigh
from deployments.ingress.core.ingress_core import HANG_S, Driver, IngressCore
from deployments.ingress.core.inputs import PendingInput, Rules
from deployments.ingress.core.routes import Hosting
from earlyexit.engine.queue import Member
from earlyexit.errors import DeadlineError, OfframpError
from optimizer.placement import PlacedPlan
from simulator.events import COMES, WAKES, Events
from simulator.inputs import NetworkTokens, Probing, recorded_loss
from simulator.outcome import REASONS, Ledger
from simulator.replica import Input, SimulatedReplica, Slot, Trip
from simulator.scenario import Scenario

WAITS_S = 30.0
"""How long a call waits for a replica if there is no SLO: `ServeSettings.default_timeout_s`."""
TOO_LATE: Final = DeadlineError("the deadline could no longer be met, so the input was not run")

Settled = Callable[[int, bool], None]
"""Called with the number of inputs that have their outcome, and whether it is an answer."""


def ignore_settled(number: int, answered: bool) -> None:
    """Does nothing."""


class SimulatedIngress(Driver):
    """The driver of one of several ingresses, on virtual time: calls are passed to simulated replicas."""

    def __init__(
        self,
        index: int,
        scenario: Scenario,
        events: Events,
        ledger: Ledger,
        placed: PlacedPlan,
        slots: Mapping[str, Slot],
        probing: Probing | None = None,
    ) -> None:
        """`index`: its position among the ingresses; `placed`: its first plan; `probing`: None without probes."""
        self.index = index
        rng = random.Random() if probing is None else probing.rng
        rules = _rules(scenario, probing)
        core = IngressCore(f"ingress#{index}", placed, rules, rng, make_call=Trip)
        super().__init__(core, events)
        self.settled: Settled = ignore_settled
        self._probing = probing
        self._slots = slots
        self._ledger = ledger
        self._events = events
        self._slo_s = scenario.slo_s
        tokens_C = tokens_in_turn(scenario)
        self._tokens = None if tokens_C is None else NetworkTokens(scenario.problem, tokens_C)
        self._per_request = scenario.inputs_per_request
        self._entry_s, self._answer_s = scenario.entry_s, scenario.answer_s
        self._crossing_s = scenario.problem.crossing_s
        self._has_networks = len(scenario.problem.networks) > 1
        self._admits = scenario.admission and not math.isinf(scenario.slo_s)

    # Receive

    def arrive(self, first: int) -> None:
        """Take a request, whose inputs are numbered from `first` on."""
        core, now_s = self.core, self._events.time_s
        numbers, deadline_s = range(first, first + self._per_request), now_s + self._slo_s
        try:
            if self._admits:
                core.check(self._per_request, deadline_s, now_s)
            if self._tokens is None:
                inputs = [PendingInput(number, now_s, deadline_s) for number in numbers]
            else:
                network, of = core.route.chains[0].network, self._tokens.of
                inputs = [PendingInput(number, now_s, deadline_s, of(number, network)) for number in numbers]
            core.submit(inputs, now_s)
        except OfframpError as refusal:
            self._drop(numbers, refusal.kind)
            return
        if core.is_due or core.wake_s < self._timer_s:
            self.do(())

    def arrive_together(self, firsts: Iterable[int]) -> None:
        """Take requests of one moment, which leave together, as live ones of the same turn of an event loop do."""
        self._is_busy = True
        for first in firsts:
            self.arrive(first)
        self._is_busy = False
        self.do(())

    # Drive

    def set_timer(self, at_s: float) -> None:
        self._events.at(max(at_s, self._events.time_s), WAKES, self._ring, at_s)

    def _ring(self, at_s: float) -> bool:
        """Wakes the core, unless the timer was set anew; returns whether there was anything to do."""
        return at_s == self._timer_s and self.wake()

    def answered(self, answered: Answered) -> None:
        inputs, block, _, took_s = answered
        latencies_s, exits = self._ledger.latency_s, self._ledger.exit
        for each, seconds in zip(inputs, took_s, strict=True):
            number = each.serial
            latencies_s[number] = seconds
            exits[number] = block
        self.settled(len(inputs), True)

    def dropped(self, dropped: Dropped) -> None:
        self._drop([each.serial for each in dropped.inputs], dropped.reason)

    def _drop(self, numbers: Sequence[int], reason: str) -> None:
        drop, code = self._ledger.drop, REASONS[reason]
        for number in numbers:
            drop[number] = code
        self.settled(len(numbers), False)

    def hung_up(self, hung_up: HungUp) -> None:
        trip = hung_up.call
        assert isinstance(trip, Trip)
        self._slots[trip.stage.slot].withdraw(trip)
        if trip.hosting is not None and trip in trip.hosting.replica.trips:
            trip.hosting.replica.engine.forget(trip)
            self._end(trip)

    # Send

    def send(self, send: SendCall) -> None:
        trip, block, members, network, rows = send
        assert isinstance(trip, Trip)
        enters = members is None
        if rows is not None:
            members = [members[row] for row in rows]
        crosses = network is not None and members is not None
        if network is not None and self._tokens is not None and self._has_networks:
            self._tokens.enter(trip.inputs, network, crossed=crosses)
        if members is None:
            members = self._members(trip)
        elif crosses:
            members = self._crossing(trip, block, members)
        trip.begin(self, members)
        delay_s = self._entry_s if enters else self._crossing_s if crosses else 0.0
        if not self.go(trip, block, delay_s):
            self._slots[trip.stage.slot].pending.append((trip, block, delay_s))
            if math.isinf(self._slo_s):
                self._events.at(self._events.time_s + WAITS_S + HANG_S, COMES, self._wait_no_more, trip)

    def go(self, trip: Trip, block: int, delay_s: float) -> bool:
        """Pass a call to a replica; returns False where its slot has none."""
        replicas = self._slots[trip.stage.slot].of[self.index]
        if not replicas.is_up:
            return False
        trip.weight, batch = weigh(trip.stage, block, trip.inputs)
        self._set_off(trip, replicas.take(trip.weight, batch), block, delay_s)
        return True

    def _set_off(self, trip: Trip, hosting: Hosting[SimulatedReplica], block: int, delay_s: float) -> None:
        trip.hosting, replica = hosting, hosting.replica
        replica.trips.add(trip)
        if delay_s:
            self._events.at(self._events.time_s + delay_s, COMES, _arrives, (trip, block))
        else:
            replica.submit(trip, block)

    def _members(self, trip: Trip) -> Sequence[Input]:
        """Returns the new inputs of a call as members of an engine's batches."""
        probe = trip.probe
        return [
            Member(sample_id="", payload=each, tokens=each.tokens, deadline_s=each.deadline_s, probe=probe)
            for each in trip.inputs
        ]

    def _crossing(self, trip: Trip, block: int, members: Sequence[Input]) -> list[Input]:
        """Returns the members that cross: an input whose request was given up does not."""
        entering = [member for member in members if member.payload.holder is trip]
        for member in entering:
            member.tokens = member.payload.tokens
        self.core.counts.cross(block, [self._crossing_s] * len(entering))
        return entering

    def _wait_no_more(self, trip: Trip) -> None:
        if trip.hosting is None:
            self._slots[trip.stage.slot].withdraw(trip)
            self.restart(trip)

    # Replies

    def answer(self, trip: Trip, members: Sequence[Input], block: int) -> None:
        if self._answer_s:
            for member in members:
                member.origin = None
            self._events.at(self._events.time_s + self._answer_s, COMES, self._take_answers, (trip, members, block))
        else:
            self._take_answers((trip, members, block))

    def answer_early(self, members: Sequence[Input], block: int) -> None:
        if self._answer_s:
            self._events.at(self._events.time_s + self._answer_s, COMES, self._take_early, (members, block))
        else:
            self._take_early((members, block))

    def lose(self, trip: Trip, members: Sequence[Input]) -> None:
        self._part_of(trip, self.core.lose(trip, _inputs_of(members), TOO_LATE, self._events.time_s))

    def go_on(self, trip: Trip, members: Sequence[Input], block: int) -> None:
        self._hear(trip)
        self._part_of(trip, self.core.go_on(trip, _inputs_of(members), block, members, self._events.time_s))

    def restart(self, trip: Trip) -> None:
        """Have the inputs of a call whose replica is dead, or that found none, start again."""
        self.do(self.core.fail(trip, trip.left(), self._events.time_s))

    def _take_answers(self, answers: tuple[Trip, Sequence[Input], int]) -> None:
        trip, members, block = answers
        inputs = _inputs_of(members)
        self._hear(trip)
        if trip.watch is not None and self._probing is not None:
            ramps = self._probing.shape.ramps if trip.probe else inputs[0].chain.present.route.ramps
            self.core.see(trip, self._probing.seen(inputs, ramps))
        self._part_of(trip, self.core.answer(trip, inputs, block, self._events.time_s))

    def _take_early(self, answers: tuple[Sequence[Input], int]) -> None:
        """Pass on answers to inputs that stayed, and may have another call by now."""
        members, block = answers
        inputs = _inputs_of(members)
        for call in {each.holder: None for each in inputs}:
            if isinstance(call, Call):
                self.do(self.core.answer_early(call, inputs, block, self._events.time_s))

    def _hear(self, trip: Trip) -> None:
        if trip.hosting is not None:
            self.core.hear(trip, trip.hosting.replica.busy, self._events.time_s)

    def _part_of(self, trip: Trip, actions: Iterable[Action]) -> None:
        """Carry out what a part of a call's reply led to."""
        if not trip.num_inside:
            self._end(trip)
        self.do(actions)

    def _end(self, trip: Trip) -> None:
        if trip.hosting is not None and trip in trip.hosting.replica.trips:
            trip.hosting.replica.trips.remove(trip)
            self._slots[trip.stage.slot].of[self.index].done(trip.hosting, trip.weight)
        trip.members = ()  # members refer to it too, and cycles are not collected here


def tokens_in_turn(scenario: Scenario) -> array[int] | None:
    """Returns the tokens of inputs in the order of their arrival, to be repeated; None where inputs have no length."""
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


def _inputs_of(members: Sequence[Input]) -> list[PendingInput]:
    return [member.payload for member in members]


def _arrives(arriving: tuple[Trip, int]) -> None:
    trip, block = arriving
    assert trip.hosting is not None
    trip.hosting.replica.submit(trip, block)
