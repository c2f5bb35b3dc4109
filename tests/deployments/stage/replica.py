"""A stage's host on an emulated device, and what its callers do."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cluster.emulated import PacedRunner
from deployments.replica.build import build_runner, starting_policy
from deployments.replica.host import OpenCall, StageHost, chunks_by_call
from deployments.settings import ServeSettings
from deployments.wire.messages import Assignment, Chunk, SplitRun, StageCall
from earlyexit.clock import MonotonicClock
from earlyexit.engine.device import Release
from earlyexit.engine.engine import Dispatch
from earlyexit.network.boundary import Split, WirePiece
from optimizer.placement import slot_name
from optimizer.plan import PolicySpec, Stage
from profiles.records import ExitRecords

V100 = "emulated:V100"


def policy_of(folder: Path, threshold: float) -> PolicySpec:
    return PolicySpec(name="recorded", thresholds=threshold, records=str(folder / "records.npz"))


class Replica:
    """A host and what its callers do."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        policy = starting_policy(settings)
        runner = build_runner(settings, V100, policy, clock=MonotonicClock())
        assert isinstance(runner, PacedRunner)
        self.runner: PacedRunner[Any] = runner
        self.host = StageHost(settings, V100, runner, MonotonicClock(), self.deliver)

    def records(self) -> ExitRecords:
        return ExitRecords.load(Path(self.settings.model) / "records.npz")

    def deliver(self, releases: list[Release[Any]]) -> None:
        for opened, chunk in chunks_by_call(releases):
            opened.take(chunk)

    def assignment(
        self,
        epoch: int,
        *splits: Split,
        threshold: float = 0.5,
        dispatch: Dispatch = "work-conserving",
    ) -> Assignment:
        stage = Stage(device=V100, replicas=1, splits=splits)
        policy = policy_of(Path(self.settings.model), threshold)
        return Assignment(epoch=epoch, slot=slot_name(V100, 0), stage=stage, policy=policy, dispatch=dispatch)

    async def call(
        self,
        ids: Sequence[str],
        assignment: Assignment,
        *,
        next_block: int = 0,
        probe: bool = False,
        lengths: Sequence[int] = (),
        traced: tuple[int, ...] = (),
    ) -> list[Chunk]:
        """The reply's parts; `lengths` left out: 1 each; `traced`: positions of inputs."""
        wire = WirePiece(
            sample_ids=tuple(ids),
            next_block=next_block,
            lengths_B=np.array(lengths or [1] * len(ids), dtype=np.int32),
            tensors=(),
            state_BS=None,
        )
        call = StageCall(
            piece=wire, remaining_s=(math.inf,) * len(ids), reserve_s=0.0, assignment=assignment, probe=probe
        )
        loop = asyncio.get_running_loop()
        parts: asyncio.Queue[Chunk] = asyncio.Queue()

        def take(chunk: Chunk) -> None:
            loop.call_soon_threadsafe(parts.put_nowait, chunk)

        begun: dict[str, list[SplitRun]] = {ids[position]: [] for position in traced}
        self.host.submit(call, OpenCall(len(ids), take, begun or None))
        chunks: list[Chunk] = []
        while sum(chunk.num_inputs for chunk in chunks) < len(ids):
            chunks.append(await asyncio.wait_for(parts.get(), 10))
        return chunks

    async def told(self, ids: Sequence[str], assignment: Assignment, *, next_block: int = 0) -> tuple[str, str]:
        """The inputs that were answered, and those that go on."""
        chunks = await self.call(ids, assignment, next_block=next_block)
        answered = "".join(answer.sample_id for chunk in chunks for answer, _ in chunk.answers)
        return answered, "".join("".join(c.going_on.piece.sample_ids) for c in chunks if c.going_on is not None)
