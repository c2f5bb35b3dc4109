"""The accelerator types of an application: the replicas that it begins with, and what a node has room for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from cluster.devices import find_device
from deployments.settings import ServeSettings
from earlyexit.errors import PlanError
from optimizer.placement import PlacedPlan


def first_replicas(settings: ServeSettings) -> dict[str, int]:
    """Returns the replicas that every accelerator type starts with: those of the plan and of the controller's problem.

    Serve refuses to start with none: a type that the plan leaves idle has one, until the controller takes it away.
    Raises PlanError where there are too few accelerators for those.
    """
    replicas = dict(PlacedPlan(plan=settings.plan).occupied)
    if settings.control is None:
        return replicas
    supplies = settings.control.problem.devices
    for device, needed in replicas.items():
        if device not in supplies:
            raise PlanError(f"the plan has stages on {device}, which the controller's problem does not have")
        if needed > supplies[device].count:
            raise PlanError(f"the plan needs {needed} {device}, there are {supplies[device].count}")
    return {device: replicas.get(device, 1) for device, supply in supplies.items() if supply.count}


def accelerators(settings: ServeSettings) -> dict[str, int]:
    """Returns the number of accelerators of each type that the application may use at most."""
    used = Counter(first_replicas(settings))
    if settings.control is not None:
        supplies = settings.control.problem.devices
        used |= Counter({device: supply.count for device, supply in supplies.items()})
    return dict(used)


def has_labels(node: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Whether a node has the wanted labels."""
    return wanted.items() <= node.items()


def room(resources: Mapping[str, float], device: str) -> int:
    """Returns the number of replicas of an accelerator type that an empty node could hold."""
    options = find_device(device).actor_options
    accelerator = options.get("accelerator_type")
    if accelerator is not None and f"accelerator_type:{accelerator}" not in resources:
        return 0
    asked = dict(options.get("resources", {}))
    if "num_gpus" in options:
        asked["GPU"] = options["num_gpus"]
    if not asked:
        asked["CPU"] = options["num_cpus"]
    return min(int(resources.get(name, 0) / amount) for name, amount in asked.items() if amount > 0)
