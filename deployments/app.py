"""The Serve application: an ingress, one deployment per accelerator type, and an optional controller."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import LoggingConfig

from cluster.devices import find_device
from deployments.controller.controller import Controller
from deployments.controller.settings import check_control
from deployments.ingress.build import check_staying
from deployments.ingress_deployment import Ingress
from deployments.replica.host import check_emulated
from deployments.replica.replica import StageReplica
from deployments.settings import ServeSettings, initial_replicas
from deployments.wire.router import AnnouncingRouter
from earlyexit.network.store import check_prunable, read_card
from optimizer.plans.plan import deployment_name
from optimizer.plans.plan_file import ModelShape, parse_plan

LIGHT = {"num_cpus": 0.1}
"""Ray's options of an actor that needs little of a core."""


def build(settings: dict[str, Any]) -> Application:
    """Returns the application of some settings, which are `ServeSettings` as plain data, as in cluster YAML.

    Raises PlanError or ModelFolderError before anything starts.
    """
    checked = ServeSettings.model_validate(settings)
    card = read_card(Path(checked.model))
    settings = checked.model_dump(mode="json") | {"card": card.model_dump(mode="json")}  # without files of this machine
    shape = ModelShape.of(card)
    plan = parse_plan(settings["plan"], shape)
    check_prunable(Path(checked.model), plan.prune)
    check_control(checked, shape)
    check_staying(plan)
    if checked.tracing is not None:
        checked.tracing.check()
    replicas = initial_replicas(checked)
    # At level INFO, Serve creates a log record for every request, even if it is not written.
    logs = {"enable_access_log": checked.access_log, "log_level": "INFO" if checked.access_log else "WARNING"}
    deployed = []
    for device, number in replicas.items():
        check_emulated(checked, device, card)
        labels = checked.node_labels.get(device)
        options = find_device(device).actor_options | ({"label_selector": labels} if labels else {})
        router = RequestRouterConfig(request_router_class=cast(Any, AnnouncingRouter))
        of_type = _deployment(deployment_name(device), number, options, logs, request_router_config=router)
        deployed.append(of_type(StageReplica).bind(settings, device))
    if checked.control is not None:  # Serve runs only bound deployments
        logs_decisions = {"enable_access_log": False, "log_level": "INFO"}
        deployed.append(_deployment("controller", 1, LIGHT, logs_decisions)(Controller).bind(settings))
    ingress = _deployment("ingress", checked.ingress_replicas, LIGHT, logs)
    return cast(Application, ingress(Ingress).bind(settings, *deployed))


def _deployment(name: str, number: int, actor_options: dict[str, Any], logs: dict[str, Any], **options: Any) -> Any:
    """Returns a decorator that makes a class a deployment with some replicas.

    Serve must not hold back calls, because the dispatcher limits the calls in flight. With Serve's default health check
    period of 10 s, a dead replica would be replaced much later. The long timeout allows for busy replicas.
    """
    return serve.deployment(
        name=name,
        num_replicas=number,
        ray_actor_options=actor_options,
        max_ongoing_requests=100_000,
        health_check_period_s=1.0,
        health_check_timeout_s=10.0,
        logging_config=LoggingConfig(encoding="JSON", **logs),
        **options,
    )
