"""Notes what happens to the inputs of sampled requests, and has spans made of it when they end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Protocol

from deployments.ingress.core.inputs import WHOLE
from deployments.ingress.crossing import LiveFlight, serial_and_attempt
from deployments.ops.tracing.spans import InputRecord, RequestRecord, Sent, Span, Visit, request_spans
from deployments.wire.messages import Chunk, SplitRun, StageCall, Timing
from earlyexit.clock import Clock

_REQUEST: ContextVar[RequestRecord | None] = ContextVar("offramp_traced_request", default=None)
"""The sampled request that a task works for."""


Attributes = Mapping[str, str | int]


class Exporter(Protocol):
    """Where spans go; `deployments.ops.tracing.otlp` has one."""

    def begin(self, name: str, attributes: Attributes, headers: Mapping[str, str], now_s: float) -> Any | None:
        """The root of a request's trace; None where it is not sampled."""
        ...

    def headers(self, root: Any) -> Mapping[str, str]:
        """What tells the caller which trace it was."""
        ...

    def end(
        self, root: Any, spans: Sequence[Span], ended_s: float, attributes: Attributes, failure: str | None
    ) -> None:
        """The request has ended; must not wait for anything.

        `failure` is None where nothing failed, empty where the attributes say what did, else what is to be said of it.
        """
        ...


class Tracer:
    """Of one ingress, on its event loop."""

    def __init__(self, exporter: Exporter, clock: Clock, starts: Collection[int] = ()) -> None:
        """`starts`: the blocks that networks of a chain begin with."""
        self._exporter = exporter
        self._clock = clock
        self._starts = starts
        self._inputs: dict[int, InputRecord] = {}  # of sampled requests, by their flights' serials

    def begin(self, name: str, attributes: Attributes, headers: Mapping[str, str]) -> RequestRecord | None:
        """A request arrives; None where it is not sampled. What follows in this task belongs to it."""
        now_s = self._clock.now_s()
        root = self._exporter.begin(name, attributes, headers, now_s)
        record = None if root is None else RequestRecord(root=root, began_s=now_s)
        _REQUEST.set(record)
        return record

    def follow(self, flights: Sequence[LiveFlight]) -> None:
        """The present request's inputs were submitted."""
        record = _REQUEST.get()
        if record is None:
            return
        now_s = self._clock.now_s()
        record.serials = [flight.input.serial for flight in flights]
        record.inputs = [InputRecord(submitted_s=now_s) for _ in flights]
        self._inputs |= zip(record.serials, record.inputs, strict=True)

    def headers(self, record: RequestRecord) -> Mapping[str, str]:
        return self._exporter.headers(record.root)

    def end(
        self, record: RequestRecord, attributes: Attributes, request_id: str | None, *, failure: str | None
    ) -> None:
        """The response is out, or the caller is gone; `failure` as in `Exporter.end`."""
        _REQUEST.set(None)
        ended_s = self._clock.now_s()
        for serial in record.serials:
            del self._inputs[serial]
        attributes = {**attributes, "offramp.inputs": len(record.inputs)}
        if request_id is not None:
            attributes["offramp.request_id"] = request_id
        self._exporter.end(record.root, request_spans(record, ended_s), ended_s, attributes, failure)

    def sent(self, slot: str, replica: str, call: StageCall) -> TracedCall | None:
        """A call goes out; None where no input of it is of a sampled request."""
        if not self._inputs:
            return None
        now_s, piece = self._clock.now_s(), call.piece
        inputs: dict[str, InputRecord] = {}
        positions = []
        for position, sample_id in enumerate(piece.sample_ids):
            serial, attempt = serial_and_attempt(sample_id)
            record = self._inputs.get(serial)
            # A probe goes on although it is answered, and a whole text beside one that lost words.
            if record is None or record.answered or attempt == WHOLE:
                continue
            record.under_way = Sent(
                slot=slot,
                replica=replica,
                epoch=call.assignment.epoch,
                attempt=attempt,
                block=piece.next_block,
                tokens=int(piece.lengths_B[position]),
                crosses=piece.next_block in self._starts and record.went_on(attempt),
                call_inputs=len(piece.sample_ids),
                at_s=now_s,
            )
            inputs[sample_id] = record
            positions.append(position)
        return TracedCall(replace(call, traced=tuple(positions)), inputs, self._clock) if inputs else None


class TracedCall:
    """A call with inputs of sampled requests."""

    def __init__(self, call: StageCall, inputs: dict[str, InputRecord], clock: Clock) -> None:
        self.call = call
        """The same, asking for what a trace needs to know."""
        self._inputs = inputs
        self._clock = clock

    def listening(self, take: Callable[[Chunk], None]) -> Callable[[Chunk], None]:
        """Take note of every part before `take` gets it."""

        def noted(chunk: Chunk) -> None:
            self._hear(chunk)
            take(chunk)

        return noted

    def fail(self, reason: str) -> None:
        for sample_id in tuple(self._inputs):
            self._end(sample_id, error=reason)

    def _hear(self, chunk: Chunk) -> None:
        runs = dict(chunk.runs)
        for answer, timing in (*chunk.answers, *chunk.early):
            self._end(answer.sample_id, timing=timing, runs=runs.get(answer.sample_id, ()), exit_block=answer.exit)
        if chunk.going_on is not None:
            going_on = chunk.going_on
            for sample_id, timing in zip(going_on.piece.sample_ids, going_on.timings, strict=True):
                self._end(sample_id, timing=timing, runs=runs.get(sample_id, ()))
        for sample_id, error in chunk.lost:
            self._end(sample_id, error=f"{error.kind}: {error}")

    def _end(
        self,
        sample_id: str,
        *,
        timing: Timing | None = None,
        runs: tuple[SplitRun, ...] = (),
        exit_block: int | None = None,
        error: str | None = None,
    ) -> None:
        record = self._inputs.pop(sample_id, None)
        if record is None or record.under_way is None:
            return
        visit = Visit(
            sent=record.under_way,
            ended_s=self._clock.now_s(),
            timing=timing,
            runs=runs,
            exit=exit_block,
            error=error,
        )
        record.end(visit)
