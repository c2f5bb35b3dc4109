"""The types of request and answer bodies, and pure functions that parse and check request bodies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from earlyexit.codecs.base import Codec
from earlyexit.errors import InputError
from earlyexit.named import NAME_PATTERN
from earlyexit.network.boundary import Column
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


def _answer(name: str, description: str, base: type[BaseModel] = Body, /, **fields: Any) -> type[BaseModel]:
    """Returns the type of a body that is only described, never parsed: answers are written as plain data.

    `fields`: the type of each required field; the type and the default of each other field.
    """
    types: dict[str, Any] = {
        field: type_ if isinstance(type_, tuple) else (type_, ...) for field, type_ in fields.items()
    }
    body: type[BaseModel] = create_model(name, __base__=base, __doc__=description, **types)
    return body


_ErrorDetail = _answer("ErrorDetail", "The kind of an error, and its message.", kind=str, message=str)
ErrorBody = _answer("ErrorBody", "Errors of paths outside /v1 and /v2.", error=_ErrorDetail, request_id=str)
V2Error = _answer("V2Error", "Errors of paths in /v2.", error=str)
_OPENAI_ERROR: Mapping[str, Any] = {"message": str, "type": str, "param": str | None, "code": str | None}
_OpenAiErrorDetail = _answer("OpenAiErrorDetail", "An error in OpenAI's format.", BaseModel, **_OPENAI_ERROR)
OpenAiError = _answer("OpenAiError", "Errors of paths in /v1.", BaseModel, error=_OpenAiErrorDetail)
Live = _answer("Live", "Whether the process answers.", live=Literal[True])
Ready = _answer("Ready", "Whether every stage has had a replica after its warm-up.", ready=bool)
_V2_TENSOR: Mapping[str, Any] = {"name": str, "datatype": str, "shape": list[int]}
_V2Tensor: Any = _answer("V2Tensor", "The description of a tensor.", **_V2_TENSOR)
_V2_TENSORS: Mapping[str, Any] = {"inputs": list[_V2Tensor], "outputs": list[_V2Tensor]}
V2Model = _answer("V2Model", "A model's metadata.", name=str, versions=list[str], platform=str, **_V2_TENSORS)
V2Server = _answer("V2Server", "The server's metadata.", name=str, version=str, extensions=list[str], models=list[str])
_BinaryTail: Any = _answer(
    "BinaryTail",
    "The parameters of an output whose bytes follow the JSON.",
    binary_data_size=Annotated[int, Field(ge=0)],
)
_V2AnswerTensor: Any = _answer(
    "V2AnswerTensor",
    "An output with its `data`, or with the number of its bytes after the JSON in `parameters`.",
    **_V2_TENSOR,
    data=(list[Any] | None, None),
    parameters=(_BinaryTail | None, None),
)
V2Answer = _answer(
    "V2Answer",
    "The answer to `POST /v2/models/{model}/infer`.",
    **{"model_name": str, "model_version": str, "id": (str, ""), "outputs": list[_V2AnswerTensor]},
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


def parse_predict(body: bytes, codec: Codec[Any]) -> tuple[InferRequest, bool]:
    """Returns the request, and whether its inputs are a list; raises InputError."""
    parsed = parse_body(PredictBody, body)
    rows, many = codec.from_json(parsed.inputs)
    if parsed.ids is not None and len(parsed.ids) != len(rows):
        raise InputError(f"ids: one id per input is needed (got {len(parsed.ids)} for {len(rows)} inputs)")
    ids = tuple(parsed.ids) if parsed.ids is not None else ("",) * len(rows)
    return InferRequest(rows=tuple(rows), ids=ids, truncate=parsed.truncate, timeout_s=parsed.timeout_s), many
