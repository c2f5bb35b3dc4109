"""Answers checked requests: encodes their inputs, passes them to the dispatcher, and awaits the outcomes."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

from deployments.api.parsing import InferRequest
from deployments.ingress.core.inputs import PendingInput
from deployments.ingress.dispatcher import CallLater, Dispatcher, call_later
from deployments.settings import ServeSettings
from earlyexit.clock import Clock
from earlyexit.codecs.base import Codec, Encode
from earlyexit.errors import DeadlineError, InputError, OfframpError, OverloadedError, UnprocessableInputError
from earlyexit.network.boundary import Answer, Encoded, TensorSpec, mismatch

MOST_ENCODERS = 4
"""Threads for inputs that take milliseconds to encode. Each may hold a decoded image of the largest size."""
RETRY_S = 1.0
"""Retry after so many seconds if too many inputs wait to be encoded."""

LAST_RESORT_S = 1.0
"""A request without an outcome ends so many seconds after its deadline."""
ABANDONED = "abandoned"
"""The reason for dropping inputs whose caller has disconnected."""


@dataclass(slots=True, eq=False)
class InferService:
    """Answers requests by one dispatcher."""

    codec: Codec[Any]
    dispatcher: Dispatcher
    settings: ServeSettings
    clock: Clock
    _: KW_ONLY
    inputs: Sequence[TensorSpec] | None = None
    """The tensors that the network takes; None if the model does not declare them."""
    trace: Callable[[Sequence[PendingInput]], None] | None = None
    """Called with the inputs of each request; None without tracing."""
    encode: Encode | None = None
    """None for the codec's."""
    later: CallLater = call_later
    _encoders: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(min(MOST_ENCODERS, os.cpu_count() or 1), "encode"), init=False
    )
    _num_encoding: int = field(default=0, init=False)

    async def infer(self, request: InferRequest) -> list[Answer]:
        """Returns the answers in the order of the inputs.

        Raises InputError for requests that the settings or the model do not allow, AdmissionError, OverloadedError,
        StageUnavailableError, DeadlineError, ExecutionError.
        """
        arrived_s = self.clock.now_s()
        asked_s, longest_s = request.timeout_s, self.settings.max_timeout_s
        if asked_s is not None and asked_s > longest_s:
            raise InputError(f"a timeout of {asked_s:g} s; at most {longest_s:g} s are taken")
        timeout_s = min(asked_s or self.settings.default_timeout_s, self.settings.slo_s or math.inf)
        deadline_s = arrived_s + timeout_s
        limit = self.settings.max_inputs_per_request
        if len(request.rows) > limit:
            raise InputError(f"{len(request.rows)} inputs in one request; at most {limit} are taken")
        self.dispatcher.check(len(request.rows), deadline_s, num_coming=self._num_encoding)
        encoded = await self._encode(request.rows, deadline_s, timeout_s, truncate=request.truncate)
        if self.inputs is not None:
            for k, each in enumerate(encoded):
                if (said := mismatch(self.inputs, each)) is not None:  # it would fail its batch, and the others in it
                    raise UnprocessableInputError(f"input {k}: {said}")
        waiter = _Waiter(len(encoded), asyncio.get_running_loop())
        flights = self.dispatcher.submit(
            list(zip(request.ids, encoded, strict=True)),
            deadline_s,
            waiter.settle,
            arrived_s=arrived_s,
            request_id=request.request_id,
        )
        late = partial(waiter.fail, DeadlineError(f"no answer within {timeout_s:g} s"))
        last_resort = self.later(max(0.0, deadline_s - self.clock.now_s()) + LAST_RESORT_S, late)
        reason = ABANDONED
        try:
            if self.trace is not None:
                self.trace(flights)
            outcomes = await waiter.outcomes
        except OfframpError as error:  # the first one; inputs without an outcome are then given up
            reason = error.kind
            raise
        finally:
            last_resort.cancel()
            self.dispatcher.give_up(flights, reason)
        return [outcomes[flight] for flight in flights]

    async def _encode(
        self, rows: Sequence[Any], deadline_s: float, timeout_s: float, *, truncate: bool
    ) -> Sequence[Encoded]:
        encode_rows = self.encode or self.codec.encode
        if not self.codec.is_slow(rows):
            return encode_rows(rows, truncate=truncate)
        if self._num_encoding + len(rows) > self.settings.max_queued:
            message = f"{self._num_encoding} inputs wait to be encoded, at most {self.settings.max_queued} are taken"
            self.dispatcher.core.refuse(OverloadedError(message, retry_after_s=RETRY_S), len(rows))
        self._num_encoding += len(rows)
        encode = partial(encode_rows, rows, truncate=truncate)
        try:
            async with asyncio.timeout(deadline_s - self.clock.now_s()):
                return await asyncio.get_running_loop().run_in_executor(self._encoders, encode)
        except TimeoutError:
            self.dispatcher.core.refuse(DeadlineError(f"no answer within {timeout_s:g} s"), len(rows))
        finally:
            self._num_encoding -= len(rows)


class _Waiter:
    """Collects a request's outcomes; the first error ends it."""

    def __init__(self, num_inputs: int, loop: asyncio.AbstractEventLoop) -> None:
        self._missing = num_inputs
        self._answers: dict[PendingInput, Answer] = {}
        self.outcomes: asyncio.Future[dict[PendingInput, Answer]] = loop.create_future()

    def fail(self, error: OfframpError) -> None:
        if not self.outcomes.done():
            self.outcomes.set_exception(error)

    def settle(self, flight: PendingInput, outcome: Answer | OfframpError) -> None:
        if isinstance(outcome, OfframpError):
            self.fail(outcome)
            return
        if self.outcomes.done():
            return
        self._answers[flight] = outcome
        self._missing -= 1
        if not self._missing:
            self.outcomes.set_result(self._answers)
