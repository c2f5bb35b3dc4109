"""Ingresses and replicas on virtual time, and the calls between them.

A simulated ingress is the live core with a driver that uses events instead of connections and timers. A simulated
replica is the live batch engine; its batches take the time of a latency profile.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from deployments.ingress.core.calls import AbortCall, Action, Call, ReturnAnswers, ReturnErrors, SendCall
from deployments.ingress.core.ingress_core import Driver, IngressCore
from deployments.ingress.core.inputs import CALL_GRACE_S, IngressOptions, PendingInput
from deployments.ingress.core.routes import StageReplicas
from deployments.settings import ServeSettings
from deployments.wire.messages import Assignment
from earlyexit.engine.engine import Batch, BatchEngine, ObservedTimes
from earlyexit.engine.queue import NO_SEQUENCE, Member
from earlyexit.errors import DeadlineError, OfframpError, SequenceLostError
from optimizer.plans.plan import PlacedPlan
from optimizer.problems.problem import PlanProblem
from simulator.events import COMES, ENDS, WAKES, Events
from simulator.inputs import NetworkTokens, Probing, recorded_loss
from simulator.outcome import REASONS, Ledger
from simulator.scenario import Scenario
from simulator.work import Ended, Exit, Input, SideBySide, Works


class SimulatedCall(Call):
    """A call with the data of its simulated ingress. It is the `origin` of its members until their next call."""

    __slots__ = ("ingress", "members")

    ingress: SimulatedIngress
    members: Sequence[Input]

    def begin(self, ingress: SimulatedIngress, members: Sequence[Input]) -> None:
        """Sets the ingress that sends the call, and its members."""
        self.ingress = ingress
        self.members = members
        reserve_s = self.reserve_s
        for member in members:
            member.origin = self
            member.reserve_s = reserve_s


def by_call(members: Sequence[Input]) -> Sequence[tuple[SimulatedCall, Sequence[Input]]]:
    """Groups the members of a batch by the call that brought them."""
    first: Any = members[0].origin
    for member in members:
        if member.origin is not first:
            break
    else:
        return ((first, members),)
    groups: dict[Any, list[Input]] = {}
    for member in members:
        groups.setdefault(member.origin, []).append(member)
    return list(groups.items())


NO_EPOCH = -1
"""The epoch of a replica that does not follow a plan yet."""


class SimulatedReplica:
    """A replica whose device loop is driven by events. Its batches take the time of the profile."""

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
        """`starts`: the first blocks of the networks of a cascade."""
        self.name = name
        self.index = index
        self.device = device
        self.epoch = NO_EPOCH
        self.slot = ""
        """The slot of the hosted stage; empty before the replica follows a plan."""
        self.period: HostingPeriod | None = None
        self.is_up = True
        self.since_s = events.time_s
        """When the replica started to accept calls."""
        self.until_s = math.inf
        """When the replica stopped accepting calls."""
        self.busy_s = 0.0
        self.calls: set[SimulatedCall] = set()
        """The calls with inputs in the replica."""
        self.engine: BatchEngine[PendingInput] = BatchEngine((), ObservedTimes(), starts=starts)
        self._problem = problem
        self._events = events
        self._holds = False
        """Whether batches must not start yet: `_start` or `_end` is running, and dropped inputs may cause new calls."""
        self._beside = SideBySide(events, lambda: self.is_up, self._exit, self._end)
        self._wakes_s = -1.0
        self._sends_until_s = 0.0
        self.works = works
        """The work of its batches, with their times."""

    def prepare(self, assignments: Iterable[Assignment]) -> None:
        """Passes the profile's times of the splits of some stages to the engine, as a warm-up does."""
        self.engine.times.is_warm_up = True
        for split in (split for each in assignments for split in each.stage.splits):
            for size, tokens in self.works.warm_up_sizes(split):
                first_s, total_s = self.works.pace.split_s(split, self.works.pace.size_of(size, tokens))
                self.engine.times.observe(split, size, tokens, first_s, total_s)
        self.engine.times.is_warm_up = False

    def follow(self, assignment: Assignment) -> None:
        """Follows an assignment from the next batch on. Assignments of older plans are ignored."""
        if assignment.epoch > self.epoch or (assignment.epoch == self.epoch and assignment.slot != self.slot):
            self.engine.follow(assignment.stage.splits, assignment.dispatch, assignment.order)
            self.epoch, self.slot = assignment.epoch, assignment.slot

    def submit(self, call: SimulatedCall, block: int) -> None:
        """Queues the inputs of a call that has arrived."""
        if not self.is_up:
            return
        assignment = call.stage.assignment
        self.follow(assignment)
        self.engine.submit(block, call.members, self._events.time_s, assignment.allowed_splits)
        self._start()

    def end(self, sequence: int) -> None:
        """Frees a sequence that has ended, so that batches do not wait for its steps."""
        if self.is_up:
            self.engine.remove_sequences((sequence,))
            self._start()

    def die(self) -> list[SimulatedCall]:
        """Ends the replica immediately; returns its calls, oldest first."""
        self.is_up = False
        calls, self.calls = self.calls, set()
        return sorted(calls, key=lambda call: (call.started_s, call.members[0].payload.serial))

    def _start(self) -> None:
        """Starts batches until the engine has no batch that may start now."""
        if self._holds or not self.engine.may_begin:
            return
        self._holds = True
        choice = self.engine.begin(self._events.time_s)
        while choice.dropped or choice.batch is not None:
            if choice.dropped:
                for call, members in by_call(choice.dropped):
                    call.ingress.lose(call, members)
            if choice.batch is not None:
                self._run(choice.batch)
            choice = self.engine.begin(self._events.time_s)
        self._holds = False
        if choice.wake_s is not None and choice.wake_s != self._wakes_s:
            self._wakes_s = choice.wake_s
            self._events.at(max(choice.wake_s, self._events.time_s), ENDS, self._wake, choice.wake_s)

    def _wake(self, wake_s: float) -> None:
        if self._wakes_s == wake_s:
            self._wakes_s = -1.0
            if self.is_up:
                self._start()

    def _run(self, batch: Batch[PendingInput]) -> None:
        """Schedules the exits and the end of a batch. The batch shrinks when inputs leave at its ramps.

        If answered inputs stay, the batch does not shrink. Probes are evaluated by every ramp.
        """
        if batch.split.overlap_below is not None or len(self.engine.running) > 1:
            self._beside.begin(batch, self.works, self._problem.ramps)
            return
        split, started_s, stays = batch.split, batch.started_s, batch.stays
        work = self.works.of(split)
        exits, last, survivors = work.part(batch)
        inside = work.size_of(batch.members)
        until_s = work.until_s(inside, self._problem.ramps if batch.probe else None)
        num_done, before_s = 0, 0.0  # the blocks that ran before the batch last shrank, and their seconds
        first_s = None
        at_end = [] if last is None else [last]
        for ramp, leaving in exits:
            end = ramp + 1 - split.first
            took_s = before_s + (until_s[end] - until_s[num_done])
            if work.is_late and not stays:
                at_end.append((ramp, leaving))
            else:
                first_s = took_s if first_s is None else first_s
                answer = self._answer_early if stays else self._release
                self._events.at(started_s + took_s, ENDS, answer, (ramp, leaving))
            if not stays:
                num_done, before_s = end, took_s
                inside -= work.size_of(leaving)
                until_s = work.until_s(inside)
        end = (split.end if last is None else last[0] + 1) - split.first
        num_waiting = sum(len(leaving) for _, leaving in at_end) if work.is_late else 0
        took_s = before_s + (until_s[end] - until_s[num_done]) + work.end_s(inside if survivors else None, num_waiting)
        self._events.at(started_s + took_s, ENDS, self._end, Ended(batch, work, first_s, took_s, at_end, survivors))

    def _exit(self, batch: Batch[PendingInput], leaving: Exit) -> None:
        if batch.stays:
            self._answer_early(leaving)
            return
        self._release(leaving)
        self.engine.shrink(batch, len(leaving[1]))
        self._start()

    def _release(self, leaving: Exit) -> None:
        if self.is_up:
            block, members = leaving
            for call, mine in by_call(members):
                call.ingress.answer(call, mine, block)

    def _answer_early(self, leaving: Exit) -> None:
        if self.is_up:
            block, members = leaving
            new = [member for member in members if not member.answered]
            for member in new:
                member.answered = True
            for call, mine in by_call(new) if new else ():
                call.ingress.answer_early(mine, block)

    def _end(self, ended: Ended) -> None:
        batch, work, first_s, total_s, at_end, survivors = ended
        if not self.is_up:
            return
        self._holds = True
        now_s = self._events.time_s
        answered = self._answered(batch, survivors) or None
        busy_s = self.engine.end(batch, first_s=first_s, total_s=total_s, now_s=now_s, answered=answered)
        self.engine.leave(batch, now_s)
        self.busy_s += busy_s
        work.count(batch, busy_s)
        for leaving in at_end:
            self._release(leaving)
        if survivors:
            self._go_on(batch.split.end, survivors)
        self._holds = False
        self._start()

    def _answered(self, batch: Batch[PendingInput], survivors: Sequence[Input]) -> list[int]:
        """Returns the sequences whose steps a batch answered."""
        members = batch.members
        if members[0].sequence == NO_SEQUENCE:
            return []
        unanswered = set() if batch.split.end == self._problem.num_blocks else {id(member) for member in survivors}
        return [member.sequence for member in members if id(member) not in unanswered]

    def _go_on(self, block: int, members: list[Input]) -> None:
        if block == self._problem.num_blocks:
            self._release((block - 1, members))
        elif not self.engine.go_on(block, members, self._events.time_s):
            # A replica sends the survivors of one batch at a time while it computes (E3 section 3.2.2).
            begins_s = max(self._events.time_s, self._sends_until_s)
            self._sends_until_s = begins_s + self._hop_s(block, self.works.inputs_of(members))
            self._events.at(self._sends_until_s, ENDS, self._sent, (block, members))

    def _hop_s(self, block: int, num_inputs: float) -> float:
        """Returns the seconds for sending survivors to a block: T_x in E3 (section 3.2.1)."""
        problem = self._problem
        each_s = problem.bytes_per_sample_N[block - 1] / problem.bandwidth_of(self.device)
        return problem.link.delay_s + num_inputs * each_s

    def _sent(self, sent: tuple[int, list[Input]]) -> None:
        if self.is_up:
            block, members = sent
            for call, mine in by_call(members):
                call.ingress.go_on(call, mine, block)


@dataclass(slots=True, eq=False)
class HostingPeriod:
    """The time in which a replica hosts one stage."""

    replica: SimulatedReplica
    slot: Slot
    since_s: float
    busy_before_s: float
    until_s: float = math.inf
    busy_after_s: float | None = None
    """The replica's busy seconds at the end of the period; None before the end."""

    @property
    def busy_s(self) -> float:
        """The seconds in which the replica ran batches during the period."""
        return (self.replica.busy_s if self.busy_after_s is None else self.busy_after_s) - self.busy_before_s


class Slot:
    """The replicas that host one stage, and the state that each ingress has of them."""

    def __init__(self, name: str, device: str, num_ingresses: int) -> None:
        self.name = name
        self.device = device
        self.replicas: list[SimulatedReplica] = []
        """The replicas, in the order of their start."""
        self.periods: list[HostingPeriod] = []
        self.pending: dict[SimulatedCall, tuple[int, float]] = {}
        """The block and the delay of each call that waits for a replica."""
        self.by_ingress = [StageReplicas[SimulatedReplica](index / num_ingresses) for index in range(num_ingresses)]
        """What each ingress knows about the replicas."""

    def host(self, replicas: Sequence[SimulatedReplica], now_s: float) -> None:
        """Sets the replicas that get new calls. Other replicas finish the calls that they have."""
        self.replicas = list(replicas)
        for each in self.by_ingress:
            each.set_replicas(replicas)
        for replica in replicas:
            if replica.period is None or replica.period.slot is not self:
                self._join(replica, now_s)

    def _join(self, replica: SimulatedReplica, now_s: float) -> None:
        if replica.period is not None:
            replica.period.until_s, replica.period.busy_after_s = now_s, replica.busy_s
        replica.period = HostingPeriod(replica, self, now_s, replica.busy_s)
        self.periods.append(replica.period)


WAITS_S: float = ServeSettings.model_fields["default_timeout_s"].default
"""The time that a call waits for a replica if there is no SLO."""
TOO_LATE: Final = DeadlineError("the deadline could no longer be met, so the input was not run")

Settled = Callable[[int, bool], None]
"""Called with the number of settled inputs, and whether they were answered."""


class SimulatedIngress(Driver):
    """The driver of one ingress on virtual time. It passes calls to simulated replicas."""

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
        """`index`: the position among the ingresses. `placed`: the first plan. `probing`: None without probes."""
        self.index = index
        rng = random.Random() if probing is None else probing.rng
        options = _options(scenario, probing)
        core = IngressCore(f"ingress#{index}", placed, options, rng, make_call=SimulatedCall)
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
        """Submits a request, whose inputs are numbered from `first` on."""
        core, now_s = self.core, self._events.time_s
        numbers, deadline_s = range(first, first + self._per_request), now_s + self._slo_s
        try:
            if self._admits:
                core.check_admission(self._per_request, deadline_s, now_s)
            if self._tokens is None:
                inputs = [PendingInput(number, now_s, deadline_s) for number in numbers]
            else:
                network, of = min([chain.network for chain in core.chains.active]), self._tokens.of
                inputs = [PendingInput(number, now_s, deadline_s, of(number, network)) for number in numbers]
            core.submit(inputs, now_s)
        except OfframpError as refusal:
            self._drop(numbers, refusal.kind)
            return
        if core.is_due or core.wake_s < self._timer_s:
            self.do()

    def arrive_together(self, firsts: Iterable[int]) -> None:
        """Submits requests that arrive at the same time, so that they can share calls (as live requests do)."""
        self._is_busy = True
        for first in firsts:
            self.arrive(first)
        self._is_busy = False
        self.do()

    # Drive

    def set_timer(self, at_s: float) -> None:
        self._events.at(max(at_s, self._events.time_s), WAKES, self._ring, at_s)

    def _ring(self, at_s: float) -> bool:
        """Wakes the core, unless the timer was replaced; returns whether there was anything to do."""
        return at_s == self._timer_s and self.wake()

    def return_answers(self, action: ReturnAnswers) -> None:
        inputs, block, _, took_s = action
        latencies_s, exits = self._ledger.latency_s, self._ledger.exit
        for each, seconds in zip(inputs, took_s, strict=True):
            number = each.serial
            latencies_s[number] = seconds
            exits[number] = block
        self.settled(len(inputs), True)

    def return_errors(self, action: ReturnErrors) -> None:
        self._drop([each.serial for each in action.inputs], action.reason)

    def _drop(self, numbers: Sequence[int], reason: str) -> None:
        drop, code = self._ledger.drop, REASONS[reason]
        for number in numbers:
            drop[number] = code
        self.settled(len(numbers), False)

    def abort_call(self, abort_call: AbortCall) -> None:
        call = abort_call.call
        assert isinstance(call, SimulatedCall)
        self._slots[call.stage.slot].pending.pop(call, None)
        if call.replica_load is not None and call in call.replica_load.replica.calls:
            call.replica_load.replica.engine.forget(call)
            self._end(call)

    # Send

    def send(self, send: SendCall) -> None:
        call, block, members, network, rows = send
        assert isinstance(call, SimulatedCall)
        if rows is not None:
            members = [members[row] for row in rows]
        crosses = network is not None and members is not None
        if network is not None and self._tokens is not None and self._has_networks:
            self._tokens.enter(call.inputs, network, crossed=crosses)
        if members is None:
            members = self._members(call)
        elif crosses:
            members = self._crossing(call, block, members)
        call.begin(self, members)
        delay_s = self._crossing_s if crosses else 0.0
        if self.go(call, block, delay_s):
            return
        if self.core.chains.can_run:
            self.restart(call)
        else:
            self._slots[call.stage.slot].pending[call] = block, delay_s
            if math.isinf(self._slo_s):
                self._events.at(self._events.time_s + WAITS_S + CALL_GRACE_S, COMES, self._stop_waiting, call)

    def go(self, call: SimulatedCall, block: int, delay_s: float) -> bool:
        """Passes a call to a replica; returns False if its slot has no replica."""
        try:
            replica = call.choose_replica(self._slots[call.stage.slot].by_ingress[self.index], block)
        except SequenceLostError:
            self.restart(call)
            return True
        if replica is None:
            return False
        replica.calls.add(call)
        if delay_s:
            self._events.at(self._events.time_s + delay_s, COMES, partial(replica.submit, call), block)
        else:
            replica.submit(call, block)
        return True

    def _members(self, call: SimulatedCall) -> Sequence[Input]:
        """Returns the new inputs of a call as members of an engine's batches."""
        full, probe = call.counts_as_full, call.probe
        return [
            Member(
                sample_id="",
                payload=each,
                tokens=each.tokens,
                deadline_s=each.deadline_s,
                counts_as_full=full,
                probe=probe,
            )
            for each in call.inputs
        ]

    def _crossing(self, call: SimulatedCall, block: int, members: Sequence[Input]) -> list[Input]:
        """Returns the members that cross into another network. Inputs that were given up do not."""
        entering = [member for member in members if member.payload.holder is call]
        for member in entering:
            member.tokens = member.payload.tokens
        self.core.counts.record_crossings(block, [self._crossing_s] * len(entering))
        return entering

    def _stop_waiting(self, call: SimulatedCall) -> None:
        if self._slots[call.stage.slot].pending.pop(call, None) is not None:
            self.restart(call)

    # Replies

    def answer(self, call: SimulatedCall, members: Sequence[Input], block: int) -> None:
        inputs = _inputs_of(members)
        if call.watch is not None and self._probing is not None:
            ramps = self._probing.shape.ramps if call.probe else inputs[0].chain.current.ramps
            self.core.observe(call, self._probing.seen(inputs, ramps))
        self._handle_part(call, self.core.answer(call, inputs, block, self._events.time_s))

    def answer_early(self, members: Sequence[Input], block: int) -> None:
        """Passes early answers to the core. The inputs stayed, and may be in another call by now."""
        inputs = _inputs_of(members)
        for call in {each.holder: None for each in inputs}:
            if isinstance(call, Call):
                self.do(self.core.answer_early(call, inputs, block, self._events.time_s))

    def lose(self, call: SimulatedCall, members: Sequence[Input]) -> None:
        self._handle_part(call, self.core.lose(call, _inputs_of(members), TOO_LATE, self._events.time_s))

    def go_on(self, call: SimulatedCall, members: Sequence[Input], block: int) -> None:
        self._handle_part(call, self.core.go_on(call, _inputs_of(members), block, members, self._events.time_s))

    def restart(self, call: SimulatedCall) -> None:
        """Retries the inputs of a call whose replica died, or that found no replica."""
        self.do(self.core.fail(call, call.remaining(), self._events.time_s))

    def _handle_part(self, call: SimulatedCall, actions: Iterable[Action]) -> None:
        """Carries out the actions that follow from a part of a call's reply."""
        if not call.num_remaining:
            self._end(call)
        self.do(actions)

    def _end(self, call: SimulatedCall) -> None:
        if call.replica_load is not None and call in call.replica_load.replica.calls:
            call.replica_load.replica.calls.remove(call)
            call.leave_replica()
        call.members = ()  # breaks a reference cycle, because garbage collection is off


def _options(scenario: Scenario, probing: Probing | None) -> IngressOptions:
    sequences = scenario.sequences
    return IngressOptions(
        max_queued=math.inf if scenario.max_queued is None else scenario.max_queued,
        calls_per_replica=scenario.calls_per_replica,
        slo_s=scenario.slo_s,
        ttft_slo_s=math.inf if sequences is None else sequences.ttft_slo_s or math.inf,
        tpot_slo_s=math.inf if sequences is None else sequences.tpot_slo_s or math.inf,
        slack=scenario.problem.slo.slack,
        num_ingresses=scenario.num_ingresses,
        admits=scenario.admission,
        shape=None if probing is None else probing.shape,
        loss=recorded_loss,
        probe_share=0.0 if probing is None else probing.share,
    )


def _inputs_of(members: Sequence[Input]) -> list[PendingInput]:
    return [member.payload for member in members]
