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
from cluster.inventory import Inventory, inventory_of_nodes
from deployments.local_ray.applications import APPLICATIONS
from earlyexit.clock import Clock, MonotonicClock
from earlyexit.errors import InputError, OfframpError

NODES = "/api/v0/nodes"
POLL_S = 1.0


class Dashboard:
    """The REST API of a Ray cluster's dashboard. Error messages are one line with the address."""

    def __init__(
        self, client: httpx.Client, clock: Clock | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._client = client
        self._clock = clock or MonotonicClock()
        self._sleep = sleep

    def serve(self) -> dict[str, Any]:
        """Returns Serve's state: `applications` by name, and its options."""
        return _fields(self._request("GET", APPLICATIONS), "applications")

    def put(self, config: Mapping[str, Any]) -> None:
        """Replaces Serve's applications; those that are not in the config are deleted."""
        self._request("PUT", APPLICATIONS, json=config)

    def inventory(self) -> Inventory:
        """Returns the hardware of the cluster's nodes."""
        rows = _fields(self._request("GET", NODES, params={"limit": 10_000}), "data")["data"]["result"]["result"]
        return inventory_of_nodes(
            {"Alive": row["state"] == "ALIVE", "Resources": row["resources_total"], "Labels": row.get("labels")}
            for row in rows
        )

    def wait_until_running(self, name: str, limit_s: float, on_progress: Callable[[str], None]) -> None:
        """Waits until the application runs; raises OfframpError if it fails, or after the limit.

        `on_progress` gets a line of text when the state has changed.
        """
        last = ""
        for application in self._poll(name, limit_s):
            status, deployments = application.get("status"), application.get("deployments", {}).values()
            healthy = sum(each["status"] == "HEALTHY" for each in deployments)
            target = sum(each["target_num_replicas"] for each in deployments)
            replicas = f"{sum(map(num_running, deployments))} of {target} replicas running"
            state = f"{status or 'NOT_STARTED'}: {healthy} of {len(deployments)} deployments healthy, {replicas}"
            if state != last:
                on_progress(state)
                last = state
            if status == "RUNNING":
                return
            if status == "DEPLOY_FAILED":
                raise OfframpError(f"application {name!r}: {status}: {_one_line(application.get('message', ''))}")
        raise OfframpError(f"application {name!r} does not run after {limit_s:g} s: {last}")

    def wait_until_gone(self, name: str, limit_s: float) -> None:
        """Waits until the application is gone; raises OfframpError after the limit."""
        if all(self._poll(name, limit_s)):
            raise OfframpError(f"application {name!r} still exists after {limit_s:g} s")

    def _poll(self, name: str, limit_s: float) -> Iterator[dict[str, Any]]:
        """Yields the state of an application, {} if there is none, at intervals until the limit."""
        end_s = self._clock.now_s() + limit_s
        while True:
            yield self.serve()["applications"].get(name, {})
            if self._clock.now_s() >= end_s:
                return
            self._sleep(POLL_S)

    def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        address = str(self._client.base_url).rstrip("/")
        try:
            response = self._client.request(method, path, **options)
        except httpx.HTTPError as error:
            raise OfframpError(f"no Ray dashboard answers at {address}: {error}") from error
        if response.status_code in (401, 403):
            raise OfframpError(f"{address} refuses with {response.status_code}: set RAY_AUTH_MODE=token and its token")
        if not response.is_success:
            raise OfframpError(f"{address}{path} answers {response.status_code}: {_one_line(response.text)}")
        return response


def _fields(response: httpx.Response, required: str) -> dict[str, Any]:
    """Returns the JSON of an answer; raises OfframpError if it has no field `required`, as of another server."""
    try:
        document = response.json()
    except ValueError:
        document = None
    if not isinstance(document, dict) or required not in document:
        raise OfframpError(f"{response.url} answers, but it is not a Ray dashboard")
    return document


@contextmanager
def open_dashboard(address: str) -> Iterator[Dashboard]:
    """Opens a dashboard, with Ray's token if RAY_AUTH_MODE requires one; raises InputError for an unusable token."""
    with httpx.Client(base_url=address, headers=token_header(os.environ), timeout=60.0) as client:
        yield Dashboard(client)


def token_header(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the header of Ray's token authentication, with the token from the places where Ray looks for it."""
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
    if not token or not token.isascii() or not token.isprintable():  # httpx's error would show it
        raise InputError(
            "RAY_AUTH_MODE is token, and the token is empty or has characters that no HTTP header can hold"
        )
    return {"Authorization": f"Bearer {token}"}


def num_running(deployment: Mapping[str, Any]) -> int:
    """Returns the number of running replicas."""
    return sum(each["state"] == "RUNNING" for each in deployment["replicas"])


def applications_document(serve: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns Serve's applications, as `offramp status --json` prints them."""
    from optimizer.plan import deployment_name

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
    """Returns the last line that is not empty: the error of a traceback, or pydantic's message without its link."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and "For further information" not in line]
    return lines[-1][:300] if lines else "no reason given"
