"""A slot's replica: the batch engine behind a port that ingresses call."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import ray
from ray import serve

from deployments.local_ray.private import bind_calls
from deployments.process_setup import Supervised, settle
from deployments.replica.build import build_runner, starting_policy
from deployments.replica.call_server import CallServer
from deployments.replica.host import StageHost
from deployments.replica.metrics import StageMetrics
from deployments.settings import ServeSettings
from deployments.wire.messages import Assignment, ReplicaReport
from earlyexit.clock import MonotonicClock
from earlyexit.engine.release import Release
from earlyexit.network.store import read_card
from optimizer.placement import initial_placement

logger = logging.getLogger(f"ray.serve.{__name__}")
PULL_S = 2.0
"""How long a new replica waits to hear from the controller what it is to do."""


class StageReplica:
    """Hosts the splits of one stage on one device; after a change of plan, those of another stage.

    It is ready for Serve when its first splits are warm, or at once if it has no assignment: its first call brings one.
    """

    async def __init__(self, settings: dict[str, Any], device: str, slot: str) -> None:  # type: ignore[misc] # Serve awaits it
        bind_calls()
        self._settings = ServeSettings.model_validate(settings)
        self._slot = slot
        self._server = CallServer(asyncio.get_running_loop(), self._settings.hop_dtype)
        # The event loop answers calls while the device's thread runs Python: 5 ms, the default, is a whole batch.
        sys.setswitchinterval(0.0005)
        clock = MonotonicClock()
        self._metrics = StageMetrics(slot, device)
        policy = starting_policy(self._settings)
        runner = await asyncio.to_thread(build_runner, self._settings, device, policy, clock=clock)
        self._host = StageHost(
            self._settings,
            device,
            slot,
            runner,
            clock,
            self._deliver,
            on_batch=self._metrics.batch_finished,
            on_death=_end_replica,
            starts=read_card(Path(self._settings.model)).chain.starts,
        )
        assignment = await self._first_assignment()
        if assignment is not None:
            await self._host.prepare(assignment)
        settle()
        self._host.start()
        self._background = Supervised()
        self._background.start("tell metrics", self._metrics.keep_telling(self._host))
        ip: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call] # ray's, not ours
        self._address = await self._server.listen(self._host, ip)

    def record_replica_metadata(self) -> dict[str, Any]:
        """Returns where this replica takes calls, which Serve passes on to every router."""
        return asdict(self._address)

    async def __del__(self) -> None:
        """Finish all work; Serve calls it to end a replica that gets no more calls."""
        await self._server.close()
        self._metrics.tell(self._host.num_waiting, self._host.memory)

    async def prepare(self, assignment: Assignment) -> None:
        """Make ready for a plan that is to come; returns when everything is warm for its first call."""
        await self._host.prepare(assignment)

    async def follow(self, assignment: Assignment) -> None:
        """Follow an assignment of the same splits from the next batch on, without waiting for its first call."""
        self._host.follow(assignment)

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
        self._server.deliver(releases, self._host.busy)
        self._metrics.record(releases)

    async def _first_assignment(self) -> Assignment | None:
        """Returns the controller's assignment, also if that is none; if it does not answer, the first plan's."""
        if self._settings.control is None:
            return planned_assignment(self._settings, self._slot)
        try:
            async with asyncio.timeout(PULL_S):
                return await self._pull()
        except Exception as error:  # a replica must start without a controller, whatever is wrong with that
            logger.warning("%s begins with the first plan: the controller does not answer: %r", self._slot, error)
        return planned_assignment(self._settings, self._slot)

    async def _pull(self) -> Assignment | None:
        # In a thread, because making a handle waits for Serve.
        handle = await asyncio.to_thread(serve.get_deployment_handle, "controller", self._settings.app)
        return cast("Assignment | None", await handle.assignment_of.remote(self._slot))


def planned_assignment(settings: ServeSettings, slot: str) -> Assignment | None:
    """Returns what a slot does under the first plan; None if that leaves the slot idle."""
    stage = initial_placement(settings.plan).stage_of.get(slot)
    return None if stage is None else Assignment.of(settings.plan, stage)


def _end_replica() -> None:
    """At once: callers then see a dead replica and send their inputs elsewhere, instead of waiting for a mute one."""
    logging.shutdown()
    os._exit(1)
