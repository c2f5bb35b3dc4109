from __future__ import annotations

import asyncio
import logging

import pytest

from deployments.process_setup import Supervised


async def fail() -> None:
    raise LookupError("no plan")


async def test_a_background_task_that_ends_by_an_error_is_logged_and_fails_the_health_check(
    caplog: pytest.LogCaptureFixture,
) -> None:
    background, goes_on = Supervised(), asyncio.Event()
    background.start("wait", goes_on.wait())
    background.check()
    with caplog.at_level(logging.ERROR):
        background.start("learn the plan", fail())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match=r"the background task 'learn the plan' has ended: LookupError\('no plan'\)"):
        background.check()
    assert [record.getMessage() for record in caplog.records] == ["the background task 'learn the plan' has ended"]
    goes_on.set()


async def test_a_background_task_that_is_done_fails_nothing() -> None:
    background = Supervised()
    background.start("start", asyncio.sleep(0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    background.check()
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "start"]
