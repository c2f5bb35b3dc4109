"""Load in phases: one client, open or closed loop, whose mix and rate change while it runs.

A request carries many inputs, to spare HTTP's cost, and is answered when its last input is. The server's deadline of a
request is the smaller of its timeout and the SLO; the timeout here is longer, so that whatever fails says why.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from earlyexit.clock import Clock, MonotonicClock
from experiments.live.meter import Meter, Usage
from experiments.live.model import TEXT
from experiments.live.phases import (
    INPUTS_PER_REQUEST,
    Phase,
    closed_keys,
    open_schedule,
    phase_at,
    request_index,
    starts_of,
    workers_of,
)
from offramp.load.connections import connected
from offramp.load.generator import Generator, Post
from offramp.load.report import RequestRecord
from offramp.load.workload import LoadConfig

TIMEOUT_SLOS = 4.0
"""A client's patience, in SLOs."""
PAUSE_SLOS = 0.1
"""What a worker of a closed loop waits after a refusal, in SLOs: it must not ask again at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Driven:
    """What became of every request; times are seconds after `start_s`."""

    phases: tuple[Phase, ...]
    start_s: float
    """On the monotonic clock."""
    slo_s: float
    keys: tuple[str, ...]
    """By the records' `input_indices`."""
    records: tuple[RequestRecord, ...]
    num_sent: int
    usage: Usage

    @property
    def starts_s(self) -> tuple[float, ...]:
        """When each phase began."""
        return starts_of(self.phases)


async def drive(url: str, phases: Sequence[Phase], *, slo_s: float, seed: int = 0) -> Driven:
    """Send all phases; returns when every request has its outcome. All are open loops, or all are closed ones."""
    is_open = {phase.rate_per_s is not None for phase in phases}
    assert len(is_open) == 1, "one kind of loop"
    meter, clock = Meter(), MonotonicClock()
    records: list[RequestRecord] = []
    async with connected(url) as post:
        start_s = clock.now_s()
        if is_open == {True}:
            schedule = open_schedule(phases, np.random.default_rng(seed))
            keys, num_sent = schedule.keys, len(schedule.send_s)
            await _generator(url, keys, post, slo_s, seed, clock).open_loop(schedule.send_s, records.append)
        else:
            keys = closed_keys(phases)
            closed = ClosedLoop(
                phases=tuple(phases),
                generator=_generator(url, keys, post, slo_s, seed, clock),
                start_s=start_s,
                records=records,
                turns=[count() for _ in phases],
            )
            num_sent = await closed.run()
    return Driven(
        phases=tuple(phases),
        start_s=start_s,
        slo_s=slo_s,
        keys=keys,
        records=tuple(sorted(records, key=lambda record: record.scheduled_s)),
        num_sent=num_sent,
        usage=meter.read(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """Workers that send back to back what the phase of the moment sends."""

    phases: tuple[Phase, ...]
    generator: Generator
    start_s: float
    records: list[RequestRecord]
    turns: list[Iterator[int]]
    """Counts every phase's requests."""

    async def run(self) -> int:
        """Until the last phase ends; gives the number of requests sent."""
        async with asyncio.TaskGroup() as group:
            workers = [group.create_task(self._work(index)) for index in range(max(map(workers_of, self.phases)))]
        return sum(worker.result() for worker in workers)

    async def _work(self, worker: int) -> int:
        """One worker; it stands by in phases that have fewer workers."""
        num_sent = 0
        while (index := phase_at(self.phases, self._now_s())) is not None:
            if worker >= workers_of(self.phases[index]):
                await self.generator.sleep(PAUSE_SLOS * self.generator.config.slo_s)
                continue
            turn = request_index(index, next(self.turns[index]), len(self.phases[index].keys))
            record = await self.generator.request(turn, self.start_s, self._now_s())
            num_sent += 1
            self.records.append(record)
            if record.error is not None:
                await self.generator.sleep(PAUSE_SLOS * self.generator.config.slo_s)
        return num_sent

    def _now_s(self) -> float:
        return self.generator.clock.now_s() - self.start_s


def _generator(url: str, keys: Sequence[str], post: Post, slo_s: float, seed: int, clock: Clock) -> Generator:
    config = LoadConfig(
        url=url,
        inputs=(TEXT,) * len(keys),
        keys=keys,
        num_requests=max(1, len(keys) // INPUTS_PER_REQUEST),
        concurrency=1,  # the loops here count for themselves
        inputs_per_request=INPUTS_PER_REQUEST,
        timeout_s=TIMEOUT_SLOS * slo_s,
        slo_s=slo_s,
        seed=seed,
    )
    return Generator(config=config, post=post, rng=random.Random(seed), clock=clock)
