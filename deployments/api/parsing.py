"""The bodies of requests and answers, and the parsing of bodies into checked requests. Pure.

gRPC's messages pass the same checks. `endpoint.py` writes answers.
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
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from earlyexit.codecs.base import Codec, Columns
from earlyexit.errors import InputError
from earlyexit.named import NAME_PATTERN
from earlyexit.network.boundary import DATATYPES, Column, parse_numbers
from earlyexit.tasks.base import Task

BodyT = TypeVar("BodyT", bound=BaseModel)
TimeoutSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
MOST_DIMENSIONS = 16
KINDS = frozenset({"str", "int", "float", "bool", "constrained-str"})
"""Pydantic's names for alternatives of a field's type, in the locations of errors."""


class Body(BaseModel):
    """A body of a request or an answer; JSON values are not converted to other types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class PredictBody(Body):
    """`POST /predict`."""

    inputs: Any
    """One input or a list of them, as the model's codec takes them."""
    truncate: bool = False
    """Truncate inputs that are too long for the model instead of refusing them."""
    timeout_s: TimeoutSeconds | None = None
    """Seconds after which an answer is worth nothing."""
    ids: list[str] | None = None
    """The caller's names of the inputs; the `recorded` exit policy looks its answers up by them."""


class ErrorDetail(Body):
    """What went wrong."""

    kind: str
    message: str


class ErrorBody(Body):
    """Every error outside /v2."""

    error: ErrorDetail
    request_id: str


class OpenAiErrorDetail(BaseModel):
    """What went wrong, as OpenAI says it."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAiError(BaseModel):
    """Every error in /v1."""

    error: OpenAiErrorDetail


class V2Error(Body):
    """Every error in /v2."""

    error: str


class V2Input(Body, strict=False):
    """An input tensor of the Open Inference Protocol."""

    name: str
    shape: list[Annotated[int, Field(ge=0, strict=True)]] = Field(min_length=1, max_length=MOST_DIMENSIONS)
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
    """A checked request, whichever route it came by."""

    rows: tuple[Any, ...]
    """The inputs, as the model's codec knows them."""
    ids: tuple[str, ...]
    truncate: bool
    timeout_s: float | None
    request_id: str = ""
    """For the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class V2Reply:
    """How a v2 caller wants its answer."""

    id: str | None
    outputs: tuple[str, ...]
    binary: frozenset[str]
    """Outputs to send as bytes behind the JSON (Triton's binary tensor extension)."""


def validated(model: type[BodyT], body: bytes) -> BodyT:
    """Parses a body; raises InputError, which names the field."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        refusal = InputError("; ".join(_explained(error)))
        refusal.param = next((str(each) for each in error.errors()[0]["loc"][:1]), None)
        raise refusal from error


def _explained(error: ValidationError) -> list[str]:
    found = error.errors(include_url=False, include_input=False)
    if found[0]["type"] == "json_invalid":
        return [f"the body is not valid JSON: {found[0]['ctx']['error']}"]
    said: dict[str, dict[str, None]] = {}
    for each in found:
        # Behind the field pydantic names the alternatives of its type.
        path = takewhile(lambda part: part not in KINDS and "[" not in part, map(str, each["loc"]))
        said.setdefault(".".join(path) or "the body", {})[each["msg"]] = None
    return [f"{path}: {' or '.join(messages)}" for path, messages in list(said.items())[:3]]


class Live(Body):
    """The process answers."""

    live: Literal[True]


class Ready(Body):
    """Whether every stage has been warm."""

    ready: bool


class V2Tensor(Body):
    """A tensor that is described, not sent."""

    name: str
    datatype: str
    shape: list[int]


class V2Model(Body):
    """A model's metadata."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[V2Tensor]
    outputs: list[V2Tensor]


class V2Server(Body):
    """The server's metadata."""

    name: str
    version: str
    extensions: list[str]
    models: list[str]


class BinaryTail(Body):
    """Of an output whose bytes follow the JSON."""

    binary_data_size: Annotated[int, Field(ge=0)]


class V2AnswerTensor(Body):
    """An output; `data`, or `parameters` that say how many bytes follow the JSON."""

    name: str
    datatype: str
    shape: list[int]
    data: list[Any] | None = None
    parameters: BinaryTail | None = None


class V2Answer(Body):
    """The answer to `POST /v2/models/{model}/infer`."""

    model_name: str
    model_version: str
    id: str = ""
    outputs: list[V2AnswerTensor]


Version = Annotated[str, Field(pattern=NAME_PATTERN)]
Share = Annotated[float, Field(ge=0, le=1)]


class IndexBody(Body):
    """`POST /v2/repository/index`."""

    ready: bool = False
    """Only what can be asked now."""


class LoadParameters(Body):
    """Triton's parameters of loading and unloading, and the version."""

    config: str | None = None
    """Settings as JSON, as `offramp load` sends them; None: those in the repository's folder."""
    version: str | None = None
    """None: the one there is to choose from."""
    unload_dependents: bool = False
    """Of no consequence: nothing depends on a version."""


class LoadBody(Body):
    """`POST /v2/repository/models/{model}/load`, and `/unload`."""

    parameters: LoadParameters = LoadParameters()


class Canary(Body):
    """A version on trial."""

    model_config = ConfigDict(frozen=True)

    version: Version
    share: Share = 0.0
    """Of the requests that name no version, those which it answers."""
    compare_share: Share = 0.0
    """Of the same, those which both versions are asked; the caller gets the answer of the one whose request it is."""


class DefaultVersion(Body):
    """The version that answers requests without a version."""

    model_config = ConfigDict(frozen=True)

    version: Version


STORED = {name: dtype.newbyteorder("<") for name, dtype in DATATYPES.items() if name != "BYTES"}


def packed(datatype: str, column: Iterable[Any]) -> bytes:
    """Returns the bytes of a column's elements, row by row."""
    if datatype == "BYTES":
        encoded = [each if isinstance(each, bytes) else str(each).encode("utf-8") for each in column]
        return b"".join(struct.pack("<I", len(each)) + each for each in encoded)
    return np.asarray(column, dtype=STORED[datatype]).tobytes()


def unpacked(datatype: str, data: bytes | memoryview, where: str) -> npt.NDArray[Any] | list[bytes]:
    """Returns the elements of a tensor; raises InputError, which names the tensor's place `where` in the request."""
    if datatype == "BYTES":
        return _strings(data, where)
    dtype = STORED[datatype]
    if len(data) % dtype.itemsize:
        raise InputError(f"{where}: {len(data)} bytes; an element of {datatype} has {dtype.itemsize}")
    if datatype == "BOOL" and any(byte > 1 for byte in set(bytes(data))):
        raise InputError(f"{where}: bytes other than 0 and 1, as BOOL")
    return np.frombuffer(data, dtype=dtype).astype(DATATYPES[datatype], copy=False)


def _strings(data: bytes | memoryview, where: str) -> list[bytes]:
    elements: list[bytes] = []
    at = 0
    while at < len(data):
        end = at + 4 + (struct.unpack_from("<I", data, at)[0] if at + 4 <= len(data) else len(data))
        if end > len(data):
            raise InputError(f"{where}: element {len(elements)} ends beyond the bytes that were sent")
        elements.append(bytes(data[at + 4 : end]))
        at = end
    return elements


EXIT = Column(name="exit", datatypes=("INT32",))
"""The block after which an input left; all answers have it."""
EXIT_SCHEMA = {
    "type": "integer",
    "description": "The block it left after; the model's last block for inputs that no ramp let out.",
}


class Signature:
    """The inputs of a codec, and the outputs of a task."""

    def __init__(self, codec: Codec[Any], task: Task) -> None:
        self.codec = codec
        self.task = task
        self.inputs = codec.inputs
        self.outputs = (*task.columns, EXIT)
        self.output_names = tuple(column.name for column in self.outputs)

    @property
    def input_tensors(self) -> list[dict[str, Any]]:
        """The inputs for the model's metadata, each in its preferred form."""
        preferred = {column.name: column for column in reversed(self.inputs)}
        return [_tensor(preferred[name]) for name in dict.fromkeys(column.name for column in self.inputs)]

    @property
    def output_tensors(self) -> list[dict[str, Any]]:
        return [_tensor(column) for column in self.outputs]

    @property
    def answer_schema(self) -> Mapping[str, Any]:
        """The JSON schema of an answer of `POST /predict`."""
        properties = {**self.task.json_schema, EXIT.name: EXIT_SCHEMA}
        return {"type": "object", "properties": properties, "required": list(properties)}


def _tensor(column: Column) -> dict[str, Any]:
    return {"name": column.name, "datatype": column.datatype, "shape": [-1, *column.shape]}


Elements: TypeAlias = npt.NDArray[Any] | list[Any]
"""The elements of a tensor, row by row; a list for BYTES."""


@dataclass(frozen=True, slots=True)
class GivenTensor:
    """An input tensor of a request."""

    name: str
    datatype: str
    shape: Sequence[int]
    content: list[Any] | bytes | memoryview
    """Values, either flat or nested as the shape says; or bytes in Triton's format."""


def read_columns(given: Sequence[GivenTensor], inputs: Sequence[Column]) -> Columns:
    """Returns the columns by name, all with the same number of rows, at least one; raises InputError."""
    columns: dict[str, Elements] = {}
    for k, tensor in enumerate(given):
        where = f"inputs.{k}"
        column = _column(tensor, inputs, where)
        if tensor.name in columns:
            raise InputError(f"{where}.name: {tensor.name!r} is there twice")
        columns[tensor.name] = _rows(tensor, column, where)
    missing = [column.name for column in inputs if column.name not in columns]
    if missing:
        raise InputError(f"inputs: {', '.join(map(repr, missing))} missing; the model takes {_names(inputs)}")
    if len({len(column) for column in columns.values()}) > 1:
        sizes = {name: len(column) for name, column in columns.items()}
        raise InputError(f"inputs: {sizes} rows; as many of each are needed")
    return columns


def _column(tensor: GivenTensor, inputs: Sequence[Column], where: str) -> Column:
    forms = [column for column in inputs if column.name == tensor.name]
    if not forms:
        raise InputError(f"{where}.name: unknown input {tensor.name!r}; the model takes {_names(inputs)}")
    for column in forms:
        if tensor.datatype in column.datatypes:
            return column
    taken = ", ".join(datatype for column in forms for datatype in column.datatypes)
    raise InputError(f"{where}.datatype: {tensor.datatype!r}; {tensor.name!r} is {taken}")


def _rows(tensor: GivenTensor, column: Column, where: str) -> Elements:
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
    """Returns whether a shape is some rows of the wanted one, whose -1 stands for any size."""
    if len(shape) != len(wanted) + 1 or min(shape) < 0:
        return False
    return all(each in (size, -1) for size, each in zip(shape[1:], wanted, strict=True))


def _elements(tensor: GivenTensor, where: str) -> Elements:
    if not isinstance(tensor.content, list):
        return unpacked(tensor.datatype, tensor.content, where)
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
    """Returns the request, and whether it has a list of inputs; raises InputError."""
    parsed = validated(PredictBody, body)
    rows, many = codec.from_json(parsed.inputs)
    if parsed.ids is not None and len(parsed.ids) != len(rows):
        raise InputError(f"ids: {len(parsed.ids)} for {len(rows)} inputs; one for every input is needed")
    ids = tuple(parsed.ids) if parsed.ids is not None else ("",) * len(rows)
    return InferRequest(rows=tuple(rows), ids=ids, truncate=parsed.truncate, timeout_s=parsed.timeout_s), many


def parse_content(content_type: str, body: bytes, codec: Codec[Any]) -> InferRequest:
    """Returns the request of a body that is one input, such as a file; raises InputError."""
    row = codec.from_content(content_type, body)
    return InferRequest(rows=(row,), ids=("",), truncate=False, timeout_s=None)


def parse_v2(body: bytes, json_length: int | None, signature: Signature) -> tuple[InferRequest, V2Reply]:
    """Parses a v2 request with tensors in JSON, or in bytes behind the first `json_length`; raises InputError."""
    if json_length is not None and not 0 <= json_length <= len(body):
        raise InputError(f"Inference-Header-Content-Length is {json_length}, the body has {len(body)} bytes")
    parsed = validated(V2Body, body if json_length is None else body[:json_length])
    tail = memoryview(b"" if json_length is None else body)[json_length or 0 :]
    asked = None if parsed.outputs is None else [(each.name, each.parameters) for each in parsed.outputs]
    return v2_checked(_given(parsed.inputs, tail), asked, parsed.parameters, parsed.id, signature)


def v2_checked(
    given: Sequence[GivenTensor],
    asked: Sequence[tuple[str, Mapping[str, Any]]] | None,
    parameters: Mapping[str, Any],
    echoed_id: str | None,
    signature: Signature,
) -> tuple[InferRequest, V2Reply]:
    """Returns the request of v2 tensors and parameters, from REST or gRPC, and the form of its answer.

    `asked`: outputs with their parameters, None for all. Raises InputError.
    """
    rows = signature.codec.from_columns(read_columns(given, signature.inputs))
    request = InferRequest(
        rows=tuple(rows),
        ids=_ids(parameters, len(rows)),
        truncate=_typed(parameters, "truncate", bool, default=False),
        timeout_s=_timeout_s(parameters),
    )
    if asked is None:
        asked = [(name, {}) for name in signature.output_names]
    names = tuple(name for name, _ in asked)
    unknown = [name for name in names if name not in signature.output_names]
    if unknown or not names:
        raise InputError(f"outputs: unknown {unknown}; the model has {', '.join(signature.output_names)}")
    all_binary = _typed(parameters, "binary_data_output", bool, default=False)
    binary = frozenset(name for name, each in asked if _typed(each, "binary_data", bool, default=all_binary))
    return request, V2Reply(id=echoed_id, outputs=names, binary=binary)


def _given(inputs: Sequence[V2Input], tail: memoryview) -> list[GivenTensor]:
    """Returns each input with its content: from the JSON, or from the bytes behind it in the order of the inputs."""
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
    if isinstance(ids, str):  # gRPC's parameters cannot be lists
        with suppress(ValueError):
            ids = from_json(ids)
    if not isinstance(ids, list) or len(ids) != count or not all(isinstance(each, str) for each in ids):
        raise InputError(f"parameters.ids: a list of {count} strings is needed")
    return tuple(ids)


def _timeout_s(parameters: Mapping[str, Any]) -> float | None:
    # Triton's request parameter counts microseconds; 0 means none.
    microseconds = _typed(parameters, "timeout", int, default=0)
    if microseconds < 0:
        raise InputError(f"parameters.timeout: {microseconds} microseconds; it must not be negative")
    try:
        return microseconds / 1e6 if microseconds else None
    except OverflowError:  # JSON's integers are unbounded; every service refuses this one
        return math.inf


def _typed(parameters: Mapping[str, Any], name: str, kind: type[T], *, default: T) -> T:
    value = parameters.get(name, default)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InputError(f"parameters.{name}: {kind.__name__} is needed, not {type(value).__name__}")
    return value
