"""Ingresses and replicas on virtual time, and the calls between them.

An ingress is the live core and its driver, with events in place of connections and timers. A replica is the live batch
engine, on an accelerator whose time is a latency profile's.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from deployments.ingress.core.calls import AbortCall, Action, Answered, Call, Dropped, SendCall, call_weight
from deployments.ingress.core.ingress_core import CALL_GRACE_S, Driver, IngressCore
from deployments.ingress.core.inputs import IngressOptions, PendingInput
from deployments.ingress.core.routes import ReplicaLoad, StageReplicas
from deployments.settings import ServeSettings
from deployments.wire.messages import Assignment
from earlyexit.engine.engine import Batch, BatchEngine
from earlyexit.engine.queue import NO_SEQUENCE, Member
from earlyexit.engine.times import ObservedTimes
from earlyexit.errors import DeadlineError, OfframpError
from optimizer.placement import PlacedPlan
from optimizer.problem import PlanProblem
from simulator.events import COMES, ENDS, WAKES, Events
from simulator.inputs import NetworkTokens, Probing, recorded_loss
from simulator.outcome import REASONS, Ledger
from simulator.scenario import Scenario
from simulator.work import Ended, Exit, Input, SideBySide, Works


class Trip(Call):
    """A call, with what its ingress knows of it; it is the `origin` of its members until they have another call."""

    __slots__ = ("hosting", "ingress", "members", "weight")

    ingress: SimulatedIngress
    members: Sequence[Input]
    hosting: ReplicaLoad[SimulatedReplica] | None
    """The replica that has it; None before."""
    weight: int
    """Its weight among the loads of its replica (`weight_of`)."""

    def begin(self, ingress: SimulatedIngress, members: Sequence[Input]) -> None:
        """Set the ingress that sends it, and its members."""
        self.ingress = ingress
        self.members = members
        self.hosting = None
        reserve_s = self.reserve_s
        for member in members:
            member.origin = self
            member.reserve_s = reserve_s

    def left(self) -> list[PendingInput]:
        """Returns the inputs that have not left the replica."""
        return [member.payload for member in self.members if member.origin is self]


def by_trip(members: Sequence[Input]) -> Sequence[tuple[Trip, Sequence[Input]]]:
    """Groups the members of a batch by the call that brought them."""
    first: Any = members[0].origin
    for member in members:
        if member.origin is not first:
            break
    else:
        return ((first, members),)
    groups: dict[Trip, list[Input]] = {}
    for member in members:
        trip: Any = member.origin
        if trip in groups:
            groups[trip].append(member)
        else:
            groups[trip] = [member]
    return list(groups.items())


NOTHING = -1
"""The epoch of a replica that follows no plan yet."""


class SimulatedReplica:
    """The live device's loop, driven by events; its batches are run by the profile."""

    def __init__(
        self,
        name: str,
        index: int,
        device: str,
        works: Works,
        problem: PlanProblem,
        events: Events,
        starts: Collection[int] = (),
    ) -> None:
        """`starts`: the blocks that networks of a chain begin with."""
        self.name = name
        self.index = index
        self.device = device
        self.epoch = NOTHING
        self.slot = ""
        """The stage that it hosts; empty before it follows a plan."""
        self.stay: Stay | None = None
        self.is_up = True
        self.since_s = events.time_s
        """When it began to take calls."""
        self.until_s = math.inf
        """When it stopped taking them."""
        self.busy_s = 0.0
        self.trips: set[Trip] = set()
        """The calls that have inputs inside."""
        self.engine: BatchEngine[PendingInput] = BatchEngine((), ObservedTimes(), starts=starts)
        self._problem = problem
        self._events = events
        self._holds = False
        """Whether no batch may start now: dropping inputs makes room at the ingress, which then sends more."""
        self._beside = SideBySide(events, lambda: self.is_up, self._exit, self._end)
        self._wakes_s = -1.0
        self._sends_until_s = 0.0
        self.works = works
        """What its batches do, at which pace."""

    def held_s(self, ended_s: float) -> float:
        """Returns how long it took calls, in a simulation that ended then."""
        return min(self.until_s, ended_s) - self.since_s

    def prepare(self, assignments: Iterable[Assignment]) -> None:
        """Learn the profile's seconds of the splits of some stages, as a warm-up does."""
        for split in (split for each in assignments for split in each.stage.splits):
            for size, tokens in self.works.known(split):
                first_s, total_s = self.works.pace.split_s(split, self.works.pace.size_of(size, tokens))
                self.engine.times.observe(split, size, tokens, first_s, total_s)

    def follow(self, assignment: Assignment) -> None:
        """Follow an assignment from the next batch on, unless it is of an older plan than the present one."""
        if assignment.epoch > self.epoch or (assignment.epoch == self.epoch and assignment.slot != self.slot):
            self.engine.follow(assignment.stage.splits, assignment.dispatch, assignment.order)
            self.epoch, self.slot = assignment.epoch, assignment.slot

    def submit(self, trip: Trip, block: int) -> None:
        """Queue the inputs of a call that has arrived."""
        if not self.is_up:
            return
        assignment = trip.stage.assignment
        self.follow(assignment)
        self.engine.submit(block, trip.members, self._events.time_s, assignment.allowed_splits)
        if not self._holds and self.engine.may_begin:
            self._start()

    def end(self, sequence: int) -> None:
        """Note that a sequence is over, and await no step of it."""
        if not self.is_up:
            return
        self.engine.remove_sequences((sequence,))
        if not self._holds and self.engine.may_begin:
            self._start()

    def die(self) -> list[Trip]:
        """End at once; returns the calls that were inside, the oldest first."""
        self.is_up = False
        trips, self.trips = self.trips, set()
        return sorted(trips, key=lambda trip: (trip.started_s, trip.members[0].payload.serial))

    def _start(self) -> None:
        """Run what the engine chooses, while the device takes more."""
        self._holds = True
        choice = self.engine.begin(self._events.time_s)
        while choice.dropped or choice.batch is not None:
            if choice.dropped:
                self._lose(choice.dropped)
            if choice.batch is not None:
                self._run(choice.batch)
            choice = self.engine.begin(self._events.time_s)
        self._holds = False
        if choice.wake_s is not None and choice.wake_s != self._wakes_s:
            self._wakes_s = choice.wake_s
            self._events.at(max(choice.wake_s, self._events.time_s), ENDS, self._wake, choice.wake_s)

    def _lose(self, dropped: Sequence[Input]) -> None:
        for trip, members in by_trip(dropped):
            trip.ingress.lose(trip, members)

    def _wake(self, wake_s: float) -> None:
        if self._wakes_s == wake_s:
            self._wakes_s = -1.0
            if self.is_up and not self._holds and self.engine.may_begin:
                self._start()

    def _run(self, batch: Batch[PendingInput]) -> None:
        """Run a batch: inputs leave at the ramps inside, and it goes on without them.

        A batch that stays goes on with all inputs: active ramps answer them early, and every ramp looks at probes.
        """
        if batch.split.overlap_below is not None or self.engine.num_running > 1:
            self._beside.begin(batch, self.works, self._problem.ramps)
            return
        split, started_s, stays = batch.split, batch.started_s, batch.stays
        work = self.works.of(split)
        exits, last, going_on = work.part(batch)
        inside, at, before_s, first_s = work.size_of(batch.members), 0, 0.0, None
        until_s = work.until_s(inside, self._problem.ramps if batch.probe else None)
        at_end = [] if last is None else [last]
        for ramp, leaving in exits:
            end = ramp + 1 - split.first
            took_s = before_s + (until_s[end] - until_s[at])
            if work.is_late and not stays:
                at_end.append((ramp, leaving))
            else:
                first_s = took_s if first_s is None else first_s
                answer = self._answer_early if stays else self._release
                self._events.at(started_s + took_s, ENDS, answer, (ramp, leaving))
            if not stays:
                at, before_s, inside = end, took_s, inside - work.size_of(leaving)
                until_s = work.until_s(inside)
        end = (split.end if last is None else last[0] + 1) - split.first
        num_waiting = sum(len(leaving) for _, leaving in at_end) if work.is_late else 0
        took_s = before_s + (until_s[end] - until_s[at]) + work.end_s(inside if going_on else None, num_waiting)
        self._events.at(started_s + took_s, ENDS, self._end, (batch, work, first_s, took_s, at_end, going_on))

    def _exit(self, batch: Batch[PendingInput], leaving: Exit) -> None:
        if batch.stays:
            self._answer_early(leaving)
            return
        self._release(leaving)
        self.engine.shrink(batch, len(leaving[1]))
        if not self._holds and self.engine.may_begin:
            self._start()

    def _release(self, leaving: Exit) -> None:
        if self.is_up:
            block, members = leaving
            for trip, mine in by_trip(members):
                trip.ingress.answer(trip, mine, block)

    def _answer_early(self, leaving: Exit) -> None:
        if self.is_up:
            block, members = leaving
            new = [member for member in members if not member.answered]
            for member in new:
                member.answered = True
            for trip, mine in by_trip(new) if new else ():
                trip.ingress.answer_early(mine, block)

    def _end(self, ended: Ended) -> None:
        batch, work, first_s, total_s, at_end, going_on = ended
        if not self.is_up:
            return
        self._holds = True
        now_s = self._events.time_s
        answered = self._answered(batch, going_on) or None
        busy_s = self.engine.end(batch, first_s=first_s, total_s=total_s, now_s=now_s, answered=answered)
        self.engine.leave(batch, now_s)
        self.busy_s += busy_s
        work.count(batch, busy_s)
        for leaving in at_end:
            self._release(leaving)
        if going_on:
            self._go_on(batch.split.end, going_on)
        self._start()

    def _answered(self, batch: Batch[PendingInput], going_on: Sequence[Input]) -> list[int]:
        """Returns the sequences whose steps a batch answered."""
        members = batch.members
        if members[0].sequence == NO_SEQUENCE:
            return []
        on = set() if batch.split.end == self._problem.num_blocks else {id(member) for member in going_on}
        return [member.sequence for member in members if id(member) not in on]

    def _go_on(self, block: int, members: list[Input]) -> None:
        if block == self._problem.num_blocks:
            self._release((block - 1, members))
        elif not self.engine.go_on(block, members, self._events.time_s):
            # A replica sends one batch's survivors at a time, and computes meanwhile (E3 section 3.2.2).
            begins_s = max(self._events.time_s, self._sends_until_s)
            self._sends_until_s = begins_s + _hop_s(self._problem, block, self.works.inputs_of(members))
            self._events.at(self._sends_until_s, ENDS, self._sent, (block, members))

    def _sent(self, sent: tuple[int, list[Input]]) -> None:
        if self.is_up:
            block, members = sent
            for trip, mine in by_trip(members):
                trip.ingress.go_on(trip, mine, block)


def _hop_s(problem: PlanProblem, block: int, num_inputs: float) -> float:
    """E3's T_x: sending the survivors that wait for a block (section 3.2.1)."""
    link = problem.link
    return link.delay_s + num_inputs * (problem.bytes_per_sample_N[block - 1] / link.bandwidth_bytes_per_s)


@dataclass(slots=True, eq=False)
class Stay:
    """A replica's time at one stage."""

    replica: SimulatedReplica
    since_s: float
    busy_before_s: float
    until_s: float = math.inf
    busy_after_s: float | None = None
    """Seconds that the replica had run when it went to another stage; None while it is at this one."""

    def held_s(self, ended_s: float) -> float:
        """Returns its length, in a simulation that ended then."""
        return min(self.until_s, ended_s) - self.since_s

    @property
    def busy_s(self) -> float:
        """The seconds that the replica ran batches meanwhile."""
        return (self.replica.busy_s if self.busy_after_s is None else self.busy_after_s) - self.busy_before_s


class Slot:
    """The replicas that host one stage, and what they have of every ingress."""

    def __init__(self, name: str, device: str, num_ingresses: int) -> None:
        self.name = name
        self.device = device
        self.replicas: list[SimulatedReplica] = []
        """In the order in which they were started."""
        self.stays: list[Stay] = []
        self.pending: list[tuple[Trip, int, float]] = []
        """The calls that found no replica, with their block and delay."""
        self.of = [StageReplicas[SimulatedReplica](index / num_ingresses) for index in range(num_ingresses)]
        """What each ingress knows of them."""

    def host(self, replicas: Sequence[SimulatedReplica], now_s: float) -> None:
        """Send calls to these replicas from now on; others end those that they have."""
        before, self.replicas = set(self.replicas), list(replicas)
        for each in self.of:
            each.set_replicas(replicas)
        for replica in replicas:
            if replica not in before and (replica.stay is None or replica.stay not in self.stays):
                self._join(replica, now_s)

    def withdraw(self, trip: object) -> None:
        """Have a call no longer wait for a replica."""
        self.pending = [waiting for waiting in self.pending if waiting[0] is not trip]

    def _join(self, replica: SimulatedReplica, now_s: float) -> None:
        if replica.stay is not None:
            replica.stay.until_s, replica.stay.busy_after_s = now_s, replica.busy_s
        replica.stay = Stay(replica, now_s, replica.busy_s)
        self.stays.append(replica.stay)


WAITS_S: float = ServeSettings.model_fields["default_timeout_s"].default
"""How long a call waits for a replica if there is no SLO."""
MAX_ATTEMPTS: int = ServeSettings.model_fields["max_attempts"].default
TOO_LATE: Final = DeadlineError("the deadline could no longer be met, so the input was not run")

Settled = Callable[[int, bool], None]
"""Called with the number of inputs that have their outcome, and whether it is an answer."""


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
        options = _options(scenario, probing)
        core = IngressCore(f"ingress#{index}", placed, options, rng, make_call=Trip)
        super().__init__(core, events)
        self.settled: Settled = lambda _number, _answered: None
        self._probing = probing
        self._slots = slots
        self._ledger = ledger
        self._events = events
        self._slo_s = scenario.slo_s
        lengths_R = scenario.lengths_R
        self._tokens = None if lengths_R is None else NetworkTokens(scenario.problem, lengths_R[scenario.rows_N])
        self._per_request = scenario.inputs_per_request
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

    def abort_call(self, abort_call: AbortCall) -> None:
        trip = abort_call.call
        assert isinstance(trip, Trip)
        self._slots[trip.stage.slot].withdraw(trip)
        if trip.hosting is not None and trip in trip.hosting.replica.trips:
            trip.hosting.replica.engine.forget(trip)
            self._end(trip)

    # Send

    def send(self, send: SendCall) -> None:
        trip, block, members, network, rows = send
        assert isinstance(trip, Trip)
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
        delay_s = self._crossing_s if crosses else 0.0
        if not self.go(trip, block, delay_s):
            self._slots[trip.stage.slot].pending.append((trip, block, delay_s))
            if math.isinf(self._slo_s):
                self._events.at(self._events.time_s + WAITS_S + CALL_GRACE_S, COMES, self._wait_no_more, trip)

    def go(self, trip: Trip, block: int, delay_s: float) -> bool:
        """Pass a call to a replica; returns False where its slot has none."""
        replicas = self._slots[trip.stage.slot].of[self.index]
        if not replicas.is_up:
            return False
        trip.weight, batch = call_weight(trip.stage, block, trip.inputs)
        self._set_off(trip, replicas.assign(trip.weight, batch, fills=trip.stage.assignment.fills), block, delay_s)
        return True

    def _set_off(self, trip: Trip, hosting: ReplicaLoad[SimulatedReplica], block: int, delay_s: float) -> None:
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
        self.core.counts.record_crossings(block, [self._crossing_s] * len(entering))
        return entering

    def _wait_no_more(self, trip: Trip) -> None:
        if trip.hosting is None:
            self._slots[trip.stage.slot].withdraw(trip)
            self.restart(trip)

    # Replies

    def answer(self, trip: Trip, members: Sequence[Input], block: int) -> None:
        inputs = _inputs_of(members)
        if trip.watch is not None and self._probing is not None:
            ramps = self._probing.shape.ramps if trip.probe else inputs[0].chain.current.route.ramps
            self.core.observe(trip, self._probing.seen(inputs, ramps))
        self._part_of(trip, self.core.answer(trip, inputs, block, self._events.time_s))

    def answer_early(self, members: Sequence[Input], block: int) -> None:
        """Pass on answers to inputs that stayed, and may have another call by now."""
        inputs = _inputs_of(members)
        for call in {each.holder: None for each in inputs}:
            if isinstance(call, Call):
                self.do(self.core.answer_early(call, inputs, block, self._events.time_s))

    def lose(self, trip: Trip, members: Sequence[Input]) -> None:
        self._part_of(trip, self.core.lose(trip, _inputs_of(members), TOO_LATE, self._events.time_s))

    def go_on(self, trip: Trip, members: Sequence[Input], block: int) -> None:
        self._part_of(trip, self.core.go_on(trip, _inputs_of(members), block, members, self._events.time_s))

    def restart(self, trip: Trip) -> None:
        """Have the inputs of a call whose replica is dead, or that found none, start again."""
        self.do(self.core.fail(trip, trip.left(), self._events.time_s))

    def _part_of(self, trip: Trip, actions: Iterable[Action]) -> None:
        """Carry out what a part of a call's reply led to."""
        if not trip.num_remaining:
            self._end(trip)
        self.do(actions)

    def _end(self, trip: Trip) -> None:
        if trip.hosting is not None and trip in trip.hosting.replica.trips:
            trip.hosting.replica.trips.remove(trip)
            self._slots[trip.stage.slot].of[self.index].release(trip.hosting, trip.weight)
        trip.members = ()  # members refer to it too, and cycles are not collected here


def _options(scenario: Scenario, probing: Probing | None) -> IngressOptions:
    has_slo = not math.isinf(scenario.slo_s)
    return IngressOptions(
        max_queued=math.inf if scenario.max_queued is None else scenario.max_queued,
        calls_per_replica=scenario.calls_per_replica,
        max_attempts=MAX_ATTEMPTS,
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
