"""Services on a Ray cluster by the REST API of its dashboard, and the versions of a model on a running service."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import httpx
from pydantic import Field, FiniteFloat
from rich.table import Table

from cluster.devices import EMULATED
from cluster.inventory import Inventory, inventory_of_nodes
from cluster.render import MOUNT, Kubernetes, ProxyLocation, grpc_environment, ray_service, serve_config, to_yaml
from deployments.local_ray.applications import (
    APPLICATIONS,
    THROUGHPUT,
    check_devices,
    claimed,
    last_error,
    message_of,
    with_application,
    without_application,
)
from deployments.local_ray.cluster import HAPROXY
from deployments.local_ray.private import LOOPBACK_NAMES
from earlyexit.clock import Clock, MonotonicClock
from earlyexit.errors import InputError, OfframpError, first_line, raising
from earlyexit.network.store import read_card
from offramp.client.client import Client, open_http
from offramp.client.protocol import key_header, read_reply, reading, shape
from offramp.commands.options import (
    CanaryJob,
    DeleteJob,
    DeployJob,
    LoadJob,
    PromoteJob,
    RenderJob,
    StatusJob,
    UnloadJob,
    VersionsJob,
)
from offramp.commands.output import cell, counts_text, make_table, milliseconds_text, print_result, warn
from optimizer.plans.plan import Plan, chains_of, deployment_name
from optimizer.plans.plan_file import parse_plan

if TYPE_CHECKING:
    from offramp.spec.file import Service


def render(job: RenderJob) -> None:
    """Prints or writes the config, the manifest or the settings of a service."""
    from offramp.spec.file import build_service, read_document  # imports the planner, which `status` does not need

    document, source = read_document(job.service)
    service = build_service(document, source)
    if job.settings:
        text = service.moved_to(job.at).settings.model_dump_json(indent=2) + "\n"
    elif job.kuberay:
        with source.located():
            text = to_yaml(_manifest(service, job))
    else:
        text = to_yaml(_config(service.moved_to(job.at)))
    if job.out is None:
        print(text, end="")
    else:
        job.out.write_text(text, encoding="utf-8")


def deploy(job: DeployJob) -> None:
    """Adds the service to the applications of the cluster, and waits until it runs."""
    from offramp.spec.file import read_service

    service = read_service(job.service).moved_to(job.at)
    with open_dashboard(job.address) as dashboard:
        applications = dashboard.serve()
        check_devices(service.inventory.counts, dashboard.inventory(), claimed(applications, service.settings.app))
        config = with_application(applications, _config(service))
        http = config["http_options"]
        if http | service.ingress.model_dump(include={"host", "port"}, exclude_unset=True) != http:
            warn(f"Serve keeps listening at {http['host']}:{http['port']} until it ends (serve shutdown)")
        elif http["host"] in LOOPBACK_NAMES:
            warn(f"HAProxy reaches only its own node's ingresses at {http['host']}: write host: 0.0.0.0 under ingress")
        dashboard.put(config)
        dashboard.wait_until_running(service.settings.app, job.timeout_s, partial(print, file=sys.stderr, flush=True))
        print(f"{service.settings.app} runs; see: offramp status --address {job.address}")


def status(job: StatusJob) -> None:
    """Prints the applications, and the current plan if the service reports it."""
    with open_dashboard(job.address) as dashboard:
        serve = dashboard.serve()
    path = min((each.get("route_prefix") or "/" for each in serve["applications"].values()), default="/")
    port = (serve.get("http_options") or {"port": 8000})["port"]  # of Serve, on the dashboard's machine
    url = job.url or str(httpx.URL(job.address).copy_with(port=port, path=path)).rstrip("/")
    with Client(url, 10.0, max_attempts=1, api_key=job.api_key) as client:
        plan = _plan_of(client, url) if serve["applications"] else None
    document = {"applications": applications_document(serve), "plan": plan}
    print_result(document, lambda: status_tables(document), as_json=job.as_json)


def delete(job: DeleteJob) -> None:
    """Removes an application, and waits until it is gone."""
    with open_dashboard(job.address) as dashboard:
        dashboard.put(without_application(dashboard.serve(), job.name))
        dashboard.wait_until_gone(job.name, job.timeout_s)
    print(f"{job.name} is gone")


RAY_SERVICE_NAME = re.compile("[a-z][a-z0-9-]{,46}")
"""KubeRay's `ValidateRayServiceMetadata`: a DNS label of RFC 1035, and room for the suffixes of its services."""


def _config(service: Service, *, host: str | None = None, proxy_location: ProxyLocation = "HeadOnly") -> dict[str, Any]:
    grpc_port = service.ingress.grpc_port
    return serve_config(
        json.loads(service.settings.model_dump_json()),  # with string keys only, as Serve returns it
        name=service.settings.app,
        environment=THROUGHPUT | ({} if grpc_port is None else grpc_environment(service.settings.max_body_bytes)),
        host=host or service.ingress.host,
        port=service.ingress.port,
        grpc_port=grpc_port,
        proxy_location=proxy_location,
    )


def _manifest(service: Service, job: RenderJob) -> dict[str, Any]:
    """Returns a KubeRay manifest, with which the service listens on all addresses of its pods.

    Raises InputError for a name that KubeRay refuses.
    """
    mount = job.at or MOUNT
    service = service.moved_to(mount)
    config = _config(service, host="0.0.0.0", proxy_location="EveryNode")
    variables = config["applications"][0]["runtime_env"]["env_vars"]
    kubernetes = Kubernetes(
        **job.model_dump(include={"image", "claim", "redis", "redis_secret"}),
        ray_version=version("ray"),
        mount=mount,
        environment=variables | ({} if service.ingress.front == "proxy" else HAPROXY),
    )
    manifest = ray_service(service.settings.app, config, service.inventory, kubernetes)
    if not RAY_SERVICE_NAME.fullmatch(name := manifest["metadata"]["name"]):
        raise InputError(f"name: {name!r}; KubeRay takes at most 47 characters, the first a letter", at=("name",))
    return manifest


def _plan_of(client: Client, url: str) -> dict[str, Any] | None:
    """Returns the service's plan. If it reports none, prints the reason on stderr and returns None."""
    try:
        report = client.plan()
        parse_plan(report["plan"])
        return report
    except OfframpError as error:
        print(f"no plan: {url}/plan: {first_line(error)}", file=sys.stderr)
        return None


def status_tables(document: Mapping[str, Any]) -> list[Table]:
    """Returns tables of the applications with their deployments, and of the current plan if there is one."""
    applications, plan = document["applications"], document["plan"]
    title = None if applications else "Nothing is served"
    table = make_table("application", "deployment", "status", "replicas", title=title)
    for each in applications:
        table.add_row(each["name"], "", f"{each['status']} {each['message']}".strip(), "")
        for one in each["deployments"]:
            name = f"{one['name']} (emulated)" if one["emulated"] else one["name"]
            table.add_row("", name, one["status"], f"{one['replicas']} of {one['wanted']}")
    if plan is None:
        return [table]
    title = f"Plan in force: {plan['reason']}" if plan.get("reason") else "Plan in force"
    if (plan.get("hops") or {}).get("dtype") == "float16":
        title += "; hidden states between stages in float16"
    if plan.get("suspended"):
        title += f"; but all inputs are refused: {plan['suspended']}"
    served = parse_plan(plan["plan"])
    names = ("chain", "share") if len(served.shares) > 1 else ()
    columns = (*names, "stage", "device", "replicas", "blocks", "batch", "ramps\nafter")
    return [table, make_table(*columns, title=title, rows=_plan_rows(served))]


def _plan_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Yields a row for each split of a plan; the first of a chain or a stage also shows these."""
    for number, (share, stages) in enumerate(zip(plan.shares, chains_of(plan.stages), strict=True)):
        of_chain: tuple[str, ...] = (str(number), f"{share:.1%}") if len(plan.shares) > 1 else ()
        for index, stage in enumerate(stages):
            name = stage.device.removeprefix(EMULATED)
            device = name if name == stage.device else f"{name} (emulated)"
            of_stage = (str(index), device, str(stage.replicas))
            for split in stage.splits:
                blocks = f"{split.first} to {split.end - 1}"
                yield *of_chain, *of_stage, blocks, str(split.batch), ", ".join(map(str, split.ramps)) or "-"
                of_chain, of_stage = ("",) * len(of_chain), ("", "", "")


NODES = "/api/v0/nodes"
# What is read of the nodes and of Serve's state.
_NODE: Any = shape(state=str, resources_total=dict[str, FiniteFloat], labels=(dict[str, str] | None, None))
_NODES: Any = shape(data=shape(result=shape(result=list[_NODE])))
_REPLICA: Any = shape(state=str)
_DEPLOYMENT: Any = shape(status=str, message=str, target_num_replicas=int, replicas=list[_REPLICA])
_APPLICATION: Any = shape(
    status=str,
    message=(str, ""),
    route_prefix=(Annotated[str, Field(pattern=r"^/[^?#\x00-\x1f\x7f]*$")] | None, None),
    deployed_app_config=(dict[str, Any] | None, None),
    deployments=(dict[str, _DEPLOYMENT], {}),
)
_HTTP: Any = shape(host=str, port=Annotated[int, Field(ge=0, lt=2**16)])
_GRPC: Any = shape(port=int, grpc_servicer_functions=(list[str], []))
_SERVE: Any = shape(
    applications=dict[str, _APPLICATION], http_options=(_HTTP | None, None), grpc_options=(_GRPC | None, None)
)
POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class Dashboard:
    """The REST API of a Ray cluster's dashboard. Error messages are one line with the address."""

    client: httpx.Client
    clock: Clock = field(default_factory=MonotonicClock)
    sleep: Callable[[float], None] = time.sleep

    def serve(self) -> dict[str, Any]:
        """Returns Serve's state: `applications` by name, and its options."""
        return dict(self._request("GET", APPLICATIONS, _SERVE))

    def put(self, config: Mapping[str, Any]) -> None:
        """Replaces Serve's applications; those that are not in the config are deleted."""
        self._request("PUT", APPLICATIONS, json=config)

    def inventory(self) -> Inventory:
        """Returns the hardware of the cluster's nodes."""
        found = self._request("GET", NODES, _NODES, params={"limit": 10_000})
        return inventory_of_nodes(
            {"Alive": row["state"] == "ALIVE", "Resources": row["resources_total"], "Labels": row.get("labels")}
            for row in found["data"]["result"]["result"]
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
            running = sum(replica["state"] == "RUNNING" for each in deployments for replica in each["replicas"])
            replicas = f"{running} of {target} replicas running"
            state = f"{status or 'NOT_STARTED'}: {healthy} of {len(deployments)} deployments healthy, {replicas}"
            state += f"; {why}" if (why := message_of(application)) else ""
            if state != last:
                on_progress(state)
                last = state
            if status == "RUNNING":
                return
            if status == "DEPLOY_FAILED":
                raise OfframpError(f"application {name!r}: {status}: {message_of(application)}")
        raise OfframpError(f"application {name!r} does not run after {limit_s:g} s: {last}")

    def wait_until_gone(self, name: str, limit_s: float) -> None:
        """Waits until the application is gone; raises OfframpError after the limit."""
        if all(self._poll(name, limit_s)):
            raise OfframpError(f"application {name!r} still exists after {limit_s:g} s")

    def _poll(self, name: str, limit_s: float) -> Iterator[dict[str, Any]]:
        """Yields the state of an application, {} if there is none, at intervals until the limit."""
        end_s = self.clock.now_s() + limit_s
        while True:
            yield self.serve()["applications"].get(name, {})
            if self.clock.now_s() >= end_s:
                return
            self.sleep(POLL_S)

    def _request(self, method: str, path: str, kind: Any = Any, **options: Any) -> Any:
        """Returns the answer, of this kind; raises OfframpError."""
        address = str(self.client.base_url).rstrip("/")
        try:
            response = self.client.request(method, path, **options)
        except httpx.HTTPError as error:
            raise OfframpError(f"no Ray dashboard answers at {address} (`offramp serve` has none): {error}") from error
        if response.status_code in (401, 403):
            raise OfframpError(f"{address} refuses with {response.status_code}: set RAY_AUTH_MODE=token and its token")
        if not response.is_success:
            reason = response.headers.get("Location") or last_error(response.text)
            raise OfframpError(f"{address}{path} answers {response.status_code}: {reason}")
        answer = read_reply(response.status_code, response.content, response.headers)
        with reading(answer, f"{address}{path}", kind, of="a Ray dashboard"):
            return answer


@contextmanager
def open_dashboard(address: str) -> Iterator[Dashboard]:
    """Opens a dashboard, with Ray's token if RAY_AUTH_MODE requires one; raises InputError for an unusable token."""
    with open_http(httpx.Client, address, headers=token_header(os.environ), timeout=60.0) as client:
        yield Dashboard(client)


def token_header(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the header of Ray's token authentication, with the token from the places where Ray looks for it."""
    if environment.get("RAY_AUTH_MODE", "").lower() != "token":
        return {}
    token = environment.get("RAY_AUTH_TOKEN")
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if token is None:
        with raising(InputError, f"RAY_AUTH_MODE is token, and {path} cannot be read", OSError):
            token = path.read_text(encoding="utf-8", errors="replace")
    return key_header(token.strip(), "token of RAY_AUTH_MODE=token")


def applications_document(serve: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns Serve's applications, as `offramp status --json` prints them."""
    return [
        {
            "name": name,
            "status": each["status"],
            "message": message_of(each),
            "route_prefix": each.get("route_prefix"),
            "deployments": [
                {
                    "name": deployment,
                    "status": details["status"],
                    "replicas": sum(replica["state"] == "RUNNING" for replica in details["replicas"]),
                    "wanted": details["target_num_replicas"],
                    "emulated": deployment.startswith(deployment_name(EMULATED)),
                }
                for deployment, details in each.get("deployments", {}).items()
            ],
        }
        for name, each in serve["applications"].items()
    ]


def versions(job: VersionsJob) -> None:
    """Prints models, versions and their states."""
    with Client(job.url, api_key=job.api_key) as client:
        rows = client.versions()
    fields = ("name", "version", "state", "reason")
    table = make_table("model", *fields[1:], rows=([row.get(field, "-") for field in fields] for row in rows))
    print_result(rows, lambda: [table], as_json=job.as_json)


def canary(job: CanaryJob) -> None:
    """Starts, ends or reads a canary, and prints it next to the default version."""
    with Client(job.url, api_key=job.api_key) as client:
        if job.end:
            report = client.end_canary()
        elif job.version is None:
            report = client.canary()
        else:
            report = client.set_canary(job.version, share=job.share, compare_share=job.compare)
    print_result(report, lambda: [side_by_side_table(report)], as_json=job.as_json)


def promote(job: PromoteJob) -> None:
    """Makes a version the default, and prints it next to the canary, if any."""
    with Client(job.url, api_key=job.api_key) as client:
        report = client.promote(job.version)
    print_result(report, lambda: [side_by_side_table(report)], as_json=job.as_json)


def load(job: LoadJob) -> None:
    """Starts a version, and waits until it is ready."""
    from offramp.spec.file import read_service  # imports the planner

    service = read_service(job.service)
    model, settings = read_card(Path(service.settings.model)).name, service.moved_to(job.at).settings
    with Client(job.url, api_key=job.api_key) as client:
        client.load(model, settings.version, settings=settings.model_dump_json(), timeout_s=job.timeout_s)
    print(f"version {settings.version} of {model} is ready")


def unload(job: UnloadJob) -> None:
    """Stops a version, and waits until it is gone."""
    with Client(job.url, api_key=job.api_key) as client:
        client.unload(job.model, job.version, timeout_s=job.timeout_s)
    print(f"version {job.version} of {job.model} is gone")


def side_by_side_table(report: Mapping[str, Any]) -> Table:
    """Returns a table with the default version and the canary in two columns."""
    versions, canary, compared = report["versions"], report["canary"], report["compared"]
    title = f"{report['model']}: version {report['default']}"
    if canary is not None:
        title += f", and {canary['version']} for {canary['share']:.1%} of the requests"
    agreement = f"they agree on {cell(compared['agreement'], '.2%')} of {compared['inputs']} inputs that both answered"
    caption = None if compared["agreement"] is None else agreement
    rows: dict[str, tuple[str, Callable[[Any], str]]] = {
        "requests": ("requests", str),
        "errors": ("errors", counts_text),
        "p50": ("p50_s", milliseconds_text),
        "p99": ("p99_s", milliseconds_text),
        "left after block": ("exits", counts_text),
        "agreement with its full model": ("agreement", partial(cell, form=".2%")),
    }
    cells = ((title, *(text(each[field]) for each in versions.values())) for title, (field, text) in rows.items())
    return make_table("", *(f"version {name}" for name in versions), title=title, caption=caption, rows=cells)
