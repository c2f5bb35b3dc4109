"""Connections to replicas: which of them host a stage, how a call gets to one, and its reply back."""

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
"""A connection that takes longer to come about is given up."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
"""Between attempts to connect; doubled each time."""


@dataclass(slots=True)
class _Open:
    """A call whose reply is not complete."""

    unsettled: int
    take: Callable[[Chunk], None]
    done: asyncio.Future[None]


class ReplicaLink:
    """The connection to one replica, which is made again when it breaks, until it is closed; on one event loop."""

    def __init__(
        self,
        name: str,
        address: Address,
        on_change: Callable[[], None],
        *,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`on_change` is called when the connection comes up and when it goes down."""
        self.name = name
        self._address = address
        self._on_change = on_change
        self._pause = pause
        self._frames: Frames | None = None
        self._ended = asyncio.Event()
        self._calls: dict[int, _Open] = {}
        self._serial = 0
        self._is_leaving = False
        self._task = asyncio.get_running_loop().create_task(self._keep())

    @property
    def is_up(self) -> bool:
        """Whether calls can be made."""
        return self._frames is not None

    async def call(self, call: StageCall, take: Callable[[Chunk], None]) -> None:
        """Run a call; `take` gets every part of its reply, and all inputs are settled when this returns.

        Raises ConnectionError if there is no connection or it breaks; RuntimeError if the replica refuses the call.
        """
        if self._frames is None:
            raise ConnectionError(f"no connection to {self.name}")
        self._serial = serial = self._serial + 1
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._calls[serial] = _Open(len(call.remaining_s), take, done)
        self._frames.send(encode(BeginCall(serial, call)))
        try:
            await done
        except asyncio.CancelledError:
            self._forget(serial)
            raise
        finally:
            del self._calls[serial]
            self._close_if_left()

    def end(self, sequences: Collection[int]) -> None:
        """Have the replica forget sequences; a replica whose connection broke has forgotten them already."""
        if self._frames is not None and sequences:
            self._frames.send(encode(EndSequences(tuple(sequences))))

    def host(self, assignment: Assignment) -> None:
        """Have the replica host a stage from now on, until a call or another assignment says otherwise."""
        if self._frames is not None:
            self._frames.send(encode(HostStage(assignment)))

    def leave(self) -> None:
        """Close the connection as soon as the calls under way are done."""
        self._is_leaving = True
        self._close_if_left()

    def _forget(self, serial: int) -> None:
        if self._frames is not None:
            self._frames.send(encode(CancelCall(serial)))

    def _close_if_left(self) -> None:
        if self._is_leaving and not self._calls:
            self._task.cancel()
            if self._frames is not None:
                self._frames.close()

    async def _keep(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                await self._connect()
            except Exception as error:  # whatever it is, the next attempt may succeed
                logger.warning("no connection to %s: %r", self.name, error)
            else:
                pause_s = FIRST_PAUSE_S
                await self._ended.wait()
            await self._pause(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _connect(self) -> None:
        frames = Frames(self._hear, self._end)
        self._ended.clear()
        async with asyncio.timeout(CONNECT_S):
            await asyncio.get_running_loop().create_connection(lambda: frames, self._address.host, self._address.port)
        if self._ended.is_set():
            raise ConnectionError("closed at once")
        frames.send(self._address.token.encode())
        self._frames = frames
        self._on_change()

    def _end(self) -> None:
        self._frames = None
        self._ended.set()
        for call in self._calls.values():
            _fail(call, ConnectionError(f"{self.name} closed the connection"))
        self._on_change()

    def _hear(self, frame: memoryview) -> None:
        try:
            message = decode_from_replica(frame)
        except MalformedError as error:  # of another version, say: nothing that follows can be trusted
            logger.warning("%s said what no replica says: %s", self.name, error)
            assert self._frames is not None
            self._frames.abort()
            return
        call = self._calls.get(message.serial)
        if call is None:  # given up
            return
        if isinstance(message, CallRefused):
            _fail(call, RuntimeError(message.reason))
            return
        try:
            call.take(message.chunk)
        except Exception as error:
            logger.exception("a part of a reply could not be taken")
            _fail(call, error)
            self._forget(message.serial)
            return
        call.unsettled -= message.chunk.num_inputs
        if not call.unsettled and not call.done.done():
            call.done.set_result(None)


def _fail(call: _Open, error: Exception) -> None:
    if not call.done.done():
        call.done.set_exception(error)


LinkTo = Callable[[str, Address, Callable[[], None]], ReplicaLink]
"""Connects to a replica, given its id, its address, and what to call when the connection comes up or goes down."""


class ReplicaLinks:
    """An ingress's connections to all replicas, and which stage of the plan each of them hosts.

    A stage's calls go to the replicas that host it, fill-first among those that are up; Serve's handles do the same at
    ten times the cost per part of a reply. A replica that dies or joins, and a new plan, may change what the others
    host (`PlacedPlan.roles`); each is told at once. Where a type has fewer replicas than stages, some stages have none:
    their calls wait until one joins, and fail as inputs do at their deadlines.
    """

    def __init__(self, placed: PlacedPlan, devices: Iterable[str], *, phase: float, link: LinkTo = ReplicaLink) -> None:
        """`devices`: the accelerator types of which there are replicas. `phase`: see `StageReplicas`.

        `link` connects to a replica. Raises PlanError for a plan on other types.
        """
        self._phase = phase
        self._link = link
        self._links: dict[str, dict[str, ReplicaLink]] = {device: {} for device in devices}
        """The connections by accelerator type and replica."""
        self._stages: dict[str, StageReplicas[ReplicaLink]] = {}
        """By slot, also of earlier plans."""
        self._changed = asyncio.Event()
        """Set, and replaced by another one, when stages may have other replicas."""
        self.follow(placed)

    def check(self, placed: PlacedPlan) -> None:
        """Raises PlanError for a plan on accelerator types of which there are no replicas."""
        missing = sorted({stage.device for stage in placed.plan.stages} - self._links.keys())
        if missing:
            raise PlanError(f"the plan needs replicas on {missing}; there are some on {sorted(self._links)}")

    def follow(self, placed: PlacedPlan) -> None:
        """Have replicas host the stages of this plan from now on; calls that wait at other stages fail."""
        self.check(placed)
        self._placed = placed
        self._assignments = assignments_of(placed)
        for slot in self._assignments:
            self._stages.setdefault(slot, StageReplicas(self._phase))
        for device in self._links:
            self._share_out(device)

    def is_up(self, slot: str) -> bool:
        """Whether a replica takes calls for a stage."""
        return self._stages[slot].is_up

    def is_planned(self, slot: str) -> bool:
        """Whether the plan has a stage; an earlier plan may have made a call for it that is sent only now."""
        return slot in self._assignments

    async def call(
        self,
        call: StageCall,
        *,
        weight: int,
        batch: int,
        take: Callable[[Chunk], None],
        homes: Sequence[KVPlacement] = (),
    ) -> None:
        """Have a batch run by some replica of its stage; `take` gets the parts of its reply as they are ready.

        `weight`: the call's; `batch`: that of what a replica makes of calls (`weight_of`); `homes`: for inputs of
        sequences, theirs; sequences that have no replica here get one. Returns when all inputs are settled. Raises
        SequenceLostError for sequences whose replica has gone or hosts another stage, and whatever happens on the way;
        inputs that no part has settled by then may be sent again.
        """
        slot, fills = call.assignment.slot, call.assignment.fills
        stage = self._stages[slot]
        while not stage.is_up and not (homes and slot in homes[0].replicas):
            if not self.is_planned(slot):
                raise ConnectionError("the stage has no replicas, and the plan no longer has it")
            await self._changed.wait()
        if homes:
            holder = stage.holder(slot, homes, call.assignment.stage.splits[0].batch, fills=fills)
            await holder.replica.call(call, take)
            return
        hosting = stage.take(weight, batch, fills=fills)
        try:
            await hosting.replica.call(call, take)
        finally:
            stage.done(hosting, weight)

    def end(self, slot: str, replica: str, sequence: int) -> None:
        """Let a replica, which may be gone, forget a sequence that has ended."""
        found = self._stages[slot].leave(replica, sequence)
        if found is not None:
            found.end((sequence,))

    async def ready(self) -> None:
        """Returns once every stage of the plan has a replica."""
        while not all(map(self.is_up, self._assignments)):
            await self._changed.wait()

    def connect(self, device: str, board: ReplicaDirectory) -> None:
        """Connect to the board's replicas from now on; called on the event loop on which calls are made."""
        loop = asyncio.get_running_loop()
        board.follow(lambda addresses: loop.call_soon_threadsafe(self.announced, device, addresses))

    def announced(self, device: str, addresses: Mapping[str, Address]) -> None:
        """Connect to these replicas of an accelerator type, and leave all others."""
        links = self._links[device]
        for name in sorted(links.keys() - addresses.keys()):
            links.pop(name).leave()
        for name in sorted(addresses.keys() - links.keys()):
            links[name] = self._link(name, addresses[name], partial(self._share_out, device))
        self._share_out(device)

    def _share_out(self, device: str) -> None:
        """Offers the stages of an accelerator type the replicas that host them, and tells these replicas."""
        links, needed = self._links[device], self._placed.needed(device)
        up = {name for name, link in links.items() if link.is_up}
        hosts = self._placed.roles(device, links)
        if len(up) >= len(needed) > len({slot for name, slot in hosts.items() if name in up}):
            hosts = self._placed.roles(device, up)  # no stage is left without a replica
        for name, slot in hosts.items():
            if name in up:  # a replica that was told the same before ignores it
                links[name].host(self._assignments[slot])
        for slot, stage in self._stages.items():
            if slot in needed or slot not in self._assignments:
                stage.offer([links[name] for name, hosted in hosts.items() if hosted == slot])
        self._changed.set()
        self._changed = asyncio.Event()
