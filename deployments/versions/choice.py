"""Which version answers a request that names none, what is counted of it, and which other version is asked too."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from pydantic import BaseModel, ConfigDict

from deployments.api.bodies import Canary, InferRequest, Version
from deployments.api.endpoint import Served
from deployments.ingress.core.outcomes import bucket_of
from deployments.wire.messages import BUCKET
from earlyexit.clock import Clock
from earlyexit.errors import OfframpError, VersionUnavailableError
from earlyexit.network.wire import Answer, stacked
from earlyexit.tasks.base import Task

Counts = Mapping[tuple[str, str], float]
"""By version and status."""


@dataclass(slots=True)
class VersionTally:
    """Requests of callers that one version was to answer."""

    answered: int = 0
    """Requests."""
    errors: Counter[str] = field(default_factory=Counter)
    """Requests that failed, by kind of error; `unreachable` ones another version answered instead."""
    exits: Counter[int] = field(default_factory=Counter)
    """Inputs by the block they left after."""
    latencies: Counter[int] = field(default_factory=Counter)
    """Answered requests by bucket, as in `IngressReport`."""

    def add(self, other: VersionTally) -> None:
        self.answered += other.answered
        self.errors += other.errors
        self.exits += other.exits
        self.latencies += other.latencies


@dataclass(slots=True)
class Tally:
    """One ingress's counts since default and canary are what they are."""

    versions: dict[str, VersionTally] = field(default_factory=dict)
    same: float = 0
    """Inputs that both versions answered the same; each counts by degrees where answers differ by degrees."""
    other: float = 0
    """Inputs that they did not."""
    failed: int = 0
    """Requests that could not be compared: one of the two did not answer."""
    skipped: int = 0
    """Requests that were not compared, because enough others were at that time."""

    def of(self, version: str) -> VersionTally:
        return self.versions.setdefault(version, VersionTally())

    def compare(self, losses: Sequence[float]) -> None:
        """Count one request's inputs by both versions; see `losses_between`."""
        self.same += len(losses) - sum(losses)
        self.other += sum(losses)

    def add(self, other: Tally) -> None:
        for version, tally in other.versions.items():
            self.of(version).add(tally)
        self.same += other.same
        self.other += other.other
        self.failed += other.failed
        self.skipped += other.skipped


def losses_between(ours: Sequence[Answer], our_task: Task, theirs: Sequence[Answer], their_task: Task) -> list[float]:
    """By input, what it costs that one version answers otherwise, from 0 to 1.

    Versions may number labels differently, or have others: then answers are compared as callers see them. Where they
    mean the same, though other settings of the task differ, the loss is our task's.
    """
    if our_task.compares(their_task):
        early, full = (stacked([answer.value for answer in answers]) for answers in (ours, theirs))
        return [float(loss) for loss in our_task.loss(early, full)]
    return [
        float(our_task.to_json(one.value, 0.0) != their_task.to_json(another.value, 0.0))
        for one, another in zip(ours, theirs, strict=True)
    ]


def quantile_s(latencies: Mapping[int, int], share: float) -> float | None:
    """The seconds within which that share was answered, at most 5 % too long; None where nothing was."""
    needed = share * sum(latencies.values())
    reached = 0
    for bucket in sorted(latencies):
        reached += latencies[bucket]
        if reached >= needed:
            return float(BUCKET ** (bucket + 1))
    return None


def version_figures(tally: VersionTally) -> dict[str, Any]:
    """One version's counts, as `GET /v2/models/{model}/canary` says them."""
    return {
        "requests": tally.answered + sum(tally.errors.values()),
        "errors": dict(tally.errors),
        "p50_s": quantile_s(tally.latencies, 0.50),
        "p99_s": quantile_s(tally.latencies, 0.99),
        "exits": {str(block): tally.exits[block] for block in sorted(tally.exits)},
    }


def compared_figures(tally: Tally) -> dict[str, Any]:
    """How far the two versions agree, in the same place."""
    inputs = round(tally.same + tally.other)
    return {
        "inputs": inputs,
        "same": tally.same,
        "agreement": tally.same / inputs if inputs else None,
        "requests_failed": tally.failed,
        "requests_skipped": tally.skipped,
    }


def counts(tally: Tally) -> dict[tuple[str, str], float]:
    """Requests by version and status; under no version's name, what was compared."""
    found: dict[tuple[str, str], float] = {
        ("", "same"): tally.same,
        ("", "other"): tally.other,
        ("", "failed"): tally.failed,
    }
    for version, each in tally.versions.items():
        found[version, "answered"] = each.answered
        found |= {(version, kind): count for kind, count in each.errors.items()}
    return found


def growth(before: Counts, now: Counts) -> dict[tuple[str, str], float]:
    """What has become more."""
    return {key: count - before.get(key, 0) for key, count in now.items() if count > before.get(key, 0)}


MOST_COMPARED = 16
"""Comparisons under way in one ingress: where the other version is slow, they must not pile up."""

Connect = Callable[[str], Awaitable[Served]]
"""Finds another version of the model; raises OfframpError."""
WhoAnswered = tuple[Served, list[Answer]]
WHOLE = 2**32

logger = logging.getLogger(f"ray.serve.{__name__}")


class Traffic(BaseModel):
    """What a model's requests without a version get."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    default: Version | None = None
    """None: the version at the address that was asked."""
    canary: Canary | None = None


def draws(request_id: str) -> tuple[float, float]:
    """Two numbers from 0 to 1 that follow from a request's id: one for `share`, one for `compare_share`.

    Not random: a request that is sent again gets the version of the first time, in whatever ingress, and those of a
    small share are among those of a larger one.
    """
    first, second = struct.unpack("<II", blake2b(request_id.encode(), digest_size=8).digest())
    return first / WHOLE, second / WHOLE


class Chosen:
    """A version that is asked, timed and counted. Where it cannot be reached, ours answers."""

    def __init__(self, served: Served, own: Served, tally: Tally, clock: Clock) -> None:
        self.served = served
        self._own = own
        self._tally = tally.of(served.version)
        self._clock = clock

    async def answer(self, request: InferRequest) -> WhoAnswered:
        """The version that answered in the end, and its answer."""
        begin_s = self._clock.now_s()
        try:
            answers = await self.served.infer(request)
        except VersionUnavailableError as error:
            self._tally.errors[error.kind] += 1
            return self._own, await self._own.infer(request)
        except OfframpError as error:
            self._tally.errors[error.kind] += 1
            raise
        self._tally.answered += 1
        self._tally.latencies[bucket_of(self._clock.now_s() - begin_s)] += 1
        self._tally.exits.update(answer.exit for answer in answers)
        return self.served, answers


class Comparisons:
    """Asks the other version too, once the caller has its answer, in the background."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, request: InferRequest, served: Served, answers: list[Answer], other: Served) -> None:
        """Compare, unless enough others are being compared."""
        if len(self._tasks) >= MOST_COMPARED:
            self._tally.skipped += 1
            return
        task = asyncio.get_running_loop().create_task(self._compare(request, served, answers, other))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def done(self) -> None:
        await asyncio.gather(*self._tasks)

    async def _compare(self, request: InferRequest, served: Served, answers: list[Answer], other: Served) -> None:
        try:
            others = await other.infer(request)
        except OfframpError as error:
            logger.info("request %s was not compared: %s", request.request_id, error)
            self._tally.failed += 1
            return
        self._tally.compare(losses_between(answers, served.task, others, other.task))


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Chosen, and the other version to be asked afterwards."""

    chosen: Chosen
    other: Served
    comparisons: Comparisons

    async def answer(self, request: InferRequest) -> WhoAnswered:
        served, answers = await self.chosen.answer(request)
        if served is self.chosen.served:  # else it was the other that answered
            self.comparisons.begin(request, served, answers, self.other)
        return served, answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Default version and canary, both there."""

    default: Chosen
    canary: Chosen | None = None
    share: float = 0.0
    compare_share: float = 0.0
    comparisons: Comparisons

    def choose(self, request_id: str) -> Chosen | Compared:
        """By the request's id alone."""
        if self.canary is None:
            return self.default
        drawn, compare_drawn = draws(request_id)
        first, second = (self.canary, self.default) if drawn < self.share else (self.default, self.canary)
        if compare_drawn >= self.compare_share:
            return first
        return Compared(chosen=first, other=second.served, comparisons=self.comparisons)


class VersionChoice:
    """The fork as the traffic wants it, of the versions that can be reached."""

    def __init__(self, own: Served, connect: Connect, clock: Clock) -> None:
        self._own = own
        self._connect = connect
        self._clock = clock
        self._counted: tuple[str, str | None] | None = None
        self.tally = Tally()
        self.comparisons = Comparisons(self.tally)
        self.fork: Fork | None = None
        """None: every request is ours."""

    async def follow(self, traffic: Traffic) -> None:
        """Go by this from now on; figures begin anew where other versions than before are concerned."""
        default = await self._reach(traffic.default or self._own.version) or self._own
        asked = traffic.canary
        canary = None if asked is None or asked.version == default.version else await self._reach(asked.version)
        if canary is None and default is self._own:
            self.fork = None
            return
        self._count(default.version, None if canary is None else canary.version)
        self.fork = Fork(
            default=self._chosen(default),
            canary=None if canary is None else self._chosen(canary),
            share=0.0 if asked is None else asked.share,
            compare_share=0.0 if asked is None else asked.compare_share,
            comparisons=self.comparisons,
        )

    def _chosen(self, served: Served) -> Chosen:
        return Chosen(served, self._own, self.tally, self._clock)

    def _count(self, default: str, canary: str | None) -> None:
        if self._counted != (default, canary):
            self._counted = (default, canary)
            self.tally = Tally()
            self.comparisons = Comparisons(self.tally)

    async def _reach(self, version: str) -> Served | None:
        if version == self._own.version:
            return self._own
        try:
            return await self._connect(version)
        except OfframpError as error:
            logger.warning("version %s is left out: %s", version, error)
            return None
