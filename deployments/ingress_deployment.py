"""The ingress: HTTP in, batches out, answers back."""

from __future__ import annotations

import asyncio
import collections
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.routing import Router

from deployments.api.access import gate_of
from deployments.api.endpoint import Bodies
from deployments.api.generation import GenerateRequest, GenerateService, Stream
from deployments.api.http import build_api
from deployments.api.live_page import Feed, Viewer
from deployments.api.operations import OPERATION_BY_RPC
from deployments.api.parsing import InferRequest, Signature
from deployments.api.server import HttpServer, Site, standalone, start_in_serve
from deployments.api.service import InferService
from deployments.controller.intake import latency_s
from deployments.ingress.build import build_core, encode_of
from deployments.ingress.core.calls import IngressCounts, latencies_within
from deployments.ingress.core.generation import GenerationLoop
from deployments.ingress.core.ingress_core import own_plan
from deployments.ingress.dispatcher import Dispatcher
from deployments.ingress.link import ReplicaLink, ReplicaLinks
from deployments.local_ray.ports import take_listener
from deployments.local_ray.private import bind_calls, replace_http_server
from deployments.metrics import SECONDS, Told
from deployments.ops.dashboard import ServiceFacts, SnapshotPoller, ask_service, image_facts
from deployments.ops.prometheus import metrics_text
from deployments.process_setup import Supervised, settle
from deployments.settings import ServeSettings, first_replicas
from deployments.versions.choice import Tally
from deployments.versions.repository import RayCluster, VersionRoutes
from deployments.versions.versions import IngressLink, RayStore, VersionFacts, Versions
from deployments.wire.controller_link import ControllerLink, Handles
from deployments.wire.directory import board_of
from deployments.wire.messages import IngressReport
from earlyexit.clock import MonotonicClock, WallClock
from earlyexit.codecs import find_codec
from earlyexit.codecs.prompt import PromptCodec
from earlyexit.errors import InputError, OfframpError, PlanError, StageUnavailableError
from earlyexit.network.boundary import Answer
from earlyexit.network.chain import Chain
from earlyexit.network.store import ModelCard, read_card
from earlyexit.tasks import find_task
from earlyexit.tasks.token import TokenTask
from optimizer.placement import deployment_name, parse_placed

if TYPE_CHECKING:
    from deployments.api.grpc.server import Rpcs

TELL_S = 1.0
"""How often Ray is told what was counted."""

logger = logging.getLogger(f"ray.serve.{__name__}")


class IngressMetrics:
    """The requests, inputs and answers of an ingress; `tell` passes the totals to Ray, once a second.

    A call to Ray per request cost an ingress 3 % of its time. Latencies are counters by `le`, because one of Ray's
    histograms takes every answer alone: 4 us here and more in Ray's agent.
    """

    def __init__(self, chain: Chain) -> None:
        """`chain`: the networks of the model that answers."""
        self._chain = chain
        self._lengths = {1}
        """Length classes of inputs that waited. The shortest is always there, so that the metric exists at once."""
        self.finished: collections.Counter[tuple[str, int]] = collections.Counter()
        """Requests by route and status; those over gRPC by the status that HTTP has for the same."""
        self.told = Told()

    def tell(self, report: IngressReport, counts: IngressCounts, hops: collections.deque[tuple[str, float]]) -> None:
        """Tell Ray what has come since the last time.

        `report` and `counts`: those of the ingress's core; `hops`: the dispatcher's, which are taken.
        """
        total, level = self.told.total, self.told.level
        for (route, status), number in self.finished.items():
            total("offramp_requests", "Requests, by route and status", number, route=route, status=str(status))
        for block, number in counts.all_exits.items():
            where = {"exit": str(block), "network": self._chain.name_of(block)}
            total("offramp_answers", "Answers, by the block they left after", number, **where)
        for reason, number in report.drops.items():
            total("offramp_drops", "Inputs without an answer, by reason", number, reason=reason)
        for slot, number in counts.retries.items():
            total("offramp_retries", "Inputs sent again because a replica failed", number, slot=slot)
        while hops:
            slot, seconds = hops.popleft()
            self.told.observe("offramp_hop_seconds", "Time a call spent outside its stage", SECONDS, seconds, slot=slot)
        total("offramp_inputs", "Inputs that arrived, refused ones too", report.arrived)
        total("offramp_answers_in_slo", "Answers inside the SLO; all of them where there is none", report.in_slo)
        _tell_times(self.told, "offramp_latency_seconds_bucket", "Answers by latency, at most `le`", report.latencies)
        total("offramp_answered_tokens", "Tokens of answered inputs", report.answered_tokens)
        for name, description, totals in (
            ("offramp_crossings", "Inputs that went on to another network", report.crossings),
            ("offramp_crossing_seconds", "Time inputs waited to be encoded anew", report.crossing_s),
            ("offramp_words", "Words that could be pruned at a crossing", report.words),
            ("offramp_pruned_words", "Words pruned at a crossing", report.pruned_words),
        ):
            for block, amount in totals.items():
                total(name, description, amount, network=self._chain.name_of(block))
        level("offramp_waiting", "Inputs that no stage has been sent yet", report.waiting)
        level("offramp_unanswered", "Inputs that wait or are under way", report.unanswered)
        level("offramp_unanswered_tokens", "Tokens of inputs that wait or are under way", report.unanswered_tokens)
        self._lengths |= report.oldest_s.keys()
        oldest = "offramp_oldest_wait_seconds", "Longest wait of inputs that no stage has been sent yet"
        for length in self._lengths:
            level(*oldest, report.oldest_s.get(length, 0.0), tokens=str(length))


def tell_sequences(told: Told, loop: GenerationLoop) -> None:
    """Tell Ray what has come of sequences since the last time."""
    total, counts = told.total, loop.counts
    told.level("offramp_sequences_running", "Sequences that were let in and have not ended", loop.num_running)
    for reason, number in counts.ended.items():
        total("offramp_sequences_ended", "Sequences that ended, by why", number, ended=reason)
    total("offramp_sequences_refused", "Sequences whose SLOs could not be kept", counts.refused)
    total("offramp_sequences_in_slo", "Sequences that ended by themselves, both SLOs kept", counts.in_slo)
    total("offramp_sequences_lost", "Times that a sequence began anew on another replica", counts.lost)
    total("offramp_sequences_probed", "Sequences that ended and were probes", counts.probes)
    total("offramp_prompt_tokens", "Tokens of prompts that were let in", counts.prompt_tokens)
    for block, number in counts.exits.items():
        total("offramp_generated_tokens", "Tokens, by the block they left after", number, exit=str(block))
    _tell_times(told, "offramp_ttft_seconds_bucket", "Sequences by time to first token", counts.ttft)
    _tell_times(told, "offramp_tpot_seconds_bucket", "Sequences by time per output token", counts.tpot)


class VersionMetrics:
    """Tells Ray about once a second what was counted."""

    def __init__(self) -> None:
        self._shown = Tally()
        self.told = Told()

    def show(self, tally: Tally) -> None:
        """Adds what a tally has counted since the last time; a new tally starts at zero."""
        if tally is not self._shown:
            self._shown = tally
            self.told.totals.clear()
        for outcome, total in (tally.inputs | {"failed": tally.failed}).items():
            self.told.total("offramp_version_compared", "Inputs that two versions answered", total, outcome=outcome)
        asked = "offramp_version_requests", "Requests without a version, by answering version"
        slow = "offramp_version_latency_seconds", "Latency by version, since its figures began"
        for version, each in tally.versions.items():
            for status, count in each.requests.items():
                self.told.total(*asked, count, version=version, status=status)
            for share in (0.5, 0.99):
                self.told.level(*slow, latency_s(each.latencies, share), version=version, quantile=f"{share:g}")


def _tell_times(told: Told, name: str, description: str, buckets: Mapping[int, int]) -> None:
    for le, number in latencies_within(buckets).items():
        told.total(name, description, number, le=le)


class RpcMethods:
    """A method for each RPC of the table of operations, for the ingress to inherit; gRPC is loaded at the first RPC."""


def _method(name: str) -> Callable[[Any, bytes, Any], Awaitable[Any]]:
    async def call(ingress: Any, request: bytes, grpc_context: Any) -> Any:
        return await ingress.rpcs.call(name, request, grpc_context)

    return call


for _name in OPERATION_BY_RPC:
    setattr(RpcMethods, _name, _method(_name))


@serve.ingress()
class Ingress(RpcMethods):
    """Holds every input until its answer is out. Needs no torch, and no controller once it has a plan."""

    def __init__(self, settings: dict[str, Any], *others: DeploymentHandle[Any]) -> None:
        """`others`: every accelerator type's replicas; the controller may be among them, but is asked by its name."""
        bind_calls()
        self._settings = ServeSettings.model_validate(settings)
        handles = {each.deployment_name: each for each in others}
        self._handles = {device: handles[deployment_name(device)] for device in first_replicas(self._settings)}
        self._clock = MonotonicClock()
        self._outright: HttpServer | None = None
        self._gate = gate_of(self._settings.access, self._clock, self._settings.ingress_replicas)
        self._controller = None if self._settings.control is None else ControllerLink(self._settings.app)
        self._background = Supervised()
        self._started = asyncio.Event()
        self._ready = False
        folder = Path(self._settings.model)
        self.card: ModelCard = read_card(folder)
        self._metrics = IngressMetrics(self.card.chain)
        self.task = find_task(self.card.task)
        codec = find_codec(self.card.codec, folder)
        self.signature = Signature(codec, self.task)
        self._tracer = None
        if self._settings.tracing is not None:
            from deployments.ops.tracing import build_tracer  # with all of OpenTelemetry

            self._tracer = build_tracer(self._settings.tracing, self._settings.app, self._clock, self.card.chain.starts)
        self._core = build_core(self._settings, self.card)
        link = ReplicaLink if self._tracer is None else self._tracer.link
        self._links = ReplicaLinks(self._core.placed, self._handles, phase=random.random(), link=link)
        self._dispatcher = Dispatcher(self._core, self._links, self._clock, codec=codec)
        self._everyone = Handles(self._settings.app)
        self._feed = self._build_feed()
        trace = None if self._tracer is None else self._tracer.follow
        encode = encode_of(codec, self._core)
        self._service = InferService(
            codec,
            self._dispatcher,
            self._settings,
            self._clock,
            inputs=self.card.inputs if self.card.chain.is_one else None,  # a chain's codec checks them itself
            trace=trace,
            encode=encode,
        )
        self._generation: GenerateService | None = None
        if isinstance(codec, PromptCodec) and isinstance(self.task, TokenTask):
            tokenizer, longest, dispatcher = codec.tokenizer, codec.max_length, self._dispatcher
            self._generation = GenerateService(
                tokenizer, self.task, longest, dispatcher, self._settings, self._clock, trace=trace
            )
        self.version = self._settings.version
        self.bodies = Bodies(self._settings.max_body_bytes, self._settings.max_held_bytes)
        self.versions = Versions(self, self._settings, RayStore(), IngressLink, self._clock, VersionMetrics().show)

    def _build_feed(self) -> Feed:
        settings = self._settings
        facts = ServiceFacts(
            model=self.card.name,
            chain=self.card.chain,
            slo_s=settings.slo_s,
            emulated={device: emulated.time_scale for device, emulated in settings.emulated.items()},
            image=image_facts(self.signature.codec),
            generates=self.card.generates,
        )
        return Feed(
            SnapshotPoller(facts, self._core, self._everyone.ask, self._controller, WallClock()).event, self._clock
        )

    def __serve_build_asgi_app__(self) -> Router:
        settings = self._settings
        self._background.start("start", self._start())
        if self._gate is not None and self._gate.ring is not None:
            self._background.start("read keys", self._gate.ring.watch())
        self._background.start("tell metrics", self._keep_telling())
        self._background.start("follow versions", self.versions.run())
        api = build_api(
            self,
            VersionRoutes(self, self.versions, RayCluster(), settings.repository.folder),
            gate=self._gate,
            cors_origins=() if settings.access is None else settings.access.cors_origins,
            tracer=self._tracer,
            prefix=settings.route_prefix,
        )
        if settings.listener is None:
            lane = {} if settings.access_log else api.lane  # Serve writes that log
            replace_http_server(partial(start_in_serve, lane))
        else:
            site = Site(router=api.router, prefix=settings.route_prefix, name=settings.app)
            self._outright = standalone(site, api.lane, access_log=settings.access_log)
            self._background.start("listen", self._outright.serve([take_listener(settings.listener)]))
        return api.router

    @cached_property
    def rpcs(self) -> Rpcs:
        from deployments.api.grpc.server import Rpcs

        return Rpcs(self, self._gate, self._tracer)

    def check_health(self) -> None:
        """Serve asks every second. An ingress whose background work has ended must be replaced."""
        self._background.check()

    async def _start(self) -> None:
        """Learn the present plan, then wait until every stage of it has a replica."""
        for device, handle in self._handles.items():
            handle._init()  # type: ignore[no-untyped-call] # from now on Serve tells what replicas there are
            self._links.connect(device, board_of(deployment_name(device)))
        try:
            document = None if self._controller is None else await self._controller.current()
            if document is not None:
                await self.follow(document)
        except PlanError as error:
            logger.warning("the controller's plan cannot be followed, the settings' is: %s", error)
        finally:
            self._started.set()
        await self._links.ready()  # a replica takes calls only after its warm-up
        settle()
        self._ready = True

    async def _keep_telling(self) -> None:
        while True:
            await asyncio.sleep(TELL_S)
            self._metrics.tell(self._peek(), self._core.counts, self._dispatcher.hops)
            if self._generation is not None:
                tell_sequences(self._metrics.told, self._generation.loop)

    async def __del__(self) -> None:
        """Serve's way to end a replica that gets no more requests."""
        self._feed.close()  # viewers of the page would stay
        if self._outright is not None:
            await self._outright.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    @property
    def max_timeout_s(self) -> float:
        return self._settings.max_timeout_s

    def is_ready(self) -> bool:
        """Whether every stage of a plan had a replica once."""
        return self._ready

    async def infer(self, request: InferRequest) -> list[Answer]:
        await self._started.wait()  # the settings' plan may be long past
        return await self._service.infer(request)

    async def generate(self, request: GenerateRequest) -> Stream:
        """Begin a sequence; raises what `GenerateService.start` does, and InputError of a model that generates none."""
        await self._started.wait()
        if self._generation is None:
            raise InputError(f"model {self.card.name!r} generates no text")
        return self._generation.start(request)

    async def answer(self, request: InferRequest) -> list[Answer] | OfframpError:
        """Another version's ingress asks; an error is a value, so that it arrives as what it is."""
        try:
            return await self.infer(request)
        except OfframpError as error:
            return error

    async def facts(self) -> VersionFacts:
        """For the ingresses of other versions."""
        return VersionFacts(card=self.card, version=self.version, agreement=self._core.agreement)

    async def tally(self) -> Tally:
        """What this ingress has counted of default and canary."""
        return self.versions.tally

    def count_request(self, route: str, status: int) -> None:
        self._metrics.finished[route, status] += 1

    async def follow(self, document: dict[str, Any]) -> int:
        """Go by a placed plan, or by none where the document only holds a `reason`; the epoch that is followed now.

        Raises PlanError for what is no plan of this application; an older plan than the present is ignored.
        """
        if "plan" in document:
            self._dispatcher.follow(placed := parse_placed(document))
            if self._generation is not None:
                self._generation.follow(placed)
        else:
            self._dispatcher.suspend(str(document.get("reason", "the controller has none")))
        return self._core.placed.epoch

    async def report(self) -> IngressReport:
        """Counts so far; what was seen of probes, and of inputs that stayed, is handed over with it."""
        return self._core.report(self._clock.now_s(), time.time())

    async def peek(self) -> IngressReport:
        """The same without observations, which are kept here, so that a viewer takes none from the controller."""
        return self._peek()

    def _peek(self) -> IngressReport:
        return self._core.peek(self._clock.now_s(), time.time())

    def watch(self) -> Viewer:
        return self._feed.join()

    async def plan(self) -> dict[str, Any]:
        """The plan in force: what the controller says of it or, where there is none, our own.

        Raises ControllerUnavailableError.
        """
        if self._controller is not None:
            return await self._controller.describe()
        return own_plan(self._core.placed, self._settings.hop_dtype)

    async def plan_history(self, limit: int) -> list[dict[str, Any]]:
        """The controller's plans so far; none without a controller. Raises ControllerUnavailableError."""
        return [] if self._controller is None else await self._controller.history(limit)

    async def metrics(self) -> str:
        """Returns what all ingresses and replicas count, for Prometheus; raises StageUnavailableError."""
        ingresses, replicas = await ask_service(self._everyone.ask, self._core.placed.occupied)
        if ingresses is None:
            raise StageUnavailableError("the ingresses do not say what they count", retry_after_s=1.0)
        return metrics_text(ingresses, replicas, self.card.chain)

    async def stats(self) -> dict[str, Any]:
        """What the replicas of the plan's stages have done since their start, and what waits here."""
        placed, replicas = self._core.placed, list[Any]()
        for device in placed.occupied:
            replicas += await self._everyone.ask(deployment_name(device), "stats") or ()
        return {
            "model": self.card.name,
            "ingress_pid": os.getpid(),
            "epoch": placed.epoch,
            "suspended": self._core.suspended,
            "unanswered": self._core.num_unanswered,
            "probe_agreement": self._core.agreement,
            "crossings": {
                "inputs": self._core.counts.crossings.total(),
                "p50_s": latency_s(self._core.counts.crossed_in, 0.5),
                "p99_s": latency_s(self._core.counts.crossed_in, 0.99),
            },
            "stages": [[each for each in replicas if each["slot"] == slot] for slot in placed.slots],
        }
