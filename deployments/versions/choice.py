"""Divides requests that name no version between versions, counts them, and compares versions."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

from pydantic import ConfigDict

from deployments.api.endpoint import Served
from deployments.api.parsing import Body, Canary, InferRequest, Version
from deployments.controller.intake import latency_s
from deployments.ingress.core.calls import bucket_of
from earlyexit.clock import Clock
from earlyexit.errors import OfframpError, VersionUnavailableError
from earlyexit.network.boundary import Answer, stack_values
from earlyexit.tasks.base import Task

ANSWERED = "answered"
MOST_COMPARED = 16
"""Comparisons that may run at the same time in one ingress, in case the other version is slow."""
WHOLE = 2**32

logger = logging.getLogger(f"ray.serve.{__name__}")


@dataclass(slots=True)
class VersionTally:
    """What was counted of the requests that were sent to one version."""

    requests: Counter[str] = field(default_factory=Counter)
    """Requests by outcome: `answered`, or the kind of an error. Another version answered those that count as
    `version_unavailable`."""
    exits: Counter[int] = field(default_factory=Counter)
    """Inputs by the block after which they left."""
    latencies: Counter[int] = field(default_factory=Counter)
    """Answered requests by bucket, as in `IngressReport`."""

    @property
    def figures(self) -> dict[str, Any]:
        """The figures of one version, as `GET /v2/models/{model}/canary` reports them."""
        return {
            "requests": self.requests.total(),
            "errors": {kind: count for kind, count in self.requests.items() if kind != ANSWERED},
            "p50_s": latency_s(self.latencies, 0.50),
            "p99_s": latency_s(self.latencies, 0.99),
            "exits": {str(block): self.exits[block] for block in sorted(self.exits)},
        }


@dataclass(slots=True)
class Tally:
    """What one ingress has counted since the default version and the canary changed."""

    versions: defaultdict[str, VersionTally] = field(default_factory=partial(defaultdict, VersionTally))
    inputs: dict[str, float] = field(default_factory=lambda: {"same": 0, "other": 0})
    """Inputs with the same answer by both versions, and with another. An input may count in part, if the task's loss
    is a number."""
    failed: int = 0
    """Requests that were not compared because one of the versions did not answer."""
    skipped: int = 0
    """Requests that were not compared because `MOST_COMPARED` comparisons were running."""

    def add(self, other: Tally) -> None:
        """Adds the counts of another ingress."""
        for version, tally in other.versions.items():
            ours = self.versions[version]
            ours.requests += tally.requests
            ours.exits += tally.exits
            ours.latencies += tally.latencies
        for outcome, count in other.inputs.items():
            self.inputs[outcome] += count
        self.failed += other.failed
        self.skipped += other.skipped

    @property
    def compared(self) -> dict[str, Any]:
        """How far two versions agree, as the same route reports it."""
        inputs = round(sum(self.inputs.values()))
        return {
            "inputs": inputs,
            "same": self.inputs["same"],
            "agreement": self.inputs["same"] / inputs if inputs else None,
            "requests_failed": self.failed,
            "requests_skipped": self.skipped,
        }


def losses_between(ours: Sequence[Answer], our_task: Task, theirs: Sequence[Answer], their_task: Task) -> list[float]:
    """Returns the loss between the answers of two versions for each input, from 0 to 1.

    If the answers of both tasks mean the same, it is the loss of our task. Otherwise, for example if labels have other
    numbers, answers are compared as callers see them.
    """
    if our_task.compares(their_task):
        early, full = (stack_values([answer.value for answer in answers]) for answers in (ours, theirs))
        return [float(loss) for loss in our_task.loss(early, full)]
    return [
        float(our_task.to_json(one.value, 0.0) != their_task.to_json(another.value, 0.0))
        for one, another in zip(ours, theirs, strict=True)
    ]


class Traffic(Body):
    """How a model's requests that name no version are divided."""

    model_config = ConfigDict(frozen=True)

    default: Version | None = None
    """None: the version at the address of the request."""
    canary: Canary | None = None


def draws(request_id: str) -> tuple[float, float]:
    """Returns two numbers from 0 to 1 that follow from a request's id: one for `share`, one for `compare_share`.

    A retry gets the version of the first attempt, in any ingress. Requests of a small share are in any larger share.
    """
    first, second = struct.unpack("<II", blake2b(request_id.encode(), digest_size=8).digest())
    return first / WHOLE, second / WHOLE


@dataclass(slots=True, kw_only=True)
class Fork:
    """Divides requests between a default version and a canary, both of which can be reached."""

    own: Served
    """This ingress's version, which answers if another one cannot be reached."""
    default: Served
    canary: Served | None
    share: float
    compare_share: float
    tally: Tally
    clock: Clock
    comparing: set[asyncio.Task[None]]
    """Running comparisons, of earlier forks too."""

    async def answer(self, request: InferRequest) -> tuple[Served, list[Answer]]:
        """Returns the answers, and the version that gave them."""
        if self.canary is None:
            return await self._ask(self.default, request)
        drawn, compare_drawn = draws(request.request_id)
        first, second = (self.canary, self.default) if drawn < self.share else (self.default, self.canary)
        served, answers = await self._ask(first, request)
        if compare_drawn < self.compare_share and served is first:
            self._begin_to_compare(request, served, answers, second)
        return served, answers

    async def _ask(self, served: Served, request: InferRequest) -> tuple[Served, list[Answer]]:
        tally, begin_s = self.tally.versions[served.version], self.clock.now_s()
        try:
            answers = await served.infer(request)
        except VersionUnavailableError as error:
            tally.requests[error.kind] += 1
            return self.own, await self.own.infer(request)
        except OfframpError as error:
            tally.requests[error.kind] += 1
            raise
        tally.requests[ANSWERED] += 1
        tally.latencies[bucket_of(self.clock.now_s() - begin_s)] += 1
        tally.exits.update(answer.exit for answer in answers)
        return served, answers

    def _begin_to_compare(self, request: InferRequest, served: Served, answers: list[Answer], other: Served) -> None:
        """Asks the other version in the background: the caller has its answer, and its trace may have ended."""
        if len(self.comparing) >= MOST_COMPARED:
            self.tally.skipped += 1
            return
        comparison = self._compare(request, served, answers, other)
        task = asyncio.get_running_loop().create_task(comparison, context=Context())
        self.comparing.add(task)
        task.add_done_callback(self.comparing.discard)

    async def _compare(self, request: InferRequest, served: Served, answers: list[Answer], other: Served) -> None:
        try:
            others = await other.infer(request)
        except OfframpError as error:
            logger.info("request %s was not compared: %s", request.request_id, error)
            self.tally.failed += 1
            return
        loss = sum(losses_between(answers, served.task, others, other.task))
        self.tally.inputs["same"] += len(answers) - loss
        self.tally.inputs["other"] += loss
