"""The application: an ingress and one deployment per stage."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, cast

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import LoggingConfig

from cluster.devices import find_device
from deployments.ingress import Ingress
from deployments.router import FillFirstRouter
from deployments.settings import ServeSettings
from deployments.stage import StageReplica
from earlyexit.store import read_card
from optimizer.plan_file import ModelShape, parse_plan

# Serve must never hold calls back: how much is under way is the dispatcher's to decide.
UNLIMITED = 100_000
# A dead replica is noticed within a second instead of ten (an only replica is back in 1.8 s instead of 9.8 s);
# the patience with a busy one stays long.
HEALTH: dict[str, Any] = {"health_check_period_s": 1.0, "health_check_timeout_s": 10.0}


def logging_of(settings: ServeSettings) -> LoggingConfig:
    """JSON; at INFO Serve makes a record of every request, even one that nobody writes."""
    level = "INFO" if settings.access_log else "WARNING"
    return LoggingConfig(encoding="JSON", enable_access_log=settings.access_log, log_level=level)


def build(settings: dict[str, Any]) -> Application:
    """The application of some settings (`ServeSettings` as plain data, as cluster YAML carries them).

    Raises PlanError or ModelFolderError before anything starts.
    """
    checked = ServeSettings.model_validate(settings)
    card = read_card(Path(checked.model))
    plan = parse_plan(checked.plan, ModelShape(num_blocks=card.num_blocks, ramps=card.ramps))
    logging_config = logging_of(checked)
    names: Counter[str] = Counter()
    stages = []
    for index, stage in enumerate(plan.stages):
        device = find_device(stage.device)
        deployment = serve.deployment(
            name=f"split-{stage.device}-{names[stage.device]}",
            num_replicas=stage.replicas,
            max_ongoing_requests=UNLIMITED,
            ray_actor_options=device.actor_options,
            request_router_config=RequestRouterConfig(request_router_class=cast(Any, FillFirstRouter)),
            logging_config=logging_config,
            **HEALTH,
        )
        names[stage.device] += 1
        stages.append(deployment(StageReplica).bind(settings, index))
    ingress = serve.deployment(
        name="ingress",
        num_replicas=checked.ingress_replicas,
        max_ongoing_requests=UNLIMITED,
        ray_actor_options={"num_cpus": 0.1},
        logging_config=logging_config,
        **HEALTH,
    )
    application: Application = ingress(Ingress).bind(settings, *stages)
    return application
