"""Sends spans to an OpenTelemetry collector, over OTLP/HTTP and on the SDK's thread; imported only with tracing."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from deployments.ops.tracing.spans import Attributes, Span

TRACES = "/v1/traces"
TRACEPARENT = "traceparent"
DEFAULT_RATIO = 0.01
NAMELESS = "unknown_service"
"""Prefix of the SDK's name for an unnamed service."""
LEAVE_MS = 2000
"""How long an ingress that stops waits until its last spans are sent."""


@dataclass(frozen=True, slots=True)
class Root:
    """The root span of a request, and by how much the wall clock was ahead of the ingress's clock at its start."""

    span: trace.Span
    ahead_s: float

    def ns(self, at_s: float) -> int:
        """Converts a time of the ingress's clock to nanoseconds since 1970."""
        return round((at_s + self.ahead_s) * 1e9)


class OtlpExporter:
    """Creates the SDK's spans when a request has ended, from the times that the ingress recorded."""

    def __init__(self, provider: TracerProvider, ratio: float | None, rng: random.Random) -> None:
        """`ratio`: the sampled share of the requests that carry no trace; None if the provider's sampler decides."""
        self._provider = provider
        self._ratio = ratio
        self._rng = rng
        self._tracer = provider.get_tracer("offramp")
        self._context = TraceContextTextMapPropagator()

    def begin(self, name: str, attributes: Attributes, headers: Mapping[str, str], now_s: float) -> Root | None:
        """Starts the root span of a request, below the caller's span if the headers name one.

        Returns None for a request that is not sampled.
        """
        # Decided before the SDK is called, which takes 10 us for a request that is not sampled.
        if self._ratio is not None and TRACEPARENT not in headers and self._rng.random() >= self._ratio:
            return None
        parent = self._context.extract(headers)
        wall_ns = time.time_ns()
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, start_time=wall_ns)
        if not span.is_recording():
            return None
        span.set_attributes(attributes)
        return Root(span, wall_ns / 1e9 - now_s)

    def headers(self, root: Root) -> Mapping[str, str]:
        """Returns W3C's `traceparent`, and `tracestate` if the caller sent one."""
        found: dict[str, str] = {}
        self._context.inject(found, trace.set_span_in_context(root.span))
        return found

    def end(
        self, root: Root, spans: Sequence[Span], ended_s: float, attributes: Attributes, failure: str | None
    ) -> None:
        """Queues the spans of a request that has ended for the thread that sends them; does not block.

        `failure` is None if nothing failed, empty if the attributes describe the failure, else its description.
        """
        root.span.set_attributes(attributes)
        if failure is not None:
            root.span.set_status(StatusCode.ERROR, failure or None)
        self._add(spans, root, root.span)
        root.span.end(root.ns(ended_s))

    def close(self) -> None:
        """Sends the remaining spans; blocks for at most `LEAVE_MS`."""
        self._provider.force_flush(LEAVE_MS)
        self._provider.shutdown()

    def _add(self, spans: Sequence[Span], root: Root, parent: trace.Span) -> None:
        context = trace.set_span_in_context(parent)
        for each in spans:
            span = self._tracer.start_span(
                each.name, context, attributes=each.attributes, start_time=root.ns(each.begin_s)
            )
            self._add(each.children, root, span)
            if each.error is not None:
                span.set_status(StatusCode.ERROR, each.error)
            span.end(root.ns(each.end_s))


def otlp_exporter(settings: TracingSettings, application: str) -> OtlpExporter:
    """Creates an exporter from the settings, and from the SDK's environment variables for what they leave out."""
    ratio = _ratio(settings)
    sampler = None if ratio is None else ParentBased(ALWAYS_ON)  # `OtlpExporter` samples requests without a parent
    provider = TracerProvider(sampler=sampler, resource=_resource(settings, application))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=traces_url(settings.endpoint))))
    return OtlpExporter(provider, ratio, random.Random())


def _ratio(settings: TracingSettings) -> float | None:
    """Returns the sampled share; None if only the environment names a sampler."""
    if settings.ratio is None and "OTEL_TRACES_SAMPLER" in os.environ:
        return None
    return DEFAULT_RATIO if settings.ratio is None else settings.ratio


def _resource(settings: TracingSettings, application: str) -> Resource:
    found = Resource.create({} if settings.service_name is None else {SERVICE_NAME: settings.service_name})
    if str(found.attributes[SERVICE_NAME]).startswith(NAMELESS):
        return found.merge(Resource({SERVICE_NAME: application}))
    return found


def traces_url(endpoint: str | None) -> str | None:
    """Returns the URL that spans are posted to; None if the SDK reads it from its environment."""
    if endpoint is None:
        return None
    path = urlsplit(endpoint).path.rstrip("/")
    return endpoint if path else endpoint.rstrip("/") + TRACES
