from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.deployments.ingress.transport.transport_scene import Slot
from tests.deployments.wire_fakes import answered, soon, turns


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
