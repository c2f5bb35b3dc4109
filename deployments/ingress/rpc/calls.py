"""Every RPC of an ingress: `Rpcs.call` reads it, has it answered, and turns errors into gRPC's statuses."""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import grpc

from deployments.ingress.access.gate import EVERYBODY, Gate
from deployments.ingress.api.answers import EXTENSIONS, server_version
from deployments.ingress.api.endpoint import GONE
from deployments.ingress.api.served import Chooser, Names, Served
from deployments.ingress.api.signature import Signature, check_model
from deployments.ingress.rpc.conversion import infer_response, parse_infer, read_message
from deployments.ingress.rpc.messages import message_class
from deployments.ingress.rpc.server import REMAINING_S, SERVICE
from deployments.ingress.tracing.hooks import failure_of
from deployments.ingress.tracing.record import RequestRecord
from deployments.ingress.tracing.tracer import Tracer
from deployments.quiet import WithoutWords
from earlyexit.errors import (
    AdmissionError,
    DeadlineError,
    InputError,
    OfframpError,
    PayloadTooLargeError,
    RateLimitError,
    UnknownModelError,
)

logger = logging.getLogger(f"ray.serve.{__name__}")
logger.addFilter(WithoutWords())

REQUEST_ID = "x-request-id"
MOST_DETAILS = 1_000
"""Characters: gRPC drops what makes its trailers too large, and every byte beyond ASCII takes three there."""
TRACED = "ModelInfer"


class Context(Protocol):
    """What is used of Serve's context of an RPC."""

    def invocation_metadata(self) -> list[tuple[str, Any]]: ...

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, str]]) -> None: ...

    def set_code(self, code: grpc.StatusCode) -> None: ...

    def set_details(self, details: str) -> None: ...


class Backend(Served, Protocol):
    """What the RPCs need of an ingress."""

    @property
    def signature(self) -> Signature: ...

    @property
    def versions(self) -> Names: ...

    def choose(self, request_id: str) -> Chooser | None: ...

    @property
    def max_body_bytes(self) -> int: ...

    @property
    def max_timeout_s(self) -> float: ...

    def is_ready(self) -> bool: ...

    def count_request(self, route: str, status: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who calls, as the metadata says."""

    metadata: Mapping[str, Any]
    request_id: str
    remaining_s: float | None
    """Until the deadline of the call; None where it has none."""
    owner: str = EVERYBODY
    """Of the key, where there are keys."""


Handler = Callable[[Any, Caller], Awaitable[Any]]


class Rpcs:
    """The RPCs of one ingress."""

    def __init__(self, backend: Backend, gate: Gate | None = None, tracer: Tracer | None = None) -> None:
        self._backend = backend
        self._gate = gate
        self._tracer = tracer
        self._handlers: dict[str, Handler] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._model_infer,
        }

    async def call(self, name: str, request: bytes, context: Context) -> Any:
        """The answer's message: an empty one where the status that the context was given says why there is none."""
        caller = _caller(context)
        record = self._begin_trace(name, caller)
        trailing = [(REQUEST_ID, caller.request_id), *self._trace_headers(record)]
        status, code = 200, grpc.StatusCode.OK
        try:
            if self._gate is not None:
                owner = self._gate.admit("POST", f"/{SERVICE}/{name}", caller.metadata.get("authorization"))
                caller = replace(caller, owner=owner)
            if len(request) > self._backend.max_body_bytes:
                raise PayloadTooLargeError(f"the message is larger than {self._backend.max_body_bytes} bytes")
            return await self._handlers[name](read_message(f"{name}Request", request), caller)
        except OfframpError as error:
            status, code = error.http_status, grpc.StatusCode[error.grpc_status]
            if not isinstance(error, (InputError, AdmissionError, RateLimitError)):  # they come by the thousand
                logger.warning("request %s: %s: %s", caller.request_id, error.kind, error.log_text)
            _fail(context, error, trailing)
        except asyncio.CancelledError:
            status, code = GONE, grpc.StatusCode.CANCELLED
            raise
        except Exception:
            status, code = 500, grpc.StatusCode.INTERNAL
            logger.exception("request %s: %s", caller.request_id, name)
            message = "the server failed on this request; its log says why, under the request's id"
            _fail(context, OfframpError(message), trailing)
        finally:
            context.set_trailing_metadata(trailing)
            self._backend.count_request(f"/{SERVICE}/{name}", status)
            if record is not None and self._tracer is not None:
                attributes = {"rpc.grpc.status_code": int(code.value[0])}
                self._tracer.end(record, attributes, caller.request_id, failure=failure_of(status))
        return message_class(f"{name}Response")()

    def _begin_trace(self, name: str, caller: Caller) -> RequestRecord | None:
        if self._tracer is None or name != TRACED:
            return None
        attributes = {"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": name}
        return self._tracer.begin(f"{SERVICE}/{name}", attributes, caller.metadata)

    def _trace_headers(self, record: RequestRecord | None) -> list[tuple[str, str]]:
        return [] if record is None or self._tracer is None else list(self._tracer.headers(record).items())

    async def _server_live(self, message: Any, caller: Caller) -> Any:
        return message_class("ServerLiveResponse")(live=True)

    async def _server_ready(self, message: Any, caller: Caller) -> Any:
        return message_class("ServerReadyResponse")(ready=self._backend.is_ready())

    async def _model_ready(self, message: Any, caller: Caller) -> Any:
        """False for models that there are not, as Triton says it."""
        try:
            check_model(
                self._backend.card, message.name, message.version or self._backend.version, self._backend.version
            )
        except UnknownModelError:
            return message_class("ModelReadyResponse")(ready=False)
        return message_class("ModelReadyResponse")(ready=self._backend.is_ready())

    async def _server_metadata(self, message: Any, caller: Caller) -> Any:
        return message_class("ServerMetadataResponse")(name="offramp", version=server_version(), extensions=EXTENSIONS)

    async def _model_metadata(self, message: Any, caller: Caller) -> Any:
        card = self._backend.card
        check_model(card, message.name, message.version or self._backend.version, self._backend.version)
        tensor = message_class("TensorMetadata")
        return message_class("ModelMetadataResponse")(
            name=card.name,
            versions=await self._backend.versions.names(),
            platform="offramp",
            inputs=[tensor(**each) for each in self._backend.signature.input_tensors],
            outputs=[tensor(**each) for each in self._backend.signature.output_tensors],
        )

    async def _model_infer(self, message: Any, caller: Caller) -> Any:
        card = self._backend.card
        check_model(card, message.model_name, message.model_version or self._backend.version, self._backend.version)
        request, reply = parse_infer(message, self._backend.signature)
        if self._gate is not None:
            self._gate.charge(caller.owner, len(request.rows))
        timeout_s = within(request.timeout_s, caller.remaining_s, self._backend.max_timeout_s)
        request = replace(request, request_id=caller.request_id, timeout_s=timeout_s)
        chosen = None if message.model_version else self._backend.choose(request.request_id)
        served: Served = self._backend
        if chosen is None:
            answers = await served.infer(request)
        else:
            served, answers = await chosen.answer(request)
        return infer_response(answers, served.task, reply, card.name, served.version)


def within(asked_s: float | None, remaining_s: float | None, longest_s: float) -> float | None:
    """A request's timeout, where the call has a deadline too; one that is asked for and too long stays, to be refused.

    Raises DeadlineError where the deadline has passed.
    """
    if remaining_s is None:
        return asked_s
    if remaining_s <= 0:
        raise DeadlineError("the deadline of the call has passed")
    if asked_s is not None and (asked_s > longest_s or asked_s <= remaining_s):
        return asked_s
    return min(remaining_s, longest_s)


def _caller(context: Context) -> Caller:
    metadata = dict(context.invocation_metadata())
    remaining_s = metadata.get(REMAINING_S)
    request_id = str(metadata.get(REQUEST_ID) or uuid.uuid4().hex)
    return Caller(
        metadata=metadata, request_id=request_id, remaining_s=None if remaining_s is None else float(remaining_s)
    )


def _fail(context: Context, error: OfframpError, trailing: list[tuple[str, str]]) -> None:
    """Set rather than raised: Serve would log a traceback of every error, and say INTERNAL for most."""
    context.set_code(grpc.StatusCode[error.grpc_status])
    context.set_details(str(error)[:MOST_DETAILS])
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        trailing.append(("retry-after", str(max(1, math.ceil(retry_after_s)))))
