from __future__ import annotations

import asyncio
import csv
import json
import random
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from earlyexit.errors import DataError, OfframpError
from offramp.client.client import AsyncClient
from offramp.commands.options import PredictJob
from offramp.commands.predict import Exits, InputRow, Row, format_of, predict_all, row_writer
from tests.clock import ManualClock
from tests.offramp.client.test_client import STOPPING, failure
from tests.offramp.load.scripted_server import listening


def answered(texts: list[str]) -> httpx.Response:
    """An answer in which each text is its own label and leaves after as many blocks as it has letters."""
    return httpx.Response(
        200, json={"outputs": [{"label": text, "score": 0.5, "exit": len(text)} for text in texts], "request_id": "r"}
    )


def given(text: str) -> InputRow:
    return InputRow({"text": text}, text)


class Server:
    """A server that refuses requests with a text that contains an x, and records all requests."""

    def __init__(self, slow: str = "") -> None:
        self.batches: list[list[str]] = []
        self._slow = slow

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        texts = json.loads(request.content)["inputs"]
        self.batches.append(texts)
        for _ in range(20 if self._slow in texts else 3):  # others get their turn meanwhile
            await asyncio.sleep(0)
        if any("x" in text for text in texts):
            return failure(422, "unprocessable_input", "an x")
        return answered(texts)


async def run(
    texts: Iterator[str],
    server: Callable[[httpx.Request], object] | str,
    *,
    batch: int = 2,
    concurrency: int = 2,
    rows: list[Row] | None = None,
    timeout_s: float = 30.0,
) -> tuple[list[Row], Exits]:
    written: list[Row] = [] if rows is None else rows
    clock = ManualClock()

    async def sleep(seconds: float) -> None:
        clock.advance(seconds)
        await asyncio.sleep(0)

    client = AsyncClient(
        server if isinstance(server, str) else "http://server",
        # httpx takes coroutines, its types do not say
        transport=None if isinstance(server, str) else httpx.MockTransport(server),  # type: ignore[arg-type]
        max_attempts=1,
    )
    async with client:
        job = PredictJob(batch=batch, concurrency=concurrency, timeout_s=timeout_s)
        tally = await predict_all(
            map(given, texts), client, job, written.append, clock=clock, on_rows=lambda _: None, sleep=sleep
        )
    return written, tally


async def test_rows_are_in_the_order_of_the_texts_although_a_request_is_slow() -> None:
    texts = ["a", "bb", "c", "dd", "e"]
    server = Server(slow="a")
    rows, tally = await run(iter(texts), server)
    assert [row["text"] for row in rows] == texts
    assert [row["label"] for row in rows] == texts
    assert dict(tally) == {1: 3, 2: 2}
    assert sorted(server.batches) == [["a", "bb"], ["c", "dd"], ["e"]]


async def test_the_number_of_concurrent_requests_is_limited() -> None:
    three_at_once, now, most = asyncio.Barrier(3), 0, 0

    async def server(request: httpx.Request) -> httpx.Response:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await three_at_once.wait()
        now -= 1
        return answered(json.loads(request.content)["inputs"])

    rows, _ = await run(map(str, range(39)), server, batch=1, concurrency=3)
    assert (len(rows), most) == (39, 3)


async def test_few_inputs_are_read_ahead_of_the_running_requests() -> None:
    taken: list[int] = []
    most_ahead = 0

    def texts() -> Iterator[str]:
        for number in range(1000):
            taken.append(number)
            yield str(number)

    class Counting(list[Row]):
        def append(self, row: Row) -> None:
            nonlocal most_ahead
            super().append(row)
            most_ahead = max(most_ahead, len(taken) - len(self))

    rows, _ = await run(texts(), Server(), batch=4, concurrency=2, rows=Counting())
    assert len(rows) == 1000
    assert most_ahead <= 4 * (2 * 2 + 2), "the window, the batch being read and the one being written"


@pytest.mark.parametrize(("kind", "reported"), [("execution", "execution"), ("internal", "offramp")])
async def test_a_text_on_which_the_server_fails_does_not_end_the_run(kind: str, reported: str) -> None:
    def server(request: httpx.Request) -> httpx.Response:
        texts = json.loads(request.content)["inputs"]
        return failure(500, kind, "it failed") if "x" in texts else answered(texts)

    rows, _ = await run(iter("axb"), server)
    assert [row.get("error") for row in rows] == [None, f"{reported}: it failed", None]


async def test_a_text_that_fails_alone_has_an_error_in_its_row() -> None:
    server = Server()
    rows, tally = await run(iter(["a", "b", "x", "d"]), server, batch=4)
    assert [row.get("error") for row in rows] == [None, None, "unprocessable_input: an x", None]
    assert rows[2] == {"text": "x", "error": "unprocessable_input: an x"}
    assert rows[3] == {"text": "d", "label": "d", "score": 0.5, "exit": 1}
    assert (tally.total(), tally[None]) == (4, 1)
    assert server.batches == [["a", "b", "x", "d"], ["a", "b"], ["x", "d"], ["x"], ["d"]]


async def test_a_busy_service_loses_no_row_and_gets_fewer_inputs_at_once() -> None:
    in_flight, refused, late = 0, 0, 0

    async def server(request: httpx.Request) -> httpx.Response:
        nonlocal in_flight, refused, late
        texts = json.loads(request.content)["inputs"]
        if in_flight + len(texts) > 20:
            refused += 1
            return failure(503, "admission", "it would be late")
        in_flight += len(texts)
        for _ in range(in_flight):
            await asyncio.sleep(0)
        in_flight -= len(texts)
        if in_flight > 10:
            late += 1
            return failure(504, "deadline", "no answer within 0.25 s")
        return answered(texts)

    texts = [str(number) for number in range(1920)]
    rows, tally = await run(iter(texts), server, batch=32, concurrency=8)
    assert [row.get("label") for row in rows] == texts
    assert (tally[None], refused > 3, refused + late < 300) == (0, True, True)


async def test_an_input_that_is_late_alone_or_all_inputs_of_a_dead_service_fail_after_the_timeout() -> None:
    asked: list[list[str]] = []

    def server(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content)["inputs"])
        return failure(504, "deadline", "late") if "slow" in asked[-1] else answered(asked[-1])

    texts = [*map(str, range(20)), "slow", *map(str, range(21, 64))]
    rows, tally = await run(iter(texts), server, batch=16)
    assert [row["text"] for row in rows if row.get("error") == "deadline: late"] == ["slow"]
    assert (tally.total(), tally[None], 25 < asked.count(["slow"]) < 45) == (64, 1, True), "every second for 30 s"
    rows, tally = await run(iter(["slow"]), server, timeout_s=900.0)
    assert rows == [{"text": "slow", "error": "deadline: late"}]
    stopping = iter([httpx.Response(404, text=STOPPING)] * 9)
    rows, tally = await run(iter("ab"), lambda request: next(stopping, answered(json.loads(request.content)["inputs"])))
    assert [row.get("label") for row in rows] == ["a", "b"]
    rows, tally = await run(iter(texts), lambda _: failure(503, "stage_unavailable", "no replica"), batch=16)
    assert (tally.total(), {row["error"] for row in rows}) == (64, {"stage_unavailable: no replica"})


async def test_an_error_of_the_service_ends_the_run_after_all_earlier_rows() -> None:
    def server(request: httpx.Request) -> httpx.Response:
        texts = json.loads(request.content)["inputs"]
        if texts == ["a"]:
            return answered(texts)
        raise httpx.ReadError("")  # as the asynchronous client says if the server speaks TLS

    rows: list[Row] = []
    with pytest.raises(OfframpError, match="no connection to http://server: ReadError; is"):
        await run(iter("abcdefgh"), server, batch=1, rows=rows)
    assert [row["text"] for row in rows] == ["a"]

    def texts() -> Iterator[str]:
        yield from ("a", "b")
        raise DataError("t.csv:4: no")

    rows.clear()
    with pytest.raises(DataError, match=r"t\.csv:4"):
        await run(texts(), Server(), batch=1, rows=rows)
    assert [row["text"] for row in rows] == ["a", "b"]


async def test_no_row_is_lost_or_doubled_although_connections_are_closed_or_reset() -> None:
    rng, ends, texts = random.Random(0), set[tuple[str, float]](), [str(number) for number in range(200)]

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            end = "kept"
            while end == "kept":
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0])
                body = answered(json.loads(await reader.readexactly(length))["inputs"]).content
                answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
                end = rng.choice(["kept", "kept", "closed", "reset"])
                share = 1.0 if end == "kept" else rng.choice([0.0, 0.9, 1.0])
                ends.add((end, share))
                writer.write(answer[: round(share * len(answer))])
                await writer.drain()
            if end == "reset":  # instead of the orderly end of a connection
                lingering = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, lingering)
        writer.close()

    async with listening(connected) as port:
        rows, tally = await run(iter(texts), f"http://127.0.0.1:{port}", batch=8)
    assert [row.get("label") for row in rows] == texts
    assert (tally.total(), tally[None], len(ends)) == (200, 0, 7), "every kind of end occurs"


def test_lists_are_json_in_csv_under_the_given_header(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    joints = [{"joint": "head", "x": 1.0}]
    with row_writer(tmp_path / "o.csv", "csv", ("image", "keypoints", "exit")) as write:
        for _ in range(2):
            write({"image": "a\rb\ud83d", "keypoints": joints, "classes": ["sky"], "exit": 1})
    [row, _] = csv.DictReader((tmp_path / "o.csv").read_bytes().decode().splitlines(keepends=True))
    assert (row["image"], json.loads(row["keypoints"])) == ("a\rb\\ud83d", joints)
    assert capsys.readouterr().err == "left out of the CSV file: classes; --format jsonl includes them\n"
    assert (format_of(None, None), format_of(None, "csv"), format_of(Path("a.csv"), None)) == ("jsonl", "csv", "csv")
