"""Where the stages of an application's first plan begin, before anybody has placed it."""

from __future__ import annotations

from collections import Counter

from optimizer.placement import PlacedPlan, slot_name
from optimizer.plan import Plan


def initial_placement(plan: Plan) -> PlacedPlan:
    """Every stage in the next slot of its accelerator type."""
    placed: Counter[str] = Counter()
    slots = []
    for stage in plan.stages:
        slots.append(slot_name(stage.device, placed[stage.device]))
        placed[stage.device] += 1
    return PlacedPlan(plan=plan, slots=tuple(slots))
