"""A server that answers every request at once and alike: what is left of a request's time is the client's.

python -m experiments.peers.null_server <port>
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

from httptools import HttpRequestParser

BODY = b'{"label": "yes", "score": 1.0, "exit": 0}'
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)


class Null(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._parser = HttpRequestParser(self)
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has the methods, but not the class

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        """Answer."""
        self._transport.write(ANSWER)


async def serve(port: int) -> None:
    """Until it is cancelled; says the port once it listens, which of 0 is any free one."""
    server = await asyncio.get_running_loop().create_server(Null, "127.0.0.1", port, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(int(sys.argv[1])))
