"""Ray Serve's server with `@serve.batch`: `python -m experiments.peers.serve_batch`.

It starts its own Ray, which can run next to another one on the same machine. It uses the same throughput switches and
HAProxy as Offramp's service.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from deployments.local_ray.applications import THROUGHPUT
from deployments.local_ray.cluster import HAPROXY, HAPROXY_PORTS, RAYLET
from earlyexit.errors import InputError
from earlyexit.network.store import read_card
from experiments.peers.stock import ServerOptions, StockModel, Texts, answer, parse_body

if TYPE_CHECKING:
    from ray.serve import Application

PORTS_BESIDE = 2000
"""Offset of the ports inside Serve, so that they differ from the defaults of another Ray on this machine."""
REPLICA_PORTS = {
    "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": 30_000,
    "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": 31_000,
    "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": 40_000,
    "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": 41_000,
}
HAPROXY_FILES = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "admin.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "server-state",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "metrics.sock",
}
STOP_AT_ONCE = {
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.1",
    "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "0.1",
}
OBJECT_STORE_BYTES = 128 * 1024 * 1024
"""Small, because nothing goes through the object store."""


def application(options: ServerOptions) -> Application:
    """Returns one deployment that batches its requests. Serve's switches must be set before."""
    from ray import serve
    from ray.serve.schema import LoggingConfig

    class Classifier:
        """A replica: it parses requests, batches them, and runs the model."""

        def __init__(self) -> None:
            self._model = StockModel.load(options)

        async def __call__(self, request: Request) -> Response:
            """Answers one request on any path."""
            try:
                texts = parse_body(json.loads(await request.body()))
            except (InputError, ValueError) as error:
                return Response(json.dumps({"error": str(error)}), status_code=400, media_type="application/json")
            return Response(json.dumps(await self._answer(texts)), media_type="application/json")

        @serve.batch(max_batch_size=options.batch, batch_wait_timeout_s=options.wait_s)
        async def _answer(self, requests: list[Texts]) -> list[dict[str, Any]]:
            return answer(self._model.predict, requests)

    deployment = serve.deployment(
        name="classifier",
        num_replicas=options.workers,
        max_ongoing_requests=max(options.batch, options.max_queued // options.workers),
        ray_actor_options={"num_cpus": 1},
        logging_config=LoggingConfig(encoding="JSON", enable_access_log=False, log_level="WARNING"),  # as in Offramp
    )
    bound: Application = deployment(Classifier).bind()
    return bound


def serve_switches(folder: Path) -> dict[str, str]:
    """Returns Serve's environment; HAProxy keeps its files in `folder`."""
    ports = {name: str(port + PORTS_BESIDE) for name, port in (HAPROXY_PORTS | REPLICA_PORTS).items()}
    files = {name: str(folder / file) for name, file in HAPROXY_FILES.items()}
    return THROUGHPUT | RAYLET | HAPROXY | STOP_AT_ONCE | ports | files


def main(options: ServerOptions) -> None:
    """Serves until SIGTERM or SIGINT; raises ModelFolderError before anything starts."""
    read_card(options.model)
    with TemporaryDirectory(prefix="haproxy-peer-") as folder:
        os.environ |= serve_switches(Path(folder))
        _serve(options)


def _serve(options: ServerOptions) -> None:
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # after the import, which sets the level
    ray.init(
        address="local",  # do not join another Ray
        num_cpus=options.workers + 1,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
    )
    try:
        serve.start(proxy_location="HeadOnly", http_options=HTTPOptions(host="127.0.0.1", port=options.port))
        serve.run(application(options), name="peer", route_prefix="/")
        _wait_for_the_end()
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call] # ray's, not ours
        ray.shutdown()


def _wait_for_the_end() -> None:
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # only now, because `ray.init` sets a handler that aborts
        signal.signal(number, lambda *_: stop.set())
    stop.wait()


if __name__ == "__main__":
    main(ServerOptions.from_environment())
