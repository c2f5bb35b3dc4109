"""`offramp render`, `deploy`, `status` and `delete`: services on a Ray cluster."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
from rich.table import Table

from cluster.devices import EMULATED
from cluster.render import (
    MOUNT,
    Kubernetes,
    ProxyLocation,
    Redis,
    grpc_environment,
    ray_service,
    serve_config,
    to_yaml,
)
from deployments.local_ray.applications import THROUGHPUT, check_devices, claimed, with_application, without_application
from deployments.local_ray.cluster import HAPROXY
from offramp.client.protocol import key_header
from offramp.commands.options import DeleteJob, DeployJob, RenderJob, ServiceFileOptions, StatusJob
from offramp.commands.output import make_table, print_result
from offramp.spec.deploying import applications_document, open_dashboard

if TYPE_CHECKING:
    from offramp.spec.file import Service


def render(job: RenderJob) -> None:
    """Prints or writes the config, the manifest or the settings of a service."""
    service = _read(job)
    if job.settings:
        text = service.moved_to(job.at).settings.model_dump_json(indent=2) + "\n"
    elif job.kuberay:
        text = to_yaml(_manifest(service, job))
    else:
        text = to_yaml(_config(service.moved_to(job.at)))
    if job.out is None:
        print(text, end="")
    else:
        job.out.write_text(text, encoding="utf-8")


def deploy(job: DeployJob) -> None:
    """Adds the service to the applications of the cluster, and waits until it runs."""
    service = _read(job).moved_to(job.at)
    with open_dashboard(job.address) as dashboard:
        applications = dashboard.serve()
        check_devices(service.inventory.counts, dashboard.inventory(), claimed(applications, service.name))
        dashboard.put(with_application(applications, _config(service)))
        dashboard.wait_until_running(service.name, job.timeout_s, partial(print, file=sys.stderr, flush=True))
        print(f"{service.name} runs; see: offramp status --address {job.address}")


def status(job: StatusJob) -> None:
    """Prints the applications, and the current plan if the service reports it."""
    with open_dashboard(job.address) as dashboard:
        serve = dashboard.serve()
    headers = key_header(job.api_key)
    url = job.url
    if url is None:  # Serve's port on the dashboard's machine
        parts = urlsplit(job.address)
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname  # IPv6
        url = f"{parts.scheme}://{host}:{(serve.get('http_options') or {}).get('port', 8000)}"
    plan = _plan_of(url, headers) if serve["applications"] else None
    document = {"applications": applications_document(serve), "plan": plan}
    print_result(document, lambda: status_tables(document), as_json=job.as_json)


def delete(job: DeleteJob) -> None:
    """Removes an application, and waits until it is gone."""
    with open_dashboard(job.address) as dashboard:
        dashboard.put(without_application(dashboard.serve(), job.name))
        dashboard.wait_until_gone(job.name, job.timeout_s)
    print(f"{job.name} is gone")


def _read(job: ServiceFileOptions) -> Service:
    from offramp.spec.file import read_service  # imports the planner, which `status` and `delete` do not need

    return read_service(job.service)


def _config(service: Service, *, host: str | None = None, proxy_location: ProxyLocation = "HeadOnly") -> dict[str, Any]:
    return serve_config(
        json.loads(service.settings.model_dump_json()),  # with string keys only, as Serve returns it
        name=service.name,
        environment=_environment(service),
        host=host or service.ingress.host,
        port=service.ingress.port,
        grpc_port=service.ingress.grpc_port,
        proxy_location=proxy_location,
    )


def _environment(service: Service) -> dict[str, str]:
    has_grpc = service.ingress.grpc_port is not None
    return THROUGHPUT | (grpc_environment(service.settings.max_body_bytes) if has_grpc else {})


def _manifest(service: Service, job: RenderJob) -> dict[str, Any]:
    """Returns a KubeRay manifest, with which the service listens on all addresses of its pods."""
    mount = job.at or MOUNT
    service = service.moved_to(mount)
    kubernetes = Kubernetes(
        image=job.image,
        ray_version=version("ray"),
        claim=job.claim,
        mount=mount,
        environment=_environment(service) | ({} if service.ingress.front == "proxy" else HAPROXY),
        redis=None if job.redis is None else Redis(address=job.redis, secret=job.redis_secret),
    )
    config = _config(service, host="0.0.0.0", proxy_location="EveryNode")
    return ray_service(service.name, config, service.inventory, kubernetes)


def _plan_of(url: str, headers: dict[str, str]) -> dict[str, Any] | None:
    """Returns the service's plan. If it reports none, prints the reason on stderr and returns None."""
    try:
        plan: dict[str, Any] = httpx.get(f"{url}/plan", headers=headers, timeout=10.0).raise_for_status().json()
    except (httpx.HTTPError, ValueError) as error:
        print(f"no plan: {url}/plan: {error}", file=sys.stderr)
        return None
    return plan


def status_tables(document: Mapping[str, Any]) -> list[Table]:
    """Returns tables of the applications with their deployments, and of the current plan if there is one."""
    applications, plan = document["applications"], document["plan"]
    table = make_table(
        "application", "deployment", "status", "replicas", title=None if applications else "Nothing is served"
    )
    for each in applications:
        table.add_row(each["name"], "", f"{each['status']} {each['message']}".strip(), "")
        for deployment in each["deployments"]:
            name = f"{deployment['name']} (emulated)" if deployment["emulated"] else deployment["name"]
            replicas = f"{deployment['replicas']} of {deployment['wanted']}"
            table.add_row("", name, deployment["status"], replicas)
    tables, inner = [table], plan
    while isinstance(inner, Mapping) and "chains" not in inner:  # the answer may be another server's
        inner = inner.get("plan")
    if isinstance(inner, Mapping) and inner["chains"]:
        title = f"Plan in force: {plan['reason']}" if plan.get("reason") else "Plan in force"
        hops = plan.get("hops")
        if isinstance(hops, Mapping) and hops.get("dtype") == "float16":
            title += "; hidden states between stages in float16"
        tables.append(_plan_table(list(inner["chains"]), title))
    return tables


def _plan_table(chains: list[dict[str, Any]], title: str) -> Table:
    several = len(chains) > 1
    names = ("chain", "share") if several else ()
    table = make_table(*names, "stage", "device", "replicas", "blocks", "batch", "ramps\nafter", title=title)
    for number, chain in enumerate(chains):
        of_chain = (str(number), f"{chain['share']:.1%}")
        for index, stage in enumerate(chain["stages"]):
            device = stage["device"]
            if device.startswith(EMULATED):
                device = f"{device.removeprefix(EMULATED)} (emulated)"
            for position, split in enumerate(stage["splits"]):
                own = (str(index), device, str(stage["replicas"])) if position == 0 else ("", "", "")
                blocks = f"{split['first']} to {split['end'] - 1}"
                ramps = ", ".join(map(str, split["ramps"])) or "-"
                table.add_row(*(of_chain if several else ()), *own, blocks, str(split["batch"]), ramps)
                of_chain = ("", "")
    return table
