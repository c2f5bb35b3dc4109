"""What all ingresses of a cluster know in common: in Ray's own key-value store, beside Serve's state.

It outlives every process of ours, and lasts as long as the cluster (with a fault-tolerant GCS: as Serve's own state).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from deployments.ingress.versions.listing import AppStatus, Listed
from deployments.ingress.versions.traffic import Traffic

NAMESPACE = b"offramp"
LISTED = "listed/"
TRAFFIC = "traffic/"


class Store(Protocol):
    """What versions know of one another."""

    async def traffic(self, model: str) -> Traffic: ...

    async def put_traffic(self, model: str, traffic: Traffic) -> None: ...

    async def listed(self) -> list[Listed]: ...

    async def put_listed(self, listed: Listed) -> None: ...

    async def statuses(self) -> Mapping[str, AppStatus]: ...


class RayStore:
    """In Ray's GCS; its calls block, so each has a thread for its millisecond."""

    async def traffic(self, model: str) -> Traffic:
        """What was put last; nothing special where nothing was."""
        value = await asyncio.to_thread(_get, TRAFFIC + model)
        return Traffic() if value is None else Traffic.model_validate_json(value)

    async def put_traffic(self, model: str, traffic: Traffic) -> None:
        await asyncio.to_thread(_put, TRAFFIC + model, traffic.model_dump_json())

    async def listed(self) -> list[Listed]:
        return await asyncio.to_thread(_listed)

    async def put_listed(self, listed: Listed) -> None:
        await asyncio.to_thread(_put, LISTED + listed.app, listed.model_dump_json())

    async def statuses(self) -> Mapping[str, AppStatus]:
        return await asyncio.to_thread(_statuses)


def _get(key: str) -> bytes | None:
    from ray.experimental.internal_kv import _internal_kv_get

    value: bytes | None = _internal_kv_get(key, namespace=NAMESPACE)
    return value


def _put(key: str, value: str) -> None:
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(key, value, namespace=NAMESPACE)


def _listed() -> list[Listed]:
    from ray.experimental.internal_kv import _internal_kv_list

    values = (_get(key.decode()) for key in _internal_kv_list(LISTED, namespace=NAMESPACE))
    return [Listed.model_validate_json(value) for value in values if value is not None]


def _statuses() -> dict[str, AppStatus]:
    from ray import serve

    applications = serve.status().applications
    return {name: AppStatus(status=each.status.value, message=each.message) for name, each in applications.items()}
