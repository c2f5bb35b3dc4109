"""Ray's dashboard, from inside a replica: the only way to scale a slot to zero, and to change what Serve runs."""

from __future__ import annotations

from typing import Any

import httpx

from earlyexit.errors import OfframpError

DASHBOARD_PORT = 8265
HTTP_S = 10.0


class RayDashboard:
    """Where it is: told, or on the head, which the address of its GCS names."""

    def __init__(self, url: str | None, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._url = url
        self._transport = transport

    async def ask(self, method: str, path: str, json: object = None) -> Any:
        """What it answers; raises OfframpError where it cannot be reached or refuses."""
        url = self._address()
        async with httpx.AsyncClient(timeout=HTTP_S, trust_env=False, transport=self._transport) as client:
            try:
                response = await client.request(method, url + path, json=json, headers=_token_headers())
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


def _token_headers() -> dict[str, str]:
    """Where Ray asks for its token, the one that this process was given."""
    from ray._private.authentication.http_token_authentication import get_auth_headers_if_auth_enabled

    return dict(get_auth_headers_if_auth_enabled({}))
