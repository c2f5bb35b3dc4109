"""The slots of an application, and the replicas that it begins with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from cluster.devices import find_device
from deployments.settings import ServeSettings
from earlyexit.errors import PlanError
from optimizer.placement import initial_placement, slot_name
from optimizer.plan import Plan


def slot_counts(settings: ServeSettings, plan: Plan) -> dict[str, int]:
    """Returns the slots per accelerator type: those of the settings, else as many as the first plan has stages.

    Raises PlanError where the plan needs more than the settings say.
    """
    needed = Counter(stage.device for stage in plan.stages)
    counts = dict(needed) | settings.slots
    for device, stages in needed.items():
        if counts[device] < stages:
            raise PlanError(f"the plan has {stages} stages on {device}, the settings give it {counts[device]} slots")
    return {device: count for device, count in counts.items() if count > 0}


def slot_devices(slots: dict[str, int]) -> dict[str, str]:
    """Returns the accelerator type of every slot, by the slot's name."""
    return {slot_name(device, index): device for device, count in slots.items() for index in range(count)}


def first_replicas(settings: ServeSettings) -> dict[str, int]:
    """Returns the replicas that every slot starts with.

    Serve refuses to start with none: a slot that the plan leaves idle has one, until the controller takes it away.
    Raises PlanError where there are too few accelerators for those.
    """
    placed = initial_placement(settings.plan)
    slots = slot_counts(settings, placed.plan)
    replicas = {slot: placed.replicas.get(slot, 1) for slot in slot_devices(slots)}
    if settings.control is not None:
        _check_enough(settings, slots, replicas)
    return replicas


def accelerators(settings: ServeSettings) -> dict[str, int]:
    """Returns the number of accelerators of each type that the application may use at most."""
    used: Counter[str] = Counter()
    devices = slot_devices(slot_counts(settings, settings.plan))
    for slot, count in first_replicas(settings).items():
        used[devices[slot]] += count
    if settings.control is not None:
        supplies = settings.control.problem.devices
        used |= Counter({device: supply.count for device, supply in supplies.items() if device in used})
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


def _check_enough(settings: ServeSettings, slots: dict[str, int], replicas: dict[str, int]) -> None:
    assert settings.control is not None
    supplies = settings.control.problem.devices
    for device, count in slots.items():
        if device not in supplies:
            raise PlanError(f"slots on {device}, which the controller's problem does not have")
        needed = sum(replicas[slot_name(device, index)] for index in range(count))
        there = supplies[device].count
        if needed > there:
            raise PlanError(
                f"the plan and one replica in each of its idle slots need {needed} {device}, there are {there}; "
                f"give {device} fewer slots"
            )
