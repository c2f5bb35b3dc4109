from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from earlyexit.errors import DataError, OfframpError
from experiments.peers.client import ClientOptions, LoadResult, run_client, send_load, summarize, write_inputs
from offramp.client.protocol import Prediction
from offramp.load.report import RequestRecord
from tests.offramp.load.scripted_server import ok, refusal, scripted

ANSWER = ok('{"label": "yes", "score": 1.0, "exit": 2}')


def options_for(folder: Path, url: str = "http://127.0.0.1:1", **given: Any) -> ClientOptions:
    """Two texts; slow machines must not fail a test, so the SLO is far away."""
    inputs = write_inputs(folder / "inputs.jsonl", ["on", "off"], ["a", "b"])
    known = {"url": url, "inputs": inputs, "duration_s": 1.0, "slo_s": 60.0, "timeout_s": 60.0}
    return ClientOptions.model_validate(known | given)


async def test_texts_go_in_turn_the_warm_up_is_not_counted_and_answers_are_written(tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    options = options_for(tmp_path, rate_per_s=40.0, warmup_s=0.5, duration_s=0.5, seed=3, answers=answers)
    async with scripted(then=(ANSWER,)) as server:
        result = await send_load(options.model_copy(update={"url": server.url}))
    assert [json.loads(body)["ids"] for body in sorted(server.bodies)[:1]] == [["b"]]
    assert result.num_sent == len(server.bodies) > result.num_counted == result.num_answered > 0
    assert result.goodput_per_s == result.num_answered / 0.5
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert len(rows) == result.num_answered
    assert {(row["label"], row["exit"]) for row in rows} == {("yes", 2)}
    assert {row["input"] for row in rows} == {0, 1}


async def test_the_same_seed_sends_the_same_arrivals_only_faster(tmp_path: Path) -> None:
    options = options_for(tmp_path, rate_per_s=100.0, duration_s=0.4, seed=3)
    async with scripted(then=(ANSWER,)) as server:
        slow = await send_load(options.model_copy(update={"url": server.url}))
        fast = await send_load(options.model_copy(update={"url": server.url, "rate_per_s": 200.0, "duration_s": 0.2}))
    assert slow.num_sent == fast.num_sent == pytest.approx(40, abs=20)


async def test_workers_send_back_to_back_until_the_time_is_over(tmp_path: Path) -> None:
    async with scripted((refusal(503),), then=(ANSWER,)) as server:
        result = await send_load(options_for(tmp_path, server.url, concurrency=2, duration_s=0.2))
    assert result.errors == {"http_503": 1}
    assert result.num_sent == result.num_answered + 1 > 1
    assert server.num_connections == 2


async def test_the_client_is_a_process_of_its_own(tmp_path: Path) -> None:
    async with scripted(then=(ANSWER,)) as server:
        options = options_for(tmp_path, server.url, rate_per_s=1000.0, duration_s=0.1)
        result = await asyncio.to_thread(run_client, options)
    assert result.num_answered == result.num_sent == pytest.approx(100, abs=40)
    assert result.cpu_per_request_s > 0


def test_where_no_server_listens_the_client_says_so(tmp_path: Path) -> None:
    with socket.socket() as bound:  # nobody else takes the port, and nobody listens at it
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(OfframpError, match=f"no server answers at {url}"):
            run_client(options_for(tmp_path, url, rate_per_s=10.0))


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({}, id="no way of sending"),
        pytest.param({"rate_per_s": 1.0, "concurrency": 1}, id="two ways of sending"),
        pytest.param({"rate_per_s": 0.0}, id="no rate"),
        pytest.param({"rate_per_s": 1.0, "rps": 1.0}, id="an unknown option"),
    ],
)
def test_options_that_contradict_each_other_are_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        options_for(tmp_path, **given)


async def test_nothing_to_send_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing is due"):
        await send_load(options_for(tmp_path, rate_per_s=0.1, duration_s=0.1))
    options = options_for(tmp_path, rate_per_s=10.0)
    options.inputs.write_text("")
    with pytest.raises(DataError, match="is empty"):
        await send_load(options)


def record(due_s: float, sent_s: float, done_s: float, error: str | None = None) -> RequestRecord:
    answers = () if error else (Prediction(exit=0, request_id="r", label="yes", score=1.0),)
    return RequestRecord(
        request_id="r",
        input_indices=(0,),
        scheduled_s=due_s,
        sent_s=sent_s,
        done_s=done_s,
        num_attempts=1,
        predictions=answers,
        error=error,
    )


def test_latency_runs_from_when_a_request_was_due_and_what_is_lost_has_none(tmp_path: Path) -> None:
    counted = [
        record(1.0, 1.25, 1.5),  # 0.5 s: within the SLO, to the point
        record(2.0, 2.0, 2.75),  # 0.75 s: too late
        record(3.0, 3.0, 3.1, "http_503"),
        record(4.0, 4.0, 4.1, "timeout"),
    ]
    options = options_for(tmp_path, rate_per_s=1.0, slo_s=0.5, duration_s=10.0)
    result = summarize(counted, options, num_sent=9, cpu_s=0.02)
    assert (result.num_counted, result.num_answered, result.measured.lost_share) == (4, 2, 0.5)
    assert result.errors == {"http_503": 1, "timeout": 1}
    assert (result.goodput_per_s, result.answered_per_s) == (0.1, 0.2)
    assert result.p50_s == 0.625
    assert result.p99_s == pytest.approx(0.7475)
    assert result.from_sent_p99_s == pytest.approx(0.745)
    assert result.lateness_p99_s == pytest.approx(0.97 * 0.25)
    assert result.cpu_per_request_s == pytest.approx(0.02 / 9)
    assert LoadResult.model_validate_json(result.model_dump_json()) == result


def test_where_nothing_is_answered_there_is_no_latency(tmp_path: Path) -> None:
    options = options_for(tmp_path, rate_per_s=1.0)
    result = summarize([record(1.0, 1.0, 1.1, "timeout")], options, num_sent=1, cpu_s=0.0)
    assert (result.p50_s, result.p99_s, result.goodput_per_s) == (None, None, 0.0)
