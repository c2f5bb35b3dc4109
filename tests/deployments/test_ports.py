from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from deployments.local_ray.ports import (
    LINGER_S,
    LOOK_S,
    HostPort,
    RunningProcess,
    await_ports,
    hold_listener,
    take_listener,
)
from earlyexit.errors import OfframpError
from tests.free_port import free_port

HOST = "127.0.0.1"
LEFT = RunningProcess(pid=7, name="haproxy")
SERVING = RunningProcess(pid=7, name="haproxy", parent="ray::HAProxyManager")
PYTHON = RunningProcess(pid=8, name="python3")
AGENT = RunningProcess(pid=9, name="ray::DashboardAgent")


class Ports:
    """Ports of which each becomes free at its second; `pause` advances the time."""

    def __init__(self, free_from_s: dict[int, float], holder: RunningProcess | None) -> None:
        self.now_s = 0.0
        self._free_from_s = free_from_s
        self._holder = holder

    def wait_for(self, *ports: int) -> None:
        await_ports([(HOST, port) for port in ports], is_free=self._is_free, holders=self._holders, pause=self._pause)

    def _is_free(self, address: HostPort) -> bool:
        return self.now_s >= self._free_from_s.get(address[1], 0.0)

    def _holders(self) -> dict[int, RunningProcess]:
        return {} if self._holder is None else dict.fromkeys(self._free_from_s, self._holder)

    def _pause(self, seconds: float) -> None:
        self.now_s += seconds


def test_orphans_of_an_earlier_service_are_named_and_awaited(caplog: pytest.LogCaptureFixture) -> None:
    ports = Ports({8000: 3.0, 8404: 20.0}, LEFT)
    ports.wait_for(8001)
    assert ports.now_s == 0.0
    ports.wait_for(8000, 8404)
    assert ports.now_s == 20.0
    [message] = caplog.messages
    assert message == "port 8000 is still taken by haproxy, pid 7 of an earlier service: waiting until it ends"
    for orphan in (replace(LEFT, parent="systemd"), AGENT):
        Ports({8000: 3.0}, orphan).wait_for(8000)
    ports = Ports({8000: 1e9}, LEFT)
    with pytest.raises(OfframpError, match=r"port 8000 of 127.0.0.1 is taken by haproxy, pid 7"):
        ports.wait_for(8000)
    assert LINGER_S <= ports.now_s <= LINGER_S + LOOK_S


@pytest.mark.parametrize(
    ("holder", "words"),
    [
        (PYTHON, "is taken by python3, pid 8$"),
        (SERVING, "is taken by haproxy, pid 7$"),
        (replace(AGENT, parent="raylet"), "is taken by ray::DashboardAgent, pid 9$"),
        (None, "is taken$"),
    ],
    ids=["another-program", "a-service-that-runs", "a-process-of-it", "unseen"],
)
def test_a_port_of_another_process_is_an_error_at_once(holder: RunningProcess | None, words: str) -> None:
    ports = Ports({8000: 10.0}, holder)
    with pytest.raises(OfframpError, match=words):
        ports.wait_for(8000)
    assert ports.now_s == 0.0


def test_a_port_that_is_released_during_the_check_is_free() -> None:
    looks = iter([False, True])
    await_ports([(HOST, 8000)], is_free=lambda address: next(looks), holders=dict)
    assert next(looks, None) is None


def no_pause(seconds: float) -> None:
    raise AssertionError(f"waits {seconds} s")


def test_the_process_that_listens_on_a_real_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OfframpError, match=rf"port {port} of 127.0.0.1 is taken by .*, pid \d+"):
            await_ports([(HOST, port)], pause=no_pause)
    await_ports([(HOST, port)], pause=no_pause)


# The socket that ingresses take


def asked(port: int) -> socket.socket:
    client = socket.create_connection((HOST, port), timeout=5)
    client.sendall(b"ask")
    return client


def answer_one(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.sendall(b"answer to " + connection.recv(100))


def test_connections_wait_while_the_ingress_is_replaced() -> None:
    port = free_port()
    with hold_listener(HOST, port) as path, hold_listener(HOST, port) as of_another_service:
        with pytest.raises(ConnectionRefusedError):
            asked(port)
        with take_listener(path):
            with pytest.raises(OfframpError, match=f"cannot listen on port {port}: .* in use"):
                take_listener(of_another_service)
            waiting = asked(port)  # no process accepts it before the first one is gone
        later = asked(port)
        with take_listener(path) as second, waiting, later:
            answer_one(second)
            answer_one(second)
            assert [client.recv(100) for client in (waiting, later)] == [b"answer to ask"] * 2


def test_a_service_that_ends_releases_its_port() -> None:
    port = free_port()
    with hold_listener(HOST, port) as path:
        take_listener(path).close()
    with pytest.raises(OfframpError, match="the listening socket cannot be received"):
        take_listener(path)
    with hold_listener(HOST, port):
        pass


def test_an_unusable_address_is_named() -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        port = other.getsockname()[1]
        with pytest.raises(OfframpError, match=f"cannot listen on port {port} of {HOST}"), hold_listener(HOST, port):
            pass
    with pytest.raises(OfframpError, match="is not an address"), hold_listener("no.such.host.invalid", 1):
        pass


def test_an_address_of_no_interface_is_not_reported_as_taken() -> None:
    await_ports([("::1", free_port())])
    with pytest.raises(OfframpError, match=r"cannot listen on port 8000 of 192.0.2.1"):
        await_ports([("192.0.2.1", 8000)])
    with pytest.raises(OfframpError, match=r"no.such.host.invalid is not an address"):
        await_ports([("no.such.host.invalid", 8000)])
