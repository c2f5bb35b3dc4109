"""Deploys, watches and removes services on a Ray cluster through the REST API of its dashboard."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from cluster.devices import EMULATED
from cluster.inventory import Inventory, from_nodes
from deployments.local_ray.applications import APPLICATIONS
from earlyexit.clock import Clock
from earlyexit.errors import InputError, OfframpError

NODES = "/api/v0/nodes"
POLL_S = 1.0
Sleep = Callable[[float], None]
Tell = Callable[[str], None]


class Dashboard:
    """The REST API of one Ray cluster; errors are one line that names the address."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def serve(self) -> dict[str, Any]:
        """Returns what Serve runs: `applications` by name, and its options."""
        return _fields(self._ask("GET", APPLICATIONS), "applications")

    def put(self, config: Mapping[str, Any]) -> None:
        """Replaces what Serve runs; applications that are not in the config are ended."""
        self._ask("PUT", APPLICATIONS, json=config)

    def inventory(self) -> Inventory:
        """Returns the hardware of the cluster's nodes."""
        rows = _fields(self._ask("GET", NODES, params={"limit": 10_000}), "data")["data"]["result"]["result"]
        return from_nodes(
            {"Alive": row["state"] == "ALIVE", "Resources": row["resources_total"], "Labels": row.get("labels")}
            for row in rows
        )

    def _ask(self, method: str, path: str, **what: Any) -> httpx.Response:
        where = str(self._client.base_url).rstrip("/")
        try:
            response = self._client.request(method, path, **what)
        except httpx.HTTPError as error:
            raise OfframpError(f"no Ray dashboard answers at {where}: {error}") from error
        if response.status_code in (401, 403):
            raise OfframpError(f"{where} refuses: {response.status_code}; set RAY_AUTH_MODE=token and its token")
        if not response.is_success:
            raise OfframpError(f"{where}{path} says {response.status_code}: {_one_line(response.text)}")
        return response


def _fields(response: httpx.Response, needed: str) -> dict[str, Any]:
    """Returns the fields of an answer, which must include `needed`; raises OfframpError for another server's answer."""
    try:
        found = response.json()
    except ValueError:
        found = None
    if not isinstance(found, dict) or needed not in found:
        raise OfframpError(f"{response.url} answers, but not as a Ray dashboard")
    return found


def dashboard_client(address: str, environment: Mapping[str, str] = os.environ) -> httpx.Client:
    """Returns a client of the dashboard, with Ray's token if RAY_AUTH_MODE asks for one; raises InputError."""
    return httpx.Client(base_url=address, headers=token_header(environment), timeout=60.0)


def token_header(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the header of Ray's token authentication; the token is where Ray itself looks for it."""
    if environment.get("RAY_AUTH_MODE", "").lower() != "token":
        return {}
    token = environment.get("RAY_AUTH_TOKEN")
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if token is None:
        try:
            token = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise InputError(f"RAY_AUTH_MODE is token, and {path} cannot be read: {error.strerror}") from error
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable():  # httpx would print it as it complains
        raise InputError("RAY_AUTH_MODE is token, and the token is empty or holds what no HTTP header can")
    return {"Authorization": f"Bearer {token}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """How to wait: clock, sleep, limit and reports."""

    clock: Clock
    sleep: Sleep
    tell: Tell
    """Gets a line when there is news."""
    limit_s: float = 600.0


def wait_until_running(dashboard: Dashboard, name: str, waiting: Waiting) -> None:
    """Returns when the application runs; raises OfframpError with Serve's message if it fails, or after the limit."""
    said = ""
    end_s = waiting.clock.now_s() + waiting.limit_s
    while True:
        application = dashboard.serve()["applications"].get(name, {})
        status = application.get("status", "NOT_STARTED")
        words = progress_words(application)
        if words != said:
            waiting.tell(words)
            said = words
        if status == "RUNNING":
            return
        if status == "DEPLOY_FAILED":
            raise OfframpError(f"application {name!r}: {status}: {_one_line(application.get('message', ''))}")
        if waiting.clock.now_s() >= end_s:
            raise OfframpError(f"application {name!r} does not run after {waiting.limit_s:g} s: {words}")
        waiting.sleep(POLL_S)


def wait_until_gone(dashboard: Dashboard, name: str, waiting: Waiting) -> None:
    """Returns when the application is gone; raises OfframpError after the limit."""
    end_s = waiting.clock.now_s() + waiting.limit_s
    while name in dashboard.serve()["applications"]:
        if waiting.clock.now_s() >= end_s:
            raise OfframpError(f"application {name!r} is still there after {waiting.limit_s:g} s")
        waiting.sleep(POLL_S)


def progress_words(application: Mapping[str, Any]) -> str:
    """Returns the progress of an application in words."""
    deployments = application.get("deployments", {}).values()
    healthy = sum(each["status"] == "HEALTHY" for each in deployments)
    running, wanted = sum(map(num_running, deployments)), sum(each["target_num_replicas"] for each in deployments)
    status = application.get("status", "NOT_STARTED")
    return f"{status}: {healthy} of {len(deployments)} deployments healthy, {running} of {wanted} replicas running"


def num_running(deployment: Mapping[str, Any]) -> int:
    """Returns the number of running replicas."""
    return sum(each["state"] == "RUNNING" for each in deployment["replicas"])


def applications_document(serve: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns what Serve runs, as `offramp status --json` prints it."""
    return [
        {
            "name": name,
            "status": each["status"],
            "message": each.get("message", ""),
            "route_prefix": each.get("route_prefix"),
            "deployments": [
                {
                    "name": deployment,
                    "status": details["status"],
                    "replicas": num_running(details),
                    "wanted": details["target_num_replicas"],
                    "emulated": is_emulated(deployment),
                }
                for deployment, details in each.get("deployments", {}).items()
            ],
        }
        for name, each in serve["applications"].items()
    ]


def is_emulated(deployment: str) -> bool:
    """Returns whether a deployment's accelerators are emulated, by its name."""
    from optimizer.placement import deployment_name

    return deployment.startswith(deployment_name(EMULATED))


def _one_line(text: str) -> str:
    """Returns the last line with content: the error of a traceback, or pydantic's message without its link."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and "For further information" not in line]
    return lines[-1][:300] if lines else "no reason given"
