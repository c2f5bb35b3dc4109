"""The versions of a model from the view of one ingress: index, canary, comparisons, and changes by operators."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from pydantic import BaseModel, ConfigDict

from cluster.inventory import Inventory, inventory_of_nodes
from deployments.api.endpoint import ModelVersion
from deployments.api.operations import InferRequest
from deployments.local_ray.applications import message_of
from deployments.local_ray.private import DeploymentHandles, ask_store, find_applications, put_applications
from deployments.settings import ServeSettings
from deployments.versions.traffic import Tally, Traffic, TrafficSplitter
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

ANNOUNCED = "listed/"
TRAFFIC = "traffic/"
TURN = "turn/"
TURN_S = 60.0
"""Time after which the turn of an ingress ends, in seconds, because it has died. The timeouts in a turn are shorter."""
TURN_POLL_S = 0.05

STATES = {"RUNNING": "READY", "NOT_STARTED": "LOADING", "DEPLOYING": "LOADING", "DELETING": "UNLOADING"}
"""Triton's states by Serve's states. All others are `UNAVAILABLE`, because requests may fail."""


class AnnouncedApp(BaseModel):
    """An application of Offramp, which its ingresses announce in the store when they start."""

    model_config = ConfigDict(frozen=True)

    app: str
    model: str
    version: str


def index_row(app: AnnouncedApp, details: Mapping[str, Any]) -> dict[str, str]:
    """Returns the row of an application in the index of Triton's repository extension, from Serve's details of it."""
    state = STATES.get(details["status"], "UNAVAILABLE")
    about = " is ".join((app.app, details["status"]))  # an f-string would have the name of Serve's enum
    reason = "" if state == "READY" else ": ".join(filter(None, (about, message_of(details))))
    return {"name": app.model, "version": app.version, "state": state, "reason": reason}


class RayCluster:
    """What the ingresses of a cluster share: a store of versions in Ray's GCS, Serve's applications, and hardware."""

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Lets one ingress of the cluster at a time change versions, because a change begins with a read.

        A turn is an entry with the time of its end. If an ingress dies, its entry stays, and the next number is used.
        """
        number = 0
        while await self.ask_store("put", f"{TURN}{number}", str(time.time() + TURN_S), False):
            ends_s = await self.ask_store("get", f"{TURN}{number}")
            if ends_s is not None and float(ends_s) < time.time():
                number += 1
            else:
                await asyncio.sleep(TURN_POLL_S)
        try:
            yield
        finally:
            await self.ask_store("del", f"{TURN}{number}")

    async def traffic(self, model: str) -> Traffic:
        """Returns how the requests of a model are divided."""
        value = await self.ask_store("get", TRAFFIC + model)
        return Traffic() if value is None else Traffic.model_validate_json(value)

    async def put_traffic(self, model: str, traffic: Traffic) -> None:
        await self.ask_store("put", TRAFFIC + model, traffic.model_dump_json())

    async def announced(self) -> list[AnnouncedApp]:
        """Returns all applications that were announced, including those that are gone."""
        values = [await self.ask_store("get", key) for key in await self.ask_store("list", ANNOUNCED)]
        return [AnnouncedApp.model_validate_json(value) for value in values if value is not None]

    async def announce(self, app: AnnouncedApp) -> None:
        await self.ask_store("put", ANNOUNCED + app.app, app.model_dump_json())

    async def running(self) -> dict[AnnouncedApp, Mapping[str, Any]]:
        """Returns the announced applications that are not gone, with Serve's details."""
        announced, serve = await self.announced(), await self.applications()
        return {each: serve["applications"][each.app] for each in announced if each.app in serve["applications"]}

    ask_store = staticmethod(ask_store)
    applications = staticmethod(find_applications)
    put = staticmethod(put_applications)

    async def inventory(self) -> Inventory:
        import ray

        return inventory_of_nodes(await asyncio.to_thread(ray.nodes))


ASK_S = 5.0
"""Timeout of requests for facts, in seconds."""
GRACE_S = 1.0
"""Added to a request's timeout, in seconds. The other ingress itself keeps the timeout, unless it hangs."""
CANCELLED_AT = 0.0
"""The deadline that cancels a waiting request, on the event loop's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFacts:
    """Facts about a version, for the ingresses of other versions."""

    card: ModelCard
    version: str
    agreement: float | None
    """Share of probes that agree with the full model; None before the first probe."""
    tally: Tally = field(default_factory=Tally)
    """What the ingress has counted of the default version and the canary."""


class IngressLink(DeploymentHandles):
    """Calls the ingresses of one application through Serve's handle.

    In Serve, requests for an application that is gone wait forever, so `waiting` allows callers to cancel them.
    """

    def __init__(self, app: str) -> None:
        super().__init__(app)
        self.waiting: set[asyncio.Timeout] = set()
        """The timeouts of requests without an answer."""

    async def answer(self, request: InferRequest) -> list[Answer] | OfframpError:
        """Returns one ingress's answers, or its error, which Serve would wrap if it were raised."""
        ingress = await self.handle("ingress")
        outcome: list[Answer] | OfframpError = await ingress.answer.remote(request)
        return outcome

    async def facts(self) -> list[VersionFacts]:
        """Returns the facts of the ingresses that are ready; raises VersionUnavailableError if none answers."""
        facts = [each for each in await self.try_broadcast("ingress", "facts", timeout_s=ASK_S) if each is not None]
        if not facts:
            raise VersionUnavailableError(f"no ingress of {self._app!r} is ready; see POST /v2/repository/index")
        return facts


class OtherVersion:
    """Another version of the model, which answers through its ingresses."""

    def __init__(self, facts: VersionFacts, link: IngressLink, default_timeout_s: float) -> None:
        self.card: ModelCard = facts.card
        self.task = find_task(facts.card.task)
        self.version = facts.version
        self._link = link
        self._default_timeout_s = default_timeout_s

    async def infer(self, request: InferRequest) -> list[Answer]:
        """Returns the answers; raises the other version's errors, or VersionUnavailableError."""
        timeout_s = request.timeout_s or self._default_timeout_s
        timeout = asyncio.timeout(timeout_s + GRACE_S)
        self._link.waiting.add(timeout)
        try:
            async with timeout:
                outcome = await self._link.answer(request)
        except Exception as error:  # Ray raises different errors for an application that is gone
            if isinstance(error, TimeoutError) and timeout.when() != CANCELLED_AT:
                raise DeadlineError(f"no answer within {timeout_s:g} s") from None
            logger.warning("request %s: version %s: %r", request.request_id, self.version, error)
            raise VersionUnavailableError(f"version {self.version!r} cannot be reached") from error
        finally:
            self._link.waiting.discard(timeout)
        if isinstance(outcome, OfframpError):
            raise outcome
        return outcome


VERSIONS_PATH = "/versions/"
"""Part of the route prefixes at which only requests for one version arrive."""
REFRESH_S = 1.0
"""Interval at which an ingress reads the store, in seconds, to follow changes that another ingress has received."""


@dataclass(slots=True, eq=False)
class Versions(TrafficSplitter):
    """The versions of one model, from the view of one ingress of one version."""

    settings: ServeSettings
    cluster: RayCluster
    link_to: Callable[[str], IngressLink]
    _links: dict[str, IngressLink] = field(default_factory=dict, init=False)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _apps: dict[str, str] = field(default_factory=dict, init=False)
    """The application that serves each version, as long as it can be used."""

    async def run(self, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        """Announces this version. An ingress at the root then follows the store forever."""
        while not await self._try(self.cluster.announce(self._own_app)):
            await sleep(REFRESH_S)
        while self.is_root:
            await self._try(self._refresh())
            await sleep(REFRESH_S)

    async def index(self, *, ready_only: bool = False) -> list[dict[str, str]]:
        """Returns the versions of all models that Serve knows, sorted by name."""
        rows = [index_row(app, details) for app, details in (await self.cluster.running()).items()]
        rows.sort(key=lambda row: (row["name"], row["version"]))
        return [row for row in rows if row["state"] == "READY" or not ready_only]

    async def names(self) -> list[str]:
        """Returns the versions of the model, or only this one if Ray does not answer."""
        try:
            rows = await self.index()
        except Exception as error:
            logger.warning("the versions could not be read: %r", error)
            rows = []
        return sorted({self.own.version, *(row["version"] for row in rows if row["name"] == self.own.card.name)})

    async def canary_report(self) -> dict[str, Any]:
        """Returns the default version and the canary, with the counts of all ingresses of the root's application.

        The counts of an ingress that has not read the last change yet belong to other versions, and are left out.
        """
        model, tally = self.own.card.name, Tally()
        traffic, root = await self.cluster.traffic(model), await self._root(model)
        for each in await self._link(root.app).facts():
            if each.tally.since == traffic.since:
                tally.add(each.tally)
        default = traffic.default or root.version
        names = [default] if traffic.canary is None else [default, traffic.canary.version]
        return {
            "model": model,
            "default": default,
            "canary": None if traffic.canary is None else traffic.canary.model_dump(),
            "versions": {
                name: tally.versions[name].figures | {"agreement": await self._agreement(name)} for name in names
            },
            "compared": tally.agreement,
        }

    async def check_free(self, model: str, version: str) -> None:
        """Raises InputError for a version that answers requests without a version."""
        traffic, root = await self.cluster.traffic(model), await self._root(model)
        answering = {each.version for each in (self._own_app, root) if each.model == model}
        if version in (traffic.default, *answering):
            remedy = "" if version in answering else " until another one is the default"
            raise InputError(f"version {version!r} answers requests that name none; it cannot be unloaded{remedy}")
        if version == traffic.canary_version:
            raise InputError(f"version {version!r} is the canary; end that first")

    def check_control(self) -> None:
        """Raises ControlRefusedError unless the settings allow changes over HTTP."""
        if self.settings.repository.control != "explicit":
            raise ControlRefusedError("changes over HTTP need repository: {control: explicit} in the service file at /")

    async def change(self, version: str, **fields: Any) -> dict[str, Any]:
        """Stores a change of fields of the last division, follows it, and returns the report.

        Raises ControlRefusedError, UnknownModelError and VersionUnavailableError unless the version can be reached, and
        InputError for a version that takes other inputs or generates, and for a canary that is the default version.
        """
        is_canary = fields.get("canary") is not None
        if self.own.card.generates and (is_canary or version != self.own.version):
            raise InputError("models that generate have no canary and no other default: use the address of a version")
        self.check_control()
        model = self.own.card.name
        async with self.cluster.turn():
            before = await self.cluster.traffic(model)
            if is_canary and version == (before.default or (await self._root(model)).version):
                raise InputError(f"version {version!r} is the default version, and cannot be the canary")
            self._apps.pop(version, None)  # another application may serve it now
            await self._connect(version)
            await self.cluster.put_traffic(model, before.changed(**fields))
        if self.is_root:
            await self._refresh()
        return await self.canary_report()

    @property
    def is_root(self) -> bool:
        """Whether requests that name no version arrive at this ingress."""
        return VERSIONS_PATH not in self.settings.route_prefix

    @property
    def _own_app(self) -> AnnouncedApp:
        return AnnouncedApp(app=self.settings.app, model=self.own.card.name, version=self.settings.version)

    async def _root(self, model: str) -> AnnouncedApp:
        """Returns the application at which requests for a model without a version arrive; ours if there is none."""
        if self.is_root and model == self.own.card.name:
            return self._own_app
        running = (await self.cluster.running()).items()
        routes = {app: details.get("route_prefix") for app, details in running if app.model == model}
        at_root = (app for app, route in routes.items() if route is not None and VERSIONS_PATH not in route)
        return next(at_root, self._own_app)

    async def _refresh(self) -> None:
        """Follows the stored division of requests, and cancels requests that wait for an application that is gone.

        All links are checked, because a canary may end and be unloaded before its last answer.
        """
        async with self._lock:  # otherwise an old division might replace a new one
            await self._divide(await self.cluster.traffic(self.own.card.name))
        for link in [each for each in self._links.values() if each.waiting]:
            try:
                await link.facts()
            except VersionUnavailableError as error:
                logger.warning("requests that wait for an application are cancelled: %s", error)
                for timeout in link.waiting:
                    if not timeout.expired():
                        timeout.reschedule(CANCELLED_AT)

    async def _divide(self, traffic: Traffic) -> None:
        """Divides requests between the available versions. If one is unavailable for a moment, the tally is kept."""
        default = await self._try_connect(traffic.default or self.own.version) or self.own
        wanted, canary = traffic.canary, None
        if wanted is not None and wanted.version != default.version:
            canary = await self._try_connect(wanted.version)
        self.canary, self.default = canary, None if canary is None and default is self.own else default
        if wanted is not None:
            self.share, self.compare_share = wanted.share, wanted.compare_share
        if self.tally.since != traffic.since:
            self.tally = Tally(since=traffic.since)

    async def _try_connect(self, version: str) -> ModelVersion | None:
        log = logger.warning if version in self._apps else logger.debug  # every refresh tries again
        try:
            return await self._connect(version)
        except (InputError, VersionUnavailableError) as error:
            log("version %s is not used: %s", version, error)
            return None

    async def _try(self, step: Awaitable[None]) -> bool:
        """Returns whether a step succeeds. While Ray is unavailable, the last state stays in force."""
        try:
            await step
        except Exception as error:
            logger.warning("a change of versions failed, and is tried again: %r", error)
            return False
        return True

    async def _connect(self, version: str) -> ModelVersion:
        """Connects to a version; raises UnknownModelError, VersionUnavailableError, and InputError for other inputs."""
        if version == self.own.version:
            return self.own
        app = self._apps.pop(version, None) or await self._find(version)  # it is looked up again after a failure
        link = self._link(app)
        [facts, *_] = await link.facts()
        if facts.version != version:
            raise VersionUnavailableError(f"{app} serves version {facts.version!r} now")
        ours, theirs = _inputs(self.own.card), _inputs(facts.card)
        if ours != theirs:
            raise InputError(f"version {version!r} takes {theirs}, version {self.own.version!r} {ours}")
        self._apps[version] = app
        return OtherVersion(facts, link, self.settings.default_timeout_s)

    async def _find(self, version: str) -> str:
        """Returns the application of a version, preferably a running one; raises UnknownModelError."""
        model, running = self.own.card.name, (await self.cluster.running()).items()
        states = {app.app: each["status"] for app, each in running if (app.model, app.version) == (model, version)}
        if not states:
            known = ", ".join(repr(each) for each in await self.names())
            raise UnknownModelError(f"unknown version {version!r} of {model!r}; there are {known}")
        return min(states, key=lambda app: (states[app] != "RUNNING", app))

    def _link(self, app: str) -> IngressLink:
        return self._links.get(app) or self._links.setdefault(app, self.link_to(app))

    async def _agreement(self, version: str) -> float | None:
        """Returns the agreement with the full model, by the probes of all ingresses; None before the first probe."""
        try:
            app = self.settings.app if version == self.own.version else await self._find(version)
            known = [each.agreement for each in await self._link(app).facts() if each.agreement is not None]
        except Exception as error:  # the other figures are reported without it
            logger.warning("no agreement of version %s: %r", version, error)
            return None
        return fmean(known) if known else None


def _inputs(card: ModelCard) -> str:
    """Describes a model's inputs, which must be the same in two versions, because they are passed on unchanged."""
    columns = (f"{each.name} {'|'.join(each.datatypes)} {list(each.shape)}" for each in make_codec(card.codec).inputs)
    return f"{card.input_kind!r} inputs, {', '.join(columns)}"
