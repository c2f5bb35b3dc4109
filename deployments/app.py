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

# Serve must not hold back calls, because the dispatcher limits the calls in flight. With Serve's default health check
# period of 10 s, a dead replica would be replaced much later. The long timeout allows for busy replicas.
COMMON: dict[str, Any] = {
    "max_ongoing_requests": 100_000,
    "health_check_period_s": 1.0,
    "health_check_timeout_s": 10.0,
}


def build(settings: dict[str, Any]) -> Application:
    """Returns the application of some settings, which are `ServeSettings` as plain data, as in cluster YAML.

    Raises PlanError or ModelFolderError before anything starts.
    """
    checked = ServeSettings.model_validate(settings)
    settings = checked.model_dump(mode="json")  # replicas parse it again, where files that it names may be missing
    card = read_card(Path(checked.model))
    shape = ModelShape.of(card)
    plan = parse_plan(settings["plan"], shape)
    check_prunable(Path(checked.model), plan.prune)
    logs = checked.access_log
    # At level INFO, Serve creates a log record for every request, even if it is not written.
    level = "INFO" if logs else "WARNING"
    logging_config = LoggingConfig(encoding="JSON", enable_access_log=logs, log_level=level)
    check_control(checked, shape)
    check_staying(plan)
    if checked.tracing is not None:
        checked.tracing.check()
    replicas = initial_replicas(checked)
    for device in replicas:
        check_emulated(checked, device, card)
    types = [_replicas(settings, device, number, logging_config) for device, number in replicas.items()]
    ingress = serve.deployment(
        name="ingress",
        num_replicas=checked.ingress_replicas,
        ray_actor_options={"num_cpus": 0.1},
        logging_config=logging_config,
        **COMMON,
    )
    controllers = [] if checked.control is None else [_controller(settings)]  # Serve runs only bound deployments
    application: Application = ingress(Ingress).bind(settings, *types, *controllers)
    return application


def _replicas(settings: dict[str, Any], device: str, number: int, logging_config: LoggingConfig) -> Application:
    labels = settings.get("node_labels", {}).get(device)
    deployment = serve.deployment(
        name=deployment_name(device),
        num_replicas=number,
        ray_actor_options=find_device(device).actor_options | ({"label_selector": labels} if labels else {}),
        request_router_config=RequestRouterConfig(request_router_class=cast(Any, AnnouncingRouter)),
        logging_config=logging_config,
        **COMMON,
    )
    application: Application = deployment(StageReplica).bind(settings, device)
    return application


def _controller(settings: dict[str, Any]) -> Application:
    """Returns the controller, which logs one line per decision at level INFO."""
    deployment = serve.deployment(
        name="controller",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0.1},
        logging_config=LoggingConfig(encoding="JSON", enable_access_log=False, log_level="INFO"),
        **COMMON,
    )
    application: Application = deployment(Controller).bind(settings)
    return application
