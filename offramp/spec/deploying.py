"""Deploys, watches and removes services on a Ray cluster through the REST API of its dashboard."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from cluster.devices import EMULATED
from cluster.inventory import Inventory, from_nodes
from deployments.local_ray.applications import APPLICATIONS
from earlyexit.clock import Clock, MonotonicClock
from earlyexit.errors import InputError, OfframpError

NODES = "/api/v0/nodes"
POLL_S = 1.0


class Dashboard:
    """The REST API of one Ray cluster; errors are one line that names the address."""

    def __init__(
        self, client: httpx.Client, clock: Clock | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._client = client
        self._clock = clock or MonotonicClock()
        self._sleep = sleep

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

    def wait_until_running(self, name: str, limit_s: float, tell: Callable[[str], None]) -> None:
        """Returns when the application runs; raises OfframpError with Serve's message if it fails, or after the limit.

        `tell` gets a line when there is news.
        """
        said = ""
        for application in self._looks(name, limit_s):
            status, deployments = application.get("status"), application.get("deployments", {}).values()
            healthy = sum(each["status"] == "HEALTHY" for each in deployments)
            wanted = sum(each["target_num_replicas"] for each in deployments)
            replicas = f"{sum(map(num_running, deployments))} of {wanted} replicas running"
            words = f"{status or 'NOT_STARTED'}: {healthy} of {len(deployments)} deployments healthy, {replicas}"
            if words != said:
                tell(words)
                said = words
            if status == "RUNNING":
                return
            if status == "DEPLOY_FAILED":
                raise OfframpError(f"application {name!r}: {status}: {_one_line(application.get('message', ''))}")
        raise OfframpError(f"application {name!r} does not run after {limit_s:g} s: {said}")

    def wait_until_gone(self, name: str, limit_s: float) -> None:
        """Returns when the application is gone; raises OfframpError after the limit."""
        if all(self._looks(name, limit_s)):
            raise OfframpError(f"application {name!r} is still there after {limit_s:g} s")

    def _looks(self, name: str, limit_s: float) -> Iterator[dict[str, Any]]:
        """Yields what Serve says of an application, empty where there is none, again and again until the limit."""
        end_s = self._clock.now_s() + limit_s
        while True:
            yield self.serve()["applications"].get(name, {})
            if self._clock.now_s() >= end_s:
                return
            self._sleep(POLL_S)

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


@contextmanager
def open_dashboard(address: str) -> Iterator[Dashboard]:
    """Opens a dashboard, with Ray's token if RAY_AUTH_MODE asks for one; raises InputError."""
    with httpx.Client(base_url=address, headers=token_header(os.environ), timeout=60.0) as client:
        yield Dashboard(client)


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


def num_running(deployment: Mapping[str, Any]) -> int:
    """Returns the number of running replicas."""
    return sum(each["state"] == "RUNNING" for each in deployment["replicas"])


def applications_document(serve: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns what Serve runs, as `offramp status --json` prints it."""
    from optimizer.placement import deployment_name

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
                    "emulated": deployment.startswith(deployment_name(EMULATED)),
                }
                for deployment, details in each.get("deployments", {}).items()
            ],
        }
        for name, each in serve["applications"].items()
    ]


def _one_line(text: str) -> str:
    """Returns the last line with content: the error of a traceback, or pydantic's message without its link."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and "For further information" not in line]
    return lines[-1][:300] if lines else "no reason given"
