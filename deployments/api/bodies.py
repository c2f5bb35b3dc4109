"""The bodies of requests and answers; `parsing.py` reads requests, `responses.py` writes answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from earlyexit.errors import InputError
from earlyexit.named import NAME_PATTERN

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
        said.setdefault(_path(each["loc"]) or "the body", {})[each["msg"]] = None
    return [f"{path}: {' or '.join(messages)}" for path, messages in list(said.items())[:3]]


def _path(loc: tuple[int | str, ...]) -> str:
    """The field, without the alternatives of its type, which pydantic names behind it."""
    alternative = next((k for k, each in enumerate(loc) if str(each) in KINDS or "[" in str(each)), len(loc))
    return ".".join(map(str, loc[:alternative]))


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


class Canary(BaseModel):
    """A version on trial."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    version: Version
    share: Share = 0.0
    """Of the requests that name no version, those which it answers."""
    compare_share: Share = 0.0
    """Of the same, those which both versions are asked; the caller gets the answer of the one whose request it is."""


class DefaultVersion(BaseModel):
    """The version that answers requests without a version."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    version: Version
