"""Inputs of sequences: they go where their sequence's keys and values are, and are never simply sent again. Pure.

A sequence may be a *probe*, with all its tokens: they run to the model's end, every ramp looks, and its caller gets
what the full model says. Where a ramp would have let a token leave is noted, and answers nobody: the next token would
come beside the one that still runs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, Generic

from deployments.ingress.core.inputs import (
    DUE,
    Actions,
    Agenda,
    Call,
    Flight,
    Flights,
    HungUp,
    I,
    Pause,
    Retried,
    Rules,
    SendCall,
    W,
    Watch,
)
from deployments.ingress.core.outcomes import Outcomes
from deployments.ingress.core.probes import ExitObservations
from deployments.ingress.core.queue import Calls, WaitQueue
from deployments.ingress.core.routes import KVPlacement, lost
from earlyexit.errors import StageUnavailableError

LOST = "sequence_lost"
"""The kind of a SequenceLostError."""


class Steps(Generic[I, W]):
    """Of one ingress: those that are sent next, and what becomes of those that went.

    A step waits for no batch here: its replica has the sequence's other steps behind it, never beside it, and fuses
    those of all ingresses. So a call has every step that came of one part of a reply.
    """

    def __init__(
        self, calls: Calls[I, W], outcomes: Outcomes, book: ExitObservations | None, rules: Rules, rng: random.Random
    ) -> None:
        self._calls = calls
        self._outcomes = outcomes
        self._book = book
        self._probe_share = rules.probe_share
        self._rng = rng
        self.due: list[Flight[I]] = []
        """Those that are sent next."""

    def check(self, home: KVPlacement) -> None:
        """Raise SequenceLostError where the plan has others by now; nobody loses what he does not have yet."""
        if home.layout is not None and not self._is_at_home(home):
            raise lost("the plan has its blocks elsewhere now")

    def join(self, flights: Flights[I]) -> None:
        """They are sent next."""
        for flight in flights:
            flight.holder = DUE
        self.due += flights

    def settle_in(self, flights: Flights[I], now_s: float) -> Actions:
        """These, their homes' first, are sent by the present plan, probes in a call of their own.

        Whether a sequence is a probe is drawn here, once: one that begins anew is what it was.
        """
        looks = self._looks
        for flight in flights:
            home = flight.home
            assert home is not None, "a service has sequences, or inputs of none"
            home.layout = self._calls.itinerary.layout
            if home.is_probe is None:
                home.is_probe = looks and self._probe_share > 0 and self._rng.random() < self._probe_share
        parts = [[each for each in flights if self._is_probe(each) is wanted] for wanted in (False, True)]
        return [self._enter(part, now_s, is_first=True) for part in parts if part]

    def send(self, now_s: float) -> Actions:
        """All that are due, in a call for every replica that has some of their sequences."""
        due, self.due = self.due, []
        by_replica, homeless = self._by_replica(due, self._calls.itinerary.first.slot, DUE)
        actions = self._lose(homeless, now_s)
        for rows in by_replica:
            actions.append(self._enter([due[row] for row in rows], now_s, is_first=False))
        return actions

    def go_on(self, call: Call[I, W], flights: Flights[I], block: int, payload: Any, now_s: float) -> Actions:
        """Of a call's inputs those that are waited for go on to a block, each to its sequence's replica there."""
        leg = self._calls.itinerary.at(block)
        by_replica, homeless = self._by_replica(flights, leg.slot, call)
        actions = self._lose(homeless, now_s)
        for rows in by_replica:
            going = [flights[row] for row in rows]
            onward = self._calls.begin(leg, going, going, now_s, call.epoch, call.watch, False)
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

        Nobody has them then. Probes are apart from others.
        """
        by_replica: dict[tuple[bool, str | frozenset[str]], list[int]] = {}
        homeless = []
        for row, flight in enumerate(flights):
            if flight.holder is not holder:
                continue
            flight.holder, home = None, flight.home
            if flight.settled or home is None:
                continue
            if self._is_at_home(home):
                where = self._is_probe(flight), home.replicas.get(slot, home.avoids)
                by_replica.setdefault(where, []).append(row)
            else:
                homeless.append(flight)
        return [*by_replica.values()], homeless

    @property
    def _looks(self) -> bool:
        """Whether replicas see anything of probes under the present plan."""
        return self._book is not None and self._book.can_look(self._calls.itinerary.placed.plan.policy)

    def _is_probe(self, flight: Flight[I]) -> bool:
        return flight.home is not None and bool(flight.home.is_probe) and self._looks

    def _enter(self, flights: Flights[I], now_s: float, *, is_first: bool) -> SendCall:
        """Probes, or others, in one call to the model's first block; of a prompt's parts only the last makes a row.

        Where too many are open already probes are run as such all the same: their callers get the full model's answers.
        """
        itinerary = self._calls.itinerary
        watch: Watch | None = "probe" if self._is_probe(flights[0]) else None
        if watch is not None and self._book is not None:
            says = [each for each in flights if each.home is not None and each.home.says]
            self._book.begin(says, itinerary.placed.plan, "probe", now_s)
        leg = itinerary.first
        call = self._calls.begin(leg, flights, flights, now_s, leg.epoch, watch, is_first)
        return SendCall(call, *itinerary.entrance(probe=call.probe))

    def _is_at_home(self, home: KVPlacement | None) -> bool:
        return home is not None and home.layout == self._calls.itinerary.layout

    def _lose(self, flights: Flights[I], now_s: float) -> Actions:
        if self._book is not None:
            self._book.forget(flights)
        return self._outcomes.fail(flights, lost("the plan has its blocks elsewhere now"), now_s)


RETRY_PAUSE_S = 0.05
"""A replica's death is noticed by all at once; a short pause lets the router learn of it before the next try."""
HANG_S = 1.0
"""How long a call outlives the last deadline of its inputs."""


class Attempts(Generic[I, W]):
    """Of the inputs of one ingress."""

    def __init__(
        self,
        calls: Calls[I, W],
        outcomes: Outcomes,
        probes: ExitObservations | None,
        steps: Steps[I, W],
        agenda: Agenda[I],
        *,
        most: int,
    ) -> None:
        """`most`: times an input is sent from the start."""
        self._calls = calls
        self._outcomes = outcomes
        self._probes = probes
        self._steps = steps
        self._agenda = agenda
        self._most = most

    def without(self, call: Call[I, W], flights: Flights[I], now_s: float) -> list[Flight[I]]:
        """Take away from a call what it will not bring to an end; what of the inputs it had."""
        mine = self._calls.take_away(call, flights, now_s)
        if call.watch is not None and self._probes is not None:
            self._probes.forget(mine)
        return mine

    def fail(self, call: Call[I, W], flights: Flights[I], now_s: float) -> Actions:
        """Nothing more comes of these inputs of a call: after a pause they start again, if they may.

        Those of sequences cannot: what they would go on from is gone. Their owners get SequenceLostError.
        """
        mine = self.without(call, flights, now_s)
        if mine and mine[0].home is not None:
            return self._steps.fail(mine, call.leg.slot, now_s)
        actions: Actions = []
        exhausted = [flight for flight in mine if flight.attempt + 1 >= self._most]
        if exhausted:
            message = f"{call.leg.slot} failed {self._most} times under this input"
            actions += self._outcomes.fail(exhausted, StageUnavailableError(message, retry_after_s=1.0), now_s)
        again = [flight for flight in mine if not flight.settled]
        if again:
            self._agenda.pauses.add(now_s + RETRY_PAUSE_S, Pause(call.leg.slot, again))
        return actions

    def go_whole(self, call: Call[I, W], now_s: float) -> Actions:
        """Probes of this call are about to lose words: beside them whole texts enter the last network, the reference.

        Nobody waits for their answers; where one is lost, so is what was seen of its probe.
        """
        book = self._probes
        alone = [] if book is None else [flight for flight in call.flights if book.goes_alone(flight)]
        if book is None or not alone:
            return []
        wholes = [book.go_beside(flight, flight.whole()) for flight in alone]
        send = self._calls.enter_last(wholes, now_s, call.epoch, "whole")
        for whole in wholes:
            if whole.deadline_s < math.inf:
                self._agenda.hanging.add(whole.deadline_s + HANG_S, whole)
        return [send]

    def hang_up(self, now_s: float) -> Actions:
        """Calls that have an input past its deadline, unless they have others that are not past theirs for so long."""
        actions: Actions = []
        for flight in self._agenda.hanging.pop(now_s):
            call = flight.holder
            if not isinstance(call, Call):
                continue
            inside = call.inside()
            until_s = max(each.deadline_s for each in inside) + HANG_S
            if until_s <= now_s:
                actions += [HungUp(call), *self.fail(call, inside, now_s)]
            elif until_s < math.inf:  # the others may leave before, and this one not
                self._agenda.hanging.add(until_s, flight)
        return actions

    def begin(self, line: WaitQueue[I], now_s: float) -> Actions:
        """Those whose pause is over by now wait in the line again."""
        actions: Actions = []
        for pause in self._agenda.pauses.pop(now_s):
            line.rejoin(again := pause.end())
            actions.append(Retried(pause.slot, len(again)))
        return actions
