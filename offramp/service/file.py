"""A service as a file: the model, what is promised, the cluster, and how plans are made.

Whatever is wrong is said as `file:line: what is wrong` before anything starts. Where accelerators are emulated, the
file speaks of their seconds; what the service is told is in seconds of a clock, `time_scale` times as many.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from cluster.devices import find_device
from cluster.inventory import Inventory
from deployments.access import AccessSettings
from deployments.settings import ControlSettings, EmulatedSettings, RepositorySettings, ServeSettings, TracingSettings
from earlyexit.errors import InputError
from offramp.jobs.planning import Solve
from offramp.service.parts import ServiceParts, read_parts
from offramp.service.plan import first_plan, plan_slots, service_problem, stretched
from offramp.service.shape import CONTROL_FIELDS, IngressDocument
from optimizer.plan import Plan
from optimizer.problem import PlanProblem
from profiles.table import LatencyTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A service file, read: what the application is told, and what starting it needs."""

    settings: ServeSettings
    inventory: Inventory
    ingress: IngressDocument

    @property
    def name(self) -> str:
        return self.settings.app


def read_service(path: Path, solve: Solve | None = None) -> Service:
    """Read a service file, and plan its first plan unless it names one; `solve` is the planner's where not given.

    Raises InputError naming file, line, what is wrong and what is allowed or would do.
    """
    parts = read_parts(path)
    problem = service_problem(parts)
    plan = first_plan(parts, problem, solve or _planner())
    return Service(settings=_settings(parts, problem, plan), inventory=parts.inventory, ingress=parts.document.ingress)


def _planner() -> Solve:
    from optimizer.planner import solve

    return solve


def _settings(parts: ServiceParts, problem: PlanProblem, plan: Plan) -> ServeSettings:
    document, scale = parts.document, parts.inventory.time_scale
    said_elsewhere = {"replicas", "port", "grpc_port", "host", "front", "route_prefix"}
    ingress = document.ingress.model_dump(exclude=said_elsewhere, exclude_none=True)
    if document.ingress.replicas is not None:
        ingress["ingress_replicas"] = document.ingress.replicas
    return ServeSettings(
        model=str(parts.model),
        plan=plan,
        app=document.name,
        version=document.model.version,
        route_prefix=document.ingress.route_prefix or _route_prefix(parts.card.name, document.model.version),
        repository=RepositorySettings(**document.repository.model_dump()),
        slots=plan_slots(parts, plan),
        node_labels={name: dict(each.labels) for name, each in parts.inventory.devices.items() if each.labels},
        emulated={name: _emulated(parts, table) for name, table in parts.tables.items() if find_device(name).emulated},
        control=_control(parts, problem) if document.planner.control else None,
        tracing=None if document.tracing is None else TracingSettings(**document.tracing.model_dump()),
        probe_share=document.planner.probe_share if document.planner.control else 0.0,
        slo_s=document.slo.latency_s * scale,
        slack=document.slo.slack,
        dtype=document.model.dtype,
        backend=document.model.backend,
        threads_per_replica=document.model.threads_per_replica,
        access=_access(parts),
        **ingress,
    )


def _access(parts: ServiceParts) -> AccessSettings | None:
    if parts.document.access is None:
        return None
    said = parts.document.access.model_dump()
    if said["keys_file"] is not None:
        said["keys_file"] = str((parts.base / said["keys_file"]).resolve())
    try:
        return AccessSettings(**said)
    except ValidationError as error:
        with parts.source.said_at(("access",)):
            raise InputError(error.errors()[0]["msg"].removeprefix("Value error, ")) from error


def _route_prefix(model: str, version: str) -> str:
    return "/" if version == "1" else f"/v2/models/{model}/versions/{version}"


def _emulated(parts: ServiceParts, table: LatencyTable) -> EmulatedSettings:
    return EmulatedSettings(
        batch=list(table.batches),
        block_s=table.block_s_NB.tolist(),
        ramp_s=table.ramp_s_EB.tolist(),
        time_scale=parts.inventory.time_scale,
        decisions=parts.document.model.decisions,
    )


def _control(parts: ServiceParts, problem: PlanProblem) -> ControlSettings:
    planner = parts.document.planner
    state = (parts.base / (planner.state or f"{parts.document.name}.sqlite")).resolve()
    said = {name: getattr(planner, name) for name in CONTROL_FIELDS if getattr(planner, name) is not None}
    return ControlSettings(
        problem=stretched(problem, parts.inventory.time_scale),
        policy=parts.exits.policy,
        strategy=planner.strategy,
        state=str(state),
        accuracy_budget=parts.exits.budget,
        **said,
    )
