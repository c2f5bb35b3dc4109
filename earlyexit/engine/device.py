"""A device: an engine that forms batches, a runner that computes them, and the threads that drive both.

A network may keep memory for sequences between their inputs, such as keys and values. The device does not look inside
this memory and knows a sequence only by its number. The memory lives from the first input of the sequence until the
sender ends the sequence, or until the last batch that uses it is over. This module needs no torch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, Self, TypeVar

from earlyexit.clock import Clock
from earlyexit.engine.engine import MOST_RUNNING, Batch, BatchEngine, Dispatch
from earlyexit.engine.queue import DEFAULT, Member, OrderSpec
from earlyexit.errors import DeadlineError, ExecutionError, InputError, OfframpError, SequenceLostError
from earlyexit.named import HopDtype
from earlyexit.network.boundary import Answer, Lengths, Split, WirePiece


class Payload(Protocol):
    """The inputs of a device: `earlyexit.network.piece.Piece`, or the inputs of an emulated device."""

    @property
    def sample_ids(self) -> tuple[str, ...]: ...
    @property
    def next_block(self) -> int: ...
    @property
    def lengths_B(self) -> Lengths: ...
    def singles(self) -> list[Self]:
        """Returns one payload per input."""

    def select(self, keep: Sequence[int]) -> Self:
        """Returns the inputs at the given positions, in the given order."""

    def to_wire(self, hop_dtype: HopDtype = "same") -> WirePiece:
        """Returns the payload in the form for other processes, with hidden states in `hop_dtype`."""


PayloadT = TypeVar("PayloadT", bound=Payload)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Generic[PayloadT]):
    """The result of one exit for a running batch."""

    answers: tuple[Answer, ...]
    survivors: PayloadT | None
    """The inputs that remain in the batch. Inputs that stay remain until the model's end, even after their answer."""
    seen: tuple[Answer, ...] = ()
    """The exit's results for inputs that stay. All are of the same block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered(Generic[PayloadT]):
    """An answered input. Its member has the seconds that it waited and ran."""

    member: Member[PayloadT]
    answer: Answer
    stays: bool = False
    """Whether it runs on to the model's end. If it is answered again, the first answer counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed(Generic[PayloadT]):
    """An exit's result for an input that stays."""

    member: Member[PayloadT]
    seen: Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivors(Generic[PayloadT]):
    """Members that continue in another stage, because their next block is not hosted here."""

    members: tuple[Member[PayloadT], ...]
    piece: PayloadT


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Generic[PayloadT]):
    """An input that was lost here, and the error. If it stays, it may have been answered before."""

    member: Member[PayloadT]
    error: OfframpError


Release = Answered[PayloadT] | Observed[PayloadT] | Survivors[PayloadT] | Failed[PayloadT]
"""Every member leaves the device exactly once: answered without staying, as a survivor, or failed."""


@dataclass(slots=True)
class InFlight(Generic[PayloadT]):
    """The members of a running batch that have not left the device."""

    members: dict[str, Member[PayloadT]]
    """Members by sample id."""
    # The next two record releases for inputs that stay, because a failed batch runs again but releases nothing twice.
    answered_s: dict[str, float] = field(default_factory=dict)
    """For early answers, the seconds of this run that are already part of the member's compute time."""
    observed: set[int] = field(default_factory=set)
    """The blocks whose exit results were released."""

    def releases(self, step: Step[PayloadT], elapsed_s: float) -> list[Release[PayloadT]]:
        """Returns the releases of a step, `elapsed_s` after the batch started."""
        staying = frozenset[str]() if step.survivors is None else frozenset(step.survivors.sample_ids)
        releases: list[Release[PayloadT]] = []
        if step.seen and step.seen[0].exit not in self.observed:
            members = self.members
            self.observed.add(step.seen[0].exit)
            releases += [Observed(member=members[seen.sample_id], seen=seen) for seen in step.seen]
        for answer in step.answers:
            stays = answer.sample_id in staying
            if not (stays and self.members[answer.sample_id].answered):  # here or in the batch of an earlier split
                releases.append(self._answered(answer, elapsed_s, stays=stays))
        return releases

    def _answered(self, answer: Answer, elapsed_s: float, *, stays: bool = False) -> Answered[PayloadT]:
        sample_id = answer.sample_id
        member = self.members[sample_id] if stays else self.members.pop(sample_id)
        member.compute_s += elapsed_s - self.answered_s.get(sample_id, 0.0)
        if stays:
            member.answered = True
            self.answered_s[sample_id] = elapsed_s
        return Answered(member=member, answer=answer, stays=stays)


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """How much of a replica's memory for sequences is used."""

    sequences: int = 0
    pages: int = 0
    """Pages that are reserved now."""
    peak_pages: int = 0
    """The most pages that were reserved at once, since the start."""
    num_pages: int = 0
    page_tokens: int = 0
    """Tokens per page."""


RETRY_S = 0.05
"""The `retry_after_s` of a lost sequence. It can restart at once on another replica."""


def lost(sequence: int, reason: str) -> SequenceLostError:
    """Returns the error for a sequence that this replica cannot continue."""
    return SequenceLostError(f"sequence {sequence} cannot continue on this replica: {reason}", retry_after_s=RETRY_S)


class Memory(Protocol[PayloadT]):
    """The memory that a network keeps for sequences between their inputs.

    It is not thread-safe: `admit`, `end` and `use` are called under the device's lock. A running batch and `take_along`
    only use the memory of their own sequences, which `Device` does not end meanwhile.
    """

    @property
    def num_tokens(self) -> Mapping[int, int]:
        """The number of tokens of every sequence that inputs have brought so far."""

    def admit(self, wire: WirePiece, sequences: Sequence[int]) -> list[OfframpError | None]:
        """Returns an error or None for each input. The first input of a sequence reserves all memory that it may need.

        OverloadedError: too little memory is free now. InputError: the memory can never hold it. SequenceLostError:
        earlier tokens of the sequence are missing.
        """

    def end(self, sequence: int) -> None:
        """Frees the memory of a sequence, if it has any."""

    def take_along(self, piece: PayloadT) -> PayloadT:
        """Returns survivors for another stage, with earlier tokens of their sequences that wait for the same block."""

    def use(self) -> MemoryUse:
        """Returns how much memory is used."""


class Runner(Protocol[PayloadT]):
    """Computes the batches of a device."""

    memory: Memory[PayloadT] | None = None
    """The memory of sequences; None for a network without."""

    def from_wire(self, wire: WirePiece) -> PayloadT:
        """Returns the inputs of a call as a payload on this device."""

    def run(self, batch: Batch[PayloadT]) -> Iterator[Step[PayloadT]]:
        """Runs a batch. Yields a step per exit as soon as it is computed. The last survivors are at the split's end.

        In a batch that stays, an answer is early if its input is also among the step's survivors.
        """

    def follow(self, policy: Any) -> None:
        """Sets the exit policy, from the next batch on. Its type depends on the runner."""

    def prepare(self, splits: Sequence[Split]) -> None:
        """Does the slow work of the first runs of these splits. Called from another thread while the device serves."""

    def warm_up_pieces(self, split: Split, size: int) -> PayloadT:
        """Returns random inputs for a warm-up, each of `warm_up_length` tokens if inputs have tokens."""


WARM_UP_TOKENS = 16
"""The length of warm-up inputs, in tokens. A short text has about this length."""


def warm_up_length(split: Split, size: int) -> int:
    """Returns the tokens of each of `size` warm-up inputs. Several inputs together fill the split's token budget."""
    return WARM_UP_TOKENS if split.tokens is None or size == 1 else max(1, split.tokens // size)


Deliver = Callable[[list[Release[PayloadT]]], None]
OnBatch = Callable[[Batch[PayloadT], float], None]
"""Called for every batch that has run, with its device seconds."""


def ignore(*args: object) -> None:
    """Does nothing. The default of the callbacks `on_batch`, `wake` and `on_death`."""


class Device(Generic[PayloadT]):
    """Runs batches, and passes every release to `deliver` as soon as it is known.

    A driver calls `start_next` and `run`: `DeviceThreads`, the simulator, or a test. `deliver` is called by one thread
    at a time.
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
        self._ended: set[int] = set()
        """Sequences that ended while a batch still uses their memory. It is freed after that batch."""
        self._lost: set[int] = set()
        """Sequences that a plan has ended, and their sender not yet. Their further inputs are not admitted."""
        self.clock = clock
        self._deliver = deliver
        self._on_batch = on_batch
        self.lock = threading.RLock()
        """Held while the engine is used."""
        self._delivering = threading.Lock()
        self.wake: Callable[[], None] = ignore
        """Set by the driver. Called under the lock when the next batch may have become possible."""
        self.overlaps = False
        """Whether any plan so far let batches overlap, for which a driver needs two threads."""
        self.failures_in_a_row = 0
        """How many inputs in a row the model failed on, each alone. A large number means that the device is broken."""

    def submit(self, next_block: int, members: Sequence[Member[PayloadT]], fallback: Sequence[Split] = ()) -> None:
        """Queues members: see `BatchEngine.submit`. Raises PlanError if no split contains the block."""
        with self.lock:
            self.engine.submit(next_block, members, self.clock.now_s(), fallback)
            self.wake()

    def follow(self, splits: Sequence[Split], dispatch: Dispatch, policy: Any, order: OrderSpec = DEFAULT) -> None:
        """Applies a plan's splits, policy and order from the next batch on: see `BatchEngine.follow`.

        Sets `overlaps` if a split lets batches overlap. It is never reset. All sequences end if the plan adds blocks,
        because these blocks have not seen their earlier tokens here.
        """
        with self.lock:
            hosted = {block for split in self.engine.splits for block in range(split.first, split.end)}
            adds_blocks = not all(hosted.issuperset(range(split.first, split.end)) for split in splits)
            ending = self._memory.num_tokens.keys() - self._ended if adds_blocks and self._memory is not None else ()
            queued = self._end(ending) if ending else []
            self._lost.update(ending)
            self.engine.follow(splits, dispatch, order)
            self.runner.follow(policy)
            self.overlaps |= any(split.overlap_below is not None for split in splits)
            self.wake()
        self._release([_was_ended(member) for member in queued])

    def forget(self, origin: object) -> int:
        """Removes the queued members of a call that was cancelled. Returns their number."""
        with self.lock:
            return self.engine.forget(origin)

    def start_next(self) -> Batch[PayloadT] | float | None:
        """Returns the next batch, or else the time at which to call this again; None: after the next submission."""
        with self.lock:
            choice = self.engine.begin(self.clock.now_s())
        late = DeadlineError("the deadline could no longer be met, so the input was not run")
        self._release([Failed(member=member, error=late) for member in choice.dropped])
        return choice.wake_s if choice.batch is None else choice.batch

    def run(self, batch: Batch[PayloadT]) -> None:
        """Runs a batch and delivers its answers. Survivors are queued again, or delivered if they go to another stage.

        If the model fails, each remaining member runs again alone, so that one bad input never costs other inputs their
        answers. Members with equal sample ids also run alone.
        """
        inside = InFlight({member.sample_id: member for member in batch.members})
        if len(inside.members) < len(batch.members):
            parts = [InFlight({member.sample_id: member}) for member in batch.members]
            continuing = self._run_one_by_one(batch, parts)
        else:
            continuing = self._run(batch, inside)
        with self.lock:
            self.engine.leave(batch, self.clock.now_s())
            for survivors in continuing:
                if self._ended:
                    survivors = self._without_ended(survivors)
                is_hosted = self.engine.go_on(survivors.piece.next_block, survivors.members, self.clock.now_s())
                if not is_hosted and survivors.members:  # a new plan no longer hosts their next block here
                    self._release([self._with_waiting_tokens(survivors)])
            if self._memory is not None and self._ended:
                for sequence in self._ended - self.engine.running_sequences:
                    self._ended.remove(sequence)
                    self._memory.end(sequence)

    def run_until_idle(self) -> None:
        """Runs batches until no batch can start now."""
        while isinstance(batch := self.start_next(), Batch):
            self.run(batch)

    def admit(self, wire: WirePiece, members: list[Member[PayloadT]]) -> list[Member[PayloadT]]:
        """Returns the admitted inputs of a call. The others are released as failed: see `Memory.admit`.

        Inputs of a sequence that a plan has ended, or that ended while its batch still runs, are not admitted.
        Otherwise they would start the sequence again.
        """
        if self._memory is None:
            return members
        with self.lock:
            refused, gone = self._memory.admit(wire, [member.sequence for member in members]), self._ended | self._lost
        admitted: list[Member[PayloadT]] = []
        failed: list[Release[PayloadT]] = []
        for member, error in zip(members, refused, strict=True):
            if member.sequence in gone:
                failed.append(_was_ended(member))
            elif error is not None:
                failed.append(Failed(member=member, error=error))
            else:
                admitted.append(member)
        self._release(failed)
        return admitted

    @property
    def memory_use(self) -> MemoryUse | None:
        """How much memory sequences use; None for a network without memory of sequences."""
        if self._memory is None:
            return None
        with self.lock:
            return self._memory.use()

    def end(self, sequences: Collection[int]) -> None:
        """Ends sequences. Their queued inputs fail. Their memory is freed now or after a running batch."""
        with self.lock:
            self._lost.difference_update(sequences)
            queued = self._end(sequences)
        self._release([_was_ended(member) for member in queued])

    def _end(self, sequences: Collection[int]) -> list[Member[PayloadT]]:
        """Ends sequences, and returns their queued members, for which the caller releases errors without the lock."""
        were_awaited = bool(self.engine.awaited)
        queued = self.engine.remove_sequences(sequences)
        if self._memory is not None:
            running = self.engine.running_sequences
            self._ended |= running.intersection(sequences)
            for sequence in sequences:
                if sequence not in running:
                    self._memory.end(sequence)
        if were_awaited and not self.engine.awaited:
            self.wake()
        return queued

    def _run(self, batch: Batch[PayloadT], inside: InFlight[PayloadT]) -> list[Survivors[PayloadT]]:
        """Runs a batch, and its members one by one if it fails. Returns the survivors that continue on this device."""
        first_s: float | None = None
        survivors: PayloadT | None = None
        for step in _steps(self.runner, batch):
            if isinstance(step, Exception):
                return self._after_failure(batch, inside, step)
            elapsed_s = self.clock.now_s() - batch.started_s
            survivors = step.survivors
            if step.answers and first_s is None:
                first_s = elapsed_s
            before = len(inside.members)
            self._release(inside.releases(step, elapsed_s))
            self._shrink(batch, before - len(inside.members))
        now_s = self.clock.now_s()
        total_s = now_s - batch.started_s
        answered = None
        if self._memory is not None:
            answered = [each.sequence for each in batch.members if each.sample_id not in inside.members]
        with self.lock:
            busy_s = self.engine.end(batch, first_s=first_s, total_s=total_s, now_s=now_s, answered=answered)
        self._on_batch(batch, busy_s)
        for sample_id, member in inside.members.items():
            member.compute_s += total_s - inside.answered_s.get(sample_id, 0.0)
        self.failures_in_a_row = 0
        return [] if survivors is None else self._pass_on(survivors, inside)

    def _after_failure(
        self, batch: Batch[PayloadT], inside: InFlight[PayloadT], error: Exception
    ) -> list[Survivors[PayloadT]]:
        if len(batch.members) > 1:
            parts = [InFlight({name: member}, observed=set(inside.observed)) for name, member in inside.members.items()]
            return self._run_one_by_one(batch, parts)
        if not isinstance(error, InputError):  # a bad input does not mean that the device is broken
            self.failures_in_a_row += 1
        self._release([_failed(member, error) for member in inside.members.values()])
        self._shrink(batch, len(inside.members))
        return []

    def _run_one_by_one(self, batch: Batch[PayloadT], parts: Sequence[InFlight[PayloadT]]) -> list[Survivors[PayloadT]]:
        continuing: list[Survivors[PayloadT]] = []
        for part in parts:
            with self.lock:
                single = self.engine.again(batch, tuple(part.members.values()), self.clock.now_s())
            continuing += self._run(single, part)
        return continuing

    def _shrink(self, batch: Batch[PayloadT], by: int) -> None:
        """Notes that `by` inputs were answered or lost. With overlapping batches, another batch may begin now."""
        if batch.split.overlap_below is None or not by:
            return
        with self.lock:
            self.engine.shrink(batch, by)
            if self.engine.may_begin:
                self.wake()

    def _without_ended(self, survivors: Survivors[PayloadT]) -> Survivors[PayloadT]:
        """Returns the survivors whose sequence has not ended. The others are released as failed."""
        keep = [k for k, member in enumerate(survivors.members) if member.sequence not in self._ended]
        if len(keep) == len(survivors.members):
            return survivors
        self._release([_was_ended(member) for k, member in enumerate(survivors.members) if k not in keep])
        members = tuple(survivors.members[k] for k in keep)
        return Survivors(members=members, piece=survivors.piece.select(keep) if keep else survivors.piece)

    def _with_waiting_tokens(self, survivors: Survivors[PayloadT]) -> Survivors[PayloadT]:
        """Returns survivors for another stage: see `Memory.take_along`."""
        return survivors if self._memory is None else replace(survivors, piece=self._memory.take_along(survivors.piece))

    def _release(self, releases: list[Release[PayloadT]]) -> None:
        if releases:
            with self._delivering:
                self._deliver(releases)

    def _pass_on(self, piece: PayloadT, inside: InFlight[PayloadT]) -> list[Survivors[PayloadT]]:
        """Returns the survivors that continue on this device. Those for another stage are released."""
        members = tuple(inside.members[sample_id] for sample_id in piece.sample_ids)
        survivors = Survivors(members=members, piece=piece)
        if not self.engine.hosts(piece.next_block):
            self._release([self._with_waiting_tokens(survivors)])
            return []
        for member, single in zip(members, piece.singles(), strict=True):
            member.payload = single
        return [survivors]


class DeviceThreads(Generic[PayloadT]):
    """Drives a device with one thread. The first plan that lets batches overlap adds a second thread."""

    def __init__(
        self, device: Device[PayloadT], *, name: str = "device", on_death: Callable[[], None] = ignore
    ) -> None:
        """`name`: the name of the threads. `on_death`: called if a thread dies of an error."""
        self.device = device
        self._name = name
        self._on_death = on_death
        self._changed = threading.Condition(device.lock)
        self._stopping = False
        self._started = False
        self._threads = [self._new_thread(name)]
        device.wake = self._wake

    def start(self) -> None:
        """Starts the threads."""
        with self.device.lock:
            self._started = True
            for thread in self._threads:
                thread.start()

    def stop(self) -> None:
        """Stops the threads after their running batches. Queued inputs stay queued."""
        with self.device.lock:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def is_alive(self) -> bool:
        """Whether all threads are alive."""
        return all(thread.is_alive() for thread in self._threads)

    def _serve(self) -> None:
        """The loop of a thread: waits for a batch and runs it, until the threads are stopped."""
        device = self.device
        try:
            while True:
                with device.lock:
                    if self._stopping:
                        return
                    batch = device.start_next()
                    if not isinstance(batch, Batch):
                        self._changed.wait(None if batch is None else max(0.0, batch - device.clock.now_s()))
                        continue
                    if device.engine.may_begin:  # the batch is so small that another may begin beside it at once
                        self._changed.notify()
                device.run(batch)
        except BaseException:
            logger.exception("the device thread dies")
            self._on_death()
            raise

    def _wake(self) -> None:
        if self.device.overlaps and len(self._threads) < MOST_RUNNING and not self._stopping:
            self._threads.append(self._new_thread(f"{self._name}-beside"))
            if self._started:
                self._threads[-1].start()
        self._changed.notify()

    def _new_thread(self, name: str) -> threading.Thread:
        return threading.Thread(target=self._serve, name=name, daemon=True)


def _steps(runner: Runner[PayloadT], batch: Batch[PayloadT]) -> Iterator[Step[PayloadT] | Exception]:
    """Yields the steps of a batch, and the error of the model if it fails."""
    try:
        yield from runner.run(batch)
    except Exception as error:
        yield error


def _was_ended(member: Member[PayloadT]) -> Failed[PayloadT]:
    return Failed(member=member, error=lost(member.sequence, "it was ended"))


def _failed(member: Member[PayloadT], error: Exception) -> Failed[PayloadT]:
    if isinstance(error, OfframpError):
        return Failed(member=member, error=error)
    wrapped = ExecutionError(f"the model failed on this input: {type(error).__name__}: {error}")
    return Failed(member=member, error=wrapped)
