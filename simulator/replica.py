"""A stage's replica: the live batch engine, and an accelerator whose time is a latency profile's."""

from __future__ import annotations

import math
from array import array
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final, Protocol

import numpy as np

from cluster.emulated import Pace, Sharing
from deployments.ingress.core.calls import Call
from deployments.ingress.core.inputs import PendingInput
from deployments.ingress.core.routes import FillFirst, KVPlacements, fill_first
from deployments.wire.messages import Assignment
from earlyexit.engine.engine import Batch, BatchEngine
from earlyexit.engine.queue import NO_SEQUENCE, Member
from earlyexit.engine.times import ObservedTimes, SplitCounts
from earlyexit.network.split import Split
from optimizer.generation.seconds import DecoderSeconds
from optimizer.plan import PolicySpec
from optimizer.problem import PlanProblem
from simulator.events import ENDS, Events
from simulator.inputs import NOWHERE

Input = Member[PendingInput]
"""One input in an engine; its serial number counts the inputs of the scenario, in the order of their arrival."""


class Door(Protocol):
    """An ingress, as replicas see it: what becomes of inputs of its calls."""

    @property
    def index(self) -> int: ...

    def answer(self, trip: Trip, members: Sequence[Input], block: int) -> None:
        """They leave the model."""
        ...

    def answer_early(self, members: Sequence[Input], block: int) -> None:
        """They are answered, and stay inside."""
        ...

    def lose(self, trip: Trip, members: Sequence[Input]) -> None:
        """They are too late."""
        ...

    def go_on(self, trip: Trip, members: Sequence[Input], block: int) -> None:
        """They wait for a block of another stage."""
        ...


class Trip(Call):
    """A call and what its ingress knows of its way; its members' `origin` until it has another."""

    __slots__ = ("ingress", "members", "replica", "weight")

    ingress: Door
    members: Sequence[Input]
    replica: SimulatedReplica | None
    """None until there is one for it."""
    weight: int
    """What its ingress counts it as, once it is on its way (`weight_of`)."""

    def begin(self, ingress: Door, members: Sequence[Input]) -> None:
        """Have these members, from the ingress whose call it is."""
        self.ingress = ingress
        self.members = members
        self.replica = None
        reserve_s = self.reserve_s
        for member in members:
            member.origin = self
            member.reserve_s = reserve_s

    def left(self) -> list[PendingInput]:
        """Those that have not left the replica."""
        return [member.payload for member in self.members if member.origin is self]


def by_trip(members: Sequence[Input]) -> Sequence[tuple[Trip, Sequence[Input]]]:
    """Members of a batch with the trip that each came by, trip by trip."""
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
"""What members cost together: a number of inputs, or where lengths count, of tokens; of steps a `StepSize`."""


class Work:
    """Of one split."""

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

    def until_s(self, size: Size) -> list[float]:
        """Seconds by number of blocks, while members of such a size are inside and none leaves."""
        until_s = self._until_s.get(size)
        if until_s is None:
            split, inputs = self.split, self._pace.size_of(size, size)
            blocks = range(split.first, split.end + 1)
            until_s = [self._pace.seconds_of_any(split.first, block, inputs, split.ramps) for block in blocks]
            self._until_s[size] = until_s
        return until_s

    def end_s(self, size: Size | None, num_waiting: int) -> float:
        """Seconds after a batch's last block, which members of such a size have reached; None: no member has.

        `num_waiting`: inputs that have left, and wait for the end.
        """
        return 0.0

    def seconds(self, block: int, size: Size, ramps: Collection[int]) -> float:
        """From the split's begin until after a block, with members of such a size inside and these ramps evaluated."""
        inputs = self._pace.size_of(size, size)
        return self._pace.seconds_of_any(self.split.first, block + 1, inputs, ramps)

    def part(self, members: Sequence[Input]) -> tuple[list[Exit], list[Input]]:
        """Inputs that leave at each of the split's ramps, in their order, and inputs that go on to its end."""
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
        """A batch was run."""
        counts = self._counts
        counts.batches += 1
        counts.inputs += len(batch.members)
        counts.tokens += batch.tokens
        counts.busy_s += seconds
        if self._took_s is not None:
            self._took_s.append(seconds)


def tokens_of(members: Sequence[Input]) -> int:
    """Of all together."""
    return sum([member.tokens for member in members])


class Works:
    """Of all splits, for replicas of one pace."""

    __slots__ = ("_hop_length", "_make", "_of", "pace")

    def __init__(self, pace: Pace, make: Callable[[Split, Pace], Work], hop_length: int | None = None) -> None:
        """`hop_length`: tokens of the input that `bytes_per_sample_N` is of; None: inputs cost alike."""
        self.pace = pace
        self._hop_length = hop_length
        self._make = make
        self._of: dict[int, Work] = {}

    def of(self, split: Split) -> Work:
        """Of one, made when it is first asked for."""
        # By identity: a split's hash is as dear as the rest of a batch.
        work = self._of.get(id(split))
        if work is None or work.split is not split:
            work = self._of[id(split)] = self._make(split, self.pace)
        return work

    def inputs_of(self, members: Sequence[Input]) -> float:
        """As many inputs of the length that hidden states are told of, as hold what these hold."""
        return len(members) if self._hop_length is None else tokens_of(members) / self._hop_length

    def known(self, split: Split) -> list[tuple[int, int]]:
        """Inputs and tokens of the batches that a replica has run when it is ready: the least, and a full one."""
        length, budget = self.pace.length, split.tokens
        if length is None:
            return [(size, size) for size in sorted({1, split.batch})]
        full = split.batch if budget is None else max(1, min(split.batch, budget // length))
        return [(size, size * length) for size in sorted({1, full})]

    def forget(self, pace: Pace) -> None:
        """Other ramps are active, or other networks used, so inputs leave elsewhere and may be longer or shorter."""
        self.pace = pace
        self._of.clear()


Ended = tuple[Batch[PendingInput], Work, float | None, float, Sequence[Exit], list[Input]]
"""A batch that has run, its work, the seconds until its first answers (None: its end) and in all, the inputs that are
answered at its end, and those that go on."""


@dataclass(slots=True, kw_only=True)
class Remaining:
    """What a batch has still to do."""

    batch: Batch[PendingInput]
    work: Work
    pace: Pace
    ramps: Collection[int]
    """Those that are evaluated."""
    exits: deque[Exit]
    """On the way, before the end."""
    end: int
    """The block at which it ends."""
    leaving: Exit | None
    """At the end."""
    going_on: list[Input]
    at: int
    """The block that comes next."""
    inside: int
    """Inputs, or where lengths count, tokens."""
    first_s: float | None = None


def remaining_of(batch: Batch[PendingInput], works: Works, all_ramps: Collection[int]) -> Remaining:
    """All that a batch does which begins; `all_ramps`: those that look at probes."""
    split, work = batch.split, works.of(batch.split)
    exits, going_on = work.part(batch.members)
    last, ramps = None, all_ramps if batch.probe else split.ramps
    if batch.stays:
        going_on = list(batch.members)
    elif exits and (not going_on or exits[-1][0] + 1 == split.end):
        last = exits.pop()
    return Remaining(
        batch=batch,
        work=work,
        pace=works.pace,
        ramps=ramps,
        exits=deque(exits),
        end=split.end if last is None else last[0] + 1,
        leaving=last,
        going_on=going_on,
        at=split.first,
        inside=work.size_of(batch.members),
    )


class SideBySide:
    """A replica's batches, driven by events."""

    __slots__ = ("_events", "_is_alive", "_on_end", "_on_exit", "_running", "_serial", "_sharing")

    def __init__(
        self,
        events: Events,
        is_alive: Callable[[], bool],
        on_exit: Callable[[Batch[PendingInput], Exit], None],
        on_end: Callable[[Ended], None],
    ) -> None:
        """`on_exit` gets the inputs that are answered on the way."""
        self._events = events
        self._is_alive = is_alive
        self._on_exit = on_exit
        self._on_end = on_end
        self._sharing = Sharing()
        self._running: dict[int, Remaining] = {}
        self._serial = 0

    def begin(self, remaining: Remaining) -> None:
        """Have a batch run from now on."""
        self._running[remaining.batch.lane] = remaining
        self._go_on(remaining)

    def _go_on(self, remaining: Remaining) -> None:
        """To the next exit where an input is answered, or the end."""
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
        """When each batch is at its next exit, or its end, if nothing happens before: what was told so far is void."""
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
    """An input of a sequence; its tokens are those of a chunk of its prompt, or the newest alone."""

    context: int
    """Tokens that its sequence had come to before."""
    behind: Counter[int]
    """Of its sequence: tokens that left after a block, and that no later token has come by for yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """How large a batch of steps is."""

    inputs: int = 0
    steps: int = 0
    """Inputs of one token."""
    prompt: int = 0
    """Tokens of all others."""
    context: int = 0
    """Tokens that the sequences of `steps` had come to."""
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
    """Of all together."""
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
    """Of one split."""

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
        """`ramps`: of the model; `fill`: of a token's time in a block, what filling it in there takes."""
        super().__init__(split, leaves, pace, counts, took_s)
        self.size_of = size_of
        self.is_late = policy is not None and policy.name in LATE
        self._seconds = seconds
        self._positions = {ramp: position for position, ramp in enumerate(ramps)}
        self._num_blocks = num_blocks
        self._fill = fill

    def until_s(self, size: StepSize) -> list[float]:
        """Without the vocabulary head behind the last block: see `end_s`."""
        return self._until_s_of(size, self.split.ramps)

    def seconds(self, block: int, size: StepSize, ramps: Collection[int]) -> float:
        """With the vocabulary head, behind the last block."""
        until_s = self._until_s_of(size, ramps)[block + 1 - self.split.first]
        return until_s + self.end_s(size, 0) if block + 1 == self.split.end else until_s

    def _until_s_of(self, size: StepSize, ramps: Collection[int]) -> list[float]:
        split, seconds = self.split, self._seconds
        filled_N = np.zeros(self._num_blocks)
        for ramp, tokens in size.behind.items():
            filled_N[ramp + 1 :] += tokens * self._fill
        block_s_N = seconds.blocks(size.steps + filled_N, size.prompt, steps=size.steps, context=size.context)
        for ramp in ramps:
            block_s_N[ramp] += seconds.ramp(self._positions[ramp], size.inputs)
        return [0.0, *accumulate(block_s_N[split.first : split.end].tolist())]

    def end_s(self, size: StepSize | None, num_waiting: int) -> float:
        inputs = num_waiting
        if size is not None and self.split.end == self._num_blocks:
            inputs += size.inputs
        return self._seconds.head(inputs)

    def count(self, batch: Batch[PendingInput], seconds: float) -> None:
        """A batch was run: what its members passed is filled in. Members that left early are behind, except probes."""
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
    """A sequence's newest tokens leave after a block, up to which all that left before them are filled in now."""
    passed = [block for block in behind if block < ramp]
    behind[ramp] += tokens + sum(behind.pop(block) for block in passed)


NOTHING = -1
"""The epoch of a replica that follows no plan yet."""


class SimulatedReplica:
    """The live device's loop, driven by events; its batches are run by the profile."""

    __slots__ = (
        "_beside",
        "_events",
        "_holds",
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
        self.engine: BatchEngine[PendingInput] = BatchEngine((), ObservedTimes(), starts=starts)
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
        assignment = trip.stage.assignment
        if assignment.epoch > self.epoch:
            self.follow(assignment)
        self.engine.submit(block, trip.members, self._events.time_s, assignment.known)
        if not self._holds and self.engine.may_begin:
            self._start()

    def forget(self, trip: Trip) -> None:
        """Remove the queued inputs of a call that was given up."""
        self.engine.forget(trip)

    def end(self, sequence: int) -> None:
        """A sequence is over: no next step of it is awaited."""
        if not self.alive:
            return
        self.engine.take_out((sequence,))
        if not self._holds and self.engine.may_begin:
            self._start()

    def die(self) -> list[Trip]:
        """End at once; gives the calls that were inside, the oldest first."""
        self.alive = False
        trips, self.trips = self.trips, set()
        return sorted(trips, key=lambda trip: (trip.started_s, trip.members[0].payload.serial))

    def become(self, works: Works) -> None:
        """Be so fast from the next batch on."""
        self._works = works

    def _start(self) -> None:
        """Run what the engine chooses, for as long as the device takes more."""
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
            if self.alive and not self._holds and self.engine.may_begin:
                self._start()

    def _run(self, batch: Batch[PendingInput]) -> None:
        """Inputs leave at the ramps inside, and the batch goes on without them."""
        if batch.split.overlap_below is not None or self.engine.num_running > 1:
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

    def _run_staying(self, batch: Batch[PendingInput]) -> None:
        """No input leaves: those that an active ramp lets out are answered there. For probes every ramp looks."""
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

    def _exit(self, batch: Batch[PendingInput], leaving: Exit) -> None:
        if batch.stays:
            self._answer_early(leaving)
            return
        self._release(leaving)
        self.engine.shrink(batch, len(leaving[1]))
        if not self._holds and self.engine.may_begin:
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
                trip.ingress.answer_early(mine, block)

    def _end(self, ended: Ended) -> None:
        batch, work, first_s, total_s, at_end, going_on = ended
        if not self.alive:
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
        """Sequences of which a batch answered steps; none of inputs of none."""
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
        if self.alive:
            block, members = sent
            for trip, mine in by_trip(members):
                trip.ingress.go_on(trip, mine, block)


def _hop_s(problem: PlanProblem, block: int, num_inputs: float) -> float:
    """E3's T_x: sending the survivors that wait for a block (section 3.2.1)."""
    link = problem.link
    return link.delay_s + num_inputs * (problem.bytes_per_sample_N[block - 1] / link.bandwidth_bytes_per_s)


class Slot:
    """The way to a stage: a call goes to the replica that the ingress's router ranks first."""

    def __init__(self, name: str, device: str, num_ingresses: int) -> None:
        self.name = name
        self.device = device
        self.replicas: dict[int, SimulatedReplica] = {}
        """Those that take calls, by an index that no other replica of the slot ever had."""
        self.retired: list[SimulatedReplica] = []
        """Those that end their work, or are dead."""
        self.pending: list[tuple[Trip, int, float]] = []
        """Calls, with their block and delay, that found no replica."""
        self.num_ever = 0
        self._holders: dict[tuple[int, int], int] = {}
        """By ingress and sequence, the replica that has it."""
        self.avoided: frozenset[str] = frozenset()
        self.routers = [FillFirst(index / num_ingresses) for index in range(num_ingresses)]
        """What each ingress knows of its loads."""

    def add(self, replica: SimulatedReplica) -> None:
        """A replica takes calls from now on."""
        self.replicas[replica.index] = replica
        if replica.name not in self.avoided:
            self._open(replica)

    def remove(self, replica: SimulatedReplica, now_s: float) -> None:
        """It takes no more; what it has, it ends."""
        replica.until_s = now_s
        del self.replicas[replica.index]
        self.retired.append(replica)
        for router in self.routers:
            router.discard(replica.index)

    def avoid(self, names: Collection[str]) -> None:
        """Leave these replicas out, while there are others."""
        before, self.avoided = self.avoided, frozenset(names)
        for replica in self.replicas.values():
            if replica.name in self.avoided - before:
                for router in self.routers:
                    router.discard(replica.index)
            elif replica.name in before - self.avoided:
                self._open(replica)

    def choose(self, ingress: int, weight: int, batch: int) -> SimulatedReplica | None:
        """The replica for a call of such a weight, which it has from now on; None where there is none."""
        if not self.replicas:
            return None
        router = self.routers[ingress]
        if len(router):
            return self.replicas[router.take(weight, batch)]
        replicas = list(self.replicas.values())  # all are avoided: those are all there is
        loads = [sum(trip.weight for trip in each.trips if trip.ingress.index == ingress) for each in replicas]
        return replicas[fill_first(loads, weight, batch, router.phase)[0]]

    def has(self, name: str) -> bool:
        """Whether a replica takes calls of its sequences."""
        index = int(name.rpartition("#")[2])
        if index not in self.replicas:
            return False
        return name not in self.avoided or all(each.name in self.avoided for each in self.replicas.values())

    def holder_of(self, ingress: int, placements: KVPlacements, batch: int) -> SimulatedReplica | None:
        """The replica of a call's sequences; where they have none, the one that `fill_first` puts first by sequences.

        None where there is no replica.
        """
        if placements.replica is not None:
            return self.replicas[int(placements.replica.rpartition("#")[2])]
        offered = [each for each in self.replicas.values() if self.has(each.name)]
        if not offered:
            return None
        held = Counter(index for (of, _), index in self._holders.items() if of == ingress)
        loads = [held[each.index] for each in offered]
        replica = offered[fill_first(loads, len(placements.each), batch, self.routers[ingress].phase)[0]]
        placements.choose(replica.name)
        self._holders.update({(ingress, number): replica.index for number in placements.numbers})
        return replica

    def leave(self, ingress: int, sequence: int) -> SimulatedReplica | None:
        """A sequence is over, or lost; gives the replica that had it, while that takes calls."""
        return self.replicas.get(self._holders.pop((ingress, sequence), -1))

    def withdraw(self, trip: object) -> None:
        """Have a call wait for a replica no more."""
        self.pending = [waiting for waiting in self.pending if waiting[0] is not trip]

    def trips(self) -> Iterator[Trip]:
        """The calls that its replicas have."""
        for replica in (*self.replicas.values(), *self.retired):
            yield from tuple(replica.trips)

    def done(self, ingress: int, replica: SimulatedReplica, weight: int) -> None:
        """A call has ended."""
        self.routers[ingress].load(replica.index, -weight)

    def _open(self, replica: SimulatedReplica) -> None:
        for router in self.routers:
            router.add(replica.index)
        for trip in replica.trips:  # one that works again may not have ended all that it had
            self.routers[trip.ingress.index].load(replica.index, trip.weight)
