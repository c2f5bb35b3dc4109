"""When new inputs that wait leave as a call to the first stage. Pure."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from deployments.ingress.core.itinerary import Leg
from deployments.ingress.core.routing import least_to_call
from earlyexit.filling import patience

AHEAD = 4
"""Calls without a part so far that a replica of several splits may have, however small: it chooses between them, which
it cannot where new inputs are kept from it until its batch has run."""
GAP_WEIGHT = 0.05
"""Of the newest gap between inputs: twenty requests tell how long the next lets wait for itself."""
LONGEST_GAP_S = 1.0
"""What a longer one counts as, and what is taken to be one before the first input."""
FRESH_S = 1.0
"""What was heard of a slot longer ago says nothing of how busy it is."""


class Departures:
    """Of one ingress: how many must wait, and until when, for a call to be made.

    Where stages fill their batches (`earlyexit.filling`) new inputs wait here, for all replicas together: one call is
    then one batch.
    """

    def __init__(self, first: Leg[Any], calls_per_replica: int) -> None:
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

    def follow(self, first: Leg[Any]) -> None:
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
