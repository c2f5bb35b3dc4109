from __future__ import annotations

import os
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from deployments.choices import HttpFront
from deployments.local_ray.cluster import (
    BINARY,
    LocalCluster,
    _resources_needed,
    _running,
    _set_environment,
    choose_front,
    open_front,
    wanted_ports,
)
from deployments.local_ray.ports import take_listener
from deployments.settings import ServeSettings
from earlyexit.errors import InputError, OfframpError
from earlyexit.network.boundary import Split
from optimizer.plans.plan import Plan, Stage, stock_plan
from optimizer.plans.plan_file import plan_document
from optimizer.problems.problem_file import problem_document
from tests.deployments.control.control_fakes import problem
from tests.free_port import free_port

HERE = "127.0.0.1"


def settings(device: str = "cpu", *, control: bool = False, **changes: Any) -> ServeSettings:
    stages = (Stage(device=device, replicas=2, splits=(Split(first=0, end=4, batch=4),)),)
    fields: dict[str, Any] = {"model": "m", "plan": plan_document(Plan(stages=stages))}
    if control:
        document = problem_document(problem())
        asked = document | {"devices": {device: {"count": 4}}, "latency": {device: document["latency"]["cpu"]}}
        fields["control"] = {"problem": asked, "policy": {"thresholds": 0.3}, "state": "control.db"}
    return ServeSettings.model_validate(fields | changes)


def test_every_possible_process_gets_a_core_including_loaded_versions() -> None:
    assert _resources_needed(settings())["CPU"] == 3  # two replicas and an ingress
    assert _resources_needed(settings(control=True))["CPU"] == 4 + 1 + 1
    needed = _resources_needed(settings("emulated:V100", control=True))
    assert (needed["CPU"], needed["emulated:V100"]) == (2, 4)
    assert _resources_needed(settings(repository={"control": "explicit"}))["CPU"] == 3 * (2 + 1)


def test_one_machine_needs_no_labels_and_starts_few_replicas_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    plain, controlled = settings(), settings(control=True, node_labels={"cpu": {"tier": "fast"}})
    assert plain.on_one_machine() == plain
    told = controlled.on_one_machine()
    assert told.control is not None
    assert (told.control.starts_at_once, told.node_labels) == (3, {})
    assert told.on_one_machine() == told


def test_the_required_ports_depend_on_the_front_and_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    for front in ("proxy", "direct"):
        assert wanted_ports(LocalCluster(front=front)) == [(HERE, 8000)]
    assert wanted_ports(LocalCluster(front="proxy", grpc_port=9000, host="::1")) == [("::1", 8000), ("::1", 9000)]
    assert wanted_ports(LocalCluster(front="direct", metrics_port=8001)) == [(HERE, 8000), (HERE, 8001)]
    pages = [(HERE, 8404), (HERE, 9101)]
    assert wanted_ports(LocalCluster(front="haproxy", host="10.1.2.3")) == [("10.1.2.3", 8000), *pages]
    wanted = wanted_ports(LocalCluster(front="haproxy", grpc_port=9000))
    assert wanted == [(HERE, 8000), (HERE, 9000), *pages, (HERE, 9500)]
    with pytest.raises(InputError, match="ports must differ"):
        wanted_ports(LocalCluster(front="haproxy", port=pages[0][1]))
    for wrong in ("http", "", "65536"):
        monkeypatch.setenv("RAY_SERVE_HAPROXY_STATS_PORT", wrong)
        with pytest.raises(InputError, match=f"STATS_PORT must be a port from 1 to 65535, not '{wrong}'"):
            wanted_ports(LocalCluster(front="haproxy"))


@pytest.mark.parametrize(
    ("host", "metrics_port", "front", "ray_address", "serve_host"),
    [
        (HERE, 8001, "haproxy", HERE, HERE),
        ("10.1.2.3", 8001, "haproxy", HERE, HERE),
        ("10.1.2.3", None, "proxy", HERE, "10.1.2.3"),
        ("0.0.0.0", None, "haproxy", HERE, HERE),
        ("0.0.0.0", 8001, "haproxy", None, "0.0.0.0"),  # every caller of the service may read the metrics
    ],
)
def test_internal_ports_listen_on_loopback(
    host: str, metrics_port: int | None, front: HttpFront, ray_address: str | None, serve_host: str
) -> None:
    cluster = LocalCluster(host=host, metrics_port=metrics_port, front=front)
    assert (cluster.ray_address, cluster.serve_host) == (ray_address, serve_host)


@pytest.mark.parametrize(("host", "address"), [("::1", "[::1]"), ("0.0.0.0", HERE), ("::", HERE), ("box", "box")])
def test_the_address_has_the_form_of_urls(host: str, address: str) -> None:
    assert LocalCluster(host=host).address == address


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own code, while it is imported
def test_a_start_returns_the_services_url_or_keeps_the_error_of_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray.exceptions as of_ray

    async def nothing() -> dict[str, Any]:
        return {"applications": {}}

    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": {"CPU": 8.0}, "Labels": {}}])
    monkeypatch.setattr("ray.serve.start", Mock(side_effect=[None, None, of_ray.RayError("the proxy has gone")]))
    monkeypatch.setattr("ray.serve.run", Mock(side_effect=[None, RuntimeError("the application has gone")]))
    monkeypatch.setattr("deployments.app.build", Mock())
    monkeypatch.setattr("deployments.local_ray.cluster._own_ray", lambda *_, **__: nullcontext())
    monkeypatch.setattr("deployments.local_ray.cluster.find_applications", nothing)
    assert [*_running(settings(route_prefix="/a"), LocalCluster(front="direct"), None)] == [f"http://{HERE}:8000/a"]
    for cause in ("the application has gone", "the proxy has gone"):
        with pytest.raises(OfframpError, match=rf"did not start; see the logs in .* {cause}"):
            next(_running(settings(), LocalCluster(front="direct"), None))


# The front

ALONE = ServeSettings(model="m", plan=stock_plan(2, batch=4))
TWO = ALONE.model_copy(update={"ingress_replicas": 2})
VERSIONS = ALONE.model_copy(update={"repository": ALONE.repository.model_copy(update={"control": "explicit"})})
CONFIGURATION = """global
    stats socket /tmp/admin.sock mode {mode} level admin expose-fd listeners
frontend prometheus
    bind {here}:9101
frontend http_frontend
    bind {served}:8000
frontend grpc_frontend
    bind {served}:9000 proto h2
    acl is_x req.hdr(application) -m str a.b-2
    acl is_y req.hdr(application) -m str a.b
{default}backend some
    server one 127.0.0.1:30000 check
listen stats
  bind {page}:8404
"""


@pytest.mark.parametrize(
    ("asked", "settings", "grpc_port", "found"),
    [
        ("auto", ALONE, None, "direct"),
        ("auto", TWO, None, "haproxy"),
        ("auto", VERSIONS, None, "haproxy"),
        ("auto", ALONE, 9000, "haproxy"),
        ("direct", ALONE, None, "direct"),
        ("haproxy", ALONE, None, "haproxy"),
        ("proxy", TWO, 9000, "proxy"),
    ],
)
def test_auto_is_direct_for_a_single_ingress(
    asked: HttpFront, settings: ServeSettings, grpc_port: int | None, found: HttpFront
) -> None:
    assert choose_front(LocalCluster(front=asked, grpc_port=grpc_port), settings) == found


@pytest.mark.parametrize(
    ("settings", "grpc_port", "reason"),
    [(TWO, None, "there are 2 ingresses"), (VERSIONS, None, "versions"), (ALONE, 9000, "it serves gRPC")],
    ids=("ingresses", "versions", "grpc"),
)
def test_direct_needs_a_single_ingress(settings: ServeSettings, grpc_port: int | None, reason: str) -> None:
    with pytest.raises(InputError, match=f"because .*{reason}"):
        choose_front(LocalCluster(front="direct", grpc_port=grpc_port), settings)


@pytest.mark.parametrize(("front", "switches"), [("direct", "00"), ("haproxy", "11"), ("proxy", "01")])
def test_serve_listens_except_with_a_direct_front(
    front: HttpFront, switches: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    _set_environment(LocalCluster(front=front), max_body_bytes=1)
    assert os.environ["RAY_SERVE_ENABLE_HA_PROXY"] + os.environ["RAY_SERVE_ENABLE_DIRECT_INGRESS"] == switches
    assert os.environ["RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S"] == "3"


def test_a_direct_front_passes_the_socket_to_the_ingress() -> None:
    port = free_port()
    with open_front(LocalCluster(front="direct", port=port), "a.b") as path:
        assert path is not None
        with take_listener(path) as listener:
            assert listener.getsockname() == (HERE, port)
    with open_front(LocalCluster(front="proxy", port=port), "a.b") as path:
        assert path is None


@pytest.mark.parametrize(
    ("host", "served", "bound"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("10.1.2.3", "127.0.0.1", "10.1.2.3"),
        ("0.0.0.0", "127.0.0.1", "0.0.0.0"),
        ("0.0.0.0", "*", "0.0.0.0"),
        ("::", "*", "::"),  # of HAProxy's addresses, * is IPv4 alone
    ],
)
def test_haproxy_listens_on_the_host_for_callers_and_on_loopback_otherwise(
    host: str, served: str, bound: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BINARY, "/bin/echo")
    file = tmp_path / "haproxy.cfg"
    file.write_text(CONFIGURATION.format(mode=666, here="", served=served, page="*", default=""))
    with open_front(LocalCluster(front="haproxy", host=host, grpc_port=9000), "a.b"):
        command = [os.environ[BINARY], "-db", "-f", str(file), "-sf", "12"]
        started = subprocess.run(command, capture_output=True, text=True, check=True)
    assert started.stdout == f"-db -f {file} -sf 12\n"
    default = "    acl is_y req.hdr_cnt(application) eq 0\n"  # gRPC calls that name no application
    assert file.read_text() == CONFIGURATION.format(mode=600, here=HERE, served=bound, page=HERE, default=default)
    assert os.environ[BINARY] == "/bin/echo"
    monkeypatch.setenv(BINARY, "/bin/nothing")
    with pytest.raises(OfframpError, match="'/bin/nothing' does not point"):
        open_front(LocalCluster(front="haproxy"), "a.b").__enter__()
