from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import httpx
import pytest

from deployments.api import state
from deployments.api.exchange import HttpRequest, RequestBodies
from deployments.api.http import build_api
from deployments.api.state import FAILURE_EVENT, PERIOD_S, LivePage, assets
from earlyexit.errors import OverloadedError
from tests.clock import ManualClock
from tests.deployments.ingress.dashboard.fake_service import FakeService
from tests.deployments.wire_fakes import turns

MOST_BYTES = 150_000


@pytest.fixture
def service() -> FakeService:
    return FakeService(max_viewers=1)


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(build_api(service, service.state, service.page))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


def test_the_page_is_small_and_self_contained() -> None:
    assert sum(map(len, assets().values())) <= MOST_BYTES
    text = b"".join(assets().values()).decode()
    loaded = re.findall(r'(?:src|href)="(?:dashboard/)([^"]+)"|from "\./([^"]+)"', text)
    assert {name for names in loaded for name in names if name} == set(assets()) - {"page.html"}
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}, "a namespace, never loaded"


async def test_the_page_and_its_files_may_load_from_nowhere_else(client: httpx.AsyncClient) -> None:
    for path in ["/dashboard", *(f"/dashboard/{name}" for name in assets() if name != "page.html")]:
        response = await client.get(path)
        assert response.status_code == 200, path
        policy = response.headers["content-security-policy"]
        assert ("default-src 'none'" in policy, "unsafe" in policy) == (True, False)
        assert response.headers["x-content-type-options"] == "nosniff"


async def test_only_the_pages_files_are_served_each_with_its_media_type(client: httpx.AsyncClient) -> None:
    kinds = {"": "text/html", "/page.js": "text/javascript", "/page.css": "text/css", "/icon.svg": "image/svg+xml"}
    for name, media_type in kinds.items():
        assert (await client.get(f"/dashboard{name}")).headers["content-type"].startswith(media_type)
    for name in ("page.html", "nothing.js", "..", "%2e%2e%2fpages.py"):
        assert (await client.get(f"/dashboard/{name}")).status_code == 404, name


@pytest.mark.parametrize(("path", "template"), [("/dashboard",) * 2, ("/dashboard/page.js", "/dashboard/{asset}")])
async def test_a_cached_file_is_answered_with_304(client: httpx.AsyncClient, path: str, template: str) -> None:
    etag = (await client.get(path)).headers["etag"]
    again = await client.get(path, headers={"if-none-match": etag})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    assert (await client.get(path, headers={"if-none-match": '"another"'})).status_code == 200
    assert "304" in (await client.get("/openapi.json")).json()["paths"][template]["get"]["responses"]


async def test_a_request_for_the_head_of_the_stream_gets_no_stream(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    response = await client.head("/dashboard/events")
    assert (response.status_code, len(service.page.viewers)) == (200, 0)
    assert response.headers["content-type"].startswith("text/event-stream")


class Viewer:
    """A client of the stream; `gone` is set when it disconnects."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self._sent: asyncio.Queue[Any] = asyncio.Queue()

    async def join(self, feed: LivePage) -> None:
        scope = {"type": "http", "method": "GET", "headers": []}
        stream: Any = await feed.events(HttpRequest(scope, self._receive, RequestBodies(0, 0)))
        self.streaming = asyncio.create_task(stream(scope, self._receive, self._sent.put))
        assert (await self._sent.get())["type"] == "http.response.start"
        await turns()

    async def event(self) -> bytes:
        """Returns the next event, or `the end`."""
        message = await self._sent.get()
        return message["body"] if message["more_body"] else b"the end"

    async def events(self) -> list[bytes]:
        """Returns the events that it got so far."""
        await turns()
        return [await self.event() for _ in range(self._sent.qsize())]

    async def _receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}


class Scene:
    """A feed with a manual clock: `sleep` returns once the clock was advanced that far. Every update is logged."""

    def __init__(self, *, max_viewers: int = 4, max_connected_s: float = 1e9) -> None:
        self.clock = ManualClock()
        self.log: list[str] = []
        self.takes_s = 0.0
        self.failing = False
        self.ending = False
        self._sleepers: list[tuple[float, asyncio.Event]] = []
        feed = partial(LivePage, self.produce, self.clock, sleep=self.sleep)
        self.feed = feed(max_viewers=max_viewers, max_connected_s=max_connected_s)

    async def joined(self) -> Viewer:
        viewer = Viewer()
        await viewer.join(self.feed)
        return viewer

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


@pytest.mark.parametrize("what", ["it leaves", "the page closes", "its request is cancelled"])
async def test_a_viewer_is_removed_however_its_stream_ends(what: str) -> None:
    scene = Scene()
    viewer = await scene.joined()
    if what == "it leaves":
        viewer.gone.set()
    elif what == "the page closes":
        scene.feed.close()
    elif what == "its request is cancelled":
        viewer.streaming.cancel()
    await turns()
    assert not scene.feed.viewers
    await scene.advance(1.0)
    await asyncio.wait_for(asyncio.wait([viewer.streaming]), timeout=5)
    ended = [] if what == "its request is cancelled" else [b"the end"]
    assert await viewer.events() == [b"state 0", *ended]


async def test_events_are_produced_only_while_there_are_viewers() -> None:
    scene = Scene()
    await scene.advance(3.0)
    assert scene.log == []
    viewer = await scene.joined()
    await scene.advance(2.0)
    viewer.gone.set()
    await scene.advance(5.0)
    assert scene.log == ["look at 3", "look at 4", "look at 5"]
    viewer = await scene.joined()
    await scene.advance(1.0)
    assert (scene.log[3:], await viewer.events()) == (["look at 10", "look at 11"], [b"state 10", b"state 11"])


async def test_viewers_share_events_and_a_later_one_sees_the_newest_at_once() -> None:
    scene = Scene()
    first = await scene.joined()
    await scene.advance(1.5)
    second = await scene.joined()
    assert [await first.events(), await second.events()] == [[b"state 0", b"state 1"], [b"state 1"]]
    await scene.advance(1.0)
    assert [await first.events(), await second.events()] == [[b"state 2"], [b"state 2"]]
    assert scene.log == ["look at 0", "look at 1", "look at 2"]


async def test_a_viewer_that_leaves_does_not_keep_others_from_an_event() -> None:
    scene = Scene()
    scene.takes_s = 1.0
    first, second = await scene.joined(), await scene.joined()
    first.streaming.cancel()
    await scene.advance(1.0)
    assert (scene.log[:1], await second.events()) == (["look at 0"], [b"state 1"])


async def test_a_page_that_closes_does_not_wait_for_an_update() -> None:
    scene = Scene()
    scene.takes_s = 1e6
    viewer = await scene.joined()
    scene.feed.close()
    assert await viewer.event() == b"the end"


async def test_slow_updates_do_not_overlap() -> None:
    scene = Scene()
    scene.takes_s = 0.5
    await scene.joined()
    await scene.advance(2.0)
    assert scene.log == ["look at 0", "look at 1", "look at 2"]
    scene.takes_s = 3 * PERIOD_S
    await scene.advance(6.0)
    assert scene.log[3:] == ["look at 3", "look at 6"]


async def test_viewers_get_an_event_if_an_update_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "POLL_TIMEOUT_S", 0.01)
    scene = Scene()
    scene.takes_s = 1e6
    assert await (await scene.joined()).event() == FAILURE_EVENT


async def test_too_many_viewers_are_refused_until_one_leaves() -> None:
    scene = Scene(max_viewers=2)
    first, _ = await scene.joined(), await scene.joined()
    with pytest.raises(OverloadedError, match="the page of this ingress has 2 viewers already"):
        await scene.joined()
    first.gone.set()
    await turns()
    await scene.joined()
    assert len(scene.feed.viewers) == 2


async def test_a_closed_feed_ends_its_viewers_and_accepts_no_more() -> None:
    scene = Scene()
    viewer = await scene.joined()
    await scene.advance(1.0)
    scene.ending = True
    await scene.advance(1.0)
    assert await viewer.events() == [b"state 0", b"state 1", b"the end"]
    with pytest.raises(OverloadedError, match="this ingress is shutting down"):
        await scene.joined()
    await scene.advance(3.0)
    assert scene.log == ["look at 0", "look at 1", "look at 2"]


async def test_a_failed_update_is_shown_until_the_next_one_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    scene.failing = True
    with caplog.at_level(logging.ERROR):
        viewer = await scene.joined()
    assert await viewer.events() == [FAILURE_EVENT]
    assert "the live page could not be updated" in caplog.text
    scene.failing = False
    await scene.advance(1.0)
    assert await viewer.events() == [b"state 1"]


async def test_a_viewer_must_reconnect_after_a_while() -> None:
    scene = Scene(max_connected_s=15.0)
    early = await scene.joined()
    await scene.advance(6.0)
    late = await scene.joined()
    await scene.advance(14.0)
    assert (await early.events())[-1] == b"the end"
    assert (await late.events())[-1] == b"state 20"
