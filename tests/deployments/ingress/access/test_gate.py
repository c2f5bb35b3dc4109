"""Access control: reloaded keys, passwords, rate limits and cross-origin requests."""

from __future__ import annotations

import base64
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.api.access import Gate
from deployments.api.http import build_api
from deployments.keys import AccessSettings
from earlyexit.errors import RateLimitError
from tests.clock import ManualClock
from tests.deployments.ingress.api.faces import BEARER, KEY, OTHER_KEY, V2_BODY, FakeBackend, client_of, gate
from tests.deployments.ingress.api.test_http import ROUTES, call, path_of

OPEN = [("GET", "/v2/health/live"), ("GET", "/v2/health/ready")]
HERE = "https://example.org"


def basic(password: str, user: str = "me") -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.fixture
async def client(backend: FakeBackend) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(backend, gate()) as client:
        yield client


async def predicted(client: httpx.AsyncClient, authorization: str) -> httpx.Response:
    return await client.post("/predict", json={"inputs": "pay"}, headers={"authorization": authorization})


# Keys


async def test_every_route_except_health_needs_a_key(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    without = {each: (await call(client, *each)).status_code for each in ROUTES}
    assert without == {each: 200 if each in OPEN else 401 for each in ROUTES}
    client.headers.update(BEARER)
    assert {(await call(client, *each)).status_code for each in ROUTES} == {200}
    async with client_of(backend) as open_to_all:
        for method, route in ROUTES:
            assert (await open_to_all.request(method, path_of(route), json=V2_BODY)).status_code != 401


async def test_every_path_that_is_not_open_needs_a_key_even_if_it_does_not_exist(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    for path in ("/nothing", "/dashboard/nothing.js", "/v2/health", "/v2/health/live/", "//v2/health/live"):
        assert (await client.get(path)).status_code == 401, path
        assert (await client.get(path, headers=BEARER)).status_code == 404, path
    async with client_of(backend, gate(), root_path="/svc") as below:
        for path, status in (("/svc/v2/health/live", 200), ("/svc/v2", 401)):
            assert (await below.get(path)).status_code == status


async def test_only_a_known_key_is_admitted(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    for authorization in (f"Bearer {KEY}", f"bearer {OTHER_KEY}", f"BEARER  {KEY} "):
        assert (await predicted(client, authorization)).status_code == 200
    backend.requests.clear()
    backend.counted.clear()
    wrong = ("Bearer", "Bearer ", "Bearer wrong-0123456789", KEY, f"Basic {KEY}", f"Digest {KEY}", f"Bearer {KEY}x")
    for authorization in (*wrong, basic(KEY)):
        response = await predicted(client, authorization)
        assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer"), authorization
        message = "the API key is unknown; send the header `Authorization: Bearer <key>`; commands: set OFFRAMP_API_KEY"
        assert response.json()["error"] == {"kind": "unauthorized", "message": message}
    assert (backend.requests, set(backend.counted)) == ([], {("access", 401)})


# Pages


async def test_browsers_may_send_the_key_as_a_password_but_not_to_post(client: httpx.AsyncClient) -> None:
    password = basic(KEY, user="")
    assert (await client.get("/openapi.json", headers={"authorization": password})).status_code == 200
    assert (await predicted(client, password)).status_code == 401
    for path in ("/docs", "/dashboard", "/dashboard/live"):
        asked = (await client.get(path)).headers["www-authenticate"]
        assert asked == 'Basic realm="offramp", charset="UTF-8"'
        assert (await client.get(path, headers={"authorization": basic(KEY)})).status_code in (200, 404)
        assert (await client.get(path, headers={"authorization": basic("no")})).status_code == 401
    for none in ("Basic !", "Basic /w==", "Basic", "Basic bm9uZQ=="):
        assert (await client.get("/docs", headers={"authorization": none})).status_code == 401, none


# Rates


async def test_too_many_requests_except_health_checks_get_a_429_with_retry_after(backend: FakeBackend) -> None:
    clock = ManualClock()
    async with client_of(backend, gate(0.5, 2.0, clock=clock)) as client:
        *taken, refused = [await predicted(client, f"Bearer {KEY}") for _ in range(3)]
        assert [each.status_code for each in (*taken, refused)] == [200, 200, 429]
        assert refused.headers["retry-after"] == "2"
        message = "too many requests: the limit is 0.5 per second, and 2 at once"
        assert refused.json()["error"] == {"kind": "rate_limit", "message": message}
        assert (await predicted(client, f"Bearer {OTHER_KEY}")).status_code == 200
        clock.advance(2.0)
        assert (await predicted(client, f"Bearer {KEY}")).status_code == 200
    assert backend.counted.count(("access", 429)) == 1
    async with client_of(backend, gate(1.0, 1.0, keys=False)) as client:
        assert [(await client.get("/v2/health/live")).status_code for _ in range(3)] == [200] * 3
        assert [(await client.get("/v2")).status_code for _ in range(2)] == [200, 429]


def test_without_keys_and_rates_every_caller_is_admitted() -> None:
    Gate(AccessSettings(cors_origins=(HERE,)), ManualClock()).admit("POST", "/predict", None)
    assert Gate(AccessSettings(rate_per_s=1.0), ManualClock(), 2).rate_per_s == 0.5


# OpenAPI


async def test_openapi_states_whether_a_key_is_needed(backend: FakeBackend) -> None:
    for keys in (True, False):
        async with client_of(backend, gate(1.0, 9.0, keys=keys)) as client:
            document = (await client.get("/openapi.json", headers=BEARER)).json()
        assert document["security"] == ([{"key": []}, {"page": []}] if keys else [])
        assert document["paths"]["/v2/health/live"]["get"]["security"] == []
        assert "security" not in document["paths"]["/predict"]["post"]


# Cross-origin requests


@pytest.mark.parametrize("method", ["POST", "PUT"])
async def test_preflight_requests_need_no_key(backend: FakeBackend, method: str) -> None:
    asked = {"origin": HERE, "access-control-request-method": method}
    asked["access-control-request-headers"] = "authorization,x-stainless-os"  # of the openai package for browsers
    async with client_of(backend, gate(), cors_origins=(HERE,)) as client:
        allowed = await client.options("/predict", headers=asked)
        refused = await client.options("/predict", headers=asked | {"origin": "https://elsewhere.org"})
        without_key = await client.post("/predict", json={"inputs": "pay"}, headers={"origin": HERE})
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, HERE)
    assert refused.status_code == 400
    assert (without_key.status_code, without_key.headers["access-control-allow-origin"]) == (401, HERE)
    assert "access-control-allow-credentials" not in allowed.headers


async def test_there_are_no_cors_headers_by_default(backend: FakeBackend) -> None:
    async with client_of(backend, None) as client:
        response = await client.get("/v2", headers={"origin": HERE})
        asked = await client.options("/v2", headers={"origin": HERE, "access-control-request-method": "GET"})
    assert "access-control-allow-origin" not in response.headers
    assert asked.status_code == 405


# Web sockets


async def test_a_web_socket_is_refused_with_and_without_keys(backend: FakeBackend) -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/predict", "headers": [], "query_string": b"", "root_path": ""}
    for each in (gate(), None):
        await build_api(backend, gate=each)(scope, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"] * 2


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    put(path, f"alice:{KEY}\n")
    return path


def owner(gate: Gate, key: str) -> str | None:
    return None if gate.keys is None else gate.keys.owner(key)


def put(path: Path, text: str) -> None:
    """Replaces a file by another one, as editors do."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.chmod(0o600)
    fresh.replace(path)


async def test_only_a_changed_key_file_is_reloaded_and_a_variable_is_read_once(path: Path) -> None:
    ring = Gate(AccessSettings(keys_file=str(path)), ManualClock())
    before = ring.keys
    ring.reload()
    assert ring.keys is before
    put(path, f"bob:{OTHER_KEY}\n")
    ring.reload()
    assert (owner(ring, KEY), owner(ring, OTHER_KEY)) == (None, "bob")
    ring = Gate(AccessSettings(keys_env="KEYS"), ManualClock(), environment={"KEYS": KEY})
    await ring.watch()
    assert owner(ring, KEY) is not None


@pytest.mark.parametrize("text", [f"bob:{OTHER_KEY[:5]}\n", "", None], ids=["short", "empty", "gone"])
def test_an_invalid_key_file_is_logged_once_without_its_text(
    path: Path, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    ring = Gate(AccessSettings(keys_file=str(path)), ManualClock())
    if text is None:
        path.unlink()
    else:
        put(path, text)
    ring.reload()
    ring.reload()
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith("the API keys were not reloaded: ")
    assert OTHER_KEY[:5] not in record.getMessage()
    assert owner(ring, KEY) == "alice"


# A rate of 2 requests per second and a burst of 3. Each row: the second of each request, and the waiting times.
WAITS = {
    "a burst passes, then the rate": ([10.0] * 4 + [10.5] * 2, [0.0, 0.0, 0.0, 0.5, 0.0, 0.5]),
    "a refusal takes nothing": ([0.0] * 5 + [0.5], [0.0, 0.0, 0.0, 0.5, 0.5, 0.0]),
    "a pause fills the bucket and no more": ([0.0] * 3 + [1000.0] * 4, [0.0] * 6 + [0.5]),
}


@pytest.mark.parametrize(("taken", "waits_s"), WAITS.values(), ids=WAITS)
def test_requests_above_the_rate_are_refused_with_the_waiting_time(taken: list[float], waits_s: list[float]) -> None:
    clock, found = ManualClock(), []
    limited = gate(2.0, 3.0, keys=False, clock=clock)
    for now_s in taken:
        clock.advance(now_s - clock.now_s())
        try:
            limited.admit("GET", "/stats", None)
            found.append(0.0)
        except RateLimitError as refusal:
            found.append(refusal.retry_after_s)
    assert found == waits_s


@pytest.mark.parametrize(
    ("rate_per_s", "burst", "num_ingresses", "share"),
    [
        (10.0, 20.0, 1, (10.0, 20.0)),
        (10.0, 20.0, 4, (2.5, 5.0)),
        (10.0, 20.0, 40, (0.25, 1.0)),
        (10.0, None, 1, (10.0, 10.0)),
        (0.5, None, 1, (0.5, 1.0)),
    ],
)
def test_each_ingress_has_its_share_of_the_rate_and_the_burst(
    rate_per_s: float, burst: float | None, num_ingresses: int, share: tuple[float, float]
) -> None:
    limited = Gate(AccessSettings(rate_per_s=rate_per_s, burst=burst), ManualClock(), num_ingresses)
    assert (limited.rate_per_s, limited.burst) == share
