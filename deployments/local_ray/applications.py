"""Several applications on one Serve: the documents for its REST API that add or remove one.

A PUT replaces the whole set of applications, so the document repeats the configs of the others. Serve does not change a
deployment whose config is the same, even if it was scaled since (tested with 2.60).
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Any

from pydantic import ValidationError

from cluster.devices import EMULATED
from cluster.inventory import Inventory, missing_accelerators
from cluster.render import BUILDER, GRPC_SERVICE
from deployments.settings import ServeSettings, max_accelerators
from earlyexit.errors import InputError, PlanError

APPLICATIONS = "/api/serve/applications/"
"""Path of Serve's REST API in Ray's dashboard."""
THROUGHPUT = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # Otherwise a replica that reports itself unhealthy would drain for 20 s if it has open calls.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # Write log lines at once, because they are few. By default a thousand are written together.
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",
    "grpc_proxy": "",  # otherwise gRPC sends calls between processes to the proxy of `https_proxy` or `http_proxy`
    "MALLOC_ARENA_MAX": "2",  # by default, freed memory stays in up to eight arenas per core, and processes grow
}
"""Environment variables that every application gets."""


def message_of(application: Mapping[str, Any]) -> str:
    """Returns Serve's message about an application, or about a deployment that failed or waits, in one line."""
    deployments = [each for each in application.get("deployments", {}).values() if each["status"] != "HEALTHY"]
    deployments.sort(key=lambda each: each["status"] != "DEPLOY_FAILED")
    message: str = next((each["message"] for each in deployments if each["message"]), application.get("message", ""))
    return message and last_error(message)


def last_error(text: str) -> str:
    """Returns the error at the end of a traceback, or the last line of another text, without pydantic's link."""
    lines = [line for line in text.splitlines() if line.strip() and "For further information" not in line]
    end = list(takewhile(lambda line: not line.startswith("  "), reversed(lines))) or lines[-1:]
    return " ".join(map(str.strip, reversed(end)))[:500] or "no reason given"


def claimed(serve: Mapping[str, Any], but: str) -> dict[str, int]:
    """Returns how many accelerators of each type Offramp's applications except `but` may use.

    Raises InputError if the settings of one of them cannot be parsed.
    """
    counts: Counter[str] = Counter()
    for config in _kept(each for name, each in serve["applications"].items() if name != but):
        if config.get("import_path") != BUILDER:
            continue
        try:
            counts.update(max_accelerators(ServeSettings.model_validate(config.get("args", {}))))
        except (ValidationError, PlanError) as error:
            name = config["name"]
            raise InputError(
                f"application {name!r} is of another release, so the accelerators that it uses are unknown; first: "
                f"offramp delete {shlex.quote(name)}"
            ) from error
    return dict(counts)


def check_devices(wanted: Mapping[str, int], inventory: Inventory, claimed: Mapping[str, int]) -> None:
    """Raises InputError if the cluster has fewer accelerators than this service and the other services need."""
    missing = missing_accelerators(Counter(wanted) + Counter(claimed), inventory)
    missing = {name: count for name, count in missing.items() if name in wanted}
    if missing:
        lines = []
        for name, count in missing.items():
            others = f", {claimed[name]} of other services" if claimed.get(name) else ""
            there = wanted[name] + claimed.get(name, 0) - count
            lines.append(f"{name}: {wanted[name]} needed{others}, {there} there")
        is_emulated = any(name.startswith(EMULATED) for name in missing)
        declared = f"a node declares its emulated accelerators: ray start --resources '{{\"{EMULATED}V100\": 16}}'"
        raise InputError(f"the cluster lacks accelerators ({'; '.join(lines)}){f'; {declared}' if is_emulated else ''}")


def with_application(serve: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the document to PUT that adds the config's application to the present ones.

    Raises InputError if an application has its name or its route, but not both, or if Serve would have to be restarted.
    """
    [application] = config["applications"]
    others = {name: each for name, each in serve["applications"].items() if name != application["name"]}
    for name, each in serve["applications"].items():
        wanted = (each.get("deployed_app_config") or {}).get("route_prefix") if name in others else None
        route = each.get("route_prefix") or wanted  # Serve names no route while it builds an application
        if route is not None and (name in others) == (route == application["route_prefix"]):
            other = "ingress.route_prefix or model.version" if name in others else "name"
            remedy = f"first: offramp delete {shlex.quote(name)}, or give this one another {other}"
            raise InputError(f"application {name!r} has route {route}; {remedy}")
    requested, running = config.get("grpc_options"), serve.get("grpc_options")
    servicers = (running or {}).get("grpc_servicer_functions", [])
    if requested and running and not (running["port"] == requested["port"] and GRPC_SERVICE in servicers):
        raise InputError(
            f"Serve runs without gRPC at port {requested['port']}, which it can open only when it starts: end it first "
            "(serve shutdown), or leave ingress.grpc_port out"
        )
    return {**config, **_options(serve), "applications": [*_kept(others.values()), application]}


def without_application(serve: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the document to PUT that removes an application; raises InputError if there is none of that name."""
    applications = serve["applications"]
    if name not in applications:
        raise InputError(f"no application {name!r}; there are: {', '.join(applications) or 'none'}")
    if applications[name].get("deployed_app_config") is None:
        raise InputError(f"application {name!r} was not deployed by a config; end it where it was started")
    return {**_options(serve), "applications": _kept(each for key, each in applications.items() if key != name)}


def _options(serve: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of the running Serve, which cannot be changed."""
    names = ("proxy_location", "http_options", "grpc_options", "target_capacity")
    return {name: serve[name] for name in names if serve.get(name) is not None}


def _kept(applications: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the submitted configs. A PUT does not affect applications without one, which were started by hand."""
    submitted = (each.get("deployed_app_config") for each in applications)
    return [config for config in submitted if config is not None]
