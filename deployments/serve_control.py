"""Every call that changes what Ray and Serve run."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from cluster.devices import find_device
from deployments.settings import ServeSettings
from earlyexit.errors import OfframpError, PlanError
from optimizer.plan_file import parse_plan

HttpFront = Literal["haproxy", "proxy"]
APP = "offramp"
LOGS = "/tmp/ray/session_latest/logs/serve"

# Serve's own switches. They are read when ray.serve is imported, here and in every replica, so they are set before.
THROUGHPUT = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # A replica that says it is broken must not drain for 20 s with calls open.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # Our own lines are few, warnings and errors: they are written at once, not when a thousand have gathered.
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(64 * 1024 * 1024),  # 4 MiB would refuse a batch of long texts
}
HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
# HAProxy's own pages, beside the port that is served.
HAPROXY_PORTS = {"RAY_SERVE_HAPROXY_STATS_PORT": 8404, "RAY_SERVE_HAPROXY_METRICS_PORT": 9101}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCluster:
    """How Ray is started on this machine."""

    port: int = 8000
    host: str = "127.0.0.1"
    """Ignored by HAProxy, which listens on every interface: put a firewall before it."""
    front: HttpFront = "haproxy"
    metrics_port: int | None = None
    """Where Prometheus finds the metrics; None for a free port."""
    drain_s: float = 5.0
    """How long an ingress goes on answering after it was told to stop."""


@contextmanager
def serving(settings: ServeSettings, cluster: LocalCluster) -> Iterator[str]:
    """Start Ray and the application on this machine; gives its URL, and ends everything cleanly.

    Raises PlanError or ModelFolderError before anything starts, OfframpError where a port is taken.
    """
    _set_environment(cluster)
    _check_ports(cluster)
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions

    from deployments.app import build

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # after the import, which sets it
    application = build(settings.model_dump())
    ray.init(
        address="local",  # never join a cluster that happens to be reachable
        num_cpus=max(os.cpu_count() or 1, _cpus_needed(settings)),
        include_dashboard=False,
        object_store_memory=512 * 1024 * 1024,
        log_to_driver=False,
        logging_level=logging.WARNING,
        _metrics_export_port=cluster.metrics_port,
    )
    try:
        _check_resources(settings, ray.cluster_resources())  # type: ignore[no-untyped-call] # ray's, not ours
        serve.start(proxy_location="HeadOnly", http_options=HTTPOptions(host=cluster.host, port=cluster.port))
        try:
            serve.run(application, name=APP, route_prefix="/")
        except RuntimeError as error:
            raise OfframpError(f"the service did not start; {LOGS} says why: {error}") from error
        yield f"http://{'127.0.0.1' if cluster.host == '0.0.0.0' else cluster.host}:{cluster.port}"
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call] # ray's, not ours
        ray.shutdown()


def _set_environment(cluster: LocalCluster) -> None:
    switches = THROUGHPUT | {
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(cluster.drain_s),
        "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": str(cluster.drain_s),
    }
    if cluster.front == "haproxy":
        switches |= HAPROXY
    for name, value in switches.items():
        os.environ.setdefault(name, value)  # whoever set one wants it so


def _check_ports(cluster: LocalCluster) -> None:
    """A process of an earlier run may still hold them: HAProxy outlives a driver that was killed."""
    ports = [cluster.port]
    host = "0.0.0.0" if cluster.front == "haproxy" else cluster.host
    if cluster.front == "haproxy":
        ports += [int(os.environ.get(name, port)) for name, port in HAPROXY_PORTS.items()]
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                hint = "; an haproxy of an earlier run may still be there" if cluster.front == "haproxy" else ""
                raise OfframpError(f"port {port} of {host} is taken{hint}") from error


def _check_resources(settings: ServeSettings, resources: dict[str, float]) -> None:
    """Serve would wait for ever for what is not there."""
    stages = parse_plan(settings.plan).stages
    needed = sum(stage.replicas * find_device(stage.device).actor_options.get("num_gpus", 0) for stage in stages)
    if needed > resources.get("GPU", 0):
        raise PlanError(f"the plan needs {needed:g} GPUs, this machine has {resources.get('GPU', 0):g}")
    for stage in stages:
        accelerator = find_device(stage.device).actor_options.get("accelerator_type")
        if accelerator and f"accelerator_type:{accelerator}" not in resources:
            raise PlanError(f"the plan needs {accelerator}, which this machine does not have")


def _cpus_needed(settings: ServeSettings) -> int:
    # Logical: on a laptop more replicas than cores is what one wants to try.
    plan = parse_plan(settings.plan)
    return sum(stage.replicas for stage in plan.stages) + settings.ingress_replicas
