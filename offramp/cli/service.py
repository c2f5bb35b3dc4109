"""A service file on a Ray cluster: `offramp render`, `deploy`, `status` and `delete`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from cluster.devices import EMULATED
from earlyexit.errors import InputError
from offramp.cli.options import ApiKeyFile, AsJson, above_zero, http_address, in_a_folder, make_table, show
from offramp.client.credentials import find_api_key, key_header

if TYPE_CHECKING:
    from rich.table import Table

    from cluster.render import ProxyLocation, Redis
    from offramp.spec.deploying import Dashboard, Waiting
    from offramp.spec.file import Service

ServiceFile = Annotated[Path, typer.Argument(metavar="SERVICE", help="Service file, YAML or JSON.")]
Address = Annotated[str, typer.Option(help="Ray's dashboard.", callback=http_address)]
At = Annotated[
    str | None, typer.Option(help="Folder where the nodes find model/, exit records and state; default: as here.")
]
Patience = Annotated[float, typer.Option(callback=above_zero, help="How long to wait until it is done.")]
DASHBOARD = "http://127.0.0.1:8265"


def render(
    service: ServiceFile,
    kuberay: Annotated[bool, typer.Option("--kuberay", help="A RayService instead of a Serve config.")] = False,
    image: Annotated[str, typer.Option(help="For --kuberay: image with Ray and this repository.")] = "offramp",
    claim: Annotated[str, typer.Option(help="For --kuberay: volume claim that all pods mount.")] = "offramp",
    redis: Annotated[
        str | None, typer.Option(help="For --kuberay: host:port of a Redis, by which the service outlives Ray's head.")
    ] = None,
    redis_secret: Annotated[
        str | None, typer.Option(help="For --redis: the secret of Kubernetes with its `password`; default: none.")
    ] = None,
    settings: Annotated[
        bool, typer.Option("--settings", help="Only the settings, as a repository's folder keeps them.")
    ] = False,
    at: At = None,
    out: Annotated[Path | None, typer.Option(help="File to write; default: print.")] = None,
) -> None:
    """Write what `serve deploy` takes, KubeRay's manifest, or the settings, for a service file."""
    from cluster.render import Redis, to_yaml
    from offramp.spec.file import read_service

    in_a_folder("out", out)
    if kuberay and settings:
        raise InputError("--kuberay and --settings are two things: give one of them")
    if (redis is not None and not kuberay) or (redis_secret is not None and redis is None):
        raise InputError("--redis goes with --kuberay, and --redis-secret with --redis")
    if settings:
        text = moved(read_service(service), at).settings.model_dump_json(indent=2) + "\n"
    elif kuberay:
        kept = None if redis is None else Redis(address=redis, secret=redis_secret)
        text = to_yaml(_manifest(read_service(service), image, claim, at, kept))
    else:
        text = to_yaml(_config(moved(read_service(service), at)))
    if out is None:
        print(text, end="")
    else:
        out.write_text(text, encoding="utf-8")


def deploy(
    service: ServiceFile,
    address: Address = DASHBOARD,
    at: At = None,
    timeout_s: Patience = 600.0,
) -> None:
    """Put a service on a running Ray cluster, beside whatever else it serves, and wait until it runs."""
    from deployments.local_ray.applications import check_devices, claimed, with_application
    from offramp.spec.deploying import wait_until_running
    from offramp.spec.file import read_service

    found = moved(read_service(service), at)
    with _dashboard(address) as dashboard:
        serve = dashboard.serve()
        check_devices(found.inventory.counts, dashboard.inventory(), claimed(serve, found.name))
        dashboard.put(with_application(serve, _config(found)))
        wait_until_running(dashboard, found.name, _waiting(timeout_s))
        print(f"{found.name} runs; offramp status --address {address}")


def status(
    address: Address = DASHBOARD,
    url: Annotated[
        str | None, typer.Option(help="The service, for its plan; default: Serve's port beside the dashboard.")
    ] = None,
    api_key_file: ApiKeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Say what a Ray cluster serves: applications, deployments, replicas, and the plan in force."""
    from offramp.spec.deploying import applications_document

    with _dashboard(address) as dashboard:
        serve = dashboard.serve()
    headers = key_header(find_api_key(api_key_file))
    plan = _plan_of(url or service_url(address, serve), headers) if serve["applications"] else None
    found = {"applications": applications_document(serve), "plan": plan}
    if as_json:
        print(json.dumps(found))
        return
    show(*status_tables(found))


def delete(
    name: Annotated[str, typer.Argument(help="The application's name.")],
    address: Address = DASHBOARD,
    timeout_s: Patience = 600.0,
) -> None:
    """End one application of a Ray cluster; the others stay."""
    from deployments.local_ray.applications import without_application
    from offramp.spec.deploying import wait_until_gone

    with _dashboard(address) as dashboard:
        dashboard.put(without_application(dashboard.serve(), name))
        wait_until_gone(dashboard, name, _waiting(timeout_s))
    print(f"{name} is gone")


def moved(service: Service, at: str | None) -> Service:
    """A service whose nodes find its files in another folder; raises InputError for a relative one."""
    from offramp.spec.file import at_folder

    if at is None:
        return service
    folder = PurePosixPath(at)
    if not folder.is_absolute():
        raise InputError(f"--at {at}: an absolute folder of the nodes is needed")
    return replace(service, settings=at_folder(service.settings, folder))


def _config(service: Service, *, host: str | None = None, proxy_location: ProxyLocation = "HeadOnly") -> dict[str, Any]:
    from cluster.render import serve_config

    return serve_config(
        json.loads(service.settings.model_dump_json()),  # as Serve gives it back: JSON has string keys only
        name=service.name,
        environment=_environment(service),
        host=host or service.ingress.host,
        port=service.ingress.port,
        grpc_port=service.ingress.grpc_port,
        proxy_location=proxy_location,
    )


def _environment(service: Service) -> dict[str, str]:
    from cluster.render import grpc_environment
    from deployments.local_ray.start import THROUGHPUT

    asked = service.ingress.grpc_port is not None
    return THROUGHPUT | (grpc_environment(service.settings.max_body_bytes) if asked else {})


def _manifest(service: Service, image: str, claim: str, at: str | None, redis: Redis | None) -> dict[str, Any]:
    """On Kubernetes a service listens on every address of its pod, and every pod may be asked."""
    from importlib.metadata import version

    from cluster.render import MOUNT, Kubernetes, ray_service
    from deployments.local_ray.start import HAPROXY

    mount = at or MOUNT
    service = moved(service, mount)
    kubernetes = Kubernetes(
        image=image,
        ray_version=version("ray"),
        claim=claim,
        mount=mount,
        environment=_environment(service) | ({} if service.ingress.front == "proxy" else HAPROXY),
        redis=redis,
    )
    config = _config(service, host="0.0.0.0", proxy_location="EveryNode")
    return ray_service(service.name, config, service.inventory, kubernetes)


@contextmanager
def _dashboard(address: str) -> Iterator[Dashboard]:
    from offramp.spec.deploying import Dashboard, dashboard_client

    with dashboard_client(address) as client:
        yield Dashboard(client)


def _waiting(limit_s: float) -> Waiting:
    from earlyexit.clock import MonotonicClock
    from offramp.spec.deploying import Waiting

    def tell(words: str) -> None:
        print(words, file=sys.stderr, flush=True)

    return Waiting(clock=MonotonicClock(), sleep=time.sleep, tell=tell, limit_s=limit_s)


def service_url(address: str, serve: dict[str, Any]) -> str:
    """Serve's own port, on the machine of the dashboard."""
    port = (serve.get("http_options") or {}).get("port", 8000)
    parts = urlsplit(address)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname  # IPv6
    return f"{parts.scheme}://{host}:{port}"


def _plan_of(url: str, headers: dict[str, str]) -> dict[str, Any] | None:
    """What the service says of its plan; None, and a line of why, where it says nothing."""
    import httpx

    try:
        response = httpx.get(f"{url}/plan", headers=headers, timeout=10.0)
        response.raise_for_status()
        found: dict[str, Any] = response.json()
    except (httpx.HTTPError, ValueError) as error:
        print(f"no plan: {url}/plan: {error}", file=sys.stderr)
        return None
    return found


def status_tables(found: Mapping[str, Any]) -> list[Table]:
    """Applications with their deployments, and the plan in force where a service said it."""
    tables = [_applications(found["applications"])]
    plan = found["plan"]
    chains = _chains(plan)
    if chains:
        tables.append(_plan(chains, _plan_title(plan)))
    return tables


def _plan_title(said: Mapping[str, Any]) -> str:
    title = f"Plan in force: {said['reason']}" if said.get("reason") else "Plan in force"
    hops = said.get("hops")
    halved = isinstance(hops, Mapping) and hops.get("dtype") == "float16"
    return f"{title}; hidden states between stages in float16" if halved else title


def _applications(applications: list[dict[str, Any]]) -> Table:
    table = make_table(
        "application", "deployment", "status", "replicas", title=None if applications else "Nothing is served"
    )
    for each in applications:
        table.add_row(each["name"], "", f"{each['status']} {each['message']}".strip(), "")
        for deployment in each["deployments"]:
            name = f"{deployment['name']} (emulated)" if deployment["emulated"] else deployment["name"]
            replicas = f"{deployment['replicas']} of {deployment['wanted']}"
            table.add_row("", name, deployment["status"], replicas)
    return table


def _chains(plan: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Returns the chains of a plan document, or of one that stands beside what else its service says."""
    while isinstance(plan, Mapping) and "chains" not in plan:  # another server may listen there
        plan = plan.get("plan")
    return list(plan["chains"]) if isinstance(plan, Mapping) else []


def _plan(chains: list[dict[str, Any]], title: str) -> Table:
    several = len(chains) > 1
    names = ("chain", "share") if several else ()
    table = make_table(*names, "stage", "device", "replicas", "blocks", "batch", "ramps after", title=title)
    for number, chain in enumerate(chains):
        of_chain = (str(number), f"{chain['share']:.1%}")
        for index, stage in enumerate(chain["stages"]):
            device = f"{stage['device'].removeprefix(EMULATED)} (emulated)" if _emulated(stage) else stage["device"]
            for position, split in enumerate(stage["splits"]):
                own = (str(index), device, str(stage["replicas"])) if position == 0 else ("", "", "")
                blocks = f"{split['first']} to {split['end'] - 1}"
                ramps = ", ".join(map(str, split["ramps"])) or "-"
                table.add_row(*(of_chain if several else ()), *own, blocks, str(split["batch"]), ramps)
                of_chain = ("", "")
    return table


def _emulated(stage: Mapping[str, Any]) -> bool:
    return bool(stage["device"].startswith(EMULATED))
