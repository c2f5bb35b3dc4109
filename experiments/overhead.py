"""What Offramp costs around a model: a model that costs nothing, against a bare FastAPI app on Ray Serve.

    python -m experiments.overhead [--json]

One Serve instance, HAProxy and throughput-optimised, serves both; rounds take turns. Minutes: about 2.
The client shares the machine's cores with everything else: ratios are what counts.
"""

from __future__ import annotations

import asyncio
import json
from argparse import ArgumentParser
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from deployments.serve_control import LocalCluster, serving
from deployments.settings import ServeSettings
from experiments.models import costless_model
from offramp.client.client import Client
from offramp.load.run import LoadConfig, run_load
from optimizer.plan import stock_plan

TEXTS = ("turn on the light", "what is the weather like tomorrow", "book a table for two at eight")
SLO_S = 0.1


def main() -> None:
    """Measure and print."""
    parser = ArgumentParser(prog="python -m experiments.overhead", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--backend", choices=("torch", "onnx"), default="torch", help="onnx leaves less of the model")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        model = costless_model(Path(folder))
        plan = stock_plan(1, batch=options.batch)
        settings = ServeSettings(model=str(model), plan=plan, backend=options.backend)
        with serving(settings, LocalCluster(port=options.port)) as url:
            _add_bare_app()
            with Client(url) as client:
                client.wait_until_ready(timeout_s=60)
            rounds = [asyncio.run(_round(url, options.requests)) for _ in range(options.rounds + 1)][1:]
    if options.json:
        print(json.dumps(rounds))
        return
    _print(rounds)


def _add_bare_app() -> None:
    from ray import serve

    from experiments.peers.bare_fastapi import Bare

    application = Bare.bind()  # type: ignore[attr-defined] # Serve types its decorator as giving the class
    serve.run(application, name="bare", route_prefix="/bare")


async def _round(url: str, requests: int) -> dict[str, Any]:
    """Both sides, alone (one client) and loaded (32 clients)."""
    figures: dict[str, Any] = {}
    for concurrency, count in ((1, max(1, requests // 6)), (32, requests)):
        for side, at in (("bare", f"{url}/bare"), ("offramp", url)):
            config = LoadConfig(url=at, inputs=TEXTS, num_requests=count, concurrency=concurrency, slo_s=SLO_S)
            report = await run_load(config)
            assert not report.errors, report.errors
            assert report.latency is not None
            figures[f"{side}_c{concurrency}_rps"] = report.achieved_rps
            figures[f"{side}_c{concurrency}_p50_s"] = report.latency.p50_s
            figures[f"{side}_c{concurrency}_p99_s"] = report.latency.p99_s
    return figures


def _print(rounds: list[dict[str, Any]]) -> None:
    middle = {name: median(each[name] for each in rounds) for name in rounds[0]}
    print(f"medians of {len(rounds)} rounds        bare FastAPI     offramp")
    for concurrency in (1, 32):
        for figure, unit, scale in (("rps", "requests/s", 1), ("p50_s", "p50 ms", 1000), ("p99_s", "p99 ms", 1000)):
            bare = middle[f"bare_c{concurrency}_{figure}"] * scale
            ours = middle[f"offramp_c{concurrency}_{figure}"] * scale
            print(f"{concurrency:>2} clients, {unit:<12} {bare:14.2f} {ours:11.2f}   {ours / bare:5.2f} x")
    ratio = median(each["offramp_c32_rps"] / each["bare_c32_rps"] for each in rounds)
    added_s = median(each["offramp_c1_p50_s"] - each["bare_c1_p50_s"] for each in rounds)
    print(f"requests/s at 32 clients: {ratio:.2f} x bare; added p50 at 1 client: {added_s * 1000:.2f} ms")


if __name__ == "__main__":
    main()
