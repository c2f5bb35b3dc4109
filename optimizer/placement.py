"""Placement: assigns the stages of a plan to the replicas that are alive.

Each accelerator type has one Serve deployment. Any of its replicas may host any stage of the plan on that type, so a
change of plan starts replicas only if a type needs more of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from optimizer.plan import Plan, Stage
from optimizer.plan_file import parse_plan, plan_document


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPlan:
    """A plan, and the state of the replicas that serve it."""

    plan: Plan
    avoided: Mapping[str, str] = field(default_factory=dict)
    """Stragglers, which get no work: accelerator type by Serve's unique replica id."""
    hosted: Mapping[str, str] = field(default_factory=dict)
    """The slot that each replica hosted when the plan was made, by replica id. Replicas keep their slot if possible."""

    @property
    def epoch(self) -> int:
        return self.plan.epoch

    @property
    def slots(self) -> tuple[str, ...]:
        """The slot of each stage, in the plan's order. The n-th stage of an accelerator type has the n-th slot."""
        num_placed: Counter[str] = Counter()
        slots = []
        for stage in self.plan.stages:
            slots.append(slot_name(stage.device, num_placed[stage.device]))
            num_placed[stage.device] += 1
        return tuple(slots)

    @property
    def stage_of(self) -> Mapping[str, Stage]:
        """The stages by slot."""
        return dict(zip(self.slots, self.plan.stages, strict=True))

    @property
    def occupied(self) -> Mapping[str, int]:
        """Replicas per accelerator type, including avoided ones, because they still occupy their accelerators."""
        counts = Counter(self.avoided.values())
        for stage in self.plan.stages:
            counts[stage.device] += stage.replicas
        return dict(counts)

    def needed(self, device: str) -> Mapping[str, int]:
        """Returns how many replicas each slot of an accelerator type needs, in the plan's order."""
        return {slot: stage.replicas for slot, stage in self.stage_of.items() if stage.device == device}

    def roles(self, device: str, live: Collection[str]) -> dict[str, str]:
        """Returns the slot that each live replica of an accelerator type hosts, by the replica's id.

        The result is deterministic, so all ingresses that see the same replicas agree. Avoided replicas host a slot
        only if there are fewer other replicas than stages.
        """
        needed = self.needed(device)
        working = [replica for replica in live if replica not in self.avoided]
        return roles(needed, working if len(working) >= len(needed) else live, self.hosted)


def roles(needed: Mapping[str, int], live: Collection[str], before: Mapping[str, str]) -> dict[str, str]:
    """Returns the slot that each live replica of one accelerator type hosts, by the replica's id.

    `needed` holds replicas per slot, in the plan's order, and `before` the slot that each replica hosted so far. As
    many replicas as possible keep their slot. The others fill the open places, in the order of their ids.
    """
    ordered = sorted(live, key=lambda replica: (len(replica), replica))  # numbers in ids ascend numerically
    assigned: dict[str, str] = {}
    places = divide_replicas(needed, len(ordered), Counter(before[replica] for replica in ordered if replica in before))
    for replica in ordered:
        slot = before.get(replica, "")
        if places.get(slot, 0):
            places[slot] -= 1
            assigned[replica] = slot
    others = [replica for replica in ordered if replica not in assigned]
    still_open = [slot for slot, number in places.items() for _ in range(number)]
    return assigned | dict(zip(others, still_open, strict=False))


def divide_replicas(needed: Mapping[str, int], number: int, held: Mapping[str, int] | None = None) -> dict[str, int]:
    """Divides a number of replicas among slots: each replica goes to the slot with the least share of its need.

    No slot is therefore empty while another has two. Among equal slots, those that already have the replica come first
    (`held` holds the replicas per slot so far).
    """
    divided, held = dict.fromkeys(needed, 0), held or {}
    for _ in range(number if needed else 0):
        slot = min(divided, key=lambda slot: (divided[slot] / needed[slot], divided[slot] >= held.get(slot, 0)))
        divided[slot] += 1
    return divided


def slot_name(device: str, index: int) -> str:
    """Returns the name of an accelerator type's slot."""
    return f"{deployment_name(device)}-{index}"


def deployment_name(device: str) -> str:
    """Returns the Serve deployment of an accelerator type's replicas. The name is valid in URLs."""
    return f"split-{re.sub(r'[^A-Za-z0-9_]', '-', device)}"


def placed_document(placed: PlacedPlan) -> dict[str, Any]:
    """Returns plain data that `parse_placed` reads. The slots are included for readers; they follow from the plan."""
    return {
        "plan": plan_document(placed.plan),
        "slots": list(placed.slots),
        "avoided": dict(sorted(placed.avoided.items())),
        "hosted": dict(sorted(placed.hosted.items())),
    }


def parse_placed(document: Mapping[str, Any]) -> PlacedPlan:
    """Returns the placed plan from the data of `placed_document`; raises PlanError."""
    return PlacedPlan(
        plan=parse_plan(document["plan"]), avoided=dict(document["avoided"]), hosted=dict(document.get("hosted", {}))
    )
