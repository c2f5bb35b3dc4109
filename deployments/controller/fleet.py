"""What the control loop asks of the service that it steers: the seam to Ray, with a fake beside it in the tests."""

from __future__ import annotations

from typing import Protocol

from deployments.wire.messages import IngressReport, ReplicaReport
from optimizer.placement import PlacedPlan


class Fleet(Protocol):
    """Ingresses and slots. Every method may fail while a process dies; the loop tries again at its next look."""

    async def scale(self, slot: str, replicas: int) -> None:
        """Have a slot run so many replicas, some time from now."""
        ...

    async def running(self) -> dict[str, int]:
        """Replicas that take calls, per slot."""
        ...

    async def prepare(self, placed: PlacedPlan) -> None:
        """Have all replicas of the plan's slots make ready, and wait for it."""
        ...

    async def follow(self, placed: PlacedPlan) -> None:
        """Have all ingresses follow the plan, and wait for it."""
        ...

    async def decide(self, placed: PlacedPlan) -> None:
        """Have ingresses and replicas at once go by a plan that differs from the one followed in its policy alone.

        Ingresses are waited for; a replica that is not reached learns it with its next call.
        """
        ...

    async def suspend(self, reason: str) -> None:
        """Have all ingresses refuse inputs, with the reason, until they follow a plan again."""
        ...

    async def ingress_reports(self) -> list[IngressReport]:
        """One per ingress; its probes are handed over once."""
        ...

    async def replica_reports(self) -> list[ReplicaReport]:
        """One per replica of every slot."""
        ...

    async def capacity(self) -> dict[str, int]:
        """Accelerators that are alive, in use or not, per type."""
        ...
