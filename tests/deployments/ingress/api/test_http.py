"""Features of only REST: routes, `/predict`, bodies, methods, route prefixes, and OpenAPI."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from deployments.api.completions.http import GenerateRoutes
from deployments.api.http import Routes
from deployments.api.openapi import openapi_document
from deployments.api.operations import OPEN_PATHS, OPERATIONS, RPC_SERVICE, Signature
from deployments.api.state import LivePage, StateRoutes
from earlyexit.codecs.prompt import PromptCodec
from earlyexit.errors import DeadlineError, StageUnavailableError
from earlyexit.tasks.token import TokenTask
from tests.deployments.ingress.api.faces import V2_BODY, V2_INFER, FakeBackend, client_of
from tests.deployments.ingress.api.signatures import TEXT

ROUTES = [
    ("POST", "/predict"),
    ("POST", "/v2/models/{model}/infer"),
    ("POST", "/v2/models/{model}/versions/{version}/infer"),
    ("GET", "/v2"),
    ("GET", "/v2/health/live"),
    ("GET", "/v2/health/ready"),
    ("GET", "/v2/models/{model}"),
    ("GET", "/v2/models/{model}/ready"),
    ("GET", "/v2/models/{model}/versions/{version}"),
    ("GET", "/v2/models/{model}/versions/{version}/ready"),
    ("GET", "/stats"),
    ("GET", "/plan"),
    ("GET", "/plan/history"),
    ("GET", "/metrics"),
    ("GET", "/dashboard"),
    ("GET", "/dashboard/events"),
    ("GET", "/dashboard/{asset}"),
    ("GET", "/openapi.json"),
    ("GET", "/docs"),
    ("POST", "/v2/repository/index"),
    ("POST", "/v2/repository/models/{model}/load"),
    ("POST", "/v2/repository/models/{model}/unload"),
    ("GET", "/v2/models/{model}/canary"),
    ("PUT", "/v2/models/{model}/canary"),
    ("DELETE", "/v2/models/{model}/canary"),
    ("PUT", "/v2/models/{model}/default"),
]
ORDERS: dict[str, dict[str, Any]] = {
    "/v2/repository/index": {},
    "/v2/repository/models/{model}/load": {},
    "/v2/repository/models/{model}/unload": {},
    "/v2/models/{model}/canary": {"version": "2", "share": 0.1},
    "/v2/models/{model}/default": {"version": "2"},
}
MEDIA_TYPES = {
    "/docs": "text/html",
    "/dashboard": "text/html",
    "/dashboard/events": "text/event-stream",
    "/dashboard/{asset}": "text/javascript",
    "/metrics": "text/plain; version=0.0.4",
}


@pytest.fixture
async def client(backend: FakeBackend) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(backend) as client:
        yield client


def path_of(route: str) -> str:
    return route.replace("{model}", "intents").replace("{version}", "1").replace("{asset}", "page.js")


async def call(client: httpx.AsyncClient, method: str, route: str) -> httpx.Response:
    """Returns a valid request to any route."""
    body = {"inputs": "pay"} if route == "/predict" else ORDERS.get(route, V2_BODY)
    return await client.request(method, path_of(route), json=body if method in ("POST", "PUT") else None)


# Answers


async def test_every_route_answers_and_is_counted(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    for method, route in ROUTES:
        backend.counted.clear()
        response = await call(client, method, route)
        assert (response.status_code, backend.counted) == (200, [(route, 200)]), f"{method} {route}"
        assert response.headers["content-type"].startswith(MEDIA_TYPES.get(route, "application/json"))
    assert [(await client.get("/docs")).text.count(each) for each in ("openapi.json", "sha384-")] == [3, 2]


async def test_serve_itself_returns_the_header_of_the_request_id(client: httpx.AsyncClient) -> None:
    client.headers["x-request-id"] = "r-1"
    for response in [await client.post("/predict", json={"inputs": "pay"}), await client.get("/nothing")]:
        assert response.json()["request_id"] == "r-1"
        assert "x-request-id" not in response.headers  # with Serve's own header, there would be two


# Refusals


def predict_error(response: httpx.Response) -> tuple[int, str, str]:
    body = response.json()
    assert set(body) == {"error", "request_id"}
    assert body["request_id"]
    return response.status_code, body["error"]["kind"], body["error"]["message"]


async def test_errors_outside_of_the_protocol_have_a_kind_and_the_requests_id(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    errors = [
        (StageUnavailableError("gone", retry_after_s=2.5), (503, "stage_unavailable", "gone"), "3"),
        (DeadlineError("late"), (504, "deadline", "late"), None),
        (RuntimeError("boom"), (500, "internal", None), None),
    ]
    for failure, said, retry_after in errors:
        backend.failure = failure
        for response in (await client.post("/predict", json={"inputs": "pay"}), await client.get("/stats")):
            status, kind, message = predict_error(response)
            assert (status, kind, said[2] and message) == said
            assert response.headers.get("retry-after") == retry_after
        await client.post(V2_INFER, json=V2_BODY)
        assert backend.counted[-1] == ("/v2/models/{model}/infer", said[0])


# OpenAPI


async def test_openapi_has_every_route_and_no_other(client: httpx.AsyncClient) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"].items()
    described = [(method.upper(), path) for path, item in paths for method in set(item) - {"parameters"}]
    assert sorted(described) == sorted(ROUTES)


# Below a route prefix


async def test_below_a_route_prefix_paths_are_relative_or_the_versions_own(backend: FakeBackend) -> None:
    backend.version = "7"
    prefix = "/v2/models/intents/versions/7"
    below = {
        "/infer": "/v2/models/{model}/versions/{version}/infer",
        "": "/v2/models/{model}/versions/{version}",
        "/ready": "/v2/models/{model}/versions/{version}/ready",
        "/predict": "/predict",
        "/plan": "/plan",
    }
    async with client_of(backend, root_path=prefix) as client:
        for path, route in below.items():
            body = {"/infer": V2_BODY, "/predict": {"inputs": "pay"}}.get(path)
            response = await client.request("GET" if body is None else "POST", prefix + path, json=body)
            assert (response.status_code, backend.counted[-1]) == (200, (route, 200))
        assert (await client.post(prefix + "/infer", json={})).json() == {"error": "inputs: Field required"}
    async with client_of(backend, root_path="/other") as client:
        assert predict_error(await client.get("/other/nothing"))[:2] == (404, "unknown_path")
        assert (await client.get("/other/openapi.json")).json()["servers"] == [{"url": "/other"}]


def references(node: object) -> list[str]:
    """Returns every `$ref` in a document."""
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [each for value in node.values() for each in references(value)]
    return [each for value in node for each in references(value)] if isinstance(node, list) else []


GENERATES = Signature(PromptCodec(8), TokenTask(16))


@pytest.mark.parametrize("signature", [TEXT, GENERATES], ids=["labels", "tokens"])
def test_openapi_is_valid(signature: Signature) -> None:
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


def test_openapi_describes_errors_in_their_format() -> None:
    document = openapi_document(TEXT)
    for path, schema in [("/predict", "ErrorBody"), ("/v2/models/{model}/infer", "V2Error")]:
        responses = document["paths"][path]["post"]["responses"]
        assert {"400", "404", "413", "422", "500", "503", "504"} <= set(responses)
        assert responses["503"]["content"]["application/json"]["schema"]["$ref"].endswith(f"/{schema}")


def test_routes_depend_on_whether_the_model_generates() -> None:
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
    all_routes = Routes, GenerateRoutes, StateRoutes, LivePage
    handled = [name for name in names for routes in all_routes if hasattr(routes, name)]
    of_versions = {"index", "load", "unload", "canary", "set_canary", "end_canary", "set_default"}
    assert len(names) == len(set(names))
    assert set(names) - set(handled) == of_versions
    over_grpc = {f"/{RPC_SERVICE}/ServerLive", f"/{RPC_SERVICE}/ServerReady", "/grpc.health.v1.Health/Check"}
    assert {"/v2/health/live", "/v2/health/ready"} | over_grpc == OPEN_PATHS
