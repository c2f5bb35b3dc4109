"""The calls under way of one ingress: whom they have, and which are unheard of."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Generic

from deployments.ingress.core.entries import Watch
from deployments.ingress.core.flights import Call, Flight, I, SendCall, W
from deployments.ingress.core.itinerary import Crossing, Itinerary, Leg
from deployments.ingress.core.routing import least_to_call


class Calls(Generic[I, W]):
    """They go by the itinerary of the moment in which they begin."""

    def __init__(
        self, itinerary: Itinerary[W], make: type[Call[I, W]], *, calls_per_replica: int, kept_s: float
    ) -> None:
        """`make`: their class.

        `kept_s`: what a stage that waits for a full batch leaves of every deadline, for what nobody expects.
        """
        self.itinerary = itinerary
        self.least: float = 1
        """New inputs that must wait for a call to be made."""
        self.least_tokens: float = math.inf
        """Or else so many tokens."""
        self._make = make
        self._calls_per_replica = calls_per_replica
        self._kept_s = kept_s
        self._open: Counter[int] = Counter()
        """By the epoch by which they were sent."""
        self._unheard: Counter[str] = Counter()
        """Of new inputs, those that nothing has come back from, by slot."""

    @property
    def oldest_epoch(self) -> int:
        """Of the plans by which they were sent; the present one where there are none."""
        return min(self._open, default=self.itinerary.epoch)

    def follow(self, itinerary: Itinerary[W]) -> None:
        self.itinerary = itinerary
        self._count_unheard(itinerary.first.slot, 0)

    def begin(
        self,
        leg: Leg[W],
        flights: Sequence[Flight[I]],
        mine: Sequence[Flight[I]],
        now_s: float,
        epoch: int,
        watch: Watch | None,
        is_first: bool,
    ) -> Call[I, W]:
        """A call; `mine`: of the flights, those that it really has, where others only travel along."""
        reserve_s = self.itinerary.reserve_s(leg) + self._kept_s
        if reserve_s == math.inf:
            reserve_s = max(0.0, *[flight.deadline_s - now_s for flight in mine])
        call = self._make(leg, flights, now_s, epoch, reserve_s, watch, is_first)
        for flight in mine:
            flight.holder = call
        call.num_inside = len(mine)
        self._open[leg.epoch] += 1
        if is_first:
            self._count_unheard(leg.slot, 1)
        return call

    def part(self, call: Call[I, W], number: int, now_s: float, took_time: bool = True) -> None:
        """A part of a call's reply came back, with so many inputs in it."""
        if took_time:
            call.leg.learn(now_s - call.started_s)
        call.num_inside -= number
        if not call.num_inside:
            epoch = call.leg.epoch
            self._open[epoch] -= 1
            if not self._open[epoch]:
                del self._open[epoch]
        if not call.heard:  # the first part tells that its batch has run: another may be sent
            call.heard = True
            if call.is_first:
                self._count_unheard(call.leg.slot, -1)

    def take_away(self, call: Call[I, W], flights: Sequence[Flight[I]], now_s: float) -> list[Flight[I]]:
        """What a call will not bring to an end; gives those of the inputs that it had."""
        mine = [flight for flight in flights if flight.holder is call]
        if mine:
            for flight in mine:
                flight.holder = None
            self.part(call, len(mine), now_s, took_time=False)
        return mine

    def cross(
        self,
        call: Call[I, W],
        mine: Sequence[Flight[I]],
        awaited: Sequence[Flight[I]],
        crossing: Crossing,
        payload: Any,
        now_s: float,
    ) -> SendCall:
        """Have inputs enter the next network; of `mine`, which have left a call, those that are awaited."""
        for flight in mine:
            flight.holder = None
        leg = self.itinerary.at(crossing.block)
        entering = self.begin(leg, awaited, awaited, now_s, call.epoch, call.watch, False)
        return SendCall(entering, crossing.block, payload, crossing.network)

    def _count_unheard(self, slot: str, change: int) -> None:
        self._unheard[slot] += change
        first = self.itinerary.first
        self.least, self.least_tokens = least_to_call(
            first.budgets[0],
            unheard=self._unheard[first.slot],
            replicas=first.stage.replicas,
            calls_per_replica=self._calls_per_replica,
        )
