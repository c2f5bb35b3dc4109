from __future__ import annotations

import asyncio
import gc
import logging
import weakref

import pytest

from deployments.process_setup import Supervised, settle


async def fail() -> None:
    raise LookupError("no plan")


async def test_a_background_task_that_ends_by_an_error_fails_the_health_check(caplog: pytest.LogCaptureFixture) -> None:
    background, goes_on = Supervised(), asyncio.Event()
    background.start("wait", goes_on.wait())
    background.start("start", asyncio.sleep(0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    background.check()
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "start"]
    with caplog.at_level(logging.ERROR):
        background.start("learn the plan", fail())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match=r"the background task 'learn the plan' has ended: LookupError\('no plan'\)"):
        background.check()
    assert [record.getMessage() for record in caplog.records] == ["the background task 'learn the plan' has ended"]
    goes_on.set()


class Ring:
    def __init__(self) -> None:
        self.me = self


def test_what_is_there_is_looked_at_no_more_what_comes_later_is_and_what_cannot_be_reached_is_not_kept() -> None:
    early: list[object] = []
    lost = weakref.ref(Ring())
    settle()
    try:
        late: list[object] = [early]
        looked_at = {id(each) for each in gc.get_objects()}
        assert (id(early) in looked_at, id(late) in looked_at, lost()) == (False, True, None)
    finally:
        gc.unfreeze()
