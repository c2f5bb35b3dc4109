"""What a request's line and headers say."""

from __future__ import annotations

import random
from collections.abc import Sequence

import httptools

Header = tuple[bytes, bytes]
REQUEST_ID = b"x-request-id"
SERVES_TIMEOUT = b"x-request-timeout-seconds"
"""A header that Serve reads."""
OF_UPGRADES = (b"upgrade", b"connection", b"http2-settings")
_ids = random.Random()  # names, not secrets; another sequence in every process


class RefusedHeadError(Exception):
    """A head that cannot be answered: status, kind and message of the refusal."""


def new_id() -> bytes:
    """A request's id."""
    return b"%032x" % _ids.getrandbits(128)


def check_head(headers: Sequence[Header], version: str) -> tuple[bytes, bool]:
    """The request's id, empty where it has none, and whether it sets Serve's timeout; names are in small letters.

    Raises RefusedHeadError.
    """
    name, has_serves_timeout, num_hosts, codings = b"", False, 0, list[bytes]()
    for key, value in headers:
        if key == b"host":
            num_hosts += 1
        elif key == b"transfer-encoding":
            codings.append(value.strip().lower())
        elif key == REQUEST_ID:
            name = name or value
        elif key == SERVES_TIMEOUT:
            has_serves_timeout = True
    if version not in ("1.1", "1.0"):
        raise RefusedHeadError(400, "input", "the protocol is not HTTP/1.1 or HTTP/1.0")
    if num_hosts > 1 or (not num_hosts and version == "1.1"):
        raise RefusedHeadError(400, "input", f"{num_hosts} Host headers; HTTP/1.1 needs exactly one")
    if codings and codings != [b"chunked"]:
        coding = b", ".join(codings)[:80].decode("latin-1")
        raise RefusedHeadError(501, "input", f"transfer-encoding {coding!r}; only chunked is supported")
    return name, has_serves_timeout


def without_upgrade(method: bytes, target: bytes, headers: Sequence[Header]) -> bytes:
    """The bytes of a head that asks for no other protocol (RFC 9110, 7.8: a server may ignore it)."""
    options = b",".join(value for name, value in headers if name == b"connection").lower()
    kept = [each for each in headers if each[0] not in OF_UPGRADES]
    if b"close" in options:
        kept.append((b"connection", b"close"))
    return b"%b %b HTTP/1.1\r\n%b\r\n" % (method, target, b"".join(b"%b: %b\r\n" % each for each in kept))


def origin_form(target: bytes) -> bytes:
    """Path and query of a target that names scheme and host, or is `*`; raises httptools' error for what is none."""
    if target.startswith(b"/"):
        return target
    if target == b"*":
        return b"/*"
    url = httptools.parse_url(target)
    return (url.path or b"/") + (b"?" + url.query if url.query else b"")


def size_of(target: bytes, headers: Sequence[Header]) -> int:
    """Bytes of a head, about."""
    return len(target) + sum(len(name) + len(value) + 4 for name, value in headers)
