"""Streams of text on their way from a server, blocking and asynchronous."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Self

import httpx

from earlyexit.errors import OfframpError
from offramp.client.generation import Generation, Piece, Reading

BROKEN = "the server's stream broke off"


class Pieces:
    """An iterator of pieces of text; a context manager, since closing it early ends the sequence."""

    def __init__(self, response: httpx.Response, reading: Reading) -> None:
        self._response = response
        self._reading = reading
        self._pieces = self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def close(self) -> None:
        """Tell the server that the stream is no longer read."""
        self._response.close()

    def whole(self) -> Generation:
        """The answer, once all of it was read; raises OfframpError before."""
        return self._reading.whole()

    def _read(self) -> Iterator[Piece]:
        try:
            for line in self._response.iter_lines():
                piece = self._reading.line(line)
                if piece is not None:
                    yield piece
        except httpx.RequestError as error:
            raise OfframpError(f"{BROKEN}: {error or type(error).__name__}") from error
        finally:
            self._response.close()
        self._reading.whole()  # raises where it came to no end


class AsyncPieces:
    """`Pieces` for asyncio."""

    def __init__(self, response: httpx.Response, reading: Reading) -> None:
        self._response = response
        self._reading = reading
        self._pieces = self._read()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self._pieces

    async def close(self) -> None:
        await self._response.aclose()

    def whole(self) -> Generation:
        return self._reading.whole()

    async def _read(self) -> AsyncIterator[Piece]:
        try:
            async for line in self._response.aiter_lines():
                piece = self._reading.line(line)
                if piece is not None:
                    yield piece
        except httpx.RequestError as error:
            raise OfframpError(f"{BROKEN}: {error or type(error).__name__}") from error
        finally:
            await self._response.aclose()
        self._reading.whole()
