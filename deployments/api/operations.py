"""The table of operations. Routes, RPCs, access rules, tracing, OpenAPI and the client's paths are derived from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel

from deployments.api.parsing import (
    Canary,
    DefaultVersion,
    ErrorBody,
    IndexBody,
    Live,
    LoadBody,
    OpenAiError,
    PredictBody,
    Ready,
    V2Answer,
    V2Body,
    V2Error,
    V2Model,
    V2Server,
)
from earlyexit.named import import_attribute

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
LIMIT: Mapping[str, Any] = {
    "name": "limit",
    "in": "query",
    "required": False,
    "schema": {"type": "integer", "minimum": 1, "maximum": 1000, "default": 20},
}
JSON_LENGTH = {
    "name": "Inference-Header-Content-Length",
    "in": "header",
    "required": False,
    "description": "Bytes of JSON at the beginning of the body, if binary tensors follow.",
    "schema": {"type": "integer", "minimum": 0},
}


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
    """The type of a 200's body, or its JSON schema; None for any object."""
    response_types: tuple[str, ...] = (JSON,)
    """Content types of answers."""
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
    def error(self) -> type[BaseModel]:
        """The type of its error bodies."""
        return error_type_of(self.path)

    @property
    def bodies(self) -> tuple[type[BaseModel], ...]:
        """The types of request, answer and error bodies."""
        further = (body for _, body in (self.other_responses or {}).values())
        return tuple(each for each in (self.body, self.answer, self.error, *further) if isinstance(each, type))

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
_V2_TENSORS: _Fields = {
    **{"request_types": (BYTES,), "answer": V2Answer, "response_types": (JSON, BYTES), "parameters": (JSON_LENGTH,)},
    **_INFERS,
    **_OF_MODEL,
}
_PARTS: _Fields = {"response_types": (EVENTS,), **_OF_MODEL, **_GENERATES}
_READY: _Fields = {"answer": Ready, "other_responses": {"503": ("The model is not ready.", Ready)}, **_OF_MODEL}
_STREAMS: _Fields = {"response_types": (JSON, EVENTS), **_GENERATES}
_HISTORY: _Fields = {"answer": {"type": "array", "items": OBJECT}, "parameters": (LIMIT,)}
_METRICS: _Fields = {"answer": TEXT, "response_types": ("text/plain",)}
_PAGE: _Fields = {"answer": TEXT, "response_types": (PAGE,)}
_LIVE: _Fields = {"answer": TEXT, "response_types": (EVENTS,)}
_ASSET: _Fields = {
    "answer": TEXT,
    "response_types": ("text/css", "text/javascript", PAGE, "image/svg+xml"),
    "other_responses": {"304": ("The file is unchanged.", None)},
}
OPERATIONS: tuple[Operation, ...] = (
    _post("predict", "/predict", "Answer one input or a list of inputs", PredictBody, **_INFERS),
    _post("infer", MODEL + "/infer", "Open Inference Protocol v2", V2Body, rpc="ModelInfer", **_V2_TENSORS),
    _post("generate", MODEL + "/generate", "Continue a text", _GENERATE_BODY, **_OF_MODEL, **_GENERATES),
    _post("generate_stream", MODEL + "/generate_stream", "Continue a text in a stream", _GENERATE_BODY, **_PARTS),
    _get("model_metadata", MODEL, "Model metadata", "404", answer=V2Model, rpc="ModelMetadata", **_OF_MODEL),
    _get("model_ready", MODEL + "/ready", "Whether the model is ready", "404", rpc="ModelReady", **_READY),
    _post("completions", "/v1/completions", "Continue a text", _BODIES + "CompletionBody", **_STREAMS),
    _post("chat", "/v1/chat/completions", "Answer messages", _BODIES + "ChatBody", **_STREAMS),
    _get("models", "/v1/models", "The model, in OpenAI's list format", models="generates"),
    _get("model", "/v1/models/{model}", "The model by its name, in OpenAI's format", "404", models="generates"),
    _get("server_metadata", "/v2", "Server metadata", answer=V2Server, rpc="ServerMetadata"),
    _get("live", "/v2/health/live", "Whether the process answers", rpc="ServerLive", **_open(Live)),
    _get("ready", "/v2/health/ready", "Whether every stage is warm", rpc="ServerReady", **_open(Ready)),
    _post("index", REPOSITORY + "/index", "All versions on the cluster, and their states", IndexBody, answer={}),
    _post("load", REPOSITORY + "/models/{model}/load", "Load a version", LoadBody, answer={}),
    _post("unload", REPOSITORY + "/models/{model}/unload", "Unload a version", LoadBody, answer={}),
    _get("canary", CANARY, "The default version and the canary, side by side", "404"),
    Operation("set_canary", "PUT", CANARY, "Let a version answer a share of requests", request=Canary, answer={}),
    Operation("end_canary", "DELETE", CANARY, "Let the default version answer all", errors=("403", "404", "503")),
    Operation("set_default", "PUT", MODEL + "/default", "Set the default version", request=DefaultVersion, answer={}),
    _get("stats", "/stats", "Counts of the stages and the ingress since they started"),
    _get("metrics", "/metrics", "Counts of all ingresses and replicas, for Prometheus", "503", **_METRICS),
    _get("plan", "/plan", "The plan in force, and the reason for it", "503"),
    _get("plan_history", "/plan/history", "The last plans, newest first", "400", "503", **_HISTORY),
    _get("page", "/dashboard", "The live page", **_PAGE),
    _get("events", "/dashboard/events", "The live page's stream of events, newest state once a second", "503", **_LIVE),
    _get("asset", "/dashboard/{asset}", "A file of the live page", "404", **_ASSET),
    _get("openapi", "/openapi.json", "This description"),
    _get("docs", "/docs", "This description as a page, to read and try", **_PAGE),
)
OPERATION_BY_NAME = {each.name: each for each in OPERATIONS}
RPC_SERVICE = "inference.GRPCInferenceService"
OPERATION_BY_RPC = {each.rpc: each for each in OPERATIONS if each.rpc is not None}
OPEN_PATHS = frozenset(
    path
    for each in OPERATIONS
    if each.is_open
    for path in (each.path, *([] if each.rpc is None else [f"/{RPC_SERVICE}/{each.rpc}"]))
)
"""Health probes need no key, over HTTP or gRPC."""
PAGES = tuple(each.path for each in OPERATIONS if each.response_types == (PAGE,))
"""Paths that people open in a browser, which asks for the key as a password; paths below them, too."""
FREQUENT = frozenset(
    path for each in OPERATIONS if each.models != "all" and each.method == "POST" for path in each.paths
)
"""Paths of the most frequent requests, which bypass routing."""
GENERATION_PATHS = tuple(sorted({each.path.removeprefix(MODEL) for each in OPERATIONS if each.models == "generates"}))
"""The last parts of paths that only models which generate have."""


def path_of(name: str, **named: str) -> str:
    """Returns the path of an operation; `named` holds the path's parameters. Raises KeyError if one is missing."""
    path = OPERATION_BY_NAME[name].path
    return (path.replace(MODEL, VERSION) if "version" in named else path).format(**named)
