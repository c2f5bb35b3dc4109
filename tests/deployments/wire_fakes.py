"""Both ends of the connection between an ingress and a replica, for tests of either: replies are given by hand."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from deployments.ingress.link import ReplicaLinks
from deployments.replica.host import OpenCall
from deployments.wire.messages import (
    Address,
    Assignment,
    BeginCall,
    CallRefused,
    CancelCall,
    Chunk,
    Frames,
    ReplyPart,
    StageCall,
    Timing,
    WireSurvivors,
    decode_from_ingress,
    decode_from_replica,
    encode,
)
from earlyexit.network.boundary import Answer, Split, WirePiece
from optimizer.placement import PlacedPlan
from optimizer.plan import Stage

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


async def soon(awaited: Awaitable[T]) -> T:
    """What happens within seconds, or never."""
    return await asyncio.wait_for(awaited, 10.0)


async def turns() -> None:
    """Let every task run until it waits for something outside."""
    for _ in range(20):
        await asyncio.sleep(0)


def piece_of(sample_ids: Sequence[str], next_block: int = 0) -> WirePiece:
    """Two tokens each."""
    return WirePiece(
        sample_ids=tuple(sample_ids),
        next_block=next_block,
        lengths_B=np.full(len(sample_ids), 2, dtype=np.int32),
        tensors=(np.arange(2 * len(sample_ids), dtype=np.int32),),
        state_BS=None,
    )


def call_of(sample_ids: Sequence[str]) -> StageCall:
    """One input per letter, or per id, with time for ever."""
    return StageCall(
        piece=piece_of(sample_ids),
        remaining_s=(math.inf,) * len(sample_ids),
        reserve_s=0.0,
        assignment=ASSIGNMENT,
    )


def answered(sample_ids: Sequence[str]) -> Chunk:
    """A part that answers these."""
    return Chunk(
        answers=tuple((Answer(sample_id=sample_id, value=1, score=0.5, exit=1), TIMING) for sample_id in sample_ids)
    )


def going_on(sample_ids: Sequence[str], next_block: int = 2) -> Chunk:
    """A part with these survivors."""
    return Chunk(going_on=WireSurvivors(piece=piece_of(sample_ids, next_block), timings=(TIMING,) * len(sample_ids)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A call that a fake replica heard."""

    replica: str
    serial: int
    call: StageCall
    frames: Frames

    @property
    def names(self) -> str:
        return "".join(self.call.piece.sample_ids)

    def say(self, chunk: Chunk) -> None:
        self.frames.send(encode(ReplyPart(self.serial, chunk)))

    def answer(self) -> None:
        """All of its inputs."""
        self.say(answered(self.names))

    def refuse(self, reason: str) -> None:
        self.frames.send(encode(CallRefused(self.serial, reason)))


class FakeReplica:
    """Keeps the calls it hears, for the test to reply to. Its port is its own at once, and mute until `listen`."""

    def __init__(self, name: str = "r1", *, asked: asyncio.Queue[Asked] | None = None) -> None:
        """`asked`: where its calls are kept; several replicas may share one."""
        self.name = name
        self.words: asyncio.Queue[str] = asyncio.Queue()
        """The first frame of every connection."""
        self.asked: asyncio.Queue[Asked] = asyncio.Queue() if asked is None else asked
        self.forgotten: asyncio.Queue[int] = asyncio.Queue()
        """Serials."""
        self.ended: asyncio.Queue[None] = asyncio.Queue()
        """Of every connection its end."""
        self._connections: set[Frames] = set()
        self._server: asyncio.Server | None = None
        self._socket = socket.socket()
        self._socket.bind((LOOPBACK, 0))
        self.address = Address(host=LOOPBACK, port=self._socket.getsockname()[1], token=WORD)

    async def listen(self) -> None:
        """Take connections."""
        self._server = await asyncio.get_running_loop().create_server(self._joined, sock=self._socket)

    def say_noise(self) -> None:
        """To everyone, what no replica says."""
        for frames in self._connections:
            frames.send(b"noise")

    def drop(self) -> None:
        """End every connection at once, and take new ones."""
        for frames in self._connections:
            frames.abort()

    def die(self) -> None:
        """End every connection at once, and take none."""
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
                case BeginCall(serial=serial, call=call):
                    self.asked.put_nowait(Asked(replica=self.name, serial=serial, call=call, frames=frames))
                case CancelCall(serial=serial):
                    self.forgotten.put_nowait(serial)

        def end() -> None:
            self._connections.discard(frames)
            self.ended.put_nowait(None)

        frames = Frames(hear, end, lambda *_: self._connections.add(frames))
        return frames


class FixedLinks(ReplicaLinks):
    """Passes every call to what the test has for its slot."""

    def __init__(self, stages: Mapping[str, Any]) -> None:
        self.stages = stages

    async def call(self, call: StageCall, **given: Any) -> None:
        await self.stages[call.assignment.slot].call(call, **given)

    def check(self, placed: PlacedPlan) -> None:
        """All plans are on types that there are."""

    def follow(self, placed: PlacedPlan) -> None:
        """The test's stages stay."""


class FakeHost:
    """Keeps the calls that are submitted to it."""

    def __init__(self) -> None:
        self.submitted: asyncio.Queue[tuple[StageCall, OpenCall]] = asyncio.Queue()
        self.forgotten: asyncio.Queue[OpenCall] = asyncio.Queue()
        self.refuses: Exception | None = None
        self.device = self

    def follow(self, assignment: Assignment) -> None:
        """Any plan can be followed."""

    def submit(self, call: StageCall, opened: OpenCall) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.submitted.put_nowait((call, opened))

    def forget(self, opened: OpenCall) -> None:
        self.forgotten.put_nowait(opened)

    def end(self, sequences: Collection[int]) -> None:
        """It keeps nothing of sequences."""


class Caller:
    """An ingress's end of a connection, by hand."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[ReplyPart | CallRefused] = asyncio.Queue()
        self.ended = asyncio.Event()
        self.frames = Frames(lambda frame: self.heard.put_nowait(decode_from_replica(frame)), self.ended.set)

    async def connect(self, address: Address, *first: bytes) -> None:
        """`first`: the frames that it begins with; without any, the replica's word."""
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self.frames, address.host, address.port)
        for frame in first or (address.token.encode(),):
            self.frames.send(frame)

    def begin(self, serial: int, sample_ids: str) -> None:
        self.frames.send(encode(BeginCall(serial, call_of(sample_ids))))

    async def part(self) -> tuple[int, str]:
        """The next part: its call, and the inputs that it answers."""
        message = await soon(self.heard.get())
        assert isinstance(message, ReplyPart), message
        return message.serial, "".join(answer.sample_id for answer, _ in message.chunk.answers)
