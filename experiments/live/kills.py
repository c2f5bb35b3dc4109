"""What a killed controller, a killed replica of each stage, and a lost node cost, under load.

    python -m experiments.live.kills [--parts controller,replicas,node]

EMULATED V100; kill -9 each time. Controller and replicas: 12 in three stages of at least two replicas, 60 % of their
capacity. Node: three nodes of 4 beside a head, 90 % of what all 12 do, then one node is gone. Printed: answers,
explicit errors, lost requests; until planning resumed; until goodput was back at what the hardware that is left can do.
Writes runs/live/kills.json. Minutes: 8.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from deployments.local_ray.cluster import DASHBOARD_HOST
from deployments.local_ray.start import THROUGHPUT
from deployments.settings import ControlSettings, ServeSettings
from earlyexit.network.split import Split
from experiments.live.emulation import Bench, bench, command, emulated
from experiments.live.load import Driven, Event, Phase, back_at_s, judged, longest_silence_s, play, played, replica_pids
from offramp.client.client import Client
from offramp.demo.service import READY_TIMEOUT_S, RunningService
from optimizer.plan import Plan, Stage

# A cluster of several nodes on one machine, any of which can be lost.

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
) -> Iterator[tuple[RunningService, Callable[[int], None]]]:
    """The service with so many nodes of so many accelerators each beside the head, its plan in force.

    Gives besides what kills all processes of a node at once, by its number.

    Ingress and controller are on the head, which has no accelerators; the nodes have nothing else. Requests come by
    Serve's own proxy, unless this process has started HAProxy before.
    """
    assert settings.control is not None, "nothing else would notice a lost node"
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
        service = RunningService(url=f"http://127.0.0.1:{port}", app=settings.app)
        with Client(service.url) as client:
            client.wait_until_ready(timeout_s=READY_TIMEOUT_S)
        asyncio.run(service.apply(plan))
        yield service, lambda index: cluster.remove_node(members[index], allow_graceful=False)
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call] # ray's, not ours
        ray.shutdown()
        cluster.shutdown()


COUNT, PER_NODE = 12, 4
CUTS, REPLICAS = (0, 3, 7, 12), (6, 3, 3)
SECONDS, KILL_S = 90.0, 30.0
SHARE, NODE_SHARE = 0.6, 0.9
BACK = 0.95
"""Of a goodput counts as all of it."""
PERIOD_S = 15.0
LOOK_S = 0.25
ASK_S = 5.0
WATCHED_S = 60.0
"""How long a dead controller is waited for."""


def run(on: Bench) -> dict[str, Any]:
    """The parts that are asked for."""
    plan = staged(on)
    parts = {
        "controller": lambda: dies(on, "controller", plan, control_of(on, PERIOD_S), kill_controller),
        "replicas": lambda: dies(on, "replicas", plan, on.control(), kill_one_of_each_stage),
        "node": lambda: node_dies(on),
    }
    return {part: parts[part]() for part in on.options.parts.split(",")}


def staged(on: Bench) -> Plan:
    """Three stages, all ramps on."""
    return on.plan(
        tuple(
            Stage(
                device=emulated("V100"),
                replicas=replicas,
                splits=(Split(first=first, end=end, batch=8, ramps=tuple(range(first, min(end, CUTS[-1] - 1)))),),
            )
            for first, end, replicas in zip(CUTS, CUTS[1:], REPLICAS, strict=False)
        )
    )


def control_of(on: Bench, period_s: float) -> ControlSettings:
    """A controller that plans."""
    return on.control(period_s=period_s, watch_s=2.0, start_s=3.0)


def dies(on: Bench, name: str, plan: Plan, control: ControlSettings, kill: Event) -> dict[str, Any]:
    """Something of the staged plan's service dies, and what is left can do as much."""
    rate_per_s = SHARE * on.predicted(plan).rate_per_s
    result = played(on, plan, steady(on, name, rate_per_s), control, event=later(kill))
    return report(on, name, rate_per_s, result.driven, result.meanwhile)


def node_dies(on: Bench) -> dict[str, Any]:
    """A third of the accelerators goes, and does not come back."""
    plan = on.plan(on.best().stages)
    smaller = bench(on.options, {"V100": COUNT - PER_NODE})
    rate_per_s = NODE_SHARE * on.predicted(plan).rate_per_s
    left_per_s = min(rate_per_s, smaller.predicted(smaller.plan(smaller.best().stages)).rate_per_s)
    settings = on.emulation.settings(on.model, plan, control_of(on, 4 * PERIOD_S))
    num_nodes, port = COUNT // PER_NODE, on.options.port
    with served_on_nodes(settings, plan, name="V100", per_node=PER_NODE, num_nodes=num_nodes, port=port) as (
        service,
        lose,
    ):

        async def kill(_: RunningService) -> dict[str, Any]:
            await asyncio.to_thread(lose, 0)
            return {"killed": "node 0"}

        result = asyncio.run(play(on, service, steady(on, "node", rate_per_s), event=later(kill)))
        return report(on, "node", left_per_s, result.driven, result.meanwhile)


def steady(on: Bench, name: str, rate_per_s: float) -> Phase:
    """All recorded inputs in turn, at one rate."""
    return Phase(name=name, seconds=SECONDS, keys=on.records.sample_ids, rate_per_s=rate_per_s)


def later(kill: Event) -> Event:
    """The same, at its second."""

    async def event(service: RunningService) -> Any:
        await asyncio.sleep(KILL_S)
        return await kill(service)

    return event


async def kill_controller(service: RunningService) -> dict[str, Any]:
    """Until it answers again, and until it has decided something again."""
    pids = replica_pids(service.app)["controller"]
    killed_s = time.monotonic()
    os.kill(pids[0], signal.SIGKILL)
    answers_s = plans_s = None
    while time.monotonic() - killed_s < WATCHED_S and plans_s is None:
        await asyncio.sleep(LOOK_S)
        try:
            description = await service.describe(timeout_s=ASK_S)
        except Exception:  # whatever a dead controller's caller gets; the next look is soon
            continue
        answers_s = answers_s or time.monotonic() - killed_s
        if description["forecast"] is not None:  # a controller that has just started has none until it plans
            plans_s = time.monotonic() - killed_s
    return {"killed": pids, "answers_again_s": answers_s, "plans_again_s": plans_s}


async def kill_one_of_each_stage(service: RunningService) -> dict[str, Any]:
    """The first process of every slot that the plan uses."""
    pids = replica_pids(service.app)
    killed = {slot: pids[slot][0] for slot in (await service.current())["slots"]}
    for pid in killed.values():
        os.kill(pid, signal.SIGKILL)
    return {"killed": killed}


def report(on: Bench, name: str, left_per_s: float, driven: Driven, told: dict[str, Any]) -> dict[str, Any]:
    """Print a part and give its figures; `left_per_s`: what is left can do so much of the load."""
    back_s = back_at_s(driven, KILL_S, BACK * left_per_s)
    silence_s = longest_silence_s(driven.records, KILL_S, SECONDS)
    figures = judged(on, driven, {"whole": (0.0, SECONDS), "after": (KILL_S, SECONDS)}, f"{name}: {told}")
    print(f"longest silence after it {silence_s:.2f} s; {BACK:.0%} of {left_per_s:.0f}/s again after {back_s} s")
    return {"told": told, "back_s": back_s, "silence_s": silence_s, **figures}


if __name__ == "__main__":
    command("kills", __doc__, run, {"V100": COUNT}, time_scale=20.0, parts="controller,replicas,node")
