"""The Open Inference Protocol v2 over gRPC.

`add_inference_service` adds it to Serve's gRPC servers, in proxies and ingresses; `cluster/render.py` names it.
Requests stay bytes until an ingress parses them: a proxy would parse them only to write them again. In an ingress,
`Rpcs.call` parses a message, answers it, and turns errors into gRPC's statuses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError

from deployments.api.access import ALL_CALLERS, Gate
from deployments.api.endpoint import (
    FAILED,
    GONE,
    LEAST_BYTES,
    Api,
    Backend,
    failure_of,
    log_error,
    own_id,
    retry_after,
    takes_gzip,
    v2_columns,
)
from deployments.api.operations import OPERATION_BY_RPC, RPC_SERVICE
from deployments.api.parsing import GivenTensor, InferRequest, Signature, V2Reply, packed, v2_checked
from deployments.process_setup import HideExceptionMessages
from earlyexit.errors import DeadlineError, InputError, OfframpError, UnknownModelError
from earlyexit.network.boundary import Answer
from earlyexit.tasks.base import Task

if TYPE_CHECKING:
    from deployments.ops.tracing import RequestRecord, Tracer

REMAINING_S = "offramp-remaining-s"
"""Metadata: seconds until the deadline of the call, which Serve does not pass on."""
ENCODING = "accept-encoding"
"""Metadata of the caller, as in HTTP: with `gzip`, large answers are compressed."""
Unary = Callable[[bytes, Any], Awaitable[bytes]]


def add_inference_service(servicer: Any, server: Any) -> None:
    """Adds the service as generated code does: Serve calls this with a mock, and puts in its own handlers."""
    handlers = {
        f"/{RPC_SERVICE}/{name}": grpc.unary_unary_rpc_method_handler(getattr(servicer, name))
        for name in OPERATION_BY_RPC
    }
    server.add_generic_rpc_handlers((InferenceHandlers(handlers),))


class InferenceHandlers:
    """The handlers of the service, which get the deadline of the call."""

    def __init__(self, handlers: dict[str, grpc.RpcMethodHandler]) -> None:
        self._method_handlers = handlers  # Serve replaces them by this name
        self._wrapped: dict[str, grpc.RpcMethodHandler] = {}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        method = handler_call_details.method
        if method not in self._wrapped and method in self._method_handlers:
            handler = self._method_handlers[method]
            self._wrapped[method] = handler._replace(unary_unary=told_and_compressing(handler.unary_unary))
        return self._wrapped.get(method)


def told_and_compressing(handler: Unary) -> Unary:
    """Puts the deadline of a call into the metadata, and compresses the answers of callers that ask for it."""

    async def call(request: bytes, context: Any) -> bytes:
        remaining_s = context.time_remaining()
        answer = await handler(request, context if remaining_s is None else _Told(context, remaining_s))
        if len(answer) >= LEAST_BYTES and takes_gzip(str(dict(context.invocation_metadata()).get(ENCODING, ""))):
            context.set_compression(grpc.Compression.Gzip)
            await context.send_initial_metadata(())  # sent with the answer, they would not name the compression
        return answer

    return call


class _Told:
    """gRPC's context with one more entry of metadata."""

    def __init__(self, context: Any, remaining_s: float) -> None:
        self._context = context
        self._remaining_s = remaining_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return (*self._context.invocation_metadata(), (REMAINING_S, repr(self._remaining_s)))


# Messages


@cache
def message_class(name: str) -> Any:
    """Returns the class of a message of the protocol."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"inference.{name}"))


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    """Returns the messages of `inference.textproto`.

    They are in their own descriptor pool: otherwise a program that also loads the generated messages of a client, such
    as Triton's, would define `inference.ModelInferRequest` twice, which protobuf refuses. protoc is not used, because
    its code runs only with the protobuf of its own major version and the next, and Triton's package needs an older one
    than Ray's gRPC. A test compares all fields with those of Triton's client.
    """
    text = (files(__package__) / "inference.textproto").read_text(encoding="utf-8")
    file = text_format.Parse(text, descriptor_pb2.FileDescriptorProto())
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool


CHOICE = "parameter_choice"
"""The protocol's name for the one field of a parameter that is set."""
CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""The field with the values of a tensor that is not raw; FP16 has none."""


def read_message(name: str, data: bytes) -> Any:
    """Parses a message; raises InputError."""
    try:
        return message_class(name).FromString(data)
    except DecodeError as error:
        raise InputError(f"the message is not a {name}") from error


def parse_infer(message: Any, signature: Signature) -> tuple[InferRequest, V2Reply]:
    """Returns the request of a ModelInferRequest, and the form of its answer; raises InputError."""
    parameters = _values(message.parameters)
    asked = [(output.name, _values(output.parameters)) for output in message.outputs]
    return v2_checked(_given(message), asked or None, parameters, message.id or None, signature)


def infer_response(answers: Sequence[Answer], task: Task, reply: V2Reply, model: str, version: str) -> dict[str, Any]:
    """Returns the fields of a ModelInferResponse; its tensors are bytes, as Triton sends them."""
    columns = v2_columns(answers, task)
    asked = {name: columns[name] for name in reply.outputs}
    return {
        **{"model_name": model, "model_version": version, "id": reply.id or ""},
        "outputs": [
            {"name": name, "datatype": datatype, "shape": shape} for name, (datatype, shape, _) in asked.items()
        ],
        "raw_output_contents": [packed(datatype, column) for datatype, _, column in asked.values()],
    }


def _values(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns parameters as JSON would have them."""
    chosen = {name: parameter.WhichOneof(CHOICE) for name, parameter in parameters.items()}
    return {name: getattr(parameters[name], choice) for name, choice in chosen.items() if choice is not None}


def _given(message: Any) -> list[GivenTensor]:
    tensors, raw = message.inputs, message.raw_input_contents
    if raw and len(raw) != len(tensors):
        raise InputError(f"raw_input_contents: {len(raw)} of them for {len(tensors)} inputs")
    given = []
    for k, tensor in enumerate(tensors):
        if raw and tensor.HasField("contents"):
            raise InputError(f"inputs.{k}.contents: must be absent where raw_input_contents is given")
        content = raw[k] if raw else _contents(tensor, f"inputs.{k}")
        given.append(GivenTensor(tensor.name, tensor.datatype, tensor.shape, content))
    return given


def _contents(tensor: Any, where: str) -> list[Any]:
    place = CONTENTS.get(tensor.datatype)
    for field, _ in tensor.contents.ListFields():
        if field.name != place:
            taken = "raw_input_contents alone" if place is None else place
            raise InputError(f"{where}.contents: {field.name}; {tensor.datatype} is taken from {taken}")
    return [] if place is None else list(getattr(tensor.contents, place))


logger = logging.getLogger(f"ray.serve.{__name__}")
logger.addFilter(HideExceptionMessages())

REQUEST_ID = "x-request-id"
MOST_DETAILS = 1_000
"""Characters of details: gRPC drops trailers that are too large, and each byte beyond ASCII takes three there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The caller of an RPC, from its metadata."""

    metadata: Mapping[str, Any]
    request_id: str
    remaining_s: float | None
    """Seconds until the deadline of the call; None if it has none."""
    owner: str = ALL_CALLERS
    """The owner of the key, if there are keys."""


class Rpcs:
    """The RPCs of one ingress."""

    def __init__(self, backend: Backend, gate: Gate | None = None, tracer: Tracer | None = None) -> None:
        self._backend = backend
        self._gate = gate
        self._api = Api(backend, gate)
        self._tracer = tracer

    async def call(self, name: str, request: bytes, context: Any) -> Any:
        """Returns the message of the answer: an empty one for errors, whose status Serve's `RayServegRPCContext` gets.

        The methods below return the fields of an operation's response.
        """
        caller = _caller(context)
        record: RequestRecord | None = None
        if self._tracer is not None and OPERATION_BY_RPC[name].is_traced:
            begun = {"rpc.system": "grpc", "rpc.service": RPC_SERVICE, "rpc.method": name}
            record = self._tracer.begin(f"{RPC_SERVICE}/{name}", begun, caller.metadata)
        trailing = [(REQUEST_ID, caller.request_id), *({} if record is None else record.headers).items()]
        status, code = 200, grpc.StatusCode.OK
        try:
            if self._gate is not None:
                owner = self._gate.admit("POST", f"/{RPC_SERVICE}/{name}", caller.metadata.get("authorization"))
                caller = replace(caller, owner=owner)
            with self._backend.bodies.holding(len(request)):
                answer = getattr(self, f"_{OPERATION_BY_RPC[name].name}")
                fields = await answer(read_message(f"{name}Request", request), caller)
            return message_class(f"{name}Response")(**fields)
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
            self._backend.count_request(f"/{RPC_SERVICE}/{name}", status)
            if record is not None and self._tracer is not None:
                attributes = {"rpc.grpc.status_code": int(code.value[0])}
                self._tracer.end(record, attributes, caller.request_id, failure=failure_of(status))
        return message_class(f"{name}Response")()

    async def _live(self, message: Any, caller: Caller) -> Mapping[str, Any]:
        return {"live": True}

    async def _ready(self, message: Any, caller: Caller) -> Mapping[str, Any]:
        return {"ready": self._backend.is_ready()}

    async def _model_ready(self, message: Any, caller: Caller) -> Mapping[str, Any]:
        """Returns false for unknown models, as Triton does."""
        try:
            self._api.check_model(message.name, message.version)
        except UnknownModelError:
            return {"ready": False}
        return await self._ready(message, caller)

    async def _server_metadata(self, message: Any, caller: Caller) -> Mapping[str, Any]:
        return self._api.server_metadata()

    async def _model_metadata(self, message: Any, caller: Caller) -> Mapping[str, Any]:
        self._api.check_model(message.name, message.version)
        return await self._api.model_metadata()

    async def _infer(self, message: Any, caller: Caller) -> Mapping[str, Any]:
        self._api.check_model(message.model_name, message.model_version)
        request, reply = parse_infer(message, self._backend.signature)
        self._api.charge(caller.owner, len(request.rows))
        timeout_s = within(request.timeout_s, caller.remaining_s, self._backend.max_timeout_s)
        request = replace(request, request_id=caller.request_id, timeout_s=timeout_s)
        served, answers = await self._api.answer(request, names_version=bool(message.model_version))
        return infer_response(answers, served.task, reply, self._backend.card.name, served.version)


def within(asked_s: float | None, remaining_s: float | None, longest_s: float) -> float | None:
    """Returns the timeout of a request, bounded by the deadline of its call; one that is too long stays, to be refused.

    Raises DeadlineError if the deadline has passed.
    """
    if remaining_s is None:
        return asked_s
    if remaining_s <= 0:
        raise DeadlineError("the deadline of the call has passed")
    if asked_s is not None and (asked_s > longest_s or asked_s <= remaining_s):
        return asked_s
    return min(remaining_s, longest_s)


def _caller(context: Any) -> Caller:
    metadata = dict(context.invocation_metadata())
    remaining_s = metadata.get(REMAINING_S)
    remaining_s = None if remaining_s is None else float(remaining_s)
    return Caller(metadata=metadata, request_id=own_id(metadata.get(REQUEST_ID)), remaining_s=remaining_s)


def _fail(context: Any, error: OfframpError, trailing: list[tuple[str, str]]) -> None:
    """Sets the status instead of raising: Serve would log a traceback, and return INTERNAL for most errors."""
    context.set_code(grpc.StatusCode[error.grpc_status])
    context.set_details(str(error)[:MOST_DETAILS])
    later = retry_after(error)
    if later is not None:
        trailing.append(("retry-after", later))
