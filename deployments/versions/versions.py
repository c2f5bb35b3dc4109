"""The versions of a model as one ingress sees them: the index, the canary, comparisons, and operators' orders."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

from pydantic import BaseModel, ConfigDict

from deployments.api.endpoint import Served
from deployments.api.parsing import Canary, InferRequest
from deployments.local_ray.private import kv_get, kv_keys, kv_put
from deployments.settings import ServeSettings
from deployments.versions.choice import Fork, Tally, Traffic
from deployments.wire.controller_link import DeploymentHandles
from earlyexit.clock import Clock
from earlyexit.codecs import make_codec
from earlyexit.errors import (
    ControlRefusedError,
    DeadlineError,
    InputError,
    OfframpError,
    UnknownModelError,
    VersionUnavailableError,
)
from earlyexit.network.boundary import Answer
from earlyexit.network.store import ModelCard
from earlyexit.tasks import find_task

logger = logging.getLogger(f"ray.serve.{__name__}")

LISTED = "listed/"
TRAFFIC = "traffic/"


STATES = {
    "RUNNING": "READY",
    "NOT_STARTED": "LOADING",
    "DEPLOYING": "LOADING",
    "DELETING": "UNLOADING",
}
"""Triton's states for Serve's. All others are `UNAVAILABLE`, since requests may fail."""


class Listed(BaseModel):
    """An application of Offramp, as its ingress announces it when it starts."""

    model_config = ConfigDict(frozen=True)

    app: str
    model: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AppStatus:
    """What Serve reports about an application."""

    status: str
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRow:
    """A row of the index of Triton's repository extension."""

    name: str
    version: str
    state: str
    reason: str

    @classmethod
    def of(cls, listed: Listed, status: AppStatus) -> IndexRow:
        """Returns the row of an application that Serve knows."""
        state = STATES.get(status.status, "UNAVAILABLE")
        why = (f"{listed.app} is {status.status}", status.message)
        reason = "" if state == "READY" else ": ".join(filter(None, why))
        return cls(name=listed.model, version=listed.version, state=state, reason=reason)


class RayStore:
    """The store in Ray's GCS. Its calls block for about a millisecond, and run in threads."""

    async def traffic(self, model: str) -> Traffic:
        """Returns how the requests of a model are divided."""
        value = await asyncio.to_thread(kv_get, TRAFFIC + model)
        return Traffic() if value is None else Traffic.model_validate_json(value)

    async def put_traffic(self, model: str, traffic: Traffic) -> None:
        await asyncio.to_thread(kv_put, TRAFFIC + model, traffic.model_dump_json())

    async def listed(self) -> list[Listed]:
        """Returns the applications that have announced themselves, also those that are gone."""

        def read() -> list[Listed]:
            values = map(kv_get, kv_keys(LISTED))
            return [Listed.model_validate_json(value) for value in values if value is not None]

        return await asyncio.to_thread(read)

    async def put_listed(self, listed: Listed) -> None:
        await asyncio.to_thread(kv_put, LISTED + listed.app, listed.model_dump_json())

    async def statuses(self) -> Mapping[str, AppStatus]:
        from ray import serve

        found = (await asyncio.to_thread(serve.status)).applications
        return {name: AppStatus(status=each.status.value, message=each.message) for name, each in found.items()}


ASK_S = 5.0
"""Timeout for an ingress's facts and tallies, in seconds."""
GRACE_S = 1.0
"""Added to a request's own timeout, which the other ingress keeps itself unless it hangs."""
RETRY_S = 1.0
GIVEN_UP = 0.0
"""The deadline of a request that is given up, on the event loop's clock."""


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
        self._handles = DeploymentHandles(app)
        self.waiting: set[asyncio.Timeout] = set()
        """The timeouts of requests that have no answer yet."""

    async def answer(self, request: InferRequest) -> list[Answer] | OfframpError:
        """Asks one ingress; raises whatever Serve raises.

        Errors are returned as values, because Serve would wrap them in different ways.
        """
        ingress = await self._handles.handle("ingress")
        answered: list[Answer] | OfframpError = await ingress.answer.remote(request)
        return answered

    async def facts(self) -> list[VersionFacts]:
        """Asks all ingresses what they serve."""
        return await self._handles.broadcast("ingress", "facts", timeout_s=ASK_S)

    async def tallies(self) -> list[Tally]:
        """Asks all ingresses what they have counted."""
        return await self._handles.broadcast("ingress", "tally", timeout_s=ASK_S)


class OtherVersion:
    """Passes requests on to the ingresses of another version."""

    def __init__(self, facts: VersionFacts, link: IngressLink, default_timeout_s: float) -> None:
        self.card: ModelCard = facts.card
        self.task = find_task(facts.card.task)
        self.version = facts.version
        self._link = link
        self._default_timeout_s = default_timeout_s

    async def infer(self, request: InferRequest) -> list[Answer]:
        """Raises the errors of the other version, and VersionUnavailableError if it cannot be reached."""
        timeout_s = request.timeout_s or self._default_timeout_s
        timeout = asyncio.timeout(timeout_s + GRACE_S)
        self._link.waiting.add(timeout)
        try:
            async with timeout:
                answered = await self._link.answer(request)
        except Exception as error:  # Ray raises different errors for an application that is gone
            if isinstance(error, TimeoutError) and timeout.when() != GIVEN_UP:
                raise DeadlineError(f"no answer within {timeout_s:g} s") from None
            logger.warning("request %s: version %s: %r", request.request_id, self.version, error)
            message = f"version {self.version!r} cannot be reached"
            raise VersionUnavailableError(message, retry_after_s=RETRY_S) from error
        finally:
            self._link.waiting.discard(timeout)
        if isinstance(answered, OfframpError):
            raise answered
        return answered


VERSIONS_PATH = "/versions/"
"""A part of route prefixes by which only requests for one version arrive."""
LOOK_S = 1.0
"""How soon an ingress follows an order that another ingress received. Each look is one read of Ray's store."""

Sleep = Callable[[float], Awaitable[object]]


@dataclass(slots=True, eq=False)
class Versions:
    """The versions of one model, as one ingress of one version sees them."""

    own: Served
    settings: ServeSettings
    store: RayStore
    link_to: Callable[[str], IngressLink]
    clock: Clock
    show: Callable[[Tally], None]
    """Gets the counts about once a second, while two versions share the requests."""
    tally: Tally = field(default_factory=Tally, init=False)
    """What this ingress has counted since the default version or the canary changed."""
    comparing: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    """Running comparisons of two versions."""
    _links: dict[str, IngressLink] = field(default_factory=dict, init=False)
    _following: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _apps: dict[str, str] = field(default_factory=dict, init=False)
    """The application that last served each version."""
    _fork: Fork | None = field(default=None, init=False)
    """None: this version answers all requests, and nothing is counted."""
    _sides: tuple[str, str | None] | None = field(default=None, init=False)
    """The default version and the canary of the tally."""

    async def answer(self, request: InferRequest) -> tuple[Served, list[Answer]]:
        """Answers a request that names no version; returns also the version that answered it."""
        if self._fork is None:
            return self.own, await self.own.infer(request)
        return await self._fork.answer(request)

    async def run(self, sleep: Sleep = asyncio.sleep) -> None:
        """Announces this version; an ingress at the root then follows the store, without an end."""
        listed = Listed(app=self.settings.app, model=self.own.card.name, version=self.own.version)
        await self._until_done(partial(self.store.put_listed, listed), sleep)
        while VERSIONS_PATH not in self.settings.route_prefix:
            await self._until_done(self._look, sleep)
            await sleep(LOOK_S)

    async def index(self, *, ready_only: bool = False) -> list[IndexRow]:
        """Returns the versions of all models by name, without applications that Serve does not know any more."""
        listed, statuses = await self.store.listed(), await self.store.statuses()
        rows = [IndexRow.of(each, statuses[each.app]) for each in listed if each.app in statuses]
        rows.sort(key=lambda row: (row.name, row.version))
        return [row for row in rows if row.state == "READY" or not ready_only]

    async def names(self) -> list[str]:
        """Returns the versions of the model; only this one if Ray does not answer."""
        try:
            rows = await self.index()
        except Exception as error:
            logger.warning("versions: %r", error)
            rows = []
        return sorted({self.own.version, *(row.version for row in rows if row.name == self.own.card.name)})

    async def side_by_side(self) -> dict[str, Any]:
        """Returns the default version and the canary, with the counts of all ingresses of this application."""
        traffic = await self.store.traffic(self.own.card.name)
        tally = Tally()
        for each in await self._link(self.settings.app).tallies():
            tally.add(each)
        default = traffic.default or self.own.version
        names = dict.fromkeys((default, *((traffic.canary.version,) if traffic.canary else ())))
        return {
            "model": self.own.card.name,
            "default": default,
            "canary": None if traffic.canary is None else traffic.canary.model_dump(),
            "versions": {
                name: tally.versions[name].figures | {"agreement": await self._agreement(name)} for name in names
            },
            "compared": tally.compared,
        }

    async def set_canary(self, canary: Canary) -> None:
        """Lets a version answer its share of the requests; a canary without any share ends the trial.

        Raises ControlRefusedError, UnknownModelError, InputError, VersionUnavailableError.
        """
        if self.own.card.generates:
            raise InputError("a stream has no canary: name the version in `model`, as 'name:version'")
        traffic = await self._changeable()
        default = traffic.default or self.own.version
        if canary.version == default:
            raise InputError(f"version {default!r} is the default; a canary is another")
        await self._connect(canary.version)
        is_over = canary.share == 0 and canary.compare_share == 0
        await self._put(traffic.model_copy(update={"canary": None if is_over else canary}))

    async def end_canary(self) -> None:
        """Lets the default version answer all requests; raises ControlRefusedError."""
        await self._put((await self._changeable()).model_copy(update={"canary": None}))

    async def set_default(self, version: str) -> None:
        """Lets a version answer requests that name none; this ends its trial as a canary.

        Raises ControlRefusedError, UnknownModelError, VersionUnavailableError.
        """
        traffic = await self._changeable()
        await self._connect(version)
        is_canary = traffic.canary is not None and traffic.canary.version == version
        await self._put(Traffic(default=version, canary=None if is_canary else traffic.canary))

    async def check_free(self, model: str, version: str) -> None:
        """Raises InputError for a version that answers requests without a version."""
        traffic = await self.store.traffic(model)
        is_ours = (model, version) == (self.own.card.name, self.own.version)
        if is_ours or version == traffic.default:
            raise InputError(f"version {version!r} answers requests that name none; it cannot be unloaded")
        if traffic.canary is not None and version == traffic.canary.version:
            raise InputError(f"version {version!r} is the canary; end that first")

    async def _changeable(self) -> Traffic:
        self.check_control()
        return await self.store.traffic(self.own.card.name)

    def check_control(self) -> None:
        """Raises ControlRefusedError unless the settings allow changes over HTTP."""
        if self.settings.repository.control != "explicit":
            raise ControlRefusedError("versions change over HTTP only if the settings say repository.control: explicit")

    async def _put(self, traffic: Traffic) -> None:
        async with self._following:
            await self.store.put_traffic(self.own.card.name, traffic)
            if VERSIONS_PATH not in self.settings.route_prefix:
                await self._follow(traffic)

    async def _look(self) -> None:
        async with self._following:  # else a traffic that was read before an order might be followed after it
            await self._follow(await self.store.traffic(self.own.card.name))
        if self._fork is not None:
            self.show(self.tally)

    async def _follow(self, traffic: Traffic) -> None:
        """Divides requests as the traffic says, and gives up requests that wait for an application that is gone.

        The traffic may not name that application any more: a canary may end, and be unloaded, before its last answer.
        """
        self._fork = await self._fork_for(traffic)
        for app, link in list(self._links.items()):
            if not link.waiting:
                continue
            try:
                [_, *_] = await link.facts()
            except Exception as error:  # Ray raises different errors for an application that is gone
                logger.warning("what waits for %s is given up: %r", app, error)
                for timeout in link.waiting:
                    if not timeout.expired():
                        timeout.reschedule(GIVEN_UP)

    async def _fork_for(self, traffic: Traffic) -> Fork | None:
        """Returns the fork between the versions that can be reached; a change of versions starts a new tally."""
        default = await self._reach(traffic.default or self.own.version) or self.own
        asked = traffic.canary
        canary = None if asked is None or asked.version == default.version else await self._reach(asked.version)
        if canary is None and default is self.own:
            return None
        sides = default.version, None if canary is None else canary.version
        if self._sides != sides:
            self._sides, self.tally = sides, Tally()
        return Fork(
            own=self.own,
            default=default,
            canary=canary,
            share=0.0 if asked is None else asked.share,
            compare_share=0.0 if asked is None else asked.compare_share,
            tally=self.tally,
            clock=self.clock,
            comparing=self.comparing,
        )

    async def _reach(self, version: str) -> Served | None:
        try:
            return await self._connect(version)
        except OfframpError as error:
            logger.warning("version %s is left out: %s", version, error)
            return None

    async def _until_done(self, step: Callable[[], Awaitable[None]], sleep: Sleep) -> None:
        """Retries a step while Ray is unavailable; meanwhile the last state stays in force."""
        while True:
            try:
                await step()
            except Exception as error:
                logger.warning("versions: %r", error)
                await sleep(LOOK_S)
            else:
                return

    async def _connect(self, version: str) -> Served:
        """Connects to a version; asks Serve only if the application that last served it does not answer."""
        if version == self.own.version:
            return self.own
        known = self._apps.pop(version, None)
        if known is not None:
            with suppress(VersionUnavailableError):
                return await self._connected(known, version)
        return await self._connected(await self._find(version), version)

    async def _connected(self, app: str, version: str) -> Served:
        link = self._link(app)
        try:
            [facts, *_] = await link.facts()
        except Exception as error:
            message = f"version {version!r} ({app}) does not answer: {error!r}"
            raise VersionUnavailableError(message, retry_after_s=RETRY_S) from error
        if facts.version != version:
            raise VersionUnavailableError(f"{app} serves version {facts.version!r} now", retry_after_s=RETRY_S)
        self._apps[version] = app
        ours, theirs = _inputs(self.own.card), _inputs(facts.card)
        if ours != theirs:
            raise InputError(f"version {version!r} takes {theirs}, version {self.own.version!r} {ours}")
        return OtherVersion(facts, link, self.settings.default_timeout_s)

    async def _find(self, version: str) -> str:
        """Returns the application that serves a version, preferably a running one; raises UnknownModelError."""
        named = self.own.card.name, version
        listed, statuses = await self.store.listed(), await self.store.statuses()
        apps = [each.app for each in listed if (each.model, each.version) == named and each.app in statuses]
        if not apps:
            known = ", ".join(repr(each) for each in await self.names())
            raise UnknownModelError(f"unknown version {version!r} of {named[0]!r}; there are {known}")
        return min(apps, key=lambda app: (statuses[app].status != "RUNNING", app))

    def _link(self, app: str) -> IngressLink:
        if app not in self._links:
            self._links[app] = self.link_to(app)
        return self._links[app]

    async def _agreement(self, version: str) -> float | None:
        """Returns the agreement with the full model by the probes of all ingresses; None before the first probe."""
        try:
            app = self.settings.app if version == self.own.version else await self._find(version)
            known = [each.agreement for each in await self._link(app).facts() if each.agreement is not None]
        except Exception as error:  # the other figures are shown without it
            logger.warning("no agreement of version %s: %r", version, error)
            return None
        return fmean(known) if known else None


def _inputs(card: ModelCard) -> str:
    """Describes the rows of a model's inputs, which are passed on unchanged from one version to another."""
    columns = (f"{each.name} {'|'.join(each.datatypes)} {list(each.shape)}" for each in make_codec(card.codec).inputs)
    return f"{card.input_kind!r} inputs, {', '.join(columns)}"
