"""Serve's request router for stages; the decisions themselves are in `routing.py` and `loads.py`."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deployments.ingress.loads import Loads
from deployments.ingress.routing import fill_first, unavoided


class FillFirstRouter(FIFOMixin, RequestRouter):
    """Routes every call by the inputs it carries: `weight`, `batch` and `avoided` are keyword arguments of each call.

    FIFOMixin is needed: without it a replica that has several calls open within one request hangs.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        self._phase = random.random()
        self._loads: Loads[ReplicaID] = Loads()

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
        call = pending_request.metadata.internal_request_id
        self._loads.end(call)  # it was chosen for before, and not taken
        if avoided:
            names = [replica.replica_id.unique_id for replica in candidate_replicas]
            candidate_replicas = [candidate_replicas[index] for index in unavoided(names, avoided)]
        loads = [self._loads.of(replica.replica_id) for replica in candidate_replicas]
        ranked = [candidate_replicas[index] for index in fill_first(loads, weight, batch, self._phase)]
        if ranked:
            self._loads.begin(call, ranked[0].replica_id, weight)
            pending_request.future.add_done_callback(partial(self._end_unless_sent, call))
        return [[replica] for replica in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._loads.move(pending_request.metadata.internal_request_id, replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._loads.end(internal_request_id)

    def _end_unless_sent(self, call: str, future: asyncio.Future[Any]) -> None:
        if future.cancelled():  # nothing will tell of its end
            self._loads.end(call)
