"""The types of request and answer bodies, and pure functions that parse and check request bodies.

gRPC messages pass the same checks. `endpoint.py` writes answers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_core import from_json

from earlyexit.codecs.base import Codec, Columns
from earlyexit.errors import InputError
from earlyexit.named import NAME_PATTERN
from earlyexit.network.boundary import DATATYPES, Column, parse_numbers
from earlyexit.tasks.base import Task

BodyT = TypeVar("BodyT", bound=BaseModel)
TimeoutSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
MAX_DIMENSIONS = 16
TYPE_NAMES = frozenset({"str", "int", "float", "bool", "constrained-str"})
"""Pydantic's names for the alternatives of a field's type, which occur in the locations of errors."""


class Body(BaseModel):
    """A body of a request or an answer; JSON values are not converted to other types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class PredictBody(Body):
    """`POST /predict`."""

    inputs: Any
    """One input or a list of inputs, in the format of the model's codec."""
    truncate: bool = False
    """Truncate inputs that are too long for the model instead of refusing them."""
    timeout_s: TimeoutSeconds | None = None
    """Timeout in seconds, after which the request fails."""
    ids: list[str] | None = None
    """The caller's names of the inputs. The `recorded` exit policy looks up answers by them."""


def _answer(name: str, description: str, fields: Mapping[str, Any], base: type[BaseModel] = Body) -> type[BaseModel]:
    """Returns the type of a body that is only described, never parsed: answers are written as plain data.

    `fields`: the type of each required field; the type and the default of each other field.
    """
    types: dict[str, Any] = {
        field: type_ if isinstance(type_, tuple) else (type_, ...) for field, type_ in fields.items()
    }
    body: type[BaseModel] = create_model(name, __base__=base, __doc__=description, **types)
    return body


_ErrorDetail = _answer("ErrorDetail", "The kind of an error, and its message.", {"kind": str, "message": str})
ErrorBody = _answer("ErrorBody", "Errors of paths outside /v1 and /v2.", {"error": _ErrorDetail, "request_id": str})
V2Error = _answer("V2Error", "Errors of paths in /v2.", {"error": str})
_OpenAiErrorDetail = _answer(
    "OpenAiErrorDetail",
    "An error in OpenAI's format.",
    {"message": str, "type": str, "param": str | None, "code": str | None},
    BaseModel,
)
OpenAiError = _answer("OpenAiError", "Errors of paths in /v1.", {"error": _OpenAiErrorDetail}, BaseModel)
Live = _answer("Live", "Whether the process answers.", {"live": Literal[True]})
Ready = _answer("Ready", "Whether every stage has had a replica after its warm-up.", {"ready": bool})
_V2Tensor: Any = _answer("V2Tensor", "The description of a tensor.", {"name": str, "datatype": str, "shape": list[int]})
_V2_TENSORS = {"inputs": list[_V2Tensor], "outputs": list[_V2Tensor]}
V2Model = _answer(
    "V2Model", "A model's metadata.", {"name": str, "versions": list[str], "platform": str, **_V2_TENSORS}
)
V2Server = _answer(
    "V2Server", "The server's metadata.", {"name": str, "version": str, "extensions": list[str], "models": list[str]}
)
_BinaryTail: Any = _answer(
    "BinaryTail",
    "The parameters of an output whose bytes follow the JSON.",
    {"binary_data_size": Annotated[int, Field(ge=0)]},
)
_V2AnswerTensor: Any = _answer(
    "V2AnswerTensor",
    "An output with its `data`, or with the number of its bytes after the JSON in `parameters`.",
    {
        **{"name": str, "datatype": str, "shape": list[int]},
        **{"data": (list[Any] | None, None), "parameters": (_BinaryTail | None, None)},
    },
)
V2Answer = _answer(
    "V2Answer",
    "The answer to `POST /v2/models/{model}/infer`.",
    {"model_name": str, "model_version": str, "id": (str, ""), "outputs": list[_V2AnswerTensor]},
)


class V2Input(Body, strict=False):
    """An input tensor of the Open Inference Protocol."""

    name: str
    shape: list[Annotated[int, Field(ge=0, strict=True)]] = Field(min_length=1, max_length=MAX_DIMENSIONS)
    datatype: str
    data: list[Any] | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)


class V2Output(Body, strict=False):
    """A requested output tensor."""

    name: str
    parameters: dict[str, Any] = Field(default_factory=dict)


class V2Body(Body, strict=False):
    """`POST /v2/models/{model}/infer`."""

    id: str | None = None
    inputs: list[V2Input] = Field(min_length=1)
    outputs: list[V2Output] | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferRequest:
    """A checked request, from any route or RPC."""

    rows: tuple[Any, ...]
    """The inputs, in the form that the model's codec encodes."""
    ids: tuple[str, ...]
    truncate: bool
    timeout_s: float | None
    request_id: str = ""
    """For logs and traces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class V2Reply:
    """The requested format of a v2 answer."""

    id: str | None
    outputs: tuple[str, ...]
    binary: frozenset[str]
    """Outputs to send as bytes after the JSON (Triton's binary tensor extension)."""


def parse_body(model: type[BodyT], body: bytes) -> BodyT:
    """Parses and validates a body; raises InputError, which names the wrong fields."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        refusal = InputError("; ".join(_messages(error)))
        refusal.param = next((str(each) for each in error.errors()[0]["loc"][:1]), None)
        raise refusal from error


def _messages(error: ValidationError) -> list[str]:
    """Returns a message for each of the first three wrong fields."""
    errors = error.errors(include_url=False, include_input=False)
    if errors[0]["type"] == "json_invalid":
        return [f"the body is not valid JSON: {errors[0]['ctx']['error']}"]
    by_field: dict[str, dict[str, None]] = {}
    for each in errors:
        # A location ends with the alternative of the field's type that pydantic tried.
        path = takewhile(lambda part: part not in TYPE_NAMES and "[" not in part, map(str, each["loc"]))
        by_field.setdefault(".".join(path) or "the body", {})[each["msg"]] = None
    return [f"{field}: {' or '.join(messages)}" for field, messages in list(by_field.items())[:3]]


Version = Annotated[str, Field(pattern=NAME_PATTERN)]
Share = Annotated[float, Field(ge=0, le=1)]


class IndexBody(Body):
    """`POST /v2/repository/index`."""

    ready: bool = False
    """Return only versions that can answer requests now."""


class LoadParameters(Body):
    """Triton's parameters for loading and unloading, and the version."""

    config: str | None = None
    """Settings as JSON, as `offramp load` sends them. None: the settings in the repository's folder."""
    version: str | None = None
    """None: the only version that exists."""
    unload_dependents: bool = False
    """Ignored, because nothing depends on a version."""


class LoadBody(Body):
    """`POST /v2/repository/models/{model}/load`, and `/unload`."""

    parameters: LoadParameters = LoadParameters()


class Canary(Body):
    """A version on trial."""

    model_config = ConfigDict(frozen=True)

    version: Version
    share: Share = 0.0
    """Share of the requests without a version that it answers."""
    compare_share: Share = 0.0
    """Share of these requests that both versions run, to compare answers. The caller gets one version's answer."""


class DefaultVersion(Body):
    """The version that answers requests without a version."""

    model_config = ConfigDict(frozen=True)

    version: Version


LITTLE_ENDIAN = {name: dtype.newbyteorder("<") for name, dtype in DATATYPES.items() if name != "BYTES"}


def pack_elements(datatype: str, column: Iterable[Any]) -> bytes:
    """Returns the elements of a column as bytes, row by row."""
    if datatype == "BYTES":
        encoded = [each if isinstance(each, bytes) else str(each).encode("utf-8") for each in column]
        return b"".join(struct.pack("<I", len(each)) + each for each in encoded)
    return np.asarray(column, dtype=LITTLE_ENDIAN[datatype]).tobytes()


def unpack_elements(datatype: str, data: bytes | memoryview, where: str) -> npt.NDArray[Any] | list[bytes]:
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
    start = 0
    while start < len(data):
        length = struct.unpack_from("<I", data, start)[0] if start + 4 <= len(data) else len(data)
        end = start + 4 + length
        if end > len(data):
            raise InputError(f"{where}: element {len(elements)} ends beyond the bytes that were sent")
        elements.append(bytes(data[start + 4 : end]))
        start = end
    return elements


EXIT = Column(name="exit", datatypes=("INT32",))
"""The output that all answers have: the block after which the input left."""


class Signature:
    """The inputs of a codec, and the outputs of a task."""

    def __init__(self, codec: Codec[Any], task: Task) -> None:
        self.codec = codec
        self.task = task
        self.inputs = codec.inputs
        self.outputs = (*task.columns, EXIT)
        self.output_names = tuple(column.name for column in self.outputs)


Elements: TypeAlias = npt.NDArray[Any] | list[Any]
"""The elements of a tensor, row by row; a list for BYTES."""


@dataclass(frozen=True, slots=True)
class RequestTensor:
    """An input tensor of a request."""

    name: str
    datatype: str
    shape: Sequence[int]
    content: list[Any] | bytes | memoryview
    """Values, either flat or nested like the shape; or bytes in Triton's format."""


def read_columns(tensors: Sequence[RequestTensor], inputs: Sequence[Column]) -> Columns:
    """Returns the columns by name, which have equally many rows, at least one; raises InputError."""
    columns: dict[str, Elements] = {}
    for k, tensor in enumerate(tensors):
        where = f"inputs.{k}"
        column = _column(tensor, inputs, where)
        if tensor.name in columns:
            raise InputError(f"{where}.name: {tensor.name!r} occurs twice")
        columns[tensor.name] = _rows(tensor, column, where)
    missing = [column.name for column in inputs if column.name not in columns]
    if missing:
        raise InputError(f"inputs: {', '.join(map(repr, missing))} missing; the model takes {_names(inputs)}")
    if len({len(column) for column in columns.values()}) > 1:
        sizes = {name: len(column) for name, column in columns.items()}
        raise InputError(f"inputs: all inputs must have equally many rows (got {sizes})")
    return columns


def _column(tensor: RequestTensor, inputs: Sequence[Column], where: str) -> Column:
    forms = [column for column in inputs if column.name == tensor.name]
    if not forms:
        raise InputError(f"{where}.name: unknown input {tensor.name!r}; the model takes {_names(inputs)}")
    for column in forms:
        if tensor.datatype in column.datatypes:
            return column
    accepted = ", ".join(datatype for column in forms for datatype in column.datatypes)
    raise InputError(f"{where}.datatype: {tensor.datatype!r}; {tensor.name!r} is {accepted}")


def _rows(tensor: RequestTensor, column: Column, where: str) -> Elements:
    elements = _elements(tensor, where)
    count, shape = len(elements), list(tensor.shape)
    if not count:
        raise InputError(f"{where}: no elements; at least one row is needed")
    if column.shape and not _is_row_shape(shape, column.shape):
        needed = ", ".join(["rows", *map(str, column.shape)])
        raise InputError(f"{where}.shape: {shape}; {tensor.name!r} is [{needed}] in {tensor.datatype}")
    if not column.shape and shape not in ([count], [count, 1], [1, count]):
        raise InputError(f"{where}.shape: {shape} does not fit {count} elements; [{count}] or [{count}, 1] would")
    if math.prod(shape) != count:
        raise InputError(f"{where}.shape: {shape} holds {math.prod(shape)} elements, {count} were sent")
    if not column.shape:
        return elements
    array = np.array(elements, dtype=object) if isinstance(elements, list) else elements
    return array.reshape(shape)


def _is_row_shape(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Returns whether a shape is a number of rows of the wanted shape, in which -1 stands for any size."""
    if len(shape) != len(wanted) + 1 or min(shape) < 0:
        return False
    return all(each in (size, -1) for size, each in zip(shape[1:], wanted, strict=True))


def _elements(tensor: RequestTensor, where: str) -> Elements:
    if not isinstance(tensor.content, list):
        return unpack_elements(tensor.datatype, tensor.content, where)
    is_text = tensor.datatype == "BYTES"
    try:
        array = np.array(tensor.content, dtype=object) if is_text else parse_numbers(tensor.content, tensor.datatype)
    except ValueError as error:
        raise InputError(f"{where}.data: {error}") from error
    flat = array.reshape(-1)
    is_ragged = is_text and any(isinstance(each, list) for each in flat)
    if is_ragged or (array.ndim > 1 and list(array.shape) != list(tensor.shape)):
        raise InputError(f"{where}.data: its nesting does not fit the shape {list(tensor.shape)}")
    if not is_text:
        return flat
    for index, item in enumerate(flat):
        if not isinstance(item, str | bytes):
            raise InputError(f"{where}.data.{index}: a string is needed, not {type(item).__name__}")
    return flat.tolist()


def _names(inputs: Sequence[Column]) -> str:
    return ", ".join(dict.fromkeys(repr(column.name) for column in inputs))


T = TypeVar("T")
BINARY_SIZE = "binary_data_size"


def parse_predict(body: bytes, codec: Codec[Any]) -> tuple[InferRequest, bool]:
    """Returns the request, and whether its inputs are a list; raises InputError."""
    parsed = parse_body(PredictBody, body)
    rows, many = codec.from_json(parsed.inputs)
    if parsed.ids is not None and len(parsed.ids) != len(rows):
        raise InputError(f"ids: one id per input is needed (got {len(parsed.ids)} for {len(rows)} inputs)")
    ids = tuple(parsed.ids) if parsed.ids is not None else ("",) * len(rows)
    return InferRequest(rows=tuple(rows), ids=ids, truncate=parsed.truncate, timeout_s=parsed.timeout_s), many


def parse_content(content_type: str, body: bytes, codec: Codec[Any]) -> InferRequest:
    """Returns the request of a body that is one input, such as a file; raises InputError."""
    row = codec.from_content(content_type, body)
    return InferRequest(rows=(row,), ids=("",), truncate=False, timeout_s=None)


def parse_v2(body: bytes, json_length: int | None, signature: Signature) -> tuple[InferRequest, V2Reply]:
    """Parses a v2 request. Binary tensors follow the first `json_length` bytes, if that is set. Raises InputError."""
    if json_length is not None and not 0 <= json_length <= len(body):
        raise InputError(f"Inference-Header-Content-Length is {json_length}, the body has {len(body)} bytes")
    parsed = parse_body(V2Body, body if json_length is None else body[:json_length])
    tail = memoryview(b"" if json_length is None else body)[json_length or 0 :]
    outputs = None if parsed.outputs is None else [(each.name, each.parameters) for each in parsed.outputs]
    return build_v2_request(_request_tensors(parsed.inputs, tail), outputs, parsed.parameters, parsed.id, signature)


def build_v2_request(
    tensors: Sequence[RequestTensor],
    outputs: Sequence[tuple[str, Mapping[str, Any]]] | None,
    parameters: Mapping[str, Any],
    echoed_id: str | None,
    signature: Signature,
) -> tuple[InferRequest, V2Reply]:
    """Returns a v2 request, and the requested format of its answer, for REST and gRPC.

    `outputs` are the requested outputs with their parameters; None for all. Raises InputError.
    """
    rows = signature.codec.from_columns(read_columns(tensors, signature.inputs))
    request = InferRequest(
        rows=tuple(rows),
        ids=_ids(parameters, len(rows)),
        truncate=_parameter(parameters, "truncate", bool, default=False),
        timeout_s=_timeout_s(parameters),
    )
    if outputs is None:
        outputs = [(name, {}) for name in signature.output_names]
    names = tuple(name for name, _ in outputs)
    unknown = [name for name in names if name not in signature.output_names]
    if unknown or not names:
        raise InputError(f"outputs: unknown {unknown}; the model has {', '.join(signature.output_names)}")
    all_binary = _parameter(parameters, "binary_data_output", bool, default=False)
    binary = frozenset(name for name, each in outputs if _parameter(each, "binary_data", bool, default=all_binary))
    return request, V2Reply(id=echoed_id, outputs=names, binary=binary)


def _request_tensors(inputs: Sequence[V2Input], tail: memoryview) -> list[RequestTensor]:
    """Returns each input with its content: from the JSON, or from the bytes after it in the order of the inputs."""
    tensors, start = [], 0
    for k, each in enumerate(inputs):
        content: list[Any] | memoryview | None = each.data
        if BINARY_SIZE in each.parameters:
            size = each.parameters[BINARY_SIZE]
            if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= len(tail) - start:
                left = len(tail) - start
                raise InputError(f"inputs.{k}.parameters.{BINARY_SIZE} is {size!r}, {left} bytes follow the JSON")
            content, start = tail[start : start + size], start + size
        if content is None:
            raise InputError(f"inputs.{k}.data: missing")
        tensors.append(RequestTensor(each.name, each.datatype, each.shape, content))
    if start < len(tail):
        raise InputError(f"{len(tail) - start} bytes after the JSON belong to no input's {BINARY_SIZE}")
    return tensors


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
    try:
        return microseconds / 1e6 if microseconds else None
    except OverflowError:  # JSON's integers are unbounded; a service refuses an infinite timeout
        return math.inf


def _parameter(parameters: Mapping[str, Any], name: str, kind: type[T], *, default: T) -> T:
    value = parameters.get(name, default)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InputError(f"parameters.{name}: {kind.__name__} is needed, not {type(value).__name__}")
    return value
