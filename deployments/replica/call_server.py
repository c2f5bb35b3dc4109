"""The port on which a replica takes calls, beside Serve's, from ingresses that know its secret."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from deployments.replica.host import OpenCall, StageHost, chunks_by_call
from deployments.wire.encoding import (
    LENGTH_BYTES,
    LONGEST,
    Begin,
    End,
    Forget,
    Frames,
    Host,
    MalformedError,
    Refused,
    encode,
    encode_part,
    from_ingress,
)
from deployments.wire.messages import Address, Assignment, Chunk, StageCall
from earlyexit.engine.device import Release
from earlyexit.named import HopDtype


class Sender:
    """Sends frames at once, also from the device's thread; the event loop sends what the socket does not take then.

    Handing every part of a reply to the event loop would cost the device's thread more than sending it, because both
    then want the interpreter's lock (docs/results.md).
    """

    def __init__(self, transport: asyncio.BaseTransport, loop: asyncio.AbstractEventLoop) -> None:
        """`transport`: of an open connection; it sends nothing itself."""
        self._socket = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        self._socket.setblocking(False)
        self._loop = loop
        self._lock = threading.Lock()
        self._backlog = bytearray()
        self._is_closed = False
        self._when_sent: Callable[[], None] | None = None

    def send(self, frame: bytes) -> None:
        """Send a frame; does nothing once the connection has ended."""
        with self._lock:
            if self._is_closed:
                return
            parts = len(frame).to_bytes(LENGTH_BYTES, "big"), frame
            if self._backlog:  # the event loop is at it
                self._backlog += b"".join(parts)
                return
            sent = self._sent_of(parts)
            if sent < LENGTH_BYTES + len(frame):
                self._backlog += b"".join(parts)
                del self._backlog[:sent]
                self._loop.call_soon_threadsafe(self._watch)

    def when_sent(self, then: Callable[[], None]) -> None:
        """Call this once everything is sent; on the event loop."""
        with self._lock:
            if self._backlog:
                self._when_sent = then
                return
        then()

    def close(self) -> None:
        """Note that the connection has ended; on the event loop."""
        with self._lock:
            self._is_closed = True
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()

    def _sent_of(self, parts: Sequence[bytes | bytearray]) -> int:
        """Sends what the socket takes now; returns the number of bytes."""
        try:
            return self._socket.sendmsg(parts)
        except BlockingIOError:
            return 0
        except OSError:  # the connection is gone, which the event loop is told too: it ends the calls
            return sum(map(len, parts))

    def _watch(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._loop.add_writer(self._socket.fileno(), self._go_on)

    def _go_on(self) -> None:
        with self._lock:
            del self._backlog[: self._sent_of([self._backlog])]
            if self._backlog:
                return
            self._loop.remove_writer(self._socket.fileno())
        if self._when_sent is not None:
            self._when_sent()


logger = logging.getLogger(f"ray.serve.{__name__}")

WORD_BYTES = 32
WORD_WITHIN_S = 5.0
"""A connection that has not sent the replica's word by then is closed."""
MOST_UNKNOWN = 256
"""The most connections that have not sent the word yet; more are closed at once, as each holds a descriptor."""


class CallServer:
    """A replica's side of its connections to ingresses; on the replica's event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, hop_dtype: HopDtype = "same") -> None:
        self._loop = loop
        self._hop_dtype = hop_dtype
        self._word = secrets.token_hex(WORD_BYTES)
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self.unknown: set[_Connection] = set()
        """Connections that have not sent the word yet."""
        self._lock = threading.Lock()
        self._open = 0
        self._idle: asyncio.Event | None = None
        """Set when no call is open, once `close` waits for that."""

    async def listen(self, host: StageHost, ip: str) -> Address:
        """Take calls at a free port of this address until `close`; returns what an ingress must know."""
        server = await self._loop.create_server(lambda: _Connection(self, host).frames, ip, 0)
        self._server = server
        return Address(host=ip, port=server.sockets[0].getsockname()[1], word=self._word)

    def deliver(self, releases: list[Release[Any]], busy: float = 0.0) -> None:
        """Send what the device released to the callers, and how busy it was; called by the device's thread."""
        for opened, chunk in chunks_by_call(releases, self._hop_dtype, busy):
            opened.take(chunk)

    async def close(self) -> None:
        """Take no new connections, and return when every call has its reply."""
        if self._server is not None:
            self._server.close()
        self._idle = asyncio.Event()
        self.count(0)
        await self._idle.wait()
        for connection in tuple(self._connections):
            connection.finish()

    def knows(self, word: memoryview) -> bool:
        """Whether a connection's first frame is this replica's word."""
        return hmac.compare_digest(word, self._word.encode())

    def joined(self, connection: _Connection) -> None:
        """Note a new connection."""
        self._connections.add(connection)

    def left(self, connection: _Connection) -> None:
        """Note that a connection has ended."""
        self.unknown.discard(connection)
        self._connections.discard(connection)

    def count(self, calls: int) -> None:
        """Note that so many more (or fewer) calls are open; from any thread."""
        with self._lock:
            self._open += calls
            if not self._open and self._idle is not None:
                self._loop.call_soon_threadsafe(self._idle.set)


class _Connection:
    """The connection of one ingress. Calls begin on the event loop, and end there or in the device's thread."""

    def __init__(self, server: CallServer, host: StageHost) -> None:
        self.frames = Frames(self._hear_word, self._end, self._open, longest=2 * WORD_BYTES)
        self._calls: dict[int, OpenCall] = {}
        self._sequences: set[int] = set()
        """Sequences that came over it and were not ended."""
        self._server = server
        self._host = host
        self._is_known = False

    def _open(self, transport: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        self._sender = Sender(transport, loop)
        self._server.joined(self)
        self._server.unknown.add(self)
        self._deadline = loop.call_later(WORD_WITHIN_S, self.frames.abort)
        if len(self._server.unknown) > MOST_UNKNOWN:
            logger.warning("a connection was closed: %d others have not sent this replica's word", MOST_UNKNOWN)
            self.frames.abort()

    def finish(self) -> None:
        """End the connection when everything is sent."""
        self._sender.when_sent(self.frames.close)

    def _hear_word(self, frame: memoryview) -> None:
        if self._is_known:
            self._hear(frame)
        elif self._server.knows(frame):
            self._is_known, self.frames.longest = True, LONGEST
            self._deadline.cancel()
            self._server.unknown.discard(self)
        else:
            logger.warning("a connection without this replica's word was refused")
            self.frames.abort()

    def _hear(self, frame: memoryview) -> None:
        try:
            message = from_ingress(frame)
        except MalformedError as error:  # of another version, say: nothing that follows can be trusted
            logger.warning("a connection said what no ingress says: %s", error)
            self.frames.abort()
            return
        match message:
            case Begin():
                self._begin(message.serial, message.call)
            case Forget():
                self._forget(message.serial)
            case End():
                self._end_sequences(self._sequences.intersection(message.sequences))
            case Host():
                self._follow(message.assignment)

    def _follow(self, assignment: Assignment) -> None:
        try:
            self._host.follow(assignment)
        except Exception:  # each call of that plan is refused with the reason
            logger.exception("plan %d cannot be followed", assignment.epoch)

    def _begin(self, serial: int, call: StageCall) -> None:
        opened = self._calls[serial] = OpenCall(len(call.remaining_s), partial(self._reply, serial))
        if call.traced:
            opened.begun = {call.piece.sample_ids[position]: [] for position in call.traced}
        self._sequences.update(call.sequences)
        self._server.count(+1)
        try:
            self._host.submit(call, opened)
        except Exception as error:  # whatever it is, the caller must learn of it
            logger.exception("a call was refused")
            self._close(serial)
            self._sender.send(encode(Refused(serial, repr(error))))

    def _reply(self, serial: int, chunk: Chunk) -> None:
        opened = self._calls.get(serial)
        if opened is None:  # forgotten, while the device ran it
            return
        self._sender.send(encode_part(serial, chunk))
        opened.unsettled -= chunk.num_inputs
        if not opened.unsettled:
            self._close(serial)

    def _forget(self, serial: int) -> None:
        opened = self._close(serial)
        if opened is not None:  # else its last part was on its way
            self._host.forget(opened)

    def _end_sequences(self, sequences: set[int]) -> None:
        if sequences:
            self._sequences -= sequences
            self._host.end(sequences)

    def _close(self, serial: int) -> OpenCall | None:
        opened = self._calls.pop(serial, None)
        if opened is not None:
            self._server.count(-1)
        return opened

    def _end(self) -> None:
        self._deadline.cancel()
        for serial in tuple(self._calls):  # the rest is no longer awaited
            self._forget(serial)
        self._end_sequences(set(self._sequences))
        self._sender.close()
        self._server.left(self)
