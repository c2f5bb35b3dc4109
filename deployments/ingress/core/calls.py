"""The calls under way of one ingress: whom they have, and which are unheard of."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import compress
from typing import Any, Generic

from deployments.ingress.core.departures import Departures
from deployments.ingress.core.entries import Watch
from deployments.ingress.core.flights import Call, Flight, I, SendCall, W
from deployments.ingress.core.itinerary import Crossing, Itinerary, Leg
from earlyexit.filling import MOST_BATCHES


class Calls(Generic[I, W]):
    """They go by the itinerary of the moment in which they begin."""

    def __init__(
        self, itinerary: Itinerary[W], make: type[Call[I, W]], *, calls_per_replica: int, kept_s: float
    ) -> None:
        """`make`: their class.

        `kept_s`: what a stage that waits for a full batch leaves of every deadline, for what nobody expects.
        """
        self.itinerary = itinerary
        self.departures = Departures(itinerary.first, calls_per_replica)
        self._make = make
        self._kept_s = kept_s
        self._open: Counter[int] = Counter()
        """By the epoch by which they were sent."""

    @property
    def oldest_epoch(self) -> int:
        """Of the plans by which they were sent; the present one where there are none."""
        return min(self._open, default=self.itinerary.epoch)

    def follow(self, itinerary: Itinerary[W]) -> None:
        self.itinerary = itinerary
        self.departures.follow(itinerary.first)

    def come(self, number: int, now_s: float, deadline_s: float, *, alone: bool) -> None:
        """So many inputs of a request wait to be sent; `alone`: nobody else does."""
        departures, first = self.departures, self.itinerary.first
        departures.come(number, now_s)
        if not alone or deadline_s == math.inf or not (share := departures.share(now_s)):
            return
        took_s = first.expected_s
        left_s = deadline_s - now_s - took_s - self.itinerary.reserve_s(first) - self._kept_s
        # Who waits on a guess of no time waits for ever: it counts as none that is left.
        wait_s = share * max(0.0, min(left_s, MOST_BATCHES * took_s))
        if wait_s > departures.gap_s:
            departures.hold_until(now_s + wait_s)

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
            self.departures.count(leg.slot, +1)
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
                self.departures.count(call.leg.slot, -1)

    def take_away(self, call: Call[I, W], flights: Sequence[Flight[I]], now_s: float) -> list[Flight[I]]:
        """What a call will not bring to an end; gives those of the inputs that it had."""
        mine = list(compress(flights, call.release(flights)))
        if mine:
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

    def enter_last(self, flights: Sequence[Flight[I]], now_s: float, epoch: int, watch: Watch) -> SendCall:
        """Have inputs enter the last network of a chain, with nothing from those before."""
        networks = self.itinerary.placed.plan.networks
        first = networks[-2]
        call = self.begin(self.itinerary.at(first), flights, flights, now_s, epoch, watch, False)
        return SendCall(call, first, None, len(networks) - 1)
