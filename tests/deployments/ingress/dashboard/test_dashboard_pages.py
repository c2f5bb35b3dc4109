from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from deployments.api import state
from deployments.api.http import build_api
from deployments.api.state import FAILURE_EVENT, PERIOD_S, LivePage, Viewer, assets
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
    transport = httpx.ASGITransport(build_api(service, service.state, service.page).router)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


def test_the_whole_page_is_small() -> None:
    assert sum(map(len, assets().values())) <= MOST_BYTES


def test_the_page_loads_only_files_that_are_served_with_it() -> None:
    text = b"".join(assets().values()).decode()
    loaded = re.findall(r'(?:src|href)="(?:dashboard/)([^"]+)"|from "\./([^"]+)"', text)
    assert {name for names in loaded for name in names if name} == set(assets()) - {"page.html"}
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}, "a namespace, never loaded"


async def test_the_page_and_its_files_may_load_from_nowhere_else(client: httpx.AsyncClient) -> None:
    for path in ["/dashboard", *(f"/dashboard/{name}" for name in assets() if name != "page.html")]:
        response = await client.get(path)
        assert response.status_code == 200, path
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"


async def test_files_have_their_media_type_and_others_are_not_found(client: httpx.AsyncClient) -> None:
    kinds = {"": "text/html", "/page.js": "text/javascript", "/page.css": "text/css", "/icon.svg": "image/svg+xml"}
    for name, media_type in kinds.items():
        assert (await client.get(f"/dashboard{name}")).headers["content-type"].startswith(media_type)
    for name in ("page.html", "nothing.js", "..", "%2e%2e%2fpages.py"):
        assert (await client.get(f"/dashboard/{name}")).status_code == 404, name


async def test_a_cached_file_is_answered_with_304(client: httpx.AsyncClient) -> None:
    etag = (await client.get("/dashboard/page.js")).headers["etag"]
    again = await client.get("/dashboard/page.js", headers={"if-none-match": etag})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    other = await client.get("/dashboard/page.js", headers={"if-none-match": '"another"'})
    assert other.status_code == 200


async def test_a_request_for_the_head_of_the_stream_gets_no_stream(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    response = await client.head("/dashboard/events")
    assert (response.status_code, len(service.page.viewers)) == (200, 0)
    assert response.headers["content-type"].startswith("text/event-stream")


class Connection:
    """An ASGI request for the stream; `gone` is set when the client disconnects."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self._is_new = True

    async def receive(self) -> dict[str, Any]:
        if self._is_new:
            self._is_new = False
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)


@pytest.mark.parametrize("what", ["it leaves", "it is let go", "its request is cancelled"])
async def test_a_viewer_is_removed_however_its_stream_ends(what: str) -> None:
    scene, connection = Scene(), Connection()
    scope = {"type": "http", "method": "GET", "headers": []}
    await connection.receive()  # the request's body was read
    stream = await scene.feed.events(Request(scope, connection.receive))
    streaming = asyncio.create_task(stream(scope, connection.receive, connection.send))
    await turns()
    [viewer] = scene.feed.viewers
    if what == "it leaves":
        connection.gone.set()
    elif what == "it is let go":
        scene.feed.leave(viewer)
    elif what == "its request is cancelled":
        streaming.cancel()
    await asyncio.wait_for(asyncio.wait([streaming]), timeout=5)
    assert viewer not in scene.feed.viewers
    if what == "it is let go":
        assert connection.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


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
    """Returns the event that the viewer gets at once, or None."""
    waiting = asyncio.ensure_future(viewer.get())
    await turns()
    if waiting.done():
        return waiting.result() or b"the end"
    waiting.cancel()
    return None


async def test_events_are_produced_only_while_there_are_viewers() -> None:
    scene = Scene()
    await scene.advance(3.0)
    assert scene.log == []
    viewer = scene.feed.join()
    await scene.advance(2.0)
    scene.feed.leave(viewer)
    await scene.advance(5.0)
    assert scene.log == ["look at 3", "look at 4", "look at 5"]
    assert len(scene.feed.viewers) == 0
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


async def test_slow_updates_do_not_overlap() -> None:
    scene = Scene()
    scene.takes_s = 0.5
    scene.feed.join()
    await scene.advance(2.0)
    assert scene.log == ["look at 0", "look at 1", "look at 2"]
    scene.takes_s = 3 * PERIOD_S
    await scene.advance(6.0)
    assert scene.log[3:] == ["look at 3", "look at 6"]


async def test_viewers_get_an_event_if_an_update_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "POLL_TIMEOUT_S", 0.01)
    scene = Scene()
    scene.takes_s = 1e6
    viewer = scene.feed.join()
    assert await viewer.get() == FAILURE_EVENT


async def test_too_many_viewers_are_refused_until_one_leaves() -> None:
    scene = Scene(max_viewers=2)
    first, _ = scene.feed.join(), scene.feed.join()
    with pytest.raises(OverloadedError, match="the page of this ingress has 2 viewers already"):
        scene.feed.join()
    scene.feed.leave(first)
    scene.feed.leave(first)
    assert scene.feed.join() is not None
    assert len(scene.feed.viewers) == 2


async def test_a_closed_feed_ends_its_viewers_and_accepts_no_more() -> None:
    scene = Scene()
    viewer = scene.feed.join()
    await scene.advance(1.0)
    scene.ending = True
    await scene.advance(1.0)
    assert await taken(viewer) == b"the end"
    with pytest.raises(OverloadedError, match="this ingress is shutting down"):
        scene.feed.join()
    await scene.advance(3.0)
    assert scene.log == ["look at 0", "look at 1", "look at 2"]


async def test_a_failed_update_is_logged_and_shown_and_the_next_may_succeed(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    scene.failing = True
    viewer = scene.feed.join()
    with caplog.at_level(logging.ERROR):
        await scene.advance(0.5)
    assert await taken(viewer) == FAILURE_EVENT
    assert "the live page could not be updated" in caplog.text
    scene.failing = False
    await scene.advance(1.0)
    assert await taken(viewer) == b"state 1"


async def test_a_viewer_must_reconnect_after_a_while() -> None:
    scene = Scene(max_connected_s=15.0)
    early = scene.feed.join()
    await scene.advance(6.0)
    late = scene.feed.join()
    await scene.advance(14.0)
    assert await taken(early) == b"the end"
    assert await taken(late) == b"state 20"
