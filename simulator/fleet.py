"""The simulated fleet for the live control loop: accelerators, replicas that start and end, and reports."""

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
    """An event loop on virtual time. The simulation runs it when something is due, so it never waits.

    It has no threads and no sockets, so coroutines may only wait for `asyncio.sleep` and for each other.
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
        """Runs everything that is due, including callbacks that are added meanwhile."""
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
    """Delays of Ray and Serve. Broadcasts and reports take no time in the simulation."""

    start_s: float = 10.0
    """The time from a free accelerator to a warm replica."""
    drain_s: float = 2.0
    """The interval at which Serve checks whether a stopped replica has finished its calls."""


@dataclass(slots=True, eq=False)
class Start:
    """A replica that was requested but does not run yet."""

    device: str
    has_accelerator: bool = False


class AcceleratorPool:
    """The accelerators of one type, numbered from 0. The lowest free one is taken first."""

    def __init__(self, count: int) -> None:
        self.holders: list[object] = [None] * count

    def is_free(self, number: int) -> bool:
        """Whether an accelerator is available and free."""
        return self.holders[number] is None

    def take(self, holder: object) -> bool:
        """Takes the lowest free accelerator; returns False if none is free."""
        free = next(filter(self.is_free, range(len(self.holders))), None)
        if free is not None:
            self.holders[free] = holder
        return free is not None

    def hand_over(self, holder: object, other: object) -> None:
        """Passes a holder's accelerator to another holder."""
        self.holders[self.holders.index(holder)] = other

    def release(self, holder: object) -> None:
        """Frees a holder's accelerator, if it has one."""
        self.holders = [None if held is holder else held for held in self.holders]


class SimulatedFleet(Fleet):
    """Starts and stops replicas as Serve does: each type gets its number of replicas as accelerators become free."""

    def __init__(self, service: SimulatedService, counts: Mapping[str, int], delays: Delays) -> None:
        """`counts`: the number of accelerators per type."""
        self.log: list[tuple[float, str]] = []
        """The actions on the service: time and text."""
        self._service = service
        self._events = service.events
        self._delays = delays
        self._accelerators = {device: AcceleratorPool(count) for device, count in counts.items()}
        self._targets = dict.fromkeys(service.running, 0)
        self._starts: list[Start] = []

    def boot(self) -> None:
        """Starts the replicas of the service's plan, which are ready immediately."""
        self._service.boot()
        for device, replicas in self._service.running.items():
            self._targets[device] = len(replicas)
            for replica in replicas.values():
                has_accelerator = self._accelerators[device].take(replica)
                assert has_accelerator, f"the plan needs more {device} than there are"

    async def scale(self, device: str, replicas: int) -> None:
        self.say(f"scale {device} to {replicas}")
        self._targets[device] = replicas
        self._reconcile(device)

    async def running(self) -> dict[str, int]:
        return {device: len(replicas) for device, replicas in self._service.running.items()}

    async def prepare(self, placed: PlacedPlan) -> None:
        """Prepares replicas that follow no plan yet. Others have nothing to compile or load in the simulation."""
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
        """Starts missing replicas of a type. Of surplus ones, it cancels those not started, then stops the newest."""
        starts = [start for start in self._starts if start.device == device]
        replicas = list(self._service.running[device].values())
        change = self._targets[device] - len(replicas) - len(starts)
        if change >= 0:
            self._starts += [Start(device) for _ in range(change)]
        else:
            for start in starts[change:]:
                self._starts.remove(start)
                self._accelerators[device].release(start)
            for replica in replicas[len(replicas) + min(0, change + len(starts)) :]:
                self._service.stop(replica)
                self._call_later(self._delays.drain_s, self._drained, replica)
        self._place()

    def _place(self) -> None:
        for start in self._starts:
            if not start.has_accelerator and self._accelerators[start.device].take(start):
                start.has_accelerator = True
                self._call_later(self._delays.start_s, self._started, start)

    def _started(self, start: Start) -> None:
        if start in self._starts:
            self._starts.remove(start)
            replica = self._service.start(start.device)
            self._accelerators[start.device].hand_over(start, replica)
            self.say(f"{replica.name} runs")

    def _drained(self, replica: SimulatedReplica) -> None:
        if replica.calls:
            self._call_later(self._delays.drain_s, self._drained, replica)
        elif replica.is_up:
            self.say(f"{replica.name} ends")
            replica.die()
            self._accelerators[replica.device].release(replica)
            self._place()

    def _call_later(self, delay_s: float, action: Callable[..., None], argument: object) -> None:
        self._events.at(self._events.time_s + delay_s, CONTROLS, action, argument)

    def say(self, words: str) -> None:
        """Appends an entry to the log."""
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
