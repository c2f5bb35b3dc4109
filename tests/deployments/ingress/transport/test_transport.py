"""Which of a stage's replicas takes a call, and which one the inputs of sequences."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from deployments.ingress.core.routes import KVPlacement, KVPlacements
from deployments.ingress.link import LinkTransport, ReplicaLinks
from deployments.wire.directory import ReplicaDirectory
from earlyexit.errors import PlanError
from earlyexit.network.boundary import Split
from optimizer.placement import PlacedPlan
from optimizer.plan import Plan, Stage
from tests.deployments.wire_fakes import Asked, FakeReplica, call_of, soon, turns

BATCH = 4
FIRST = "split-cpu-0"


class Call:
    """A call to the slot."""

    def __init__(
        self,
        transport: LinkTransport,
        sample_ids: str,
        placements: KVPlacements | None = None,
    ) -> None:
        self.task = asyncio.create_task(
            transport.call(
                call_of(sample_ids),
                weight=len(sample_ids),
                batch=BATCH,
                take=lambda _: None,
                placements=placements,
            )
        )


def placed(*avoided: str) -> PlacedPlan:
    """A stage of one block, whose replicas of these names rest."""
    stage = Stage(device="cpu", replicas=1, splits=(Split(first=0, end=1, batch=BATCH),))
    return PlacedPlan(plan=Plan(stages=(stage,), epoch=1), avoided=dict.fromkeys(avoided, "cpu"))


class Slot:
    """A stage's fake replicas, their board, and the links that follow it."""

    def __init__(self) -> None:
        self.board = ReplicaDirectory()
        self.links = ReplicaLinks(placed(), ["cpu"], phase=0.0)
        self.links.connect("cpu", self.board)
        self.transport = self.links[FIRST]
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
        """A replica that does not listen yet and is not announced."""
        replica = self.replicas[name] = FakeReplica(name, asked=self._asked)
        return replica

    async def announce(self, *names: str) -> None:
        """As Serve's router does, in a thread of its own."""
        await asyncio.to_thread(self.board.announce, {name: self.replicas[name].address for name in names})

    def avoid(self, *replicas: str) -> None:
        """These get no work from now on."""
        self.links.follow(placed(*replicas))

    def call(self, sample_ids: str) -> Call:
        self._calls.append(Call(self.transport, sample_ids))
        return self._calls[-1]

    def call_of(self, *homes: KVPlacement) -> Call:
        """Of these sequences an input each."""
        letters = "abcdefgh"[: len(homes)]
        self._calls.append(Call(self.transport, letters, placements=KVPlacements("slot", homes)))
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

    async def sent(self, sample_ids: str) -> tuple[Call, Asked]:
        """A call, and the replica that it reached."""
        call = self.call(sample_ids)
        return call, await self.asked()

    async def taker(self, sample_ids: str) -> str:
        """The replica that takes a call, which stays open."""
        _, asked = await self.sent(sample_ids)
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


@pytest.mark.parametrize("how", ["answered", "refused", "given-up"])
async def test_a_call_that_has_ended_however_is_no_load(slot: Slot, how: str) -> None:
    await slot.has("a", "b")
    call, first = await slot.sent("wxyz")  # a full batch
    await slot.taker("x")
    if how == "answered":
        first.answer()
    elif how == "refused":
        first.refuse("PlanError()")
    else:
        call.task.cancel()
    await asyncio.wait([call.task], timeout=10.0)
    assert await slot.taker("x") == first.replica  # idle again


async def test_avoided_replicas_are_left_out_while_there_are_others(slot: Slot) -> None:
    await slot.has("a", "b", "c")
    slot.avoid("a", "b", "elsewhere")
    assert {await slot.taker("x") for _ in range(5)} == {"c"}
    slot.avoid("b")
    assert {await slot.taker("x") for _ in range(4)} == {"a"}  # c is at its second batch
    slot.avoid()
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


def test_a_plan_on_types_without_replicas_is_refused() -> None:
    links = ReplicaLinks(placed(), ["cpu"], phase=0.0)
    elsewhere = Stage(device="V100", replicas=1, splits=(Split(first=0, end=1, batch=1),))
    with pytest.raises(PlanError, match=r"needs replicas on \['V100'\]; there are some on \['cpu'\]"):
        links.follow(PlacedPlan(plan=Plan(stages=(elsewhere,))))
