"""Replicas and ingresses are killed under load: who loses what.

    python -m experiments.chaos MODEL --data DATA [--part test]

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

import httpx

from deployments.serve_control import LocalCluster, serving
from deployments.settings import ServeSettings
from earlyexit.dataset import LabelledRows, read_labelled
from earlyexit.split import Split
from offramp.client.client import Client
from offramp.jobs.calibration import read_calibration
from offramp.load.report import LoadReport
from offramp.load.run import LoadConfig, run_load
from optimizer.calibration_file import CalibrationCard
from optimizer.plan import Plan, Stage

BATCH = 16
SHARE_OF_CAPACITY = 0.7
Chaos = Callable[[str, float], Awaitable[list[float]]]
"""(url, expected duration of the load) -> when something was killed, on the monotonic clock."""


def main() -> None:
    """Run the three scenarios and print what became of every request."""
    parser = ArgumentParser(prog="python -m experiments.chaos", description=__doc__)
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
        _print(*_under_load(url, data, options.requests, kill_one_of_each_stage, retries=0))
    print("2. one ingress of two is killed")
    with _service(options, many, ingress_replicas=2) as url:
        _print(*_under_load(url, data, options.requests // 4, kill_an_ingress, retries=0))
        time.sleep(5)  # until the killed one is replaced
        print("   the same with the client's retry (same request id)")
        _print(*_under_load(url, data, options.requests // 4, kill_an_ingress, retries=5))
    print("3. the only replica of a stage is killed")
    with _service(options, one, ingress_replicas=1) as url:
        _print(*_under_load(url, data, options.requests // 4, kill_first_stage, retries=0))


def two_stages(card: CalibrationCard, *, replicas: int) -> Plan:
    """Block 0, where most inputs leave, and the rest."""
    ramps = tuple(sorted(card.thresholds))
    num_blocks = int(card.tested["num_blocks"])
    first = Split(first=0, end=1, batch=BATCH, ramps=tuple(r for r in ramps if r < 1))
    rest = Split(first=1, end=num_blocks, batch=BATCH, ramps=tuple(r for r in ramps if r >= 1))
    stages = tuple(Stage(device="cpu", replicas=replicas, splits=(split,)) for split in (first, rest))
    return Plan(stages=stages, policy=card.policy_spec())


@contextmanager
def _service(options: Any, plan: Plan, *, ingress_replicas: int) -> Iterator[str]:
    settings = ServeSettings(model=str(options.model.resolve()), plan=plan, ingress_replicas=ingress_replicas)
    with serving(settings, LocalCluster(port=options.port)) as url:
        with Client(url) as client:
            client.wait_until_ready(timeout_s=60)
        yield url


def _under_load(
    url: str, data: LabelledRows, requests: int, chaos: Chaos, *, retries: int
) -> tuple[LoadReport, list[float]]:
    return asyncio.run(_load_and_chaos(url, data, requests, chaos, retries=retries))


async def _load_and_chaos(
    url: str, data: LabelledRows, requests: int, chaos: Chaos, *, retries: int
) -> tuple[LoadReport, list[float]]:
    probe = LoadConfig(url=url, inputs=data.texts, labels=data.labels, num_requests=600, concurrency=64, slo_s=0.25)
    await run_load(replace(probe, num_requests=200))
    capacity_rps = (await run_load(probe)).achieved_rps
    rate_rps = SHARE_OF_CAPACITY * capacity_rps
    print(f"   capacity {capacity_rps:.0f}/s, {requests} requests at {rate_rps:.0f}/s")
    loaded = replace(probe, num_requests=requests, concurrency=None, rate_rps=rate_rps, retries=retries)
    started_s = time.monotonic()
    report, killed_s = await asyncio.gather(run_load(loaded), chaos(url, requests / rate_rps))
    return report, [when_s - started_s for when_s in killed_s]


async def kill_one_of_each_stage(url: str, duration_s: float) -> list[float]:
    """A replica of the first stage after a third of the time, one of the second after another third."""
    killed_s = []
    for stage in (0, 1):
        await asyncio.sleep(duration_s / 3)
        killed_s.append(_kill((await _stats(url))["stages"][stage][0]["pid"]))
    return killed_s


async def kill_first_stage(url: str, duration_s: float) -> list[float]:
    """The first stage's only replica, in the middle."""
    await asyncio.sleep(duration_s / 2)
    return [_kill((await _stats(url))["stages"][0][0]["pid"])]


async def kill_an_ingress(url: str, duration_s: float) -> list[float]:
    """Whichever ingress answers, in the middle."""
    await asyncio.sleep(duration_s / 2)
    return [_kill((await _stats(url))["ingress_pid"])]


async def _stats(url: str) -> dict[str, Any]:
    async with httpx.AsyncClient() as client:
        stats: dict[str, Any] = (await client.get(f"{url}/stats", timeout=10)).json()
        return stats


def _kill(pid: int) -> float:
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()


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
        print(f"   killed at {when_s:.1f} s: longest silence after it {_longest_silence(report, when_s):.2f} s")


def _longest_silence(report: LoadReport, since_s: float) -> float:
    """Seconds without any answer, the longest stretch within ten seconds of `since_s`."""
    done_s = sorted(r.done_s for r in report.records if r.predictions and since_s <= r.done_s <= since_s + 10)
    return max((after - before for before, after in zip([since_s, *done_s], done_s, strict=False)), default=0.0)


if __name__ == "__main__":
    main()
