"""What all ingresses of a cluster share, in Ray's key-value store: the versions, and how requests are divided.

The store lasts as long as the cluster; with a fault-tolerant GCS as long as Serve's own state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from deployments.local_ray.private import kv_get, kv_keys, kv_put
from deployments.versions.choice import Traffic

LISTED = "listed/"
TRAFFIC = "traffic/"


STATES = {
    "RUNNING": "READY",
    "NOT_STARTED": "LOADING",
    "DEPLOYING": "LOADING",
    "DELETING": "UNLOADING",
}
"""Triton's states for Serve's. All others are `UNAVAILABLE`, since requests may fail."""


class Listed(BaseModel):
    """An application of Offramp, as its ingress announces it when it starts."""

    model_config = ConfigDict(frozen=True)

    app: str
    model: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AppStatus:
    """What Serve reports about an application."""

    status: str
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRow:
    """A row of the index of Triton's repository extension."""

    name: str
    version: str
    state: str
    reason: str


def index_rows(listed: Iterable[Listed], statuses: Mapping[str, AppStatus]) -> list[IndexRow]:
    """Returns the index by model and version, without applications that Serve does not know any more."""
    rows = [_row(each, statuses[each.app]) for each in listed if each.app in statuses]
    return sorted(rows, key=lambda row: (row.name, row.version))


def app_of(listed: Iterable[Listed], statuses: Mapping[str, AppStatus], model: str, version: str) -> str | None:
    """Returns the application that serves a version, preferably a running one; None if there is none."""
    apps = [each.app for each in listed if (each.model, each.version) == (model, version) and each.app in statuses]
    return min(apps, key=lambda app: (statuses[app].status != "RUNNING", app), default=None)


def _row(listed: Listed, status: AppStatus) -> IndexRow:
    state = STATES.get(status.status, "UNAVAILABLE")
    reason = "" if state == "READY" else ": ".join(filter(None, (f"{listed.app} is {status.status}", status.message)))
    return IndexRow(name=listed.model, version=listed.version, state=state, reason=reason)


class RayStore:
    """The store in Ray's GCS. Its calls block for about a millisecond, and run in threads."""

    async def traffic(self, model: str) -> Traffic:
        """Returns how the requests of a model are divided."""
        value = await asyncio.to_thread(kv_get, TRAFFIC + model)
        return Traffic() if value is None else Traffic.model_validate_json(value)

    async def put_traffic(self, model: str, traffic: Traffic) -> None:
        await asyncio.to_thread(_put, TRAFFIC + model, traffic)

    async def listed(self) -> list[Listed]:
        return await asyncio.to_thread(_listed)

    async def put_listed(self, listed: Listed) -> None:
        await asyncio.to_thread(_put, LISTED + listed.app, listed)

    async def statuses(self) -> Mapping[str, AppStatus]:
        from ray import serve

        found = (await asyncio.to_thread(serve.status)).applications
        return {name: AppStatus(status=each.status.value, message=each.message) for name, each in found.items()}


def _put(key: str, value: BaseModel) -> None:
    kv_put(key, value.model_dump_json())


def _listed() -> list[Listed]:
    values = map(kv_get, kv_keys(LISTED))
    return [Listed.model_validate_json(value) for value in values if value is not None]
