from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.routing import Router

from deployments.ingress.api.http import build_app
from deployments.ingress.api.orders import Canary, LoadParameters
from deployments.ingress.versions.http import version_paths
from earlyexit.errors import ControlRefusedError
from tests.deployments.ingress.api.test_http import FakeBackend
from tests.deployments.ingress.versions.version_fakes import FakeDesk

SIDES = {"model": "intents", "default": "1", "canary": None}
CANARY = "/v2/models/intents/canary"


@pytest.fixture
def desk() -> FakeDesk:
    return FakeDesk()


def app(desk: FakeDesk) -> Router:
    return build_app(FakeBackend(versions=desk), more=version_paths(desk, desk, "intents", 2000))


@pytest.fixture
async def client(desk: FakeDesk) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app(desk)), base_url="http://test") as client:
        yield client


@pytest.mark.parametrize(("body", "ready_only"), [(b"", False), (b"{}", False), (b'{"ready": true}', True)])
async def test_the_index_is_tritons(
    client: httpx.AsyncClient, desk: FakeDesk, body: bytes, *, ready_only: bool
) -> None:
    response = await client.post("/v2/repository/index", content=body)
    assert response.json() == [{"name": "intents", "version": "1", "state": "READY", "reason": ""}]
    assert desk.orders == [("index", ready_only)]


@pytest.mark.parametrize("what", ["load", "unload"])
async def test_loading_takes_tritons_parameters(client: httpx.AsyncClient, desk: FakeDesk, what: str) -> None:
    parameters = {"version": "2", "unload_dependents": False}
    response = await client.post(f"/v2/repository/models/b/{what}", json={"parameters": parameters})
    assert (response.status_code, response.json()) == (200, {})
    assert desk.orders == [(what, "b", LoadParameters(version="2"))]


async def test_orders_answer_with_both_sides(client: httpx.AsyncClient, desk: FakeDesk) -> None:
    answers = [
        await client.get(CANARY),
        await client.put(CANARY, json={"version": "2", "share": 0.1, "compare_share": 0.01}),
        await client.delete(CANARY),
        await client.put("/v2/models/intents/default", json={"version": "2"}),
    ]
    assert [(each.status_code, each.json()) for each in answers] == [(200, SIDES)] * 4
    assert desk.orders == [Canary(version="2", share=0.1, compare_share=0.01), "end", ("default", "2")]


@pytest.mark.parametrize(
    ("method", "path", "body", "words"),
    [
        ("PUT", CANARY, {"share": 0.1}, "version: Field required"),
        ("PUT", CANARY, {"version": "2", "share": 2}, "share: Input should be less than or equal to 1"),
        ("PUT", "/v2/models/intents/default", {}, "version: Field required"),
        ("POST", "/v2/repository/index", {"reddy": True}, "reddy: Extra inputs are not permitted"),
        ("POST", "/v2/repository/models/b/load", {"parameters": {"file:1": ""}}, "parameters.file:1: Extra inputs"),
    ],
)
async def test_a_bad_order_is_a_400_that_says_why(
    client: httpx.AsyncClient, desk: FakeDesk, method: str, path: str, body: dict[str, object], words: str
) -> None:
    response = await client.request(method, path, json=body)
    assert response.status_code == 400
    assert words in response.json()["error"]
    assert desk.orders == []


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "canary"), ("PUT", "canary"), ("DELETE", "canary"), ("PUT", "default")]
)
async def test_another_models_canary_is_a_404(client: httpx.AsyncClient, method: str, path: str) -> None:
    response = await client.request(method, f"/v2/models/other/{path}")
    assert (response.status_code, response.json()) == (404, {"error": "unknown model 'other'; served is 'intents'"})


async def test_an_order_that_is_not_allowed_is_a_403(client: httpx.AsyncClient, desk: FakeDesk) -> None:
    desk.failure = ControlRefusedError("not by HTTP")
    response = await client.delete(CANARY)
    assert (response.status_code, response.json()) == (403, {"error": "not by HTTP"})


async def test_another_method_is_told_those_there_are(client: httpx.AsyncClient) -> None:
    response = await client.post(CANARY)
    assert (response.status_code, response.headers["allow"]) == (405, "GET, PUT, DELETE")
