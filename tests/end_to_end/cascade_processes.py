"""Replicas in processes of their own, without Ray, that can be killed; and the ingress that calls them."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from deployments.api.service import InferService
from deployments.ingress.build import encode_of
from deployments.ingress.core.ingress_core import IngressCore
from deployments.ingress.core.inputs import Rules
from deployments.ingress.crossing import encoder_of
from deployments.ingress.dispatcher import Dispatcher
from deployments.ingress.link import LinkTransport, ReplicaLink
from deployments.settings import ServeSettings
from deployments.wire.directory import ReplicaDirectory
from deployments.wire.messages import Address, Assignment
from earlyexit.clock import MonotonicClock
from earlyexit.codecs import find_codec
from earlyexit.network.store import read_card
from optimizer.placement import PlacedPlan, initial_placement
from optimizer.plan import Plan

SLOTS = ("split-cpu-0", "split-cpu-1")


class NoMetrics:
    """Counts nothing."""

    def answers(self, exits: list[int]) -> None: ...
    def dropped(self, reason: str, num_inputs: int) -> None: ...
    def hop(self, slot: str, seconds: float) -> None: ...
    def retried(self, slot: str, num_inputs: int) -> None: ...


def replica(document: str, slot: str, told: Connection) -> None:
    """A slot's replica, until it is killed; tells its address when it is warm."""
    asyncio.run(_replica(ServeSettings.model_validate_json(document), slot, told))


async def _replica(settings: ServeSettings, slot: str, told: Connection) -> None:
    from deployments.replica.build import build_runner, starting_policy
    from deployments.replica.call_server import CallServer
    from deployments.replica.host import StageHost

    clock, server = MonotonicClock(), CallServer(asyncio.get_running_loop())
    runner = build_runner(settings, "cpu", starting_policy(settings), clock=clock)
    starts = read_card(Path(settings.model)).chain.starts
    host = StageHost(settings, "cpu", slot, runner, clock, server.deliver, starts=starts)
    await host.prepare(Assignment.of(settings.plan, initial_placement(settings.plan).stage_of[slot]))
    host.start()
    told.send(await server.listen(host, "127.0.0.1"))
    await asyncio.Event().wait()


@dataclass
class Processes:
    """One replica for every slot."""

    settings: ServeSettings
    boards: dict[str, ReplicaDirectory] = field(default_factory=lambda: {slot: ReplicaDirectory() for slot in SLOTS})
    _running: dict[str, BaseProcess] = field(default_factory=dict)
    _serial: int = 0

    async def start(self, *slots: str) -> None:
        """Returns when they take calls."""
        context, document = multiprocessing.get_context("spawn"), self.settings.model_dump_json()
        waiting = []
        for slot in slots:
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=replica, args=(document, slot, theirs), daemon=True)
            process.start()
            self._running[slot] = process
            waiting.append((slot, mine))
        for slot, mine in waiting:
            address: Address = await asyncio.to_thread(mine.recv)
            self._serial += 1
            self.boards[slot].announce({f"{slot}-{self._serial}": address})

    async def kill(self) -> None:
        """All of them, kill -9, with what is inside; others take their places."""
        for process in self._running.values():
            process.kill()
        for slot, process in self._running.items():
            await asyncio.to_thread(process.join)
            self.boards[slot].announce({})
        await self.start(*SLOTS)

    def end(self) -> None:
        for process in self._running.values():
            process.kill()
            process.join()


@dataclass(frozen=True, kw_only=True)
class Served:
    """A running service."""

    service: InferService
    dispatcher: Dispatcher
    processes: Processes

    def follow(self, plan: Plan, epoch: int) -> None:
        """Each stage in the next slot."""
        placed = PlacedPlan(plan=replace(plan, epoch=epoch), slots=SLOTS[: len(plan.stages)])
        self.dispatcher.follow(placed)


@asynccontextmanager
async def served(settings: ServeSettings) -> AsyncIterator[Served]:
    processes, clock = Processes(settings), MonotonicClock()
    transports = {slot: LinkTransport(phase=0.0, link=ReplicaLink) for slot in SLOTS}
    for slot, transport in transports.items():
        transport.follow(processes.boards[slot])
    try:
        await processes.start(*SLOTS)
        folder = Path(settings.model)
        codec: Any = find_codec(read_card(folder).codec, folder)
        rules = Rules(max_queued=500, calls_per_replica=2, max_attempts=50)
        placed = initial_placement(settings.plan)
        core = IngressCore("i", placed, transports, rules, random.Random(0))
        dispatcher = Dispatcher(core, transports, clock, NoMetrics(), encoder=encoder_of("i", codec))
        service = InferService(codec, dispatcher, settings, clock, encode=encode_of(codec, core))
        yield Served(service=service, dispatcher=dispatcher, processes=processes)
    finally:
        for board in processes.boards.values():
            board.announce({})
        processes.end()
        await asyncio.sleep(0)
