"""What a request costs over gRPC beside HTTP: the Open Inference Protocol both ways, on a model that costs nothing.

    python -m experiments.grpc_overhead [--json]

One service behind HAProxy; rounds take turns. Minutes: about 1. The clients share the machine's cores with everything
else: ratios are what counts.
"""

from __future__ import annotations

import asyncio
import json
import time
from argparse import ArgumentParser
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import grpc
import httpx
import psutil

from deployments.ingress.rpc.messages import message_class
from deployments.ingress.rpc.server import SERVICE
from deployments.serve_control import LocalCluster, serving
from deployments.settings import ServeSettings
from experiments.models import costless_model
from offramp.client.client import Client
from optimizer.plan import stock_plan

TEXT = "what is the weather like tomorrow"
Ask = Callable[[], Awaitable[Any]]


def main() -> None:
    """Measure and print."""
    parser = ArgumentParser(prog="python -m experiments.grpc_overhead", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--grpc-port", type=int, default=9000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        plan = stock_plan(1, batch=32)
        settings = ServeSettings(model=str(costless_model(Path(folder))), plan=plan)
        with serving(settings, LocalCluster(port=options.port, grpc_port=options.grpc_port)) as url:
            with Client(url) as client:
                client.wait_until_ready(timeout_s=60)
                model = client.metadata()["name"]
            ingress = psutil.Process(httpx.get(f"{url}/stats").raise_for_status().json()["ingress_pid"])
            rounds = asyncio.run(_rounds(url, f"127.0.0.1:{options.grpc_port}", model, ingress, options))
    if options.json:
        print(json.dumps(rounds))
        return
    _print(rounds)


async def _rounds(
    url: str, grpc_address: str, model: str, ingress: psutil.Process, options: Any
) -> list[dict[str, float]]:
    """The first is thrown away: everything in it is cold."""
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        grpc.aio.insecure_channel(grpc_address) as channel,
    ):
        sides = {"http": _over_http(session, url, model), "grpc": _over_grpc(channel, model)}
        return [await _round(sides, ingress, options.requests) for _ in range(options.rounds + 1)][1:]


def _over_http(session: aiohttp.ClientSession, url: str, model: str) -> Ask:
    body = json.dumps({"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": [TEXT]}]})

    async def ask() -> None:
        async with session.post(f"{url}/v2/models/{model}/infer", data=body) as response:
            response.raise_for_status()
            await response.read()

    return ask


def _over_grpc(channel: Any, model: str) -> Ask:
    message = message_class("ModelInferRequest")(model_name=model)
    message.inputs.add(name="text", datatype="BYTES", shape=[1]).contents.bytes_contents.append(TEXT.encode())
    request, call = message.SerializeToString(), channel.unary_unary(f"/{SERVICE}/ModelInfer")

    async def ask() -> None:
        await call(request)

    return ask


async def _round(sides: dict[str, Ask], ingress: psutil.Process, requests: int) -> dict[str, float]:
    """Both sides, alone (one client) and loaded (32 clients)."""
    figures: dict[str, float] = {}
    for concurrency, count in ((1, max(2, requests // 5)), (32, requests)):
        for side, ask in sides.items():
            busy_s, began_s = _busy_s(ingress), time.perf_counter()
            latencies_s = await _closed_loop(ask, count, concurrency)
            figures[f"{side}_c{concurrency}_rps"] = count / (time.perf_counter() - began_s)
            figures[f"{side}_c{concurrency}_p50_s"] = median(latencies_s)
            figures[f"{side}_c{concurrency}_p99_s"] = quantiles(latencies_s, n=100)[-1]
            figures[f"{side}_c{concurrency}_ingress_s"] = (_busy_s(ingress) - busy_s) / count
    return figures


async def _closed_loop(ask: Ask, count: int, concurrency: int) -> list[float]:
    latencies_s: list[float] = []
    left = iter(range(count))

    async def client() -> None:
        for _ in left:
            began_s = time.perf_counter()
            await ask()
            latencies_s.append(time.perf_counter() - began_s)

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return latencies_s


def _busy_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _print(rounds: list[dict[str, float]]) -> None:
    middle = {name: median(each[name] for each in rounds) for name in rounds[0]}
    print(f"medians of {len(rounds)} rounds                 HTTP        gRPC")
    units = (
        ("rps", "requests/s", 1),
        ("p50_s", "p50 ms", 1e3),
        ("p99_s", "p99 ms", 1e3),
        ("ingress_s", "ingress us", 1e6),
    )
    for concurrency in (1, 32):
        for figure, unit, scale in units:
            http, over = (middle[f"{side}_c{concurrency}_{figure}"] * scale for side in ("http", "grpc"))
            print(f"{concurrency:>2} clients, {unit:<12} {http:14.2f} {over:11.2f}   {over / http:5.2f} x")


if __name__ == "__main__":
    main()
