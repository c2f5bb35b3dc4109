"""The state of applications, as in Serve's REST API."""

from __future__ import annotations

from typing import Any


def serving(*applications: dict[str, Any]) -> dict[str, Any]:
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": 8000},
        "grpc_options": None,
        "applications": {each["name"]: each for each in applications},
    }


def application(name: str, *, status: str = "RUNNING", route: str | None = None, **deployments: Any) -> dict[str, Any]:
    """Returns Serve's description of an application that a config deployed."""
    config = {"name": name, "route_prefix": route or f"/{name}", "import_path": "m:a", "args": {"a": 1}}
    return {
        "name": name,
        "status": status,
        "message": "",
        "route_prefix": route or f"/{name}",
        "deployed_app_config": config,
        "deployments": deployments,
    }
