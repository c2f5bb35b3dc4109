"""The time of an emulated accelerator: a latency profile, read between its batch sizes, stretched, and waited for."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from earlyexit.clock import Clock
from earlyexit.device import Runner
from earlyexit.engine import Batch, Dispatch
from earlyexit.errors import PlanError
from earlyexit.release import Payload, Step
from earlyexit.split import Split
from earlyexit.wire import WirePiece
from profiles.table import LatencyTable

P = TypeVar("P", bound=Payload)


class Pace:
    """Seconds of consecutive blocks at any number of inputs, up to the largest measured batch.

    Interpolated once, here: a batch then costs its replica additions only.
    """

    def __init__(self, table: LatencyTable, ramps: tuple[int, ...], stretch: float) -> None:
        sizes_X = np.arange(1, table.batches[-1] + 1, dtype=np.float64)
        block_s_NX = table.blocks_at(sizes_X) * stretch
        # Per number of inputs, the seconds before every block and, last, those of all blocks.
        self._before_s = np.vstack([np.zeros(len(sizes_X)), block_s_NX.cumsum(0)]).T.tolist()
        self._ramp_s = dict(zip(ramps, (table.ramps_at(sizes_X) * stretch).tolist(), strict=True))
        self._largest = table.batches[-1]

    def check_batch(self, size: int) -> None:
        """Raise PlanError for a batch about which the profile says nothing."""
        if size > self._largest:
            raise PlanError(f"the profile knows no batch of {size}: its largest is {self._largest}")

    def seconds(self, first: int, end: int, size: int, ramps: Collection[int]) -> float:
        """Of blocks first to end - 1 with `size` inputs inside, with those of the given ramps that are among them."""
        before_s = self._before_s[size - 1]
        ramp_s = sum([self._ramp_s[ramp][size - 1] for ramp in ramps if first <= ramp < end])
        return float(before_s[end] - before_s[first] + ramp_s)

    def split_s(self, split: Split, size: int) -> tuple[float, float]:
        """Until a split's first active ramp, or its end, and to its end, when nobody leaves."""
        first_end = split.segments()[0].end
        return (
            self.seconds(split.first, first_end, size, split.ramps),
            self.seconds(split.first, split.end, size, split.ramps),
        )


class PacedRunner(Runner[P]):
    """Another runner's steps, each not before the time that the emulated accelerator would have needed for it.

    Blocks count at the number of inputs really inside them, ramps where they are evaluated. A batch starts, for the
    emulated accelerator, as soon as the accelerator and the batch's last input were there: what this process needs
    between two batches costs it nothing.
    """

    def __init__(
        self,
        inner: Runner[P],
        table: LatencyTable,
        ramps: tuple[int, ...],
        *,
        time_scale: float,
        slowness: float = 1.0,
        clock: Clock,
        sleep: Callable[[float], None],
    ) -> None:
        self.inner = inner
        self.pace = Pace(table, ramps, time_scale * slowness)
        self.dispatch: Dispatch = "work-conserving"
        """Of the engine it runs for; a deferred batch that is not full was waited with, and starts when chosen."""
        self._ramps = ramps
        self._clock = clock
        self._sleep = sleep
        self._free_s = -math.inf
        self._stayed: tuple[str, ...] = ()

    def from_wire(self, wire: WirePiece) -> P:
        return self.inner.from_wire(wire)

    def follow(self, policy: Any) -> None:
        self.inner.follow(policy)

    def prepare(self, splits: Sequence[Split]) -> None:
        """Raises PlanError for batches above the profile's, too."""
        for split in splits:
            self.pace.check_batch(split.batch)
        self.inner.prepare(splits)

    def warm_up_pieces(self, split: Split, size: int) -> P:
        return self.inner.warm_up_pieces(split, size)

    def run(self, batch: Batch[P]) -> Iterator[Step[P]]:
        self.pace.check_batch(len(batch.members))
        evaluated = self._ramps if batch.probe else batch.split.ramps
        at_block, inside, due_s = batch.split.first, len(batch.members), self._start_s(batch)
        for step in self.inner.run(batch):
            end = step.answers[-1].exit + 1 if step.survivors is None else step.survivors.next_block
            due_s += self.pace.seconds(at_block, end, inside, evaluated)
            self._free_s = due_s
            self._stayed = () if step.survivors is None else step.survivors.sample_ids
            self._sleep_until(due_s)
            yield step
            at_block, inside = end, len(self._stayed)

    def _start_s(self, batch: Batch[P]) -> float:
        if self.dispatch == "deferred" and len(batch.members) < batch.split.batch:
            return max(self._free_s, batch.started_s)
        # Who stayed on the device from the batch before was here when that ended, whenever it was queued again.
        stayed = set(self._stayed)
        return max(
            [self._free_s, *[member.queued_since_s for member in batch.members if member.sample_id not in stayed]]
        )

    def _sleep_until(self, due_s: float) -> None:
        left_s = due_s - self._clock.now_s()
        if left_s > 0:
            self._sleep(left_s)
