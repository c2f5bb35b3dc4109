"""Which replicas host a stage, which of them takes a call, and which one the inputs of sequences."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from deployments.ingress.core.routes import KVPlacement, KVPlacements
from deployments.ingress.link import LinkTransport, ReplicaLinks
from deployments.wire.directory import ReplicaDirectory
from earlyexit.errors import PlanError, SequenceLostError
from earlyexit.network.boundary import Split
from optimizer.placement import PlacedPlan
from optimizer.plan import Plan, Stage
from tests.deployments.wire_fakes import Asked, FakeReplica, call_of, soon, turns

BATCH = 4
FIRST, SECOND = "split-cpu-0", "split-cpu-1"


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


def placed(*replicas: int, epoch: int = 1, avoided: Sequence[str] = (), **hosted: str) -> PlacedPlan:
    """Stages of one block each."""
    stages = (
        Stage(device="cpu", replicas=each, splits=(Split(first=block, end=block + 1, batch=BATCH),))
        for block, each in enumerate(replicas)
    )
    plan = Plan(stages=tuple(stages), epoch=epoch)
    return PlacedPlan(plan=plan, avoided=dict.fromkeys(avoided, "cpu"), hosted=hosted)


class Slot:
    """A stage's fake replicas, their board, and the links that follow it."""

    def __init__(self, *replicas: int) -> None:
        self.board = ReplicaDirectory()
        self.links = ReplicaLinks(placed(*replicas or (1,)), ["cpu"], phase=0.0)
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
        """One that does not listen yet, and that no link knows of."""
        replica = self.replicas[name] = FakeReplica(name, asked=self._asked)
        return replica

    async def announce(self, *names: str) -> None:
        """As Serve's router does, in a thread of its own."""
        await asyncio.to_thread(self.board.announce, {name: self.replicas[name].address for name in names})

    def avoid(self, *replicas: str) -> None:
        """These get no work from now on."""
        self.links.follow(placed(1, avoided=replicas))

    def call(self, sample_ids: str, *, slot: str = FIRST) -> Call:
        self._calls.append(Call(self.links[slot], sample_ids))
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

    async def sent(self, sample_ids: str, *, slot: str = FIRST) -> tuple[Call, Asked]:
        """A call, and the replica that it reached."""
        call = self.call(sample_ids, slot=slot)
        return call, await self.asked()

    async def taker(self, sample_ids: str, *, slot: str = FIRST) -> str:
        """Returns the replica that takes a call, which stays open."""
        _, asked = await self.sent(sample_ids, slot=slot)
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


@pytest.fixture
async def slot() -> AsyncIterator[Slot]:
    slot = Slot()
    yield slot
    await slot.end()


# Which replica


@pytest.mark.parametrize("how", ["answered", "refused", "given-up"])
async def test_a_call_that_has_ended_however_is_no_load(slot: Slot, how: str) -> None:
    await slot.has("a", "b")
    call, first = await slot.sent("wxyz")  # a batch, behind which no call would wait
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


# Which stage a replica hosts


@pytest.fixture
async def two_stages() -> AsyncIterator[Slot]:
    scene = Slot(2, 1)
    yield scene
    await scene.end()


async def told(replica: FakeReplica) -> tuple[int, str]:
    return await soon(replica.hosted.get())


async def test_replicas_share_the_stages_and_are_told_which(two_stages: Slot) -> None:
    await two_stages.has("a", "b", "c")
    assert {await two_stages.taker("x"), await two_stages.taker("x")} == {"a", "b"}
    assert await two_stages.taker("x", slot=SECOND) == "c"
    hosted = [two_stages.replicas[name].hosted for name in "abc"]
    last = [[each.get_nowait() for _ in range(each.qsize())][-1] for each in hosted]
    assert last == [(1, FIRST), (1, FIRST), (1, SECOND)]
    two_stages.links.follow(placed(1, 2, epoch=2, a=FIRST, b=FIRST, c=SECOND))
    assert [await told(two_stages.replicas[name]) for name in "abc"] == [(2, FIRST), (2, SECOND), (2, SECOND)]
    two_stages.links.follow(placed(1, 2, epoch=2, a=FIRST, b=FIRST, c=SECOND))
    await turns()
    assert all(each.empty() for each in hosted)


async def test_where_the_only_replica_of_a_stage_dies_another_hosts_it_at_once(two_stages: Slot) -> None:
    await two_stages.has("a", "b", "c")
    call, _ = await two_stages.sent("x", slot=SECOND)
    two_stages.replicas["c"].die()  # Serve has not noticed it
    with pytest.raises(ConnectionError):
        await soon(call.task)
    assert [await two_stages.taker("x", slot=SECOND), await two_stages.taker("x")] == ["b", "a"]


async def test_calls_to_a_stage_without_a_replica_wait_for_one_and_fail_when_the_plan_drops_it(
    two_stages: Slot,
) -> None:
    await two_stages.has("a")
    waiting = two_stages.call("x", slot=SECOND)
    await turns()
    assert two_stages.is_mute
    await two_stages.has("a", "b")
    assert (await two_stages.asked()).replica == "b"
    await two_stages.has("a")
    dropped = two_stages.call("y", slot=SECOND)
    await turns()
    two_stages.links.follow(placed(1, epoch=2))
    with pytest.raises(ConnectionError, match="no longer has it"):
        await soon(dropped.task)
    assert not waiting.task.done()


async def test_a_call_of_an_earlier_plan_fails_at_once_where_the_plan_has_dropped_its_stage(two_stages: Slot) -> None:
    await two_stages.has("a", "b", "c")
    late = two_stages.call("x", slot=SECOND)  # its task runs after the change of plan
    two_stages.links.follow(placed(1, epoch=2))
    with pytest.raises(ConnectionError, match="no longer has it"):
        await soon(late.task)


async def test_a_sequence_is_lost_with_its_replicas_stage_and_its_pages_are_given_back(two_stages: Slot) -> None:
    await two_stages.has("a", "b", "c")
    [home], name = await two_stages.begun(1)
    slots = {each: SECOND if each == name else FIRST for each in "abc"}
    two_stages.links.follow(placed(2, 1, epoch=2, **slots))
    with pytest.raises(SequenceLostError, match=f"{name} takes no calls any more"):
        await soon(two_stages.call_of(home).task)
    two_stages.transport.end(name, 1)
    assert await soon(two_stages.replicas[name].over.get()) == (1,)


def test_a_plan_on_types_without_replicas_is_refused() -> None:
    links = ReplicaLinks(placed(1), ["cpu"], phase=0.0)
    elsewhere = Stage(device="V100", replicas=1, splits=(Split(first=0, end=1, batch=1),))
    with pytest.raises(PlanError, match=r"needs replicas on \['V100'\]; there are some on \['cpu'\]"):
        links.follow(PlacedPlan(plan=Plan(stages=(elsewhere,))))
