"""What becomes of inputs: each has its outcome once, counts once, and teaches what it can."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter
from typing import Any, NoReturn

from deployments.ingress.core.admission import Admission
from deployments.ingress.core.counts import IngressCounts
from deployments.ingress.core.flights import (
    Actions,
    Answered,
    Call,
    Dropped,
    Flight,
    Flights,
    I,
    Tokens,
    flights_of,
    picked,
)
from deployments.ingress.core.itinerary import Itinerary
from deployments.ingress.core.probes import ProbeBook
from deployments.ingress.core.rules import Rules
from earlyexit.errors import AdmissionError, InputError, OfframpError, OverloadedError
from optimizer.plan import Plan

_cost_of = attrgetter("cost")
LONGEST_RETRY_S = 30.0
"""A rate measured under little load says little about a full queue, and a limit that has fallen little about a long
input; nobody is sent away for longer."""


@dataclass(slots=True)
class AnswerRate:
    """Answers per second, as a moving average over about ten seconds; tells refused callers when to come back."""

    rate_per_s: float = 0.0
    _since_s: float | None = None
    _count: int = 0

    def begin(self, now_s: float) -> None:
        """Count from now on: until now there was nothing to answer."""
        self._since_s, self._count = now_s, 0

    def record(self, count: int, now_s: float) -> None:
        if self._since_s is None:
            self._since_s = now_s
        self._count += count
        elapsed_s = now_s - self._since_s
        if elapsed_s >= 1.0:
            weight = 1 - math.exp(-elapsed_s / 10)
            self.rate_per_s += (self._count / elapsed_s - self.rate_per_s) * (weight if self.rate_per_s else 1.0)
            self._since_s, self._count = now_s, 0

    def seconds_for(self, count: int) -> float:
        """How long `count` answers take, at least 1 s (HTTP's Retry-After counts whole seconds)."""
        return min(max(1.0, count / self.rate_per_s), LONGEST_RETRY_S) if self.rate_per_s else 1.0


LATE = "deadline"
"""The reason of whoever missed its deadline; the kind of a DeadlineError."""


class Outcomes:
    """The end of every input of one ingress."""

    def __init__(self, rules: Rules, plan: Plan, probes: ProbeBook | None) -> None:
        self.num_unanswered = 0
        self.unanswered_tokens = 0
        """Of these."""
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
            self._admission.follow(plan, self.counts.tokens_per_input)

    def admit(self, num_inputs: int, left_s: float, now_s: float, *, num_coming: int) -> None:
        """Refuse what cannot be answered in the seconds that are left: raises AdmissionError.

        Where tokens count, nothing is shorter than one: whoever is refused now would be when its length is known.
        """
        if self._admission is None:
            return
        if self._admission.counts_tokens:
            coming = num_coming * (self.counts.tokens_per_input or 1.0)
            late_s = self._admission.late_s(num_inputs, left_s, unanswered=self.unanswered_tokens + coming, now_s=now_s)
        else:
            unanswered = self.num_unanswered + num_coming
            late_s = self._admission.late_s(num_inputs, left_s, unanswered=unanswered, now_s=now_s)
        if late_s > 0:
            self._refuse_late(num_inputs, left_s, late_s)

    def take(
        self, inputs: Sequence[I], tokens: Tokens, arrived_s: float, deadline_s: float, now_s: float
    ) -> list[Flight[I]]:
        """A request's inputs; where tokens count, and these are too many to be in time: raises AdmissionError."""
        num_inputs = num_tokens = len(inputs)
        if tokens is not None:
            num_tokens = sum(tokens)
        admission = self._admission
        if admission is not None and admission.counts_tokens:
            left_s = deadline_s - now_s
            late_s = admission.late_s(num_tokens, left_s, unanswered=self.unanswered_tokens, now_s=now_s)
            if late_s > 0:
                self._refuse_late(num_inputs, left_s, late_s)
        flights = flights_of(inputs, tokens, arrived_s, deadline_s, self.num_unanswered, self.unanswered_tokens)
        self.counts.take(num_inputs, num_tokens)
        self.num_unanswered += num_inputs
        self.unanswered_tokens += num_tokens
        return flights

    def _refuse_late(self, num_inputs: int, left_s: float, late_s: float) -> NoReturn:
        message = f"no answer is to be had within {left_s:.3g} s now, but {late_s:.3g} s later"
        self.refuse(AdmissionError(message, retry_after_s=min(late_s, LONGEST_RETRY_S)), num_inputs)

    def refuse(self, error: OfframpError, num_inputs: int) -> NoReturn:
        """Count inputs that arrived and are not taken; raises the error."""
        self.counts.arrived += num_inputs
        self.counts.refused += num_inputs
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
        self.note(call, flights, block, itinerary)
        fresh, answers = picked(flights, answers, _settled_now(flights))
        if not fresh:
            return []
        num_tokens = self._leave(fresh)
        self._rate.record(len(fresh), now_s)
        latencies_s = [now_s - flight.arrived_s for flight in fresh]
        self.counts.answer(block, latencies_s, num_tokens, by_present_plan=call.epoch == itinerary.epoch)
        if self._admission is not None and block >= itinerary.last_split:
            for flight, latency_s in zip(fresh, latencies_s, strict=True):
                self._admission.answered(latency_s, *self._admission.cost_of(flight), now_s)
        return [Answered(fresh, block, answers, latencies_s)]

    def note(self, call: Call[Any, Any], flights: Flights[Any], block: int, itinerary: Itinerary[Any]) -> None:
        """An exit let watched inputs leave; the first one counts."""
        if call.watch is not None and self._probes is not None:
            for flight in flights:
                self._probes.answered(flight, block, itinerary.ramps)

    def fail(self, flights: Flights[Any], error: OfframpError, now_s: float) -> Actions:
        """Inputs get an error, for good."""
        return self.drop(flights, error.kind, error, now_s)

    def drop(self, flights: Flights[Any], reason: str, error: OfframpError | None, now_s: float) -> Actions:
        """Inputs get no answer; no `error` where their owner no longer waits for one."""
        fresh = list(compress(flights, _settled_now(flights)))
        if not fresh:
            return []
        if reason == LATE:
            self._learn_lateness(fresh, now_s)
        self._leave(fresh)
        self.counts.drops[reason] += len(fresh)
        return [Dropped(fresh, reason, error)]

    def _leave(self, flights: Flights[Any]) -> int:
        """Inputs have their outcome; how many tokens they have."""
        num_tokens: int = sum(map(_cost_of, flights))
        self.num_unanswered -= len(flights)
        self.unanswered_tokens -= num_tokens
        return num_tokens

    def _learn_lateness(self, flights: Iterable[Flight[Any]], now_s: float) -> None:
        """What was dropped for its deadline would have taken longer still: left out, only the quick would be known."""
        if self._admission is not None:
            for flight in flights:
                until_s = now_s if math.isinf(flight.deadline_s) else max(now_s, flight.deadline_s)
                self._admission.given_up(until_s - flight.arrived_s, *self._admission.cost_of(flight), now_s)


def _settled_now(flights: Flights[Any]) -> list[bool]:
    """Settle inputs; whether each had no outcome before, which one that is named twice has the second time."""
    fresh = []
    for flight in flights:
        fresh.append(not flight.settled)
        flight.settled = True
    return fresh
