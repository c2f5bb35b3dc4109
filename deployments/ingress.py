"""The ingress: HTTP in, batches out, answers back."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.routing import Router

from deployments.bodies import InferRequest
from deployments.dispatcher import Dispatcher
from deployments.http import build_app
from deployments.metrics import IngressMetrics
from deployments.service import InferService
from deployments.settings import ServeSettings
from deployments.transport import HandleTransport
from earlyexit.clock import MonotonicClock
from earlyexit.errors import InputError, OfframpError
from earlyexit.store import ModelCard, read_card
from earlyexit.tokenizer import TextTokenizer
from earlyexit.wire import Answer
from optimizer.plan_file import parse_plan

READY_PAUSE_S = 1.0
STATS_TIMEOUT_S = 5.0

logger = logging.getLogger(f"ray.serve.{__name__}")


@serve.ingress()
class Ingress:
    """Holds every input until its answer is out. Needs no torch."""

    def __init__(self, settings: dict[str, Any], *stages: DeploymentHandle[Any]) -> None:
        self._settings = ServeSettings.model_validate(settings)
        self._stages = stages
        self._clock = MonotonicClock()
        self._metrics = IngressMetrics()
        self._ready = False
        folder = Path(self._settings.model)
        self.card: ModelCard = read_card(folder)
        item_bytes = {"float32": 4, "bfloat16": 2}[self._settings.dtype]
        self._dispatcher = Dispatcher(
            parse_plan(self._settings.plan),
            [HandleTransport(stage, self._settings.by_reference_bytes) for stage in stages],
            self._clock,
            self._metrics,
            bytes_per_token=int(self.card.backbone["hidden_size"]) * item_bytes,
            max_queued=self._settings.max_queued,
            calls_per_replica=self._settings.calls_per_replica,
            max_attempts=self._settings.max_attempts,
            name=uuid.uuid4().hex[:8],
        )
        tokenizer = TextTokenizer.load(folder, self.card.max_length)
        self._service = InferService(tokenizer, self._dispatcher, self._settings, self._clock)

    def __serve_build_asgi_app__(self) -> Router:
        self._warming = asyncio.get_running_loop().create_task(self._wait_for_stages())
        return build_app(self)

    async def _wait_for_stages(self) -> None:
        """Ready when every stage has answered: a replica takes calls only after its warm-up."""
        for stage in self._stages:
            while not await self._answers(stage):  # noqa: ASYNC110 - nothing here would set an event
                await asyncio.sleep(READY_PAUSE_S)
        self._ready = True

    async def _answers(self, stage: DeploymentHandle[Any]) -> bool:
        try:
            await stage.stats.remote()
        except Exception as error:
            logger.warning("a stage is not there yet: %r", error)
            return False
        return True

    @property
    def max_body_bytes(self) -> int:
        return self._settings.max_body_bytes

    def is_ready(self) -> bool:
        """Whether every stage was warm once."""
        return self._ready

    async def infer(self, request: InferRequest) -> list[Answer]:
        """See `InferService.infer`."""
        try:
            return await self._service.infer(request)
        except OfframpError as error:
            if not isinstance(error, InputError):
                self._metrics.dropped(error.kind, len(request.texts))
            raise

    def count_request(self, route: str, status: int) -> None:
        """Count a finished request."""
        self._metrics.request(route, status)

    async def stats(self) -> dict[str, Any]:
        """What every stage's replicas have done since their start, and what waits here."""
        stages = [await self._stage_stats(stage) for stage in self._stages]
        return {
            "model": self.card.name,
            "ingress_pid": os.getpid(),
            "unanswered": self._dispatcher.num_unanswered,
            "stages": stages,
        }

    async def _stage_stats(self, stage: DeploymentHandle[Any]) -> list[Any]:
        """Every replica's; none while a stage has no replica."""
        try:
            return await stage.broadcast("stats").results_async(timeout_s=STATS_TIMEOUT_S)
        except (DeploymentUnavailableError, TimeoutError, RayError) as error:
            logger.warning("statistics of a stage are missing: %r", error)
            return []
