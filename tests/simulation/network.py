"""An event loop on virtual time, with connections in memory that delay, drop, repeat and split messages, and break."""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simulator.events import COMES, Events, SimulatedTime

HOST: contextvars.ContextVar[str] = contextvars.ContextVar("host")
"""The process to which a coroutine belongs, by name."""


SPLIT = 0.1
"""Share of the frames that arrive in two parts."""


@dataclass(slots=True)
class Weather:
    """The faults of the network. All of them are zero once the faults have stopped."""

    delay_s: float = 0.002
    """The longest delay of a frame."""
    late: float = 0.0
    """Share of the replies that are late."""
    late_s: float = 0.0
    """The longest delay of a late reply."""
    lost: float = 0.0
    """Share of the replies that never arrive, although their connection stays."""
    repeated: float = 0.0
    """Share of the replies that arrive twice."""


class VirtualTransport(asyncio.Transport):
    """One end of a connection. Data that is written together arrives together, in order, after a delay."""

    def __init__(self, network: Network, rng: random.Random, *, replies: bool) -> None:
        super().__init__()
        self._network = network
        self._rng = rng
        self._replies = replies
        self._last_s = 0.0
        self._is_closing = False
        self._is_lost = False
        self.peer: VirtualTransport | None = None
        self.protocol: asyncio.BufferedProtocol | None = None

    def is_closing(self) -> bool:
        return self._is_closing

    def write(self, data: Any) -> None:
        self.writelines((data,))

    def writelines(self, parts: Any) -> None:
        """Sends one frame."""
        if self._is_closing:
            return
        frame, weather, rng = b"".join(parts), self._network.weather, self._rng
        delay_s, times = rng.random() * weather.delay_s, 1
        if self._replies:
            if rng.random() < weather.late:
                delay_s += rng.random() * weather.late_s
            times = 0 if rng.random() < weather.lost else 2 if rng.random() < weather.repeated else 1
        cut = rng.randrange(len(frame)) if rng.random() < SPLIT else 0
        for part in (frame[:cut], frame[cut:]) * times:
            self._at_peer(delay_s, self._deliver, part)

    def close(self) -> None:
        """Closes the connection; the other end notices it after all sent data."""
        if not self._is_closing:
            self._is_closing = True
            self._at_peer(0.0, VirtualTransport.abort, None)
            self._network.loop.call_soon(self._lose)

    def abort(self, _: object = None) -> None:
        """Ends the connection at once; the other end notices it a moment later."""
        if not self._is_lost:
            self._is_closing = True
            self._network.loop.call_soon(self._lose)
            self._at_peer(0.0, VirtualTransport.abort, None)

    def vanish(self) -> None:
        """Ends the process at this end."""
        self._is_closing = self._is_lost = True
        self._at_peer(0.0, VirtualTransport.abort, None)

    def _at_peer(self, delay_s: float, what: Callable[[VirtualTransport, Any], None], argument: Any) -> None:
        events, peer = self._network.loop.events, self.peer
        assert peer is not None
        self._last_s = max(self._last_s, events.time_s + delay_s)
        events.at(self._last_s, COMES, lambda _: self._network.loop.run(what, peer, argument))

    def _deliver(self, peer: VirtualTransport, frame: bytes) -> None:
        left = memoryview(frame)
        while left and not peer._is_closing:
            assert peer.protocol is not None
            buffer = memoryview(peer.protocol.get_buffer(-1))
            taken = min(len(buffer), len(left))
            buffer[:taken] = left[:taken]
            left = left[taken:]
            peer.protocol.buffer_updated(taken)

    def _lose(self) -> None:
        if not self._is_lost:
            self._is_lost = True
            assert self.protocol is not None
            self.protocol.connection_lost(None)


class Server:
    """A port that accepts connections."""

    def __init__(self, network: Network, port: int, factory: Callable[[], asyncio.BufferedProtocol]) -> None:
        self.port, self.factory = port, factory
        self._network = network
        self.sockets = (self,)

    def getsockname(self) -> tuple[str, int]:
        return "", self.port

    def close(self) -> None:
        self._network.servers.pop(self.port, None)


class Network:
    """All connections of the simulated service."""

    def __init__(self, seed: int, weather: Weather) -> None:
        self.weather = weather
        self.loop: VirtualLoop
        self.servers: dict[int, Server] = {}
        self.cut_off: set[str] = set()
        """Hosts that are unreachable in both directions, by name."""
        self._seed = seed
        self._num_ports = 0
        self._connections: dict[tuple[str, str], list[tuple[VirtualTransport, VirtualTransport]]] = {}
        """The two ends of each connection, by client and server."""
        self._num_connections = 0

    def listen(self, factory: Callable[[], asyncio.BufferedProtocol]) -> Server:
        self._num_ports += 1
        server = self.servers[self._num_ports] = Server(self, self._num_ports, factory)
        return server

    def connect(self, client: str, host: str, port: int, factory: Callable[[], Any]) -> tuple[VirtualTransport, Any]:
        """Opens a connection; raises ConnectionRefusedError."""
        server = self.servers.get(port)
        if server is None or self.cut_off & {client, host}:
            raise ConnectionRefusedError(f"{host} takes no connections")
        self._num_connections += 1
        rng = random.Random(f"{self._seed} {self._num_connections}")
        near = VirtualTransport(self, rng, replies=False)
        far = VirtualTransport(self, rng, replies=True)
        near.peer, far.peer = far, near
        protocol, far.protocol = factory(), server.factory()
        near.protocol = protocol
        self._connections.setdefault((client, host), []).append((near, far))
        far.protocol.connection_made(far)
        protocol.connection_made(near)
        return near, protocol

    def cut(self, host: str) -> None:
        """Breaks every connection of a host."""
        for ends in self._of(host):
            self.loop.run(VirtualTransport.abort, ends[0], None)

    def vanish(self, host: str) -> None:
        """Ends a host's process."""
        self.cut_off.add(host)
        for (client, server), ends in self._connections.items():
            for near, far in ends:
                if client == host:
                    near.vanish()
                if server == host:
                    far.vanish()

    def _of(self, host: str) -> list[tuple[VirtualTransport, VirtualTransport]]:
        return [each for hosts, ends in self._connections.items() if host in hosts for each in ends]


class VirtualLoop(SimulatedTime):
    """Runs coroutines on virtual time, with connections, and with threads whose work takes no time."""

    def __init__(self, events: Events, network: Network) -> None:
        super().__init__(events)
        self.events = events
        self._network = network
        network.loop = self

    def run(self, call: Callable[..., object], *arguments: Any) -> None:
        """Calls a function now, as the loop would."""
        self.call_soon(call, *arguments)

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override] # typeshed's is generic in the arguments
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override] # as above
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        await asyncio.sleep(0.001)
        return self._network.connect(HOST.get(), host, port, protocol_factory)

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        return self._network.listen(protocol_factory)
