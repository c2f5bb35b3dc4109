"""The repository index: every version that is on the cluster, and how it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

STATES = {
    "RUNNING": "READY",
    "NOT_STARTED": "LOADING",
    "DEPLOYING": "LOADING",
    "DELETING": "UNLOADING",
}
"""Triton's words for Serve's; of everything else requests may fail."""


class Listed(BaseModel):
    """An application of ours, as its ingress says it to everybody when it starts."""

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
