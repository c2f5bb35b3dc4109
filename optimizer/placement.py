"""A plan on replicas: which stage each replica hosts, and which replicas get no work.

There is one Serve deployment per accelerator type. Any of its replicas may host any stage of the plan on that type, so
a change of plan starts replicas only where a type needs more of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from optimizer.plan import Plan, Stage
from optimizer.plan_file import parse_plan, plan_document


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPlan:
    """A plan, and what is known of the replicas that serve it."""

    plan: Plan
    avoided: Mapping[str, str] = field(default_factory=dict)
    """Replicas that get no work, stragglers: Serve's unique id -> accelerator type."""
    hosted: Mapping[str, str] = field(default_factory=dict)
    """The slot that each replica hosted when the plan was made, by its id; replicas stay there where they can."""

    @property
    def epoch(self) -> int:
        return self.plan.epoch

    @property
    def slots(self) -> tuple[str, ...]:
        """One per stage, in the plan's order: the n-th stage of an accelerator type has the type's n-th slot."""
        placed: Counter[str] = Counter()
        slots = []
        for stage in self.plan.stages:
            slots.append(slot_name(stage.device, placed[stage.device]))
            placed[stage.device] += 1
        return tuple(slots)

    @property
    def stage_of(self) -> Mapping[str, Stage]:
        """By slot."""
        return dict(zip(self.slots, self.plan.stages, strict=True))

    @property
    def occupied(self) -> Mapping[str, int]:
        """Replicas per accelerator type, avoided ones too: they keep their accelerators from being used again."""
        taken = Counter(self.avoided.values())
        for stage in self.plan.stages:
            taken[stage.device] += stage.replicas
        return dict(taken)

    def needed(self, device: str) -> Mapping[str, int]:
        """Returns how many replicas each slot of an accelerator type needs, in the plan's order."""
        return {slot: stage.replicas for slot, stage in self.stage_of.items() if stage.device == device}

    def roles(self, device: str, live: Collection[str]) -> dict[str, str]:
        """Returns the slot that each live replica of an accelerator type hosts, by the replica's id.

        All ingresses that see the same replicas come to the same result. Avoided replicas host a slot only where there
        are fewer others than stages.
        """
        needed = self.needed(device)
        working = [replica for replica in live if replica not in self.avoided]
        return roles(needed, working if len(working) >= len(needed) else live, self.hosted)


def roles(needed: Mapping[str, int], live: Collection[str], before: Mapping[str, str]) -> dict[str, str]:
    """Returns the slot that each live replica of one accelerator type hosts, by the replica's id.

    `needed` holds replicas per slot, in the plan's order, and `before` the slot that each replica hosted so far. As
    many replicas as possible keep their slot. The others fill the open places, in the order of their ids.
    """
    ordered, found = in_id_order(live), dict[str, str]()
    places = divide_replicas(needed, len(ordered), Counter(before[replica] for replica in ordered if replica in before))
    for replica in ordered:
        slot = before.get(replica, "")
        if places.get(slot, 0):
            places[slot] -= 1
            found[replica] = slot
    others = [replica for replica in ordered if replica not in found]
    still_open = [slot for slot, number in places.items() for _ in range(number)]
    return found | dict(zip(others, still_open, strict=False))


def divide_replicas(needed: Mapping[str, int], number: int, held: Mapping[str, int] | None = None) -> dict[str, int]:
    """Divides so many replicas among slots: each goes to the slot that has the least share of what it needs.

    So no slot is empty while another has two. With fewer replicas than slots some have none. Of equal slots those come
    first whose replica is there already (`held`: replicas per slot so far), then the first.
    """
    given, held = dict.fromkeys(needed, 0), held or {}
    for _ in range(number if needed else 0):
        given[min(given, key=lambda slot: (given[slot] / needed[slot], given[slot] >= held.get(slot, 0)))] += 1
    return given


def in_id_order(replicas: Iterable[str]) -> list[str]:
    """Returns replica ids in order; numbered ones by their number."""
    return sorted(replicas, key=lambda replica: (len(replica), replica))


def slot_name(device: str, index: int) -> str:
    """Returns the name of an accelerator type's slot."""
    return f"{deployment_name(device)}-{index}"


def deployment_name(device: str) -> str:
    """Returns the Serve deployment of an accelerator type's replicas; names of deployments travel in URLs."""
    return f"split-{re.sub(r'[^A-Za-z0-9_]', '-', device)}"


def placed_document(placed: PlacedPlan) -> dict[str, Any]:
    """Plain data that `parse_placed` reads back; it names the slots, which follow from the plan."""
    return {
        "plan": plan_document(placed.plan),
        "slots": list(placed.slots),
        "avoided": dict(sorted(placed.avoided.items())),
        "hosted": dict(sorted(placed.hosted.items())),
    }


def parse_placed(document: Mapping[str, Any]) -> PlacedPlan:
    """Read what `placed_document` wrote; raises PlanError."""
    return PlacedPlan(
        plan=parse_plan(document["plan"]), avoided=dict(document["avoided"]), hosted=dict(document.get("hosted", {}))
    )
