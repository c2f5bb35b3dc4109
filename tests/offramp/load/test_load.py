from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from offramp.client.protocol import Outcome, Prediction, Request, connection_failure, failure_of
from offramp.commands.bench import render, summarize
from offramp.commands.options import BenchJob
from offramp.commands.predict import lines_of, stream_inputs
from offramp.load.generator import Generator, LoadConfig, RequestRecord, run_load
from tests.clock import ManualClock

ANSWER = {"label": "a", "score": 0.9, "exit": 0, "request_id": "r"}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def config_of(**changes: Any) -> LoadConfig:
    settings: dict[str, Any] = {"url": "http://server", "inputs": ["x", "y"], "num_requests": 3}
    loop = {} if "concurrency" in changes else {"send_times_s": [0.1, 0.2, 0.3]}
    return LoadConfig(**{**settings, **loop, **changes})


def generator_of(config: LoadConfig, post: Any, clock: ManualClock) -> Generator:
    async def sleep(seconds: float) -> None:
        await asyncio.sleep(0)  # what was started before runs at its own time
        clock.advance(seconds)

    return Generator(config=config, post=post, rng=random.Random(0), clock=clock, sleep=sleep)


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/predict", handler)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


async def test_latency_is_counted_from_the_schedule() -> None:
    clock = ManualClock()

    async def post(request: Request, timeout_s: float) -> Outcome:
        clock.advance(0.25)
        return ANSWER

    clock.advance(2.5)  # the request of second 2 is sent half a second late
    record = await generator_of(config_of(), post, clock).request(0, start_s=0.0, scheduled_s=2.0)
    assert (record.scheduled_s, record.sent_s, record.done_s) == (2.0, 2.5, 2.75)
    assert (record.latency_s, record.lateness_s) == (0.75, 0.5)
    clock = ManualClock(31.0)
    record = await generator_of(config_of(), post, clock).request(0, start_s=0.0, scheduled_s=0.0)
    assert record.error == "timeout"


async def test_an_open_loop_never_waits_for_an_answer() -> None:
    clock = ManualClock()
    sent_at_s: list[float] = []
    all_are_sent = asyncio.Event()

    async def post(request: Request, timeout_s: float) -> Outcome:
        sent_at_s.append(clock.now_s())
        if len(sent_at_s) == 3:
            all_are_sent.set()
        await all_are_sent.wait()  # no request is answered before the last is sent
        return ANSWER

    records: list[RequestRecord] = []
    generator = generator_of(config_of(), post, clock)
    await generator.open_loop([1.0, 2.0, 4.0], records.append, generator.sleep)
    assert sent_at_s == [1.0, 2.0, 4.0]
    assert {record.scheduled_s: record.latency_s for record in records} == {1.0: 3.0, 2.0: 2.0, 4.0: 0.0}


async def test_a_closed_loop_keeps_one_request_per_worker_running() -> None:
    under_way, most = 0, 0

    async def post(request: Request, timeout_s: float) -> Outcome:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        return ANSWER

    records: list[RequestRecord] = []
    await generator_of(config_of(concurrency=4), post, ManualClock()).closed_loop(iter(range(10)), records.append)
    assert most == 4
    assert len(records) == 10
    assert {record.lateness_s for record in records} == {0.0}


async def test_a_repeated_request_keeps_its_id_and_counts_from_its_first_schedule() -> None:
    clock = ManualClock()
    ids: list[str] = []
    busy = failure_of(503, "", "1.0")
    outcomes: list[Outcome] = [busy, connection_failure("cut"), ANSWER]

    async def post(request: Request, timeout_s: float) -> Outcome:
        ids.append(request.request_id)
        clock.advance(0.5)
        return outcomes.pop(0)

    record = await generator_of(config_of(retries=2), post, clock).request(0, start_s=0.0, scheduled_s=0.0)
    assert len(set(ids)) == 1
    assert record.num_attempts == 3
    assert 2.5 <= record.latency_s <= 2.8  # three times 0.5 s, 1 s asked for, and at most 0.1 s + 0.2 s of jitter


@pytest.mark.parametrize("retries", [0, 3])
async def test_a_request_is_retried_only_after_a_temporary_error(retries: int) -> None:
    requests: list[Request] = []

    async def post(request: Request, timeout_s: float) -> Outcome:
        requests.append(request)
        return failure_of(422, {"error": {"kind": "unprocessable_input", "message": "too long"}})

    record = await generator_of(config_of(retries=retries), post, ManualClock()).request(0, 0.0, 0.0)
    assert (record.error, record.num_attempts, len(requests)) == ("unprocessable_input", 1, 1)


async def test_every_request_is_counted_exactly_once_whatever_its_outcome() -> None:
    bodies: list[dict[str, Any]] = []
    ids: set[str] = set()

    async def handler(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        ids.add(request.headers["X-Request-ID"])
        match bodies[-1]["inputs"]:
            case "busy":
                return web.json_response({"error": {"kind": "overloaded", "message": "full"}}, status=503)
            case "broken":
                assert request.transport is not None
                request.transport.close()
            case "html":
                return web.Response(status=502, text="<html>")
            case "nonsense":
                return web.json_response({"hello": 1})
            case "slow":
                await asyncio.sleep(30)
        return web.json_response(ANSWER)

    texts = ["fine", "busy", "broken", "html", "nonsense", "slow", "fine"]
    progress: list[tuple[int, int]] = []
    async with serving(handler) as url:
        config = config_of(url=url, inputs=texts, send_times_s=[k / 500 for k in range(14)], timeout_s=0.3)
        records = await run_load(config, lambda done, total: progress.append((done, total)))
    report = report_of(*records, labels=None)
    assert (report["num_requests"], report["num_answers"]) == (14, 4)
    assert report["errors"] == {"connection": 2, "http_502": 2, "malformed": 2, "overloaded": 2, "timeout": 2}
    assert [record.scheduled_s for record in records] == [k / 500 for k in range(14)]
    assert len(ids) == 14
    assert progress == [(done, 14) for done in range(1, 15)]


async def test_a_run_reports_exits_accuracy_and_keys() -> None:
    bodies: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        rows = [{"label": "a", "score": 0.9, "exit": len(text)} for text in bodies[-1]["inputs"]]
        return web.json_response({"outputs": rows, "request_id": request.headers["X-Request-ID"]})

    async with serving(handler) as url:
        keys = ["k0", "k1", "k2"]
        config = config_of(url=url, inputs=["x", "yy", "z"], keys=keys, concurrency=1, inputs_per_request=2)
        report = report_of(*await run_load(config), slo_s=30.0, offered_rps=None, labels=["a", "b", "a"])
    assert len(bodies) == 3
    assert [(body["inputs"], body["ids"]) for body in bodies] == [
        (["x", "yy"], ["k0", "k1"]),
        (["z", "x"], ["k2", "k0"]),
        (["yy", "z"], ["k1", "k2"]),
    ]
    assert (report["num_requests"], report["num_inputs"], report["num_answers"]) == (3, 6, 6)
    assert report["answers_by_exit"] == {"1": 4, "2": 2}
    assert report["mean_exit_blocks"] == pytest.approx((4 * 2 + 2 * 3) / 6)
    assert report["accuracy"] == pytest.approx(4 / 6)
    assert report["offered_rps"] is None
    assert report["lateness_p99_s"] is None
    assert report["achieved_rps"] == report["goodput_rps"] == pytest.approx(6 / report["duration_s"])
    assert json.loads(json.dumps(report)) == report


async def test_class_maps_of_a_run_are_not_kept() -> None:
    tensors: list[tuple[str, str, list[int], list[float]]] = [
        ("class_map", "UINT8", [1, 2, 3], [0, 1, 2, 0, 1, 2]),
        ("score", "FP32", [1], [0.5]),
        ("exit", "INT32", [1], [4]),
    ]
    outputs = [{"name": name, "datatype": kind, "shape": shape, "data": data} for name, kind, shape, data in tensors]

    async def post(request: Request, timeout_s: float) -> Outcome:
        return {"model_name": "m", "outputs": outputs}

    record = await generator_of(config_of(), post, ManualClock()).request(0, start_s=0.0, scheduled_s=0.0)
    assert [(each.task_values, each.exit) for each in record.predictions] == [({"score": 0.5}, 4)]


def answered(
    scheduled_s: float, latency_s: float, *, label: str = "a", exit_index: int = 0, text: int = 0
) -> RequestRecord:
    return RequestRecord(
        input_indices=(text,),
        scheduled_s=scheduled_s,
        sent_s=scheduled_s + 0.002,
        done_s=scheduled_s + latency_s,
        num_attempts=1,
        predictions=(Prediction(label=label, score=0.9, exit=exit_index, request_id="r"),),
    )


def failed(scheduled_s: float, error: str, num_attempts: int = 1) -> RequestRecord:
    return replace(answered(scheduled_s, 0.5), num_attempts=num_attempts, predictions=(), error=error)


def report_of(
    *records: RequestRecord,
    slo_s: float = 0.1,
    offered_rps: float | None = 2.0,
    labels: Sequence[str] | None = ("a", "b"),
) -> dict[str, Any]:
    job = BenchJob(data=Path("texts.csv"), seed=7, slo_ms=1000 * slo_s)
    return summarize(job, records, "2026-01-01T00:00:00+00:00", offered_rps, labels)


def test_percentiles_of_a_known_list() -> None:
    report = report_of(*(answered(0.0, float(value)) for value in range(100, -1, -1)))
    figures = {"p50_s": 50.0, "p90_s": 90.0, "p95_s": 95.0, "p99_s": 99.0, "max_s": 100.0, "mean_s": 50.0}
    assert report["latency"] == pytest.approx(figures)
    assert (report["seed"], report["schema_version"]) == (7, 1)


def test_rates_cover_the_whole_run_and_a_late_client_is_reported() -> None:
    report = report_of(
        answered(1.0, 0.0625, exit_index=0),
        answered(2.0, 0.125, exit_index=3, text=1),
        answered(3.0, 1.0, exit_index=3),
        failed(3.25, "overloaded", num_attempts=3),
        slo_s=0.125,
    )
    assert report["duration_s"] == 4.0
    assert report["achieved_rps"] == 3 / 4
    assert report["goodput_rps"] == 1 / 4 + 1 / 4
    assert report["answers_by_exit"] == {"0": 1, "3": 2}
    assert report["mean_exit_blocks"] == (1 + 4 + 4) / 3
    assert report["accuracy"] == pytest.approx(2 / 3)
    assert report["errors"] == {"overloaded": 1}
    assert report["num_retries"] == 2
    assert report_of(answered(1.0, 0.1), slo_s=0.019)["is_client_bound"]
    assert not report_of(answered(1.0, 0.1), slo_s=0.021)["is_client_bound"]
    assert not report_of(answered(1.0, 0.1), slo_s=0.001, offered_rps=None)["is_client_bound"]


@pytest.mark.parametrize("answers", [[], [answered(0.0, 0.0125)]], ids=["none", "some"])
def test_a_report_is_printed_with_and_without_answers(answers: list[RequestRecord]) -> None:
    console = Console(width=100, force_terminal=False)
    with console.capture() as captured:
        console.print(render(report_of(*answers, failed(1.0, "connection"))))
    assert f"{len(answers)} of {len(answers) + 1} inputs" in captured.get()
    assert "connection: 1" in captured.get()
    assert ("12.50 ms" in captured.get()) == bool(answers)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.csv", '\ufefftext,label\n"a, b",x\nc,y\n\n'),
        ("t.tsv", "label\ttext\nx\ta, b\ny\tc\n"),
        ("t.jsonl", '{"text": "a, b", "label": 1}\n{"text": "c"}\n'),
        ("t.txt", "a, b\n\nc\n"),
    ],
)
def test_texts_are_read_by_the_files_ending_without_their_labels(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert [each.value for each in stream_inputs(tmp_path / name, {"text": "text"})] == ["a, b", "c"]


def test_inputs_are_streamed_from_chosen_parts_columns_and_lines(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"train": [["a", "x"]], "val": [["b", "y"]]}', encoding="utf-8")
    assert [each.value for each in stream_inputs(tmp_path / "c.json", {"text": "text"}, part="val")] == ["b"]
    (tmp_path / "t.csv").write_text("id,body\n1,a\n", encoding="utf-8")
    assert [each.value for each in stream_inputs(tmp_path / "t.csv", {"text": "body"})] == ["a"]
    lines = iter(["\ufeffa\n", "b\r\n", "c\n"])
    assert list(islice(lines_of(lines, "pipe"), 2)) == ["a", "b"]
    assert list(lines) == ["c\n"]
