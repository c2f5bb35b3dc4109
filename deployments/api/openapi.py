"""The API's OpenAPI document, which is built from the schemas of the bodies."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from deployments.api.operations import (
    BYTES,
    EXIT,
    JSON,
    OBJECT,
    OPERATIONS,
    REPOSITORY,
    REQUEST_ID,
    TEXT,
    Operation,
    PredictBody,
    Signature,
    error_type_of,
)
from earlyexit.network.boundary import Column

SWAGGER_PAGE = """<!doctype html><title>Offramp</title>
<link rel="stylesheet" href="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5.35.0/swagger-ui.css" crossorigin
integrity="sha384-WlYgdmXYOOBWL5apwjDEZwN+U3HmXSSu5R6V5aGxEcf7z+KuRNwBhoxKVN1i3D5I">
<div id="ui">See <a href="openapi.json">openapi.json</a>. This page shows it by a script of cdn.jsdelivr.net</div>
<script src="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5.35.0/swagger-ui-bundle.js" crossorigin
integrity="sha384-gjRm0bEPMeTmMh5jT2cHccIwCUZSTd8YC+j0d0sXw0MdGEfScduGpSyF3ZSSLkX9"></script>
<script>SwaggerUIBundle({url: "openapi.json", dom_id: "#ui"})</script>
"""

ERRORS = {
    "400": "The request is malformed or not allowed.",
    "401": "No API key, or an unknown one.",
    "403": "The service's settings do not allow this over HTTP.",
    "404": "No such path, model or version.",
    "405": "The path does not allow this method.",
    "406": "The model cannot answer this request in a content type that Accept allows.",
    "413": "The body is too large.",
    "415": "The body has a content type or a content encoding that is not supported.",
    "422": "The model cannot process an input.",
    "429": "The rate limit is exceeded; see Retry-After.",
    "500": "The model, or the server, failed on this request.",
    "503": "Too much is queued, the answer would be late, or no replica is available; see Retry-After.",
    "504": "No answer within the timeout.",
}
ALWAYS = ("405", "500")
EVERYWHERE = ("401", *ALWAYS, "429")


def _header(name: str, description: str, **schema: Any) -> dict[str, Any]:
    return {"headers": {name: {"description": description, "schema": schema}}}


HEADERS = {
    "401": _header("WWW-Authenticate", "The authentication scheme.", type="string"),
    "405": _header("Allow", "The allowed methods.", type="string"),
    **dict.fromkeys(("429", "503"), _header("Retry-After", "Seconds to wait.", type="integer", minimum=1)),
}
PREDICT_ONE, PREDICT_MANY = "PredictOne", "PredictMany"
SCHEMES = {
    "key": {"type": "http", "scheme": "bearer", "description": "An API key."},
    "page": {"type": "http", "scheme": "basic", "description": "For GET: any user name, the key as the password."},
}
PARAMETERS = re.compile(r"\{(\w+)\}")


@cache
def openapi_document(
    signature: Signature, *, keys: bool = False, model: str | None = None, version: str = "1", prefix: str = "/"
) -> dict[str, Any]:
    """Returns the OpenAPI 3.1 document.

    `keys`: whether API keys are needed. `model`: None for any model. `prefix`: the prefix of the service's paths.
    """
    absent = "answers" if signature.generates else "generates"
    allowed = {"model": {} if model is None else {"enum": [model]}, "version": {"enum": [version]}}
    paths: dict[str, Any] = {}
    for each in OPERATIONS:
        if each.models == absent:
            continue
        for path in each.paths:
            known: Mapping[str, Any] = {} if path.startswith(REPOSITORY) else allowed
            parameters = [
                {"name": name, "in": "path", "required": True, "schema": {**TEXT, **known.get(name, {})}}
                for name in PARAMETERS.findall(path)
            ]
            operations = paths.setdefault(path, {"parameters": parameters} if parameters else {})
            operations[each.method.lower()] = _operation(each, signature)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Offramp", "version": "1", "description": "Early-exit model serving."},
        "servers": [{"url": prefix}],
        "paths": paths,
        "components": {"schemas": _schemas(signature), "securitySchemes": SCHEMES},
        "security": [{"key": []}, {"page": []}] if keys else [],
    }


def _schemas(signature: Signature) -> dict[str, Any]:
    """Returns the schemas of all bodies by name, with the model's inputs and answers."""
    operations = (each for each in OPERATIONS if signature.generates or each.models != "generates")
    bodies = dict.fromkeys(body for each in operations for body in each.bodies)
    inputs: Any = [(body, "validation") for body in bodies]
    _, definitions = models_json_schema(inputs, ref_template="#/components/schemas/{model}")
    schemas: dict[str, Any] = definitions["$defs"]
    schemas["PredictBody"]["properties"]["inputs"] = dict(signature.codec.json_schema)
    block = {
        "type": "integer",
        "description": "The block after which the input left; the last block if it left at no ramp.",
    }
    answer, request_id = {**signature.task.json_schema, EXIT.name: block}, {"request_id": {"type": "string"}}
    outputs = {"type": "array", "items": _object(answer), "description": "In the order of the inputs."}
    schemas[PREDICT_ONE] = _object(answer | request_id)
    schemas[PREDICT_MANY] = _object({"outputs": outputs} | request_id)
    schemas["V2Input"]["description"] = f"An input tensor: {_forms(signature.inputs)}."
    schemas["V2AnswerTensor"]["description"] = f"An output tensor: {_forms(signature.outputs)}."
    tensor = schemas["V2AnswerTensor"]["properties"]
    tensor["name"]["enum"] = list(signature.output_names)
    tensor["datatype"]["enum"] = sorted({column.datatype for column in signature.outputs})
    return schemas


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    fields = {"properties": properties, "required": [*properties]}
    return {"type": "object", **fields, "additionalProperties": False}


def _forms(columns: Sequence[Column]) -> str:
    """Describes columns by their names, datatypes and shapes."""
    shapes = (", ".join(["rows", *map(str, column.shape)]) for column in columns)
    forms = zip(columns, shapes, strict=True)
    return "; ".join(f"{column.name}: {' or '.join(column.datatypes)} [{shape}]" for column, shape in forms)


def _operation(row: Operation, signature: Signature) -> dict[str, Any]:
    """Returns the OpenAPI operation of a row of the table. An operation with a body may be answered by any error."""
    is_predict, has_body = row.body is PredictBody, row.body is not None
    operation: dict[str, Any] = {"summary": row.summary}
    if row.is_open:
        operation["security"] = []
    if parameters := [*([REQUEST_ID] if has_body else []), *row.parameters]:
        operation["parameters"] = parameters
    if has_body:
        other_types = (*row.request_types, *(signature.codec.content_types if is_predict else ()))
        content = {JSON: {"schema": _schema(row.body)}} | {content_type: {} for content_type in other_types}
        operation["requestBody"] = {"required": True, "content": content}
    answer = {"anyOf": [_schema(PREDICT_ONE), _schema(PREDICT_MANY)]} if is_predict else _schema(row.answer)
    contents: dict[str, Any] = {JSON: {"schema": answer}, BYTES: {}}
    content = {each: contents.get(each, {"schema": TEXT}) for each in row.response_types}
    content |= {content_type: {} for content_type in signature.task.content_types if is_predict}
    responses: dict[str, Any] = {"200": {"description": "Answers" if has_body else row.summary, "content": content}}
    statuses = ERRORS if has_body else (*(ALWAYS if row.is_open else EVERYWHERE), *row.errors)
    for status in sorted(statuses):
        responses[status] = _response(ERRORS[status], error_type_of(row.path)) | HEADERS.get(status, {})
    for status, (description, body) in (row.other_responses or {}).items():
        responses[status] = {"description": description} if body is None else _response(description, body)
    return operation | {"responses": responses}


def _response(description: str, body: type[BaseModel]) -> dict[str, Any]:
    return {"description": description, "content": {JSON: {"schema": _schema(body)}}}


def _schema(body: type[BaseModel] | Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Returns the schema of a body: a reference to a type or to a named schema, a JSON schema, or any object."""
    if isinstance(body, type):
        body = body.__name__
    if isinstance(body, str):
        return {"$ref": f"#/components/schemas/{body}"}
    return dict(OBJECT if body is None else body)
