"""The methods that Serve calls, by the names of RPCs, on an ingress with a gRPC port."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from deployments.api.operations import OPERATION_BY_RPC

if TYPE_CHECKING:
    from ray.serve.grpc_util import RayServegRPCContext

    from deployments.api.access import Gate
    from deployments.api.grpc.calls import Rpcs
    from deployments.ops.tracing.tracer import Tracer


class RpcMethods:
    """A method for each RPC of the table of operations, for the ingress to inherit; gRPC is loaded at the first RPC."""

    _gate: Gate | None
    _tracer: Tracer | None

    @cached_property
    def _rpcs(self) -> Rpcs:
        from deployments.api.grpc.calls import Rpcs

        return Rpcs(self, self._gate, self._tracer)  # type: ignore[arg-type] # an ingress, which is a backend


def _method(name: str) -> Callable[[RpcMethods, bytes, RayServegRPCContext], Awaitable[Any]]:
    async def call(ingress: RpcMethods, request: bytes, grpc_context: RayServegRPCContext) -> Any:
        return await ingress._rpcs.call(name, request, grpc_context)

    return call


for _name in OPERATION_BY_RPC:
    setattr(RpcMethods, _name, _method(_name))
