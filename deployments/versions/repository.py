"""The HTTP routes of Triton's repository extension and of the canary.

They load and unload versions while other versions serve. Each version is an application, which Serve starts or stops.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.render import application_config
from deployments.api.exchange import HttpRequest
from deployments.api.operations import Canary, DefaultVersion, IndexBody, LoadBody, LoadParameters, parse_body
from deployments.local_ray.applications import THROUGHPUT, check_devices, claimed, with_application, without_application
from deployments.settings import ServeSettings, max_accelerators
from deployments.versions.versions import AnnouncedApp, Versions
from earlyexit.errors import ControlRefusedError, InputError, UnknownModelError

SETTINGS_FILE = "settings.json"


class VersionRoutes:
    """Handlers of the operations on versions. A load or unload replaces the whole set of applications."""

    def __init__(self, versions: Versions, folder: str | None) -> None:
        self._versions = versions
        self._folder = None if folder is None else Path(folder)

    async def index(self, request: HttpRequest) -> list[dict[str, str]]:
        """Answers with all versions on the cluster, followed by those that are only in the repository's folder."""
        body = await request.parsed(IndexBody, empty=b"{}")
        rows = await self._versions.index(ready_only=body.ready)
        loaded = {(row["name"], row["version"]) for row in rows}
        files = {} if body.ready else await asyncio.to_thread(settings_files, self._folder)
        rows += [
            {"name": model, "version": version, "state": "UNAVAILABLE", "reason": "not loaded"}
            for model, versions in files.items()
            for version in versions
            if (model, version) not in loaded
        ]
        return rows

    async def load(self, request: HttpRequest) -> Mapping[str, Any]:
        """Starts to load a version; the index reports when it is ready.

        Raises InputError, UnknownModelError, and ModelFolderError for a folder without a model.
        """
        model, parameters = await self._parsed(request)
        if not self._versions.is_root:  # it does not know how many accelerators the service at / may use
            raise ControlRefusedError("versions are loaded by the service at /, not at the address of a version")
        cluster, own = self._versions.cluster, self._versions.settings
        settings = await asyncio.to_thread(self._settings, model, parameters)
        if settings.access is None:  # otherwise the version's own address would need no key
            settings = settings.model_copy(update={"access": own.access})
        new = AnnouncedApp(app=settings.app, model=model, version=settings.version)
        async with cluster.turn():
            serve, running = await cluster.applications(), await cluster.running()
            for each in running:
                if ((each.model, each.version) == (model, new.version)) != (each.app == new.app):
                    raise InputError(
                        f"application {each.app!r} serves version {each.version!r} of {each.model!r}; "
                        f"{new.app!r}, version {new.version!r} of {model!r}, needs another name or version"
                    )
            others = Counter(claimed(serve, new.app))
            if serve["applications"].get(own.app, {}).get("deployed_app_config") is None:  # `offramp serve` started it
                others += Counter(max_accelerators(own))
                settings = settings.on_one_machine()
            check_devices(max_accelerators(settings), await cluster.inventory(), others)
            config = application_config(json.loads(settings.model_dump_json()), name=new.app, environment=THROUGHPUT)
            config = with_application(serve, {"applications": [config]})
            await cluster.announce(new)
            await cluster.put(config)
        return {}

    async def unload(self, request: HttpRequest) -> Mapping[str, Any]:
        """Starts to unload a version, which still answers its running requests; the index reports when it is gone.

        Raises UnknownModelError, and InputError for a version that answers requests without a version.
        """
        model, parameters = await self._parsed(request)
        cluster = self._versions.cluster
        async with cluster.turn():
            serve, running = await cluster.applications(), await cluster.running()
            loaded = {each.version: each.app for each in running if each.model == model}
            version = _choose(loaded, model, parameters.version, "cluster")
            await self._versions.check_free(model, version)
            await cluster.put(without_application(serve, loaded[version]))
        return {}

    async def canary(self, request: HttpRequest) -> Mapping[str, Any]:
        return await self._versions.canary_report()

    async def set_canary(self, request: HttpRequest) -> Mapping[str, Any]:
        """Lets a version answer its share of the requests. A canary whose shares are 0 ends the trial."""
        canary = await request.parsed(Canary)
        return await self._versions.change(canary.version, canary=canary)

    async def end_canary(self, request: HttpRequest) -> Mapping[str, Any]:
        return await self._versions.change(self._versions.own.version, canary=None)

    async def set_default(self, request: HttpRequest) -> Mapping[str, Any]:
        """Lets a version answer requests that name none. If it was the canary, its trial ends."""
        body = await request.parsed(DefaultVersion)
        return await self._versions.change(body.version, default=body.version)

    async def _parsed(self, request: HttpRequest) -> tuple[str, LoadParameters]:
        """Returns the model and the parameters; raises ControlRefusedError unless the settings allow changes.

        Browsers send POST requests for pages of any site without asking the service first.
        """
        body = await request.parsed(LoadBody, empty=b"{}")
        self._versions.check_control()
        host, origin = map(request.headers.get, ("host", "origin"))
        if origin not in (None, f"http://{host}", f"https://{host}"):
            access = self._versions.settings.access
            if access is None or not {origin, "*"} & {*access.cors_origins}:
                raise ControlRefusedError(f"pages of {origin} may not change versions; see access.cors_origins")
        return request.path_params["model"], body.parameters

    def _settings(self, model: str, parameters: LoadParameters) -> ServeSettings:
        """Returns the settings of the request or, if it has none, those in the repository's folder."""
        if parameters.config is not None:
            source, config = "parameters.config", parameters.config.encode()
        else:
            files = settings_files(self._folder).get(model, {})
            path = files[_choose(files, model, parameters.version, "repository")]
            source, config = str(path), path.read_bytes()
        try:
            settings = parse_body(ServeSettings, config)
        except InputError as error:
            error.args = (f"{source}: {error}",)
            raise
        card = settings.read_card()
        if card.name != model:
            raise InputError(f"the settings are of model {card.name!r}, not of {model!r}")
        if parameters.version not in (None, settings.version):
            raise InputError(f"the settings are of version {settings.version!r}, not of {parameters.version!r}")
        return settings


def settings_files(folder: Path | None) -> dict[str, dict[str, Path]]:
    """Returns the settings files of a repository's folder by model and version; none without a folder."""
    files: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.glob(f"*/*/{SETTINGS_FILE}")) if folder is not None else []:
        files.setdefault(path.parts[-3], {})[path.parts[-2]] = path
    return files


def _choose(versions: Mapping[str, object], model: str, requested: str | None, owner: str) -> str:
    """Returns the requested version, or the only one. Raises UnknownModelError, and InputError if there are several."""
    names = ", ".join(map(repr, sorted(versions))) or "none"
    if not requested and len(versions) > 1:
        raise InputError(f"parameters.version is needed: the {owner} has {model!r} as versions {names}")
    version = requested or next(iter(versions), "")
    if version not in versions:
        wanted = f"version {version!r}" if version else "version"
        raise UnknownModelError(f"the {owner} has no {wanted} of {model!r}; it has {names}")
    return version
