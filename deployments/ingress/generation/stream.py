"""What a sequence says, as its caller takes it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from earlyexit.errors import DeadlineError
from earlyexit.generation.sequence import Said


class CutShortError(DeadlineError):
    """A limit of time ended a sequence after its first token; its caller keeps what was said."""

    def __init__(self, message: str, *, text: str) -> None:
        """`text`: the text that was held back, because it might have become a stop string."""
        super().__init__(message)
        self.text = text


def _nobody() -> None:
    """Nothing runs yet."""


class Stream:
    """An asynchronous iterator of `Said`, the last of which says why it `ended`; on one event loop, for one reader.

    It is never longer than the request's `max_tokens`: a reader who is slow holds no pages of any replica, for the
    sequence goes on without him, and is over the sooner. An error is raised once everything said before it was taken.
    Errors that come before the first token (no pages, no replica, no time) are raised by the first `anext`: who answers
    with a status takes that first. Whoever stops before the end must `abort`, or close it (`contextlib.aclosing`).
    """

    def __init__(self, num_prompt: int) -> None:
        self.num_prompt = num_prompt
        """Tokens of the prompt."""
        self.num_said = 0
        """Tokens that came of it so far."""
        self.when_aborted: Callable[[], None] = _nobody
        """Told once; the service's."""
        self._said: deque[Said] = deque()
        self._error: Exception | None = None
        self._is_over = False
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Said:
        while not self._said:
            if self._error is not None:
                raise self._error
            if self._is_over:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._said.popleft()

    @property
    def is_over(self) -> bool:
        """Whether nothing more is said."""
        return self._is_over

    def abort(self) -> None:
        """Give the sequence up: its pages are freed, and what nobody has taken yet is forgotten."""
        if not self._is_over:
            self._is_over = True
            self.when_aborted()
            self._wake()
        self._said.clear()

    async def aclose(self) -> None:
        """The same, for `contextlib.aclosing`."""
        self.abort()

    # The service's side

    def put(self, said: Said) -> None:
        """A token came."""
        if self._is_over:
            return
        self.num_said += 1
        self._said.append(said)
        self._is_over = said.ended is not None
        self._wake()

    def fail(self, error: Exception) -> None:
        """No more tokens come, for this reason."""
        if not self._is_over:
            self._error, self._is_over = error, True
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
