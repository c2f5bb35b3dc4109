"""The HTTP interface of an ingress: route handlers, and the ASGI application that serves them."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.api.access import Gate
from deployments.api.completions.http import GenerateRoutes
from deployments.api.endpoint import (
    ANYTHING,
    GENERATION_TASK,
    MAX_DIGITS,
    SERVER_METADATA,
    Backend,
    Endpoint,
    ModelVersion,
    find_header,
    infer_version,
    json_response,
    model_metadata,
    predict_response,
    preferred_type,
    request_id,
    run_writer,
    v2_response,
)
from deployments.api.openapi import SWAGGER_PAGE, openapi_document
from deployments.api.operations import BYTES, FREQUENT, JSON, handlers_of
from deployments.api.parsing import InferRequest, parse_content, parse_predict, parse_v2
from deployments.api.server import FastPaths
from earlyexit.clock import Clock, WallClock
from earlyexit.errors import InputError, NotAcceptableError
from earlyexit.network.boundary import Answer

if TYPE_CHECKING:
    from deployments.ops.tracing import Tracer

MEDIA = ("image/", "audio/", "video/")
"""Prefixes of content types that are not JSON. Many clients send a wrong type, so what begins as JSON is parsed."""
HEADER_LENGTH = "inference-header-content-length"


class Routes:
    """Handlers of the operations that need nothing but a backend."""

    def __init__(self, backend: Backend, gate: Gate | None) -> None:
        self._backend = backend
        self._has_keys = gate is not None and gate.keys is not None

    async def predict(self, request: Request) -> Response:
        """Answers one input or a list of inputs in JSON, or one input that is the whole body, such as an image."""
        body = await self._backend.bodies.read(request)
        infer_request, many = self._parse_predict(request, body)
        content_type = self._answer_type(request, many=many)
        served, answers = await self._answer(request, infer_request)
        if content_type == JSON:
            write = partial(predict_response, answers, served.task, request_id(request), many=many)
            return Response(await run_writer(write, answers), media_type=JSON)
        [answer] = answers
        content = await run_writer(partial(served.task.to_content, content_type, answer.value), answers)
        return Response(content, media_type=content_type)

    def _answer_type(self, request: Request, *, many: bool) -> str:
        """Returns the content type of the answer; raises NotAcceptableError if the caller accepts none."""
        lines = [value for name, value in request.scope["headers"] if name == b"accept"]
        accept = b", ".join(lines).decode("latin-1") or ANYTHING  # several lines of a header form one list
        if accept in (ANYTHING, JSON):
            return JSON
        single_types = self._backend.signature.task.content_types
        content_type = preferred_type(accept, (JSON,) if many else (JSON, *single_types))
        if content_type is None:
            others = "".join(f", or {each} for a single input" for each in single_types)
            raise NotAcceptableError(f"accept {accept[:80]!r}; this model answers {JSON}{others}")
        return content_type

    def _parse_predict(self, request: Request, body: bytes) -> tuple[InferRequest, bool]:
        codec = self._backend.signature.codec
        content_type = (find_header(request.scope, b"content-type") or "").partition(";")[0].strip().lower()
        if content_type in codec.content_types:
            return parse_content(content_type, body, codec), False
        is_file = codec.content_types and content_type != JSON and body[:1] not in b" \n\r\t[{"
        if is_file or content_type.startswith(MEDIA):
            accepted = ", ".join((JSON, *codec.content_types))
            raise InputError(f"content-type {content_type[:80]!r}; this model takes {accepted}")
        return parse_predict(body, codec)

    async def infer(self, request: Request) -> Response:
        """Answers the Open Inference Protocol v2, with tensors in JSON or in the binary extension."""
        body = await self._backend.bodies.read(request)
        infer_request, reply = parse_v2(body, _json_length(request), self._backend.signature)
        served, answers = await self._answer(request, infer_request)
        card = served.card
        write = partial(v2_response, answers, served.task, reply, card.name, served.version)
        content, json_length = await run_writer(write, answers)
        if json_length is None:
            return Response(content, media_type=JSON)
        return Response(content, media_type=BYTES, headers={HEADER_LENGTH: str(json_length)})

    def _answer(self, request: Request, infer_request: InferRequest) -> Awaitable[tuple[ModelVersion, list[Answer]]]:
        infer_request = replace(infer_request, request_id=request_id(request))
        return infer_version(self._backend, infer_request, names_version="version" in request.path_params)

    async def model_metadata(self, request: Request) -> Response:
        return json_response(await model_metadata(self._backend))

    async def server_metadata(self, request: Request) -> Response:
        return json_response({**SERVER_METADATA, "models": [self._backend.card.name]})

    async def live(self, request: Request) -> Response:
        return json_response({"live": True})

    async def ready(self, request: Request) -> Response:
        is_ready = self._backend.is_ready
        return json_response({"ready": is_ready}, status=200 if is_ready else 503)

    model_ready = ready

    async def openapi(self, request: Request) -> Response:
        backend = self._backend
        names = {"model": backend.card.name, "version": backend.version}
        return json_response(openapi_document(backend.signature, keys=self._has_keys, **names))

    async def docs(self, request: Request) -> Response:
        return HTMLResponse(SWAGGER_PAGE)


SENT_HEADERS = ("Authorization", "Content-Encoding", "Content-Type", "X-Request-ID", "Inference-Header-Content-Length")
READ_HEADERS = ("Retry-After", "X-Request-ID", "Inference-Header-Content-Length")
PREFLIGHT_CACHE_S = 600


@dataclass(frozen=True, slots=True)
class HttpApi:
    """The HTTP interface of an ingress."""

    router: Router
    """The ASGI application with all routes."""
    fast_paths: FastPaths
    """The most frequent paths, whose requests go to the same endpoints without routing."""


def build_api(
    backend: Backend,
    *more: object,
    gate: Gate | None = None,
    cors_origins: Sequence[str] = (),
    tracer: Tracer | None = None,
    prefix: str = "/",
    wall: Clock | None = None,
) -> HttpApi:
    """Builds the HTTP interface of a backend.

    `more`: further objects whose methods handle operations. `prefix`: the prefix of the service's paths. `wall`: a
    clock of seconds since 1970. Starlette's application class is not used: its middlewares repeat what `Endpoint` does.
    """
    handlers: list[object] = [Routes(backend, gate), *more]
    if backend.signature.task.name == GENERATION_TASK:
        handlers.append(GenerateRoutes(backend, wall or WallClock()))
    endpoints = {
        path: Endpoint(backend, path, methods, gate, tracer)
        for each in handlers
        for path, methods in handlers_of(each).items()
    }
    # This middleware precedes the endpoints, because preflight requests carry no key. Credentials are not allowed: a
    # page of another site must send a key itself, and must not use a password that the browser stores.
    cross_origin = Middleware(
        CORSMiddleware,
        allow_origins=list(cors_origins),
        allow_methods=["GET", "POST"],
        allow_headers=list(SENT_HEADERS),
        expose_headers=list(READ_HEADERS),
        max_age=PREFLIGHT_CACHE_S,
    )
    middlewares = [cross_origin] if cors_origins else []
    router = Router(
        routes=[Route(path, endpoint) for path, endpoint in endpoints.items()],
        redirect_slashes=False,
        default=Endpoint(backend, "unknown", {}, gate),
        middleware=middlewares,
    )
    with_prefix = Router(router.routes, redirect_slashes=False, default=router.default)

    async def route_again(scope: Scope, receive: Receive, send: Send) -> None:
        """Routes an unknown path with its prefix, which may belong to the path: `/v2/models/{model}/versions/..`."""
        await with_prefix({**scope, "root_path": ""}, receive, send)

    router.default = route_again
    frequent = {path: endpoint for path, endpoint in endpoints.items() if path in FREQUENT}
    return HttpApi(router, _fast_paths(frequent, backend, middlewares, prefix.rstrip("/")))


def _fast_paths(
    endpoints: Mapping[str, Endpoint], backend: Backend, middlewares: Sequence[Middleware], root: str
) -> FastPaths:
    named = {"model": backend.card.name, "version": backend.version}
    fast_paths: dict[bytes, ASGIApp] = {}
    for path, endpoint in endpoints.items():
        params = {name: value for name, value in named.items() if f"{{{name}}}" in path}
        app: ASGIApp = endpoint
        for each in reversed(middlewares):
            app = each.cls(app, *each.args, **each.kwargs)
        full_path = root + path.format(**params)
        entries = {"path": full_path, "root_path": root, "path_params": params}
        fast_paths[quote(full_path).encode()] = partial(_with_entries, app, entries)
    return fast_paths


def _with_entries(
    app: ASGIApp, entries: Mapping[str, Any], scope: Scope, receive: Receive, send: Send
) -> Awaitable[None]:
    """Calls an application with the entries of the scope that routing would add."""
    return app({**scope, **entries}, receive, send)


def _json_length(request: Request) -> int | None:
    length = request.headers.get(HEADER_LENGTH)
    if length is None:
        return None
    if not length.isascii() or not length.isdigit() or len(length) > MAX_DIGITS:
        raise InputError(f"Inference-Header-Content-Length must be a number of bytes (got {length[:20]!r})")
    return int(length)
