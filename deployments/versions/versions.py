"""What an ingress knows and does about versions: which exist, which answers, how two compare, and operators' orders."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from statistics import fmean
from typing import Any

from deployments.api.bodies import Canary
from deployments.api.endpoint import Served, VersionFacts
from deployments.settings import ServeSettings
from deployments.versions.choice import (
    Chosen,
    Compared,
    Tally,
    Traffic,
    VersionChoice,
    compared_figures,
    version_figures,
)
from deployments.versions.other import IngressLink, PatientLink, connected
from deployments.versions.store import IndexRow, Listed, RayStore, app_of, index_rows
from earlyexit.clock import Clock
from earlyexit.codecs import make_codec
from earlyexit.errors import ControlRefusedError, InputError, UnknownModelError, VersionUnavailableError
from earlyexit.network.store import ModelCard

VERSIONS_PATH = "/versions/"
"""In a route prefix: only requests for this version come by it."""
LOOK_S = 1.0
"""How soon an ingress does what another was told; one look is one question to Ray."""

Sleep = Callable[[float], Awaitable[object]]

logger = logging.getLogger(f"ray.serve.{__name__}")


class Versions:
    """Of one model, as one ingress of one version sees them."""

    def __init__(
        self,
        own: Served,
        settings: ServeSettings,
        store: RayStore,
        link_to: Callable[[str], IngressLink],
        clock: Clock,
        show: Callable[[Tally], None],
    ) -> None:
        """`show` is told about once a second what was counted, while two versions share the requests."""
        self._own = own
        self._app = settings.app
        self._store = store
        self._link_to = link_to
        self._links: dict[str, PatientLink] = {}
        self._answers: dict[str, bool] = {}
        """Which applications answered when they were last asked what they are, while the traffic is followed."""
        self._following = asyncio.Lock()
        self._apps: dict[str, str] = {}
        self._is_root = VERSIONS_PATH not in settings.route_prefix
        self._control = settings.repository.control
        self._default_timeout_s = settings.default_timeout_s
        self._choice = VersionChoice(own, self._connect, clock)
        self._show = show

    def choose(self, request_id: str) -> Chosen | Compared | None:
        """The version that answers a request that names none; None: this one, and nothing is counted."""
        fork = self._choice.fork
        return None if fork is None else fork.choose(request_id)

    async def run(self, sleep: Sleep = asyncio.sleep) -> None:
        """Announce this version; at the root, then follow the store for ever."""
        await self._until_done(self._register, sleep)
        while self._is_root:
            await self._until_done(self._look, sleep)
            await sleep(LOOK_S)

    async def index(self, *, ready_only: bool = False) -> list[IndexRow]:
        rows = index_rows(await self._store.listed(), await self._store.statuses())
        return [row for row in rows if row.state == "READY" or not ready_only]

    async def names(self) -> list[str]:
        """The versions of our model; only ours where Ray does not say."""
        try:
            rows = await self.index()
        except Exception as error:
            logger.warning("versions: %r", error)
            rows = []
        return sorted({self._own.version, *(row.version for row in rows if row.name == self._own.card.name)})

    @property
    def tally(self) -> Tally:
        """What this ingress has counted since default and canary are what they are."""
        return self._choice.tally

    async def side_by_side(self) -> dict[str, Any]:
        """Default and canary, with what all our ingresses have counted of each."""
        traffic = await self._store.traffic(self._own.card.name)
        tally = Tally()
        for each in await self._link(self._app).tallies():
            tally.add(each)
        default = traffic.default or self._own.version
        names = dict.fromkeys((default, *((traffic.canary.version,) if traffic.canary else ())))
        return {
            "model": self._own.card.name,
            "default": default,
            "canary": None if traffic.canary is None else traffic.canary.model_dump(),
            "versions": {
                name: version_figures(tally.of(name)) | {"agreement": await self._agreement(name)} for name in names
            },
            "compared": compared_figures(tally),
        }

    async def set_canary(self, canary: Canary) -> None:
        """Let a version answer its share; one that neither answers nor is compared ends it.

        Raises ControlRefusedError, UnknownModelError, InputError, VersionUnavailableError.
        """
        if self._own.card.generates:
            raise InputError("a stream has no canary: name the version in `model`, as 'name:version'")
        traffic = await self._changeable()
        default = traffic.default or self._own.version
        if canary.version == default:
            raise InputError(f"version {default!r} is the default; a canary is another")
        await self._check_there(canary.version)
        is_over = canary.share == 0 and canary.compare_share == 0
        await self._put(traffic.model_copy(update={"canary": None if is_over else canary}))

    async def end_canary(self) -> None:
        """Let the default version answer everything; raises ControlRefusedError."""
        await self._put((await self._changeable()).model_copy(update={"canary": None}))

    async def set_default(self, version: str) -> None:
        """Let a version answer what names none; its canary is over with that.

        Raises ControlRefusedError, UnknownModelError, VersionUnavailableError.
        """
        traffic = await self._changeable()
        await self._check_there(version)
        is_canary = traffic.canary is not None and traffic.canary.version == version
        await self._put(Traffic(default=version, canary=None if is_canary else traffic.canary))

    async def check_free(self, model: str, version: str) -> None:
        """Raise InputError for a version that requests are sent to which name none."""
        traffic = await self._store.traffic(model)
        is_ours = (model, version) == (self._own.card.name, self._own.version)
        if is_ours or version == traffic.default:
            raise InputError(f"version {version!r} answers requests that name none; it cannot be unloaded")
        if traffic.canary is not None and version == traffic.canary.version:
            raise InputError(f"version {version!r} is the canary; end that first")

    async def _changeable(self) -> Traffic:
        self.check_control()
        return await self._store.traffic(self._own.card.name)

    def check_control(self) -> None:
        """Raise ControlRefusedError unless the settings let operators in."""
        if self._control != "explicit":
            raise ControlRefusedError("not by HTTP: this service's settings do not say repository.control: explicit")

    async def _check_there(self, version: str) -> None:
        if version != self._own.version:
            await self._connect(version)

    async def _put(self, traffic: Traffic) -> None:
        async with self._following:
            await self._store.put_traffic(self._own.card.name, traffic)
            if self._is_root:
                await self._follow(traffic)

    async def _register(self) -> None:
        listed = Listed(app=self._app, model=self._own.card.name, version=self._own.version)
        await self._store.put_listed(listed)

    async def _look(self) -> None:
        """Under a lock: what was read before an order must not be followed after it."""
        async with self._following:
            await self._follow(await self._store.traffic(self._own.card.name))
        if self._choice.fork is not None:
            self._show(self._choice.tally)

    async def _follow(self, traffic: Traffic) -> None:
        """What still waits for an application that is gone is given up once nothing more is sent there.

        Also where the traffic does not name it any more: a canary may end, and be unloaded, before its last answer.
        """
        self._answers.clear()
        await self._choice.follow(traffic)
        for app, link in list(self._links.items()):
            if link.is_waited_for and not await self._is_there(app, link):
                link.give_up()

    async def _is_there(self, app: str, link: PatientLink) -> bool:
        if app not in self._answers:
            try:
                self._answers[app] = bool(await link.facts())
            except Exception as error:  # whatever Ray says of what is gone
                logger.warning("what waits for %s is given up: %r", app, error)
                self._answers[app] = False
        return self._answers[app]

    async def _until_done(self, step: Callable[[], Awaitable[None]], sleep: Sleep) -> None:
        """Ray may be away for a while: what was known then goes on."""
        while True:
            try:
                await step()
            except Exception as error:
                logger.warning("versions: %r", error)
                await sleep(LOOK_S)
            else:
                return

    async def _connect(self, version: str) -> Served:
        """Serve is asked only where the application of the last time does not answer any more."""
        app = self._apps.pop(version, None)
        try:
            served = await self._connected(app or await self._find(version), version)
        except VersionUnavailableError:
            if app is None:
                raise
            served = await self._connected(await self._find(version), version)
        return served

    async def _connected(self, app: str, version: str) -> Served:
        self._answers[app] = False
        served = await connected(app, version, self._link(app), self._default_timeout_s)
        self._answers[app] = True
        self._apps[version] = app
        ours, theirs = _inputs(self._own.card), _inputs(served.card)
        if ours != theirs:
            raise InputError(f"version {version!r} takes {theirs}, version {self._own.version!r} {ours}")
        return served

    async def _find(self, version: str) -> str:
        name = self._own.card.name
        app = app_of(await self._store.listed(), await self._store.statuses(), name, version)
        if app is None:
            known = ", ".join(repr(each) for each in await self.names())
            raise UnknownModelError(f"unknown version {version!r} of {name!r}; there are {known}")
        return app

    def _link(self, app: str) -> PatientLink:
        if app not in self._links:
            self._links[app] = PatientLink(self._link_to(app))
        return self._links[app]

    async def _agreement(self, version: str) -> float | None:
        """With the full model, by the probes of all its ingresses; None before the first probe."""
        try:
            app = self._app if version == self._own.version else await self._find(version)
            return mean_agreement(await self._link(app).facts())
        except Exception as error:  # the other figures are worth showing without it
            logger.warning("no agreement of version %s: %r", version, error)
            return None


def _inputs(card: ModelCard) -> str:
    """What rows are made of: those of one version are given to another as they are."""
    columns = (f"{each.name} {'|'.join(each.datatypes)} {list(each.shape)}" for each in make_codec(card.codec).inputs)
    return f"{card.input_kind!r} inputs, {', '.join(columns)}"


def mean_agreement(facts: Iterable[VersionFacts]) -> float | None:
    """Over the ingresses that have seen a probe."""
    known = [each.agreement for each in facts if each.agreement is not None]
    return fmean(known) if known else None
