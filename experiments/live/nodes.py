"""A cluster of several nodes on one machine, any of which can be lost."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from deployments.serve_control import DASHBOARD_HOST
from deployments.settings import ServeSettings
from deployments.switches import THROUGHPUT
from experiments.live.emulation import emulated
from experiments.live.service import READY_TIMEOUT_S, Service
from offramp.client.client import Client
from optimizer.plan import Plan

STORE_BYTES = 150 * 1024 * 1024
DASHBOARD_PORT = 8269
LABEL = "offramp-node"
HEAD = {
    "num_cpus": 4,
    "object_store_memory": STORE_BYTES,
    "include_dashboard": True,
    "dashboard_host": DASHBOARD_HOST,
    "dashboard_port": DASHBOARD_PORT,
}


@contextmanager
def served_on_nodes(
    settings: ServeSettings, plan: Plan, *, name: str, per_node: int, num_nodes: int, port: int
) -> Iterator[tuple[Service, Callable[[int], None]]]:
    """The service with so many nodes of so many accelerators each beside the head, its plan in force.

    Gives besides what kills all processes of a node at once, by its number.

    Ingress and controller are on the head, which has no accelerators; the nodes have nothing else. Requests come by
    Serve's own proxy, unless this process has started HAProxy before.
    """
    assert settings.control is not None, "nobody else would notice a lost node"
    for switch, value in THROUGHPUT.items():  # read when ray.serve is imported
        os.environ.setdefault(switch, value)
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster
    from ray.serve.config import HTTPOptions

    from deployments.app import build

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    url = f"http://{DASHBOARD_HOST}:{DASHBOARD_PORT}"
    control = settings.control.model_copy(update={"dashboard_url": url})
    application = build(settings.model_copy(update={"control": control}).model_dump())
    cluster: Any = Cluster(initialize_head=True, head_node_args=HEAD)
    try:
        has = {"num_cpus": 0, "resources": {emulated(name): per_node}, "object_store_memory": STORE_BYTES}
        members = [cluster.add_node(labels={LABEL: str(index)}, **has) for index in range(num_nodes)]
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.WARNING)
        serve.start(proxy_location="HeadOnly", http_options=HTTPOptions(host="127.0.0.1", port=port))
        serve.run(application, name=settings.app, route_prefix="/", external_scaler_enabled=True)
        service = Service(url=f"http://127.0.0.1:{port}", app=settings.app)
        with Client(service.url) as client:
            client.wait_until_ready(timeout_s=READY_TIMEOUT_S)
        asyncio.run(service.apply(plan))
        yield service, lambda index: cluster.remove_node(members[index], allow_graceful=False)
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call] # ray's, not ours
        ray.shutdown()
        cluster.shutdown()
