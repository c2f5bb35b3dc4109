from __future__ import annotations

import re
from typing import Any

import pytest

from deployments.api.completions.http import GenerateRoutes
from deployments.api.http import Routes
from deployments.api.openapi import openapi_document
from deployments.api.operations import FREQUENT, OPEN_PATHS, OPERATIONS, RPC_SERVICE
from deployments.api.parsing import Signature
from earlyexit.codecs.prompt import PromptCodec
from earlyexit.tasks.token import TokenTask
from tests.deployments.ingress.api.signatures import TEXT


def references(node: object) -> list[str]:
    """Every `$ref` in a document."""
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [each for value in node.values() for each in references(value)]
    return [each for value in node for each in references(value)] if isinstance(node, list) else []


ASSIGNED = ("page", "asset")
"""Handlers that are functions, and attributes of the routes."""
GENERATES = Signature(PromptCodec(8), TokenTask(16))


@pytest.mark.parametrize("signature", [TEXT, GENERATES], ids=["labels", "tokens"])
def test_the_description_is_whole(signature: Signature) -> None:
    document = openapi_document(signature)
    assert document["openapi"].startswith("3.1")
    assert {"title", "version"} <= set(document["info"])
    for reference in references(document):
        node: Any = document
        for key in reference.removeprefix("#/").split("/"):
            node = node[key]
    for path, item in document["paths"].items():
        declared = [parameter["name"] for parameter in item.get("parameters", [])]
        assert declared == re.findall(r"{(\w+)}", path)
        for method in set(item) - {"parameters"}:
            operation = item[method]
            assert operation["summary"]
            assert all(response["description"] for response in operation["responses"].values())
            assert ("requestBody" in operation) == (method in ("post", "put"))


def test_errors_are_described_in_the_form_that_they_have() -> None:
    document = openapi_document(TEXT)
    for path, schema in [("/predict", "ErrorBody"), ("/v2/models/{model}/infer", "V2Error")]:
        responses = document["paths"][path]["post"]["responses"]
        assert {"400", "404", "413", "422", "500", "503", "504"} <= set(responses)
        assert responses["503"]["content"]["application/json"]["schema"]["$ref"].endswith(f"/{schema}")


def test_routes_are_those_of_what_the_model_answers() -> None:
    labels, tokens = (set(openapi_document(each)["paths"]) for each in (TEXT, GENERATES))
    of_labels = {"/predict", "/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer"}
    assert labels - tokens == of_labels
    assert {path for path in tokens - labels if path.startswith("/v1")} == {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/v1/models/{model}",
    }
    assert {path.rpartition("/")[2] for path in tokens - labels if path.startswith("/v2")} == {
        "generate",
        "generate_stream",
    }
    responses = openapi_document(GENERATES)["paths"]["/v1/completions"]["post"]["responses"]
    assert responses["503"]["content"]["application/json"]["schema"]["$ref"].endswith("/OpenAiError")


def test_every_operation_has_one_handler_under_a_name_of_its_own() -> None:
    names = [each.name for each in OPERATIONS]
    handled = [
        name for name in names for routes in (Routes, GenerateRoutes) if hasattr(routes, name) or name in ASSIGNED
    ]
    of_versions = {"index", "load", "unload", "canary", "set_canary", "end_canary", "set_default"}
    assert len(names) == len(set(names))
    assert set(names) - set(handled) == of_versions
    over_grpc = {f"/{RPC_SERVICE}/ServerLive", f"/{RPC_SERVICE}/ServerReady"}
    assert {"/v2/health/live", "/v2/health/ready"} | over_grpc == OPEN_PATHS
    assert {path.rsplit("/", 1)[1] for path in FREQUENT} == {
        *("predict", "infer", "generate", "generate_stream", "completions")
    }
