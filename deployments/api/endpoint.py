"""Endpoints: access, counting and tracing of the requests for one path, and errors in the format of its protocol."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocketClose

from deployments.api.access import Gate
from deployments.api.exchange import (
    MIN_COMPRESSED_BYTES,
    SERVER_ERROR,
    Handler,
    HttpRequest,
    RequestBodies,
    compress,
    error_response,
    first_header,
    json_response,
)
from deployments.api.generation import GenerateRequest, Stream
from deployments.api.operations import GENERATION_PATHS, MODEL, InferRequest, Signature
from deployments.api.v2 import tensors_of
from deployments.process_setup import HideExceptionMessages
from earlyexit.errors import (
    AdmissionError,
    InputError,
    MethodNotAllowedError,
    OfframpError,
    OverloadedError,
    RateLimitError,
    StageUnavailableError,
    UnauthorizedError,
    UnknownModelError,
    UnknownPathError,
)
from earlyexit.network.boundary import Answer
from earlyexit.network.store import ModelCard
from earlyexit.tasks.base import Task

if TYPE_CHECKING:
    from deployments.ops.tracing import RequestRecord, Tracer

SERVER_METADATA: Mapping[str, Any] = {
    "name": "offramp",
    "version": version("offramp"),
    "extensions": ("binary_tensor_data", "parameters", "model_repository"),
}
"""The server's metadata, with the names of the Open Inference Protocol, and its extensions by Triton's names."""
CLIENT_CLOSED_REQUEST = 499
"""The status that is counted if the caller disconnected before the response (nginx's 499)."""
UNLOGGED_ERRORS = (InputError, AdmissionError, OverloadedError, RateLimitError, StageUnavailableError)
"""Errors that may occur thousands of times: they are counted, but not logged. Their cause is logged once elsewhere."""

logger = logging.getLogger(f"ray.serve.{__name__}")
logger.addFilter(HideExceptionMessages())


class ModelVersion(Protocol):
    """A version of a model: this ingress's own, or another one behind other ingresses."""

    card: ModelCard
    version: str

    @property
    def task(self) -> Task: ...

    async def infer(self, request: InferRequest) -> list[Answer]:
        """Returns the answers in the order of the inputs; raises what `InferService.infer` raises."""


class ServedVersions(Protocol):
    """All versions of the model."""

    async def names(self) -> list[str]: ...

    async def answer(self, request: InferRequest) -> tuple[ModelVersion, list[Answer]]:
        """Answers a request that names no version; also returns the version that answered it."""


class Backend(ModelVersion, Protocol):
    """The interface of an ingress to HTTP and gRPC."""

    bodies: RequestBodies
    max_timeout_s: float
    is_ready: bool
    """Whether every stage of a chain has had a replica."""

    @property
    def signature(self) -> Signature: ...

    @property
    def versions(self) -> ServedVersions: ...

    def count_request(self, route: str, status: int) -> None:
        """Counts a finished request."""

    async def generate(self, request: GenerateRequest) -> Stream:
        """Starts a sequence; raises what `GenerateService.start` raises."""


async def infer_version(
    backend: Backend, request: InferRequest, *, names_version: bool = False
) -> tuple[ModelVersion, list[Answer]]:
    """Returns the answers and the version that gave them."""
    if names_version:
        return backend, await backend.infer(request)
    return await backend.versions.answer(request)


def check_model(backend: Backend, model: str, version: str | None = None) -> None:
    """Raises UnknownModelError for a model or version that is not served; None stands for any version."""
    card, served = backend.card, backend.version
    if model != card.name:
        raise UnknownModelError(f"unknown model {model!r}; served is {card.name!r}", param="model")
    if (version or served) != served:
        raise UnknownModelError(f"unknown version {version!r} of {model!r}; served is {served!r}", param="model")


async def model_metadata(backend: Backend) -> dict[str, Any]:
    """Returns the model's metadata, with the protocol's names."""
    return {
        "name": backend.card.name,
        "versions": await backend.versions.names(),
        "platform": "offramp",
        "inputs": tensors_of(backend.signature.inputs),
        "outputs": tensors_of(backend.signature.outputs),
    }


class Endpoint:
    """The ASGI application of one path: it calls the handler, counts and traces requests, and turns errors into JSON.

    It counts requests that the gate refuses under the route `access`. A model in the path must be served here.
    """

    def __init__(self, backend: Backend, path: str, gate: Gate | None = None, tracer: Tracer | None = None) -> None:
        self.handlers: dict[str, Handler] = {}
        """The handlers by HTTP method; none for an unknown path."""
        self._backend = backend
        self._gate = gate
        self._path = path
        self._tracer = tracer
        self._has_model = path.startswith(MODEL)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # there are none: the handshake fails
            return await WebSocketClose()(scope, receive, send)
        request = HttpRequest(scope, receive, self._backend.bodies)
        if self._gate is not None:
            try:
                self._gate.admit(request.method, request.path, first_header(scope["headers"], b"authorization"))
            except (UnauthorizedError, RateLimitError) as error:
                self._backend.count_request("access", error.http_status)
                return await error_response(request.path, request.id, error)(scope, receive, send)
        record: RequestRecord | None = None
        if self._tracer is not None and request.method == "POST" and "POST" in self.handlers:
            route = {"http.request.method": "POST", "http.route": self._path}
            url = {"url.path": scope["path"], "url.scheme": scope["scheme"]}
            record = self._tracer.begin(f"POST {self._path}", route | url, request.headers)
        status = CLIENT_CLOSED_REQUEST  # if the HTTP server cancels this task
        try:
            response = await self._answer(request)
            if len(getattr(response, "body", b"")) >= MIN_COMPRESSED_BYTES:  # streams have no `body`
                await compress(request, response)
            if record is not None:
                response.headers.update(record.headers)
            await response(scope, receive, send)
            status = request.late_status or response.status_code
        finally:
            request.release()
            self._backend.count_request(self._path, status)
            if record is not None and self._tracer is not None:
                self._tracer.end(record, {"http.response.status_code": status}, request.id, trace_failure(status))

    async def _answer(self, request: HttpRequest) -> Response:
        try:
            handler = self._handler(request)
            if self._has_model:
                check_model(self._backend, **request.path_params)
            answer = await handler(request)
            return answer if isinstance(answer, Response) else json_response(answer)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:
            error = failure_of(error, request.id, request.target)  # no other variable: it would be in a cycle
            return error_response(request.path, request.id, error)

    def _handler(self, request: HttpRequest) -> Handler:
        handler = self.handlers.get("GET" if request.method == "HEAD" else request.method)
        if handler is not None:
            return handler
        if not self.handlers:
            is_missing = request.target.endswith(GENERATION_PATHS) and not self._backend.signature.generates
            hint = ", because the model does not generate" if is_missing else ""
            raise UnknownPathError(f"{request.target}: there is no such path{hint}; see /openapi.json")
        message = f"{request.target}: only {', '.join(self.handlers)} is allowed; see /openapi.json"
        raise MethodNotAllowedError(message, allowed=(*self.handlers, *(["HEAD"] if "GET" in self.handlers else [])))


def trace_failure(status: int) -> str | None:
    """Returns the failure that a trace reports for a status; None for success, and for errors of the caller.

    By OpenTelemetry's convention, an error of the caller is not an error of the server's span.
    """
    if status == CLIENT_CLOSED_REQUEST:
        return "the caller disconnected before the response"
    return "" if status >= SERVER_ERROR else None


class InternalError(OfframpError):
    """An unexpected failure of the server, caused by an exception that is no OfframpError."""


def failure_of(error: Exception, request_id: str, what: str) -> OfframpError:
    """Returns the error that a caller gets, and logs the one that ended the request, unless it is a refusal.

    Must be called while the error is handled.
    """
    fields = {"request_id": request_id}  # Serve sets this field only for requests that it routed itself
    if not isinstance(error, OfframpError):
        logger.exception("request %s: %s", request_id, what, extra=fields)
        return InternalError("the server failed on this request; its log has the reason, under the request's id")
    if not isinstance(error, UNLOGGED_ERRORS):
        logger.warning("request %s: %s: %s", request_id, error.kind, error.log_text, extra=fields)
    return error
