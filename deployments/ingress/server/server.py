"""The listener, and what its connections share."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from deployments.ingress.server.connection import Connection
from deployments.ingress.server.exchange import App
from deployments.ingress.server.lane import Lane
from deployments.ingress.server.limits import Limits
from deployments.ingress.server.timers import Deadlines

BACKLOG = 2048
"""Connections that wait to be taken, uvicorn's number."""


class HttpServer:
    """HTTP/1.1 and 1.0 on sockets that are bound already; serves one event loop's applications."""

    def __init__(
        self, app: App, *, lane: Lane | None = None, limits: Limits | None = None, outright: bool = False
    ) -> None:
        """`app` answers what `lane` does not have.

        `outright`: it is ours too. Else it is Serve's, which gives requests their ids and is told, not cancelled, when
        a caller leaves.
        """
        self.app = app
        self.outright = outright
        self.lane: Lane = lane or {}
        self.limits = limits or Limits()
        self.is_ending = False
        self.loop = asyncio.get_running_loop()
        lengths_s = {
            "idle": self.limits.idle_s,
            "head": self.limits.head_s,
            "body": self.limits.body_s,
            "stuck": self.limits.stuck_s,
            "linger": self.limits.linger_s,
        }
        self.deadlines = Deadlines[Connection](lengths_s, Connection.expire, self.loop)
        self._connections: set[Connection] = set()
        self._exit = asyncio.Event()
        self._left = asyncio.Event()
        self._listeners: list[asyncio.Server] = []

    @property
    def should_exit(self) -> bool:
        """Set by Serve, as it does uvicorn's: nobody new is let in, and who is inside gets his answer."""
        return self._exit.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        if value:
            self._exit.set()

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def admit(self, connection: Connection) -> bool:
        """Count one more, unless there are too many."""
        if len(self._connections) >= self.limits.connections:
            return False
        self._connections.add(connection)
        return True

    def forget(self, connection: Connection) -> None:
        """It has ended."""
        self._connections.discard(connection)
        if not self._connections:
            self._left.set()

    async def listen(self, sockets: Sequence[socket.socket]) -> None:
        """Take connections from now on."""
        for each in sockets:
            listener = await self.loop.create_server(lambda: Connection(self), sock=each, backlog=BACKLOG)
            self._listeners.append(listener)

    async def serve(self) -> None:
        """Until `should_exit`, and then until the last answer is out; cancelled, it ends at once."""
        try:
            await self._exit.wait()
            self._close_listeners()
            self.is_ending = True
            for connection in list(self._connections):
                if connection.is_idle:
                    connection.close()
            while self._connections:
                self._left.clear()
                await self._left.wait()
        finally:
            self._close_listeners()
            self.deadlines.close()
            for connection in list(self._connections):
                connection.abort()

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners = []
