"""The table of operations, the types of their bodies, and requests in any protocol.

Routes, RPCs, access rules, tracing, OpenAPI and the client's paths are derived from the table.
"""

from __future__ import annotations

import random
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import takewhile
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from earlyexit.codecs.base import Codec
from earlyexit.errors import InputError
from earlyexit.named import NAME_PATTERN, import_attribute
from earlyexit.network.boundary import Column
from earlyexit.tasks.base import Task

TimeoutSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NULL_IS_EMPTY = BeforeValidator(lambda given: {} if given is None else given)
Parameters = Annotated[dict[str, Any], NULL_IS_EMPTY]
MAX_DIGITS = 12
"""Most digits of a number in a header; Python refuses to parse numbers with thousands of digits."""
MAX_DIMENSIONS = 16
MAX_TENSORS = 1000
"""Most inputs, and outputs, of a v2 request. No model has that many."""
T = TypeVar("T")
FastList = Annotated[list[T], Field(fail_fast=True)]
"""A list whose first wrong element ends the check. A million wrong ones, in 2 MB, would take a second and 0.5 GB."""


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
    ids: FastList[str] | None = None
    """The caller's names of the inputs. The `recorded` exit policy looks up answers by them."""


def _answer(name: str, description: str, base: type[BaseModel] = Body, /, **fields: Any) -> type[BaseModel]:
    """Returns the type of a body that is only described, never parsed: answers are written as plain data.

    `fields`: the type of each required field; the type and the default of each other field.
    """
    body: type[BaseModel] = create_model(name, __base__=base, __doc__=description, **fields)
    return body


_ErrorDetail = _answer("ErrorDetail", "The kind of an error, and its message.", kind=str, message=str)
ErrorBody = _answer("ErrorBody", "Errors of paths outside /v1 and /v2.", error=_ErrorDetail, request_id=str)
V2Error = _answer("V2Error", "Errors of paths in /v2.", error=str)
_OPENAI_ERROR: Mapping[str, Any] = {"message": str, "type": str, "param": str | None, "code": str | None}
_OpenAiErrorDetail = _answer("OpenAiErrorDetail", "An error in OpenAI's format.", BaseModel, **_OPENAI_ERROR)
OpenAiError = _answer("OpenAiError", "Errors of paths in /v1.", BaseModel, error=_OpenAiErrorDetail)
Live = _answer("Live", "Whether the process answers.", live=Literal[True])
Ready = _answer("Ready", "Whether every stage of a chain has had a replica after its warm-up.", ready=bool)
ModelReady = _answer("ModelReady", "Whether a model is ready.", Ready, name=str)
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
_V2_NAMES: Mapping[str, Any] = {"model_name": str, "model_version": str, "id": (str, "")}
_V2_ANSWER = "The answer to `POST /v2/models/{model}/infer`."
V2Answer = _answer("V2Answer", _V2_ANSWER, **_V2_NAMES, outputs=list[_V2AnswerTensor])


class V2Input(Body, strict=False):
    """An input tensor of the Open Inference Protocol."""

    name: str
    shape: list[Annotated[int, Field(ge=0, lt=2**63, strict=True)]] = Field(min_length=1, max_length=MAX_DIMENSIONS)
    datatype: str
    data: list[Any] | None = None
    parameters: Parameters = {}


class V2Output(Body, strict=False):
    """A requested output tensor."""

    name: str
    parameters: Parameters = {}


class V2Body(Body, strict=False):
    """`POST /v2/models/{model}/infer`."""

    id: str | None = None
    model_name: str | None = None
    """Ignored, because the path names the model. KServe's clients send it."""
    inputs: Annotated[FastList[V2Input], Field(min_length=1, max_length=MAX_TENSORS)]
    outputs: Annotated[FastList[V2Output], Field(max_length=MAX_TENSORS)] | None = None
    parameters: Parameters = {}


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

    parameters: Annotated[LoadParameters, NULL_IS_EMPTY] = LoadParameters()


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


# Operations

JSON, EVENTS, BYTES = "application/json", "text/event-stream", "application/octet-stream"
PAGE, TEXT = "text/html", {"type": "string"}
OPENAI_CODES = {
    "unauthorized": "invalid_api_key",
    "unknown_model": "model_not_found",
    "rate_limit": "rate_limit_exceeded",
    "context_length": "context_length_exceeded",
}
"""OpenAI's codes of errors, by our kind, if they differ."""
MODEL = "/v2/models/{model}"
VERSION = MODEL + "/versions/{version}"
REPOSITORY, CANARY = "/v2/repository", MODEL + "/canary"
OBJECT: Mapping[str, Any] = {"type": "object"}


def _parameter(name: str, place: str, description: str, **schema: Any) -> Mapping[str, Any]:
    """Returns an optional OpenAPI parameter."""
    return {"name": name, "in": place, "required": False, "description": description, "schema": schema}


LIMIT = _parameter("limit", "query", "The most plans to return.", type="integer", minimum=1, maximum=1000, default=20)
_LENGTH = "Bytes of JSON at the beginning of the body, if binary tensors follow."
JSON_LENGTH = _parameter("Inference-Header-Content-Length", "header", _LENGTH, type="integer", minimum=0)
_ID = "Returned with the answer, and logged; created if it is missing."
REQUEST_ID = _parameter("X-Request-ID", "header", _ID, type="string")


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    name: str
    """The name of the method that handles it."""
    method: str
    path: str
    summary: str
    _: KW_ONLY
    request: type[BaseModel] | str | None = None
    """The type of request bodies, or its `module:name`, so that clients, which need only paths, do not import it."""
    request_types: tuple[str, ...] = ()
    """Content types of request bodies, besides JSON."""
    answer: type[BaseModel] | Mapping[str, Any] | None = None
    """The type of a 200's JSON body, or its JSON schema; None for any object."""
    response_types: tuple[str, ...] = (JSON,)
    """Content types of answers. All except JSON and bytes are texts."""
    errors: tuple[str, ...] = ()
    """Statuses of errors of an operation without a body, besides the errors of all operations."""
    other_responses: Mapping[str, tuple[str, type[BaseModel] | None]] | None = None
    """Further responses that are not errors: description and body type, by status."""
    parameters: tuple[Mapping[str, Any], ...] = ()
    """OpenAPI parameters, besides those in the path."""
    models: Literal["all", "answers", "generates"] = "all"
    """The models that have the operation: models that answer inputs, models that generate, or all."""
    by_version: bool = False
    """Whether there is also a path with a version of the model."""
    rpc: str | None = None
    """The corresponding gRPC method."""
    is_open: bool = False
    """Whether it needs no API key."""

    @property
    def body(self) -> type[BaseModel] | None:
        """The type of request bodies."""
        body: type[BaseModel] | None = import_attribute(self.request) if isinstance(self.request, str) else self.request
        return body

    @property
    def bodies(self) -> tuple[type[BaseModel], ...]:
        """The types of request, answer and error bodies."""
        further = (body for _, body in (self.other_responses or {}).values())
        return tuple(
            each for each in (self.body, self.answer, error_type_of(self.path), *further) if isinstance(each, type)
        )

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path, self.path.replace(MODEL, VERSION)) if self.by_version else (self.path,)


def error_type_of(path: str) -> type[BaseModel]:
    """Returns the type of error bodies of a path. Each protocol has its own."""
    if path.startswith("/v2"):
        return V2Error
    return OpenAiError if path.startswith("/v1/") else ErrorBody


def _get(name: str, path: str, summary: str, *errors: str, **fields: Any) -> Operation:
    return Operation(name, "GET", path, summary, errors=errors, **fields)


def _post(name: str, path: str, summary: str, body: type[BaseModel] | str, **fields: Any) -> Operation:
    return Operation(name, "POST", path, summary, request=body, **fields)


def _open(answer: type[BaseModel]) -> _Fields:
    return {"answer": answer, "is_open": True, "other_responses": {"503": ("Not yet.", answer)}}


_BODIES = "deployments.api.completions.bodies:"
_GENERATE_BODY = _BODIES + "GenerateBody"
_Fields: TypeAlias = dict[str, Any]
_OF_MODEL: _Fields = {"by_version": True}
_INFERS: _Fields = {"models": "answers"}
_GENERATES: _Fields = {"models": "generates"}
_TENSORS: _Fields = _INFERS | _OF_MODEL | {"request_types": (BYTES,), "response_types": (JSON, BYTES)}
_TENSORS |= {"answer": V2Answer, "parameters": (JSON_LENGTH,)}
_PARTS: _Fields = {"response_types": (EVENTS,), **_OF_MODEL, **_GENERATES}
_READY: _Fields = {"answer": ModelReady, "other_responses": {"503": ("The model is not ready.", ModelReady)}}
_STREAMS: _Fields = {"response_types": (JSON, EVENTS), **_GENERATES}
_HISTORY: _Fields = {"answer": {"type": "array", "items": OBJECT}, "parameters": (LIMIT,)}
_PAGE: _Fields = {"response_types": (PAGE,)}
_CACHED: _Fields = {"other_responses": {"304": ("The file is unchanged.", None)}}
_LIVE: _Fields = {"response_types": (EVENTS,)}
_ASSET: _Fields = {"response_types": ("text/css", "text/javascript", "image/svg+xml")}
OPERATIONS: tuple[Operation, ...] = (
    _post("predict", "/predict", "Answer one input or a list of inputs", PredictBody, **_INFERS),
    _post("infer", MODEL + "/infer", "Open Inference Protocol v2", V2Body, rpc="ModelInfer", **_TENSORS),
    _post("generate", MODEL + "/generate", "Continue a text", _GENERATE_BODY, **_OF_MODEL, **_GENERATES),
    _post("generate_stream", MODEL + "/generate_stream", "Continue a text in a stream", _GENERATE_BODY, **_PARTS),
    _get("model_metadata", MODEL, "Model metadata", "404", answer=V2Model, rpc="ModelMetadata", **_OF_MODEL),
    _get("model_ready", MODEL + "/ready", "Whether the model is ready", "404", rpc="ModelReady", **_READY, **_OF_MODEL),
    _post("completions", "/v1/completions", "Continue a text", _BODIES + "CompletionBody", **_STREAMS),
    _post("chat", "/v1/chat/completions", "Answer messages", _BODIES + "ChatBody", **_STREAMS),
    _get("models", "/v1/models", "The model, in OpenAI's list format", models="generates"),
    _get("model", "/v1/models/{model}", "The model by its name, in OpenAI's format", "404", models="generates"),
    _get("server_metadata", "/v2", "Server metadata", answer=V2Server, rpc="ServerMetadata"),
    _get("live", "/v2/health/live", "Whether the process answers", rpc="ServerLive", **_open(Live)),
    _get("ready", "/v2/health/ready", "Whether every stage of a chain is warm", rpc="ServerReady", **_open(Ready)),
    _post("index", REPOSITORY + "/index", "All versions on the cluster, and their states", IndexBody, answer={}),
    _post("load", REPOSITORY + "/models/{model}/load", "Load a version", LoadBody, answer={}),
    _post("unload", REPOSITORY + "/models/{model}/unload", "Unload a version", LoadBody, answer={}),
    _get("canary", CANARY, "The default version and the canary, side by side", "404", "503"),
    Operation("set_canary", "PUT", CANARY, "Let a version answer a share of requests", request=Canary, answer={}),
    Operation("end_canary", "DELETE", CANARY, "Let the default version answer all", errors=("403", "404", "503")),
    Operation("set_default", "PUT", MODEL + "/default", "Set the default version", request=DefaultVersion, answer={}),
    _get("stats", "/stats", "Counts of the stages and the ingress since they started"),
    _get("metrics", "/metrics", "Metrics of all processes, for Prometheus", "503", response_types=("text/plain",)),
    _get("plan", "/plan", "The plan in force, and the reason for it", "503"),
    _get("plan_history", "/plan/history", "The last plans, newest first", "400", "503", **_HISTORY),
    _get("page", "/dashboard", "The live page", **_PAGE, **_CACHED),
    _get("events", "/dashboard/events", "The live page's stream of events, newest state once a second", "503", **_LIVE),
    _get("asset", "/dashboard/{asset}", "A file of the live page", "404", **_ASSET, **_CACHED),
    _get("openapi", "/openapi.json", "This description"),
    _get("docs", "/docs", "This description as a page, to read and try", **_PAGE),
)
OPERATION_BY_NAME = {each.name: each for each in OPERATIONS}
RPC_SERVICE = "inference.GRPCInferenceService"
OPERATION_BY_RPC = {each.rpc: each for each in OPERATIONS if each.rpc is not None}
OPERATION_BY_RPC["Check"] = replace(OPERATION_BY_NAME["ready"], name="check")
RPC_PATHS = {rpc: f"/{RPC_SERVICE}/{rpc}" for rpc in OPERATION_BY_RPC} | {"Check": "/grpc.health.v1.Health/Check"}
"""The path of each gRPC method, by its name. `Check` is gRPC's own health check, which probes of Kubernetes call."""
OPEN_PATHS = frozenset(each.path for each in OPERATIONS if each.is_open) | frozenset(
    RPC_PATHS[rpc] for rpc, each in OPERATION_BY_RPC.items() if each.is_open
)
"""Health probes need no key, over HTTP or gRPC."""
PAGES = tuple(each.path for each in OPERATIONS if each.response_types == (PAGE,))
"""Paths that people open in a browser, which asks for the key as a password; paths below them, too."""
GENERATION_PATHS = tuple(sorted({each.path.removeprefix(MODEL) for each in OPERATIONS if each.models == "generates"}))
"""The last parts of paths that only models which generate have."""


def path_of(name: str, **named: str) -> str:
    """Returns the path of an operation; `named` holds the path's parameters. Raises KeyError if one is missing."""
    path = OPERATION_BY_NAME[name].path
    return (path.replace(MODEL, VERSION) if "version" in named else path).format(**named)


# Requests


def new_id() -> str:
    """Returns a new id of a request. It is not secret, so a fast generator is enough."""
    return f"{random.getrandbits(128):032x}"


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
        self.generates = task.name == "token"
        """Whether answers are the next tokens of sequences."""

    def check_answers(self) -> None:
        """Raises InputError for a model that generates: no input in any form would be answered."""
        if self.generates:
            paths = " or ".join(OPERATION_BY_NAME[name].path for name in ("completions", "chat", "generate"))
            raise InputError(f"this model generates text: send the request to {paths}")


@dataclass(frozen=True, slots=True, kw_only=True)
class InferRequest:
    """A checked request, from any route or RPC."""

    rows: tuple[Any, ...]
    """The inputs, in the form that the model's codec encodes."""
    ids: tuple[str, ...]
    truncate: bool = False
    timeout_s: float | None = None
    request_id: str = ""
    """For logs and traces."""
    arrived_s: float | None = None
    """When the request arrived, if another version failed to answer it first; None: now."""


BodyT = TypeVar("BodyT", bound=BaseModel)
TYPE_NAMES = frozenset({"str", "int", "float", "bool", "constrained-str"})
"""Pydantic's names for the alternatives of a field's type, which occur in the locations of errors."""
MAX_ERRORS = 1000
"""Most wrong fields that are listed. 200,000 unknown fields, in a body of 2 MB, would take seconds."""


def parse_body(model: type[BodyT], body: bytes) -> BodyT:
    """Parses and validates a body; raises InputError, which names the wrong fields."""
    try:
        return model.model_validate_json(body.removeprefix(BOM_UTF8))  # editors on Windows write the mark
    except ValidationError as error:
        if error.error_count() > MAX_ERRORS:
            raise InputError(f"the body has {error.error_count()} wrong fields; see /openapi.json") from None
        errors = error.errors(include_url=False, include_input=False)
        param = next((str(each) for each in errors[0]["loc"][:1]), None)
        raise InputError("; ".join(_messages(errors)), param=param) from error


def _messages(errors: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a message for each of the first three wrong fields."""
    if errors[0]["type"] == "json_invalid":
        return [f"the body is not valid JSON: {errors[0]['ctx']['error']}"]
    by_field: dict[str, dict[str, None]] = {}
    for each in errors:
        # A location ends with the alternative of the field's type that pydantic tried.
        path = takewhile(lambda part: part not in TYPE_NAMES and "[" not in part, map(str, each["loc"]))
        message = "unknown field; see /openapi.json" if each["type"] == "extra_forbidden" else each["msg"]
        by_field.setdefault(".".join(path) or "the body", {})[message] = None
    return [f"{field}: {' or '.join(messages)}" for field, messages in list(by_field.items())[:3]]


def parse_predict(body: bytes, codec: Codec[Any], request_id: str = "") -> tuple[InferRequest, bool]:
    """Returns the request, and whether its inputs are a list; raises InputError."""
    parsed = parse_body(PredictBody, body)
    rows, many = codec.from_json(parsed.inputs)
    if parsed.ids is not None and len(parsed.ids) != len(rows):
        raise InputError(f"ids: one id per input is needed (got {len(parsed.ids)} for {len(rows)} inputs)")
    ids = tuple(parsed.ids) if parsed.ids is not None else ("",) * len(rows)
    request = InferRequest(
        rows=tuple(rows), ids=ids, truncate=parsed.truncate, timeout_s=parsed.timeout_s, request_id=request_id
    )
    return request, many
