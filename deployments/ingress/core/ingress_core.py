"""The core of an ingress: events in, actions out; and the loop that drives it.

The core does no networking, reads no clock, and never looks at the content of an input. The life of an input:
`check_admission` and `submit` admit it, `pump` sends it in a batch, `answer` settles it, `go_on` sends it to the next
stage, `fail` starts it again, and `wake` ends it at its deadline. Every new call follows the newest plan, even if its
inputs began under an older one.

A `Driver` has the clock. It carries out the core's actions, calls `pump` while `is_due`, and `wake` at `wake_s`.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import compress
from typing import Any

from deployments.ingress.core.calls import (
    CALL_TIMEOUT,
    DEADLINE,
    PAUSE,
    RETRY_PAUSE_S,
    AbortCall,
    Action,
    Actions,
    Answers,
    Call,
    ReturnAnswers,
    ReturnErrors,
    SendCall,
    Timers,
    Unanswered,
    placements_of,
    select,
)
from deployments.ingress.core.inputs import ASIDE, CALL_GRACE_S, Chain, IngressOptions, Inputs, PendingInput
from deployments.ingress.core.routes import ReplicaLoad, lost
from deployments.wire.messages import IngressReport, summed
from earlyexit.clock import Clock
from earlyexit.errors import DeadlineError, OfframpError, StageUnavailableError
from earlyexit.network.boundary import Answer
from optimizer.plans.plan import PlacedPlan

SUSPENDED_RETRY_S = 5.0
"""Retry-After of a service without a plan. Planning and starting a replica take seconds."""
OTHER_SLOTS = "the current plan runs its blocks on other slots"


class IngressCore(Unanswered):
    """The decisions of one ingress. All times are from the caller's clock, which must never go back."""

    def __init__(
        self, name: str, placed: PlacedPlan, options: IngressOptions, rng: random.Random, make_call: type[Call] = Call
    ) -> None:
        """`make_call`: the class of calls. A subclass may hold data of the driver."""
        super().__init__(placed, options, make_call)
        self.name = name
        self.suspended: str | None = None
        """Why the service has no plan; None if it has one."""
        self.wake_s = math.inf
        """When the driver must call `wake`."""
        self._timers = Timers()
        self._rng = rng
        self._steps: list[PendingInput] = []
        """Inputs of sequences that are to be sent to the replicas of their sequences, without waiting for a batch."""

    @property
    def placed(self) -> PlacedPlan:
        return self.chains.placed

    @property
    def num_waiting(self) -> int:
        return sum([len(chain.queue.inputs) for chain in self.chains.active])

    @property
    def is_due(self) -> bool:
        """Whether `pump` would send a call now."""
        for chain in self.chains.active:
            if chain.is_due:
                return True
        return bool(self._steps)

    # Plans

    def follow(self, placed: PlacedPlan) -> None:
        """Switches to a plan. A plan older than the current one is ignored. Raises PlanError for another model."""
        if placed.epoch < self.placed.epoch:
            return
        stayed = self.chains.stays
        self.chains.follow(placed)
        if stayed and not self.chains.stays:
            self.observations.stop_staying()
        self.suspended = None

    def suspend(self, reason: str, now_s: float) -> Actions:
        """Stops serving until the next plan: waiting and new inputs get StageUnavailableError."""
        self.suspended = reason
        steps, self._steps = self._steps, []
        return self.drop([*self.chains.clear(), *steps], self._no_plan(), now_s)

    # Receive and admit

    def check_admission(self, num_inputs: int, deadline_s: float, now_s: float, *, num_coming: int = 0) -> None:
        """Raises AdmissionError or StageUnavailableError for a request that must be refused, before it is encoded.

        `num_coming`: inputs that were admitted earlier but not submitted yet. The lengths of the inputs are not known
        here: if the plan counts tokens, `submit` checks again.
        """
        if self.suspended is not None:
            self.refuse(self._no_plan(), num_inputs)
        left_s = deadline_s - now_s
        late_s = self.chains.late_s(num_inputs, num_coming, left_s, now_s)
        if late_s > 0:
            self.refuse_late(num_inputs, left_s, late_s)

    def submit(self, inputs: Inputs, now_s: float) -> None:
        """Accepts all inputs of a request, or none. There is at least one, and they have the same deadline.

        The inputs of a sequence are submitted one at a time. The first one is queued like other inputs. The later ones
        go to the replicas of the sequence, without waiting for a batch.

        Raises OverloadedError if too many inputs are unanswered, StageUnavailableError if there is no plan, InputError
        for a request that could never fit, and AdmissionError if the plan counts tokens and the inputs would be late.
        Raises SequenceLostError if the current plan runs the blocks of the sequence on other slots.
        """
        if self.suspended is not None:
            self.refuse(self._no_plan(), len(inputs))
        placement = inputs[0].placement
        layout = None if placement is None else placement.layout
        if layout is not None:  # a later step stays in the chain of its sequence
            own = self.chains.with_layout(layout)
            if own is None:
                raise lost(OTHER_SLOTS)
            drawn = [own]
        else:
            if placement is None or not placement.is_retry:
                self.check_room(len(inputs), now_s)
            left_s = inputs[0].deadline_s - now_s
            drawn, late_s = self.chains.draw([each.tokens for each in inputs], left_s, now_s)
            if late_s > 0 and any(each.admission.counts_tokens for each in drawn):  # others: see `check_admission`
                self.refuse_late(len(inputs), left_s, late_s)
        self.chains.assign(drawn, inputs)
        self.counts.arrived += len(inputs)
        self._start_timer(inputs[0].deadline_s, DEADLINE, inputs)
        if layout is not None:
            inputs[0].holder = ASIDE
            self._steps += inputs
            return
        for chain, its_inputs in self.chains.by_chain(inputs):
            chain.queue.push(its_inputs)

    def _expire(self, inputs: Inputs, now_s: float) -> Actions:
        """Drops inputs at their common deadline. A call that still holds some of them is aborted a little later."""
        deadline_s = inputs[0].deadline_s
        for each in inputs:
            if each.holder is not None:
                self._start_timer(deadline_s + CALL_GRACE_S, CALL_TIMEOUT, (each,))
        timeout_s = round(deadline_s - inputs[0].arrived_s, 9)  # the precision of a clock that has run for a day
        return self.give_up(inputs, DeadlineError(f"no answer within {timeout_s:g} s"), now_s)

    def give_up(self, inputs: Inputs, why: OfframpError | str, now_s: float) -> Actions:
        """Drops inputs, whether queued or sent. `why`: the error, or a reason if the caller no longer waits."""
        waiting = [each for each in inputs if each.holder is None and not each.settled]
        actions = self.drop(inputs, why, now_s)
        for chain, its_inputs in self.chains.by_chain(waiting):
            chain.queue.discard(its_inputs)
        return actions

    # Batch and send

    def pump(self, now_s: float) -> Actions:
        """Sends all calls that may be sent now to the first stages of the chains."""
        steps, self._steps = self._steps, []
        actions = self._send_steps(steps, now_s) if steps else []
        for chain in self.chains.active:
            while chain.is_due:
                inputs = chain.queue.pop_batch(chain.first_stage.budgets[0], self.placed.plan.order, now_s)
                if inputs[0].placement is None:
                    watch = self.observations.draw(inputs, chain.plan, self.options.probe_share, self._rng, now_s)
                    actions.append(self.enter(chain, inputs, now_s, watch))
                else:
                    self._begin_sequences(chain, inputs)
                    actions += self._send_steps(inputs, now_s)
        return actions

    # Sequences

    def _begin_sequences(self, chain: Chain, inputs: Inputs) -> None:
        """Draws which new sequences are probes. A restarted sequence keeps its earlier draw."""
        share = self.options.probe_share if self.observations.can_observe(self.placed.plan.policy) else 0.0
        for each in inputs:
            assert each.placement is not None, "a generating service has no inputs without a sequence"
            each.holder, each.placement.layout = ASIDE, chain.layout
            if each.placement.is_probe is None:
                each.placement.is_probe = share > 0 and self._rng.random() < share

    def _send_steps(
        self, inputs: Inputs, now_s: float, before: Call | None = None, block: int = 0, payload: Any = None
    ) -> Actions:
        """Sends the awaited inputs of sequences to the replicas that keep their sequences, in one call per replica.

        `before`: the call whose output, the `payload`, they take to `block`; None: they start at the first block of
        their chain. Probes have calls of their own. Inputs whose layout the current plan does not have are lost.
        """
        holder: object = ASIDE if before is None else before
        groups: dict[tuple[bool, str, ReplicaLoad[Any] | frozenset[str]], tuple[Chain, list[int]]] = {}
        displaced = []
        for row, each in enumerate(inputs):
            placement = each.placement
            if each.holder is not holder or placement is None:
                continue
            each.holder = None
            if each.settled:
                continue
            chain = self.chains.with_layout(placement.layout)
            if chain is None:
                displaced.append(each)
                continue
            slot = chain.at(block).slot
            is_probe = bool(placement.is_probe) and self.observations.can_observe(self.placed.plan.policy)
            key = is_probe, slot, placement.keepers.get(slot, placement.excluded)
            groups.setdefault(key, (chain, []))[1].append(row)
        self.observations.forget(displaced)
        actions = self.drop(displaced, lost(OTHER_SLOTS), now_s) if displaced else []
        for (is_probe, _, _), (chain, rows) in groups.items():
            chosen = [inputs[row] for row in rows]
            if before is None:
                actions.append(self._enter_steps(chain, chosen, now_s, is_probe=is_probe))
            else:
                part = None if len(rows) == len(inputs) else tuple(rows)
                actions.append(self.begin(chain, block, chosen, now_s, before.watch, payload, rows=part))
        return actions

    def _enter_steps(self, chain: Chain, inputs: Inputs, now_s: float, *, is_probe: bool) -> SendCall:
        """Returns the action that sends inputs of sequences, all or none of them probes, to the first block.

        Only the last chunk of a prompt is observed. If too many observations are open, probes still run as probes,
        because their callers must get the full model's answers.
        """
        placements = placements_of(inputs)
        if is_probe:
            observed = [each for each, placement in zip(inputs, placements, strict=True) if placement.yields_token]
            self.observations.begin(observed, chain.plan, "probe", now_s)
        return self.enter(chain, inputs, now_s, "probe" if is_probe else None, is_first=not placements[0].keepers)

    # Handle the parts of a call's reply. Inputs that the call does not hold are skipped. A block that the model does
    # not have raises ExecutionError, and nothing changes.

    def answer(self, call: Call, inputs: Inputs, block: int, now_s: float, answers: Answers = ()) -> Actions:
        """Settles inputs that left the model after a block with their answers."""
        self.chains.check_block(block)
        held, answers = select(inputs, answers, call.release(inputs))
        if not held:
            return []
        self.record_reply(call, len(held), now_s, end=block + 1)
        return self.settle(call, held, block, answers, now_s)

    def answer_early(self, call: Call, inputs: Inputs, block: int, now_s: float, answers: Answers = ()) -> Actions:
        """Settles inputs whose batch still runs, so the call keeps them.

        Of sequences, only the exit of the token is recorded, because callers of probes get the full model's answers.
        """
        self.chains.check_block(block)
        held, answers = select(inputs, answers, [each.holder is call for each in inputs])
        if held and held[0].placement is None:
            return self.settle(call, held, block, answers, now_s)
        self.record_exit(call, held, block)
        return []

    def observe(self, call: Call, seen: Iterable[tuple[PendingInput, Answer]]) -> None:
        """Records the results of exits for inputs that the call still holds."""
        self.observations.observe([(pending, each) for pending, each in seen if pending.holder is call])

    def lose(self, call: Call, inputs: Inputs, error: OfframpError, now_s: float) -> Actions:
        """Drops inputs that a stage will never answer."""
        return self.drop(self._remove(call, inputs, now_s), error, now_s)

    def go_on(self, call: Call, inputs: Inputs, block: int, payload: Any, now_s: float) -> Actions:
        """Sends inputs to the stage that hosts a block under the current plan, with the output of the previous stage.

        Nothing is sent if no input is awaited any more. Otherwise all inputs are sent, because they share one payload.
        Only awaited inputs cross into another network, because each of them is encoded again.
        """
        self.chains.check_block(block)
        held = list(dict.fromkeys(each for each in inputs if each.holder is call))
        if not held:
            return []
        self.record_reply(call, len(held), now_s, end=block)
        if held[0].placement is not None:
            return self._send_steps(inputs, now_s, call, block, payload)
        # The first input is nearly always awaited, so checking it first is fast.
        if held[0].settled and not any(self.is_awaited(call, each) for each in held):
            call.release(held)
            return []
        chain = held[0].chain.current
        network = chain.crossing(block, probe=call.probe)
        if network is None:
            return [self.begin(chain, block, inputs, now_s, call.watch, payload, held=held)]
        awaited = [each for each in held if self.is_awaited(call, each)]
        call.release(held)
        entering = self.begin(chain, chain.starts[network], awaited, now_s, call.watch, payload, enters=network)
        if call.watch == "probe" and block - 1 in chain.plan.prune:
            return [entering, *self._send_unpruned(entering.call, now_s)]
        return [entering]

    def is_awaited(self, call: Call, pending: PendingInput) -> bool:
        """Whether a call holds an input that is still needed: for the caller's answer, or to be observed after it."""
        if pending.holder is not call:
            return False
        if not pending.settled or call.watch is None:
            return not pending.settled
        return self.chains.stays if self.options.shape is None else pending in self.observations.open

    def _send_unpruned(self, call: Call, now_s: float) -> Actions:
        """Sends unpruned copies of probes, whose words are about to be pruned, to the last network of the cascade.

        The answers of that network are the reference for the probes; no request waits for them. If a copy is lost, the
        observations of its probe are lost too.
        """
        copies = [copy for each in call.inputs if (copy := self.observations.copy_unpruned(each)) is not None]
        if not copies:
            return []
        chain = copies[0].chain.current
        last = len(chain.starts) - 1
        for copy in copies:
            self._start_timer(copy.deadline_s + CALL_GRACE_S, CALL_TIMEOUT, (copy,))
        return [self.begin(chain, chain.starts[last], copies, now_s, "unpruned", enters=last)]

    # Fail and start again

    def fail(self, call: Call, inputs: Inputs, now_s: float) -> Actions:
        """Retries inputs of a failed call from block 0 after a pause. Inputs that failed too often are dropped.

        Inputs of sequences are not retried, because the keys and values are lost. They get SequenceLostError.
        """
        removed, slot = self._remove(call, inputs, now_s), call.stage.slot
        max_attempts = self.options.max_attempts
        if removed and removed[0].placement is not None:
            error: OfframpError = lost(f"a replica of {slot} failed")
            ended = [each for each in removed if not each.settled]
            if ended:
                self.counts.retries[slot] += len(ended)
        else:
            error = StageUnavailableError(f"{slot} failed {max_attempts} times on this input")
            ended = [each for each in removed if each.attempt + 1 >= max_attempts]
        actions = self.drop(ended, error, now_s)
        retried = [each for each in removed if not each.settled]
        for each in retried:
            each.holder = ASIDE
        if retried:
            self._start_timer(now_s + RETRY_PAUSE_S, PAUSE, retried, slot)
        return actions

    def _remove(self, call: Call, inputs: Inputs, now_s: float) -> list[PendingInput]:
        """Removes inputs that will not come back from a call, and their observations; returns those that it held."""
        removed = list(compress(inputs, call.release(inputs)))
        if removed:
            self.record_reply(call, len(removed), now_s, end=0)
        self.observations.forget(removed)
        return removed

    # Timers

    def wake(self, now_s: float) -> Actions:
        """Handles the next expired timer, if there is one: a deadline, the timeout of a call, or the end of a pause."""
        expired = self._timers.pop(now_s)
        self.wake_s = self._timers.next_s()
        actions = [] if expired is None else self._on_timer(*expired, now_s)
        if self.suspended is not None:
            actions += self.drop(self.chains.clear(), self._no_plan(), now_s)
        return actions

    def _on_timer(self, kind: int, inputs: Inputs, slot: str, now_s: float) -> Actions:
        if kind == DEADLINE:
            return self._expire(inputs, now_s)
        if kind == CALL_TIMEOUT:
            return self._abort_call(inputs[0], now_s)
        retried = [each for each in inputs if not each.settled]
        for each in retried:
            each.attempt += 1
            each.holder = None
        self.chains.requeue(retried)
        self.counts.retries[slot] += len(retried)
        return []

    def _start_timer(self, at_s: float, kind: int, inputs: Inputs, slot: str = "") -> None:
        """Starts a timer, unless it would never expire."""
        if at_s < math.inf:
            self._timers.add(at_s, kind, inputs, slot)
            if at_s < self.wake_s:
                self.wake_s = at_s

    def _abort_call(self, pending: PendingInput, now_s: float) -> Actions:
        """Aborts the call that holds an overdue input. If the call has later deadlines, the timeout is extended."""
        call = pending.holder
        assert isinstance(call, Call), "otherwise the timer would be obsolete"
        remaining = call.remaining()
        until_s = max(each.deadline_s for each in remaining) + CALL_GRACE_S
        if until_s <= now_s:
            return [AbortCall(call), *self.fail(call, remaining, now_s)]
        self._start_timer(until_s, CALL_TIMEOUT, (pending,))
        return []

    def _no_plan(self) -> StageUnavailableError:
        return StageUnavailableError(f"the service has no plan: {self.suspended}", retry_after_s=SUSPENDED_RETRY_S)

    # Reports

    def report(self, now_s: float, wall_s: float) -> IngressReport:
        """Returns all counts and removes the completed observations. `now_s` and `wall_s`: the time on both clocks."""
        return replace(self.peek(), probes=self.observations.take_completed(wall_s - now_s))

    def peek(self) -> IngressReport:
        """Returns all counts so far, and keeps the observations."""
        return IngressReport(
            name=self.name,
            epoch=self.placed.epoch,
            suspended=self.suspended is not None,
            oldest_epoch=self.oldest_epoch,
            unanswered=self.num_unanswered,
            waiting=self.num_waiting,
            chains=tuple(chain.load for chain in self.chains.active),
            **summed([self.counts]),
        )


class Driver(ABC):
    """Runs a core. Subclasses carry out its actions, on the live service or in the simulator."""

    def __init__(self, core: IngressCore, clock: Clock) -> None:
        self.core = core
        self.clock = clock
        self._queue: deque[Action] = deque()
        """Actions that are still to be carried out."""
        self._is_busy = False
        self._timer_s = math.inf
        """When the current timer expires."""
        self._handlers: dict[type[Action], Callable[[Any], None]] = {
            SendCall: self.send,
            ReturnAnswers: self.return_answers,
            ReturnErrors: self.return_errors,
            AbortCall: self.abort_call,
        }

    def follow(self, placed: PlacedPlan) -> None:
        """Switches to a plan. A plan older than the current one is ignored. Raises PlanError for another model."""
        self.core.follow(placed)
        self.do()

    def set_available(self, replicas: Mapping[str, int]) -> bool:
        """Sets the number of replicas by slot, and sends what is due. Returns whether any chain can run."""
        self.core.chains.set_available(replicas)
        self.do()
        return self.core.chains.can_run

    def suspend(self, reason: str) -> None:
        """Stops serving until the next plan: waiting and new inputs get StageUnavailableError."""
        self.do(self.core.suspend(reason, self.clock.now_s()))

    def do(self, actions: Iterable[Action] = ()) -> None:
        """Carries out actions, and then sends the calls that are due. A nested call only appends to the queue."""
        queue = self._queue
        queue.extend(actions)
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while queue or self.pump():
                action = queue.popleft()
                self._handlers[type(action)](action)
        finally:
            self._is_busy = False
            if self.core.wake_s < self._timer_s:
                self._timer_s = self.core.wake_s
                self.set_timer(self._timer_s)

    def pump(self) -> bool:
        """Queues the calls that are due, or schedules this; returns whether there are actions to carry out now."""
        if self.core.is_due:
            self._queue.extend(self.core.pump(self.clock.now_s()))
        return bool(self._queue)

    def wake(self) -> bool:
        """Handles the expired timers; returns whether there was anything to do.

        If one of them raises an error, the others are kept and are due again immediately.
        """
        now_s = max(self._timer_s, self.clock.now_s())  # an event loop's timer may fire slightly early
        self._timer_s = math.inf
        actions: list[Action] = []
        try:
            while self.core.wake_s <= now_s:
                actions += self.core.wake(now_s)
        finally:
            is_work_due = bool(actions) or self.core.is_due
            self.do(actions)
        return is_work_due

    @abstractmethod
    def set_timer(self, at_s: float) -> None:
        """Sets the timer that calls `wake`; replaces the earlier timer."""

    @abstractmethod
    def send(self, send: SendCall) -> None:
        """Sends a call to its stage."""

    @abstractmethod
    def return_answers(self, action: ReturnAnswers) -> None:
        """Passes answers to the callers."""

    @abstractmethod
    def return_errors(self, action: ReturnErrors) -> None:
        """Passes errors to the callers of dropped inputs."""

    @abstractmethod
    def abort_call(self, abort_call: AbortCall) -> None:
        """Aborts a call."""
