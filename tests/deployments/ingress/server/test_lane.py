"""What goes straight to its endpoint is answered as what goes by the router, and Serve finds what it starts."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import warnings
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from deployments.api.access import Gate
from deployments.api.http import build_api
from deployments.api.server.server import Site, StandaloneServer
from earlyexit.errors import OverloadedError
from tests.deployments.ingress.api.faces import KEY, MAX_BODY_BYTES, V2_BODY, V2_INFER, FakeBackend, gate
from tests.deployments.ingress.server.places import Caller, post

ORIGIN = "https://page.example"
V2 = json.dumps(V2_BODY).encode()
CASES: dict[str, tuple[str, bytes, Sequence[str]]] = {
    "text": ("/predict", b'{"inputs": "pay"}', ()),
    "texts": ("/predict", b'{"inputs": ["pay", "bill"]}', ()),
    "v2": (V2_INFER, V2, ()),
    "v2 of a version": ("/v2/models/intents/versions/1/infer", V2, ()),
    "v2 of another version": ("/v2/models/intents/versions/9/infer", V2, ()),
    "a query": ("/predict?x=1", b'{"inputs": "pay"}', ()),
    "no JSON": ("/predict", b"{", ()),
    "an empty body": ("/predict", b"", ()),
    "too long": ("/predict", b" " * (MAX_BODY_BYTES + 1), ()),
    "much too long": ("/predict", b" " * 200_000, ()),
    "no gzip": ("/predict", b"x", ("Content-Encoding: gzip",)),
    "no such answer": ("/predict", b'{"inputs": "pay"}', ("Accept: image/png",)),
    "a wrong key": ("/predict", b'{"inputs": "pay"}', ("Authorization: Bearer nonsense",)),
    "another page": ("/predict", b'{"inputs": "pay"}', (f"Origin: {ORIGIN}",)),
    "an unknown page": ("/predict", b'{"inputs": "pay"}', ("Origin: https://else.example",)),
}


@asynccontextmanager
async def serving(
    backend: FakeBackend, guard: Gate | None = None, *, lane: bool = True, prefix: str = "/", access_log: bool = False
) -> AsyncIterator[tuple[StandaloneServer, int]]:
    origins = (ORIGIN,)
    api = build_api(backend, gate=guard, cors_origins=origins, prefix=prefix)
    site = Site(router=api.router, prefix=prefix, name="offramp")
    outright, bound = StandaloneServer(site, api.lane if lane else {}, access_log=access_log), socket.socket()
    bound.bind(("127.0.0.1", 0))
    await outright.start(bound)
    try:
        yield outright, bound.getsockname()[1]
    finally:
        await asyncio.wait_for(outright.close(), 5)


async def asked(port: int, data: bytes) -> tuple[int, dict[str, str], bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    status, headers, body = await Caller(reader, writer).answer()
    writer.close()
    headers.pop("date")
    return status, headers, body


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("keys", [False, True], ids=["open", "keys"])
async def test_the_lane_answers_as_the_router_does(case: str, keys: bool) -> None:
    path, body, lines = CASES[case]
    found: list[Any] = []
    for lane in (False, True):
        backend = FakeBackend()
        async with serving(backend, gate() if keys else None, lane=lane) as (_, port):
            told = [*lines, "X-Request-ID: r-1"]
            if keys and not any(line.startswith("Authorization") for line in lines):
                told.append(f"Authorization: Bearer {KEY}")
            found.append((await asked(port, post(body, *told, path=path)), backend.counted))
    assert found[0] == found[1]
    assert found[1][0][1]["x-request-id"] == "r-1"


async def test_what_fails_and_what_is_refused_later_is_said_alike() -> None:
    for failure in (OverloadedError("full", retry_after_s=3.0), ValueError("words")):
        found = []
        for lane in (False, True):
            async with serving(FakeBackend(failure=failure), lane=lane) as (_, port):
                found.append(await asked(port, post(b'{"inputs": "pay"}', "X-Request-ID: r", path="/predict")))
        assert found[0] == found[1]


async def test_the_rest_is_routed_below_the_prefix_and_serves_own_paths_are_there() -> None:
    async with serving(FakeBackend(), prefix="/intents") as (_, port):
        for path, status, words in (
            ("/intents/v2/health/live", 200, b"live"),
            ("/intents/predict", 405, b"only POST"),
            ("/intents/nowhere", 404, b"unknown_path"),
            ("/predict", 404, b"/-/routes"),
            ("/intentsx", 404, b"/-/routes"),
            ("/-/healthz", 200, b"success"),
            ("/-/routes", 200, b'{"/intents": "offramp"}'),
            ("http://here/intents/v2", 200, b"extensions"),
        ):
            found, _, body = await asked(port, f"GET {path} HTTP/1.1\r\nHost: here\r\n\r\n".encode())
            assert (found, words in body) == (status, True), path
        status, _, body = await asked(port, post(b'{"inputs": "pay"}', path="/intents/predict"))
        assert (status, json.loads(body)["label"]) == (200, "card")


async def test_the_access_log_has_a_line_per_request_with_its_id(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="ray.serve")
    async with serving(FakeBackend(), access_log=True) as (_, port):
        await asked(port, post(b'{"inputs": "pay"}', "X-Request-ID: r-7", path="/predict"))
        await asked(port, b"GET /nowhere HTTP/1.1\r\nHost: here\r\n\r\n")
    lines = [record for record in caplog.records if getattr(record, "serve_access_log", False)]
    assert [record.getMessage().rsplit(" ", 1)[0] for record in lines] == ["POST /predict 200", "GET /nowhere 404"]
    assert getattr(lines[0], "request_id", "") == "r-7"


async def test_serve_starts_and_ends_ours_as_it_does_its_own() -> None:
    with warnings.catch_warnings():  # Serve's own, of pydantic
        warnings.simplefilter("ignore")
        from ray.serve.config import HTTPOptions

        from deployments.api.server import in_serve
    backend = FakeBackend()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = HTTPOptions(host="127.0.0.1", port=port)
    api, loop = build_api(backend), asyncio.get_running_loop()
    task, server = await in_serve._start(api.lane, None, api.router, options, event_loop=loop)
    for path in ("/predict", V2_INFER):
        body = b'{"inputs": "pay"}' if path == "/predict" else V2
        status, headers, _ = await asked(port, post(body, "X-Request-ID: r-1", path=path))
        assert (status, headers["x-request-id"]) == (200, "r-1")
    status, headers, _ = await asked(port, b"GET /v2 HTTP/1.1\r\nHost: here\r\n\r\n")
    assert (status, len(headers["x-request-id"])) == (200, 36)
    with pytest.raises(RuntimeError, match="bind") as raised:
        await in_serve._start(api.lane, None, api.router, options, event_loop=loop)
    assert isinstance(raised.value.__cause__, OSError)
    server.should_exit = True
    await asyncio.wait_for(task, 5)
