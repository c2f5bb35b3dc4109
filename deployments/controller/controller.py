"""The Serve deployment of the controller: the control loop of one application, its fleet on Ray, and its metrics."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray import serve

from deployments.controller.act import ControlLoop
from deployments.controller.description import describe
from deployments.controller.observe import ServiceFleet, room
from deployments.controller.remember import History
from deployments.local_ray.private import DeploymentHandles, bind_calls, find_applications, scale_deployment
from deployments.metrics import LazyMetrics
from deployments.ops.prometheus import Sample
from deployments.process_setup import BackgroundTasks
from deployments.settings import ServeSettings, initial_replicas
from deployments.wire.controller_link import CONTROLLER
from deployments.wire.messages import IngressReport, ReplicaReport
from earlyexit.clock import WallClock
from earlyexit.errors import OfframpError, raising
from earlyexit.network.store import check_prunable, read_card
from optimizer.plans.plan import PlacedPlan, deployment_name
from optimizer.plans.plan_file import ModelShape, parse_plan
from optimizer.problems.problem import PlanProblem
from optimizer.search.decision import Decision, Strategy

NICENESS = 5
"""Added to the process's niceness, so that planning does not take processor time from serving."""
REPORT_S = 5.0
"""The timeout of reports. The report of a busy replica may be missing until the next tick."""
PREPARE_S = 60.0
"""The timeout for preparing a plan, because replicas may have to compile or load."""
FOLLOW_S = 10.0

logger = logging.getLogger(f"ray.serve.{__name__}")


class Controller(BackgroundTasks):
    """Creates and runs the control loop, and answers requests about it."""

    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc] # Serve awaits it
        super().__init__()
        bind_calls()
        os.nice(NICENESS)
        self._settings = ServeSettings.model_validate(settings)
        self._metrics = LazyMetrics()
        control = self._settings.control
        assert control is not None, "settings with a controller"
        self._history = History.open(Path(control.state), self._settings.app)
        self._loop = ControlLoop(
            RayFleet(self._settings),
            self._history,
            control,
            first=PlacedPlan(plan=self._settings.plan),
            clock=WallClock(),
            sleep=asyncio.sleep,
            solve=_solve,
        )
        self.start("control loop", self._loop.run())
        self.start("export metrics", self._export_metrics())

    async def plans(self) -> list[PlacedPlan] | str:
        """Returns the plans whose stages a replica may have to host; the last is the one that ingresses should follow.

        Returns the reason if there is no plan.
        """
        state = self._loop.state
        both = state.placed, state.followed
        return [each for each in both if each is not None] if state.suspended is None else state.suspended

    async def describe(self) -> dict[str, Any]:
        """Returns the plan, the forecasts and the measurements; see `describe`."""
        return describe(self._loop, self._history, self._settings)

    async def history(self, limit: int) -> list[dict[str, Any]]:
        """Returns the last plans of the history, newest first."""
        return self._history.plans(limit)

    async def samples(self) -> list[Sample]:
        """Returns the last values of the metrics."""
        return self._metrics.samples()

    async def apply(self, plan_document: dict[str, Any], hold: bool = False) -> int:
        """See `ControlLoop.apply`. Also raises PlanError if the plan prunes words and the model does not support it."""
        model = Path(self._settings.model)
        check_prunable(model, parse_plan(dict(plan_document), ModelShape.of(read_card(model))).prune)
        return await self._loop.apply(plan_document, hold=hold)

    async def _export_metrics(self) -> None:
        while True:
            try:
                export_metrics(self._metrics, await self.describe())
            except Exception as error:  # missing metrics must not end planning
                logger.warning("metrics could not be exported", exc_info=error)
            await asyncio.sleep(self._loop.settings.watch_s)


async def _solve(problem: PlanProblem, strategy: Strategy, time_limit_s: float) -> Decision:
    from optimizer.search.planner import solve  # loading its compiled parts takes a moment

    return await asyncio.to_thread(solve, problem, strategy, time_limit_s=time_limit_s)


class RayFleet(DeploymentHandles, ServiceFleet):
    """The ingresses and replicas of one application. Must be used inside a process of the application."""

    def __init__(self, settings: ServeSettings) -> None:
        super().__init__(settings.app)
        self._labels = {device: settings.node_labels.get(device, {}).items() for device in initial_replicas(settings)}
        """The labels that a node must have, by accelerator type that the application may use."""

    async def scale(self, device: str, replicas: int) -> None:
        with raising(OfframpError, f"{device} was not scaled to {replicas}", OfframpError):
            await scale_deployment(self._app, deployment_name(device), replicas)

    async def running(self) -> dict[str, int]:
        deployments = (await find_applications())["applications"][self._app]["deployments"]
        if CONTROLLER not in deployments:
            raise OfframpError("Serve deploys this application anew, and does not list its deployments yet")
        own, controllers = serve.get_replica_context().replica_id.unique_id, deployments[CONTROLLER]["replicas"]
        if any(each["replica_id"] != own and each["state"] != "STARTING" for each in controllers):
            raise OfframpError("another controller runs, which would undo plans of this one; Serve ends one of them")
        accept = "RUNNING", "RECOVERING", "PENDING_MIGRATION"  # Serve has started again, or their node is drained
        found = {name: sum(one["state"] in accept for one in each["replicas"]) for name, each in deployments.items()}
        return {device: found[deployment_name(device)] for device in self._labels}

    async def prepare(self, placed: PlacedPlan) -> None:
        names = {deployment_name(stage.device) for stage in placed.plan.stages}
        await asyncio.gather(*(self.broadcast(name, "prepare", placed, timeout_s=PREPARE_S) for name in names))

    async def follow(self, placed: PlacedPlan) -> None:
        await self.broadcast("ingress", "follow", placed, timeout_s=FOLLOW_S)

    async def suspend(self, reason: str) -> None:
        await self.broadcast("ingress", "suspend", reason, timeout_s=FOLLOW_S)

    async def ingress_reports(self) -> list[IngressReport | None]:
        return await self.try_broadcast("ingress", "report", WallClock().now_s(), timeout_s=REPORT_S)

    async def replica_reports(self) -> list[ReplicaReport]:
        names = map(deployment_name, self._labels)
        reports = await asyncio.gather(*(self.try_broadcast(name, "report", timeout_s=REPORT_S) for name in names))
        # Without the report of one replica, a straggler would be taken for lost.
        return [report for of_type in reports if None not in of_type for report in of_type]

    async def capacity(self) -> dict[str, int]:
        alive = [node for node in await asyncio.to_thread(ray.nodes) if node["Alive"]]
        return {
            device: sum(room(each["Resources"], device) for each in alive if labels <= each.get("Labels", {}).items())
            for device, labels in self._labels.items()
        }


def export_metrics(metrics: LazyMetrics, described: Mapping[str, Any]) -> None:
    """Exports every known figure of a description (`describe`) to Ray."""
    gauge, tuning, observed = metrics.set_gauge, described["tuning"], described["observed"]
    gauge("offramp_plan_epoch", "The plan in force", described["epoch"])
    gauge("offramp_stragglers", "Replicas that get no work because they are slow", len(described["stragglers"]))
    for phase, seconds in described["phases_s"].items():
        gauge("offramp_replan_seconds", "Time of the last planning, by phase", seconds, phase=phase)
    for device, accelerator in described["accelerators"].items():
        gauge("offramp_accelerators", "Accelerators alive", accelerator["alive"], device=device)
        ratio = accelerator["latency_ratio"]
        gauge("offramp_latency_ratio", "Seconds that plans expect of batches over the profile's", ratio, device=device)
    for ramp, threshold in tuning["thresholds"].items():
        gauge("offramp_threshold", "Score at which inputs leave, active or not", threshold, ramp=ramp)
    predicted = described["predicted"]
    gauge("offramp_predicted_rate", "Inputs per second that the plan should sustain", predicted.get("rate_per_s"))
    gauge("offramp_observed_rate", "Inputs per second that arrive", observed["rate_per_s"])
    gauge("offramp_goodput", "Answers per second inside the SLO", observed["goodput_per_s"])
    gauge("offramp_agreement", "Share of probes answered as by the full model", observed["agreement"])
    pruned = "Share of probes with pruned words whose last answer equals that for the whole text"
    gauge("offramp_pruned_agreement", pruned, observed["pruned_agreement"])
    gauge("offramp_alarm_evidence", "Evidence of too much loss; the alarm sounds at 1", tuning["evidence"])
    survivals = {"observed": observed["survival"], "forecast": (described["forecast"] or {}).get("survival")}
    survives = "Share of inputs that leave at no ramp before the block"
    for kind, survival in survivals.items():
        for block, share in enumerate(survival or ()):
            gauge("offramp_survival", survives, share, block=str(block), kind=kind)
    metrics.set_totals("offramp_plan_changes", "Changes of the plan, by reason", described["plan_changes"], "reason")
