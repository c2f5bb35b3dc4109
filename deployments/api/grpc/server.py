"""Adds the protocol to Serve's gRPC servers, in proxies and ingresses; `cluster/render.py` names it.

Requests stay bytes until an ingress parses them: a proxy would parse them only to write them again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from deployments.api.endpoint import LEAST_BYTES, takes_gzip
from deployments.api.operations import OPERATION_BY_RPC, RPC_SERVICE

REMAINING_S = "offramp-remaining-s"
"""Metadata: seconds until the deadline of the call, which Serve does not pass on."""
ENCODING = "accept-encoding"
"""Metadata of the caller, as in HTTP: with `gzip`, large answers are compressed."""
Unary = Callable[[bytes, Any], Awaitable[bytes]]


def add_inference_service(servicer: Any, server: Any) -> None:
    """Adds the service as generated code does: Serve calls this with a mock, and puts in its own handlers."""
    handlers = {
        f"/{RPC_SERVICE}/{name}": grpc.unary_unary_rpc_method_handler(getattr(servicer, name))
        for name in OPERATION_BY_RPC
    }
    server.add_generic_rpc_handlers((InferenceHandlers(handlers),))


class InferenceHandlers:
    """The handlers of the service, which get the deadline of the call."""

    def __init__(self, handlers: dict[str, grpc.RpcMethodHandler]) -> None:
        self._method_handlers = handlers  # Serve replaces them by this name
        self._wrapped: dict[str, grpc.RpcMethodHandler] = {}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        method = handler_call_details.method
        if method not in self._wrapped and method in self._method_handlers:
            handler = self._method_handlers[method]
            self._wrapped[method] = handler._replace(unary_unary=told_and_compressing(handler.unary_unary))
        return self._wrapped.get(method)


def told_and_compressing(handler: Unary) -> Unary:
    """Puts the deadline of a call into the metadata, and compresses the answers of callers that ask for it."""

    async def call(request: bytes, context: Any) -> bytes:
        remaining_s = context.time_remaining()
        answer = await handler(request, context if remaining_s is None else _Told(context, remaining_s))
        if len(answer) >= LEAST_BYTES and takes_gzip(str(dict(context.invocation_metadata()).get(ENCODING, ""))):
            context.set_compression(grpc.Compression.Gzip)
            await context.send_initial_metadata(())  # sent with the answer, they would not name the compression
        return answer

    return call


class _Told:
    """gRPC's context with one more entry of metadata."""

    def __init__(self, context: Any, remaining_s: float) -> None:
        self._context = context
        self._remaining_s = remaining_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return (*self._context.invocation_metadata(), (REMAINING_S, repr(self._remaining_s)))
