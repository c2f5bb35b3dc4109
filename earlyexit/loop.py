"""What a device does between batches, whoever runs them: a thread live, a heap of events in the simulator. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

from earlyexit.engine import Batch, BatchEngine, Choice
from earlyexit.member import Member, P


class DeviceLoop(Generic[P]):
    """Of one device, which runs one batch at a time: begin, run, end, go on."""

    __slots__ = ("engine",)

    def __init__(self, engine: BatchEngine[P]) -> None:
        self.engine = engine

    def begin(self, now_s: float) -> Choice[P]:
        """What a free device does now; the members of a batch have waited until here."""
        choice = self.engine.choose(now_s)
        if choice.batch is not None:
            started_s = choice.batch.started_s
            for member in choice.batch.members:
                member.queue_s += started_s - member.queued_since_s
        return choice

    def end(self, batch: Batch[P], *, first_s: float | None, total_s: float) -> None:
        """A batch has run. `first_s`: until its first answers; None where all stayed to its end."""
        self.engine.finished(batch, first_s=total_s if first_s is None else first_s, total_s=total_s)

    def go_on(self, block: int, members: Sequence[Member[P]], now_s: float) -> bool:
        """Have members of a batch that has run wait for their next block here; False where nobody hosts it.

        Asked when they are to be queued, not when the batch ends: a plan may have come in between.
        """
        if not self.engine.hosts(block):
            return False
        self.engine.submit(block, members, now_s)
        return True
