"""The steps of a change from one plan to the next.

A replica can host any stage of its accelerator type, so a change only needs enough replicas of each type. Types that
need more replicas grow before the switch. Types that need fewer shrink after the earlier plan has drained. So neither
plan lacks replicas while it is in force.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from earlyexit.errors import PlanError
from optimizer.placement import PlacedPlan


def num_started(before: PlacedPlan | None, after: PlacedPlan) -> int:
    """Returns the number of replicas that a change starts."""
    before_counts = {} if before is None else before.occupied
    return sum(max(0, needed - before_counts.get(device, 0)) for device, needed in after.occupied.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Set the number of replicas of an accelerator type, including avoided ones."""

    device: str
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Await:
    """Wait until accelerator types run at least these numbers of replicas."""

    replicas: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Prepare:
    """Prepare every replica for all stages of the next plan on its accelerator type, while it serves."""


@dataclass(frozen=True, slots=True)
class Switch:
    """Switch every ingress to the next plan."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Wait until no input of an earlier plan is in flight."""


ChangeStep = Scale | Await | Prepare | Switch | Drain


def steps(
    before: PlacedPlan | None,
    after: PlacedPlan,
    available: Mapping[str, int],
    running: Mapping[str, int],
    coming: Mapping[str, int] | None = None,
) -> tuple[ChangeStep, ...]:
    """Returns the steps from `before` to `after`, from the replicas that are running to those that `after` needs.

    `available` has the accelerators per type. `coming` includes starting replicas, which hold accelerators but must be
    awaited; None: no replica is starting. If `before` equals `after`, the steps only correct the numbers of replicas.
    Raises PlanError if `after` and its avoided replicas need more accelerators than are available.
    """
    coming = running if coming is None else coming
    requested = {} if before is None else before.occupied
    needed = {device: after.occupied.get(device, 0) for device in sorted({*requested, *after.occupied, *coming})}
    for device, number in needed.items():
        if number > available.get(device, 0):
            raise PlanError(
                f"the plan and its avoided replicas need {number} {device}, but only {available.get(device, 0)} exist"
            )
    missing = {device: number for device, number in needed.items() if number > running.get(device, 0)}
    # A type with the right number of replicas is scaled too if another number was requested, or it would not stay so.
    scales = {
        device: Scale(device=device, replicas=number)
        for device, number in needed.items()
        if (number or device in coming)  # the application has no deployment for other types
        and not number == running.get(device, 0) == coming.get(device, 0) == requested.get(device, 0)
    }
    shrinking = tuple(scale for device, scale in scales.items() if running.get(device, 0) > scale.replicas)
    before_switch: tuple[ChangeStep, ...] = tuple(scale for scale in scales.values() if scale not in shrinking)
    before_switch = (*before_switch, Await(replicas=missing)) if missing else before_switch
    if before == after:
        return (*shrinking, *before_switch, Prepare()) if missing else (*shrinking, *before_switch)
    after_switch: tuple[ChangeStep, ...] = (Drain(), *shrinking) if shrinking else ()
    return (*before_switch, Prepare(), Switch(), *after_switch)
