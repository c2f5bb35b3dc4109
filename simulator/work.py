"""The work of batches on simulated accelerators: which inputs leave where, and how long batches take by the profile."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import sub
from typing import Any, Final, NamedTuple

import numpy as np

from cluster.emulated import Pace, Sharing
from deployments.ingress.core.inputs import PendingInput
from earlyexit.engine.engine import Batch
from earlyexit.engine.queue import Member, SplitCounts
from earlyexit.network.boundary import Split
from optimizer.generation.seconds import DecoderSeconds
from optimizer.plans.plan import PolicySpec
from simulator.events import ENDS, Events
from simulator.inputs import NOWHERE

Input = Member[PendingInput]
"""An input in an engine. Its serial number is its position in the scenario, in the order of arrival."""


Exit = tuple[int, list[Input]]
"""A block, and the inputs that leave after it."""
Size = Any
"""The size of a batch: its inputs or, if inputs have lengths, its tokens. For steps a `StepSize`."""


@dataclass(slots=True, eq=False)
class Work:
    """The work of the batches of one split."""

    split: Split
    leaves: array[int]
    """The ramp at which each input leaves, or NOWHERE. The index is the input's number modulo the array's length."""
    pace: Pace
    counts: SplitCounts
    took_s: array[float] | None = None
    """Collects the seconds of every batch, if not None."""
    _until_s: dict[int, list[float]] = field(default_factory=dict, init=False)

    @property
    def is_late(self) -> bool:
        """Whether inputs that leave early are answered only at the batch's end."""
        return False

    def size_of(self, members: Sequence[Input]) -> Size:
        """Returns the size of some members."""
        return len(members) if self.pace.length is None else tokens_of(members)

    def until_s(self, size: Size, ramps: Collection[int] | None = None) -> list[float]:
        """Returns the seconds from the batch's start to the end of each block, for a batch of constant size.

        `ramps`: the evaluated ramps; None: the split's.
        """
        until_s = self._until_s.get(size) if ramps is None else None
        if until_s is None:
            split, inputs = self.split, self.pace.size_of(size, size)
            evaluated = split.ramps if ramps is None else ramps
            blocks = range(split.first, split.end + 1)
            until_s = [self.pace.seconds_of_any(split.first, block, inputs, evaluated) for block in blocks]
            if ramps is None:
                self._until_s[size] = until_s
        return until_s

    def end_s(self, size: Size | None, num_waiting: int) -> float:
        """Returns the seconds of the head after a batch's last block.

        `size`: of the members that reach it; None: no member does. `num_waiting`: members that left early and are
        answered at the end.
        """
        return 0.0

    def part(self, batch: Batch[PendingInput]) -> tuple[list[Exit], Exit | None, list[Input]]:
        """Divides a batch into the exits before its end, the exit at its end, and the inputs that continue.

        If answered inputs stay, all inputs go on.
        """
        if not self.split.ramps:
            return [], None, list(batch.members)
        leaves, cycle = self.leaves, len(self.leaves)
        by_ramp: dict[int, list[Input]] = {}
        for member in batch.members:
            by_ramp.setdefault(leaves[member.payload.serial % cycle], []).append(member)
        survivors = by_ramp.pop(NOWHERE, [])
        exits = sorted(by_ramp.items())
        if batch.stays:
            return exits, None, list(batch.members)
        last = exits.pop() if exits and (not survivors or exits[-1][0] + 1 == self.split.end) else None
        return exits, last, survivors

    def count(self, batch: Batch[PendingInput], seconds: float) -> None:
        """Counts a batch that has run."""
        counts = self.counts
        counts.batches += 1
        counts.inputs += len(batch.members)
        counts.tokens += batch.tokens
        counts.busy_s += seconds
        if self.took_s is not None:
            self.took_s.append(seconds)


def tokens_of(members: Sequence[Input]) -> int:
    """Returns the tokens of all members."""
    return sum([member.tokens for member in members])


@dataclass(slots=True, eq=False)
class Works:
    """The work of all splits, for replicas of one pace."""

    pace: Pace
    make: Callable[[Split, Pace], Work]
    hop_length: int | None = None
    """The tokens of an input with hidden states of `bytes_per_sample_N`; None: inputs have no lengths."""
    _of: dict[int, Work] = field(default_factory=dict, init=False)

    def of(self, split: Split) -> Work:
        """Returns the work of a split, which is created at the first call."""
        # The key is the identity, because computing a split's hash is slow.
        work = self._of.get(id(split))
        if work is None or work.split is not split:
            work = self._of[id(split)] = self.make(split, self.pace)
        return work

    def inputs_of(self, members: Sequence[Input]) -> float:
        """Returns the members as an equivalent number of inputs of length `hop_length`."""
        return len(members) if self.hop_length is None else tokens_of(members) / self.hop_length

    def warm_up_sizes(self, split: Split) -> list[tuple[int, int]]:
        """Returns the inputs and tokens of the warm-up's batches: one input, and a full batch."""
        length, budget = self.pace.length, split.tokens
        if length is None:
            return [(size, size) for size in sorted({1, split.batch})]
        full = split.batch if budget is None else max(1, min(split.batch, budget // length))
        return [(size, size * length) for size in sorted({1, full})]

    def forget(self, pace: Pace) -> None:
        """Drops all work after a change of ramps or networks, which changes exits and lengths."""
        self.pace = pace
        self._of.clear()


class Ended(NamedTuple):
    """A batch that has run."""

    batch: Batch[PendingInput]
    work: Work
    first_s: float | None
    """The seconds until its first answers; None: they come at its end."""
    total_s: float
    at_end: Sequence[Exit]
    survivors: list[Input]


@dataclass(slots=True, kw_only=True)
class Remaining:
    """The remaining work of a running batch."""

    batch: Batch[PendingInput]
    work: Work
    pace: Pace
    ramps: Collection[int]
    """The evaluated ramps."""
    exits: deque[Exit]
    """The exits before the end."""
    last: Exit | None
    """The exit at the end."""
    survivors: list[Input]
    at: int
    """The next block."""
    inside: int
    """The current size of the batch: inputs or, if inputs have lengths, tokens."""
    first_s: float | None = None


@dataclass(slots=True, eq=False)
class SideBySide:
    """Overlapping batches of a replica, driven by events."""

    events: Events
    is_alive: Callable[[], bool]
    on_exit: Callable[[Batch[PendingInput], Exit], None]
    """Called with each exit before the end."""
    on_end: Callable[[Ended], None]
    _sharing: Sharing = field(default_factory=Sharing, init=False)
    _running: dict[int, Remaining] = field(default_factory=dict, init=False)
    _serial: int = field(default=0, init=False)

    def begin(self, batch: Batch[PendingInput], works: Works, all_ramps: Collection[int]) -> None:
        """Starts a batch. `all_ramps`: the ramps that evaluate probes."""
        split, work = batch.split, works.of(batch.split)
        exits, last, survivors = work.part(batch)
        self._running[batch.lane] = remaining = Remaining(
            batch=batch,
            work=work,
            pace=work.pace,
            ramps=all_ramps if batch.probe else split.ramps,
            exits=deque(exits),
            last=last,
            survivors=survivors,
            at=split.first,
            inside=work.size_of(batch.members),
        )
        self._go_on(remaining)

    def _go_on(self, remaining: Remaining) -> None:
        """Runs a batch to its next exit or to its end."""
        following = remaining.exits[0] if remaining.exits else remaining.last
        end = remaining.batch.split.end if following is None else following[0] + 1
        self._sharing.step(
            remaining.batch.lane,
            remaining.pace,
            remaining.at,
            end,
            remaining.ramps,
            inside=remaining.pace.size_of(remaining.inside, remaining.inside),
            at_s=self.events.time_s,
        )
        remaining.at = end
        self._schedule()

    def _schedule(self) -> None:
        """Schedules the next exit or end of every batch. Events that were scheduled earlier become obsolete."""
        self._serial += 1
        for lane in self._running:
            due_s = max(self.events.time_s, self._sharing.due_s(lane))
            self.events.at(due_s, ENDS, self._on_due, (lane, self._serial))

    def _on_due(self, scheduled: tuple[int, int]) -> Any:
        lane, serial = scheduled
        if serial != self._serial or not self.is_alive():
            return False  # obsolete
        remaining, now_s = self._running[lane], self.events.time_s
        elapsed_s = now_s - remaining.batch.started_s
        if not remaining.exits:
            del self._running[lane]
            self._sharing.leave(lane, now_s)
            self._schedule()
            at_end = [] if remaining.last is None else [remaining.last]
            first_s, survivors = remaining.first_s, remaining.survivors
            self.on_end(Ended(remaining.batch, remaining.work, first_s, elapsed_s, at_end, survivors))
            return None
        if remaining.first_s is None:
            remaining.first_s = elapsed_s
        exited = remaining.exits.popleft()
        if not remaining.batch.stays:
            remaining.inside -= remaining.work.size_of(exited[1])
        self._go_on(remaining)
        self.on_exit(remaining.batch, exited)
        return None


LATE: Final = ("foreseen", "similar")
"""Policies that decide before the head that all exits share runs (`Cut`). Inputs that leave under them are answered at
the batch's end."""
Behind = Counter[tuple[int, bool]]
"""Numbers of tokens, by the block after which they left, and whether they belong to a prompt of several tokens."""


@dataclass(slots=True, kw_only=True)
class StepMember(Member[PendingInput]):
    """An input of a sequence: a chunk of the prompt, or the newest token."""

    context: int
    """The earlier tokens of the sequence."""
    behind: Behind
    """Tokens of the sequence whose skipped blocks are not filled in yet."""


class StepSize(NamedTuple):
    """The size of a batch of steps."""

    inputs: int
    steps: int
    """Inputs of one token."""
    prompt: int
    """The tokens of all other inputs."""
    context: int
    """The sum of the earlier tokens of the steps' sequences."""
    behind: Behind
    """Tokens to be filled in."""

    def __sub__(self, other: StepSize) -> StepSize:
        return StepSize(*map(sub, self, other))


@dataclass(slots=True, eq=False, kw_only=True)
class StepWork(Work):
    """The work of the batches of one split of a decoder."""

    seconds: DecoderSeconds
    ramps: Sequence[int]
    """All ramps of the model."""
    num_blocks: int
    fill: float
    """The time of filling in a token in a block, as a share of computing it."""
    policy: PolicySpec | None

    @property
    def is_late(self) -> bool:
        return self.policy is not None and self.policy.name in LATE

    def size_of(self, members: Sequence[Input]) -> StepSize:
        steps, prompt, context = 0, 0, 0
        behind: Behind = Counter()
        for member in members:
            assert isinstance(member, StepMember)
            if member.tokens == 1:
                steps += 1
                context += member.context
            else:
                prompt += member.tokens
            behind.update(member.behind)
        return StepSize(len(members), steps, prompt, context, behind)

    def until_s(self, size: StepSize, ramps: Collection[int] | None = None) -> list[float]:
        """See `Work.until_s`. The vocabulary head after the last block is not included: see `end_s`."""
        split, seconds = self.split, self.seconds
        rows_N, prompt_N = np.full((2, self.num_blocks), [[float(size.steps)], [size.prompt]])
        for (ramp, is_prompt), tokens in size.behind.items():
            (prompt_N if is_prompt else rows_N)[ramp + 1 :] += tokens * self.fill
        block_s_N = seconds.blocks(rows_N, prompt_N, steps=size.steps, context=size.context)
        for ramp in split.ramps if ramps is None else ramps:
            block_s_N[ramp] += seconds.ramp(self.ramps.index(ramp), size.inputs)
        return [0.0, *accumulate(block_s_N[split.first : split.end].tolist())]

    def end_s(self, size: StepSize | None, num_waiting: int) -> float:
        at_last = 0 if size is None or self.split.end < self.num_blocks else size.inputs
        return self.seconds.head(num_waiting + at_last)

    def count(self, batch: Batch[PendingInput], seconds: float) -> None:
        """Counts a batch, and updates the tokens that are to be filled in. Probes leave none behind."""
        Work.count(self, batch, seconds)  # `super()` does not work in a slotted dataclass
        leaves, cycle, at_end = self.leaves, len(self.leaves), self.split.end == self.num_blocks
        for member in batch.members:
            assert isinstance(member, StepMember)
            ramp = leaves[member.payload.serial % cycle] if self.split.ramps and not batch.stays else NOWHERE
            if ramp != NOWHERE:
                leave(member.behind, ramp, member.tokens)
            elif at_end:
                member.behind.clear()


def leave(behind: Behind, ramp: int, tokens: int) -> None:
    """Records that the newest tokens of a sequence left after a block. It fills in earlier tokens up to that block."""
    for block, is_prompt in [each for each in behind if each[0] < ramp]:
        behind[ramp, is_prompt] += behind.pop((block, is_prompt))
    behind[ramp, tokens > 1] += tokens
