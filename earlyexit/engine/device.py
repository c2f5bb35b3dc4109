"""A device: an engine, the runner that computes its batches, what it releases, and the threads that drive them.

The device does not know what a network keeps of sequences between their inputs, such as keys and values. Sequences have
numbers. The memory of a sequence lives from its first input until the sender ends the sequence, and longer only while a
batch computes with it. This needs no torch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, Self, TypeVar

from earlyexit.clock import Clock
from earlyexit.engine.engine import MOST_RUNNING, Batch, BatchEngine, Dispatch
from earlyexit.engine.queue import DEFAULT, Member, OrderSpec
from earlyexit.errors import DeadlineError, ExecutionError, InputError, OfframpError, SequenceLostError
from earlyexit.named import HopDtype
from earlyexit.network.boundary import Answer, ExitResult, Lengths, Split, WirePiece


class Payload(Protocol):
    """What a device must know of the inputs it runs: `earlyexit.network.piece.Piece`, or an emulated device's."""

    @property
    def sample_ids(self) -> tuple[str, ...]: ...
    @property
    def next_block(self) -> int: ...
    @property
    def lengths_B(self) -> Lengths: ...
    def singles(self) -> list[Self]:
        """Returns one payload per input."""
        ...

    def select(self, keep: Sequence[int]) -> Self:
        """Returns the inputs at the given positions, in the given order."""
        ...

    def to_wire(self, hop_dtype: HopDtype = "same") -> WirePiece:
        """Returns the payload for another process; hidden states in `hop_dtype`."""
        ...


PayloadT = TypeVar("PayloadT", bound=Payload)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Generic[PayloadT]):
    """What the next exit of a running batch gave: answers, and the inputs still inside."""

    answers: tuple[Answer, ...]
    survivors: PayloadT | None
    """None when no input is left. Inputs that stay are among them until the model's end, answered or not."""
    seen: tuple[ExitResult, ...] = ()
    """What the exit said of inputs that stay; all have the same block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered(Generic[PayloadT]):
    """An answered input; its member says where its time went."""

    member: Member[PayloadT]
    answer: Answer
    stays: bool = False
    """Whether it still goes on to the model's end; if it is answered again, the first answer counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed(Generic[PayloadT]):
    """What an exit said of an input that stays."""

    member: Member[PayloadT]
    seen: ExitResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivors(Generic[PayloadT]):
    """Members whose next block is not hosted here."""

    members: tuple[Member[PayloadT], ...]
    piece: PayloadT


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Generic[PayloadT]):
    """An input that gets no answer here, unless it stayed after one, and why."""

    member: Member[PayloadT]
    error: OfframpError


Release = Answered[PayloadT] | Observed[PayloadT] | Survivors[PayloadT] | Failed[PayloadT]
"""Every member is released for good exactly once: answered without staying, going on, or lost."""


@dataclass(slots=True)
class InFlight(Generic[PayloadT]):
    """Members of a running batch that are not released for good, by sample id."""

    members: dict[str, Member[PayloadT]]
    # What has been released of inputs that stay: a batch that failed runs again and must release nothing twice. Early
    # answers are kept with the seconds of this run that their compute time contains.
    answered_s: dict[str, float] = field(default_factory=dict)
    looked: set[int] = field(default_factory=set)

    def releases(self, step: Step[PayloadT], elapsed_s: float, *, stay: bool) -> list[Release[PayloadT]]:
        """Returns what a step releases, `elapsed_s` after the batch started; `stay`: whether answered inputs stay."""
        if not stay:
            return [self._leave(answer, elapsed_s) for answer in step.answers]
        staying = frozenset[str]() if step.survivors is None else frozenset(step.survivors.sample_ids)
        releases: list[Release[PayloadT]] = []
        if step.seen and step.seen[0].block not in self.looked:
            members = self.members
            self.looked.add(step.seen[0].block)
            releases += [Observed(member=members[seen.sample_id], seen=seen) for seen in step.seen]
        for answer in step.answers:
            if answer.sample_id not in staying:
                releases.append(self._leave(answer, elapsed_s))
            elif not self.members[answer.sample_id].answered:  # here or, at an earlier ramp, in another split's batch
                releases.append(self._answer_early(answer, elapsed_s))
        return releases

    def charge(self, total_s: float) -> None:
        """Add a run's seconds to the compute time of members still inside."""
        for sample_id, member in self.members.items():
            member.compute_s += total_s - self.answered_s.get(sample_id, 0.0)

    def apart(self) -> list[InFlight[PayloadT]]:
        """Returns every member alone, for another run."""
        return [InFlight({name: member}, looked=set(self.looked)) for name, member in self.members.items()]

    def _leave(self, answer: Answer, elapsed_s: float) -> Answered[PayloadT]:
        member = self.members.pop(answer.sample_id)
        member.compute_s += elapsed_s - self.answered_s.get(answer.sample_id, 0.0)
        return Answered(member=member, answer=answer)

    def _answer_early(self, answer: Answer, elapsed_s: float) -> Answered[PayloadT]:
        member = self.members[answer.sample_id]
        member.compute_s += elapsed_s
        member.answered = True
        self.answered_s[answer.sample_id] = elapsed_s
        return Answered(member=member, answer=answer, stays=True)


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """How much of a replica's memory sequences have."""

    sequences: int = 0
    pages: int = 0
    """Reserved now."""
    peak_pages: int = 0
    """Reserved at most, since the start."""
    num_pages: int = 0
    page_tokens: int = 0
    """Tokens of a page."""


RETRY_S = 0.05
"""When a lost sequence may begin anew: at once, elsewhere."""


def lost(sequence: int, why: str) -> SequenceLostError:
    """Returns the error of a sequence that cannot go on here."""
    return SequenceLostError(f"sequence {sequence} cannot go on here: {why}", retry_after_s=RETRY_S)


class Memory(Protocol[PayloadT]):
    """What a network keeps of sequences.

    Not thread-safe: `admit`, `end` and `use` are called with the device's lock held. A running batch, and `take_along`,
    use only the memory of their own inputs' sequences, which `Device` does not end meanwhile.
    """

    def admit(self, wire: WirePiece, sequences: Sequence[int]) -> list[OfframpError | None]:
        """Reserve all memory that a sequence may need with its first input; returns for each input an error or None.

        OverloadedError where there is no room now, InputError where there never is, SequenceLostError where earlier
        tokens of the sequence are unknown.
        """
        ...

    def end(self, sequence: int) -> None:
        """Free the memory of a sequence, if there is any."""
        ...

    def take_along(self, piece: PayloadT) -> PayloadT:
        """Returns survivors that go on elsewhere, with earlier tokens that wait here for the same block."""
        ...

    def use(self) -> MemoryUse:
        """Returns how much memory is used."""
        ...


class Runner(Protocol[PayloadT]):
    """What computes a device's batches."""

    memory: Memory[PayloadT] | None = None
    """What its network keeps of sequences; None for a network that keeps nothing."""

    def from_wire(self, wire: WirePiece) -> PayloadT:
        """Returns a call's inputs as a payload on this device."""
        ...

    def run(self, batch: Batch[PayloadT]) -> Iterator[Step[PayloadT]]:
        """Runs a batch; yields a step per exit as soon as it is known. The last survivors have reached the split's end.

        In a batch that stays, an answer is early if its input is also among the step's survivors.
        """
        ...

    def follow(self, policy: Any) -> None:
        """Decide by `policy`, in the form that this runner takes, from the next batch on."""
        ...

    def prepare(self, splits: Sequence[Split]) -> None:
        """Do what is slow the first time, off the device's thread, while the device serves."""
        ...

    def warm_up_pieces(self, split: Split, size: int) -> PayloadT:
        """Returns meaningless inputs for a warm-up, each of `warm_up_length` tokens where inputs have tokens."""
        ...


WARM_UP_TOKENS = 16
"""Length of a warm-up's inputs: that of a short text."""


def warm_up_length(split: Split, size: int) -> int:
    """Returns the tokens of each of `size` warm-up inputs; several together fill the split's token budget, if any."""
    return WARM_UP_TOKENS if split.tokens is None or size == 1 else max(1, split.tokens // size)


Deliver = Callable[[list[Release[PayloadT]]], None]
OnBatch = Callable[[Batch[PayloadT], float], None]
"""Is called for every batch that has run, with the seconds that it had the device."""


def ignore(*told: object) -> None:
    """The default of `on_batch`, of `wake`, and of `on_death`: `is_alive` says it too."""


class Device(Generic[PayloadT]):
    """Steps through batches and passes everything that it releases to `deliver`, as soon as it is known.

    A driver calls `start_next` and `run`: `DeviceThreads`, virtual time, or a test. One thread at a time calls
    `deliver`.
    """

    def __init__(
        self,
        engine: BatchEngine[PayloadT],
        runner: Runner[PayloadT],
        clock: Clock,
        deliver: Deliver[PayloadT],
        on_batch: OnBatch[PayloadT] = ignore,
    ) -> None:
        self.engine = engine
        self.runner = runner
        self._memory = runner.memory
        self._over: set[int] = set()
        """Sequences that ended while a batch computes with them; their memory is freed when it is over."""
        self.clock = clock
        self._deliver = deliver
        self._on_batch = on_batch
        self.lock = threading.RLock()
        """Held while the engine is used."""
        self._delivering = threading.Lock()
        self.wake: Callable[[], None] = ignore
        """The driver's: called with the lock held when a batch may begin that could not a moment ago."""
        self.overlaps = False
        """Whether a plan ever let batches overlap, for which a driver needs two threads."""
        self.failures_in_a_row = 0
        """Inputs that the model failed on, each alone, since its last success. Many mean a broken device."""

    def submit(self, next_block: int, members: Sequence[Member[PayloadT]], fallback: Sequence[Split] = ()) -> None:
        """Queue members, as `BatchEngine.submit`; raises PlanError where no split holds the block."""
        with self.lock:
            self.engine.submit(next_block, members, self.clock.now_s(), fallback)
            self.wake()

    def follow(self, splits: Sequence[Split], dispatch: Dispatch, policy: Any, order: OrderSpec = DEFAULT) -> None:
        """Host other splits, and decide by another policy and order, from the next batch on; see `BatchEngine.follow`.

        The first splits that let batches overlap set `overlaps`, which then stays.
        """
        with self.lock:
            self.engine.follow(splits, dispatch, order)
            self.runner.follow(policy)
            self.overlaps |= any(split.overlap_below is not None for split in splits)
            self.wake()

    def forget(self, origin: object) -> int:
        """Remove the queued members of an origin; returns their number."""
        with self.lock:
            return self.engine.forget(origin)

    def start_next(self) -> Batch[PayloadT] | float | None:
        """Returns the next batch to run, or the second to ask again at, or None until something is submitted."""
        with self.lock:
            choice = self.engine.begin(self.clock.now_s())
        late = DeadlineError("the deadline could no longer be met, so the input was not run")
        self._release([Failed(member=member, error=late) for member in choice.dropped])
        return choice.wake_s if choice.batch is None else choice.batch

    def run(self, batch: Batch[PayloadT]) -> None:
        """Run a batch, deliver its answers and the survivors that go on elsewhere, and queue the others again.

        If the model fails, every member that is still inside runs once more, alone: one bad input costs its batch-mates
        time, but never their answers. Members with equal sample ids run alone too.
        """
        inside = InFlight({member.sample_id: member for member in batch.members})
        if len(inside.members) < len(batch.members):
            parts = [InFlight({member.sample_id: member}) for member in batch.members]
            coming_back = self._run_one_by_one(batch, parts)
        else:
            coming_back = self._attempt(batch, inside)
        with self.lock:
            self.engine.leave(batch, self.clock.now_s())
            for going in coming_back:
                if self._over:
                    going = self._without_over(going)
                is_hosted = self.engine.go_on(going.piece.next_block, going.members, self.clock.now_s())
                if not is_hosted and going.members:  # a new plan no longer hosts their next block here
                    self._release([self._leaving(going)])
            if self._memory is not None and self._over:
                for sequence in self._over - self.engine.running_sequences:
                    self._over.remove(sequence)
                    self._memory.end(sequence)

    def run_until_idle(self) -> None:
        """Run batches until every queue is empty or waits for time to pass."""
        while isinstance(batch := self.start_next(), Batch):
            self.run(batch)

    def admit(self, wire: WirePiece, members: list[Member[PayloadT]]) -> list[Member[PayloadT]]:
        """Returns the inputs of a call that the network takes; the others are released as lost: see `Memory.admit`.

        A sequence that was ended during a batch is kept until that batch is over and takes no further inputs: they
        would find nothing of it and begin it anew.
        """
        if self._memory is None:
            return members
        with self.lock:
            errors = [
                _over(member).error if member.sequence in self._over else error
                for member, error in zip(
                    members, self._memory.admit(wire, [member.sequence for member in members]), strict=True
                )
            ]
        pairs = list(zip(members, errors, strict=True))
        self._release([Failed(member=member, error=error) for member, error in pairs if error is not None])
        return [member for member, error in pairs if error is None]

    @property
    def memory_use(self) -> MemoryUse | None:
        """How much memory sequences use; None for a network that keeps nothing of them."""
        if self._memory is None:
            return None
        with self.lock:
            return self._memory.use()

    def end(self, sequences: Collection[int]) -> None:
        """End sequences: their queued inputs are lost, and their memory is freed, if need be after a running batch."""
        with self.lock:
            were_awaited = bool(self.engine.returning)
            queued = self.engine.remove_sequences(sequences)
            if self._memory is not None:
                running = self.engine.running_sequences
                self._over |= running.intersection(sequences)
                for sequence in sequences:
                    if sequence not in running:
                        self._memory.end(sequence)
            if were_awaited and not self.engine.returning:
                self.wake()
        self._release([_over(member) for member in queued])

    def _attempt(self, batch: Batch[PayloadT], inside: InFlight[PayloadT]) -> list[Survivors[PayloadT]]:
        try:
            survivors = self._run(batch, inside)
        except _ModelFailure as failure:
            if len(batch.members) > 1:
                return self._run_one_by_one(batch, inside.apart())
            if not isinstance(failure.error, InputError):  # a bad input is not the device's fault
                self.failures_in_a_row += 1
            self._release([_failed(member, failure.error) for member in inside.members.values()])
            self._shrink(batch, len(inside.members))
            return []
        self.failures_in_a_row = 0
        return [] if survivors is None else self._pass_on(survivors, inside)

    def _run_one_by_one(self, batch: Batch[PayloadT], parts: Sequence[InFlight[PayloadT]]) -> list[Survivors[PayloadT]]:
        coming_back: list[Survivors[PayloadT]] = []
        for part in parts:
            with self.lock:
                single = self.engine.again(batch, tuple(part.members.values()), self.clock.now_s())
            coming_back += self._attempt(single, part)
        return coming_back

    def _run(self, batch: Batch[PayloadT], inside: InFlight[PayloadT]) -> PayloadT | None:
        first_s: float | None = None
        survivors: PayloadT | None = None
        for step in _steps(self.runner, batch):
            elapsed_s = self.clock.now_s() - batch.started_s
            survivors = step.survivors
            if step.answers and first_s is None:
                first_s = elapsed_s
            before = len(inside.members)
            self._release(inside.releases(step, elapsed_s, stay=batch.stays))
            self._shrink(batch, before - len(inside.members))
        now_s = self.clock.now_s()
        total_s = now_s - batch.started_s
        answered = None
        if self._memory is not None:
            answered = [each.sequence for each in batch.members if each.sample_id not in inside.members]
        with self.lock:
            busy_s = self.engine.end(batch, first_s=first_s, total_s=total_s, now_s=now_s, answered=answered)
        self._on_batch(batch, busy_s)
        inside.charge(total_s)
        return survivors

    def _shrink(self, batch: Batch[PayloadT], by: int) -> None:
        """Note inputs that were answered or lost; where batches overlap, that may make room for another."""
        if batch.split.overlap_below is None or not by:
            return
        with self.lock:
            self.engine.shrink(batch, by)
            if self.engine.may_begin:
                self.wake()

    def _without_over(self, going: Survivors[PayloadT]) -> Survivors[PayloadT]:
        """Returns survivors without those of ended sequences, which are lost."""
        keep = [k for k, member in enumerate(going.members) if member.sequence not in self._over]
        if len(keep) == len(going.members):
            return going
        self._release([_over(member) for k, member in enumerate(going.members) if k not in keep])
        members = tuple(going.members[k] for k in keep)
        return Survivors(members=members, piece=going.piece.select(keep) if keep else going.piece)

    def _leaving(self, going: Survivors[PayloadT]) -> Survivors[PayloadT]:
        """Returns survivors with everything of their sequences that has to go along."""
        return going if self._memory is None else replace(going, piece=self._memory.take_along(going.piece))

    def _release(self, releases: list[Release[PayloadT]]) -> None:
        if releases:
            with self._delivering:
                self._deliver(releases)

    def _pass_on(self, survivors: PayloadT, inside: InFlight[PayloadT]) -> list[Survivors[PayloadT]]:
        members = tuple(inside.members[sample_id] for sample_id in survivors.sample_ids)
        going = Survivors(members=members, piece=survivors)
        if not self.engine.hosts(survivors.next_block):
            self._release([self._leaving(going)])
            return []
        for member, single in zip(members, survivors.singles(), strict=True):
            member.payload = single
        return [going]


class DeviceThreads(Generic[PayloadT]):
    """Drives a device by a thread of its own, and by a second one from the first plan on that lets batches overlap."""

    def __init__(
        self, device: Device[PayloadT], *, name: str = "device", on_death: Callable[[], None] = ignore
    ) -> None:
        """`name`: of the threads. `on_death` is called where a thread ends by an error that is not the model's."""
        self.device = device
        self._name = name
        self._on_death = on_death
        self._news = threading.Condition(device.lock)
        self._stopping = False
        self._started = False
        self._threads = [self._new_thread(name)]
        device.wake = self._wake

    def start(self) -> None:
        """Begin to take work."""
        with self.device.lock:
            self._started = True
            for thread in self._threads:
                thread.start()

    def stop(self) -> None:
        """Finish the running batches and end the threads; what is queued stays queued."""
        with self.device.lock:
            self._stopping = True
            self._news.notify_all()
        for thread in self._threads:
            thread.join()

    def is_alive(self) -> bool:
        """Whether the threads still take work."""
        return all(thread.is_alive() for thread in self._threads)

    def _serve(self) -> None:
        """The loop of a thread: choose a batch, run it, deliver what it releases, queue the survivors again."""
        try:
            while (batch := self._next()) is not None:
                self.device.run(batch)
        except BaseException:
            logger.exception("the device thread ends")
            self._on_death()
            raise

    def _next(self) -> Batch[PayloadT] | None:
        device = self.device
        with device.lock:
            while not self._stopping:
                found = device.start_next()
                if isinstance(found, Batch):
                    if device.engine.may_begin:  # the batch is so small that another may begin beside it at once
                        self._news.notify()
                    return found
                self._news.wait(None if found is None else max(0.0, found - device.clock.now_s()))
        return None

    def _wake(self) -> None:
        if self.device.overlaps and len(self._threads) < MOST_RUNNING and not self._stopping:
            self._threads.append(self._new_thread(f"{self._name}-beside"))
            if self._started:
                self._threads[-1].start()
        self._news.notify()

    def _new_thread(self, name: str) -> threading.Thread:
        return threading.Thread(target=self._serve, name=name, daemon=True)


class _ModelFailure(Exception):  # noqa: N818 - it wraps an error, and never leaves this file
    """Wraps what the model raised, to tell it apart from errors in delivering answers."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def _steps(runner: Runner[PayloadT], batch: Batch[PayloadT]) -> Iterator[Step[PayloadT]]:
    """Yields the batch's steps; raises the model's errors as _ModelFailure."""
    try:
        yield from runner.run(batch)
    except Exception as error:
        raise _ModelFailure(error) from error


def _over(member: Member[PayloadT]) -> Failed[PayloadT]:
    return Failed(member=member, error=lost(member.sequence, "it was ended"))


def _failed(member: Member[PayloadT], error: Exception) -> Failed[PayloadT]:
    if isinstance(error, OfframpError):
        return Failed(member=member, error=error)
    wrapped = ExecutionError(f"the model failed on this input: {type(error).__name__}: {error}")
    return Failed(member=member, error=wrapped)
