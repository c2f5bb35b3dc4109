"""A stage's replica: the live batch engine, and an accelerator whose time is a latency profile's."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from deployments.ingress.core.flights import Flight
from deployments.messages import Assignment
from earlyexit.engine import Batch, BatchEngine
from earlyexit.loop import DeviceLoop
from earlyexit.member import NO_SEQUENCE
from earlyexit.times import ObservedTimes
from optimizer.problem import PlanProblem
from simulator.beside import Ended, SideBySide, remaining_of
from simulator.events import ENDS, Events
from simulator.trip import Input, Trip, by_trip
from simulator.work import Exit, Works

NOTHING = -1
"""The epoch of a replica that follows no plan yet."""


class SimulatedReplica:
    """The live device's loop, driven by events; its batches are run by the profile."""

    __slots__ = (
        "_beside",
        "_events",
        "_holds",
        "_loop",
        "_problem",
        "_sends_until_s",
        "_wakes_s",
        "_works",
        "alive",
        "busy_s",
        "device",
        "engine",
        "epoch",
        "index",
        "name",
        "since_s",
        "trips",
        "until_s",
    )

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
        self.alive = True
        self.since_s = events.time_s
        """When it began to take calls."""
        self.until_s = math.inf
        """When it stopped taking them."""
        self.busy_s = 0.0
        self.trips: set[Trip] = set()
        """Those of which inputs are inside."""
        self.engine: BatchEngine[Flight[int]] = BatchEngine((), ObservedTimes(), starts=starts)
        self._loop = DeviceLoop(self.engine)
        self._problem = problem
        self._events = events
        self._holds = False
        """Whether nothing is to start meanwhile: what is dropped makes room at the ingress, and more comes."""
        self._beside = SideBySide(events, lambda: self.alive, self._exit, self._end)
        self._wakes_s = -1.0
        self._sends_until_s = 0.0
        self._works = works

    @property
    def busy(self) -> float:
        """Share of its time that it had run when its latest batch began."""
        return self.engine.busy

    def prepare(self, assignment: Assignment) -> None:
        """Learn what the profile says of its splits, as a replica that warms up does, and follow it."""
        for split in assignment.stage.splits:
            for size, tokens in self._works.known(split):
                first_s, total_s = self._works.pace.split_s(split, self._works.pace.size_of(size, tokens))
                self.engine.times.observe(split, size, tokens, first_s, total_s)
        self.follow(assignment)

    def follow(self, assignment: Assignment) -> None:
        """Do as the assignment says from the next batch on, unless it is no newer than what is followed."""
        if assignment.epoch > self.epoch:
            self.engine.follow(assignment.stage.splits, assignment.dispatch, assignment.order, assignment.entry)
            self.epoch = assignment.epoch

    def submit(self, trip: Trip, block: int) -> None:
        """Queue a call's inputs, which have arrived."""
        if not self.alive:
            return
        assignment = trip.leg.assignment
        if assignment.epoch > self.epoch:
            self.follow(assignment)
        self.engine.submit(block, trip.members, self._events.time_s, assignment.known)
        if not self._holds and self._loop.may_begin:
            self._start()

    def forget(self, trip: Trip) -> None:
        """Throw out what is queued of a call that nobody waits for any more."""
        self.engine.forget(trip)

    def end(self, sequence: int) -> None:
        """One is over: nobody waits for its next step any more."""
        if not self.alive:
            return
        self.engine.take_out((sequence,))
        if not self._holds and self._loop.may_begin:
            self._start()

    def die(self) -> list[Trip]:
        """End at once; gives the calls that were inside, the oldest first."""
        self.alive = False
        trips, self.trips = self.trips, set()
        return sorted(trips, key=lambda trip: (trip.started_s, trip.members[0].payload.input))

    def become(self, works: Works) -> None:
        """Be so fast from the next batch on."""
        self._works = works

    def _start(self) -> None:
        """Run what the engine chooses, for as long as the device takes more."""
        self._holds = True
        choice = self._loop.begin(self._events.time_s)
        while choice.dropped or choice.batch is not None:
            if choice.dropped:
                self._lose(choice.dropped)
            if choice.batch is not None:
                self._run(choice.batch)
            choice = self._loop.begin(self._events.time_s)
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
            if self.alive and not self._holds and self._loop.may_begin:
                self._start()

    def _run(self, batch: Batch[Flight[int]]) -> None:
        """Inputs leave at the ramps inside, and the batch goes on without them."""
        if batch.split.overlap_below is not None or self._loop.num_running > 1:
            self._beside.begin(remaining_of(batch, self._works, self._problem.ramps))
            return
        if batch.stays:
            self._run_staying(batch)
            return
        split, started_s = batch.split, batch.started_s
        work = self._works.of(split)
        exits, going_on = work.part(batch.members)
        inside, at, took_s, first_s = work.size_of(batch.members), 0, 0.0, None
        last = exits.pop() if exits and (not going_on or exits[-1][0] + 1 == split.end) else None
        at_end = [] if last is None else [last]
        for ramp, leaving in exits:
            end, until_s = ramp + 1 - split.first, work.until_s(inside)
            took_s += until_s[end] - until_s[at]
            if work.is_late:
                at_end.append((ramp, leaving))
            else:
                first_s = took_s if first_s is None else first_s
                self._events.at(started_s + took_s, ENDS, self._release, (ramp, leaving))
            at, inside = end, inside - work.size_of(leaving)
        end, until_s = (split.end if last is None else last[0] + 1) - split.first, work.until_s(inside)
        took_s += until_s[end] - until_s[at]
        num_waiting = sum(len(leaving) for _, leaving in at_end) if work.is_late else 0
        took_s += work.end_s(inside if going_on else None, num_waiting)
        self._events.at(started_s + took_s, ENDS, self._end, (batch, work, first_s, took_s, at_end, going_on))

    def _run_staying(self, batch: Batch[Flight[int]]) -> None:
        """Nobody leaves: those whom an active ramp lets out are answered there. Of probes every ramp looks."""
        split, started_s, first_s = batch.split, batch.started_s, None
        ramps = self._problem.ramps if batch.probe else split.ramps
        work = self._works.of(split)
        size = work.size_of(batch.members)
        for ramp, leaving in work.part(batch.members)[0]:
            took_s = work.seconds(ramp, size, ramps)
            first_s = took_s if first_s is None else first_s
            self._events.at(started_s + took_s, ENDS, self._answer_early, (ramp, leaving))
        took_s = work.seconds(split.end - 1, size, ramps)
        ended: Ended = (batch, work, first_s, took_s, [], list(batch.members))
        self._events.at(started_s + took_s, ENDS, self._end, ended)

    def _exit(self, batch: Batch[Flight[int]], leaving: Exit) -> None:
        if batch.stays:
            self._answer_early(leaving)
            return
        self._release(leaving)
        self._loop.shrink(batch, len(leaving[1]))
        if not self._holds and self._loop.may_begin:
            self._start()

    def _release(self, leaving: Exit) -> None:
        if self.alive:
            block, members = leaving
            for trip, mine in by_trip(members):
                trip.ingress.answer(trip, mine, block)

    def _answer_early(self, leaving: Exit) -> None:
        if self.alive:
            block, members = leaving
            new = [member for member in members if not member.answered]
            for member in new:
                member.answered = True
            for trip, mine in by_trip(new) if new else ():
                trip.ingress.answer_early(trip, mine, block)

    def _end(self, ended: Ended) -> None:
        batch, work, first_s, total_s, at_end, going_on = ended
        if not self.alive:
            return
        self._holds = True
        now_s = self._events.time_s
        busy_s = self._loop.end(batch, first_s=first_s, total_s=total_s, now_s=now_s)
        if answered := self._answered(batch, going_on):
            self.engine.returning.answered(answered, took_s=total_s, now_s=now_s)
        self._loop.leave(batch, now_s)
        self.busy_s += busy_s
        work.count(batch, busy_s)
        for leaving in at_end:
            self._release(leaving)
        if going_on:
            self._go_on(batch.split.end, going_on)
        self._start()

    def _answered(self, batch: Batch[Flight[int]], going_on: Sequence[Input]) -> list[int]:
        """Sequences of which a batch answered steps; none of inputs of none."""
        members = batch.members
        if members[0].sequence == NO_SEQUENCE:
            return []
        on = set() if batch.split.end == self._problem.num_blocks else {id(member) for member in going_on}
        return [member.sequence for member in members if id(member) not in on]

    def _go_on(self, block: int, members: list[Input]) -> None:
        if block == self._problem.num_blocks:
            self._release((block - 1, members))
        elif not self._loop.go_on(block, members, self._events.time_s):
            # A replica sends one batch's survivors at a time, and computes meanwhile (E3 section 3.2.2).
            begins_s = max(self._events.time_s, self._sends_until_s)
            self._sends_until_s = begins_s + _hop_s(self._problem, block, self._works.inputs_of(members))
            self._events.at(self._sends_until_s, ENDS, self._sent, (block, members))

    def _sent(self, sent: tuple[int, list[Input]]) -> None:
        if self.alive:
            block, members = sent
            for trip, mine in by_trip(members):
                trip.ingress.go_on(trip, mine, block)


def _hop_s(problem: PlanProblem, block: int, num_inputs: float) -> float:
    """E3's T_x: sending the survivors that wait for a block (section 3.2.1)."""
    link = problem.link
    return link.delay_s + num_inputs * (problem.bytes_per_sample_N[block - 1] / link.bandwidth_bytes_per_s)
