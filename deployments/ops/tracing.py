"""Traces of sampled requests: what happens to their inputs, sent as spans to an OpenTelemetry collector.

The children of a span fill it without gaps, so the times of a request add up to its latency. An ingress and a stage
share no clock: the stage reports durations, and the rest of a call is its hop. How a hop divides into the way there and
the way back is unknown; one half is put before the stage's own time, and one half after it.

The SDK's spans are created when a request has ended, from the times that the ingress recorded, and are sent over
OTLP/HTTP on the SDK's thread. This module is imported only with tracing.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
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
from deployments.ingress.core.inputs import UNPRUNED, PendingInput
from deployments.ingress.dispatcher import serial_and_attempt
from deployments.ingress.link import LinkTo, ReplicaLink
from deployments.wire.messages import Address, Chunk, SplitRun, StageCall, Timing
from earlyexit.clock import Clock

Attributes = Mapping[str, str | int | float | bool]
NONE: Attributes = {}
MOST_INPUTS = 16
"""How many inputs of a request have spans: the slowest, which determine its latency."""
ATTEMPT, EXIT = "offramp.attempt", "offramp.exit"


@dataclass(slots=True, kw_only=True, eq=False)
class Span:
    """A named period, and the spans inside it."""

    name: str
    begin_s: float
    end_s: float = math.inf
    """Infinite while it lasts."""
    attributes: dict[str, str | int | float | bool] = field(default_factory=dict)
    children: list[Span] = field(default_factory=list)
    error: str | None = None

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


class InputSpan(Span):
    """The span of an input: it waits and visits stages by turns, until it is answered or its request ends."""

    @property
    def is_answered(self) -> bool:
        return EXIT in self.attributes

    def went_on(self, attempt: int) -> bool:
        """Returns whether a stage sent it on in this attempt, which counts from 0."""
        last = self.children[-1] if self.children else self
        return last.attributes.get(ATTEMPT) == attempt + 1 and EXIT not in last.attributes and last.error is None

    def enter(self, stage: Span, tokens: int | None = None) -> None:
        """Begins a visit to a stage; `tokens`: its length where it was encoded again, for the next network."""
        if tokens is None:
            self._wait_until(stage.begin_s)
        else:
            block = stage.attributes["offramp.block"]
            self._wait_until(stage.begin_s, "crossing", {"offramp.block": block, "offramp.tokens": tokens})
        self.children.append(stage)

    def leave(
        self,
        now_s: float,
        timing: Timing | None = None,
        runs: Sequence[SplitRun] = (),
        exit_block: int | None = None,
        error: str | None = None,
    ) -> None:
        """Ends the visit, if there is one: with an answer after a block, with an error, or else the input goes on."""
        stage = self.children[-1]
        if stage.end_s < math.inf:
            return
        stage.end_s, stage.error = now_s, error
        if timing is not None:
            # At least 0, because clocks of two machines may run at different speeds.
            hop_s = max(0.0, stage.seconds - timing.queue_s - timing.compute_s)
            times = {"queue": timing.queue_s, "compute": timing.compute_s, "hop": hop_s}
            stage.attributes |= {f"offramp.{name}_s": seconds for name, seconds in times.items()}
            stage.children = list(_inside(stage.begin_s, hop_s / 2, timing, runs))
        if exit_block is not None:
            stage.attributes[EXIT] = self.attributes[EXIT] = exit_block
            self.end_s = now_s

    def end(self, now_s: float) -> None:
        """Ends it with its request, if it has no answer."""
        if self.is_answered:
            return
        if self.children:
            self.leave(now_s, error="given up")
        self._wait_until(now_s)
        self.end_s, self.error = now_s, "no answer"

    def _wait_until(self, now_s: float, name: str = "queue", attributes: Attributes = NONE) -> None:
        since_s = self.children[-1].end_s if self.children else self.begin_s
        if now_s > since_s or not self.children:
            self.children.append(Span(name=name, begin_s=since_s, end_s=now_s, attributes=dict(attributes)))


def _inside(begin_s: float, half_s: float, timing: Timing, runs: Sequence[SplitRun]) -> Iterator[Span]:
    times: list[tuple[str, float, Attributes]] = []
    for run in runs:
        attributes = {
            "offramp.first_block": run.first,
            "offramp.end_block": run.end,
            "offramp.batch": run.batch,
            "offramp.batch_tokens": run.tokens,
            "offramp.target_batch": run.target,
        }
        times += [
            ("stage queue", run.queue_s, NONE),
            (f"split {run.first} to {run.end - 1}", run.compute_s, attributes),
        ]
    if not runs:
        times = [("stage queue", timing.queue_s, NONE), ("compute", timing.compute_s, NONE)]
    for name, seconds, about in (("hop", half_s, NONE), *times, ("hop", half_s, NONE)):
        yield Span(name=name, begin_s=begin_s, end_s=begin_s + seconds, attributes=dict(about))
        begin_s += seconds


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """A sampled request."""

    root: Any
    """The SDK's span of the whole request."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of the response that name the trace: W3C's `traceparent`, and `tracestate` if the caller sent one."""
    began_s: float
    ahead_s: float = 0.0
    """By how much the wall clock was ahead of the ingress's clock at its start."""
    inputs: dict[int, InputSpan] = field(default_factory=dict)
    """By serial number."""

    def ns(self, at_s: float) -> int:
        """Converts a time of the ingress's clock to nanoseconds since 1970."""
        return round((at_s + self.ahead_s) * 1e9)

    def spans(self, ended_s: float) -> list[Span]:
        """Returns the request's spans: preparation until its inputs are submitted, the inputs, and the reply."""
        inputs = list(self.inputs.values())
        submitted_s = inputs[0].begin_s if inputs else ended_s
        prepare = Span(name="prepare", begin_s=self.began_s, end_s=submitted_s)
        if not inputs:  # refused
            return [prepare]
        for each in inputs:
            each.end(ended_s)
        by_end = sorted(inputs, key=lambda each: -each.end_s)
        slowest = by_end[:MOST_INPUTS]
        reply = Span(name="reply", begin_s=by_end[0].end_s, end_s=ended_s)
        return [prepare, *(each for each in inputs if each in slowest), reply]


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
            if record is None or record.is_answered or attempt == UNPRUNED:
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
