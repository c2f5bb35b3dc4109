"""Records what happens to the inputs of sampled requests, and sends it as spans to an OpenTelemetry collector.

Spans are created when a request has ended, from the times that the ingress recorded, and are sent over OTLP/HTTP on the
SDK's thread. This module is imported only with tracing.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from deployments.choices import TracingSettings
from deployments.ingress.core.inputs import WHOLE, PendingInput
from deployments.ingress.dispatcher import serial_and_attempt
from deployments.ingress.link import LinkTo, ReplicaLink
from deployments.ops.tracing.spans import ATTEMPT, Attributes, InputSpan, RequestRecord, Span
from deployments.wire.messages import Address, Chunk, StageCall, Timing
from earlyexit.clock import Clock

TRACES = "/v1/traces"
TRACEPARENT = "traceparent"
DEFAULT_RATIO = 0.01
NAMELESS = "unknown_service"
"""Prefix of the SDK's name for an unnamed service."""
LEAVE_MS = 2000
"""How long an ingress that stops waits until its last spans are sent."""

_REQUEST: ContextVar[RequestRecord | None] = ContextVar("offramp_traced_request", default=None)
"""The sampled request that the current task serves."""


class Tracer:
    """The tracer of one ingress, on its event loop."""

    def __init__(
        self,
        provider: TracerProvider,
        clock: Clock,
        *,
        ratio: float | None = None,
        starts: Collection[int] = (),
    ) -> None:
        """`ratio`: the sampled share of the requests that carry no trace; None if the provider's sampler decides.

        `starts`: the first block of each network of a chain.
        """
        self._provider = provider
        self._sdk = provider.get_tracer("offramp")
        self._propagator = TraceContextTextMapPropagator()
        self._clock = clock
        self._ratio = ratio
        self._starts = starts
        self._inputs: dict[int, InputSpan] = {}
        """Inputs of sampled requests, by the serial number of their inputs."""

    def begin(self, name: str, attributes: Attributes, headers: Mapping[str, str]) -> RequestRecord | None:
        """Starts the trace of a request, which covers the rest of this task, below the caller's if the headers name it.

        Returns None for a request that is not sampled.
        """
        record = self._begin(name, attributes, headers)
        _REQUEST.set(record)
        return record

    def _begin(self, name: str, attributes: Attributes, headers: Mapping[str, str]) -> RequestRecord | None:
        # Decided before the SDK is called, which takes 10 us for a request that is not sampled.
        if self._ratio is not None and TRACEPARENT not in headers and random.random() >= self._ratio:
            return None
        now_s, wall_ns = self._clock.now_s(), time.time_ns()
        root = self._sdk.start_span(name, self._propagator.extract(headers), SpanKind.SERVER, start_time=wall_ns)
        if not root.is_recording():
            return None
        root.set_attributes(attributes)
        named: dict[str, str] = {}
        self._propagator.inject(named, trace.set_span_in_context(root))
        return RequestRecord(root=root, headers=named, began_s=now_s, ahead_s=wall_ns / 1e9 - now_s)

    def follow(self, inputs: Sequence[PendingInput]) -> None:
        """Records that the inputs of the current request were submitted."""
        record = _REQUEST.get()
        if record is None:
            return
        now_s = self._clock.now_s()
        record.inputs = {
            each.serial: InputSpan(name="input", begin_s=now_s, attributes={"offramp.input": position})
            for position, each in enumerate(inputs)
        }
        self._inputs |= record.inputs

    def end(
        self, record: RequestRecord, attributes: Attributes, request_id: str | None, *, failure: str | None
    ) -> None:
        """Queues the spans of a request that has ended for the thread that sends them; does not block.

        `failure` is None if nothing failed, empty if the attributes describe the failure, else its description.
        """
        _REQUEST.set(None)
        ended_s = self._clock.now_s()
        for serial in record.inputs:
            del self._inputs[serial]
        record.root.set_attributes({**attributes, "offramp.inputs": len(record.inputs)})
        if request_id is not None:
            record.root.set_attribute("offramp.request_id", request_id)
        if failure is not None:
            record.root.set_status(StatusCode.ERROR, failure or None)
        self._add(record.spans(ended_s), record, record.root)
        record.root.end(record.ns(ended_s))

    def _add(self, spans: Iterable[Span], record: RequestRecord, parent: trace.Span) -> None:
        context = trace.set_span_in_context(parent)
        for each in spans:
            begin_ns = record.ns(each.begin_s)
            span = self._sdk.start_span(each.name, context, attributes=each.attributes, start_time=begin_ns)
            self._add(each.children, record, span)
            if each.error is not None:
                span.set_status(StatusCode.ERROR, each.error)
            span.end(record.ns(each.end_s))

    def close(self) -> None:
        """Sends the remaining spans; blocks for at most `LEAVE_MS`."""
        self._provider.force_flush(LEAVE_MS)
        self._provider.shutdown()

    @property
    def link(self) -> LinkTo:
        """A factory of links that record the calls to replicas."""
        return partial(TracedLink, self)

    def sent(self, replica: str, call: StageCall) -> tuple[StageCall, dict[str, InputSpan]]:
        """Records that a call is sent; returns it, and those of its inputs that belong to sampled requests.

        The call then asks the replica for the times of these inputs.
        """
        inputs: dict[str, InputSpan] = {}
        if not self._inputs:
            return call, inputs
        now_s, piece = self._clock.now_s(), call.piece
        positions = []
        for position, sample_id in enumerate(piece.sample_ids):
            serial, attempt = serial_and_attempt(sample_id)
            record = self._inputs.get(serial)
            # A probe continues after its answer, and so does the unpruned copy of a pruned text.
            if record is None or record.is_answered or attempt == WHOLE:
                continue
            attributes: dict[str, str | int | float | bool] = {
                "offramp.slot": call.assignment.slot,
                "offramp.replica": replica,
                "offramp.plan_epoch": call.assignment.epoch,
                ATTEMPT: attempt + 1,
                "offramp.block": piece.next_block,
                "offramp.call_inputs": len(piece.sample_ids),
            }
            stage = Span(name=f"stage {call.assignment.slot}", begin_s=now_s, attributes=attributes)
            crosses = piece.next_block in self._starts and record.went_on(attempt)
            record.enter(stage, int(piece.lengths_B[position]) if crosses else None)
            inputs[sample_id] = record
            positions.append(position)
        return (replace(call, traced=tuple(positions)) if inputs else call), inputs

    def came_back(self, chunk: Chunk, inputs: dict[str, InputSpan]) -> None:
        """Records a part of the reply to a call, and removes the inputs that it settles."""
        now_s, runs = self._clock.now_s(), dict(chunk.runs)
        timed: list[tuple[str, Timing, int | None]] = [
            (answer.sample_id, timing, answer.exit) for answer, timing in (*chunk.answers, *chunk.early)
        ]
        if (on := chunk.going_on) is not None:
            timed += [
                (sample_id, timing, None) for sample_id, timing in zip(on.piece.sample_ids, on.timings, strict=True)
            ]
        for sample_id, timing, exit_block in timed:
            if sample_id in inputs:
                inputs.pop(sample_id).leave(now_s, timing, runs.get(sample_id, ()), exit_block)
        for sample_id, error in chunk.lost:
            if sample_id in inputs:
                inputs.pop(sample_id).leave(now_s, error=f"{error.kind}: {error}")

    def failed(self, reason: str, inputs: Mapping[str, InputSpan]) -> None:
        """Records that a call failed before these inputs came back."""
        for record in inputs.values():
            record.leave(self._clock.now_s(), error=reason)


class TracedLink(ReplicaLink):
    """A link to a replica that records calls with inputs of sampled requests."""

    def __init__(self, tracer: Tracer, replica: str, address: Address, on_change: Callable[[], None]) -> None:
        super().__init__(replica, address, on_change)
        self._tracer = tracer

    async def call(self, call: StageCall, take: Callable[[Chunk], None]) -> None:
        call, inputs = self._tracer.sent(self.name, call)
        if not inputs:
            return await super().call(call, take)

        def noted(chunk: Chunk) -> None:
            self._tracer.came_back(chunk, inputs)
            take(chunk)

        try:
            await super().call(call, noted)
        except BaseException as error:  # a cancelled call has failed, too
            self._tracer.failed(repr(error), inputs)
            raise
        return None


def build_tracer(settings: TracingSettings, application: str, clock: Clock, starts: Collection[int]) -> Tracer:
    """Returns a tracer of the settings, and of the SDK's environment variables for what they leave out."""
    ratio = settings.ratio
    if ratio is None and "OTEL_TRACES_SAMPLER" not in os.environ:
        ratio = DEFAULT_RATIO
    sampler = None if ratio is None else ParentBased(ALWAYS_ON)  # `Tracer` samples requests without a parent
    resource = Resource.create({} if settings.service_name is None else {SERVICE_NAME: settings.service_name})
    if str(resource.attributes[SERVICE_NAME]).startswith(NAMELESS):
        resource = resource.merge(Resource({SERVICE_NAME: application}))
    provider = TracerProvider(sampler=sampler, resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=traces_url(settings.endpoint))))
    return Tracer(provider, clock, ratio=ratio, starts=starts)


def traces_url(endpoint: str | None) -> str | None:
    """Returns the URL that spans are posted to; None if the SDK reads it from its environment."""
    if endpoint is None:
        return None
    path = urlsplit(endpoint).path.rstrip("/")
    return endpoint if path else endpoint.rstrip("/") + TRACES
