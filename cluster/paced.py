"""What runs on an emulated accelerator: another runner, and waiting for the time that its profile says."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from cluster.pace import Pace
from cluster.sharing import Sharing
from earlyexit.clock import Clock
from earlyexit.device import Runner
from earlyexit.engine import Batch, Dispatch
from earlyexit.release import Payload, Step
from earlyexit.split import Split
from earlyexit.wire import WirePiece
from profiles.table import LatencyTable

P = TypeVar("P", bound=Payload)


class PacedRunner(Runner[P]):
    """Another runner's steps, each not before the time that the emulated accelerator would have needed for it.

    Blocks count at the inputs really inside them, or at their tokens where lengths count; ramps where they are
    evaluated. A batch starts, for the emulated accelerator, as soon as the accelerator and the batch's last input were
    there: what this process needs between two batches costs it nothing.
    """

    def __init__(
        self,
        inner: Runner[P],
        table: LatencyTable,
        ramps: tuple[int, ...],
        *,
        time_scale: float,
        slowness: float = 1.0,
        length: int | None = None,
        clock: Clock,
        sleep: Callable[[float], None],
        wait: Callable[[threading.Condition, float], object] = threading.Condition.wait,
    ) -> None:
        """`length`: tokens of the profile's inputs; None: inputs cost alike, however long they are.

        `wait`: for so many seconds at most, or until the condition is told of a change.
        """
        self.inner = inner
        self.memory = inner.memory
        self.pace = Pace(table, ramps, time_scale * slowness, length=length)
        self.dispatch: Dispatch = "work-conserving"
        """Of the engine it runs for; a deferred batch that is not full was waited with, and starts when chosen."""
        self._ramps = ramps
        self._clock = clock
        self._sleep = sleep
        self._wait = wait
        self._free_s = -math.inf
        self._stayed: dict[int, tuple[str, ...]] = {}
        """By lane."""
        self._changed = threading.Condition()
        """Of what follows: another batch began, shrank or ended."""
        self._sharing = Sharing()

    def from_wire(self, wire: WirePiece) -> P:
        return self.inner.from_wire(wire)

    def follow(self, policy: Any) -> None:
        self.inner.follow(policy)

    def prepare(self, splits: Sequence[Split]) -> None:
        """Raises PlanError for batches above the profile's, too."""
        for split in splits:
            self.pace.check_budget(split.budget)
        self.inner.prepare(splits)

    def warm_up_pieces(self, split: Split, size: int) -> P:
        return self.inner.warm_up_pieces(split, size)

    def run(self, batch: Batch[P]) -> Iterator[Step[P]]:
        """With a batch in each of two threads, each is as slow as `Sharing` says."""
        if self.pace.length is None:
            self.pace.check_batch(len(batch.members))
        with self._changed:
            is_shared = batch.split.overlap_below is not None or len(self._sharing) > 0
        return self._run_shared(batch) if is_shared else self._run_alone(batch)

    def _run_alone(self, batch: Batch[P]) -> Iterator[Step[P]]:
        evaluated, size_of = self._evaluated(batch), _sizes_in(batch, self.pace)
        at_block, inside, due_s = batch.split.first, size_of(_ids_of(batch)), self._start_s(batch)
        for step in self.inner.run(batch):
            end = _end_of(step)
            due_s += self.pace.seconds_of_any(at_block, end, inside, evaluated)
            stay = () if step.survivors is None else step.survivors.sample_ids
            with self._changed:
                self._free_s = due_s
                self._stayed[batch.lane] = stay
            self._sleep_until(due_s)
            yield step
            at_block, inside = end, size_of(stay)

    def _run_shared(self, batch: Batch[P]) -> Iterator[Step[P]]:
        evaluated, size_of, lane = self._evaluated(batch), _sizes_in(batch, self.pace), batch.lane
        at_block, inside, due_s = batch.split.first, size_of(_ids_of(batch)), self._start_s(batch)
        try:
            for step in self.inner.run(batch):
                end, stay = _end_of(step), () if step.survivors is None else step.survivors.sample_ids
                with self._changed:
                    self._sharing.step(lane, self.pace, at_block, end, evaluated, inside=inside, at_s=due_s)
                    due_s = self._wait_shared(lane)
                    self._sharing.shrink(lane, size_of(stay), due_s)
                    self._free_s = max(self._free_s, due_s)
                    self._stayed[lane] = stay
                    self._changed.notify_all()
                yield step
                at_block, inside = end, size_of(stay)
        finally:  # whether it ended, failed, or is not wanted any more
            with self._changed:
                self._sharing.leave(lane, due_s)
                self._changed.notify_all()

    def _wait_shared(self, lane: int) -> float:
        """Until a lane's step is over, however the other's changes meanwhile; gives when that was."""
        self._changed.notify_all()
        while (left_s := (due_s := self._sharing.due_s(lane)) - self._clock.now_s()) > 0:
            self._wait(self._changed, left_s)
        return due_s

    def _evaluated(self, batch: Batch[P]) -> tuple[int, ...]:
        return self._ramps if batch.probe else batch.split.ramps

    def _start_s(self, batch: Batch[P]) -> float:
        with self._changed:  # another lane writes them
            free_s, stayed = self._free_s, {each for sample_ids in self._stayed.values() for each in sample_ids}
        # One that tokens filled was waited with too: for somebody who may not be in it.
        if self.dispatch == "deferred" and len(batch.members) < batch.split.batch:
            return max(free_s, batch.started_s)
        # Who stayed on the device from the batch before was here when that ended, whenever it was queued again.
        return max([free_s, *[member.since_s for member in batch.members if member.sample_id not in stayed]])

    def _sleep_until(self, due_s: float) -> None:
        left_s = due_s - self._clock.now_s()
        if left_s > 0:
            self._sleep(left_s)


def _end_of(step: Step[Any]) -> int:
    """The block that a step's survivors wait for, or would."""
    return step.answers[-1].exit + 1 if step.survivors is None else step.survivors.next_block


def _sizes_in(batch: Batch[Any], pace: Pace) -> Callable[[Sequence[str]], float]:
    """How large some of a batch's inputs are together, by their sample ids, as the profile counts."""
    if pace.length is None:
        return len
    tokens_of = {member.sample_id: member.tokens for member in batch.members}
    return lambda sample_ids: pace.size_of(len(sample_ids), sum([tokens_of[each] for each in sample_ids]))


def _ids_of(batch: Batch[Any]) -> list[str]:
    return [member.sample_id for member in batch.members]
