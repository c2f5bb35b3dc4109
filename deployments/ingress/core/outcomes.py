"""What becomes of inputs: each has its outcome once, counts once, and teaches what it can. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NoReturn, Protocol

from deployments.ingress.core.admission import Admission
from deployments.ingress.core.counts import IngressCounts
from deployments.ingress.core.flights import AnswerRate, Flight, FlightBook
from deployments.ingress.core.itinerary import Itinerary
from deployments.ingress.core.probes import ProbeBook
from deployments.messages import Chunk
from deployments.reports import IngressReport
from earlyexit.errors import DeadlineError, OfframpError
from earlyexit.wire import Answer
from optimizer.plan import Plan


class OutcomeMetrics(Protocol):
    """What is counted of outcomes; `IngressMetrics` does."""

    def answers(self, exits: list[int]) -> None: ...

    def dropped(self, reason: str, num_inputs: int) -> None: ...


class Outcomes:
    """The end of every input of one ingress."""

    def __init__(
        self,
        book: FlightBook,
        metrics: OutcomeMetrics,
        *,
        slo_s: float | None,
        admission: Admission | None,
        probes: ProbeBook | None,
    ) -> None:
        self._book = book
        self._metrics = metrics
        self._admission = admission
        self._probes = probes
        self._counts = IngressCounts(slo_s)
        self._rate = AnswerRate()

    @property
    def counts(self) -> IngressCounts:
        """Of all inputs so far."""
        return self._counts

    def retry_after_s(self, now_s: float) -> float:
        """When to come back, for an input that found the book full."""
        if not self._book.num_unanswered:
            self._rate.begin(now_s)
        return self._rate.seconds_for(self._book.num_unanswered)

    def begin_plan(self, plan: Plan) -> None:
        """Another plan is in force."""
        self._counts.begin_plan()
        if self._admission is not None:
            self._admission.follow(plan)

    def arrive(self, num_inputs: int) -> None:
        """Count inputs that were taken."""
        self._counts.arrived += num_inputs

    def refuse(self, error: OfframpError, num_inputs: int) -> NoReturn:
        """Count inputs that arrived and are not taken; raises the error."""
        self._counts.arrived += num_inputs
        self._drop(error.kind, num_inputs)
        raise error

    def take(self, chunk: Chunk, itinerary: Itinerary[Any], now_s: float) -> None:
        """Give inputs what a part of a reply holds for them."""
        self._answer(chunk, itinerary, now_s)
        for sample_id, error in chunk.lost:
            self.fail(sample_id, error, now_s)
        if self._probes is not None and chunk.seen:
            self._probes.see(chunk.seen)

    def fail(self, sample_id: str, error: OfframpError, now_s: float) -> None:
        """Give an input an error, for good."""
        flight = self._book.settle(sample_id, error)
        if flight is not None:
            self._drop(error.kind, 1)
            if isinstance(error, DeadlineError):
                self._learn_lateness([flight], now_s)
        if self._probes is not None:
            self._probes.forget((sample_id,))

    def fail_waiting(self, error: OfframpError) -> None:
        """Give every input that has not been sent an error."""
        self._drop(error.kind, self._book.settle_waiting(error))

    def give_up(self, flights: Sequence[Flight], reason: str, now_s: float) -> None:
        """Forget inputs whose owner no longer waits."""
        unsettled = [flight for flight in flights if not flight.settled]
        if reason == "deadline":
            self._learn_lateness(unsettled, now_s)
        self._book.give_up(unsettled)
        self._drop(reason, len(unsettled))

    def report(
        self, name: str, itinerary: Itinerary[Any], *, oldest_epoch: int, now_s: float, wall_s: float
    ) -> IngressReport:
        """Everything so far; probes are handed over with it. `now_s` and `wall_s`: this moment, on both clocks."""
        probes = None if self._probes is None else self._probes.hand_over(wall_s - now_s)
        return replace(self.peek(name, itinerary, oldest_epoch=oldest_epoch, wall_s=wall_s), probes=probes)

    def peek(self, name: str, itinerary: Itinerary[Any], *, oldest_epoch: int, wall_s: float) -> IngressReport:
        """Everything so far but the probes, which stay here."""
        counts = self._counts
        return IngressReport(
            name=name,
            epoch=itinerary.epoch,
            oldest_epoch=oldest_epoch,
            at_s=wall_s,
            unanswered=self._book.num_unanswered,
            waiting=self._book.num_waiting,
            arrived=counts.arrived,
            answered=counts.answered,
            in_slo=counts.in_slo,
            exits=dict(counts.exits),
            drops=dict(counts.drops),
            latencies=dict(counts.latencies),
        )

    def _answer(self, chunk: Chunk, itinerary: Itinerary[Any], now_s: float) -> None:
        exits = []
        for answer, _ in (*chunk.answers, *chunk.early):
            flight = self._book.settle(answer.sample_id, answer)
            if flight is not None:
                exits.append(answer.exit)
                self._count(flight, answer, itinerary, now_s)
        if exits:
            self._rate.record(len(exits), now_s)
            self._metrics.answers(exits)
        if self._probes is not None:
            for answer, _ in (*chunk.answers, *chunk.early):
                self._probes.answered(answer.sample_id, answer.exit, itinerary.ramps)

    def _count(self, flight: Flight, answer: Answer, itinerary: Itinerary[Any], now_s: float) -> None:
        by_present_plan = flight.epoch == itinerary.epoch
        self._counts.answer(answer.exit, now_s - flight.arrived_s, by_present_plan=by_present_plan)
        if self._admission is not None and answer.exit >= itinerary.last_split:
            self._admission.answered(now_s - flight.arrived_s, flight.ahead, now_s)

    def _learn_lateness(self, flights: Iterable[Flight], now_s: float) -> None:
        """What was dropped for its deadline would have taken longer still: left out, only the quick would be known."""
        if self._admission is not None:
            for flight in flights:
                self._admission.given_up(max(now_s, flight.deadline_s) - flight.arrived_s, flight.ahead, now_s)

    def _drop(self, reason: str, num_inputs: int) -> None:
        if num_inputs:  # a counter refuses zero
            self._counts.drops[reason] += num_inputs
            self._metrics.dropped(reason, num_inputs)
