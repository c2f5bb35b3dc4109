"""The ingress deployment: it answers HTTP and gRPC requests, and sends batches of their inputs to replicas."""

from __future__ import annotations

import asyncio
import collections
import gc
import logging
import math
import random
from collections.abc import Awaitable, Callable
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from deployments.api.access import Gate
from deployments.api.exchange import RequestBodies
from deployments.api.generation import GenerateRequest, GenerateService, Stream
from deployments.api.http import build_api
from deployments.api.operations import OPERATION_BY_RPC, InferRequest, Signature
from deployments.api.server import HttpServer, below_prefix, start_in_serve, with_access_log
from deployments.api.service import InferService
from deployments.api.state import LivePage, StateRoutes
from deployments.ingress.build import build_core
from deployments.ingress.core.calls import latencies_within
from deployments.ingress.core.generation import GenerationLoop
from deployments.ingress.core.ingress_core import IngressCore
from deployments.ingress.core.inputs import Chains
from deployments.ingress.dispatcher import Dispatcher, ReplicaLinks
from deployments.local_ray.ports import take_listener
from deployments.local_ray.private import DeploymentHandles, bind_calls, replace_http_server
from deployments.metrics import SECONDS, LazyMetrics
from deployments.ops.dashboard import ServiceFacts, image_facts
from deployments.ops.prometheus import Sample
from deployments.process_setup import BackgroundTasks
from deployments.settings import ServeSettings, initial_replicas
from deployments.versions.repository import VersionRoutes
from deployments.versions.traffic import Tally
from deployments.versions.versions import IngressLink, RayCluster, VersionFacts, Versions
from deployments.wire.controller_link import ControllerLink
from deployments.wire.directory import directory_of
from deployments.wire.messages import IngressReport, latency_s
from earlyexit.clock import MonotonicClock, WallClock
from earlyexit.codecs import find_codec
from earlyexit.codecs.prompt import PromptCodec
from earlyexit.errors import InputError, OfframpError, PlanError
from earlyexit.network.boundary import Answer
from earlyexit.network.chain import ModelChain
from earlyexit.tasks import find_task
from earlyexit.tasks.token import TokenTask
from optimizer.plans.plan import PlacedPlan, deployment_name

if TYPE_CHECKING:
    from deployments.api.grpc.server import Rpcs

EXPORT_S = 1.0
"""Interval at which counts are exported to Ray, in seconds."""

logger = logging.getLogger(f"ray.serve.{__name__}")


class IngressMetrics(LazyMetrics):
    """The metrics of an ingress. `export` passes the totals to Ray once a second, because a call per request is slow.

    Latencies are counters with a label `le`, because a histogram of Ray's needs one call per answer.
    """

    def __init__(self, model_chain: ModelChain) -> None:
        super().__init__()
        self._model_chain = model_chain
        self.finished: collections.Counter[tuple[str, int]] = collections.Counter()
        """Requests by route and HTTP status. Requests over gRPC count under the corresponding HTTP status."""
        self._tally, self._earlier = Tally(), Tally()
        """The present comparison of versions, which began at zero, and the sum of all earlier ones."""

    def export(self, core: IngressCore, now_s: float, hops_s: dict[str, list[float]]) -> None:
        """Exports the core's counts since the last export. `hops_s` is the dispatcher's, and is emptied."""
        counts, set_total, set_gauge, set_totals = core.counts, self.set_total, self.set_gauge, self.set_totals
        for (route, status), number in self.finished.items():
            set_total("offramp_requests", "Requests, by route and status", number, route=route, status=str(status))
        for block, number in counts.exits.items():
            where = {"exit": str(block), "network": self._model_chain.name_of(block)}
            set_total("offramp_answers", "Answers, by the block they left after", number, **where)
        set_totals("offramp_drops", "Inputs without an answer, by reason", counts.drops, "reason")
        set_totals("offramp_retries", "Inputs sent again because a replica failed", counts.retries, "slot")
        for slot, each in hops_s.items():
            self.observe("offramp_hop_seconds", "Time a call spent outside its stage", SECONDS, each, slot=slot)
        hops_s.clear()
        set_total("offramp_inputs", "Inputs that arrived, including refused ones", counts.arrived)
        set_totals("offramp_assigned_inputs", "Inputs that were not refused, by chain", counts.assigned, "chain")
        set_total("offramp_answers_in_slo", "Answers inside the SLO; all answers without an SLO", counts.in_slo)
        latencies = latencies_within(counts.latencies)
        set_totals("offramp_latency_seconds_bucket", "Answers by latency, at most `le`", latencies, "le")
        set_total("offramp_answered_tokens", "Tokens of answered inputs", counts.answered_tokens)
        for name, description, totals in (
            ("offramp_crossings", "Inputs that were passed to another network", counts.crossings),
            ("offramp_crossing_seconds", "Time inputs waited to be encoded again", counts.crossing_s),
            ("offramp_words", "Words that could be pruned at a crossing", counts.words),
            ("offramp_pruned_words", "Words pruned at a crossing", counts.pruned_words),
        ):
            for block, amount in totals.items():
                set_total(name, description, amount, network=self._model_chain.name_of(block))
        set_gauge("offramp_ingress_plan_epoch", "The plan that the ingress follows", core.placed.epoch)
        set_gauge("offramp_waiting", "Inputs that were not sent to any stage yet", core.num_waiting)
        self._export_chains(core.chains, now_s)

    def _export_chains(self, chains: Chains, now_s: float) -> None:
        """Exports the queues and the loads of the plan's chains."""
        oldest = "offramp_oldest_wait_seconds", "Longest wait of inputs that were not sent to any stage yet"
        self.set_gauges(*oldest, {1: 0.0} | chains.oldest_s(now_s), "tokens")  # exists from the start
        active, usable = chains.active, chains.usable
        limits = [each.admission.limit if each in usable else 0.0 for each in active]
        finite = (0.0 if math.isinf(limit) else limit for limit in limits)  # Ray drops infinite values
        for name, description, by_chain in (
            ("offramp_unanswered", "Inputs that wait or are in flight", (each.num_unanswered for each in active)),
            ("offramp_unanswered_tokens", "Tokens of these inputs", (each.unanswered_tokens for each in active)),
            ("offramp_admission_limit", "Most unanswered inputs, or tokens; 0: no limit", finite),
        ):
            self.set_gauges(name, description, dict(enumerate(by_chain)), "chain")

    def export_sequences(self, loop: GenerationLoop) -> None:
        """Exports the counts of generated sequences."""
        set_total, set_totals, counts = self.set_total, self.set_totals, loop.counts
        running = "offramp_sequences_running", "Sequences that were admitted and have not ended"
        self.set_gauge(*running, loop.num_running)
        set_totals("offramp_sequences_ended", "Sequences that ended, by reason", counts.ended, "ended")
        set_total("offramp_sequences_refused", "Sequences whose SLOs could not be kept", counts.refused)
        set_total("offramp_sequences_in_slo", "Sequences that completed within both SLOs", counts.in_slo)
        set_total("offramp_sequences_lost", "Times that a sequence started again on another replica", counts.lost)
        set_total("offramp_sequences_probed", "Sequences that ended and were probes", counts.probes)
        set_total("offramp_prompt_tokens", "Tokens of admitted prompts", counts.prompt_tokens)
        set_totals("offramp_generated_tokens", "Tokens, by the block they left after", counts.exits, "exit")
        ttft, tpot = latencies_within(counts.ttft), latencies_within(counts.tpot)
        set_totals("offramp_ttft_seconds_bucket", "Sequences by time to first token", ttft, "le")
        set_totals("offramp_tpot_seconds_bucket", "Sequences by time per output token", tpot, "le")

    def export_versions(self, tally: Tally) -> None:
        """Exports the counts of all comparisons of versions so far, and the latencies of the present one, else 0."""
        if tally is not self._tally:
            self._earlier.add(self._tally)
            self._tally = tally
        total = Tally()
        total.add(self._earlier)
        total.add(tally)
        self.set_totals("offramp_version_compared", "Inputs that two versions answered", total.compared, "outcome")
        requests = "offramp_version_requests", "Requests without a version, by answering version"
        latency = "offramp_version_latency_seconds", "Latency by version, since its figures began"
        for version, each in total.versions.items():
            for status, count in each.requests.items():
                self.set_total(*requests, count, version=version, status=status)
            for share in (0.5, 0.99):
                value = latency_s(tally.versions[version].latencies, share) or 0.0
                self.set_gauge(*latency, value, version=version, quantile=f"{share:g}")


@serve.ingress()
class Ingress(BackgroundTasks):
    """Holds every input until it is answered. It does not import torch, and needs the controller only to get a plan."""

    def __init__(self, settings: dict[str, Any], *deployments: DeploymentHandle[Any]) -> None:
        """`deployments`: one per accelerator type, and the controller, if there is one."""
        super().__init__()
        bind_calls()
        self._settings = ServeSettings.model_validate(settings)
        handles = {each.deployment_name: each for each in deployments}
        self._stage_handles = {device: handles[deployment_name(device)] for device in initial_replicas(self._settings)}
        self._clock = MonotonicClock()
        self._http_server: HttpServer | None = None
        access, num_ingresses = self._settings.access, self._settings.ingress_replicas
        self._gate = None if access is None else Gate(access, self._clock, num_ingresses)
        self._controller = None if self._settings.control is None else ControllerLink(self._settings.app)
        self._started = asyncio.Event()
        self.is_ready = False
        self.max_timeout_s = self._settings.max_timeout_s
        self.card = self._settings.read_card()
        self._metrics = IngressMetrics(self.card.chain)
        self.task = find_task(self.card.task)
        codec = find_codec(self.card.codec, Path(self._settings.model))
        self.signature = Signature(codec, self.task)
        self._tracer = None
        if self._settings.tracing is not None:
            from deployments.ops.tracing import build_tracer  # imports OpenTelemetry

            self._tracer = build_tracer(self._settings.tracing, self._settings.app, self._clock, self.card.chain.starts)
        self._core = build_core(self._settings, self.card)
        self._links = ReplicaLinks(self._stage_handles, phase=random.random())
        self._dispatcher = Dispatcher(self._core, self._links, self._clock, codec=codec, tracer=self._tracer)
        facts = ServiceFacts(card=self.card, settings=self._settings, image=image_facts(codec))
        ask_all = DeploymentHandles(self._settings.app).try_broadcast
        self._state = StateRoutes(facts, self._core, ask_all, self._controller, WallClock())
        self._page = LivePage(self._state.event, self._clock)
        inputs = self.card.inputs if self.card.chain.is_one else None  # a chain's codec checks its inputs itself
        self._service = InferService(codec, self._dispatcher, self._settings, self._clock, inputs=inputs)
        self._generation: GenerateService | None = None
        if isinstance(codec, PromptCodec) and isinstance(self.task, TokenTask):
            self._generation = GenerateService(codec, self.task, self._dispatcher, self._settings, self._clock)
        self.version = self._settings.version
        self.bodies = RequestBodies(self._settings.max_body_bytes, self._settings.max_held_bytes)
        self.versions = Versions(self, self._clock, self._settings, RayCluster(), IngressLink)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        settings = self._settings
        self.start("start", self._start())
        if self._gate is not None:
            self.start("read keys", self._gate.watch())
        self.start("export metrics", self._keep_exporting())
        self.start("follow versions", self.versions.run())
        api = build_api(
            self,
            VersionRoutes(self.versions, settings.repository.folder),
            self._state,
            self._page,
            gate=self._gate,
            cors_origins=() if settings.access is None else settings.access.cors_origins,
            tracer=self._tracer,
        )
        site = below_prefix(api, settings.route_prefix, settings.app)
        site = with_access_log(site) if settings.access_log else site  # Serve logs what passes through its layers
        if settings.listener is None:
            replace_http_server(partial(start_in_serve, site))
        else:
            self._http_server = HttpServer(site)
            self.start("listen", self._http_server.serve([take_listener(settings.listener)]))
        return api

    @cached_property
    def _rpcs(self) -> Rpcs:
        from deployments.api.grpc.server import Rpcs  # the first RPC imports gRPC

        return Rpcs(self, self._gate, self._tracer)

    def __getattr__(self, name: str) -> Callable[[bytes, Any], Awaitable[Any]]:
        """Returns the method of an RPC, which Serve calls by its name."""
        if name not in OPERATION_BY_RPC:
            raise AttributeError(name)

        async def call(request: bytes, grpc_context: Any) -> Any:
            return await self._rpcs.call(name, request, grpc_context)

        call.__name__ = name
        return call

    async def _start(self) -> None:
        """Gets the present plan, then waits until every stage of a chain has a replica."""
        for device, handle in self._stage_handles.items():
            handle._init()  # type: ignore[no-untyped-call] # Serve announces replicas from now on
            self._links.connect(device, directory_of(deployment_name(device)))
        try:
            plans = None if self._controller is None else await self._controller.ask_at_startup("plans")
            if isinstance(plans, str):
                await self.suspend(plans)
            elif plans is not None:
                await self.follow(plans[-1])
        except PlanError as error:
            logger.warning("the controller's plan cannot be followed, so the plan of the settings is: %s", error)
        finally:
            self._started.set()
        await self._links.ready()  # a replica takes calls only after its warm-up
        gc.collect()
        gc.freeze()  # Serve has frozen the objects of the start; later collections visit none of the others either
        self.is_ready = True

    async def _keep_exporting(self) -> None:
        while True:
            await asyncio.sleep(EXPORT_S)
            self._metrics.export(self._core, self._clock.now_s(), self._dispatcher.hops_s)
            if self._generation is not None:
                self._metrics.export_sequences(self._generation.loop)
            if self.versions.tally.since:
                self._metrics.export_versions(self.versions.tally)

    async def __del__(self) -> None:
        """Closes the ingress. Serve calls this once the replica gets no more requests."""
        self._page.close()  # otherwise viewers of the page would stay connected
        if self._http_server is not None:
            await self._http_server.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    async def infer(self, request: InferRequest) -> list[Answer]:
        await self._started.wait()  # the plan of the settings may be outdated
        return await self._service.infer(request)

    async def generate(self, request: GenerateRequest) -> Stream:
        """Starts a sequence; raises what `GenerateService.start` raises, and InputError for a model that answers."""
        await self._started.wait()
        if self._generation is None:
            raise InputError(f"model {self.card.name!r} generates no text")
        return self._generation.start(request)

    async def answer(self, request: InferRequest) -> list[Answer] | OfframpError:
        """Answers a request of another version's ingress. Errors are returned, because Serve would wrap raised ones."""
        try:
            return await self.infer(request)
        except OfframpError as error:
            return error

    async def facts(self) -> VersionFacts | None:
        """Returns facts for the ingresses of other versions; None before this one is ready."""
        if not self.is_ready:
            return None
        agreement, tally = self._core.observations.agreement, self.versions.tally
        return VersionFacts(card=self.card, version=self.version, agreement=agreement, tally=tally)

    def count_request(self, route: str, status: int) -> None:
        self._metrics.finished[route, status] += 1

    async def follow(self, placed: PlacedPlan) -> None:
        """Follows a plan, unless it is older than the present one. Raises PlanError if it does not fit."""
        self._dispatcher.follow(placed)
        if self._generation is not None:
            self._generation.loop.follow(self._core.placed.plan)

    async def suspend(self, reason: str) -> None:
        """Refuses all inputs, until a plan is to be followed again."""
        self._dispatcher.suspend(reason)

    async def report(self, wall_s: float) -> IngressReport:
        """Returns the counts so far, and the new observations in the time of the controller's wall clock."""
        return self._core.report(self._clock.now_s(), wall_s)

    async def samples(self) -> list[Sample]:
        """Returns the last values of the metrics."""
        return self._metrics.samples(ingress=self._core.name)

    async def peek(self) -> IngressReport:
        """Returns the counts so far, and leaves the observations for the controller."""
        return self._core.peek()
