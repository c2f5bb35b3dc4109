"""From one plan to the next: the steps of the change.

Replicas of an accelerator type host any of its stages, so what a change needs is that each type has enough of them.
Types that need more replicas grow before the switch. Types that need fewer shrink once the earlier plan's last input
is answered, so neither plan lacks replicas while it is followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from earlyexit.errors import PlanError
from optimizer.placement import PlacedPlan


def num_started(before: PlacedPlan | None, after: PlacedPlan) -> int:
    """Replicas that a change-over starts."""
    had = {} if before is None else before.occupied
    return sum(max(0, needed - had.get(device, 0)) for device, needed in after.occupied.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Have an accelerator type run so many replicas, avoided ones among them."""

    device: str
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Await:
    """Wait until accelerator types run at least so many replicas."""

    replicas: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Prepare:
    """Have every replica make ready for all stages of the next plan on its accelerator type, while it serves."""


@dataclass(frozen=True, slots=True)
class Switch:
    """Have every ingress follow the next plan."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Wait until no input is under way by an earlier plan."""


ChangeStep = Scale | Await | Prepare | Switch | Drain


def steps(
    before: PlacedPlan | None,
    after: PlacedPlan,
    counts: Mapping[str, int],
    running: Mapping[str, int],
    coming: Mapping[str, int] | None = None,
) -> tuple[ChangeStep, ...]:
    """What leads from `before`, with the replicas that run now, to `after`, on so many accelerators per type.

    `coming` counts starting replicas too: they have accelerators, but are waited for; None: there are none. Where
    `before` is `after` only what is missing, or too much, is scaled. Raises PlanError where `after` and its avoided
    replicas need more accelerators than there are.
    """
    coming = running if coming is None else coming
    asked = {} if before is None else before.occupied
    needed = {device: after.occupied.get(device, 0) for device in sorted({*asked, *after.occupied, *coming})}
    for device, number in needed.items():
        if number > counts.get(device, 0):
            raise PlanError(
                f"the plan and its avoided replicas need {number} {device}, there are {counts.get(device, 0)}"
            )
    missing = {device: number for device, number in needed.items() if number > running.get(device, 0)}
    # A type that runs as many as it needs is told again where it was told otherwise, for it would not stay so.
    told = {
        device: Scale(device=device, replicas=number)
        for device, number in needed.items()
        if (number or device in coming)  # a type that the application has no more cannot be told
        and not number == running.get(device, 0) == coming.get(device, 0) == asked.get(device, 0)
    }
    shrinking = tuple(scale for device, scale in told.items() if running.get(device, 0) > scale.replicas)
    ahead: tuple[ChangeStep, ...] = tuple(scale for scale in told.values() if scale not in shrinking)
    ahead = (*ahead, Await(replicas=missing)) if missing else ahead
    if before == after:
        return (*shrinking, *ahead, Prepare()) if missing else (*shrinking, *ahead)
    late: tuple[ChangeStep, ...] = (Drain(), *shrinking) if shrinking else ()
    return (*ahead, Prepare(), Switch(), *late)
