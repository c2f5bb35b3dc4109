"""The methods that Serve calls, each by its RPC's name, on an ingress that has a gRPC port."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.grpc_util import RayServegRPCContext

    from deployments.ingress.access.gate import Gate
    from deployments.ingress.rpc.calls import Rpcs
    from deployments.ingress.tracing.hooks import Tracing


class RpcMethods:
    """What an ingress inherits; nothing is loaded before the first RPC."""

    _gate: Gate | None
    _tracing: Tracing | None

    @cached_property
    def _rpcs(self) -> Rpcs:
        from deployments.ingress.rpc.calls import Rpcs

        tracer = None if self._tracing is None else self._tracing.tracer
        return Rpcs(self, self._gate, tracer)  # type: ignore[arg-type] # an ingress, which is a backend


def _method(name: str) -> Callable[[RpcMethods, bytes, RayServegRPCContext], Awaitable[Any]]:
    async def call(self: RpcMethods, request: bytes, grpc_context: RayServegRPCContext) -> Any:
        return await self._rpcs.call(name, request, grpc_context)

    call.__name__ = name
    return call


for _name in ("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer"):
    setattr(RpcMethods, _name, _method(_name))
