"""From checked texts to answers: what every route of an ingress calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from deployments.bodies import InferRequest
from deployments.dispatcher import Dispatcher
from deployments.flights import Flight
from deployments.settings import ServeSettings
from earlyexit.clock import Clock
from earlyexit.errors import DeadlineError, InputError, OfframpError
from earlyexit.tokenizer import TextTokenizer, TokenIds
from earlyexit.wire import Answer

LONG_TEXT_CHARS = 20_000
"""Above this, tokenizing takes milliseconds and leaves the event loop."""


class InferService:
    """Tokenizes, dispatches, waits; raises what the HTTP layer turns into a status."""

    def __init__(self, tokenizer: TextTokenizer, dispatcher: Dispatcher, settings: ServeSettings, clock: Clock) -> None:
        self._tokenizer = tokenizer
        self._dispatcher = dispatcher
        self._settings = settings
        self._clock = clock

    async def infer(self, request: InferRequest) -> list[Answer]:
        """The answers, in the order of the texts.

        Raises InputError for what the settings or the model do not allow, OverloadedError, StageUnavailableError,
        DeadlineError, ExecutionError.
        """
        timeout_s = self._timeout_s(request.timeout_s)
        deadline_s = self._clock.now_s() + timeout_s
        limit = self._settings.max_inputs_per_request
        if len(request.texts) > limit:
            raise InputError(f"{len(request.texts)} inputs in one request; at most {limit} are taken")
        encoded = await self._encode(request.texts, truncate=request.truncate)
        waiter = _Waiter(len(encoded), asyncio.get_running_loop())
        flights = self._dispatcher.submit(
            list(zip(request.ids, encoded, strict=True)), deadline_s, waiter.settle, request_id=request.request_id
        )
        try:
            async with asyncio.timeout(deadline_s - self._clock.now_s()):
                outcomes = await waiter.outcomes
        except TimeoutError:
            raise DeadlineError(f"no answer within {timeout_s:g} s") from None
        finally:
            self._dispatcher.give_up([flight for flight in flights if not flight.settled])
        return [outcomes[flight.serial] for flight in flights]

    def _timeout_s(self, asked: float | None) -> float:
        longest = self._settings.max_timeout_s
        if asked is not None and asked > longest:
            raise InputError(f"a timeout of {asked:g} s; at most {longest:g} s are taken")
        return asked or self._settings.default_timeout_s

    async def _encode(self, texts: Sequence[str], *, truncate: bool) -> list[TokenIds]:
        encode: Callable[[], list[TokenIds]] = lambda: self._tokenizer.encode(texts, truncate=truncate)  # noqa: E731
        if sum(map(len, texts)) > LONG_TEXT_CHARS:
            return await asyncio.to_thread(encode)
        return encode()


class _Waiter:
    """Collects a request's outcomes; the first error ends it."""

    def __init__(self, num_inputs: int, loop: asyncio.AbstractEventLoop) -> None:
        self._missing = num_inputs
        self._answers: dict[int, Answer] = {}
        self.outcomes: asyncio.Future[dict[int, Answer]] = loop.create_future()

    def settle(self, flight: Flight, outcome: Answer | OfframpError) -> None:
        """Take one input's outcome."""
        if self.outcomes.done():
            return
        if isinstance(outcome, OfframpError):
            self.outcomes.set_exception(outcome)
            return
        self._answers[flight.serial] = outcome
        self._missing -= 1
        if not self._missing:
            self.outcomes.set_result(self._answers)
