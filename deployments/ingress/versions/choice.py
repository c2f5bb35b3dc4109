"""Who answers a request that names no version, what is counted of it, and who is asked as well."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import blake2b

from pydantic import BaseModel, ConfigDict

from deployments.ingress.api.bodies import InferRequest
from deployments.ingress.api.face import Served
from deployments.ingress.api.orders import Canary, Version
from deployments.ingress.core.counts import bucket_of
from deployments.ingress.versions.tally import Tally, losses_between
from earlyexit.clock import Clock
from earlyexit.errors import OfframpError, VersionUnavailableError
from earlyexit.wire import Answer

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
        """Who answered in the end, and what."""
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
    """Asks the other version too, once the caller has its answer; nobody waits for it."""

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
