"""The API's OpenAPI document, made from the bodies' own schemas."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from deployments.ingress.bodies import ErrorBody, PredictBody, PredictMany, PredictOne, V2Body, V2Error

SWAGGER_PAGE = """<!doctype html>
<html><head><title>Offramp</title>
<link rel="stylesheet" href="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui.css"></head>
<body><div id="ui"></div>
<script src="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({url: "openapi.json", dom_id: "#ui"})</script>
<noscript>The description itself is at <a href="openapi.json">openapi.json</a>.</noscript></body></html>
"""

BODIES: tuple[type[BaseModel], ...] = (PredictBody, PredictOne, PredictMany, ErrorBody, V2Body, V2Error)
LIMIT = {"name": "limit", "in": "query", "required": False, "schema": {"type": "integer", "minimum": 1}}
ERRORS = {
    "400": "The body is malformed, or asks for what is not allowed.",
    "404": "No such model or version.",
    "413": "The body is too large.",
    "422": "A text that this model cannot take.",
    "500": "The model, or the server, failed on this request.",
    "503": "Too much is queued, it would be answered too late, or no replica is there; see Retry-After.",
    "504": "No answer within the timeout.",
}


@cache
def openapi_document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    _, schemas = models_json_schema(
        [(body, "validation") for body in BODIES], ref_template="#/components/schemas/{model}"
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "Offramp", "version": "1", "description": "Early-exit model serving."},
        "paths": {
            "/predict": {
                "post": _operation("Classify one text or a list of texts", "PredictBody", _predicted(), "ErrorBody")
            },
            **_model_paths("/v2/models/{model}", _parameters("model")),
            **_model_paths("/v2/models/{model}/versions/{version}", _parameters("model", "version")),
            "/v2": {"get": _plain("Server metadata")},
            "/v2/health/live": {"get": _plain("Whether the process answers")},
            "/v2/health/ready": {"get": _plain("Whether every stage is warm")},
            "/stats": {"get": _plain("What stages and ingress have done since their start")},
            "/plan": {"get": _plain("The plan in force, and why")},
            "/plan/history": {"get": _plain("The plans so far, newest first") | {"parameters": [LIMIT]}},
            "/dashboard": {"get": _plain("The live page")},
            "/dashboard/events": {"get": _stream("The live page's stream of events, newest state once a second")},
            "/dashboard/{asset}": {"parameters": _parameters("asset"), "get": _plain("A file of the live page")},
            "/openapi.json": {"get": _plain("This description")},
            "/docs": {"get": _plain("This description, to read and try")},
        },
        "components": {"schemas": schemas["$defs"]},
    }


def _model_paths(path: str, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    infer = _operation("Open Inference Protocol v2", "V2Body", {"type": "object"}, "V2Error")
    return {
        f"{path}/infer": {"parameters": parameters, "post": infer},
        path: {"parameters": parameters, "get": _plain("Model metadata")},
        f"{path}/ready": {"parameters": parameters, "get": _plain("Whether the model is ready")},
    }


def _parameters(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _predicted() -> dict[str, Any]:
    return {"anyOf": [{"$ref": "#/components/schemas/PredictOne"}, {"$ref": "#/components/schemas/PredictMany"}]}


def _operation(summary: str, body: str, answer: dict[str, Any], error_body: str) -> dict[str, Any]:
    error = {"content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{error_body}"}}}}
    return {
        "summary": summary,
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{body}"}}},
        },
        "responses": {
            "200": {"description": "Answers", "content": {"application/json": {"schema": answer}}},
            **{status: {"description": text, **error} for status, text in ERRORS.items()},
        },
    }


def _plain(summary: str) -> dict[str, Any]:
    return {"summary": summary, "responses": {"200": {"description": summary}}}


def _stream(summary: str) -> dict[str, Any]:
    """Server-sent events."""
    content = {"text/event-stream": {"schema": {"type": "string"}}}
    too_many = {"description": "Too many look at the page already; see Retry-After."}
    return {"summary": summary, "responses": {"200": {"description": summary, "content": content}, "503": too_many}}
