"""A call to a stage, on its way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deployments.ingress.core.itinerary import Leg
from earlyexit.engine import Member

if TYPE_CHECKING:
    from simulator.ingress import Ingress
    from simulator.replica import Replica
    from simulator.slot import Slot

Input = Member[int]
"""One input; its payload is its number, in the order of arrival."""


class Call:
    """Inputs that were sent to one replica together; its members' `origin` until they leave it."""

    __slots__ = ("epoch", "first", "heard", "ingress", "leg", "members", "num_inside", "probe", "replica", "started_s")

    replica: Replica
    """Set when it takes its way."""

    def __init__(
        self,
        ingress: Ingress,
        leg: Leg[Slot],
        members: Sequence[Input],
        started_s: float,
        *,
        epoch: int,
        first: bool,
        probe: bool,
    ) -> None:
        self.ingress = ingress
        self.leg = leg
        self.members = members
        self.started_s = started_s
        self.epoch = epoch
        """Of the plan by which its inputs were sent to the first stage."""
        self.first = first
        """Whether it brings new inputs, to the first block."""
        self.probe = probe
        self.num_inside = len(members)
        self.heard = False
        """Whether anything has come back."""

    def lost(self) -> list[Input]:
        """Those that are still inside, when its replica dies."""
        return [member for member in self.members if member.origin is self]


def by_call(members: Sequence[Input]) -> Sequence[tuple[Any, Sequence[Input]]]:
    """Members of a batch with the call that each came with, call by call."""
    first = members[0].origin
    for member in members:
        if member.origin is not first:
            break
    else:
        return ((first, members),)
    groups: dict[int, tuple[Any, list[Input]]] = {}
    for member in members:
        key = id(member.origin)
        if key in groups:
            groups[key][1].append(member)
        else:
            groups[key] = (member.origin, [member])
    return list(groups.values())
