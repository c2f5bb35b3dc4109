"""The HTTP interface of an ingress: handlers of inference, metadata and health, and the router of all operations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from itertools import product
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.api.access import Gate
from deployments.api.completions.http import GenerateRoutes
from deployments.api.endpoint import SERVER_METADATA, Backend, Endpoint, infer_version, model_metadata
from deployments.api.exchange import (
    ANYTHING,
    LARGE_BYTES,
    HttpRequest,
    UnsupportedMediaTypeError,
    first_header,
    json_response,
    preferred_type,
    run,
)
from deployments.api.openapi import PARAMETERS, SWAGGER_PAGE, openapi_document
from deployments.api.operations import BYTES, EXIT, JSON, OPERATIONS, InferRequest, parse_predict
from deployments.api.v2 import parse_v2, v2_response
from earlyexit.clock import Clock, WallClock
from earlyexit.errors import NotAcceptableError
from earlyexit.network.boundary import Answer, PackedArray
from earlyexit.tasks.base import Task

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

    async def predict(self, request: HttpRequest) -> Response:
        """Answers one input or a list of inputs in JSON, or one input that is the whole body, such as an image."""
        body = await request.body()
        infer_request, many = await run(partial(self._parse_predict, request, body), in_thread=len(body) >= LARGE_BYTES)
        content_type = self._answer_type(request, many=many)
        served, answers = await infer_version(self._backend, infer_request)
        if content_type == JSON:
            write = partial(predict_response, answers, served.task, request.id, many=many)
        else:
            [answer] = answers
            write = partial(served.task.to_content, content_type, answer.value)
        return Response(await run(write, in_thread=are_large(answers)), media_type=content_type)

    def _answer_type(self, request: HttpRequest, *, many: bool) -> str:
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

    def _parse_predict(self, request: HttpRequest, body: bytes) -> tuple[InferRequest, bool]:
        self._backend.signature.check_answers()
        codec = self._backend.signature.codec
        content_type = first_header(request.scope["headers"], b"content-type") or ""
        content_type = content_type.partition(";")[0].strip().lower()
        if content_type in codec.content_types:
            row = codec.from_content(content_type, body)
            return InferRequest(rows=(row,), ids=("",), request_id=request.id), False
        is_file = codec.content_types and content_type != JSON and body[:1] not in b" \n\r\t[{"
        if is_file or content_type.startswith(MEDIA):
            accepted = ", ".join((JSON, *codec.content_types))
            raise UnsupportedMediaTypeError(f"content-type {content_type[:80]!r}; this model takes {accepted}")
        return parse_predict(body, codec, request.id)

    async def infer(self, request: HttpRequest) -> Response:
        """Answers the Open Inference Protocol v2, with tensors in JSON or in the binary extension."""
        body = await request.body()
        parse = partial(parse_v2, body, request.headers.get(HEADER_LENGTH), self._backend.signature, request.id)
        infer_request, reply = await run(parse, in_thread=len(body) >= LARGE_BYTES)
        names_version = "version" in request.path_params
        served, answers = await infer_version(self._backend, infer_request, names_version=names_version)
        write = partial(v2_response, answers, served.task, reply, served.card.name, served.version)
        content, length = await run(write, in_thread=are_large(answers))
        if length is None:
            return Response(content, media_type=JSON)
        return Response(content, media_type=BYTES, headers={HEADER_LENGTH: str(length)})

    async def model_metadata(self, request: HttpRequest) -> Mapping[str, Any]:
        return await model_metadata(self._backend)

    async def server_metadata(self, request: HttpRequest) -> Mapping[str, Any]:
        return {**SERVER_METADATA, "models": [self._backend.card.name]}

    async def live(self, request: HttpRequest) -> Mapping[str, Any]:
        return {"live": True}

    async def ready(self, request: HttpRequest) -> Response:
        is_ready, name = self._backend.is_ready, {"name": self._backend.card.name} if request.path_params else {}
        return json_response({**name, "ready": is_ready}, status=200 if is_ready else 503)

    model_ready = ready

    async def openapi(self, request: HttpRequest) -> Mapping[str, Any]:
        backend = self._backend
        names = {"model": backend.card.name, "version": backend.version}
        prefix = request.scope.get("root_path") or "/"
        return openapi_document(backend.signature, keys=self._has_keys, prefix=prefix, **names)

    async def docs(self, request: HttpRequest) -> Response:
        return HTMLResponse(SWAGGER_PAGE)


def are_large(answers: Sequence[Answer]) -> bool:
    """Returns whether answers take milliseconds to write: five class maps of 180 x 240 take 2 to 4 ms as JSON."""
    return sum(len(answer.value.raw) for answer in answers if isinstance(answer.value, PackedArray)) >= 200_000


def predict_response(answers: Sequence[Answer], task: Task, request_id: str, *, many: bool) -> bytes:
    """Returns the JSON body of a `/predict` answer."""
    outputs = [{**task.to_json(answer.value, answer.score), EXIT.name: answer.exit} for answer in answers]
    answer = {"outputs": outputs} if many else outputs[0]
    return to_json({**answer, "request_id": request_id}, inf_nan_mode="null")


def route(endpoints: Mapping[str, Endpoint], unknown: Endpoint) -> ASGIApp:
    """Returns the application that passes each request to the endpoint of its path, or to `unknown`."""
    patterns = (PARAMETERS.sub(r"(?P<\1>[^/]+)", path.replace(".", r"\.")) for path in endpoints)
    endpoint_of = dict(zip(map(re.compile, patterns), endpoints.values(), strict=True))

    @lru_cache(64)  # most requests have the same few paths
    def find(path: str, prefix: str) -> tuple[Endpoint, dict[str, str], str]:
        # The prefix is no part of the path, or it begins the path of a version: /v2/models/{model}/versions/..
        for root in (prefix, ""):
            for pattern, endpoint in endpoint_of.items():
                if (found := pattern.fullmatch(path.removeprefix(root))) is not None:
                    return endpoint, found.groupdict(), root
        return unknown, {}, prefix

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":  # Serve waits for both answers
            for each in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{each}.complete"})
            return
        endpoint, scope["path_params"], scope["root_path"] = find(scope["path"], scope.get("root_path", ""))
        await endpoint(scope, receive, send)

    return answer


def build_api(
    backend: Backend,
    *more: object,
    gate: Gate | None = None,
    cors_origins: Sequence[str] = (),
    tracer: Tracer | None = None,
    wall: Clock | None = None,
) -> ASGIApp:
    """Builds the HTTP interface of a backend.

    `more`: further objects whose methods handle operations. `wall`: a clock of seconds since 1970.
    """
    handlers: list[object] = [Routes(backend, gate), *more]
    if backend.signature.generates:
        handlers.append(GenerateRoutes(backend, wall or WallClock()))
    endpoints: dict[str, Endpoint] = {}
    for operation in OPERATIONS:
        found = [getattr(each, operation.name) for each in handlers if hasattr(each, operation.name)]
        for path, handler in product(operation.paths, found):
            endpoint = endpoints.setdefault(path, Endpoint(backend, path, gate, tracer))
            endpoint.handlers[operation.method] = handler
    app = route(endpoints, Endpoint(backend, "unknown", gate))
    if not cors_origins:
        return app
    # This middleware precedes the endpoints, because preflight requests carry no key. Credentials are not allowed: a
    # page of another site must send a key itself, and must not use a password that the browser stores.
    return CORSMiddleware(
        app,
        allow_origins=list(cors_origins),
        allow_methods=sorted({each.method for each in OPERATIONS}),
        allow_headers=["*"],
        expose_headers=["Retry-After", "X-Request-ID", "Inference-Header-Content-Length"],
    )
