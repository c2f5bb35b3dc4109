from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from deployments.ingress.api.bodies import InferRequest
from deployments.ingress.rpc.calls import MOST_DETAILS, Rpcs, within
from deployments.ingress.rpc.messages import message_class
from deployments.ingress.rpc.server import REMAINING_S, RPCS
from deployments.ingress.versions.choice import Chosen
from deployments.ingress.versions.tally import Tally
from earlyexit.clock import ManualClock
from earlyexit.errors import (
    AdmissionError,
    ControllerUnavailableError,
    DeadlineError,
    ExecutionError,
    InputError,
    OfframpError,
    OverloadedError,
    StageUnavailableError,
    UnprocessableInputError,
)
from earlyexit.store import ModelCard
from earlyexit.wire import Answer
from tests.deployments.ingress.api.signatures import Described
from tests.deployments.ingress.versions.version_fakes import FakeDesk, FakeServed
from tests.model_cards import a_card

CARD = a_card()
INFER = "/inference.GRPCInferenceService/ModelInfer"


@dataclass
class FakeBackend(Described):
    """Answers label 0 for texts of even length and 1 for the others, unless it is told to fail."""

    card: ModelCard = CARD
    version: str = "1"
    versions: FakeDesk = field(default_factory=FakeDesk)
    chosen: Chosen | None = None
    max_body_bytes: int = 2000
    max_timeout_s: float = 60.0
    ready: bool = True
    failure: BaseException | None = None
    requests: list[InferRequest] = field(default_factory=list)
    counted: list[tuple[str, int]] = field(default_factory=list)

    async def infer(self, request: InferRequest) -> list[Answer]:
        self.requests.append(request)
        if self.failure is not None:
            raise self.failure
        return [Answer(sample_id="", value=len(text) % 2, score=0.75, exit=1) for text in request.rows]

    def choose(self, request_id: str) -> Chosen | None:
        return self.chosen

    def is_ready(self) -> bool:
        return self.ready

    def count_request(self, route: str, status: int) -> None:
        self.counted.append((route, status))


@dataclass
class FakeContext:
    """What Serve would send behind the answer."""

    metadata: list[tuple[str, Any]] = field(default_factory=list)
    code: grpc.StatusCode = grpc.StatusCode.OK
    details: str = ""
    trailing: list[tuple[str, str]] = field(default_factory=list)

    def invocation_metadata(self) -> list[tuple[str, Any]]:
        return self.metadata

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, str]]) -> None:
        self.trailing = trailing_metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details


def infer_bytes(*texts: str, model: str = "intents", version: str = "", timeout: int | None = None) -> bytes:
    message = message_class("ModelInferRequest")(model_name=model, model_version=version, id="7")
    message.inputs.add(name="text", datatype="BYTES", shape=[len(texts)])
    message.inputs[0].contents.bytes_contents.extend(text.encode() for text in texts)
    if timeout is not None:
        message.parameters["timeout"].int64_param = timeout
    return bytes(message.SerializeToString())


async def call(
    name: str, request: bytes = b"", *, backend: FakeBackend | None = None, **metadata: str
) -> tuple[Any, FakeContext]:
    context = FakeContext(metadata=[(key.replace("_", "-"), value) for key, value in metadata.items()])
    return await Rpcs(backend or FakeBackend()).call(name, request, context), context


def model(name: str, *, of: str, version: str = "") -> bytes:
    return bytes(message_class(f"{name}Request")(name=of, version=version).SerializeToString())


async def test_every_rpc_of_the_service_is_answered() -> None:
    for name in RPCS:
        request = infer_bytes("pay") if name == "ModelInfer" else b""
        if name == "ModelMetadata":
            request = model(name, of="intents")
        response, context = await call(name, request)
        assert (type(response).__name__, context.code) == (f"{name}Response", grpc.StatusCode.OK)


@pytest.mark.parametrize("ready", [True, False])
async def test_readiness_is_the_backends(ready: bool) -> None:
    backend = FakeBackend(ready=ready)
    server, _ = await call("ServerReady", backend=backend)
    served, _ = await call("ModelReady", model("ModelReady", of="intents", version="1"), backend=backend)
    assert (server.ready, served.ready) == (ready, ready)


async def test_a_model_that_is_not_served_is_not_ready() -> None:
    for request in (model("ModelReady", of="other"), model("ModelReady", of="intents", version="2")):
        response, context = await call("ModelReady", request)
        assert (response.ready, context.code) == (False, grpc.StatusCode.OK)


async def test_metadata_says_what_the_model_takes_and_gives() -> None:
    response, _ = await call("ModelMetadata", model("ModelMetadata", of="intents"))
    assert [(each.name, each.datatype) for each in (*response.inputs, *response.outputs)] == [
        ("text", "BYTES"),
        ("label", "BYTES"),
        ("score", "FP32"),
        ("exit", "INT32"),
    ]


async def test_texts_are_answered_in_order_and_counted() -> None:
    backend = FakeBackend()
    response, context = await call("ModelInfer", infer_bytes("pay", "bill"), backend=backend)
    assert response.raw_output_contents[0] == b"\x04\0\0\0card\x04\0\0\0bill"
    assert (response.id, context.code, backend.counted) == ("7", grpc.StatusCode.OK, [(INFER, 200)])


async def test_a_chosen_version_answers_what_names_none() -> None:
    backend = FakeBackend()
    backend.chosen = Chosen(FakeServed(version="2", label=0), backend, Tally(), ManualClock())
    response, _ = await call("ModelInfer", infer_bytes("pay"), backend=backend)
    assert (response.model_version, response.raw_output_contents[0]) == ("2", b"\x04\0\0\0bill")
    assert backend.requests == []


async def test_the_callers_request_id_comes_back_and_goes_in() -> None:
    backend = FakeBackend()
    _, context = await call("ModelInfer", infer_bytes("pay"), backend=backend, x_request_id="r-1")
    assert (context.trailing, backend.requests[0].request_id) == ([("x-request-id", "r-1")], "r-1")


async def test_a_call_without_an_id_gets_one() -> None:
    backend = FakeBackend()
    _, context = await call("ModelInfer", infer_bytes("pay"), backend=backend)
    assert context.trailing == [("x-request-id", backend.requests[0].request_id)]
    assert backend.requests[0].request_id


@pytest.mark.parametrize(
    ("failure", "code", "status"),
    [
        (InputError("no"), grpc.StatusCode.INVALID_ARGUMENT, 400),
        (UnprocessableInputError("no"), grpc.StatusCode.INVALID_ARGUMENT, 422),
        (DeadlineError("no"), grpc.StatusCode.DEADLINE_EXCEEDED, 504),
        (ExecutionError("no"), grpc.StatusCode.INTERNAL, 500),
    ],
)
async def test_an_error_is_a_status_with_its_message(failure: OfframpError, code: grpc.StatusCode, status: int) -> None:
    backend = FakeBackend(failure=failure)
    response, context = await call("ModelInfer", infer_bytes("pay"), backend=backend)
    assert (context.code, context.details, backend.counted) == (code, "no", [(INFER, status)])
    assert response.SerializeToString() == b""


@pytest.mark.parametrize("kind", [OverloadedError, AdmissionError, StageUnavailableError, ControllerUnavailableError])
async def test_who_may_come_back_is_told_when(kind: type[OverloadedError]) -> None:
    backend = FakeBackend(failure=kind("later", retry_after_s=2.1))
    _, context = await call("ModelInfer", infer_bytes("pay"), backend=backend, x_request_id="r-1")
    assert (context.code, context.details) == (grpc.StatusCode.UNAVAILABLE, "later")
    assert context.trailing == [("x-request-id", "r-1"), ("retry-after", "3")]


@pytest.mark.parametrize(
    ("name", "request_bytes"),
    [
        ("ModelInfer", infer_bytes("pay", model="other")),
        ("ModelInfer", infer_bytes("pay", version="2")),
        ("ModelMetadata", model("ModelMetadata", of="other")),
    ],
)
async def test_an_unknown_model_or_version_is_not_found(name: str, request_bytes: bytes) -> None:
    _, context = await call(name, request_bytes)
    assert context.code is grpc.StatusCode.NOT_FOUND
    assert context.details.startswith("unknown ")


async def test_a_message_that_is_too_large_is_refused_unread() -> None:
    _, context = await call("ModelInfer", b"\xff" * 2001)
    assert (context.code, context.details) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "the message is larger than 2000 bytes",
    )


async def test_what_is_no_message_is_the_callers_error() -> None:
    _, context = await call("ModelInfer", b"\xff\xff")
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_what_nobody_expected_is_internal_and_logged_without_its_words(caplog: pytest.LogCaptureFixture) -> None:
    backend = FakeBackend(failure=RuntimeError("secret"))
    with caplog.at_level(logging.ERROR):
        _, context = await call("ModelInfer", infer_bytes("pay"), backend=backend, x_request_id="r-1")
    assert (context.code, backend.counted) == (grpc.StatusCode.INTERNAL, [(INFER, 500)])
    assert "secret" not in context.details
    assert "request r-1: ModelInfer" in caplog.text


async def test_a_caller_that_went_away_is_counted_and_the_cancelling_goes_on() -> None:
    backend = FakeBackend(failure=asyncio.CancelledError())
    with pytest.raises(asyncio.CancelledError):
        await call("ModelInfer", infer_bytes("pay"), backend=backend)
    assert backend.counted == [(INFER, 499)]


async def test_details_are_short_enough_for_trailers() -> None:
    _, context = await call("ModelInfer", infer_bytes("pay", model="m" * 1500))
    assert len(context.details) == MOST_DETAILS


async def test_the_deadline_of_the_call_bounds_the_request() -> None:
    backend = FakeBackend()
    await call("ModelInfer", infer_bytes("pay"), backend=backend, **{REMAINING_S: "1.5"})
    await call("ModelInfer", infer_bytes("pay", timeout=500_000), backend=backend, **{REMAINING_S: "1.5"})
    assert [request.timeout_s for request in backend.requests] == [1.5, 0.5]


async def test_a_call_whose_deadline_has_passed_is_not_begun() -> None:
    backend = FakeBackend()
    _, context = await call("ModelInfer", infer_bytes("pay"), backend=backend, **{REMAINING_S: "0.0"})
    assert (context.code, backend.requests) == (grpc.StatusCode.DEADLINE_EXCEEDED, [])


@pytest.mark.parametrize(
    ("asked_s", "remaining_s", "timeout_s"),
    [
        pytest.param(None, None, None, id="nothing is asked"),
        pytest.param(2.0, None, 2.0, id="no deadline"),
        pytest.param(None, 3.0, 3.0, id="a deadline alone"),
        pytest.param(None, 900.0, 60.0, id="a deadline beyond what is taken is no error"),
        pytest.param(2.0, 3.0, 2.0, id="the timeout comes first"),
        pytest.param(4.0, 3.0, 3.0, id="the deadline comes first"),
        pytest.param(61.0, 3.0, 61.0, id="a timeout beyond what is taken stays, to be refused"),
    ],
)
def test_the_sooner_of_timeout_and_deadline_counts(
    asked_s: float | None, remaining_s: float | None, timeout_s: float | None
) -> None:
    assert within(asked_s, remaining_s, 60.0) == timeout_s
