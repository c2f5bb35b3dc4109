"""Traces of sampled requests, whose spans are sent to an OpenTelemetry collector.

The children of a span fill it without gaps, so the times of a request add up to its latency. An ingress and a replica
do not share a clock: the replica reports durations, and the rest of a call is its hop. The share of the hop before and
after the replica's time is unknown, so each is shown as one half.

The SDK's spans are created when a request has ended, from the times that the ingress recorded. The SDK's thread sends
them over OTLP/HTTP. This module is imported only if tracing is on.
"""

from __future__ import annotations

import logging
import math
import os
import random
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Thread
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from msgspec import structs
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_SERVICE_NAME
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from deployments.choices import TracingSettings
from deployments.ingress.core.calls import Call
from deployments.ingress.core.inputs import PendingInput
from deployments.wire.messages import Chunk, StageCall, Timing
from earlyexit.clock import Clock

Value: TypeAlias = str | int | float | bool
Attributes: TypeAlias = dict[str, Value]
MAX_INPUT_SPANS = 16
"""Most inputs of a request with spans: the slowest inputs, because they determine the request's latency."""
ATTEMPT, EXIT = "offramp.attempt", "offramp.exit"


@dataclass(slots=True, kw_only=True, eq=False)
class Span:
    """A named period of time, and its child spans."""

    name: str
    begin_s: float
    end_s: float = math.inf
    """Infinite until the span ends."""
    attributes: Attributes = field(default_factory=dict)
    children: list[Span] = field(default_factory=list)
    error: str | None = None


class InputSpan(Span):
    """The span of an input. Its children are its waits and its visits to stages, in turn."""

    @property
    def is_answered(self) -> bool:
        return EXIT in self.attributes

    def enter(self, stage: Span, tokens: int | None = None) -> None:
        """Starts a visit to a stage. `tokens` is set if the input was encoded again for the next network."""
        block = stage.attributes.get("offramp.block", 0)
        self._wait_until(stage.begin_s, {} if tokens is None else {"offramp.block": block, "offramp.tokens": tokens})
        self.children.append(stage)

    def leave(
        self, now_s: float, timing: Timing | None = None, exit_block: int | None = None, error: str | None = None
    ) -> None:
        """Ends the present visit, if there is one: with an answer after a block, with an error, or as a survivor."""
        stage = self.children[-1]
        if stage.end_s < math.inf:
            return
        stage.end_s, stage.error = now_s, error
        if timing is not None:
            # The difference may be negative, because the clocks of two machines may run at different speeds.
            hop_s = max(0.0, now_s - stage.begin_s - timing.queue_s - timing.compute_s)
            seconds = {"queue": timing.queue_s, "compute": timing.compute_s, "hop": hop_s}
            stage.attributes |= {f"offramp.{name}_s": value for name, value in seconds.items()}
            stage.children = list(_stage_spans(stage.begin_s, hop_s / 2, timing))
        if exit_block is not None:
            stage.attributes[EXIT] = self.attributes[EXIT] = exit_block
            self.end_s = now_s

    def end(self, now_s: float) -> None:
        """Ends the span together with its request, if the input has no answer."""
        if self.is_answered:
            return
        if self.children:
            self.leave(now_s, error="given up")
        self._wait_until(now_s, {})
        self.end_s, self.error = now_s, "no answer"

    def _wait_until(self, now_s: float, crossing: Attributes) -> None:
        since_s = self.children[-1].end_s if self.children else self.begin_s
        if now_s > since_s or not self.children:
            name = "crossing" if crossing else "queue"
            self.children.append(Span(name=name, begin_s=since_s, end_s=now_s, attributes=crossing))


def _stage_spans(begin_s: float, half_s: float, timing: Timing) -> Iterator[Span]:
    """Returns the children of a visit to a stage: half the hop, queue and compute times, and half the hop."""
    parts: list[tuple[str, float, Attributes]] = []
    for run in timing.runs:
        batch: Attributes = {
            "offramp.first_block": run.first,
            "offramp.end_block": run.end,
            "offramp.batch": run.batch,
            "offramp.batch_tokens": run.tokens,
            "offramp.target_batch": run.target,
        }
        parts += [("stage queue", run.queue_s, {}), (f"split {run.first} to {run.end - 1}", run.compute_s, batch)]
    parts = parts or [("stage queue", timing.queue_s, {}), ("compute", timing.compute_s, {})]
    for name, seconds, attributes in [("hop", half_s, Attributes()), *parts, ("hop", half_s, Attributes())]:
        yield Span(name=name, begin_s=begin_s, end_s=begin_s + seconds, attributes=attributes)
        begin_s += seconds


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """A sampled request."""

    root: Any
    """The SDK's span of the whole request."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Response headers that identify the trace: W3C's `traceparent`, and `tracestate` if the caller sent one."""
    begin_s: float
    wall_offset_s: float = 0.0
    """Wall-clock time minus the ingress's clock, at the start of the request."""
    inputs: dict[int, InputSpan] = field(default_factory=dict)
    """The spans of its inputs, by serial number."""

    def ns(self, at_s: float) -> int:
        """Converts a time of the ingress's clock to nanoseconds since 1970."""
        return round((at_s + self.wall_offset_s) * 1e9)

    def spans(self, ended_s: float) -> list[Span]:
        """Returns the children of the request's span: preparation, the slowest inputs, and the reply."""
        inputs = list(self.inputs.values())
        submitted_s = inputs[0].begin_s if inputs else ended_s
        prepare = Span(name="prepare", begin_s=self.begin_s, end_s=submitted_s)
        if not inputs:  # the request was refused
            return [prepare]
        for each in inputs:
            each.end(ended_s)
        slowest = sorted(inputs, key=lambda each: -each.end_s)[:MAX_INPUT_SPANS]
        reply = Span(name="reply", begin_s=slowest[0].end_s, end_s=ended_s)
        return [prepare, *(each for each in inputs if each in slowest), reply]


logger = logging.getLogger(f"ray.serve.{__name__}")
DEFAULT_RATIO = 0.01
CLOSE_S = 2.0
"""Timeout in seconds for sending the last spans when the ingress stops."""

_REQUEST: ContextVar[RequestRecord | None] = ContextVar("offramp_traced_request", default=None)
"""The sampled request of the current task."""


class Tracer:
    """The tracer of one ingress, on its event loop."""

    def __init__(
        self, provider: TracerProvider, clock: Clock, *, ratio: float | None = None, starts: Collection[int] = ()
    ) -> None:
        """`ratio`: sampled share of the requests without a trace; None if the provider's sampler decides.

        `starts`: the first block of each network of a cascade.
        """
        self._provider = provider
        self._sdk = provider.get_tracer("offramp")
        self._propagator = TraceContextTextMapPropagator()
        self.clock = clock
        self._ratio = ratio
        self._starts = starts
        self._inputs: dict[int, InputSpan] = {}
        """The spans of all inputs of sampled requests, by serial number."""
        self._calls: dict[Call, dict[str, InputSpan]] = {}
        """For open calls, the spans of sampled inputs that no part of the reply has settled, by sample id."""

    def begin(self, name: str, attributes: Mapping[str, Value], headers: Mapping[str, str]) -> RequestRecord | None:
        """Starts the trace of the current task's request, as a child of the trace in the headers, if there is one.

        Returns None for a request that is not sampled.
        """
        _REQUEST.set(None)
        # Decided before the SDK is called, because the SDK is slow (10 us) even for requests that are not sampled.
        parent = self._propagator.extract(headers)  # empty without a valid traceparent
        if self._ratio is not None and not parent and random.random() >= self._ratio:
            return None
        now_s, wall_ns = self.clock.now_s(), time.time_ns()
        root = self._sdk.start_span(name, parent, SpanKind.SERVER, start_time=wall_ns)
        if not root.is_recording():
            return None
        root.set_attributes(attributes)
        response_headers: dict[str, str] = {}
        self._propagator.inject(response_headers, trace.set_span_in_context(root))
        offset_s = wall_ns / 1e9 - now_s
        record = RequestRecord(root=root, headers=response_headers, begin_s=now_s, wall_offset_s=offset_s)
        _REQUEST.set(record)
        return record

    def record_inputs(self, inputs: Sequence[PendingInput]) -> None:
        """Records that the inputs of the current request are submitted. Only the first step of a sequence counts."""
        record = _REQUEST.get()
        if record is None or record.inputs:
            return
        now_s = self.clock.now_s()
        record.inputs = {
            each.serial: InputSpan(name="input", begin_s=now_s, attributes={"offramp.input": position})
            for position, each in enumerate(inputs)
        }
        self._inputs |= record.inputs

    def end(self, record: RequestRecord, status: Mapping[str, Value], request_id: str, failure: str | None) -> None:
        """Ends a request, and queues its spans for the SDK's thread; does not block.

        `status`: the attribute of the response's status. `failure`: None without a failure, empty if the status
        describes it, otherwise its description.
        """
        _REQUEST.set(None)
        ended_s = self.clock.now_s()
        for serial in record.inputs:
            del self._inputs[serial]
        record.root.set_attributes({**status, "offramp.inputs": len(record.inputs), "offramp.request_id": request_id})
        if failure is not None:
            record.root.set_status(StatusCode.ERROR, failure or None)
            record.root.set_attribute("error.type", str(next(iter(status.values()))))
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
        """Sends the remaining spans; blocks for at most `CLOSE_S`, while the SDK would try for half a minute."""
        closing = Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)

    def on_call(self, replica: str, call: Call, message: StageCall) -> StageCall:
        """Records that a call is sent; returns its message, which asks the replica for the times of sampled inputs."""
        if not self._inputs or call.watch == "unpruned":  # copies of pruned texts are not recorded
            return message
        now_s, piece, assignment = self.clock.now_s(), message.piece, call.stage.assignment
        inputs: dict[str, InputSpan] = {}
        positions = []
        for position, (sample_id, each) in enumerate(zip(piece.sample_ids, call.inputs, strict=True)):
            span = self._inputs.get(each.serial)
            if span is None or span.is_answered:  # calls after the answer (of probes) are not recorded
                continue
            attributes: Attributes = {
                "offramp.slot": assignment.slot,
                "offramp.replica": replica,
                "offramp.plan_epoch": assignment.epoch,
                ATTEMPT: each.attempt + 1,
                "offramp.block": piece.next_block,
                "offramp.call_inputs": len(piece.sample_ids),
            }
            stage = Span(name=f"stage {assignment.slot}", begin_s=now_s, attributes=attributes)
            before = (span.children or [span])[-1]
            was_passed_on = before.attributes.get(ATTEMPT) == each.attempt + 1 and EXIT not in before.attributes
            crosses = piece.next_block in self._starts and was_passed_on and before.error is None
            span.enter(stage, int(piece.lengths_B[position]) if crosses else None)
            inputs[sample_id] = span
            positions.append(position)
        if not inputs:
            return message
        self._calls[call] = inputs
        return structs.replace(message, traced=tuple(positions))

    def on_reply(self, call: Call, chunk: Chunk) -> None:
        """Records a part of a call's reply."""
        inputs, now_s = self._calls.get(call), self.clock.now_s()
        if inputs is None:
            return
        ends: dict[str, Any] = {sample_id: {"error": f"{error.kind}: {error}"} for sample_id, error in chunk.lost}
        if chunk.survivors is not None:
            timings = zip(chunk.survivors.sample_ids, chunk.survivor_timings, strict=True)
            ends |= {sample_id: {"timing": timing} for sample_id, timing in timings}
        for answer, timing in (*chunk.early, *chunk.answers):  # an early answer's input may also be a survivor
            ends[answer.sample_id] = {"timing": timing, "exit_block": answer.exit}
        for sample_id in inputs.keys() & ends.keys():
            inputs.pop(sample_id).leave(now_s, **ends[sample_id])

    def on_end(self, call: Call, error: BaseException | None) -> None:
        """Records the end of a call."""
        for span in self._calls.pop(call, {}).values():
            span.leave(self.clock.now_s(), error=repr(error))


class SpanExporter(OTLPSpanExporter):
    """Warns when spans begin to be lost, and when they are sent again.

    The SDK logs every lost batch, but to stderr, which is in Serve's log only at level INFO.
    """

    is_losing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        if self.is_losing != (result is not SpanExportResult.SUCCESS):
            self.is_losing = not self.is_losing
            logger.warning("the collector accepts %s", "no traces; they are lost" if self.is_losing else "traces again")
        return result


def build_tracer(settings: TracingSettings, application: str, clock: Clock, starts: Collection[int]) -> Tracer:
    """Returns the tracer of the settings. The SDK's environment variables replace settings that are not set."""
    ratio = settings.ratio
    if ratio is None and "OTEL_TRACES_SAMPLER" not in os.environ:
        ratio = DEFAULT_RATIO
    sampler = None if ratio is None else ParentBased(ALWAYS_ON)  # `Tracer` itself samples requests without a parent
    name = settings.service_name or os.environ.get(OTEL_SERVICE_NAME) or application
    provider = TracerProvider(sampler=sampler, resource=Resource.create({SERVICE_NAME: name}))
    provider.add_span_processor(BatchSpanProcessor(SpanExporter(endpoint=traces_url(settings.endpoint))))
    return Tracer(provider, clock, ratio=ratio, starts=starts)


def traces_url(endpoint: str | None) -> str | None:
    """Returns the URL for spans; None if the SDK reads it from its environment variables."""
    if endpoint is None:
        return None
    return endpoint if urlsplit(endpoint).path.rstrip("/") else endpoint.rstrip("/") + "/v1/traces"
