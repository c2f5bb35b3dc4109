"""Tests of a small model on a real Ray Serve application."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import httpx
import pytest

from earlyexit.errors import InputError
from offramp import Client
from tests.end_to_end.load import under_load
from tests.end_to_end.one_ray import COLLECTOR_PORT, GRPC_PORT, METRICS_PORT, PORT, OneRay
from tests.end_to_end.tiny_service import Tiny, text_service
from tests.end_to_end.triton_clients import ask_grpc, ask_http
from tests.metrics_page import check_series, once_on_page
from tests.otlp_receiver import Receiver

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("url")]

METRICS_S = 120.0
UPDATE_S = 3.0
"""Longer than `GET /metrics` needs to be up to date, in seconds."""
STUCK_S = 1.0
"""Longer than a request takes to reach a stage."""
TRACES_S = 60.0
TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(scope="module")
def url(one_ray: OneRay, tiny: Tiny) -> str:
    return one_ray.serve(text_service(tiny))


def test_the_service_listens_only_on_its_host(one_ray: OneRay) -> None:
    listening = one_ray.listening()
    assert set(listening) == {"127.0.0.1"}, listening
    assert len(listening["127.0.0.1"]) > 5  # Serve's proxy, Ray's own processes, every replica


def test_a_request_id_is_returned_once_or_created(http: httpx.Client) -> None:
    for path in ("/v2", "/nothing"):
        response = http.get(path, headers={"X-Request-ID": "r-1"})
        assert response.headers.get_list("x-request-id") == ["r-1"]
    response = http.post("/predict", json={"inputs": "pay"})
    assert response.headers.get_list("x-request-id") == [response.json()["request_id"]]


@pytest.fixture(scope="module")
def triton(url: str, tiny: Tiny) -> Any:
    """Returns the answers that Triton's own clients got."""
    return {
        "http": ask_http(f"127.0.0.1:{PORT}", "tiny", tiny.texts),
        "grpc": ask_grpc(f"127.0.0.1:{GRPC_PORT}", "tiny", tiny.texts),
    }


def test_tritons_clients_get_the_same_answers_over_both_transports(triton: Any, tiny: Tiny) -> None:
    http, grpc = triton["http"], triton["grpc"]
    assert http["health"] == grpc["health"] == [True, True, True, False]
    assert (http["server"]["models"], http["model"]["name"]) == (["tiny"], "tiny")
    assert (grpc["server"]["name"], grpc["model"]["name"], grpc["said"]) == ("offramp", "tiny", ["r7", "tiny", "1"])
    for columns in (http["json"], http["binary"], grpc["answers"]):
        for index in range(len(tiny.texts)):
            tiny.check(index, {name: columns[name][index] for name in ("label", "score", "exit")})
    assert (grpc["labels"], grpc["check"]) == (grpc["answers"]["label"], b"\x08\x01")  # SERVING


def test_tritons_clients_get_the_same_refusals_over_both_transports(triton: Any) -> None:
    statuses = {
        "unknown_model": ("404", "NOT_FOUND", "unknown model 'other'; served is 'tiny'"),
        "empty_text": ("400", "INVALID_ARGUMENT", "text: element 0 is empty"),
        "no_time": ("504", "DEADLINE_EXCEEDED", "no answer within 1e-06 s"),
    }
    for name, (over_http, over_grpc, words) in statuses.items():
        assert triton["http"][name] == [over_http, words]
        assert triton["grpc"][name] == [f"StatusCode.{over_grpc}", words]
    grpc = triton["grpc"]
    assert grpc["too_long"][0] == "StatusCode.INVALID_ARGUMENT"
    assert grpc["too_large"] == ["StatusCode.RESOURCE_EXHAUSTED", "the message is larger than 20000 bytes"]
    assert grpc["no_deadline_left"][0] == "StatusCode.DEADLINE_EXCEEDED"
    status, details, metadata = grpc["nothing"]
    assert (status, details) == ("INVALID_ARGUMENT", "inputs: 'text' missing; the model takes 'text'")
    assert metadata["x-request-id"] == "r8"


def test_the_client_predicts(url: str, tiny: Tiny) -> None:
    with Client(url) as client:
        prediction = client.predict(tiny.texts[0], request_id="r-1")
        predictions = client.predict_many(tiny.texts)
        with pytest.raises(InputError, match=r"a request must have at most 32 inputs \(got 33\)"):
            client.predict_many(["pay"] * 33)
    assert prediction.request_id == "r-1"
    for index, each in enumerate([prediction, *predictions]):
        tiny.check(max(0, index - 1), {"label": each.label, "score": each.score, "exit": each.exit})


def test_the_statistics_count_what_every_split_ran(tiny: Tiny, http: httpx.Client) -> None:
    before = split_inputs(http)
    http.post("/predict", json={"inputs": tiny.texts}).raise_for_status()
    after = split_inputs(http)
    exits = [answer.exit for answer in tiny.answers]
    ran = [sum(leaves >= first for leaves in exits) for first in (0, 2, 3)]
    assert [late - early for early, late in zip(before, after, strict=True)] == ran


def test_the_services_own_port_has_metrics_for_prometheus(tiny: Tiny, http: httpx.Client) -> None:
    http.post("/predict", json={"inputs": tiny.texts}).raise_for_status()
    ran = sum(split_inputs(http))
    time.sleep(UPDATE_S)
    page = http.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    series = {
        line.partition(" ")[0]: float(line.rpartition(" ")[2]) for line in page.text.splitlines() if line[0] != "#"
    }
    assert sum(value for name, value in series.items() if name.startswith("offramp_batch_size_sum_total")) == ran
    answered = [value for name, value in series.items() if name.startswith("offramp_answers_total{ingress=")]
    assert sum(answered) >= len(tiny.texts)


def split_inputs(http: httpx.Client) -> list[int]:
    """Returns the number of inputs that every split has run, on its stage's one replica."""
    stats = http.get("/stats").json()
    assert (stats["model"], stats["unanswered"]) == ("tiny", 0)
    return [split["inputs"] for [replica] in stats["stages"] for split in replica["splits"]]


@pytest.mark.parametrize("num_cases", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_the_service_answers_as_its_openapi_description_requires(url: str, num_cases: int) -> None:
    from tests.end_to_end.fuzz import fuzz  # schemathesis takes a second to import

    findings = fuzz(url, num_cases)
    assert findings.problems == []
    assert findings.num_cases >= num_cases
    assert {200, 400, 404} <= set(findings.statuses)


def test_a_request_with_a_trace_is_sent_to_the_collector(tiny: Tiny, http: httpx.Client) -> None:
    deepest = max(range(len(tiny.texts)), key=lambda index: tiny.answers[index].exit)
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "x-request-id": "r-9"}
    with Receiver(COLLECTOR_PORT).running() as receiver:
        response = http.post("/predict", json={"inputs": tiny.texts[deepest]}, headers=headers)
        [root] = receiver.wait_for(1, TRACES_S)
    assert response.headers["traceparent"] == f"00-{TRACE}-{root.span_id}-01"
    assert (root.trace_id, root.attributes["offramp.request_id"]) == (TRACE, "r-9")
    assert root.names == ["prepare", "input", "reply"]
    stages = [span for each in root.named("input") for span in each.children if span.name != "queue"]
    assert [span.attributes["offramp.slot"] for span in stages] == ["split-cpu-0", "split-cpu-1"]
    assert stages[-1].names == ["hop", "stage queue", "split 2 to 2", "stage queue", "split 3 to 3", "hop"]
    [each] = root.named("input")
    assert sum(span.seconds for span in root.children) == pytest.approx(root.seconds, rel=0.01)
    assert sum(span.seconds for span in each.children) == pytest.approx(each.seconds, rel=0.01)


def test_no_answer_is_lost_while_killed_replicas_are_replaced(tiny: Tiny, http: httpx.Client) -> None:
    """Late in the file, because the stages' counts restart."""
    killed = [replica["pid"] for [replica] in http.get("/stats").json()["stages"]]
    with under_load(tiny.texts, clients=8) as load:
        for pid in killed:
            os.kill(pid, signal.SIGSTOP)  # later inputs stay inside until the replicas die
        time.sleep(STUCK_S)
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        load.more(8 * len(tiny.texts))
        [[first], [second]] = http.get("/stats").json()["stages"]
    for index, answer in load.answers:
        tiny.check(index, answer)
    assert {first["pid"], second["pid"]}.isdisjoint(killed)


def test_inputs_that_were_sent_again_are_counted(tiny: Tiny) -> None:
    wanted = {"ray_offramp_retries_total"}
    check_series(once_on_page(METRICS_PORT, wanted, METRICS_S), wanted)
