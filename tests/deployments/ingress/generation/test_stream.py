"""What a reader of a sequence gets, and when."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from deployments.api.generation import Stream
from earlyexit.sequences.sequence import Chosen, Ended, Said


def said(token: int, ended: Ended | None = None) -> Said:
    return Said(chosen=Chosen(token, -0.5), text=f"<{token}>", ended=ended, exit=1)


async def tokens_of(stream: Stream) -> list[int]:
    return [each.chosen.token async for each in stream]


async def test_a_reader_has_a_token_a_turn_after_it_came() -> None:
    stream = Stream(1)
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    stream.put(said(1))
    await asyncio.sleep(0)
    assert reader.done()


async def test_whoever_stops_reading_aborts_once_and_nothing_comes_after() -> None:
    aborted: list[str] = []
    stream = Stream(1)
    stream.when_aborted = lambda: aborted.append("told")
    stream.put(said(1))
    async with aclosing(stream) as reading:
        await anext(reading)
    stream.abort()
    stream.put(said(2))
    assert (aborted, await tokens_of(stream)) == (["told"], [])


async def test_an_abort_ends_who_waits_and_after_the_end_it_is_nothing() -> None:
    aborted: list[str] = []
    stream, over = Stream(1), Stream(1)
    over.when_aborted = lambda: aborted.append("told")
    reader = asyncio.create_task(tokens_of(stream))
    await asyncio.sleep(0)
    stream.abort()
    over.put(said(1, "length"))
    over.abort()
    assert (await reader, aborted) == ([], [])
