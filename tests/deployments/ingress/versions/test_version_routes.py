from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from deployments.api.bodies import Canary, LoadParameters
from earlyexit.errors import ControlRefusedError
from tests.deployments.ingress.api.faces import FakeBackend, client_of
from tests.deployments.ingress.versions.version_fakes import FakeDesk

SIDES = {"model": "intents", "default": "1", "canary": None}
CANARY = "/v2/models/intents/canary"


@pytest.fixture
def desk() -> FakeDesk:
    return FakeDesk()


@pytest.fixture
async def client(desk: FakeDesk) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(FakeBackend(versions=desk)) as client:
        yield client


async def test_the_index_is_tritons(client: httpx.AsyncClient, desk: FakeDesk) -> None:
    for body in (b"", b"{}", b'{"ready": true}'):
        response = await client.post("/v2/repository/index", content=body)
        assert response.json() == [{"name": "intents", "version": "1", "state": "READY", "reason": ""}]
    assert desk.orders == [("index", False), ("index", False), ("index", True)]


async def test_loading_takes_tritons_parameters(client: httpx.AsyncClient, desk: FakeDesk) -> None:
    parameters = {"version": "2", "unload_dependents": False}
    for what in ("load", "unload"):
        response = await client.post(f"/v2/repository/models/b/{what}", json={"parameters": parameters})
        assert (response.status_code, response.json()) == (200, {})
    assert desk.orders == [(what, "b", LoadParameters(version="2")) for what in ("load", "unload")]


async def test_orders_answer_with_both_sides(client: httpx.AsyncClient, desk: FakeDesk) -> None:
    answers = [
        await client.get(CANARY),
        await client.put(CANARY, json={"version": "2", "share": 0.1, "compare_share": 0.01}),
        await client.delete(CANARY),
        await client.put("/v2/models/intents/default", json={"version": "2"}),
    ]
    assert [(each.status_code, each.json()) for each in answers] == [(200, SIDES)] * 4
    assert desk.orders == [Canary(version="2", share=0.1, compare_share=0.01), "end", ("default", "2")]


async def test_a_bad_order_is_a_400_that_names_the_field(client: httpx.AsyncClient, desk: FakeDesk) -> None:
    bad: list[tuple[str, str, dict[str, Any], str]] = [
        ("PUT", CANARY, {"share": 0.1}, "version: "),
        ("PUT", CANARY, {"version": "2", "share": 2}, "share: "),
        ("PUT", "/v2/models/intents/default", {}, "version: "),
        ("POST", "/v2/repository/index", {"reddy": True}, "reddy: "),
        ("POST", "/v2/repository/models/b/load", {"parameters": {"file:1": ""}}, "parameters.file:1: "),
    ]
    for method, path, body, field in bad:
        response = await client.request(method, path, json=body)
        assert (response.status_code, field in response.json()["error"]) == (400, True), (path, body)
    assert desk.orders == []


async def test_another_models_canary_is_a_404(client: httpx.AsyncClient) -> None:
    for method, path in (("GET", "canary"), ("PUT", "canary"), ("DELETE", "canary"), ("PUT", "default")):
        response = await client.request(method, f"/v2/models/other/{path}")
        said = {"error": "unknown model 'other'; served is 'intents'"}
        assert (response.status_code, response.json()) == (404, said)


async def test_an_order_that_is_not_allowed_is_a_403(client: httpx.AsyncClient, desk: FakeDesk) -> None:
    desk.failure = ControlRefusedError("not by HTTP")
    response = await client.delete(CANARY)
    assert (response.status_code, response.json()) == (403, {"error": "not by HTTP"})


async def test_another_method_is_told_those_there_are(client: httpx.AsyncClient) -> None:
    response = await client.post(CANARY)
    assert (response.status_code, response.headers["allow"]) == (405, "GET, PUT, DELETE")
