"""A whole service without Ray that traces its requests: HTTP, ingress, sockets, two replicas of emulated devices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer, models

from deployments.api.grpc.server import Rpcs
from deployments.api.http import build_api
from deployments.api.operations import InferRequest
from deployments.api.service import InferService
from deployments.ingress.core.inputs import IngressOptions
from deployments.ops.tracing import Tracer, build_tracer
from deployments.settings import ServeSettings
from deployments.wire.directory import ReplicaDirectory
from deployments.wire.messages import Address
from earlyexit.clock import MonotonicClock
from earlyexit.codecs import find_codec
from earlyexit.network.boundary import Answer, Split
from earlyexit.network.store import read_card
from optimizer.plans.plan import PlacedPlan, Plan, PolicySpec, Stage
from optimizer.plans.plan_file import plan_document
from tests.deployments.ingress.api.faces import FakeBackend
from tests.deployments.service_here import built, connected
from tests.deployments.stage.small_model import save_records, save_small_model

DEVICE = "emulated:V100"
BLOCK_S = 0.03
BATCH = 4


def plan_of(folder: Path) -> Plan:
    """Blocks 0 and 1 on one replica, 2 and 3 as two splits on another."""
    policy = PolicySpec(name="recorded", thresholds=0.5, records=str(folder / "records.npz"))
    first = (Split(first=0, end=2, batch=BATCH, ramps=(0, 1)),)
    rest = (Split(first=2, end=3, batch=BATCH, ramps=(2,)), Split(first=3, end=4, batch=BATCH))
    stages = tuple(Stage(device=DEVICE, replicas=1, splits=splits) for splits in (first, rest))
    return Plan(stages=stages, policy=policy)


def settings_of(folder: Path, **tracing: Any) -> ServeSettings:
    """Returns settings of a model in which a leaves at ramp 0, b at 1, c at 2 and d at the end."""
    save_small_model(folder)
    Tokenizer(models.WordLevel({"[UNK]": 0, "pay": 1}, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    save_records(folder, "confidence", [[1, 1, 1], [0, 1, 1], [0, 0, 1], [0, 0, 0]])
    emulated = {"batch": [1, BATCH], "block_s": [[BLOCK_S, BLOCK_S]] * 4, "ramp_s": [[0.0, 0.0]] * 3}
    return ServeSettings.model_validate(
        {
            "model": str(folder),
            "app": "traced",
            "plan": plan_document(plan_of(folder)),
            "emulated": {DEVICE: emulated},
            "tracing": tracing or None,
            "max_queued": 100,
        }
    )


@dataclass(kw_only=True)
class Backend(FakeBackend):
    """A backend that answers with a service."""

    service: InferService

    async def infer(self, request: InferRequest) -> list[Answer]:
        return await self.service.infer(request)


@dataclass(slots=True, kw_only=True)
class Traced:
    """A running service."""

    http: httpx.AsyncClient
    rpcs: Rpcs
    board: ReplicaDirectory
    addresses: Mapping[str, Address]
    tracer: Tracer | None

    async def ask(self, *ids: str, **more: Any) -> httpx.Response:
        """Requests the answers of these inputs."""
        body = {"inputs": ["pay"] * len(ids), "ids": list(ids), **more.pop("body", {})}
        return await self.http.post("/predict", json=body, **more)


@asynccontextmanager
async def traced_service(settings: ServeSettings) -> AsyncIterator[Traced]:
    placed, clock = PlacedPlan(plan=settings.plan), MonotonicClock()
    tracer = None if settings.tracing is None else build_tracer(settings.tracing, settings.app, clock, ())
    rules = IngressOptions(max_queued=settings.max_queued)
    async with connected(placed, await built(settings, placed), rules, tracer=tracer) as running:
        codec = find_codec({"name": "text", "max_length": 8}, Path(settings.model))
        service = InferService(codec, running.dispatcher, settings, clock)
        backend = Backend(card=read_card(Path(settings.model)), service=service)
        transport = httpx.ASGITransport(build_api(backend, tracer=tracer))
        async with httpx.AsyncClient(transport=transport, base_url="http://traced", timeout=20.0) as http:
            yield Traced(
                http=http,
                rpcs=Rpcs(backend, None, tracer),
                board=running.board,
                addresses=running.addresses,
                tracer=tracer,
            )
            if tracer is not None:
                await asyncio.to_thread(tracer.close)  # sends all remaining spans
