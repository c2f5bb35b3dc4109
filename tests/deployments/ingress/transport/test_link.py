"""A link to a replica: how it connects again, and what ends its calls; pauses last until the test ends them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from deployments.ingress.link import FIRST_PAUSE_S, LONGEST_PAUSE_S, ReplicaLink
from deployments.wire.messages import Chunk
from tests.deployments.wire_fakes import WORD, FakeReplica, call_of, soon, turns


class Scene:
    """A link and the replica at its other end."""

    def __init__(self, replica: FakeReplica) -> None:
        self.replica = replica
        self.pauses_s: asyncio.Queue[float] = asyncio.Queue()
        self._over: asyncio.Queue[None] = asyncio.Queue()
        self.link = ReplicaLink("r1", self.replica.address, lambda: None, pause=self._pause)

    def call(self, take: Any = lambda _: None) -> asyncio.Task[None]:
        return asyncio.create_task(self.link.call(call_of("a"), take))

    async def pause_s(self) -> float:
        """Returns the length of the next pause, which ends."""
        pause_s = await soon(self.pauses_s.get())
        self.end_pause()
        return pause_s

    def end_pause(self) -> None:
        self._over.put_nowait(None)

    async def end(self) -> None:
        self.replica.die()
        self.link.leave()
        await turns()

    async def _pause(self, seconds: float) -> None:
        self.pauses_s.put_nowait(seconds)
        await self._over.get()


@pytest.fixture
async def down() -> AsyncIterator[Scene]:
    """Nothing listens yet."""
    scene = Scene(FakeReplica())
    yield scene
    await scene.end()


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    """The link is up."""
    replica = FakeReplica()
    await replica.listen()
    scene = Scene(replica)
    assert await soon(replica.words.get()) == WORD
    yield scene
    await scene.end()


async def test_pauses_between_attempts_double_up_to_the_longest_and_begin_anew_after_a_connection(down: Scene) -> None:
    with pytest.raises(ConnectionError, match="no connection to r1"):
        await down.call()
    assert [await down.pause_s() for _ in range(6)] == [FIRST_PAUSE_S * 2**k for k in range(5)] + [LONGEST_PAUSE_S]
    assert await soon(down.pauses_s.get()) == LONGEST_PAUSE_S
    await down.replica.listen()
    down.end_pause()
    await soon(down.replica.words.get())
    down.replica.drop()
    assert await down.pause_s() == FIRST_PAUSE_S
    assert await soon(down.replica.words.get()) == WORD


async def test_what_no_replica_says_ends_the_connection_which_is_tried_again(scene: Scene) -> None:
    call = scene.call()
    await soon(scene.replica.asked.get())
    scene.replica.say_noise()
    with pytest.raises(ConnectionError):
        await soon(call)
    await scene.pause_s()
    assert await soon(scene.replica.words.get()) == WORD


async def test_a_call_that_is_refused_or_whose_part_cannot_be_taken_fails_and_others_go_on(scene: Scene) -> None:
    def refuse(chunk: Chunk) -> None:
        raise LookupError("this input is not known")

    refused, failing, other = scene.call(), scene.call(refuse), scene.call()
    asked = [await soon(scene.replica.asked.get()) for _ in range(3)]
    asked[0].refuse("PlanError('no split holds block 2')")
    with pytest.raises(RuntimeError, match="no split holds block 2"):
        await soon(refused)
    asked[1].answer()
    with pytest.raises(LookupError, match="is not known"):
        await soon(failing)
    asked[2].answer()
    await soon(other)


@pytest.mark.parametrize("how", ["died", "given-up"])
async def test_a_link_that_leaves_finishes_its_calls_and_never_comes_back(scene: Scene, how: str) -> None:
    call = scene.call()
    await soon(scene.replica.asked.get())
    scene.link.leave()
    if how == "died":
        scene.replica.drop()
    else:
        call.cancel()
    with pytest.raises((ConnectionError, asyncio.CancelledError)):
        await soon(call)
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
