"""Tests of the comparison with other servers: bodies, processes, the client, a side's turn, kernels."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from earlyexit.errors import OfframpError
from earlyexit.training.ramps import exit_outputs
from experiments.peers.client import ClientOptions, LoadResult, run_client, send_load, summarize, write_inputs
from experiments.peers.processes import MARK, Server, serving
from experiments.peers.stock import Kernel, Prediction, ServerOptions, StockModel, Texts, answer, parse_body
from offramp.client.protocol import Prediction as Answered
from offramp.load.generator import RequestRecord
from tests.end_to_end.tiny_service import LABELS, NUM_BLOCKS, make_model, some_texts
from tests.free_port import free_port
from tests.offramp.load.scripted_server import ok, scripted

ANSWER = ok('{"label": "yes", "score": 1.0, "exit": 2}')
# A parent whose child loses its environment, as a process does that renames itself, and prints its process id.
FAMILY = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], env={}, stdin=subprocess.PIPE)
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_requests_of_several_texts_are_one_batch_and_get_their_own_answers_back() -> None:
    def echo(texts: Sequence[str]) -> list[Prediction]:
        return [Prediction(label=text, score=float(len(texts)), exit=5) for text in texts]

    requests = [parse_body({"inputs": inputs, "ids": ["a"]}) for inputs in ("a", ["b", "c"], ["d"])]
    assert requests[2] == Texts(texts=("d",), alone=False)
    a, b, c, d = ({"label": name, "score": 4.0, "exit": 5} for name in "abcd")
    assert answer(echo, requests) == [a, {"outputs": [b, c]}, {"outputs": [d]}]


def test_a_server_is_its_process_those_with_its_mark_and_their_children() -> None:
    sleeper = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    family, pipe = [sys.executable, "-c", FAMILY], subprocess.PIPE
    with (
        subprocess.Popen(sleeper, stdin=pipe) as leader,
        subprocess.Popen(family, env=os.environ | {MARK: "of-this-test"}, stdin=pipe, stdout=pipe) as parent,
        subprocess.Popen(sleeper, stdin=pipe) as stranger,
    ):
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        server = Server("", leader, "of-this-test", Path())
        assert {process.pid for process in server.processes()} == {leader.pid, parent.pid, child}
        assert stranger.pid not in {process.pid for process in server.processes()}
        assert server.memory_bytes() > 3_000_000  # three interpreters; shared memory is counted in parts
    assert (server.processes(), server.memory_bytes(), server.cpu_s()) == ([], 0, 0)


def test_a_server_that_cannot_start_is_an_error_that_shows_its_log(tmp_path: Path) -> None:
    options = ServerOptions(model=tmp_path / "no-such-model", port=free_port())
    with (
        pytest.raises(OfframpError, match=r"ended with 1 before it answered:\n[\s\S]*no-such-model"),
        serving("ray-serve", options, logs=tmp_path),
    ):
        pytest.fail("it cannot have answered")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = options.model_copy(update={"port": taken.getsockname()[1]})
        with pytest.raises(OfframpError, match="is taken"), serving("ray-serve", options, logs=tmp_path):
            pytest.fail("it cannot have started")


def options_for(folder: Path, url: str = "http://127.0.0.1:1", **changes: Any) -> ClientOptions:
    """Returns options with two texts and a large SLO, so that slow machines do not fail tests."""
    inputs = write_inputs(folder / "inputs.jsonl", ["on", "off"])
    known = {"url": url, "inputs": inputs, "duration_s": 1.0, "slo_s": 60.0, "timeout_s": 60.0}
    return ClientOptions.model_validate(known | changes)


async def test_the_load_client_does_not_count_the_warm_up(tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    options = options_for(tmp_path, rate_per_s=40.0, warmup_s=0.5, duration_s=0.5, seed=3, answers=answers)
    async with scripted(then=(ANSWER,)) as server:
        result = await send_load(options.model_copy(update={"url": server.url}))
        again = options.model_copy(update={"url": server.url, "rate_per_s": 80.0, "warmup_s": 0.25, "duration_s": 0.25})
        assert (await send_load(again.model_copy(update={"answers": None}))).num_sent == result.num_sent
    assert result.num_sent > result.num_counted == result.num_answered > 0
    assert result.goodput_per_s == result.num_answered / 0.5
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert len(rows) == result.num_answered
    assert {(row["label"], row["exit"]) for row in rows} == {("yes", 2)}
    assert {row["input"] for row in rows} == {0, 1}


async def test_the_client_is_another_process_and_fails_if_no_server_listens(tmp_path: Path) -> None:
    async with scripted(then=(ANSWER,)) as server:
        options = options_for(tmp_path, server.url, rate_per_s=1000.0, duration_s=0.1)
        result = await asyncio.to_thread(run_client, options)
    assert result.num_answered == result.num_sent == pytest.approx(100, abs=40)
    assert result.cpu_s > 0
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(OfframpError, match=f"no server answers at {url}"):
        run_client(options_for(tmp_path, url, rate_per_s=10.0))


def record(due_s: float, sent_s: float, done_s: float, error: str | None = None) -> RequestRecord:
    answers = () if error else (Answered(exit=0, request_id="r", label="yes", score=1.0),)
    times: dict[str, Any] = {"scheduled_s": due_s, "sent_s": sent_s, "done_s": done_s}
    return RequestRecord(input_indices=(0,), num_attempts=1, predictions=answers, error=error, **times)


def test_latency_counts_from_the_time_at_which_a_request_was_due(tmp_path: Path) -> None:
    counted = [
        record(1.0, 1.25, 1.5),  # 0.5 s: exactly within the SLO
        record(2.0, 2.0, 2.75),  # 0.75 s: too late
        record(3.0, 3.0, 3.1, "http_503"),
        record(4.0, 4.0, 4.1, "timeout"),
    ]
    options = options_for(tmp_path, rate_per_s=1.0, slo_s=0.5, duration_s=10.0)
    result = summarize(counted, options, num_sent=9, cpu_s=0.02)
    assert (result.num_counted, result.num_answered, result.lost_share) == (4, 2, 0.5)
    assert result.errors == {"http_503": 1, "timeout": 1}
    assert (result.goodput_per_s, result.answered_per_s, result.p50_s) == (0.1, 0.2, 0.625)
    assert result.from_sent_p99_s == pytest.approx(0.745)
    assert result.lateness_p99_s == pytest.approx(0.97 * 0.25)
    assert LoadResult(**json.loads(json.dumps(asdict(result)))) == result
    nothing = summarize(counted[2:], options, num_sent=2, cpu_s=0.0)
    assert (nothing.p50_s, nothing.p99_s, nothing.goodput_per_s) == (None, None, 0.0)


TEXTS = some_texts(20)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def unsplit_answers(folder: Path) -> tuple[list[str], list[float]]:
    """Returns labels and scores of the full model for each input alone, without padding and packing."""
    model, tokenizer = make_model(folder)
    logits = [exit_outputs(model, tokenizer.encode([text]))[NUM_BLOCKS - 1] for text in TEXTS]
    score_N, label_N = torch.cat(logits).softmax(-1).max(-1)
    return [LABELS[label] for label in label_N.tolist()], score_N.tolist()


@pytest.mark.parametrize("kernel", ["packed", pytest.param("onnx", marks=pytest.mark.slow)])  # its export takes long
def test_all_kernels_answer_a_batch_as_the_unsplit_model_its_inputs_one_by_one(tmp_path: Path, kernel: Kernel) -> None:
    labels, scores = unsplit_answers(tmp_path)
    stock = StockModel.load(ServerOptions(model=tmp_path, kernel=kernel))
    predictions = stock.predict(TEXTS)
    assert [each.label for each in predictions] == labels
    assert [each.score for each in predictions] == pytest.approx(scores, abs=1e-5)


def test_the_computation_needs_neither_ray_nor_offramp_nor_transformers() -> None:
    code = "import sys; import experiments.peers.stock; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"ray", "offramp", "deployments", "transformers"} & set(loaded)
