"""Another version, as an ingress reaches it: through Serve, because its own replicas are not ours to choose."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

from deployments.api.bodies import InferRequest
from deployments.api.endpoint import VersionFacts
from deployments.versions.choice import Tally
from earlyexit.errors import DeadlineError, OfframpError, VersionUnavailableError
from earlyexit.network.store import ModelCard
from earlyexit.network.wire import Answer
from earlyexit.tasks import find_task

ASK_S = 5.0
"""How long an ingress has to say what it is, or what it counted."""
GRACE_S = 1.0
"""Beyond a request's own timeout, which the other ingress keeps itself unless it hangs."""
RETRY_S = 1.0

logger = logging.getLogger(f"ray.serve.{__name__}")


class IngressLink(Protocol):
    """The ingresses of one application."""

    async def answer(self, request: InferRequest) -> list[Answer] | OfframpError: ...

    async def facts(self) -> list[VersionFacts]: ...

    async def tallies(self) -> list[Tally]: ...


class RayIngressLink:
    """Through Serve's handle."""

    def __init__(self, app: str) -> None:
        self._app = app
        self._handle: Any = None

    async def answer(self, request: InferRequest) -> list[Answer] | OfframpError:
        """Errors come back as values: Serve would wrap them, differently on each of its ways."""
        answered: list[Answer] | OfframpError = await (await self._ingress()).answer.remote(request)
        return answered

    async def facts(self) -> list[VersionFacts]:
        return await self._all("facts")

    async def tallies(self) -> list[Tally]:
        return await self._all("tally")

    async def _all(self, method: str) -> list[Any]:
        handle = await self._ingress()
        return list(await handle.broadcast(method).results_async(timeout_s=ASK_S))

    async def _ingress(self) -> Any:
        """In a thread, because making a handle waits for Serve."""
        from ray import serve

        if self._handle is None:
            self._handle = await asyncio.to_thread(serve.get_deployment_handle, "ingress", self._app)
        return self._handle


class PatientLink:
    """A link whose waiting requests can be given up: Serve lets them wait for ever for an application that is gone."""

    def __init__(self, link: IngressLink) -> None:
        self._link = link
        self._waiting: set[asyncio.Task[list[Answer] | OfframpError]] = set()

    async def answer(self, request: InferRequest) -> list[Answer] | OfframpError:
        """Raises ConnectionError where it is given up."""
        task = asyncio.ensure_future(self._link.answer(request))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)
        try:
            return await task
        except asyncio.CancelledError:
            asked = asyncio.current_task()
            if asked is not None and asked.cancelling():  # the asking task is cancelled, not the task that it waits for
                raise
            raise ConnectionError("given up") from None

    async def facts(self) -> list[VersionFacts]:
        return await self._link.facts()

    async def tallies(self) -> list[Tally]:
        return await self._link.tallies()

    @property
    def is_waited_for(self) -> bool:
        """Whether a request has no answer yet."""
        return bool(self._waiting)

    def give_up(self) -> None:
        """Every pending call gets an error at once."""
        for task in self._waiting:
            task.cancel()


class OtherVersion:
    """Serves by passing on."""

    def __init__(
        self, facts: VersionFacts, link: IngressLink, default_timeout_s: float, *, grace_s: float = GRACE_S
    ) -> None:
        self.card: ModelCard = facts.card
        self.task = find_task(facts.card.task)
        self.version = facts.version
        self._link = link
        self._default_timeout_s = default_timeout_s
        self._grace_s = grace_s

    async def infer(self, request: InferRequest) -> list[Answer]:
        """Raises the other side's errors, and VersionUnavailableError where there is no other side."""
        timeout_s = request.timeout_s or self._default_timeout_s
        try:
            async with asyncio.timeout(timeout_s + self._grace_s):
                answered = await self._link.answer(request)
        except TimeoutError:
            raise DeadlineError(f"no answer within {timeout_s:g} s") from None
        except Exception as error:  # whatever Ray says of what is gone
            logger.warning("request %s: version %s: %r", request.request_id, self.version, error)
            message = f"version {self.version!r} cannot be reached"
            raise VersionUnavailableError(message, retry_after_s=RETRY_S) from error
        if isinstance(answered, OfframpError):
            raise answered
        return answered


async def connected(app: str, version: str, link: IngressLink, default_timeout_s: float) -> OtherVersion:
    """The version that an application serves; raises VersionUnavailableError if no ingress of it answers."""
    try:
        [facts, *_] = await link.facts()
    except Exception as error:
        message = f"version {version!r} ({app}) does not answer: {error!r}"
        raise VersionUnavailableError(message, retry_after_s=RETRY_S) from error
    if facts.version != version:
        raise VersionUnavailableError(f"{app} serves version {facts.version!r} now", retry_after_s=RETRY_S)
    return OtherVersion(facts, link, default_timeout_s)
