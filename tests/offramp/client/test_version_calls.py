from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

import httpx
import pytest

from earlyexit.clock import ManualClock
from earlyexit.errors import DeadlineError, InputError, OfframpError
from offramp import Client

SIDES = {"model": "intents", "default": "1"}
ROW = {"name": "intents", "version": "2", "reason": ""}


class FakeServer:
    """Says its name, gives one index after the other (the last for ever), and keeps what it was told."""

    def __init__(self, *states: str | None) -> None:
        self.states = list(states)
        self.under_its_path = [HTTPStatus.OK]
        self.orders: list[tuple[str, str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v2":
            return httpx.Response(200, json={"name": "offramp", "models": ["intents"]})
        if request.url.path == "/v2/repository/index":
            state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
            return httpx.Response(200, json=[] if state is None else [ROW | {"state": state, "reason": "why"}])
        if request.url.path == "/v2/models/intents/versions/2/ready":
            status = self.under_its_path.pop(0) if len(self.under_its_path) > 1 else self.under_its_path[0]
            return httpx.Response(status, json={})
        body = json.loads(request.content) if request.content else None
        self.orders.append((request.method, request.url.path, body))
        return httpx.Response(200, json=SIDES)


def client_of(server: Any) -> tuple[Client, ManualClock]:
    clock = ManualClock()
    return Client("http://server", transport=httpx.MockTransport(server), clock=clock, sleep=clock.advance), clock


def test_loading_waits_until_the_version_is_ready_or_did_not_start() -> None:
    server = FakeServer(None, "LOADING", "LOADING", "READY")
    client, clock = client_of(server)
    client.load("intents", "2", settings="{}", timeout_s=10.0)
    body = {"parameters": {"version": "2", "config": "{}"}}
    assert server.orders == [("POST", "/v2/repository/models/intents/load", body)]
    assert clock.now_s() == 1.5  # three polls of half a second
    client, _ = client_of(FakeServer("LOADING", "UNAVAILABLE"))
    with pytest.raises(OfframpError, match="version '2' of 'intents' did not start: why"):
        client.load("intents", "2")
    client, _ = client_of(lambda request: httpx.Response(403, json={"error": "not by HTTP"}))
    with pytest.raises(InputError, match=r"^not by HTTP"):
        client.versions()


@pytest.mark.parametrize("last", [HTTPStatus.OK, HTTPStatus.NOT_FOUND])
def test_a_version_that_runs_is_loaded_once_it_is_ready_under_its_path_or_not_found_there(last: HTTPStatus) -> None:
    server = FakeServer("READY")
    server.under_its_path = [HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.SERVICE_UNAVAILABLE, last]
    client, clock = client_of(server)
    client.load("intents", "2", timeout_s=10.0)
    assert clock.now_s() == 1.0


def test_waiting_for_a_version_ends_in_time() -> None:
    server = FakeServer("READY")
    server.under_its_path = [HTTPStatus.SERVICE_UNAVAILABLE]
    client, clock = client_of(server)
    with pytest.raises(DeadlineError, match="version '2' of 'intents' runs but was not ready in time"):
        client.load("intents", "2", timeout_s=3.0)
    assert clock.now_s() <= 3.0
    client, clock = client_of(FakeServer("LOADING"))
    with pytest.raises(DeadlineError, match="version '2' of 'intents' is LOADING after 3 s"):
        client.load("intents", "2", timeout_s=3.0)
    assert clock.now_s() <= 3.0


@pytest.mark.parametrize("state", [None, "UNAVAILABLE"])
def test_unloading_waits_until_the_version_is_gone(state: str | None) -> None:
    server = FakeServer("READY", "UNLOADING", state)
    client, clock = client_of(server)
    client.unload("intents", "2")
    assert server.orders == [("POST", "/v2/repository/models/intents/unload", {"parameters": {"version": "2"}})]
    assert clock.now_s() == 1.0
