"""What the loss of a Ray cluster's head costs where GCS keeps its state in Redis.

    python -m experiments.live.head

EMULATED V100, 4, on a node beside a head that runs nothing of the service; 60 % of their capacity. All processes of the
head are killed with -9, among them Serve's controller; 10 s later another head is started, as Kubernetes would. Load
goes to the HAProxy of the node that is left. Printed: answers, explicit errors, lost requests; seconds from the new
head until the controller plans, with what it remembers. Needs Debian's redis-server.
Writes runs/live/head.json. Minutes: 3.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from cluster.render import serve_config
from deployments.local_ray.cluster import DASHBOARD_HOST
from deployments.local_ray.ports import free_port
from deployments.local_ray.processes import MARK, NotedRun, noted_run
from deployments.local_ray.start import HAPROXY, HAPROXY_PORTS, RAYLET, THROUGHPUT
from deployments.settings import ServeSettings
from earlyexit.clock import MonotonicClock
from experiments.live.emulation import Bench, emulated
from experiments.live.load import longest_silence_s
from experiments.live.scenario import command, judged, play
from experiments.live.service import Service, control_settings, emulated_settings
from offramp.client.client import Client
from offramp.spec.deploying import Dashboard, Waiting, dashboard_client, wait_until_running

COUNT = 4
SECONDS, KILL_S, AWAY_S = 90.0, 20.0, 10.0
SHARE = 0.6
PERIOD_S = 5.0
PLANNED_WITHIN_S = 60.0
"""How long a controller that does not plan is waited for."""
LOOK_S = 0.25
READY_S = 120.0
STORE_BYTES = 150 * 1024 * 1024
RECONNECT_S = 600
"""How long a node without a head waits for one, as KubeRay sets it."""
WORKER_PORTS = 1000
"""Of each node's: they share one address here."""
NAME = "head"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A head that keeps its state elsewhere, and a node; each is started and killed on its own."""

    folder: Path
    environment: dict[str, str]
    port: int
    dashboard_port: int
    served_port: int
    """Of the node's HAProxy; the head's has another."""

    @property
    def dashboard_url(self) -> str:
        return f"http://{DASHBOARD_HOST}:{self.dashboard_port}"

    def start_head(self, disk: str) -> NotedRun:
        """It has no cores, so that Serve puts nothing on it but its own controller and its proxy.

        Every head has a `disk` of its own, as a new machine has: by its files Ray would take it for the one before.
        """
        return self._start(
            0,
            ["--head", f"--port={self.port}", f"--temp-dir={self.folder / disk}", "--num-cpus=0"],
            ["--include-dashboard=true", f"--dashboard-host={DASHBOARD_HOST}"],
            [f"--dashboard-port={self.dashboard_port}", f"--ray-client-server-port={free_port()}"],
        )

    def start_node(self, resources: dict[str, int]) -> NotedRun:
        """A node with some accelerators."""
        address = f"--address={DASHBOARD_HOST}:{self.port}"
        return self._start(1, [address, "--num-cpus=4", f"--resources={json.dumps(resources)}"])

    def _start(self, index: int, *arguments: Sequence[str]) -> NotedRun:
        run, first = noted_run(), 11_000 + index * WORKER_PORTS
        own = [
            f"--node-ip-address={DASHBOARD_HOST}",
            f"--object-store-memory={STORE_BYTES}",
            f"--min-worker-port={first}",
            f"--max-worker-port={first + WORKER_PORTS - 1}",
            *(f"--{name}-port={free_port()}" for name in ("dashboard-agent-listen", "metrics-export")),
            "--disable-usage-stats",
        ]
        ray = Path(sys.executable).with_name("ray")
        asked = [str(ray), "start", *(word for words in arguments for word in words), *own]
        with run.starting(), (self.folder / "ray.log").open("ab") as log:
            environment = self.environment | self._haproxy(index) | {MARK: os.environ[MARK]}
            subprocess.run(asked, env=environment, stdout=log, stderr=log, check=True)
        return run

    def _haproxy(self, index: int) -> dict[str, str]:
        """Each node's has files and ports of its own."""
        folder = self.folder / str(index)
        folder.mkdir(exist_ok=True)
        return {
            "RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(self.served_port),
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "state"),
            **{name: str(free_port()) for name in HAPROXY_PORTS},
        }


def run(on: Bench) -> dict[str, Any]:
    """The whole scenario."""
    plan = on.plan(on.best().stages)
    rate_per_s = SHARE * on.predicted(plan).rate_per_s
    with ExitStack() as stack:
        cluster = stack.enter_context(_cluster(on.options.port))
        heads = [cluster.start_head("a")]
        stack.callback(lambda: heads[-1].end())
        stack.callback(cluster.start_node({emulated("V100"): COUNT}).end)
        control = control_settings(on.problem, on.spec, state=NAME, period_s=PERIOD_S, watch_s=1.0, start_s=3.0)
        control = control.model_copy(update={"dashboard_url": cluster.dashboard_url})
        settings = emulated_settings(on.emulation, on.model, plan, control=control, app=NAME)
        _deploy(cluster, settings)
        service = Service(url=f"http://{DASHBOARD_HOST}:{cluster.served_port}", app=NAME)
        with Client(service.url) as client:
            client.wait_until_ready(timeout_s=READY_S)

        async def lose(_: Service) -> dict[str, Any]:
            await asyncio.sleep(KILL_S)
            before, killed = await _remembered(service.url), len(heads[-1].processes())
            await asyncio.to_thread(heads[-1].end, grace_s=0.0)
            await asyncio.sleep(AWAY_S)
            began_s, wall_s = time.monotonic(), time.time()
            heads.append(await asyncio.to_thread(cluster.start_head, "b"))
            started_s = time.monotonic() - began_s
            planned_s = await _planned(service.url, since_s=wall_s + started_s, began_s=time.monotonic())
            return {
                "killed": f"{killed} processes",
                "new_head_started_s": started_s,
                "planned_s": planned_s,
                "remembered": before == (await _remembered(service.url))[-len(before) :],
            }

        result = asyncio.run(play(on, service, [on.steady(NAME, SECONDS, rate_per_s)], event=lose))
        silence_s = longest_silence_s(result.driven.records, KILL_S, SECONDS)
        windows = {"whole": [(0.0, SECONDS)], "no head": [(KILL_S, KILL_S + AWAY_S)], "after": [(KILL_S, SECONDS)]}
        figures = judged(on, result.driven, windows, title=f"head: {result.meanwhile}")
        print(
            f"longest silence after it {silence_s:.2f} s; planned {result.meanwhile['planned_s']} s after the new head"
        )
        return {"told": result.meanwhile, "silence_s": silence_s, **figures}


@contextmanager
def _cluster(served_port: int) -> Iterator[Cluster]:
    """A Redis, and what Ray is told of it; SystemExit says where it is not installed."""
    if shutil.which("redis-server") is None:
        raise SystemExit("redis-server is missing: apt-get install redis-server")
    redis_port = free_port()
    environment = os.environ | THROUGHPUT | RAYLET | HAPROXY
    environment |= {
        "RAY_REDIS_ADDRESS": f"{DASHBOARD_HOST}:{redis_port}",
        "RAY_external_storage_namespace": uuid.uuid4().hex,
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(RECONNECT_S),
        "RAY_AUTH_MODE": "disabled",
    }
    with tempfile.TemporaryDirectory(prefix="offramp-head-") as name:
        options = ["--port", str(redis_port), "--bind", DASHBOARD_HOST, "--save", "", "--dir", name]
        with (Path(name) / "redis.log").open("wb") as log:
            redis = subprocess.Popen(["redis-server", *options], stdout=log)
        try:
            yield Cluster(
                folder=Path(name),
                environment=environment,
                port=free_port(),
                dashboard_port=free_port(),
                served_port=served_port,
            )
        finally:
            redis.send_signal(signal.SIGTERM)
            redis.wait()


def _deploy(cluster: Cluster, settings: ServeSettings) -> None:
    """Put the service there as `offramp deploy` does."""
    config = serve_config(
        json.loads(settings.model_dump_json()),
        name=NAME,
        environment=THROUGHPUT,
        host=DASHBOARD_HOST,
        port=free_port(),
        proxy_location="EveryNode",
    )
    with dashboard_client(cluster.dashboard_url) as client:
        dashboard = Dashboard(client)
        dashboard.put(config)
        waiting = Waiting(clock=MonotonicClock(), sleep=time.sleep, tell=print, limit_s=READY_S)
        wait_until_running(dashboard, NAME, waiting)


async def _planned(url: str, *, since_s: float, began_s: float) -> float | None:
    """Seconds until the controller has planned after a moment; None where it has not in time."""
    while (waited_s := time.monotonic() - began_s) < PLANNED_WITHIN_S:
        said = await _ask(url, "/plan")
        if said is not None and said["forecast"] is not None and said["forecast"]["at_s"] > since_s:
            return waited_s
        await asyncio.sleep(LOOK_S)
    return None


async def _remembered(url: str) -> list[float]:
    """When the controller decided on its plans, newest first."""
    return [row["at_s"] for row in await _ask(url, "/plan/history") or ()]


async def _ask(url: str, path: str) -> Any:
    """None where there is no answer in time."""
    async with httpx.AsyncClient(timeout=5.0, trust_env=False) as client:
        try:
            response = await client.get(url + path)
        except httpx.HTTPError:
            return None
        return response.json() if response.is_success else None


if __name__ == "__main__":
    command(NAME, __doc__, run, {"V100": COUNT})
