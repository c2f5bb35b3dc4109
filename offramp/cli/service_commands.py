"""The commands around a service file: parses, calls, prints. Registered on the app of `offramp.cli.app`."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from earlyexit.errors import InputError
from offramp.cli.options import ApiKeyFile, AsJson, above_zero, http_address, in_a_folder
from offramp.client.credentials import find_api_key, key_header

if TYPE_CHECKING:
    from cluster.render import ProxyLocation
    from deployments.serve_control import LocalCluster
    from deployments.settings import ServeSettings
    from offramp.service.deploying import Dashboard, Waiting
    from offramp.service.file import Service

ServiceFile = Annotated[Path, typer.Argument(metavar="SERVICE", help="Service file, YAML or JSON.")]
Address = Annotated[str, typer.Option(help="Ray's dashboard.", callback=http_address)]
At = Annotated[
    str | None, typer.Option(help="Folder where the nodes find model/, exit records and state; default: as here.")
]
Patience = Annotated[float, typer.Option(callback=above_zero, help="How long to wait until it is done.")]
DASHBOARD = "http://127.0.0.1:8265"

EXAMPLES = {"text": "'a text'", "text_pair": "'a text' 'another'", "image": "photo.jpg"}
"""Arguments of `offramp predict`, by codec."""

commands = typer.Typer()


@commands.command()
def render(
    service: ServiceFile,
    kuberay: Annotated[bool, typer.Option("--kuberay", help="A RayService instead of a Serve config.")] = False,
    image: Annotated[str, typer.Option(help="For --kuberay: image with Ray and this repository.")] = "offramp",
    claim: Annotated[str, typer.Option(help="For --kuberay: volume claim that all pods mount.")] = "offramp",
    settings: Annotated[
        bool, typer.Option("--settings", help="Only the settings, as a repository's folder keeps them.")
    ] = False,
    at: At = None,
    out: Annotated[Path | None, typer.Option(help="File to write; default: print.")] = None,
) -> None:
    """Write what `serve deploy` takes, KubeRay's manifest, or the settings, for a service file."""
    from cluster.render import to_yaml

    in_a_folder("out", out)
    if kuberay and settings:
        raise InputError("--kuberay and --settings are two things: give one of them")
    if settings:
        text = moved(_read(service), at).settings.model_dump_json(indent=2) + "\n"
    else:
        text = to_yaml(_manifest(service, image, claim, at) if kuberay else _config(moved(_read(service), at)))
    if out is None:
        print(text, end="")
    else:
        out.write_text(text, encoding="utf-8")


@commands.command()
def deploy(
    service: ServiceFile,
    address: Address = DASHBOARD,
    at: At = None,
    timeout_s: Patience = 600.0,
) -> None:
    """Put a service on a running Ray cluster, beside whatever else it serves, and wait until it runs."""
    from deployments.applications import check_devices, claimed, with_application
    from offramp.service.deploying import wait_until_running

    found = moved(_read(service), at)
    with _dashboard(address) as dashboard:
        serve = dashboard.serve()
        check_devices(found.inventory.counts, dashboard.inventory(), claimed(serve, found.name))
        dashboard.put(with_application(serve, _config(found)))
        wait_until_running(dashboard, found.name, _waiting(timeout_s))
        print(f"{found.name} runs; offramp status --address {address}")


@commands.command()
def status(
    address: Address = DASHBOARD,
    url: Annotated[
        str | None, typer.Option(help="The service, for its plan; default: Serve's port beside the dashboard.")
    ] = None,
    api_key_file: ApiKeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Say what a Ray cluster serves: applications, deployments, replicas, and the plan in force."""
    from offramp.service.deploying import applications_document

    with _dashboard(address) as dashboard:
        serve = dashboard.serve()
    headers = key_header(find_api_key(api_key_file))
    plan = _plan_of(url or service_url(address, serve), headers) if serve["applications"] else None
    found = {"applications": applications_document(serve), "plan": plan}
    if as_json:
        print(json.dumps(found))
        return
    from rich.console import Console

    from offramp.cli.report_status import status_tables

    Console().print(*status_tables(found))


@commands.command()
def delete(
    name: Annotated[str, typer.Argument(help="The application's name.")],
    address: Address = DASHBOARD,
    timeout_s: Patience = 600.0,
) -> None:
    """End one application of a Ray cluster; the others stay."""
    from deployments.applications import without_application
    from offramp.service.deploying import wait_until_gone

    with _dashboard(address) as dashboard:
        dashboard.put(without_application(dashboard.serve(), name))
        wait_until_gone(dashboard, name, _waiting(timeout_s))
    print(f"{name} is gone")


def serve_file(service: Path, *, port: int | None, grpc_port: int | None, metrics_port: int | None) -> None:
    """Start Ray on this machine with a service file's application, until told to stop."""
    from deployments.serve_control import LocalCluster
    from offramp.service.access import with_environment

    found = _read(service)
    ingress = found.ingress
    settings = found.settings.model_copy(update={"access": with_environment(found.settings.access)})
    cluster = LocalCluster(
        port=port or ingress.port,
        host=ingress.host,
        front=ingress.front,
        grpc_port=grpc_port or ingress.grpc_port,
        metrics_port=metrics_port,
    )
    serve_until_stopped(settings, cluster)


def serve_until_stopped(settings: ServeSettings, cluster: LocalCluster) -> None:
    """Serve on this machine until Ctrl-C or SIGTERM."""
    from deployments.serve_control import serving
    from earlyexit.store import read_card
    from offramp.service.access import exposure_notes

    try:
        with serving(settings, cluster) as url:
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # after Ray's own; both signals end cleanly
            card = read_card(Path(settings.model))
            print(f"serving {card.name} at {url}   API: {url}/docs")
            if cluster.grpc_port is not None:
                print(f"gRPC at {cluster.address}:{cluster.grpc_port}")
            print(f"try: offramp predict {EXAMPLES.get(card.codec['name'], '--data FILE')} --url {url}", flush=True)
            keys = settings.access is not None and settings.access.has_keys
            with_grpc = cluster.grpc_port is not None
            for note in exposure_notes(cluster.host, cluster.front, has_keys=keys, has_grpc=with_grpc):
                print(f"note: {note}; see docs/security.md", file=sys.stderr, flush=True)
            signal.pause()
    except KeyboardInterrupt:
        print("stopped")


def _read(service: Path) -> Service:
    from offramp.service.file import read_service

    return read_service(service)


def moved(service: Service, at: str | None) -> Service:
    """A service whose nodes find its files in another folder; raises InputError for a relative one."""
    from offramp.service.paths import at_folder

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
    from deployments.switches import THROUGHPUT

    asked = service.ingress.grpc_port is not None
    return THROUGHPUT | (grpc_environment(service.settings.max_body_bytes) if asked else {})


def _manifest(path: Path, image: str, claim: str, at: str | None) -> dict[str, Any]:
    """On Kubernetes a service listens on every address of its pod, and every pod may be asked."""
    from importlib.metadata import version

    from cluster.render import MOUNT, Kubernetes, ray_service
    from deployments.switches import HAPROXY

    mount = at or MOUNT
    service = moved(_read(path), mount)
    kubernetes = Kubernetes(
        image=image,
        ray_version=version("ray"),
        claim=claim,
        mount=mount,
        environment=_environment(service) | (HAPROXY if service.ingress.front == "haproxy" else {}),
    )
    config = _config(service, host="0.0.0.0", proxy_location="EveryNode")
    return ray_service(service.name, config, service.inventory, kubernetes)


@contextmanager
def _dashboard(address: str) -> Iterator[Dashboard]:
    from offramp.service.deploying import Dashboard, dashboard_client

    with dashboard_client(address) as client:
        yield Dashboard(client)


def _waiting(limit_s: float) -> Waiting:
    from earlyexit.clock import MonotonicClock
    from offramp.service.deploying import Waiting

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
