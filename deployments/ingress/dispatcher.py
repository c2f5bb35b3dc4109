"""Carries out what the core of an ingress decides: calls to stages, one timer, answers to their owners."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, Protocol, cast

from deployments.ingress.core.ingress_core import IngressCore
from deployments.ingress.core.inputs import Action, Answered, Call, Dropped, Flight, HungUp, Retried, SendCall
from deployments.ingress.core.routes import KVPlacement, KVPlacements, homes_of
from deployments.ingress.crossing import (
    ChainEntrance,
    LiveFlight,
    Query,
    Settle,
    Way,
    cuts_of,
    departure,
    is_measured,
    settle_all,
)
from deployments.ingress.link import Transport
from deployments.wire.messages import Chunk, StageCall, Timing
from earlyexit.clock import Clock
from earlyexit.errors import ExecutionError, InputError, OfframpError
from earlyexit.network.wire import Answer, Encoded, WirePiece
from optimizer.placement import PlacedPlan


class Alarm(Protocol):
    """What `Later` gives."""

    def cancel(self) -> None: ...


Later = Callable[[float, Callable[[], None]], Alarm]
"""Has something called after so many seconds."""


def on_loop(seconds: float, call: Callable[[], None]) -> Alarm:
    """By the running event loop."""
    return asyncio.get_running_loop().call_later(seconds, call)


UNKNOWN: LiveFlight = Flight(
    Query(key="", encoded=Encoded(0, ()), serial=0, request_id="", settle=lambda *_: None), cast("Any", None), 0.0, 0.0
)
"""Stands for the inputs that a reply mentions but its call did not contain. No call and no chain has it."""


class DispatchMetrics(Protocol):
    """What is counted of inputs and calls; `IngressMetrics` does. None of it is told of no inputs at all."""

    def answers(self, exits: list[int]) -> None: ...

    def dropped(self, reason: str, num_inputs: int) -> None: ...

    def hop(self, slot: str, seconds: float) -> None: ...

    def retried(self, slot: str, num_inputs: int) -> None: ...


def by_block(
    flights: Mapping[str, LiveFlight], answers: Sequence[tuple[Answer, Timing]]
) -> Iterable[tuple[int, list[LiveFlight], list[Answer]]]:
    """Answers by the block after which they left; nearly always one."""
    found: defaultdict[int, tuple[list[LiveFlight], list[Answer]]] = defaultdict(lambda: ([], []))
    for answer, _ in answers:
        mine, said = found[answer.exit]
        mine.append(flights.get(answer.sample_id, UNKNOWN))
        said.append(answer)
    for block, (mine, said) in found.items():
        yield block, mine, said


def requests_of(flights: Sequence[LiveFlight]) -> str:
    """The first few requests of the inputs, for the log."""
    found = sorted({flight.input.request_id for flight in flights})
    return ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")


# A child of the logger that Serve writes as JSON, with the request id where there is one.
logger = logging.getLogger(f"ray.serve.{__name__}")

MISFIT = "the encoded inputs do not fit together"
LiveCall = Call[Query, Transport]


class Dispatcher:
    """One per ingress, on its event loop."""

    def __init__(
        self,
        core: IngressCore[Query, Transport],
        clock: Clock,
        metrics: DispatchMetrics,
        *,
        later: Later = on_loop,
        entrance: ChainEntrance | None = None,
    ) -> None:
        """`entrance`: of a chain; None where the model is one network."""
        self.core = core
        self._entrance = entrance
        self._clock = clock
        self._metrics = metrics
        self._later = later
        self._serial = 0
        self._turn_planned = False
        self._alarm: Alarm | None = None
        self._alarm_s = math.inf
        # Calls to stages belong to no HTTP request: in a request's context Serve would take them for its children.
        self._context = contextvars.copy_context()
        self._tasks: dict[LiveCall, asyncio.Task[None]] = {}

    def follow(self, placed: PlacedPlan) -> None:
        """Go by this plan from now on; one older than the present is ignored. Raises PlanError for foreign slots."""
        self.core.follow(placed)
        for slot, transport in self.core.ways.items():
            if slot not in self.core.placed.slots:
                transport.fail_waiting()
        self._plan_turn()

    def suspend(self, reason: str) -> None:
        """There is no plan: what waits, and what arrives until the next one, gets StageUnavailableError."""
        self._do(self.core.suspend(reason, self._clock.now_s()))

    def check(self, num_inputs: int, deadline_s: float, *, num_coming: int = 0) -> None:
        """Refuse a request before work is spent on it: raises AdmissionError or StageUnavailableError.

        `num_coming`: inputs that were let in before and are still to be submitted.
        """
        with self._counting_refusals(num_inputs):
            self.core.check(num_inputs, deadline_s, self._clock.now_s(), num_coming=num_coming)

    def refuse(self, error: OfframpError, num_inputs: int) -> NoReturn:
        """Count the inputs of a request that was let in and is never submitted; raises the error."""
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
    ) -> list[LiveFlight]:
        """Take a request's inputs, each with its id; `settle` is called once for every one that is not given up.

        `arrived_s`: since when its owner waits; None for now. Raises OverloadedError when too many wait already,
        StageUnavailableError where there is no plan, InputError for a request that could never fit.
        """
        now_s = self._clock.now_s()
        queries = [
            Query(key=key, encoded=encoded, serial=serial, request_id=request_id, settle=settle)
            for serial, (key, encoded) in enumerate(inputs, self._serial + 1)
        ]
        with self._counting_refusals(len(inputs)):
            flights = self.core.submit(
                queries,
                tokens=[encoded.length for _, encoded in inputs],
                arrived_s=now_s if arrived_s is None else arrived_s,
                deadline_s=deadline_s,
                now_s=now_s,
            )
        self._serial += len(inputs)
        self._plan_turn()
        self._set_alarm()
        return flights

    def step(
        self,
        encoded: Encoded,
        home: KVPlacement,
        deadline_s: float,
        settle: Settle,
        *,
        arrived_s: float,
        request_id: str = "",
    ) -> LiveFlight:
        """Take an input of a sequence; see `submit` and `IngressCore.step`, of whose errors SequenceLostError is one.

        Nothing ends it at its deadline: see `expire`.
        """
        serial = self._serial + 1
        query = Query(key="", encoded=encoded, serial=serial, request_id=request_id, settle=settle)
        with self._counting_refusals(1):
            flight = self.core.step(
                query,
                home,
                tokens=encoded.length,
                arrived_s=arrived_s,
                deadline_s=deadline_s,
                now_s=self._clock.now_s(),
            )
        self._serial = serial
        self._plan_turn()
        return flight

    def expire(self, flight: LiveFlight) -> None:
        """The deadline of a sequence's input has come: its owner is told, and a call that hangs is ended."""
        self._do(self.core.expire(flight, self._clock.now_s()))

    def end(self, home: KVPlacement) -> None:
        """Lets replicas forget a sequence that has ended, or that begins anew elsewhere."""
        home.is_over = True
        for slot, replica in home.replicas.items():
            self.core.ways[slot].end(replica, home.number)

    def give_up(self, flights: Sequence[LiveFlight], reason: str) -> None:
        """Forget inputs whose owner no longer waits; those without an outcome count as dropped for this reason."""
        self._do(self.core.give_up(flights, reason, self._clock.now_s()))

    @contextmanager
    def _counting_refusals(self, num_inputs: int) -> Iterator[None]:
        try:
            yield
        except InputError:
            raise
        except OfframpError as error:
            self._metrics.dropped(error.kind, num_inputs)
            raise

    def _plan_turn(self) -> None:
        # Not at once: requests that arrive in the same turn of the loop leave in the same call.
        if not self._turn_planned:
            self._turn_planned = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_planned = False
        if self.core.is_due:
            self._do(self.core.pump(self._clock.now_s()))

    def _wake(self) -> None:
        # A loop's timer may come a moment before its time.
        now_s = max(self._alarm_s, self._clock.now_s())
        self._alarm, self._alarm_s = None, math.inf
        try:
            self._do(self.core.wake(now_s))
        finally:
            self._set_alarm()
            self._plan_turn()

    def _set_alarm(self) -> None:
        wake_s = self.core.wake_s
        if wake_s < self._alarm_s:
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm_s = wake_s
            self._alarm = self._later(max(0.0, wake_s - self._clock.now_s()), self._wake)

    def _do(self, actions: Iterable[Action]) -> None:
        """Carry out every action, whatever became of the one before; a call that cannot be sent has failed."""
        try:
            for action in actions:
                try:
                    self._carry_out(action)
                except Exception:
                    logger.exception("an ingress cannot carry out %s", type(action).__name__)
                    if isinstance(action, SendCall) and action.call not in self._tasks:
                        self._fail(action.call)
        finally:
            self._set_alarm()

    def _carry_out(self, action: Action) -> None:
        match action:
            case SendCall(call, _, payload, None, rows):
                self._send(call, payload if rows is None else payload.select(rows), call.flights)
            case SendCall(call, block, payload, int(network)):
                self._enter(call, block, network, payload)
            case Answered(flights, block, answers, _):
                settle_all(zip(flights, answers, strict=True))
                self._metrics.answers([block] * len(flights))
            case Dropped(flights, reason, error):
                if error is not None:
                    settle_all((flight, error) for flight in flights)
                self._metrics.dropped(reason, len(flights))
            case HungUp(call):
                requests = requests_of(call.flights)
                logger.warning("%s hangs under %d inputs of %s", call.leg.slot, len(call.flights), requests)
                task = self._tasks.pop(call, None)
                if task is not None:
                    task.cancel()
            case Retried(slot, number):
                self._metrics.retried(slot, number)

    def _fail(self, call: LiveCall) -> None:
        """Have what a call has left start again."""
        self._do(self.core.fail(call, call.inside(), self._clock.now_s()))
        self._plan_turn()

    def _enter(self, call: LiveCall, block: int, network: int, going_on: WirePiece | None) -> None:
        """Send inputs to a network's first block, new ones or those that cross."""
        entrance = self._entrance
        if entrance is None:
            self._depart(call)
            return
        cuts = cuts_of(going_on, self.core.itinerary.placed.plan)
        whole = call.watch == "whole"
        way = Way(flights=call.flights, block=block, network=network, going_on=going_on, cuts=cuts, whole=whole)
        if entrance.is_slow(way):
            self._tasks[call] = self._begin(self._enter_slowly(entrance, call, way))
        else:
            self._enter_network(entrance, call, way)

    def _depart(self, call: LiveCall) -> None:
        """Where there is one network, for which all were encoded as they came."""
        try:
            piece = departure(self.core.name, call.flights)
        except Exception as error:
            self._lose(call, call.flights, error, MISFIT)
        else:
            self._send(call, piece, call.flights)

    async def _enter_slowly(self, entrance: ChainEntrance, call: LiveCall, way: Way) -> None:
        """Have them encoded beside the event loop first."""
        try:
            await asyncio.to_thread(entrance.prepare, way)
            self._enter_network(entrance, call, way)
        except Exception as error:
            self._tasks.pop(call, None)
            self._lose(call, call.inside(), error, MISFIT)

    def _enter_network(self, entrance: ChainEntrance, call: LiveCall, way: Way) -> None:
        self._tasks.pop(call, None)  # what encoded them beside the event loop is done
        measured = is_measured(self.core.itinerary.placed.plan, way.network)
        try:
            entering = entrance.enter(way, measured=measured)
        except Exception as error:
            self._lose(call, call.flights, error, MISFIT)
            return
        for flight, refusal in entering.refused:
            self._lose(call, (flight,), refusal, "the next network's codec makes nothing of it")
        if way.going_on is not None:
            took_s = self._clock.now_s() - call.started_s
            waited_s = [took_s] * len(entering.flights)
            self.core.counts.cross(way.block, waited_s, words=entering.words, pruned_words=entering.pruned_words)
        if entering.flights:
            self._send(call, entering.piece, entering.flights)

    def _lose(self, call: LiveCall, flights: Sequence[LiveFlight], error: Exception, why: str) -> None:
        logger.warning("%d inputs of %s are lost, %s: %r", len(flights), requests_of(flights), why, error)
        said = ExecutionError(f"{why}: {type(error).__name__}: {error}")
        self._do(self.core.lose(call, flights, said, self._clock.now_s()))
        self._plan_turn()

    def _send(self, call: LiveCall, piece: WirePiece, flights: Sequence[LiveFlight]) -> None:
        now_s = self._clock.now_s()
        homes = None if flights[0].home is None else homes_of(call.leg.slot, flights)
        stage_call = StageCall(
            piece=piece,
            # An input that no request waits for any more has no time left: the stage drops it unrun.
            remaining_s=tuple(
                flight.deadline_s - now_s if self.core.is_awaited(call, flight) else -1.0 for flight in flights
            ),
            reserve_s=call.reserve_s,
            assignment=call.leg.assignment,
            probe=call.probe,
            sequences=() if homes is None else homes.numbers,
        )
        self._tasks[call] = self._begin(self._carry(call, stage_call, flights, homes))

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work, context=self._context.copy())

    async def _carry(
        self, call: LiveCall, stage_call: StageCall, flights: Sequence[LiveFlight], homes: KVPlacements | None
    ) -> None:
        """Have a stage run a call; what it leaves unsettled, because it or the way to it failed, starts again."""
        by_id = dict(zip(stage_call.piece.sample_ids, flights, strict=True))
        weight, batch = call.leg.weigh(stage_call.piece.next_block, flights)
        avoided, take = self.core.itinerary.avoided, partial(self._take, call, by_id)
        try:
            await call.leg.transport.call(
                stage_call, weight=weight, batch=batch, avoided=avoided, take=take, homes=homes
            )
        except Exception as error:
            left = call.inside()
            logger.warning("%s failed under %d inputs of %s: %r", call.leg.slot, len(left), requests_of(left), error)
        finally:  # also where the call was hung up: the replica may have begun the sequence in the meantime
            for home in () if homes is None else homes.each:
                if home.is_over:
                    self.end(home)
        self._tasks.pop(call, None)  # not when cancelled: nothing starts while an ingress ends
        if call.num_inside:
            self._fail(call)

    def _take(self, call: LiveCall, flights: Mapping[str, LiveFlight], chunk: Chunk) -> None:
        """A part of a call's reply."""
        core, now_s = self.core, self._clock.now_s()
        core.hear(call, chunk.busy, now_s)
        if chunk.seen:
            core.see(call, [(flights.get(seen.sample_id, UNKNOWN), seen) for seen in chunk.seen])
        for block, mine, answers in by_block(flights, chunk.answers):
            self._do(core.answer(call, mine, block, now_s, answers))
        for block, mine, answers in by_block(flights, chunk.early):
            self._do(core.answer_early(call, mine, block, now_s, answers))
        for sample_id, error in chunk.lost:
            self._do(core.lose(call, [flights.get(sample_id, UNKNOWN)], error, now_s))
        if chunk.going_on is not None:
            piece = chunk.going_on.piece
            mine = [flights.get(sample_id, UNKNOWN) for sample_id in piece.sample_ids]
            self._do(core.go_on(call, mine, piece.next_block, piece, now_s))
        self._plan_turn()
        if chunk.timings:
            inside_s = max(timing.queue_s + timing.compute_s for timing in chunk.timings)
            try:
                self._metrics.hop(call.leg.slot, max(0.0, now_s - call.started_s - inside_s))
            except Exception:  # the reply is taken all the same
                logger.exception("a hop to %s is not counted", call.leg.slot)
