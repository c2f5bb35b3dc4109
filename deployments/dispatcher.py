"""Sends inputs through the stages: batches out, parts of replies in, again from the start where a replica died."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from deployments.flights import AnswerRate, Flight, FlightBook, Settle, departure
from deployments.messages import Chunk, GoingOn, StageCall
from earlyexit.clock import Clock
from earlyexit.errors import StageUnavailableError
from earlyexit.tokenizer import TokenIds
from optimizer.plan import Plan

if TYPE_CHECKING:  # it imports ray
    from deployments.transport import Transport

# A child of the logger that Serve writes as JSON, with the request id where there is one.
logger = logging.getLogger(f"ray.serve.{__name__}")

HANG_S = 1.0
"""How long a call outlives the last deadline of its inputs."""
SMOOTHING = 0.1
"""Weight of the newest call in what a stage is expected to take."""
RETRY_PAUSE_S = 0.05
"""A replica's death is noticed by all at once; a short pause lets the router learn of it before the next try."""


class CallMetrics(Protocol):
    """What is counted of calls to stages; `IngressMetrics` does."""

    def answers(self, exits: list[int]) -> None: ...

    def hop(self, stage_index: int, seconds: float) -> None: ...

    def retried(self, stage_index: int, num_inputs: int) -> None: ...


class Dispatcher:
    """One per ingress, on its event loop."""

    def __init__(
        self,
        plan: Plan,
        stages: Sequence[Transport],
        clock: Clock,
        metrics: CallMetrics,
        *,
        bytes_per_token: int,
        max_queued: int,
        calls_per_replica: int,
        max_attempts: int,
        name: str,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._plan = plan
        self._stages = stages
        self._clock = clock
        self._metrics = metrics
        self._bytes_per_token = bytes_per_token
        self._max_attempts = max_attempts
        self._pause = pause
        self._stage_s = [0.0] * len(stages)
        self._num_replicas = plan.stages[0].replicas
        self._calls_per_replica = calls_per_replica
        self._unheard: set[object] = set()
        self._pump_planned = False
        self._book = FlightBook(max_queued, name)
        self._rate = AnswerRate()
        # Calls to stages belong to no HTTP request: in a request's context Serve would take them for its children.
        self._context = contextvars.copy_context()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_unanswered(self) -> int:
        return self._book.num_unanswered

    def submit(
        self, inputs: Sequence[tuple[str, TokenIds]], deadline_s: float, settle: Settle, *, request_id: str = ""
    ) -> list[Flight]:
        """Take a request's inputs, (id, tokens) each; `settle` is called once for every one of them.

        Raises OverloadedError when too many wait already.
        """
        if not self._book.num_unanswered:
            self._rate.begin(self._clock.now_s())
        retry_after_s = self._rate.seconds_for(self._book.num_unanswered)
        flights = self._book.admit(inputs, deadline_s, settle, retry_after_s=retry_after_s, request_id=request_id)
        self._plan_pump()
        return flights

    def give_up(self, flights: Sequence[Flight]) -> None:
        """Forget inputs whose owner no longer waits."""
        self._book.give_up(flights)

    def _plan_pump(self) -> None:
        # Not at once: requests that arrive in the same turn of the loop leave in the same call.
        if not self._pump_planned:
            self._pump_planned = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_planned = False
        batch = self._plan.stages[0].splits[0].batch
        while self._may_call(batch):
            ticket = object()
            self._unheard.add(ticket)
            self._start(self._enter(self._book.depart(batch), ticket))

    def _may_call(self, batch: int) -> bool:
        """A call that some replica can start now takes whatever waits; one that will queue behind it must be full."""
        unheard = len(self._unheard)
        if unheard < self._num_replicas:
            return self._book.num_waiting > 0
        return unheard < self._calls_per_replica * self._num_replicas and self._book.num_waiting >= batch

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine, context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _enter(self, flights: Sequence[Flight], ticket: object) -> None:
        piece = departure(flights)

        def heard() -> None:
            self._unheard.discard(ticket)
            self._plan_pump()

        try:
            await self._call(0, piece, piece.sample_ids, num_tokens=len(piece.values), heard=heard)
        finally:
            self._unheard.discard(ticket)
        self._plan_pump()  # not when cancelled: nothing starts while an ingress ends

    async def _go_on(self, going_on: GoingOn) -> None:
        stage_index = self._plan.stage_index_of(going_on.next_block)
        wanted = [sample_id for sample_id in going_on.sample_ids if self._book.find(sample_id) is not None]
        if wanted:
            await self._call(stage_index, going_on.piece, going_on.sample_ids, num_tokens=going_on.num_tokens)

    async def _call(
        self,
        stage_index: int,
        piece: Any,
        sample_ids: Sequence[str],
        *,
        num_tokens: int,
        heard: Callable[[], None] | None = None,
    ) -> None:
        """Call a stage; whatever it leaves unsettled, because it or the way to it failed, starts again.

        `heard` is called with every part of the reply: the first tells that the call's batch has run.
        """
        unsettled = set(sample_ids)
        started_s = self._clock.now_s()
        call = StageCall(
            piece=piece,
            remaining_s=self._remaining_s(sample_ids),
            reserve_s=sum(self._stage_s[stage_index + 1 :]),
            epoch=self._plan.epoch,
        )
        stage = self._plan.stages[stage_index]
        is_last = stage_index == len(self._stages) - 1
        reply_bytes = 0 if is_last else num_tokens * self._bytes_per_token
        try:
            chunks = self._stages[stage_index].call(call, reply_bytes=reply_bytes, batch=stage.splits[0].batch)
            # A replica that hangs must not hold the call for ever: nobody waits behind the last deadline.
            async with asyncio.timeout(max(0.0, *call.remaining_s) + HANG_S):
                async for chunk in chunks:
                    self._take(stage_index, chunk, unsettled, started_s)
                    if heard is not None:
                        heard()
        except Exception as error:
            requests = self._request_ids(unsettled)
            logger.warning("stage %d failed under %d inputs of %s: %r", stage_index, len(unsettled), requests, error)
        if heard is not None:
            heard()  # others need not wait for the pause of a failed call
        if unsettled:
            await self._again(stage_index, [sample_id for sample_id in sample_ids if sample_id in unsettled])

    def _take(self, stage_index: int, chunk: Chunk, unsettled: set[str], started_s: float) -> None:
        now_s = self._clock.now_s()
        for answer, _ in chunk.answers:
            unsettled.discard(answer.sample_id)
            self._book.settle(answer.sample_id, answer)
        for sample_id, error in chunk.lost:
            unsettled.discard(sample_id)
            self._book.settle(sample_id, error)
        self._stage_s[stage_index] += SMOOTHING * (now_s - started_s - self._stage_s[stage_index])
        timings = [timing for _, timing in chunk.answers]
        if chunk.going_on is not None:
            unsettled.difference_update(chunk.going_on.sample_ids)
            self._start(self._go_on(chunk.going_on))
            timings = list(chunk.going_on.timings)
        if chunk.answers:
            self._rate.record(len(chunk.answers), now_s)
            self._metrics.answers([answer.exit for answer, _ in chunk.answers])
        if timings:
            inside_s = max(timing.queue_s + timing.compute_s for timing in timings)
            self._metrics.hop(stage_index, max(0.0, now_s - started_s - inside_s))

    async def _again(self, stage_index: int, sample_ids: Sequence[str]) -> None:
        exhausted = [sample_id for sample_id in sample_ids if self._is_exhausted(sample_id)]
        for sample_id in exhausted:
            message = f"stage {stage_index} failed {self._max_attempts} times under this input"
            self._book.settle(sample_id, StageUnavailableError(message, retry_after_s=1.0))
        await self._pause(RETRY_PAUSE_S)
        num_again = self._book.send_again(sample_ids)
        if num_again:  # not where all were exhausted or given up: a counter refuses zero
            self._metrics.retried(stage_index, num_again)
            self._plan_pump()

    def _request_ids(self, sample_ids: set[str]) -> str:
        """The first few requests of the inputs, for the log."""
        flights = (self._book.find(sample_id) for sample_id in sample_ids)
        found = sorted({flight.request_id for flight in flights if flight is not None})
        return ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")

    def _is_exhausted(self, sample_id: str) -> bool:
        flight = self._book.find(sample_id)
        return flight is not None and flight.attempt + 1 >= self._max_attempts

    def _remaining_s(self, sample_ids: Sequence[str]) -> tuple[float, ...]:
        now_s = self._clock.now_s()
        found = (self._book.find(sample_id) for sample_id in sample_ids)
        # An input that nobody waits for any more has no time left: the stage drops it unrun.
        return tuple(-1.0 if flight is None else flight.deadline_s - now_s for flight in found)
