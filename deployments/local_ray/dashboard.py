"""A client of Ray's dashboard for replicas: the only way to scale a slot to zero, and to change what Serve runs."""

from __future__ import annotations

from typing import Any

import httpx

from deployments.local_ray.private import token_headers
from earlyexit.errors import OfframpError

DASHBOARD_PORT = 8265
HTTP_S = 10.0


class RayDashboard:
    """The dashboard at a URL, or else on the head of this cluster."""

    def __init__(self, url: str | None, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._url = url
        self._transport = transport

    async def ask(self, method: str, path: str, json: object = None) -> Any:
        """Returns the answer's JSON; raises OfframpError if the dashboard cannot be reached, or refuses."""
        url = self._address()
        async with httpx.AsyncClient(timeout=HTTP_S, trust_env=False, transport=self._transport) as client:
            try:
                response = await client.request(method, url + path, json=json, headers=token_headers())
            except httpx.HTTPError as error:
                raise OfframpError(f"Ray's dashboard at {url} cannot be reached: {error!r}") from error
        if response.status_code != httpx.codes.OK:
            raise OfframpError(f"Ray's dashboard says {response.status_code}: {response.text[:500]}")
        return response.json() if response.content else None

    def _address(self) -> str:
        if self._url is None:
            import ray

            head = ray.get_runtime_context().gcs_address.rpartition(":")[0]
            self._url = f"http://{head}:{DASHBOARD_PORT}"
        return self._url.rstrip("/")
