"""Requests as bytes on real sockets of this process, over fast paths and over the router."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import warnings
from collections.abc import AsyncIterator

import pytest

from deployments.api.http import build_api
from deployments.api.server import Connection, Limits, start_in_serve
from tests.deployments.ingress.api.faces import V2_BODY, V2_INFER, FakeBackend
from tests.deployments.ingress.server.places import GET, Door, Place, post, serving, serving_api
from tests.deployments.wire_fakes import until
from tests.free_port import free_port


@pytest.fixture(params=[False, True], ids=["app", "fast"])
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    async with serving(fast=request.param) as place:
        yield place


async def test_a_request_is_answered_with_its_body_and_id(place: Place) -> None:
    caller = await place.call(post(b"pay", "X-Request-ID: r-1"))
    status, headers, body = await caller.answer()
    assert (status, body, headers["x-request-id"], headers["x-app"]) == (200, b"pay", "r-1", "1")
    assert headers["date"].endswith("GMT")
    caller.send(post(b"again"))
    status, headers, body = await caller.answer()
    assert (status, body, len(headers["x-request-id"])) == (200, b"again", 32)


async def test_a_request_may_come_in_single_bytes(place: Place) -> None:
    caller = await place.call()
    for byte in post(b"pay"):
        caller.send(bytes([byte]))
        await caller.writer.drain()
    assert (await caller.answer())[2] == b"pay"


async def test_pipelined_requests_are_answered_one_after_the_other(place: Place) -> None:
    place.app.gate.clear()
    caller = await place.call(b"".join(post(b"%d" % k) for k in range(20)))
    await asyncio.sleep(0.05)
    assert len(place.app.asked) == 1
    place.app.gate.set()
    assert [(await caller.answer())[2] for _ in range(20)] == [b"%d" % k for k in range(20)]


async def test_a_connection_with_too_many_pipelined_requests_ends_after_their_answers() -> None:
    async with serving(Limits(pipelined=10)) as place:
        place.app.gate.clear()
        caller = await place.call(GET * 20)
        await until(lambda: len(place.app.asked) == 1)
        caller.send(GET * 20)
        place.app.gate.set()
        assert [await caller.status() for _ in range(21)] == [200] * 20 + [0]


async def test_a_long_body_is_read_at_the_speed_of_the_application(place: Place) -> None:
    place.app.gate.clear()
    caller = await place.call(post(b"x" * 3_000_000))
    await asyncio.sleep(0.1)
    [connection] = place.server.server_state.connections
    assert isinstance(connection, Connection)
    assert 0 < len(connection.cycle.body) < 600_000
    place.app.gate.set()
    status, _, body = await caller.answer()
    assert (status, len(body)) == (200, 3_000_000)


async def test_trailers_without_end_are_refused(place: Place) -> None:
    head = b"POST /echo HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"
    caller = await place.call(head + b"1\r\nx\r\n0\r\nX: ")
    await until(lambda: place.app.parts == [1])
    caller.send(b"a" * 3000)
    assert await caller.status() == 431


async def test_expect_100_continue_is_answered(place: Place) -> None:
    caller = await place.call(post(b"pay", "Expect: 100-continue")[:-3])
    assert await caller.status() == 100
    caller.send(b"pay")
    assert (await caller.answer())[2] == b"pay"


async def test_a_stream_is_chunked_except_over_http_1_0(place: Place) -> None:
    caller = await place.call(b"GET /stream HTTP/1.1\r\nHost: here\r\n\r\nGET /stream HTTP/2.0\r\nHost: here\r\n\r\n")
    assert [(await caller.answer())[2] for _ in range(2)] == [b"onetwo"] * 2
    old = await place.call(b"GET /stream HTTP/1.0\r\n\r\n")
    head, body = (await old.reader.read()).split(b"\r\n\r\n")
    assert (b"chunked" in head, b"connection: close" in head, body) == (False, True, b"onetwo")


async def test_head_gets_no_body(place: Place) -> None:
    caller = await place.call(b"HEAD /echo HTTP/1.1\r\nHost: here\r\n\r\n" + GET)
    head = await caller.reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in head
    assert (await caller.answer())[2] == b"nothing"


async def test_a_body_that_the_application_does_not_read_is_discarded_after_the_answer(place: Place) -> None:
    caller = await place.call(b"POST /early HTTP/1.1\r\nHost: here\r\nContent-Length: 1000001\r\n\r\nx")
    assert await caller.status() == 413
    caller.send(b"x" * 1_000_000 + GET)
    assert await caller.status() == 200
    assert place.app.bodies == [b"", b""]


async def test_a_failure_is_answered_with_500_unless_half_an_answer_was_sent(place: Place) -> None:
    caller = await place.call(b"GET /fails HTTP/1.1\r\nHost: here\r\n\r\n")
    assert (await caller.status(), await caller.is_closed()) == (500, True)
    caller = await place.call(b"GET /breaks HTTP/1.1\r\nHost: here\r\n\r\n")
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await caller.answer()


@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
async def test_the_request_of_a_disconnected_client_is_cancelled(place: Place, is_reset: bool) -> None:
    place.app.gate.clear()
    caller = await place.call(post(b"pay"))
    await asyncio.sleep(0.02)
    caller.reset() if is_reset else caller.writer.close()
    await asyncio.sleep(0.05)
    assert place.app.ended == ["cancelled"]
    assert not place.server.server_state.connections


async def test_serves_application_assigns_ids_and_is_notified_of_disconnects() -> None:
    async with serving(standalone=False) as place:
        caller = await place.call(post(b"pay", "X-Request-ID: r-1"))
        assert "x-request-id" not in (await caller.answer())[1]
        place.app.ended.clear()
        place.app.gate.clear()
        caller = await place.call(post(b"pay"))
        await asyncio.sleep(0.02)
        caller.reset()
        await asyncio.sleep(0.02)
        place.app.gate.set()
        await asyncio.sleep(0.02)
        assert place.app.ended == ["left"]


async def test_slow_heads_and_bodies_get_408_and_idle_callers_are_closed() -> None:
    limits = Limits(progress_bytes=100)
    async with serving(limits) as place:
        slow = {
            b"GET /echo HTTP/1.1\r\nHost: here\r\nX:": 408,
            b"POST /echo HTTP/1.1\r\nHost: here\r\nContent-Length: 5\r\n\r\npa": 408,
            b"POST /echo HTTP/1.1\r\nHost: here\r\nContent-Length: 500\r\n\r\npa": 408,
            b"": 0,
            GET: 200,
        }
        callers = [await place.call(data) for data in slow]
        assert await callers[-1].status() == 200
        begun_s, told = asyncio.get_running_loop().time(), [caller.status() for caller in callers[:-1]]
        waiting = [asyncio.ensure_future(each) for each in told]
        for after_s, done in ((0, 0), (9, 0), (11, 1), (29, 1), (31, 3), (89, 3), (91, 4)):
            place.server.sweep(begun_s + after_s)
            await asyncio.sleep(0.05)
            assert sum(each.done() for each in waiting) == done
        assert [await each for each in waiting] == list(slow.values())[:-1]
        place.server.sweep(begun_s + 97)  # a refused client may have had more to send
        assert [await caller.is_closed() for caller in callers] == [True] * 5


async def test_a_client_that_reads_no_answers_is_disconnected() -> None:
    async with serving(Limits(stalled_s=0.3)) as place:
        loop, big = asyncio.get_running_loop(), post(b"x" * 60_000)
        with socket.create_connection(("127.0.0.1", place.port)) as greedy:
            greedy.setblocking(False)

            async def send_for_ever() -> None:
                while True:
                    await loop.sock_sendall(greedy, big)

            with pytest.raises(ConnectionError):
                await asyncio.wait_for(send_for_ever(), 10)
        await asyncio.sleep(0.05)
        assert not place.server.server_state.connections


async def test_connections_beyond_the_limit_get_503_and_many_more_are_closed(place: Place) -> None:
    callers = [await place.call() for _ in range(10)]
    assert await (await place.call()).is_closed()
    for caller in callers:
        caller.send(GET)
    assert [await caller.status() for caller in callers] == [200] * 8 + [503] * 2


async def test_close_waits_for_answers_and_accepts_no_new_client(place: Place) -> None:
    place.app.gate.clear()
    idle, busy = await place.call(), await place.call(post(b"pay"))
    await asyncio.sleep(0.02)
    place.server.should_exit = True
    assert await idle.is_closed()
    with pytest.raises(ConnectionError):
        await place.call()
    assert not place.task.done()
    place.app.gate.set()
    status, headers, body = await busy.answer()
    assert (status, headers["connection"], body) == (200, "close", b"pay")
    await asyncio.wait_for(place.task, 5)
    assert place.server.should_exit


async def asked(door: Door, data: bytes) -> tuple[int, dict[str, str], bytes]:
    status, headers, body = await (await door.call(data)).answer()
    headers.pop("date")
    return status, headers, body


async def test_other_paths_are_routed_below_the_prefix_and_serves_paths_exist() -> None:
    async with serving_api(FakeBackend(), prefix="/intents") as door:
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
            found, _, body = await asked(door, f"GET {path} HTTP/1.1\r\nHost: here\r\n\r\n".encode())
            assert (found, words in body) == (status, True), path
        status, _, body = await asked(door, post(b'{"inputs": "pay"}', path="/intents/predict"))
        assert (status, json.loads(body)["label"]) == (200, "card")


async def test_the_access_log_has_a_line_per_request_with_its_id(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="ray.serve")
    async with serving_api(FakeBackend(), access_log=True) as door:
        await asked(door, post(b'{"inputs": "pay"}', "X-Request-ID: r-7", path="/predict"))
        await asked(door, b"GET /no%0Awhere HTTP/1.1\r\nHost: here\r\n\r\n")
    lines = [record for record in caplog.records if getattr(record, "serve_access_log", False)]
    assert [record.getMessage().rsplit(" ", 1)[0] for record in lines] == ["POST /predict 200", "GET /no%0Awhere 404"]
    assert getattr(lines[0], "request_id", "") == "r-7"


async def test_serve_starts_and_stops_our_server_like_its_own() -> None:
    with warnings.catch_warnings():  # Serve's own, of pydantic
        warnings.simplefilter("ignore")
        from ray.serve.config import HTTPOptions
    door = Door(free_port())
    options = HTTPOptions(host="127.0.0.1", port=door.port)
    api, loop = build_api(FakeBackend()), asyncio.get_running_loop()
    task, server = await start_in_serve(api, None, api, options, event_loop=loop)
    for path in ("/predict", V2_INFER):
        body = b'{"inputs": "pay"}' if path == "/predict" else json.dumps(V2_BODY).encode()
        status, headers, _ = await asked(door, post(body, "X-Request-ID: r-1", path=path))
        assert (status, headers["x-request-id"]) == (200, "r-1")
    status, headers, _ = await asked(door, b"GET /v2 HTTP/1.1\r\nHost: here\r\n\r\n")
    assert (status, len(headers["x-request-id"])) == (200, 36)
    with pytest.raises(RuntimeError, match="bind") as raised:
        await start_in_serve(api, None, api, options, event_loop=loop)
    assert isinstance(raised.value.__cause__, OSError)
    door.close()
    server.should_exit = True
    await asyncio.wait_for(task, 5)
