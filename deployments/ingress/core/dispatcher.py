"""Sends inputs through the stages: batches out, parts of replies in, again from the start where a replica died.

It goes by the newest plan it was told: every call from then on, those of pieces that began under an older one too.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from deployments.ingress.core.admission import Admission
from deployments.ingress.core.calls import HANG_S, Calls, HopMetrics
from deployments.ingress.core.counts import IngressCounts
from deployments.ingress.core.flights import Flight, FlightBook, Settle, departure
from deployments.ingress.core.itinerary import Itinerary, lay_out
from deployments.ingress.core.outcomes import OutcomeMetrics, Outcomes
from deployments.ingress.core.probes import ProbeBook, can_look
from deployments.ingress.core.routing import may_call
from deployments.reports import IngressReport
from earlyexit.clock import Clock
from earlyexit.errors import AdmissionError, OverloadedError, StageUnavailableError
from earlyexit.signature import Encoded
from optimizer.placement import PlacedPlan
from profiles.records import Loss, differ
from profiles.stream import StreamShape

if TYPE_CHECKING:  # it imports ray
    from deployments.ingress.transport.transport import Transport

RETRY_PAUSE_S = 0.05
"""A replica's death is noticed by all at once; a short pause lets the router learn of it before the next try."""
SUSPENDED_RETRY_S = 5.0
"""When to come back to a service that has no plan: planning and starting a replica take seconds."""


class CallMetrics(OutcomeMetrics, HopMetrics, Protocol):
    """What is counted of inputs and calls; `IngressMetrics` does."""

    def retried(self, slot: str, num_inputs: int) -> None: ...


class Dispatcher:
    """One per ingress, on its event loop."""

    def __init__(
        self,
        placed: PlacedPlan,
        transports: Mapping[str, Transport],
        clock: Clock,
        metrics: CallMetrics,
        *,
        max_queued: int,
        calls_per_replica: int,
        max_attempts: int,
        name: str,
        slo_s: float | None = None,
        slack: float = 0.0,
        num_ingresses: int = 1,
        shape: StreamShape | None = None,
        loss: Loss = differ,
        probe_share: float = 0.0,
        rng: random.Random | None = None,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`transports` by slot, of all slots that a plan may ever use; raises PlanError for a plan that needs others.

        Without `slo_s` nothing is refused early; without `shape` there are no probes; `loss` is
        the task's, by which their exits are compared. `slack`: share of the SLO that
        stages which wait for full batches leave (E3 section 4).
        """
        self._transports = transports
        self._clock = clock
        self._metrics = metrics
        self._max_attempts = max_attempts
        self._name = name
        self._rng = rng or random.Random()
        self._pause = pause
        self._calls_per_replica = calls_per_replica
        # Calls of new inputs that nothing has come back from, by slot.
        self._unheard: defaultdict[str, set[object]] = defaultdict(set)
        self._suspended: str | None = None
        self._pump_planned = False
        self._book = FlightBook(max_queued, name)
        self._admission = None if slo_s is None else Admission(placed.plan, slo_s=slo_s, num_ingresses=num_ingresses)
        self._shape = shape
        self._probe_share = probe_share
        self._probes = None if shape is None else ProbeBook(shape, loss, outlive_s=HANG_S)
        self._outcomes = Outcomes(self._book, metrics, slo_s=slo_s, admission=self._admission, probes=self._probes)
        self._calls = Calls(
            lay_out(placed, transports),
            self._book,
            self._outcomes,
            self._probes,
            clock,
            metrics,
            kept_s=0.0 if slo_s is None else slack * slo_s,
            failed=self._again,
        )

    @property
    def _itinerary(self) -> Itinerary[Transport]:
        return self._calls.itinerary

    @property
    def name(self) -> str:
        return self._name

    @property
    def placed(self) -> PlacedPlan:
        return self._itinerary.placed

    @property
    def suspended(self) -> str | None:
        """Why there is no plan to serve by; None where there is one."""
        return self._suspended

    @property
    def num_unanswered(self) -> int:
        return self._book.num_unanswered

    @property
    def num_waiting(self) -> int:
        return self._book.num_waiting

    @property
    def counts(self) -> IngressCounts:
        return self._outcomes.counts

    @property
    def oldest_epoch(self) -> int:
        """Of the plans by which the calls under way were sent; the present one where there are none."""
        return self._calls.oldest_epoch

    @property
    def agreement(self) -> float | None:
        """Share of probes so far that got the full model's answer; None before the first."""
        return None if self._probes is None else self._probes.agreement

    def follow(self, placed: PlacedPlan) -> None:
        """Go by this plan from now on; one older than the present is ignored. Raises PlanError for foreign slots."""
        if placed.epoch < self._itinerary.epoch:
            return
        before, self._calls.itinerary = self._itinerary, lay_out(placed, self._transports, self._itinerary)
        if placed.epoch > before.epoch:
            self._outcomes.begin_plan(placed.plan)
        self._suspended = None
        self._plan_pump()

    def suspend(self, reason: str) -> None:
        """There is no plan: what waits, and what arrives until the next one, gets StageUnavailableError."""
        self._suspended = reason
        self._outcomes.fail_waiting(_no_plan(reason))

    def check(self, num_inputs: int, deadline_s: float) -> None:
        """Refuse a request before work is spent on it: raises AdmissionError or StageUnavailableError."""
        if self._suspended is not None:
            self._outcomes.refuse(_no_plan(self._suspended), num_inputs)
        if self._admission is None:
            return
        now_s = self._clock.now_s()
        left_s = deadline_s - now_s
        late_s = self._admission.late_s(num_inputs, left_s, unanswered=self._book.num_unanswered, now_s=now_s)
        if late_s > 0:
            message = f"no answer is to be had within {left_s:.3g} s now, but {late_s:.3g} s later"
            self._outcomes.refuse(AdmissionError(message, retry_after_s=late_s), num_inputs)

    def submit(
        self,
        inputs: Sequence[tuple[str, Encoded]],
        deadline_s: float,
        settle: Settle,
        *,
        arrived_s: float | None = None,
        request_id: str = "",
    ) -> list[Flight]:
        """Take a request's inputs, (id, tokens) each; `settle` is called once for every one of them.

        `arrived_s`: since when its owner waits; None for now. Raises OverloadedError when too many wait already,
        StageUnavailableError where there is no plan, InputError for a request that could never fit.
        """
        now_s = self._clock.now_s()
        if self._suspended is not None:
            self._outcomes.refuse(_no_plan(self._suspended), len(inputs))
        try:
            flights = self._book.admit(
                inputs,
                deadline_s,
                settle,
                arrived_s=now_s if arrived_s is None else arrived_s,
                retry_after_s=self._outcomes.retry_after_s(now_s),
                request_id=request_id,
            )
        except OverloadedError as error:
            self._outcomes.refuse(error, len(inputs))
        self._outcomes.arrive(len(flights))
        self._plan_pump()
        return flights

    def give_up(self, flights: Sequence[Flight], reason: str) -> None:
        """Forget inputs whose owner no longer waits; those without an outcome count as dropped for this reason."""
        self._outcomes.give_up(flights, reason, self._clock.now_s())

    def report(self, wall_s: float) -> IngressReport:
        """Everything so far, at this second of the wall clock; probes are handed over with it."""
        oldest_epoch, now_s = self.oldest_epoch, self._clock.now_s()
        report = self._outcomes.report(
            self._name, self._itinerary, oldest_epoch=oldest_epoch, now_s=now_s, wall_s=wall_s
        )
        return replace(report, suspended=self._suspended is not None)

    def peek(self, wall_s: float) -> IngressReport:
        """The same without the probes, which stay for whoever asks for the report."""
        counts = self._outcomes.peek(self._name, self._itinerary, oldest_epoch=self.oldest_epoch, wall_s=wall_s)
        return replace(counts, suspended=self._suspended is not None)

    def _plan_pump(self) -> None:
        # Not at once: requests that arrive in the same turn of the loop leave in the same call.
        if not self._pump_planned:
            self._pump_planned = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_planned = False
        leg = self._itinerary.first
        unheard = self._unheard[leg.slot]
        batch = leg.batch_at(0)
        while may_call(
            self._book.num_waiting,
            batch,
            unheard=len(unheard),
            replicas=leg.stage.replicas,
            calls_per_replica=self._calls_per_replica,
        ):
            ticket = object()
            unheard.add(ticket)
            flights = self._book.depart(batch, leg.epoch)
            self._calls.start(self._enter(flights, partial(unheard.discard, ticket)))

    async def _enter(self, flights: Sequence[Flight], heard: Callable[[], None]) -> None:
        piece = departure(flights)
        leg = self._itinerary.first
        probe = self._is_probe() and self._begin_probes(flights)

        def heard_of() -> None:
            heard()
            self._plan_pump()

        try:
            await self._calls.call(leg, piece, probe=probe, heard=heard_of)
        finally:
            heard()
        self._plan_pump()  # not when cancelled: nothing starts while an ingress ends

    def _is_probe(self) -> bool:
        if self._shape is None or not self._probe_share:
            return False
        return self._rng.random() < self._probe_share and can_look(self.placed.plan.policy, self._shape.score)

    def _begin_probes(self, flights: Sequence[Flight]) -> bool:
        assert self._probes is not None
        return self._probes.begin(flights, self._itinerary.ramps, self._clock.now_s())

    async def _again(self, slot: str, sample_ids: Sequence[str]) -> None:
        if self._probes is not None:
            self._probes.forget(sample_ids)  # what has no answer is sent again under another id
        for sample_id in [sample_id for sample_id in sample_ids if self._is_exhausted(sample_id)]:
            message = f"{slot} failed {self._max_attempts} times under this input"
            error = StageUnavailableError(message, retry_after_s=1.0)
            self._outcomes.fail(sample_id, error, self._clock.now_s())
        await self._pause(RETRY_PAUSE_S)
        num_again = self._book.send_again(sample_ids)
        if not num_again:  # all were exhausted or given up: a counter refuses zero
            return
        self._metrics.retried(slot, num_again)
        if self._suspended is not None:
            self._outcomes.fail_waiting(_no_plan(self._suspended))
        self._plan_pump()

    def _is_exhausted(self, sample_id: str) -> bool:
        flight = self._book.find(sample_id)
        return flight is not None and flight.attempt + 1 >= self._max_attempts


def _no_plan(reason: str) -> StageUnavailableError:
    return StageUnavailableError(f"there is no plan to serve by: {reason}", retry_after_s=SUSPENDED_RETRY_S)
