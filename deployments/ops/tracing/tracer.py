"""Records what happens to the inputs of sampled requests, and exports it as spans when the requests end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from deployments.ingress.core.inputs import WHOLE, PendingInput
from deployments.ingress.dispatcher import serial_and_attempt
from deployments.ingress.link import LinkTo, ReplicaLink
from deployments.ops.tracing.spans import Attributes, InputRecord, RequestRecord, Sent, Visit, request_spans
from deployments.settings import ServeSettings
from deployments.wire.messages import Address, Chunk, SplitRun, StageCall, Timing
from earlyexit.clock import Clock
from earlyexit.errors import InputError

if TYPE_CHECKING:
    from deployments.ops.tracing.otlp import OtlpExporter

_REQUEST: ContextVar[RequestRecord | None] = ContextVar("offramp_traced_request", default=None)
"""The sampled request that the current task serves."""


class Tracer:
    """The tracer of one ingress, on its event loop."""

    def __init__(self, exporter: OtlpExporter, clock: Clock, starts: Collection[int] = ()) -> None:
        """`starts`: the first block of each network of a chain."""
        self._exporter = exporter
        self._clock = clock
        self._starts = starts
        self._inputs: dict[int, InputRecord] = {}
        """Inputs of sampled requests, by the serial number of their inputs."""

    def begin(self, name: str, attributes: Attributes, headers: Mapping[str, str]) -> RequestRecord | None:
        """Starts the trace of a request, which covers the rest of this task; None for a request that is not sampled."""
        now_s = self._clock.now_s()
        root = self._exporter.begin(name, attributes, headers, now_s)
        record = None if root is None else RequestRecord(root=root, began_s=now_s)
        _REQUEST.set(record)
        return record

    def follow(self, inputs: Sequence[PendingInput]) -> None:
        """Records that the inputs of the current request were submitted."""
        record = _REQUEST.get()
        if record is None:
            return
        now_s = self._clock.now_s()
        record.serials = [each.serial for each in inputs]
        record.inputs = [InputRecord(submitted_s=now_s) for _ in inputs]
        self._inputs |= zip(record.serials, record.inputs, strict=True)

    def headers(self, record: RequestRecord) -> Mapping[str, str]:
        """Returns the response headers that name the trace."""
        return self._exporter.headers(record.root)

    def end(
        self, record: RequestRecord, attributes: Attributes, request_id: str | None, *, failure: str | None
    ) -> None:
        """Exports a request whose response was sent, or whose caller has left; `failure` as in `OtlpExporter.end`."""
        _REQUEST.set(None)
        ended_s = self._clock.now_s()
        for serial in record.serials:
            del self._inputs[serial]
        attributes = {**attributes, "offramp.inputs": len(record.inputs)}
        if request_id is not None:
            attributes["offramp.request_id"] = request_id
        self._exporter.end(record.root, request_spans(record, ended_s), ended_s, attributes, failure)

    def close(self) -> None:
        """Sends the remaining spans; blocks for at most two seconds."""
        self._exporter.close()

    def link(self, slot: str) -> LinkTo:
        """Returns a factory of links that record the calls to a slot's replicas."""
        return partial(TracedLink, self, slot)

    def sent(self, slot: str, replica: str, call: StageCall) -> TracedCall | None:
        """Records that a call is sent; returns None if none of its inputs belongs to a sampled request."""
        if not self._inputs:
            return None
        now_s, piece = self._clock.now_s(), call.piece
        inputs: dict[str, InputRecord] = {}
        positions = []
        for position, sample_id in enumerate(piece.sample_ids):
            serial, attempt = serial_and_attempt(sample_id)
            record = self._inputs.get(serial)
            # A probe continues after its answer, and so does the unpruned copy of a pruned text.
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
    """A call that carries inputs of sampled requests."""

    def __init__(self, call: StageCall, inputs: dict[str, InputRecord], clock: Clock) -> None:
        self.call = call
        """The call, which also asks the replica for the times of these inputs."""
        self._inputs = inputs
        self._clock = clock

    def listening(self, take: Callable[[Chunk], None]) -> Callable[[Chunk], None]:
        """Returns a callback that records each part of the reply and passes it on to `take`."""

        def noted(chunk: Chunk) -> None:
            self._hear(chunk)
            take(chunk)

        return noted

    def fail(self, reason: str) -> None:
        """Records that the call failed before these inputs came back."""
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


class TracedLink(ReplicaLink):
    """A link to a replica that records calls with inputs of sampled requests."""

    def __init__(
        self, tracer: Tracer, slot: str, replica: str, address: Address, on_change: Callable[[], None]
    ) -> None:
        super().__init__(replica, address, on_change)
        self._tracer = tracer
        self._slot = slot

    async def call(self, call: StageCall, take: Callable[[Chunk], None]) -> None:
        traced = self._tracer.sent(self._slot, self.replica, call)
        if traced is None:
            return await super().call(call, take)
        try:
            await super().call(traced.call, traced.listening(take))
        except BaseException as error:  # a cancelled call has failed, too
            traced.fail(repr(error))
            raise
        return None


def start_tracing(settings: ServeSettings, clock: Clock, starts: Collection[int] = ()) -> Tracer | None:
    """Returns the tracer that the settings ask for; without one, OpenTelemetry is not imported.

    `starts`: the first block of each network of a chain.
    """
    if settings.tracing is None:
        return None
    from deployments.ops.tracing.otlp import otlp_exporter

    return Tracer(otlp_exporter(settings.tracing, settings.app), clock, starts)


def check_tracing(settings: ServeSettings) -> None:
    """Raises InputError if the settings ask for traces and the exporter is not installed."""
    if settings.tracing is None:
        return
    try:
        import opentelemetry.exporter.otlp.proto.http  # noqa: F401 # only whether it is there
    except ImportError as error:
        raise InputError(
            "tracing needs OpenTelemetry's exporter over OTLP/HTTP: install Offramp with its extra 'tracing', "
            f"pip install '.[tracing]' ({error})"
        ) from error
