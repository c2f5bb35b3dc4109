"""A stage's replica: the batch engine behind a streamed call."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import ray
import torch

from cluster.devices import find_device
from deployments.build import build_device, build_policy, build_segments, expect_no_loss, warm_up
from deployments.messages import Chunk, GoingOn, StageCall, Timing
from deployments.settings import ServeSettings
from deployments.stage_metrics import StageMetrics
from earlyexit.clock import MonotonicClock
from earlyexit.cut import SegmentRunner
from earlyexit.device import Answered, Deliver, Device, DeviceThread, GoesOn, PieceMember, Release, ignore_batch
from earlyexit.engine import Member
from earlyexit.piece import Piece
from earlyexit.store import load_model
from earlyexit.times import ObservedTimes, Times
from earlyexit.wire import WirePiece
from optimizer.plan_file import parse_plan

logger = logging.getLogger(f"ray.serve.{__name__}")


BROKEN_AFTER = 20
"""Inputs in a row that the model fails on, each alone, before the replica counts as broken (a lost GPU, say)."""


class OpenCall:
    """A call whose inputs are in the engine; parts of the reply come in from the device's thread."""

    def __init__(self, num_inputs: int, loop: asyncio.AbstractEventLoop) -> None:
        self.unsettled = num_inputs
        self.parts: asyncio.Queue[Chunk] = asyncio.Queue()
        self.loop = loop


class StageReplica:
    """Hosts one stage's splits on one device. Ready, for Serve, only when every split has run warm."""

    def __init__(self, settings: dict[str, Any], stage_index: int) -> None:
        self._settings = ServeSettings.model_validate(settings)
        self._plan = parse_plan(self._settings.plan)
        self._stage = self._plan.stages[stage_index]
        self._clock = MonotonicClock()
        torch.set_num_threads(self._settings.threads_per_replica)
        # The event loop answers calls while the device's thread runs Python: 5 ms, the default, is a whole batch.
        sys.setswitchinterval(0.0005)
        self._metrics = StageMetrics(stage_index)
        self._start()

    def _start(self) -> None:
        folder = Path(self._settings.model)
        torch_device = find_device(self._stage.device).torch_device
        self._model = load_model(folder, device=torch_device, dtype=getattr(torch, self._settings.dtype))
        self._policy = build_policy(self._plan.policy)
        threads = self._settings.threads_per_replica
        segments = build_segments(self._model, self._settings.backend, folder, threads)
        # The first round is cold; only the second says how long batches take.
        times = ObservedTimes()
        for learnt in (ObservedTimes(), times):
            warm_up(self._build(segments, learnt, expect_no_loss), self._model, self._policy)
        self._device = self._build(segments, times, self._deliver)
        self._thread = DeviceThread(self._device, name=f"device-{self._stage.device}", on_death=_end_replica)
        self._thread.start()
        logger.info("stage is warm: blocks %d to %d on %s", self._stage.first, self._stage.end - 1, torch_device)

    def _build(self, segments: SegmentRunner | None, times: Times, deliver: Deliver) -> Device:
        return build_device(
            self._model,
            self._stage.splits,
            self._policy,
            clock=self._clock,
            deliver=deliver,
            dispatch=self._plan.dispatch,
            segments=segments,
            times=times,
            on_batch=ignore_batch if deliver is expect_no_loss else self._metrics.batch_finished,
        )

    async def run(self, call: StageCall, *, weight: int, batch: int) -> AsyncIterator[Chunk]:
        """Run a batch; answers and survivors are streamed as they are ready, by value.

        `weight` and `batch` are read by the router on the sender's side.
        """
        async for chunk in self._run(call.piece, call):
            yield chunk

    async def run_by_reference(self, call: StageCall, *, weight: int, batch: int) -> AsyncIterator[Chunk]:
        """The same with hidden states in the object store, for pieces too large for gRPC."""
        wire = await call.piece if isinstance(call.piece, ray.ObjectRef) else call.piece
        async for chunk in self._run(wire, call):
            yield chunk if chunk.going_on is None else _by_reference(chunk, chunk.going_on)

    async def stats(self) -> dict[str, Any]:
        """What the engine has done so far, per split."""
        counts = self._device.engine.counts
        return {
            "pid": os.getpid(),
            "device": self._stage.device,
            "splits": [
                {
                    "first": split.first,
                    "end": split.end,
                    "batch": split.batch,
                    "batches": counts[split.first].batches,
                    "inputs": counts[split.first].inputs,
                    "fill": counts[split.first].fill,
                    "busy_s": counts[split.first].busy_s,
                    "dropped": counts[split.first].dropped,
                }
                for split in self._stage.splits
            ],
        }

    def check_health(self) -> None:
        """Serve asks every second: a replica without its device thread must be replaced."""
        if not self._thread.is_alive():
            raise RuntimeError("the device thread has ended")
        if self._device.failures_in_a_row >= BROKEN_AFTER:
            raise RuntimeError(f"the model failed on {self._device.failures_in_a_row} inputs in a row")

    async def _run(self, wire: WirePiece, call: StageCall) -> AsyncIterator[Chunk]:
        opened = OpenCall(len(call.remaining_s), asyncio.get_running_loop())
        self._thread.submit(wire.next_block, self._members(wire, call, opened))
        try:
            while opened.unsettled:
                chunk = await opened.parts.get()
                opened.unsettled -= chunk.num_inputs
                yield chunk
        finally:
            if opened.unsettled:  # the caller is gone: nobody waits for the rest
                self._thread.forget(opened)

    def _members(self, wire: WirePiece, call: StageCall, opened: OpenCall) -> list[PieceMember]:
        now_s = self._clock.now_s()
        piece = self._model.from_wire(wire, self._policy)
        return [
            Member(
                sample_id=single.sample_ids[0],
                payload=single,
                deadline_s=now_s + remaining_s,
                reserve_s=call.reserve_s,
                origin=opened,
            )
            for single, remaining_s in zip(piece.singles(), call.remaining_s, strict=True)
        ]

    def _deliver(self, releases: list[Release]) -> None:
        """From the device's thread: put what it released into the replies of the calls it came with."""
        for opened, chunk in _chunks_by_call(releases):
            opened.loop.call_soon_threadsafe(opened.parts.put_nowait, chunk)
        self._metrics.record(releases)


def _end_replica() -> None:
    """At once: callers then see a dead replica and send their inputs elsewhere, instead of waiting for a mute one."""
    logging.shutdown()
    os._exit(1)


def _chunks_by_call(releases: list[Release]) -> list[tuple[OpenCall, Chunk]]:
    chunks: list[tuple[OpenCall, Chunk]] = []
    answers: dict[OpenCall, list[Answered]] = {}
    for release in releases:
        match release:
            case Answered():
                answers.setdefault(_call_of(release.member), []).append(release)
            case GoesOn():
                chunks.extend(_survivor_chunks(release))
            case _:
                lost = ((release.member.sample_id, release.error),)
                chunks.append((_call_of(release.member), Chunk(lost=lost)))
    chunks.extend((opened, _answer_chunk(answered)) for opened, answered in answers.items())
    return chunks


def _answer_chunk(answered: list[Answered]) -> Chunk:
    return Chunk(answers=tuple((each.answer, _timing(each.member)) for each in answered))


def _survivor_chunks(release: GoesOn) -> list[tuple[OpenCall, Chunk]]:
    positions: dict[OpenCall, list[int]] = {}
    for position, member in enumerate(release.members):
        positions.setdefault(_call_of(member), []).append(position)
    if len(positions) == 1:
        return [(opened, _going_on(release.piece, release.members)) for opened in positions]
    return [
        (opened, _going_on(release.piece.select(mine), tuple(release.members[k] for k in mine)))
        for opened, mine in positions.items()
    ]


def _going_on(piece: Piece, members: tuple[PieceMember, ...]) -> Chunk:
    going_on = GoingOn(
        sample_ids=piece.sample_ids,
        next_block=piece.next_block,
        num_tokens=int(piece.lengths_B.sum()),
        piece=piece.to_wire(),
        timings=tuple(_timing(member) for member in members),
    )
    return Chunk(going_on=going_on)


def _by_reference(chunk: Chunk, going_on: GoingOn) -> Chunk:
    reference = ray.put(going_on.piece)
    return Chunk(
        answers=chunk.answers,
        going_on=GoingOn(
            sample_ids=going_on.sample_ids,
            next_block=going_on.next_block,
            num_tokens=going_on.num_tokens,
            piece=reference,
            timings=going_on.timings,
        ),
        lost=chunk.lost,
    )


def _call_of(member: PieceMember) -> OpenCall:
    assert isinstance(member.origin, OpenCall)
    return member.origin


def _timing(member: PieceMember) -> Timing:
    return Timing(queue_s=member.queue_s, compute_s=member.compute_s)
