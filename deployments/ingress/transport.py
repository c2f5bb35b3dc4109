"""How a piece gets to a stage and its replies back; a faster path can take this interface's place."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol, cast

from ray import ObjectRef
from ray.serve.handle import DeploymentHandle

from deployments.messages import Chunk, StageCall


class Transport(Protocol):
    """One stage, as its callers see it."""

    def call(self, call: StageCall, *, reply_bytes: int, batch: int, avoided: frozenset[str]) -> AsyncIterator[Chunk]:
        """Send a batch that may come back with up to `reply_bytes` of hidden state; its parts as they are ready.

        `batch`: what a replica makes of calls; `avoided`: replicas to leave out while there are others.

        Raises whatever happens on the way; inputs that no part has settled by then may be sent again.
        """
        ...


class HandleTransport:
    """Serve's own handles, streamed: gRPC while everything is small, actor calls and the object store for the rest.

    References never travel in gRPC calls: there they leak.
    """

    def __init__(self, handle: DeploymentHandle[Any], by_reference_bytes: int) -> None:
        self._by_reference_bytes = by_reference_bytes
        # Plain pickle: what travels are our own dataclasses and arrays, for which cloudpickle, the default, is slow.
        self._by_value = handle.options(
            method_name="run",
            stream=True,
            _by_reference=False,
            request_serialization="pickle",
            response_serialization="pickle",
        )
        self._by_reference = handle.options(method_name="run_by_reference", stream=True, _by_reference=True)

    def call(self, call: StageCall, *, reply_bytes: int, batch: int, avoided: frozenset[str]) -> AsyncIterator[Chunk]:
        large = isinstance(call.piece, ObjectRef) or reply_bytes > self._by_reference_bytes
        handle = self._by_reference if large else self._by_value
        weight = len(call.remaining_s)
        return cast("AsyncIterator[Chunk]", handle.remote(call, weight=weight, batch=batch, avoided=avoided))
