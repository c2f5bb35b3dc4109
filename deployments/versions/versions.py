"""The versions of a model as one ingress sees them: the index, the canary, comparisons, and operators' orders."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from statistics import fmean
from typing import Any

from deployments.api.endpoint import Served
from deployments.api.parsing import Canary, InferRequest
from deployments.settings import ServeSettings
from deployments.versions.choice import Fork, Tally, Traffic, compared_figures, version_figures
from deployments.versions.other import IngressLink, VersionFacts, connected
from deployments.versions.store import IndexRow, Listed, RayStore, app_of, index_rows
from earlyexit.clock import Clock
from earlyexit.codecs import make_codec
from earlyexit.errors import ControlRefusedError, InputError, OfframpError, UnknownModelError, VersionUnavailableError
from earlyexit.network.boundary import Answer
from earlyexit.network.store import ModelCard

VERSIONS_PATH = "/versions/"
"""A part of route prefixes by which only requests for one version arrive."""
LOOK_S = 1.0
"""How soon an ingress follows an order that another ingress received. Each look is one read of Ray's store."""

Sleep = Callable[[float], Awaitable[object]]

logger = logging.getLogger(f"ray.serve.{__name__}")


class Versions:
    """The versions of one model, as one ingress of one version sees them."""

    def __init__(
        self,
        own: Served,
        settings: ServeSettings,
        store: RayStore,
        link_to: Callable[[str], IngressLink],
        clock: Clock,
        show: Callable[[Tally], None],
    ) -> None:
        """`show` gets the counts about once a second, while two versions share the requests."""
        self._own = own
        self._app = settings.app
        self._store = store
        self._link_to = link_to
        self._links: dict[str, IngressLink] = {}
        self._answers: dict[str, bool] = {}
        """Whether each application answered when it was last asked, during one look."""
        self._following = asyncio.Lock()
        self._apps: dict[str, str] = {}
        """The application that last served each version."""
        self._is_root = VERSIONS_PATH not in settings.route_prefix
        self._control = settings.repository.control
        self._default_timeout_s = settings.default_timeout_s
        self._clock = clock
        self._show = show
        self._fork: Fork | None = None
        """None: this version answers all requests, and nothing is counted."""
        self._sides: tuple[str, str | None] | None = None
        """The default version and the canary of the tally."""
        self.tally = Tally()
        """What this ingress has counted since the default version or the canary changed."""
        self.comparing: set[asyncio.Task[None]] = set()
        """Running comparisons of two versions."""

    async def answer(self, request: InferRequest) -> tuple[Served, list[Answer]]:
        """Answers a request that names no version; returns also the version that answered it."""
        if self._fork is None:
            return self._own, await self._own.infer(request)
        return await self._fork.answer(request)

    async def run(self, sleep: Sleep = asyncio.sleep) -> None:
        """Announces this version; an ingress at the root then follows the store, without an end."""
        await self._until_done(self._register, sleep)
        while self._is_root:
            await self._until_done(self._look, sleep)
            await sleep(LOOK_S)

    async def index(self, *, ready_only: bool = False) -> list[IndexRow]:
        rows = index_rows(await self._store.listed(), await self._store.statuses())
        return [row for row in rows if row.state == "READY" or not ready_only]

    async def names(self) -> list[str]:
        """Returns the versions of the model; only this one if Ray does not answer."""
        try:
            rows = await self.index()
        except Exception as error:
            logger.warning("versions: %r", error)
            rows = []
        return sorted({self._own.version, *(row.version for row in rows if row.name == self._own.card.name)})

    async def side_by_side(self) -> dict[str, Any]:
        """Returns the default version and the canary, with the counts of all ingresses of this application."""
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
        """Lets a version answer its share of the requests; a canary without any share ends the trial.

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
        """Lets the default version answer all requests; raises ControlRefusedError."""
        await self._put((await self._changeable()).model_copy(update={"canary": None}))

    async def set_default(self, version: str) -> None:
        """Lets a version answer requests that name none; this ends its trial as a canary.

        Raises ControlRefusedError, UnknownModelError, VersionUnavailableError.
        """
        traffic = await self._changeable()
        await self._check_there(version)
        is_canary = traffic.canary is not None and traffic.canary.version == version
        await self._put(Traffic(default=version, canary=None if is_canary else traffic.canary))

    async def check_free(self, model: str, version: str) -> None:
        """Raises InputError for a version that answers requests without a version."""
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
        """Raises ControlRefusedError unless the settings allow orders over HTTP."""
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
        async with self._following:  # else a traffic that was read before an order might be followed after it
            await self._follow(await self._store.traffic(self._own.card.name))
        if self._fork is not None:
            self._show(self.tally)

    async def _follow(self, traffic: Traffic) -> None:
        """Divides requests as the traffic says, and gives up requests that wait for an application that is gone.

        The traffic may not name that application any more: a canary may end, and be unloaded, before its last answer.
        """
        self._answers.clear()
        self._fork = await self._fork_for(traffic)
        for app, link in list(self._links.items()):
            if link.is_waited_for and not await self._is_there(app, link):
                link.give_up()

    async def _fork_for(self, traffic: Traffic) -> Fork | None:
        """Returns the fork between the versions that can be reached; a change of versions starts a new tally."""
        default = await self._reach(traffic.default or self._own.version) or self._own
        asked = traffic.canary
        canary = None if asked is None or asked.version == default.version else await self._reach(asked.version)
        if canary is None and default is self._own:
            return None
        sides = default.version, None if canary is None else canary.version
        if self._sides != sides:
            self._sides, self.tally = sides, Tally()
        return Fork(
            own=self._own,
            default=default,
            canary=canary,
            share=0.0 if asked is None else asked.share,
            compare_share=0.0 if asked is None else asked.compare_share,
            tally=self.tally,
            clock=self._clock,
            comparing=self.comparing,
        )

    async def _reach(self, version: str) -> Served | None:
        if version == self._own.version:
            return self._own
        try:
            return await self._connect(version)
        except OfframpError as error:
            logger.warning("version %s is left out: %s", version, error)
            return None

    async def _is_there(self, app: str, link: IngressLink) -> bool:
        if app not in self._answers:
            try:
                self._answers[app] = bool(await link.facts())
            except Exception as error:  # Ray raises different errors for an application that is gone
                logger.warning("what waits for %s is given up: %r", app, error)
                self._answers[app] = False
        return self._answers[app]

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

    def _link(self, app: str) -> IngressLink:
        if app not in self._links:
            self._links[app] = self._link_to(app)
        return self._links[app]

    async def _agreement(self, version: str) -> float | None:
        """Returns the agreement with the full model by the probes of all ingresses; None before the first probe."""
        try:
            app = self._app if version == self._own.version else await self._find(version)
            return mean_agreement(await self._link(app).facts())
        except Exception as error:  # the other figures are shown without it
            logger.warning("no agreement of version %s: %r", version, error)
            return None


def _inputs(card: ModelCard) -> str:
    """Describes the rows of a model's inputs, which are passed on unchanged from one version to another."""
    columns = (f"{each.name} {'|'.join(each.datatypes)} {list(each.shape)}" for each in make_codec(card.codec).inputs)
    return f"{card.input_kind!r} inputs, {', '.join(columns)}"


def mean_agreement(facts: Iterable[VersionFacts]) -> float | None:
    """Returns the mean over the ingresses that have seen a probe; None if there is none."""
    known = [each.agreement for each in facts if each.agreement is not None]
    return fmean(known) if known else None
