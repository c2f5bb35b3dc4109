"""Loads and unloads versions while others serve: each is an application, which Serve starts or ends.

The HTTP routes are Triton's repository extension, and the canary.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cluster.inventory import Inventory, from_nodes
from cluster.render import application_config
from deployments.api.endpoint import Backend, json_response
from deployments.api.parsing import Canary, DefaultVersion, IndexBody, LoadBody, LoadParameters, validated
from deployments.local_ray.applications import THROUGHPUT, check_devices, claimed, with_application, without_application
from deployments.local_ray.private import find_applications, put_applications
from deployments.settings import ServeSettings, max_accelerators
from deployments.versions.versions import IndexRow, Listed, Versions
from earlyexit.errors import InputError, UnknownModelError
from earlyexit.network.store import read_card

SETTINGS_FILE = "settings.json"


class RayCluster:
    """The applications that Serve runs on this cluster, and the cluster's hardware."""

    async def applications(self) -> dict[str, Any]:
        return await find_applications()

    async def put(self, config: Mapping[str, Any]) -> None:
        await put_applications(config)

    async def inventory(self) -> Inventory:
        import ray

        return from_nodes(await asyncio.to_thread(ray.nodes))


class VersionRoutes:
    """Handlers over the versions of one model.

    One version is loaded or unloaded at a time, because each PUT replaces all applications.
    """

    def __init__(self, backend: Backend, versions: Versions, cluster: RayCluster, folder: str | None) -> None:
        self._bodies = backend.bodies
        self._versions = versions
        self._cluster = cluster
        self._folder = None if folder is None else Path(folder)
        self._lock = asyncio.Lock()

    async def index(self, request: Request) -> Response:
        """Returns all versions on the cluster, then those that are only in the folder."""
        body = validated(IndexBody, await self._bodies.read(request) or b"{}")
        rows = await self._versions.index(ready_only=body.ready)
        loaded = {(row.name, row.version) for row in rows}
        known = {} if body.ready else await asyncio.to_thread(in_folder, self._folder)
        rows += [
            IndexRow(name=model, version=version, state="UNAVAILABLE", reason="not loaded")
            for model, versions in known.items()
            for version in versions
            if (model, version) not in loaded
        ]
        return json_response([asdict(row) for row in rows])

    async def load(self, request: Request) -> Response:
        """Begins to load a version; the index tells when it is ready."""
        return await self._order(request, self._load)

    async def unload(self, request: Request) -> Response:
        """Begins to unload a version; the index tells when it is gone."""
        return await self._order(request, self._unload)

    async def canary(self, request: Request) -> Response:
        return json_response(await self._versions.side_by_side())

    async def set_canary(self, request: Request) -> Response:
        await self._versions.set_canary(validated(Canary, await self._bodies.read(request)))
        return await self.canary(request)

    async def end_canary(self, request: Request) -> Response:
        await self._versions.end_canary()
        return await self.canary(request)

    async def set_default(self, request: Request) -> Response:
        body = validated(DefaultVersion, await self._bodies.read(request))
        await self._versions.set_default(body.version)
        return await self.canary(request)

    async def _order(self, request: Request, carry_out: Callable[[str, LoadParameters], Awaitable[None]]) -> Response:
        """Carries out an order; raises ControlRefusedError unless the settings allow it."""
        body = validated(LoadBody, await self._bodies.read(request) or b"{}")
        self._versions.check_control()
        async with self._lock:
            await carry_out(request.path_params["model"], body.parameters)
        return json_response({})

    async def _load(self, model: str, parameters: LoadParameters) -> None:
        """Makes Serve start a version; the index tells when it is ready.

        Raises InputError, UnknownModelError, and ModelFolderError for a folder without a model.
        """
        settings = await asyncio.to_thread(self._settings, model, parameters)
        serve = await self._cluster.applications()
        self._check_new(settings, model, await self._versions.store.listed(), serve)
        others = claimed(serve, settings.app)
        check_devices(max_accelerators(settings), await self._cluster.inventory(), others)
        config = application_config(json.loads(settings.model_dump_json()), name=settings.app, environment=THROUGHPUT)
        config = with_application(serve, {"applications": [config]})
        await self._versions.store.put_listed(Listed(app=settings.app, model=model, version=settings.version))
        await self._cluster.put(config)

    async def _unload(self, model: str, parameters: LoadParameters) -> None:
        """Makes Serve end a version, after the answers to its running requests.

        Raises InputError for a version that answers requests without a version, UnknownModelError.
        """
        serve = await self._cluster.applications()
        there = {
            each.version: each.app
            for each in await self._versions.store.listed()
            if each.model == model and each.app in serve["applications"]
        }
        version = parameters.version or _only(there, f"{model!r} is loaded as versions")
        if version not in there:
            raise UnknownModelError(f"version {version!r} of {model!r} is not loaded; there are {_names(there)}")
        await self._versions.check_free(model, version)
        await self._cluster.put(without_application(serve, there[version]))

    def _settings(self, model: str, parameters: LoadParameters) -> ServeSettings:
        settings = validated(ServeSettings, self._config(model, parameters))
        card = read_card(Path(settings.model))
        if card.name != model:
            raise InputError(f"the settings are of model {card.name!r}, not of {model!r}")
        if parameters.version not in (None, settings.version):
            raise InputError(f"the settings are of version {settings.version!r}, not of {parameters.version!r}")
        return settings

    def _config(self, model: str, parameters: LoadParameters) -> bytes:
        if parameters.config is not None:
            return parameters.config.encode()
        known = in_folder(self._folder).get(model, {})
        version = parameters.version or _only(known, f"the repository has {model!r} as versions")
        if version not in known:
            raise UnknownModelError(f"the repository has no version {version!r} of {model!r}; it has {_names(known)}")
        return known[version].read_bytes()

    def _check_new(self, settings: ServeSettings, model: str, listed: list[Listed], serve: Mapping[str, Any]) -> None:
        for each in listed:
            is_same = (each.model, each.version) == (model, settings.version)
            if each.app in serve["applications"] and is_same != (each.app == settings.app):
                raise InputError(
                    f"application {each.app!r} serves version {each.version!r} of {each.model!r}; "
                    f"{settings.app!r}, version {settings.version!r} of {model!r}, needs another name or version"
                )


def in_folder(folder: Path | None) -> dict[str, dict[str, Path]]:
    """Returns the settings files of a repository's folder by model and version; none without a folder."""
    found: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.glob(f"*/*/{SETTINGS_FILE}")) if folder is not None else []:
        found.setdefault(path.parts[-3], {})[path.parts[-2]] = path
    return found


def _only(known: Mapping[str, object], words: str) -> str:
    if len(known) != 1:
        raise InputError(f"parameters.version is needed: {words} {_names(known)}")
    return next(iter(known))


def _names(known: Mapping[str, object]) -> str:
    return ", ".join(map(repr, sorted(known))) or "none"
