import socket

import pytest

from deployments.local_ray.ports import holding, take_listener
from earlyexit.errors import OfframpError

HOST = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def asked(port: int) -> socket.socket:
    client = socket.create_connection((HOST, port), timeout=5)
    client.sendall(b"ask")
    return client


def answer_one(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.sendall(b"answer to " + connection.recv(100))


def test_callers_are_refused_until_the_first_ingress_listens() -> None:
    port = free_port()
    with holding(HOST, port) as path:
        with pytest.raises(ConnectionRefusedError):
            asked(port)
        with take_listener(path) as listener:
            listener.listen()
            with asked(port) as client:
                answer_one(listener)
                assert client.recv(100) == b"answer to ask"


def test_a_client_that_comes_while_no_ingress_is_there_is_answered_by_the_next_one() -> None:
    port = free_port()
    with holding(HOST, port) as path:
        with take_listener(path) as first:
            first.listen()
            waiting = asked(port)  # accepted by no process before the first one has gone
        later = asked(port)
        with take_listener(path) as second, waiting, later:
            answer_one(second)
            answer_one(second)
            assert [client.recv(100) for client in (waiting, later)] == [b"answer to ask"] * 2


def test_a_service_that_ends_lets_go_of_its_port_and_hands_nothing_over() -> None:
    port = free_port()
    with holding(HOST, port) as path:
        take_listener(path).close()
    with pytest.raises(OfframpError, match="the socket to listen on cannot be had"):
        take_listener(path)
    with holding(HOST, port):
        pass


def test_an_address_that_cannot_be_had_is_named() -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        port = other.getsockname()[1]
        with pytest.raises(OfframpError, match=f"port {port} of {HOST} cannot be listened on"), holding(HOST, port):
            pass
    with pytest.raises(OfframpError, match="is no address"), holding("no.such.host.invalid", 1):
        pass
