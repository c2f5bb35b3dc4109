"""Which replica of a slot takes a call, and which one the inputs of sequences."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from deployments.ingress.core.routes import KVPlacement, KVPlacements
from deployments.ingress.link import LinkTransport
from deployments.wire.directory import ReplicaDirectory
from deployments.wire.messages import Chunk
from tests.deployments.wire_fakes import Asked, FakeReplica, answered, call_of, names, soon, turns

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

    async def end(self) -> None:
        for call in self._calls:
            call.task.cancel()
        await asyncio.gather(*(call.task for call in self._calls), return_exceptions=True)
        await self.announce()
        for replica in self.replicas.values():
            replica.die()
        await turns()


@pytest.fixture
async def slot() -> AsyncIterator[Slot]:
    slot = Slot()
    yield slot
    await slot.end()


# Which replica


async def test_idle_replicas_come_first_and_then_batches_fill_one_after_the_other(slot: Slot) -> None:
    await slot.has("a", "b", "c")
    assert {await slot.taker("x"), await slot.taker("x"), await slot.taker("x")} == {"a", "b", "c"}
    fuller = await slot.taker("xy")  # 3, 1, 1
    assert await slot.taker("x") == fuller  # 4, 1, 1
    next_one = await slot.taker("xy")  # 4, 3, 1
    assert next_one != fuller
    assert await slot.taker("xy") not in {fuller, next_one}  # 4, 3, 3: two more do not fit the batch of 3


@pytest.mark.parametrize("how", ["answered", "refused", "given-up"])
async def test_a_call_that_has_ended_however_is_no_load(slot: Slot, how: str) -> None:
    await slot.has("a", "b")
    call, first = await slot.sent("wxyz")  # a batch, behind which nobody would wait
    await slot.taker("x")
    if how == "answered":
        first.answer()
    elif how == "refused":
        first.refuse("PlanError()")
    else:
        call.task.cancel()
    await asyncio.wait([call.task], timeout=10.0)
    assert await slot.taker("x") == first.replica  # idle again


async def test_avoided_replicas_get_calls_where_there_are_no_others(slot: Slot) -> None:
    await slot.has("a", "b")
    assert {await slot.taker("x", avoided=("a", "b")), await slot.taker("x", avoided=("a", "b"))} == {"a", "b"}
    await slot.has("a")
    assert await slot.taker("x", avoided=("a",)) == "a"
    await slot.has("a", "c")
    assert await slot.taker("x", avoided=("a",)) == "c"


async def test_a_call_is_a_load_by_its_weight_until_the_last_of_its_inputs_has_left(slot: Slot) -> None:
    await slot.has("a", "b")
    long, first = await slot.sent("xy", weight=3)
    _, second = await slot.sent("vw", weight=1)
    assert first.replica != second.replica
    first.say(answered("x"))
    await turns()
    # Of batches of 4 the first one's has room for one more, the other's for three: the fullest that fits comes first.
    assert [await slot.taker("u"), await slot.taker("tuv")] == [first.replica, second.replica]
    first.say(answered("y"))
    await soon(long.task)
    assert await slot.taker("rst") == first.replica  # it holds 1, the other one 4


async def test_avoided_replicas_are_left_out_while_there_are_others(slot: Slot) -> None:
    await slot.has("a", "b", "c")
    assert {await slot.taker("x", avoided=("a", "b", "elsewhere")) for _ in range(5)} == {"c"}
    assert {await slot.taker("x", avoided=("b",)) for _ in range(4)} == {"a"}  # c is at its second batch
    assert await slot.taker("x") == "b"  # idle, and no longer avoided


# Coming and going


async def test_sequences_go_where_their_home_is_and_those_without_one_where_fewest_full_batches_of_them_are(
    slot: Slot,
) -> None:
    await slot.has("a", "b")
    [x, y], first = await slot.begun(1, 2)
    [z], second = await slot.begun(3)
    assert {first, second} == {"a", "b"}
    await slot.begun(4)  # to the fuller one
    for home, replica in ((z, second), (x, first), (y, first)):
        slot.call_of(home)
        (found := await slot.asked()).answer()
        assert (home.replicas, found.replica) == ({"slot": replica}, replica)
    assert (await slot.begun(5, 6))[1] == second  # 3 and 1 of a batch of 4


async def test_a_sequence_avoids_replicas_that_had_no_room_while_there_are_others(slot: Slot) -> None:
    await slot.has("a", "b", "c")
    full: frozenset[str] = frozenset()
    for number in (1, 2, 3):
        home = KVPlacement(number, avoids=full)
        slot.call_of(home)
        (found := await slot.asked()).answer()
        assert (home.newest, found.replica in full) == (found.replica, False)
        slot.transport.end(found.replica, number)
        full |= {found.replica}
    slot.call_of(KVPlacement(4, avoids=full))
    (await slot.asked()).answer()
    assert full == {"a", "b", "c"}
