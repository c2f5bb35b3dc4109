"""The core of an ingress: events in, actions out. It knows no network, no clock, and of an input no more than times.

It follows the newest plan that it was given, for all later calls, also those of inputs that began under an older plan.
Its driver carries out its actions, calls `pump` when `is_due` says so, and calls `wake` at `wake_s`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, NoReturn

from deployments.ingress.core.admission import Admission
from deployments.ingress.core.attempts import HANG_S, Attempts, Calls, Steps
from deployments.ingress.core.chains import Chains
from deployments.ingress.core.inputs import (
    Actions,
    Agenda,
    Answers,
    Call,
    Flight,
    Flights,
    I,
    Rules,
    SendCall,
    Tokens,
    Watch,
    picked,
)
from deployments.ingress.core.outcomes import IngressCounts, Outcomes
from deployments.ingress.core.probes import book_of
from deployments.ingress.core.routes import KVPlacement, PlanRoute, W, lay_out
from deployments.wire.messages import IngressReport
from earlyexit.errors import DeadlineError, OfframpError, StageUnavailableError
from earlyexit.named import HopDtype
from earlyexit.network.wire import Seen
from optimizer.placement import PlacedPlan, placed_document
from optimizer.plan import Plan


def own_plan(placed: PlacedPlan, hop_dtype: HopDtype) -> dict[str, Any]:
    """Plain data, of which `parse_placed` reads the plan back."""
    return {**placed_document(placed), "hops": {"dtype": hop_dtype}}


def admission_of(rules: Rules, plan: Plan) -> Admission | None:
    """The admission control of a plan of one chain; None where everything is let in."""
    if rules.slo_s is None or not rules.admits:
        return None
    return Admission(plan, slo_s=rules.slo_s, num_ingresses=rules.num_ingresses)


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

        `make_call`: the class of calls, in which the driver may keep data of its own.
        """
        self.name = name
        self.suspended: str | None = None
        """Why there is no plan to serve by; None where there is one."""
        self.wake_s = math.inf
        """When to call `wake`, at the latest."""
        self.ways = ways
        self._rules = rules
        self._rng = rng
        self._chains: Chains[Flight[I], W] = Chains(
            lay_out(placed, ways), rules.calls_per_replica, partial(admission_of, rules)
        )
        self._calls: Calls[I, W] = Calls(self._chains, make_call, rules)
        self._probes = book_of(rules, outlive_s=HANG_S)
        self._outcomes: Outcomes[I, W] = Outcomes(self._chains, rules, self._probes)
        self._steps: Steps[I, W] = Steps(self._chains, self._calls, self._outcomes, self._probes, rules, rng)
        self._agenda: Agenda[I] = Agenda()
        self._attempts: Attempts[I, W] = Attempts(
            self._chains, self._calls, self._outcomes, self._probes, self._steps, self._agenda, most=rules.max_attempts
        )

    @property
    def itinerary(self) -> PlanRoute[W]:
        """The routes of the plan in force."""
        return self._chains.route

    @property
    def placed(self) -> PlacedPlan:
        return self.itinerary.placed

    @property
    def num_unanswered(self) -> int:
        return self._outcomes.num_unanswered

    @property
    def num_waiting(self) -> int:
        return sum([chain.line.length for chain in self._chains.active])

    @property
    def counts(self) -> IngressCounts:
        return self._outcomes.counts

    @property
    def oldest_epoch(self) -> int:
        """Of the plans by which the calls under way were sent; the present one where there are none."""
        return self._calls.oldest_epoch

    @property
    def agreement(self) -> float | None:
        """Share of probes, and of those that stayed, so far that got the full model's answer; None before the first."""
        return None if self._probes is None else self._probes.agreement

    @property
    def is_due(self) -> bool:
        """Whether a call would be made now."""
        for chain in self._chains.active:
            if chain.is_due:
                return True
        return bool(self._steps.due)

    # Plans

    def follow(self, placed: PlacedPlan) -> None:
        """Go by this plan from now on; one older than the present is ignored. Raises PlanError for foreign slots."""
        if placed.epoch < self.itinerary.epoch:
            return
        before = self.itinerary
        self._chains.follow(lay_out(placed, self.ways, before), self.counts.tokens_per_input)
        if self._probes is not None and not self.itinerary.stays:
            self._probes.stop_staying()
        if placed.epoch > before.epoch:
            self.counts.begin_plan()
        self.suspended = None

    def suspend(self, reason: str, now_s: float) -> Actions:
        """There is no plan: what waits, and what arrives until the next one, gets StageUnavailableError."""
        self.suspended = reason
        return self._outcomes.fail([*self._chains.clear(), *self._steps.clear()], self._no_plan(), now_s)

    # In

    def check(self, num_inputs: int, deadline_s: float, now_s: float, *, num_coming: int = 0) -> None:
        """Refuse a request before work is spent on it: raises AdmissionError or StageUnavailableError.

        `num_coming`: inputs that were let in before and are still to be submitted. How long inputs are shows later:
        where that counts, `submit` looks again.
        """
        if self.suspended is not None:
            self.refuse(self._no_plan(), num_inputs)
        self._outcomes.admit(num_inputs, deadline_s - now_s, now_s, num_coming=num_coming)

    def refuse(self, error: OfframpError, num_inputs: int) -> NoReturn:
        """Count the inputs of a request that is never submitted; raises the error."""
        self._outcomes.refuse(error, num_inputs)

    def submit(
        self, inputs: Sequence[I], *, tokens: Tokens = None, arrived_s: float, deadline_s: float, now_s: float
    ) -> list[Flight[I]]:
        """Take a request's inputs, all or none.

        `arrived_s`: since when its owner waits. Raises OverloadedError when too many have no outcome already,
        StageUnavailableError where there is no plan, InputError for a request that could never fit, AdmissionError
        where the plan counts tokens and so many cannot be in time.
        """
        outcomes, number = self._outcomes, len(inputs)
        if self.suspended is not None:
            outcomes.refuse(self._no_plan(), number)
        if outcomes.num_unanswered + number > self._rules.max_queued:
            outcomes.refuse_overload(number, self._rules.max_queued, now_s)
        flights = outcomes.take(inputs, tokens, arrived_s, deadline_s, now_s)
        for chain, mine in self._chains.apart(flights):
            chain.line.join(mine)
            self._calls.come(chain, len(mine), now_s, deadline_s)
            if chain.departures.held_until_s < self.wake_s:
                self.wake_s = chain.departures.held_until_s
        if deadline_s < math.inf:
            self._agenda.deadlines.add(deadline_s, flights)
            if deadline_s < self.wake_s:
                self.wake_s = deadline_s
        return flights

    def step(
        self, given: I, home: KVPlacement, *, tokens: int, arrived_s: float, deadline_s: float, now_s: float
    ) -> Flight[I]:
        """Take an input of a sequence, which goes to its home or, the first one of that home, where there is room.

        Its deadline is its sequence's, which its owner keeps: see `expire`. Raises what `submit` raises, and
        SequenceLostError for a home that is no more.
        """
        if self.suspended is not None:
            self.refuse(self._no_plan(), 1)
        begins, outcomes = home.layout is None, self._outcomes
        if begins and not home.is_again and outcomes.num_unanswered >= self._rules.max_queued:
            outcomes.refuse_overload(1, self._rules.max_queued, now_s)
        self._steps.check(home)
        [flight] = made = outcomes.take((given,), (tokens,), arrived_s, deadline_s, now_s)
        flight.home = home
        (flight.chain.line if begins else self._steps).join(made)
        return flight

    def expire(self, flight: Flight[I], now_s: float) -> Actions:
        """The deadline of a sequence's input has come; a call that does not let go of it is hung up."""
        actions = self._miss_deadline((flight,), now_s)
        self.wake_s = min(self.wake_s, self._agenda.next_s())
        return actions

    def give_up(self, flights: Flights[I], reason: str, now_s: float) -> Actions:
        """Forget inputs whose owner no longer waits; those without an outcome count as dropped for this reason."""
        return self._drop(flights, reason, None, now_s)

    # Out

    def pump(self, now_s: float) -> Actions:
        """Send whatever may be sent now to the first stages of the chains."""
        actions: Actions = self._steps.send(now_s) if self._steps.due else []
        itinerary, book, share = self.itinerary, self._probes, self._rules.probe_share
        unseen: Watch | None = "stay" if itinerary.stays else None
        for chain in self._chains.active:
            route, line = chain.route, chain.line
            leg = route.first
            while chain.is_due:
                flights = line.leave(leg.budgets[0], itinerary.order, now_s)
                if flights[0].home is not None:
                    actions += self._steps.settle_in(route, flights, now_s)
                    continue
                watch = unseen if book is None else book.draw(flights, route.plan, share, self._rng, now_s)
                call = self._calls.begin(route, leg, flights, flights, now_s, leg.epoch, watch, True)
                actions.append(SendCall(call, *route.entrance(probe=call.probe)))
            if not line.length:
                chain.departures.release()
        return actions

    def is_awaited(self, call: Call[I, W], flight: Flight[I]) -> bool:
        """Whether a call has an input that is waited for: by its owner or, once that has an answer, to be seen."""
        if flight.holder is not call:
            return False
        if not flight.settled or call.watch is None:
            return not flight.settled
        return self.itinerary.stays if self._probes is None else self._probes.holds(flight)

    # Back: parts of a call's reply. What a call does not have, or no longer, is passed over. A block that the model
    # does not have raises ExecutionError, and changes nothing.

    def answer(self, call: Call[I, W], flights: Flights[I], block: int, now_s: float, answers: Answers = ()) -> Actions:
        """Inputs left the model after a block, with these answers."""
        self.itinerary.check(block)
        mine, answers = picked(flights, answers, call.release(flights))
        if not mine:
            return []
        self._calls.part(call, len(mine), now_s)
        return self._outcomes.answer(call, mine, block, answers, mine[0].chain.present.route, now_s)

    def answer_early(
        self, call: Call[I, W], flights: Flights[I], block: int, now_s: float, answers: Answers = ()
    ) -> Actions:
        """Inputs are answered, and stay inside: no part of a reply, for their batch still runs.

        Of a sequence it is only noted where its token would have left: see `Steps`.
        """
        self.itinerary.check(block)
        mine, answers = picked(flights, answers, [flight.holder is call for flight in flights])
        if not mine:
            return []
        route = mine[0].chain.present.route
        if mine[0].home is not None:
            self._outcomes.note(call, mine, block, route)
            return []
        return self._outcomes.answer(call, mine, block, answers, route, now_s)

    def hear(self, call: Call[I, W], busy: float, now_s: float) -> None:
        """A replica that has a call said what share of its time it was busy, of late."""
        for chain in self._chains.active:
            chain.departures.hear(call.leg.slot, busy, now_s)

    def see(self, call: Call[I, W], seen: Iterable[tuple[Flight[I], Seen]]) -> None:
        """Exits said something of inputs that stay, which the call still has."""
        mine = [(flight, each) for flight, each in seen if flight.holder is call]
        if mine and self._probes is not None:
            self._probes.see(mine)

    def lose(self, call: Call[I, W], flights: Flights[I], error: OfframpError, now_s: float) -> Actions:
        """A stage has no answer for inputs, and will have none."""
        return self._outcomes.fail(self._attempts.without(call, flights, now_s), error, now_s)

    def go_on(self, call: Call[I, W], flights: Flights[I], block: int, payload: Any, now_s: float) -> Actions:
        """Sends inputs on to a block, with this payload, at the slot that hosts it now, if any of them is awaited.

        Inputs that no request waits for travel along, but not into another network, for which all would be encoded.
        """
        self.itinerary.check(block)
        mine = list(dict.fromkeys(flight for flight in flights if flight.holder is call))
        if not mine:
            return []
        self._calls.part(call, len(mine), now_s)
        if mine[0].home is not None:
            return self._steps.go_on(call, flights, block, payload, now_s)
        # The first input is nearly always awaited, and checking all of them takes time.
        if mine[0].settled and not any(self.is_awaited(call, flight) for flight in mine):
            call.release(mine)
            return []
        route = mine[0].chain.present.route
        if route.crossings and (crossing := route.crossing(block, probe=call.probe)) is not None:
            awaited = [flight for flight in mine if self.is_awaited(call, flight)]
            crosses = self._calls.cross(call, mine, awaited, crossing, payload, now_s)
            if call.watch != "probe" or block - 1 not in route.plan.prune:
                return [crosses]
            beside = self._attempts.go_whole(crosses.call, now_s)
            self.wake_s = min(self.wake_s, self._agenda.next_s())
            return [crosses, *beside]
        call = self._calls.begin(route, route.at(block), flights, mine, now_s, call.epoch, call.watch, False)
        return [SendCall(call, block, payload)]

    def fail(self, call: Call[I, W], flights: Flights[I], now_s: float) -> Actions:
        """Nothing more comes of these inputs of a call: they start again later, if they may; see `Attempts.fail`."""
        actions = self._attempts.fail(call, flights, now_s)
        self.wake_s = min(self.wake_s, self._agenda.next_s())
        return actions

    # Later

    def wake(self, now_s: float) -> Actions:
        """Do what is due by now: deadlines, calls that hang, and inputs that start again after their pause."""
        actions: Actions = []
        for chain in self._chains.active:
            chain.departures.wake(now_s)
        for flights in self._agenda.deadlines.pop(now_s):
            actions += self._miss_deadline(flights, now_s)
        actions += self._attempts.hang_up(now_s)
        actions += self._attempts.begin(now_s)
        if self.suspended is not None:
            actions += self._outcomes.fail(self._chains.clear(), self._no_plan(), now_s)
        self.wake_s = min(self._agenda.next_s(), *[chain.departures.held_until_s for chain in self._chains.active])
        return actions

    def report(self, now_s: float, wall_s: float) -> IngressReport:
        """Everything so far, and what was seen of inputs. `now_s` and `wall_s`: this moment, on both clocks."""
        probes = None if self._probes is None else self._probes.hand_over(wall_s - now_s)
        return replace(self.peek(now_s, wall_s), probes=probes)

    def peek(self, now_s: float, wall_s: float) -> IngressReport:
        """Everything so far but what was seen, which stays here."""
        return IngressReport(
            name=self.name,
            epoch=self.itinerary.epoch,
            suspended=self.suspended is not None,
            oldest_epoch=self.oldest_epoch,
            at_s=wall_s,
            unanswered=self.num_unanswered,
            unanswered_tokens=self._outcomes.unanswered_tokens,
            waiting=self.num_waiting,
            oldest_s=self._chains.oldest_s(now_s),
            **self.counts.totals(),
        )

    def _miss_deadline(self, flights: Flights[I], now_s: float) -> Actions:
        """Of a request."""
        deadline_s = flights[0].deadline_s
        for flight in flights:
            if flight.holder is not None:
                self._agenda.hanging.add(deadline_s + HANG_S, flight)
        timeout_s = round(deadline_s - flights[0].arrived_s, 9)  # a clock that has run for a day knows no more digits
        error = DeadlineError(f"no answer within {timeout_s:g} s")
        return self._drop(flights, error.kind, error, now_s)

    def _no_plan(self) -> StageUnavailableError:
        return StageUnavailableError(f"there is no plan to serve by: {self.suspended}", retry_after_s=SUSPENDED_RETRY_S)

    def _drop(self, flights: Flights[I], reason: str, error: OfframpError | None, now_s: float) -> Actions:
        """Inputs get no answer, wherever they are."""
        waiting = [flight for flight in flights if flight.is_waiting]
        actions = self._outcomes.drop(flights, reason, error, now_s)
        for chain, mine in self._chains.apart(waiting):
            chain.line.forget(mine)
        return actions
