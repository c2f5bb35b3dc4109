"""Code that all routes and RPCs share: access, counting, tracing, errors as JSON, request bodies and answers.

Request bodies are read and decompressed within limits. Answers are written in the content type that the caller prefers,
and are compressed. gRPC answers have the same columns.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import math
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import numpy as np
from pydantic_core import to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocketClose

from deployments.api.access import Gate
from deployments.api.generation import GenerateRequest, Stream
from deployments.api.operations import GENERATION_PATHS, JSON, MODEL, OPERATION_BY_NAME, TRACED, Handler, error_type_of
from deployments.api.parsing import EXIT, InferRequest, OpenAiError, Signature, V2Error, V2Reply, pack_elements
from deployments.process_setup import HideExceptionMessages
from earlyexit.errors import (
    AdmissionError,
    InputError,
    MethodNotAllowedError,
    OfframpError,
    OverloadedError,
    PayloadTooLargeError,
    RateLimitError,
    UnauthorizedError,
    UnknownModelError,
    UnknownPathError,
)
from earlyexit.network.boundary import Answer, Column, PackedArray
from earlyexit.network.store import ModelCard
from earlyexit.tasks.base import Task, ValueArray

if TYPE_CHECKING:
    from deployments.ops.tracing import RequestRecord, Tracer

EXTENSIONS = ("binary_tensor_data", "parameters", "model_repository")
"""The supported extensions of the Open Inference Protocol, by Triton's names."""
SERVER_METADATA: Mapping[str, Any] = {"name": "offramp", "version": version("offramp"), "extensions": EXTENSIONS}
"""The server's metadata, with the protocol's names."""
GENERATION_TASK = "token"
"""The name of the task of models that generate."""
GENERATION_HINT = "send the request to {}, {} or {}".format(
    *(OPERATION_BY_NAME[name].path for name in ("completions", "chat", "generate"))
)
CLIENT_CLOSED_REQUEST = 499
"""The status that is counted if the caller disconnected before the response (nginx's 499)."""
SERVER_ERROR = 500
UNLOGGED_ERRORS = (InputError, AdmissionError, RateLimitError)
"""Errors that may occur thousands of times: they are counted, but not logged."""
FAILURE = "the server failed on this request; its log has the reason, under the request's id"
REQUEST_ID = "offramp.request_id"
"""Key of an ASGI scope: the request's id, once it was looked up."""
OPENAI_CODES = {
    "unauthorized": "invalid_api_key",
    "unknown_model": "model_not_found",
    "rate_limit": "rate_limit_exceeded",
    "context_length": "context_length_exceeded",
}

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
    """Whether every stage of the plan has had a replica."""

    @property
    def signature(self) -> Signature: ...

    @property
    def versions(self) -> ServedVersions: ...

    def count_request(self, route: str, status: int) -> None:
        """Counts a finished request."""

    async def generate(self, request: GenerateRequest) -> Stream:
        """Starts a sequence; raises what `GenerateService.start` raises."""


async def infer_version(
    backend: Backend, request: InferRequest, *, names_version: bool
) -> tuple[ModelVersion, list[Answer]]:
    """Returns the answers and the version that gave them; raises InputError for a model that generates."""
    if backend.signature.task.name == GENERATION_TASK:
        raise InputError(f"model {backend.card.name!r} generates text: {GENERATION_HINT}")
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

    It counts requests that the gate refuses under the route `access`. If the path names a model and a version, they
    must be served here.
    """

    def __init__(
        self,
        backend: Backend,
        path: str,
        handlers: Mapping[str, Handler],
        gate: Gate | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._backend = backend
        self._gate = gate
        self._path = path
        self._handlers = handlers
        self._tracer = tracer if path in TRACED else None
        self._has_model = path.startswith(MODEL)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # there are none: the handshake fails
            return await WebSocketClose()(scope, receive, send)
        request = Request(scope, receive)
        if self._gate is not None:
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            try:
                self._gate.admit(scope["method"], path, find_header(scope, b"authorization"))
            except (UnauthorizedError, RateLimitError) as error:
                self._backend.count_request("access", error.http_status)
                return await _error(request, error)(scope, receive, send)
        record: RequestRecord | None = None
        if self._tracer is not None:
            route = {"http.request.method": "POST", "http.route": self._path}
            record = self._tracer.begin(f"POST {self._path}", route, request.headers)
        status: int | None = None
        try:
            response = await self._answer(request)
            if len(getattr(response, "body", b"")) >= MIN_COMPRESSED_BYTES:  # streams have no `body`
                await compress(request, response)
            status = response.status_code
            self._backend.count_request(self._path, status)
            if record is not None:
                response.headers.update(record.headers)
            await response(scope, receive, send)
        finally:
            self._backend.bodies.release(scope)
            if record is not None and self._tracer is not None:
                attributes = {} if status is None else {"http.response.status_code": status}
                self._tracer.end(record, attributes, scope.get(REQUEST_ID), failure=trace_failure(status))

    async def _answer(self, request: Request) -> Response:
        try:
            handler = self._handler(request)
            if self._has_model:
                check_model(self._backend, **request.path_params)
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:
            return _error(request, failure_of(error, request_id(request), f"{request.method} {request.url.path}"))

    def _handler(self, request: Request) -> Handler:
        handler = self._handlers.get("GET" if request.method == "HEAD" else request.method)
        if handler is not None:
            return handler
        target = f"{request.method} {request.url.path}"
        if not self._handlers:
            hint = ", because the model does not generate" if target.endswith(GENERATION_PATHS) else ""
            raise UnknownPathError(f"{target}: there is no such path{hint}; see /openapi.json")
        allowed = tuple(self._handlers)
        message = f"{target}: only {', '.join(allowed)} is allowed; see /openapi.json"
        raise MethodNotAllowedError(message, allowed=allowed)


def trace_failure(status: int | None) -> str | None:
    """Returns the failure that a trace reports for a status; None for success, and for errors of the caller.

    By OpenTelemetry's convention, an error of the caller is not an error of the server's span.
    """
    if status is None or status == CLIENT_CLOSED_REQUEST:
        return "the caller disconnected before the response"
    return "" if status >= SERVER_ERROR else None


class InternalError(OfframpError):
    """A failure of the server that is no error of the tree."""


def failure_of(error: Exception, request_id: str, what: str) -> OfframpError:
    """Returns the error that a caller gets, and logs the one that ended the request, unless it is a refusal.

    Must be called while the error is handled.
    """
    fields = {"request_id": request_id}  # Serve sets this field only for requests that it routed itself
    if not isinstance(error, OfframpError):
        logger.exception("request %s: %s", request_id, what, extra=fields)
        return InternalError(FAILURE)
    if not isinstance(error, UNLOGGED_ERRORS):
        logger.warning("request %s: %s: %s", request_id, error.kind, error.log_text, extra=fields)
    return error


def retry_after_header(error: OfframpError) -> str | None:
    """Returns the value of Retry-After in whole seconds; None if a retry would not help."""
    retry_after_s = getattr(error, "retry_after_s", None)
    return None if retry_after_s is None else str(max(1, math.ceil(retry_after_s)))


def id_or_new(request_id: object) -> str:
    """Returns the caller's id of a request, or a new one if the caller sent none."""
    return str(request_id or uuid.uuid4().hex)


def request_id(request: Request) -> str:
    """Returns the request's id: the caller's, or a new one. The HTTP server adds it to the response."""
    scope = request.scope
    id_: str | None = scope.get(REQUEST_ID)
    if id_ is None:
        id_ = scope[REQUEST_ID] = id_or_new(find_header(scope, b"x-request-id"))
    return id_


def json_response(content: object, status: int = 200) -> Response:
    """Returns a JSON response. JSON has no infinite numbers, which become null."""
    return Response(to_json(content, inf_nan_mode="null"), status_code=status, media_type=JSON)


def _error(request: Request, error: OfframpError) -> Response:
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    error_type = error_type_of(path)
    if error_type is V2Error:
        body: dict[str, object] = {"error": str(error)}
    elif error_type is OpenAiError:
        body = openai_error(error)
    else:
        body = {"error": {"kind": error.kind, "message": str(error)}, "request_id": request_id(request)}
    response = json_response(body, status=error.http_status)
    if isinstance(error, MethodNotAllowedError):
        response.headers["allow"] = ", ".join(error.allowed)
    if isinstance(error, UnauthorizedError):
        response.headers["www-authenticate"] = error.scheme
    retry_after = retry_after_header(error)
    if retry_after is not None:
        response.headers["retry-after"] = retry_after
    return response


def openai_error(error: OfframpError) -> dict[str, object]:
    """Returns an error in OpenAI's format; its code is our `kind` if OpenAI has no code for it."""
    type_ = "server_error" if error.http_status >= SERVER_ERROR else "invalid_request_error"
    param = error.param if isinstance(error, InputError) else None
    code = OPENAI_CODES.get(error.kind, error.kind)
    return {"error": {"message": str(error), "type": type_, "param": param, "code": code}}


def find_header(scope: Scope, name: bytes) -> str | None:
    """Returns the first header of a name, which is in lower case; None if there is none."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return None


MAX_DIGITS = 12
"""Most digits of a number in a header; Python refuses to parse numbers with thousands of digits."""
HELD_BYTES = "offramp.held"
"""Key of an ASGI scope: bytes of its body that are held in memory."""
RETRY_AFTER_S = 1.0
GZIP_ENCODINGS = (b"gzip", b"x-gzip")
GZIP_WINDOW = 31
"""zlib's `wbits` for the gzip format."""
LARGE_GZIP_BYTES = 1000
"""Larger bodies are decompressed in a thread, because that may take more than a millisecond."""


class RequestBodies:
    """Reads request bodies, and limits the memory of the bodies whose requests are not answered yet."""

    def __init__(self, max_bytes: int, max_held_bytes: int) -> None:
        """`max_bytes` limits one body, `max_held_bytes` all bodies; one body of the largest size is always accepted."""
        self.max_bytes = max_bytes
        self._max_held_bytes = max(max_held_bytes, max_bytes)
        self.held_bytes = 0

    async def read(self, request: Request) -> bytes:
        """Returns the decompressed body, which counts as held until `release`.

        Raises PayloadTooLargeError, InputError for encodings other than gzip, and OverloadedError if too much is held.
        """
        is_gzip = False
        for name, value in request.scope["headers"]:  # checked before the body is read
            if name == b"content-length" and (len(value) > MAX_DIGITS or int(value) > self.max_bytes):
                raise self._too_large()
            if name == b"content-encoding" and value.lower() != b"identity":
                if value.lower() not in GZIP_ENCODINGS or is_gzip:
                    encoding = value[:80].decode("latin-1")
                    raise InputError(f"content-encoding must be gzip or identity (got {encoding!r})")
                is_gzip = True
        body = await self._read(request)
        if not is_gzip:
            return body
        if len(body) < LARGE_GZIP_BYTES:
            content = self._decompress(body)
        else:
            content = await asyncio.to_thread(self._decompress, body)
        self._hold(request.scope, len(content) - len(body))
        return content

    async def _read(self, request: Request) -> bytes:
        parts = bytearray()
        while True:  # Starlette's `stream` is a generator around this, which takes twice the time
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            part: bytes = message.get("body", b"")
            self._hold(request.scope, len(part))
            if len(parts) + len(part) > self.max_bytes:
                raise self._too_large()
            is_last = not message.get("more_body", False)
            if is_last and not parts:
                return part
            parts += part
            if is_last:
                return bytes(parts)

    def release(self, scope: Scope) -> None:
        """Releases the body of a finished request."""
        self.held_bytes -= scope.pop(HELD_BYTES, 0)

    @contextmanager
    def holding(self, num_bytes: int) -> Iterator[None]:
        """Counts a message that gRPC has read as held within the block; raises what `read` raises."""
        if num_bytes > self.max_bytes:
            raise PayloadTooLargeError(f"the message is larger than {self.max_bytes} bytes")
        scope: Scope = {}
        self._hold(scope, num_bytes)
        try:
            yield
        finally:
            self.release(scope)

    def _hold(self, scope: Scope, num_bytes: int) -> None:
        if self.held_bytes + num_bytes > self._max_held_bytes:
            message = f"requests in progress hold {self.held_bytes} bytes; the limit is {self._max_held_bytes}"
            raise OverloadedError(message, retry_after_s=RETRY_AFTER_S)
        self.held_bytes += num_bytes
        scope[HELD_BYTES] = scope.get(HELD_BYTES, 0) + num_bytes

    def _decompress(self, body: bytes) -> bytes:
        decompressor = zlib.decompressobj(GZIP_WINDOW)
        try:
            content = decompressor.decompress(body, self.max_bytes + 1)
        except zlib.error as error:
            raise InputError(f"the body is not gzip: {error}") from error
        if len(content) > self.max_bytes:
            raise self._too_large()
        if not decompressor.eof:
            raise InputError("the gzip body is cut off")
        if decompressor.unused_data:
            raise InputError("bytes follow the end of the gzip body")
        return content

    def _too_large(self) -> PayloadTooLargeError:
        return PayloadTooLargeError(f"the body is larger than {self.max_bytes} bytes")


ANYTHING = "*/*"
GZIP = "gzip"
MIN_COMPRESSED_BYTES = 1_500
"""Smaller answers are not compressed, because they fit into one packet."""


def preferred_type(accept: str, offered: Sequence[str]) -> str | None:
    """Returns the offered content type that the caller prefers (RFC 9110, section 12.5.1); None if it accepts none.

    A type has the weight of the most specific range that includes it. The first of equal types is returned.
    """
    ranges = _weights(accept)
    if not ranges:
        return offered[0] if not accept.strip() else None
    weights = [
        _weight(ranges, (content_type, f"{content_type.partition('/')[0]}/*", ANYTHING)) for content_type in offered
    ]
    best = max(weights)
    return offered[weights.index(best)] if best > 0 else None


def _weights(header: str) -> dict[str, float]:
    """Returns the weights of a header's ranges by name, in lower case and without parameters."""
    weights: dict[str, float] = {}
    for part in header.split(","):
        name, *parameters = (each.strip().lower() for each in part.split(";"))
        with suppress(ValueError):
            weight = float(next((each.removeprefix("q=") for each in parameters if each.startswith("q=")), "1"))
            if name and 0 <= weight <= 1:
                weights[name] = weight
    return weights


def _weight(weights: dict[str, float], names: Sequence[str]) -> float:
    return next((weights[name] for name in names if name in weights), 0.0)


T = TypeVar("T")
LARGE_ANSWERS_BYTES = 200_000
"""Larger answers are written in a thread (measured: five class maps of 180 x 240 as JSON take 2 to 4 ms)."""
LARGE_BODY_BYTES = 500_000
"""Larger bodies are compressed in a thread (measured: 1 to 3 ms)."""
GZIP_LEVEL = 1
"""zlib's level (measured: level 6 takes four times as long as level 1 for a class map in JSON)."""


async def run_writer(write: Callable[[], T], answers: Sequence[Answer]) -> T:
    """Returns the result of `write`, which runs in a thread if the answers are large."""
    size = sum(len(answer.value.raw) for answer in answers if isinstance(answer.value, PackedArray))
    return write() if size < LARGE_ANSWERS_BYTES else await asyncio.to_thread(write)


async def compress(request: Request, response: Response) -> None:
    """Compresses a large response if the caller accepts gzip.

    Images, which are compressed already, and responses with an ETag stay unchanged.
    """
    body, headers = bytes(response.body), response.headers
    if "etag" in headers or headers.get("content-type", "").startswith("image/"):
        return
    headers.add_vary_header("Accept-Encoding")
    accepted = _weights(", ".join(request.headers.getlist("accept-encoding")))
    if not _weight(accepted, (GZIP, "*")):
        return
    write = partial(gzip.compress, body, GZIP_LEVEL, mtime=0)
    response.body = write() if len(body) < LARGE_BODY_BYTES else await asyncio.to_thread(write)
    headers["content-encoding"] = GZIP
    headers["content-length"] = str(len(response.body))


def predict_response(answers: Sequence[Answer], task: Task, request_id: str, *, many: bool) -> bytes:
    """Returns the JSON body of a `/predict` answer."""
    outputs = [{**task.to_json(answer.value, answer.score), EXIT.name: answer.exit} for answer in answers]
    answer = {"outputs": outputs} if many else outputs[0]
    return to_json({**answer, "request_id": request_id})


def v2_columns(answers: Sequence[Answer], task: Task) -> dict[str, tuple[str, list[int], list[Any] | ValueArray]]:
    """Returns datatype, shape and elements of the model's outputs, by name."""
    values = task.to_columns([answer.value for answer in answers], [answer.score for answer in answers])
    columns = {column.name: (column.datatype, values[column.name]) for column in task.columns}
    columns[EXIT.name] = (EXIT.datatype, [answer.exit for answer in answers])
    return {
        name: (datatype, list(column.shape) if isinstance(column, np.ndarray) else [len(answers)], column)
        for name, (datatype, column) in columns.items()
    }


def v2_response(
    answers: Sequence[Answer], task: Task, reply: V2Reply, model: str, version: str = "1"
) -> tuple[bytes, int | None]:
    """Returns the body of a v2 answer, and the length of its JSON part if binary tensors follow it, else None."""
    columns = v2_columns(answers, task)
    outputs: list[bytes] = []
    binary: list[bytes] = []
    for name in reply.outputs:
        datatype, shape, column = columns[name]
        output: dict[str, Any] = {"name": name, "datatype": datatype, "shape": shape}
        if name in reply.binary:
            data = pack_elements(datatype, column)
            outputs.append(to_json(output | {"parameters": {"binary_data_size": len(data)}}))
            binary.append(data)
        else:
            outputs.append(_with_member(to_json(output), b"data", _elements(column)))
    head = {"model_name": model, "model_version": version} | ({"id": reply.id} if reply.id else {})
    header = _with_member(to_json(head), b"outputs", b"[%b]" % b",".join(outputs))
    return (b"".join((header, *binary)), len(header)) if binary else (header, None)


def _with_member(json_object: bytes, name: bytes, value: bytes) -> bytes:
    """Appends a member to a non-empty JSON object."""
    return b'%b,"%b":%b}' % (json_object[:-1], name, value)


def _elements(column: list[Any] | ValueArray) -> bytes:
    """Returns a column as JSON. Rows of arrays are encoded one by one, so that other threads can run in between."""
    if not isinstance(column, np.ndarray):
        return to_json(column)
    return b"[%b]" % b",".join(msgspec.json.encode(row.ravel().tolist())[1:-1] for row in column)


def tensors_of(columns: Sequence[Column]) -> list[dict[str, Any]]:
    """Returns the tensors for the model's metadata, each in its preferred form."""
    preferred: dict[str, Column] = {}
    for each in columns:
        preferred.setdefault(each.name, each)
    return [{"name": name, "datatype": each.datatype, "shape": [-1, *each.shape]} for name, each in preferred.items()]
