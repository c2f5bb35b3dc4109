"""A service as a file: the model, what is promised, the cluster, and how plans are made.

Whatever is wrong is said as `file:line: what is wrong` before anything starts. Where accelerators are emulated, the
file speaks of their seconds; what the service is told is in seconds of a clock, `time_scale` times as many.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from cluster.devices import find_device
from cluster.inventory import Inventory
from deployments.controller.settings import check_tuning
from deployments.settings import ControlSettings, EmulatedSettings, PlanningSettings, ServeSettings
from earlyexit.errors import InputError, PlanError
from offramp.commands.plan import Solve, most_worth
from offramp.spec.application import application_settings
from offramp.spec.documents import IngressDocument
from offramp.spec.model import ServiceParts, calibrated_parts, read_parts
from offramp.spec.plan import first_plan, service_problem, stretched
from optimizer.plan import Plan, PolicySpec
from optimizer.problem import PlanProblem

MODEL = "model"
"""Name of the model's folder in the folder that all nodes have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A service file: the settings of the application, and what is needed to start it."""

    settings: ServeSettings
    inventory: Inventory
    ingress: IngressDocument

    @property
    def name(self) -> str:
        return self.settings.app

    def moved_to(self, at: str | None) -> Service:
        """Returns a service whose nodes find its files in another folder; itself for None."""
        return self if at is None else replace(self, settings=at_folder(self.settings, PurePosixPath(at)))


def read_service(path: Path, solve: Solve | None = None) -> Service:
    """Reads a service file, and makes its first plan unless it names one; `solve`: None for the planner's.

    Raises InputError naming file, line, what is wrong and what is allowed or would do.
    """
    from optimizer import planner

    found: list[tuple[ServiceParts, PlanProblem, Plan]] = []
    refused: list[InputError] = []
    for each in calibrated_parts(read_parts(path)):  # the best plan of a chain with several calibrations
        try:
            problem = service_problem(each)
            found.append((each, problem, first_plan(each, problem, solve or planner.solve)))
        except InputError as error:  # no plan within the SLO, for instance
            refused.append(error)
    if not found:
        raise refused[0]
    parts, problem, plan = found[most_worth(found[0][1].objective, [each.predicted for _, _, each in found])]
    return Service(settings=_settings(parts, problem, plan), inventory=parts.inventory, ingress=parts.document.ingress)


def _settings(parts: ServiceParts, problem: PlanProblem, plan: Plan) -> ServeSettings:
    document, controlled = parts.document, parts.document.planner.control
    with parts.source.said_at(("planner", "tuning")):
        if not controlled and document.planner.tuning != "off":
            raise PlanError(f"tuning {document.planner.tuning!r} is the controller's, and planner.control is false")
    with parts.source.said_at(("planner", "strategy")):
        if controlled and document.planner.strategy == "pame":
            raise PlanError("strategy pame plans from recorded batches, which a controller has none of; control: false")
    return application_settings(
        document,
        plan,
        parts.base,
        node_labels={name: dict(each.labels) for name, each in parts.inventory.devices.items() if each.labels},
        emulated={
            name: EmulatedSettings(
                batch=list(table.batches),
                block_s=table.block_s_NB.tolist(),
                ramp_s=table.ramp_s_EB.tolist(),
                length=None if problem.lengths is None else table.length,
                time_scale=parts.inventory.time_scale,
                decisions=document.model.decisions,
            )
            for name, table in parts.tables.items()
            if find_device(name).emulated
        },
        control=_control(parts, problem) if controlled else None,
        probe_share=document.planner.probe_share if controlled else 0.0,
        slo_s=document.slo.latency_s * parts.inventory.time_scale,
        slack=document.slo.slack,
    )


def _control(parts: ServiceParts, problem: PlanProblem) -> ControlSettings:
    planner = parts.document.planner
    state = (parts.base / (planner.state or f"{parts.document.name}.sqlite")).resolve()
    confidence: dict[str, Any] = (
        {} if parts.exits.confidence is None else {"accuracy_confidence": parts.exits.confidence}
    )
    control = ControlSettings(
        problem=stretched(problem, parts.inventory.time_scale),
        policy=parts.exits.policy,
        state=str(state),
        accuracy_budget=parts.exits.budget,
        **confidence,
        **planner.model_dump(include=set(PlanningSettings.model_fields)),
    )
    with parts.source.said_at(("planner", "tuning")):
        check_tuning(control, planner.probe_share)
    return control


def at_folder(settings: ServeSettings, folder: PurePosixPath) -> ServeSettings:
    """Returns settings for nodes that have all files in one folder: `model/`, other exit records, state and keys."""
    model, plan, control, access = Path(settings.model), settings.plan, settings.control, settings.access
    if plan.policy is not None:
        plan = replace(plan, policy=_moved(plan.policy, model, folder))
    if control is not None:
        state, policy = str(folder / Path(control.state).name), _moved(control.policy, model, folder)
        control = control.model_copy(update={"state": state, "policy": policy})
    if access is not None and access.keys_file is not None:
        access = access.model_copy(update={"keys_file": str(folder / Path(access.keys_file).name)})
    return settings.model_copy(
        update={"model": str(folder / MODEL), "plan": plan, "control": control, "access": access}
    )


def _moved(policy: PolicySpec, model: Path, folder: PurePosixPath) -> PolicySpec:
    if policy.records is None:
        return policy
    records = Path(policy.records)
    inside = folder / MODEL / records.relative_to(model) if records.is_relative_to(model) else folder / records.name
    return replace(policy, records=str(inside))
