"""A server on a real socket that answers requests by a script, in the order of their arrival."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path

import numpy as np

from offramp.load.arrivals import parse_arrivals
from profiles.scores import FloatArray

Reply = tuple[bytes | None, ...]
"""The parts of an answer, which are written one by one; None closes the connection. An empty script never answers."""


def ok(body: str = '{"label": "yes", "score": 1.0}') -> bytes:
    """Returns an answer with a body."""
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


def refusal(status: int) -> bytes:
    """Returns an answer without a body."""
    return f"HTTP/1.1 {status} No\r\nContent-Length: 0\r\n\r\n".encode()


YES = (ok(),)


@dataclass
class Scripted:
    """A received request."""

    replies: Iterator[Reply]
    url: str = ""
    bodies: list[bytes] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)
    connections: list[int] = field(default_factory=list)
    """The index of the connection of each request."""
    num_connections: int = 0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers until the client or the script closes the connection."""
        index = self.num_connections
        self.num_connections += 1
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0])
                self.heads.append(head)
                self.connections.append(index)
                self.bodies.append(await reader.readexactly(length))
                await _write(writer, next(self.replies))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has gone
        finally:
            writer.close()


async def _write(writer: asyncio.StreamWriter, reply: Reply) -> None:
    for piece in reply:
        if piece is None:
            writer.close()
        else:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)  # the next piece is a packet of its own


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[None, None, None]]


@asynccontextmanager
async def listening(serve: Serve) -> AsyncIterator[int]:
    """Yields the port of a server that runs `serve` for each connection. Its connections are closed at the end."""
    running: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        running[asyncio.create_task(serve(reader, writer))] = writer

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            for writer in running.values():
                writer.close()  # which ends a `serve` that waits for its client
            await asyncio.gather(*running)


@asynccontextmanager
async def scripted(*replies: Reply, then: Reply = YES) -> AsyncIterator[Scripted]:
    """Yields a server at `url`, which answers all requests after the script with `then`."""
    state = Scripted(replies=chain(replies, repeat(then)))
    async with listening(state.connected) as port:
        state.url = f"http://127.0.0.1:{port}"
        yield state


def draw(spec: str, duration_s: float, seed: int = 0) -> FloatArray:
    """Draws the arrivals of a process, in seconds."""
    return parse_arrivals(spec)[0].draw(duration_s, np.random.default_rng(seed))


def trace(folder: Path, text: str, name: str = "trace") -> str:
    """Returns the arrivals option for a trace file."""
    (folder / name).write_text(text, encoding="utf-8")
    return f"trace:{folder / name}"


def per_second(arrivals_s_N: FloatArray, duration_s: int) -> list[int]:
    """Returns the number of arrivals in each second."""
    return [int(count) for count in np.bincount(arrivals_s_N.astype(np.int64), minlength=duration_s)]
