"""Calls to stages: a piece out, its reply in part by part, its survivors on to whoever hosts their next block now."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from deployments.ingress.core.flights import FlightBook
from deployments.ingress.core.itinerary import Itinerary, Leg
from deployments.ingress.core.outcomes import Outcomes
from deployments.ingress.core.probes import ProbeBook
from deployments.messages import Chunk, GoingOn, StageCall
from earlyexit.clock import Clock
from earlyexit.wire import WirePiece

if TYPE_CHECKING:  # it imports ray
    from deployments.ingress.transport.transport import Transport

# A child of the logger that Serve writes as JSON, with the request id where there is one.
logger = logging.getLogger(f"ray.serve.{__name__}")

HANG_S = 1.0
"""How long a call outlives the last deadline of its inputs."""


class Failed(Protocol):
    """What is done about the inputs that a call left without an outcome."""

    async def __call__(self, slot: str, sample_ids: Sequence[str]) -> None: ...


class HopMetrics(Protocol):
    """What is counted of calls; `IngressMetrics` does."""

    def hop(self, slot: str, seconds: float) -> None: ...


class Calls:
    """The calls under way of one ingress; they go by the itinerary of the moment in which they are sent."""

    def __init__(
        self,
        itinerary: Itinerary[Transport],
        book: FlightBook,
        outcomes: Outcomes,
        probes: ProbeBook | None,
        clock: Clock,
        metrics: HopMetrics,
        *,
        kept_s: float,
        failed: Failed,
    ) -> None:
        """`kept_s`: what a stage that waits for a full batch leaves of every deadline, for what nobody expects."""
        self.itinerary = itinerary
        self._book = book
        self._outcomes = outcomes
        self._probes = probes
        self._clock = clock
        self._metrics = metrics
        self._kept_s = kept_s
        self._failed = failed
        self._open: Counter[int] = Counter()  # by epoch
        # Calls to stages belong to no HTTP request: in a request's context Serve would take them for its children.
        self._context = contextvars.copy_context()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def oldest_epoch(self) -> int:
        """Of the plans by which the calls under way were sent; the present one where there are none."""
        return min(self._open, default=self.itinerary.epoch)

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Let it run beside everything else, outside of any request."""
        task = asyncio.get_running_loop().create_task(coroutine, context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def call(
        self,
        leg: Leg[Transport],
        piece: WirePiece,
        *,
        probe: bool,
        heard: Callable[[], None] = lambda: None,
    ) -> None:
        """Call a stage; whatever it leaves unsettled, because it or the way to it failed, starts again.

        `heard` is called with every part of the reply: the first tells that the call's batch has run.
        """
        sample_ids = piece.sample_ids
        unsettled = set(sample_ids)
        remaining_s = self._remaining_s(sample_ids)
        call = StageCall(
            piece=piece,
            remaining_s=remaining_s,
            reserve_s=self._reserve_s(leg, remaining_s),
            assignment=leg.assignment,
            probe=probe,
        )
        self._open[leg.epoch] += 1
        try:
            await self._exchange(leg, call, unsettled, heard)
        except Exception as error:
            requests = self._request_ids(unsettled)
            logger.warning("%s failed under %d inputs of %s: %r", leg.slot, len(unsettled), requests, error)
        finally:
            self._close(leg.epoch)
        heard()  # others need not wait for the pause of a failed call
        if unsettled:
            await self._failed(leg.slot, [sample_id for sample_id in sample_ids if sample_id in unsettled])

    async def _go_on(self, going_on: GoingOn, *, probe: bool) -> None:
        piece = going_on.piece
        if any(self._deadline_s(sample_id) is not None for sample_id in piece.sample_ids):
            await self.call(self.itinerary.at(piece.next_block), piece, probe=probe)

    async def _exchange(
        self,
        leg: Leg[Transport],
        call: StageCall,
        unsettled: set[str],
        heard: Callable[[], None],
    ) -> None:
        started_s = self._clock.now_s()

        def take(chunk: Chunk) -> None:
            self._take(leg, chunk, unsettled, started_s, probe=call.probe)
            heard()

        # A replica that hangs must not hold the call for ever: nobody waits behind the last deadline.
        async with asyncio.timeout(max(0.0, *call.remaining_s) + HANG_S):
            batch = leg.batch_at(call.piece.next_block)
            await leg.transport.call(call, batch=batch, avoided=self.itinerary.avoided, take=take)

    def _take(self, leg: Leg[Transport], chunk: Chunk, unsettled: set[str], started_s: float, *, probe: bool) -> None:
        now_s = self._clock.now_s()
        unsettled.difference_update([answer.sample_id for answer, _ in chunk.answers])
        unsettled.difference_update([sample_id for sample_id, _ in chunk.lost])
        self._outcomes.take(chunk, self.itinerary, now_s)
        if chunk.answers or chunk.early or chunk.going_on is not None:  # what is dropped took no time
            leg.learn(now_s - started_s)
        timings = [timing for _, timing in chunk.answers]
        if chunk.going_on is not None:
            unsettled.difference_update(chunk.going_on.piece.sample_ids)
            self.start(self._go_on(chunk.going_on, probe=probe))
            timings = list(chunk.going_on.timings)
        if timings:
            inside_s = max(timing.queue_s + timing.compute_s for timing in timings)
            self._metrics.hop(leg.slot, max(0.0, now_s - started_s - inside_s))

    def _close(self, epoch: int) -> None:
        self._open[epoch] -= 1
        if not self._open[epoch]:
            del self._open[epoch]

    def _request_ids(self, sample_ids: set[str]) -> str:
        """The first few requests of the inputs, for the log."""
        flights = (self._book.find(sample_id) for sample_id in sample_ids)
        found = sorted({flight.request_id for flight in flights if flight is not None})
        return ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")

    def _deadline_s(self, sample_id: str) -> float | None:
        """Until when an input under way is waited for: by its owner or, of an answered probe, for what it shows."""
        flight = self._book.find(sample_id)
        if flight is not None:
            return flight.deadline_s
        return None if self._probes is None else self._probes.deadline_s(sample_id)

    def _reserve_s(self, leg: Leg[Transport], remaining_s: Sequence[float]) -> float:
        later_s = self.itinerary.reserve_s(leg)
        return max(0.0, *remaining_s) if math.isinf(later_s) else later_s + self._kept_s

    def _remaining_s(self, sample_ids: Sequence[str]) -> tuple[float, ...]:
        now_s = self._clock.now_s()
        deadlines_s = map(self._deadline_s, sample_ids)
        # An input that nobody waits for any more has no time left: the stage drops it unrun.
        return tuple(-1.0 if deadline_s is None else deadline_s - now_s for deadline_s in deadlines_s)
