"""Answers parsed requests: encodes their inputs, passes them to the dispatcher, and awaits the outcomes."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

from deployments.api.operations import InferRequest
from deployments.ingress.core.inputs import PendingInput
from deployments.ingress.dispatcher import Dispatcher
from deployments.settings import ServeSettings
from earlyexit.clock import Clock
from earlyexit.codecs.base import Codec
from earlyexit.codecs.chain import ChainCodec
from earlyexit.errors import DeadlineError, InputError, OfframpError, OverloadedError
from earlyexit.network.boundary import Answer, Encoded, TensorSpec, check_fit

MAX_ENCODER_THREADS = 4
"""Threads for inputs that take milliseconds to encode; each may hold a decoded image of the largest size."""
ABANDONED = "abandoned"
"""The reason for dropping inputs whose caller has disconnected."""


@dataclass(slots=True, eq=False)
class InferService:
    """Answers requests with one dispatcher."""

    codec: Codec[Any]
    dispatcher: Dispatcher
    settings: ServeSettings
    clock: Clock
    _: KW_ONLY
    inputs: Sequence[TensorSpec] | None = None
    """The network's input tensors; None if the model does not declare them."""
    _encoders: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(min(MAX_ENCODER_THREADS, os.cpu_count() or 1), "encode"), init=False
    )
    _num_encoding: int = field(default=0, init=False)

    async def infer(self, request: InferRequest) -> list[Answer]:
        """Returns the answers in the order of the inputs.

        Raises InputError for requests that the settings or the model do not allow, UnprocessableInputError,
        AdmissionError, OverloadedError, StageUnavailableError, DeadlineError and ExecutionError.
        """
        now_s = self.clock.now_s()
        arrived_s = now_s if request.arrived_s is None else request.arrived_s
        timeout_s = self._checked_timeout_s(request)
        deadline_s = arrived_s + timeout_s
        self.dispatcher.core.check_admission(len(request.rows), deadline_s, now_s, num_coming=self._num_encoding)
        encoded = await self._encode(request.rows, deadline_s, timeout_s, truncate=request.truncate)
        if self.inputs is not None:
            check_fit(self.inputs, encoded)  # an input that does not fit would fail its whole batch
        answers: dict[int, Answer] = {}  # by serial number: the inputs themselves would be in a reference cycle
        errors: list[OfframpError] = []
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def settle(each: PendingInput, outcome: Answer | OfframpError) -> None:
            """Adds the answer to an input, or ends the request with its first error."""
            if done.done():
                return
            if isinstance(outcome, OfframpError):
                errors.append(outcome)
            else:
                answers[each.serial] = outcome
            if errors or len(answers) == len(encoded):
                done.set_result(None)

        inputs, request_id = list(zip(request.ids, encoded, strict=True)), request.request_id
        pending = self.dispatcher.submit(inputs, deadline_s, settle, arrived_s=arrived_s, request_id=request_id)
        try:
            await done
        except asyncio.CancelledError:
            self.dispatcher.give_up(pending, ABANDONED)
            raise
        if errors:  # of one input; the request's other inputs are given up
            self.dispatcher.give_up(pending, errors[0].kind)
            raise errors.pop()  # a variable that keeps it would be in a cycle with its traceback
        return [answers[each.serial] for each in pending]

    def _checked_timeout_s(self, request: InferRequest) -> float:
        """Returns the timeout of a request. Raises InputError for a timeout or a number of inputs above its limit."""
        requested_s, max_s, limit = request.timeout_s, self.settings.max_timeout_s, self.settings.max_inputs_per_request
        if requested_s is not None and requested_s > max_s:
            raise InputError(f"the timeout must be at most {max_s:g} s (got {requested_s:g} s)")
        if len(request.rows) > limit:
            raise InputError(f"a request must have at most {limit} inputs (got {len(request.rows)})")
        return min(requested_s or self.settings.default_timeout_s, self.settings.slo_s or math.inf)

    async def _encode(
        self, rows: Sequence[Any], deadline_s: float, timeout_s: float, *, truncate: bool
    ) -> Sequence[Encoded]:
        """Returns the encoded inputs. Rows that take long run in a thread, until the deadline (DeadlineError)."""
        encode: Callable[[], Sequence[Encoded]] = partial(self.codec.encode, rows, truncate=truncate)
        if isinstance(self.codec, ChainCodec):  # for the first network of the current plan
            used = self.dispatcher.core.placed.plan.used
            encode = partial(self.codec.encode_for, rows, truncate=truncate, used=used)
        if not self.codec.is_slow(rows):
            return encode()
        if self._num_encoding + len(rows) > self.settings.max_queued:
            message = f"{self._num_encoding} inputs wait to be encoded; the limit is {self.settings.max_queued}"
            self.dispatcher.core.refuse(OverloadedError(message), len(rows))
        self._num_encoding += len(rows)
        try:
            async with asyncio.timeout(deadline_s - self.clock.now_s()):
                return await asyncio.get_running_loop().run_in_executor(self._encoders, encode)
        except TimeoutError:
            self.dispatcher.core.refuse(DeadlineError(f"no answer within {timeout_s:g} s"), len(rows))
        finally:
            self._num_encoding -= len(rows)
