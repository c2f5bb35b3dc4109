"""The application: an ingress, one deployment per accelerator type, and a controller where one is asked for."""

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
from deployments.replica.build import check_emulated
from deployments.replica.replica import StageReplica
from deployments.settings import ServeSettings, initial_replicas
from deployments.wire.router import AnnouncingRouter
from earlyexit.network.store import check_prunable, read_card
from optimizer.placement import deployment_name
from optimizer.plan_file import ModelShape, parse_plan

# Serve must never hold calls back: the dispatcher decides how many calls are under way.
UNLIMITED = 100_000
# A dead replica is noticed within a second instead of ten (an only replica is back in 1.8 s instead of 9.8 s).
# A busy replica may still take long to answer.
HEALTH: dict[str, Any] = {"health_check_period_s": 1.0, "health_check_timeout_s": 10.0}


def build(settings: dict[str, Any]) -> Application:
    """Returns the application of some settings (`ServeSettings` as plain data, as cluster YAML carries them).

    Raises PlanError or ModelFolderError before anything starts.
    """
    checked = ServeSettings.model_validate(settings)
    settings = checked.model_dump(mode="json")  # replicas read it anew, where files that it names may be missing
    card = read_card(Path(checked.model))
    shape = ModelShape.of(card)
    plan = parse_plan(settings["plan"], shape)
    check_prunable(Path(checked.model), plan.prune)
    logs = checked.access_log
    # At INFO, Serve creates a record of every request, even if it is not written.
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
        max_ongoing_requests=UNLIMITED,
        ray_actor_options={"num_cpus": 0.1},
        logging_config=logging_config,
        **HEALTH,
    )
    beside = [] if checked.control is None else [_controller(settings)]  # Serve runs only what is bound
    application: Application = ingress(Ingress).bind(settings, *types, *beside)
    return application


def _replicas(settings: dict[str, Any], device: str, number: int, logging_config: LoggingConfig) -> Application:
    labels = settings.get("node_labels", {}).get(device)
    deployment = serve.deployment(
        name=deployment_name(device),
        num_replicas=number,
        max_ongoing_requests=UNLIMITED,
        ray_actor_options=find_device(device).actor_options | ({"label_selector": labels} if labels else {}),
        request_router_config=RequestRouterConfig(request_router_class=cast(Any, AnnouncingRouter)),
        logging_config=logging_config,
        **HEALTH,
    )
    application: Application = deployment(StageReplica).bind(settings, device)
    return application


def _controller(settings: dict[str, Any]) -> Application:
    """The controller logs one line per decision, at INFO."""
    deployment = serve.deployment(
        name="controller",
        num_replicas=1,
        max_ongoing_requests=UNLIMITED,
        ray_actor_options={"num_cpus": 0.1},
        logging_config=LoggingConfig(encoding="JSON", enable_access_log=False, log_level="INFO"),
        **HEALTH,
    )
    application: Application = deployment(Controller).bind(settings)
    return application
