from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from deployments.ingress.link import FIRST_PAUSE_S, LONGEST_PAUSE_S, ReplicaLink
from deployments.wire.messages import Chunk
from tests.deployments.wire_fakes import WORD, Asked, FakeReplica, call_of, names, soon, turns


class Scene:
    """A link and the replica at its other end; pauses last until the test ends them."""

    def __init__(self, replica: FakeReplica) -> None:
        self.replica = replica
        self.changes: asyncio.Queue[bool] = asyncio.Queue()
        """Whether it was up, whenever it told of a change."""
        self._pauses: asyncio.Queue[float] = asyncio.Queue()
        self._over: asyncio.Queue[None] = asyncio.Queue()
        self.link = ReplicaLink("r1", self.replica.address, self._changed, pause=self._pause)

    def call(self, sample_ids: str) -> Call:
        return Call(self.link, sample_ids)

    async def asked(self) -> Asked:
        return await soon(self.replica.asked.get())

    async def begun_pause_s(self) -> float:
        """The next pause, which goes on."""
        return await soon(self._pauses.get())

    async def pause_s(self) -> float:
        """The next pause, which ends."""
        pause_s = await self.begun_pause_s()
        self.end_pause()
        return pause_s

    def end_pause(self) -> None:
        self._over.put_nowait(None)

    @property
    def is_pausing(self) -> bool:
        """Whether a pause has begun that nobody was told of."""
        return not self._pauses.empty()

    def _changed(self) -> None:
        self.changes.put_nowait(self.link.is_up)

    async def _pause(self, seconds: float) -> None:
        self._pauses.put_nowait(seconds)
        await self._over.get()


class Call:
    """A call over the link, and the parts that came."""

    def __init__(self, link: ReplicaLink, sample_ids: str) -> None:
        self.parts: list[Chunk] = []
        self.task = asyncio.create_task(link.call(call_of(sample_ids), self.parts.append))

    @property
    def names(self) -> list[str]:
        return names(self.parts)


@pytest.fixture
async def down() -> AsyncIterator[Scene]:
    """Nobody listens yet."""
    scene = Scene(FakeReplica())
    yield scene
    scene.replica.die()
    scene.link.leave()
    await turns()


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    """The link is up."""
    replica = FakeReplica()
    await replica.listen()
    scene = Scene(replica)
    assert await soon(replica.words.get()) == WORD
    yield scene
    replica.die()
    scene.link.leave()
    await turns()


# The connection


async def test_pauses_between_attempts_double_up_to_the_longest_and_begin_anew_after_a_connection(down: Scene) -> None:
    pauses_s = [await down.pause_s() for _ in range(6)]
    assert pauses_s == [FIRST_PAUSE_S * 2**k for k in range(5)] + [LONGEST_PAUSE_S]
    assert await down.begun_pause_s() == LONGEST_PAUSE_S
    await down.replica.listen()
    down.end_pause()
    await soon(down.replica.words.get())
    down.replica.drop()
    assert await down.pause_s() == FIRST_PAUSE_S
    assert await soon(down.replica.words.get()) == WORD


async def test_a_link_without_a_connection_takes_no_calls(down: Scene) -> None:
    with pytest.raises(ConnectionError, match="no connection to r1"):
        await down.link.call(call_of("a"), lambda _: None)


async def test_whoever_says_what_no_replica_says_is_left_and_tried_again(scene: Scene) -> None:
    call = scene.call("a")
    await scene.asked()
    scene.replica.say_noise()
    with pytest.raises(ConnectionError):
        await soon(call.task)
    await scene.pause_s()
    assert await soon(scene.replica.words.get()) == WORD


# Calls


async def test_a_refused_call_fails_for_the_replicas_reason_and_others_go_on(scene: Scene) -> None:
    refused, other = scene.call("a"), scene.call("b")
    (await scene.asked()).refuse("PlanError('no split holds block 2')")
    with pytest.raises(RuntimeError, match="no split holds block 2"):
        await soon(refused.task)
    (await scene.asked()).answer()
    await soon(other.task)


async def test_a_part_that_cannot_be_taken_fails_its_call_and_no_other(scene: Scene) -> None:
    def refuse(chunk: Chunk) -> None:
        raise LookupError("nobody knows this input")

    failing = asyncio.create_task(scene.link.call(call_of("a"), refuse))
    (await scene.asked()).answer()
    with pytest.raises(LookupError, match="nobody knows"):
        await soon(failing)
    other = scene.call("b")
    (await scene.asked()).answer()
    await soon(other.task)


# Sequences


async def test_nothing_is_said_of_sequences_where_there_is_no_connection_any_more(down: Scene) -> None:
    down.link.end([7])
    assert down.replica.over.empty()


# The end


@pytest.mark.parametrize("how", ["died", "given-up"])
async def test_a_link_that_leaves_never_comes_back(scene: Scene, how: str) -> None:
    call = scene.call("a")
    await scene.asked()
    scene.link.leave()
    if how == "died":
        scene.replica.drop()
    else:
        call.task.cancel()
    with pytest.raises((ConnectionError, asyncio.CancelledError)):
        await soon(call.task)
    await soon(scene.replica.ended.get())
    scene.end_pause()
    await turns()
    assert (scene.link.is_up, scene.replica.words.empty()) == (False, True)


async def test_a_link_that_never_came_up_stops_trying_when_it_leaves(down: Scene) -> None:
    assert await down.begun_pause_s() == FIRST_PAUSE_S
    await down.replica.listen()
    down.link.leave()
    down.end_pause()
    await turns()
    assert (down.is_pausing, down.replica.words.empty()) == (False, True)


async def test_a_link_tries_again_after_any_error(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, replica = asyncio.get_running_loop(), FakeReplica()
    await replica.listen()
    connect, errors = loop.create_connection, [OverflowError("port"), UnicodeError("host")]

    async def fails_twice(*args: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop(0)
        return await connect(*args, **options)

    monkeypatch.setattr(loop, "create_connection", fails_twice)
    scene = Scene(replica)
    assert (await scene.pause_s(), await scene.pause_s()) == (FIRST_PAUSE_S, 2 * FIRST_PAUSE_S)
    assert await soon(scene.changes.get())
    replica.die()
    scene.link.leave()
    await turns()
