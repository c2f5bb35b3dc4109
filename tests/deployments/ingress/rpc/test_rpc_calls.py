"""What only gRPC has; what it says as REST does is in `api/test_faces.py`."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from deployments.api.grpc.calls import MOST_DETAILS, Rpcs, within
from deployments.api.grpc.messages import message_class
from deployments.api.grpc.server import REMAINING_S
from deployments.api.operations import OPEN_PATHS, OPERATION_BY_RPC, RPC_SERVICE
from tests.deployments.ingress.api.faces import KEY, FakeBackend, FakeContext, gate, infer_bytes

INFER = "/inference.GRPCInferenceService/ModelInfer"


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


async def call(backend: FakeBackend, name: str, request: bytes = b"", **metadata: str) -> tuple[Any, FakeContext]:
    context = FakeContext(metadata=[(key.replace("_", "-"), value) for key, value in metadata.items()])
    return await Rpcs(backend).call(name, request, context), context


async def test_every_rpc_of_the_service_is_answered(backend: FakeBackend) -> None:
    metadata = bytes(message_class("ModelMetadataRequest")(name="intents").SerializeToString())
    requests = {"ModelInfer": infer_bytes("pay"), "ModelMetadata": metadata}
    for name in OPERATION_BY_RPC:
        response, context = await call(backend, name, requests.get(name, b""))
        assert (type(response).__name__, context.code) == (f"{name}Response", grpc.StatusCode.OK)
        assert backend.counted[-1] == (f"/{RPC_SERVICE}/{name}", 200)


async def test_every_rpc_but_health_is_behind_the_keys(backend: FakeBackend) -> None:
    for name in OPERATION_BY_RPC:
        without, behind = FakeContext(), FakeContext(metadata=[("authorization", f"Bearer {KEY}")])
        for context in (without, behind):
            await Rpcs(backend, gate()).call(name, b"", context)
        refused = without.code is grpc.StatusCode.UNAUTHENTICATED
        assert refused == (f"/{RPC_SERVICE}/{name}" not in OPEN_PATHS), name
        assert behind.code is not grpc.StatusCode.UNAUTHENTICATED


async def test_the_requests_ids_come_back(backend: FakeBackend) -> None:
    response, context = await call(backend, "ModelInfer", infer_bytes("pay"), x_request_id="r-1")
    assert (response.id, context.trailing) == ("7", [("x-request-id", "r-1")])
    _, context = await call(backend, "ModelInfer", infer_bytes("pay"))
    assert context.trailing == [("x-request-id", backend.requests[1].request_id)]


async def test_where_there_is_no_answer_the_message_is_empty(backend: FakeBackend) -> None:
    for request in (b"\xff\xff", b"\xff" * 2001):
        response, context = await call(backend, "ModelInfer", request)
        assert response.SerializeToString() == b""
        assert context.code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert backend.counted == [(INFER, 400), (INFER, 413)]


async def test_a_caller_that_went_away_is_counted_and_the_cancelling_goes_on(backend: FakeBackend) -> None:
    backend.failure = asyncio.CancelledError()
    with pytest.raises(asyncio.CancelledError):
        await call(backend, "ModelInfer", infer_bytes("pay"))
    assert backend.counted == [(INFER, 499)]


async def test_details_are_short_enough_for_trailers(backend: FakeBackend) -> None:
    _, context = await call(backend, "ModelInfer", infer_bytes("pay", model="m" * 1500))
    assert len(context.details) == MOST_DETAILS


async def test_the_deadline_of_the_call_bounds_the_request(backend: FakeBackend) -> None:
    await call(backend, "ModelInfer", infer_bytes("pay"), **{REMAINING_S: "1.5"})
    await call(backend, "ModelInfer", infer_bytes("pay", parameters={"timeout": 500_000}), **{REMAINING_S: "1.5"})
    _, passed = await call(backend, "ModelInfer", infer_bytes("pay"), **{REMAINING_S: "0.0"})
    assert [request.timeout_s for request in backend.requests] == [1.5, 0.5]
    assert passed.code is grpc.StatusCode.DEADLINE_EXCEEDED


def test_the_sooner_of_timeout_and_deadline_counts() -> None:
    assert within(None, None, 60.0) is None
    assert within(2.0, None, 60.0) == 2.0
    assert within(None, 3.0, 60.0) == 3.0
    assert within(None, 900.0, 60.0) == 60.0  # a deadline beyond what is taken is no error
    assert within(2.0, 3.0, 60.0) == 2.0
    assert within(4.0, 3.0, 60.0) == 3.0
    assert within(61.0, 3.0, 60.0) == 61.0  # a timeout beyond what is taken stays, to be refused
