"""Keys, passwords, rates and other sites' pages, over the routes of REST."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from deployments.api.access import ALL_CALLERS, RateLimits, gate_of
from deployments.api.http import build_api
from deployments.keys import AccessSettings
from earlyexit.clock import ManualClock
from tests.deployments.ingress.api.faces import BEARER, KEY, OTHER_KEY, V2_BODY, FakeBackend, client_of, gate
from tests.deployments.ingress.api.test_http import ROUTES, call, path_of

OPEN = [("GET", "/v2/health/live"), ("GET", "/v2/health/ready")]
HERE = "https://example.org"


def basic(password: str, user: str = "me") -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def client(backend: FakeBackend) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(backend, gate()) as client:
        yield client


async def predicted(client: httpx.AsyncClient, authorization: str) -> httpx.Response:
    return await client.post("/predict", json={"inputs": "pay"}, headers={"authorization": authorization})


# Keys


async def test_every_route_but_health_is_behind_the_keys(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    without = {each: (await call(client, *each)).status_code for each in ROUTES}
    assert without == {each: 200 if each in OPEN else 401 for each in ROUTES}
    client.headers.update(BEARER)
    assert {(await call(client, *each)).status_code for each in ROUTES} == {200}
    async with client_of(backend) as open_to_all:
        for method, route in ROUTES:
            assert (await open_to_all.request(method, path_of(route), json=V2_BODY)).status_code != 401


async def test_what_is_not_listed_as_open_is_behind_the_keys_even_where_nothing_is(client: httpx.AsyncClient) -> None:
    for path in ("/nothing", "/dashboard/nothing.js", "/v2/health", "/v2/health/live/", "//v2/health/live"):
        assert (await client.get(path)).status_code == 401, path
        assert (await client.get(path, headers=BEARER)).status_code == 404, path


async def test_below_a_route_prefix_the_same_paths_are_open(backend: FakeBackend) -> None:
    async with client_of(backend, gate(), root_path="/svc") as client:
        for path, status in (("/svc/v2/health/live", 200), ("/svc/v2", 401)):
            assert (await client.get(path)).status_code == status


async def test_a_known_key_is_let_in(client: httpx.AsyncClient) -> None:
    for authorization in (f"Bearer {KEY}", f"bearer {OTHER_KEY}", f"BEARER  {KEY} "):
        assert (await predicted(client, authorization)).status_code == 200


async def test_anything_else_is_a_401_that_quotes_nothing(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    wrong = ("Bearer", "Bearer ", "Bearer wrong-0123456789", KEY, f"Basic {KEY}", f"Digest {KEY}", f"Bearer {KEY}x")
    for authorization in (*wrong, basic(KEY)):
        response = await predicted(client, authorization)
        assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer"), authorization
        message = "the API key is not known here; send the header `Authorization: Bearer <key>`"
        assert response.json()["error"] == {"kind": "unauthorized", "message": message}
    assert (backend.requests, set(backend.counted)) == ([], {("access", 401)})


# Pages


async def test_a_browser_is_asked_for_a_password_on_pages(client: httpx.AsyncClient) -> None:
    for path in ("/docs", "/dashboard", "/dashboard/live"):
        asked = (await client.get(path)).headers["www-authenticate"]
        assert asked == 'Basic realm="offramp", charset="UTF-8"'
        assert (await client.get(path, headers={"authorization": basic(KEY)})).status_code in (200, 404)
        assert (await client.get(path, headers={"authorization": basic("no")})).status_code == 401
    for none in ("Basic !", "Basic /w==", "Basic", "Basic bm9uZQ=="):
        assert (await client.get("/docs", headers={"authorization": none})).status_code == 401, none


async def test_the_password_is_good_for_what_a_page_gets_and_not_for_what_it_would_post(
    client: httpx.AsyncClient,
) -> None:
    password = basic(KEY, user="")
    assert (await client.get("/openapi.json", headers={"authorization": password})).status_code == 200
    assert (await predicted(client, password)).status_code == 401


# Rates


async def test_too_many_requests_are_a_429_with_the_time_to_wait(backend: FakeBackend) -> None:
    clock = ManualClock()
    async with client_of(backend, gate(RateLimits(0.5, 2.0), clock=clock)) as client:
        *taken, refused = [await predicted(client, f"Bearer {KEY}") for _ in range(3)]
        assert [each.status_code for each in (*taken, refused)] == [200, 200, 429]
        assert refused.headers["retry-after"] == "2"
        message = "too many requests: 0.5 per second are taken, 2 at once"
        assert refused.json()["error"] == {"kind": "rate_limit", "message": message}
        assert (await predicted(client, f"Bearer {OTHER_KEY}")).status_code == 200
        clock.advance(2.0)
        assert (await predicted(client, f"Bearer {KEY}")).status_code == 200
    assert backend.counted.count(("access", 429)) == 1


async def test_health_is_never_too_much(backend: FakeBackend) -> None:
    async with client_of(backend, gate(RateLimits(1.0, 1.0), keys=False)) as client:
        assert [(await client.get("/v2/health/live")).status_code for _ in range(3)] == [200] * 3
        assert [(await client.get("/v2")).status_code for _ in range(2)] == [200, 429]


async def test_a_rate_of_inputs_counts_those_of_predictions_alone(backend: FakeBackend) -> None:
    async with client_of(backend, gate(RateLimits(1.0, 4.0, "inputs"))) as client:
        client.headers.update(BEARER)
        assert [(await client.get("/stats")).status_code for _ in range(9)] == [200] * 9
        answers = [await client.post("/predict", json={"inputs": each}) for each in (["pay"] * 3, "pay", "pay")]
    assert [answer.status_code for answer in answers] == [200, 200, 429]


def test_settings_that_ask_for_nothing_make_no_gate() -> None:
    assert gate_of(None, ManualClock(), 1) is None
    assert gate_of(AccessSettings(cors_origins=(HERE,)), ManualClock(), 1) is None
    limited = gate_of(AccessSettings(rate_per_s=1.0), ManualClock(), 2)
    assert limited is not None
    assert limited.admit("GET", "/stats", None) == ALL_CALLERS


# The description


@pytest.mark.parametrize(("keys", "security"), [(True, [{"key": []}, {"page": []}]), (False, [])])
async def test_the_description_says_whether_a_key_is_needed(
    backend: FakeBackend, keys: bool, security: list[dict[str, Any]]
) -> None:
    async with client_of(backend, gate(RateLimits(1.0, 9.0), keys=keys)) as client:
        document = (await client.get("/openapi.json", headers=BEARER)).json()
    assert document["security"] == security
    assert document["paths"]["/v2/health/live"]["get"]["security"] == []
    assert "security" not in document["paths"]["/predict"]["post"]


# Other sites' pages


async def test_a_browsers_question_beforehand_is_answered_without_a_key(backend: FakeBackend) -> None:
    asked = {"origin": HERE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with client_of(backend, gate(), cors_origins=(HERE,)) as client:
        allowed = await client.options("/predict", headers=asked)
        refused = await client.options("/predict", headers=asked | {"origin": "https://elsewhere.org"})
        without_key = await client.post("/predict", json={"inputs": "pay"}, headers={"origin": HERE})
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, HERE)
    assert refused.status_code == 400
    assert (without_key.status_code, without_key.headers["access-control-allow-origin"]) == (401, HERE)
    assert "access-control-allow-credentials" not in allowed.headers


async def test_no_origin_is_named_unless_it_is_asked_for(backend: FakeBackend) -> None:
    async with client_of(backend, None) as client:
        response = await client.get("/v2", headers={"origin": HERE})
        asked = await client.options("/v2", headers={"origin": HERE, "access-control-request-method": "GET"})
    assert "access-control-allow-origin" not in response.headers
    assert asked.status_code == 405


# Web sockets


@pytest.mark.parametrize("behind", [True, False], ids=["keys", "open"])
async def test_a_web_socket_is_refused(backend: FakeBackend, behind: bool) -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/predict", "headers": [], "query_string": b"", "root_path": ""}
    await build_api(backend, gate=gate() if behind else None).router(scope, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]
