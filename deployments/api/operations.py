"""The table of operations: routes, gRPC methods, open and frequent paths, OpenAPI and client paths follow from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pydantic import BaseModel

from deployments.api.bodies import (
    Canary,
    DefaultVersion,
    ErrorBody,
    IndexBody,
    Live,
    LoadBody,
    PredictBody,
    Ready,
    V2Answer,
    V2Body,
    V2Error,
    V2Model,
    V2Server,
)
from deployments.api.completions.bodies import ChatBody, CompletionBody, GenerateBody, OpenAiError

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
    """The handler: a method of the class that answers the operation."""
    method: str
    path: str
    summary: str
    _: KW_ONLY
    body: type[BaseModel] | None = None
    takes: tuple[str, ...] = ()
    """Content types of the body besides JSON."""
    answer: type[BaseModel] | Mapping[str, Any] | None = None
    """What a 200 holds: a body, or a JSON schema; None for any object."""
    gives: tuple[str, ...] = (JSON,)
    """Content types of the answer; those after JSON have a schema of their own, or none."""
    errors: tuple[str, ...] = ()
    """Statuses of an operation without a body, beside those that every operation may have."""
    error: type[BaseModel] = ErrorBody
    more: Mapping[str, tuple[str, type[BaseModel] | None]] | None = None
    """Further answers that are no errors: status -> description and body."""
    parameters: tuple[Mapping[str, Any], ...] = ()
    """Beside those in the path."""
    of: Literal["all", "answers", "generates"] = "all"
    """Which models have it: those that answer each input at once, those that generate, or all."""
    of_any_model: bool = False
    """Whether the path may name a model that this service does not serve."""
    by_version: bool = False
    """Whether the path below a version of the model is the same operation."""
    rpc: str | None = None
    """The method of the gRPC service that is the same operation."""
    is_open: bool = False
    """Whether it is answered without an API key."""
    is_frequent: bool = False
    """Whether its paths skip routing."""

    @property
    def is_traced(self) -> bool:
        """Whether its requests may be traced: those that post something, which is inference."""
        return self.method == "POST"

    @property
    def bodies(self) -> tuple[type[BaseModel], ...]:
        """The bodies of requests and answers, errors too."""
        further = (body for _, body in (self.more or {}).values())
        return tuple(each for each in (self.body, self.answer, self.error, *further) if isinstance(each, type))

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path, self.path.replace(MODEL, VERSION)) if self.by_version else (self.path,)


def bound(handlers: object) -> dict[str, dict[str, Handler]]:
    """Returns the methods of `handlers` that answer operations, by path and HTTP method, in the table's order."""
    found: dict[str, dict[str, Handler]] = {}
    for each in OPERATIONS:
        handler: Handler | None = getattr(handlers, each.name, None)
        if handler is not None:
            for path in each.paths:
                found.setdefault(path, {})[each.method] = handler
    return found


def _get(name: str, path: str, summary: str, *errors: str, **fields: Any) -> Operation:
    return Operation(name, "GET", path, summary, errors=errors, **fields)


def _post(name: str, path: str, summary: str, body: type[BaseModel], **fields: Any) -> Operation:
    return Operation(name, "POST", path, summary, body=body, **fields)


_OF_MODEL: dict[str, Any] = {"error": V2Error, "by_version": True}
_GENERATES: dict[str, Any] = {"of": "generates", "is_frequent": True}
_OPENAI: dict[str, Any] = {"error": OpenAiError, "of": "generates"}
_HEALTH: dict[str, Any] = {"error": V2Error, "is_open": True}
_ORDER: dict[str, Any] = {"answer": {}, "error": V2Error}
OPERATIONS: tuple[Operation, ...] = (
    _post("predict", "/predict", "Answer one input or a list of inputs", PredictBody, of="answers", is_frequent=True),
    _post(
        "infer",
        MODEL + "/infer",
        "Open Inference Protocol v2",
        V2Body,
        rpc="ModelInfer",
        takes=(BYTES,),
        answer=V2Answer,
        gives=(JSON, BYTES),
        parameters=(JSON_LENGTH,),
        of="answers",
        is_frequent=True,
        **_OF_MODEL,
    ),
    _post("generate", MODEL + "/generate", "Go on with a text", GenerateBody, **_OF_MODEL, **_GENERATES),
    _post(
        "generate_stream",
        MODEL + "/generate_stream",
        "The same, as events of its parts",
        GenerateBody,
        gives=(EVENTS,),
        **_OF_MODEL,
        **_GENERATES,
    ),
    _get("model_metadata", MODEL, "Model metadata", "404", answer=V2Model, rpc="ModelMetadata", **_OF_MODEL),
    _get(
        "model_ready",
        MODEL + "/ready",
        "Whether the model is ready",
        "404",
        answer=Ready,
        more={"503": ("It is not.", Ready)},
        rpc="ModelReady",
        **_OF_MODEL,
    ),
    _post(
        "completions",
        "/v1/completions",
        "Go on with a text",
        CompletionBody,
        gives=(JSON, EVENTS),
        error=OpenAiError,
        **_GENERATES,
    ),
    _post(
        "chat",
        "/v1/chat/completions",
        "Answer messages",
        ChatBody,
        gives=(JSON, EVENTS),
        error=OpenAiError,
        **_GENERATES,
    ),
    _get("models", "/v1/models", "The model, as OpenAI lists models", **_OPENAI),
    _get("model", "/v1/models/{model}", "The same, by its name", "404", **_OPENAI),
    _get("server_metadata", "/v2", "Server metadata", answer=V2Server, error=V2Error, rpc="ServerMetadata"),
    _get("live", "/v2/health/live", "Whether the process answers", answer=Live, **_HEALTH, rpc="ServerLive"),
    _get("ready", "/v2/health/ready", "Whether every stage is warm", answer=Ready, **_HEALTH, rpc="ServerReady"),
    _post("index", REPOSITORY + "/index", "Every version on the cluster, and its state", IndexBody, **_ORDER),
    _post("load", REPOSITORY + "/models/{model}/load", "Load a version", LoadBody, of_any_model=True, **_ORDER),
    _post("unload", REPOSITORY + "/models/{model}/unload", "Unload a version", LoadBody, of_any_model=True, **_ORDER),
    _get("canary", CANARY, "Default version and canary, side by side", "404", error=V2Error),
    Operation("set_canary", "PUT", CANARY, "Let a version answer a share", body=Canary, **_ORDER),
    Operation(
        "end_canary",
        "DELETE",
        CANARY,
        "Let the default version answer all",
        errors=("403", "404", "503"),
        error=V2Error,
    ),
    Operation("set_default", "PUT", MODEL + "/default", "Let a version be the default", body=DefaultVersion, **_ORDER),
    _get("stats", "/stats", "What stages and ingress have done since their start"),
    _get(
        "metrics",
        "/metrics",
        "What all ingresses and replicas count, for Prometheus",
        "503",
        answer=TEXT,
        gives=("text/plain",),
    ),
    _get("plan", "/plan", "The plan in force, and why", "503"),
    _get(
        "plan_history",
        "/plan/history",
        "The plans so far, newest first",
        "400",
        "503",
        answer={"type": "array", "items": OBJECT},
        parameters=(LIMIT,),
    ),
    _get("page", "/dashboard", "The live page", answer=TEXT, gives=(PAGE,)),
    _get(
        "events",
        "/dashboard/events",
        "The live page's stream of events, newest state once a second",
        "503",
        answer=TEXT,
        gives=(EVENTS,),
    ),
    _get(
        "asset",
        "/dashboard/{asset}",
        "A file of the live page",
        "404",
        answer=TEXT,
        gives=("text/css", "text/javascript", PAGE, "image/svg+xml"),
        more={"304": ("As it was.", None)},
    ),
    _get("openapi", "/openapi.json", "This description"),
    _get("docs", "/docs", "This description, to read and try", answer=TEXT, gives=(PAGE,)),
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
"""A person opens these and what is below them: a browser then asks for the key itself, as a password."""
FREQUENT = frozenset(path for each in OPERATIONS if each.is_frequent for path in each.paths)
ENDS_OF_GENERATION = tuple(sorted({each.path.removeprefix(MODEL) for each in OPERATIONS if each.of == "generates"}))
"""How the paths end that only models which generate have."""


def path_of(name: str, **named: str) -> str:
    """Returns the path of an operation for the model, and the version where one is given; raises KeyError."""
    path = OPERATION_BY_NAME[name].path
    return (path.replace(MODEL, VERSION) if "version" in named else path).format(**named)
