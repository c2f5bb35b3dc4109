"""A replica of an accelerator type: the batch engine behind a port that ingresses call, and its metrics."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import defaultdict, deque
from dataclasses import asdict
from typing import Any

import ray
from ray import serve

from deployments.local_ray.private import bind_calls
from deployments.metrics import SECONDS, LazyMetrics
from deployments.ops.prometheus import Sample
from deployments.process_setup import BackgroundTasks
from deployments.replica.host import CallServer, StageHost, build_runner
from deployments.settings import ServeSettings
from deployments.wire.controller_link import ControllerLink
from deployments.wire.messages import ReplicaReport
from earlyexit.clock import MonotonicClock
from earlyexit.engine.device import Answered, MemoryUse, Release, Survivors
from earlyexit.engine.engine import Batch
from earlyexit.network.boundary import Split
from optimizer.plans.plan import PlacedPlan


class StageReplica(BackgroundTasks):
    """Hosts one stage on one device. Ingresses assign the stage, which may change with the plan and with the replicas.

    The constructor returns when the plan's stages on this accelerator type are warm.
    """

    async def __init__(self, settings: dict[str, Any], device: str) -> None:  # type: ignore[misc] # Serve awaits it
        super().__init__()
        bind_calls()
        self._settings = ServeSettings.model_validate(settings)
        self._metrics = StageMetrics(device)
        self._server = CallServer(self._settings.hop_dtype, self._metrics.record)
        # The event loop must get the GIL quickly while the device thread runs. The default of 5 ms is a whole batch.
        sys.setswitchinterval(0.0005)
        clock = MonotonicClock()
        runner = await asyncio.to_thread(build_runner, self._settings, device, clock=clock)
        self._host = StageHost(
            self._settings,
            device,
            runner,
            clock,
            self._server.deliver,
            on_batch=self._metrics.batch_finished,
            on_death=_end_replica,
            starts=self._settings.read_card().chain.starts,  # after the weights were read
        )
        # The controller's plans or, if it has none or does not reply, the plan of the settings.
        control, link = self._settings.control, ControllerLink(self._settings.app)
        plans = None if control is None else await link.ask_at_startup("plans")
        await self._host.prepare_first(plans if isinstance(plans, list) else [PlacedPlan(plan=self._settings.plan)])
        self._host.threads.start()
        self.start("export metrics", self._metrics.export_regularly(self._host))
        ip: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call] # ray's, not ours
        self._address = await self._server.listen(self._host, ip)

    def record_replica_metadata(self) -> dict[str, Any]:
        """Returns the address for calls, which Serve passes on to every router."""
        return asdict(self._address)

    async def __del__(self) -> None:
        """Finishes all work. Serve calls it when it stops the replica."""
        await self._server.close()
        if "_host" in vars(self):  # otherwise Serve has stopped the replica while it started
            self._metrics.export(self._host)

    async def prepare(self, placed: PlacedPlan) -> None:
        """Prepares for a coming plan; returns when its stages are warm."""
        await self._host.prepare([placed])

    async def report(self) -> ReplicaReport:
        """Returns the report for the controller."""
        context = serve.get_replica_context()
        return self._host.report(replica=context.replica_tag, node=ray.get_runtime_context().get_node_id())

    async def samples(self) -> list[Sample]:
        """Returns the last values of the metrics."""
        return self._metrics.samples(replica=serve.get_replica_context().replica_tag)

    def check_health(self) -> None:
        """Raises an error if the replica must be replaced. Serve calls it every second."""
        self._host.check()
        super().check_health()


def _end_replica() -> None:
    """Ends the process immediately, so that ingresses notice the failure and send their inputs to other replicas."""
    logging.shutdown()
    os._exit(1)


SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)


class StageMetrics(LazyMetrics):
    """The metrics of a replica, labelled with its accelerator type and the slot that it hosts when they are exported.

    The device thread records times. The event loop exports them to Ray once a second, because a call of Ray per input
    would slow the device thread (by 6 %).
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._labels = {"slot": "", "device": device}
        self._spent_s: deque[tuple[float, float]] = deque()
        """Seconds of waiting and of running, per input."""
        self._ran: deque[tuple[Split, int, int, bool, float]] = deque()
        """For each batch: split, inputs, tokens, whether they are probes, and seconds."""

    def record(self, releases: list[Release[Any]]) -> None:
        """Records the times of inputs. The ingress counts failed inputs, because it knows if it sends them again."""
        for release in releases:
            if isinstance(release, Answered) and not release.stays:
                self._spent_s.append((release.member.queue_s, release.member.compute_s))
            elif isinstance(release, Survivors):
                self._spent_s.extend((member.queue_s, member.compute_s) for member in release.members)

    def batch_finished(self, batch: Batch[Any], seconds: float) -> None:
        """Records a batch and its seconds on the device."""
        self._ran.append((batch.split, len(batch.members), batch.tokens, batch.probe, seconds))

    async def export_regularly(self, host: StageHost) -> None:
        """Exports the metrics once a second, until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            self.export(host)

    def export(self, host: StageHost) -> None:
        """Exports the metrics since the last export to Ray. Does nothing before the replica hosts a stage."""
        if not host.slot:
            return
        if self._labels["slot"] not in ("", host.slot):
            self._set_gauges(0, None if host.device.memory_use is None else MemoryUse())
        self._labels = {**self._labels, "slot": host.slot}
        self._set_gauges(host.device.engine.num_waiting, host.device.memory_use)
        observe, count = self.observe, self.add
        spent_s = [self._spent_s.popleft() for _ in range(len(self._spent_s))]
        queued_s, ran_s = [each[0] for each in spent_s], [each[1] for each in spent_s]
        observe("offramp_queue_seconds", "Time an input waited in a stage", SECONDS, queued_s, **self._labels)
        observe("offramp_compute_seconds", "Time an input ran in a stage", SECONDS, ran_s, **self._labels)
        ran: defaultdict[Split, list[tuple[int, int]]] = defaultdict(list)
        while self._ran:
            split, size, tokens, is_probe, seconds = self._ran.popleft()
            labels = {**self._labels, "split": str(split.first)}
            count("offramp_batch_tokens", "Tokens of the inputs of batches", tokens, **labels)
            count("offramp_busy_seconds", "Time the device ran batches", seconds, **labels)
            if not is_probe:  # probes do not wait to fill a batch
                ran[split].append((size, tokens))
        for split, batches in ran.items():
            labels = {**self._labels, "split": str(split.first)}
            fill, of_tokens = "Share of the target batch that was filled", "Share of the token budget that was filled"
            observe("offramp_batch_fill", fill, SHARES, [size / split.batch for size, _ in batches], **labels)
            observe("offramp_batch_size", "Inputs per batch", SIZES, [size for size, _ in batches], **labels)
            if split.tokens is not None:
                fills = [tokens / split.tokens for _, tokens in batches]
                observe("offramp_batch_token_fill", of_tokens, SHARES, fills, **labels)

    def _set_gauges(self, num_waiting: int, memory: MemoryUse | None) -> None:
        gauge, labels = self.set_gauge, self._labels
        gauge("offramp_stage_waiting", "Inputs queued in a stage's replica", num_waiting, **labels)
        if memory is not None:
            gauge("offramp_sequences", "Sequences whose keys and values a replica keeps", memory.sequences, **labels)
            pages = "Pages of keys and values: reserved now, most reserved so far, or all"
            for which, number in (("reserved", memory.pages), ("peak", memory.peak_pages), ("all", memory.num_pages)):
                gauge("offramp_kv_pages", pages, number, **labels, which=which)
