"""The load generator: sends predictions to a server at a rate, or from so many workers, and reports what came back.

One process, one event loop. In an open loop (`rate_rps` or `send_times_s`) every request has its send time before the
first is sent, and is sent then whether or not earlier ones were answered; its latency counts from that time. In a
closed loop (`concurrency`) workers send back to back, and latency counts from the sending.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from earlyexit.clock import MonotonicClock
from offramp.client.client import AsyncClient
from offramp.client.inputs import travel_as_json
from offramp.load.connections import connected
from offramp.load.generator import Generator, LoadConfig, OnRecord, exact_sleep
from offramp.load.processes import Poisson, Uniform
from offramp.load.report import LoadReport, RequestRecord, render, summarise

__all__ = ["LoadConfig", "LoadReport", "RequestRecord", "render", "run_load"]

OnProgress = Callable[[int, int], object]
"""Called with the number of requests done and the number of all, after each."""


async def run_load(
    config: LoadConfig, on_progress: OnProgress | None = None, *, api_key: str | None = None
) -> LoadReport:
    """Warm up, measure, report. Requests that fail are counted in the report, not raised."""
    async with connected(config.url, api_key=api_key) as post:
        generator = Generator(
            config=config,
            post=post,
            rng=random.Random(config.seed),
            clock=MonotonicClock(),
            metadata={} if travel_as_json(config.inputs[:1]) else await _metadata(config, api_key),
        )
        await _run_phase(generator, config.warmup_requests, lambda _: None)
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        records = await _measure(generator, on_progress)
    return summarise(
        records,
        started_at=started_at,
        seed=config.seed,
        slo_s=config.slo_s,
        offered_rps=config.offered_rps,
        labels=config.labels,
    )


async def _metadata(config: LoadConfig, api_key: str | None) -> dict[str, Any]:
    async with AsyncClient(config.url, config.timeout_s, api_key=api_key) as client:
        return await client.metadata()


async def _measure(generator: Generator, on_progress: OnProgress | None) -> list[RequestRecord]:
    records: list[RequestRecord] = []
    num_requests = generator.config.num_requests

    def note(record: RequestRecord) -> None:
        records.append(record)
        if on_progress is not None:
            on_progress(len(records), num_requests)

    await _run_phase(generator, num_requests, note)
    assert len(records) == num_requests
    return records


async def _run_phase(generator: Generator, num_requests: int, done: OnRecord) -> None:
    times_s = send_times_s(generator.config, num_requests)
    if times_s is None:
        await generator.closed_loop(iter(range(num_requests)), done)
        return
    with exact_sleep() as pace:
        await replace(generator, pace=pace).open_loop(times_s, done)


def send_times_s(config: LoadConfig, num_requests: int) -> Sequence[float] | None:
    """When an open loop sends its first so many requests; None for a closed loop."""
    if config.send_times_s is not None:
        return config.send_times_s[:num_requests]
    if config.rate_rps is None:
        return None
    process = (Uniform if config.arrivals == "constant" else Poisson)(rate_per_s=config.rate_rps)
    return [float(time_s) for time_s in process.first(num_requests, np.random.default_rng(config.seed))]
