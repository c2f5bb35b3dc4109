"""The API's OpenAPI document, which is built from the schemas of the bodies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from deployments.api.endpoint import GENERATION_TASK
from deployments.api.operations import BYTES, EVENTS, JSON, OBJECT, OPERATIONS, REPOSITORY, TEXT, Operation
from deployments.api.parsing import EXIT, PredictBody, Signature
from earlyexit.network.boundary import Column

SWAGGER_PAGE = """<!doctype html>
<html><head><title>Offramp</title>
<link rel="stylesheet" href="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui.css"></head>
<body><div id="ui">See <a href="openapi.json">openapi.json</a>. This page shows it by a script of cdn.jsdelivr.net</div>
<script src="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({url: "openapi.json", dom_id: "#ui"})</script></body></html>
"""

ERRORS = {
    "400": "The request is malformed or not allowed.",
    "401": "No API key, or an unknown one.",
    "403": "The service's settings do not allow this over HTTP.",
    "404": "No such path, model or version.",
    "405": "The path does not allow this method.",
    "406": "The model cannot answer this request in a content type that Accept allows.",
    "413": "The body is too large.",
    "422": "The model cannot process an input.",
    "429": "The rate limit is exceeded; see Retry-After.",
    "500": "The model, or the server, failed on this request.",
    "503": "Too much is queued, the answer would be late, or no replica is available; see Retry-After.",
    "504": "No answer within the timeout.",
}
ALWAYS = ("405", "500")
EVERYWHERE = ("401", *ALWAYS, "429")
RETRY_AFTER = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 1}}}
HEADERS = {
    "401": {"WWW-Authenticate": {"description": "The authentication scheme.", "schema": {"type": "string"}}},
    "405": {"Allow": {"description": "The allowed methods.", "schema": {"type": "string"}}},
    "429": RETRY_AFTER,
    "503": RETRY_AFTER,
}
PREDICT_ONE, PREDICT_MANY = "PredictOne", "PredictMany"
REQUEST_ID = {
    "name": "X-Request-ID",
    "in": "header",
    "required": False,
    "description": "Returned with the answer, and logged; created if it is missing.",
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
    """Returns the OpenAPI 3.1 document. `keys`: whether API keys are needed; `model`: None for any model."""
    schemas = _schemas(each for each in OPERATIONS if each.models != "generates")
    _add_model_schemas(schemas, signature)
    if signature.task.name == GENERATION_TASK:
        schemas |= _schemas(each for each in OPERATIONS if each.models == "generates")
    allowed = {"model": {} if model is None else {"enum": [model]}, "version": {"enum": [version]}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Offramp", "version": "1", "description": "Early-exit model serving."},
        "paths": _paths(signature, allowed),
        "components": {"schemas": schemas, "securitySchemes": SCHEMES},
        "security": [{"key": []}, {"page": []}] if keys else [],
    }


def _paths(signature: Signature, allowed: Mapping[str, Mapping[str, list[str]]]) -> dict[str, Any]:
    """Returns the paths of a model with this signature; `allowed` has the schemas of path parameters."""
    excluded = "answers" if signature.task.name == GENERATION_TASK else "generates"
    paths: dict[str, Any] = {}
    for each in OPERATIONS:
        for path in () if each.models == excluded else each.paths:
            names = PARAMETERS.findall(path)
            known = {} if path.startswith(REPOSITORY) else allowed
            in_path = {"in": "path", "required": True}
            parameters = [{"name": name, **in_path, "schema": {**TEXT, **known.get(name, {})}} for name in names]
            operations = paths.setdefault(path, {"parameters": parameters} if parameters else {})
            operations[each.method.lower()] = _operation(each, signature)
    return paths


def _add_model_schemas(schemas: dict[str, Any], signature: Signature) -> None:
    """Adds the schemas of the model's inputs and answers."""
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
    """Returns the schemas of the answers of `POST /predict`."""
    block = {
        "type": "integer",
        "description": "The block after which the input left; the last block if it left at no ramp.",
    }
    properties = {**signature.task.json_schema, EXIT.name: block}
    answer = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    request_id = {"request_id": {"type": "string"}}
    one = answer | {"properties": properties | request_id, "required": [*properties, *request_id]}
    outputs = {"outputs": {"type": "array", "items": answer, "description": "In the order of the inputs."}}
    many = {
        "type": "object",
        "properties": outputs | request_id,
        "required": [*outputs, *request_id],
        "additionalProperties": False,
    }
    return {PREDICT_ONE: one, PREDICT_MANY: many}


def _schemas(operations: Iterable[Operation]) -> dict[str, Any]:
    """Returns the schemas of all bodies of the operations, by name."""
    bodies = dict.fromkeys(body for each in operations for body in each.bodies)
    _, schemas = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    by_name: dict[str, Any] = schemas["$defs"]
    return by_name


def _shape(column: Column) -> str:
    return f"[{', '.join(['rows', *map(str, column.shape)])}]"


def _operation(row: Operation, signature: Signature) -> dict[str, Any]:
    """Returns the OpenAPI operation of a row of the table."""
    responses = {"200": _answer(row, signature), **_errors(row)}
    for status, (description, body) in (row.other_responses or {}).items():
        responses[status] = {"description": description} if body is None else _response(description, _schema(body))
    operation: dict[str, Any] = {"summary": row.summary}
    if row.is_open:
        operation["security"] = []
    parameters = [*row.parameters] if row.body is None else [REQUEST_ID, *row.parameters]
    if parameters:
        operation["parameters"] = parameters
    if row.body is not None:
        content_types = (*row.request_types, *(signature.codec.content_types if row.body is PredictBody else ()))
        content = {JSON: {"schema": _schema(row.body)}, **{content_type: {} for content_type in content_types}}
        operation["requestBody"] = {"required": True, "content": content}
    return {**operation, "responses": responses}


def _answer(row: Operation, signature: Signature) -> dict[str, Any]:
    """Returns the response of status 200."""
    if row.body is None:
        content = {each: {"schema": _schema(row.answer)} for each in row.response_types}
        return {"description": row.summary, "content": content}
    is_predict, other_types = row.body is PredictBody, signature.task.content_types
    schema = {"anyOf": [_schema(PREDICT_ONE), _schema(PREDICT_MANY)]} if is_predict else _schema(row.answer)
    contents: dict[str, Any] = {JSON: {"schema": schema}, EVENTS: {"schema": TEXT}, BYTES: {}}
    content = {each: contents[each] for each in row.response_types}
    if is_predict:
        content |= {content_type: {} for content_type in other_types}
    return {"description": "Answers", "content": content}


def _schema(body: type[BaseModel] | Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Returns the schema of a body: a reference to a type or to a named schema, a JSON schema, or any object."""
    if isinstance(body, type):
        body = body.__name__
    return {"$ref": f"#/components/schemas/{body}"} if isinstance(body, str) else dict(OBJECT if body is None else body)


def _errors(row: Operation) -> dict[str, Any]:
    """Returns the error responses. An operation with a body may be answered by any error."""
    statuses = ERRORS if row.body is not None else (*(ALWAYS if row.is_open else EVERYWHERE), *row.errors)
    return {
        status: _response(ERRORS[status], _schema(row.error))
        | ({"headers": HEADERS[status]} if status in HEADERS else {})
        for status in sorted(statuses)
    }


def _response(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {JSON: {"schema": schema}}}
