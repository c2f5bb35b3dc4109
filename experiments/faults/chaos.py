"""Replicas and ingresses are killed under load: who loses what.

    python -m experiments.faults.chaos MODEL --data DATA [--part test]

1. Two replicas per stage; one of each stage is killed (-9): every request must get its answer.
2. Two ingresses, one is killed: what was in flight in it fails visibly, once without and once with the client's retry.
3. One replica per stage; it is killed: answer or explicit error, and how long until answers come again.

Minutes: about 4 on two cores. MODEL is a calibrated folder, such as `make demo` leaves in runs/demo/model.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from argparse import ArgumentParser
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from deployments.local_ray.cluster import LocalCluster, serving
from deployments.settings import ServeSettings
from earlyexit.data.rows import LabelledRows, read_labelled
from earlyexit.network.split import Split
from experiments.live.load import longest_silence_s, replica_pids
from offramp.client.client import Client
from offramp.commands.calibrate import read_calibration
from offramp.load.report import LoadReport
from offramp.load.run import LoadConfig, run_load
from optimizer.calibration_file import CalibrationCard
from optimizer.plan import Plan, Stage

BATCH = 16
SHARE_OF_CAPACITY = 0.7
LOOKED_S = 10.0
"""How long silence is looked for after something was killed."""
APP = "offramp"
INGRESS, FIRST, SECOND = "ingress", "split-cpu-0", "split-cpu-1"


def main() -> None:
    """Run the three scenarios and print what became of every request."""
    parser = ArgumentParser(prog="python -m experiments.faults.chaos", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--part")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    data = read_labelled(options.data, part=options.part)
    card = read_calibration(options.model)
    many, one = two_stages(card, replicas=2), two_stages(card, replicas=1)

    print("1. one replica of each of two stages is killed, two replicas per stage")
    with _service(options, many, ingress_replicas=1) as url:
        asyncio.run(_under_load(url, data, options.requests, killed(FIRST, SECOND)))
    print("2. one ingress of two is killed")
    with _service(options, many, ingress_replicas=2) as url:
        asyncio.run(_under_load(url, data, options.requests // 4, killed(INGRESS)))
        time.sleep(5)  # until the killed one is replaced
        print("   the same with the client's retry (same request id)")
        asyncio.run(_under_load(url, data, options.requests // 4, killed(INGRESS), retries=5))
    print("3. the only replica of a stage is killed")
    with _service(options, one, ingress_replicas=1) as url:
        asyncio.run(_under_load(url, data, options.requests // 4, killed(FIRST)))


def two_stages(card: CalibrationCard, *, replicas: int) -> Plan:
    """Block 0, where most inputs leave, and the rest."""
    ramps = tuple(sorted(card.thresholds))
    num_blocks = int(card.tested["num_blocks"])
    first = Split(first=0, end=1, batch=BATCH, ramps=tuple(r for r in ramps if r < 1))
    rest = Split(first=1, end=num_blocks, batch=BATCH, ramps=tuple(r for r in ramps if r >= 1))
    stages = tuple(Stage(device="cpu", replicas=replicas, splits=(split,)) for split in (first, rest))
    return Plan(stages=stages, policy=card.policy_spec())


def killed(*deployments: str) -> Callable[[float], Awaitable[list[float]]]:
    """Kills (-9) a process of each, spread evenly over a load's duration; tells when, on the monotonic clock."""

    async def kill(duration_s: float) -> list[float]:
        killed_s = []
        for deployment in deployments:
            await asyncio.sleep(duration_s / (len(deployments) + 1))
            os.kill(replica_pids(APP)[deployment][0], signal.SIGKILL)
            killed_s.append(time.monotonic())
        return killed_s

    return kill


@contextmanager
def _service(options: Any, plan: Plan, *, ingress_replicas: int) -> Iterator[str]:
    settings = ServeSettings(model=str(options.model.resolve()), app=APP, plan=plan, ingress_replicas=ingress_replicas)
    with serving(settings, LocalCluster(port=options.port)) as url:
        with Client(url) as client:
            client.wait_until_ready(timeout_s=60)
        yield url


async def _under_load(
    url: str,
    data: LabelledRows,
    requests: int,
    kill: Callable[[float], Awaitable[list[float]]],
    *,
    retries: int = 0,
) -> None:
    probe = LoadConfig(url=url, inputs=data.texts, labels=data.labels, num_requests=600, concurrency=64, slo_s=0.25)
    await run_load(replace(probe, num_requests=200))
    capacity_rps = (await run_load(probe)).achieved_rps
    rate_rps = SHARE_OF_CAPACITY * capacity_rps
    print(f"   capacity {capacity_rps:.0f}/s, {requests} requests at {rate_rps:.0f}/s")
    loaded = replace(probe, num_requests=requests, concurrency=None, rate_rps=rate_rps, retries=retries)
    started_s = time.monotonic()
    report, killed_s = await asyncio.gather(run_load(loaded), kill(requests / rate_rps))
    _print(report, [when_s - started_s for when_s in killed_s])


def _print(report: LoadReport, killed_s: list[float]) -> None:
    assert len(report.records) == report.num_requests
    latency = report.latency
    assert latency is not None
    print(
        f"   {report.num_answers} answers to {report.num_requests} requests, errors {report.errors or 'none'}, "
        f"{report.num_retries} sent again by the client; accuracy {report.accuracy:.2%}; "
        f"p50 {latency.p50_s * 1000:.0f} ms, p99 {latency.p99_s * 1000:.0f} ms, max {latency.max_s * 1000:.0f} ms"
    )
    for when_s in killed_s:
        silence_s = longest_silence_s(report.records, when_s, min(when_s + LOOKED_S, report.duration_s))
        print(f"   killed at {when_s:.1f} s: longest silence after it {silence_s:.2f} s")


if __name__ == "__main__":
    main()
