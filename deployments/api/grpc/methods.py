"""The methods that Serve calls, each by its RPC's name, on an ingress that has a gRPC port."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.grpc_util import RayServegRPCContext

    from deployments.api.access import Gate
    from deployments.api.grpc.calls import Rpcs
    from deployments.api.tracing import Tracing


class RpcMethods:
    """What an ingress inherits; nothing is loaded before the first RPC."""

    _gate: Gate | None
    _tracing: Tracing | None

    @cached_property
    def _rpcs(self) -> Rpcs:
        from deployments.api.grpc.calls import Rpcs

        tracer = None if self._tracing is None else self._tracing.tracer
        return Rpcs(self, self._gate, tracer)  # type: ignore[arg-type] # an ingress, which is a backend

    async def ServerLive(self, request: bytes, grpc_context: RayServegRPCContext) -> Any:
        return await self._rpcs.call("ServerLive", request, grpc_context)

    async def ServerReady(self, request: bytes, grpc_context: RayServegRPCContext) -> Any:
        return await self._rpcs.call("ServerReady", request, grpc_context)

    async def ModelReady(self, request: bytes, grpc_context: RayServegRPCContext) -> Any:
        return await self._rpcs.call("ModelReady", request, grpc_context)

    async def ServerMetadata(self, request: bytes, grpc_context: RayServegRPCContext) -> Any:
        return await self._rpcs.call("ServerMetadata", request, grpc_context)

    async def ModelMetadata(self, request: bytes, grpc_context: RayServegRPCContext) -> Any:
        return await self._rpcs.call("ModelMetadata", request, grpc_context)

    async def ModelInfer(self, request: bytes, grpc_context: RayServegRPCContext) -> Any:
        return await self._rpcs.call("ModelInfer", request, grpc_context)
