"""Applications on one Serve, side by side: what to send its REST API so that one comes or goes. Pure.

A PUT replaces the whole set of applications, so the others are sent back with it as they were submitted. Serve does
nothing to a deployment whose config has not changed: what was scaled since stays scaled (tried with 2.60).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from cluster.devices import EMULATED
from cluster.inventory import Inventory, lacking
from cluster.render import BUILDER, GRPC_SERVICE
from deployments.settings import ServeSettings
from deployments.slots import accelerators
from earlyexit.errors import InputError, PlanError

APPLICATIONS = "/api/serve/applications/"
"""Of Ray's dashboard."""


def claimed(serve: Mapping[str, Any], but: str) -> dict[str, int]:
    """Accelerators per type that our other applications may come to use.

    Raises InputError for one of ours whose settings cannot be read.
    """
    counts: Counter[str] = Counter()
    for config in _kept(each for name, each in serve["applications"].items() if name != but):
        if config.get("import_path") == BUILDER:
            counts.update(accelerators(_settings(config)))
    return dict(counts)


def _settings(config: Mapping[str, Any]) -> ServeSettings:
    try:
        return ServeSettings.model_validate(config.get("args", {}))
    except (ValidationError, PlanError) as error:
        name = config.get("name")
        raise InputError(
            f"application {name!r} is of another release, and what it uses unknown; first: offramp delete {name}"
        ) from error


def check_devices(wanted: Mapping[str, int], there: Inventory, claimed: Mapping[str, int]) -> None:
    """Raise InputError where the cluster has fewer accelerators than the service file, and other services, may use."""
    missing = lacking(Counter(wanted) + Counter(claimed), there)
    missing = {name: count for name, count in missing.items() if name in wanted}
    if missing:
        each = (_lack(name, wanted[name], claimed.get(name, 0), count) for name, count in missing.items())
        hint = (
            f"; nodes say how many emulated ones they have: ray start --resources '{{\"{EMULATED}V100\": 16}}'"
            if any(name.startswith(EMULATED) for name in missing)
            else ""
        )
        raise InputError(f"the cluster lacks accelerators ({'; '.join(each)}){hint}")


def with_application(serve: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """What to PUT so that the config's one application runs beside those there are.

    Raises InputError where another application has its route, or Serve would have to begin anew.
    """
    [application] = config["applications"]
    others = {name: each for name, each in serve["applications"].items() if name != application["name"]}
    taken = [name for name, each in others.items() if each.get("route_prefix") == application["route_prefix"]]
    if taken:
        raise InputError(
            f"application {taken[0]!r} has route {application['route_prefix']}; first: offramp delete {taken[0]}, "
            "or give this one another ingress.route_prefix or model.version"
        )
    _check_grpc(serve.get("grpc_options"), config)
    return {**config, **_options(serve), "applications": [*_kept(others.values()), application]}


def _check_grpc(there: Mapping[str, Any] | None, config: Mapping[str, Any]) -> None:
    """Raise InputError where gRPC is asked of a Serve that runs without it."""
    wanted = config.get("grpc_options")
    if wanted is None or there is None:
        return
    if there["port"] != wanted["port"] or GRPC_SERVICE not in there.get("grpc_servicer_functions", []):
        raise InputError(
            f"Serve runs without gRPC at port {wanted['port']}, which it takes at its start only: end it first "
            "(serve shutdown), or leave ingress.grpc_port out"
        )


def without_application(serve: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What to PUT so that one application ends; raises InputError where there is none of that name."""
    applications = serve["applications"]
    if name not in applications:
        raise InputError(f"no application {name!r}; there are: {', '.join(applications) or 'none'}")
    if applications[name].get("deployed_app_config") is None:
        raise InputError(f"application {name!r} was not deployed by a config; end it where it was started")
    return {**_options(serve), "applications": _kept(each for key, each in applications.items() if key != name)}


def _options(serve: Mapping[str, Any]) -> dict[str, Any]:
    """Of a Serve that runs: they cannot change while it does."""
    names = ("proxy_location", "http_options", "grpc_options", "target_capacity")
    return {name: serve[name] for name in names if serve.get(name) is not None}


def _kept(applications: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """As they were submitted; those started by hand were not, and a PUT leaves them alone."""
    submitted = (each.get("deployed_app_config") for each in applications)
    return [config for config in submitted if config is not None]


def _lack(name: str, wanted: int, claimed: int, missing: int) -> str:
    others = f", {claimed} of other services" if claimed else ""
    return f"{name}: {wanted} in the file{others}, {wanted + claimed - missing} there"
