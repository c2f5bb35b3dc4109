from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from deployments.api.events import Departure, EventStream
from deployments.api.http import build_api
from deployments.api.live_page import Viewer, assets
from tests.deployments.ingress.dashboard.fake_service import FakeService
from tests.deployments.wire_fakes import turns

MOST_BYTES = 150_000


@pytest.fixture
def service() -> FakeService:
    return FakeService(most_viewers=1)


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(build_api(service).router)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


def test_the_whole_page_is_small() -> None:
    assert sum(len(asset.content) for asset in assets().values()) <= MOST_BYTES


def test_the_page_loads_only_files_that_are_served_with_it() -> None:
    text = "".join(asset.content.decode() for asset in assets().values())
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


async def test_files_have_their_media_type_and_others_are_not_there(client: httpx.AsyncClient) -> None:
    kinds = {"": "text/html", "/page.js": "text/javascript", "/page.css": "text/css", "/icon.svg": "image/svg+xml"}
    for name, media_type in kinds.items():
        assert (await client.get(f"/dashboard{name}")).headers["content-type"].startswith(media_type)
    for name in ("page.html", "nothing.js", "..", "%2e%2e%2fpages.py"):
        assert (await client.get(f"/dashboard/{name}")).status_code == 404, name


async def test_a_browser_that_has_a_file_is_told_so(client: httpx.AsyncClient) -> None:
    etag = (await client.get("/dashboard/page.js")).headers["etag"]
    again = await client.get("/dashboard/page.js", headers={"if-none-match": etag})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    other = await client.get("/dashboard/page.js", headers={"if-none-match": '"another"'})
    assert other.status_code == 200


async def test_a_request_for_the_head_of_the_stream_gets_no_stream(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    response = await client.head("/dashboard/events")
    assert (response.status_code, service.feed.num_viewers) == (200, 0)
    assert response.headers["content-type"].startswith("text/event-stream")


class Connection:
    """One ASGI request for the stream; `gone` is set when the client leaves."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self.blocked = False
        self._is_new = True

    async def receive(self) -> dict[str, Any]:
        if self._is_new:
            self._is_new = False
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        if self.blocked and message["type"] == "http.response.body":
            await asyncio.Event().wait()


async def stream_to(viewer: Viewer, connection: Connection, *, stuck_s: float = 60.0) -> None:
    stream = EventStream(viewer, Departure(connection.receive, viewer.leave), stuck_s=stuck_s)
    await stream({}, connection.receive, connection.send)


def a_viewer(left: list[Viewer]) -> Viewer:
    return Viewer(0.0, left.append)


async def streamed(what: str) -> tuple[Connection, bool]:
    """Streams to a viewer until something ends it; returns also whether the viewer has left."""
    left: list[Viewer] = []
    connection, viewer = Connection(), a_viewer(left)
    connection.blocked = what == "it takes nothing"
    viewer.offer(b"data: 1\n\n")
    streaming = asyncio.create_task(stream_to(viewer, connection, stuck_s=0.01 if connection.blocked else 60.0))
    await turns()
    if what == "it leaves":
        connection.gone.set()
    elif what == "it is let go":
        viewer.leave()
    elif what == "its request is cancelled":
        streaming.cancel()
    await asyncio.wait_for(asyncio.wait([streaming]), timeout=5)
    return connection, viewer in left


@pytest.mark.parametrize("what", ["it leaves", "it is let go", "it takes nothing", "its request is cancelled"])
async def test_a_viewer_leaves_its_feed_however_its_stream_ends(what: str) -> None:
    connection, has_left = await streamed(what)
    assert has_left
    if what == "it is let go":
        assert connection.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
