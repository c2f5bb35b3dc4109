"""Tests of a service with API keys, and of its logs, which must hold nothing that a caller sent."""

from __future__ import annotations

import base64
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.keys import AccessSettings
from earlyexit.errors import RateLimitError
from offramp import Client
from tests.end_to_end.one_ray import OneRay
from tests.end_to_end.tiny_service import Tiny, one_stage, text_service

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("url")]

ALICE, BOB, CAROL = "alice-marker-7f3a9c", "bob-marker-51d0e2", "carol-marker-c44b1"
RATE_PER_S, BURST = 0.1, 30.0
TEXT = "zebra-marker-text"
MARKER = b"marker"
RELOAD_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("protected")
    write_keys(folder, f"alice:{ALICE}", f"bob:{BOB}")
    return folder


def write_keys(folder: Path, *lines: str) -> None:
    fresh = folder / "keys.new"
    fresh.write_text("\n".join(lines), encoding="utf-8")
    fresh.chmod(0o600)
    fresh.replace(folder / "keys")


@pytest.fixture(scope="module")
def url(one_ray: OneRay, tiny: Tiny, folder: Path) -> str:
    access = AccessSettings(
        keys_file=str(folder / "keys"), rate_per_s=RATE_PER_S, burst=BURST, cors_origins=("https://example.org",)
    )
    plan = one_stage(tiny.thresholds)  # a second stage would add a replica, and nothing to test
    return one_ray.serve(text_service(tiny, plan=plan, app="protected", access=access))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def basic(key: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"me:{key}".encode()).decode()}


def test_a_page_of_an_allowed_origin_may_send_requests(http: httpx.Client) -> None:
    preflight_headers = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    response = http.options("/predict", headers=preflight_headers)
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, "https://example.org")


def test_keys_are_read_again_when_their_file_changes(folder: Path, http: httpx.Client) -> None:
    write_keys(folder, f"alice:{ALICE}", f"bob:{BOB}", f"carol:{CAROL}")
    until_s = time.monotonic() + RELOAD_S
    while (status := http.get("/v2", headers=bearer(CAROL)).status_code) == 401 and time.monotonic() < until_s:
        time.sleep(0.2)
    assert status == 200


MARKED: list[tuple[str, str, dict[str, Any], int]] = [
    ("POST", "/predict", {"json": {"inputs": TEXT}}, 200),
    ("POST", "/predict", {"json": {"inputs": TEXT, "ids": [TEXT, TEXT]}}, 400),
    ("POST", "/predict", {"json": {"inputs": TEXT, TEXT: 1}}, 400),
    ("POST", "/predict", {"content": b'{"inputs": "' + TEXT.encode()}, 400),
    ("POST", "/predict", {"content": TEXT, "headers": {"Content-Encoding": TEXT}}, 415),
    ("POST", "/predict", {"json": {"inputs": TEXT * 1200}}, 413),
    ("POST", "/predict", {"json": {"inputs": f"{TEXT} " * 13}}, 422),
    ("POST", "/predict", {"json": {"inputs": TEXT, "timeout_s": 1e-6}}, 504),
    ("POST", f"/v2/models/{TEXT}/infer", {"json": {}}, 404),
    ("POST", "/v2/models/tiny/infer", {"json": {"inputs": [{"name": TEXT, "shape": [1], "datatype": "BYTES"}]}}, 400),
    ("POST", "/v2/models/tiny/infer", {"content": TEXT, "headers": {"Inference-Header-Content-Length": TEXT}}, 400),
    ("GET", f"/v2/models/{TEXT}", {}, 404),
    ("GET", f"/{TEXT}", {}, 404),
    ("GET", f"/predict?{TEXT}={TEXT}", {}, 405),
    ("GET", f"/plan/history?limit={TEXT}", {}, 400),
]


def test_logs_hold_nothing_that_callers_send(url: str, one_ray: OneRay, http: httpx.Client) -> None:
    """Last in the file. It fails requests in every way, with a mark in every field of a caller, then reads all logs."""
    http.headers.update(bearer(BOB))
    for method, path, arguments, status in MARKED:
        response = http.request(method, path, **arguments)
        assert (response.status_code, path) == (status, path), response.text
    for headers in (bearer(f"{TEXT}-no-key"), basic(f"{TEXT}-no-key"), {"Authorization": f"Digest {TEXT}"}):
        assert http.post("/predict", json={"inputs": TEXT}, headers=headers).status_code == 401
    assert httpx.post(f"{url}/predict", json={"inputs": TEXT}).status_code == 401, "without a key"
    statuses = [http.post("/predict", json={"inputs": TEXT}).status_code for _ in range(30)]
    assert set(statuses) == {200, 429}
    refused = http.post("/predict", json={"inputs": TEXT})
    assert (refused.status_code, refused.json()["error"]["kind"]) == (429, "rate_limit")
    assert 1 <= int(refused.headers["retry-after"]) <= 10
    with Client(url, api_key=BOB, max_attempts=1) as client, pytest.raises(RateLimitError, match="too many"):
        client.predict(TEXT)
    logs = Path(one_ray.order("logs"))
    found = [path for path in [*logs.rglob("*"), one_ray.log] if path.is_file()]
    assert any("ingress" in path.name and b"API keys were reloaded" in path.read_bytes() for path in found)
    assert [path.name for path in found if MARKER in path.read_bytes()] == []
    assert [path.name for path in found if b"Get dashboard http address failed" in path.read_bytes()] == []
