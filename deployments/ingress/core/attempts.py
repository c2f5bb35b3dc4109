"""What becomes of inputs whose call will not bring them to an end. Pure."""

from __future__ import annotations

import math
from typing import Generic

from deployments.ingress.core.calls import Calls
from deployments.ingress.core.flights import Actions, Call, Flight, Flights, HungUp, I, Pause, Retried, W
from deployments.ingress.core.line import Line
from deployments.ingress.core.outcomes import Outcomes
from deployments.ingress.core.probes import ProbeBook
from deployments.ingress.core.steps import Steps
from deployments.ingress.core.timetable import Agenda
from earlyexit.errors import StageUnavailableError

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
        probes: ProbeBook | None,
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

    def begin(self, line: Line[I], now_s: float) -> Actions:
        """Those whose pause is over by now wait in the line again."""
        actions: Actions = []
        for pause in self._agenda.pauses.pop(now_s):
            line.rejoin(again := pause.end())
            actions.append(Retried(pause.slot, len(again)))
        return actions
