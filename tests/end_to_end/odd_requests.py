"""Requests that no client library sends, as bytes: what a server must refuse, or answer, without a 5xx."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

REFUSED = frozenset({400, 411, 413, 414, 422, 431})
CLOSED = frozenset({None})
V2 = "/v2/models/{model}/infer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Odd:
    """One request."""

    name: str
    head: str
    """Request line and headers, without Host and key; `{model}` stands for the model's name."""
    body: bytes = b""
    allowed: frozenset[int | None] = REFUSED


def _predict(name: str, body: bytes, *headers: str, allowed: frozenset[int | None] = REFUSED) -> Odd:
    lines = ("POST /predict HTTP/1.1", f"Content-Length: {len(body)}", *headers)
    return Odd(name=name, head="\r\n".join(lines), body=body, allowed=allowed)


def _binary(name: str, tail: bytes, *, said: int | None = None) -> Odd:
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": len(tail)}}
    head = json.dumps({"inputs": [tensor]}).encode()
    lines = (
        f"POST {V2} HTTP/1.1",
        f"Content-Length: {len(head + tail)}",
        f"Inference-Header-Content-Length: {len(head) if said is None else said}",
        "Content-Type: application/octet-stream",
    )
    return Odd(name=name, head="\r\n".join(lines), body=head + tail, allowed=REFUSED)


def _chunked(name: str, body: bytes, *, allowed: frozenset[int | None]) -> Odd:
    return Odd(name=name, head="POST /predict HTTP/1.1\r\nTransfer-Encoding: chunked", body=body, allowed=allowed)


GOOD = b'{"inputs": "pay my bill"}'
FINE: frozenset[int | None] = frozenset({200, 503})
ODD = (
    _predict("null", b"null"),
    _predict("null-inputs", b'{"inputs": null}'),
    _predict("null-timeout", b'{"inputs": "pay", "timeout_s": null}', allowed=FINE),
    _predict("nul-bytes", b'{"inputs": "\\u0000\\u0000"}', allowed=FINE | {422}),
    _predict("huge-integer", b'{"inputs": "pay", "timeout_s": ' + b"9" * 10_000 + b"}"),
    _predict("huge-float", b'{"inputs": "pay", "timeout_s": 1e999}'),
    _predict("not-a-number", b'{"inputs": "pay", "timeout_s": NaN}'),
    _predict("smallest-float", b'{"inputs": "pay", "timeout_s": 5e-324}', allowed=frozenset({504, 503})),
    _predict("lone-surrogate", b'{"inputs": "\\ud800"}', allowed=REFUSED | FINE),
    _predict("surrogate-pair", b'{"inputs": "\\ud83d\\ude00"}', allowed=FINE | {422}),
    _predict("raw-surrogate", b'{"inputs": "\xed\xa0\x80"}'),
    _predict("overlong-utf8", b'{"inputs": "\xc0\xaf"}'),
    _predict("utf16", '{"inputs": "pay"}'.encode("utf-16")),
    _predict("byte-order-mark", b"\xef\xbb\xbf" + GOOD, allowed=REFUSED | FINE),
    _predict("deep-lists", b'{"inputs": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
    _predict("deep-objects", b'{"inputs": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001),
    _predict("duplicate-keys", b'{"inputs": "a", "inputs": "pay"}', allowed=REFUSED | FINE),
    _predict("trailing-garbage", GOOD + b"garbage"),
    _predict("empty", b""),
    _predict("wrong-content-type", GOOD, "Content-Type: text/plain", allowed=FINE),
    _predict("an-image", GOOD, "Content-Type: image/png"),
    _predict("no-such-charset", GOOD, "Content-Type: application/json; charset=nonsense", allowed=FINE),
    _predict("said-gzip", GOOD, "Content-Encoding: gzip"),
    _predict("two-encodings", GOOD, "Content-Encoding: identity", "Content-Encoding: br"),
    _predict("request-id-with-a-return", GOOD, "X-Request-ID: a\rb", allowed=REFUSED | FINE | CLOSED),
    _predict("folded-header", GOOD, "X-Request-ID: a\r\n Set-Cookie: b", allowed=REFUSED | FINE | CLOSED),
    _predict("space-before-colon", GOOD, "X-Request-ID : a", allowed=REFUSED | FINE | CLOSED),
    # Serve itself reads every request's id as UTF-8, before the application is asked, and fails where it is none.
    _predict("latin-1-request-id", GOOD, "X-Request-ID: \xe9\xff", allowed=REFUSED | FINE | {500}),
    _predict("long-request-id", GOOD, "X-Request-ID: " + "a" * 4000, allowed=REFUSED | FINE),
    _predict("header-of-100-kB", GOOD, "X-Filler: " + "a" * 100_000, allowed=REFUSED | FINE | CLOSED),
    _predict("a-thousand-headers", GOOD, *("X-Filler: a",) * 1000, allowed=REFUSED | FINE | CLOSED),
    _predict("two-lengths", GOOD, "Content-Length: 3", allowed=REFUSED | CLOSED),
    _predict("length-and-chunks", GOOD, "Transfer-Encoding: chunked", allowed=REFUSED | CLOSED),
    Odd(name="negative-length", head="POST /predict HTTP/1.1\r\nContent-Length: -1", allowed=REFUSED | CLOSED),
    Odd(name="length-of-words", head="POST /predict HTTP/1.1\r\nContent-Length: ten", allowed=REFUSED | CLOSED),
    Odd(
        name="huge-length",
        head="POST /predict HTTP/1.1\r\nContent-Length: " + "9" * 60,
        body=GOOD,
        allowed=REFUSED | CLOSED,
    ),
    Odd(
        name="too-large-and-unsent",
        head="POST /predict HTTP/1.1\r\nContent-Length: 999999999",
        allowed=frozenset({413}),
    ),
    Odd(name="shorter-length", head="POST /predict HTTP/1.1\r\nContent-Length: 5", body=GOOD),
    Odd(
        name="longer-length",
        head="POST /predict HTTP/1.1\r\nContent-Length: 99",
        body=GOOD,
        allowed=REFUSED | CLOSED | {408, 499},
    ),
    Odd(name="no-length", head="POST /predict HTTP/1.1"),
    _chunked("chunks", b"5\r\n" + GOOD[:5] + b"\r\n14\r\n" + GOOD[5:] + b"\r\n0\r\n\r\n", allowed=FINE),
    _chunked("chunk-of-nonsense", b"zz\r\nabc\r\n0\r\n\r\n", allowed=REFUSED | CLOSED),
    _chunked("chunk-that-lies", b"2\r\nabcdef\r\n0\r\n\r\n", allowed=REFUSED | CLOSED),
    _chunked("chunk-of-2-to-the-64", b"10000000000000000\r\nabc", allowed=REFUSED | CLOSED),
    _binary("binary-garbage", b"\xff" * 64),
    _binary("binary-length-beyond", struct.pack("<I", 2**32 - 1) + b"pay"),
    _binary("binary-cut-short", b"\x03\x00"),
    _binary("binary-empty", b""),
    _binary("binary-not-utf8", struct.pack("<I", 2) + b"\xff\xfe"),
    _binary("header-length-beyond", struct.pack("<I", 3) + b"pay", said=10**9),
    _binary("header-length-zero", struct.pack("<I", 3) + b"pay", said=0),
    Odd(name="websocket", head="GET /predict HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13",
        allowed=REFUSED | {403, 404, 405}),
    Odd(name="unknown-method", head="BREW /predict HTTP/1.1", allowed=REFUSED | CLOSED | {405, 501}),
    Odd(name="trace", head="TRACE /predict HTTP/1.1", allowed=REFUSED | {405}),
    Odd(name="nul-in-path", head="GET /v2/models/%00 HTTP/1.1", allowed=REFUSED | {404}),
    Odd(name="bad-percent", head="GET /v2/models/%zz%ff HTTP/1.1", allowed=REFUSED | {404}),
    Odd(name="dots-in-path", head="GET /v2/models/../../etc/passwd HTTP/1.1", allowed=REFUSED | {404}),
    Odd(name="path-of-60-kB", head=f"GET /{'a' * 60_000} HTTP/1.1", allowed=REFUSED | CLOSED | {404}),
    Odd(name="http-0.9", head="GET /", allowed=REFUSED | CLOSED),
    Odd(name="http-1.0", head="GET /v2 HTTP/1.0", allowed=frozenset({200})),
    Odd(name="no-http", head="\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", allowed=REFUSED | CLOSED),
)  # fmt: skip


def send_odd(url: str, model: str, odd: Odd, headers: Mapping[str, str], patience_s: float) -> int | None:
    """The first answer's status, None where the connection is closed without one; raises TimeoutError for neither."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    lines = [
        odd.head.replace("{model}", model),
        f"Host: {parts.netloc}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    with socket.create_connection((parts.hostname, parts.port or 80), timeout=patience_s) as connection:
        try:
            connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + odd.body)
            if None in odd.allowed:
                connection.shutdown(socket.SHUT_WR)  # more would be waited for
            return _status(connection)
        except TimeoutError:
            raise
        except OSError:  # reset, or closed before all was sent
            return None


def _status(connection: socket.socket) -> int | None:
    received = b""
    while b"\r\n" not in received:
        part = connection.recv(65536)
        if not part:
            return None
        received += part
    return int(received.split(b" ", 2)[1])
