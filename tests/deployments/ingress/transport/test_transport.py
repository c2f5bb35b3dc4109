from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import pytest

from deployments.ingress.link import LinkTransport
from deployments.replica.call_server import CallServer
from deployments.replica.host import StageHost
from deployments.wire.directory import ReplicaDirectory
from earlyexit.engine.queue import Member
from earlyexit.engine.release import Told
from earlyexit.network.wire import Answer
from tests.deployments.ingress.transport.transport_scene import Call, Slot
from tests.deployments.wire_fakes import LOOPBACK, FakeHost, answered, call_of, soon, turns


@pytest.fixture
async def slot() -> AsyncIterator[Slot]:
    slot = Slot()
    yield slot
    await slot.end()


async def test_a_call_goes_to_the_slots_replica_and_its_parts_come_back(slot: Slot) -> None:
    await slot.has("a")
    call, asked = await slot.sent("xy")
    assert (asked.replica, asked.names, asked.call.remaining_s) == ("a", "xy", call_of("xy").remaining_s)
    asked.say(answered("y"))
    asked.say(answered("x"))
    await soon(call.task)
    assert call.names == ["y", "x"]


async def test_calls_wait_for_a_replica_where_there_is_none(slot: Slot) -> None:
    calls = [slot.call("x"), slot.call("y")]
    await turns()
    assert [call.task.done() for call in calls] == [False, False]
    await slot.has("a")
    for _ in calls:
        (await slot.asked()).answer()
    for call in calls:
        await soon(call.task)


async def test_calls_wait_again_when_the_last_replica_has_gone(slot: Slot) -> None:
    await slot.has("a")
    call, asked = await slot.sent("x")
    asked.answer()
    await soon(call.task)
    await slot.has()
    await soon(slot.replicas["a"].ended.get())
    waiting = slot.call("y")
    await turns()
    assert (waiting.task.done(), slot.is_mute) == (False, True)
    await slot.has("b")
    assert (await slot.asked()).replica == "b"


async def test_a_replica_that_does_not_answer_its_port_gets_no_calls(slot: Slot) -> None:
    slot.make("mute")
    await slot.announce("mute")
    first, second = slot.call("x"), slot.call("y")
    await slot.has("mute", "b")
    assert {(await slot.asked()).replica, (await slot.asked()).replica} == {"b"}
    assert (first.task.done(), second.task.done()) == (False, False)


async def test_a_call_that_is_given_up_while_it_waits_reaches_nobody(slot: Slot) -> None:
    given_up, other = slot.call("x"), slot.call("y")
    await turns()
    given_up.task.cancel()
    await slot.has("a")
    assert (await slot.asked()).names == "y"
    assert not other.task.done()


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


async def test_what_a_call_began_with_is_a_load_until_its_end(slot: Slot) -> None:
    await slot.has("a", "b")
    call, first = await slot.sent("xyz")
    _, second = await slot.sent("xy")
    first.say(answered("xy"))
    other = await slot.taker("x")  # 3 and 2 of 4: the fuller one
    assert (other, call.task.done()) == (first.replica, False)
    assert await slot.taker("x") == second.replica


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


async def test_loads_stay_as_they_are_while_replicas_come_and_go(slot: Slot) -> None:
    await slot.has("a")
    call, asked = await slot.sent("xyz")
    await slot.has("a", "b")
    assert await slot.taker("x") == "b"  # idle
    assert await slot.taker("x") == "a"  # 4 and 1 now
    await slot.has("a", "b", "c")
    assert await slot.taker("x") == "c"
    await slot.has("a", "b")
    assert [await slot.taker("x"), await slot.taker("x")] == ["b", "b"]  # 4 and 3 now
    asked.answer()
    await soon(call.task)
    assert await slot.taker("x") == "b"  # 1 and 4 now
    assert await slot.taker("x") == "a"


async def test_avoided_replicas_are_left_out_while_there_are_others(slot: Slot) -> None:
    await slot.has("a", "b", "c")
    assert {await slot.taker("x", avoided=("a", "b", "elsewhere")) for _ in range(5)} == {"c"}
    assert {await slot.taker("x", avoided=("b",)) for _ in range(4)} == {"a"}  # c is at its second batch
    assert await slot.taker("x") == "b"  # idle, and no longer avoided


async def test_avoided_replicas_get_calls_where_there_are_no_others(slot: Slot) -> None:
    await slot.has("a", "b")
    assert {await slot.taker("x", avoided=("a", "b")), await slot.taker("x", avoided=("a", "b"))} == {"a", "b"}
    await slot.has("a")
    assert await slot.taker("x", avoided=("a",)) == "a"
    await slot.has("a", "c")
    assert await slot.taker("x", avoided=("a",)) == "c"


async def test_another_choice_of_avoided_replicas_forgets_no_load(slot: Slot) -> None:
    await slot.has("a", "b")
    assert await slot.taker("xyz", avoided=("b",)) == "a"
    assert await slot.taker("x", avoided=("a",)) == "b"
    assert await slot.taker("x") == "a"  # 3 and 1 of 4: the fuller one
    assert await slot.taker("x") == "b"


# Coming and going


async def test_a_replica_that_dies_fails_its_calls_and_gets_no_more(slot: Slot) -> None:
    await slot.has("a", "b")
    (one, first), (other, second) = await slot.sent("x"), await slot.sent("y")
    slot.replicas[first.replica].die()
    with pytest.raises(ConnectionError, match=first.replica):
        await soon(one.task)
    assert {await slot.taker("x"), await slot.taker("x")} == {second.replica}
    second.answer()
    await soon(other.task)


async def test_a_replica_that_is_reached_again_is_as_idle_as_it_is(slot: Slot) -> None:
    await slot.has("a", "b")
    one, first = await slot.sent("wxyz")
    await slot.sent("y")
    again = slot.replicas[first.replica]
    again.drop()
    with pytest.raises(ConnectionError):
        await soon(one.task)
    await soon(again.words.get())
    assert await slot.taker("x") == first.replica


async def test_a_replica_that_is_no_longer_announced_ends_its_calls_and_gets_no_more(slot: Slot) -> None:
    await slot.has("a")
    call, asked = await slot.sent("xy")
    await slot.has("b")
    assert {await slot.taker("x"), await slot.taker("x")} == {"b"}
    asked.say(answered("x"))
    assert slot.replicas["a"].ended.empty()
    asked.say(answered("y"))
    await soon(call.task)
    await soon(slot.replicas["a"].ended.get())
    assert call.names == ["x", "y"]


async def test_what_was_announced_before_the_transport_follows_is_known() -> None:
    slot = Slot()
    await slot.has("a")
    late = LinkTransport(phase=0.5)
    late.follow(slot.board)
    call = Call(late, "x", ())
    (await slot.asked()).answer()
    await soon(call.task)
    assert call.names == ["x"]
    await slot.end()


async def test_a_transport_and_a_replicas_server_understand_each_other() -> None:
    host, board, transport = FakeHost(), ReplicaDirectory(), LinkTransport(phase=0.0)
    server = CallServer(asyncio.get_running_loop())
    address = await server.listen(cast(StageHost, host), LOOPBACK)
    transport.follow(board)
    board.announce({"a": address})
    answered_call, given_up = Call(transport, "xy", ()), Call(transport, "z", ())
    opened = {call.piece.sample_ids: opened for call, opened in [await soon(host.submitted.get()) for _ in range(2)]}
    given_up.task.cancel()
    assert await soon(host.forgotten.get()) is opened["z",]
    board.announce({})
    closing = asyncio.create_task(server.close())
    for sample_id in "xy":
        member = Member(sample_id=sample_id, payload=None, origin=opened["x", "y"])
        answer = Answer(sample_id=sample_id, value=1, score=0.5, exit=1)
        await asyncio.to_thread(server.deliver, [Told(member=member, answer=answer)])
    await soon(answered_call.task)
    assert answered_call.names == ["x", "y"]
    await soon(closing)
    await turns()
