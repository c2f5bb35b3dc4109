from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from deployments.access import AccessSettings
from deployments.ingress.access.gate import EVERYBODY, Gate, gate_of
from deployments.ingress.access.key_ring import KeyRing
from deployments.ingress.access.rates import Limit, RateLimits
from deployments.ingress.api.http import build_app
from deployments.ingress.versions.http import version_paths
from earlyexit.clock import ManualClock
from tests.deployments.ingress.api.test_http import ROUTES, V2_BODY, V2_INFER, FakeBackend, call, path_of

KEY, OTHER = "alice-0123456789", "bob-012345678901"
BEARER = {"authorization": f"Bearer {KEY}"}
OPEN = [("GET", "/v2/health/live"), ("GET", "/v2/health/ready")]
HERE = "https://example.org"


def ring() -> KeyRing:
    return KeyRing(AccessSettings(keys_env="KEYS"), {"KEYS": f"alice:{KEY},bob:{OTHER}"})


def gate(
    limit: Limit | None = None, *, keys: bool = True, clock: ManualClock | None = None, of: str = "requests"
) -> Gate:
    return Gate(
        ring=ring() if keys else None,
        limits=None if limit is None else RateLimits(limit, of),
        clock=clock or ManualClock(),
        counts_inputs=of == "inputs",
    )


def basic(password: str, user: str = "me") -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


def client_of(backend: FakeBackend, gate: Gate | None, **options: Any) -> httpx.AsyncClient:
    paths = version_paths(backend.versions, backend.versions, backend.card.name, backend.max_body_bytes)
    transport = httpx.ASGITransport(build_app(backend, gate, more=paths, **options))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@pytest.fixture
async def client(backend: FakeBackend) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(backend, gate()) as client:
        yield client


# Keys


@pytest.mark.parametrize(("method", "route"), ROUTES)
async def test_every_route_but_health_is_behind_the_keys(client: httpx.AsyncClient, method: str, route: str) -> None:
    without = await call(client, method, route)
    assert without.status_code == (200 if (method, route) in OPEN else 401)
    client.headers.update(BEARER)
    assert (await call(client, method, route)).status_code == 200


@pytest.mark.parametrize(
    "path", ["/nothing", "/dashboard/nothing.js", "/v2/health", "/v2/health/live/", "//v2/health/live"]
)
async def test_what_is_not_listed_as_open_is_behind_the_keys_even_where_nothing_is(
    client: httpx.AsyncClient, path: str
) -> None:
    assert (await client.get(path)).status_code == 401
    assert (await client.get(path, headers=BEARER)).status_code == 404


@pytest.mark.parametrize("authorization", [f"Bearer {KEY}", f"bearer {OTHER}", f"BEARER  {KEY} "])
async def test_a_known_key_is_let_in(client: httpx.AsyncClient, authorization: str) -> None:
    response = await client.post("/predict", json={"inputs": "pay"}, headers={"authorization": authorization})
    assert response.status_code == 200


@pytest.mark.parametrize(
    "authorization",
    [
        "Bearer",
        "Bearer ",
        "Bearer wrong-0123456789",
        KEY,
        f"Basic {KEY}",
        f"Digest {KEY}",
        basic(KEY),
        f"Bearer {KEY}x",
    ],
)
async def test_anything_else_is_a_401_that_quotes_nothing(
    client: httpx.AsyncClient, backend: FakeBackend, authorization: str
) -> None:
    response = await client.post("/predict", json={"inputs": "pay"}, headers={"authorization": authorization})
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
    error = response.json()["error"]
    assert error["kind"] == "unauthorized"
    assert error["message"] == "the API key is not known here; send the header `Authorization: Bearer <key>`"
    assert (backend.requests, backend.counted) == ([], [("access", 401)])


async def test_no_key_at_all_is_a_401_that_says_so_in_the_protocols_form(client: httpx.AsyncClient) -> None:
    response = await client.post(V2_INFER, json=V2_BODY)
    assert response.status_code == 401
    assert response.json() == {"error": "no API key was sent; send the header `Authorization: Bearer <key>`"}


# Pages


@pytest.mark.parametrize("path", ["/docs", "/dashboard", "/dashboard/live"])
async def test_a_browser_is_asked_for_a_password_on_pages(client: httpx.AsyncClient, path: str) -> None:
    asked = (await client.get(path)).headers["www-authenticate"]
    assert asked == 'Basic realm="offramp", charset="UTF-8"'
    assert (await client.get(path, headers={"authorization": basic(KEY)})).status_code in (200, 404)
    assert (await client.get(path, headers={"authorization": basic("no")})).status_code == 401


async def test_the_password_is_good_for_what_a_page_gets_and_not_for_what_it_would_post(
    client: httpx.AsyncClient,
) -> None:
    client.headers["authorization"] = basic(KEY, user="")
    assert (await client.get("/openapi.json")).status_code == 200
    assert (await client.post("/predict", json={"inputs": "pay"})).status_code == 401


@pytest.mark.parametrize("value", ["Basic !", "Basic /w==", "Basic", "Basic bm9uZQ=="])
async def test_a_password_that_is_none_is_refused(client: httpx.AsyncClient, value: str) -> None:
    assert (await client.get("/docs", headers={"authorization": value})).status_code == 401


# Rates


async def test_too_many_requests_are_a_429_with_the_time_to_wait(backend: FakeBackend) -> None:
    clock = ManualClock()
    async with client_of(backend, gate(Limit(rate_per_s=0.5, burst=2.0), clock=clock)) as client:
        client.headers.update(BEARER)
        statuses = [(await client.post("/predict", json={"inputs": "pay"})).status_code for _ in range(2)]
        refused = await client.post("/predict", json={"inputs": "pay"})
        assert [*statuses, refused.status_code] == [200, 200, 429]
        assert refused.headers["retry-after"] == "2"
        message = "too many requests: 0.5 per second are taken, 2 at once"
        assert refused.json()["error"] == {"kind": "rate_limit", "message": message}
        others = await client.post("/predict", json={"inputs": "pay"}, headers={"authorization": f"Bearer {OTHER}"})
        assert others.status_code == 200
        clock.advance(2.0)
        assert (await client.post("/predict", json={"inputs": "pay"})).status_code == 200
    assert backend.counted.count(("access", 429)) == 1


async def test_health_is_never_too_much(backend: FakeBackend) -> None:
    async with client_of(backend, gate(Limit(rate_per_s=1.0, burst=1.0), keys=False)) as client:
        assert [(await client.get("/v2/health/live")).status_code for _ in range(3)] == [200] * 3
        assert [(await client.get("/v2")).status_code for _ in range(2)] == [200, 429]


@pytest.mark.parametrize(("path", "one", "three"), [("/predict", "pay", ["pay"] * 3), (V2_INFER, None, None)])
async def test_a_rate_of_inputs_counts_those_of_predictions(
    backend: FakeBackend, path: str, one: str | None, three: list[str] | None, caplog: pytest.LogCaptureFixture
) -> None:
    texts = {"inputs": [{"name": "text", "shape": [3], "datatype": "BYTES", "data": ["pay"] * 3}]}
    body, single = ({"inputs": three}, {"inputs": one}) if three else (texts, V2_BODY)
    async with client_of(backend, gate(Limit(rate_per_s=1.0, burst=4.0), of="inputs")) as client:
        client.headers.update(BEARER)
        assert [(await client.get("/stats")).status_code for _ in range(9)] == [200] * 9
        answers = [await client.post(path, json=each) for each in (body, single, single)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert answers[2].headers["retry-after"] == "1"
    assert caplog.records == []


def test_settings_that_ask_for_nothing_make_no_gate() -> None:
    assert gate_of(None, ManualClock(), 1) is None
    assert gate_of(AccessSettings(cors_origins=(HERE,)), ManualClock(), 1) is None
    limited = gate_of(AccessSettings(rate_per_s=1.0), ManualClock(), 2)
    assert limited is not None
    assert limited.admit("GET", "/stats", None) == EVERYBODY


# The description


@pytest.mark.parametrize(("keys", "security"), [(True, [{"key": []}, {"page": []}]), (False, [])])
async def test_the_description_says_whether_a_key_is_needed(
    backend: FakeBackend, keys: bool, security: list[dict[str, Any]]
) -> None:
    async with client_of(backend, gate(Limit(rate_per_s=1.0, burst=9.0), keys=keys)) as client:
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


@pytest.mark.parametrize(("method", "route"), ROUTES)
async def test_without_keys_everything_is_open(backend: FakeBackend, method: str, route: str) -> None:
    async with client_of(backend, None) as client:
        assert (await client.request(method, path_of(route), json=V2_BODY)).status_code != 401


# Web sockets


@pytest.mark.parametrize("behind", [True, False], ids=["keys", "open"])
async def test_a_web_socket_is_refused(backend: FakeBackend, behind: bool) -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/predict", "headers": [], "query_string": b"", "root_path": ""}
    await build_app(backend, gate() if behind else None)(scope, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]
