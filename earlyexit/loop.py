"""What a device does between batches, whoever runs them: threads live, a heap of events in the simulator. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Generic

from earlyexit.engine import NOTHING, Batch, BatchEngine, Choice
from earlyexit.member import Member, P

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
