"""What all ingresses of a cluster know in common: in Ray's own key-value store, beside Serve's state.

It outlives every process of ours, and lasts as long as the cluster (with a fault-tolerant GCS: as Serve's own state).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from deployments.versions.choice import Traffic

NAMESPACE = b"offramp"
LISTED = "listed/"
TRAFFIC = "traffic/"


STATES = {
    "RUNNING": "READY",
    "NOT_STARTED": "LOADING",
    "DEPLOYING": "LOADING",
    "DELETING": "UNLOADING",
}
"""Triton's words for Serve's; of everything else requests may fail."""


class Listed(BaseModel):
    """An application of ours, as its ingress announces it at its start."""

    model_config = ConfigDict(frozen=True)

    app: str
    model: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AppStatus:
    """What Serve says of an application."""

    status: str
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRow:
    """A line of the index, as Triton's repository extension has it."""

    name: str
    version: str
    state: str
    reason: str


def index_rows(listed: Iterable[Listed], statuses: Mapping[str, AppStatus]) -> list[IndexRow]:
    """What there is, by model and version; what has said its name and is gone is left out."""
    rows = [_row(each, statuses[each.app]) for each in listed if each.app in statuses]
    return sorted(rows, key=lambda row: (row.name, row.version))


def app_of(listed: Iterable[Listed], statuses: Mapping[str, AppStatus], model: str, version: str) -> str | None:
    """The application that serves a version, the running one of several; None where there is none."""
    apps = [each.app for each in listed if (each.model, each.version) == (model, version) and each.app in statuses]
    return min(apps, key=lambda app: (statuses[app].status != "RUNNING", app), default=None)


def _row(listed: Listed, status: AppStatus) -> IndexRow:
    state = STATES.get(status.status, "UNAVAILABLE")
    reason = "" if state == "READY" else ": ".join(filter(None, (f"{listed.app} is {status.status}", status.message)))
    return IndexRow(name=listed.model, version=listed.version, state=state, reason=reason)


class RayStore:
    """What versions know of one another, in Ray's GCS; its calls block, so each has a thread for its millisecond."""

    async def traffic(self, model: str) -> Traffic:
        """What was put last; nothing special where nothing was."""
        value = await asyncio.to_thread(_get, TRAFFIC + model)
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


def _get(key: str) -> bytes | None:
    from ray.experimental.internal_kv import _internal_kv_get

    value: bytes | None = _internal_kv_get(key, namespace=NAMESPACE)
    return value


def _put(key: str, value: BaseModel) -> None:
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(key, value.model_dump_json(), namespace=NAMESPACE)


def _listed() -> list[Listed]:
    from ray.experimental.internal_kv import _internal_kv_list

    values = (_get(key.decode()) for key in _internal_kv_list(LISTED, namespace=NAMESPACE))
    return [Listed.model_validate_json(value) for value in values if value is not None]
