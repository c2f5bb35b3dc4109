"""The Open Inference Protocol v2 for REST and gRPC: metadata, the tensors of requests, and the tensors of answers."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from pydantic_core import from_json

from deployments.api.operations import EXIT, MAX_DIGITS, InferRequest, Signature, T, V2Body, V2Input, parse_body
from earlyexit.codecs.base import Columns
from earlyexit.errors import InputError, raising
from earlyexit.network.boundary import DATATYPES, Answer, Column, parse_numbers
from earlyexit.tasks.base import Task, ValueArray


def tensors_of(columns: Sequence[Column]) -> list[dict[str, Any]]:
    """Returns the tensors for the model's metadata, each in its preferred form."""
    preferred: dict[str, Column] = {}
    for each in columns:
        preferred.setdefault(each.name, each)
    return [{"name": name, "datatype": each.datatype, "shape": [-1, *each.shape]} for name, each in preferred.items()]


# Elements as bytes

Elements: TypeAlias = npt.NDArray[Any] | list[Any]
"""The elements of a tensor, row by row; a list for BYTES."""
LITTLE_ENDIAN = {name: dtype.newbyteorder("<") for name, dtype in DATATYPES.items() if name != "BYTES"}


def pack_elements(datatype: str, column: Iterable[Any]) -> bytes:
    """Returns the elements of a column as bytes, row by row."""
    if datatype == "BYTES":
        encoded = [each if isinstance(each, bytes) else str(each).encode("utf-8") for each in column]
        return b"".join(struct.pack("<I", len(each)) + each for each in encoded)
    return np.asarray(column, dtype=LITTLE_ENDIAN[datatype]).tobytes()


def unpack_elements(datatype: str, data: bytes | memoryview, where: str) -> Elements:
    """Returns the elements of a tensor; raises InputError, whose message begins with `where`."""
    if datatype == "BYTES":
        return _strings(data, where)
    dtype = LITTLE_ENDIAN[datatype]
    if len(data) % dtype.itemsize:
        raise InputError(f"{where}: {len(data)} bytes are not a multiple of {dtype.itemsize}, the size of {datatype}")
    if datatype == "BOOL" and any(byte > 1 for byte in set(bytes(data))):
        raise InputError(f"{where}: bytes of BOOL must be 0 or 1")
    return np.frombuffer(data, dtype=dtype).astype(DATATYPES[datatype], copy=False)


def _strings(data: bytes | memoryview, where: str) -> list[bytes]:
    """Returns the elements of a BYTES tensor: the length of each precedes it, as 4 bytes."""
    elements: list[bytes] = []
    data, start = bytes(data), 0
    while start < len(data):
        end = start + 4 + int.from_bytes(data[start : start + 4], "little")
        if end > len(data):
            raise InputError(f"{where}: element {len(elements)} ends beyond the bytes that were sent")
        elements.append(data[start + 4 : end])
        start = end
    return elements


# Requests

BINARY_SIZE = "binary_data_size"
SHARED_MEMORY = "shared_memory_region"
UNSUPPORTED = ("classification", SHARED_MEMORY)
"""Parameters of Triton's outputs that would change the answer."""
Content: TypeAlias = list[Any] | bytes | memoryview
"""The content of an input tensor: values, either flat or nested like its shape, or bytes in Triton's format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class V2Reply:
    """The requested format of a v2 answer."""

    id: str | None
    outputs: Mapping[str, bool]
    """Whether each output is sent as bytes after the JSON (Triton's binary tensor extension)."""


def parse_v2(
    body: bytes, json_length: str | None, signature: Signature, request_id: str = ""
) -> tuple[InferRequest, V2Reply]:
    """Parses a v2 request. Binary tensors follow the JSON, whose length a header states then. Raises InputError."""
    signature.check_answers()
    size = len(body)
    if json_length is not None:
        is_number = json_length.isascii() and json_length.isdigit() and len(json_length) <= MAX_DIGITS
        if not is_number or (size := int(json_length)) > len(body):
            what = f"must be a number up to {len(body)}, the bytes of the body (got {json_length[:20]!r})"
            raise InputError(f"Inference-Header-Content-Length {what}")
    parsed = parse_body(V2Body, body[:size])
    return build_v2_request(parsed, _json_contents(parsed, memoryview(body)[size:]), signature, request_id)


def _json_contents(body: V2Body, tail: memoryview) -> list[Content | None]:
    """Returns each input's content: from the JSON, or from the bytes after it in the order of the inputs."""
    contents: list[Content | None] = []
    start = 0
    for k, each in enumerate(body.inputs):
        content: Content | None = each.data
        if BINARY_SIZE in each.parameters:
            size, left = each.parameters[BINARY_SIZE], len(tail) - start
            if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= left:
                raise InputError(f"inputs.{k}.parameters.{BINARY_SIZE} is {size!r}, {left} bytes follow the JSON")
            content, start = tail[start : start + size], start + size
        contents.append(content)
    if start < len(tail):
        raise InputError(f"{len(tail) - start} bytes after the JSON belong to no input's {BINARY_SIZE}")
    return contents


def build_v2_request(
    body: V2Body, contents: Sequence[Content | None], signature: Signature, request_id: str
) -> tuple[InferRequest, V2Reply]:
    """Returns a v2 request, and the requested format of its answer, for REST and gRPC; raises InputError.

    `contents` are the contents of the body's inputs, whose `data` is not used.
    """
    rows = signature.codec.from_columns(_columns(body.inputs, contents, signature.inputs))
    request = InferRequest(
        rows=tuple(rows),
        ids=_ids(body.parameters, len(rows)),
        truncate=_parameter(body.parameters, "truncate", bool, default=False),
        timeout_s=_timeout_s(body.parameters),
        request_id=request_id,
    )
    requested = {each.name: each.parameters for each in body.outputs or ()}
    outputs: Mapping[str, Mapping[str, Any]] = requested or {name: {} for name in signature.output_names}
    if unknown := [name for name in outputs if name not in signature.output_names]:
        raise InputError(f"outputs: unknown {unknown}; the model has {', '.join(signature.output_names)}")
    if len(requested) < len(body.outputs or ()):  # a thousand times the same output would be a thousand answers
        raise InputError("outputs: the same output must not be requested twice")
    unsupported = [f"{name}.parameters.{key}" for name, each in outputs.items() for key in UNSUPPORTED if key in each]
    if unsupported:
        raise InputError(f"outputs: {unsupported[0]} is not supported; without it, all values are returned")
    all_binary = _parameter(body.parameters, "binary_data_output", bool, default=False)
    binary = {name: _parameter(each, "binary_data", bool, default=all_binary) for name, each in outputs.items()}
    return request, V2Reply(id=body.id, outputs=binary)


def _columns(inputs: Sequence[V2Input], contents: Sequence[Content | None], known: Sequence[Column]) -> Columns:
    """Returns the columns by name, which have equally many rows, at least one; raises InputError."""
    columns: dict[str, Elements] = {}
    for k, (tensor, content) in enumerate(zip(inputs, contents, strict=True)):
        where = f"inputs.{k}"
        column = _column(tensor, known, where)
        if SHARED_MEMORY in tensor.parameters:
            raise InputError(f"{where}: shared memory is not supported, so send the data in the request")
        if content is None:
            raise InputError(f"{where}.data: missing")
        if tensor.name in columns:
            raise InputError(f"{where}.name: {tensor.name!r} occurs twice")
        columns[tensor.name] = _rows(tensor, content, column, where)
    if missing := [column.name for column in known if column.name not in columns]:
        raise InputError(f"inputs: {', '.join(map(repr, missing))} missing; the model takes {_names(known)}")
    sizes = {name: len(column) for name, column in columns.items()}
    if len(set(sizes.values())) > 1:
        raise InputError(f"inputs: all inputs must have equally many rows (got {sizes})")
    return columns


def _column(tensor: V2Input, known: Sequence[Column], where: str) -> Column:
    """Returns the form of an input that has the tensor's datatype."""
    forms = [column for column in known if column.name == tensor.name]
    if not forms:
        raise InputError(f"{where}.name: unknown input {tensor.name!r}; the model takes {_names(known)}")
    for column in forms:
        if tensor.datatype in column.datatypes:
            return column
    accepted = ", ".join(datatype for column in forms for datatype in column.datatypes)
    raise InputError(f"{where}.datatype: {tensor.datatype!r}; {tensor.name!r} is {accepted}")


def _names(known: Sequence[Column]) -> str:
    return ", ".join(dict.fromkeys(repr(column.name) for column in known))


def _rows(tensor: V2Input, content: Content, column: Column, where: str) -> Elements:
    """Returns the elements of a tensor in the shape of its column; a list for a column of single elements."""
    shape = list(tensor.shape)
    elements = _elements(content, tensor.datatype, shape, where)
    count = len(elements)
    if not count:
        raise InputError(f"{where}: no elements; at least one row is needed")
    if not column.shape and shape not in ([count], [count, 1], [1, count]):
        raise InputError(f"{where}.shape: {shape} does not fit {count} elements; [{count}] or [{count}, 1] would")
    if column.shape and not _is_row_shape(shape, column.shape):
        needed = ", ".join(["rows", *map(str, column.shape)])
        raise InputError(f"{where}.shape: {shape}; {tensor.name!r} is [{needed}] in {tensor.datatype}")
    if math.prod(shape) != count:
        raise InputError(f"{where}.shape: {shape} holds {math.prod(shape)} elements, {count} were sent")
    if not column.shape:
        return elements
    return np.asarray(elements, dtype=object if isinstance(elements, list) else None).reshape(shape)


def _is_row_shape(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Returns whether a shape is a number of rows of the wanted shape, in which -1 stands for any size."""
    has_axes = len(shape) == len(wanted) + 1 and min(shape) >= 0
    return has_axes and all(each in (size, -1) for size, each in zip(shape[1:], wanted, strict=True))


def _elements(content: Content, datatype: str, shape: list[int], where: str) -> Elements:
    if not isinstance(content, list):
        return unpack_elements(datatype, content, where)
    is_text = datatype == "BYTES"
    with raising(InputError, f"{where}.data", ValueError):
        array = np.array(content, dtype=object) if is_text else parse_numbers(content, datatype)
    flat = array.reshape(-1)
    is_ragged = is_text and any(isinstance(each, list) for each in flat)
    if is_ragged or (array.ndim > 1 and list(array.shape) != shape):
        raise InputError(f"{where}.data: its nesting does not fit the shape {shape}")
    if not is_text:
        return flat
    for index, item in enumerate(flat):
        if not isinstance(item, str | bytes):
            raise InputError(f"{where}.data.{index}: a string is needed, not {type(item).__name__}")
    return flat.tolist()


def _ids(parameters: Mapping[str, Any], count: int) -> tuple[str, ...]:
    ids = parameters.get("ids")
    if ids is None:
        return ("",) * count
    if isinstance(ids, str):  # a gRPC parameter cannot be a list
        with suppress(ValueError):
            ids = from_json(ids)
    if not isinstance(ids, list) or len(ids) != count or not all(isinstance(each, str) for each in ids):
        raise InputError(f"parameters.ids: a list of {count} strings is needed")
    return tuple(ids)


def _timeout_s(parameters: Mapping[str, Any]) -> float | None:
    # Triton's parameter is in microseconds, and 0 stands for no timeout.
    microseconds = _parameter(parameters, "timeout", int, default=0)
    if microseconds < 0:
        raise InputError(f"parameters.timeout: {microseconds} microseconds must not be negative")
    return min(microseconds, 2**63) / 1e6 if microseconds else None  # JSON's integers are unbounded


def _parameter(parameters: Mapping[str, Any], name: str, kind: type[T], *, default: T) -> T:
    value = parameters.get(name, default)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InputError(f"parameters.{name}: {kind.__name__} is needed, not {type(value).__name__}")
    return value


# Answers

OutputTensor: TypeAlias = tuple[str, list[int], list[Any] | ValueArray]
"""Datatype, shape and elements of an output."""


def v2_columns(answers: Sequence[Answer], task: Task, names: Iterable[str]) -> dict[str, OutputTensor]:
    """Returns some of the model's outputs, by name."""
    values = task.to_columns([answer.value for answer in answers], [answer.score for answer in answers])
    values = {**values, EXIT.name: [answer.exit for answer in answers]}
    datatypes = {column.name: column.datatype for column in (*task.columns, EXIT)}
    shapes = {
        name: list(column.shape) if isinstance(column, np.ndarray) else [len(answers)]
        for name, column in values.items()
    }
    return {name: (datatypes[name], shapes[name], values[name]) for name in names}


def v2_response(
    answers: Sequence[Answer], task: Task, reply: V2Reply, model: str, version: str
) -> tuple[bytes, int | None]:
    """Returns the body of a v2 answer, and the length of its JSON part if binary tensors follow it, else None."""
    outputs: list[dict[str, Any]] = []
    binary: list[bytes] = []
    for name, (datatype, shape, column) in v2_columns(answers, task, reply.outputs).items():
        output: dict[str, Any] = {"name": name, "datatype": datatype, "shape": shape}
        if reply.outputs[name]:
            binary.append(pack_elements(datatype, column))
            output["parameters"] = {BINARY_SIZE: len(binary[-1])}
        else:
            output["data"] = _flat_json(column) if isinstance(column, np.ndarray) else column
        outputs.append(output)
    head = {"model_name": model, "model_version": version} | ({"id": reply.id} if reply.id else {})
    header = msgspec.json.encode(head | {"outputs": outputs}, enc_hook=np.generic.item)  # infinity becomes null
    return (b"".join((header, *binary)), len(header)) if binary else (header, None)


def _flat_json(array: ValueArray) -> msgspec.Raw:
    """Returns an array as a flat list. Its rows are encoded one by one, so that other threads can run in between."""
    return msgspec.Raw(b"[%b]" % b",".join(msgspec.json.encode(row.ravel().tolist())[1:-1] for row in array))
