"""The API's OpenAPI document, made from the bodies' own schemas."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

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
from deployments.api.completions.bodies import (
    CHAT_TOKENS,
    COMPLETION_TOKENS,
    OPENAI_TEMPERATURE,
    V2_TEMPERATURE,
    ChatBody,
    CompletionBody,
    GenerateBody,
    OpenAiError,
)
from deployments.api.endpoint import EXIT_HEADER, GENERATES, SCORE_HEADER
from deployments.api.parsing import Signature
from earlyexit.network.wire import Column

SWAGGER_PAGE = """<!doctype html>
<html><head><title>Offramp</title>
<link rel="stylesheet" href="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui.css"></head>
<body><div id="ui"></div>
<script src="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({url: "openapi.json", dom_id: "#ui"})</script>
<noscript>The description itself is at <a href="openapi.json">openapi.json</a>.</noscript></body></html>
"""

BODIES: tuple[type[BaseModel], ...] = (
    *(PredictBody, ErrorBody),
    *(V2Body, V2Answer, V2Model, V2Server, V2Error, Live, Ready),
)
ORDERS: tuple[type[BaseModel], ...] = (IndexBody, LoadBody, Canary, DefaultVersion)
ERRORS = {
    "400": "The request is malformed, or asks for what is not allowed.",
    "401": "No API key, or none that is known here.",
    "403": "The service's settings allow no such orders by HTTP.",
    "404": "No such path, model or version.",
    "405": "A path asked with a method that it does not take.",
    "406": "What Accept asks for is no kind of answer that this model gives to this request.",
    "413": "The body is too large.",
    "422": "An input that this model cannot take.",
    "429": "More than this key may send; see Retry-After.",
    "500": "The model, or the server, failed on this request.",
    "503": "Too much is queued, it would be answered too late, or no replica is there; see Retry-After.",
    "504": "No answer within the timeout.",
}
EVERYWHERE = ("401", "405", "429", "500")
RETRY_AFTER = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 1}}}
HEADERS = {
    "401": {"WWW-Authenticate": {"description": "What to send.", "schema": {"type": "string"}}},
    "405": {"Allow": {"description": "The methods that are taken.", "schema": {"type": "string"}}},
    "429": RETRY_AFTER,
    "503": RETRY_AFTER,
}
OF_CONTENT = {
    SCORE_HEADER: {"description": "How sure the exit was; of answers that are no JSON.", "schema": {"type": "number"}},
    EXIT_HEADER: {"description": "The block it left after; the same.", "schema": {"type": "integer"}},
}
GENERATE_EXAMPLES: dict[str, dict[str, Any]] = {
    "CompletionBody": {"model": "smollm2", "prompt": "The sky is blue because", "max_tokens": 20},
    "ChatBody": {"model": "smollm2", "messages": [{"role": "user", "content": "Why is the sky blue?"}], "stream": True},
    "GenerateBody": {"text_input": "The sky is blue because", "parameters": {"max_tokens": 20}},
}
GENERATE_DEFAULTS: dict[str, dict[str, Any]] = {
    "CompletionBody": {"temperature": OPENAI_TEMPERATURE, "max_tokens": COMPLETION_TOKENS},
    "ChatBody": {"temperature": OPENAI_TEMPERATURE, "max_tokens": CHAT_TOKENS, "logprobs": False, "top_logprobs": 0},
    "GenerateBody": {"temperature": V2_TEMPERATURE, "max_tokens": COMPLETION_TOKENS},
    "GenerateParameters": {"temperature": V2_TEMPERATURE, "max_tokens": COMPLETION_TOKENS},
    "StreamOptions": {"include_usage": False},
}
SHARED_DEFAULTS = {"top_p": 1.0, "ignore_eos": False, "exits": False, "stream": False, "echo": False}
"""What a request gets that leaves a field out, or sends null. A field without a default is off, or random."""
PREDICT_ONE, PREDICT_MANY = "PredictOne", "PredictMany"
LIMIT = {
    "name": "limit",
    "in": "query",
    "required": False,
    "schema": {"type": "integer", "minimum": 1, "maximum": 1000, "default": 20},
}
REQUEST_ID = {
    "name": "X-Request-ID",
    "in": "header",
    "required": False,
    "description": "Comes back, and stands in the log; made where it is missing.",
    "schema": {"type": "string"},
}
JSON_LENGTH = {
    "name": "Inference-Header-Content-Length",
    "in": "header",
    "required": False,
    "description": "Bytes of JSON that the body begins with, where binary tensors follow.",
    "schema": {"type": "integer", "minimum": 0},
}
SCHEMES = {
    "key": {"type": "http", "scheme": "bearer", "description": "An API key."},
    "page": {"type": "http", "scheme": "basic", "description": "For GET: any user name, the key as the password."},
}
JSON = "application/json"
EVENTS = "text/event-stream"
OBJECT, TEXT = {"type": "object"}, {"type": "string"}
STREAM = "The live page's stream of events, newest state once a second"
FILES = ("text/css", "text/javascript", "text/html", "image/svg+xml")


@cache
def openapi_document(
    signature: Signature, *, keys: bool = False, model: str | None = None, version: str = "1"
) -> dict[str, Any]:
    """OpenAPI 3.1, of a service with API keys or without, and of one model or any with this signature."""
    _, schemas = models_json_schema(
        [(body, "validation") for body in (*BODIES, *ORDERS)], ref_template="#/components/schemas/{model}"
    )
    _say_of_the_model(schemas["$defs"], signature)
    if generates := signature.task.name == GENERATES:
        schemas["$defs"] |= generate_schemas()
    named = _parameter("model", None if model is None else [model])
    versions = [version]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Offramp", "version": "1", "description": "Early-exit model serving."},
        "paths": {
            **({} if generates else {"/predict": {"post": _predict(signature)}}),
            **_model_paths("/v2/models/{model}", [named], generates=generates),
            **_model_paths(
                "/v2/models/{model}/versions/{version}",
                [named, _parameter("version", versions)],
                generates=generates,
            ),
            **(_openai_paths(named) if generates else {}),
            "/v2": {"get": _get("Server metadata", _reference(V2Server), error=V2Error)},
            "/v2/health/live": {"get": _health("Whether the process answers", Live)},
            "/v2/health/ready": {"get": _health("Whether every stage is warm", Ready)},
            **_version_paths(named),
            "/stats": {"get": _get("What stages and ingress have done since their start")},
            "/metrics": {
                "get": _get(
                    "What all ingresses and replicas count, for Prometheus", TEXT, ("503",), kinds=("text/plain",)
                )
            },
            "/plan": {"get": _get("The plan in force, and why", errors=("503",))},
            "/plan/history": {
                "get": _get("The plans so far, newest first", {"type": "array", "items": OBJECT}, ("400", "503"))
                | {"parameters": [LIMIT]}
            },
            "/dashboard": {"get": _get("The live page", TEXT, kinds=("text/html",))},
            "/dashboard/events": {"get": _get(STREAM, TEXT, ("503",), kinds=(EVENTS,))},
            "/dashboard/{asset}": {"parameters": [_parameter("asset", None)], "get": _file("A file of the live page")},
            "/openapi.json": {"get": _get("This description")},
            "/docs": {"get": _get("This description, to read and try", TEXT, kinds=("text/html",))},
        },
        "components": {"schemas": schemas["$defs"], "securitySchemes": SCHEMES},
        "security": [{"key": []}, {"page": []}] if keys else [],
    }


def _say_of_the_model(schemas: dict[str, Any], signature: Signature) -> None:
    """Put in what follows from the model: its inputs, and what an answer is."""
    schemas["PredictBody"]["properties"]["inputs"] = dict(signature.codec.json_schema)
    schemas |= answer_schemas(signature)
    forms = "; ".join(f"{column.name}: {' or '.join(column.datatypes)} {_shape(column)}" for column in signature.inputs)
    schemas["V2Input"]["description"] = f"An input tensor: {forms}."
    tensor = schemas["V2AnswerTensor"]["properties"]
    tensor["name"]["enum"] = list(signature.output_names)
    tensor["datatype"]["enum"] = sorted({column.datatype for column in signature.outputs})
    outputs = "; ".join(f"{column.name}: {column.datatype} {_shape(column)}" for column in signature.outputs)
    schemas["V2AnswerTensor"]["description"] = f"An output tensor: {outputs}."


def answer_schemas(signature: Signature) -> dict[str, Any]:
    """The answers of `POST /predict`."""
    answer = {**signature.answer_schema, "additionalProperties": False}
    request_id = {"request_id": {"type": "string"}}
    one = answer | {"properties": answer["properties"] | request_id, "required": [*answer["required"], *request_id]}
    outputs = {"outputs": {"type": "array", "items": answer, "description": "In the order of the inputs."}}
    many = {
        "type": "object",
        "properties": outputs | request_id,
        "required": [*outputs, *request_id],
        "additionalProperties": False,
    }
    return {PREDICT_ONE: one, PREDICT_MANY: many}


def generate_schemas() -> dict[str, Any]:
    """What is asked of a model that generates."""
    bodies: tuple[type[BaseModel], ...] = (CompletionBody, ChatBody, GenerateBody, OpenAiError)
    _, schemas = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    found: dict[str, Any] = schemas["$defs"]
    for name, example in GENERATE_EXAMPLES.items():
        found[name]["examples"] = [example]
    for name, defaults in GENERATE_DEFAULTS.items():
        for field, described in found[name]["properties"].items():
            described.pop("default", None)
            if (default := {**SHARED_DEFAULTS, **defaults}.get(field)) is not None:
                described["default"] = default
    return found


def _predict(signature: Signature) -> dict[str, Any]:
    answer = {"anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in (PREDICT_ONE, PREDICT_MANY)]}
    operation = _operation("Answer one input or a list of inputs", PredictBody, answer)
    operation["requestBody"]["content"] |= {content_type: {} for content_type in signature.codec.content_types}
    if signature.task.content_types:
        answered = operation["responses"]["200"]
        answered["content"] |= {content_type: {} for content_type in signature.task.content_types}
        answered["headers"] = OF_CONTENT
    return operation


def _shape(column: Column) -> str:
    return f"[{', '.join(['rows', *map(str, column.shape)])}]"


def _openai_paths(named: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's; streams are events of JSON."""
    texts = _operation("Go on with a text", CompletionBody, OBJECT, error=OpenAiError)
    chats = _operation("Answer messages", ChatBody, OBJECT, error=OpenAiError)
    for each in (texts, chats):
        each["responses"]["200"]["content"][EVENTS] = {"schema": TEXT}
    listed = _get("The model, as OpenAI lists models", error=OpenAiError)
    one = _get("The same, by its name", errors=("404",), error=OpenAiError)
    return {
        "/v1/completions": {"post": texts},
        "/v1/chat/completions": {"post": chats},
        "/v1/models": {"get": listed},
        "/v1/models/{model}": {"parameters": [named], "get": one},
    }


def _generate_paths(path: str, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    """Triton's generate extension."""
    whole = _operation("Go on with a text", GenerateBody, OBJECT, error=V2Error)
    stream = _operation("The same, as events of its parts", GenerateBody, OBJECT, error=V2Error)
    stream["responses"]["200"]["content"] = {EVENTS: {"schema": TEXT}}
    return {
        f"{path}/generate": {"parameters": parameters, "post": whole},
        f"{path}/generate_stream": {"parameters": parameters, "post": stream},
    }


def _model_paths(path: str, parameters: list[dict[str, Any]], *, generates: bool) -> dict[str, Any]:
    infer = _operation("Open Inference Protocol v2", V2Body, _reference(V2Answer), error=V2Error)
    infer["requestBody"]["content"]["application/octet-stream"] = {}
    infer["responses"]["200"]["content"]["application/octet-stream"] = {}
    infer["parameters"].append(JSON_LENGTH)
    ready = _get("Whether the model is ready", _reference(Ready), ("404",), error=V2Error)
    ready["responses"]["503"] = _response("It is not.", _reference(Ready))
    asked = {f"{path}/infer": {"parameters": parameters, "post": infer}}
    return {
        **(_generate_paths(path, parameters) if generates else asked),
        path: {"parameters": parameters, "get": _get("Model metadata", _reference(V2Model), ("404",), error=V2Error)},
        f"{path}/ready": {"parameters": parameters, "get": ready},
    }


def _parameter(name: str, allowed: list[str] | None) -> dict[str, Any]:
    values = {} if allowed is None else {"enum": allowed}
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"} | values}


def _version_paths(named: dict[str, Any]) -> dict[str, Any]:
    of_any, of_ours = {"parameters": [_parameter("model", None)]}, {"parameters": [named]}
    end = _get("Let the default version answer all", OBJECT, ("403", "404", "503"), error=V2Error)
    return {
        "/v2/repository/index": {"post": _order("Every version on the cluster, and its state", IndexBody)},
        "/v2/repository/models/{model}/load": of_any | {"post": _order("Load a version", LoadBody)},
        "/v2/repository/models/{model}/unload": of_any | {"post": _order("Unload a version", LoadBody)},
        "/v2/models/{model}/canary": of_ours
        | {
            "get": _get("Default version and canary, side by side", OBJECT, ("404",), error=V2Error),
            "put": _order("Let a version answer a share", Canary),
            "delete": end,
        },
        "/v2/models/{model}/default": of_ours | {"put": _order("Let a version be the default", DefaultVersion)},
    }


def _order(summary: str, body: type[BaseModel]) -> dict[str, Any]:
    return _operation(summary, body, {}, error=V2Error)


def _operation(
    summary: str, body: type[BaseModel], answer: dict[str, Any], *, error: type[BaseModel] = ErrorBody
) -> dict[str, Any]:
    return {
        "summary": summary,
        "parameters": [REQUEST_ID],
        "requestBody": {"required": True, "content": {JSON: {"schema": _reference(body)}}},
        "responses": {"200": _response("Answers", answer), **_errors(ERRORS, error=error)},
    }


def _get(
    summary: str,
    schema: dict[str, Any] = OBJECT,
    errors: Iterable[str] = (),
    *,
    error: type[BaseModel] = ErrorBody,
    kinds: Iterable[str] = (JSON,),
) -> dict[str, Any]:
    """A GET behind the keys; `errors`: what it may answer beside what all may."""
    found = {"description": summary, "content": {kind: {"schema": schema} for kind in kinds}}
    return {"summary": summary, "responses": {"200": found, **_errors((*EVERYWHERE, *errors), error=error)}}


def _file(summary: str) -> dict[str, Any]:
    """Text of some kind, which a browser keeps."""
    operation = _get(summary, TEXT, ("404",), kinds=FILES)
    operation["responses"]["304"] = {"description": "As it was."}
    return operation


def _health(summary: str, answer: type[BaseModel]) -> dict[str, Any]:
    """Open to everybody."""
    states = {"200": _response(summary, _reference(answer)), "503": _response("Not yet.", _reference(answer))}
    return {"summary": summary, "security": [], "responses": states | _errors(("405", "500"), error=V2Error)}


def _errors(statuses: Iterable[str], *, error: type[BaseModel]) -> dict[str, Any]:
    body = _reference(error)
    return {
        status: _response(ERRORS[status], body) | ({"headers": HEADERS[status]} if status in HEADERS else {})
        for status in sorted(statuses)
    }


def _response(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {JSON: {"schema": schema}}}


def _reference(body: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{body.__name__}"}
