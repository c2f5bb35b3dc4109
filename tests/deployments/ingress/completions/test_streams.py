"""Streams over our HTTP server: when chunks are sent, slow readers, and disconnecting callers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from deployments.api.http import build_api
from tests.deployments.ingress.completions.generating import CHAT, TEXT, Teller, events, listening, text_of
from tests.deployments.wire_fakes import until
from tests.earlyexit.codecs.prompts import prompt_codec

WAY = pytest.mark.parametrize("fast", [True, False], ids=["fast", "asgi"])
PATIENCE_S = 10.0


@pytest.fixture
def teller(tmp_path: Path) -> Teller:
    return Teller(codec=prompt_codec(tmp_path), may_say=asyncio.Semaphore(0))


def permits(teller: Teller) -> asyncio.Semaphore:
    assert teller.may_say is not None
    return teller.may_say


class Reader:
    """A caller that reads an answer's bytes as they arrive."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def ask(cls, port: int, body: dict[str, Any], path: str = "/v1/completions", limit: int = 65536) -> Reader:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=limit)
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: here\r\nx-request-id: r7\r\ncontent-length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        return cls(reader, writer)

    async def event(self) -> Any:
        """Returns the JSON of the next event."""
        async with asyncio.timeout(PATIENCE_S):
            line = b""
            while not line.startswith(b"data: "):
                line = await self.reader.readline()
                assert line, "the connection ended"
            return json.loads(line[6:])


@WAY
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)])
async def test_the_first_chunk_arrives_before_the_second_token_is_computed(
    teller: Teller, fast: bool, path: str, body: dict[str, Any]
) -> None:
    async with listening(teller, fast=fast) as port:
        reader = await Reader.ask(port, body | {"stream": True}, path)
        permits(teller).release()
        first = await reader.event()
        if "delta" in first["choices"][0]:
            assert first["choices"][0]["delta"]["role"] == "assistant"
            first = await reader.event()
        assert (first["choices"][0].get("text") or first["choices"][0]["delta"]["content"]) == "a"
        assert teller.computed == 1
        permits(teller).release()
        assert (await reader.event())["choices"][0]
        assert teller.computed == 2
        reader.writer.close()
        await until(lambda: teller.aborted == ["r7"])


@WAY
@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("num_said", [0, 2])
async def test_a_disconnect_ends_the_sequence(teller: Teller, fast: bool, streams: bool, num_said: int) -> None:
    async with listening(teller, fast=fast) as port:
        reader = await Reader.ask(port, TEXT | {"stream": streams})
        await until(lambda: len(teller.asked) == 1)
        for _ in range(num_said):
            permits(teller).release()
        await until(lambda: teller.computed == num_said)
        if streams and num_said:
            await reader.event()
        reader.writer.close()
        await until(lambda: teller.aborted == ["r7"])
        for _ in range(20):
            permits(teller).release()
        await asyncio.sleep(0)
        assert teller.computed == num_said
        await until(lambda: teller.counted == [("/v1/completions", 499)])


async def test_the_buffer_of_a_slow_reader_is_limited_by_max_tokens(teller: Teller) -> None:
    teller.may_say, teller.goes_on, teller.answer = None, True, b"x"
    app = build_api(teller)
    body = [{"type": "http.request", "body": json.dumps(TEXT | {"stream": True}).encode()}]
    room, sent = asyncio.Semaphore(0), []

    async def receive() -> Any:
        return body.pop() if body else await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        sent.append(message)
        if message["type"] == "http.response.body":
            await room.acquire()

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    task = asyncio.ensure_future(app(scope, receive, send))
    await until(lambda: teller.computed == 50 and len(sent) > 1)
    assert len(sent) == 2  # the head, and the first event, which the client has not taken
    for _ in range(60):
        room.release()
    await task
    assert text_of(events(b"".join(each.get("body", b"") for each in sent).decode())) == "x" * 50
    assert teller.aborted == []
