"""A runner that notes, as batches begin, which traced inputs are in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from deployments.messages import SplitRun
from deployments.stage.chunks import OpenCall
from earlyexit.device import Runner
from earlyexit.engine import Batch
from earlyexit.member import Member
from earlyexit.release import Step
from earlyexit.split import Split
from earlyexit.wire import WirePiece


class WatchedRunner:
    """Another runner, watched; only where tracing is on."""

    def __init__(self, runner: Runner[Any]) -> None:
        self._runner = runner
        self.memory = runner.memory

    def from_wire(self, wire: WirePiece) -> Any:
        return self._runner.from_wire(wire)

    def run(self, batch: Batch[Any]) -> Iterator[Step[Any]]:
        for member in batch.members:
            opened = member.origin
            if isinstance(opened, OpenCall) and opened.begun is not None and member.sample_id in opened.begun:
                opened.begun[member.sample_id].append(_begun(batch, member))
        return self._runner.run(batch)

    def follow(self, policy: Any) -> None:
        self._runner.follow(policy)

    def prepare(self, splits: Sequence[Split]) -> None:
        self._runner.prepare(splits)

    def warm_up_pieces(self, split: Split, size: int) -> Any:
        return self._runner.warm_up_pieces(split, size)


def _begun(batch: Batch[Any], member: Member[Any]) -> SplitRun:
    return SplitRun(
        first=batch.split.first,
        end=batch.split.end,
        batch=len(batch.members),
        tokens=batch.tokens,
        target=batch.split.batch,
        queue_s=member.queue_s,
        compute_s=member.compute_s,
    )
