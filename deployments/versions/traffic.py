"""Divides requests that name no version between two versions, counts them, and compares the versions' answers."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextvars import Context
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Any

from pydantic import ConfigDict

from deployments.api.endpoint import ModelVersion
from deployments.api.operations import Body, Canary, InferRequest, Version
from deployments.ingress.core.calls import bucket_of
from deployments.wire.messages import latency_s
from earlyexit.clock import Clock
from earlyexit.errors import OfframpError, VersionUnavailableError
from earlyexit.network.boundary import Answer, stack_values
from earlyexit.tasks.base import Task

ANSWERED = "answered"
MAX_COMPARISONS = 16
"""Most comparisons that run at the same time in one ingress, which matters if the other version is slow."""

logger = logging.getLogger(f"ray.serve.{__name__}")


@dataclass(slots=True)
class VersionTally:
    """Counts of the requests that were sent to one version."""

    requests: Counter[str] = field(default_factory=Counter)
    """Requests by outcome: `answered`, or the kind of an error. This ingress's own version answered the requests that
    count as `version_unavailable`."""
    exits: Counter[int] = field(default_factory=Counter)
    """Answered inputs by exit block."""
    latencies: Counter[int] = field(default_factory=Counter)
    """Answered requests by latency bucket, as in `IngressReport`."""

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
    """The counts of one ingress since the default version or the canary was replaced."""

    since: int = 0
    """The number of the change that replaced it, as in `Traffic`."""
    versions: defaultdict[str, VersionTally] = field(default_factory=partial(defaultdict, VersionTally))
    compared: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("same", "other", "failed", "skipped"), 0))
    """Compared inputs with the `same` answer from both versions, and with an `other`; losses between 0 and 1 count in
    part. Requests that were not compared, because the other version `failed`, or `skipped` as `MAX_COMPARISONS` ran."""

    def add(self, other: Tally) -> None:
        """Adds the counts of another ingress."""
        for version, tally in other.versions.items():
            ours = self.versions[version]
            ours.requests += tally.requests
            ours.exits += tally.exits
            ours.latencies += tally.latencies
        for outcome, count in other.compared.items():
            self.compared[outcome] += count

    @property
    def agreement(self) -> dict[str, Any]:
        """How far the two versions agree, as the same route reports it."""
        same, inputs = self.compared["same"], round(self.compared["same"] + self.compared["other"])
        return {
            "inputs": inputs,
            "same": same,
            "agreement": same / inputs if inputs else None,
            "requests_failed": self.compared["failed"],
            "requests_skipped": self.compared["skipped"],
        }


def losses_between(ours: Sequence[Answer], our_task: Task, theirs: Sequence[Answer], their_task: Task) -> list[float]:
    """Returns the loss between the answers of two versions for each input, from 0 to 1.

    If answers of both tasks have the same meaning, this is our task's loss. Otherwise, for example if labels have
    different numbers, the JSON forms of the answers are compared.
    """
    if our_task.compares(their_task):
        early, full = (stack_values([answer.value for answer in answers]) for answers in (ours, theirs))
        return [float(loss) for loss in our_task.loss(early, full)]
    return [
        float(our_task.to_json(one.value, 0.0) != their_task.to_json(another.value, 0.0))
        for one, another in zip(ours, theirs, strict=True)
    ]


class Traffic(Body):
    """How the requests of a model that name no version are divided."""

    model_config = ConfigDict(frozen=True)

    default: Version | None = None
    """The default version. None: the version of the ingress that receives the request."""
    canary: Canary | None = None
    changes: int = 0
    """The number of changes so far."""
    since: int = 0
    """The number of the last change of the default version or of the canary's version. Counts begin with it."""

    def changed(self, **fields: Any) -> Traffic:
        """Returns the division after one more change. A canary without shares, or one that became the default, ends."""
        after = self.model_copy(update={**fields, "changes": self.changes + 1})
        canary = after.canary
        if canary is not None and (canary.version == after.default or canary.share == canary.compare_share == 0):
            after = after.model_copy(update={"canary": None})
        is_same_trial = (after.default, after.canary_version) == (self.default, self.canary_version)
        return after if is_same_trial else after.model_copy(update={"since": after.changes})

    @property
    def canary_version(self) -> str | None:
        return None if self.canary is None else self.canary.version


def hashed_draws(request_id: str) -> tuple[float, float]:
    """Returns two numbers from 0 to 1 for `share` and `compare_share`, which are a hash of the request's id.

    Because of the hash, a retry goes to the same version in any ingress, and a growing share keeps its requests.
    """
    first, second = struct.unpack("<II", blake2b(request_id.encode(), digest_size=8).digest())
    return first / 2**32, second / 2**32


Answered = tuple[ModelVersion, list[Answer]]
"""A version, and its answers to a request."""


@dataclass(slots=True, eq=False)
class TrafficSplitter:
    """Divides requests that name no version between a default version and a canary."""

    own: ModelVersion
    """This ingress's version, which answers if the selected one is unavailable."""
    clock: Clock
    _: KW_ONLY
    default: ModelVersion | None = None
    """The default version. None: this ingress's version answers all requests, which are not counted."""
    canary: ModelVersion | None = None
    share: float = 0.0
    compare_share: float = 0.0
    tally: Tally = field(default_factory=Tally)
    comparing: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    """Running comparisons of two versions."""

    async def answer(self, request: InferRequest) -> Answered:
        """Answers a request that names no version; also returns the version that answered it."""
        default, canary, compare_share = self.default, self.canary, self.compare_share
        if default is None:
            return self.own, await self.own.infer(request)
        if canary is None:
            return await self._ask(default, request)
        drawn, compare_drawn = hashed_draws(request.request_id)
        selected, other = (canary, default) if drawn < self.share else (default, canary)
        answered = await self._ask(selected, request)
        if compare_drawn < compare_share and answered[0] is selected:
            self._compare_soon(request, answered, other)
        return answered

    async def _ask(self, served: ModelVersion, request: InferRequest) -> Answered:
        tally, begin_s = self.tally.versions[served.version], self.clock.now_s()
        try:
            answers = await served.infer(request)
        except VersionUnavailableError as error:
            tally.requests[error.kind] += 1
            return self.own, await self.own.infer(replace(request, arrived_s=begin_s))
        except OfframpError as error:
            tally.requests[error.kind] += 1
            raise
        tally.requests[ANSWERED] += 1
        tally.latencies[bucket_of(self.clock.now_s() - begin_s)] += 1
        tally.exits.update(answer.exit for answer in answers)
        return served, answers

    def _compare_soon(self, request: InferRequest, answered: Answered, other: ModelVersion) -> None:
        """Starts a comparison in the background. It has a context of its own, because the request's trace may end."""
        if len(self.comparing) >= MAX_COMPARISONS:
            self.tally.compared["skipped"] += 1
            return
        comparison = self._compare(request, answered, other, self.tally)
        task = asyncio.get_running_loop().create_task(comparison, context=Context())
        self.comparing.add(task)
        task.add_done_callback(self.comparing.discard)

    async def _compare(self, request: InferRequest, answered: Answered, other: ModelVersion, tally: Tally) -> None:
        served, answers = answered
        try:
            other_answers = await other.infer(request)
        except OfframpError as error:
            logger.info("request %s was not compared: %s", request.request_id, error)
            tally.compared["failed"] += 1
            return
        loss = sum(losses_between(answers, served.task, other_answers, other.task))
        tally.compared["same"] += len(answers) - loss
        tally.compared["other"] += loss
