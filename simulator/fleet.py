"""The fleet that the live control loop steers here: accelerators, replicas that start and end, and reports."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import Context
from dataclasses import dataclass
from typing import Any

from deployments.controller.observe import Fleet
from deployments.wire.messages import IngressReport, ReplicaReport, assignments_of
from optimizer.placement import PlacedPlan
from simulator.events import CONTROLS, Events
from simulator.processes import NOTHING, SimulatedReplica
from simulator.service import SimulatedService


class SimulatedTime(asyncio.BaseEventLoop):
    """An event loop that never waits: the simulation runs it when something is due, and its time is the simulation's.

    It has no threads and no sockets: coroutines may only wait for sleep and for each other.
    """

    def __init__(self, events: Events) -> None:
        super().__init__()
        self._events = events
        self._soon: deque[asyncio.Handle] = deque()
        self._has_turn = False

    def time(self) -> float:
        return self._events.time_s

    def call_soon(  # type: ignore[override] # typeshed's is generic in the arguments
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._due(handle)
        return handle

    def call_at(  # type: ignore[override] # typeshed's is generic in the arguments
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._events.at(when, CONTROLS, self._due, handle)
        return handle

    def _due(self, handle: asyncio.Handle) -> None:
        self._soon.append(handle)
        if not self._has_turn:
            self._has_turn = True
            self._events.at(self._events.time_s, CONTROLS, self._run_turn)

    def _run_turn(self, _: None) -> None:
        """Run whatever is due, and what follows from it at the same moment."""
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            while self._soon:
                handle = self._soon.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            asyncio._set_running_loop(outer)
            self._has_turn = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """How long Ray and Serve take; broadcasts and reports (9 to 43 ms live) take no time here."""

    start_s: float = 10.0
    """From a free accelerator to a warm replica that takes calls."""
    drain_s: float = 2.0
    """How often Serve checks whether a replica that takes no more calls has ended those that it had."""


@dataclass(slots=True, eq=False)
class Start:
    """A replica that was requested, and does not run yet."""

    device: str
    has_accelerator: bool = False


class AcceleratorPool:
    """Accelerators of one type, from 0 on. The lowest free one is taken first: a plan's first stage has the lowest."""

    def __init__(self, count: int) -> None:
        self.holders: list[object] = [None] * count

    def is_free(self, number: int) -> bool:
        """Whether an accelerator can be taken."""
        return self.holders[number] is None

    def take(self, holder: object) -> bool:
        """Takes the lowest free accelerator; returns False if none is free."""
        free = next(filter(self.is_free, range(len(self.holders))), None)
        if free is not None:
            self.holders[free] = holder
        return free is not None

    def hand_over(self, holder: object, other: object) -> None:
        """Give a holder's accelerator to another."""
        self.holders[self.holders.index(holder)] = other

    def release(self, holder: object) -> None:
        """Free a holder's accelerator, if it has one."""
        self.holders = [None if held is holder else held for held in self.holders]


class SimulatedFleet(Fleet):
    """Does what Serve does: every type gets its number of replicas as soon as there are accelerators for them."""

    def __init__(self, service: SimulatedService, counts: Mapping[str, int], delays: Delays) -> None:
        """`counts`: accelerators per type."""
        self.log: list[tuple[float, str]] = []
        """What was done to the service, and when."""
        self._service = service
        self._events = service.events
        self._delays = delays
        self._accelerators = {device: AcceleratorPool(count) for device, count in counts.items()}
        self._told = dict.fromkeys(service.running, 0)
        self._starts: list[Start] = []

    def boot(self) -> None:
        """Start the service's plan, ready for work."""
        self._service.boot()
        for device, replicas in self._service.running.items():
            self._told[device] = len(replicas)
            for replica in replicas.values():
                has_accelerator = self._accelerators[device].take(replica)
                assert has_accelerator, f"the plan needs more {device} than there are"

    async def scale(self, device: str, replicas: int) -> None:
        self.say(f"scale {device} to {replicas}")
        self._told[device] = replicas
        self._reconcile(device)

    async def running(self) -> dict[str, int]:
        return {device: len(replicas) for device, replicas in self._service.running.items()}

    async def prepare(self, placed: PlacedPlan) -> None:
        """Replicas that follow a plan already have nothing to compile or to load here."""
        self.say(f"prepare {placed.epoch}")
        for assignment in assignments_of(placed).values():
            for replica in self._service.running[assignment.stage.device].values():
                if replica.epoch == NOTHING:
                    replica.prepare([assignment])

    async def follow(self, placed: PlacedPlan) -> None:
        self.say(f"follow {placed.epoch}")
        self._service.follow(placed)

    async def suspend(self, reason: str) -> None:
        self.say("suspend")
        for ingress in self._service.ingresses:
            ingress.suspend(reason)

    async def ingress_reports(self) -> list[IngressReport]:
        now_s = self._events.time_s
        return [ingress.core.report(now_s, now_s) for ingress in self._service.ingresses]

    async def replica_reports(self) -> list[ReplicaReport]:
        return [_report(replica) for replicas in self._service.running.values() for replica in replicas.values()]

    async def capacity(self) -> dict[str, int]:
        return {device: len(each.holders) for device, each in self._accelerators.items()}

    def _reconcile(self, device: str) -> None:
        """Start replicas that a type lacks; of too many, give up those that have not started, then stop the newest."""
        starts = [start for start in self._starts if start.device == device]
        replicas = list(self._service.running[device].values())
        change = self._told[device] - len(replicas) - len(starts)
        if change >= 0:
            self._starts += [Start(device) for _ in range(change)]
        else:
            for start in starts[change:]:
                self._starts.remove(start)
                self._accelerators[device].release(start)
            for replica in replicas[len(replicas) + min(0, change + len(starts)) :]:
                self._service.stop(replica)
                self._later(self._delays.drain_s, self._drained, replica)
        self._place()

    def _place(self) -> None:
        for start in self._starts:
            if not start.has_accelerator and self._accelerators[start.device].take(start):
                start.has_accelerator = True
                self._later(self._delays.start_s, self._started, start)

    def _started(self, start: Start) -> None:
        if start in self._starts:
            self._starts.remove(start)
            replica = self._service.start(start.device)
            self._accelerators[start.device].hand_over(start, replica)
            self.say(f"{replica.name} runs")

    def _drained(self, replica: SimulatedReplica) -> None:
        if replica.trips:
            self._later(self._delays.drain_s, self._drained, replica)
        elif replica.is_up:
            self.say(f"{replica.name} ends")
            replica.die()
            self._accelerators[replica.device].release(replica)
            self._place()

    def _later(self, delay_s: float, action: Callable[..., None], argument: object) -> None:
        self._events.at(self._events.time_s + delay_s, CONTROLS, action, argument)

    def say(self, words: str) -> None:
        """Write an entry into the log."""
        self.log.append((self._events.time_s, words))


def _report(replica: SimulatedReplica) -> ReplicaReport:
    return ReplicaReport(
        slot=replica.slot,
        replica=replica.name,
        node="simulated",
        pid=0,
        device=replica.device,
        epoch=replica.epoch,
        waiting=replica.engine.num_waiting,
        times=replica.engine.times_run,
    )
