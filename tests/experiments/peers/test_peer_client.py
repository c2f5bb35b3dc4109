from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from earlyexit.errors import DataError, OfframpError
from experiments.peers.alarm import Alarm, LoopTimer, new_alarm
from experiments.peers.capacity import null_server
from experiments.peers.client import ClientOptions, run_client, send_load
from experiments.peers.loops import poisson_times_s
from tests.offramp.load.scripted_server import Scripted, bodies, ok, refusal, scripted, times


def options_for(folder: Path, server: Scripted | None = None, **given: Any) -> ClientOptions:
    """Two bodies; slow machines must not fail a test, so the SLO is far away."""
    path = folder / "bodies.jsonl"
    path.write_text(bodies(["on", "off"]))
    url = server.url if server is not None else "http://127.0.0.1:1"
    known = {"url": url, "bodies": path, "duration_s": 1.0, "slo_s": 60.0, "timeout_s": 60.0, "connections": 2}
    return ClientOptions.model_validate(known | given)


def times_file(folder: Path, *times_s: float) -> Path:
    path = folder / "times.txt"
    path.write_text(times(*times_s))
    return path


async def test_every_line_of_the_bodies_is_sent_in_turn_at_the_times_given(tmp_path: Path) -> None:
    async with scripted() as server:
        result = await send_load(options_for(tmp_path, server, times=times_file(tmp_path, 0, 0, 0)))
    assert sorted(server.bodies) == [b'{"inputs": "off"}', b'{"inputs": "on"}', b'{"inputs": "on"}']
    assert server.heads[0].startswith(b"POST /predict HTTP/1.1\r\n")
    assert (result.num_sent, result.num_counted, result.num_answered) == (3, 3, 3)
    assert result.num_within_slo == 3
    assert (result.offered_per_s, result.goodput_per_s) == (3.0, 3.0)


async def test_the_warm_up_is_sent_but_not_counted(tmp_path: Path) -> None:
    at = times_file(tmp_path, 0, 0, 0.002)
    async with scripted((refusal(503),)) as server:
        result = await send_load(options_for(tmp_path, server, times=at, warmup_s=0.001, connections=1))
    assert (result.num_sent, result.num_counted, result.num_refused) == (3, 1, 0)
    assert (result.offered_per_s, result.num_answered) == (1.0, 1)


async def test_refusals_and_failures_are_told_apart_and_missing_from_goodput(tmp_path: Path) -> None:
    script = [(refusal(503),), (refusal(429),), (refusal(500),), (ok(), None)]
    async with scripted(*script) as server:
        at = times_file(tmp_path, 0, 0, 0, 0)
        result = await send_load(options_for(tmp_path, server, times=at, connections=1, most_connections=1))
    assert (result.num_answered, result.num_refused, result.failed) == (1, 2, {"status 500": 1})
    assert result.goodput_per_s == 1.0


async def test_a_server_that_never_answers_is_left_after_the_timeout(tmp_path: Path) -> None:
    async with scripted(then=()) as server:
        at = times_file(tmp_path, 0, 0, 0)
        result = await send_load(options_for(tmp_path, server, times=at, timeout_s=0.02, most_connections=2))
    assert (result.num_answered, result.failed) == (0, {"timeout": 3})


async def test_answers_are_counted_and_written_when_asked_for(tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    async with scripted((ok('{"label": "no", "score": 0.5, "exit": 2}'),)) as server:
        at = times_file(tmp_path, 0, 0)
        options = options_for(tmp_path, server, times=at, connections=1, most_connections=1, answers=answers)
        result = await send_load(options)
    assert (result.labels, result.exits) == ({"no": 1, "yes": 1}, {"2": 1})
    assert answers.read_text().splitlines() == [
        '{"body": 0, "predictions": [{"label": "no", "score": 0.5, "exit": 2}]}',
        '{"body": 1, "predictions": [{"label": "yes", "score": 1.0}]}',
    ]


async def test_workers_of_a_closed_loop_each_use_one_connection_and_need_no_other(tmp_path: Path) -> None:
    async with scripted() as server:
        result = await send_load(options_for(tmp_path, server, concurrency=2, duration_s=0.02))
    assert result.num_answered == result.num_sent >= 2
    assert (server.num_connections, result.num_connections, result.num_waited) == (2, 2, 0)


async def test_workers_whose_connections_fail_send_no_more(tmp_path: Path) -> None:
    async with scripted(then=(None,)) as server:
        result = await send_load(options_for(tmp_path, server, concurrency=2, duration_s=60.0))
    assert (result.num_sent, result.failed, result.num_retried) == (2, {"connection": 2}, 2)


def test_the_same_seed_draws_the_same_arrivals_only_faster() -> None:
    slow_s, fast_s = poisson_times_s(100.0, 2.0, seed=3), poisson_times_s(200.0, 1.0, seed=3)
    assert slow_s == pytest.approx([2 * each_s for each_s in fast_s])
    assert slow_s == sorted(slow_s)
    assert slow_s[-1] < 2.0
    assert len(slow_s) == pytest.approx(200, abs=45)  # three deviations of the square root of 200
    assert poisson_times_s(100.0, 2.0, seed=4) != slow_s


async def test_the_client_is_a_process_of_its_own(tmp_path: Path) -> None:
    async with scripted() as server:
        options = options_for(tmp_path, server, rate_per_s=1000.0, duration_s=0.1)
        result = await asyncio.to_thread(run_client, options)
    assert result.num_answered == result.num_sent == len(poisson_times_s(1000.0, 0.1, seed=0)) == len(server.bodies)


def test_the_null_server_answers_every_request(tmp_path: Path) -> None:
    with null_server() as url:
        options = options_for(tmp_path, url=url, times=times_file(tmp_path, *[0.0] * 50), keep_bodies=True)
        result = run_client(options)
    assert result.labels == {"yes": 50}


def test_where_no_server_listens_the_client_says_so(tmp_path: Path) -> None:
    with socket.socket() as bound:  # nobody else takes the port, and nobody listens at it
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(OfframpError, match=f"no server answers at {url}"):
            run_client(options_for(tmp_path, url=url, rate_per_s=10.0))


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({}, id="no way of sending"),
        pytest.param({"rate_per_s": 1.0, "concurrency": 1}, id="two ways of sending"),
        pytest.param({"rate_per_s": 0.0}, id="no rate"),
        pytest.param({"rate_per_s": 1.0, "connections": 3, "most_connections": 2}, id="too many connections"),
        pytest.param({"rate_per_s": 1.0, "rps": 1.0}, id="an unknown option"),
    ],
)
def test_options_that_contradict_each_other_are_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        options_for(tmp_path, **given)


@pytest.mark.parametrize(
    "at_s",
    [
        pytest.param((0.2, 0.1), id="descending"),
        pytest.param((-0.1,), id="before the start"),
        pytest.param((1.0,), id="after the end"),
        pytest.param((), id="none"),
    ],
)
async def test_send_times_that_cannot_be_are_refused(tmp_path: Path, at_s: tuple[float, ...]) -> None:
    with pytest.raises(DataError):
        await send_load(options_for(tmp_path, times=times_file(tmp_path, *at_s)))


async def test_a_schedule_with_nothing_to_count_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing is due"):
        await send_load(options_for(tmp_path, times=times_file(tmp_path, 0.1), warmup_s=0.5))


@pytest.mark.parametrize("kind", ["of the system", "of the loop"])
async def test_an_alarm_never_rings_before_its_time_and_can_be_set_again(kind: str) -> None:
    loop = asyncio.get_running_loop()
    rung_s: list[float] = []
    set_s: list[float] = []
    done = loop.create_future()

    def ring() -> None:
        rung_s.append(time.monotonic())
        if len(rung_s) == 3:
            done.set_result(None)
        else:
            set_next()

    def set_next() -> None:
        set_s.append(time.monotonic() + 0.001)
        alarm.set(set_s[-1])

    alarm: Alarm = (
        new_alarm(loop, time.monotonic, ring) if kind == "of the system" else LoopTimer(loop, time.monotonic, ring)
    )
    set_next()
    await done
    alarm.close()
    assert all(rung >= at for rung, at in zip(rung_s, set_s, strict=True))
