"""Both ends of the connection between an ingress and a replica, for tests of either: replies are given by hand."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np

from deployments.ingress.core.calls import Call
from deployments.ingress.core.ingress_core import IngressCore
from deployments.ingress.core.inputs import Chains, PendingInput
from deployments.ingress.core.routes import KVPlacement, StageRoute
from deployments.ingress.dispatcher import Dispatcher, ReplicaLinks
from deployments.replica.host import OpenCall
from deployments.wire.messages import (
    Address,
    Assignment,
    CallRefused,
    CancelCall,
    Chunk,
    Frames,
    ReplyPart,
    StageCall,
    Timing,
    decode_from_ingress,
    decode_from_replica,
    encode,
)
from earlyexit.network.boundary import Answer, Budget, Split, WirePiece
from optimizer.plans.plan import PlacedPlan, Stage

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
WORD = "the word"
TIMING = Timing(queue_s=0.25, compute_s=0.5)
ASSIGNMENT = Assignment(
    epoch=3,
    slot="split-cpu-0",
    stage=Stage(device="cpu", replicas=2, splits=(Split(first=0, end=2, batch=4),)),
    policy=None,
    dispatch="work-conserving",
)
ROUTE = StageRoute(first=0, assignment=ASSIGNMENT, budgets=(Budget(inputs=4),), expected_s=0.0)


async def soon(awaited: Awaitable[T]) -> T:
    """Waits for something that happens within seconds or never."""
    return await asyncio.wait_for(awaited, 10.0)


async def until(is_so: Callable[[], bool]) -> None:
    """Waits until a condition holds that a server and its caller bring about on one loop, in turns."""
    async with asyncio.timeout(10.0):
        while not is_so():  # noqa: ASYNC110 - no event says so
            await asyncio.sleep(0)


async def turns() -> None:
    """Lets every task run until it waits for an external event."""
    for _ in range(20):
        await asyncio.sleep(0)


def piece_of(sample_ids: Sequence[str], next_block: int = 0) -> WirePiece:
    """Returns a piece with two tokens per input."""
    return WirePiece(
        sample_ids=tuple(sample_ids),
        next_block=next_block,
        lengths_B=np.full(len(sample_ids), 2, dtype=np.int32),
        tensors=(np.arange(2 * len(sample_ids), dtype=np.int32),),
        state_BS=None,
    )


SERIALS = count(1)


def call_of(sample_ids: Sequence[str], serial: int | None = None) -> StageCall:
    """Returns a call with one input per letter or id, without deadlines."""
    return StageCall(
        serial=next(SERIALS) if serial is None else serial,
        piece=piece_of(sample_ids),
        remaining_s=(math.inf,) * len(sample_ids),
        reserve_s=0.0,
    )


def answered(sample_ids: Sequence[str]) -> Chunk:
    """Returns a part that answers these inputs."""
    return Chunk(
        answers=tuple((Answer(sample_id=sample_id, value=1, score=0.5, exit=1), TIMING) for sample_id in sample_ids)
    )


def survivors(sample_ids: Sequence[str], next_block: int = 2) -> Chunk:
    """Returns a part with these survivors."""
    return Chunk(survivors=piece_of(sample_ids, next_block), survivor_timings=(TIMING,) * len(sample_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A call that a fake replica received."""

    replica: str
    call: StageCall
    frames: Frames

    @property
    def names(self) -> str:
        return "".join(self.call.piece.sample_ids)

    def say(self, chunk: Chunk) -> None:
        self.frames.send(encode(ReplyPart(self.call.serial, chunk)))

    def answer(self) -> None:
        """Answers all of its inputs."""
        self.say(answered(self.names))

    def refuse(self, reason: str) -> None:
        self.frames.send(encode(CallRefused(self.call.serial, reason)))


class FakeReplica:
    """Keeps the calls that it receives, for the test to reply. Its port is bound at once, and open after `listen`."""

    def __init__(self, name: str = "r1", *, asked: asyncio.Queue[Asked] | None = None) -> None:
        """`asked`: the queue of its calls, which several replicas may share."""
        self.name = name
        self.words: asyncio.Queue[str] = asyncio.Queue()
        """The first frame of every connection."""
        self.asked: asyncio.Queue[Asked] = asyncio.Queue() if asked is None else asked
        self.forgotten: asyncio.Queue[int] = asyncio.Queue()
        """Serials of cancelled calls."""
        self.ended: asyncio.Queue[None] = asyncio.Queue()
        """The end of every connection."""
        self._connections: set[Frames] = set()
        self._server: asyncio.Server | None = None
        self._socket = socket.socket()
        self._socket.bind((LOOPBACK, 0))
        self.address = Address(host=LOOPBACK, port=self._socket.getsockname()[1], token=WORD)

    async def listen(self) -> None:
        """Accepts connections."""
        self._server = await asyncio.get_running_loop().create_server(self._joined, sock=self._socket)

    def say_noise(self) -> None:
        """Sends all connections a message that no replica sends."""
        for frames in self._connections:
            frames.send(b"noise")

    def drop(self) -> None:
        """Ends every connection at once, and accepts new ones."""
        for frames in self._connections:
            frames.abort()

    def die(self) -> None:
        """Ends every connection at once, and accepts no more."""
        if self._server is not None:
            self._server.close()
        self._socket.close()
        self.drop()

    def _joined(self) -> Frames:
        first = True

        def hear(frame: memoryview) -> None:
            nonlocal first
            if first:
                first = False
                self.words.put_nowait(bytes(frame).decode())
                return
            match decode_from_ingress(frame):
                case StageCall() as call:
                    self.asked.put_nowait(Asked(replica=self.name, call=call, frames=frames))
                case CancelCall(serial=serial):
                    self.forgotten.put_nowait(serial)

        def end() -> None:
            self._connections.discard(frames)
            self.ended.put_nowait(None)

        frames = Frames(hear, end, lambda: self._connections.add(frames))
        return frames


class FixedLinks(ReplicaLinks):
    """Passes every call to the test's stage of its slot."""

    def __init__(self, stages: Mapping[str, Any]) -> None:
        self.stages = stages

    def send(self, call: Call, message: StageCall) -> None:
        self.stages[call.stage.slot].call(call, message, self.owner)

    def cancel(self, call: Call) -> None:
        self.owner.ended(call, asyncio.CancelledError())

    def check_plan(self, placed: PlacedPlan) -> None:
        """Accepts every plan."""

    def follow(self) -> None:
        """Keeps the stages of the test."""


class AwaitedCall(Call):
    """A call of an ingress, whose end is a future: None, or its error."""

    def __init__(self, message: StageCall, *placements: KVPlacement, refused: Exception | None = None) -> None:
        """`placements`: those of its inputs' sequences, if they have any. `refused`: the error of taking its parts."""
        of_inputs = placements or (None,) * len(message.remaining_s)
        inputs = [PendingInput(0, 0.0, math.inf, placement=placement) for placement in of_inputs]
        super().__init__(ROUTE, inputs, 0.0, 0.0, None, message.serial, False)
        self.num_remaining = len(inputs)
        self.message, self.refused = message, refused
        self.end: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()


class Owner(Dispatcher):
    """Takes the replies to calls, without links. Its core only has the chains of a plan."""

    def __init__(self, chains: Chains | None = None) -> None:
        self.core, self.tracer = cast(IngressCore, SimpleNamespace(chains=chains)), None

    def set_available(self, slots: Mapping[str, int]) -> bool:
        return any(slots.values())  # chains of one stage

    def replied(self, call: Any, chunk: Chunk) -> None:
        if call.refused is not None:
            raise call.refused
        call.num_remaining -= len(chunk.settled)

    def ended(self, call: Any, error: BaseException | None) -> None:
        call.leave_replica()
        call.end.set_result(error)


class FakeHost:
    """Keeps the calls that are submitted to it."""

    def __init__(self) -> None:
        self.submitted: asyncio.Queue[tuple[StageCall, OpenCall]] = asyncio.Queue()
        self.forgotten: asyncio.Queue[OpenCall] = asyncio.Queue()
        self.refuses: Exception | None = None
        self.device = self

    def follow(self, assignment: Assignment) -> None:
        """Any plan can be followed."""

    def submit(self, call: StageCall, assignment: Assignment, opened: OpenCall) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.submitted.put_nowait((call, opened))

    def forget(self, opened: OpenCall) -> None:
        self.forgotten.put_nowait(opened)

    def end(self, sequences: Collection[int]) -> None:
        """Keeps no state of sequences."""


class Caller:
    """An ingress's end of a connection, controlled by the test."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[ReplyPart | CallRefused] = asyncio.Queue()
        self.ended = asyncio.Event()
        self.frames = Frames(lambda frame: self.heard.put_nowait(decode_from_replica(frame)), self.ended.set)

    async def connect(self, address: Address, *first: bytes) -> None:
        """`first`: its first frames; by default the replica's token."""
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self.frames, address.host, address.port)
        for frame in first or (address.token.encode(),):
            self.frames.send(frame)

    def begin(self, serial: int, sample_ids: str) -> None:
        self.frames.send(encode(ASSIGNMENT))
        self.frames.send(encode(call_of(sample_ids, serial)))

    async def part(self) -> tuple[int, str]:
        """Returns the next part: the serial of its call, and the inputs that it answers."""
        message = await soon(self.heard.get())
        assert isinstance(message, ReplyPart), message
        return message.serial, "".join(answer.sample_id for answer, _ in message.chunk.answers)


class Method:
    """A remote method of a deployment's handle; its reply is awaited."""

    def __init__(self, reply: Any) -> None:
        self._reply = reply

    def remote(self, *arguments: object) -> Awaitable[Any]:
        async def answer() -> Any:
            if self._reply == "never":
                await asyncio.Event().wait()
            if isinstance(self._reply, Exception):
                raise self._reply
            return [self._reply, *arguments] if arguments else self._reply

        return answer()
