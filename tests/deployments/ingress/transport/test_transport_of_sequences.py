"""Which replica takes the inputs of sequences."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from deployments.ingress.core.routes import KVPlacement
from tests.deployments.ingress.transport.transport_scene import Slot
from tests.deployments.wire_fakes import soon


@pytest.fixture
async def slot() -> AsyncIterator[Slot]:
    slot = Slot()
    yield slot
    await slot.end()


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


async def test_a_sequence_that_is_over_is_ended_once_and_makes_room(slot: Slot) -> None:
    await slot.has("a", "b")
    _, first = await slot.begun(1, 2, 3)
    _, second = await slot.begun(4)
    slot.transport.end(first, 1)
    slot.transport.end(first, 1)
    slot.transport.end(first, 2)
    slot.transport.end("gone", 3)
    over = slot.replicas[first].over
    assert [await soon(over.get()), await soon(over.get()), over.empty()] == [(1,), (2,), True]
    [[home], again] = await slot.begun(5)
    assert {again, (await slot.begun(6, 7))[1]} <= {first, second}
    slot.transport.end(again, home.number)
    assert await soon(slot.replicas[again].over.get()) == (5,)


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
