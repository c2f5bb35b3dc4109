"""Serve's request router for stages; the decision itself is in `routing.py`."""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deployments.ingress.routing import fill_first, unavoided


class FillFirstRouter(FIFOMixin, RequestRouter):
    """Routes every call by the inputs it carries: `weight`, `batch` and `avoided` are keyword arguments of each call.

    FIFOMixin is needed: without it a replica that has several calls open within one request hangs.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        self._phase = random.random()
        self._loads: dict[ReplicaID, int] = {}
        self._open: dict[tuple[ReplicaID, str], int] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        # Without this the router spins when every replica is at capacity.
        pending_request.routing_context.should_backoff = True
        weight = pending_request.kwargs.get("weight", 1)
        batch = pending_request.kwargs.get("batch", 1)
        avoided = pending_request.kwargs.get("avoided", ())
        if avoided:
            names = [replica.replica_id.unique_id for replica in candidate_replicas]
            candidate_replicas = [candidate_replicas[index] for index in unavoided(names, avoided)]
        loads = [self._loads.get(replica.replica_id, 0) for replica in candidate_replicas]
        return [[candidate_replicas[index]] for index in fill_first(loads, weight, batch, self._phase)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        weight = pending_request.kwargs.get("weight", 1)
        self._open[replica_id, pending_request.metadata.internal_request_id] = weight
        self._loads[replica_id] = self._loads.get(replica_id, 0) + weight

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        weight = self._open.pop((replica_id, internal_request_id), 0)
        left = self._loads.get(replica_id, 0) - weight
        if left > 0:
            self._loads[replica_id] = left
        else:
            self._loads.pop(replica_id, None)
