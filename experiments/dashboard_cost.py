"""What the live page costs: latency with nobody looking and with three viewers, in turns.

    python -m experiments.dashboard_cost [--rounds 8] [--rate 200] [--viewers 3]

A model that costs nothing, open loop: whatever a look takes from the ingress shows. Each round has both sides, in
another order than the one before. The load comes from one process and the viewers are another: neither waits for
the other. With the service they share the machine's cores. Minutes: 6.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import httpx
import psutil

from deployments.serve_control import LocalCluster, serving
from deployments.settings import ServeSettings
from experiments.models import costless_model
from experiments.overhead import SLO_S, TEXTS
from experiments.peers.client import ClientOptions, run_client, write_inputs
from offramp.client.client import Client
from optimizer.plan import stock_plan

TARGET = 1.05
"""Of p99 with viewers over p99 without."""
SETTLE_S = 4.0
"""Until the viewers are there and the producer runs, or has stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a round."""

    viewers: int
    p50_s: float
    p99_s: float
    ingress_share: float
    """Of one core, that the ingress took; that hardly depends on what else the machine does."""
    states: int
    """That all viewers got."""


def main() -> None:
    """Measure and print."""
    parser = ArgumentParser(prog="python -m experiments.dashboard_cost", description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0, help="of load, per side and round")
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--viewers", type=int, default=3)
    parser.add_argument("--front", choices=("haproxy", "proxy"), default="haproxy")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        plan = stock_plan(1, batch=32)
        settings = ServeSettings(model=str(costless_model(Path(folder))), plan=plan, slo_s=None)
        with serving(settings, LocalCluster(port=options.port, front=options.front)) as url:
            with Client(url) as client:
                client.wait_until_ready(timeout_s=60)
            load = ClientOptions(
                url=url,
                inputs=write_inputs(Path(folder) / "inputs.jsonl", TEXTS),
                rate_per_s=options.rate,
                duration_s=options.seconds,
                warmup_s=SETTLE_S,
                slo_s=SLO_S,
            )
            rounds = take_turns(load, options.viewers, options.rounds)
    if options.json:
        print(json.dumps([[asdict(side) for side in sides] for sides in rounds]))
        return
    report(rounds)


def take_turns(load: ClientOptions, viewers: int, rounds: int) -> list[tuple[Side, Side]]:
    """Rounds of (nobody looks, viewers look), after one that only warms up."""
    measure(load, viewers)
    taken = []
    for index in range(rounds):
        order = (0, viewers) if index % 2 == 0 else (viewers, 0)
        sides = {count: measure(load, count) for count in order}
        taken.append((sides[0], sides[viewers]))
    return taken


def measure(load: ClientOptions, viewers: int) -> Side:
    """The load, with so many viewers."""
    ingress = psutil.Process(httpx.get(f"{load.url}/stats").json()["ingress_pid"])
    with looking(load.url, viewers) as got:
        before, began_s = ingress.cpu_times(), time.monotonic()
        result = run_client(load)
        after, seconds = ingress.cpu_times(), time.monotonic() - began_s
        assert not result.lost_share, result
        assert result.p50_s is not None
        assert result.p99_s is not None
        return Side(
            viewers=viewers,
            p50_s=result.p50_s,
            p99_s=result.p99_s,
            ingress_share=(after.user + after.system - before.user - before.system) / seconds,
            states=got.value,
        )


@contextmanager
def looking(url: str, viewers: int) -> Iterator[Synchronized[int]]:
    """So many viewers that read as fast as they can, in a process of their own; how many states they have got."""
    context = multiprocessing.get_context("spawn")
    got: Synchronized[int] = context.Value("l", 0)
    process = context.Process(target=_look_for_ever, args=(url, viewers, got))
    process.start()
    try:
        yield got
    finally:
        process.terminate()
        process.join()


def _look_for_ever(url: str, viewers: int, got: Synchronized[int]) -> None:
    async def look() -> None:
        async with httpx.AsyncClient(timeout=None) as client, asyncio.TaskGroup() as group:
            for _ in range(viewers):
                group.create_task(_look(client, url, got))
            await asyncio.Event().wait()

    asyncio.run(look())


async def _look(client: httpx.AsyncClient, url: str, got: Synchronized[int]) -> None:
    async with client.stream("GET", f"{url}/dashboard/events") as response:
        async for line in response.aiter_lines():
            got.value += line.startswith("data: ")


def report(rounds: Sequence[tuple[Side, Side]]) -> None:
    """Medians, and the ratio over the rounds."""
    for name, sides in (("nobody looks", [each[0] for each in rounds]), ("viewers look", [each[1] for each in rounds])):
        p50_s, p99_s = median(side.p50_s for side in sides), median(side.p99_s for side in sides)
        share = median(side.ingress_share for side in sides)
        print(
            f"{name}   p50 {p50_s * 1e3:6.2f} ms   p99 {p99_s * 1e3:6.2f} ms   ingress {share:.1%} of a core   "
            f"{sides[0].viewers} viewers"
        )
    ratios = sorted(looked.p99_s / alone.p99_s for alone, looked in rounds)
    states = sum(looked.states for _, looked in rounds)
    print(
        f"p99 with viewers: {median(ratios):.3f} x (rounds {', '.join(f'{ratio:.2f}' for ratio in ratios)}; "
        f"target {TARGET}); {states} states sent"
    )


if __name__ == "__main__":
    main()
