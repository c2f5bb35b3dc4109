"""Calls on their way to a replica, and inside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from deployments.ingress.core.flights import Call, Flight
from earlyexit.member import Member

Input = Member[Flight[int]]
"""One input in an engine; its flight's own input is its number, in the order of arrival."""


class Door(Protocol):
    """An ingress, as replicas see it: what becomes of inputs of its calls."""

    @property
    def index(self) -> int: ...

    def answer(self, trip: Trip, members: Sequence[Input], block: int) -> None:
        """They leave the model."""
        ...

    def answer_early(self, trip: Trip, members: Sequence[Input], block: int) -> None:
        """They are answered, and stay inside."""
        ...

    def lose(self, trip: Trip, members: Sequence[Input]) -> None:
        """They are too late."""
        ...

    def go_on(self, trip: Trip, members: Sequence[Input], block: int) -> None:
        """They wait for a block of another stage."""
        ...


class Holder(Protocol):
    """A replica, as ingresses see it."""

    trips: set[Trip]

    @property
    def index(self) -> int: ...

    @property
    def busy(self) -> float: ...

    def submit(self, trip: Trip, block: int) -> None: ...

    def forget(self, trip: Trip) -> None: ...


class Trip(Call[int, Any]):
    """A call and what its ingress knows of its way; its members' `origin` until it has another."""

    __slots__ = ("ingress", "members", "replica", "weight")

    ingress: Door
    members: Sequence[Input]
    replica: Holder | None
    """None until there is one for it."""
    weight: int
    """What its ingress counts it as, once it is on its way (`weight_of`)."""

    def begin(self, ingress: Door, members: Sequence[Input]) -> None:
        """Have these members, from the ingress whose call it is."""
        self.ingress = ingress
        self.members = members
        self.replica = None
        reserve_s = self.reserve_s
        for member in members:
            member.origin = self
            member.reserve_s = reserve_s

    def left(self) -> list[Flight[int]]:
        """Those that have not left the replica."""
        return [member.payload for member in self.members if member.origin is self]


def by_trip(members: Sequence[Input]) -> Sequence[tuple[Trip, Sequence[Input]]]:
    """Members of a batch with the trip that each came by, trip by trip."""
    first: Any = members[0].origin
    for member in members:
        if member.origin is not first:
            break
    else:
        return ((first, members),)
    groups: dict[Trip, list[Input]] = {}
    for member in members:
        trip: Any = member.origin
        if trip in groups:
            groups[trip].append(member)
        else:
            groups[trip] = [member]
    return list(groups.items())
