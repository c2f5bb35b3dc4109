"""The choice of replicas for calls and sequences, and links to replicas and the controller."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from deployments.ingress.core.inputs import Chains, IngressOptions
from deployments.ingress.core.routes import KVPlacement
from deployments.ingress.dispatcher import FIRST_PAUSE_S, LONGEST_PAUSE_S, ReplicaLink, ReplicaLinks
from deployments.local_ray.private import DeploymentHandles
from deployments.wire.controller_link import ControllerLink
from deployments.wire.directory import ReplicaDirectory
from earlyexit.errors import ControllerUnavailableError, OfframpError, PlanError
from earlyexit.network.boundary import Split
from optimizer.plans.plan import PlacedPlan, Plan, Stage
from tests.deployments.wire_fakes import WORD, Asked, AwaitedCall, FakeReplica, Method, Owner, call_of, soon, turns

BATCH = 4
FIRST = "split-cpu-0"


def placed(*avoided: str, shares: tuple[float, ...] = (1.0,)) -> PlacedPlan:
    """Returns a plan of chains with one stage of one block, which avoids these replicas."""
    stage = Stage(device="cpu", replicas=1, splits=(Split(first=0, end=1, batch=BATCH),))
    plan = Plan(stages=(stage,) * len(shares), shares=shares, epoch=1)
    return PlacedPlan(plan=plan, avoided=dict.fromkeys(avoided, "cpu"))


class Slot:
    """The fake replicas of a stage, their directory, and the links that follow it."""

    def __init__(self) -> None:
        self.board = ReplicaDirectory()
        self.links = ReplicaLinks(["cpu"], phase=0.0)
        self.links.owner = Owner(Chains(placed(), IngressOptions()))
        self.links.follow()
        self._calls: list[AwaitedCall] = []
        self.links.connect("cpu", self.board)
        self.replicas: dict[str, FakeReplica] = {}
        self._asked: asyncio.Queue[Asked] = asyncio.Queue()

    async def has(self, *names: str) -> None:
        """Announces exactly these replicas, and waits until all of them are up."""
        new = [self.make(name) for name in names if name not in self.replicas]
        for replica in new:
            await replica.listen()
        await self.announce(*names)
        for replica in new:
            await soon(replica.words.get())

    def make(self, name: str) -> FakeReplica:
        """Returns a replica that does not listen yet and is not announced."""
        replica = self.replicas[name] = FakeReplica(name, asked=self._asked)
        return replica

    async def announce(self, *names: str) -> None:
        """Announces replicas from another thread, like Serve's router."""
        await asyncio.to_thread(self.board.announce, {name: self.replicas[name].address for name in names})

    def avoid(self, *replicas: str) -> None:
        """Avoids these replicas from now on."""
        self.follow(placed(*replicas))

    def follow(self, plan: PlacedPlan) -> None:
        self.links.owner.core.chains.follow(plan)
        self.links.follow()

    def call(self, sample_ids: str, *placements: KVPlacement, left_s: float = math.inf) -> AwaitedCall:
        message = structs.replace(call_of(sample_ids), remaining_s=(left_s,) * len(sample_ids))
        self._calls.append(AwaitedCall(message, *placements))
        self.links.send(self._calls[-1], message)
        return self._calls[-1]

    def call_of(self, *placements: KVPlacement) -> AwaitedCall:
        """Returns a call with one input for each of these sequences."""
        return self.call("abcdefgh"[: len(placements)], *placements)

    async def begun(self, *numbers: int) -> tuple[list[KVPlacement], str]:
        """Starts new sequences in one call; returns their placements and their replica."""
        placements = [KVPlacement(number) for number in numbers]
        self.call_of(*placements)
        asked = await self.asked()
        asked.answer()
        return placements, asked.replica

    async def asked(self) -> Asked:
        """Returns the next call that reaches a replica."""
        return await soon(self._asked.get())

    async def sent(self, sample_ids: str) -> tuple[AwaitedCall, Asked]:
        """Sends a call; returns it and the replica that it reached."""
        return self.call(sample_ids), await self.asked()

    async def taker(self, sample_ids: str) -> str:
        """Returns the replica of a new call, which stays open."""
        _, asked = await self.sent(sample_ids)
        return asked.replica

    async def end(self) -> None:
        for call in self._calls:
            self.links.cancel(call)
        for replica in self.replicas.values():
            replica.die()
        await turns()
        await self.announce()
        await turns()


@pytest.fixture
async def slot() -> AsyncIterator[Slot]:
    slot = Slot()
    yield slot
    await slot.end()


# The choice of a replica


@pytest.mark.parametrize("how", ["answered", "refused", "given-up"])
async def test_a_call_is_no_load_once_it_has_ended(slot: Slot, how: str) -> None:
    await slot.has("a", "b")
    call, first = await slot.sent("wxyz")  # a full batch
    await slot.taker("x")
    if how == "answered":
        first.answer()
    elif how == "refused":
        first.refuse("PlanError()")
    else:
        slot.links.cancel(call)
    await soon(call.end)
    assert await slot.taker("x") == first.replica  # idle again


async def test_avoided_replicas_are_left_out_while_there_are_others(slot: Slot) -> None:
    await slot.has("a", "b", "c")
    slot.avoid("a", "b", "elsewhere")
    assert {await slot.taker("x") for _ in range(5)} == {"c"}
    slot.avoid("b")
    assert {await slot.taker("x") for _ in range(4)} == {"a"}  # c has begun its second batch
    slot.avoid()
    assert await slot.taker("x") == "b"  # idle, and no longer avoided


# Replicas that start and end


async def test_new_sequences_go_to_the_replica_with_the_fewest(slot: Slot) -> None:
    await slot.has("a", "b")
    [x, y], first = await slot.begun(1, 2)
    [z], second = await slot.begun(3)
    assert {first, second} == {"a", "b"}
    assert (await slot.begun(4))[1] == second
    for home, replica in ((z, second), (x, first), (y, first)):
        slot.call_of(home)
        (found := await slot.asked()).answer()
        assert (home.keepers[FIRST].replica.name, found.replica) == (replica, replica)
    assert (await slot.begun(5, 6))[1] == first  # both have two


async def test_an_ingress_is_ready_once_one_chain_can_run(slot: Slot) -> None:
    slot.follow(placed(shares=(0.5, 0.5)))
    ready = asyncio.create_task(slot.links.ready())
    await turns()
    assert not ready.done()
    await slot.has("a")
    await soon(ready)


async def test_waiting_for_a_replica_reduces_the_time_until_the_deadline(slot: Slot) -> None:
    began_s = asyncio.get_running_loop().time()
    slot.call("x", left_s=10.0)
    await turns()
    await slot.has("a")
    [left_s] = (await slot.asked()).call.remaining_s
    assert 10.0 > left_s >= 10.0 - (asyncio.get_running_loop().time() - began_s)


async def test_a_call_that_cannot_be_encoded_fails_alone(slot: Slot) -> None:
    message = call_of("x")
    message = structs.replace(message, piece=replace(message.piece, tensors=(np.array([None]),)))
    waiting, direct = AwaitedCall(message), AwaitedCall(message)
    slot.links.send(waiting, message)
    slot.call("y")
    await slot.has("a")
    slot.links.send(direct, message)
    assert [type(await soon(each.end)) for each in (waiting, direct)] == [TypeError, TypeError]
    assert (await slot.asked()).call.piece.sample_ids == ("y",)


async def test_the_last_replicas_of_a_type_are_used_until_they_end_or_another_one_runs(slot: Slot) -> None:
    await slot.has("a", "b")
    await slot.announce("b")
    await soon(slot.replicas["a"].ended.get())
    await slot.announce()
    call, asked = await slot.sent("x")
    assert asked.replica == "b"
    await slot.has("c")
    assert await slot.taker("y") == "c"
    assert not call.end.done()
    asked.answer()
    assert await soon(call.end) is None
    await soon(slot.replicas["b"].ended.get())


def test_a_plan_on_types_without_replicas_is_refused() -> None:
    links = ReplicaLinks(["cpu"], phase=0.0)
    elsewhere = Stage(device="V100", replicas=1, splits=(Split(first=0, end=1, batch=1),))
    with pytest.raises(PlanError, match=r"needs replicas on \['V100'\]; the service has replicas on \['cpu'\]"):
        links.check_plan(PlacedPlan(plan=Plan(stages=(elsewhere,))))


class Scene:
    """A link, and the replica at its other end."""

    def __init__(self, replica: FakeReplica) -> None:
        self.replica = replica
        self.pauses_s: asyncio.Queue[float] = asyncio.Queue()
        self._over: asyncio.Queue[None] = asyncio.Queue()
        self.link = ReplicaLink("r1", self.replica.address, lambda: None, Owner())
        self.link._pause = self._pause

    def call(self, refused: Exception | None = None) -> AwaitedCall:
        call = AwaitedCall(call_of("a"), refused=refused)
        self.link.begin(call, call.message)
        return call

    async def pause_s(self) -> float:
        """Returns the length of the next pause, which ends."""
        pause_s = await soon(self.pauses_s.get())
        self.end_pause()
        return pause_s

    def end_pause(self) -> None:
        self._over.put_nowait(None)

    async def end(self) -> None:
        self.replica.die()
        self.link.close_when_idle()
        await turns()

    async def _pause(self, seconds: float) -> None:
        self.pauses_s.put_nowait(seconds)
        await self._over.get()


@pytest.fixture
async def down() -> AsyncIterator[Scene]:
    """A scene in which the replica does not listen yet."""
    scene = Scene(FakeReplica())
    yield scene
    await scene.end()


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    """A scene in which the link is up."""
    replica = FakeReplica()
    await replica.listen()
    scene = Scene(replica)
    assert await soon(replica.words.get()) == WORD
    yield scene
    await scene.end()


async def test_pauses_between_connection_attempts_double_until_one_succeeds(down: Scene) -> None:
    assert repr(await down.call().end) == "ConnectionError('no connection to r1')"
    assert [await down.pause_s() for _ in range(6)] == [FIRST_PAUSE_S * 2**k for k in range(5)] + [LONGEST_PAUSE_S]
    assert await soon(down.pauses_s.get()) == LONGEST_PAUSE_S
    await down.replica.listen()
    down.end_pause()
    await soon(down.replica.words.get())
    down.replica.drop()
    assert await down.pause_s() == FIRST_PAUSE_S
    assert await soon(down.replica.words.get()) == WORD


async def test_a_malformed_message_ends_the_connection_which_is_then_opened_again(scene: Scene) -> None:
    call = scene.call()
    await soon(scene.replica.asked.get())
    scene.replica.say_noise()
    assert isinstance(await soon(call.end), ConnectionError)
    await scene.pause_s()
    assert await soon(scene.replica.words.get()) == WORD


async def test_a_call_that_is_refused_or_whose_reply_is_invalid_fails_alone(scene: Scene) -> None:
    refused, failing, other = scene.call(), scene.call(LookupError("this input is not known")), scene.call()
    asked = [await soon(scene.replica.asked.get()) for _ in range(3)]
    asked[0].refuse("PlanError('no split holds block 2')")
    assert repr(await soon(refused.end)) == """RuntimeError("PlanError('no split holds block 2')")"""
    asked[1].answer()
    assert await soon(failing.end) is failing.refused
    asked[2].answer()
    assert await soon(other.end) is None


@pytest.mark.parametrize("how", ["died", "given-up"])
async def test_a_link_that_is_closed_when_idle_finishes_its_calls(scene: Scene, how: str) -> None:
    call = scene.call()
    await soon(scene.replica.asked.get())
    scene.link.close_when_idle()
    if how == "died":
        scene.replica.drop()
    else:
        scene.link.cancel(call)
    assert isinstance(await soon(call.end), ConnectionError if how == "died" else asyncio.CancelledError)
    await soon(scene.replica.ended.get())
    await turns()
    assert (scene.link.is_up, scene.replica.words.empty(), scene.replica.forgotten.empty()) == (
        False,
        True,
        how == "died",
    )


async def test_a_link_tries_again_after_any_error(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    connect, errors = loop.create_connection, [OverflowError("port"), UnicodeError("host")]

    async def fails_twice(*args: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop(0)
        return await connect(*args, **options)

    monkeypatch.setattr(loop, "create_connection", fails_twice)
    replica = FakeReplica()
    await replica.listen()
    scene = Scene(replica)
    assert (await scene.pause_s(), await scene.pause_s()) == (FIRST_PAUSE_S, 2 * FIRST_PAUSE_S)
    assert await soon(replica.words.get()) == WORD
    await scene.end()


class Handle:
    """A controller that replies the same to everything."""

    def __init__(self, reply: Any) -> None:
        self.current = self.coming = self.describe = self.history = Method(reply)


def link_to(reply: Any) -> ControllerLink:
    link = ControllerLink("offramp")
    link._handles["controller"] = Handle(reply)
    return link


async def test_the_controller_is_called_by_its_deployments_name() -> None:
    assert await link_to(placed()).ask_at_startup("current") == placed()
    assert await link_to([placed("r1"), placed()]).ask_at_startup("coming") == [placed("r1"), placed()]
    assert await link_to({"epoch": 1}).ask("describe") == {"epoch": 1}
    assert await link_to("row").ask("history", 3) == ["row", 3]


@pytest.mark.parametrize("reply", ["never", ConnectionError("died")], ids=["mute", "dead"])
async def test_an_ingress_starts_without_a_controller_that_is_gone(reply: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.wire.controller_link.STARTUP_TIMEOUT_S", 0.01)
    assert await link_to(reply).ask_at_startup("current") is None


class Replicas:
    """A deployment whose replicas reply differently, as Serve's handle of it does."""

    def __init__(self, *replies: Any) -> None:
        self._replies = replies

    def broadcast(self, method: str, *arguments: object) -> Any:
        self.asked = method, *arguments
        results = [SimpleNamespace(get_async=Method(reply).remote) for reply in self._replies]
        return SimpleNamespace(_fetch_replica_results_async=Method(results).remote)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own settings, when it is imported
async def test_a_broadcast_returns_the_answers_of_the_other_replicas_if_one_hangs() -> None:
    handles = DeploymentHandles("offramp")
    handles._handles["ingress"] = ingresses = Replicas("a", "never", ConnectionError("died"), "b")
    assert await handles.try_broadcast("ingress", "report", 7.0, timeout_s=0.01) == ["a", None, None, "b"]
    assert ingresses.asked == ("report", 7.0)
    with pytest.raises(OfframpError, match="follow failed on a replica of ingress: TimeoutError"):
        await handles.broadcast("ingress", "follow", timeout_s=0.01)


async def test_calls_to_a_controller_that_is_gone_raise_controller_unavailable() -> None:
    for error, words in ((ConnectionError("died"), "died"), (TimeoutError(), "TimeoutError")):
        with pytest.raises(ControllerUnavailableError, match=f"the controller does not answer: {words}"):
            await link_to(error).ask("describe")
