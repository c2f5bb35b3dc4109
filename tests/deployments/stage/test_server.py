from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from cluster.emulated import EmulatedPiece
from deployments.replica.host import CallServer, OpenCall, StageHost
from deployments.wire.messages import Address, Begin, Host, Part, Refused, encode
from earlyexit.engine.device import Answered, Failed, Release
from earlyexit.engine.queue import Member
from earlyexit.errors import DeadlineError, PlanError
from earlyexit.network.boundary import Answer
from tests.deployments.wire_fakes import LOOPBACK, Caller, FakeHost, call_of, piece_of, soon, turns


class Scene:
    """A server of a fake host, whose device releases what the test says."""

    def __init__(self) -> None:
        self.host = FakeHost()
        self.server = CallServer(asyncio.get_running_loop())
        self.address = Address(host="", port=0, word="")
        self._callers: list[Caller] = []

    async def listen(self) -> None:
        self.address = await self.server.listen(cast(StageHost, self.host), LOOPBACK)

    async def caller(self, *first: bytes) -> Caller:
        """One that is connected, with the server's word unless it begins otherwise."""
        caller = Caller()
        await caller.connect(self.address, *first)
        self._callers.append(caller)
        return caller

    async def opened(self) -> OpenCall:
        """The next call that the host was given."""
        _, opened = await soon(self.host.submitted.get())
        return opened

    async def release(self, *releases: Release[Any]) -> None:
        """As the device does: from another thread."""
        await asyncio.to_thread(self.server.deliver, list(releases))

    async def end(self) -> None:
        for caller in self._callers:
            caller.frames.abort()
            await soon(caller.ended.wait())
        await soon(self.server.close())
        await turns()


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    scene = Scene()
    await scene.listen()
    yield scene
    await scene.end()


def member(sample_id: str, opened: OpenCall) -> Member[EmulatedPiece]:
    wire = piece_of(sample_id, next_block=2)
    payload = EmulatedPiece(sample_ids=wire.sample_ids, next_block=2, lengths_B=wire.lengths_B)
    return Member(sample_id=sample_id, payload=payload, origin=opened, queue_s=0.25, compute_s=0.5)


def answers(sample_id: str, opened: OpenCall) -> Answered[EmulatedPiece]:
    answer = Answer(sample_id=sample_id, value=1, score=0.5, exit=1)
    return Answered(member=member(sample_id, opened), answer=answer)


# Which connections may call


@pytest.mark.parametrize(
    "word",
    [
        pytest.param(b"x" * 64, id="another"),
        pytest.param(b"", id="none"),
        pytest.param(b"short", id="short"),
        pytest.param(b"x" * 65, id="long"),
        pytest.param(encode(Begin(1, call_of("a"))), id="a-call"),
        pytest.param("wörd".encode("latin-1"), id="noise"),
    ],
)
async def test_a_connection_without_the_word_is_not_heard(scene: Scene, word: bytes) -> None:
    caller = await scene.caller(word, encode(Begin(1, call_of("a"))))
    await soon(caller.ended.wait())
    assert (caller.heard.empty(), scene.host.submitted.empty()) == (True, True)


async def test_what_no_ingress_says_ends_the_connection_and_forgets_its_calls(scene: Scene) -> None:
    caller = await scene.caller()
    caller.begin(1, "a")
    opened = await scene.opened()
    caller.frames.send(b"noise")
    await soon(caller.ended.wait())
    assert await soon(scene.host.forgotten.get()) is opened


async def test_a_plan_that_the_host_cannot_follow_ends_no_connection(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: Any) -> None:
        raise PlanError("a running replica keeps its exit records")

    monkeypatch.setattr(scene.host, "follow", refuse)
    caller = await scene.caller()
    caller.frames.send(encode(Host(call_of("a").assignment)))
    caller.begin(1, "a")
    await scene.opened()
    assert "cannot be followed" in caplog.text


# Calls


async def test_a_call_that_the_host_refuses_is_told_why_and_others_go_on(scene: Scene) -> None:
    caller = await scene.caller()
    scene.host.refuses = PlanError("no split holds block 2")
    caller.begin(1, "a")
    assert await soon(caller.heard.get()) == Refused(1, "PlanError('no split holds block 2')")
    scene.host.refuses = None
    caller.begin(2, "b")
    await scene.release(answers("b", await scene.opened()))
    assert await caller.part() == (2, "b")


# The end


async def test_a_reply_that_is_longer_than_the_connection_takes_at_once_is_whole_before_the_server_closes(
    scene: Scene,
) -> None:
    caller = await scene.caller()
    caller.begin(1, "a")
    opened = await scene.opened()
    reason = "x" * 20_000_000
    scene.server.deliver([Failed(member=member("a", opened), error=DeadlineError(reason))])
    await soon(scene.server.close())
    part = await soon(caller.heard.get())
    assert isinstance(part, Part)
    assert str(part.chunk.lost[0][1]) == reason
    await soon(caller.ended.wait())


async def silent_caller(scene: Scene) -> Caller:
    caller = Caller()
    loop = asyncio.get_running_loop()
    await loop.create_connection(lambda: caller.frames, scene.address.host, scene.address.port)
    return caller


async def test_a_connection_that_does_not_send_the_word_in_time_is_closed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.replica.host.WORD_WITHIN_S", 0.0)
    silent = await silent_caller(scene)
    await soon(silent.ended.wait())
    assert not scene.server.unknown


async def test_connections_that_have_not_sent_the_word_are_bounded(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = await scene.caller()
    monkeypatch.setattr("deployments.replica.host.MOST_UNKNOWN", 0)
    one_more = await silent_caller(scene)
    await soon(one_more.ended.wait())
    assert not known.ended.is_set()
