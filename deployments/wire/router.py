"""Serve's request router for replicas: tells where they are. Calls to stages go there without Serve."""

from __future__ import annotations

import random

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from deployments.wire import directory as members
from deployments.wire.messages import Address


class AnnouncingRouter(FIFOMixin, RequestRouter):
    """What Serve itself is asked of replicas (statistics, preparations) goes to any of them.

    FIFOMixin is needed: without it a replica that has several calls open within one request hangs. Serve pickles this
    class by value, and what it uses by reference.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:  # without this the router spins when every replica is at capacity
            pending_request.routing_context.should_backoff = True
        return [random.sample(candidate_replicas, len(candidate_replicas))]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        addresses = {replica.replica_id.unique_id: Address(**replica.replica_metadata) for replica in replicas}
        members.board_of(self._deployment_id.name).announce(addresses)
