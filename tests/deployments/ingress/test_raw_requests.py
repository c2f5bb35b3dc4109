"""Requests as bytes, with the expected statuses, headers and JSON, and whether the connection is closed."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from dataclasses import dataclass
from typing import Any

import pytest

from deployments.api.exchange import RequestBodies
from tests.deployments.ingress.api.faces import KEY, MAX_BODY_BYTES, FakeBackend, gate
from tests.deployments.ingress.server.places import post, serving_api
from tests.deployments.wire_fakes import until

BODY = b'{"inputs": "pay"}'
CHUNKS = b"5\r\n" + BODY[:5] + b"\r\n%x\r\n" % (len(BODY) - 5) + BODY[5:] + b"\r\n0\r\n"
HEAD = b"POST /predict HTTP/1.1\r\nHost: here\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
GOOD = post(BODY, path="/predict")
GET = b"GET /v2/health/live HTTP/1.1\r\nHost: here\r\n\r\n"
ODD_PATHS = b"models/%00", b"models/%zz%ff", b"models/../../etc/passwd"
LIVE = '{"live":true}'
CARD, INPUT = '"label":"card"', '"kind":"input"'
"""Of an answer, and of a refusal of what is wrong."""


@dataclass(frozen=True)
class Case:
    """Bytes that are sent at once, and the status and a part of the JSON of each answer."""

    sent: bytes
    answers: tuple[tuple[int, str], ...]
    closes: bool = False
    half: bool = False
    """Whether the caller then closes its half of the connection."""
    keys: bool = False
    headers: tuple[tuple[str, str], ...] = ()
    """The headers of the last answer."""


def refused(sent: bytes, status: int = 400, kind: str = "input", **more: Any) -> Case:
    part = '{"error":"' if b" /v2" in sent else f'"kind":"{kind}"'
    return Case(sent, ((status, part),), closes=True, **more)


def answered(sent: bytes, **more: Any) -> Case:
    """Returns a case with a following request, which is answered, too."""
    return Case(sent + GET, ((200, CARD), (200, LIVE)), **more)


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
LENGTH = b"Content-Length: %d\r\n\r\n" % len(BODY)
CASES = {
    # no requests
    "words": refused(b"nonsense\r\n\r\n"),
    "TLS": refused(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    "a negative length": refused(HEAD + b"Content-Length: -1\r\n\r\n"),
    "two lengths": refused(HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n"),
    "length and chunks": refused(HEAD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"),
    "a wrong chunk": refused(CHUNKED + b"zz\r\n"),
    "a chunk that lies": refused(CHUNKED + b"2\r\nabcdef\r\n0\r\n\r\n"),
    "a chunk of 2 to the 64": refused(CHUNKED + b"10000000000000000\r\nabc"),
    "a length in words": refused(HEAD + b"Content-Length: ten\r\n\r\n"),
    "a length of 60 digits": refused(HEAD + b"Content-Length: " + b"9" * 60 + b"\r\n\r\n"),
    "no length": Case(HEAD + b"\r\n" + GET, ((400, INPUT), (200, LIVE))),
    "just fits": answered(post(BODY.ljust(MAX_BODY_BYTES), path="/predict")),
    "a byte too long": Case(post(BODY.ljust(MAX_BODY_BYTES + 1), path="/predict"), ((413, "larger than 2000 bytes"),)),
    "too long": Case(
        HEAD + b"Content-Length: 50000\r\n\r\n" + b"x" * 50_000 + GET, ((413, "payload_too_large"), (200, LIVE))
    ),
    "too many chunks": Case(
        CHUNKED + (b"64\r\n" + b"x" * 100 + b"\r\n") * 30 + b"0\r\n\r\n" + GET,
        ((413, "payload_too_large"), (200, LIVE)),
    ),
    "a folded line": refused(GET[:-2] + b"X: a\r\n b\r\n\r\n"),
    "BREW": refused(b"BREW /predict HTTP/1.1\r\nHost: here\r\n\r\n"),
    "TRACE": Case(b"TRACE /predict HTTP/1.1\r\nHost: here\r\n\r\n", ((405, "only POST"),)),
    "a space in a name": refused(b"GET /v2 HTTP/1.1\r\nHost: here\r\nA : b\r\n\r\n"),
    "HTTP/2": refused(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "CONNECT": refused(b"CONNECT here:1 HTTP/1.1\r\nHost: here\r\n\r\n", 405, "method_not_allowed"),
    "nonsense in v1": Case(b"POST /v1/completions HTTP/1.1\r\nX\r\n\r\n", ((400, '"code":"input"'),), closes=True),
    "nonsense with a name": refused(
        b"POST / HTTP/1.1\r\nX-Request-ID: r-1\r\nA: b\r\nX\r\n\r\n", headers=(("x-request-id", "r-1"),)
    ),
    "a refusal behind a request": Case(GOOD + b"nonsense\r\n\r\n", ((200, CARD),), closes=True),
    "a wrong URL behind a request": Case(GOOD + GET.replace(b"/v2", b"http://h?"), ((200, CARD),), closes=True),
    "a URL of 70,000 bytes": refused(GET.replace(b"/v2", b"/v2" + b"a" * 70_000), 431),
    "no host": refused(b"GET /v2 HTTP/1.1\r\n\r\n"),
    "two hosts": refused(GET[:-2] + b"Host: there\r\n\r\n"),
    "a head that is too long, and more": refused(
        b"GET /v2 HTTP/1.1\r\nHost: here\r\nX: " + b"a" * 5000 + b"\r\n\r\n" + CHUNKED + GET, 431
    ),
    "a head without end": refused(b"GET /plan HTTP/1.1\r\nX-Filler: " + b"a" * 3000, 431, "head_too_large"),
    "a head of too many lines": refused(b"GET /v2 HTTP/1.1\r\n" + b"A: b\r\n" * 500, 431),
    # codings
    "chunked": answered(CHUNKED + CHUNKS + b"\r\n"),
    "Chunked": answered(HEAD + b"Transfer-Encoding: Chunked\r\n\r\n" + CHUNKS + b"\r\n"),
    "gzip and chunked": refused(HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNKS + b"\r\n"),
    "gzip, then chunked": refused(HEAD + b"Transfer-Encoding: gzip\r\n" + CHUNKED[len(HEAD) :] + CHUNKS + b"\r\n"),
    "gzip": answered(post(gzip.compress(BODY), "Content-Encoding: gzip", path="/predict")),
    "deflate": answered(post(zlib.compress(BODY), "Content-Encoding: deflate", path="/predict")),
    "GZIP in chunks": answered(
        HEAD
        + b"Content-Encoding: GZIP\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"%x\r\n%b\r\n0\r\n\r\n" % (len(gzip.compress(BODY)), gzip.compress(BODY))
    ),
    "gzip that is cut off": Case(
        post(gzip.compress(BODY)[:-4], "Content-Encoding: gzip", path="/predict") + GET, ((400, "cut off"), (200, LIVE))
    ),
    "gzip with more behind": Case(
        post(gzip.compress(BODY) * 2, "Content-Encoding: gzip", path="/predict"), ((400, "follow the end"),)
    ),
    "gzip that grows": Case(
        post(gzip.compress(b" " * 100 * MAX_BODY_BYTES), "Content-Encoding: gzip", path="/predict") + GET,
        ((413, "payload_too_large"), (200, LIVE)),
    ),
    # trailers are ignored
    "a key in a trailer": Case(
        CHUNKED + CHUNKS + b"Authorization: Bearer " + KEY.encode() + b"\r\n\r\n" + GET,
        ((401, "unauthorized"), (200, LIVE)),
        keys=True,
    ),
    "a kind in a trailer": answered(CHUNKED + CHUNKS + b"Content-Type: image/png\r\nAccept: image/png\r\n\r\n"),
    "an encoding in a trailer": answered(CHUNKED + CHUNKS + b"Content-Encoding: br\r\n\r\n"),
    "an Upgrade in a trailer": answered(CHUNKED + CHUNKS + b"Connection: upgrade\r\nUpgrade: h2c\r\n\r\n"),
    "a length in a trailer": refused(CHUNKED + CHUNKS + b"Content-Length: 4\r\n\r\n"),
    # a request to change the protocol
    "Upgrade": answered(HEAD + UPGRADE + LENGTH + BODY),
    "Upgrade and chunks": answered(HEAD + UPGRADE + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKS + b"\r\n"),
    "Upgrades without a body": Case((GET[:-2] + UPGRADE + b"\r\n") * 999 + GET, ((200, LIVE),) * 1000),
    "Upgrade and close": Case(
        HEAD + b"Connection: upgrade, close\r\nUpgrade: h2c\r\n" + LENGTH + BODY + GET, ((200, CARD),), closes=True
    ),
    "Upgrade to a web socket": Case(
        GET[:-2] + b"Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n\x81\x85",
        ((200, LIVE),),
        closes=True,
    ),
    # ends
    "half a body": Case(GOOD[:-3], (), closes=True, half=True),
    "half a head": Case(GOOD[:30], (), closes=True, half=True),
    "nothing": Case(b"", (), closes=True, half=True),
    "HTTP/1.0": Case(b"GET /v2/health/live HTTP/1.0\r\n" + UPGRADE + b"\r\n", ((200, LIVE),), closes=True),
    # targets and names
    "a whole URL": answered(GOOD.replace(b"/predict", b"http://here/predict")),
    "a host alone": refused(b"GET http://here HTTP/1.1\r\nHost: here\r\n\r\n"),
    "odd paths": Case(b"".join(GET.replace(b"health/live", each) for each in ODD_PATHS), ((404, "error"),) * 3),
    "a name": Case(
        post(b"{", "X-Request-ID: r-1", path="/predict"),
        ((400, '"request_id":"r-1"'),),
        headers=(("x-request-id", "r-1"),),
    ),
    "two names": Case(
        post(b"{", "X-Request-ID:", "X-Request-ID: r-1", "X-Request-ID: r-2", path="/predict"),
        ((400, '"request_id":"r-1"'),),
        headers=(("x-request-id", "r-1"),),
    ),
}


@pytest.mark.parametrize("name", CASES)
async def test_a_request_gets_its_answers(name: str) -> None:
    case = CASES[name]
    async with serving_api(FakeBackend(), gate() if case.keys else None) as door:
        caller = await door.call(case.sent)
        if case.half:
            caller.writer.write_eof()
        for status, part in case.answers:
            found, headers, body = await caller.answer()
            assert (found, part in body.decode()) == (status, True), body
            assert headers["content-type"] == "application/json", headers
            named = json.loads(body).get("request_id", headers["x-request-id"])
            assert (named, len(named) > 0) == (headers["x-request-id"], True)
        if case.headers:
            assert {name: headers[name] for name, _ in case.headers} == dict(case.headers)
        if case.closes:
            assert await caller.is_closed()
        else:
            caller.send(GET)
            assert await caller.status() == 200


async def test_bodies_beyond_the_memory_limit_are_refused_until_others_are_answered() -> None:
    backend = FakeBackend(bodies=RequestBodies(MAX_BODY_BYTES, 2 * MAX_BODY_BYTES))
    stalled = HEAD + b"Content-Length: %d\r\n\r\n" % MAX_BODY_BYTES + b" " * (MAX_BODY_BYTES - 1)
    async with serving_api(backend) as door:
        callers = [await door.call(stalled) for _ in range(2)]
        await until(lambda: backend.bodies.held_bytes == 2 * MAX_BODY_BYTES - 2)
        caller = await door.call(post(BODY, path="/predict"))
        found, headers, body = await caller.answer()
        assert (found, headers["retry-after"], b'"kind":"overloaded"' in body) == (503, "1", True)
        assert await (await door.call(GET)).status() == 200
        callers[0].send(b" ")
        assert (await callers[0].answer())[0] == 400
        assert await (await door.call(GOOD)).status() == 200
        callers[1].reset()
        await until(lambda: backend.bodies.held_bytes == 0)


@pytest.mark.parametrize("standalone", [False, True], ids=["in Serve", "standalone"])
async def test_a_caller_that_disconnects_while_sending_is_counted(standalone: bool) -> None:
    backend = FakeBackend()
    async with serving_api(backend, standalone=standalone) as door:
        caller = await door.call(GOOD[:-3])
        await asyncio.sleep(0.05)
        caller.reset()
        await until(lambda: bool(backend.counted))
    assert (backend.counted, backend.requests) == ([("/predict", 499)], [])
