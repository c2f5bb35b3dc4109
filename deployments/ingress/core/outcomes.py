"""What becomes of inputs: each has its outcome once, counts once, and teaches what it can."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from deployments.ingress.core.admission import Admission
from deployments.ingress.core.counts import AnswerRate, IngressCounts
from deployments.ingress.core.flights import Actions, Answered, Call, Dropped, Flight, Flights, picked
from deployments.ingress.core.itinerary import Itinerary
from deployments.ingress.core.probes import ProbeBook
from deployments.ingress.core.rules import Rules
from earlyexit.errors import AdmissionError, InputError, OfframpError, OverloadedError
from optimizer.plan import Plan

LATE = "deadline"
"""The reason of whoever missed its deadline; the kind of a DeadlineError."""


class Outcomes:
    """The end of every input of one ingress."""

    def __init__(self, rules: Rules, plan: Plan, probes: ProbeBook | None) -> None:
        self.num_unanswered = 0
        self.counts = IngressCounts(rules.slo_s)
        self._admission: Admission | None = None
        if rules.slo_s is not None and rules.admits:
            self._admission = Admission(plan, slo_s=rules.slo_s, num_ingresses=rules.num_ingresses)
        self._probes = probes
        self._rate = AnswerRate()

    def begin_plan(self, plan: Plan) -> None:
        """Another plan is in force."""
        self.counts.begin_plan()
        if self._admission is not None:
            self._admission.follow(plan)

    def admit(self, num_inputs: int, left_s: float, now_s: float, *, num_coming: int) -> None:
        """Refuse what cannot be answered in the seconds that are left: raises AdmissionError."""
        if self._admission is None:
            return
        unanswered = self.num_unanswered + num_coming
        late_s = self._admission.late_s(num_inputs, left_s, unanswered=unanswered, now_s=now_s)
        if late_s > 0:
            message = f"no answer is to be had within {left_s:.3g} s now, but {late_s:.3g} s later"
            self.refuse(AdmissionError(message, retry_after_s=late_s), num_inputs)

    def refuse(self, error: OfframpError, num_inputs: int) -> NoReturn:
        """Count inputs that arrived and are not taken; raises the error."""
        self.counts.arrived += num_inputs
        self.counts.drops[error.kind] += num_inputs
        raise error

    def refuse_overload(self, num_inputs: int, most: float, now_s: float) -> NoReturn:
        """Refuse what there is no room for, with what is known of when there will be; raises OverloadedError.

        Raises InputError for what there could never be room for.
        """
        if num_inputs > most:
            raise InputError(f"{num_inputs} inputs in one request; at most {most} wait here at a time")
        if not self.num_unanswered:
            self._rate.begin(now_s)
        message = f"{self.num_unanswered} inputs wait for their answers here, at most {most} are taken"
        self.refuse(OverloadedError(message, retry_after_s=self._rate.seconds_for(self.num_unanswered)), num_inputs)

    def arrive(self, num_inputs: int) -> None:
        """Count inputs that were taken."""
        self.counts.arrived += num_inputs
        self.num_unanswered += num_inputs

    def answer(
        self,
        call: Call[Any, Any],
        flights: Flights[Any],
        block: int,
        answers: Sequence[Any],
        itinerary: Itinerary[Any],
        now_s: float,
    ) -> Actions:
        """Inputs are answered, those that have no outcome yet."""
        if call.probe and self._probes is not None:
            for flight in flights:
                self._probes.answered(flight, block, itinerary.ramps)
        fresh, answers = picked(flights, answers, [not flight.settled for flight in flights])
        if not fresh:
            return []
        for flight in fresh:
            flight.settled = True
        self.num_unanswered -= len(fresh)
        self._rate.record(len(fresh), now_s)
        latencies_s = [now_s - flight.arrived_s for flight in fresh]
        self.counts.answer(block, latencies_s, by_present_plan=call.epoch == itinerary.epoch)
        if self._admission is not None and block >= itinerary.last_split:
            for flight, latency_s in zip(fresh, latencies_s, strict=True):
                self._admission.answered(latency_s, flight.ahead, now_s)
        return [Answered(fresh, block, answers, latencies_s)]

    def fail(self, flights: Flights[Any], error: OfframpError, now_s: float) -> Actions:
        """Inputs get an error, for good."""
        return self.drop(flights, error.kind, error, now_s)

    def drop(self, flights: Flights[Any], reason: str, error: OfframpError | None, now_s: float) -> Actions:
        """Inputs get no answer; no `error` where their owner no longer waits for one."""
        fresh = [flight for flight in flights if not flight.settled]
        if not fresh:
            return []
        if reason == LATE:
            self._learn_lateness(fresh, now_s)
        for flight in fresh:
            flight.settled = True
        self.num_unanswered -= len(fresh)
        self.counts.drops[reason] += len(fresh)
        return [Dropped(fresh, reason, error)]

    def _learn_lateness(self, flights: Iterable[Flight[Any]], now_s: float) -> None:
        """What was dropped for its deadline would have taken longer still: left out, only the quick would be known."""
        if self._admission is not None:
            for flight in flights:
                until_s = now_s if math.isinf(flight.deadline_s) else max(now_s, flight.deadline_s)
                self._admission.given_up(until_s - flight.arrived_s, flight.ahead, now_s)
