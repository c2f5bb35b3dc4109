"""Connections of an ingress to replicas: which replicas host a stage, and how calls and replies are exchanged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from deployments.ingress.core.routes import KVPlacement, StageReplicas
from deployments.wire.directory import ReplicaDirectory
from deployments.wire.messages import (
    Address,
    Assignment,
    BeginCall,
    CallRefused,
    CancelCall,
    Chunk,
    EndSequences,
    Frames,
    HostStage,
    MalformedError,
    StageCall,
    assignments_of,
    decode_from_replica,
    encode,
)
from earlyexit.errors import PlanError
from optimizer.placement import PlacedPlan

logger = logging.getLogger(f"ray.serve.{__name__}")

CONNECT_S = 5.0
"""The timeout of an attempt to connect."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
"""The pause between attempts to connect, which doubles each time."""


@dataclass(slots=True)
class _OpenCall:
    """A call whose reply is not complete."""

    unsettled: int
    take: Callable[[Chunk], None]
    done: asyncio.Future[None]


class ReplicaLink:
    """The connection to one replica, on one event loop. It reconnects until it is closed."""

    def __init__(
        self,
        name: str,
        address: Address,
        on_change: Callable[[], None],
        *,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`on_change`: called when the connection comes up or goes down."""
        self.name = name
        self._address = address
        self._on_change = on_change
        self._pause = pause
        self._frames: Frames | None = None
        self._disconnected = asyncio.Event()
        self._calls: dict[int, _OpenCall] = {}
        self._serial = 0
        self._is_closing = False
        self._task = asyncio.get_running_loop().create_task(self._keep_connected())

    @property
    def is_up(self) -> bool:
        """Whether calls can be made."""
        return self._frames is not None

    async def call(self, call: StageCall, take: Callable[[Chunk], None]) -> None:
        """Runs a call until all its inputs are settled. `take`: called with every part of the reply.

        Raises ConnectionError if there is no connection or it breaks, and RuntimeError if the replica refuses the call.
        """
        if self._frames is None:
            raise ConnectionError(f"no connection to {self.name}")
        self._serial = serial = self._serial + 1
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._calls[serial] = _OpenCall(len(call.remaining_s), take, done)
        self._frames.send(encode(BeginCall(serial, call)))
        try:
            await done
        except asyncio.CancelledError:
            self._cancel(serial)
            raise
        finally:
            del self._calls[serial]
            self._close_if_idle()

    def end(self, sequences: Collection[int]) -> None:
        """Makes the replica free sequences. If the connection is broken, it has already freed them."""
        if self._frames is not None and sequences:
            self._frames.send(encode(EndSequences(tuple(sequences))))

    def host(self, assignment: Assignment) -> None:
        """Makes the replica host a stage, until another assignment or a call for another stage arrives."""
        if self._frames is not None:
            self._frames.send(encode(HostStage(assignment)))

    def close_when_idle(self) -> None:
        """Closes the connection as soon as all open calls are done."""
        self._is_closing = True
        self._close_if_idle()

    def _cancel(self, serial: int) -> None:
        if self._frames is not None:
            self._frames.send(encode(CancelCall(serial)))

    def _close_if_idle(self) -> None:
        if self._is_closing and not self._calls:
            self._task.cancel()
            if self._frames is not None:
                self._frames.close()

    async def _keep_connected(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                await self._connect()
            except Exception as error:  # the next attempt may succeed, whatever the error is
                logger.warning("no connection to %s: %r", self.name, error)
            else:
                pause_s = FIRST_PAUSE_S
                await self._disconnected.wait()
            await self._pause(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _connect(self) -> None:
        frames = Frames(self._on_frame, self._on_disconnect)
        self._disconnected.clear()
        async with asyncio.timeout(CONNECT_S):
            await asyncio.get_running_loop().create_connection(lambda: frames, self._address.host, self._address.port)
        if self._disconnected.is_set():
            raise ConnectionError("the replica closed the new connection")
        frames.send(self._address.token.encode())
        self._frames = frames
        self._on_change()

    def _on_disconnect(self) -> None:
        self._frames = None
        self._disconnected.set()
        for call in self._calls.values():
            _fail(call, ConnectionError(f"{self.name} closed the connection"))
        self._on_change()

    def _on_frame(self, frame: memoryview) -> None:
        try:
            message = decode_from_replica(frame)
        except MalformedError as error:  # from another version, for example: later frames cannot be trusted either
            logger.warning("%s sent a malformed message: %s", self.name, error)
            assert self._frames is not None
            self._frames.abort()
            return
        call = self._calls.get(message.serial)
        if call is None:  # cancelled in the meantime
            return
        if isinstance(message, CallRefused):
            _fail(call, RuntimeError(message.reason))
            return
        try:
            call.take(message.chunk)
        except Exception as error:
            logger.exception("a part of a reply from %s could not be processed", self.name)
            _fail(call, error)
            self._cancel(message.serial)
            return
        call.unsettled -= message.chunk.num_inputs
        if not call.unsettled and not call.done.done():
            call.done.set_result(None)


def _fail(call: _OpenCall, error: Exception) -> None:
    if not call.done.done():
        call.done.set_exception(error)


LinkTo = Callable[[str, Address, Callable[[], None]], ReplicaLink]
"""Connects to a replica. The arguments are its id, its address, and `on_change` of `ReplicaLink`."""


class ReplicaLinks:
    """The connections of an ingress to all replicas, and the assignment of the plan's stages to these replicas.

    A stage's calls go to the replicas that host it, fill-first among those that are up. (Serve's handles are ten times
    as expensive per part of a reply.) If a replica joins or dies, or the plan changes, other replicas may be assigned
    other stages (`PlacedPlan.roles`). If an accelerator type has fewer replicas than stages, some stages have none.
    Their calls wait for a replica until the deadlines of their inputs.
    """

    def __init__(self, placed: PlacedPlan, devices: Iterable[str], *, phase: float, link: LinkTo = ReplicaLink) -> None:
        """`devices`: the accelerator types that have replicas. `phase`: see `StageReplicas`.

        Raises PlanError for a plan on other types.
        """
        self._phase = phase
        self._link = link
        self._links: dict[str, dict[str, ReplicaLink]] = {device: {} for device in devices}
        """The connections by accelerator type and replica."""
        self._stages: dict[str, StageReplicas[ReplicaLink]] = {}
        """By slot, including slots of earlier plans."""
        self._changed = asyncio.Event()
        """Set, and replaced by a new event, when the replicas of stages may have changed."""
        self.follow(placed)

    def check(self, placed: PlacedPlan) -> None:
        """Raises PlanError for a plan on accelerator types that have no replicas."""
        missing = sorted({stage.device for stage in placed.plan.stages} - self._links.keys())
        if missing:
            raise PlanError(f"the plan needs replicas on {missing}; the service has replicas on {sorted(self._links)}")

    def follow(self, placed: PlacedPlan) -> None:
        """Switches to a plan: assigns its stages to replicas. Calls that wait for a removed stage fail."""
        self.check(placed)
        self._placed = placed
        self._assignments = assignments_of(placed)
        for slot in self._assignments:
            self._stages.setdefault(slot, StageReplicas(self._phase))
        for device in self._links:
            self._assign_stages(device)

    def is_up(self, slot: str) -> bool:
        """Whether any replica accepts calls for a stage."""
        return self._stages[slot].is_up

    def is_planned(self, slot: str) -> bool:
        """Whether the current plan has a stage. A call for a stage of an earlier plan may be sent late."""
        return slot in self._assignments

    async def call(
        self,
        call: StageCall,
        *,
        weight: int,
        batch: int,
        take: Callable[[Chunk], None],
        placements: Sequence[KVPlacement] = (),
    ) -> None:
        """Runs a call on a replica of its stage, until all its inputs are settled.

        `weight` and `batch`: the weights of the call and of a full batch (`weight_of`). `take`: called with each part
        of the reply. `placements`: the KV placements of inputs of sequences; new sequences get a replica here. Raises
        SequenceLostError if the replica of the sequences is gone or hosts another stage, and the errors of the
        connection. Inputs that are not settled after an error may be sent again.
        """
        slot, fills = call.assignment.slot, call.assignment.fills
        stage = self._stages[slot]
        while not stage.is_up and not (placements and slot in placements[0].replicas):
            if not self.is_planned(slot):
                raise ConnectionError("the stage has no replicas, and the current plan does not have the stage")
            await self._changed.wait()
        if placements:
            keeper = stage.replica_for(slot, placements, call.assignment.stage.splits[0].batch, fills=fills)
            await keeper.replica.call(call, take)
            return
        assigned = stage.assign(weight, batch, fills=fills)
        try:
            await assigned.replica.call(call, take)
        finally:
            stage.release(assigned, weight)

    def end(self, slot: str, replica: str, sequence: int) -> None:
        """Makes a replica, if it still exists, free a sequence that has ended."""
        link = self._stages[slot].end_sequence(replica, sequence)
        if link is not None:
            link.end((sequence,))

    async def ready(self) -> None:
        """Returns once every stage of the plan has a replica."""
        while not all(map(self.is_up, self._assignments)):
            await self._changed.wait()

    def connect(self, device: str, directory: ReplicaDirectory) -> None:
        """Keeps connections to the directory's replicas. Must be called on the event loop of the calls."""
        loop = asyncio.get_running_loop()
        directory.follow(lambda addresses: loop.call_soon_threadsafe(self.set_addresses, device, addresses))

    def set_addresses(self, device: str, addresses: Mapping[str, Address]) -> None:
        """Connects to these replicas of an accelerator type, and closes the connections to all others."""
        links = self._links[device]
        for name in sorted(links.keys() - addresses.keys()):
            links.pop(name).close_when_idle()
        for name in sorted(addresses.keys() - links.keys()):
            links[name] = self._link(name, addresses[name], partial(self._assign_stages, device))
        self._assign_stages(device)

    def _assign_stages(self, device: str) -> None:
        """Assigns the stages of an accelerator type to its replicas."""
        links, needed = self._links[device], self._placed.needed(device)
        up = {name for name, link in links.items() if link.is_up}
        hosts = self._placed.roles(device, links)
        if len(up) >= len(needed) > len({slot for name, slot in hosts.items() if name in up}):
            hosts = self._placed.roles(device, up)  # otherwise a stage would have only replicas that are down
        for name, slot in hosts.items():
            if name in up:  # a replica ignores an assignment that it already follows
                links[name].host(self._assignments[slot])
        for slot, stage in self._stages.items():
            if slot in needed or slot not in self._assignments:
                stage.set_replicas([links[name] for name, hosted in hosts.items() if hosted == slot])
        self._changed.set()
        self._changed = asyncio.Event()
