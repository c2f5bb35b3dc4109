"""Sampled requests of a whole service, and the spans that a real OTLP receiver gets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.api.grpc.server import message_class
from earlyexit.network.store import read_card
from tests.deployments.ingress.api.faces import FakeContext, infer_bytes
from tests.deployments.ingress.tracing.traced_service import BLOCK_S, settings_of, traced_service
from tests.deployments.wire_fakes import FakeReplica, soon
from tests.otlp_receiver import Received, Receiver

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SLOT = "split-emulated-V100-0"
FIRST, SECOND = "stage split-emulated-V100-0", "stage split-emulated-V100-1"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver().running() as receiver:
        yield receiver


def lasting(span: Received) -> float:
    """Returns the seconds of a request as the sum of the leaf spans of its slowest input."""
    slowest = max(span.named("input"), key=lambda each: each.begin_s + each.seconds)
    aside = [child for child in span.children if child.name != "input"]
    return sum(leaf.seconds for top in (*aside, slowest) for leaf in leaves(top))


def leaves(span: Received) -> list[Received]:
    return [leaf for child in span.children for leaf in leaves(child)] if span.children else [span]


async def test_the_spans_of_a_request_add_up_to_its_latency(tmp_path: Path, receiver: Receiver) -> None:
    async with traced_service(settings_of(tmp_path, endpoint=receiver.url, ratio=1.0)) as service:
        for ids in ("a", "b", "c", "d", "abcd"):
            assert (await service.ask(*ids)).status_code == 200
    roots = receiver.requests()
    assert [each.attributes["offramp.exit"] for each in roots[-1].named("input")] == [0, 1, 2, 3]
    assert [each.attributes["offramp.batch"] for each in roots[-1].named("split 0 to 1")] == [4] * 4
    assert [each.attributes["offramp.batch"] for each in roots[-1].named("split 2 to 2")] == [2] * 2
    assert [lasting(root) for root in roots] == pytest.approx([root.seconds for root in roots], rel=1e-3)
    assert [root.seconds >= blocks * BLOCK_S for root, blocks in zip(roots, (1, 2, 3, 4, 4), strict=True)] == [True] * 5


async def test_an_input_of_all_stages_has_spans_of_queues_splits_and_hops(tmp_path: Path, receiver: Receiver) -> None:
    async with traced_service(settings_of(tmp_path, endpoint=receiver.url, ratio=1.0)) as service:
        await service.ask("d", headers={"x-request-id": "r-7"})
    [root] = receiver.requests()
    assert (root.name, root.service, receiver.paths) == ("POST /predict", "traced", {"/v1/traces"})
    assert root.attributes == {
        "http.request.method": "POST",
        "http.route": "/predict",
        "url.path": "/predict",
        "url.scheme": "http",
        "http.response.status_code": 200,
        "offramp.inputs": 1,
        "offramp.request_id": "r-7",
    }
    assert root.names == ["prepare", "input", "reply"]
    [first], [second] = root.named(FIRST), root.named(SECOND)
    assert [span.names for span in (first, second)] == [
        ["hop", "stage queue", "split 0 to 1", "hop"],
        ["hop", "stage queue", "split 2 to 2", "stage queue", "split 3 to 3", "hop"],
    ]
    assert (first.attributes["offramp.replica"], second.attributes["offramp.block"]) == ("split-emulated-V100-0-r", 2)
    assert ("offramp.exit" in first.attributes, second.attributes["offramp.exit"]) == (False, 3)
    for span in (first, second):
        inside_s = sum(child.seconds for child in span.children if child.name != "hop")
        told_s = span.attributes["offramp.queue_s"] + span.attributes["offramp.compute_s"]
        hop_s = sum(hop.seconds for hop in span.named("hop"))
        assert (inside_s, hop_s) == pytest.approx((told_s, span.attributes["offramp.hop_s"]), abs=1e-6)
    [split] = root.named("split 0 to 1")
    assert (split.attributes["offramp.batch"], split.attributes["offramp.target_batch"]) == (1, 4)


async def test_an_rpc_is_traced_like_an_http_request_and_returns_its_trace(tmp_path: Path, receiver: Receiver) -> None:
    context = FakeContext(metadata=[("traceparent", f"00-{TRACE}-{PARENT}-01"), ("x-request-id", "r-7")])
    async with traced_service(settings_of(tmp_path, endpoint=receiver.url, ratio=0.0)) as service:
        message = message_class("ModelInferRequest").FromString(infer_bytes("pay", model=read_card(tmp_path).name))
        message.parameters["ids"].string_param = '["d"]'
        await service.rpcs.call("ModelInfer", message.SerializeToString(), context)
        await service.rpcs.call("ModelInfer", infer_bytes("pay", model="another"), FakeContext(context.metadata))
        await service.rpcs.call("ServerLive", b"", FakeContext())
    [root, bad] = receiver.requests()
    assert (root.name, root.trace_id, root.parent_id) == ("inference.GRPCInferenceService/ModelInfer", TRACE, PARENT)
    assert root.attributes == {
        "rpc.system.name": "grpc",
        "rpc.method": "inference.GRPCInferenceService/ModelInfer",
        "rpc.response.status_code": "OK",
        "offramp.inputs": 1,
        "offramp.request_id": "r-7",
    }
    assert root.names == ["prepare", "input", "reply"]
    assert lasting(root) == pytest.approx(root.seconds, rel=1e-3)
    assert context.trailing == [("x-request-id", "r-7"), ("traceparent", f"00-{TRACE}-{root.span_id}-01")]
    assert (bad.names, bad.failed, bad.attributes["rpc.response.status_code"]) == (["prepare"], False, "NOT_FOUND")


async def test_a_callers_trace_is_continued_and_returned(tmp_path: Path, receiver: Receiver) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    async with traced_service(settings_of(tmp_path, endpoint=receiver.url, ratio=0.0)) as service:
        response = await service.ask("a", headers=headers)
        silent = await service.ask("a", headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
        unasked = await service.ask("a")
        malformed = await service.ask("a", headers={"traceparent": f"00-{TRACE}-01"})
    [root] = receiver.requests()
    assert (root.trace_id, root.parent_id, root.trace_state) == (TRACE, PARENT, "vendor=1")
    returned = (f"00-{TRACE}-{root.span_id}-01", "vendor=1")
    assert (response.headers["traceparent"], response.headers["tracestate"]) == returned
    assert ["traceparent" in each.headers for each in (silent, unasked, malformed)] == [False] * 3


async def test_an_input_that_is_sent_again_shows_its_attempts(tmp_path: Path, receiver: Receiver) -> None:
    async with traced_service(settings_of(tmp_path, endpoint=receiver.url, ratio=1.0)) as service:
        dying = FakeReplica("r0")
        await dying.listen()
        service.board.announce({"r0": dying.address})
        response = asyncio.create_task(service.ask("a"))
        await soon(dying.asked.get())
        service.board.announce({"r1": service.addresses[f"{SLOT}-r"]})
        dying.die()
        assert (await response).status_code == 200
    [root] = receiver.requests()
    [each], (lost, answered) = root.named("input"), root.named(FIRST)
    assert each.names == ["queue", FIRST, "queue", FIRST]
    assert [span.attributes["offramp.attempt"] for span in (lost, answered)] == [1, 2]
    assert (lost.failed, answered.failed, each.failed) == (True, False, False)
    assert "ConnectionError" in lost.said
    assert lasting(root) == pytest.approx(root.seconds, rel=1e-3)


async def test_a_request_that_is_not_answered_in_time_shows_where_it_was(tmp_path: Path, receiver: Receiver) -> None:
    async with traced_service(settings_of(tmp_path, endpoint=receiver.url, ratio=1.0)) as service:
        response = await service.ask("a", body={"timeout_s": 0.9 * BLOCK_S})
    [root] = receiver.requests()
    status, failure = root.attributes["http.response.status_code"], root.attributes["error.type"]
    assert (response.status_code, status, failure, root.failed) == (504, 504, "504", True)
    [each] = root.named("input")
    assert (each.failed, each.said) == (True, "no answer")
    assert lasting(root) == pytest.approx(root.seconds, rel=1e-3)


async def test_a_refused_request_is_a_span_without_inputs_and_no_error_of_the_server(
    tmp_path: Path, receiver: Receiver
) -> None:
    async with traced_service(settings_of(tmp_path, endpoint=receiver.url, ratio=1.0)) as service:
        await service.http.post("/predict", content=b"{")
        await service.http.get("/v2/health/live")
    [root] = receiver.requests()
    assert (root.names, root.failed, root.attributes["http.response.status_code"]) == (["prepare"], False, 400)


async def test_headers_for_the_collector_come_from_the_environment(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20secret")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "from outside")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    async with traced_service(settings_of(tmp_path, service_name=None)) as service:
        await service.ask("a")
    [root] = receiver.requests()
    assert root.service == "from outside"
    assert receiver.headers[0]["authorization"] == "Bearer secret"


async def test_a_service_that_does_not_trace_answers_without_a_trace(tmp_path: Path) -> None:
    async with traced_service(settings_of(tmp_path)) as service:
        response = await service.ask("a", headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    assert (service.tracer, response.status_code, "traceparent" in response.headers) == (None, 200, False)
