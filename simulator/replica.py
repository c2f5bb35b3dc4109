"""A stage's replica: the live batch engine, and an accelerator whose time is a latency profile's."""

from __future__ import annotations

import math
from array import array
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cluster.emulated import Pace, Sharing
from deployments.ingress.core.calls import Call
from deployments.ingress.core.inputs import PendingInput
from deployments.ingress.core.routes import Hosting, StageReplicas
from deployments.wire.messages import Assignment
from earlyexit.engine.engine import Batch, BatchEngine
from earlyexit.engine.queue import NO_SEQUENCE, Member, SplitCounts
from earlyexit.engine.times import ObservedTimes
from earlyexit.network.boundary import Split
from optimizer.generation.seconds import DecoderSeconds
from optimizer.plan import PolicySpec
from optimizer.problem import PlanProblem
from simulator.events import ENDS, Events
from simulator.inputs import NOWHERE

if TYPE_CHECKING:
    from simulator.ingress import SimulatedIngress

Input = Member[PendingInput]
"""One input in an engine; its serial number counts the inputs of the scenario, in the order of their arrival."""


class Trip(Call):
    """A call, with what its ingress knows of it; it is the `origin` of its members until they have another call."""

    __slots__ = ("hosting", "ingress", "members", "weight")

    ingress: SimulatedIngress
    members: Sequence[Input]
    hosting: Hosting[SimulatedReplica] | None
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


Exit = tuple[int, list[Input]]
"""A block, and the inputs that leave after it."""
Size = Any
"""What members cost together: a number of inputs or, where lengths count, of tokens; for steps a `StepSize`."""


class Work:
    """What the batches of one split do, and for how long."""

    __slots__ = ("_counts", "_leaves", "_pace", "_took_s", "_until_s", "is_late", "size_of", "split")

    def __init__(
        self,
        split: Split,
        leaves: array[int],
        pace: Pace,
        counts: SplitCounts,
        took_s: array[float] | None = None,
    ) -> None:
        """`leaves`: by an input's number modulo their number, the ramp at which it leaves, or NOWHERE.

        `took_s`: gets the seconds of every batch.
        """
        self.split = split
        self.size_of: Callable[[Sequence[Input]], Size] = len if pace.length is None else tokens_of
        self.is_late = False
        """Whether inputs that leave early are answered at the batch's end."""
        self._pace = pace
        self._until_s: dict[int, list[float]] = {}
        self._leaves = leaves
        self._counts = counts
        self._took_s = took_s

    def until_s(self, size: Size, ramps: Collection[int] | None = None) -> list[float]:
        """Returns the seconds until after each block, while members of this size are inside and none leaves.

        `ramps`: those that are evaluated; None: the split's.
        """
        until_s = self._until_s.get(size) if ramps is None else None
        if until_s is None:
            split, inputs = self.split, self._pace.size_of(size, size)
            evaluated = split.ramps if ramps is None else ramps
            blocks = range(split.first, split.end + 1)
            until_s = [self._pace.seconds_of_any(split.first, block, inputs, evaluated) for block in blocks]
            if ramps is None:
                self._until_s[size] = until_s
        return until_s

    def end_s(self, size: Size | None, num_waiting: int) -> float:
        """Returns the seconds after a batch's last block, which members of this size reach; None: no member does.

        `num_waiting`: inputs that have left, and wait for the end.
        """
        return 0.0

    def part(self, batch: Batch[PendingInput]) -> tuple[list[Exit], Exit | None, list[Input]]:
        """Returns the inputs that leave at each ramp before the end, those that leave at the end, and those that go on.

        Of a batch that stays, the first are answered early, and all go on.
        """
        exits, going_on = self._part(batch.members)
        if batch.stays:
            return exits, None, list(batch.members)
        last = exits.pop() if exits and (not going_on or exits[-1][0] + 1 == self.split.end) else None
        return exits, last, going_on

    def _part(self, members: Sequence[Input]) -> tuple[list[Exit], list[Input]]:
        if not self.split.ramps:
            return [], list(members)
        leaves, cycle = self._leaves, len(self._leaves)
        by_ramp: dict[int, list[Input]] = {}
        going_on: list[Input] = []
        for member in members:
            ramp = leaves[member.payload.serial % cycle]
            if ramp == NOWHERE:
                going_on.append(member)
            elif ramp in by_ramp:
                by_ramp[ramp].append(member)
            else:
                by_ramp[ramp] = [member]
        return sorted(by_ramp.items()), going_on

    def count(self, batch: Batch[PendingInput], seconds: float) -> None:
        """Count a batch that has run."""
        counts = self._counts
        counts.batches += 1
        counts.inputs += len(batch.members)
        counts.tokens += batch.tokens
        counts.busy_s += seconds
        if self._took_s is not None:
            self._took_s.append(seconds)


def tokens_of(members: Sequence[Input]) -> int:
    """Returns the tokens of all members."""
    return sum([member.tokens for member in members])


class Works:
    """The work of all splits, for replicas of one pace."""

    __slots__ = ("_hop_length", "_make", "_of", "pace")

    def __init__(self, pace: Pace, make: Callable[[Split, Pace], Work], hop_length: int | None = None) -> None:
        """`hop_length`: the tokens of the input whose size `bytes_per_sample_N` gives; None: inputs cost alike."""
        self.pace = pace
        self._hop_length = hop_length
        self._make = make
        self._of: dict[int, Work] = {}

    def of(self, split: Split) -> Work:
        """Returns the work of a split, made when it is first asked for."""
        # By identity: a split's hash is as dear as the rest of a batch.
        work = self._of.get(id(split))
        if work is None or work.split is not split:
            work = self._of[id(split)] = self._make(split, self.pace)
        return work

    def inputs_of(self, members: Sequence[Input]) -> float:
        """Returns the members as a number of inputs of the length whose hidden state is known."""
        return len(members) if self._hop_length is None else tokens_of(members) / self._hop_length

    def known(self, split: Split) -> list[tuple[int, int]]:
        """Returns the inputs and tokens of a warm-up's batches: the smallest, and a full one."""
        length, budget = self.pace.length, split.tokens
        if length is None:
            return [(size, size) for size in sorted({1, split.batch})]
        full = split.batch if budget is None else max(1, min(split.batch, budget // length))
        return [(size, size * length) for size in sorted({1, full})]

    def forget(self, pace: Pace) -> None:
        """Forget all work: with other ramps or networks inputs leave elsewhere, and may be longer or shorter."""
        self.pace = pace
        self._of.clear()


Ended = tuple[Batch[PendingInput], Work, float | None, float, Sequence[Exit], list[Input]]
"""A batch that has run, its work, the seconds until its first answers (None: its end) and in all, the inputs that are
answered at its end, and those that go on."""


@dataclass(slots=True, kw_only=True)
class Remaining:
    """What a running batch still has to do."""

    batch: Batch[PendingInput]
    work: Work
    pace: Pace
    ramps: Collection[int]
    """The ramps that are evaluated."""
    exits: deque[Exit]
    """The exits before the end."""
    end: int
    """The block at which it ends."""
    leaving: Exit | None
    """The inputs that leave at the end."""
    going_on: list[Input]
    at: int
    """The next block."""
    inside: int
    """Inputs inside or, where lengths count, their tokens."""
    first_s: float | None = None


def remaining_of(batch: Batch[PendingInput], works: Works, all_ramps: Collection[int]) -> Remaining:
    """Returns all that a new batch has to do; `all_ramps`: those that look at probes."""
    split, work = batch.split, works.of(batch.split)
    exits, last, going_on = work.part(batch)
    return Remaining(
        batch=batch,
        work=work,
        pace=works.pace,
        ramps=all_ramps if batch.probe else split.ramps,
        exits=deque(exits),
        end=split.end if last is None else last[0] + 1,
        leaving=last,
        going_on=going_on,
        at=split.first,
        inside=work.size_of(batch.members),
    )


class SideBySide:
    """The batches of a replica that overlap, driven by events."""

    __slots__ = ("_events", "_is_alive", "_on_end", "_on_exit", "_running", "_serial", "_sharing")

    def __init__(
        self,
        events: Events,
        is_alive: Callable[[], bool],
        on_exit: Callable[[Batch[PendingInput], Exit], None],
        on_end: Callable[[Ended], None],
    ) -> None:
        """`on_exit` gets the inputs that are answered before the end."""
        self._events = events
        self._is_alive = is_alive
        self._on_exit = on_exit
        self._on_end = on_end
        self._sharing = Sharing()
        self._running: dict[int, Remaining] = {}
        self._serial = 0

    def begin(self, remaining: Remaining) -> None:
        """Start a batch."""
        self._running[remaining.batch.lane] = remaining
        self._go_on(remaining)

    def _go_on(self, remaining: Remaining) -> None:
        """Run a batch to its next exit, or to its end."""
        end = remaining.exits[0][0] + 1 if remaining.exits else remaining.end
        self._sharing.step(
            remaining.batch.lane,
            remaining.pace,
            remaining.at,
            end,
            remaining.ramps,
            inside=remaining.pace.size_of(remaining.inside, remaining.inside),
            at_s=self._events.time_s,
        )
        remaining.at = end
        self._tell()

    def _tell(self) -> None:
        """Schedule every batch's next exit or end, if nothing happens before; earlier schedules become void."""
        self._serial += 1
        for lane in self._running:
            due_s = max(self._events.time_s, self._sharing.due_s(lane))
            self._events.at(due_s, ENDS, self._arrive, (lane, self._serial))

    def _arrive(self, told: tuple[int, int]) -> Any:
        lane, serial = told
        if serial != self._serial or not self._is_alive():
            return False  # void: nothing happens now
        remaining, now_s = self._running[lane], self._events.time_s
        elapsed_s = now_s - remaining.batch.started_s
        if not remaining.exits:
            del self._running[lane]
            self._sharing.leave(lane, now_s)
            self._tell()
            at_end = [] if remaining.leaving is None else [remaining.leaving]
            self._on_end((remaining.batch, remaining.work, remaining.first_s, elapsed_s, at_end, remaining.going_on))
            return None
        if remaining.first_s is None:
            remaining.first_s = elapsed_s
        exited = remaining.exits.popleft()
        remaining.inside = (
            remaining.inside if remaining.batch.stays else remaining.inside - remaining.work.size_of(exited[1])
        )
        self._go_on(remaining)
        self._on_exit(remaining.batch, exited)
        return None


LATE: Final = ("foreseen", "similar")
"""Policies that decide before the head that all exits share is asked (`earlyexit/network/cut.py`). An input that leaves
by them is answered at the batch's end."""


@dataclass(slots=True, kw_only=True)
class Step(Member[PendingInput]):
    """An input of a sequence: a chunk of its prompt, or its newest token."""

    context: int
    """The tokens of its sequence before it."""
    behind: Counter[int]
    """By block, the tokens of its sequence that left after it and are not filled in yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """The size of a batch of steps."""

    inputs: int = 0
    steps: int = 0
    """Inputs of one token."""
    prompt: int = 0
    """The tokens of all other inputs."""
    context: int = 0
    """The tokens before the steps, in their sequences."""
    behind: Counter[int] = field(default_factory=Counter)
    """Tokens to be filled in, by the block that they left after."""

    def __sub__(self, other: StepSize) -> StepSize:
        return StepSize(
            inputs=self.inputs - other.inputs,
            steps=self.steps - other.steps,
            prompt=self.prompt - other.prompt,
            context=self.context - other.context,
            behind=self.behind - other.behind,
        )


def size_of(members: Sequence[Input]) -> StepSize:
    """Returns the size of all members."""
    steps, prompt, context = 0, 0, 0
    behind: Counter[int] = Counter()
    for member in members:
        assert isinstance(member, Step)
        if member.tokens == 1:
            steps += 1
            context += member.context
        else:
            prompt += member.tokens
        if member.behind:
            behind += member.behind
    return StepSize(inputs=len(members), steps=steps, prompt=prompt, context=context, behind=behind)


class StepWork(Work):
    """What the batches of one split of a decoder do, and for how long."""

    __slots__ = ("_fill", "_num_blocks", "_positions", "_seconds")

    def __init__(
        self,
        split: Split,
        leaves: array[int],
        pace: Pace,
        counts: SplitCounts,
        took_s: array[float] | None = None,
        *,
        seconds: DecoderSeconds,
        ramps: Sequence[int],
        num_blocks: int,
        fill: float,
        policy: PolicySpec | None,
    ) -> None:
        """`ramps`: the model's; `fill`: the share of a token's time in a block that filling it in takes."""
        super().__init__(split, leaves, pace, counts, took_s)
        self.size_of = size_of
        self.is_late = policy is not None and policy.name in LATE
        self._seconds = seconds
        self._positions = {ramp: position for position, ramp in enumerate(ramps)}
        self._num_blocks = num_blocks
        self._fill = fill

    def until_s(self, size: StepSize, ramps: Collection[int] | None = None) -> list[float]:
        """As `Work.until_s`, without the vocabulary head behind the last block: see `end_s`."""
        split, seconds = self.split, self._seconds
        filled_N = np.zeros(self._num_blocks)
        for ramp, tokens in size.behind.items():
            filled_N[ramp + 1 :] += tokens * self._fill
        block_s_N = seconds.blocks(size.steps + filled_N, size.prompt, steps=size.steps, context=size.context)
        for ramp in split.ramps if ramps is None else ramps:
            block_s_N[ramp] += seconds.ramp(self._positions[ramp], size.inputs)
        return [0.0, *accumulate(block_s_N[split.first : split.end].tolist())]

    def end_s(self, size: StepSize | None, num_waiting: int) -> float:
        inputs = num_waiting
        if size is not None and self.split.end == self._num_blocks:
            inputs += size.inputs
        return self._seconds.head(inputs)

    def count(self, batch: Batch[PendingInput], seconds: float) -> None:
        """Count a batch, and fill in what its members passed. Members that left early are behind, except probes."""
        super().count(batch, seconds)
        leaves, cycle, at_end = self._leaves, len(self._leaves), self.split.end == self._num_blocks
        for member in batch.members:
            assert isinstance(member, Step)
            ramp = leaves[member.payload.serial % cycle] if self.split.ramps and not batch.stays else NOWHERE
            if ramp != NOWHERE:
                leave(member.behind, ramp, member.tokens)
            elif at_end:
                member.behind.clear()


def leave(behind: Counter[int], ramp: int, tokens: int) -> None:
    """Note that a sequence's newest tokens left after a block, up to which earlier ones are filled in now."""
    passed = [block for block in behind if block < ramp]
    behind[ramp] += tokens + sum(behind.pop(block) for block in passed)


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
        self._works = works

    @property
    def busy(self) -> float:
        """The share of its time that it had run when its latest batch began."""
        return self.engine.busy

    def held_s(self, ended_s: float) -> float:
        """Returns how long it took calls, in a simulation that ended then."""
        return min(self.until_s, ended_s) - self.since_s

    def prepare(self, assignments: Iterable[Assignment]) -> None:
        """Learn the profile's seconds of the splits of some stages, as a warm-up does."""
        for split in (split for each in assignments for split in each.stage.splits):
            for size, tokens in self._works.known(split):
                first_s, total_s = self._works.pace.split_s(split, self._works.pace.size_of(size, tokens))
                self.engine.times.observe(split, size, tokens, first_s, total_s)

    def follow(self, assignment: Assignment) -> None:
        """Follow an assignment from the next batch on, unless it is of an older plan than the present one."""
        if assignment.epoch > self.epoch or (assignment.epoch == self.epoch and assignment.slot != self.slot):
            self.engine.follow(assignment.stage.splits, assignment.dispatch, assignment.order, assignment.entry)
            self.epoch, self.slot = assignment.epoch, assignment.slot

    def submit(self, trip: Trip, block: int) -> None:
        """Queue the inputs of a call that has arrived."""
        if not self.is_up:
            return
        assignment = trip.stage.assignment
        self.follow(assignment)
        self.engine.submit(block, trip.members, self._events.time_s, assignment.known)
        if not self._holds and self.engine.may_begin:
            self._start()

    def end(self, sequence: int) -> None:
        """Note that a sequence is over, and await no step of it."""
        if not self.is_up:
            return
        self.engine.take_out((sequence,))
        if not self._holds and self.engine.may_begin:
            self._start()

    def die(self) -> list[Trip]:
        """End at once; returns the calls that were inside, the oldest first."""
        self.is_up = False
        trips, self.trips = self.trips, set()
        return sorted(trips, key=lambda trip: (trip.started_s, trip.members[0].payload.serial))

    def become(self, works: Works) -> None:
        """Run batches at another pace from now on."""
        self._works = works

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
            self._beside.begin(remaining_of(batch, self._works, self._problem.ramps))
            return
        split, started_s, stays = batch.split, batch.started_s, batch.stays
        work = self._works.of(split)
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
            self._sends_until_s = begins_s + _hop_s(self._problem, block, self._works.inputs_of(members))
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
        """The longest here first."""
        self.stays: list[Stay] = []
        self.pending: list[tuple[Trip, int, float]] = []
        """The calls that found no replica, with their block and delay."""
        self.of = [StageReplicas[SimulatedReplica](index / num_ingresses) for index in range(num_ingresses)]
        """What each ingress knows of them."""

    def host(self, replicas: Sequence[SimulatedReplica], now_s: float) -> None:
        """Send calls to these replicas from now on; others end those that they have."""
        before, self.replicas = set(self.replicas), list(replicas)
        for each in self.of:
            each.offer(replicas)
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
