"""A slot's fake replicas behind the transport that calls them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from deployments.ingress.core.routes import KVPlacement, KVPlacements
from deployments.ingress.link import LinkTransport
from deployments.wire.directory import ReplicaDirectory
from deployments.wire.messages import Chunk
from tests.deployments.wire_fakes import Asked, FakeReplica, call_of, names, soon, turns

BATCH = 4


class Call:
    """A call to the slot, and the parts that came."""

    def __init__(
        self,
        transport: LinkTransport,
        sample_ids: str,
        avoided: Sequence[str],
        weight: int | None = None,
        placements: KVPlacements | None = None,
    ) -> None:
        self.parts: list[Chunk] = []
        self.task = asyncio.create_task(
            transport.call(
                call_of(sample_ids),
                weight=len(sample_ids) if weight is None else weight,
                batch=BATCH,
                avoided=frozenset(avoided),
                take=self.parts.append,
                placements=placements,
            )
        )

    @property
    def names(self) -> list[str]:
        return names(self.parts)


class Slot:
    """A slot's fake replicas, its board, and the transport that follows it."""

    def __init__(self) -> None:
        self.board = ReplicaDirectory()
        self.transport = LinkTransport(phase=0.0)
        self.transport.follow(self.board)
        self.replicas: dict[str, FakeReplica] = {}
        self._asked: asyncio.Queue[Asked] = asyncio.Queue()
        self._calls: list[Call] = []

    async def has(self, *names: str) -> None:
        """These replicas and no others, all of which are up when this returns."""
        new = [self.make(name) for name in names if name not in self.replicas]
        for replica in new:
            await replica.listen()
        await self.announce(*names)
        for replica in new:
            await soon(replica.words.get())

    def make(self, name: str) -> FakeReplica:
        """One that does not listen yet, and that nobody knows of."""
        replica = self.replicas[name] = FakeReplica(name, asked=self._asked)
        return replica

    async def announce(self, *names: str) -> None:
        """As Serve's router does, in a thread of its own."""
        await asyncio.to_thread(self.board.announce, {name: self.replicas[name].address for name in names})

    def call(self, sample_ids: str, *, avoided: Sequence[str] = (), weight: int | None = None) -> Call:
        """`weight`: the call's; None: its inputs."""
        self._calls.append(Call(self.transport, sample_ids, avoided, weight))
        return self._calls[-1]

    def call_of(self, *homes: KVPlacement, avoided: Sequence[str] = ()) -> Call:
        """Of these sequences an input each."""
        letters = "abcdefgh"[: len(homes)]
        self._calls.append(Call(self.transport, letters, avoided, placements=KVPlacements("slot", homes)))
        return self._calls[-1]

    async def begun(self, *numbers: int) -> tuple[list[KVPlacement], str]:
        """New sequences, which one call brings to a replica, and whose they are now."""
        homes = [KVPlacement(number) for number in numbers]
        self.call_of(*homes)
        asked = await self.asked()
        asked.answer()
        return homes, asked.replica

    async def asked(self) -> Asked:
        """The next call that reaches a replica."""
        return await soon(self._asked.get())

    async def sent(
        self, sample_ids: str, *, avoided: Sequence[str] = (), weight: int | None = None
    ) -> tuple[Call, Asked]:
        """A call and whom it reached."""
        call = self.call(sample_ids, avoided=avoided, weight=weight)
        return call, await self.asked()

    async def taker(self, sample_ids: str, *, avoided: Sequence[str] = ()) -> str:
        """Who takes a call, which stays open."""
        _, asked = await self.sent(sample_ids, avoided=avoided)
        return asked.replica

    @property
    def is_mute(self) -> bool:
        """Whether no call has reached a replica that the test does not know of."""
        return self._asked.empty()

    async def end(self) -> None:
        for call in self._calls:
            call.task.cancel()
        await asyncio.gather(*(call.task for call in self._calls), return_exceptions=True)
        await self.announce()
        for replica in self.replicas.values():
            replica.die()
        await turns()
