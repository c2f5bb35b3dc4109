"""The connection to one replica, over which calls go out and parts of their replies come in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from deployments.encoding import Begin, End, Forget, MalformedError, Refused, encode, from_replica
from deployments.frames import Frames
from deployments.messages import Address, Chunk, StageCall

logger = logging.getLogger(f"ray.serve.{__name__}")

CONNECT_S = 5.0
"""A connection that takes longer to come about is given up."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
"""Between attempts to connect; doubled each time."""


@dataclass(slots=True)
class _Open:
    """A call without its whole reply."""

    unsettled: int
    take: Callable[[Chunk], None]
    done: asyncio.Future[None]


class ReplicaLink:
    """Connects, and connects again, until it is closed; on one event loop."""

    def __init__(
        self,
        replica: str,
        address: Address,
        on_change: Callable[[], None],
        *,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`on_change`: told when it comes to be up, and when no longer."""
        self.replica = replica
        self._address = address
        self._on_change = on_change
        self._pause = pause
        self._frames: Frames | None = None
        self._ended = asyncio.Event()
        self._calls: dict[int, _Open] = {}
        self._serial = 0
        self._is_leaving = False
        self._task = asyncio.get_running_loop().create_task(self._keep())

    @property
    def is_up(self) -> bool:
        """Whether calls can be made."""
        return self._frames is not None

    async def call(self, call: StageCall, take: Callable[[Chunk], None]) -> None:
        """Have a call run; `take` gets every part of its reply, and all inputs are settled when this returns.

        Raises ConnectionError where there is no connection, or no longer; RuntimeError where the replica refuses.
        """
        if self._frames is None:
            raise ConnectionError(f"no connection to {self.replica}")
        self._serial = serial = self._serial + 1
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._calls[serial] = _Open(len(call.remaining_s), take, done)
        self._frames.send(encode(Begin(serial, call)))
        try:
            await done
        except asyncio.CancelledError:
            self._forget(serial)
            raise
        finally:
            del self._calls[serial]
            self._close_if_left()

    def end(self, sequences: Iterable[int]) -> None:
        """Have the replica give up what it keeps of these; where there is no connection any more, it has already."""
        if self._frames is not None:
            self._frames.send(encode(End(tuple(sequences))))

    def leave(self) -> None:
        """Close as soon as the calls under way are done; nobody makes new ones."""
        self._is_leaving = True
        self._close_if_left()

    def _forget(self, serial: int) -> None:
        if self._frames is not None:
            self._frames.send(encode(Forget(serial)))

    def _close_if_left(self) -> None:
        if self._is_leaving and not self._calls:
            self._task.cancel()
            if self._frames is not None:
                self._frames.close()

    async def _keep(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                await self._connect()
            except Exception as error:  # whatever it is, the next attempt may succeed
                logger.warning("no connection to %s: %r", self.replica, error)
            else:
                pause_s = FIRST_PAUSE_S
                await self._ended.wait()
            await self._pause(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _connect(self) -> None:
        frames = Frames(self._hear, self._end)
        self._ended.clear()
        async with asyncio.timeout(CONNECT_S):
            await asyncio.get_running_loop().create_connection(lambda: frames, self._address.host, self._address.port)
        if self._ended.is_set():
            raise ConnectionError("closed at once")
        frames.send(self._address.word.encode())
        self._frames = frames
        self._on_change()

    def _end(self) -> None:
        self._frames = None
        self._ended.set()
        for call in self._calls.values():
            _fail(call, ConnectionError(f"{self.replica} closed the connection"))
        self._on_change()

    def _hear(self, frame: memoryview) -> None:
        try:
            message = from_replica(frame)
        except MalformedError as error:  # of another version, say: nothing that follows can be trusted
            logger.warning("%s said what no replica says: %s", self.replica, error)
            assert self._frames is not None
            self._frames.abort()
            return
        call = self._calls.get(message.serial)
        if call is None:  # given up
            return
        if isinstance(message, Refused):
            _fail(call, RuntimeError(message.reason))
            return
        try:
            call.take(message.chunk)
        except Exception as error:
            logger.exception("a part of a reply could not be taken")
            _fail(call, error)
            self._forget(message.serial)
            return
        call.unsettled -= message.chunk.num_inputs
        if not call.unsettled and not call.done.done():
            call.done.set_result(None)


def _fail(call: _Open, error: Exception) -> None:
    if not call.done.done():
        call.done.set_exception(error)
