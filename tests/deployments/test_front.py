import os
import subprocess
from pathlib import Path

import pytest

from deployments.local_ray.cluster import BINARY, HttpFront, front_of, prepared, switches_of
from deployments.local_ray.ports import take_listener
from deployments.settings import ServeSettings
from earlyexit.errors import InputError
from optimizer.plan import stock_plan
from tests.deployments.test_listener import HOST, free_port

ALONE = ServeSettings(model="m", plan=stock_plan(2, batch=4))
TWO = ALONE.model_copy(update={"ingress_replicas": 2})
VERSIONS = ALONE.model_copy(update={"repository": ALONE.repository.model_copy(update={"control": "explicit"})})
CONFIGURATION = """global
    stats socket /tmp/admin.sock mode 666 level admin expose-fd listeners
frontend prometheus
    bind :9101
frontend http_frontend
    bind {served}:8000
frontend grpc_frontend
    bind {served}:9000 proto h2
backend some
    server one 127.0.0.1:30000 check
listen stats
  bind *:8404
"""
BOUND = """global
    stats socket /tmp/admin.sock mode 600 level admin expose-fd listeners
frontend prometheus
    bind 127.0.0.1:9101
frontend http_frontend
    bind {host}:8000
frontend grpc_frontend
    bind {host}:9000 proto h2
backend some
    server one 127.0.0.1:30000 check
listen stats
  bind 127.0.0.1:8404
"""


@pytest.mark.parametrize(
    ("asked", "settings", "has_grpc", "found"),
    [
        ("auto", ALONE, False, "direct"),
        ("auto", TWO, False, "haproxy"),
        ("auto", VERSIONS, False, "haproxy"),
        ("auto", ALONE, True, "haproxy"),
        ("direct", ALONE, False, "direct"),
        ("haproxy", ALONE, False, "haproxy"),
        ("proxy", TWO, True, "proxy"),
    ],
)
def test_nothing_stands_before_an_ingress_that_is_alone(
    asked: HttpFront, settings: ServeSettings, has_grpc: bool, found: HttpFront
) -> None:
    assert front_of(asked, settings, has_grpc=has_grpc) == found


@pytest.mark.parametrize(
    ("settings", "has_grpc", "reason"),
    [(TWO, False, "there are 2 ingresses"), (VERSIONS, False, "versions"), (ALONE, True, "it speaks gRPC")],
    ids=("ingresses", "versions", "grpc"),
)
def test_callers_cannot_reach_ingresses_themselves_where_one_is_not_all(
    settings: ServeSettings, has_grpc: bool, reason: str
) -> None:
    with pytest.raises(InputError, match=f"because .*{reason}"):
        front_of("direct", settings, has_grpc=has_grpc)


def test_serve_listens_unless_the_ingress_does() -> None:
    ha_proxy, own_ports = "RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_ENABLE_DIRECT_INGRESS"
    assert switches_of("direct") == {ha_proxy: "0", own_ports: "0"}
    assert switches_of("haproxy") == {ha_proxy: "1", own_ports: "1"}
    assert switches_of("proxy") == {ha_proxy: "0", own_ports: "1"}


def test_an_ingress_that_is_reached_itself_is_told_where_its_socket_is() -> None:
    port = free_port()
    with prepared("direct", ALONE, HOST, port, ()) as told:
        assert told.listener is not None
        with take_listener(told.listener) as listener:
            assert listener.getsockname() == (HOST, port)
    with prepared("proxy", ALONE, HOST, port, ()) as told:
        assert told == ALONE


@pytest.mark.parametrize(
    ("host", "served", "bound"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("10.1.2.3", "127.0.0.1", "10.1.2.3"),
        ("0.0.0.0", "127.0.0.1", "*"),
        ("0.0.0.0", "*", "*"),
    ],
)
def test_haproxy_listens_for_callers_on_the_host_and_for_the_rest_on_loopback(
    host: str, served: str, bound: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BINARY, "/bin/echo")
    file = tmp_path / "haproxy.cfg"
    file.write_text(CONFIGURATION.format(served=served))
    with prepared("haproxy", ALONE, host, 8000, (9000,)):
        command = [os.environ[BINARY], "-db", "-f", str(file), "-sf", "12"]
        started = subprocess.run(command, capture_output=True, text=True, check=True)
    assert started.stdout == f"-db -f {file} -sf 12\n"
    assert file.read_text() == BOUND.format(host=bound)
    assert os.environ[BINARY] == "/bin/echo"
