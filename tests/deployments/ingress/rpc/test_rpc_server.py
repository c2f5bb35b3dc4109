from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from deployments.api.grpc.server import REMAINING_S, add_inference_service
from deployments.api.operations import OPERATION_BY_RPC, RPC_SERVICE

LONG = 10_000


class Echo:
    """Answers every RPC with its name, what came, and the deadline that its metadata tells."""

    def __getattr__(self, name: str) -> Any:
        async def answer(request: bytes, context: Any) -> bytes:
            told = dict(context.invocation_metadata()).get(REMAINING_S, "none")
            context.set_trailing_metadata((("told", told),))
            return f"{name} {request.decode()}".encode() * (LONG if request == b"much" else 1)

        return answer


@asynccontextmanager
async def a_server() -> AsyncIterator[int]:
    """Its port."""
    server = grpc.aio.server()
    add_inference_service(Echo(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


@asynccontextmanager
async def channel_to_a_server() -> AsyncIterator[Any]:
    async with a_server() as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel


async def ask(channel: Any, name: str, **options: Any) -> tuple[bytes, dict[str, str]]:
    call = channel.unary_unary(f"/{RPC_SERVICE}/{name}")(b"pay", **options)
    answer = await call
    return answer, dict(await call.trailing_metadata())


async def test_every_rpc_reaches_its_method_as_bytes() -> None:
    async with channel_to_a_server() as channel:
        answers = [(await ask(channel, name))[0] for name in OPERATION_BY_RPC]
    assert answers == [f"{name} pay".encode() for name in OPERATION_BY_RPC]


async def test_the_deadline_of_a_call_is_told_and_none_where_there_is_none() -> None:
    async with channel_to_a_server() as channel:
        _, without = await ask(channel, "ModelInfer")
        _, with_one = await ask(channel, "ModelInfer", timeout=60.0)
    assert without["told"] == "none"
    assert 0 < float(with_one["told"]) < 61  # gRPC sends it rounded up


async def test_rpcs_of_the_protocol_that_are_not_there_are_unimplemented() -> None:
    async with channel_to_a_server() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(channel, "ModelStreamInfer")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@asynccontextmanager
async def counted(port: int) -> AsyncIterator[tuple[int, list[int]]]:
    """A port in front of a server, and how many bytes come back from there, part by part."""
    sent: list[int] = []
    relays: list[asyncio.Task[None]] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counts: list[int]) -> None:
        while part := await reader.read(1 << 16):
            counts.append(len(part))
            writer.write(part)
            await writer.drain()
        writer.close()

    async def both_ways(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", port)
        try:
            await asyncio.gather(pump(reader, to_server, []), pump(from_server, writer, sent))
        finally:
            to_server.close()
            writer.close()

    def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relays.append(asyncio.create_task(both_ways(reader, writer)))

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as front:
        yield front.sockets[0].getsockname()[1], sent
    for each in relays:
        each.cancel()
    await asyncio.gather(*relays, return_exceptions=True)


@pytest.mark.parametrize(
    ("asked", "request_", "is_compressed"),
    [
        ((("accept-encoding", "gzip"),), b"much", True),
        ((("accept-encoding", "gzip"),), b"pay", False),
        ((("accept-encoding", "br"),), b"much", False),
        ((), b"much", False),
    ],
    ids=["gzip", "small", "another-encoding", "nothing-asked"],
)
async def test_a_large_answer_takes_few_bytes_where_it_is_asked_for_compressed(
    asked: tuple[tuple[str, str], ...], request_: bytes, is_compressed: bool
) -> None:
    async with (
        a_server() as port,
        counted(port) as (front, sent),
        grpc.aio.insecure_channel(f"127.0.0.1:{front}") as to,
    ):
        call = to.unary_unary(f"/{RPC_SERVICE}/ModelInfer")(request_, metadata=asked)
        answer = await call
        assert answer == b"ModelInfer " + request_ if request_ == b"pay" else b"ModelInfer much" * LONG
        assert dict(await call.trailing_metadata())["told"] == "none"
    assert (sum(sent) < len(answer) / 50) == is_compressed
