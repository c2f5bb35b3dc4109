from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from deployments.settings import ServeSettings
from earlyexit.data.source_file import read_source
from offramp.commands import serve
from offramp.commands.service import status_tables
from offramp.spec import file
from offramp.spec.documents import ServeJob
from offramp.spec.file import at_folder, read_service
from optimizer.plans.plan import PolicySpec
from tests.cluster.kuberay_schema import RayService
from tests.offramp.cli.runs import Answering, Captured, cells, printed, refused, run, serving, url_of, written
from tests.offramp.service.service_folders import write_model

SERVICE = """
schema_version: 1
name: demo
model:
  folder: model
  latency:
    emulated:V100: {batch: [1], block_s: [[0.01], [0.01], [0.01]], ramp_s: [[0.001], [0.001]]}
slo: {latency_s: 1.0}
cluster: {devices: {emulated:V100: {count: 4}}}
planner: {strategy: serial}
"""
SPLITS = [{"first": 0, "end": 2, "batch": 4, "ramps": [0, 1]}, {"first": 2, "end": 3, "batch": 4, "ramps": []}]
CHAIN = {"share": 1.0, "stages": [{"device": "emulated:V100", "replicas": 2, "splits": SPLITS}]}
PLAN = {"plan": {"chains": [CHAIN], "policy": {"name": "entropy", "thresholds": 0.4}}}


@pytest.fixture
def service(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    return written(tmp_path / "service.yaml", SERVICE)


class FakeRay(ThreadingHTTPServer):
    """A dashboard whose Serve deploys applications at once, and the service with its plan."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.num_v100 = 4
        self.config: dict[str, Any] = {"applications": []}

    def describe(self) -> dict[str, Any]:
        slot = {"status": "HEALTHY", "message": "", "target_num_replicas": 2, "replicas": [{"state": "RUNNING"}] * 2}
        return {
            "http_options": {"host": "127.0.0.1", "port": self.server_port},
            "applications": {
                each["name"]: {
                    "status": "RUNNING",
                    "message": "",
                    "route_prefix": each["route_prefix"],
                    "deployed_app_config": each,
                    "deployments": {"split-emulated-V100-0": slot},
                }
                for each in self.config["applications"]
            },
        }


class Handler(Answering):
    server: FakeRay

    def do_GET(self) -> None:
        nodes = [{"state": "ALIVE", "resources_total": {"emulated:V100": self.server.num_v100}, "labels": {}}]
        answers: dict[str, Any] = {
            **{each["route_prefix"].rstrip("/") + "/plan": PLAN for each in self.server.config["applications"]},
            "/other/plan": {"plan": {"chains": [1]}},
            "/api/v0/nodes": {"data": {"result": {"result": nodes}}},
            "/api/serve/applications/": self.server.describe(),
        }
        if self.path == "/down/plan":
            self.say({"error": {"kind": "controller_unavailable", "message": "the controller does not answer"}}, 503)
        else:
            self.say(answers[self.path.partition("?")[0]])

    def do_PUT(self) -> None:
        self.server.config = self.take()
        self.say({})


@pytest.fixture
def ray() -> Iterator[FakeRay]:
    yield from serving(FakeRay())


def test_render_prints_the_settings_and_what_a_grpc_port_needs(service: Path, capsys: Captured) -> None:
    assert run("render", service) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    [application] = config["applications"]
    assert application["name"] == "demo"
    assert application["runtime_env"]["env_vars"]["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "1"
    assert ServeSettings.model_validate(application["args"]).model == str(service.parent / "model")
    assert config["http_options"] == {"host": "127.0.0.1", "port": 8000}
    service.write_text(f"{SERVICE}ingress: {{grpc_port: 9001}}\n", encoding="utf-8")
    assert run("render", service) == 0
    document = yaml.safe_load(capsys.readouterr().out)
    assert document["grpc_options"]["port"] == 9001
    [application] = document["applications"]
    switches = application["runtime_env"]["env_vars"]
    assert switches["RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"] == str(4 * 2**20)


def test_manifests_are_for_kuberay_and_use_redis_for_the_head(service: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "rayservice.yaml"
    assert run("render", service, "--kuberay", "--image", "registry/offramp:1", "--out", out) == 0
    manifest = RayService.model_validate(yaml.safe_load(out.read_text(encoding="utf-8")))
    config = yaml.safe_load(manifest.spec.serveConfigV2)
    settings = ServeSettings.model_validate(config["applications"][0]["args"])
    assert settings.model == "/offramp/model"
    assert settings.plan.policy is not None
    assert settings.plan.policy.records == "/offramp/model/exit_records.npz"
    assert settings.control is not None
    assert settings.control.state == "/offramp/demo.sqlite"
    assert (config["proxy_location"], config["http_options"]["host"]) == ("EveryNode", "0.0.0.0")
    [worker] = manifest.spec.rayClusterConfig.workerGroupSpecs
    [container] = worker.template.spec.containers
    assert container.image == "registry/offramp:1"
    assert {"name": "RAY_SERVE_ENABLE_HA_PROXY", "value": "1"} in [each.model_dump() for each in container.env]
    assert run("render", service, "--kuberay", "--redis", "redis:6379", "--redis-secret", "mine") == 0
    cluster = RayService.model_validate(yaml.safe_load(capsys.readouterr().out)).spec.rayClusterConfig
    kept = cluster.gcsFaultToleranceOptions
    assert kept is not None
    assert (kept.redisAddress, kept.redisPassword is not None) == ("redis:6379", True)
    assert [group.groupName for group in cluster.workerGroupSpecs][-1] == "front"
    service.write_text(SERVICE.replace("name: demo", "name: 2nd"), encoding="utf-8")
    assert ":3: name: '2nd'; KubeRay takes at most 47" in refused(capsys, "render", service, "--kuberay")


def test_paths_are_those_of_the_nodes_with_at(service: Path, tmp_path: Path) -> None:
    settings = read_service(service).settings
    outside = PolicySpec(name="recorded", thresholds=0.5, records="/x/r.npz")
    plan = replace(settings.plan, policy=outside)
    moved = at_folder(settings.model_copy(update={"plan": plan}), PurePosixPath("/data"))
    assert moved.plan.policy == replace(outside, records="/data/r.npz")
    assert moved.control is not None
    assert moved.control.policy.records == "/data/model/exit_records.npz"


def test_a_service_is_deployed_watched_and_deleted(service: Path, ray: FakeRay, capsys: Captured) -> None:
    assert run("deploy", service, "--address", url_of(ray)) == 0
    told = capsys.readouterr()
    assert told.err.startswith("warning: HAProxy reaches only its own node's ingresses at 127.0.0.1: write host: 0.0.0")
    assert told.err.endswith("\nRUNNING: 1 of 1 deployments healthy, 2 of 2 replicas running\n")
    assert told.out == f"demo runs; see: offramp status --address {url_of(ray)}\n"
    assert [each["name"] for each in ray.config["applications"]] == ["demo"]

    found = printed(capsys, "status", "--address", url_of(ray))
    assert found["plan"] == PLAN
    assert found["applications"][0]["deployments"][0]["emulated"] is True

    assert run("status", "--address", url_of(ray), "--url", f"{url_of(ray)}/down") == 0
    assert capsys.readouterr().err == f"no plan: {url_of(ray)}/down/plan: the controller does not answer\n"
    assert run("status", "--address", url_of(ray), "--url", f"{url_of(ray)}/other") == 0
    assert capsys.readouterr().err.endswith("chains.0: Input should be a mapping with share and stages, not 1\n")

    assert run("delete", "demo", "--address", url_of(ray)) == 0
    assert capsys.readouterr().out == "demo is gone\n"
    assert ray.config["applications"] == []
    service.write_text(f"{SERVICE}ingress: {{route_prefix: /demo, host: 0.0.0.0}}\n", encoding="utf-8")
    assert run("deploy", service, "--address", url_of(ray)) == 0
    assert "warning: Serve keeps listening at 127.0.0.1:" in capsys.readouterr().err
    assert run("status", "--address", url_of(ray)) == 0
    rows = cells(capsys.readouterr().out)
    assert "split-emulated-V100-0 (emulated) HEALTHY 2 of 2" in rows
    assert "0 V100 (emulated) 2 0 to 1 4 0, 1" in rows
    assert "2 to 2 4 -" in rows


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"hops": {"dtype": "float16", "bytes_per_input": [512.0]}}, "; hidden states between stages in float16"),
        ({"hops": {"dtype": "same", "bytes_per_input": [1024.0]}}, ""),
        ({"hops": None}, ""),
        ({"suspended": "no plan"}, "; but all inputs are refused: no plan"),
    ],
    ids=["half", "same", "of an earlier version", "suspended"],
)
def test_status_reports_hops_in_half_precision_and_suspensions(facts: dict[str, Any], words: str) -> None:
    _, plan = status_tables({"applications": [], "plan": PLAN | {"reason": "asked"} | facts})
    assert plan.title == f"Plan in force: asked{words}"


def test_status_numbers_the_chains_of_a_plan_that_has_several() -> None:
    beside = {"share": 0.25, "stages": [{"device": "K80", "replicas": 1, "splits": SPLITS}]}
    chains = [CHAIN | {"share": 0.75}, beside]
    _, plan = status_tables({"applications": [], "plan": {"plan": PLAN["plan"] | {"chains": chains}}})
    rows = list(zip(*(column.cells for column in plan.columns), strict=True))
    assert [row[:5] for row in rows] == [
        ("0", "75.0%", "0", "V100 (emulated)", "2"),
        ("", "", "", "", ""),
        ("1", "25.0%", "0", "K80", "1"),
        ("", "", "", "", ""),
    ]


def test_idle_and_empty_clusters_are_reported(ray: FakeRay, capsys: Captured, service: Path) -> None:
    assert run("status", "--address", url_of(ray)) == 0
    assert "Nothing is served" in capsys.readouterr().out
    assert refused(capsys, "delete", "gone", "--address", url_of(ray)) == "no application 'gone'; there are: none"
    ray.num_v100 = 3
    said = refused(capsys, "deploy", service, "--address", url_of(ray))
    assert said.startswith("the cluster lacks accelerators (emulated:V100: 4 needed, 3 there)")
    assert ray.config["applications"] == []


def test_serve_reads_a_file_once(service: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    reads = Mock(wraps=read_source)
    monkeypatch.setattr(file, "read_source", reads)
    monkeypatch.setattr(serve, "check_model", lambda _: None)
    settings, cluster = serve._settings_of(ServeJob.model_validate({"model": service, "port": 8998}))
    assert (settings.app, cluster.port) == ("demo", 8998)
    assert [call.args[0] for call in reads.call_args_list] == [service]
    assert capsys.readouterr().out == "planning demo: usually less than a minute\n"


def test_a_wrong_service_file_and_options_that_it_sets_are_refused(service: Path, capsys: Captured) -> None:
    service.write_text(SERVICE.replace("slo:", "slos:"), encoding="utf-8")
    for command in ("render", "deploy", "serve"):
        assert refused(capsys, command, service).startswith(f"{service}:8: slos: unknown field")
    said = refused(capsys, "serve", service, "--port", 9000, "--plan", "stock", "--max-queued", 5)
    assert said.startswith("--max-queued and --plan: the service file sets this")
