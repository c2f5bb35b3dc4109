"""Inputs of sequences: they go where their sequence's keys and values are, and are never simply sent again. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic

from deployments.ingress.core.calls import Calls
from deployments.ingress.core.flights import DUE, Actions, Call, Flight, Flights, I, Retried, SendCall, W
from deployments.ingress.core.homes import Home, lost
from deployments.ingress.core.outcomes import Outcomes

LOST = "sequence_lost"
"""The kind of a SequenceLostError."""


class Steps(Generic[I, W]):
    """Of one ingress: those that are sent next, and what becomes of those that went.

    A step waits for no batch here: its replica has the sequence's other steps behind it, never beside it, and fuses
    those of all ingresses. So a call has every step that came of one part of a reply.
    """

    def __init__(self, calls: Calls[I, W], outcomes: Outcomes) -> None:
        self._calls = calls
        self._outcomes = outcomes
        self.due: list[Flight[I]] = []
        """Those that are sent next."""

    def check(self, home: Home) -> None:
        """Raise SequenceLostError where the plan has others by now; nobody loses what he does not have yet."""
        if home.layout is not None and not self._is_at_home(home):
            raise lost("the plan has its blocks elsewhere now")

    def join(self, flights: Flights[I]) -> None:
        """They are sent next."""
        for flight in flights:
            flight.holder = DUE
        self.due += flights

    def settle_in(self, flights: Flights[I]) -> None:
        """These, their homes' first, are sent by the present plan. Nothing is to be seen of them.

        (A probe is answered early and goes on, and its sequence's next step would come beside it.)
        """
        for flight in flights:
            assert flight.home is not None, "a service has sequences, or inputs of none"
            flight.home.layout = self._calls.itinerary.layout

    def send(self, now_s: float) -> Actions:
        """All that are due, in a call for every replica that has some of their sequences."""
        due, self.due = self.due, []
        itinerary = self._calls.itinerary
        leg = itinerary.first
        by_replica, homeless = self._by_replica(due, leg.slot, DUE)
        actions = self._lose(homeless, now_s)
        for rows in by_replica:
            flights = [due[row] for row in rows]
            call = self._calls.begin(leg, flights, flights, now_s, leg.epoch, None, False)
            actions.append(SendCall(call, *itinerary.entrance(probe=False)))
        return actions

    def go_on(self, call: Call[I, W], flights: Flights[I], block: int, payload: Any, now_s: float) -> Actions:
        """Of a call's inputs those that are waited for go on to a block, each to its sequence's replica there."""
        leg = self._calls.itinerary.at(block)
        by_replica, homeless = self._by_replica(flights, leg.slot, call)
        actions = self._lose(homeless, now_s)
        for rows in by_replica:
            going = [flights[row] for row in rows]
            onward = self._calls.begin(leg, going, going, now_s, call.epoch, None, False)
            part = None if len(rows) == len(flights) else tuple(rows)
            actions.append(SendCall(onward, block, payload, None, part))
        return actions

    def fail(self, flights: Flights[I], slot: str, now_s: float) -> Actions:
        """Nothing more comes of inputs that no call has any more: their sequences are lost."""
        waited_for = [flight for flight in flights if not flight.settled]
        actions = self._outcomes.fail(waited_for, lost(f"a replica of {slot} failed under it"), now_s)
        if waited_for:
            actions.append(Retried(slot, len(waited_for)))
        return actions

    def clear(self) -> list[Flight[I]]:
        """Those that were due, which are not sent."""
        due, self.due = self.due, []
        for flight in due:
            flight.holder = None
        return due

    def _by_replica(
        self, flights: Flights[I], slot: str, holder: object
    ) -> tuple[Sequence[Sequence[int]], list[Flight[I]]]:
        """Positions of those that a holder has and somebody waits for, and who of them has lost his home.

        Nobody has them then.
        """
        by_replica: dict[str | frozenset[str], list[int]] = {}
        homeless = []
        for row, flight in enumerate(flights):
            if flight.holder is not holder:
                continue
            flight.holder, home = None, flight.home
            if flight.settled or home is None:
                continue
            if self._is_at_home(home):
                by_replica.setdefault(home.replicas.get(slot, home.avoids), []).append(row)
            else:
                homeless.append(flight)
        return [*by_replica.values()], homeless

    def _is_at_home(self, home: Home | None) -> bool:
        return home is not None and home.layout == self._calls.itinerary.layout

    def _lose(self, flights: Flights[I], now_s: float) -> Actions:
        return self._outcomes.fail(flights, lost("the plan has its blocks elsewhere now"), now_s)
