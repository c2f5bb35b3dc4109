"""What a replica keeps for itself, and what importing costs.

    python -m experiments.memory MODEL

Private memory (USS) of every process of a running two-stage service after 200 requests; import times in fresh
interpreters, medians of 5. Minutes: under 1.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from statistics import median

import httpx
import psutil

from deployments.serve_control import LocalCluster, serving
from deployments.settings import ServeSettings
from experiments.chaos import two_stages
from experiments.kit import show
from offramp.client.client import Client
from offramp.jobs.calibration import read_calibration
from offramp.load.run import LoadConfig, run_load

IMPORTS = ("offramp", "offramp.client.client", "offramp.cli.app", "optimizer.plan_file", "deployments.settings")
MIB = 2**20


def main() -> None:
    """Measure and print."""
    parser = ArgumentParser(prog="python -m experiments.memory", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    show("importing, seconds", ("module", "median of 5"), ((module, _import_s(module)) for module in IMPORTS))
    plan = two_stages(read_calibration(options.model), replicas=1)
    settings = ServeSettings(model=str(options.model.resolve()), plan=plan)
    with serving(settings, LocalCluster(port=options.port)) as url:
        with Client(url) as client:
            client.wait_until_ready(timeout_s=60)
        texts = ("how much money do i have", "what is the meaning of life and who said so first")
        asyncio.run(run_load(LoadConfig(url=url, inputs=texts, num_requests=200, concurrency=8, slo_s=1.0)))
        stats = httpx.get(f"{url}/stats").json()
        pids = {"ingress": stats["ingress_pid"]}
        pids |= {f"stage {index}": stage[0]["pid"] for index, stage in enumerate(stats["stages"])}
        found = {name: psutil.Process(pid).memory_full_info() for name, pid in pids.items()}
    rows = [(name, memory.uss / MIB, memory.rss / MIB) for name, memory in found.items()]
    show("memory, MiB", ("process", "private", "resident"), rows)


def _import_s(module: str) -> float:
    code = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(5)]
    return median(float(run.stdout) for run in runs)


if __name__ == "__main__":
    main()
