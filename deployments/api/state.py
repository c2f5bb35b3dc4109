"""The routes on the service's state: counts, plans and metrics, and the live page with its stream of events."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from functools import cache, partial
from hashlib import sha256
from importlib.resources import files
from itertools import chain
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response

from deployments.api.exchange import EVENT_HEADERS, EventStream, HttpRequest
from deployments.api.operations import LIMIT, MAX_DIGITS
from deployments.ingress.core.ingress_core import IngressCore
from deployments.ops.dashboard import SHARES_S, ServiceFacts, Snapshot, page_state, within
from deployments.ops.prometheus import CONTENT_TYPE, metrics_text
from deployments.wire.controller_link import CONTROLLER, ControllerLink
from deployments.wire.messages import IngressReport, ReplicaReport
from earlyexit.clock import Clock
from earlyexit.errors import (
    ControllerUnavailableError,
    InputError,
    OverloadedError,
    StageUnavailableError,
    UnknownPathError,
)
from optimizer.plans.plan import deployment_name
from optimizer.plans.plan_file import placed_document

PERIOD_S = 1.0
POLL_TIMEOUT_S = 10.0
"""Timeout of an update, in seconds. Viewers then get an error event, because proxies close idle connections."""
MAX_VIEWERS = 16
RETRY_S = 10.0
MAX_CONNECTED_S = 600.0
"""Viewers must reconnect after this time. This limits what a proxy buffers, and moves viewers to new ingresses."""
FAILURE_EVENT = b'event: trouble\ndata: {"words": "the service\'s state is not available; see the ingress log"}\n\n'

logger = logging.getLogger(f"ray.serve.{__name__}")


@dataclass(slots=True, eq=False)
class LivePage:
    """Handlers of the live page, and its viewers at one ingress. They share each event, and a slow one skips some."""

    produce: Callable[[], Awaitable[bytes | None]]
    """Returns the newest event; None if there are no more events."""
    clock: Clock
    _: KW_ONLY
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    max_viewers: int = MAX_VIEWERS
    max_connected_s: float = MAX_CONNECTED_S
    viewers: set[object] = field(default_factory=set, init=False)
    _newest: asyncio.Task[bytes | None] | None = field(default=None, init=False)
    """The task that produces the newest event; None before the first viewer."""
    _newest_s: float = field(default=0.0, init=False)
    """When the newest event was requested."""
    _closed: bool = field(default=False, init=False)

    async def page(self, request: HttpRequest) -> Response:
        """Answers with the page."""
        return _respond(request, PAGE)

    async def asset(self, request: HttpRequest) -> Response:
        """Answers with a file that the page loads; raises UnknownPathError."""
        name = request.path_params["asset"]
        if name == PAGE or name not in assets():
            raise UnknownPathError(f"{request.target}: there is no such path; see /openapi.json")
        return _respond(request, name)

    async def events(self, request: HttpRequest) -> Response:
        """Answers with the event stream; raises OverloadedError for too many viewers, or while the ingress stops."""
        if request.method == "HEAD":
            return Response(media_type="text/event-stream", headers=EVENT_HEADERS)
        if self._closed:
            raise OverloadedError("this ingress is shutting down; another one serves the page")
        if len(self.viewers) >= self.max_viewers:
            message = f"the page of this ingress has {self.max_viewers} viewers already"
            raise OverloadedError(message, retry_after_s=RETRY_S)
        viewer = object()
        self.viewers.add(viewer)
        return EventStream(self._events_for(viewer), partial(self.viewers.discard, viewer))

    def close(self) -> None:
        """Ends the streams of all viewers within a second, and accepts no more, because the ingress shuts down."""
        self._closed = True
        self.viewers.clear()
        if self._newest is not None:
            self._newest.cancel()

    async def _events_for(self, viewer: object) -> AsyncIterator[bytes]:
        """Yields an event per period, until the viewer has left or must reconnect."""
        until_s = self.clock.now_s() + self.max_connected_s
        while viewer in self.viewers and self.clock.now_s() < until_s:
            if self._newest is None or (self._newest.done() and self.clock.now_s() >= self._newest_s + PERIOD_S):
                self._newest, self._newest_s = asyncio.create_task(self._update()), self.clock.now_s()
            event = await asyncio.shield(self._newest)  # other viewers may wait for it, too
            if event is None:
                self.close()
                return
            yield event
            await self.sleep(max(0.0, self._newest_s + PERIOD_S - self.clock.now_s()))

    async def _update(self) -> bytes | None:
        try:
            async with asyncio.timeout(POLL_TIMEOUT_S):
                return await self.produce()
        except asyncio.CancelledError:  # by `close`
            return None
        except Exception:
            logger.exception("the live page could not be updated")
            return FAILURE_EVENT


PAGE = "page.html"
CONTENT_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page may load only files of this service."""
PAGE_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # browsers revalidate by ETag, so the page always has the service's version
}


@cache
def assets() -> Mapping[str, bytes]:
    """Returns the page's files by name. They are read once."""
    return {entry.name: entry.read_bytes() for entry in (files(__package__) / "assets").iterdir()}


def _respond(request: HttpRequest, name: str) -> Response:
    content = assets()[name]
    etag = f'"{sha256(content).hexdigest()[:16]}"'
    headers = PAGE_HEADERS | {"etag": etag}
    if etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=CONTENT_TYPES[name.rpartition(".")[2]], headers=headers)


CONTROLLER_S = 5.0
"""Interval between requests to the controller, in seconds, which is also the controller's own interval."""
MAX_CHANGES = 12
"""Most plans of the history on the page."""
MAX_MISSED = 2
"""After so many snapshots without itself, an ingress knows that it is being stopped. Serve does not notify it."""


def _limit(request: HttpRequest) -> int:
    schema = LIMIT["schema"]
    text = request.query_params.get("limit", str(schema["default"]))
    limit = int(text) if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS else 0
    if not schema["minimum"] <= limit <= schema["maximum"]:
        raise InputError(f"limit must be a number from 1 to {schema['maximum']} (got {text[:20]!r})")
    return limit


def _stats(report: ReplicaReport) -> dict[str, Any]:
    stats = {name: getattr(report, name) for name in ("replica", "node", "pid", "device", "slot", "epoch", "splits")}
    return stats if report.memory is None else {**stats, "memory": asdict(report.memory)}


@dataclass(slots=True, eq=False)
class StateRoutes:
    """Handlers of the operations on the service's state, and the events of the live page.

    An event is computed from the snapshots that rates and shares need.
    """

    facts: ServiceFacts
    ingress: IngressCore
    ask_all: Callable[[str, str], Awaitable[list[Any]]]
    """Calls a method of each running replica of a deployment; returns None in place of an answer that is missing."""
    controller: ControllerLink | None
    wall: Clock
    """Seconds since 1970."""
    _snapshots: Sequence[Snapshot] = field(default=(), init=False)
    _polled_s: float = field(default=-CONTROLLER_S, init=False)
    _reported: dict[str, Any] = field(default_factory=partial(dict, controller="none", described=None), init=False)
    """The last report of the controller, as fields of a snapshot."""
    _missed: int = field(default=0, init=False)
    _serial: int = field(default=0, init=False)

    async def stats(self, request: HttpRequest) -> object:
        """Returns the counts of the plan's replicas since they started, and the counts of this ingress."""
        placed = self.ingress.placed
        _, replicas = await self._ask_service()
        return {
            "model": self.facts.card.name,
            "ingress_pid": os.getpid(),
            "epoch": placed.epoch,
            "suspended": self.ingress.suspended,
            "unanswered": self.ingress.num_unanswered,
            "probe_agreement": self.ingress.observations.agreement,
            "stages": [[_stats(each) for each in replicas if each.slot == slot] for slot in placed.stage_of],
        }

    async def plan(self, request: HttpRequest) -> object:
        """Returns the controller's description of the plan in force, or our own if there is no controller."""
        if self.controller is not None:
            return await self.controller.ask("describe")
        return {**placed_document(self.ingress.placed), "hops": {"dtype": self.facts.settings.hop_dtype}}

    async def plan_history(self, request: HttpRequest) -> object:
        """Returns the controller's last plans, none without a controller."""
        limit = _limit(request)
        return [] if self.controller is None else await self.controller.ask("history", limit)

    async def metrics(self, request: HttpRequest) -> Response:
        """Answers with the metrics of all processes, for Prometheus; raises StageUnavailableError."""
        names = ["ingress", *self._stage_deployments] + ([] if self.controller is None else [CONTROLLER])
        ingresses, *others = await asyncio.gather(*(self.ask_all(each, "samples") for each in names))
        if ingresses and all(each is None for each in ingresses):
            raise StageUnavailableError("the ingresses do not report their metrics")
        processes = filter(None, chain(ingresses, *others))
        return Response(metrics_text(chain.from_iterable(processes)), headers={"content-type": CONTENT_TYPE})

    async def event(self) -> bytes | None:
        """Returns the page's present state as a server-sent event; None if this ingress is being stopped."""
        ingresses, replicas = await self._ask_service()
        await self._poll_controller()
        if ingresses is not None:
            is_listed = any(report.name == self.ingress.name for report in ingresses)
            self._missed = 0 if is_listed else self._missed + 1
        if self._missed >= MAX_MISSED:
            return None
        snapshot = Snapshot(
            at_s=self.wall.now_s(),
            placed=self.ingress.placed,
            suspended=self.ingress.suspended,
            ingresses=ingresses or (),
            replicas=replicas,
            agreement=self.ingress.observations.agreement,
            **self._reported,
        )
        self._snapshots = within([*self._snapshots, snapshot], SHARES_S)
        self._serial += 1
        state = page_state(self.facts, self._snapshots) | {"serial": self._serial}
        return b"retry: 2000\nevent: state\ndata: " + to_json(state, inf_nan_mode="null") + b"\n\n"

    async def _ask_service(self) -> tuple[list[IngressReport] | None, list[ReplicaReport]]:
        """Returns the reports of all ingresses, or None if one is missing, and of the replicas on the plan's types."""
        ingresses, *of_types = await asyncio.gather(
            self.ask_all("ingress", "peek"), *(self.ask_all(each, "report") for each in self._stage_deployments)
        )
        # Counts of an ingress that was left out would seem to begin at its next report.
        return None if None in ingresses else ingresses, [*filter(None, chain(*of_types))]

    @property
    def _stage_deployments(self) -> list[str]:
        return [deployment_name(device) for device in self.ingress.placed.occupied]

    async def _poll_controller(self) -> None:
        now_s = self.wall.now_s()
        if self.controller is None or 0 <= now_s - self._polled_s < CONTROLLER_S:
            return
        self._polled_s = now_s
        try:
            ask = self.controller.ask
            described, history = await asyncio.gather(ask("describe"), ask("history", MAX_CHANGES))
            self._reported = {"controller": "answers", "described": described, "history": history}
        except ControllerUnavailableError:  # the page shows this; a log message would repeat every few seconds
            self._reported["controller"] = "silent"
