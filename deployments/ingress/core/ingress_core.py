"""The core of an ingress: events in, actions out; and the loop that drives it.

The core knows no network, no clock, and of an input no more than times. An input's life, method by method: `check` and
`submit` receive and admit it, `pump` sends it in a batch, `answer` settles it, `go_on` sends it to the next stage,
`fail` has it start again, and `wake` ends it at its deadline. All later calls follow the newest plan, also those of
inputs that began under an older one.

A `Driver` has the clock. It carries out the core's actions, calls `pump` when `is_due` says so, and calls `wake` at
`wake_s`.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NoReturn

from deployments.ingress.core.calls import (
    DEADLINE,
    HANGING,
    PAUSE,
    RETRY_PAUSE_S,
    Action,
    Actions,
    Answered,
    Answers,
    Call,
    Calls,
    Dropped,
    HungUp,
    IngressCounts,
    Outcomes,
    Pause,
    SendCall,
    Timers,
    picked,
)
from deployments.ingress.core.generation import Steps
from deployments.ingress.core.inputs import Chains, Inputs, PendingInput, Rules
from deployments.ingress.core.probes import MOST_OPEN, ExitObservations, Watch
from deployments.ingress.core.routes import KVPlacement, PlanRoute, lay_out
from deployments.wire.messages import IngressReport
from earlyexit.clock import Clock
from earlyexit.errors import DeadlineError, OfframpError, StageUnavailableError
from earlyexit.named import HopDtype
from earlyexit.network.boundary import ExitResult
from optimizer.placement import PlacedPlan, placed_document


def own_plan(placed: PlacedPlan, hop_dtype: HopDtype) -> dict[str, Any]:
    """Returns plain data of which `parse_placed` makes the plan again."""
    return {**placed_document(placed), "hops": {"dtype": hop_dtype}}


SUSPENDED_RETRY_S = 5.0
"""When to come back to a service that has no plan: planning and starting a replica take seconds."""
HANG_S = 1.0
"""How long a call outlives the last deadline of its inputs."""


class IngressCore:
    """What one ingress decides. Seconds are the caller's, and never go back."""

    def __init__(
        self,
        name: str,
        placed: PlacedPlan,
        rules: Rules,
        rng: random.Random,
        make_call: type[Call] = Call,
    ) -> None:
        """`make_call`: the class of calls, in which the driver may keep data of its own."""
        self.name = name
        self.suspended: str | None = None
        """Why there is no plan to serve by; None where there is one."""
        self.wake_s = math.inf
        """When to call `wake`, at the latest."""
        self._rules = rules
        self._rng = rng
        self._chains = chains = Chains(lay_out(placed), rules)
        self._calls = Calls(chains, rules, make_call)
        self._observations: ExitObservations | None = None
        if rules.shape is not None:
            # Answered inputs that run on wait in stages with their states, as others do: no more than are admitted.
            most = int(min(MOST_OPEN, rules.max_queued))
            self._observations = ExitObservations(rules.shape, rules.loss, outlive_s=HANG_S, most_open=most)
        self._outcomes = Outcomes(chains, rules, self._observations)
        self._steps = Steps(chains, self._calls, self._outcomes, self._observations, rules.probe_share, rng)
        self._timers = Timers()

    @property
    def route(self) -> PlanRoute:
        """The routes of the plan in force."""
        return self._chains.route

    @property
    def placed(self) -> PlacedPlan:
        return self._chains.route.placed

    @property
    def num_unanswered(self) -> int:
        return self._outcomes.num_unanswered

    @property
    def num_waiting(self) -> int:
        return sum([chain.queue.length for chain in self._chains.active])

    @property
    def counts(self) -> IngressCounts:
        return self._outcomes.counts

    @property
    def oldest_epoch(self) -> int:
        """The oldest plan by which a call under way was sent; the present one where there is no call."""
        return self._calls.oldest_epoch

    @property
    def agreement(self) -> float | None:
        """Share of the observed inputs so far that got the full model's answer; None before the first."""
        return None if self._observations is None else self._observations.agreement

    @property
    def is_due(self) -> bool:
        """Whether a call would be made now."""
        for chain in self._chains.active:
            if chain.is_due:
                return True
        return bool(self._steps.due)

    # Plans

    def follow(self, placed: PlacedPlan) -> None:
        """Follow this plan from now on; one older than the present is ignored. Raises PlanError for another model's."""
        before = self.route
        if placed.epoch < before.epoch:
            return
        self._chains.follow(lay_out(placed, before), self.counts.tokens_per_input)
        if self._observations is not None and not self.route.stays:
            self._observations.stop_staying()
        if placed.epoch > before.epoch:
            self.counts.exits.clear()
        self.suspended = None

    def suspend(self, reason: str, now_s: float) -> Actions:
        """Serve by no plan: what waits, and what arrives until the next one, gets StageUnavailableError."""
        self.suspended = reason
        return self._outcomes.drop([*self._chains.clear(), *self._steps.clear()], self._no_plan(), now_s)

    # Receive and admit

    def check(self, num_inputs: int, deadline_s: float, now_s: float, *, num_coming: int = 0) -> None:
        """Refuse a request before work is spent on it: raises AdmissionError or StageUnavailableError.

        `num_coming`: inputs that were admitted before and are still to be submitted. The inputs' lengths are known
        later: where they count, `submit` checks again.
        """
        if self.suspended is not None:
            self.refuse(self._no_plan(), num_inputs)
        self._outcomes.admit(num_inputs, deadline_s - now_s, now_s, num_coming=num_coming)

    def refuse(self, error: OfframpError, num_inputs: int) -> NoReturn:
        """Count the inputs of a request that is never submitted; raises the error."""
        self._outcomes.refuse(error, num_inputs)

    def submit(self, inputs: Inputs, now_s: float) -> None:
        """Take a request's inputs, which have one deadline: all or none.

        Raises OverloadedError when too many have no outcome already, StageUnavailableError where there is no plan,
        InputError for a request that could never fit, AdmissionError where the plan counts tokens and so many cannot be
        in time.
        """
        if self.suspended is not None:
            self.refuse(self._no_plan(), len(inputs))
        self._outcomes.check_room(len(inputs), now_s)
        self._outcomes.take(inputs, now_s)
        deadline_s = inputs[0].deadline_s if inputs else math.inf
        for chain, mine in self._chains.apart(inputs):
            chain.queue.join(mine)
        if deadline_s < math.inf:
            self._timers.add(deadline_s, DEADLINE, inputs)
            if deadline_s < self.wake_s:
                self.wake_s = deadline_s

    def step(self, pending: PendingInput, placement: KVPlacement, now_s: float) -> None:
        """Take an input of a sequence: it goes where the sequence is or, if it is the first, where there is room.

        Its deadline is its sequence's, which the caller keeps: see `expire`. Raises what `submit` raises, and
        SequenceLostError if the plan has the sequence's blocks elsewhere now.
        """
        if self.suspended is not None:
            self.refuse(self._no_plan(), 1)
        begins = placement.layout is None
        if begins and not placement.is_again:
            self._outcomes.check_room(1, now_s)
        self._steps.check(placement)
        self._outcomes.take((pending,), now_s)
        pending.placement = placement
        (pending.chain.queue if begins else self._steps).join((pending,))

    def expire(self, pending: PendingInput, now_s: float) -> Actions:
        """End a sequence's input, whose deadline has come; a call that does not let go of it is hung up."""
        actions = self._miss_deadline((pending,), now_s)
        self.wake_s = min(self.wake_s, self._timers.next_s())
        return actions

    def give_up(self, inputs: Inputs, why: OfframpError | str, now_s: float) -> Actions:
        """Drop inputs, wherever they are, with an error, or for a reason where their caller no longer waits."""
        waiting = [each for each in inputs if each.holder is None and not each.settled]
        actions = self._outcomes.drop(inputs, why, now_s)
        for chain, mine in self._chains.apart(waiting):
            chain.queue.forget(mine)
        return actions

    # Batch and send

    def pump(self, now_s: float) -> Actions:
        """Send whatever may be sent now to the first stages of the chains."""
        actions: Actions = self._steps.send(now_s) if self._steps.due else []
        for chain in self._chains.active:
            first = chain.route.first
            while chain.is_due:
                inputs = chain.queue.leave(first.budgets[0], self.placed.plan.order, now_s)
                if inputs[0].placement is not None:
                    actions += self._steps.begin(chain.route, inputs, now_s)
                    continue
                if self._observations is None:
                    watch: Watch | None = "stay" if self.route.stays else None
                else:
                    plan, share = chain.route.plan, self._rules.probe_share
                    watch = self._observations.draw(inputs, plan, share, self._rng, now_s)
                call = self._calls.begin(chain.route, first, inputs, now_s, first.epoch, watch, is_first=True)
                actions.append(SendCall(call, *chain.route.entrance(probe=call.probe)))
        return actions

    # Settle, or send on: parts of a call's reply. Inputs that the call does not have, or no longer, are passed over. A
    # block that the model does not have raises ExecutionError, and changes nothing.

    def answer(self, call: Call, inputs: Inputs, block: int, now_s: float, answers: Answers = ()) -> Actions:
        """Settle inputs that left the model after a block, with these answers."""
        self.route.check(block)
        mine, answers = picked(inputs, answers, call.release(inputs))
        if not mine:
            return []
        self._calls.part(call, len(mine), now_s)
        return self._outcomes.answer(call, mine, block, answers, mine[0].chain.present.route, now_s)

    def answer_early(self, call: Call, inputs: Inputs, block: int, now_s: float, answers: Answers = ()) -> Actions:
        """Answer inputs that stay inside: this is no part of a reply, for their batch still runs.

        For an input of a sequence it is only noted where its token would have left: see `Steps`.
        """
        self.route.check(block)
        mine, answers = picked(inputs, answers, [each.holder is call for each in inputs])
        if not mine:
            return []
        route = mine[0].chain.present.route
        if mine[0].placement is not None:
            self._outcomes.note(call, mine, block, route)
            return []
        return self._outcomes.answer(call, mine, block, answers, route, now_s)

    def see(self, call: Call, seen: Iterable[tuple[PendingInput, ExitResult]]) -> None:
        """Note what exits said of inputs that stay, which the call still has."""
        mine = [(pending, each) for pending, each in seen if pending.holder is call]
        if mine and self._observations is not None:
            self._observations.see(mine)

    def lose(self, call: Call, inputs: Inputs, error: OfframpError, now_s: float) -> Actions:
        """Fail inputs for which a stage has no answer, and will have none."""
        return self._outcomes.drop(self._without(call, inputs, now_s), error, now_s)

    def go_on(self, call: Call, inputs: Inputs, block: int, payload: Any, now_s: float) -> Actions:
        """Sends inputs on to a block, with this payload, at the stage that hosts it now, if any of them is awaited.

        Inputs that no request waits for travel along, but not into another network, for which all would be encoded.
        """
        self.route.check(block)
        mine = list(dict.fromkeys(each for each in inputs if each.holder is call))
        if not mine:
            return []
        self._calls.part(call, len(mine), now_s)
        if mine[0].placement is not None:
            return self._steps.go_on(call, inputs, block, payload, now_s)
        # The first input is nearly always awaited, and checking all of them takes time.
        if mine[0].settled and not any(self.is_awaited(call, each) for each in mine):
            call.release(mine)
            return []
        route = mine[0].chain.present.route
        if route.crossings and (crossing := route.crossing(block, probe=call.probe)) is not None:
            awaited = [each for each in mine if self.is_awaited(call, each)]
            call.release(mine)
            stage = route.at(crossing.block)
            entering = self._calls.begin(route, stage, awaited, now_s, call.epoch, call.watch)
            beside = self._go_whole(entering, now_s) if call.watch == "probe" and block - 1 in route.plan.prune else []
            return [SendCall(entering, crossing.block, payload, crossing.network), *beside]
        onward = self._calls.begin(route, route.at(block), inputs, now_s, call.epoch, call.watch, mine=mine)
        return [SendCall(onward, block, payload)]

    def is_awaited(self, call: Call, pending: PendingInput) -> bool:
        """Whether a call has an input that is waited for: by its caller or, once that has an answer, to be observed."""
        if pending.holder is not call:
            return False
        if not pending.settled or call.watch is None:
            return not pending.settled
        return self.route.stays if self._observations is None else self._observations.holds(pending)

    def _go_whole(self, call: Call, now_s: float) -> Actions:
        """Send the whole texts of a call's probes, which are about to lose words, to the last network of the chain.

        That network is the reference. No request waits for the answers to these copies. If a copy is lost, the
        observations of its probe are lost too.
        """
        observations = self._observations
        alone = [] if observations is None else [each for each in call.inputs if observations.goes_alone(each)]
        if observations is None or not alone:
            return []
        wholes = [each.whole() for each in alone]
        route = wholes[0].chain.present.route
        first, last = route.plan.networks[-2], len(route.plan.networks) - 1
        reference = self._calls.begin(route, route.at(first), wholes, now_s, call.epoch, "whole")
        for each, whole in zip(alone, wholes, strict=True):
            observations.go_beside(each, whole)
            self._watch_hanging(whole.deadline_s + HANG_S, whole)
        return [SendCall(reference, first, None, last)]

    # Fail and start again

    def fail(self, call: Call, inputs: Inputs, now_s: float) -> Actions:
        """Take back inputs of a call that failed: after a pause they start again, unless they failed too often.

        Inputs of sequences cannot: what they would go on from is gone. Their callers get SequenceLostError.
        """
        mine, slot = self._without(call, inputs, now_s), call.stage.slot
        if mine and mine[0].placement is not None:
            return self._steps.fail(mine, slot, now_s)
        most = self._rules.max_attempts
        exhausted = [each for each in mine if each.attempt + 1 >= most]
        error = StageUnavailableError(f"{slot} failed {most} times under this input", retry_after_s=1.0)
        actions = self._outcomes.drop(exhausted, error, now_s)
        again = [each for each in mine if not each.settled]
        if again:
            self._timers.add(now_s + RETRY_PAUSE_S, PAUSE, Pause(slot, again))
        self.wake_s = min(self.wake_s, self._timers.next_s())
        return actions

    def _without(self, call: Call, inputs: Inputs, now_s: float) -> list[PendingInput]:
        """Takes inputs away from a call, which will not bring them to an end; returns those that it had."""
        mine = self._calls.take_away(call, inputs, now_s)
        if call.watch is not None and self._observations is not None:
            self._observations.forget(mine)
        return mine

    # Later

    def wake(self, now_s: float) -> Actions:
        """Do what is due by now: deadlines, calls that hang, and inputs that start again after their pause.

        An error in one of them takes nothing from the others, which are due again at once.
        """
        actions: Actions = []
        expired = deque(self._timers.pop(now_s))
        try:
            while expired:
                actions += self._expire(*expired[0], now_s)
                expired.popleft()
        except Exception:
            if not actions:  # else what was done is carried out first, and the error comes with the next call
                expired.popleft()
                raise
        finally:
            for kind, thing in expired:
                self._timers.add(now_s, kind, thing)
            self.wake_s = self._timers.next_s()
        if self.suspended is not None:
            actions += self._outcomes.drop(self._chains.clear(), self._no_plan(), now_s)
        return actions

    def _expire(self, kind: int, thing: Any, now_s: float) -> Actions:
        if kind == DEADLINE:
            return self._miss_deadline(thing, now_s)
        if kind == HANGING:
            return self._hang_up(thing, now_s)
        again = thing.end()
        for chain, mine in self._chains.apart(again):
            chain.queue.rejoin(mine)
        if again:
            self.counts.retries[thing.slot] += len(again)
        return []

    def _miss_deadline(self, inputs: Inputs, now_s: float) -> Actions:
        """Drop a request's inputs, and watch the calls that still have some."""
        deadline_s = inputs[0].deadline_s
        for each in inputs:
            if each.holder is not None:
                self._watch_hanging(deadline_s + HANG_S, each)
        timeout_s = round(deadline_s - inputs[0].arrived_s, 9)  # a clock that has run for a day knows no more digits
        return self.give_up(inputs, DeadlineError(f"no answer within {timeout_s:g} s"), now_s)

    def _watch_hanging(self, at_s: float, pending: PendingInput) -> None:
        if at_s < math.inf:
            self._timers.add(at_s, HANGING, pending)
            self.wake_s = min(self.wake_s, at_s)

    def _hang_up(self, pending: PendingInput, now_s: float) -> Actions:
        """Stop the call that has an input past its deadline, unless it has others that are not past theirs for long."""
        call = pending.holder
        if not isinstance(call, Call):
            return []
        inside = call.inside()
        until_s = max(each.deadline_s for each in inside) + HANG_S
        if until_s <= now_s:
            return [HungUp(call), *self.fail(call, inside, now_s)]
        self._watch_hanging(until_s, pending)  # the others may leave before, and this one not
        return []

    def _no_plan(self) -> StageUnavailableError:
        return StageUnavailableError(f"there is no plan to serve by: {self.suspended}", retry_after_s=SUSPENDED_RETRY_S)

    # Reports

    def report(self, now_s: float, wall_s: float) -> IngressReport:
        """Returns all counts, and hands over what was observed. `now_s` and `wall_s`: this moment, on both clocks."""
        seen = None if self._observations is None else self._observations.hand_over(wall_s - now_s)
        return replace(self.peek(now_s, wall_s), probes=seen)

    def peek(self, now_s: float, wall_s: float) -> IngressReport:
        """Returns all counts so far; what was observed stays here."""
        return IngressReport(
            name=self.name,
            epoch=self.route.epoch,
            suspended=self.suspended is not None,
            oldest_epoch=self.oldest_epoch,
            at_s=wall_s,
            unanswered=self.num_unanswered,
            unanswered_tokens=sum(chain.unanswered_tokens for chain in self._chains.active),
            waiting=self.num_waiting,
            oldest_s=self._chains.oldest_s(now_s),
            **self.counts.totals(),
        )


class Driver(ABC):
    """The loop around a core. What carries its calls, live or simulated, is a subclass."""

    def __init__(self, core: IngressCore, clock: Clock) -> None:
        self.core = core
        self.clock = clock
        self._todo: deque[Action] = deque()
        self._is_busy = False
        self._timer_s = math.inf
        """When the timer that is set expires."""
        self._handlers: dict[type[Action], Callable[[Any], None]] = {
            SendCall: self.send,
            Answered: self.answered,
            Dropped: self.dropped,
            HungUp: self.hung_up,
        }

    def follow(self, placed: PlacedPlan) -> None:
        """Follow this plan from now on; one older than the present is ignored. Raises PlanError for another model's."""
        self.core.follow(placed)
        self.do(())

    def suspend(self, reason: str) -> None:
        """Serve by no plan: what waits, and what arrives until the next one, gets StageUnavailableError."""
        self.do(self.core.suspend(reason, self.clock.now_s()))

    def do(self, actions: Iterable[Action]) -> None:
        """Carry out actions and whatever follows from them; a nested call leaves its actions to the outer one."""
        todo = self._todo
        todo.extend(actions)
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while todo or self.pump():
                self.carry_out(todo.popleft())
        finally:
            self._is_busy = False
            if self.core.wake_s < self._timer_s:
                self._timer_s = self.core.wake_s
                self.set_timer(self._timer_s)

    def pump(self) -> bool:
        """Have the core send what is due, if anything; returns whether there are actions to carry out."""
        if self.core.is_due:
            self._todo.extend(self.core.pump(self.clock.now_s()))
        return bool(self._todo)

    def carry_out(self, action: Action) -> None:
        self._handlers[type(action)](action)

    def wake(self) -> bool:
        """The timer has expired; returns whether there was anything to do."""
        now_s = max(self._timer_s, self.clock.now_s())  # a loop's timer may come a moment before its time
        self._timer_s = math.inf
        actions: list[Action] = []
        try:
            actions = self.core.wake(now_s)
        finally:
            is_something = bool(actions) or self.core.is_due
            self.do(actions)
        return is_something

    @abstractmethod
    def set_timer(self, at_s: float) -> None:
        """Call `wake` then, instead of when it was to be called before."""

    @abstractmethod
    def send(self, send: SendCall) -> None:
        """Send a call to its stage."""

    @abstractmethod
    def answered(self, answered: Answered) -> None:
        """Give callers their answers."""

    @abstractmethod
    def dropped(self, dropped: Dropped) -> None:
        """Tell callers that their inputs get no answer."""

    @abstractmethod
    def hung_up(self, hung_up: HungUp) -> None:
        """Stop a call."""
