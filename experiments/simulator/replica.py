"""A stage's replica: the live batch engine, and an accelerator whose time is a latency profile's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cluster.pace import Pace
from deployments.messages import Assignment
from earlyexit.engine import Batch, BatchEngine
from earlyexit.split import Split
from earlyexit.times import ObservedTimes
from experiments.simulator.call import Call, Input, by_call
from experiments.simulator.decisions import STAYS
from experiments.simulator.events import ENDS
from experiments.simulator.work import Work

if TYPE_CHECKING:
    from experiments.simulator.service import Service

NOTHING = -1
"""The epoch of a replica that follows no plan yet."""

Exit = tuple[int, list[Input]]
"""A block, and who leaves after it."""


class Replica:
    """Does what `deployments.stage.host.StageHost` and `earlyexit.device.Device` do, without threads and processes."""

    def __init__(self, name: str, index: int, device: str, pace: Pace, service: Service) -> None:
        self.name = name
        self.index = index
        self.device = device
        self.epoch = NOTHING
        self.alive = True
        self.since_s = service.events.time_s
        """When it began to take calls."""
        self.until_s = math.inf
        """When it stopped taking them."""
        self.busy_s = 0.0
        self.calls: set[Call] = set()
        """Those of which inputs are inside."""
        self.engine: BatchEngine[int] = BatchEngine((), ObservedTimes())
        self._pace = pace
        self._service = service
        self._events = service.events
        self._is_busy = False
        self._wakes_s = -1.0
        self._sends_until_s = 0.0
        self._works: dict[int, Work] = {}

    def prepare(self, assignment: Assignment) -> None:
        """Learn what the profile says of its splits, as a replica that warms up does, and follow it."""
        for split in assignment.stage.splits:
            for size in sorted({1, split.batch}):
                first_s, total_s = self._pace.split_s(split, size)
                self.engine.times.observe(split, size, first_s, total_s)
        self.follow(assignment)

    def follow(self, assignment: Assignment) -> None:
        """Do as the assignment says from the next batch on, unless it is no newer than what is followed."""
        if assignment.epoch > self.epoch:
            self.engine.follow(assignment.stage.splits, assignment.dispatch)
            self.epoch = assignment.epoch

    def submit(self, call: Call, block: int) -> None:
        """Queue a call's inputs, which have arrived."""
        if not self.alive:
            return
        assignment = call.leg.assignment
        if assignment.epoch > self.epoch:
            self.follow(assignment)
        self.engine.submit(block, call.members, self._events.time_s, assignment.stage.splits)
        if not self._is_busy:
            self._start()

    def forget_leaves(self) -> None:
        """Other ramps are active, so inputs leave elsewhere."""
        self._works.clear()

    def die(self) -> list[Call]:
        """End at once; gives the calls that were inside."""
        self.alive = False
        return list(self.calls)

    def _start(self) -> None:
        """Run what the engine chooses. Busy meanwhile: what is dropped makes room at the ingress, and more comes."""
        self._is_busy = True
        choice = self.engine.choose(self._events.time_s)
        while choice.dropped:
            self._lose(choice.dropped)
            if choice.batch is not None:
                break
            choice = self.engine.choose(self._events.time_s)
        if choice.batch is not None:
            self._run(choice.batch)
            return
        self._is_busy = False
        if choice.wake_s is not None and choice.wake_s != self._wakes_s:
            self._wakes_s = choice.wake_s
            self._events.at(max(choice.wake_s, self._events.time_s), ENDS, self._wake, choice.wake_s)

    def _lose(self, dropped: Sequence[Input]) -> None:
        for call, members in by_call(dropped):
            call.ingress.lose(call, members)

    def _wake(self, wake_s: float) -> None:
        if self._wakes_s == wake_s:
            self._wakes_s = -1.0
            if self.alive and not self._is_busy:
                self._start()

    def _run(self, batch: Batch[int]) -> None:
        split = batch.split
        if batch.probe:
            self._run_probes(batch)
        elif not split.ramps or split.ramps[0] + 1 == split.end:
            total_s = self._work(split).whole_s[len(batch.members) - 1]
            self._events.at(batch.started_s + total_s, ENDS, self._end, (batch, total_s, total_s, None))
        else:
            self._run_shrinking(batch)

    def _run_shrinking(self, batch: Batch[int]) -> None:
        """Inputs leave at the ramps inside, and the batch goes on without them."""
        split, started_s = batch.split, batch.started_s
        exits, num_staying = self._exits(split, batch.members)
        at, inside, took_s, first_s = split.first, len(batch.members), 0.0, None
        for ramp, leaving in exits:
            took_s += self._pace.seconds(at, ramp + 1, inside, split.ramps)
            first_s = took_s if first_s is None else first_s
            self._events.at(started_s + took_s, ENDS, self._release, (ramp, leaving))
            at, inside = ramp + 1, inside - len(leaving)
        if num_staying:
            took_s += self._pace.seconds(at, split.end, inside, split.ramps)
        told = {id(member) for _, leaving in exits for member in leaving}
        first_s = took_s if first_s is None else first_s
        self._events.at(started_s + took_s, ENDS, self._end, (batch, first_s, took_s, told))

    def _run_probes(self, batch: Batch[int]) -> None:
        """Every ramp looks and nobody leaves; those whom an active ramp lets out are answered there."""
        split, started_s, ramps = batch.split, batch.started_s, self._service.ramps
        size = len(batch.members)
        exits, _ = self._exits(split, batch.members)
        for ramp, leaving in exits:
            took_s = self._pace.seconds(split.first, ramp + 1, size, ramps)
            self._events.at(started_s + took_s, ENDS, self._answer_early, (ramp, leaving))
        took_s = self._pace.seconds(split.first, split.end, size, ramps)
        self._events.at(started_s + took_s, ENDS, self._end, (batch, took_s, took_s, set()))

    def _exits(self, split: Split, members: Sequence[Input]) -> tuple[list[Exit], int]:
        """Who leaves at which of the split's ramps, in their order, and how many stay to its end."""
        leaves, cycle = self._work(split).leaves, self._service.cycle
        by_ramp: dict[int, list[Input]] = {}
        num_staying = 0
        for member in members:
            ramp = leaves[member.payload % cycle]
            if ramp == STAYS:
                num_staying += 1
            else:
                by_ramp.setdefault(ramp, []).append(member)
        return sorted(by_ramp.items()), num_staying

    def _release(self, leaving: Exit) -> None:
        if self.alive:
            block, members = leaving
            for call, mine in by_call(members):
                call.ingress.answer(call, mine, block)

    def _answer_early(self, leaving: Exit) -> None:
        if self.alive:
            block, members = leaving
            for call, mine in by_call(members):
                call.ingress.answer_probes(call, mine, block)

    def _end(self, ended: tuple[Batch[int], float, float, set[int] | None]) -> None:
        batch, first_s, total_s, told = ended
        if not self.alive:
            return
        self.busy_s += total_s
        self.engine.finished(batch, first_s=first_s, total_s=total_s)
        self._work(batch.split).count(batch, total_s)
        staying = self._part(batch) if told is None else [each for each in batch.members if id(each) not in told]
        if staying:
            self._go_on(batch.split.end, staying)
        self._start()

    def _part(self, batch: Batch[int]) -> list[Input]:
        """Answer those who leave at the end of a split; gives the others."""
        split = batch.split
        if not split.ramps:
            return list(batch.members)
        leaves, cycle = self._work(split).leaves, self._service.cycle
        leaving: list[Input] = []
        staying: list[Input] = []
        for member in batch.members:
            (staying if leaves[member.payload % cycle] == STAYS else leaving).append(member)
        if leaving:
            self._release((split.end - 1, leaving))
        return staying

    def _go_on(self, block: int, members: list[Input]) -> None:
        service = self._service
        if block == service.num_blocks:
            self._release((block - 1, members))
        elif self.engine.hosts(block):
            self.engine.submit(block, members, self._events.time_s)
        else:
            # A replica sends one batch's survivors at a time, and computes meanwhile (E3 section 3.2.2).
            begins_s = max(self._events.time_s, self._sends_until_s)
            self._sends_until_s = begins_s + service.hop_s(block, len(members))
            self._events.at(self._sends_until_s, ENDS, self._sent, (block, members))

    def _sent(self, sent: tuple[int, list[Input]]) -> None:
        if self.alive:
            block, members = sent
            for call, mine in by_call(members):
                call.ingress.go_on(call, mine, block)

    def _work(self, split: Split) -> Work:
        # By identity: a split's hash is as dear as the rest of a batch.
        work = self._works.get(id(split))
        if work is None or work.split is not split:
            work = self._works[id(split)] = self._service.work(split, self._pace)
        return work
