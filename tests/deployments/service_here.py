"""A service without Ray in this process: an ingress, real connections, and replicas with their own threads."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from deployments.ingress.core.ingress_core import IngressCore
from deployments.ingress.core.inputs import IngressOptions
from deployments.ingress.dispatcher import CallTracer, Dispatcher, ReplicaLinks
from deployments.replica.host import CallServer, StageHost, build_runner
from deployments.settings import ServeSettings
from deployments.wire.directory import ReplicaDirectory
from deployments.wire.messages import Address
from earlyexit.clock import MonotonicClock
from earlyexit.codecs.base import Codec
from earlyexit.engine.device import Runner
from optimizer.plans.plan import PlacedPlan
from tests.deployments.wire_fakes import LOOPBACK


class Replica:
    """A replica that lives in this process."""

    def __init__(
        self, name: str, settings: ServeSettings, device: str, runner: Runner[Any], starts: Sequence[int] = ()
    ) -> None:
        self.name, self.device, self.runner = name, device, runner
        self.server = CallServer()
        self.host = StageHost(settings, device, runner, MonotonicClock(), self.server.deliver, starts=starts)

    @property
    def pages(self) -> int:
        """Pages of keys and values that sequences hold."""
        use = self.host.device.memory_use
        return 0 if use is None else use.pages

    def die(self) -> None:
        """Ends the replica like a killed process."""
        for connection in tuple(self.server.connections):
            connection.frames.abort()
        assert self.server._server is not None
        self.server._server.close()


async def built(settings: ServeSettings, placed: PlacedPlan, starts: Sequence[int] = ()) -> list[Replica]:
    """Yields one replica for every stage, prepared for the plan."""
    replicas = []
    for slot, stage in placed.stage_of.items():
        runner = build_runner(settings, stage.device, clock=MonotonicClock())
        replicas.append(Replica(f"{slot}-r", settings, stage.device, runner, starts))
        await replicas[-1].host.prepare([placed])
    return replicas


class Running:
    """An ingress that is connected to its replicas."""

    def __init__(self, core: IngressCore, dispatcher: Dispatcher, addresses: Mapping[str, Address]) -> None:
        self.core = core
        self.dispatcher = dispatcher
        self.addresses = addresses
        self.board = ReplicaDirectory()


@asynccontextmanager
async def connected(
    placed: PlacedPlan,
    replicas: Sequence[Replica],
    rules: IngressOptions,
    *,
    codec: Codec[Any] | None = None,
    tracer: CallTracer | None = None,
) -> AsyncIterator[Running]:
    """All replicas are of one accelerator type."""
    [device] = {each.device for each in replicas}
    links = ReplicaLinks([device], phase=0.0)
    core = IngressCore("i", placed, rules, random.Random(0))
    dispatcher = Dispatcher(core, links, MonotonicClock(), codec=codec, tracer=tracer)
    addresses = {}
    for replica in replicas:
        replica.host.threads.start()
        addresses[replica.name] = await replica.server.listen(replica.host, LOOPBACK)
    running = Running(core, dispatcher, addresses)
    links.connect(device, running.board)
    running.board.announce(addresses)
    try:
        yield running
    finally:
        running.board.announce({})
        for replica in replicas:
            await asyncio.to_thread(replica.host.threads.stop)
            replica.die()
        await asyncio.sleep(0)
