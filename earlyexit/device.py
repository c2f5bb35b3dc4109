"""A device: an engine, the cuts it runs, and whoever waits for the answers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from earlyexit.clock import Clock
from earlyexit.cut import Step
from earlyexit.engine import Batch, BatchEngine, Member
from earlyexit.errors import DeadlineError, ExecutionError, OfframpError
from earlyexit.piece import Piece, fuse
from earlyexit.split import Split
from earlyexit.wire import Answer

logger = logging.getLogger(__name__)

PieceMember = Member[Piece]
Inside = dict[str, PieceMember]
"""Members of a running batch that have no answer yet, by sample id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """An input that left, with its answer and where its time went."""

    member: PieceMember
    answer: Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class GoesOn:
    """Members whose next block is not hosted here."""

    members: tuple[PieceMember, ...]
    piece: Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """An input that gets no answer here, and why."""

    member: PieceMember
    error: OfframpError


Release = Answered | GoesOn | Lost
Deliver = Callable[[list[Release]], None]
OnBatch = Callable[[Batch[Piece]], None]


def ignore_batch(batch: Batch[Piece]) -> None:
    """Nobody counts batches."""


class RunnableCut(Protocol):
    """What a device needs of a cut."""

    def run(self, piece: Piece) -> Iterator[Step]:
        """See `earlyexit.cut.Cut.run`."""
        ...


class Device:
    """Runs one batch at a time; everything it releases goes to `deliver` as soon as it is known."""

    def __init__(
        self,
        engine: BatchEngine[Piece],
        cuts: Mapping[int, RunnableCut],
        clock: Clock,
        deliver: Deliver,
        on_batch: OnBatch = ignore_batch,
    ) -> None:
        self.engine = engine
        self._cuts = cuts
        self.clock = clock
        self._deliver = deliver
        self._on_batch = on_batch
        self.failures_in_a_row = 0
        """Inputs on which the model failed, alone, since it last did not: many mean a broken device, not bad inputs."""

    def start_next(self) -> Batch[Piece] | float | None:
        """The next batch to run; or the second to ask again at; or None until something is submitted."""
        choice = self.engine.choose(self.clock.now_s())
        if choice.dropped:
            self._deliver([_too_late(member) for member in choice.dropped])
        if choice.batch is None:
            return choice.wake_s
        return choice.batch

    def run(self, batch: Batch[Piece]) -> tuple[int, list[PieceMember]]:
        """Run a batch, deliver its answers, and give back the block and the members to submit again here.

        If the model fails, every member that has no answer yet runs once more, alone: one bad input costs its
        batch-mates time, never their answers. So do members whose sample ids do not tell them apart.
        """
        inside: Inside = {member.sample_id: member for member in batch.members}
        if len(inside) < len(batch.members):
            return self._run_one_by_one(batch.split, batch.members)
        try:
            done = self._run(batch, inside)
        except _ModelFailure as failure:
            if len(batch.members) > 1:
                return self._run_one_by_one(batch.split, list(inside.values()))
            self.failures_in_a_row += 1
            self._deliver([_failed(member, failure.error) for member in inside.values()])
            return batch.split.end, []
        self.failures_in_a_row = 0
        return done

    def _run_one_by_one(self, split: Split, members: Sequence[PieceMember]) -> tuple[int, list[PieceMember]]:
        again: list[PieceMember] = []
        for member in members:
            again += self.run(Batch(split=split, members=(member,), started_s=self.clock.now_s()))[1]
        return split.end, again

    def run_until_idle(self) -> None:
        """Run batches until every queue is empty or waits for time to pass."""
        while isinstance(batch := self.start_next(), Batch):
            next_block, members = self.run(batch)
            if members:
                self.engine.submit(next_block, members, self.clock.now_s())

    def _run(self, batch: Batch[Piece], inside: Inside) -> tuple[int, list[PieceMember]]:
        first_s: float | None = None
        survivors: Piece | None = None
        for step in _steps(self._cuts[batch.split.first], batch):
            elapsed_s = self.clock.now_s() - batch.started_s
            survivors = step.survivors
            if step.answers:
                first_s = elapsed_s if first_s is None else first_s
                self._deliver([_answered(inside.pop(answer.sample_id), answer, elapsed_s) for answer in step.answers])
        total_s = self.clock.now_s() - batch.started_s
        self._on_batch(batch)
        self.engine.finished(batch, first_s=total_s if first_s is None else first_s, total_s=total_s)
        for member in inside.values():
            member.compute_s += total_s
        return self._pass_on(survivors, inside)

    def _pass_on(self, survivors: Piece | None, inside: Inside) -> tuple[int, list[PieceMember]]:
        if survivors is None:
            return 0, []
        members = tuple(inside[sample_id] for sample_id in survivors.sample_ids)
        if not self.engine.hosts(survivors.next_block):
            self._deliver([GoesOn(members=members, piece=survivors)])
            return survivors.next_block, []
        for member, single in zip(members, survivors.singles(), strict=True):
            member.payload = single
        return survivors.next_block, list(members)


def ignore_death() -> None:
    """Leave it to `is_alive`."""


class DeviceThread:
    """A device in a thread of its own: it never waits for anything but work.

    Should the thread end by an error (the model's own are answered, this is something else), `on_death` is called.
    """

    def __init__(self, device: Device, name: str = "device", on_death: Callable[[], None] = ignore_death) -> None:
        self._device = device
        self._on_death = on_death
        self._clock = device.clock
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)

    def start(self) -> None:
        """Begin to take work."""
        self._thread.start()

    def stop(self) -> None:
        """Finish the running batch and end; what is queued stays queued."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def is_alive(self) -> bool:
        """Whether the device still takes work."""
        return self._thread.is_alive()

    def submit(self, next_block: int, members: list[PieceMember]) -> None:
        """Queue members; raises PlanError where no split here starts with that block."""
        with self._wake:
            self._device.engine.submit(next_block, members, self._clock.now_s())
            self._wake.notify()

    def forget(self, origin: object) -> int:
        """Throw out the queued members of an origin; how many there were."""
        with self._wake:
            return self._device.engine.forget(origin)

    def _loop(self) -> None:
        try:
            self._work()
        except BaseException:
            logger.exception("the device thread ends")
            self._on_death()
            raise

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            next_block, members = self._device.run(batch)
            if members:
                self.submit(next_block, members)

    def _next(self) -> Batch[Piece] | None:
        with self._wake:
            while not self._stopping:
                found = self._device.start_next()
                if isinstance(found, Batch):
                    return found
                self._wake.wait(None if found is None else max(0.0, found - self._clock.now_s()))
        return None


class _ModelFailure(Exception):  # noqa: N818 - it wraps an error, and never leaves this file
    """Whatever the model raised; told apart from what goes wrong in delivering answers."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def _steps(cut: RunnableCut, batch: Batch[Piece]) -> Iterator[Step]:
    """The cut's steps, the model's errors as _ModelFailure."""
    try:
        yield from cut.run(fuse([member.payload for member in batch.members]))
    except Exception as error:
        raise _ModelFailure(error) from error


def _answered(member: PieceMember, answer: Answer, elapsed_s: float) -> Answered:
    member.compute_s += elapsed_s
    return Answered(member=member, answer=answer)


def _too_late(member: PieceMember) -> Lost:
    return Lost(member=member, error=DeadlineError("the deadline could no longer be met, so the input was not run"))


def _failed(member: PieceMember, error: Exception) -> Lost:
    if isinstance(error, OfframpError):
        return Lost(member=member, error=error)
    return Lost(member=member, error=ExecutionError(f"the model failed on this input: {type(error).__name__}: {error}"))
