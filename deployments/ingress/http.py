"""The HTTP face of an ingress: `/predict`, the Open Inference Protocol v2, health, statistics, OpenAPI."""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from pydantic_core import to_json
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from deployments.ingress.bodies import (
    EXTENSIONS,
    OUTPUTS,
    check_model,
    parse_predict,
    parse_v2,
    predict_response,
    server_version,
    v2_response,
)
from deployments.ingress.cross_origin import cross_origin
from deployments.ingress.dashboard import pages
from deployments.ingress.dashboard.feed import Viewer
from deployments.ingress.gate import Gate
from deployments.ingress.openapi import SWAGGER_PAGE, openapi_document
from deployments.quiet import WithoutWords
from deployments.versions.served import Chooser, Names, Served
from earlyexit.errors import (
    AdmissionError,
    InputError,
    MethodNotAllowedError,
    OfframpError,
    PayloadTooLargeError,
    RateLimitError,
    UnauthorizedError,
    UnknownPathError,
)

logger = logging.getLogger(f"ray.serve.{__name__}")
logger.addFilter(WithoutWords())

JSON = "application/json"
HEADER_LENGTH = "inference-header-content-length"
MAX_DIGITS = 12
"""Of a length; Python refuses to read numbers of thousands."""
SOME_PLANS = 20
"""Of the history, unless the caller wants another number."""
MOST_PLANS = 1000
CALLER = "offramp.caller"
"""Of an ASGI scope: whom the gate let in."""
REFUSALS = (InputError, AdmissionError, RateLimitError)
"""They come by the thousand, and are counted, not logged."""
Handler = Callable[[Request], Awaitable[Response]]


class Backend(Served, Protocol):
    """What the routes need of an ingress."""

    @property
    def max_body_bytes(self) -> int: ...

    @property
    def versions(self) -> Names: ...

    def choose(self, request_id: str) -> Chooser | None: ...

    def is_ready(self) -> bool: ...

    async def stats(self) -> dict[str, Any]: ...

    async def plan(self) -> dict[str, Any]: ...

    async def plan_history(self, limit: int) -> list[dict[str, Any]]: ...

    def watch(self) -> Viewer: ...

    def count_request(self, route: str, status: int) -> None: ...


EndpointOf = Callable[[Backend, str, Mapping[str, Handler]], ASGIApp]


class Routes:
    """Handlers over a backend."""

    def __init__(self, backend: Backend, gate: Gate | None) -> None:
        self._backend = backend
        self._gate = gate

    async def predict(self, request: Request) -> Response:
        """One text or a list of texts to labels."""
        body = await read_body(request, self._backend.max_body_bytes)
        infer_request, many = parse_predict(body)
        if self._gate is not None:
            self._gate.charge(request.scope[CALLER], len(infer_request.texts))
        infer_request = replace(infer_request, request_id=_request_id(request))
        chosen = self._backend.choose(infer_request.request_id)
        served: Served = self._backend
        if chosen is None:
            answers = await served.infer(infer_request)
        else:
            served, answers = await chosen.answer(infer_request)
        labels = served.card.label_names
        return Response(predict_response(answers, labels, _request_id(request), many=many), media_type=JSON)

    async def v2_infer(self, request: Request) -> Response:
        """Open Inference Protocol, tensors in JSON or in the binary extension."""
        self._check_model(request)
        body = await read_body(request, self._backend.max_body_bytes)
        infer_request, reply = parse_v2(body, _json_length(request))
        if self._gate is not None:
            self._gate.charge(request.scope[CALLER], len(infer_request.texts))
        infer_request = replace(infer_request, request_id=_request_id(request))
        chosen = None if "version" in request.path_params else self._backend.choose(infer_request.request_id)
        served: Served = self._backend
        if chosen is None:
            answers = await served.infer(infer_request)
        else:
            served, answers = await chosen.answer(infer_request)
        card = served.card
        content, json_length = v2_response(answers, card.label_names, reply, card.name, served.version)
        if json_length is None:
            return Response(content, media_type=JSON)
        return Response(content, media_type="application/octet-stream", headers={HEADER_LENGTH: str(json_length)})

    async def v2_model(self, request: Request) -> Response:
        """Model metadata."""
        self._check_model(request)
        card = self._backend.card
        return _json(
            {
                "name": card.name,
                "versions": await self._backend.versions.names(),
                "platform": "offramp",
                "inputs": [{"name": "text", "datatype": "BYTES", "shape": [-1]}],
                "outputs": [{"name": name, "datatype": kind, "shape": [-1]} for name, kind in OUTPUTS.items()],
            }
        )

    async def v2_server(self, request: Request) -> Response:
        """Server metadata."""
        models = [self._backend.card.name]
        return _json({"name": "offramp", "version": server_version(), "extensions": EXTENSIONS, "models": models})

    async def live(self, request: Request) -> Response:
        """The process answers."""
        return _json({"live": True})

    async def ready(self, request: Request) -> Response:
        """Every stage has run warm."""
        is_ready = self._backend.is_ready()
        return _json({"ready": is_ready}, status=200 if is_ready else 503)

    async def model_ready(self, request: Request) -> Response:
        """The same for a named model."""
        self._check_model(request)
        return await self.ready(request)

    async def stats(self, request: Request) -> Response:
        """What stages and ingress have done."""
        return _json(await self._backend.stats())

    async def plan(self, request: Request) -> Response:
        """The plan in force, and why."""
        return _json(await self._backend.plan())

    async def plan_history(self, request: Request) -> Response:
        """The plans so far, newest first."""
        return _json(await self._backend.plan_history(_limit(request)))

    async def events(self, request: Request) -> Response:
        """The live page's stream."""
        return pages.watch(request, self._backend.watch)

    async def openapi(self, request: Request) -> Response:
        """The API's description."""
        has_keys = self._gate is not None and self._gate.ring is not None
        return _json(openapi_document(keys=has_keys, model=self._backend.card.name))

    async def docs(self, request: Request) -> Response:
        """The same, to read and try."""
        return HTMLResponse(SWAGGER_PAGE)

    def _check_model(self, request: Request) -> None:
        served = self._backend.version
        check_model(
            self._backend.card, request.path_params["model"], request.path_params.get("version", served), served
        )


def build_app(
    backend: Backend,
    gate: Gate | None = None,
    cors_origins: Sequence[str] = (),
    endpoint: EndpointOf | None = None,
    more: Iterable[tuple[str, Mapping[str, Handler]]] = (),
) -> Router:
    """The ASGI application over a backend; what is off costs nothing.

    `more` are further paths, with their handlers by method. `endpoint` makes another of a path's handlers than
    `Endpoint`. Starlette's router without its application: the middlewares around it do what `Endpoint` does, at 6 % of
    an ingress.
    """
    routes = Routes(backend, gate)
    endpoint = endpoint or Endpoint
    before: list[Middleware] = []
    if cors_origins:
        before.append(cross_origin(cors_origins))
    if gate is not None:
        before.append(Middleware(Gatekeeper, backend=backend, gate=gate))

    def route(path: str, handler: Handler, method: str = "GET") -> Route:
        return Route(path, endpoint(backend, path, {method: handler}))

    model = "/v2/models/{model}"
    version = model + "/versions/{version}"
    router = Router(
        routes=[
            route("/predict", routes.predict, "POST"),
            route(model + "/infer", routes.v2_infer, "POST"),
            route(version + "/infer", routes.v2_infer, "POST"),
            route("/v2", routes.v2_server),
            route("/v2/health/live", routes.live),
            route("/v2/health/ready", routes.ready),
            route(model, routes.v2_model),
            route(model + "/ready", routes.model_ready),
            route(version, routes.v2_model),
            route(version + "/ready", routes.model_ready),
            route("/stats", routes.stats),
            route("/plan", routes.plan),
            route("/plan/history", routes.plan_history),
            route("/dashboard", pages.page),
            route("/dashboard/events", routes.events),
            route("/dashboard/{asset}", pages.asset),
            route("/openapi.json", routes.openapi),
            route("/docs", routes.docs),
            *(Route(path, endpoint(backend, path, handlers)) for path, handlers in more),
        ],
        redirect_slashes=False,
        default=_unknown(Endpoint(backend, "unknown", {})),
        middleware=before,
    )
    router.default = FromTheRoot(router)
    return router


class FromTheRoot:
    """Below a route prefix a path may be meant from the root: `/v2/models/{model}/versions/{version}/infer`."""

    def __init__(self, router: Router) -> None:
        self._router = Router(router.routes, redirect_slashes=False, default=router.default)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI request that matches nothing below the prefix."""
        await self._router({**scope, "root_path": ""}, receive, send)


def _unknown(endpoint: Endpoint) -> ASGIApp:
    """Where no route is: a 404, and for a web socket, which none of ours is, a handshake that fails."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await (WebSocketClose() if scope["type"] == "websocket" else endpoint)(scope, receive, send)

    return answer


class Gatekeeper:
    """Stands before every route, those of tomorrow too, and lets through whom the gate admits."""

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
        """One ASGI request."""
        request = Request(scope, receive)
        response = await self._respond(request)
        self._backend.count_request(self._path, response.status_code)
        await response(scope, receive, send)

    async def _respond(self, request: Request) -> Response:
        try:
            return await self._handler(request)(request)
        except OfframpError as error:
            if not isinstance(error, REFUSALS):
                logger.warning("request %s: %s: %s", _request_id(request), error.kind, error.log_text)
            return _error(request, error)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody is left to read it
        except Exception:
            logger.exception("request %s: %s %s", _request_id(request), request.method, request.url.path)
            message = "the server failed on this request; its log says why, under the request's id"
            return _json(_error_body(request, "internal", message), status=500)

    def _handler(self, request: Request) -> Handler:
        handler = self._handlers.get("GET" if request.method == "HEAD" else request.method)
        if handler is not None:
            return handler
        asked = f"{request.method} {request.url.path}"
        if not self._handlers:
            raise UnknownPathError(f"{asked}: there is no such path; see /openapi.json")
        allowed = tuple(self._handlers)
        message = f"{asked}: only {', '.join(allowed)} is allowed; see /openapi.json"
        raise MethodNotAllowedError(message, allowed=allowed)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body; raises PayloadTooLargeError, and InputError for a compressed one."""
    for name, value in request.scope["headers"]:  # what is refused is not read
        if name == b"content-length" and (len(value) > MAX_DIGITS or int(value) > max_bytes):
            raise PayloadTooLargeError(f"the body is larger than {max_bytes} bytes")
        if name == b"content-encoding" and value != b"identity":
            encoding = value.decode("latin-1")
            raise InputError(f"content-encoding {encoding!r}; only plain bodies are taken")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise PayloadTooLargeError(f"the body is larger than {max_bytes} bytes")
    return bytes(body)


def _authorization(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"authorization":
            return str(value, "latin-1")
    return None


def _request_id(request: Request) -> str:
    """The caller's, or a new one; as a header Serve itself sends it back, here it would be there twice."""
    if not hasattr(request.state, "request_id"):
        request.state.request_id = request.headers.get("x-request-id") or uuid.uuid4().hex
    return str(request.state.request_id)


def _json_length(request: Request) -> int | None:
    length = request.headers.get(HEADER_LENGTH)
    if length is None:
        return None
    if not length.isascii() or not length.isdigit() or len(length) > MAX_DIGITS:
        raise InputError(f"Inference-Header-Content-Length is {length[:20]!r}; a number of bytes is needed")
    return int(length)


def _limit(request: Request) -> int:
    text = request.query_params.get("limit", str(SOME_PLANS))
    limit = int(text) if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS else 0
    if not 1 <= limit <= MOST_PLANS:
        raise InputError(f"limit is {text[:20]!r}; a number from 1 to {MOST_PLANS} is needed")
    return limit


def _json(content: object, status: int = 200) -> Response:
    return Response(to_json(content), status_code=status, media_type=JSON)


def _error(request: Request, error: OfframpError) -> Response:
    response = _json(_error_body(request, error.kind, str(error)), status=error.http_status)
    if isinstance(error, MethodNotAllowedError):
        response.headers["allow"] = ", ".join(error.allowed)
    if isinstance(error, UnauthorizedError):
        response.headers["www-authenticate"] = error.scheme
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        response.headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
    return response


def _error_body(request: Request, kind: str, message: str) -> dict[str, object]:
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    if path.startswith("/v2"):  # the protocol's errors are a string
        return {"error": message}
    return {"error": {"kind": kind, "message": message}, "request_id": _request_id(request)}
