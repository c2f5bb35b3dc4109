"""The table of operations, from which routes, RPCs, access, tracing, OpenAPI and the client's paths follow."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

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

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

Handler: TypeAlias = "Callable[[Request], Awaitable[Response]]"
JSON, EVENTS, BYTES = "application/json", "text/event-stream", "application/octet-stream"
PAGE, TEXT = "text/html", {"type": "string"}
MODEL = "/v2/models/{model}"
VERSION = MODEL + "/versions/{version}"
REPOSITORY, CANARY = "/v2/repository", MODEL + "/canary"
OBJECT: Mapping[str, Any] = {"type": "object"}
LIMIT = {
    "name": "limit",
    "in": "query",
    "required": False,
    "schema": {"type": "integer", "minimum": 1, "maximum": 1000, "default": 20},
}
JSON_LENGTH = {
    "name": "Inference-Header-Content-Length",
    "in": "header",
    "required": False,
    "description": "Bytes of JSON that the body begins with, where binary tensors follow.",
    "schema": {"type": "integer", "minimum": 0},
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    name: str
    """The name of its handler: a method of the class that answers it."""
    method: str
    path: str
    summary: str
    _: KW_ONLY
    asked: type[BaseModel] | str | None = None
    """The body of requests, or its place `module:name`: clients, which take paths from this table, do not load it."""
    takes: tuple[str, ...] = ()
    """Content types of the request's body besides JSON."""
    answer: type[BaseModel] | Mapping[str, Any] | None = None
    """The body of a 200, or its JSON schema; None for any object."""
    gives: tuple[str, ...] = (JSON,)
    """Content types of the answer."""
    errors: tuple[str, ...] = ()
    """Statuses of errors of an operation without a body, beside those that all operations have."""
    more: Mapping[str, tuple[str, type[BaseModel] | None]] | None = None
    """Further answers that are not errors: description and body by status."""
    parameters: tuple[Mapping[str, Any], ...] = ()
    """Parameters beside those in the path."""
    of: Literal["all", "answers", "generates"] = "all"
    """The models that have it: those that answer each input at once, those that generate, or all."""
    by_version: bool = False
    """Whether it also has a path below a version of the model."""
    rpc: str | None = None
    """The gRPC method of the same operation."""
    is_open: bool = False
    """Whether it is answered without an API key."""

    @property
    def is_traced(self) -> bool:
        """Whether its requests may be traced: POST requests are."""
        return self.method == "POST"

    @property
    def body(self) -> type[BaseModel] | None:
        """The body of requests."""
        found: type[BaseModel] | None = import_attribute(self.asked) if isinstance(self.asked, str) else self.asked
        return found

    @property
    def error(self) -> type[BaseModel]:
        """The body of its errors."""
        return error_of(self.path)

    @property
    def bodies(self) -> tuple[type[BaseModel], ...]:
        """The bodies of requests, answers and errors."""
        further = (body for _, body in (self.more or {}).values())
        return tuple(each for each in (self.body, self.answer, self.error, *further) if isinstance(each, type))

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path, self.path.replace(MODEL, VERSION)) if self.by_version else (self.path,)


def error_of(path: str) -> type[BaseModel]:
    """Returns the body of errors below a path: each protocol has its own."""
    return V2Error if path.startswith("/v2") else OpenAiError if path.startswith("/v1/") else ErrorBody


def bound(handlers: object) -> dict[str, dict[str, Handler]]:
    """Returns the methods of an object that handle operations, by path and HTTP method, in the table's order."""
    found: dict[str, dict[str, Handler]] = {}
    for each in OPERATIONS:
        handler: Handler | None = getattr(handlers, each.name, None)
        if handler is not None:
            for path in each.paths:
                found.setdefault(path, {})[each.method] = handler
    return found


def _get(name: str, path: str, summary: str, *errors: str, **fields: Any) -> Operation:
    return Operation(name, "GET", path, summary, errors=errors, **fields)


def _post(name: str, path: str, summary: str, body: type[BaseModel] | str, **fields: Any) -> Operation:
    return Operation(name, "POST", path, summary, asked=body, **fields)


def _open(answer: type[BaseModel]) -> _Fields:
    return {"answer": answer, "is_open": True, "more": {"503": ("Not yet.", answer)}}


_BODIES = "deployments.api.completions.bodies:"
_GENERATE_BODY = _BODIES + "GenerateBody"
_Fields: TypeAlias = dict[str, Any]
_OF_MODEL: _Fields = {"by_version": True}
_INFERS: _Fields = {"of": "answers"}
_GENERATES: _Fields = {"of": "generates"}
_V2_TENSORS: _Fields = {
    **{"takes": (BYTES,), "answer": V2Answer, "gives": (JSON, BYTES), "parameters": (JSON_LENGTH,)},
    **_INFERS,
    **_OF_MODEL,
}
_PARTS: _Fields = {"gives": (EVENTS,), **_OF_MODEL, **_GENERATES}
_READY: _Fields = {"answer": Ready, "more": {"503": ("It is not.", Ready)}, **_OF_MODEL}
_STREAMS: _Fields = {"gives": (JSON, EVENTS), **_GENERATES}
_HISTORY: _Fields = {"answer": {"type": "array", "items": OBJECT}, "parameters": (LIMIT,)}
_METRICS: _Fields = {"answer": TEXT, "gives": ("text/plain",)}
_PAGE: _Fields = {"answer": TEXT, "gives": (PAGE,)}
_LIVE: _Fields = {"answer": TEXT, "gives": (EVENTS,)}
_ASSET: _Fields = {
    "answer": TEXT,
    "gives": ("text/css", "text/javascript", PAGE, "image/svg+xml"),
    "more": {"304": ("As it was.", None)},
}
OPERATIONS: tuple[Operation, ...] = (
    _post("predict", "/predict", "Answer one input or a list of inputs", PredictBody, **_INFERS),
    _post("infer", MODEL + "/infer", "Open Inference Protocol v2", V2Body, rpc="ModelInfer", **_V2_TENSORS),
    _post("generate", MODEL + "/generate", "Continue a text", _GENERATE_BODY, **_OF_MODEL, **_GENERATES),
    _post("generate_stream", MODEL + "/generate_stream", "The same, as events of its parts", _GENERATE_BODY, **_PARTS),
    _get("model_metadata", MODEL, "Model metadata", "404", answer=V2Model, rpc="ModelMetadata", **_OF_MODEL),
    _get("model_ready", MODEL + "/ready", "Whether the model is ready", "404", rpc="ModelReady", **_READY),
    _post("completions", "/v1/completions", "Continue a text", _BODIES + "CompletionBody", **_STREAMS),
    _post("chat", "/v1/chat/completions", "Answer messages", _BODIES + "ChatBody", **_STREAMS),
    _get("models", "/v1/models", "The model, as OpenAI lists models", of="generates"),
    _get("model", "/v1/models/{model}", "The same, by its name", "404", of="generates"),
    _get("server_metadata", "/v2", "Server metadata", answer=V2Server, rpc="ServerMetadata"),
    _get("live", "/v2/health/live", "Whether the process answers", rpc="ServerLive", **_open(Live)),
    _get("ready", "/v2/health/ready", "Whether every stage is warm", rpc="ServerReady", **_open(Ready)),
    _post("index", REPOSITORY + "/index", "Every version on the cluster, and its state", IndexBody, answer={}),
    _post("load", REPOSITORY + "/models/{model}/load", "Load a version", LoadBody, answer={}),
    _post("unload", REPOSITORY + "/models/{model}/unload", "Unload a version", LoadBody, answer={}),
    _get("canary", CANARY, "Default version and canary, side by side", "404"),
    Operation("set_canary", "PUT", CANARY, "Let a version answer a share", asked=Canary, answer={}),
    Operation("end_canary", "DELETE", CANARY, "Let the default version answer all", errors=("403", "404", "503")),
    Operation("set_default", "PUT", MODEL + "/default", "Make a version the default", asked=DefaultVersion, answer={}),
    _get("stats", "/stats", "What stages and ingress have done since their start"),
    _get("metrics", "/metrics", "What all ingresses and replicas count, for Prometheus", "503", **_METRICS),
    _get("plan", "/plan", "The plan in force, and why", "503"),
    _get("plan_history", "/plan/history", "The plans so far, newest first", "400", "503", **_HISTORY),
    _get("page", "/dashboard", "The live page", **_PAGE),
    _get("events", "/dashboard/events", "The live page's stream of events, newest state once a second", "503", **_LIVE),
    _get("asset", "/dashboard/{asset}", "A file of the live page", "404", **_ASSET),
    _get("openapi", "/openapi.json", "This description"),
    _get("docs", "/docs", "This description, to read and try", **_PAGE),
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
TRACED = frozenset(path for each in OPERATIONS if each.is_traced for path in each.paths)
PAGES = tuple(each.path for each in OPERATIONS if each.gives == (PAGE,))
"""Paths that people open, also those below: a browser asks for the key as a password."""
FREQUENT = frozenset(path for each in OPERATIONS if each.of != "all" and each.is_traced for path in each.paths)
"""Paths that skip routing."""
ENDS_OF_GENERATION = tuple(sorted({each.path.removeprefix(MODEL) for each in OPERATIONS if each.of == "generates"}))
"""Ends of the paths that only models which generate have."""


def path_of(name: str, **named: str) -> str:
    """Returns the path of an operation for the model, and the version where one is given; raises KeyError."""
    path = OPERATION_BY_NAME[name].path
    return (path.replace(MODEL, VERSION) if "version" in named else path).format(**named)
