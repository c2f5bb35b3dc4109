"""What all paths of an ingress share: admission of callers, errors as JSON, counts of requests, release of bodies."""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from deployments.api.bodies import InferRequest
from deployments.api.generation import GenerateRequest, Stream
from deployments.api.live_page import Viewer
from deployments.api.operations import ENDS_OF_GENERATION, OPERATION_BY_NAME, Handler
from deployments.api.parsing import Signature
from deployments.api.request_body import Bodies
from deployments.api.responses import compressed
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
from earlyexit.network.store import ModelCard
from earlyexit.network.wire import Answer
from earlyexit.tasks.base import Task


class Served(Protocol):
    """Answers requests as one version; raises what `InferService.infer` raises."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def task(self) -> Task:
        """What its answers are."""
        ...

    @property
    def version(self) -> str: ...

    async def infer(self, request: InferRequest) -> list[Answer]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFacts:
    """What one ingress says of its version to another's."""

    card: ModelCard
    version: str
    agreement: float | None
    """Of this ingress's probes with the full model; None before the first."""


class Chooser(Protocol):
    """A version that was chosen for a request: returns the version that answered, and its answer."""

    async def answer(self, request: InferRequest) -> tuple[Served, list[Answer]]: ...


class Names(Protocol):
    """Knows which versions of the model there are."""

    async def names(self) -> list[str]: ...


VERSION = version("offramp")
"""Read once: it lies in a file."""
EXTENSIONS = ("binary_tensor_data", "parameters", "model_repository")
"""Of the protocol, by Triton's names."""
GENERATES = "token"
"""The task whose answers only make sense one after the other."""
WHERE_IT_GENERATES = "ask {}, {} or {}".format(
    *(OPERATION_BY_NAME[name].path for name in ("completions", "chat", "generate"))
)
GONE = 499
"""The status that is counted if the caller left before the response."""
REFUSALS = (InputError, AdmissionError, RateLimitError)
"""They come by the thousand, and are counted, not logged."""
FAILED = "the server failed on this request; its log says why, under the request's id"


class Backend(Served, Protocol):
    """What HTTP and gRPC need of an ingress."""

    @property
    def signature(self) -> Signature: ...

    @property
    def versions(self) -> Names: ...

    @property
    def bodies(self) -> Bodies: ...

    def choose(self, request_id: str) -> Chooser | None: ...

    def is_ready(self) -> bool: ...

    def count_request(self, route: str, status: int) -> None:
        """Counts a finished request."""
        ...

    @property
    def max_timeout_s(self) -> float: ...

    async def generate(self, request: GenerateRequest) -> Stream:
        """Begins a sequence; raises what refuses it."""
        ...

    async def stats(self) -> dict[str, Any]: ...

    async def plan(self) -> dict[str, Any]: ...

    async def plan_history(self, limit: int) -> list[dict[str, Any]]: ...

    async def metrics(self) -> str: ...

    def watch(self) -> Viewer: ...


class Api:
    """Over a backend, behind a gate where there is one."""

    def __init__(self, backend: Backend, gate: Gate | None) -> None:
        self._backend = backend
        self._gate = gate

    def charge(self, caller: str | None, asked: InferRequest) -> None:
        """Count a request's inputs; raises RateLimitError. `caller`: admitted by the gate, if there is one."""
        if self._gate is not None:
            assert caller is not None
            self._gate.charge(caller, len(asked.rows))

    async def answer(self, asked: InferRequest, *, names_version: bool) -> tuple[Served, list[Answer]]:
        """The version that answered: another version's ingress, if the request names none and that one is to answer.

        Raises InputError of a model that generates.
        """
        if self._backend.signature.task.name == GENERATES:
            raise InputError(f"model {self._backend.card.name!r} generates text: {WHERE_IT_GENERATES}")
        chosen = None if names_version else self._backend.choose(asked.request_id)
        return (self._backend, await self._backend.infer(asked)) if chosen is None else await chosen.answer(asked)

    def check_model(self, name: str, version: str | None) -> None:
        """Raise UnknownModelError for what is not served; no `version` stands for whichever is."""
        card, served = self._backend.card, self._backend.version
        if name != card.name:
            raise UnknownModelError(f"unknown model {name!r}; served is {card.name!r}", param="model")
        if (version or served) != served:
            raise UnknownModelError(f"unknown version {version!r} of {name!r}; served is {served!r}", param="model")

    async def model_metadata(self) -> dict[str, Any]:
        """As the protocol names its parts."""
        return {
            "name": self._backend.card.name,
            "versions": await self._backend.versions.names(),
            "platform": "offramp",
            "inputs": self._backend.signature.input_tensors,
            "outputs": self._backend.signature.output_tensors,
        }

    def server_metadata(self) -> dict[str, Any]:
        """As the protocol names its parts."""
        return {"name": "offramp", "version": VERSION, "extensions": EXTENSIONS}


def log_error(logger: logging.Logger, request_id: str, error: OfframpError) -> None:
    """Log what became of a request, unless it is a refusal."""
    if not isinstance(error, REFUSALS):
        said = {"request_id": request_id}  # Serve's field; it fills it only where it has passed the request on itself
        logger.warning("request %s: %s: %s", request_id, error.kind, error.log_text, extra=said)


def retry_after(error: OfframpError) -> str | None:
    """When to come back, in whole seconds; None where that would not help."""
    retry_after_s = getattr(error, "retry_after_s", None)
    return None if retry_after_s is None else str(max(1, math.ceil(retry_after_s)))


def own_id(given: object) -> str:
    """A request's id: the caller's, or a new one."""
    return str(given or uuid.uuid4().hex)


logger = logging.getLogger(f"ray.serve.{__name__}")
logger.addFilter(WithoutWords())

JSON = "application/json"
CALLER = "offramp.caller"
"""Key of an ASGI scope: the caller that the gate admitted."""
REQUEST_ID = "offramp.request_id"
"""Of an ASGI scope: once it was asked for."""
SERVER_ERROR = 500
OPENAI_CODES = {
    "unauthorized": "invalid_api_key",
    "unknown_model": "model_not_found",
    "rate_limit": "rate_limit_exceeded",
    "context_length": "context_length_exceeded",
}


EndpointOf = Callable[[Backend, str, Mapping[str, Handler]], ASGIApp]
"""Makes a path's handlers by method an application: `Endpoint`, or what traces too."""


class Gatekeeper:
    """Runs before every route and passes on the callers that the gate admits."""

    def __init__(self, app: ASGIApp, backend: Backend, gate: Gate) -> None:
        self._app = app
        self._backend = backend
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI request; what is refused is counted under the route `access`."""
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
    """A path's handlers by method, with their errors turned into JSON and their requests counted."""

    def __init__(self, backend: Backend, path: str, handlers: Mapping[str, Handler]) -> None:
        self._backend = backend
        self._path = path
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._respond(Request(scope, receive))
            self._backend.count_request(self._path, response.status_code)
            await response(scope, receive, send)
        finally:
            self._backend.bodies.release(scope)

    async def _respond(self, request: Request) -> Response:
        return await compressed(request, await self._answer(request))

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
    """Where no route is: a 404, and for a web socket, which none of ours is, a handshake that fails."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await (WebSocketClose() if scope["type"] == "websocket" else endpoint)(scope, receive, send)

    return answer


def request_id(request: Request) -> str:
    """The caller's, or a new one; as a header the server itself sends it back, here it would be there twice."""
    scope = request.scope
    known: str | None = scope.get(REQUEST_ID)
    if known is None:
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        known = scope[REQUEST_ID] = own_id(given.decode("latin-1"))
    return known


def json_response(content: object, status: int = 200) -> Response:
    """An answer of JSON."""
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
    if path.startswith("/v2"):  # the protocol's errors are a string
        return {"error": message}
    if path.startswith("/v1/"):
        return openai_error(kind, message, status, param)
    return {"error": {"kind": kind, "message": message}, "request_id": request_id(request)}


def openai_error(kind: str, message: str, status: int, param: str | None = None) -> dict[str, object]:
    """An error as OpenAI's clients read it; `kind` is ours where they have no word for it."""
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
"""Of an answer that is no JSON."""
READ = ("Retry-After", "X-Request-ID", "Inference-Header-Content-Length", SCORE_HEADER, EXIT_HEADER)
REMEMBERED_S = 600


def cross_origin(origins: Sequence[str]) -> Middleware:
    """Answers a browser's question beforehand, which carries no key, and names the origins in every answer.

    Without credentials: a page of another site sends a key itself, never a password that the browser remembers.
    """
    return Middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["GET", "POST"],
        allow_headers=list(SENT),
        expose_headers=list(READ),
        max_age=REMEMBERED_S,
    )
