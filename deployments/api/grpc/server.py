"""The Open Inference Protocol v2 over gRPC.

`add_inference_service` adds the service to Serve's gRPC servers, in proxies and ingresses. The Serve configuration from
`cluster/render.py` names it. Proxies pass requests on as bytes. In an ingress, `Rpcs.call` parses a message, answers
it, and turns errors into gRPC statuses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError

from deployments.api.access import Gate
from deployments.api.endpoint import (
    CLIENT_CLOSED_REQUEST,
    SERVER_METADATA,
    Backend,
    check_model,
    failure_of,
    infer_version,
    model_metadata,
    trace_failure,
)
from deployments.api.exchange import LARGE_BYTES, retry_after_header, run
from deployments.api.operations import OPERATION_BY_RPC, RPC_PATHS, InferRequest, Signature, V2Body, V2Output, new_id
from deployments.api.v2 import Content, V2Reply, build_v2_request, pack_elements, v2_columns
from earlyexit.errors import DeadlineError, InputError, RetryableError, UnknownModelError, UnknownPathError
from earlyexit.network.boundary import Answer
from earlyexit.tasks.base import Task

if TYPE_CHECKING:
    from deployments.ops.tracing import RequestRecord, Tracer

REMAINING_KEY = "offramp-remaining-s"
"""Metadata key of the seconds until the call's deadline."""


def add_inference_service(servicer: Any, server: Any) -> None:
    """Adds the service as generated code does. Serve calls this with a mock servicer, then replaces the handlers."""
    handlers = {path: grpc.unary_unary_rpc_method_handler(getattr(servicer, rpc)) for rpc, path in RPC_PATHS.items()}
    server.add_generic_rpc_handlers((InferenceHandlers(handlers),))


class InferenceHandlers:
    """The RPC handlers of the service. They get the deadline of a call as metadata, because Serve does not pass it."""

    def __init__(self, handlers: dict[str, grpc.RpcMethodHandler]) -> None:
        self._method_handlers = handlers  # Serve replaces them through this attribute

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        handler = self._method_handlers.get(handler_call_details.method)
        return handler and handler._replace(unary_unary=partial(_with_deadline, handler.unary_unary))


async def _with_deadline(handler: Callable[[bytes, Any], Awaitable[bytes]], request: bytes, context: Any) -> bytes:
    return await handler(request, _ContextWithDeadline(context, context.time_remaining()))


class _ContextWithDeadline:
    """A gRPC context whose metadata has the deadline, and not what a caller may have sent in its place."""

    def __init__(self, context: Any, remaining_s: float | None) -> None:
        self._context = context
        self._remaining_s = remaining_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        own = () if self._remaining_s is None else ((REMAINING_KEY, repr(self._remaining_s)),)
        return (*(each for each in self._context.invocation_metadata() if each[0] != REMAINING_KEY), *own)


# Messages


@cache
def message_class(name: str) -> Any:
    """Returns the class of a protocol message."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"inference.{name}"))


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    """Returns a descriptor pool with the messages of `inference.textproto`.

    The messages have their own pool. Otherwise a program that also imports a client's generated messages, such as
    Triton's, would define `inference.ModelInferRequest` twice, which protobuf rejects. The code of protoc is not used,
    because it needs a protobuf of its own or the next major version, and Triton's package needs an older protobuf than
    Ray's gRPC. A test compares all fields with those of Triton's client.
    """
    text = (files(__package__) / "inference.textproto").read_text(encoding="utf-8")
    file = text_format.Parse(text, descriptor_pb2.FileDescriptorProto())
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool


PARAMETER_CHOICE = "parameter_choice"
"""The protocol's `oneof` of a parameter's value."""
CONTENT_FIELDS = {
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    **{each: f"{each.lower()}_contents" for each in ("BOOL", "INT64", "UINT64", "FP32", "FP64", "BYTES")},
}
"""The field with the values of a tensor without raw bytes, by datatype; FP16 has no field."""


def read_message(name: str, data: bytes) -> Any:
    """Parses a message; raises InputError."""
    try:
        return message_class(name).FromString(data)
    except DecodeError as error:
        raise InputError(f"the message is not a {name}") from error


def parse_infer(message: Any, signature: Signature, request_id: str = "") -> tuple[InferRequest, V2Reply]:
    """Returns the request of a ModelInferRequest, and the requested format of its answer; raises InputError."""
    signature.check_answers()
    values = ((each.name, _values(each.parameters)) for each in message.outputs)
    outputs = [V2Output.model_construct(name=name, parameters=parameters) for name, parameters in values]
    body = V2Body.model_construct(
        id=message.id or None, inputs=message.inputs, outputs=outputs, parameters=_values(message.parameters)
    )
    return build_v2_request(body, _contents(message), signature, request_id)


def _values(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of parameters that are set."""
    fields = {name: parameter.WhichOneof(PARAMETER_CHOICE) for name, parameter in parameters.items()}
    return {name: getattr(parameters[name], field) for name, field in fields.items() if field is not None}


def _contents(message: Any) -> Sequence[Content]:
    """Returns the content of each input: raw bytes of all inputs, or typed values."""
    tensors, raw = message.inputs, message.raw_input_contents
    if not raw:
        return [_typed_content(tensor, f"inputs.{k}.contents") for k, tensor in enumerate(tensors)]
    if len(raw) != len(tensors):
        raise InputError(f"raw_input_contents: {len(raw)} of them for {len(tensors)} inputs")
    for k, tensor in enumerate(tensors):
        if tensor.HasField("contents"):
            raise InputError(f"inputs.{k}.contents: must be absent if raw_input_contents is set")
    return list(raw)


def _typed_content(tensor: Any, where: str) -> list[Any]:
    expected = CONTENT_FIELDS.get(tensor.datatype)
    for field, _ in tensor.contents.ListFields():
        if field.name != expected:
            place = expected or "raw_input_contents"
            raise InputError(f"{where}: values of {tensor.datatype} must be in {place} (got {field.name})")
    return [] if expected is None else list(getattr(tensor.contents, expected))


def infer_response(answers: Sequence[Answer], task: Task, reply: V2Reply, model: str, version: str) -> dict[str, Any]:
    """Returns the fields of a ModelInferResponse. Its tensors are raw bytes, as Triton sends them."""
    columns = v2_columns(answers, task, reply.outputs)
    return {
        **{"model_name": model, "model_version": version, "id": reply.id or ""},
        "outputs": [
            {"name": name, "datatype": datatype, "shape": shape} for name, (datatype, shape, _) in columns.items()
        ],
        "raw_output_contents": [pack_elements(datatype, column) for datatype, _, column in columns.values()],
    }


REQUEST_ID = "x-request-id"
MAX_DETAILS = 1_000
"""Most characters of details. gRPC drops trailers that are too large, where a non-ASCII byte takes three bytes."""


class Rpcs:
    """The RPC handlers of one ingress."""

    def __init__(self, backend: Backend, gate: Gate | None = None, tracer: Tracer | None = None) -> None:
        self._backend = backend
        self._gate = gate
        self._tracer = tracer

    async def call(self, name: str, request: bytes, context: Any) -> Any:
        """Returns the response message, or an empty one after an error, whose status is set on the `context`.

        `context` is Serve's `RayServegRPCContext`. The methods below return the fields of an operation's response.
        """
        path, metadata = RPC_PATHS[name], dict(context.invocation_metadata())
        remaining_s = None if REMAINING_KEY not in metadata else float(metadata[REMAINING_KEY])
        request_id = str(metadata.get(REQUEST_ID) or new_id())
        record: RequestRecord | None = None
        if self._tracer is not None and OPERATION_BY_RPC[name].method == "POST":
            record = self._tracer.begin(path[1:], {"rpc.system.name": "grpc", "rpc.method": path[1:]}, metadata)
        trailing = [(REQUEST_ID, request_id), *({} if record is None else record.headers).items()]
        bodies, held_bytes, status, code = self._backend.bodies, 0, 200, grpc.StatusCode.OK
        try:
            if self._gate is not None:
                self._gate.admit("POST", path, metadata.get("authorization"))
            bodies.check(len(request), "message")
            held_bytes = bodies.hold(len(request))
            handler = getattr(self, f"_{OPERATION_BY_RPC[name].name}")
            fields = await handler(read_message(f"{name}Request", request), request_id, remaining_s)
            return message_class(f"{name}Response")(**fields)
        except asyncio.CancelledError:
            status, code = CLIENT_CLOSED_REQUEST, grpc.StatusCode.CANCELLED
            raise
        except Exception as error:
            error = failure_of(error, request_id, name)  # no other variable: it would be in a cycle
            status, code = error.http_status, grpc.StatusCode[error.grpc_status]
            context.set_code(code)  # if the error were raised, Serve would log a traceback, and often return INTERNAL
            context.set_details(str(error)[:MAX_DETAILS])
            if isinstance(error, RetryableError):
                trailing.append(("retry-after", retry_after_header(error)))
        finally:
            bodies.held_bytes -= held_bytes
            context.set_trailing_metadata(trailing)
            self._backend.count_request(path, status)
            if record is not None and self._tracer is not None:
                self._tracer.end(record, {"rpc.response.status_code": code.name}, request_id, trace_failure(status))
        return message_class(f"{name}Response")()

    async def _live(self, *_: object) -> Mapping[str, Any]:
        return {"live": True}

    async def _ready(self, *_: object) -> Mapping[str, Any]:
        return {"ready": self._backend.is_ready}

    async def _check(self, message: Any, *_: object) -> Mapping[str, Any]:
        """Raises UnknownPathError for a service that is not served, as gRPC's health protocol says."""
        if message.service not in ("", *(path.split("/")[1] for path in RPC_PATHS.values())):
            raise UnknownPathError(f"unknown service {message.service!r}")
        return {"status": 1 if self._backend.is_ready else 2}  # SERVING and NOT_SERVING of gRPC's health protocol

    async def _model_ready(self, message: Any, *_: object) -> Mapping[str, Any]:
        """Returns false for an unknown model, as Triton does."""
        try:
            check_model(self._backend, message.name, message.version)
        except UnknownModelError:
            return {"ready": False}
        return await self._ready()

    async def _server_metadata(self, *_: object) -> Mapping[str, Any]:
        return SERVER_METADATA

    async def _model_metadata(self, message: Any, *_: object) -> Mapping[str, Any]:
        check_model(self._backend, message.name, message.version)
        return await model_metadata(self._backend)

    async def _infer(self, message: Any, request_id: str, remaining_s: float | None) -> Mapping[str, Any]:
        check_model(self._backend, message.model_name, message.model_version)
        parse = partial(parse_infer, message, self._backend.signature, request_id)
        request, reply = await run(parse, in_thread=message.ByteSize() >= LARGE_BYTES)
        request = within_call(request, remaining_s, self._backend.max_timeout_s)
        served, answers = await infer_version(self._backend, request, names_version=bool(message.model_version))
        return infer_response(answers, served.task, reply, self._backend.card.name, served.version)


def within_call(request: InferRequest, remaining_s: float | None, max_s: float) -> InferRequest:
    """Returns a request whose timeout is limited by the deadline of its call. Raises DeadlineError.

    A timeout above `max_s` stays unchanged, so that it is refused.
    """
    requested_s = request.timeout_s or max_s
    if remaining_s is None or requested_s > max_s:
        return request
    if remaining_s <= 0:
        raise DeadlineError("the deadline of the call has passed")
    return replace(request, timeout_s=min(remaining_s, requested_s))
