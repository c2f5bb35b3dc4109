"""REST and gRPC give the same answers and errors to the same requests."""

from __future__ import annotations

import gc
import logging
from typing import Any

import grpc
import pytest

from deployments.api.grpc.server import Rpcs, message_class
from deployments.versions.traffic import TrafficSplitter
from earlyexit.errors import (
    AdmissionError,
    ControllerUnavailableError,
    DeadlineError,
    ExecutionError,
    InputError,
    OfframpError,
    OverloadedError,
    StageUnavailableError,
    UnknownModelError,
    UnprocessableInputError,
)
from tests.clock import ManualClock
from tests.deployments.ingress.api.faces import FACES, KEY, Ask, FakeBackend, FakeContext, FakeDesk, client_of, gate
from tests.deployments.ingress.versions.version_world import FakeServed
from tests.model_cards import a_card


@pytest.fixture(params=list(FACES.values()), ids=list(FACES))
def ask(request: pytest.FixtureRequest) -> Ask:
    face: Ask = request.param
    return face


FAILURES: list[tuple[OfframpError, int, grpc.StatusCode, str | None]] = [
    (InputError("300 inputs; at most 256"), 400, grpc.StatusCode.INVALID_ARGUMENT, None),
    (UnprocessableInputError("too long"), 422, grpc.StatusCode.INVALID_ARGUMENT, None),
    (OverloadedError("full", retry_after_s=0.01), 503, grpc.StatusCode.UNAVAILABLE, "1"),
    (AdmissionError("late", retry_after_s=1.0), 503, grpc.StatusCode.UNAVAILABLE, "1"),
    (StageUnavailableError("gone", retry_after_s=1.2), 503, grpc.StatusCode.UNAVAILABLE, "2"),
    (ControllerUnavailableError("gone", retry_after_s=30.0), 503, grpc.StatusCode.UNAVAILABLE, "30"),
    (DeadlineError("no answer within 1 s"), 504, grpc.StatusCode.DEADLINE_EXCEEDED, None),
    (ExecutionError("the model failed"), 500, grpc.StatusCode.INTERNAL, None),
]


async def test_an_error_has_its_status_message_and_retry_after(ask: Ask, backend: FakeBackend) -> None:
    for failure, status, code, retry_after in FAILURES:
        backend.failure = failure
        said = await ask(backend, "pay")
        assert (said.status, said.message, said.retry_after) == (status, str(failure), retry_after), failure.kind
        assert said.code in ("", code.name)


async def test_an_unknown_model_or_version_is_a_404_that_names_the_known_one(ask: Ask, backend: FakeBackend) -> None:
    gc.disable()  # an error in a reference cycle would stay, and keep its request
    model = await ask(backend, "pay", model="other")
    version = await ask(backend, "pay", version="2")
    left = [each for each in gc.get_objects() if isinstance(each, UnknownModelError) and "'other'" in str(each)]
    gc.enable()
    assert model.message == "unknown model 'other'; served is 'intents'"
    assert version.message == "unknown version '2' of 'intents'; served is '1'"
    for said in (model, version):
        assert (said.status, said.code in ("", "NOT_FOUND")) == (404, True)
    assert (backend.requests, left) == ([], [])


async def test_a_request_keeps_its_callers_id_or_gets_a_new_one(ask: Ask, backend: FakeBackend) -> None:
    await ask(backend, "pay", headers={"x-request-id": "r-1"})
    await ask(backend, "pay")
    await ask(backend, "pay")
    given, *made = [request.request_id for request in backend.requests]
    assert (given, len({*made, "", given})) == ("r-1", 4)


async def test_the_selected_version_answers_requests_that_name_none(ask: Ask, backend: FakeBackend) -> None:
    other = FakeServed(version="2", label=1, card=a_card(("a", "b")))
    sides: Any = {"own": backend, "default": other, "canary": None, "share": 0.0, "compare_share": 0.0}
    assert isinstance(backend.versions, FakeDesk)
    backend.versions.splitter = TrafficSplitter(**sides, clock=ManualClock())
    said = await ask(backend, "pay")
    assert (said.version, said.labels, backend.requests) == ("2", ("b",), [])
    assert ((await ask(backend, "pay", version="1")).version, len(backend.requests)) == ("1", 1)


async def test_failures_are_logged_without_their_messages(
    ask: Ask, backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.failure = RuntimeError("secret/path.py: boom")
    said = await ask(backend, "pay", headers={"x-request-id": "r-1"})
    assert (said.status, said.code in ("", "INTERNAL")) == (500, True)
    assert "the server failed on this request" in said.message
    assert "boom" not in said.message + caplog.text
    assert "RuntimeError (its message is left out: it may quote the request)" in caplog.text
    [record] = caplog.records
    assert record.getMessage().startswith("request r-1: ")
    assert record.exc_info is not None
    assert record.exc_info[1] is backend.failure
    caplog.clear()
    backend.failure = ExecutionError("the model failed on this input: KeyError: 'my name'")
    said = await ask(backend, "pay", headers={"x-request-id": "r-1"})
    assert said.message == "the model failed on this input: KeyError: 'my name'"
    [record] = caplog.records
    assert record.getMessage() == "request r-1: execution: the model failed on this input: KeyError"


async def test_frequent_refusals_are_counted_and_not_logged(
    ask: Ask, backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    logged = {}
    for kind in (AdmissionError, OverloadedError, StageUnavailableError):
        backend.failure = failure = kind("refused", retry_after_s=1.0)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            await ask(backend, "pay")
        logged[failure.kind] = len(caplog.records)
    assert logged == {"admission": 0, "overloaded": 0, "stage_unavailable": 0}
    assert [status for _, status in backend.counted] == [503] * 3


async def test_a_body_that_is_too_large_is_not_read(ask: Ask, backend: FakeBackend) -> None:
    said = await ask(backend, "x" * 2001)
    assert (said.status, said.code in ("", "RESOURCE_EXHAUSTED")) == (413, True)
    assert said.message.endswith(" is larger than 2000 bytes")


async def test_requests_without_a_known_key_are_refused_without_quotes(ask: Ask, backend: FakeBackend) -> None:
    without = await ask(backend, "pay", gate=gate())
    wrong = await ask(backend, "pay", gate=gate(), headers={"authorization": "Bearer wrong-0123456789"})
    asked = "send the header `Authorization: Bearer <key>`; commands: set OFFRAMP_API_KEY"
    assert without.message == f"no API key was sent; {asked}"
    assert wrong.message == f"the API key is unknown; {asked}"
    for said in (without, wrong):
        assert (said.status, said.code in ("", "UNAUTHENTICATED")) == (401, True)
    assert backend.requests == []
    assert (await ask(backend, "pay", gate=gate(), headers={"authorization": f"Bearer {KEY}"})).status == 200


async def test_requests_beyond_the_rate_are_refused_with_retry_after(
    ask: Ask, backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    limited = gate(1.0, 2.0)
    asked = [("pay",) * 3, ("pay",), ("pay",)]
    said = [await ask(backend, *texts, gate=limited, headers={"authorization": f"Bearer {KEY}"}) for texts in asked]
    assert [each.status for each in said] == [200, 200, 429]
    assert (said[2].code in ("", "RESOURCE_EXHAUSTED"), said[2].retry_after) == (True, "1")
    assert caplog.records == []


async def test_http_and_grpc_return_the_same_metadata(backend: FakeBackend) -> None:
    async with client_of(backend) as client:
        model, server = (await client.get("/v2/models/intents")).json(), (await client.get("/v2")).json()
    rpcs, request = Rpcs(backend), message_class("ModelMetadataRequest")(name="intents")
    told = await rpcs.call("ModelMetadata", request.SerializeToString(), FakeContext())
    tensors = {
        side: [
            {"name": each.name, "datatype": each.datatype, "shape": list(each.shape)} for each in getattr(told, side)
        ]
        for side in ("inputs", "outputs")
    }
    assert model == {
        "name": "intents",
        "versions": ["1"],
        "platform": "offramp",
        "inputs": [{"name": "text", "datatype": "BYTES", "shape": [-1]}],
        "outputs": [
            {"name": "label", "datatype": "BYTES", "shape": [-1]},
            {"name": "score", "datatype": "FP32", "shape": [-1]},
            {"name": "exit", "datatype": "INT32", "shape": [-1]},
        ],
    }
    assert {"name": told.name, "versions": list(told.versions), "platform": told.platform} | tensors == model
    said = await rpcs.call("ServerMetadata", b"", FakeContext())
    assert server["extensions"] == list(said.extensions) == ["binary_tensor_data", "parameters", "model_repository"]
    names = server["name"], said.name, server["models"], said.version
    assert names == ("offramp", "offramp", ["intents"], server["version"])


@pytest.mark.parametrize("ready", [True, False])
async def test_before_its_stages_are_warm_a_service_is_live_but_not_ready(ready: bool) -> None:
    backend = FakeBackend(is_ready=ready)
    async with client_of(backend) as client:
        assert (await client.get("/v2/health/live")).json() == {"live": True}
        for path in ("/v2/health/ready", "/v2/models/intents/ready", "/v2/models/intents/versions/1/ready"):
            response = await client.get(path)
            name = {"name": "intents"} if "models" in path else {}
            assert (response.status_code, response.json()) == (200 if ready else 503, {"ready": ready} | name)
    rpcs = Rpcs(backend)
    assert (await rpcs.call("ServerLive", b"", FakeContext())).live
    assert (await rpcs.call("ServerReady", b"", FakeContext())).ready == ready
    checked = await rpcs.call("Check", b"\n\x1einference.GRPCInferenceService", FakeContext())
    assert checked.SerializeToString() == bytes([0x08, 1 if ready else 2])  # field 1 of grpc.health.v1's response
    asked = ("intents", "1", ready), ("intents", "", ready), ("other", "", False), ("intents", "2", False)
    for model, version, there in asked:
        request, context = message_class("ModelReadyRequest")(name=model, version=version), FakeContext()
        response = await rpcs.call("ModelReady", request.SerializeToString(), context)
        assert (response.ready, context.code) == (there, grpc.StatusCode.OK)
