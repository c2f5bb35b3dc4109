"""A device: an engine, what runs its batches, and whoever waits for the answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, Protocol

from earlyexit.clock import Clock
from earlyexit.engine.engine import NOTHING, Batch, BatchEngine, Choice
from earlyexit.engine.queue import Member, P
from earlyexit.engine.release import Inside, Lost, PayloadT, Release, Step, Survivors
from earlyexit.errors import DeadlineError, ExecutionError, InputError, OfframpError
from earlyexit.network.split import Split
from earlyexit.network.wire import WirePiece
from earlyexit.sequences.memory import Memory, MemoryUse, SequencePins, lost

MOST_BATCHES: Final = 2
"""That a device runs at once: a third would find the device no emptier, and slow down two others (PAME figure 5)."""


@dataclass(slots=True, eq=False)
class _Running(Generic[P]):
    """A batch on the device."""

    batch: Batch[P]
    inside: int
    """Inputs that are not answered, or stay."""
    beside_since_s: float | None
    """Since when another runs beside it; None while it is alone."""
    shared_s: float = 0.0
    """Seconds of those that ran beside it before, and ended."""

    @property
    def leaves_room(self) -> bool:
        below = self.batch.split.overlap_below
        return below is not None and self.inside < below


class DeviceLoop(Generic[P]):
    """Of one device: begin, run, end, go on.

    It runs one batch at a time. Where the running batch's split says `overlap_below`, the next one may begin beside it
    as soon as fewer inputs than that remain inside, whether they left at ramps or were never more (PAME section 4.2);
    never more than two run at once. The running batch's split decides, though a plan may have come since.
    """

    __slots__ = ("_running", "engine")

    def __init__(self, engine: BatchEngine[P]) -> None:
        self.engine = engine
        self._running: list[_Running[P]] = []

    @property
    def may_begin(self) -> bool:
        """Whether the device takes a batch now, should there be one."""
        running = self._running
        return not running or (len(running) < MOST_BATCHES and running[0].leaves_room)

    @property
    def num_running(self) -> int:
        """Batches on the device."""
        return len(self._running)

    def begin(self, now_s: float) -> Choice[P]:
        """What the device does now: nothing where it is busy; the members of a batch have waited until here."""
        if not self.may_begin:
            return NOTHING
        choice = self.engine.choose(now_s)
        if choice.batch is None:
            return choice
        started_s = choice.batch.started_s
        for member in choice.batch.members:
            member.queue_s += started_s - member.since_s
        if not self._running:
            self._running.append(_Running(choice.batch, len(choice.batch.members), None))
            return choice
        return self._begin_beside(choice, choice.batch, now_s)

    def shrink(self, batch: Batch[P], by: int) -> None:
        """So many inputs have left a running batch for good."""
        self._of(batch).inside -= by

    def end(self, batch: Batch[P], *, first_s: float | None, total_s: float, now_s: float) -> float:
        """A batch has run; gives the seconds that it had the device, with those of two batches counted half.

        `first_s`: until its first answers; None where all stayed to its end.
        """
        running = self._of(batch)
        shared_s, since_s = running.shared_s, running.beside_since_s
        if since_s is not None:
            shared_s += now_s - since_s
        first_s = total_s if first_s is None else first_s
        return self.engine.finished(batch, first_s=first_s, total_s=total_s, shared_s=min(shared_s, total_s))

    def again(self, batch: Batch[P], members: Sequence[Member[P]], now_s: float) -> Batch[P]:
        """Some members of a batch that failed, or could not run as one, as a batch of their own in its place."""
        running, tokens = self._of(batch), sum(member.tokens for member in members)
        running.shared_s = 0.0
        if running.beside_since_s is not None:
            running.beside_since_s = now_s
        return replace(batch, members=tuple(members), tokens=tokens, started_s=now_s)

    def leave(self, batch: Batch[P], now_s: float) -> None:
        """A batch, and whatever ran again of it, is over: its place on the device is free."""
        self._running.remove(self._of(batch))
        for other in self._running:
            if other.beside_since_s is not None:
                other.shared_s += now_s - other.beside_since_s
                other.beside_since_s = None

    def go_on(self, block: int, members: Sequence[Member[P]], now_s: float) -> bool:
        """Have members of a batch that has run wait for their next block here; False where nobody hosts it.

        Asked when they are to be queued, not when the batch ends: a plan may have come in between.
        """
        if not self.engine.hosts(block):
            return False
        self.engine.submit(block, members, now_s)
        return True

    def _begin_beside(self, choice: Choice[P], batch: Batch[P], now_s: float) -> Choice[P]:
        (other,) = self._running
        beside = replace(batch, lane=1 - other.batch.lane)
        other.beside_since_s = now_s
        self._running.append(_Running(beside, len(beside.members), now_s))
        return replace(choice, batch=beside)

    def _of(self, batch: Batch[P]) -> _Running[P]:
        running = self._running
        return running[0] if running[0].batch.lane == batch.lane else running[1]


class Runner(Protocol[PayloadT]):
    """What computes a device's batches."""

    memory: Memory[PayloadT] | None = None
    """What its network keeps of sequences; None where it keeps nothing."""

    def from_wire(self, wire: WirePiece) -> PayloadT:
        """A payload on this device."""
        ...

    def run(self, batch: Batch[PayloadT]) -> Iterator[Step[PayloadT]]:
        """Run a batch, one step per exit, as soon as it is known; the last survivors wait for the split's end.

        Of a batch that stays, an answer to an input that is also among the step's survivors is an early one.
        """
        ...

    def follow(self, policy: Any) -> None:
        """Decide by `policy`, in whatever form this runner takes it, from the next batch on."""
        ...

    def prepare(self, splits: Sequence[Split]) -> None:
        """Whatever is slow the first time, off the device's thread, while it serves."""
        ...

    def warm_up_pieces(self, split: Split, size: int) -> PayloadT:
        """Inputs of nothing, for warming; where they have tokens, as many as `warm_up_length` says."""
        ...


WARM_UP_TOKENS = 16
"""Length of the inputs of nothing: that of a short text."""


def warm_up_length(split: Split, size: int) -> int:
    """Tokens of each of `size` inputs of nothing: several fill the split's token budget, where it has one."""
    return WARM_UP_TOKENS if split.tokens is None or size == 1 else max(1, split.tokens // size)


Deliver = Callable[[list[Release[PayloadT]]], None]
OnBatch = Callable[[Batch[PayloadT], float], None]
"""Is told of every batch that has run, and the seconds that it had the device."""


def ignore_batch(batch: Batch[Any], seconds: float) -> None:
    """Nobody counts batches."""


def ignore_room() -> None:
    """Nobody sleeps until a batch may begin."""


class Device(Generic[PayloadT]):
    """Runs one batch at a time, or two; everything it releases goes to `deliver` as soon as it is known.

    Two threads may run one batch each, where `DeviceLoop` lets the second begin; `deliver` is called by one at a time.
    """

    def __init__(
        self,
        engine: BatchEngine[PayloadT],
        runner: Runner[PayloadT],
        clock: Clock,
        deliver: Deliver[PayloadT],
        on_batch: OnBatch[PayloadT] = ignore_batch,
    ) -> None:
        self.engine = engine
        self._loop = DeviceLoop(engine)
        self.runner = runner
        self._memory = runner.memory
        self._hands = None if self._memory is None else SequencePins(self._memory)
        self.clock = clock
        self._deliver = deliver
        self._on_batch = on_batch
        self.lock = threading.RLock()
        """Held while the engine is asked or told something."""
        self._delivering = threading.Lock()
        self.on_room: Callable[[], None] = ignore_room
        """Called with the lock held, when a batch may begin that could not a moment ago: a running one has shrunk so
        far that another may beside it, or nobody is waited for any longer, as who was is over."""
        self.failures_in_a_row = 0
        """Inputs on which the model failed, alone, since it last did not: many mean a broken device, not bad inputs."""

    def start_next(self) -> Batch[PayloadT] | float | None:
        """The next batch to run; or the second to ask again at; or None until something is submitted."""
        with self.lock:
            choice = self._loop.begin(self.clock.now_s())
            if self._hands is not None and choice.batch is not None:
                self._hands.take(choice.batch.members)
        if choice.dropped:
            self._release([_too_late(member) for member in choice.dropped])
        return choice.wake_s if choice.batch is None else choice.batch

    @property
    def may_begin(self) -> bool:
        """Whether a batch can start now, should there be one."""
        return self._loop.may_begin

    def run(self, batch: Batch[PayloadT]) -> list[Survivors[PayloadT]]:
        """Run a batch, deliver its answers and who goes on elsewhere, and give back who goes on here, to `requeue`.

        If the model fails, every member that is still inside runs once more, alone: one bad input costs its batch-mates
        time, never their answers. So do members whose sample ids do not tell them apart.
        """
        inside = Inside({member.sample_id: member for member in batch.members})
        if len(inside.members) < len(batch.members):
            parts = [Inside({member.sample_id: member}) for member in batch.members]
            coming_back = self._run_one_by_one(batch, parts)
        else:
            coming_back = self._attempt(batch, inside)
        with self.lock:
            self._loop.leave(batch, self.clock.now_s())
            if self._hands is not None:
                back = {id(member) for going in coming_back for member in going.members}
                self._hands.let_go(member for member in batch.members if id(member) not in back)
        return coming_back

    def requeue(self, coming_back: Iterable[Survivors[PayloadT]]) -> None:
        """Submit what `run` gave back; deliver those whose next block is no longer hosted, for a plan may have come."""
        for going in coming_back:
            with self.lock:
                if self._hands is not None:
                    going = self._without_over(going, self._hands)
                is_hosted = self._loop.go_on(going.piece.next_block, going.members, self.clock.now_s())
            if not is_hosted and going.members:
                self._release([self._leaving(going)])

    def run_until_idle(self) -> None:
        """Run batches until every queue is empty or waits for time to pass."""
        while isinstance(batch := self.start_next(), Batch):
            self.requeue(self.run(batch))

    def admit(self, wire: WirePiece, members: list[Member[PayloadT]]) -> list[Member[PayloadT]]:
        """Whom the network takes of a call's inputs; the others are released, lost: see `Memory.admit`.

        A sequence that was ended while a batch has it is kept until that batch is over, and takes nothing more: what
        came in behind would find nothing of it, and begin it anew for nobody.
        """
        if self._memory is None or self._hands is None:
            return members
        with self.lock:
            errors = self._memory.admit(wire, [member.sequence for member in members])
            errors = [
                _over(member).error if self._hands.is_over(member) else error
                for member, error in zip(members, errors, strict=True)
            ]
        pairs = list(zip(members, errors, strict=True))
        self._lose([Lost(member=member, error=error) for member, error in pairs if error is not None])
        return [member for member, error in pairs if error is None]

    @property
    def memory_use(self) -> MemoryUse | None:
        """How much sequences have of what the network keeps; None where it keeps nothing of any."""
        if self._memory is None:
            return None
        with self.lock:
            return self._memory.use()

    def end(self, sequences: Collection[int]) -> None:
        """Sequences are over: their queued inputs are lost, and what is kept of them goes, if need be after a batch."""
        with self.lock:
            were_awaited = bool(self.engine.returning)
            queued = self.engine.take_out(sequences)
            if self._hands is not None:
                self._hands.end(sequences)
            if were_awaited and not self.engine.returning:
                self.on_room()
        self._lose([_over(member) for member in queued])

    def _attempt(self, batch: Batch[PayloadT], inside: Inside[PayloadT]) -> list[Survivors[PayloadT]]:
        try:
            survivors = self._run(batch, inside)
        except _ModelFailure as failure:
            if len(batch.members) > 1:
                return self._run_one_by_one(batch, inside.apart())
            if not isinstance(failure.error, InputError):  # what is wrong with an input is not the device's fault
                self.failures_in_a_row += 1
            self._release([_failed(member, failure.error) for member in inside.members.values()])
            self._shrink(batch, len(inside.members))
            return []
        self.failures_in_a_row = 0
        return [] if survivors is None else self._pass_on(survivors, inside)

    def _run_one_by_one(self, batch: Batch[PayloadT], parts: Sequence[Inside[PayloadT]]) -> list[Survivors[PayloadT]]:
        coming_back: list[Survivors[PayloadT]] = []
        for part in parts:
            with self.lock:
                single = self._loop.again(batch, tuple(part.members.values()), self.clock.now_s())
            coming_back += self._attempt(single, part)
        return coming_back

    def _run(self, batch: Batch[PayloadT], inside: Inside[PayloadT]) -> PayloadT | None:
        first_s: float | None = None
        survivors: PayloadT | None = None
        for step in _steps(self.runner, batch):
            elapsed_s = self.clock.now_s() - batch.started_s
            survivors = step.survivors
            if step.answers and first_s is None:
                first_s = elapsed_s
            before = len(inside.members)
            if releases := inside.releases(step, elapsed_s, stay=batch.stays):
                self._release(releases)
            self._shrink(batch, before - len(inside.members))
        now_s = self.clock.now_s()
        total_s = now_s - batch.started_s
        with self.lock:
            busy_s = self._loop.end(batch, first_s=first_s, total_s=total_s, now_s=now_s)
            if self._hands is not None:
                answered = [each.sequence for each in batch.members if each.sample_id not in inside.members]
                self.engine.returning.answered(answered, took_s=total_s, now_s=now_s)
        self._on_batch(batch, busy_s)
        inside.charge(total_s)
        return survivors

    def _shrink(self, batch: Batch[PayloadT], by: int) -> None:
        """So many are no longer inside, answered or lost: where batches overlap, that may make room for another."""
        if batch.split.overlap_below is None or not by:
            return
        with self.lock:
            self._loop.shrink(batch, by)
            if self._loop.may_begin:
                self.on_room()

    def _without_over(self, going: Survivors[PayloadT], hands: SequencePins[PayloadT]) -> Survivors[PayloadT]:
        """Without, and no longer in hand; who is over is lost."""
        keep = [k for k, member in enumerate(going.members) if not hands.is_over(member)]
        hands.let_go(going.members)
        if len(keep) == len(going.members):
            return going
        self._lose([_over(member) for k, member in enumerate(going.members) if k not in keep])
        members = tuple(going.members[k] for k in keep)
        return Survivors(members=members, piece=going.piece.select(keep) if keep else going.piece)

    def _leaving(self, going: Survivors[PayloadT]) -> Survivors[PayloadT]:
        """With whatever has to go along."""
        return going if self._memory is None else replace(going, piece=self._memory.take_along(going.piece))

    def _lose(self, lost: list[Release[PayloadT]]) -> None:
        if lost:
            self._release(lost)

    def _release(self, releases: list[Release[PayloadT]]) -> None:
        with self._delivering:
            self._deliver(releases)

    def _pass_on(self, survivors: PayloadT, inside: Inside[PayloadT]) -> list[Survivors[PayloadT]]:
        members = tuple(inside.members[sample_id] for sample_id in survivors.sample_ids)
        going = Survivors(members=members, piece=survivors)
        if not self.engine.hosts(survivors.next_block):
            self._release([self._leaving(going)])
            return []
        for member, single in zip(members, survivors.singles(), strict=True):
            member.payload = single
        return [going]


class _ModelFailure(Exception):  # noqa: N818 - it wraps an error, and never leaves this file
    """Whatever the model raised; told apart from what goes wrong in delivering answers."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def _steps(runner: Runner[PayloadT], batch: Batch[PayloadT]) -> Iterator[Step[PayloadT]]:
    """The batch's steps, the model's errors as _ModelFailure."""
    try:
        yield from runner.run(batch)
    except Exception as error:
        raise _ModelFailure(error) from error


def _too_late(member: Member[PayloadT]) -> Lost[PayloadT]:
    return Lost(member=member, error=DeadlineError("the deadline could no longer be met, so the input was not run"))


def _over(member: Member[PayloadT]) -> Lost[PayloadT]:
    return Lost(member=member, error=lost(member.sequence, "it was ended"))


def _failed(member: Member[PayloadT], error: Exception) -> Lost[PayloadT]:
    if isinstance(error, OfframpError):
        return Lost(member=member, error=error)
    return Lost(member=member, error=ExecutionError(f"the model failed on this input: {type(error).__name__}: {error}"))
