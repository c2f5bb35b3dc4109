"""The live driver of an ingress: calls go over connections to replicas, outcomes to the callers of an event loop."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, Protocol

from deployments.ingress.core.calls import (
    Action,
    Answered,
    Call,
    Dropped,
    HungUp,
    Retried,
    SendCall,
    placements_of,
    weigh,
)
from deployments.ingress.core.ingress_core import IngressCore
from deployments.ingress.core.inputs import Inputs, PendingInput, Settle
from deployments.ingress.core.routes import KVPlacement, KVPlacements
from deployments.ingress.crossing import CrossingEncoder, NetworkEntry, cuts_of, departure, is_measured
from deployments.ingress.driver import Driver
from deployments.ingress.link import LinkTransport
from deployments.wire.messages import Chunk, StageCall, Timing
from earlyexit.clock import Clock
from earlyexit.errors import ExecutionError, InputError, OfframpError
from earlyexit.network.boundary import Answer, Encoded, WirePiece
from optimizer.placement import PlacedPlan


class Alarm(Protocol):
    """A timer that can be cancelled."""

    def cancel(self) -> None: ...


Later = Callable[[float, Callable[[], None]], Alarm]
"""Has something called after so many seconds."""


def on_loop(seconds: float, call: Callable[[], None]) -> Alarm:
    """Sets a timer of the running event loop."""
    return asyncio.get_running_loop().call_later(seconds, call)


UNKNOWN = PendingInput(0, 0.0, 0.0)
"""Stands for the inputs that a reply mentions but its call did not contain. No call and no chain has it."""
MISFIT = "the encoded inputs do not fit together"

# A child of the logger that Serve writes as JSON, with the request id where there is one.
logger = logging.getLogger(f"ray.serve.{__name__}")


class DispatchMetrics(Protocol):
    """What is counted of inputs and calls; `IngressMetrics` does. It is never called for no inputs."""

    def answers(self, exits: list[int]) -> None: ...

    def dropped(self, reason: str, num_inputs: int) -> None: ...

    def hop(self, slot: str, seconds: float) -> None: ...

    def retried(self, slot: str, num_inputs: int) -> None: ...


class Dispatcher(Driver):
    """One per ingress, on its event loop."""

    def __init__(
        self,
        core: IngressCore,
        transports: Mapping[str, LinkTransport],
        clock: Clock,
        metrics: DispatchMetrics,
        *,
        later: Later = on_loop,
        encoder: CrossingEncoder | None = None,
    ) -> None:
        """`transports`: by slot; `encoder`: of a chain, None where the model is one network."""
        super().__init__(core, clock)
        self._transports = transports
        self._encoder = encoder
        self._metrics = metrics
        self._later = later
        self._serial = 0
        self._turn_planned = False
        self._alarm: Alarm | None = None
        # Calls to stages belong to no HTTP request: in a request's context Serve would take them for its children.
        self._context = contextvars.copy_context()
        self._tasks: dict[Call, asyncio.Task[None]] = {}

    def follow(self, placed: PlacedPlan) -> None:
        super().follow(placed)
        for slot, transport in self._transports.items():
            if slot not in self.core.placed.slots:
                transport.fail_waiting()

    # Receive

    def check(self, num_inputs: int, deadline_s: float, *, num_coming: int = 0) -> None:
        """Refuse a request before work is spent on it: raises AdmissionError or StageUnavailableError.

        `num_coming`: inputs that were admitted before and are still to be submitted.
        """
        with self._counting_refusals(num_inputs):
            self.core.check(num_inputs, deadline_s, self.clock.now_s(), num_coming=num_coming)

    def refuse(self, error: OfframpError, num_inputs: int) -> NoReturn:
        """Count the inputs of a request that was admitted and is never submitted; raises the error."""
        self._metrics.dropped(error.kind, num_inputs)
        self.core.refuse(error, num_inputs)

    def submit(
        self,
        inputs: Sequence[tuple[str, Encoded]],
        deadline_s: float,
        settle: Settle,
        *,
        arrived_s: float | None = None,
        request_id: str = "",
    ) -> list[PendingInput]:
        """Take a request's inputs, each with its id; `settle` is called once for every one that is not given up.

        `arrived_s`: since when the caller waits; None for now. Raises what `IngressCore.submit` raises.
        """
        now_s = self.clock.now_s()
        since_s = now_s if arrived_s is None else arrived_s
        pending = [
            PendingInput(serial, since_s, deadline_s, encoded.length, encoded, settle, key=key, request_id=request_id)
            for serial, (key, encoded) in enumerate(inputs, self._serial + 1)
        ]
        with self._counting_refusals(len(inputs)):
            self.core.submit(pending, now_s)
        self._serial += len(inputs)
        self.do(())
        return pending

    def step(
        self,
        encoded: Encoded,
        placement: KVPlacement,
        deadline_s: float,
        settle: Settle,
        *,
        arrived_s: float,
        request_id: str = "",
    ) -> PendingInput:
        """Take an input of a sequence; see `submit` and `IngressCore.step`. Nothing ends it at its deadline: `expire`.

        Raises what `submit` raises, and SequenceLostError.
        """
        serial = self._serial + 1
        pending = PendingInput(serial, arrived_s, deadline_s, encoded.length, encoded, settle, request_id=request_id)
        with self._counting_refusals(1):
            self.core.step(pending, placement, self.clock.now_s())
        self._serial = serial
        self.do(())
        return pending

    def expire(self, pending: PendingInput) -> None:
        """End a sequence's input, whose deadline has come, and stop a call that hangs under it."""
        self.do(self.core.expire(pending, self.clock.now_s()))

    def end(self, placement: KVPlacement) -> None:
        """Let replicas forget a sequence that has ended, or that begins anew elsewhere."""
        placement.is_over = True
        for slot, replica in placement.replicas.items():
            self._transports[slot].end(replica, placement.number)

    def give_up(self, inputs: Inputs, reason: str) -> None:
        """Forget inputs whose caller no longer waits; those without an outcome count as dropped for this reason."""
        self.do(self.core.give_up(inputs, reason, self.clock.now_s()))

    @contextmanager
    def _counting_refusals(self, num_inputs: int) -> Iterator[None]:
        try:
            yield
        except InputError:
            raise
        except OfframpError as error:
            self._metrics.dropped(error.kind, num_inputs)
            raise

    # Drive

    def pump(self) -> bool:
        if self.core.is_due:
            self._plan_turn()
        return False

    def _plan_turn(self) -> None:
        # Not at once: requests that arrive in the same turn of the loop leave in the same call.
        if not self._turn_planned:
            self._turn_planned = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_planned = False
        if self.core.is_due:
            self.do(self.core.pump(self.clock.now_s()))

    def set_timer(self, at_s: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._later(max(0.0, at_s - self.clock.now_s()), self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self.wake()

    def carry_out(self, action: Action) -> None:
        """Carry out an action, whatever became of the one before; a call that cannot be sent has failed."""
        try:
            super().carry_out(action)
        except Exception:
            logger.exception("an ingress cannot carry out %s", type(action).__name__)
            if isinstance(action, SendCall) and action.call not in self._tasks:
                self._fail(action.call)

    def answered(self, answered: Answered) -> None:
        settle_all(zip(answered.inputs, answered.answers, strict=True))
        self._metrics.answers([answered.block] * len(answered.inputs))

    def dropped(self, dropped: Dropped) -> None:
        if dropped.error is not None:
            settle_all((pending, dropped.error) for pending in dropped.inputs)
        self._metrics.dropped(dropped.reason, len(dropped.inputs))

    def hung_up(self, hung_up: HungUp) -> None:
        call = hung_up.call
        logger.warning("%s hangs under %d inputs of %s", call.stage.slot, len(call.inputs), requests_of(call.inputs))
        task = self._tasks.pop(call, None)
        if task is not None:
            task.cancel()

    def retried(self, retried: Retried) -> None:
        self._metrics.retried(*retried)

    def _fail(self, call: Call) -> None:
        """Have what a call has left start again."""
        self.do(self.core.fail(call, call.inside(), self.clock.now_s()))

    def _lose(self, call: Call, inputs: Inputs, error: Exception, why: str) -> None:
        logger.warning("%d inputs of %s are lost, %s: %r", len(inputs), requests_of(inputs), why, error)
        told = ExecutionError(f"{why}: {type(error).__name__}: {error}")
        self.do(self.core.lose(call, inputs, told, self.clock.now_s()))

    # Send

    def send(self, send: SendCall) -> None:
        call, block, payload, network, rows = send
        if network is None:
            self._send(call, payload if rows is None else payload.select(rows), call.inputs)
        elif self._encoder is None:
            self._depart(call)
        else:
            self._enter(self._encoder, call, block, network, payload)

    def _depart(self, call: Call) -> None:
        """Send new inputs of a model that is one network, for which all were encoded as they came."""
        try:
            piece = departure(self.core.name, call.inputs)
        except Exception as error:
            self._lose(call, call.inputs, error, MISFIT)
        else:
            self._send(call, piece, call.inputs)

    def _enter(
        self, encoder: CrossingEncoder, call: Call, block: int, network: int, going_on: WirePiece | None
    ) -> None:
        """Send inputs to a network's first block, new ones or those that cross."""
        cuts = cuts_of(going_on, self.core.placed.plan)
        whole = call.watch == "whole"
        entry = NetworkEntry(
            inputs=call.inputs, block=block, network=network, going_on=going_on, cuts=cuts, whole=whole
        )
        if encoder.is_slow(entry):
            self._tasks[call] = self._begin(self._enter_slowly(encoder, call, entry))
        else:
            self._enter_network(encoder, call, entry)

    async def _enter_slowly(self, encoder: CrossingEncoder, call: Call, entry: NetworkEntry) -> None:
        """Encode the inputs beside the event loop first."""
        try:
            await asyncio.to_thread(encoder.prepare, entry)
            self._enter_network(encoder, call, entry)
        except Exception as error:
            self._tasks.pop(call, None)
            self._lose(call, call.inside(), error, MISFIT)

    def _enter_network(self, encoder: CrossingEncoder, call: Call, entry: NetworkEntry) -> None:
        self._tasks.pop(call, None)  # what encoded them beside the event loop is done
        measured = is_measured(self.core.placed.plan, entry.network)
        try:
            entered = encoder.enter(entry, measured=measured)
        except Exception as error:
            self._lose(call, call.inputs, error, MISFIT)
            return
        for pending, refusal in entered.refused:
            self._lose(call, (pending,), refusal, "the next network's codec makes nothing of it")
        if entry.going_on is not None:
            took_s = self.clock.now_s() - call.started_s
            waited_s = [took_s] * len(entered.inputs)
            self.core.counts.cross(entry.block, waited_s, words=entered.words, pruned_words=entered.pruned_words)
        if entered.inputs:
            self._send(call, entered.piece, entered.inputs)

    def _send(self, call: Call, piece: WirePiece, inputs: Inputs) -> None:
        now_s = self.clock.now_s()
        placements = None if inputs[0].placement is None else placements_of(call.stage.slot, inputs)
        stage_call = StageCall(
            piece=piece,
            # An input that no request waits for any more has no time left: the stage drops it unrun.
            remaining_s=tuple(each.deadline_s - now_s if self.core.is_awaited(call, each) else -1.0 for each in inputs),
            reserve_s=call.reserve_s,
            assignment=call.stage.assignment,
            probe=call.probe,
            sequences=() if placements is None else placements.numbers,
        )
        self._tasks[call] = self._begin(self._carry(call, stage_call, inputs, placements))

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work, context=self._context.copy())

    async def _carry(self, call: Call, stage_call: StageCall, inputs: Inputs, placements: KVPlacements | None) -> None:
        """Have a stage run a call; what it leaves unsettled, because it or the way to it failed, starts again."""
        by_id = dict(zip(stage_call.piece.sample_ids, inputs, strict=True))
        weight, batch = weigh(call.stage, stage_call.piece.next_block, inputs)
        avoided, take = self.core.route.avoided, partial(self._take, call, by_id)
        try:
            await self._transports[call.stage.slot].call(
                stage_call, weight=weight, batch=batch, avoided=avoided, take=take, placements=placements
            )
        except Exception as error:
            left = call.inside()
            logger.warning("%s failed under %d inputs of %s: %r", call.stage.slot, len(left), requests_of(left), error)
        finally:  # also where the call was hung up: the replica may have begun the sequence in the meantime
            for placement in () if placements is None else placements.each:
                if placement.is_over:
                    self.end(placement)
        self._tasks.pop(call, None)  # not when cancelled: nothing starts while an ingress ends
        if call.num_inside:
            self._fail(call)

    # Settle

    def _take(self, call: Call, inputs: Mapping[str, PendingInput], chunk: Chunk) -> None:
        """Pass a part of a call's reply to the core."""
        core, now_s = self.core, self.clock.now_s()
        core.hear(call, chunk.busy, now_s)
        if chunk.seen:
            core.see(call, [(inputs.get(seen.sample_id, UNKNOWN), seen) for seen in chunk.seen])
        for block, mine, answers in by_block(inputs, chunk.answers):
            self.do(core.answer(call, mine, block, now_s, answers))
        for block, mine, answers in by_block(inputs, chunk.early):
            self.do(core.answer_early(call, mine, block, now_s, answers))
        for sample_id, error in chunk.lost:
            self.do(core.lose(call, [inputs.get(sample_id, UNKNOWN)], error, now_s))
        if chunk.going_on is not None:
            piece = chunk.going_on.piece
            mine = [inputs.get(sample_id, UNKNOWN) for sample_id in piece.sample_ids]
            self.do(core.go_on(call, mine, piece.next_block, piece, now_s))
        # Even if nothing is due yet: sequences ask for their next steps before this turn comes, and it sends them.
        self._plan_turn()
        if chunk.timings:
            inside_s = max(timing.queue_s + timing.compute_s for timing in chunk.timings)
            try:
                self._metrics.hop(call.stage.slot, max(0.0, now_s - call.started_s - inside_s))
            except Exception:  # the reply is taken all the same
                logger.exception("a hop to %s is not counted", call.stage.slot)


def by_block(
    inputs: Mapping[str, PendingInput], answers: Sequence[tuple[Answer, Timing]]
) -> Iterable[tuple[int, list[PendingInput], list[Answer]]]:
    """Groups answers by the block after which they left; nearly always one."""
    found: defaultdict[int, tuple[list[PendingInput], list[Answer]]] = defaultdict(lambda: ([], []))
    for answer, _ in answers:
        mine, given = found[answer.exit]
        mine.append(inputs.get(answer.sample_id, UNKNOWN))
        given.append(answer)
    for block, (mine, given) in found.items():
        yield block, mine, given


def settle_all(outcomes: Iterable[tuple[PendingInput, Answer | OfframpError]]) -> None:
    """Give every caller its outcome, even where giving the one before failed."""
    for pending, outcome in outcomes:
        try:
            pending.settle(pending, outcome)
        except Exception:
            logger.exception("an input of %s has an outcome that its caller cannot take", pending.request_id)


def requests_of(inputs: Inputs) -> str:
    """Names the first few requests of the inputs, for the log."""
    found = sorted({each.request_id for each in inputs})
    return ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
