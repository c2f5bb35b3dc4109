"""A plan on its slots: which deployment hosts each stage, and which replicas get no work."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from earlyexit.errors import PlanError
from optimizer.plan import Plan, Stage
from optimizer.plan_file import parse_plan, plan_document


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPlan:
    """A plan whose stages have slots; refuses two stages in one slot, and a slot of another accelerator type."""

    plan: Plan
    slots: tuple[str, ...]
    """One per stage, in the plan's order: the Serve deployment that hosts it."""
    avoided: Mapping[str, str] = field(default_factory=dict)
    """Replicas that get no work, stragglers: Serve's unique id -> the slot it is in, of the plan or not."""

    def __post_init__(self) -> None:
        if len(self.slots) != len(self.plan.stages):
            raise PlanError(f"{len(self.plan.stages)} stages need as many slots, not {len(self.slots)}")
        if len(set(self.slots)) != len(self.slots):
            raise PlanError(f"two stages in one slot: {list(self.slots)}")
        for stage, slot in zip(self.plan.stages, self.slots, strict=True):
            if not is_slot_of(stage.device, slot):
                raise PlanError(f"slot {slot!r} is not of {stage.device}")

    @property
    def epoch(self) -> int:
        return self.plan.epoch

    @property
    def avoided_ids(self) -> frozenset[str]:
        return frozenset(self.avoided)

    @property
    def stage_of(self) -> Mapping[str, Stage]:
        """By slot."""
        return dict(zip(self.slots, self.plan.stages, strict=True))

    @property
    def replicas(self) -> Mapping[str, int]:
        """How many replicas each slot of the plan needs, avoided ones not counted."""
        return {slot: stage.replicas for slot, stage in self.stage_of.items()}

    @property
    def occupied(self) -> Mapping[str, int]:
        """How many replicas each slot runs, avoided ones too: they keep their accelerators from being used again."""
        avoided = Counter(self.avoided.values())
        return {slot: self.replicas.get(slot, 0) + avoided[slot] for slot in {**self.replicas, **avoided}}


def initial_placement(plan: Plan, avoided: Mapping[str, str] | None = None) -> PlacedPlan:
    """Where no plan was before: every stage in the next slot of its accelerator type."""
    placed: Counter[str] = Counter()
    slots = []
    for stage in plan.stages:
        slots.append(slot_name(stage.device, placed[stage.device]))
        placed[stage.device] += 1
    return PlacedPlan(plan=plan, slots=tuple(slots), avoided=avoided or {})


def slot_name(device: str, index: int) -> str:
    """Serve's name of an accelerator type's slot."""
    return f"{slot_prefix(device)}{index}"


def slot_prefix(device: str) -> str:
    """What all slots of an accelerator type begin with; names of deployments travel in URLs."""
    return f"split-{re.sub(r'[^A-Za-z0-9_]', '-', device)}-"


def is_slot_of(device: str, slot: str) -> bool:
    """Whether a slot is one of an accelerator type's."""
    prefix = slot_prefix(device)
    return slot.startswith(prefix) and slot.removeprefix(prefix).isdecimal()


def placed_document(placed: PlacedPlan) -> dict[str, Any]:
    """Plain data that `parse_placed` reads back."""
    avoided = dict(sorted(placed.avoided.items()))
    return {"plan": plan_document(placed.plan), "slots": list(placed.slots), "avoided": avoided}


def parse_placed(document: Mapping[str, Any]) -> PlacedPlan:
    """Read what `placed_document` wrote; raises PlanError."""
    return PlacedPlan(
        plan=parse_plan(document["plan"]),
        slots=tuple(document["slots"]),
        avoided=dict(document["avoided"]),
    )
