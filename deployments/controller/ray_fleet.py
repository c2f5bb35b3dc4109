"""The fleet on Ray Serve: replica counts by its scale endpoint, everything else by broadcast."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.controller.fleet import Fleet
from deployments.local_ray.dashboard import RayDashboard
from deployments.slots import has_labels, room
from deployments.wire.messages import Assignment, IngressReport, ReplicaReport
from earlyexit.errors import OfframpError
from optimizer.placement import PlacedPlan, placed_document

REPORT_S = 5.0
"""A replica that is too busy to report for so long counts as silent this time."""
PREPARE_S = 60.0
"""A replica may compile or load what the plan needs."""
FOLLOW_S = 10.0

logger = logging.getLogger(f"ray.serve.{__name__}")


class RayFleet(Fleet):
    """One application's ingresses and slots; used from inside one of its replicas."""

    def __init__(
        self,
        app: str,
        slots: Mapping[str, str],
        devices: tuple[str, ...],
        dashboard_url: str | None,
        node_labels: Mapping[str, Mapping[str, str]],
    ) -> None:
        """`slots`: with their accelerator types. `devices`: the types whose accelerators are counted."""
        self._app = app
        self._slots = slots
        self._devices = devices
        self._dashboard = RayDashboard(dashboard_url)
        self._node_labels = node_labels
        self._handles: dict[str, DeploymentHandle[Any]] = {}

    async def scale(self, slot: str, replicas: int) -> None:
        path = f"/api/v1/applications/{self._app}/deployments/{slot}/scale"
        try:
            await self._dashboard.ask("POST", path, {"target_num_replicas": replicas})
        except OfframpError as error:
            raise OfframpError(f"{slot} was not scaled to {replicas}: {error}") from error

    async def running(self) -> dict[str, int]:
        status = await asyncio.to_thread(serve.status)
        application = status.applications.get(self._app)
        deployments = {} if application is None else application.deployments
        return {
            slot: sum(count for state, count in deployments[slot].replica_states.items() if state == "RUNNING")
            for slot in self._slots
            if slot in deployments
        }

    async def prepare(self, placed: PlacedPlan) -> None:
        calls = [
            self._broadcast(slot, "prepare", Assignment.of(placed.plan, stage), timeout_s=PREPARE_S)
            for slot, stage in placed.stage_of.items()
        ]
        await asyncio.gather(*calls)

    async def follow(self, placed: PlacedPlan) -> None:
        await self._asked_to_follow(placed)

    async def decide(self, placed: PlacedPlan) -> None:
        calls = [
            self._broadcast(slot, "follow", Assignment.of(placed.plan, stage), timeout_s=FOLLOW_S)
            for slot, stage in placed.stage_of.items()
        ]
        followed, *told = await asyncio.gather(self._asked_to_follow(placed), *calls, return_exceptions=True)
        for missed in told:
            if isinstance(missed, BaseException):
                logger.warning("a replica learns the new policy with its next call: %r", missed)
        if isinstance(followed, BaseException):
            raise followed

    async def suspend(self, reason: str) -> None:
        await self._broadcast("ingress", "follow", {"reason": reason}, timeout_s=FOLLOW_S)

    async def ingress_reports(self) -> list[IngressReport]:
        return await self._reports("ingress")

    async def replica_reports(self) -> list[ReplicaReport]:
        reports = await asyncio.gather(*(self._reports(slot) for slot in self._slots))
        return [report for of_slot in reports for report in of_slot]

    async def capacity(self) -> dict[str, int]:
        nodes = await asyncio.to_thread(ray.nodes)
        alive = [node for node in nodes if node["Alive"]]
        return {
            device: sum(
                room(node["Resources"], device)
                for node in alive
                if has_labels(node.get("Labels", {}), self._node_labels.get(device, {}))
            )
            for device in self._devices
        }

    async def _asked_to_follow(self, placed: PlacedPlan) -> list[Any]:
        return await self._broadcast("ingress", "follow", placed_document(placed), timeout_s=FOLLOW_S)

    async def _reports(self, deployment: str) -> list[Any]:
        """Those of a deployment whose replica dies at that moment are missing until the next look."""
        try:
            return await self._broadcast(deployment, "report", timeout_s=REPORT_S)
        except (TimeoutError, RayError) as error:
            logger.warning("reports of %s are missing: %r", deployment, error)
            return []

    async def _broadcast(self, deployment: str, method: str, *arguments: Any, timeout_s: float) -> list[Any]:
        """What every replica returned; nothing where there is none."""
        if deployment not in self._handles:  # in a thread, because making a handle waits for Serve
            self._handles[deployment] = await asyncio.to_thread(serve.get_deployment_handle, deployment, self._app)
        handle = self._handles[deployment]
        try:
            return list(await handle.broadcast(method, *arguments).results_async(timeout_s=timeout_s))
        except DeploymentUnavailableError:
            return []
