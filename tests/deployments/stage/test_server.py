"""A replica's server, and the replies that a host makes from its device's releases."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any, cast

import numpy as np
import pytest
import torch

from cluster.emulated import EmulatedPiece
from deployments.replica.host import CallServer, OpenCall, StageHost, chunks_by_call, split_runs
from deployments.wire.messages import SILENT_S, Address, CallRefused, Chunk, ReplyPart, SplitRun, encode
from earlyexit.engine.device import Answered, Failed, Observed, Release, Survivors
from earlyexit.engine.queue import Member
from earlyexit.errors import DeadlineError, PlanError
from earlyexit.named import HopDtype
from earlyexit.network.boundary import Answer
from earlyexit.network.piece import Piece
from tests.deployments.wire_fakes import LOOPBACK, Caller, FakeHost, call_of, piece_of, soon, turns


class Scene:
    """A server with a fake host, whose device's releases the test gives."""

    def __init__(self) -> None:
        self.host = FakeHost()
        self.server = CallServer()
        self.address = Address(host="", port=0, token="")
        self._callers: list[Caller] = []

    async def listen(self) -> None:
        self.address = await self.server.listen(cast(StageHost, self.host), LOOPBACK)

    async def caller(self, *first: bytes) -> Caller:
        """Returns a connected caller, which has sent the token unless `first` differs."""
        caller = Caller()
        await caller.connect(self.address, *first)
        self._callers.append(caller)
        return caller

    async def opened(self) -> OpenCall:
        """Returns the next call that the host received."""
        _, opened = await soon(self.host.submitted.get())
        return opened

    async def release(self, *releases: Release[Any]) -> None:
        """Delivers releases from another thread, like the device."""
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


# Authentication of connections


@pytest.mark.parametrize(
    "word",
    [
        pytest.param(b"x" * 64, id="another"),
        pytest.param(b"", id="none"),
        pytest.param(b"short", id="short"),
        pytest.param(b"x" * 65, id="long"),
        pytest.param(encode(call_of("a")), id="a-call"),
        pytest.param("wörd".encode("latin-1"), id="noise"),
    ],
)
async def test_a_connection_without_the_token_is_closed(scene: Scene, word: bytes) -> None:
    caller = await scene.caller(word, encode(call_of("a")))
    await soon(caller.ended.wait())
    assert (caller.heard.empty(), scene.host.submitted.empty()) == (True, True)


async def test_a_malformed_message_ends_the_connection_with_its_calls(scene: Scene) -> None:
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
    caller.begin(1, "a")
    await scene.opened()
    assert "cannot be followed" in caplog.text


async def test_both_ends_notice_a_machine_that_is_silent(scene: Scene) -> None:
    caller = await scene.caller()
    while not scene.server.connections:
        await turns()
    [connection] = scene.server.connections
    for frames in (caller.frames, connection.frames):
        assert frames._transport is not None
        end = frames._transport.get_extra_info("socket")
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if sys.platform == "linux":
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * SILENT_S


# Calls


async def test_a_call_that_the_host_refuses_fails_alone_with_the_reason(scene: Scene) -> None:
    caller = await scene.caller()
    scene.host.refuses = PlanError("no split holds block 2")
    caller.begin(1, "a")
    assert await soon(caller.heard.get()) == CallRefused(1, "PlanError('no split holds block 2')")
    scene.host.refuses = None
    caller.begin(2, "b")
    await scene.release(answers("b", await scene.opened()))
    assert await caller.part() == (2, "b")


# The end


async def test_a_server_that_closes_still_replies_until_the_ingress_disconnects(scene: Scene) -> None:
    caller = await scene.caller()
    caller.begin(1, "a")
    opened = await scene.opened()
    closing = asyncio.create_task(scene.server.close())
    reason = "x" * 20_000_000  # more than the connection takes at once
    scene.server.deliver([Failed(member=member("a", opened), error=DeadlineError(reason))])
    part = await soon(caller.heard.get())
    assert isinstance(part, ReplyPart)
    assert str(part.chunk.lost[0][1]) == reason
    caller.begin(2, "b")
    await scene.release(answers("b", await scene.opened()))
    assert await caller.part() == (2, "b")
    assert not closing.done()
    caller.frames.close()
    await soon(closing)
    await soon(caller.ended.wait())


async def silent_caller(scene: Scene) -> Caller:
    caller = Caller()
    loop = asyncio.get_running_loop()
    await loop.create_connection(lambda: caller.frames, scene.address.host, scene.address.port)
    return caller


async def test_the_number_of_connections_without_the_token_is_limited(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = await scene.caller()
    with monkeypatch.context() as patched:
        patched.setattr("deployments.replica.host.TOKEN_TIMEOUT_S", 0.0)
        await soon((await silent_caller(scene)).ended.wait())
    assert all(each.is_known for each in scene.server.connections)
    monkeypatch.setattr("deployments.replica.host.MOST_UNKNOWN", 0)
    await soon((await silent_caller(scene)).ended.wait())
    assert not known.ended.is_set()


# Replies from a device's releases

HIDDEN = torch.tensor([[0.1], [70_000.0]])


def unheard(chunk: Chunk) -> None:
    raise AssertionError("parts are made here, not said")


@pytest.mark.parametrize(
    ("hop_dtype", "expected"),
    [("same", HIDDEN.numpy()), ("float16", np.array([[0.1], [65504.0]], dtype=np.float16))],
    ids=["same", "float16"],
)
def test_hidden_states_are_sent_in_the_hop_dtype(
    hop_dtype: HopDtype, expected: np.ndarray[tuple[int, ...], np.dtype[np.generic]]
) -> None:
    piece = Piece(
        sample_ids=("a", "x"),
        next_block=1,
        lengths_B=np.ones(2, dtype=np.int32),
        tensors=(HIDDEN,),
        state_BS=torch.zeros(2, 0),
    )
    one, other = OpenCall(2, unheard), OpenCall(2, unheard)
    for origins in ((one, other), (one, one)):
        members: list[Member[Any]] = [
            Member(sample_id=name, payload=single, origin=opened)
            for name, single, opened in zip("ax", piece.singles(), origins, strict=True)
        ]
        release: Survivors[Any] = Survivors(members=tuple(members), piece=piece)
        found = [each.survivors for _, each in chunks_by_call([release], hop_dtype)]
        values = np.concatenate([survivors.tensors[0] for survivors in found if survivors is not None])
        assert values.dtype == expected.dtype
        assert np.array_equal(values, expected)


def test_observations_come_no_later_than_the_part_that_ends_the_call() -> None:
    ids, lengths_B = ("a", "x"), np.ones(2, dtype=np.int32)
    both = Piece(sample_ids=ids, next_block=1, lengths_B=lengths_B, tensors=(HIDDEN,), state_BS=torch.zeros(2, 0))
    opened = OpenCall(2, unheard)
    a, x = (Member(sample_id=each.sample_ids[0], payload=each, origin=opened) for each in both.singles())
    seen = Answer(sample_id="a", exit=3, score=0.25, value=7)
    releases: list[Release[Any]] = [
        Survivors(members=(x,), piece=x.payload),
        Answered(member=a, answer=Answer(sample_id="a", value=3, score=0.5, exit=1)),
        Observed(member=a, seen=seen),
    ]
    [(_, chunk), (_, last)] = chunks_by_call(releases)
    assert (chunk.seen, chunk.settled) == ((seen,), ("a",))
    assert last.survivors is not None
    assert last.survivors.sample_ids == ("x",)


def run(first: int, end: int, queue_s: float, compute_s: float) -> SplitRun:
    return SplitRun(first=first, end=end, batch=3, tokens=3, target=4, queue_s=queue_s, compute_s=compute_s)


def test_the_times_of_an_input_are_divided_between_its_batches() -> None:
    noted = [run(0, 2, 1.0, 0.0), run(2, 3, 1.5, 4.0), run(3, 4, 3.5, 5.0)]
    assert split_runs(noted, 7.0) == (run(0, 2, 1.0, 4.0), run(2, 3, 0.5, 1.0), run(3, 4, 2.0, 2.0))
    assert split_runs([], 0.0) == ()
    noted = [run(0, 2, 1.0, 0.0), run(0, 2, 1.0, 0.0)]
    assert split_runs(noted, 3.0) == (run(0, 2, 1.0, 0.0), run(0, 2, 0.0, 3.0))
