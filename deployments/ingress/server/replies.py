"""Answers as bytes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from email.utils import formatdate
from functools import cache
from http import HTTPStatus

Headers = Iterable[tuple[bytes, bytes]]
WITHOUT_BODY = frozenset({204, 304})
CLOSE = b"connection: close\r\n"
KEEP = b"connection: keep-alive\r\n"
"""Said to HTTP/1.0, which closes otherwise."""


class _Date:
    """The `Date` of answers, written once a second."""

    def __init__(self) -> None:
        self._second = 0
        self._line = b""

    def line(self) -> bytes:
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._line = b"date: %b\r\n" % formatdate(second, usegmt=True).encode()
        return self._line


_DATE = _Date()


def head_of(status: int, headers: Headers, more: bytes = b"") -> bytes:
    """A status line and headers; `more`: further lines as they are."""
    lines = [_status_line(status), _DATE.line(), more]
    for name, value in headers:
        lines += (name, b": ", value, b"\r\n")
    lines.append(b"\r\n")
    return b"".join(lines)


def plain(status: int, words: str) -> bytes:
    """The last answer of a connection, to what is no request."""
    body = words.encode()
    headers = ((b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(body)))
    return head_of(status, headers, CLOSE) + body


@cache
def _status_line(status: int) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return b"HTTP/1.1 %d %b\r\n" % (status, phrase.encode())
