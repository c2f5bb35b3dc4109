"""A device: an engine, what runs its batches, and whoever waits for the answers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol

from earlyexit.clock import Clock
from earlyexit.engine import Batch, BatchEngine, Dispatch
from earlyexit.errors import DeadlineError, ExecutionError, InputError, OfframpError
from earlyexit.loop import MOST_BATCHES, DeviceLoop
from earlyexit.member import Member
from earlyexit.order import DEFAULT, OrderSpec
from earlyexit.release import GoesOn, Inside, Lost, P, Release, Step
from earlyexit.split import Split
from earlyexit.wire import WirePiece

logger = logging.getLogger(__name__)


class Runner(Protocol[P]):
    """What computes a device's batches."""

    def from_wire(self, wire: WirePiece) -> P:
        """A payload on this device."""
        ...

    def run(self, batch: Batch[P]) -> Iterator[Step[P]]:
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

    def warm_up_pieces(self, split: Split, size: int) -> P:
        """Inputs of nothing, for warming; where they have tokens, as many as `warm_up_length` says."""
        ...


WARM_UP_TOKENS = 16
"""Length of the inputs of nothing: that of a short text."""


def warm_up_length(split: Split, size: int) -> int:
    """Tokens of each of `size` inputs of nothing: several fill the split's token budget, where it has one."""
    return WARM_UP_TOKENS if split.tokens is None or size == 1 else max(1, split.tokens // size)


Deliver = Callable[[list[Release[P]]], None]
OnBatch = Callable[[Batch[P], float], None]
"""Is told of every batch that has run, and the seconds that it had the device."""


def ignore_batch(batch: Batch[Any], seconds: float) -> None:
    """Nobody counts batches."""


def ignore_room() -> None:
    """Nobody waits to run a batch beside another."""


class Device(Generic[P]):
    """Runs one batch at a time, or two; everything it releases goes to `deliver` as soon as it is known.

    Two threads may run one batch each, where `DeviceLoop` lets the second begin; `deliver` is called by one at a time.
    """

    def __init__(
        self,
        engine: BatchEngine[P],
        runner: Runner[P],
        clock: Clock,
        deliver: Deliver[P],
        on_batch: OnBatch[P] = ignore_batch,
    ) -> None:
        self.engine = engine
        self._loop = DeviceLoop(engine)
        self.runner = runner
        self.clock = clock
        self._deliver = deliver
        self._on_batch = on_batch
        self.lock = threading.RLock()
        """Held while the engine is asked or told something."""
        self._delivering = threading.Lock()
        self.on_room: Callable[[], None] = ignore_room
        """Called with the lock held, when a running batch has shrunk so far that another may begin beside it."""
        self.failures_in_a_row = 0
        """Inputs on which the model failed, alone, since it last did not: many mean a broken device, not bad inputs."""

    def start_next(self) -> Batch[P] | float | None:
        """The next batch to run; or the second to ask again at; or None until something is submitted."""
        with self.lock:
            choice = self._loop.begin(self.clock.now_s())
        if choice.dropped:
            self._release([_too_late(member) for member in choice.dropped])
        return choice.wake_s if choice.batch is None else choice.batch

    @property
    def may_begin(self) -> bool:
        """Whether a batch can start now, should there be one."""
        return self._loop.may_begin

    def run(self, batch: Batch[P]) -> list[GoesOn[P]]:
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
        return coming_back

    def requeue(self, coming_back: Iterable[GoesOn[P]]) -> None:
        """Submit what `run` gave back; deliver those whose next block is no longer hosted, for a plan may have come."""
        for going in coming_back:
            with self.lock:
                is_hosted = self._loop.go_on(going.piece.next_block, going.members, self.clock.now_s())
            if not is_hosted:
                self._release([going])

    def run_until_idle(self) -> None:
        """Run batches until every queue is empty or waits for time to pass."""
        while isinstance(batch := self.start_next(), Batch):
            self.requeue(self.run(batch))

    def _attempt(self, batch: Batch[P], inside: Inside[P]) -> list[GoesOn[P]]:
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

    def _run_one_by_one(self, batch: Batch[P], parts: Sequence[Inside[P]]) -> list[GoesOn[P]]:
        coming_back: list[GoesOn[P]] = []
        for part in parts:
            with self.lock:
                single = self._loop.again(batch, tuple(part.members.values()), self.clock.now_s())
            coming_back += self._attempt(single, part)
        return coming_back

    def _run(self, batch: Batch[P], inside: Inside[P]) -> P | None:
        first_s: float | None = None
        survivors: P | None = None
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
        self._on_batch(batch, busy_s)
        inside.charge(total_s)
        return survivors

    def _shrink(self, batch: Batch[P], by: int) -> None:
        """So many are no longer inside, answered or lost: where batches overlap, that may make room for another."""
        if batch.split.overlap_below is None or not by:
            return
        with self.lock:
            self._loop.shrink(batch, by)
            if self._loop.may_begin:
                self.on_room()

    def _release(self, releases: list[Release[P]]) -> None:
        with self._delivering:
            self._deliver(releases)

    def _pass_on(self, survivors: P, inside: Inside[P]) -> list[GoesOn[P]]:
        members = tuple(inside.members[sample_id] for sample_id in survivors.sample_ids)
        going = GoesOn(members=members, piece=survivors)
        if not self.engine.hosts(survivors.next_block):
            self._release([going])
            return []
        for member, single in zip(members, survivors.singles(), strict=True):
            member.payload = single
        return [going]


def ignore_death() -> None:
    """Leave it to `is_alive`."""


class DeviceThread(Generic[P]):
    """A device in a thread of its own, and one more where batches overlap: they never wait for anything but work.

    Should a thread end by an error (the model's own are answered, this is something else), `on_death` is called.
    """

    def __init__(self, device: Device[P], name: str = "device", on_death: Callable[[], None] = ignore_death) -> None:
        self._device = device
        self._name = name
        self._on_death = on_death
        self._clock = device.clock
        self._wake = threading.Condition(device.lock)
        self._stopping = False
        self._started = False
        self._threads = [self._new_thread(name)]
        device.on_room = self._wake.notify

    def start(self) -> None:
        """Begin to take work."""
        with self._wake:
            self._started = True
            for thread in self._threads:
                thread.start()

    def stop(self) -> None:
        """Finish the running batches and end; what is queued stays queued."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()

    def is_alive(self) -> bool:
        """Whether the device still takes work."""
        return all(thread.is_alive() for thread in self._threads)

    def submit(self, next_block: int, members: Sequence[Member[P]], fallback: Sequence[Split] = ()) -> None:
        """Queue members, as `BatchEngine.submit`; raises PlanError where no split holds the block."""
        with self._wake:
            self._device.engine.submit(next_block, members, self._clock.now_s(), fallback)
            self._wake.notify()

    def follow(
        self,
        splits: Sequence[Split],
        dispatch: Dispatch,
        policy: Any,
        order: OrderSpec = DEFAULT,
        entry: int | None = None,
    ) -> None:
        """Host other splits, and decide by another policy and order, from the next batch on; see `BatchEngine.follow`.

        The first that let batches overlap bring the second thread, which then stays.
        """
        with self._wake:
            self._device.engine.follow(splits, dispatch, order, entry)
            self._device.runner.follow(policy)
            if any(split.overlap_below is not None for split in splits):
                self._add_thread()
            self._wake.notify()

    def forget(self, origin: object) -> int:
        """Throw out the queued members of an origin; how many there were."""
        with self._wake:
            return self._device.engine.forget(origin)

    def _new_thread(self, name: str) -> threading.Thread:
        return threading.Thread(target=self._loop, name=name, daemon=True)

    def _add_thread(self) -> None:
        if len(self._threads) < MOST_BATCHES and not self._stopping:
            self._threads.append(self._new_thread(f"{self._name}-beside"))
            if self._started:
                self._threads[-1].start()

    def _loop(self) -> None:
        try:
            self._work()
        except BaseException:
            logger.exception("the device thread ends")
            self._on_death()
            raise

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            coming_back = self._device.run(batch)
            with self._wake:
                self._device.requeue(coming_back)

    def _next(self) -> Batch[P] | None:
        with self._wake:
            while not self._stopping:
                found = self._device.start_next()
                if isinstance(found, Batch):
                    if self._device.may_begin:  # a batch so small that another may begin beside it at once
                        self._wake.notify()
                    return found
                self._wake.wait(None if found is None else max(0.0, found - self._clock.now_s()))
        return None


class _ModelFailure(Exception):  # noqa: N818 - it wraps an error, and never leaves this file
    """Whatever the model raised; told apart from what goes wrong in delivering answers."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def _steps(runner: Runner[P], batch: Batch[P]) -> Iterator[Step[P]]:
    """The batch's steps, the model's errors as _ModelFailure."""
    try:
        yield from runner.run(batch)
    except Exception as error:
        raise _ModelFailure(error) from error


def _too_late(member: Member[P]) -> Lost[P]:
    return Lost(member=member, error=DeadlineError("the deadline could no longer be met, so the input was not run"))


def _failed(member: Member[P], error: Exception) -> Lost[P]:
    if isinstance(error, OfframpError):
        return Lost(member=member, error=error)
    return Lost(member=member, error=ExecutionError(f"the model failed on this input: {type(error).__name__}: {error}"))
