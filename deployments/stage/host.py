"""What a stage's replica is apart from Serve: a device, and the assignment that it follows."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection
from dataclasses import asdict
from typing import Any

from cluster.paced import PacedRunner
from deployments.messages import Assignment, StageCall
from deployments.reports import ReplicaReport
from deployments.settings import ServeSettings
from deployments.stage.build import policy_for, warm_up
from deployments.stage.chunks import OpenCall
from deployments.stage.watched import WatchedRunner
from earlyexit.clock import Clock
from earlyexit.cpu import Contention
from earlyexit.device import Deliver, Device, OnBatch, Runner, ignore_batch
from earlyexit.device_thread import DeviceThread, ignore_death
from earlyexit.engine import Batch, BatchEngine
from earlyexit.member import NO_SEQUENCE, Member
from earlyexit.memory import MemoryUse
from earlyexit.times import ObservedTimes
from optimizer.dispatch import ON_PROCESSORS
from optimizer.plan import PolicySpec

NOTHING = -1
"""The epoch of a replica that follows no plan yet."""
BROKEN_AFTER = 20
"""Inputs in a row that the model fails on, each alone, before the replica counts as broken (a lost GPU, say)."""


class StageHost:
    """Runs what the newest assignment it has seen says, and what older calls still need."""

    def __init__(
        self,
        settings: ServeSettings,
        device: str,
        slot: str,
        runner: Runner[Any],
        clock: Clock,
        deliver: Deliver[Any],
        *,
        on_batch: OnBatch[Any] = ignore_batch,
        on_death: Callable[[], None] = ignore_death,
        starts: Collection[int] = (),
    ) -> None:
        """`starts`: the blocks that networks of a chain begin with."""
        self.epoch = NOTHING
        self._settings = settings
        self._device_name = device
        self._slot = slot
        self._runner = runner
        self._clock = clock
        watched = runner if settings.tracing is None else WatchedRunner(runner)
        self._starts = starts
        engine: BatchEngine[Any] = BatchEngine((), ObservedTimes(), starts=starts)
        # A device that is emulated, or a GPU, shares with nobody what it runs on.
        shares = device == ON_PROCESSORS and not isinstance(runner, PacedRunner)
        self._contention = Contention() if shares else None
        self._on_batch = on_batch
        self._device: Device[Any] = Device(engine, watched, clock, deliver, self._ran)
        self._thread = DeviceThread(self._device, name=f"device-{device}", on_death=on_death)
        self._policy: tuple[PolicySpec | None, Any] = None, policy_for(settings, device, None)

    @property
    def num_waiting(self) -> int:
        """Inputs queued in the engine."""
        return self._device.engine.num_waiting

    @property
    def busy(self) -> float:
        """Share of its time that the device ran, of late; more where it waits for the processors that it shares."""
        return self._device.engine.busy

    @property
    def memory(self) -> MemoryUse | None:
        """What sequences have of it; None where the network keeps nothing of any."""
        return self._device.memory_use

    def start(self) -> None:
        """Begin to take calls."""
        self._thread.start()

    def stop(self) -> None:
        """Finish the running batch and end."""
        self._thread.stop()

    async def prepare(self, assignment: Assignment) -> None:
        """Whatever is slow the first time, beside serving; a replica that follows nothing yet then follows this."""
        policy = await asyncio.to_thread(self._make_ready, assignment)
        self._policy = assignment.policy, policy
        if self.epoch == NOTHING:
            self._thread.follow((), assignment.dispatch, policy, assignment.order)
            times = await asyncio.to_thread(
                warm_up, self._runner, assignment.stage.splits, clock=self._clock, starts=self._starts
            )
            if self.epoch == NOTHING:  # else a call was faster, and its batches have taught the times since
                self._device.engine.times = times
                self.follow(assignment)

    def follow(self, assignment: Assignment) -> None:
        """Do as the assignment says from the next batch on, unless it is no newer than what is followed."""
        if assignment.epoch <= self.epoch:
            return
        if assignment.policy != self._policy[0]:
            self._policy = assignment.policy, policy_for(self._settings, self._device_name, assignment.policy)
        if isinstance(self._runner, PacedRunner):
            self._runner.dispatch = assignment.dispatch
        self._thread.follow(
            assignment.stage.splits, assignment.dispatch, self._policy[1], assignment.order, assignment.entry
        )
        self.epoch = assignment.epoch

    def submit(self, call: StageCall, opened: OpenCall) -> None:
        """Queue a call's inputs; raises PlanError where no split, followed or of the call's own, holds the block."""
        self.follow(call.assignment)
        members = self._thread.admit(call.piece, self._members(call, opened))
        if members:
            self._thread.submit(call.piece.next_block, members, fallback=call.assignment.known)

    def forget(self, opened: OpenCall) -> None:
        """Throw out what is queued of a call that nobody waits for any more."""
        self._thread.forget(opened)

    def end(self, sequences: Collection[int]) -> None:
        """Sequences are over: what is queued of them is lost, what is kept of them is free once no batch needs it."""
        self._thread.end(sequences)

    def check(self) -> None:
        """Raise RuntimeError where the replica must be replaced."""
        if not self._thread.is_alive():
            raise RuntimeError("the device thread has ended")
        if self._device.failures_in_a_row >= BROKEN_AFTER:
            raise RuntimeError(f"the model failed on {self._device.failures_in_a_row} inputs in a row")

    def report(self, *, replica: str, node: str) -> ReplicaReport:
        """What it has done since its start, probes left out: they do more work than others."""
        engine = self._device.engine
        return ReplicaReport(
            slot=self._slot,
            replica=replica,
            node=node,
            pid=os.getpid(),
            device=self._device_name,
            epoch=self.epoch,
            waiting=self.num_waiting,
            times=engine.times_run,
            memory=self.memory,
        )

    def stats(self) -> dict[str, Any]:
        """What the present splits have done so far."""
        engine = self._device.engine
        counts = engine.counts
        return {
            "pid": os.getpid(),
            "device": self._device_name,
            "slot": self._slot,
            "epoch": self.epoch,
            "splits": [
                {
                    "first": split.first,
                    "end": split.end,
                    "batch": split.batch,
                    "batches": counts[split.first].batches,
                    "inputs": counts[split.first].inputs,
                    "tokens": counts[split.first].tokens,
                    "fill": counts[split.first].fill,
                    "token_fill": counts[split.first].token_fill,
                    "busy_s": counts[split.first].busy_s,
                    "dropped": counts[split.first].dropped,
                }
                for split in engine.splits
            ],
            **({} if self.memory is None else {"memory": asdict(self.memory)}),
        }

    def _ran(self, batch: Batch[Any], busy_s: float) -> None:
        """Told of every batch, by the device's thread."""
        if self._contention is not None:
            self._device.engine.load.waited = self._contention.share(self._clock.now_s())
        self._on_batch(batch, busy_s)

    def _make_ready(self, assignment: Assignment) -> Any:
        # Not for the detours: there every ramp looks, which is the network's own work, whatever runs the rest.
        self._runner.prepare(assignment.stage.splits)
        return policy_for(self._settings, self._device_name, assignment.policy, assignment.stage.splits)

    def _members(self, call: StageCall, opened: OpenCall) -> list[Member[Any]]:
        now_s = self._clock.now_s()
        singles = self._runner.from_wire(call.piece).singles()
        sequences = call.sequences or (NO_SEQUENCE,) * len(singles)
        return [
            Member(
                sample_id=single.sample_ids[0],
                payload=single,
                tokens=tokens,
                deadline_s=now_s + remaining_s,
                reserve_s=call.reserve_s,
                origin=opened,
                probe=call.probe,
                sequence=sequence,
            )
            for single, tokens, remaining_s, sequence in zip(
                singles, call.piece.lengths_B.tolist(), call.remaining_s, sequences, strict=True
            )
        ]
