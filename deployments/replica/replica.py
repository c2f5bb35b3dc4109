"""A replica of an accelerator type: the batch engine behind a port that ingresses call, and its metrics."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from ray import serve

from deployments.local_ray.private import bind_calls
from deployments.metrics import SECONDS, LazyMetrics
from deployments.process_setup import BackgroundTasks, freeze_garbage_collection
from deployments.replica.build import build_runner
from deployments.replica.host import CallServer, StageHost
from deployments.settings import ServeSettings
from deployments.wire.controller_link import ControllerLink
from deployments.wire.messages import Assignment, ReplicaReport
from earlyexit.clock import MonotonicClock
from earlyexit.engine.device import Answered, MemoryUse, Release, Survivors
from earlyexit.engine.engine import Batch
from earlyexit.network.boundary import Split
from earlyexit.network.store import read_card
from optimizer.placement import PlacedPlan, parse_placed


class StageReplica:
    """Hosts one stage on one device. Ingresses say which: another one when the plan changes, or replicas come or go.

    It is ready for Serve when the plan's stages on its accelerator type are warm, or at once if there are none.
    """

    async def __init__(self, settings: dict[str, Any], device: str) -> None:  # type: ignore[misc] # Serve awaits it
        bind_calls()
        self._settings = ServeSettings.model_validate(settings)
        self._server = CallServer(asyncio.get_running_loop(), self._settings.hop_dtype)
        # The event loop answers calls while the device's thread runs Python: 5 ms, the default, is a whole batch.
        sys.setswitchinterval(0.0005)
        clock = MonotonicClock()
        self._metrics = StageMetrics(device)
        runner = await asyncio.to_thread(build_runner, self._settings, device, clock=clock)
        self._host = StageHost(
            self._settings,
            device,
            runner,
            clock,
            self._deliver,
            on_batch=self._metrics.batch_finished,
            on_death=_end_replica,
            starts=read_card(Path(self._settings.model)).chain.starts,
        )
        # The controller's plans or, if there are none or it does not answer, the settings'.
        documents = [] if self._settings.control is None else await ControllerLink(self._settings.app).coming()
        plans = [parse_placed(each) for each in documents] or [PlacedPlan(plan=self._settings.plan)]
        await self._host.prepare_first(plans)
        freeze_garbage_collection()
        self._host.threads.start()
        self._background = BackgroundTasks()
        self._background.start("tell metrics", self._metrics.keep_telling(self._host))
        ip: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call] # ray's, not ours
        self._address = await self._server.listen(self._host, ip)

    def record_replica_metadata(self) -> dict[str, Any]:
        """Returns where this replica takes calls, which Serve passes on to every router."""
        return asdict(self._address)

    async def __del__(self) -> None:
        """Finish all work; Serve calls it to end a replica that gets no more calls."""
        await self._server.close()
        self._metrics.tell(self._host)

    async def prepare(self, assignments: Sequence[Assignment]) -> None:
        """Make ready for a plan that is to come; returns when everything is warm for its first call."""
        await self._host.prepare(assignments)

    async def report(self) -> ReplicaReport:
        """For the controller."""
        context = serve.get_replica_context()
        return self._host.report(replica=context.replica_tag, node=ray.get_runtime_context().get_node_id())

    async def stats(self) -> dict[str, Any]:
        """Returns what the engine has done so far, per split."""
        return self._host.stats()

    def check_health(self) -> None:
        """Raise an error if the replica must be replaced; Serve asks every second."""
        self._host.check()
        self._background.check()

    def _deliver(self, releases: list[Release[Any]]) -> None:
        """From the device's thread."""
        self._server.deliver(releases)
        self._metrics.record(releases)


def _end_replica() -> None:
    """At once: callers then see a dead replica and send their inputs elsewhere, instead of waiting for a mute one."""
    logging.shutdown()
    os._exit(1)


SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)


class StageMetrics:
    """The counts of a replica, by accelerator type and the stage that it hosts when they are told.

    The event loop passes them to Ray once a second: one call per input cost the device's thread 6 % of its time.
    """

    def __init__(self, device: str) -> None:
        self._where = {"slot": "", "device": device}
        self.metrics = LazyMetrics()
        self._spent_s: deque[tuple[float, float]] = deque()
        """Seconds of waiting and running, per input."""
        self._ran: deque[tuple[Split, int, int, bool, float]] = deque()
        """Split, inputs, tokens, whether they are probes, and seconds. A batch itself would hold hidden states."""

    def record(self, releases: list[Release[Any]]) -> None:
        """Count what a device released."""
        for release in releases:
            match release:
                case Answered(stays=False):
                    self._spent_s.append((release.member.queue_s, release.member.compute_s))
                case Survivors():
                    self._spent_s.extend((member.queue_s, member.compute_s) for member in release.members)
                case _:  # the ingress counts what got no answer: it knows whether another attempt follows
                    pass

    def batch_finished(self, batch: Batch[Any], seconds: float) -> None:
        """Count a batch, and the seconds that it had the device; on the device's thread, as soon as it has run."""
        self._ran.append((batch.split, len(batch.members), batch.tokens, batch.probe, seconds))

    async def keep_telling(self, host: StageHost) -> None:
        """Tell Ray once a second, until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            self.tell(host)

    def tell(self, host: StageHost) -> None:
        """Tell Ray what was counted since the last time; nothing before the replica hosts a stage."""
        if not host.slot:
            return
        if self._where["slot"] not in ("", host.slot):
            self._set_gauges(0, None if host.device.memory_use is None else MemoryUse())
        self._where = {**self._where, "slot": host.slot}
        self._set_gauges(host.device.engine.num_waiting, host.device.memory_use)
        observe, count = self.metrics.observe, self.metrics.add
        while self._spent_s:
            queue_s, compute_s = self._spent_s.popleft()
            observe("offramp_queue_seconds", "Time an input waited in a stage", SECONDS, queue_s, **self._where)
            observe("offramp_compute_seconds", "Time an input ran in a stage", SECONDS, compute_s, **self._where)
        while self._ran:
            split, size, tokens, is_probe, seconds = self._ran.popleft()
            where = {**self._where, "split": str(split.first)}
            count("offramp_batch_tokens", "Tokens of the inputs of batches", tokens, **where)
            count("offramp_busy_seconds", "Time the device ran batches", seconds, **where)
            if is_probe:  # probes do not wait to fill a batch
                continue
            fill, of_tokens = "Share of the target batch that was filled", "Share of the token budget that was filled"
            observe("offramp_batch_fill", fill, SHARES, size / split.batch, **where)
            observe("offramp_batch_size", "Inputs per batch", SIZES, size, **where)
            if split.tokens is not None:
                observe("offramp_batch_token_fill", of_tokens, SHARES, tokens / split.tokens, **where)

    def _set_gauges(self, num_waiting: int, memory: MemoryUse | None) -> None:
        level, where = self.metrics.set_gauge, self._where
        level("offramp_stage_waiting", "Inputs queued in a stage's replica", num_waiting, **where)
        if memory is not None:
            level("offramp_sequences", "Sequences that a replica keeps keys and values of", memory.sequences, **where)
            pages = "Pages of keys and values: reserved, reserved at most, there are"
            for which, number in (("reserved", memory.pages), ("peak", memory.peak_pages), ("all", memory.num_pages)):
                level("offramp_kv_pages", pages, number, **where, which=which)
