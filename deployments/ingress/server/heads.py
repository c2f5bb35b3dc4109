"""What a request's line and headers say."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import httptools

Address = tuple[str, int] | None
Header = tuple[bytes, bytes]
ASGI = {"version": "3.0", "spec_version": "2.3"}
REQUEST_ID = b"x-request-id"
SERVES_TIMEOUT = b"x-request-timeout-seconds"
"""A header that Serve reads."""
_ids = random.Random()  # names, not secrets; another sequence in every process


@dataclass(slots=True)
class Head:
    """One that is whole; not frozen, which would take twice as long to make."""

    target: bytes
    headers: list[Header]
    """Names in small letters."""
    raw_path: bytes
    query: bytes
    length: int
    """Of the body, in bytes, where it is told."""
    chunked: bool
    expects: bool
    """Whether the caller waits to be told to send its body."""
    request_id: bytes
    """Empty where the caller gave none."""
    has_serves_timeout: bool

    def name(self) -> bytes:
        """The request's id: one that is made now stands among the headers too."""
        if not self.request_id:
            self.request_id = b"%032x" % _ids.getrandbits(128)
            self.headers.append((REQUEST_ID, self.request_id))
        return self.request_id

    def scope(self, method: str, version: str, client: Address, server: Address) -> dict[str, Any]:
        """ASGI's."""
        return {
            "type": "http",
            "asgi": ASGI,
            "http_version": version,
            "server": server,
            "client": client,
            "scheme": "http",
            "root_path": "",
            "method": method,
            "path": self._path(),
            "raw_path": self.raw_path,
            "query_string": self.query,
            "headers": self.headers,
        }

    def _path(self) -> str:
        """Decoded; of a target that names scheme and host, too."""
        if not self.raw_path.startswith(b"/"):
            try:
                url = httptools.parse_url(self.target)
            except httptools.HttpParserInvalidURLError:  # `OPTIONS *`
                return "*"
            self.raw_path, self.query = url.path or b"/", url.query or b""
        path = self.raw_path.partition(b"#")[0].decode("latin-1")
        return unquote(path) if "%" in path else path


def head_of_request(target: bytes, headers: list[Header]) -> Head:
    """Of what the parser has found good."""
    raw_path, _, query = target.partition(b"?")
    head = Head(target, headers, raw_path, query, 0, False, False, b"", False)
    for name, value in headers:
        if name == b"content-length":
            head.length = int(value)
        elif name == b"transfer-encoding":
            head.chunked = True
        elif name == b"expect":
            head.expects = value.lower() == b"100-continue"
        elif name == REQUEST_ID:
            head.request_id = value
        elif name == SERVES_TIMEOUT:
            head.has_serves_timeout = True
    return head


def size_of(target: bytes, headers: list[Header]) -> int:
    """Bytes of a head, about."""
    return len(target) + sum(len(name) + len(value) + 4 for name, value in headers)


def address_of(given: Any) -> Address:
    """Of what a transport says of an end; None where that is no pair."""
    return (str(given[0]), int(given[1])) if isinstance(given, tuple) else None
