"""The HTTP routes of versions: Triton's repository extension, and the canary."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response

from deployments.api.endpoint import Api, Backend, json_response
from deployments.api.parsing import Canary, DefaultVersion, IndexBody, LoadBody, LoadParameters, validated
from deployments.versions.repository import Repository
from deployments.versions.versions import Versions


class VersionRoutes:
    """Handlers over the versions of one model."""

    def __init__(self, backend: Backend, versions: Versions, repository: Repository) -> None:
        self._api = Api(backend, None)
        self._bodies = backend.bodies
        self._versions = versions
        self._repository = repository

    async def index(self, request: Request) -> Response:
        body = validated(IndexBody, await self._bodies.read(request) or b"{}")
        rows = await self._repository.index(ready_only=body.ready)
        return json_response([asdict(row) for row in rows])

    async def load(self, request: Request) -> Response:
        """Begins to load a version; the index tells when it is ready."""
        return await self._order(request, self._repository.load)

    async def unload(self, request: Request) -> Response:
        """Begins to unload a version; the index tells when it is gone."""
        return await self._order(request, self._repository.unload)

    async def _order(self, request: Request, carry_out: Callable[[str, LoadParameters], Awaitable[None]]) -> Response:
        body = validated(LoadBody, await self._bodies.read(request) or b"{}")
        await carry_out(request.path_params["model"], body.parameters)
        return json_response({})

    async def canary(self, request: Request) -> Response:
        self._check_model(request)
        return json_response(await self._versions.side_by_side())

    async def set_canary(self, request: Request) -> Response:
        self._check_model(request)
        await self._versions.set_canary(validated(Canary, await self._bodies.read(request)))
        return await self.canary(request)

    async def end_canary(self, request: Request) -> Response:
        self._check_model(request)
        await self._versions.end_canary()
        return await self.canary(request)

    async def set_default(self, request: Request) -> Response:
        self._check_model(request)
        body = validated(DefaultVersion, await self._bodies.read(request))
        await self._versions.set_default(body.version)
        return await self.canary(request)

    def _check_model(self, request: Request) -> None:
        self._api.check_model(request.path_params["model"], None)
