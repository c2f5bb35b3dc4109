"""The HTTP face of versions: Triton's repository extension, and the canary."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any, Protocol

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from deployments.api.bodies import Canary, DefaultVersion, IndexBody, LoadBody, LoadParameters, validated
from deployments.api.endpoint import json_response
from deployments.api.operations import Handler, bound
from deployments.api.request_body import Bodies
from deployments.versions.store import IndexRow
from earlyexit.errors import UnknownModelError

_LOAD = TypeAdapter(LoadBody)
_INDEX = TypeAdapter(IndexBody)
_CANARY = TypeAdapter(Canary)
_DEFAULT = TypeAdapter(DefaultVersion)


class RepositoryDesk(Protocol):
    """What the routes need of `Repository`."""

    async def index(self, *, ready_only: bool = False) -> list[IndexRow]: ...

    async def load(self, model: str, parameters: LoadParameters) -> None: ...

    async def unload(self, model: str, parameters: LoadParameters) -> None: ...


class VersionDesk(Protocol):
    """What the routes need of `Versions`."""

    async def side_by_side(self) -> dict[str, Any]: ...

    async def set_canary(self, canary: Canary) -> None: ...

    async def end_canary(self) -> None: ...

    async def set_default(self, version: str) -> None: ...


class VersionRoutes:
    """Handlers over the versions of one model."""

    def __init__(self, versions: VersionDesk, repository: RepositoryDesk, model: str, bodies: Bodies) -> None:
        self._versions = versions
        self._repository = repository
        self._model = model
        self._bodies = bodies

    async def index(self, request: Request) -> Response:
        body = validated(_INDEX, await self._bodies.read(request) or b"{}")
        rows = await self._repository.index(ready_only=body.ready)
        return json_response([asdict(row) for row in rows])

    async def load(self, request: Request) -> Response:
        """Begin to load a version; the index says when it is ready."""
        return await self._order(request, self._repository.load)

    async def unload(self, request: Request) -> Response:
        """Begin to unload a version; once it is gone the index says so."""
        return await self._order(request, self._repository.unload)

    async def _order(self, request: Request, carry_out: Callable[[str, LoadParameters], Awaitable[None]]) -> Response:
        body = validated(_LOAD, await self._bodies.read(request) or b"{}")
        await carry_out(request.path_params["model"], body.parameters)
        return json_response({})

    async def canary(self, request: Request) -> Response:
        self._check_model(request)
        return json_response(await self._versions.side_by_side())

    async def set_canary(self, request: Request) -> Response:
        self._check_model(request)
        await self._versions.set_canary(validated(_CANARY, await self._bodies.read(request)))
        return await self.canary(request)

    async def end_canary(self, request: Request) -> Response:
        self._check_model(request)
        await self._versions.end_canary()
        return await self.canary(request)

    async def set_default(self, request: Request) -> Response:
        self._check_model(request)
        body = validated(_DEFAULT, await self._bodies.read(request))
        await self._versions.set_default(body.version)
        return await self.canary(request)

    def _check_model(self, request: Request) -> None:
        name = request.path_params["model"]
        if name != self._model:
            raise UnknownModelError(f"unknown model {name!r}; served is {self._model!r}")


def version_paths(
    versions: VersionDesk, repository: RepositoryDesk, model: str, bodies: Bodies
) -> list[tuple[str, Mapping[str, Handler]]]:
    """For `build_app`."""
    return list(bound(VersionRoutes(versions, repository, model, bodies)).items())
