from __future__ import annotations

import asyncio
from itertools import count

import pytest

from earlyexit.errors import InputError
from experiments.peers.tally import Ledger
from experiments.peers.wire import Pool, host_and_port, prepare
from tests.offramp.load.scripted_server import Reply, Scripted, ok, refusal, scripted

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"5\r\n{'a':\r\n", b"3\r\n 1}\r\n0\r\n\r\n"
WITH_CONNECTION = b"HTTP/1.1 %s\r\nConnection: close\r\n\r\nuntil the end"


def pool_to(server: Scripted, *, most: int = 4, keep_bodies: bool = False) -> Pool:
    """Time is the number of looks at the clock."""
    ticks = count()
    return Pool(
        requests=prepare(server.url, "/predict", [b'"a"', b'"b"']),
        ledger=Ledger(),
        clock=lambda: float(next(ticks)),
        most=most,
        keep_bodies=keep_bodies,
    )


async def opened(pool: Pool, server: Scripted, num: int = 1) -> Ledger:
    await pool.open(*host_and_port(server.url), num)
    return pool.ledger


async def until_ended(ledger: Ledger) -> None:
    ended = asyncio.Event()
    ledger.on_end = lambda _: ended.set()
    while ledger.num_open:
        ended.clear()
        await ended.wait()


async def outcomes_of(replies: list[Reply], num: int = 1) -> list[object]:
    """What becomes of requests sent one after the other."""
    async with scripted(*replies) as server:
        pool = pool_to(server)
        ledger = await opened(pool, server)
        for _ in range(num):
            pool.send(ledger.take(0.0, 0.0))
            await until_ended(ledger)
        await pool.close()
    return list(ledger.outcomes)


def test_a_request_is_ready_to_go_over_the_wire() -> None:
    assert prepare("http://there:81", "/predict", [b'{"inputs": "so"}']) == [
        b"POST /predict HTTP/1.1\r\nHost: there:81\r\nAccept: */*\r\nConnection: keep-alive\r\n"
        b'Content-Type: application/json\r\nContent-Length: 16\r\n\r\n{"inputs": "so"}'
    ]


@pytest.mark.parametrize("url", ["https://there:81", "there:81", "http://", "http://there:81/predict"])
def test_an_address_has_a_host_and_no_path(url: str) -> None:
    with pytest.raises(InputError, match="http://host:port"):
        host_and_port(url)


def test_the_port_of_http_is_80() -> None:
    assert host_and_port("http://there") == ("there", 80)


async def test_bodies_take_turns_on_one_connection() -> None:
    async with scripted() as server:
        pool = pool_to(server)
        ledger = await opened(pool, server)
        for _ in range(3):
            pool.send(ledger.take(0.0, 0.0))
            await until_ended(ledger)
        await pool.close()
    assert server.bodies == [b'"a"', b'"b"', b'"a"']
    assert (ledger.outcomes, server.num_connections) == ([200, 200, 200], 1)


async def test_answers_come_with_a_length_or_in_chunks_and_in_any_number_of_pieces() -> None:
    whole = ok("12345")
    async with scripted((whole[:20], whole[20:-2], whole[-2:]), CHUNKED) as server:
        pool = pool_to(server, keep_bodies=True)
        ledger = await opened(pool, server)
        for _ in range(2):
            pool.send(ledger.take(0.0, 0.0))
            await until_ended(ledger)
        await pool.close()
    assert ledger.bodies == {0: b"12345", 1: b"{'a': 1}"}
    assert ledger.outcomes == [200, 200]


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        pytest.param((refusal(503),), 503, id="refused"),
        pytest.param((refusal(500),), 500, id="failed"),
        pytest.param((WITH_CONNECTION % b"503 Busy", None), 503, id="a refusal that ends with its connection"),
        pytest.param((WITH_CONNECTION % b"200 OK", None), "connection", id="an answer that may be cut off"),
        pytest.param((ok()[:-1], None), "connection", id="an answer that is cut off"),
        pytest.param((b"SSH-2.0-OpenSSH_9.6\r\n",), "malformed", id="not HTTP"),
    ],
)
async def test_every_request_has_its_outcome_and_the_next_one_is_answered(reply: Reply, outcome: object) -> None:
    assert await outcomes_of([reply], num=2) == [outcome, 200]


async def test_a_request_on_a_connection_that_closes_before_an_answer_is_sent_again_once() -> None:
    async with scripted((None,), (ok(),), (None,), (None,)) as server:
        pool = pool_to(server)
        ledger = await opened(pool, server)
        for _ in range(3):
            pool.send(ledger.take(0.0, 0.0))
            await until_ended(ledger)
        await pool.close()
    assert ledger.outcomes == [200, "connection", 200]
    assert server.bodies == [b'"a"', b'"a"', b'"b"', b'"b"', b'"a"']
    assert pool.retried == {0, 1}


async def test_a_connection_that_the_server_closed_while_idle_is_replaced_without_a_retry() -> None:
    async with scripted((ok(), None)) as server:
        pool = pool_to(server)
        ledger = await opened(pool, server)
        pool.send(ledger.take(0.0, 0.0))
        await until_ended(ledger)
        for _ in range(20):  # until the close has come through
            await asyncio.sleep(0)
        pool.send(ledger.take(0.0, 0.0))
        await until_ended(ledger)
        await pool.close()
    assert (ledger.outcomes, server.num_connections, pool.retried) == ([200, 200], 2, set())


async def test_a_pool_grows_while_all_its_connections_are_busy_up_to_its_limit() -> None:
    async with scripted() as server:
        pool = pool_to(server, most=3)
        ledger = await opened(pool, server)
        for _ in range(10):
            pool.send(ledger.take(0.0, 0.0))
        await until_ended(ledger)
        await pool.close()
    assert ledger.outcomes == [200] * 10
    assert (pool.num_connections, server.num_connections, pool.num_waited) == (3, 3, 9)


async def test_free_connections_take_turns() -> None:
    async with scripted() as server:
        pool = pool_to(server)
        ledger = await opened(pool, server, num=2)
        for _ in range(4):
            pool.send(ledger.take(0.0, 0.0))
            await until_ended(ledger)
        await pool.close()
    assert server.connections in ([0, 1, 0, 1], [1, 0, 1, 0])


async def test_what_was_due_too_long_ago_times_out_whether_sent_or_waiting() -> None:
    async with scripted(then=()) as server:
        pool = pool_to(server, most=1)
        ledger = await opened(pool, server)
        for due_s in (1.0, 2.0, 3.0):
            pool.send(ledger.take(due_s, due_s))
        pool.time_out(2.5)
        assert ledger.outcomes == ["timeout", "timeout", None]
        pool.time_out(3.5)
        assert ledger.outcomes == ["timeout"] * 3
        await pool.close()
    assert pool.retried == set()


async def test_requests_fail_when_nobody_listens_any_more() -> None:
    async with scripted((None,)) as server:
        pool = pool_to(server)
        ledger = await opened(pool, server)
    pool.send(ledger.take(0.0, 0.0))
    await until_ended(ledger)
    pool.send(ledger.take(0.0, 0.0))
    await until_ended(ledger)
    await pool.close()
    assert ledger.outcomes == ["connection", "connection"]
