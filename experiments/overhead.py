"""Processor time per request by part of Offramp's service, around a model that costs nothing.

    python -m experiments.overhead [--rounds 5] [--fronts haproxy proxy]

At three rates and saturated; medians of rounds. The client shares the machine's cores with the service. Minutes: 2 a
round and front.
"""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from deployments.local_ray.cluster import LocalCluster, serving
from deployments.settings import ServeSettings
from experiments.models import costless_model
from experiments.peers.client import ClientOptions, run_client, write_inputs
from experiments.peers.processes import LOGS, Server, running
from experiments.peers.turns import per_input
from experiments.turns import Figures, in_turns, tell
from offramp.client.client import Client
from optimizer.plan import stock_plan

LOADS: Mapping[str, Mapping[str, float]] = {
    **{f"{rate:g}/s": {"rate_per_s": rate} for rate in (100.0, 450.0, 1000.0)},
    "saturated": {"concurrency": 64},
}
SLO_S = 0.25
WARM_S = 2.0
TEXTS = (
    "turn on the light",
    "what is the weather like tomorrow",
    "book a table for two at eight",
    "how much of my salary goes into taxes",
)
SERVE = "--serve"
"""How this module is called as a service, which ends with its input."""


def main() -> None:
    """Measure and print."""
    parser = ArgumentParser(prog="python -m experiments.overhead", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a load")
    parser.add_argument("--backend", choices=("torch", "onnx"), default="torch", help="onnx leaves less of the model")
    parser.add_argument("--fronts", nargs="+", choices=("haproxy", "proxy"), default=["haproxy"])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument(SERVE, choices=("haproxy", "proxy"), help="only serve, until the input ends")
    options = parser.parse_args()
    if options.serve:
        serve(options)
        return
    with TemporaryDirectory() as folder:
        inputs = write_inputs(Path(folder) / "inputs.jsonl", TEXTS)
        sides = {front: partial(cost_by_part, front, inputs, options) for front in options.fronts}
        found = in_turns(sides, options.rounds, warm_ups=0)
    if options.json:
        print(json.dumps(found))
    else:
        tell(f"{options.rounds} rounds", found)


def cost_by_part(front: str, inputs: Path, options: Namespace) -> Figures:
    """Milliseconds of processor time per answer, by part and in all, at every rate and saturated."""
    figures: Figures = {}
    with served(front, options) as server:
        for name, load in LOADS.items():
            told = {"url": server.url, "inputs": inputs, "slo_s": SLO_S, **load}
            run_client(ClientOptions.model_validate(told | {"duration_s": WARM_S}))
            before = server.cpu_s_by_part()
            result = run_client(ClientOptions.model_validate(told | {"duration_s": options.seconds}))
            assert not result.measured.lost_share, result
            parts_s = per_input(before, server.cpu_s_by_part(), result.num_sent)
            parts_s["beside the stages"] = sum(each_s for part, each_s in parts_s.items() if part != "stages")
            figures |= {f"{name}, ms, {part}": 1000 * each_s for part, each_s in parts_s.items()}
            figures[f"{name}, p50 ms"] = 1000 * (result.p50_s or 0.0)
            figures[f"{name}, answers/s"] = result.answered_per_s
    return figures


@contextmanager
def served(front: str, options: Namespace) -> Iterator[Server]:
    """The service in a process of its own, once it is ready."""
    url = f"http://127.0.0.1:{options.port}"
    command = [sys.executable, "-m", "experiments.overhead", SERVE, front]
    command += ["--port", str(options.port), "--backend", options.backend]
    with running(command, url, LOGS / f"parts-{front}.log", {}, stdin=subprocess.PIPE) as server:
        try:
            with Client(url, timeout_s=10.0) as client:
                client.wait_until_ready(timeout_s=120.0)
            yield server
        finally:
            server.process.communicate()  # the end of its input ends it


def serve(options: Namespace) -> None:
    """Serve a model that costs nothing until the input ends."""
    with TemporaryDirectory() as folder:
        model = str(costless_model(Path(folder)))
        settings = ServeSettings(model=model, plan=stock_plan(1, batch=32), backend=options.backend)
        with serving(settings, LocalCluster(port=options.port, front=options.serve)):
            sys.stdin.read()


if __name__ == "__main__":
    main()
