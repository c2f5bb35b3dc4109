from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from earlyexit.errors import DeadlineError, InputError, OverloadedError
from offramp.client.protocol import Failure, Request
from offramp.load import connections
from offramp.load.connections import Connection, connected
from offramp.load.generator import exact_sleep
from offramp.load.sustained import Ending, ProbeResult, Search, Verdict
from tests.offramp.load.scripted_server import Reply as Said
from tests.offramp.load.scripted_server import listening, ok, refusal, scripted

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b'5\r\n{"a":\r\n', b"3\r\n 1}\r\n0\r\n\r\n"
TO_THE_END = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
CLOSING = b"HTTP/1.1 503 No\r\nRetry-After: 2\r\nConnection: close\r\n\r\n"
HINTS = b"HTTP/1.1 103 Early Hints\r\nRetry-After: 9\r\n\r\n"
SWITCHING = b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"
BUSY = b"HTTP/1.1 503 No\r\nretry-after: 2.5\r\nContent-Length: 4\r\n\r\nbusy"


PLAIN = Request("predict", {}, request_id="r")


async def asked(said: Sequence[Said], num: int = 1, timeout_s: float = 30.0) -> list[object]:
    """Returns the outcomes of requests that are sent one after the other."""
    async with scripted(*said) as server, connected(server.url) as post:
        outcomes = [await post(PLAIN, timeout_s) for _ in range(num)]
    return [(each.kind, str(each.error)) if isinstance(each, Failure) else each for each in outcomes]


async def test_a_request_has_its_key_body_and_address() -> None:
    async with scripted() as server, connected(f"{server.url}/below/", api_key="k") as post:
        await post(Request("predict", {"inputs": "so"}, request_id="the-id"), 30.0)
    lines = server.heads[0].decode().split("\r\n")
    assert lines[0] == "POST /below/predict HTTP/1.1"
    assert lines[1] == f"Host: {server.url.removeprefix('http://')}"
    assert {"Authorization: Bearer k", "Content-Type: application/json", "X-Request-ID: the-id"} < set(lines)
    assert server.bodies == [b'{"inputs": "so"}']
    async with scripted() as server, connected(f"{server.url}/bü cher%20/") as post:
        await post(PLAIN, 30.0)
    assert server.heads[0].startswith(b"POST /b%C3%BC%20cher%20/predict HTTP/1.1\r\n")
    async with scripted() as server, connected(server.url) as post:
        body: dict[str, object] = {"inputs": [], "parameters": {}}
        await post(Request("infer", body, tail=b"\x00\xff", named={"model": "m"}), 2.0)
    assert server.heads[0].startswith(b"POST /v2/models/m/infer HTTP/1.1\r\n")
    assert b"Inference-Header-Content-Length: 50\r\n" in server.heads[0]
    assert server.bodies == [b'{"inputs": [], "parameters": {"timeout": 2000000}}\x00\xff']


async def test_bodies_and_retry_after_of_answers_are_read() -> None:
    described = {"name": "class_map", "datatype": "UINT8", "shape": [1, 2, 2], "parameters": {"binary_data_size": 4}}
    content = json.dumps({"outputs": [described]}).encode()
    head = f"HTTP/1.1 200 OK\r\nInference-Header-Content-Length: {len(content)}\r\n"
    said = f"{head}Content-Length: {len(content) + 4}\r\n\r\n".encode() + content + bytes([0, 1, 2, 3])
    async with scripted((said,), (ok("5"),)) as server, connected(server.url) as post:
        first, second = [await post(PLAIN, 30.0) for _ in range(2)]
    assert first["outputs"][0]["data"].tolist() == [0, 1, 2, 3]
    assert second == 5
    async with scripted((BUSY,), (HINTS, ok())) as server, connected(server.url) as post:
        busy, fine = [await post(PLAIN, 30.0) for _ in range(2)]
    assert isinstance(busy, Failure)
    assert isinstance(busy.error, OverloadedError)
    assert (busy.kind, busy.is_transient, busy.error.retry_after_s) == ("http_503", True, 2.5)
    assert str(busy.error) == "HTTP 503 from the server: busy"
    assert not isinstance(fine, Failure)


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        pytest.param((ok("12345")[:20], ok("12345")[20:-2], b"45"), 12345, id="an answer in pieces"),
        pytest.param(CHUNKED, {"a": 1}, id="an answer in chunks"),
        pytest.param((TO_THE_END + b"7", None), 7, id="an answer that ends with its connection"),
        pytest.param((CLOSING, None), "http_503", id="no body, and the connection ends"),
        pytest.param((refusal(503),), "http_503", id="refused"),
        pytest.param((HINTS, HINTS + ok("12345")), 12345, id="an answer after interim ones"),
        pytest.param((HINTS, None), "connection", id="an interim answer alone"),
        pytest.param((SWITCHING,), "connection", id="another protocol"),
        pytest.param((ok()[:-1], None), "connection", id="an answer that is cut off"),
        pytest.param((None,), "connection", id="closed without an answer"),
        pytest.param((b"SSH-2.0-OpenSSH_9.6\r\n",), "connection", id="not HTTP"),
    ],
)
async def test_every_broken_answer_is_an_outcome_of_its_request_alone(said: Said, outcome: object) -> None:
    first, second = await asked([said, (ok("1"),)], num=2)
    assert (first[0] if isinstance(first, tuple) else first, second) == (outcome, 1)


@pytest.mark.parametrize("patience_s", [0.2, 30.0], ids=["timed out", "cancelled"])
async def test_a_connection_is_not_reused_after_a_timeout(patience_s: float) -> None:
    async with scripted((ok(),), then=()) as server, connected(server.url) as post:
        await post(PLAIN, 30.0)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(post(PLAIN, patience_s), 0.4)
        late = await post(PLAIN, 0.2)
        assert isinstance(late, Failure)
        assert (late.kind, late.is_transient, str(late.error)) == ("timeout", False, "no answer within 0.2 s")
    assert 0 not in server.connections[2:]


async def test_a_connection_is_not_reused_after_a_cancelled_request() -> None:
    free: deque[Connection] = deque()
    async with scripted(then=()) as server:
        loop, (host, port) = asyncio.get_running_loop(), server.url.removeprefix("http://").split(":")
        _, connection = await loop.create_connection(lambda: Connection(free), host, int(port))
        asking = asyncio.create_task(
            connection.send(b"", loop.time() + 30.0, Failure(error=DeadlineError("late"), kind="timeout"))
        )
        await asyncio.sleep(0)
        asking.cancel()
        connection.data_received(ok())
        assert not free
        assert not connection.is_open
        with pytest.raises(asyncio.CancelledError):
            await asking


async def test_new_connections_are_opened_only_if_all_are_busy() -> None:
    async with scripted() as server, connected(server.url) as post:
        await asyncio.gather(*(post(PLAIN, 30.0) for _ in range(3)))
        for _ in range(6):
            await post(PLAIN, 30.0)
    assert server.num_connections == 3
    assert sorted(server.connections[3:6]) == sorted(server.connections[6:]) == [0, 1, 2]


@pytest.mark.parametrize("said", [(ok(), None), (ok(),)], ids=["closed by the server", "idle for too long"])
async def test_a_connection_that_may_be_gone_is_replaced(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "KEEP_ALIVE_S", 30.0 if None in said else 0.0)
    async with scripted(said) as server, connected(server.url) as post:
        await post(PLAIN, 30.0)
        for _ in range(20):  # until the close has come through
            await asyncio.sleep(0)
        assert not isinstance(await post(PLAIN, 30.0), Failure)
    assert server.num_connections == 2


async def test_a_missing_listener_or_failed_tls_is_a_connection_error() -> None:
    with socket.socket() as bound:  # no other process takes the port
        bound.bind(("127.0.0.1", 0))
        async with connected(f"http://127.0.0.1:{bound.getsockname()[1]}") as post:
            outcome = await post(PLAIN, 30.0)
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.is_transient) == ("connection", True)
    assert "Connect call failed" in str(outcome.error)
    first: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first.append(await reader.readexactly(1))
        writer.close()

    async with listening(listen) as port, connected(f"https://127.0.0.1:{port}") as post:
        outcome = await post(PLAIN, 30.0)
    assert first == [b"\x16"], "a handshake"
    assert isinstance(outcome, Failure)
    assert outcome.kind == "connection"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        *((url, "http://host:port") for url in ("there:81", "http://", "ftp://there", "http://there?x=1")),
        *((url, "http://host:port") for url in ("http://there:81x", "http://there:0", "http://[::1", "http://a..b")),
        *((url, "http://host:port") for url in ("http://bücher", "http://a/\udcff")),
        ("http://me:secret@there", "^(?!.*secret).*api_key"),
    ],
)
async def test_only_http_addresses_are_accepted(url: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        async with connected(url):
            pytest.fail("nothing to connect to")


async def test_an_exact_sleep_is_never_too_short_and_can_be_repeated() -> None:
    with exact_sleep() as sleep:
        for seconds in (0.002, 0.0, 0.001):
            began_s = time.monotonic()
            await sleep(seconds)
            assert time.monotonic() - began_s >= seconds
    with exact_sleep() as sleep:
        sleeping = asyncio.ensure_future(sleep(1 - 1e-10))
        await asyncio.sleep(0)
        assert not sleeping.done()
        sleeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sleeping


Server = Callable[[float, int], Verdict]
"""Returns the verdict of a probe from its rate and its index."""


def run(**changes: Any) -> ProbeResult:
    """Returns a result that passes, except for the given fields."""
    good = {"lost_share": 0.0, "p99_s": 0.05, "from_sent_p99_s": 0.05, "lateness_p99_s": 0.001}
    return ProbeResult(**(good | changes))


def up_to(capacity_per_s: float) -> Server:
    return lambda rate_per_s, _: "passed" if rate_per_s <= capacity_per_s else "failed"


def searched(server: Server, *, growth: float = 2.0, resolution: float = 0.1, most_probes: int = 30) -> Search:
    """Runs a search from 100/s, between 10/s and 1000/s."""
    bounds: Any = {"low_per_s": 10.0, "high_per_s": 1000.0, "resolution": resolution, "most_probes": most_probes}
    search = Search(start_per_s=100.0, growth=growth, **bounds)
    while (rate_per_s := search.next_rate()) is not None:
        search.add(rate_per_s, server(rate_per_s, len(search.probes)))
    return search


def rates(search: Search) -> list[float]:
    return [round(probe.rate_per_s, 1) for probe in search.probes]


@pytest.mark.parametrize(
    ("told", "verdict"),
    [
        pytest.param(run(), "passed", id="all is well"),
        pytest.param(run(p99_s=0.1, from_sent_p99_s=0.1, lost_share=0.01), "passed", id="just well enough"),
        pytest.param(run(p99_s=0.101), "failed", id="too slow"),
        pytest.param(run(lost_share=0.02), "failed", id="too much lost"),
        pytest.param(run(p99_s=None, from_sent_p99_s=None), "failed", id="nothing answered"),
        pytest.param(run(lateness_p99_s=0.011), "client late", id="a late client hides a server that may be well"),
        pytest.param(
            run(lateness_p99_s=0.02, p99_s=0.13, from_sent_p99_s=0.12), "client late", id="slow by no more than late"
        ),
        pytest.param(
            run(lateness_p99_s=0.02, p99_s=0.14, from_sent_p99_s=0.121), "failed", id="slow by more than late"
        ),
        pytest.param(run(lateness_p99_s=0.02, lost_share=0.02), "failed", id="late, but the server refused too much"),
    ],
)
def test_a_probe_passes_fails_or_is_void_because_the_client_was_late(told: ProbeResult, verdict: Verdict) -> None:
    assert told.verdict(0.1) == verdict


def test_a_search_brackets_the_capacity_and_repeats_each_failure() -> None:
    search = searched(up_to(250.0), resolution=0.2)
    # 100 passes, as does 2 times that; 4 times that is 800. sqrt(200 * 800) = 400, 282.8, 237.8; 282.8 / 237.8 = 1.19.
    assert rates(search) == [100.0, 200.0, 800.0, 400.0, 282.8, 237.8, 282.8]
    assert (round(search.best_per_s, 1), search.ending) == (237.8, "bracketed")
    # The second probe, of 200/s, fails although 500/s are sustained.
    search = searched(lambda rate, index: "failed" if index == 1 else up_to(500.0)(rate, index))
    assert search.best_per_s <= 500.0 <= 1.1 * search.best_per_s
    # 141.4, 168.2 and 183.4 pass, and 183.4 is within 10 % of 200, which then passes as well: up from there.
    assert rates(search)[:6] == [100.0, 200.0, 141.4, 168.2, 183.4, 200.0]
    assert search.probes[6].rate_per_s > 200.0
    assert search.ending == "bracketed"


@pytest.mark.parametrize("capacity_per_s", [11.0, 99.0, 100.0, 101.0, 333.3, 950.0], ids=str)
def test_the_result_is_within_the_resolution_of_the_capacity(capacity_per_s: float) -> None:
    best_per_s = searched(up_to(capacity_per_s), resolution=0.03).best_per_s
    assert best_per_s <= capacity_per_s <= 1.03 * best_per_s


def test_a_search_probes_rates_within_its_bounds_until_one_is_bracketed() -> None:
    search = searched(up_to(0.0))
    assert rates(search) == [100.0, 50.0, 12.5, 10.0, 10.0]
    assert (search.best_per_s, search.ending) == (0.0, "none passed")
    search = searched(up_to(1e9))
    assert rates(search) == [100.0, 200.0, 800.0, 1000.0]
    assert (search.best_per_s, search.ending) == (1000.0, "highest")
    search = searched(lambda rate, index: "client late" if index == 1 else up_to(250.0)(rate, index), resolution=0.2)
    assert rates(search) == [100.0, 200.0, 200.0, 800.0, 400.0, 282.8, 237.8, 282.8]
    assert search.ending == "bracketed"
    search = searched(lambda rate, _: "passed" if rate <= 250.0 else "client late", resolution=0.2)
    assert rates(search) == [100.0, 200.0, 800.0, 800.0, 400.0, 400.0, 282.8, 282.8, 237.8]
    assert (round(search.best_per_s, 1), search.ending) == (237.8, "client late")


@pytest.mark.parametrize(("most_probes", "ending"), [(3, "most probes"), (4, "highest")], ids=str)
def test_a_search_takes_no_more_probes_than_it_may(most_probes: int, ending: Ending) -> None:
    search = searched(up_to(1e9), most_probes=most_probes)
    assert (len(search.probes), search.ending) == (most_probes, ending)
