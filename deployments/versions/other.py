"""Another version of the model, which is reached through Serve."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from deployments.api.parsing import InferRequest
from deployments.versions.choice import Tally
from earlyexit.errors import DeadlineError, OfframpError, VersionUnavailableError
from earlyexit.network.boundary import Answer
from earlyexit.network.store import ModelCard
from earlyexit.tasks import find_task

ASK_S = 5.0
"""Timeout for an ingress's facts and tallies, in seconds."""
GRACE_S = 1.0
"""Added to a request's own timeout, which the other ingress keeps itself unless it hangs."""
RETRY_S = 1.0

logger = logging.getLogger(f"ray.serve.{__name__}")


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFacts:
    """What an ingress tells the ingresses of other versions."""

    card: ModelCard
    version: str
    agreement: float | None
    """The agreement of its probes with the full model; None before the first probe."""


class IngressLink:
    """The ingresses of one application, through Serve's handle.

    Serve lets requests wait forever for an application that is gone, so waiting requests can be given up.
    """

    def __init__(self, app: str) -> None:
        self._app = app
        self._handle: Any = None
        self._waiting: set[asyncio.Task[list[Answer] | OfframpError]] = set()

    async def answer(self, request: InferRequest) -> list[Answer] | OfframpError:
        """Asks one ingress; raises ConnectionError if the request is given up, and whatever Serve raises.

        Errors are returned as values, because Serve would wrap them in different ways.
        """
        task = asyncio.ensure_future(self._ask(request))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)
        try:
            return await task
        except asyncio.CancelledError:
            asking = asyncio.current_task()
            if asking is not None and asking.cancelling():  # the caller was cancelled, and not the request given up
                raise
            raise ConnectionError("given up") from None

    @property
    def is_waited_for(self) -> bool:
        """Whether a request has no answer yet."""
        return bool(self._waiting)

    def give_up(self) -> None:
        """Ends all waiting requests with an error."""
        for task in self._waiting:
            task.cancel()

    async def facts(self) -> list[VersionFacts]:
        """Asks all ingresses what they serve."""
        return await self._broadcast("facts")

    async def tallies(self) -> list[Tally]:
        """Asks all ingresses what they have counted."""
        return await self._broadcast("tally")

    async def _ask(self, request: InferRequest) -> list[Answer] | OfframpError:
        answered: list[Answer] | OfframpError = await (await self._ingress()).answer.remote(request)
        return answered

    async def _broadcast(self, method: str) -> list[Any]:
        handle = await self._ingress()
        return list(await handle.broadcast(method).results_async(timeout_s=ASK_S))

    async def _ingress(self) -> Any:
        from ray import serve

        if self._handle is None:  # created in a thread, because that waits for Serve
            self._handle = await asyncio.to_thread(serve.get_deployment_handle, "ingress", self._app)
        return self._handle


class OtherVersion:
    """Passes requests on to the ingresses of another version."""

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
        """Raises the errors of the other version, and VersionUnavailableError if it cannot be reached."""
        timeout_s = request.timeout_s or self._default_timeout_s
        try:
            async with asyncio.timeout(timeout_s + self._grace_s):
                answered = await self._link.answer(request)
        except TimeoutError:
            raise DeadlineError(f"no answer within {timeout_s:g} s") from None
        except Exception as error:  # Ray raises different errors for an application that is gone
            logger.warning("request %s: version %s: %r", request.request_id, self.version, error)
            message = f"version {self.version!r} cannot be reached"
            raise VersionUnavailableError(message, retry_after_s=RETRY_S) from error
        if isinstance(answered, OfframpError):
            raise answered
        return answered


async def connected(app: str, version: str, link: IngressLink, default_timeout_s: float) -> OtherVersion:
    """Returns the version that an application serves; raises VersionUnavailableError if no ingress answers."""
    try:
        [facts, *_] = await link.facts()
    except Exception as error:
        message = f"version {version!r} ({app}) does not answer: {error!r}"
        raise VersionUnavailableError(message, retry_after_s=RETRY_S) from error
    if facts.version != version:
        raise VersionUnavailableError(f"{app} serves version {facts.version!r} now", retry_after_s=RETRY_S)
    return OtherVersion(facts, link, default_timeout_s)
