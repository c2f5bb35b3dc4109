from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import httpx
import pytest

from deployments.keys import AccessSettings
from deployments.settings import ServeSettings
from earlyexit.errors import InputError, ModelFolderError, OfframpError, PlanError
from earlyexit.network.boundary import Split
from offramp.commands.serve import exposure_notes
from offramp.commands.service import Dashboard, applications_document, token_header
from offramp.spec.application import application_settings, resolve_plan, with_environment_keys
from offramp.spec.documents import ApplicationDocument, ServedModelDocument
from offramp.spec.file import at_folder
from optimizer.plans.plan import Plan, PolicySpec, Stage, serial_plan, stock_plan
from optimizer.plans.plan_file import write_plan
from tests.clock import ManualClock
from tests.deployments.serve_status import application, serving
from tests.exit_records import calibration_card

KEYS = {"OFFRAMP_API_KEYS": "alice:alice-0123456789"}
PLAN = stock_plan(3, batch=7)


def settings(access: AccessSettings | None = None) -> ServeSettings:
    return ServeSettings(model="m", plan=PLAN, access=access)


def test_settings_of_the_service_file_reach_replicas(tmp_path: Path, model: Path) -> None:
    given = {"model": {"folder": "m"}, "access": {"keys_file": "../keys"}, "repository": {"folder": "versions"}}
    document = ApplicationDocument.model_validate(given)
    found = application_settings(document, PLAN, tmp_path / "services")
    assert found.model == str(tmp_path / "services" / "m")
    assert found.access == AccessSettings(keys_file=str(tmp_path / "keys"))
    assert found.repository.folder == str(tmp_path / "services" / "versions")
    moved = at_folder(settings(AccessSettings(keys_file="/home/me/keys")), PurePosixPath("/srv/offramp"))
    assert moved.access == AccessSettings(keys_file="/srv/offramp/keys")
    splits = (Split(first=0, end=2, batch=8, tokens=64), Split(first=2, end=3, batch=8))
    plan = Plan(stages=(Stage(device="cpu", replicas=1, splits=splits),))
    write_plan(plan, tmp_path / "tokens.yaml")
    read = resolve_plan(str(tmp_path / "tokens.yaml"), model)
    served = application_settings(ApplicationDocument(model=ServedModelDocument(folder=str(model))), read)
    assert ServeSettings.model_validate_json(served.model_dump_json()).plan.splits == splits


def test_a_built_in_plan_has_batches_of_32_and_calibrated_thresholds(model: Path) -> None:
    assert resolve_plan("stock", model) == stock_plan(3, batch=32, device="cpu", replicas=1)
    told = resolve_plan("stock", model, batch=4, replicas=2, device="cuda")
    assert told == stock_plan(3, batch=4, device="cuda", replicas=2)
    thresholds = {0: 0.4, 1: 0.5}
    (model / "calibration.json").write_text(calibration_card(thresholds).model_dump_json(), encoding="utf-8")
    assert resolve_plan("serial", model) == serial_plan(3, (0, 1), PolicySpec(thresholds=thresholds), batch=32)
    assert resolve_plan("early-exit", model).ramps == (0, 1)


def test_a_plan_of_a_file_is_taken_or_refused(model: Path, tmp_path: Path) -> None:
    plan_file = str(tmp_path / "plan.yaml")
    write_plan(PLAN, tmp_path / "plan.yaml")
    assert resolve_plan(plan_file, model) == PLAN
    with pytest.raises(InputError, match=r"--batch and --device: only for built-in plans; .* sets this"):
        resolve_plan(plan_file, model, batch=32, device="cpu")
    with pytest.raises(PlanError, match="--plan serail: no such file; built-in plans are stock, early-exit, serial"):
        resolve_plan("serail", model, batch=4)
    with pytest.raises(ModelFolderError, match="is not calibrated; run: offramp calibrate"):
        resolve_plan("serial", model)
    with pytest.raises(PlanError, match="unknown device 'tpu'; known: cpu, cuda"):
        resolve_plan("stock", model, device="tpu")


@pytest.mark.parametrize(
    ("named", "environment", "access"),
    [
        pytest.param(None, {}, None, id="nothing"),
        pytest.param(None, KEYS, AccessSettings(keys_env="OFFRAMP_API_KEYS"), id="environment"),
        pytest.param(
            AccessSettings(rate_per_s=5.0), KEYS, AccessSettings(rate_per_s=5.0, keys_env="OFFRAMP_API_KEYS"), id="rate"
        ),
        pytest.param(AccessSettings(keys_file="/k"), KEYS, AccessSettings(keys_file="/k"), id="file"),
    ],
)
def test_keys_of_the_environment_are_used_if_none_are_named(
    named: AccessSettings | None,
    environment: dict[str, str],
    access: AccessSettings | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.environ", environment)
    found = with_environment_keys(named)
    assert found == access
    assert "alice" not in str(found)


@pytest.mark.parametrize(
    ("host", "ray_is_open", "has_keys", "mode", "words"),
    [
        ("127.0.0.1", False, False, "disabled", []),
        ("0.0.0.0", False, True, "token", []),
        ("10.0.0.1", False, False, "token", ["without API keys"]),
        ("0.0.0.0", True, True, "token", ["as --metrics-port does"]),
        ("0.0.0.0", True, False, "disabled", ["without API keys", "opens them to all"]),
    ],
)
def test_open_ports_are_reported(
    host: str, ray_is_open: bool, has_keys: bool, mode: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    notes = exposure_notes(host, has_keys=has_keys, ray_is_open=ray_is_open)
    assert [word in note for word, note in zip(words, notes, strict=True)] == [True] * len(words)


NODE = {
    "node_id": "a",
    "state": "ALIVE",
    "resources_total": {"CPU": 4.0, "emulated:V100": 2.0, "memory": 1e9},
    "labels": {"ray.io/node-id": "a"},
}


def deployment(wanted: int = 1, running: int = 1, status: str = "HEALTHY") -> dict[str, Any]:
    states = ["RUNNING"] * running + ["STARTING"] * (wanted - running)
    replicas = [{"state": state} for state in states]
    return {"status": status, "target_num_replicas": wanted, "replicas": replicas, "message": ""}


class FakeRay:
    """A dashboard that gives answers in order, repeats the last one, and records the applications."""

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
    clock = ManualClock()  # which its sleeps advance
    client = httpx.Client(base_url="http://ray:8265", transport=httpx.MockTransport(answer))
    return Dashboard(client, clock, clock.advance)


def test_the_inventory_counts_living_nodes_and_the_status_counts_replicas() -> None:
    assert dashboard(FakeRay(serving())).inventory().counts == {"cpu": 4, "emulated:V100": 2}
    slots = {"split-emulated-V100-0": deployment(2, 1), "split-cpu-0": deployment()}
    serve = serving(application("demo") | {"deployments": slots})
    [found] = applications_document(serve)
    assert found["status"] == "RUNNING"
    assert found["deployments"] == [
        {"name": "split-emulated-V100-0", "status": "HEALTHY", "replicas": 1, "wanted": 2, "emulated": True},
        {"name": "split-cpu-0", "status": "HEALTHY", "replicas": 1, "wanted": 1, "emulated": False},
    ]


def test_waiting_reports_each_change_once_until_the_application_runs_or_is_gone() -> None:
    starting = serving(application("demo", status="DEPLOYING", a=deployment(2, 0, "UPDATING"), b=deployment()))
    running = serving(application("demo", a=deployment(2, 2), b=deployment()))
    said: list[str] = []
    dashboard(FakeRay(serving(), starting, starting, running)).wait_until_running("demo", 10.0, said.append)
    assert said == [
        "NOT_STARTED: 0 of 0 deployments healthy, 0 of 0 replicas running",
        "DEPLOYING: 1 of 2 deployments healthy, 1 of 3 replicas running",
        "RUNNING: 2 of 2 deployments healthy, 3 of 3 replicas running",
    ]
    deleting = serving(application("demo", status="DELETING"))
    dashboard(FakeRay(deleting, deleting, serving())).wait_until_gone("demo", 10.0)
    with pytest.raises(OfframpError, match="still exists after 3 s"):
        dashboard(FakeRay(deleting)).wait_until_gone("demo", 3.0)


def test_an_application_that_fails_ends_the_wait_with_serves_message() -> None:
    failed = application("demo", status="DEPLOY_FAILED") | {"message": "Traceback:\n  a\nPlanError: too many stages\n"}
    with pytest.raises(OfframpError, match="application 'demo': DEPLOY_FAILED: PlanError: too many stages"):
        dashboard(FakeRay(serving(failed))).wait_until_running("demo", 10.0, print)
    trace = (
        'RuntimeError: Traceback:\n  File "a.py", line 2\n    load()\n    ^^^^^^\nModelError: m is broken:\n\tno b\n'
    )
    failed |= {"deployments": {"a": deployment(), "b": deployment(status="DEPLOY_FAILED") | {"message": trace}}}
    assert applications_document(serving(failed))[0]["message"] == "ModelError: m is broken: no b"
    stuck = serving(application("demo", status="DEPLOYING", a=deployment(2, 1, "UPDATING")))
    stuck["applications"]["demo"]["deployments"]["a"]["message"] = f"1 replica waits {'for ' * 100}a core"
    words = "does not run after 5 s: DEPLOYING: 0 of 1 deployments healthy, 1 of 2 .* 1 replica waits .* a core$"
    with pytest.raises(OfframpError, match=words):
        dashboard(FakeRay(stuck)).wait_until_running("demo", 5.0, print)


def refuse(_: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("Connection refused")


def says(status: int, text: str = "") -> Callable[[httpx.Request], httpx.Response]:
    return lambda _: httpx.Response(status, text=text)


AT = "http://ray:8265/api/serve/applications/"
NO_OBJECT = "the answer: Input should be a valid dictionary or instance of Object"
TRACEBACK = "Traceback\n\n  ValueError: no such app \n  For further information"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (refuse, "no Ray dashboard answers at http://ray:8265 (`offramp serve` has none): Connection refused"),
        (says(401), "http://ray:8265 refuses with 401: set RAY_AUTH_MODE=token and its token"),
        (says(400, TRACEBACK), f"{AT} answers 400: ValueError: no such app"),
        (says(200, "<html>"), f"{AT} does not answer as a Ray dashboard does: '<html>'; {NO_OBJECT}"),
    ],
    ids=["no server", "no token", "refused", "a page"],
)
def test_an_error_is_one_line_with_the_address(answer: Any, words: str) -> None:
    with pytest.raises(OfframpError) as error:
        dashboard(answer).serve()
    assert str(error.value) == words


def test_a_token_is_sent_only_where_ray_is_told_to_use_one_and_never_printed(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("from-file\n", encoding="utf-8")
    assert token_header({}) == {}
    assert token_header({"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "t"}) == {}
    assert token_header({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t"}) == {"Authorization": "Bearer t"}
    found = token_header({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)})
    assert found == {"Authorization": "Bearer from-file"}
    with pytest.raises(InputError, match=r"RAY_AUTH_MODE is token, and .*gone cannot be read"):
        token_header({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "gone")})
    for token in ("", "sec\nret", "\ufeffsecret"):
        with pytest.raises(InputError, match="has characters that an HTTP header cannot hold") as refusal:
            token_header({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token})
        assert "sec" not in str(refusal.value)
