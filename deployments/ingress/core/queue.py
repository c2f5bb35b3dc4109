"""The line of inputs that wait at an ingress to be sent, and who of them goes next. Pure."""

from __future__ import annotations

import math
from bisect import insort_left, insort_right
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any, Generic

from deployments.ingress.core.inputs import Call, Flight, I, SendCall, W, Watch
from deployments.ingress.core.routes import Crossing, PlanRoute, StageRoute, least_to_call
from earlyexit.engine.filling import MOST_BATCHES, patience
from earlyexit.engine.order import Order, take_from
from earlyexit.network.split import Budget

AHEAD = 4
"""Calls without a part so far that a replica of several splits may have, however small: it chooses between them, which
it cannot where new inputs are kept from it until its batch has run."""
GAP_WEIGHT = 0.05
"""Of the newest gap between inputs: twenty requests tell how long the next lets wait for itself."""
LONGEST_GAP_S = 1.0
"""What a longer one counts as, and what is taken to be one before the first input."""
FRESH_S = 1.0
"""What was heard of a slot longer ago says nothing of how busy it is."""


class BatchingPolicy:
    """Of one ingress: how many must wait, and until when, for a call to be made.

    Where stages fill their batches (`earlyexit.engine.filling`), new inputs wait here for all replicas together, so
    that one call is one batch.
    """

    def __init__(self, first: StageRoute[Any], calls_per_replica: int) -> None:
        self._calls_per_replica = calls_per_replica
        self._unheard: Counter[str] = Counter()
        """Calls of new inputs that nothing has come back from, by slot."""
        self._busy: dict[str, tuple[float, float]] = {}
        """By slot, how busy it said it was, and when."""
        self.gap_s = LONGEST_GAP_S
        """Between one input and the next, of late; who would have left by then waits for nobody."""
        self._came_s = -math.inf
        self.held_until_s = math.inf
        """When those who wait leave, however few; infinite where nobody is held."""
        self.least: float = 1
        """New inputs that must wait for a call to be made."""
        self.least_tokens: float = math.inf
        """Or else so many tokens."""
        self.follow(first)

    def follow(self, first: StageRoute[Any]) -> None:
        """New inputs enter by this leg from now on."""
        self._first = first
        self.held_until_s = math.inf
        self._update()

    def count(self, slot: str, change: int) -> None:
        """So many more calls of new inputs are unheard of, or fewer."""
        self._unheard[slot] += change
        self._update()

    def hear(self, slot: str, busy: float, now_s: float) -> None:
        """A replica said what share of its time it was busy, of late."""
        self._busy[slot] = busy, now_s

    def share(self, now_s: float) -> float:
        """Of the time that deadlines leave, what new inputs may wait here; see `patience`."""
        heard = self._busy.get(self._first.slot)
        if heard is None or not self._fills or now_s - heard[1] > FRESH_S:
            return 0.0
        return patience(heard[0])

    def come(self, number: int, now_s: float) -> None:
        """So many inputs arrived together."""
        gap_s = min(LONGEST_GAP_S, now_s - self._came_s) / number
        self.gap_s += GAP_WEIGHT * (gap_s - self.gap_s)
        self._came_s = now_s

    def hold_until(self, until_s: float) -> None:
        """Those who wait leave then, or as soon as they are a batch."""
        self.held_until_s = until_s
        self._update()

    def wake(self, now_s: float) -> None:
        """Who was held until now leaves."""
        if self.held_until_s <= now_s:
            self.release()

    def release(self) -> None:
        """Nobody is held any more, until the next comes."""
        if self.held_until_s < math.inf:
            self.held_until_s = math.inf
            self._update()

    @property
    def _fills(self) -> bool:
        return self._first.assignment.dispatch == "filling"

    def _update(self) -> None:
        leg, budget = self._first, self._first.budgets[0]
        unheard, replicas = self._unheard[leg.slot], leg.stage.replicas
        several = self._fills and len(leg.stage.splits) > 1
        self.least, self.least_tokens = least_to_call(
            budget,
            unheard=unheard // AHEAD if several else unheard,
            replicas=replicas,
            calls_per_replica=1 if several else self._calls_per_replica,
        )
        if self.held_until_s < math.inf and self.least == 1:
            self.least, self.least_tokens = budget.inputs, math.inf if budget.tokens is None else budget.tokens


MANY_GONE = 64
"""So many in a line are not worth being looked for."""
_deadline_of = attrgetter("deadline_s")
_place_of = attrgetter("deadline_s", "arrived_s")
_tokens_of = attrgetter("tokens")


def length_class(tokens: int) -> int:
    """Inputs whose waits are told together: the power of two that is the longest of them."""
    return 1 << max(0, tokens - 1).bit_length()


class WaitQueue(Generic[I]):
    """Inputs that wait to be sent, the earliest deadline first, equal ones in their order of arrival.

    Where all have the same SLO that is first in, first out. Those that are sent again have their old place.
    """

    __slots__ = ("_flights", "length", "tokens")

    def __init__(self) -> None:
        self.length = 0
        self.tokens = 0
        """Of all who wait."""
        self._flights: deque[Flight[I]] = deque()
        """Those that were settled meanwhile are passed over when their turn comes."""

    def join(self, flights: Sequence[Flight[I]]) -> None:
        """A request's inputs, which have one deadline, wait."""
        waiting = self._flights
        if not waiting or not flights or flights[0].deadline_s >= waiting[-1].deadline_s:
            waiting.extend(flights)
        else:
            for flight in flights:
                insort_right(waiting, flight, key=_deadline_of)
        self.length += len(flights)
        self.tokens += sum(map(_tokens_of, flights))

    def rejoin(self, flights: Sequence[Flight[I]]) -> None:
        """Wait once more, before those of equal deadlines that arrived at the same time or later."""
        for flight in reversed(flights):
            insort_left(self._flights, flight, key=_place_of)
        self.length += len(flights)
        self.tokens += sum(map(_tokens_of, flights))

    def __iter__(self) -> Iterator[Flight[I]]:
        """Those who wait, the earliest deadline first."""
        return (flight for flight in self._flights if not flight.settled)

    def oldest_s(self, now_s: float) -> dict[int, float]:
        """How long those who have waited longest have, by length class."""
        since_s: dict[int, float] = {}
        for flight in self:
            length = length_class(flight.tokens)
            since_s[length] = min(since_s.get(length, now_s), flight.since_s)
        return {length: now_s - first_s for length, first_s in sorted(since_s.items())}

    def leave(self, budget: Budget, order: Order, now_s: float) -> list[Flight[I]]:
        """The next ones, as many as a batch holds: at least one, if anybody waits."""
        if not self.length:
            return []
        if not order.takes_front(self._flights, now_s):
            leaving = self._chosen(budget, order, now_s)
        else:
            leaving = self._first(budget.inputs) if budget.tokens is None else self._first_within(budget)
        self.length -= len(leaving)
        self.tokens -= sum(map(_tokens_of, leaving))
        return leaving

    def clear(self) -> list[Flight[I]]:
        """Everybody, who waits no more."""
        waiting = list(self)
        self.length = self.tokens = 0
        self._flights.clear()
        return waiting

    def forget(self, gone: Sequence[Flight[I]]) -> None:
        """These, who waited here, were settled just now."""
        self.length -= len(gone)
        self.tokens -= sum(map(_tokens_of, gone))
        flights = self._flights
        while flights and flights[0].settled:
            flights.popleft()
        if len(flights) > 2 * self.length + MANY_GONE:
            self._flights = deque(flight for flight in flights if not flight.settled)

    def _first(self, most: int) -> list[Flight[I]]:
        flights, number = self._flights, min(most, self.length)
        if self.length == len(flights):  # nobody was settled here
            return [flights.popleft()] if number == 1 else [flights.popleft() for _ in range(number)]
        leaving: list[Flight[I]] = []
        while len(leaving) < number:
            flight = flights.popleft()
            if not flight.settled:
                leaving.append(flight)
        return leaving

    def _first_within(self, budget: Budget) -> list[Flight[I]]:
        flights, number = self._flights, self.length
        leaving: list[Flight[I]] = []
        tokens = 0
        while len(leaving) < number:
            flight = flights[0]
            if not flight.settled:
                if not budget.room_for(len(leaving), tokens, flight.tokens):
                    break
                leaving.append(flight)
                tokens += flight.tokens
            flights.popleft()
        return leaving

    def _chosen(self, budget: Budget, order: Order, now_s: float) -> list[Flight[I]]:
        waiting = list(self)
        leaving = take_from(waiting, order, budget, now_s)
        self._flights = deque(waiting)
        return leaving


class Calls(Generic[I, W]):
    """They go by the itinerary of the moment in which they begin."""

    def __init__(
        self, itinerary: PlanRoute[W], make: type[Call[I, W]], *, calls_per_replica: int, kept_s: float
    ) -> None:
        """`make`: their class.

        `kept_s`: what a stage that waits for a full batch leaves of every deadline, for what nobody expects.
        """
        self.itinerary = itinerary
        self.departures = BatchingPolicy(itinerary.first, calls_per_replica)
        self._make = make
        self._kept_s = kept_s
        self._open: Counter[int] = Counter()
        """By the epoch by which they were sent."""

    @property
    def oldest_epoch(self) -> int:
        """Of the plans by which they were sent; the present one where there are none."""
        return min(self._open, default=self.itinerary.epoch)

    def follow(self, itinerary: PlanRoute[W]) -> None:
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
        leg: StageRoute[W],
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
