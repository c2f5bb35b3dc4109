"""How a piece gets to a stage, and its reply back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from deployments.ingress.core.routing import FillFirst
from deployments.ingress.transport.link import ReplicaLink
from deployments.ingress.transport.members import Board
from deployments.messages import Address, Chunk, StageCall

LinkTo = Callable[[str, Address, Callable[[], None]], ReplicaLink]
"""A replica's id, where it takes calls, and what is told when it comes to be up or no longer is."""


class Transport(Protocol):
    """One stage, as its callers see it."""

    async def call(
        self, call: StageCall, *, weight: int, batch: int, avoided: frozenset[str], take: Callable[[Chunk], None]
    ) -> None:
        """Have a batch run by some replica; `take` gets the parts of its reply as they are ready.

        `weight`: the call's; `batch`: that of what a replica makes of calls (`weight_of`); `avoided`: replicas to leave
        out while there are others. Returns when all inputs are settled. Raises whatever happens on the way; inputs that
        no part has settled by then may be sent again.
        """
        ...


@dataclass(slots=True, eq=False)
class _Replica:
    """What an ingress knows of one."""

    link: ReplicaLink
    load: int = 0
    """Weight of this ingress's calls that it has."""
    position: int = -1
    """Among those that are offered; -1 where it is not."""


class LinkTransport:
    """Straight to the replicas of a slot: a connection to each, fill-first among those that are up.

    Serve's handles do the same at ten times the cost per part of a reply (docs/performance.md).
    """

    def __init__(self, *, phase: float, link: LinkTo = ReplicaLink) -> None:
        """`phase`: where equal replicas are begun with; another one in every ingress. `link` connects to one."""
        self._link = link
        self._replicas: dict[str, _Replica] = {}
        self._phase = phase
        self._avoided: frozenset[str] = frozenset()
        self._offered: list[_Replica] = []
        self._router = FillFirst(phase)
        """Of the offered ones, by their positions."""
        self._some_offered = asyncio.Event()

    def follow(self, board: Board) -> None:
        """Connect to the board's replicas from now on; called on the event loop on which calls are made."""
        loop = asyncio.get_running_loop()

        def tell(addresses: Mapping[str, Address]) -> None:
            loop.call_soon_threadsafe(self._follow, addresses)

        board.follow(tell)

    async def call(
        self, call: StageCall, *, weight: int, batch: int, avoided: frozenset[str], take: Callable[[Chunk], None]
    ) -> None:
        if avoided != self._avoided:
            self._avoided = avoided
            self._offer()
        while not self._offered:
            await self._some_offered.wait()
        replica = self._offered[self._router.take(weight, batch)]
        replica.load += weight
        try:
            await replica.link.call(call, take)
        finally:
            replica.load -= weight
            if replica.position >= 0:
                self._router.load(replica.position, -weight)

    def _follow(self, addresses: Mapping[str, Address]) -> None:
        for name in self._replicas.keys() - addresses.keys():
            self._replicas.pop(name).link.leave()
        for name in addresses.keys() - self._replicas.keys():
            self._replicas[name] = _Replica(self._link(name, addresses[name], self._offer))
        self._offer()

    def _offer(self) -> None:
        """To calls from now on: those that are up, without the avoided ones where that leaves any."""
        for replica in self._offered:
            replica.position = -1
        up = {name: replica for name, replica in self._replicas.items() if replica.link.is_up}
        self._offered = [replica for name, replica in up.items() if name not in self._avoided] or [*up.values()]
        self._router = FillFirst(self._phase)
        for position, replica in enumerate(self._offered):
            replica.position = position
            self._router.add(position)
            self._router.load(position, replica.load)
        if self._offered:
            self._some_offered.set()
        else:
            self._some_offered.clear()
