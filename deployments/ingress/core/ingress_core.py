"""The core of an ingress: events in, actions out. It knows no network, no clock, and of an input no more than times.

It goes by the newest plan it was told: every call from then on, those of inputs that began under an older one too.
Whoever drives it carries its actions out, calls `pump` where `is_due` says so, and `wake` at `wake_s`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, NoReturn, TypeVar

from deployments.ingress.core.actions import Action, HungUp, Retried, Send
from deployments.ingress.core.admission import Admission
from deployments.ingress.core.calls import Calls
from deployments.ingress.core.counts import IngressCounts
from deployments.ingress.core.due import Due
from deployments.ingress.core.flights import Call, Flight, I, Line, Pause, W
from deployments.ingress.core.itinerary import Itinerary, lay_out
from deployments.ingress.core.outcomes import Outcomes
from deployments.ingress.core.probes import ProbeBook, can_look
from deployments.ingress.core.rules import Rules
from deployments.reports import IngressReport
from earlyexit.errors import DeadlineError, OfframpError, StageUnavailableError
from earlyexit.wire import Seen
from optimizer.placement import PlacedPlan

T = TypeVar("T")
Settling = Callable[[Sequence[Flight[Any]], T, float], list[Action]]

RETRY_PAUSE_S = 0.05
"""A replica's death is noticed by all at once; a short pause lets the router learn of it before the next try."""
HANG_S = 1.0
"""How long a call outlives the last deadline of its inputs."""
SUSPENDED_RETRY_S = 5.0
"""When to come back to a service that has no plan: planning and starting a replica take seconds."""


class IngressCore(Generic[I, W]):
    """What one ingress decides. Seconds are the caller's, and never go back."""

    def __init__(
        self,
        name: str,
        placed: PlacedPlan,
        ways: Mapping[str, W],
        rules: Rules,
        rng: random.Random,
        make_call: type[Call[I, W]] = Call,
    ) -> None:
        """`ways`: by slot, to all that a plan may ever use; raises PlanError for a plan that needs others.

        `make_call`: the class of calls, where whoever drives it keeps things of its own in them.
        """
        self.name = name
        self.suspended: str | None = None
        """Why there is no plan to serve by; None where there is one."""
        self.wake_s = math.inf
        """When to call `wake`, at the latest."""
        self._ways = ways
        self._rules = rules
        self._rng = rng
        self._calls: Calls[I, W] = Calls(
            lay_out(placed, ways),
            make_call,
            calls_per_replica=rules.calls_per_replica,
            kept_s=0.0 if rules.slo_s is None else rules.slack * rules.slo_s,
        )
        admission = None
        if rules.slo_s is not None and rules.admits:
            admission = Admission(placed.plan, slo_s=rules.slo_s, num_ingresses=rules.num_ingresses)
        self._probes = None if rules.shape is None else ProbeBook(rules.shape, rules.loss, outlive_s=HANG_S)
        self._outcomes = Outcomes(slo_s=rules.slo_s, admission=admission, probes=self._probes)
        self._line: Line[I] = Line()
        self._deadlines: Due[list[Flight[I]]] = Due(_are_over)
        self._hanging: Due[Flight[I]] = Due(_is_let_go)
        """Inputs past their deadline that a call has still."""
        self._pauses: Due[Pause[I]] = Due(_is_given_up)

    @property
    def itinerary(self) -> Itinerary[W]:
        return self._calls.itinerary

    @property
    def num_unanswered(self) -> int:
        return self._outcomes.num_unanswered

    @property
    def num_waiting(self) -> int:
        return self._line.length

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

    @property
    def is_due(self) -> bool:
        """Whether a call would be made now."""
        return self._line.length >= self._calls.least

    # Plans

    def follow(self, placed: PlacedPlan) -> None:
        """Go by this plan from now on; one older than the present is ignored. Raises PlanError for foreign slots."""
        if placed.epoch < self.itinerary.epoch:
            return
        before = self.itinerary
        self._calls.follow(lay_out(placed, self._ways, before))
        if placed.epoch > before.epoch:
            self._outcomes.begin_plan(placed.plan)
        self.suspended = None

    def suspend(self, reason: str, now_s: float) -> list[Action]:
        """There is no plan: what waits, and what arrives until the next one, gets StageUnavailableError."""
        self.suspended = reason
        return self._fail_waiting(now_s)

    # In

    def check(self, num_inputs: int, deadline_s: float, now_s: float, *, num_coming: int = 0) -> None:
        """Refuse a request before work is spent on it: raises AdmissionError or StageUnavailableError.

        `num_coming`: inputs that were let in before and are still to be submitted.
        """
        if self.suspended is not None:
            self.refuse(_no_plan(self.suspended), num_inputs)
        self._outcomes.admit(num_inputs, deadline_s - now_s, now_s, num_coming=num_coming)

    def refuse(self, error: OfframpError, num_inputs: int) -> NoReturn:
        """Count the inputs of a request that is never submitted; raises the error."""
        self._outcomes.refuse(error, num_inputs)

    def submit(self, inputs: Sequence[I], *, arrived_s: float, deadline_s: float, now_s: float) -> list[Flight[I]]:
        """Take a request's inputs, all or none.

        `arrived_s`: since when its owner waits. Raises OverloadedError when too many have no outcome already,
        StageUnavailableError where there is no plan, InputError for a request that could never fit.
        """
        outcomes, number = self._outcomes, len(inputs)
        unanswered = outcomes.num_unanswered
        if self.suspended is not None:
            outcomes.refuse(_no_plan(self.suspended), number)
        if unanswered + number > self._rules.max_queued:
            outcomes.refuse_overload(number, self._rules.max_queued, now_s)
        if number == 1:  # as most requests are, and a comprehension costs as much as the flight
            flights = [Flight(inputs[0], arrived_s, deadline_s, unanswered)]
        else:
            flights = [Flight(each, arrived_s, deadline_s, unanswered + k) for k, each in enumerate(inputs)]
        outcomes.arrive(number)
        self._line.join(flights)
        if deadline_s < math.inf:
            self._deadlines.add(deadline_s, flights)
            if deadline_s < self.wake_s:
                self.wake_s = deadline_s
        return flights

    def give_up(self, flights: Sequence[Flight[I]], reason: str, now_s: float) -> list[Action]:
        """Forget inputs whose owner no longer waits; those without an outcome count as dropped for this reason."""
        return self._settle(flights, self._outcomes.give_up, reason, now_s)

    # Out

    def pump(self, now_s: float) -> list[Action]:
        """Send whatever may be sent now to the first stage."""
        actions: list[Action] = []
        leg = self.itinerary.first
        while self._line.length >= self._calls.least:
            flights = self._line.leave(leg.batches[0])
            probe = self._is_probe() and self._begin_probes(flights, now_s)
            call = self._calls.begin(leg, flights, flights, now_s, leg.epoch, probe, True)
            actions.append(Send(call, 0, None))
        return actions

    def is_awaited(self, call: Call[I, W], flight: Flight[I]) -> bool:
        """Whether a call has an input that is waited for: by its owner or, of an answered probe, for what it shows."""
        if flight.holder is not call:
            return False
        return not flight.settled or (call.probe and self._probes is not None and self._probes.holds(flight))

    # Back: parts of a call's reply. What a call does not have, or no longer, is passed over.

    def answer(
        self, call: Call[I, W], flights: Sequence[Flight[I]], block: int, now_s: float, answers: Sequence[Any] = ()
    ) -> list[Action]:
        """Inputs left the model after a block, with these answers."""
        mine, answers = _of_call(call, flights, answers)
        if not mine:
            return []
        for flight in mine:
            flight.holder = None
        self._calls.part(call, len(mine), now_s)
        return self._outcomes.answer(call, mine, block, answers, self._calls.itinerary, now_s)

    def answer_early(
        self, call: Call[I, W], flights: Sequence[Flight[I]], block: int, now_s: float, answers: Sequence[Any] = ()
    ) -> list[Action]:
        """Probes are answered, and stay inside."""
        mine, answers = _of_call(call, flights, answers)
        if not mine:
            return []
        self._calls.part(call, 0, now_s)
        return self._outcomes.answer(call, mine, block, answers, self._calls.itinerary, now_s)

    def see(self, call: Call[I, W], seen: Iterable[tuple[Flight[I], Seen]]) -> None:
        """Exits said something of probes, which the call still has."""
        mine = [(flight, each) for flight, each in seen if flight.holder is call]
        if mine and self._probes is not None:
            self._calls.hear(call)
            self._probes.see(mine)

    def lose(self, call: Call[I, W], flights: Sequence[Flight[I]], error: OfframpError, now_s: float) -> list[Action]:
        """A stage has no answer for inputs, and will have none."""
        mine = self._without(call, flights, now_s)
        return self._outcomes.fail(mine, error, now_s)

    def go_on(
        self, call: Call[I, W], flights: Sequence[Flight[I]], block: int, payload: Any, now_s: float
    ) -> list[Action]:
        """Inputs go on to a block, with this payload; to whoever hosts it now, if anybody waits for any of them."""
        mine = [flight for flight in flights if flight.holder is call]
        if not mine:
            return []
        self._calls.part(call, len(mine), now_s)
        if not self._some_awaited(call, mine):
            for flight in mine:
                flight.holder = None
            return []
        leg = self._calls.itinerary.at(block)
        return [Send(self._calls.begin(leg, flights, mine, now_s, call.epoch, call.probe, False), block, payload)]

    def fail(self, call: Call[I, W], flights: Sequence[Flight[I]], now_s: float) -> list[Action]:
        """Nothing more comes of these inputs of a call: after a pause they start again, if they may."""
        mine, most = self._without(call, flights, now_s), self._rules.max_attempts
        actions: list[Action] = []
        exhausted = [flight for flight in mine if flight.attempt + 1 >= most]
        if exhausted:
            message = f"{call.leg.slot} failed {most} times under this input"
            actions += self._outcomes.fail(exhausted, StageUnavailableError(message, retry_after_s=1.0), now_s)
        again = [flight for flight in mine if not flight.settled]
        if again:
            self._pauses.add(now_s + RETRY_PAUSE_S, Pause(call.leg.slot, again))
            self.wake_s = min(self.wake_s, now_s + RETRY_PAUSE_S)
        return actions

    # Later

    def wake(self, now_s: float) -> list[Action]:
        """Do what is due by now: deadlines, calls that hang, and inputs that start again after their pause."""
        actions: list[Action] = []
        for flights in self._deadlines.pop(now_s):
            actions += self._miss_deadline(flights, now_s)
        for flight in self._hanging.pop(now_s):
            actions += self._hang_up(flight, now_s)
        for pause in self._pauses.pop(now_s):
            actions += self._send_again(pause)
        if self.suspended is not None:
            actions += self._fail_waiting(now_s)
        self.wake_s = min(self._deadlines.next_s(), self._hanging.next_s(), self._pauses.next_s())
        return actions

    # Told

    def report(self, now_s: float, wall_s: float) -> IngressReport:
        """Everything so far; probes are handed over with it. `now_s` and `wall_s`: this moment, on both clocks."""
        probes = None if self._probes is None else self._probes.hand_over(wall_s - now_s)
        return replace(self.peek(wall_s), probes=probes)

    def peek(self, wall_s: float) -> IngressReport:
        """Everything so far but the probes, which stay here."""
        counts = self.counts
        return IngressReport(
            name=self.name,
            epoch=self.itinerary.epoch,
            suspended=self.suspended is not None,
            oldest_epoch=self.oldest_epoch,
            at_s=wall_s,
            unanswered=self.num_unanswered,
            waiting=self.num_waiting,
            arrived=counts.arrived,
            answered=counts.answered,
            in_slo=counts.in_slo,
            exits=dict(counts.exits),
            drops=dict(counts.drops),
            latencies=dict(counts.latencies),
        )

    def _is_probe(self) -> bool:
        rules = self._rules
        if rules.shape is None or not rules.probe_share:
            return False
        is_drawn = self._rng.random() < rules.probe_share
        return is_drawn and can_look(self.itinerary.placed.plan.policy, rules.shape.score)

    def _begin_probes(self, flights: Sequence[Flight[I]], now_s: float) -> bool:
        assert self._probes is not None
        return self._probes.begin(flights, self.itinerary.ramps, now_s)

    def _without(self, call: Call[I, W], flights: Sequence[Flight[I]], now_s: float) -> list[Flight[I]]:
        """Take away from a call what it will not bring to an end; what of the inputs it had."""
        mine = [flight for flight in flights if flight.holder is call]
        if mine:
            for flight in mine:
                flight.holder = None
            if call.probe and self._probes is not None:
                self._probes.forget(mine)
            self._calls.part(call, len(mine), now_s, took_time=False)
        return mine

    def _some_awaited(self, call: Call[I, W], flights: Sequence[Flight[I]]) -> bool:
        for flight in flights:  # noqa: SIM110 - `any` of a generator takes five times as long, for every part of a reply
            if not flight.settled or (call.probe and self.is_awaited(call, flight)):
                return True
        return False

    def _miss_deadline(self, flights: Sequence[Flight[I]], now_s: float) -> list[Action]:
        """Of a request."""
        deadline_s = flights[0].deadline_s
        for flight in flights:
            if flight.holder is not None:
                self._hanging.add(deadline_s + HANG_S, flight)
        error = DeadlineError(f"no answer within {deadline_s - flights[0].arrived_s:g} s")
        return self._settle(flights, self._outcomes.fail, error, now_s)

    def _hang_up(self, flight: Flight[I], now_s: float) -> list[Action]:
        """Give up the call that has an input, unless it has others that are not past their deadline for so long."""
        call = flight.holder
        if not isinstance(call, Call):
            return []
        inside = call.inside()
        if max(each.deadline_s for each in inside) + HANG_S > now_s:
            return []
        return [HungUp(call), *self.fail(call, inside, now_s)]

    def _send_again(self, pause: Pause[I]) -> list[Action]:
        again = pause.unsettled()
        for flight in again:
            flight.attempt += 1
            flight.holder = None
        self._line.return_to_front(again)
        return [Retried(pause.slot, len(again))]

    def _fail_waiting(self, now_s: float) -> list[Action]:
        assert self.suspended is not None
        return self._outcomes.fail(self._line.clear(), _no_plan(self.suspended), now_s)

    def _settle(self, flights: Sequence[Flight[I]], settle: Settling[T], why: T, now_s: float) -> list[Action]:
        """Settle inputs wherever they are."""
        num_waiting = sum([flight.is_waiting for flight in flights])
        actions = settle(flights, why, now_s)
        if num_waiting:
            self._line.forget(num_waiting)
        return actions


def _of_call(
    call: Call[I, Any], flights: Sequence[Flight[I]], answers: Sequence[Any]
) -> tuple[Sequence[Flight[I]], Sequence[Any]]:
    """Those that the call has, with their answers, where there are any."""
    for flight in flights:
        if flight.holder is not call:
            break
    else:
        return flights, answers
    mine = [flight for flight in flights if flight.holder is call]
    if answers:
        answers = [answer for flight, answer in zip(flights, answers, strict=True) if flight.holder is call]
    return mine, answers


def _are_over(flights: Sequence[Flight[I]]) -> bool:
    for flight in flights:  # noqa: SIM110 - `all` of a generator takes five times as long, for every request
        if not flight.settled or flight.holder is not None:
            return False
    return True


def _is_let_go(flight: Flight[I]) -> bool:
    return flight.holder is None


def _is_given_up(pause: Pause[I]) -> bool:
    return not pause.unsettled()


def _no_plan(reason: str) -> StageUnavailableError:
    return StageUnavailableError(f"there is no plan to serve by: {reason}", retry_after_s=SUSPENDED_RETRY_S)
