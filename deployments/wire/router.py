"""The request router of replicas. It announces their addresses to ingresses, whose calls bypass Serve."""

from __future__ import annotations

import random

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from deployments.wire import directory
from deployments.wire.messages import Address


class AnnouncingRouter(FIFOMixin, RequestRouter):
    """Announces the addresses of replicas. Serve's own requests (statistics, preparations) go to any replica.

    Without FIFOMixin, a replica with several open calls within one request hangs. Serve pickles this class by value, so
    the directory is used through its module, which is pickled by reference.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:  # otherwise the router would spin while every replica is at capacity
            pending_request.routing_context.should_backoff = True
        return [random.sample(candidate_replicas, len(candidate_replicas))]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        addresses = {replica.replica_id.unique_id: Address(**replica.replica_metadata) for replica in replicas}
        directory.directory_of(self._deployment_id.name).announce(addresses)
