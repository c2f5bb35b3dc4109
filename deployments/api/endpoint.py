"""What all routes and RPCs share: admission, counting, tracing, errors as JSON, and release of request bodies."""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, Protocol

from pydantic_core import to_json
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from deployments.api.access import Gate
from deployments.api.bodies import InferRequest, V2Error
from deployments.api.completions.bodies import OpenAiError
from deployments.api.generation import GenerateRequest, Stream
from deployments.api.live_page import Viewer
from deployments.api.operations import ENDS_OF_GENERATION, JSON, OPERATION_BY_NAME, TRACED, Handler, error_of
from deployments.api.parsing import Signature
from deployments.api.request_body import Bodies
from deployments.api.responses import compress, is_large
from deployments.ops.tracing.spans import RequestRecord
from deployments.ops.tracing.tracer import Tracer
from deployments.process_setup import WithoutWords
from earlyexit.errors import (
    AdmissionError,
    InputError,
    MethodNotAllowedError,
    OfframpError,
    RateLimitError,
    UnauthorizedError,
    UnknownModelError,
    UnknownPathError,
)
from earlyexit.network.boundary import Answer
from earlyexit.network.store import ModelCard
from earlyexit.tasks.base import Task

VERSION = version("offramp")
"""Read once, because it is in a file."""
EXTENSIONS = ("binary_tensor_data", "parameters", "model_repository")
"""Extensions of the Open Inference Protocol, by Triton's names."""
GENERATES = "token"
"""The name of the task of models that generate."""
WHERE_IT_GENERATES = "ask {}, {} or {}".format(
    *(OPERATION_BY_NAME[name].path for name in ("completions", "chat", "generate"))
)
GONE = 499
"""The status that is counted if the caller left before the response."""
SERVER_ERROR = 500
REFUSALS = (InputError, AdmissionError, RateLimitError)
"""Errors that may come by the thousand: they are counted, but not logged."""
FAILED = "the server failed on this request; its log says why, under the request's id"
CALLER = "offramp.caller"
"""Key of an ASGI scope: the caller that the gate admitted."""
REQUEST_ID = "offramp.request_id"
"""Key of an ASGI scope: the request's id, once it was asked for."""
OPENAI_CODES = {
    "unauthorized": "invalid_api_key",
    "unknown_model": "model_not_found",
    "rate_limit": "rate_limit_exceeded",
    "context_length": "context_length_exceeded",
}

logger = logging.getLogger(f"ray.serve.{__name__}")
logger.addFilter(WithoutWords())


class Served(Protocol):
    """One version of a model: this ingress, or another version's."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def task(self) -> Task: ...

    @property
    def version(self) -> str: ...

    async def infer(self, request: InferRequest) -> list[Answer]:
        """Returns the answers in the order of the inputs; raises what `InferService.infer` raises."""
        ...


class ServedVersions(Protocol):
    """All versions of the model."""

    async def names(self) -> list[str]: ...

    async def answer(self, request: InferRequest) -> tuple[Served, list[Answer]]:
        """Answers a request that names no version; returns also the version that answered it."""
        ...


class Backend(Served, Protocol):
    """What HTTP and gRPC need of an ingress."""

    @property
    def signature(self) -> Signature: ...

    @property
    def versions(self) -> ServedVersions: ...

    @property
    def bodies(self) -> Bodies: ...

    @property
    def max_timeout_s(self) -> float: ...

    def is_ready(self) -> bool: ...

    def count_request(self, route: str, status: int) -> None:
        """Counts a finished request."""
        ...

    async def generate(self, request: GenerateRequest) -> Stream:
        """Starts a sequence; raises what `GenerateService.start` raises."""
        ...

    async def stats(self) -> dict[str, Any]: ...

    async def plan(self) -> dict[str, Any]: ...

    async def plan_history(self, limit: int) -> list[dict[str, Any]]: ...

    async def metrics(self) -> str: ...

    def watch(self) -> Viewer: ...


class Api:
    """The operations that HTTP and gRPC share, over a backend, and behind a gate if there is one."""

    def __init__(self, backend: Backend, gate: Gate | None) -> None:
        self._backend = backend
        self._gate = gate

    def charge(self, caller: str | None, num_inputs: int) -> None:
        """Counts a request's inputs for the caller that the gate admitted; raises RateLimitError."""
        if self._gate is not None:
            assert caller is not None
            self._gate.charge(caller, num_inputs)

    async def answer(self, asked: InferRequest, *, names_version: bool) -> tuple[Served, list[Answer]]:
        """Returns the answers and the version that gave them; raises InputError for a model that generates."""
        if self._backend.signature.task.name == GENERATES:
            raise InputError(f"model {self._backend.card.name!r} generates text: {WHERE_IT_GENERATES}")
        if names_version:
            return self._backend, await self._backend.infer(asked)
        return await self._backend.versions.answer(asked)

    def check_model(self, name: str, version: str | None) -> None:
        """Raises UnknownModelError for a model that is not served here; no `version` means any."""
        card, served = self._backend.card, self._backend.version
        if name != card.name:
            raise UnknownModelError(f"unknown model {name!r}; served is {card.name!r}", param="model")
        if (version or served) != served:
            raise UnknownModelError(f"unknown version {version!r} of {name!r}; served is {served!r}", param="model")

    async def model_metadata(self) -> dict[str, Any]:
        """Returns the model's metadata, by the names of the protocol."""
        return {
            "name": self._backend.card.name,
            "versions": await self._backend.versions.names(),
            "platform": "offramp",
            "inputs": self._backend.signature.input_tensors,
            "outputs": self._backend.signature.output_tensors,
        }

    def server_metadata(self) -> dict[str, Any]:
        """Returns the server's metadata, by the names of the protocol."""
        return {"name": "offramp", "version": VERSION, "extensions": EXTENSIONS}


class Gatekeeper:
    """Middleware before all routes: passes on only requests that the gate admits."""

    def __init__(self, app: ASGIApp, backend: Backend, gate: Gate) -> None:
        self._app = app
        self._backend = backend
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one ASGI request; a refused request is counted under the route `access`."""
        if scope["type"] != "lifespan":
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            try:
                scope[CALLER] = self._gate.admit(scope.get("method", "GET"), path, _authorization(scope))
            except (UnauthorizedError, RateLimitError) as error:
                self._backend.count_request("access", error.http_status)
                refusal = WebSocketClose() if scope["type"] == "websocket" else _error(Request(scope), error)
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Endpoint:
    """The handlers of one path by method: counts and traces requests, and turns errors into JSON."""

    def __init__(
        self, backend: Backend, path: str, handlers: Mapping[str, Handler], tracer: Tracer | None = None
    ) -> None:
        self._backend = backend
        self._path = path
        self._handlers = handlers
        self._tracer = tracer if path in TRACED else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        record = None if self._tracer is None else self._begin_trace(self._tracer, request)
        status: int | None = None
        try:
            response = await self._answer(request)
            if is_large(response):
                await compress(request, response)
            status = response.status_code
            self._backend.count_request(self._path, status)
            if record is not None and self._tracer is not None:
                response.headers.update(self._tracer.headers(record))
            await response(scope, receive, send)
        finally:
            self._backend.bodies.release(scope)
            if record is not None and self._tracer is not None:
                attributes = {} if status is None else {"http.response.status_code": status}
                self._tracer.end(record, attributes, scope.get(REQUEST_ID), failure=failure_of(status))

    def _begin_trace(self, tracer: Tracer, request: Request) -> RequestRecord | None:
        attributes = {"http.request.method": "POST", "http.route": self._path}
        return tracer.begin(f"POST {self._path}", attributes, request.headers)

    async def _answer(self, request: Request) -> Response:
        try:
            return await self._handler(request)(request)
        except OfframpError as error:
            log_error(logger, request_id(request), error)
            return _error(request, error)
        except ClientDisconnect:
            return Response(status_code=GONE)
        except Exception:
            name = request_id(request)
            asked = (name, request.method, request.url.path)
            logger.exception("request %s: %s %s", *asked, extra={"request_id": name})
            return json_response(_error_body(request, "internal", FAILED, 500), status=500)

    def _handler(self, request: Request) -> Handler:
        handler = self._handlers.get("GET" if request.method == "HEAD" else request.method)
        if handler is not None:
            return handler
        asked = f"{request.method} {request.url.path}"
        if not self._handlers:
            raise UnknownPathError(f"{asked}: there is no such path{_hint(request)}; see /openapi.json")
        allowed = tuple(self._handlers)
        message = f"{asked}: only {', '.join(allowed)} is allowed; see /openapi.json"
        raise MethodNotAllowedError(message, allowed=allowed)


def nowhere(endpoint: Endpoint) -> ASGIApp:
    """Returns the application for unknown paths: a 404, and for a web socket a handshake that fails."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await (WebSocketClose() if scope["type"] == "websocket" else endpoint)(scope, receive, send)

    return answer


def failure_of(status: int | None) -> str | None:
    """Returns the failure that a trace reports for a status; None for success, and for errors of the caller.

    OpenTelemetry's convention: an error of the caller is no error of the server's span.
    """
    if status is None or status == GONE:
        return "the caller left before the response"
    return "" if status >= SERVER_ERROR else None


def log_error(logger: logging.Logger, request_id: str, error: OfframpError) -> None:
    """Logs the error that ended a request, unless it is a refusal."""
    if not isinstance(error, REFUSALS):
        fields = {"request_id": request_id}  # Serve fills this field only for requests that it passed on itself
        logger.warning("request %s: %s: %s", request_id, error.kind, error.log_text, extra=fields)


def retry_after(error: OfframpError) -> str | None:
    """Returns the whole seconds after which to retry; None if a retry would not help."""
    retry_after_s = getattr(error, "retry_after_s", None)
    return None if retry_after_s is None else str(max(1, math.ceil(retry_after_s)))


def own_id(given: object) -> str:
    """Returns the id that the caller gave a request, or a new one."""
    return str(given or uuid.uuid4().hex)


def request_id(request: Request) -> str:
    """Returns the request's id: the caller's, or a new one. The server itself sends it back as a header."""
    scope = request.scope
    known: str | None = scope.get(REQUEST_ID)
    if known is None:
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        known = scope[REQUEST_ID] = own_id(given.decode("latin-1"))
    return known


def json_response(content: object, status: int = 200) -> Response:
    """Returns a response of JSON."""
    return Response(to_json(content), status_code=status, media_type=JSON)


def _hint(request: Request) -> str:
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    return " here, models that generate have it" if path.endswith(ENDS_OF_GENERATION) else ""


def _error(request: Request, error: OfframpError) -> Response:
    param = error.param if isinstance(error, InputError) else None
    body = _error_body(request, error.kind, str(error), error.http_status, param)
    response = json_response(body, status=error.http_status)
    if isinstance(error, MethodNotAllowedError):
        response.headers["allow"] = ", ".join(error.allowed)
    if isinstance(error, UnauthorizedError):
        response.headers["www-authenticate"] = error.scheme
    later = retry_after(error)
    if later is not None:
        response.headers["retry-after"] = later
    return response


def _error_body(request: Request, kind: str, message: str, status: int, param: str | None = None) -> dict[str, object]:
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    form = error_of(path)
    if form is V2Error:
        return {"error": message}
    if form is OpenAiError:
        return openai_error(kind, message, status, param)
    return {"error": {"kind": kind, "message": message}, "request_id": request_id(request)}


def openai_error(kind: str, message: str, status: int, param: str | None = None) -> dict[str, object]:
    """Returns an error in the form of OpenAI; its code is our `kind` if OpenAI has none."""
    type_ = "server_error" if status >= SERVER_ERROR else "invalid_request_error"
    code = OPENAI_CODES.get(kind, kind)
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}


def _authorization(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"authorization":
            return str(value, "latin-1")
    return None


SENT = ("Authorization", "Content-Encoding", "Content-Type", "X-Request-ID", "Inference-Header-Content-Length")
SCORE_HEADER, EXIT_HEADER = "X-Offramp-Score", "X-Offramp-Exit"
"""Headers of an answer that is not JSON."""
READ = ("Retry-After", "X-Request-ID", "Inference-Header-Content-Length", SCORE_HEADER, EXIT_HEADER)
REMEMBERED_S = 600


def cross_origin(origins: Sequence[str]) -> Middleware:
    """Returns the CORS middleware: it answers preflight requests, which carry no key, and adds CORS headers.

    Credentials are not allowed: a page of another site sends a key itself, never a password that the browser stores.
    """
    return Middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["GET", "POST"],
        allow_headers=list(SENT),
        expose_headers=list(READ),
        max_age=REMEMBERED_S,
    )
