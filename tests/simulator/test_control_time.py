"""Coroutines on a simulated clock."""

from __future__ import annotations

import asyncio
from contextlib import closing

from simulator.events import COMES, ENDS, Events
from simulator.fleet import SimulatedTime


def test_sleepers_wake_among_events_after_the_work_of_the_same_moment() -> None:
    events, log = Events(), list[str]()
    with closing(SimulatedTime(events)) as loop:

        async def look() -> None:
            for _ in range(2):
                await asyncio.sleep(1.5)
                log.append(f"{events.time_s} looks")

        loop.create_task(look())
        for time_s in (1.0, 1.5, 3.0):
            events.at(time_s, ENDS, lambda _: log.append(f"{events.time_s} ends"))
        events.run_out()
    assert log == ["1.0 ends", "1.5 ends", "1.5 looks", "3.0 ends", "3.0 looks"]


def test_a_cancelled_sleeper_never_wakes() -> None:
    events, log = Events(), list[str]()
    with closing(SimulatedTime(events)) as loop:

        async def sleeper() -> None:
            await asyncio.sleep(5.0)
            log.append("woke")

        task = loop.create_task(sleeper())
        events.at(1.0, COMES, lambda _: log.append(f"cancelled: {task.cancel()}"))
        events.run_out()
        assert task.cancelled()
    assert log == ["cancelled: True"]


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
