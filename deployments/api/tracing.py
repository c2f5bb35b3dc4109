"""Where an ingress that traces differs from one that does not: its endpoints and its links."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from deployments.api.endpoint import GONE, REQUEST_ID, Backend, Endpoint, EndpointOf
from deployments.api.operations import TRACED, Handler
from deployments.ingress.crossing import LiveFlight
from deployments.ingress.link import LinkTo, ReplicaLink
from deployments.ops.tracing.tracer import Tracer
from deployments.settings import ServeSettings
from deployments.wire.messages import Address, Chunk, StageCall
from earlyexit.clock import Clock
from earlyexit.errors import InputError

SERVER_ERROR = 500


class TracedEndpoint(Endpoint):
    """Traces the requests that post something: inference."""

    def __init__(self, tracer: Tracer, backend: Backend, path: str, handlers: Mapping[str, Handler]) -> None:
        super().__init__(backend, path, handlers)
        self._tracer = tracer
        self._traced = path in TRACED

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._traced:
            return await super().__call__(scope, receive, send)
        request = Request(scope, receive)
        attributes = {"http.request.method": "POST", "http.route": self._path}
        record = self._tracer.begin(f"POST {self._path}", attributes, request.headers)
        if record is None:
            return await super().__call__(scope, receive, send)
        status: int | None = None
        try:
            response = await self._respond(request)
            status = response.status_code
            self._backend.count_request(self._path, status)
            response.headers.update(self._tracer.headers(record))
            await response(scope, receive, send)
        finally:
            self._backend.bodies.release(scope)
            self._tracer.end(
                record,
                {} if status is None else {"http.response.status_code": status},
                scope.get(REQUEST_ID),
                failure=failure_of(status),
            )
        return None


def failure_of(status: int | None) -> str | None:
    """What a trace says of a response; by the convention, what the caller did wrong is no error of a server."""
    if status is None or status == GONE:
        return "the caller left before the response"
    return "" if status >= SERVER_ERROR else None


class TracedLink(ReplicaLink):
    """Notes the calls with inputs of sampled requests."""

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
        except BaseException as error:  # a call that is cancelled has failed too
            traced.fail(repr(error))
            raise
        return None


class Tracing:
    """What an ingress that traces puts in the place of its own."""

    def __init__(self, tracer: Tracer, close: Callable[[], None]) -> None:
        """`close` sends what is left; it may block for a moment."""
        self.tracer = tracer
        self.close = close

    @property
    def endpoint(self) -> EndpointOf:
        return partial(TracedEndpoint, self.tracer)

    def link(self, slot: str) -> LinkTo:
        return partial(TracedLink, self.tracer, slot)

    def follow(self, flights: Sequence[LiveFlight]) -> None:
        self.tracer.follow(flights)


def start_tracing(settings: ServeSettings, clock: Clock, starts: Collection[int] = ()) -> Tracing | None:
    """None where the settings ask for none, and then OpenTelemetry is not loaded.

    `starts`: the blocks that networks of a chain begin with.
    """
    if settings.tracing is None:
        return None
    from deployments.ops.tracing.otlp import otlp_exporter

    exporter = otlp_exporter(settings.tracing, settings.app)
    return Tracing(Tracer(exporter, clock, starts), exporter.close)


def check_tracing(settings: ServeSettings) -> None:
    """Raise InputError where traces are asked for and what sends them is not installed."""
    if settings.tracing is None:
        return
    try:
        import opentelemetry.exporter.otlp.proto.http  # noqa: F401 # only whether it is there
    except ImportError as error:
        raise InputError(
            "tracing needs OpenTelemetry's exporter over OTLP/HTTP: install Offramp with its extra 'tracing', "
            f"pip install '.[tracing]' ({error})"
        ) from error
