from __future__ import annotations

from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from deployments.settings import ServeSettings
from tests.offramp.cli.runs import Answering, Captured, printed, run, serving, url_of
from tests.offramp.service.service_folders import write_model

SIDE = {"requests": 90, "errors": {}, "p50_s": 0.01, "p99_s": 0.02, "exits": {"0": 60, "5": 30}, "agreement": 0.9945}
SIDES = {
    "model": "m",
    "default": "1",
    "canary": {"version": "2", "share": 0.1, "compare_share": 0.05},
    "versions": {"1": SIDE, "2": SIDE | {"requests": 10, "errors": {"deadline": 1}, "agreement": None, "p99_s": None}},
    "compared": {"inputs": 400, "same": 395, "agreement": 0.9875, "requests_failed": 0, "requests_skipped": 0},
}
SERVICE = """
schema_version: 1
name: second
model:
  folder: model
  version: "2"
  latency:
    cpu: {batch: [1], block_s: [[0.01], [0.01], [0.01]], ramp_s: [[0.001], [0.001]]}
slo: {latency_s: 1.0}
cluster: {devices: {cpu: {count: 2}}}
planner: {strategy: serial, control: false}
"""


class FakeService(ThreadingHTTPServer):
    """A service that starts and stops versions at once."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.orders: list[tuple[str, str, Any]] = []
        self.keys: set[str | None] = set()
        self.loaded = {"1"}


class Handler(Answering):
    server: FakeService

    def do_GET(self) -> None:
        self.server.keys.add(self.headers["Authorization"])
        self.say({"name": "offramp", "models": ["m"]} if self.path == "/v2" else SIDES)

    def do_POST(self) -> None:
        body = self._take()
        if self.path.endswith("/index"):  # without reasons, as Triton answers
            self.say([{"name": "m", "version": each, "state": "READY"} for each in sorted(self.server.loaded)])
            return
        version = body["parameters"]["version"]
        change = self.server.loaded.add if self.path.endswith("/load") else self.server.loaded.discard
        change(version)
        self.say({})

    def do_PUT(self) -> None:
        self._take()
        self.say(SIDES)

    do_DELETE = do_PUT

    def _take(self) -> Any:
        body = self.take()
        self.server.keys.add(self.headers["Authorization"])
        self.server.orders.append((self.command, self.path, body))
        return body


@pytest.fixture
def service() -> Iterator[FakeService]:
    yield from serving(FakeService())


def test_versions_can_be_listed_and_promoted(service: FakeService, capsys: Captured) -> None:
    assert run("versions", "--url", url_of(service)) == 0
    assert "READY" in capsys.readouterr().out
    assert printed(capsys, "versions", "--url", url_of(service))[0]["version"] == "1"
    assert run("promote", "--url", url_of(service), "--version", "2") == 0
    assert service.orders[-1] == ("PUT", "/v2/models/m/default", {"version": "2"})
    assert "version 1" in capsys.readouterr().out


def test_a_canary_begins_shows_itself_and_ends(service: FakeService, capsys: Captured) -> None:
    assert run("canary", "--url", url_of(service), "--version", "2", "--share", "0.1", "--compare", "0.05") == 0
    said = capsys.readouterr().out
    assert "m: version 1, and 2 for 10.0% of the requests" in said
    assert "they agree on 98.75%" in said
    assert "99.45%" in said
    assert printed(capsys, "canary", "--url", url_of(service), "--end") == SIDES
    assert run("canary", "--url", url_of(service)) == 0
    path = "/v2/models/m/canary"
    assert service.orders == [
        ("PUT", path, {"version": "2", "share": 0.1, "compare_share": 0.05}),
        ("DELETE", path, None),
    ]


def test_the_key_of_the_environment_or_a_file_is_sent(
    service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFRAMP_API_KEY", "alice-0123456789")
    assert run("promote", "--url", url_of(service), "--version", "2") == 0
    (tmp_path / "key").write_text("bob-012345678901\n", encoding="utf-8")
    (tmp_path / "key").chmod(0o600)
    assert run("versions", "--url", url_of(service), "--api-key-file", str(tmp_path / "key")) == 0
    assert service.keys == {"Bearer alice-0123456789", "Bearer bob-012345678901"}


def test_a_service_files_version_is_loaded_and_unloaded(service: FakeService, tmp_path: Path, capsys: Captured) -> None:
    write_model(tmp_path / "model")
    (tmp_path / "second.yaml").write_text(SERVICE, encoding="utf-8")
    assert run("render", str(tmp_path / "second.yaml"), "--settings") == 0
    settings = ServeSettings.model_validate_json(capsys.readouterr().out)
    assert (settings.version, settings.route_prefix) == ("2", "/v2/models/m/versions/2")
    assert run("load", str(tmp_path / "second.yaml"), "--url", url_of(service)) == 0
    assert run("unload", "m", "--version", "2", "--url", url_of(service)) == 0
    assert capsys.readouterr().out == "version 2 of m is ready\nversion 2 of m is gone\n"
    orders = {path.removeprefix("/v2/repository/"): body for _, path, body in service.orders}
    assert ServeSettings.model_validate_json(orders["models/m/load"]["parameters"]["config"]) == settings
    assert orders["models/m/unload"] == {"parameters": {"version": "2"}}
