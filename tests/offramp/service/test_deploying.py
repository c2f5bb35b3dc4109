from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from earlyexit.clock import ManualClock
from earlyexit.errors import InputError, OfframpError
from offramp.spec.deploying import (
    Dashboard,
    Waiting,
    applications_document,
    token_header,
    wait_until_gone,
    wait_until_running,
)
from tests.deployments.serve_status import application, serving

NODE = {
    "node_id": "a",
    "state": "ALIVE",
    "resources_total": {"CPU": 4.0, "emulated:V100": 2.0, "memory": 1e9},
    "labels": {"ray.io/node-id": "a"},
}


def deployment(wanted: int = 1, running: int = 1, status: str = "HEALTHY") -> dict[str, Any]:
    states = ["RUNNING"] * running + ["STARTING"] * (wanted - running)
    return {"status": status, "target_num_replicas": wanted, "replicas": [{"state": state} for state in states]}


class FakeRay:
    """A dashboard that gives one answer after the other, the last for ever, and keeps what it was told to run."""

    def __init__(self, *serves: dict[str, Any]) -> None:
        self.serves = list(serves)
        self.put: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/api/v0/nodes":
            return httpx.Response(200, json={"data": {"result": {"result": [NODE, NODE | {"state": "DEAD"}]}}})
        assert request.url.path == "/api/serve/applications/"
        if request.method == "PUT":
            self.put.append(json.loads(request.content))
            return httpx.Response(200)
        return httpx.Response(200, json=self.serves.pop(0) if len(self.serves) > 1 else self.serves[0])


def dashboard(answer: Any) -> Dashboard:
    return Dashboard(httpx.Client(base_url="http://ray:8265", transport=httpx.MockTransport(answer)))


class Patience:
    """A wait whose clock its sleeps advance."""

    def __init__(self, limit_s: float = 10.0) -> None:
        clock = ManualClock()
        self.said: list[str] = []
        self.waiting = Waiting(clock=clock, sleep=clock.advance, tell=self.said.append, limit_s=limit_s)


def test_the_inventory_is_of_nodes_alive_and_the_status_of_replicas() -> None:
    assert dashboard(FakeRay(serving())).inventory().counts == {"cpu": 4, "emulated:V100": 2}
    slots = {"split-emulated-V100-0": deployment(2, 1), "split-cpu-0": deployment()}
    serve = serving(application("demo") | {"deployments": slots})
    [found] = applications_document(serve)
    assert found["status"] == "RUNNING"
    assert found["deployments"] == [
        {"name": "split-emulated-V100-0", "status": "HEALTHY", "replicas": 1, "wanted": 2, "emulated": True},
        {"name": "split-cpu-0", "status": "HEALTHY", "replicas": 1, "wanted": 1, "emulated": False},
    ]


def test_waiting_tells_every_news_once_until_the_application_runs_or_is_gone() -> None:
    starting = serving(application("demo", status="DEPLOYING", a=deployment(2, 0, "UPDATING"), b=deployment()))
    running = serving(application("demo", a=deployment(2, 2), b=deployment()))
    patience = Patience()
    wait_until_running(dashboard(FakeRay(serving(), starting, starting, running)), "demo", patience.waiting)
    assert patience.said == [
        "NOT_STARTED: 0 of 0 deployments healthy, 0 of 0 replicas running",
        "DEPLOYING: 1 of 2 deployments healthy, 1 of 3 replicas running",
        "RUNNING: 2 of 2 deployments healthy, 3 of 3 replicas running",
    ]
    deleting = serving(application("demo", status="DELETING"))
    wait_until_gone(dashboard(FakeRay(deleting, deleting, serving())), "demo", Patience().waiting)
    with pytest.raises(OfframpError, match="still there after 3 s"):
        wait_until_gone(dashboard(FakeRay(deleting)), "demo", Patience(3.0).waiting)


def test_an_application_that_never_runs_ends_the_wait_with_serves_words() -> None:
    failed = application("demo", status="DEPLOY_FAILED") | {"message": "Traceback:\n  a\nPlanError: too many stages\n"}
    with pytest.raises(OfframpError, match="application 'demo': DEPLOY_FAILED: PlanError: too many stages"):
        wait_until_running(dashboard(FakeRay(serving(failed))), "demo", Patience().waiting)
    stuck = serving(application("demo", status="DEPLOYING", a=deployment(2, 1, "UPDATING")))
    with pytest.raises(OfframpError, match="does not run after 5 s: DEPLOYING: 0 of 1 deployments healthy, 1 of 2"):
        wait_until_running(dashboard(FakeRay(stuck)), "demo", Patience(5.0).waiting)


def refuse(_: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("Connection refused")


def says(status: int, text: str = "") -> Callable[[httpx.Request], httpx.Response]:
    return lambda _: httpx.Response(status, text=text)


AT = "http://ray:8265/api/serve/applications/"
TRACEBACK = "Traceback\n\n  ValueError: no such app \n  For further information"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (refuse, "no Ray dashboard answers at http://ray:8265: Connection refused"),
        (says(401), "http://ray:8265 refuses: 401; set RAY_AUTH_MODE=token and its token"),
        (says(400, TRACEBACK), f"{AT} says 400: ValueError: no such app"),
        (says(200, "<html>"), f"{AT} answers, but not as a Ray dashboard"),
        (says(200, '{"detail": "?"}'), f"{AT} answers, but not as a Ray dashboard"),
        (says(302, "elsewhere"), f"{AT} says 302: elsewhere"),
    ],
    ids=["no server", "no token", "refused", "a page", "another service", "elsewhere"],
)
def test_what_goes_wrong_is_one_line_with_the_address(answer: Any, words: str) -> None:
    with pytest.raises(OfframpError) as error:
        dashboard(answer).serve()
    assert str(error.value) == words


def test_a_token_is_sent_only_where_ray_is_told_to_use_one(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("from-file\n", encoding="utf-8")
    assert token_header({}) == {}
    assert token_header({"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "t"}) == {}
    assert token_header({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t"}) == {"Authorization": "Bearer t"}
    found = token_header({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)})
    assert found == {"Authorization": "Bearer from-file"}
    with pytest.raises(InputError, match=r"RAY_AUTH_MODE is token, and .*gone cannot be read"):
        token_header({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "gone")})


@pytest.mark.parametrize("token", ["", "sec\nret", "\ufeffsecret"], ids=["empty", "two lines", "a mark before it"])
def test_a_token_that_no_header_can_hold_is_refused_and_not_printed(token: str) -> None:
    with pytest.raises(InputError, match="holds what no HTTP header can") as refusal:
        token_header({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token})
    assert "sec" not in str(refusal.value)
