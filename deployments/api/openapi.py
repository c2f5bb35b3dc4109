"""The API's OpenAPI document, made from the bodies' own schemas."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from deployments.api.endpoint import EXIT_HEADER, GENERATES, SCORE_HEADER
from deployments.api.operations import BYTES, EVENTS, JSON, OBJECT, OPERATIONS, REPOSITORY, TEXT, Operation
from deployments.api.parsing import PredictBody, Signature
from earlyexit.network.boundary import Column

SWAGGER_PAGE = """<!doctype html>
<html><head><title>Offramp</title>
<link rel="stylesheet" href="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui.css"></head>
<body><div id="ui"></div>
<script src="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({url: "openapi.json", dom_id: "#ui"})</script>
<noscript>The description itself is at <a href="openapi.json">openapi.json</a>.</noscript></body></html>
"""

ERRORS = {
    "400": "The request is malformed, or asks for what is not allowed.",
    "401": "No API key, or an unknown one.",
    "403": "The service's settings do not allow this over HTTP.",
    "404": "No such path, model or version.",
    "405": "The path does not take this method.",
    "406": "The model cannot answer this request in a type that Accept allows.",
    "413": "The body is too large.",
    "422": "The model cannot take an input.",
    "429": "The rate limit is used up; see Retry-After.",
    "500": "The model, or the server, failed on this request.",
    "503": "Too much is queued, the answer would be late, or no replica is available; see Retry-After.",
    "504": "No answer within the timeout.",
}
ALWAYS = ("405", "500")
EVERYWHERE = ("401", *ALWAYS, "429")
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
PREDICT_ONE, PREDICT_MANY = "PredictOne", "PredictMany"
REQUEST_ID = {
    "name": "X-Request-ID",
    "in": "header",
    "required": False,
    "description": "Comes back, and stands in the log; made where it is missing.",
    "schema": {"type": "string"},
}
SCHEMES = {
    "key": {"type": "http", "scheme": "bearer", "description": "An API key."},
    "page": {"type": "http", "scheme": "basic", "description": "For GET: any user name, the key as the password."},
}
PARAMETERS = re.compile(r"\{(\w+)\}")


@cache
def openapi_document(
    signature: Signature, *, keys: bool = False, model: str | None = None, version: str = "1"
) -> dict[str, Any]:
    """OpenAPI 3.1, of a service with API keys or without, and of one model or any with this signature."""
    schemas = _schemas(each for each in OPERATIONS if each.of != "generates")
    _say_of_the_model(schemas, signature)
    if signature.task.name == GENERATES:
        schemas |= _schemas(each for each in OPERATIONS if each.of == "generates")
    allowed = {"model": {} if model is None else {"enum": [model]}, "version": {"enum": [version]}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Offramp", "version": "1", "description": "Early-exit model serving."},
        "paths": _paths(signature, allowed),
        "components": {"schemas": schemas, "securitySchemes": SCHEMES},
        "security": [{"key": []}, {"page": []}] if keys else [],
    }


def _paths(signature: Signature, allowed: Mapping[str, Mapping[str, list[str]]]) -> dict[str, Any]:
    """Returns the paths that a model of this signature has; `allowed`: schemas of parameters in paths."""
    left_out = "answers" if signature.task.name == GENERATES else "generates"
    paths: dict[str, Any] = {}
    for each in OPERATIONS:
        for path in () if each.of == left_out else each.paths:
            names = PARAMETERS.findall(path)
            known = {} if path.startswith(REPOSITORY) else allowed
            in_path = {"in": "path", "required": True}
            parameters = [{"name": name, **in_path, "schema": {**TEXT, **known.get(name, {})}} for name in names]
            found = paths.setdefault(path, {"parameters": parameters} if parameters else {})
            found[each.method.lower()] = _described(each, signature)
    return paths


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


def _schemas(operations: Iterable[Operation]) -> dict[str, Any]:
    """Returns the schemas of all bodies of some operations, by name."""
    bodies = dict.fromkeys(body for each in operations for body in each.bodies)
    _, schemas = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    found: dict[str, Any] = schemas["$defs"]
    return found


def _shape(column: Column) -> str:
    return f"[{', '.join(['rows', *map(str, column.shape)])}]"


def _described(each: Operation, signature: Signature) -> dict[str, Any]:
    """Returns the OpenAPI operation of a row of the table; one with a body may be answered by any error."""
    responses = {"200": _answered(each, signature), **_errors(each)}
    for status, (words, body) in (each.more or {}).items():
        responses[status] = {"description": words} if body is None else _response(words, _reference(body))
    operation: dict[str, Any] = {"summary": each.summary}
    if each.is_open:
        operation["security"] = []
    parameters = [*each.parameters] if each.body is None else [REQUEST_ID, *each.parameters]
    if parameters:
        operation["parameters"] = parameters
    if each.body is not None:
        kinds = (*each.takes, *(signature.codec.content_types if each.body is PredictBody else ()))
        content = {JSON: {"schema": _reference(each.body)}, **{kind: {} for kind in kinds}}
        operation["requestBody"] = {"required": True, "content": content}
    return {**operation, "responses": responses}


def _answered(each: Operation, signature: Signature) -> dict[str, Any]:
    """Returns the response of status 200."""
    if each.body is None:
        content = {kind: {"schema": _schema(each.answer)} for kind in each.gives}
        return {"description": each.summary, "content": content}
    is_predict, forms = each.body is PredictBody, signature.task.content_types
    schema = {"anyOf": [_named(PREDICT_ONE), _named(PREDICT_MANY)]} if is_predict else _schema(each.answer)
    contents: dict[str, Any] = {JSON: {"schema": schema}, EVENTS: {"schema": TEXT}, BYTES: {}}
    content = {kind: contents[kind] for kind in each.gives}
    if not (is_predict and forms):
        return {"description": "Answers", "content": content}
    return {"description": "Answers", "content": {**content, **{kind: {} for kind in forms}}, "headers": OF_CONTENT}


def _schema(answer: type[BaseModel] | Mapping[str, Any] | None) -> dict[str, Any]:
    if isinstance(answer, type):
        return _reference(answer)
    return dict(OBJECT if answer is None else answer)


def _errors(each: Operation) -> dict[str, Any]:
    statuses = ERRORS if each.body is not None else (*(ALWAYS if each.is_open else EVERYWHERE), *each.errors)
    return {
        status: _response(ERRORS[status], _reference(each.error))
        | ({"headers": HEADERS[status]} if status in HEADERS else {})
        for status in sorted(statuses)
    }


def _response(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {JSON: {"schema": schema}}}


def _reference(body: type[BaseModel]) -> dict[str, Any]:
    return _named(body.__name__)


def _named(schema: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{schema}"}
