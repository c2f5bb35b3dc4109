"""What Offramp costs around a model, on a model that costs nothing.

    python -m experiments.overhead bare          # beside a bare FastAPI app on Ray Serve (2 minutes)
    python -m experiments.overhead grpc          # the Open Inference Protocol over HTTP and over gRPC (1 minute)
    python -m experiments.overhead parts         # processor time by part, --beside a commit (2 min/round)

Sides take turns; medians of rounds. The clients share the machine's cores with the service: ratios are what counts.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil

from deployments.local_ray.cluster import LocalCluster, serving
from deployments.settings import ServeSettings
from earlyexit.clock import MonotonicClock
from experiments.checkout import Checkout, checked_out
from experiments.models import costless_model
from experiments.peers.client import ROOT, ClientOptions, run_client, write_inputs
from experiments.peers.processes import LOGS, Server, running
from experiments.peers.turns import per_input
from experiments.turns import Figures, Side, in_turns, tell
from offramp.client.client import Client
from offramp.client.inputs import TensorBody
from offramp.client.protocol import Outcome, Reply
from offramp.load.connections import connected
from offramp.load.generator import Body, Generator, LoadConfig, Post
from offramp.load.report import RequestRecord, summarise
from optimizer.plan import stock_plan

# Processor time per request by part of a service, at some rates and saturated; this checkout alone, or beside another.

RATES_PER_S = (100.0, 450.0, 1000.0)
WORKERS = 64
"""Of the closed loop that saturates."""
PARTS_SLO_S = 0.25
WARM_S = 2.0
PARTS_TEXTS = (
    "turn on the light",
    "what is the weather like tomorrow",
    "book a table for two at eight",
    "how much of my salary goes into taxes",
)
SERVE = """
import sys
from argparse import Namespace
from experiments.overhead import costless
with costless(Namespace(port=int(sys.argv[1]), backend=sys.argv[2], front=sys.argv[3])):
    sys.stdin.read()
"""


@contextmanager
def parts(options: Namespace) -> Iterator[Mapping[str, Side]]:
    """The older checkout, behind HAProxy, then ours behind each front."""
    ours = Checkout(name="this checkout", root=ROOT)
    sides = {f"this checkout, {front}": (ours, front) for front in options.fronts}
    if options.beside is not None:
        sides = {options.beside: (Checkout(name=options.beside, root=checked_out(options.beside)), "haproxy"), **sides}
    with TemporaryDirectory() as folder:
        inputs = write_inputs(Path(folder) / "inputs.jsonl", PARTS_TEXTS)
        yield {name: partial(cost_by_part, *side, inputs, options) for name, side in sides.items()}


def cost_by_part(checkout: Checkout, front: str, inputs: Path, options: Namespace) -> Figures:
    """Milliseconds of processor time per answer, by part and in all, at every rate and saturated."""
    figures: Figures = {}
    loads: dict[str, dict[str, float]] = {f"{rate:g}/s": {"rate_per_s": rate} for rate in RATES_PER_S}
    loads["saturated"] = {"concurrency": WORKERS}
    with served(checkout, front, options) as server:
        for name, load in loads.items():
            told = {"url": server.url, "inputs": inputs, "slo_s": PARTS_SLO_S} | load
            run_client(ClientOptions.model_validate(told | {"duration_s": WARM_S}))
            before = server.cpu_s_by_part()
            result = run_client(ClientOptions.model_validate(told | {"duration_s": options.seconds}))
            assert not result.lost_share, result
            parts_s = per_input(before, server.cpu_s_by_part(), result.num_sent)
            parts_s["beside the stages"] = sum(each_s for part, each_s in parts_s.items() if part != "stages")
            figures |= {f"{name}, ms, {part}": 1000 * each_s for part, each_s in parts_s.items()}
            figures[f"{name}, p50 ms"] = 1000 * (result.p50_s or 0.0)
            figures[f"{name}, answers/s"] = result.answered_per_s
    return figures


@contextmanager
def served(checkout: Checkout, front: str, options: Namespace) -> Iterator[Server]:
    """A checkout's service, once it is ready."""
    url = f"http://127.0.0.1:{options.port}"
    command = [sys.executable, "-c", SERVE, str(options.port), options.backend, front]
    log = LOGS / f"parts-{front}-{checkout.name.replace(' ', '-')}.log"
    with running(command, url, log, checkout.environment(), cwd=checkout.root, stdin=subprocess.PIPE) as server:
        try:
            with Client(url, timeout_s=10.0) as client:
                client.wait_until_ready(timeout_s=120.0)
            yield server
        finally:
            server.process.communicate()  # the end of its input ends it


TEXTS = ("turn on the light", "what is the weather like tomorrow", "book a table for two at eight")
SLO_S = 0.1
GRPC_PORT = 9000
DONE = Reply(status=200, payload={"label": "", "score": 1.0, "exit": 0})
Over = Callable[[str], AbstractAsyncContextManager[Post]]
"""How a service at an address is asked."""


def main() -> None:
    """Measure and print."""
    parser = ArgumentParser(
        prog="python -m experiments.overhead", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("bench", choices=tuple(BENCHES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=3000, help="of a closed loop")
    parser.add_argument("--seconds", type=float, default=20.0, help="of an open loop")
    parser.add_argument("--backend", choices=("torch", "onnx"), default="torch", help="onnx leaves less of the model")
    parser.add_argument("--front", choices=("haproxy", "proxy"), default="haproxy")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--fronts", nargs="+", default=["haproxy"], help="that ours is measured behind (parts)")
    parser.add_argument("--beside", help="a commit whose service takes turns with ours (parts)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with BENCHES[options.bench](options) as sides:
        found = in_turns(sides, options.rounds, warm_ups=0 if options.bench == "parts" else 1)
    if options.json:
        print(json.dumps(found))
    else:
        tell(f"{options.bench}, {options.rounds} rounds", found)


@contextmanager
def costless(options: Namespace, grpc_port: int | None = None, **settings_of: Any) -> Iterator[str]:
    """The address of a ready service whose model costs nothing."""
    with TemporaryDirectory() as folder:
        model = str(costless_model(Path(folder)))
        settings = ServeSettings(model=model, plan=stock_plan(1, batch=32), backend=options.backend, **settings_of)
        cluster = LocalCluster(port=options.port, grpc_port=grpc_port, front=options.front)
        with serving(settings, cluster) as url:
            with Client(url) as client:
                client.wait_until_ready(timeout_s=60)
            yield url


@contextmanager
def bare(options: Namespace) -> Iterator[Mapping[str, Side]]:
    """One Serve instance, HAProxy and throughput-optimised, serves both."""
    with costless(options) as url:
        from ray import serve

        from experiments.peers.bare_fastapi import Bare

        application = Bare.bind()  # type: ignore[attr-defined] # Serve types its decorator as giving the class
        serve.run(application, name="bare", route_prefix="/bare")
        yield {
            "bare FastAPI": partial(closed_loops, f"{url}/bare", options.requests),
            "offramp": partial(closed_loops, url, options.requests),
        }


@contextmanager
def grpc(options: Namespace) -> Iterator[Mapping[str, Side]]:
    """One service answers both; the ingress's processor time is told."""
    with costless(options, GRPC_PORT) as url:
        with Client(url) as client:
            model = str(client.metadata()["name"])
        yield {
            "HTTP": partial(closed_loops, url, options.requests, partial(over_http, model=model), ingress_of(url)),
            "gRPC": partial(closed_loops, url, options.requests, partial(over_grpc, model=model), ingress_of(url)),
        }


BENCHES: Mapping[str, Callable[[Namespace], AbstractContextManager[Mapping[str, Side]]]] = {
    "bare": bare,
    "grpc": grpc,
    "parts": parts,
}


def closed_loops(url: str, requests: int, over: Over = connected, ingress: psutil.Process | None = None) -> Figures:
    """Alone (one client) and loaded (32 clients)."""
    figures: Figures = {}
    for clients, count in ((1, max(2, requests // 6)), (32, requests)):
        config = LoadConfig(url=url, inputs=TEXTS, num_requests=count, concurrency=clients, slo_s=SLO_S)
        busy_s = 0.0 if ingress is None else cpu_s(ingress)
        records = asyncio.run(_closed_loop(config, over))
        report = summarise(records, started_at="", seed=0, slo_s=SLO_S, offered_rps=None, labels=None)
        assert not report.errors, report.errors
        assert report.latency is not None
        name = f"{clients} client{'s' if clients > 1 else ''}"
        figures[f"{name}, requests/s"] = report.achieved_rps
        figures[f"{name}, p50 ms"] = 1000 * report.latency.p50_s
        figures[f"{name}, p99 ms"] = 1000 * report.latency.p99_s
        if ingress is not None:
            figures[f"{name}, ingress us"] = 1e6 * (cpu_s(ingress) - busy_s) / count
    return figures


async def _closed_loop(config: LoadConfig, over: Over) -> list[RequestRecord]:
    records: list[RequestRecord] = []
    async with over(config.url) as post:
        generator = Generator(config=config, post=post, rng=random.Random(0), clock=MonotonicClock())
        await generator.closed_loop(iter(range(config.num_requests)), records.append)
    return records


class JsonTensors(TensorBody):
    """A body of the Open Inference Protocol in JSON alone."""

    def content(self, timeout_s: float | None) -> tuple[bytes, dict[str, str]]:  # the server's
        return json.dumps({"inputs": self.inputs}).encode(), {"Content-Type": "application/json"}


@asynccontextmanager
async def over_http(url: str, *, model: str) -> AsyncIterator[Post]:
    """The Open Inference Protocol in JSON; what is answered is not read."""
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": [TEXTS[1]]}
    asked = JsonTensors(model=model, inputs=(tensor,), tail=b"")
    async with connected(url) as post:

        async def ask(request_id: str, body: Body, timeout_s: float) -> Outcome:  # noqa: ARG001 # its contract
            outcome = await post(request_id, asked, timeout_s)
            return DONE if isinstance(outcome, Reply) and outcome.status == 200 else outcome

        yield ask


@asynccontextmanager
async def over_grpc(_: str, *, model: str) -> AsyncIterator[Post]:
    """The same as protocol buffers; what is answered is not read."""
    import grpc as library

    from deployments.api.grpc.messages import message_class
    from deployments.api.grpc.server import SERVICE

    message = message_class("ModelInferRequest")(model_name=model)
    message.inputs.add(name="text", datatype="BYTES", shape=[1]).contents.bytes_contents.append(TEXTS[1].encode())
    request = message.SerializeToString()
    async with library.aio.insecure_channel(f"127.0.0.1:{GRPC_PORT}") as channel:
        call = channel.unary_unary(f"/{SERVICE}/ModelInfer")

        async def ask(request_id: str, body: Body, timeout_s: float) -> Outcome:  # noqa: ARG001 # its contract
            await call(request, timeout=timeout_s)
            return DONE

        yield ask


def ingress_of(url: str) -> psutil.Process:
    """The process that answers at an address."""
    return psutil.Process(httpx.get(f"{url}/stats").raise_for_status().json()["ingress_pid"])


def cpu_s(process: psutil.Process) -> float:
    """Processor seconds of a process since it began."""
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main()
