"""Every RPC of an ingress: `Rpcs.call` reads it, has it answered, and turns errors into gRPC's statuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import grpc

from deployments.ingress.access.gate import EVERYBODY, Gate
from deployments.ingress.api.face import FAILED, GONE, Backend, Face, log_error, own_id, retry_after
from deployments.ingress.rpc.conversion import infer_response, parse_infer, read_message
from deployments.ingress.rpc.messages import message_class
from deployments.ingress.rpc.server import REMAINING_S, SERVICE
from deployments.ingress.tracing.hooks import failure_of
from deployments.ingress.tracing.spans import RequestRecord
from deployments.ingress.tracing.tracer import Tracer
from deployments.quiet import WithoutWords
from earlyexit.errors import (
    DeadlineError,
    OfframpError,
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


class RpcBackend(Backend, Protocol):
    """What the RPCs need of an ingress besides."""

    @property
    def max_timeout_s(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who calls, as the metadata says."""

    metadata: Mapping[str, Any]
    request_id: str
    remaining_s: float | None
    """Until the deadline of the call; None where it has none."""
    owner: str = EVERYBODY
    """Of the key, where there are keys."""


RpcHandler = Callable[[Any, Caller], Awaitable[Any]]


class Rpcs:
    """The RPCs of one ingress."""

    def __init__(self, backend: RpcBackend, gate: Gate | None = None, tracer: Tracer | None = None) -> None:
        self._backend = backend
        self._gate = gate
        self._face = Face(backend, gate)
        self._tracer = tracer
        self._handlers: dict[str, RpcHandler] = {
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
            with self._backend.bodies.holding(len(request)):
                return await self._handlers[name](read_message(f"{name}Request", request), caller)
        except OfframpError as error:
            status, code = error.http_status, grpc.StatusCode[error.grpc_status]
            log_error(logger, caller.request_id, error)
            _fail(context, error, trailing)
        except asyncio.CancelledError:
            status, code = GONE, grpc.StatusCode.CANCELLED
            raise
        except Exception:
            status, code = 500, grpc.StatusCode.INTERNAL
            logger.exception("request %s: %s", caller.request_id, name)
            _fail(context, OfframpError(FAILED), trailing)
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
            self._face.check_model(message.name, message.version)
        except UnknownModelError:
            return message_class("ModelReadyResponse")(ready=False)
        return message_class("ModelReadyResponse")(ready=self._backend.is_ready())

    async def _server_metadata(self, message: Any, caller: Caller) -> Any:
        return message_class("ServerMetadataResponse")(**self._face.server_metadata())

    async def _model_metadata(self, message: Any, caller: Caller) -> Any:
        self._face.check_model(message.name, message.version)
        said, tensor = await self._face.model_metadata(), message_class("TensorMetadata")
        tensors = {side: [tensor(**each) for each in said[side]] for side in ("inputs", "outputs")}
        return message_class("ModelMetadataResponse")(**said | tensors)

    async def _model_infer(self, message: Any, caller: Caller) -> Any:
        self._face.check_model(message.model_name, message.model_version)
        request, reply = parse_infer(message, self._backend.signature)
        self._face.charge(caller.owner, request)
        timeout_s = within(request.timeout_s, caller.remaining_s, self._backend.max_timeout_s)
        request = replace(request, request_id=caller.request_id, timeout_s=timeout_s)
        served, answers = await self._face.answer(request, names_version=bool(message.model_version))
        return infer_response(answers, served.task, reply, self._backend.card.name, served.version)


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
    remaining_s = None if remaining_s is None else float(remaining_s)
    return Caller(metadata=metadata, request_id=own_id(metadata.get(REQUEST_ID)), remaining_s=remaining_s)


def _fail(context: Context, error: OfframpError, trailing: list[tuple[str, str]]) -> None:
    """Set rather than raised: Serve would log a traceback of every error, and say INTERNAL for most."""
    context.set_code(grpc.StatusCode[error.grpc_status])
    context.set_details(str(error)[:MOST_DETAILS])
    later = retry_after(error)
    if later is not None:
        trailing.append(("retry-after", later))
