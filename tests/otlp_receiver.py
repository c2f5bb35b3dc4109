"""An OpenTelemetry collector for tests, which keeps the spans that it receives."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from gzip import decompress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

ERROR = 2
"""The protocol's number of a span's error status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A received span, and the spans inside it, ordered by their begin."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    trace_state: str
    begin_s: float
    seconds: float
    attributes: dict[str, Any]
    failed: bool
    said: str
    service: str
    children: list[Received] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [child.name for child in self.children]

    def named(self, name: str) -> list[Received]:
        """Returns the spans inside with this name, at any depth."""
        below = [found for child in self.children for found in child.named(name)]
        return [child for child in self.children if child.name == name] + below


class Receiver:
    """Receives the requests of an OTLP/HTTP exporter."""

    def __init__(self, port: int = 0) -> None:
        self._spans: list[Received] = []
        self.headers: list[dict[str, str]] = []
        self.paths: set[str] = set()
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    @contextmanager
    def running(self) -> Iterator[Receiver]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def requests(self) -> list[Received]:
        """Returns the roots of all traces so far, with the spans inside them, ordered by their begin."""
        with self._lock:
            spans = sorted(self._spans, key=lambda span: span.begin_s)
        inside: defaultdict[str, list[Received]] = defaultdict(list)
        for span in spans:
            span.children.clear()
            inside[span.parent_id].append(span)
        for span in spans:
            span.children.extend(inside[span.span_id])
        known = {span.span_id for span in spans}
        return [span for span in spans if span.parent_id not in known]

    def wait_for(self, count: int, patience_s: float) -> list[Received]:
        """Waits for at least this number of traces; returns those that arrived in time."""
        until_s = time.monotonic() + patience_s
        while len(found := self.requests()) < count and time.monotonic() < until_s:
            time.sleep(0.1)  # another process sends them
        return found

    def _take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self._lock:
            for resource in request.resource_spans:
                service = str(_attributes(resource.resource.attributes)["service.name"])
                for scope in resource.scope_spans:
                    self._spans.extend(_received(span, service) for span in scope.spans)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.paths.add(self.path)
                receiver.headers.append({name.lower(): value for name, value in self.headers.items()})
                receiver._take(decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 # the name in the base class
                pass

        return Handler


def _received(span: Any, service: str) -> Received:
    return Received(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        trace_state=span.trace_state,
        begin_s=span.start_time_unix_nano / 1e9,
        seconds=(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
        attributes=_attributes(span.attributes),
        failed=span.status.code == ERROR,
        said=span.status.message,
        service=service,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
