"""Coroutines on a simulated clock."""

from __future__ import annotations

import asyncio
from contextlib import closing

from simulator.events import Events
from simulator.fleet import SimulatedTime


async def test_it_runs_inside_of_another_event_loop_and_leaves_it_as_it_was() -> None:
    events, log = Events(), list[float]()
    outer = asyncio.get_running_loop()
    with closing(SimulatedTime(events)) as loop:

        async def tell() -> None:
            await asyncio.sleep(1.0)
            log.append(asyncio.get_running_loop().time())

        loop.create_task(tell())
        events.run_out()
    assert log == [1.0]
    assert asyncio.get_running_loop() is outer
