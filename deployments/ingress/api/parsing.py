"""Request bodies to checked requests; pure. gRPC's messages come by the same checks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import TypeAdapter
from pydantic_core import from_json

from deployments.ingress.api.bodies import InferRequest, PredictBody, V2Body, V2Input, V2Reply, validated
from deployments.ingress.api.columns import GivenTensor, read_columns
from deployments.ingress.api.signature import Signature
from earlyexit.codecs.base import Codec
from earlyexit.errors import InputError

T = TypeVar("T")
BINARY_SIZE = "binary_data_size"
_PREDICT = TypeAdapter(PredictBody)
_V2 = TypeAdapter(V2Body)


def parse_predict(body: bytes, codec: Codec[Any]) -> tuple[InferRequest, bool]:
    """The request, and whether it was a list of inputs; raises InputError."""
    parsed = validated(_PREDICT, body)
    rows, many = codec.from_json(parsed.inputs)
    if parsed.ids is not None and len(parsed.ids) != len(rows):
        raise InputError(f"ids: {len(parsed.ids)} for {len(rows)} inputs; one for every input is needed")
    ids = tuple(parsed.ids) if parsed.ids is not None else ("",) * len(rows)
    return InferRequest(rows=tuple(rows), ids=ids, truncate=parsed.truncate, timeout_s=parsed.timeout_s), many


def parse_content(content_type: str, body: bytes, codec: Codec[Any]) -> InferRequest:
    """The request of a body that is one input as it is; raises InputError."""
    row = codec.from_content(content_type, body)
    return InferRequest(rows=(row,), ids=("",), truncate=False, timeout_s=None)


def parse_v2(body: bytes, json_length: int | None, signature: Signature) -> tuple[InferRequest, V2Reply]:
    """A v2 request, its tensors in the JSON or in bytes behind the first `json_length`; raises InputError."""
    if json_length is not None and not 0 <= json_length <= len(body):
        raise InputError(f"Inference-Header-Content-Length is {json_length}, the body has {len(body)} bytes")
    parsed = validated(_V2, body if json_length is None else body[:json_length])
    tail = memoryview(b"" if json_length is None else body)[json_length or 0 :]
    asked = None if parsed.outputs is None else [(each.name, each.parameters) for each in parsed.outputs]
    request = v2_request(_given(parsed.inputs, tail), parsed.parameters, signature)
    return request, v2_reply(parsed.id, asked, parsed.parameters, signature)


def v2_request(given: Sequence[GivenTensor], parameters: Mapping[str, Any], signature: Signature) -> InferRequest:
    """The request of v2 tensors and its parameters, however they came; raises InputError."""
    rows = signature.codec.from_columns(read_columns(given, signature.inputs))
    return InferRequest(
        rows=tuple(rows),
        ids=_ids(parameters, len(rows)),
        truncate=_typed(parameters, "truncate", bool, default=False),
        timeout_s=_timeout_s(parameters),
    )


def v2_reply(
    echoed_id: str | None,
    asked: Sequence[tuple[str, Mapping[str, Any]]] | None,
    parameters: Mapping[str, Any],
    signature: Signature,
) -> V2Reply:
    """How the answer is wanted: `asked` are outputs with their parameters, None for all; raises InputError."""
    if asked is None:
        asked = [(name, {}) for name in signature.output_names]
    names = tuple(name for name, _ in asked)
    unknown = [name for name in names if name not in signature.output_names]
    if unknown or not names:
        raise InputError(f"outputs: unknown {unknown}; the model has {', '.join(signature.output_names)}")
    all_binary = _typed(parameters, "binary_data_output", bool, default=False)
    binary = frozenset(name for name, each in asked if _typed(each, "binary_data", bool, default=all_binary))
    return V2Reply(id=echoed_id, outputs=names, binary=binary)


def _given(inputs: Sequence[V2Input], tail: memoryview) -> list[GivenTensor]:
    """Every input with its content, in the JSON or of the bytes behind it, which follow in the inputs' order."""
    given, at = [], 0
    for k, each in enumerate(inputs):
        content: list[Any] | memoryview | None = each.data
        if BINARY_SIZE in each.parameters:
            size = each.parameters[BINARY_SIZE]
            if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= len(tail) - at:
                left = len(tail) - at
                raise InputError(f"inputs.{k}.parameters.{BINARY_SIZE} is {size!r}, {left} bytes follow the JSON")
            content, at = tail[at : at + size], at + size
        if content is None:
            raise InputError(f"inputs.{k}.data: missing")
        given.append(GivenTensor(each.name, each.datatype, each.shape, content))
    if at < len(tail):
        raise InputError(f"{len(tail) - at} bytes follow the JSON that no {BINARY_SIZE} of an input announces")
    return given


def _ids(parameters: Mapping[str, Any], count: int) -> tuple[str, ...]:
    ids = parameters.get("ids")
    if ids is None:
        return ("",) * count
    if isinstance(ids, str):  # gRPC's parameters are no lists
        ids = _json_list(ids)
    if not isinstance(ids, list) or len(ids) != count or not all(isinstance(each, str) for each in ids):
        raise InputError(f"parameters.ids: a list of {count} strings is needed")
    return tuple(ids)


def _json_list(text: str) -> object:
    try:
        return from_json(text)
    except ValueError:
        return None


def _timeout_s(parameters: Mapping[str, Any]) -> float | None:
    # Triton's request parameter counts microseconds; 0 means none.
    microseconds = _typed(parameters, "timeout", int, default=0)
    if microseconds < 0:
        raise InputError(f"parameters.timeout: {microseconds} microseconds; it must not be negative")
    try:
        return microseconds / 1e6 if microseconds else None
    except OverflowError:  # JSON's integers have no end; no service allows this one
        return math.inf


def _typed(parameters: Mapping[str, Any], name: str, kind: type[T], *, default: T) -> T:
    value = parameters.get(name, default)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InputError(f"parameters.{name}: {kind.__name__} is needed, not {type(value).__name__}")
    return value
