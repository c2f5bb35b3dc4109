"""Features of only gRPC, and its server. Common features of REST and gRPC are in `api/test_faces.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from deployments.api.grpc.server import MAX_DETAILS, REMAINING_KEY, Rpcs, add_inference_service, message_class
from deployments.api.operations import OPEN_PATHS, OPERATION_BY_RPC, RPC_PATHS, RPC_SERVICE
from tests.deployments.ingress.api.faces import KEY, FakeBackend, FakeContext, gate, infer_bytes

INFER = "/inference.GRPCInferenceService/ModelInfer"


async def call(backend: FakeBackend, name: str, request: bytes = b"", **metadata: str) -> tuple[Any, FakeContext]:
    context = FakeContext(metadata=[(key.replace("_", "-"), value) for key, value in metadata.items()])
    return await Rpcs(backend).call(name, request, context), context


async def test_every_rpc_of_the_service_is_answered(backend: FakeBackend) -> None:
    metadata = bytes(message_class("ModelMetadataRequest")(name="intents").SerializeToString())
    requests = {"ModelInfer": infer_bytes("pay"), "ModelMetadata": metadata}
    for name in OPERATION_BY_RPC:
        response, context = await call(backend, name, requests.get(name, b""))
        assert (type(response).__name__, context.code) == (f"{name}Response", grpc.StatusCode.OK)
        assert backend.counted[-1] == (RPC_PATHS[name], 200)


async def test_the_health_of_an_unknown_service_is_not_found(backend: FakeBackend) -> None:
    for service in ("", RPC_SERVICE, "other"):
        _, context = await call(backend, "Check", message_class("CheckRequest")(service=service).SerializeToString())
        assert (context.code is grpc.StatusCode.NOT_FOUND) == (service == "other")


async def test_every_rpc_except_health_needs_a_key(backend: FakeBackend) -> None:
    for name in OPERATION_BY_RPC:
        without, behind = FakeContext(), FakeContext(metadata=[("authorization", f"Bearer {KEY}")])
        for context in (without, behind):
            await Rpcs(backend, gate()).call(name, b"", context)
        refused = without.code is grpc.StatusCode.UNAUTHENTICATED
        assert refused == (RPC_PATHS[name] not in OPEN_PATHS), name
        assert behind.code is not grpc.StatusCode.UNAUTHENTICATED


async def test_the_request_ids_are_returned(backend: FakeBackend) -> None:
    response, context = await call(backend, "ModelInfer", infer_bytes("pay"), x_request_id="r-1")
    assert (response.id, context.trailing) == ("7", [("x-request-id", "r-1")])
    _, context = await call(backend, "ModelInfer", infer_bytes("pay"))
    assert context.trailing == [("x-request-id", backend.requests[1].request_id)]


async def test_the_message_of_an_error_is_empty(backend: FakeBackend) -> None:
    for request in (b"\xff\xff", b"\xff" * 2001):
        response, context = await call(backend, "ModelInfer", request)
        assert response.SerializeToString() == b""
        assert context.code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert backend.counted == [(INFER, 400), (INFER, 413)]


async def test_a_cancellation_is_counted_and_raised_again(backend: FakeBackend) -> None:
    backend.failure = asyncio.CancelledError()
    with pytest.raises(asyncio.CancelledError):
        await call(backend, "ModelInfer", infer_bytes("pay"))
    assert backend.counted == [(INFER, 499)]


async def test_details_are_short_enough_for_trailers(backend: FakeBackend) -> None:
    _, context = await call(backend, "ModelInfer", infer_bytes("pay", model="m" * 1500))
    assert len(context.details) == MAX_DETAILS


async def test_the_sooner_of_timeout_and_deadline_limits_the_request(backend: FakeBackend) -> None:
    for remaining_s in ("1.5", "900.0"):  # a later deadline than the maximum of 60 s is not an error
        await call(backend, "ModelInfer", infer_bytes("pay"), **{REMAINING_KEY: remaining_s})
    for timeout_us in (500_000, 4_000_000, 61_000_000):  # a timeout above the maximum is refused later
        asked = infer_bytes("pay", parameters={"timeout": timeout_us})
        await call(backend, "ModelInfer", asked, **{REMAINING_KEY: "1.5"})
    _, passed = await call(backend, "ModelInfer", infer_bytes("pay"), **{REMAINING_KEY: "0.0"})
    assert [request.timeout_s for request in backend.requests] == [1.5, 60.0, 0.5, 1.5, 61.0]
    assert passed.code is grpc.StatusCode.DEADLINE_EXCEEDED


class Echo:
    """Answers every RPC with its name, the request, and the deadline in its metadata."""

    def __getattr__(self, name: str) -> Any:
        async def answer(request: bytes, context: Any) -> bytes:
            told = dict(context.invocation_metadata()).get(REMAINING_KEY, "none")
            context.set_trailing_metadata((("told", told),))
            return f"{name} {request.decode()}".encode()

        return answer


@asynccontextmanager
async def channel_to_a_server() -> AsyncIterator[Any]:
    server = grpc.aio.server()
    add_inference_service(Echo(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


async def ask(channel: Any, name: str, **options: Any) -> tuple[bytes, dict[str, str]]:
    call = channel.unary_unary(RPC_PATHS.get(name, f"/{RPC_SERVICE}/{name}"))(b"pay", **options)
    answer = await call
    return answer, dict(await call.trailing_metadata())


async def test_unknown_rpcs_are_unimplemented() -> None:
    async with channel_to_a_server() as channel:
        answers = [(await ask(channel, name))[0] for name in OPERATION_BY_RPC]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(channel, "ModelStreamInfer")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert answers == [f"{name} pay".encode() for name in OPERATION_BY_RPC]


async def test_the_deadline_of_a_call_is_in_its_metadata() -> None:
    async with channel_to_a_server() as channel:
        _, without = await ask(channel, "ModelInfer", metadata=((REMAINING_KEY, "nan"),))
        _, with_one = await ask(channel, "ModelInfer", timeout=60.0)
    assert without["told"] == "none"
    assert 0 < float(with_one["told"]) < 61  # gRPC sends it rounded up
