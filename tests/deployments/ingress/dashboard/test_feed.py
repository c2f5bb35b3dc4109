from __future__ import annotations

import asyncio
import logging

import pytest

from deployments.api.live_page import BEAT, HEARTBEAT_S, PERIOD_S, TROUBLE, Feed, Viewer
from earlyexit.clock import ManualClock
from earlyexit.errors import OverloadedError
from tests.deployments.wire_fakes import turns


class Scene:
    """A feed on a manual clock: `sleep` returns when the clock was advanced that far; every production is logged."""

    def __init__(self, *, most_viewers: int = 4, longest_s: float = 1e9) -> None:
        self.clock = ManualClock()
        self.log: list[str] = []
        self.takes_s = 0.0
        self.failing = False
        self.ending = False
        self._sleepers: list[tuple[float, asyncio.Event]] = []
        self.feed = Feed(self.produce, self.clock, sleep=self.sleep, most_viewers=most_viewers, longest_s=longest_s)

    async def sleep(self, seconds: float) -> None:
        if not seconds:
            return
        woken = asyncio.Event()
        self._sleepers.append((self.clock.now_s() + seconds, woken))
        await woken.wait()

    async def produce(self) -> bytes | None:
        self.log.append(f"look at {self.clock.now_s():g}")
        if self.takes_s:
            await self.sleep(self.takes_s)
        if self.failing:
            raise ValueError("no figures")
        return None if self.ending else f"state {self.clock.now_s():g}".encode()

    async def advance(self, seconds: float, *, step_s: float = 0.5) -> None:
        until_s = self.clock.now_s() + seconds
        await turns()
        while self.clock.now_s() < until_s:
            self.clock.advance(step_s)
            for sleeper in [each for each in self._sleepers if each[0] <= self.clock.now_s()]:
                self._sleepers.remove(sleeper)
                sleeper[1].set()
            await turns()


async def taken(viewer: Viewer) -> bytes | None:
    """What the viewer gets at once; None for nothing."""
    waiting = asyncio.ensure_future(anext(viewer, b"the end"))
    await turns()
    if waiting.done():
        return waiting.result()
    waiting.cancel()
    return None


async def test_nothing_is_produced_before_anybody_looks_or_after_the_last_has_left() -> None:
    scene = Scene()
    await scene.advance(3.0)
    assert scene.log == []
    viewer = scene.feed.join()
    await scene.advance(2.0)
    viewer.leave()
    await scene.advance(5.0)
    assert scene.log == ["look at 3", "look at 4", "look at 5"]
    assert scene.feed.num_viewers == 0
    viewer = scene.feed.join()
    await scene.advance(1.0)
    assert (scene.log[3:], await taken(viewer)) == (["look at 10", "look at 11"], b"state 11")


async def test_one_producer_serves_all_viewers_and_a_later_one_sees_the_newest_at_once() -> None:
    scene = Scene()
    first = scene.feed.join()
    await scene.advance(1.5)
    second = scene.feed.join()
    assert [await taken(first), await taken(second)] == [b"state 1", b"state 1"]
    await scene.advance(1.0)
    assert [await taken(first), await taken(second)] == [b"state 2", b"state 2"]
    assert scene.log == ["look at 0", "look at 1", "look at 2"]


async def test_looks_that_take_long_begin_a_period_apart_and_never_overlap() -> None:
    scene = Scene()
    scene.takes_s = 0.5
    scene.feed.join()
    await scene.advance(2.0)
    assert scene.log == ["look at 0", "look at 1", "look at 2"]
    scene.takes_s = 3 * PERIOD_S
    await scene.advance(6.0)
    assert scene.log[3:] == ["look at 3", "look at 6"]


async def test_where_there_is_no_news_viewers_get_a_heartbeat() -> None:
    scene = Scene()
    scene.takes_s = 1e6
    viewer = scene.feed.join()
    await scene.advance(HEARTBEAT_S - 0.5)
    assert await taken(viewer) is None
    await scene.advance(0.5)
    assert await taken(viewer) == BEAT
    busy = Scene()
    viewer = busy.feed.join()
    await busy.advance(HEARTBEAT_S)
    assert await taken(viewer) == b"state 10", "a heartbeat never takes the place of news"


async def test_too_many_viewers_are_refused_until_one_leaves() -> None:
    scene = Scene(most_viewers=2)
    first, _ = scene.feed.join(), scene.feed.join()
    with pytest.raises(OverloadedError, match="2 look at the page of this ingress already"):
        scene.feed.join()
    first.leave()
    first.leave()
    assert scene.feed.join() is not None
    assert scene.feed.num_viewers == 2


async def test_when_the_ingress_ends_viewers_end_and_no_more_are_taken() -> None:
    scene = Scene()
    viewer = scene.feed.join()
    await scene.advance(1.0)
    scene.ending = True
    await scene.advance(1.0)
    assert await taken(viewer) == b"the end"
    with pytest.raises(OverloadedError, match="this ingress ends"):
        scene.feed.join()
    await scene.advance(3.0)
    assert scene.log == ["look at 0", "look at 1", "look at 2"]


async def test_a_look_that_fails_is_logged_and_told_and_the_next_may_succeed(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    scene.failing = True
    viewer = scene.feed.join()
    with caplog.at_level(logging.ERROR):
        await scene.advance(0.5)
    assert await taken(viewer) == TROUBLE
    assert "the live page has no news" in caplog.text
    scene.failing = False
    await scene.advance(1.0)
    assert await taken(viewer) == b"state 1"


async def test_a_viewer_is_asked_to_come_again_after_a_while() -> None:
    scene = Scene(longest_s=15.0)
    early = scene.feed.join()
    await scene.advance(6.0)
    late = scene.feed.join()
    await scene.advance(14.0)
    assert await taken(early) == b"the end"
    assert await taken(late) == b"state 20"
